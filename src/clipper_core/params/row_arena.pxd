# Where the rows of an embedding table lie: chunks of up to 32 MiB that never move, so that a row
# number is an address.
#
# Threads: any. Only taking a row and giving one back take the lock; whose row it is, is the index's
# to say.
from clipper_core.runtime.machine cimport atomic, relaxed, u32, u64, u8

cdef struct Arena:
    atomic[u8*]* chunks     # of all rows that there is room for; NULL where nothing was made yet
    u32 shift                   # a chunk has 1 << shift rows, and behind them a stamp for each
    u64 row_bytes
    u64 rows_max                # at most `room`
    u64 room                    # rows that there are chunks for: some more, for a table that is not
                            # bounded for a while
    atomic[u32] lock            # of the rest
    u64 next                    # rows handed out so far
    u32 free                    # the first of a list through the rows given back, or NO_ROW
    u64 free_count
    u64 chunk_count

cdef inline u8* arena_chunk(const Arena* arena, u32 row) noexcept nogil:
    """Relaxed: who may touch the row took its bucket's lock after who made the chunk gave it back;
    who fetches the row ahead of that may come while the chunk is made."""
    return arena.chunks[row >> arena.shift].load(relaxed)

cdef inline float* arena_row(const Arena* arena, u32 row) noexcept nogil:
    return <float*> (arena_chunk(arena, row) + (row & ((<u64> 1 << arena.shift) - 1))
                     * arena.row_bytes)

cdef inline u32* arena_stamp(const Arena* arena, u32 row) noexcept nogil:
    return <u32*> (arena_chunk(arena, row)
                   + (arena.row_bytes << arena.shift)) + (row & ((<u64> 1 << arena.shift) - 1))

cdef bint arena_init(Arena* arena, u64 row_bytes, u64 rows_max) noexcept nogil
cdef void arena_free(Arena* arena) noexcept nogil
cdef void arena_bound(Arena* arena, u64 rows_max) noexcept nogil
cdef u32 arena_take(Arena* arena) noexcept nogil        # NO_ROW: rows_max, or no memory
cdef void arena_give(Arena* arena, u32 row) noexcept nogil
# so many can be taken without a page fault
cdef bint arena_reserve(Arena* arena, u64 rows) noexcept nogil
cdef u64 arena_limit(Arena* arena) noexcept nogil       # of rows, as arena_bound said last
cdef u64 arena_used(Arena* arena) noexcept nogil
cdef u64 arena_bytes(Arena* arena) noexcept nogil
