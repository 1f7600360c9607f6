"""Answers that were given without Python, kept for feedback by their id."""
from libc.stdlib cimport calloc, free

from clipper_core.results.completion cimport ENGINE_ID_BITS, claims_lock, claims_unlock
from clipper_core.runtime.machine cimport aligned_new, monotonic_us
from clipper_core.runtime.status cimport BAD_INPUT, NO_MEMORY, raise_for
from clipper_core.wire.prediction cimport (
    TAG_BLOB, TAG_NONE, Blob, object_value, value_drop, value_heard, value_hold,
)

cdef enum:
    SIZE_MAX = 1 << 28

cdef u64 SPREAD = 0x9E3779B97F4A7C15


cdef inline u64 _place(const RecentState* r, u64 number) noexcept nogil:
    """Ids of one engine follow each other; those of another begin elsewhere in the table, by the
    golden ratio."""
    cdef u64 begin = ((((number >> ENGINE_ID_BITS) * SPREAD) >> 32) * (r.mask + 1)) >> 32
    return (number + begin) & r.mask


cdef inline u64 _bytes_of(const Value* value) noexcept nogil:
    return (<Blob*> value.word).nbytes + sizeof(Blob) if value.tag == TAG_BLOB else 0


cdef void _clear(RecentState* r, Entry* entry) noexcept nogil:
    """Under the lock."""
    if entry.number == 0:
        return
    r.bytes -= _bytes_of(&entry.value)
    r.count -= 1
    value_drop(&entry.value)
    entry.number = 0
    entry.value.tag = TAG_NONE


cdef void recent_add(RecentState* r, u64 number, u32 owner, const Value* value,
                     u64 now_us) noexcept nogil:
    cdef u64 at = _place(r, number), i
    cdef Entry* entry = &r.entries[at]
    if _bytes_of(value) > r.bytes_max:
        return
    claims_lock(r.lock)
    _clear(r, entry)
    entry.number, entry.given_us, entry.owner, entry.value = number, now_us, owner, value[0]
    value_hold(&entry.value)
    r.bytes += _bytes_of(value)
    r.count += 1
    for i in range(1, r.mask + 1):          # what lies behind an answer is the oldest
        if r.bytes <= r.bytes_max:
            break
        _clear(r, &r.entries[(at + i) & r.mask])
    claims_unlock(r.lock)


cdef class RecentAnswers:
    """Threads: any. The last answers that were given without Python, by their number.

    size: answers, at least so many; rounded up to a power of two.  bytes_max: of outputs that are
    no scalars. MemoryError when there is no memory for the table.
    """

    def __cinit__(self, u64 size, u64 bytes_max):
        cdef u64 capacity = 1
        if not 1 <= size <= SIZE_MAX:
            raise_for(BAD_INPUT, f"size={size}: it must lie between 1 and {SIZE_MAX}")
        while capacity < size:
            capacity *= 2
        self.state = <RecentState*> aligned_new(sizeof(RecentState))
        if self.state != NULL:
            self.state.entries = <Entry*> calloc(capacity, sizeof(Entry))
        if self.state == NULL or self.state.entries == NULL:
            raise_for(NO_MEMORY, f"no memory for {capacity} recent answers")
        self.state.mask, self.state.bytes_max = capacity - 1, bytes_max

    def __dealloc__(self):
        cdef u64 i
        if self.state == NULL:
            return
        if self.state.entries != NULL:
            for i in range(self.state.mask + 1):
                _clear(self.state, &self.state.entries[i])
            free(self.state.entries)
        free(self.state)

    def add(self, u64 number, u32 owner, output):
        """Remember an answer. TypeError for an output that no prediction can be."""
        cdef Value value = object_value(output)
        if number:
            recent_add(self.state, number, owner, &value, monotonic_us())
        value_drop(&value)

    def take(self, u64 number):
        """The answer of that number, which is forgotten: (owner, output, confidence, seconds since
        it was given); None if it is not there."""
        cdef RecentState* r = self.state
        cdef Entry* entry = &r.entries[_place(r, number)]
        cdef Entry found
        cdef bint is_there
        with nogil:
            claims_lock(r.lock)
            is_there = number != 0 and entry.number == number
            if is_there:
                found = entry[0]
                value_hold(&found.value)
                _clear(r, entry)
            claims_unlock(r.lock)
        if not is_there:
            return None
        try:
            heard = value_heard(&found.value)
        finally:
            value_drop(&found.value)
        return found.owner, heard[0], heard[1], (monotonic_us() - found.given_us) * 1e-6

    def numbers(self):
        """The numbers of the answers that are there, in no order."""
        cdef RecentState* r = self.state
        cdef u64 i
        found = []
        claims_lock(r.lock)
        for i in range(r.mask + 1):
            if r.entries[i].number:
                found.append(r.entries[i].number)
        claims_unlock(r.lock)
        return found

    def __len__(self):
        return self.state.count

    @property
    def nbytes(self):
        """Bytes of the outputs that are no scalars."""
        return self.state.bytes
