"""Whether a push would exceed a quota, told before anything of it is applied.

The distinct ids of the push bound the rows that it makes. Only where that many would be too many
are those counted that have no row.
"""
from clipper_core.params.embedding_rows cimport Rows
from clipper_core.params.row_arena cimport arena_used
from clipper_core.params.row_index cimport NO_ROW, Seen, index_bucket, index_hash, index_look
from clipper_core.params.shard_state cimport Place
from clipper_core.runtime.machine cimport relaxed


cdef u64 _missing(Rows* rows, const PartWork* work) noexcept nogil:
    """Nobody makes or removes rows meanwhile."""
    cdef Seen seen
    cdef u64 u, n = 0
    cdef i64 id
    for u in range(work.distinct.n):
        id = work.ids[work.distinct.first[u]]
        seen.home = index_bucket(&rows.index, index_hash(id))
        index_look(&seen, id)
        n += seen.row == NO_ROW
    return n


cdef u64 _made(Rows* rows, const PartWork* work, bint exact) noexcept nogil:
    cdef u64 n = _missing(rows, work) if exact else work.distinct.n
    cdef u64 used, room
    if rows.evicts:             # others go for them
        used = arena_used(&rows.arena)
        room = rows.arena.rows_max - min(used, rows.arena.rows_max)
        n = min(n, room)
    return n


cdef bint _exceeded(ShardLoopState* s, const PartWork* works, u64 count, bint exact,
                    i64* about) noexcept nogil:
    cdef Place* place
    cdef u64 i, n, rows = 0, nbytes = 0
    for i in range(s.place_count.load(relaxed)):
        place = &s.places[i]
        place.coming = arena_used(&place.rows.arena)
        rows += place.coming
        nbytes += place.coming * (place.rows.arena.row_bytes + QUOTA_ROW_BYTES)
    for i in range(count):
        if works[i].variable:
            continue
        place = &s.places[works[i].table]
        n = _made(place.rows, &works[i], exact)
        place.coming += n
        rows += n
        nbytes += n * (place.rows.arena.row_bytes + QUOTA_ROW_BYTES)
        if n and place.quota and place.coming > place.quota:
            about[0] = place.number.load(relaxed)
            return True
        about[0] = -1
        if n and ((s.quota_rows and rows > s.quota_rows)
                  or (s.quota_bytes and nbytes > s.quota_bytes)):
            return True
    return False


cdef bint quotas_exceeded(ShardLoopState* s, const PartWork* works, u64 n,
                          i64* about) noexcept nogil:
    return (s.has_quotas and _exceeded(s, works, n, False, about)
            and _exceeded(s, works, n, True, about))
