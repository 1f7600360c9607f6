"""What Python has of a shard's state: its counters. `SequenceWindow` and `SharedRegion`
are for tests.

A push that would exceed a quota is refused before anything of it is applied: the distinct ids of
the push bound the rows that it makes, and only where that many would be too many are those counted
that have no row.
"""
from libc.stdlib cimport free
from libc.string cimport memcpy, memset
from posix.unistd cimport dup

from clipper_core.params.embedding_rows cimport Rows
from clipper_core.params.row_arena cimport arena_used
from clipper_core.params.row_index cimport NO_ROW, Seen, index_bucket, index_hash, index_look
from clipper_core.runtime.histogram cimport count, histogram_record, histogram_snapshot, note
from clipper_core.runtime.machine cimport aligned_new, relaxed, u64, u8
from clipper_core.runtime.status cimport BAD_INPUT, NO_MEMORY, TOO_LARGE, raise_for


cdef class SequenceWindow:
    """Threads: one. Which pushes of a worker were seen: the last 1024 up to the highest."""
    cdef Sequences one

    def look(self, u64 sequence):
        """0: new, 1: seen, 2: too old to know."""
        return <int> self.one.look(sequence)

    def mark(self, u64 sequence):
        self.one.mark(sequence)


_WHY = {
    REGION_ABSENT: "no descriptor", REGION_UNSEALED: "no memory file whose size is sealed",
    REGION_UNMAPPED: "it cannot be mapped",
}


def calm(int fd):
    """What a shard does with a connection over TCP: calm_loopback."""
    calm_loopback(fd)


cdef class SharedRegion:
    """Threads: one. What a shard makes of a descriptor that came with a connection.

    fd: stays the caller's.  bytes_max: of the memory. Raises what raise_for makes of BAD_INPUT (no
    sealed memory) and TOO_LARGE.
    """
    cdef Region one

    def __cinit__(self, int fd, u64 bytes_max):
        cdef RegionFault fault
        self.one.take(dup(fd))
        fault = self.one.map(bytes_max)
        if fault == REGION_TOO_LARGE:
            raise_for(TOO_LARGE, f"shared memory of more than {bytes_max} bytes")
        elif fault != REGION_MAPPED:
            raise_for(BAD_INPUT, f"shared memory: {_WHY[fault]}")

    @property
    def nbytes(self):
        return self.one.bytes

    def write(self, u64 offset, const u8[::1] data not None):
        """False: not all of it lies inside, or it begins at no multiple of 64; nothing is written
        then."""
        cdef u8* to = self.one.at(offset, <u64> data.shape[0])
        if to == NULL:
            return False
        if data.shape[0]:
            memcpy(to, &data[0], data.shape[0])
        return True

    def lies_inside(self, u64 offset, u64 n):
        return self.one.at(offset, n) != NULL


cdef void counts_refuse(ShardCounts* counts, u32 why) noexcept nogil:
    count(&counts.refused[why % REASONS_MAX], 1)


cdef void counts_push(ShardCounts* counts, u32 table, u64 applied, u64 made, u64 unadmitted,
                      u64 refused,
                      u64 evicted) noexcept nogil:
    cdef TableCounts* one = &counts.tables[table]
    note(&one.applied, applied)
    note(&one.made, made)
    note(&one.unadmitted, unadmitted)
    note(&one.refused, refused)
    note(&one.evicted, evicted)


cdef class Counts:
    """Threads: any; of `push` and `expire`, who has held the door."""

    def __cinit__(self):
        self.state = <ShardCounts*> aligned_new(sizeof(ShardCounts))
        if self.state == NULL:
            raise_for(NO_MEMORY, "counters of a shard")

    def __dealloc__(self):
        free(self.state)

    cdef TableCounts* _table(self, u32 table) except NULL:
        if table >= COUNTED_MAX:
            raise_for(BAD_INPUT, f"table {table}: a shard has at most {COUNTED_MAX}")
        return &self.state.tables[table]

    def push(self, u32 table, counted):
        """What `Table.push` said."""
        self._table(table)
        counts_push(self.state, table, counted["applied"], counted["made"], counted["unadmitted"],
                    counted["refused"],
                    counted["evicted"])

    def clear(self, u32 table):
        """A table of another one's number begins at 0."""
        memset(<void*> self._table(table), 0, sizeof(TableCounts))

    def expire(self, u32 table, u64 rows):
        note(&self._table(table).expired, rows)

    def refuse(self, u32 why):
        """A request, by the number that says why."""
        counts_refuse(self.state, why)

    def lag(self, u64 versions):
        """A push whose gradients are of an older version by so many."""
        histogram_record(&self.state.lags, versions)

    def take(self):
        """A push of a whole model."""
        count(&self.state.taken, 1)

    @property
    def taken(self):
        return self.state.taken.load(relaxed)

    def table(self, u32 table):
        """-> rows pulled, missed among them; ids applied, unadmitted, refused; rows made, evicted,
        expired"""
        cdef TableCounts* one = self._table(table)
        return {"pulled": one.pulled.load(relaxed), "missed": one.missed.load(relaxed),
                "applied": one.applied.load(relaxed),
                "made": one.made.load(relaxed), "unadmitted": one.unadmitted.load(relaxed),
                "refused": one.refused.load(relaxed),
                "evicted": one.evicted.load(relaxed), "expired": one.expired.load(relaxed)}

    def refused(self):
        """-> how many requests, by the number that says why"""
        each = {why: self.state.refused[why].load(relaxed) for why in range(REASONS_MAX)}
        return {why: n for why, n in each.items() if n}

    def lags(self):
        """A Snapshot, of versions."""
        return histogram_snapshot(&self.state.lags)


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


cdef bint _exceeded(ShardLoopState* s, const PartWork* works, u64 parts, bint exact,
                    i64* about) noexcept nogil:
    cdef Place* place
    cdef u64 i, n, rows = 0, nbytes = 0
    for i in range(s.place_count.load(relaxed)):
        place = &s.places[i]
        place.coming = arena_used(&place.rows.arena)
        rows += place.coming
        nbytes += place.coming * (place.rows.arena.row_bytes + QUOTA_ROW_BYTES)
    for i in range(parts):
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
