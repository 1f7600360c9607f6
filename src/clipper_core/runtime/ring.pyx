"""The lock-free work queue, whose cells are rows that are sent as they are, and a single-producer
ring of words for notifications."""
from libc.stdlib cimport free
from libc.string cimport memcpy

from clipper_core.runtime.machine cimport aligned_new, shared_new
from clipper_core.runtime.status cimport NO_MEMORY, raise_for

cdef extern from "<sys/mman.h>" nogil:
    int PROT_READ
    int PROT_WRITE
    int MAP_PRIVATE
    int MAP_ANONYMOUS
    int MAP_NORESERVE
    void* MAP_FAILED
    void* mmap(void* addr, size_t length, int prot, int flags, int fd, long offset) noexcept
    int munmap(void* addr, size_t length) noexcept


cdef extern from "<unistd.h>" nogil:
    int close(int fd) noexcept


cdef u64 _lines(u64 nbytes) noexcept nogil:
    return (nbytes + 63) & ~<u64> 63


cdef Ring* ring_new(u64 size, u64 row_bytes, u64 side_bytes, bint shared=False,
                    u64 first=0) noexcept nogil:
    cdef u64 rows = _lines(size * row_bytes), sides = _lines(size * side_bytes), seqs = _lines(size
            * 8)
    cdef int fd = -1
    cdef void* apart = shared_new(rows, &fd) if shared and rows else NULL
    cdef u64 total = sides + seqs + (0 if apart != NULL else rows)
    cdef Ring* ring = <Ring*> aligned_new(sizeof(Ring))
    cdef Cells* cells = <Cells*> aligned_new(sizeof(Cells))
    cdef void* map = mmap(NULL, total, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
    if ring == NULL or cells == NULL or map == MAP_FAILED:
        free(ring)
        free(cells)
        if map != MAP_FAILED:
            munmap(map, total)
        if apart != NULL:
            munmap(apart, rows)
            close(fd)
        return NULL
    ring.cells = cells
    ring.mask = size - 1
    ring.row_bytes = row_bytes
    ring.side_bytes = side_bytes
    ring.fd = fd
    ring.rows_bytes = rows
    ring.rows = <u8*> (apart if apart != NULL else map)
    ring.sides = <u8*> map + (0 if apart != NULL else rows)
    ring.map = map
    ring.map_bytes = total
    cells.init(<atomic[u64]*> (ring.sides + sides), size, first)
    return ring


cdef void ring_free(Ring* ring) noexcept nogil:
    if ring == NULL:
        return
    if ring.fd >= 0:
        munmap(ring.rows, ring.rows_bytes)
        close(ring.fd)
    munmap(ring.map, ring.map_bytes)
    free(ring.cells)
    free(ring)


cdef Spsc* spsc_new(u64 size) noexcept nogil:
    cdef Spsc* ring = <Spsc*> aligned_new(sizeof(Spsc))
    cdef void* words = aligned_new(size * 8)
    if ring == NULL or words == NULL:
        free(ring)
        free(words)
        return NULL
    ring.init(<atomic[u64]*> words, size)
    return ring


cdef void spsc_free(Spsc* ring) noexcept nogil:
    if ring != NULL:
        free(spsc_words(ring))
        free(ring)


cdef extern from *:
    """
    static inline void* spsc_words(clipper::Spsc<>* r) { return (void*) r->words; }
    """
    void* spsc_words(Spsc* ring) noexcept nogil


cdef class WorkRing:
    """A ring of tasks. Threads: any may push; one may pop.

    A ring of `size` rows (a power of two >= 2) of `row_bytes` bytes each, for tests and benchmarks;
    the engine uses the same structure without Python. `shared`: the rows are in a memfd, if
    available. Source: docs/design.md, "The queue is the wire buffer".
    """
    cdef Ring* ring
    cdef u64 head

    def __cinit__(self, u64 size, u64 row_bytes, bint shared=False):
        if size < 2 or size & (size - 1):
            raise ValueError(f"size must be a power of two and at least 2, not {size}")
        self.ring = ring_new(size, row_bytes, 8, shared)
        if self.ring == NULL:
            raise_for(NO_MEMORY, f"no memory for a ring of {size} rows of {row_bytes} bytes")

    def __dealloc__(self):
        ring_free(self.ring)

    def push(self, bytes row):
        """Copy `row` into the next cell and publish it; False when the ring is full."""
        cdef u64 pos
        if <u64> len(row) != self.ring.row_bytes:
            raise ValueError(f"a row of this ring has {self.ring.row_bytes} bytes, not {len(row)}")
        if not self.ring.cells.claim(&pos):
            return False
        memcpy(ring_row(self.ring, pos), <const char*> row, self.ring.row_bytes)
        self.ring.cells.publish(pos)
        return True

    def pop(self):
        """The oldest published row, or None. The cell is released at once."""
        cdef u64 pos = self.head
        if not self.ring.cells.published(pos):
            return None
        row = (<char*> ring_row(self.ring, pos))[:self.ring.row_bytes]
        self.ring.cells.release(pos)
        self.head = pos + 1
        return row

    def claim(self):
        """Claim a position without publishing it (tests of order); None when full."""
        cdef u64 pos
        return pos if self.ring.cells.claim(&pos) else None

    def publish(self, u64 pos):
        self.ring.cells.publish(pos)

    def release(self, u64 pos):
        self.ring.cells.release(pos)

    def published(self, u64 pos):
        return bool(self.ring.cells.published(pos))

    def untouched(self, u64 pos):
        """Return whether no thread has claimed the cell of position `pos` since. Always False on
        machines of weak memory order."""
        return bool(self.ring.cells.untouched(pos))

    @property
    def fd(self):
        """The memfd of the rows, which belongs to the ring; -1 for private memory."""
        return self.ring.fd

    def churn(self, u64 first, u64 count):
        """Push `count` words first, first+1, ... from a nogil loop, spinning while full; for stress
        tests (row_bytes == 8)."""
        cdef u64 i, pos
        if self.ring.row_bytes != 8:
            raise ValueError("churn pushes words: row_bytes must be 8")
        with nogil:
            for i in range(first, first + count):
                while not self.ring.cells.claim(&pos):
                    pass
                (<u64*> ring_row(self.ring, pos))[0] = i
                self.ring.cells.publish(pos)

    def drain(self, u64 count):
        """Pop exactly `count` words in a nogil loop and return their sum modulo 2**64 (row_bytes ==
        8)."""
        cdef u64 total = 0, taken = 0
        with nogil:
            while taken < count:
                if self.ring.cells.published(self.head):
                    total += (<u64*> ring_row(self.ring, self.head))[0]
                    self.ring.cells.release(self.head)
                    self.head += 1
                    taken += 1
        return total


cdef class SpscRing:
    """A ring of `size` 64-bit words (a power of two). Threads: one may push, one other may pop."""
    cdef Spsc* ring

    def __cinit__(self, u64 size):
        if size < 2 or size & (size - 1):
            raise ValueError(f"size must be a power of two and at least 2, not {size}")
        self.ring = spsc_new(size)
        if self.ring == NULL:
            raise_for(NO_MEMORY, f"no memory for a ring of {size} words")

    def __dealloc__(self):
        spsc_free(self.ring)

    def push(self, u64 word):
        """Push a row. Return False when the ring is full."""
        return bool(self.ring.push(word))

    def pop(self):
        """The oldest word, or None."""
        cdef u64 word
        return word if self.ring.pop(&word) else None
