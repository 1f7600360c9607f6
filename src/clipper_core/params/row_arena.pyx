"""Rows of an embedding table in memory.

A fresh byte costs 3 to 4 ns to fault in and zero, several times what reading it costs: whoever
knows that rows will be needed calls arena_reserve, on a thread that nobody waits for.
"""
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from clipper_core.params.row_index cimport NO_ROW, row_pages_free, row_pages_new, row_pages_touch
from clipper_core.runtime.machine cimport acquire, atomic, pause, relaxed, release, u32, u64, u8

cdef enum:
    CHUNK_BYTES = 32 << 20
    MORE_ROWS = 1 << 16


cdef inline u64 _rows_bytes(const Arena* arena) noexcept nogil:
    return arena.row_bytes << arena.shift


cdef inline u64 _chunk_bytes(const Arena* arena) noexcept nogil:
    return _rows_bytes(arena) + (sizeof(u32) << arena.shift)


cdef bint arena_init(Arena* arena, u64 row_bytes, u64 rows_max) noexcept nogil:
    arena.shift = 0
    while row_bytes << (arena.shift + 1) <= CHUNK_BYTES and <u64> 1 << arena.shift < rows_max:
        arena.shift += 1
    arena.row_bytes = row_bytes
    arena.rows_max = rows_max
    arena.room = min(4 * rows_max + MORE_ROWS, <u64> NO_ROW)
    arena.free = NO_ROW
    arena.next = arena.free_count = arena.chunk_count = 0
    arena.chunks = <atomic[u8*]*> calloc((arena.room >> arena.shift) + 1, sizeof(atomic[u8*]))
    return arena.chunks != NULL


cdef void arena_free(Arena* arena) noexcept nogil:
    cdef u64 i
    for i in range(arena.chunk_count):
        row_pages_free(arena.chunks[i].load(relaxed), _chunk_bytes(arena))
    free(arena.chunks)
    arena.chunks = NULL
    arena.chunk_count = 0


cdef inline void _lock(Arena* arena) noexcept nogil:
    while arena.lock.exchange(1, acquire):
        pause()


cdef inline void _unlock(Arena* arena) noexcept nogil:
    arena.lock.store(0, release)


cdef bint _chunks(Arena* arena, u64 n) noexcept nogil:
    """At least so many chunks; under the lock."""
    cdef u8* chunk
    while arena.chunk_count < n:
        chunk = <u8*> row_pages_new(_chunk_bytes(arena))
        if chunk == NULL:
            return False
        arena.chunks[arena.chunk_count].store(chunk, relaxed)
        arena.chunk_count += 1
    return True


cdef void arena_bound(Arena* arena, u64 rows_max) noexcept nogil:
    _lock(arena)
    arena.rows_max = min(rows_max, arena.room)
    _unlock(arena)


cdef u64 arena_limit(Arena* arena) noexcept nogil:
    cdef u64 rows_max
    _lock(arena)
    rows_max = arena.rows_max
    _unlock(arena)
    return rows_max


cdef u32 arena_take(Arena* arena) noexcept nogil:
    cdef u32 row = NO_ROW
    _lock(arena)
    if arena.next - arena.free_count >= arena.rows_max:
        row = NO_ROW
    elif arena.free != NO_ROW:
        row = arena.free
        memcpy(&arena.free, arena_row(arena, row), sizeof(u32))
        arena.free_count -= 1
    elif arena.next < arena.room and _chunks(arena, (arena.next >> arena.shift) + 1):
        row = <u32> arena.next
        arena.next += 1
    _unlock(arena)
    return row


cdef void arena_give(Arena* arena, u32 row) noexcept nogil:
    _lock(arena)
    memcpy(arena_row(arena, row), &arena.free, sizeof(u32))
    arena.free = row
    arena.free_count += 1
    _unlock(arena)


cdef bint arena_reserve(Arena* arena, u64 rows) noexcept nogil:
    cdef u64 first, last, i, mask = (<u64> 1 << arena.shift) - 1
    cdef bint made
    _lock(arena)
    first = arena.next
    last = min(first + (rows - min(rows, arena.free_count)), arena.rows_max)
    made = first == last or _chunks(arena, ((last - 1) >> arena.shift) + 1)
    _unlock(arena)
    i = first
    while made and i < last:    # chunks never move, and are not given back while the arena lives
        first = min(last - i, mask + 1 - (i & mask))
        row_pages_touch(<u8*> (<size_t> arena_row(arena, <u32> i) & ~<size_t> 4095),
                    first * arena.row_bytes)
        i = (i | mask) + 1
    return made


cdef u64 arena_used(Arena* arena) noexcept nogil:
    cdef u64 used
    _lock(arena)
    used = arena.next - arena.free_count
    _unlock(arena)
    return used


cdef u64 arena_bytes(Arena* arena) noexcept nogil:
    cdef u64 bytes
    _lock(arena)
    bytes = arena.next * (arena.row_bytes + sizeof(u32))
    _unlock(arena)
    return bytes
