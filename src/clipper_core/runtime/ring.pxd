# The work queue that is also the wire buffer. A submitter claims a position, copies its row once
# into that cell, and publishes it; a batch is a run of cells, which is sent without a copy. Each
# row has a side cell of `side_bytes` for its task.
#
# Threads: claim, publish, row, side: any thread (a cell belongs to the thread that claimed it until
# it is published, then to the consumer).
#          published, release: the consumer (the loop) only.
from clipper_core.runtime.machine cimport atomic, u64, u8

cdef extern from "runtime/ring.hpp" namespace "clipper" nogil:
    cdef cppclass Cells "clipper::Cells<>":
        u64 size
        atomic[u64] tail                     # next position to be claimed
        void init(atomic[u64]* zeros, u64 n, u64 first) noexcept   # `first` is the first position
        bint claim(u64* pos) noexcept
        bint full() noexcept                 # a claim would fail now
        void publish(u64 pos) noexcept
        bint published(u64 pos) noexcept
        void release(u64 pos) noexcept
        bint idle() noexcept                 # all claimed cells are released; only while no thread
                                             # claims
        bint untouched(u64 pos) noexcept     # its cell has not been claimed again, whether released
                                             # or not
    cdef cppclass Spsc "clipper::Spsc<>":
        u64 size
        void init(atomic[u64]* words, u64 n) noexcept
        bint push(u64 word) noexcept
        bint pop(u64* word) noexcept
        u64 room() noexcept                  # called by the writer: number of words that fit
        bint tail_moved() noexcept           # called by the reader: whether there is a word

cdef struct Ring:
    Cells* cells
    u64 mask
    u64 row_bytes               # stride of the rows; 0 when rows are not in the ring (variable
                                # length)
    u64 side_bytes
    u8* rows                    # size x row_bytes, 64-byte aligned, touched lazily
    u8* sides                   # size x side_bytes
    int fd                      # memfd of rows that containers may map, which have a mapping of
                                # their own; else -1
    u64 rows_bytes
    void* map                   # the mapping of everything else
    u64 map_bytes

# Return a ring; NULL when there is no memory. size: a power of two, at least 2.  first: its first
# position.  shared: the rows are in a memfd if the system has one, else in private memory.
cdef Ring* ring_new(u64 size, u64 row_bytes, u64 side_bytes, bint shared=*,
                    u64 first=*) noexcept nogil
cdef void ring_free(Ring* ring) noexcept nogil
cdef Spsc* spsc_new(u64 size) noexcept nogil
cdef void spsc_free(Spsc* ring) noexcept nogil

cdef inline u8* ring_row(Ring* ring, u64 pos) noexcept nogil:
    return ring.rows + (pos & ring.mask) * ring.row_bytes

cdef inline u8* ring_side(Ring* ring, u64 pos) noexcept nogil:
    return ring.sides + (pos & ring.mask) * ring.side_bytes
