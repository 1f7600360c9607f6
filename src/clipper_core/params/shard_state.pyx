"""The state of a shard, of which Python reads the counters. `SequenceWindow` and `SharedRegion` are
for tests.

A push that would exceed a quota is refused before anything of it is applied: the distinct ids of
the push bound the rows that it makes, and only where that many would be too many are those counted
that have no row.
"""
from libc.math cimport isfinite
from libc.stdlib cimport free
from libc.string cimport memcpy, memset
from posix.unistd cimport dup

from clipper_core.params.embedding_rows cimport (
    NO_ROW, Seen, arena_used, index_bucket, index_hash, index_look,
)
from clipper_core.runtime.allocation cimport try_push
from clipper_core.runtime.histogram cimport count, histogram_record, histogram_snapshot, note
from clipper_core.runtime.machine cimport aligned_new, eventfd_signal, relaxed
from clipper_core.runtime.status cimport BAD_INPUT, FULL, NO_MEMORY, TOO_LARGE, raise_for

cdef class SequenceWindow:
    """Which pushes of a worker were seen: the last 1024 up to the highest. Threads: one."""
    cdef Sequences one

    def look(self, u64 sequence):
        """Return 0 if the push is new, 1 if it was seen, 2 if it is too old to know."""
        return <int> self.one.look(sequence)

    def mark(self, u64 sequence):
        self.one.mark(sequence)


_WHY = {
    REGION_ABSENT: "no descriptor", REGION_UNSEALED: "no memory file whose size is sealed",
    REGION_UNMAPPED: "it cannot be mapped",
}


def calm(int fd):
    """Call calm_loopback, as a shard does for a connection over TCP."""
    calm_loopback(fd)


cdef class SharedRegion:
    """The mapped memory of a descriptor that a connection has sent. Threads: one.

    fd: still belongs to the caller.
    bytes_max: largest size of the memory.

    Raises the exceptions of BAD_INPUT (no sealed memory) and TOO_LARGE (see raise_for).
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
        """Write data at an offset. Return False, and write nothing, if not all of it lies inside,
        or the offset is no multiple of 64."""
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
    """Counts of a shard by table. Threads: any; `push` and `expire`: while requests are held
    back."""

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
        """Count a push; counted: as `Table.push` returns it."""
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
        """Count a refused request; why: the number of the reason."""
        counts_refuse(self.state, why)

    def lag(self, u64 versions):
        """Count a push by the number of versions that its gradients are behind."""
        histogram_record(&self.state.lags, versions)

    def take(self):
        """A push of a whole model."""
        count(&self.state.taken, 1)

    @property
    def taken(self):
        return self.state.taken.load(relaxed)

    def table(self, u32 table):
        """Return the counts of a table: rows pulled, missed among them; ids applied, unadmitted,
        refused; rows made, evicted, expired."""
        cdef TableCounts* one = self._table(table)
        return {"pulled": one.pulled.load(relaxed), "missed": one.missed.load(relaxed),
                "applied": one.applied.load(relaxed),
                "made": one.made.load(relaxed), "unadmitted": one.unadmitted.load(relaxed),
                "refused": one.refused.load(relaxed),
                "evicted": one.evicted.load(relaxed), "expired": one.expired.load(relaxed)}

    def refused(self):
        """Return the number of refused requests by the number of the reason."""
        each = {why: self.state.refused[why].load(relaxed) for why in range(REASONS_MAX)}
        return {why: n for why, n in each.items() if n}

    def lags(self):
        """A Snapshot, of versions."""
        return histogram_snapshot(&self.state.lags)


cdef u64 _missing(Rows* rows, const PartWork* work) noexcept nogil:
    """Count the ids of a part that have no row. No thread may make or remove rows meanwhile."""
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


# -- Answers of a shard: refusals, room for rows, and pushes that wait for followers.

cdef void put_answer(ShardLoopState* s, ShardConnection* c, const ShardHead* to,
                      u8 flags) noexcept nogil:
    cdef ShardHead head = shard_answer(to[0], SHARD_ANSWER, s.epoch.load(relaxed),
                                       s.model.load(relaxed))
    head.flags = flags
    c.output.put(&head, HEAD_BYTES)


cdef void shard_refuse(ShardLoopState* s, ShardConnection* c, const ShardHead* to, u32 why,
                  i64 about) noexcept nogil:
    """Refuse a request. `rows` is the reason; the payload is the id, the lag or the limit that it
    is about."""
    cdef ShardHead head = shard_answer(to[0], SHARD_REFUSED, s.epoch.load(relaxed),
                                       s.model.load(relaxed))
    head.rows = why
    head.payload_bytes = sizeof(i64)
    s.refused.fetch_add(1, relaxed)
    counts_refuse(s.counts, why)
    c.output.put(&head, HEAD_BYTES)
    c.output.put(&about, sizeof(i64))


cdef u8* answer_room(ShardLoopState* s, ShardConnection* c, const ShardHead* h,
                     u64 whole) noexcept nogil:
    """Return where the rows of an answer go, whose head is written already. NULL: the request was
    refused, or the connection is closed."""
    cdef ShardHead head = shard_answer(h[0], SHARD_ANSWER, s.epoch.load(relaxed),
                                       s.model.load(relaxed))
    cdef u8* to
    if h.flags & IN_REGION:
        to = c.region.at(h.sequence, whole)
        if to == NULL:
            shard_refuse(s, c, h, NOT_SHARED, <i64> c.region.bytes)
            return NULL
        head.flags = IN_REGION
        c.output.put(&head, HEAD_BYTES)
        return to
    if whole > s.frame_bytes_max:
        shard_refuse(s, c, h, TOO_LARGE, <i64> s.frame_bytes_max)
        return NULL
    to = c.output.reserve(HEAD_BYTES + whole)
    if to == NULL:
        return NULL
    head.payload_bytes = <u32> whole
    memcpy(to, &head, HEAD_BYTES)
    c.output.end += HEAD_BYTES + whole
    return to + HEAD_BYTES


# -- pushes
# --------------------------------------------------------------------------------------------------

cdef Sighting _seen(ShardLoopState* s, const ShardHead* h, bint* full) noexcept nogil:
    cdef Sighting sight
    s.log.guard.lock()
    sight = s.log.look(h.worker, h.sequence)
    full[0] = s.log.waits() and s.log.held.size() >= s.log.held_max
    s.log.guard.unlock()
    return sight


cdef bint push_is_known(ShardLoopState* s, const ShardHead* h) noexcept nogil:
    """Return whether there is memory for its worker, so that a repetition will be recognized."""
    cdef bint known
    if h.sequence == 0:
        return True
    s.log.guard.lock()
    known = s.log.window(h.worker) != NULL
    s.log.guard.unlock()
    return known


cdef double _scale(ShardLoopState* s, const ShardHead* h, u64* lag) noexcept nogil:
    """Return the factor of the rate: a gradient of a model that is `lag` pushes old counts less."""
    cdef u64 now = s.model.load(relaxed)
    lag[0] = now - h.model if h.model and now > h.model else 0
    return <double> h.scale / max(<u64> 1, lag[0]) if s.slows.load(relaxed) else h.scale


cdef void answer_push(ShardLoopState* s, ShardConnection* c, const ShardHead* h,
                      const u32* counted) noexcept nogil:
    """Answer a push that is applied and noted: now, or when followers have it. Under the log's
    guard. counted: [4]; NULL: it had been applied before."""
    cdef Held held
    cdef ShardHead head
    head = shard_answer(h[0], SHARD_ANSWER, s.epoch.load(relaxed), s.model.load(relaxed))
    head.flags = DUPLICATE if counted == NULL else 0
    head.payload_bytes = 0 if counted == NULL else PUSHED_BYTES
    if not (s.log.waits() and s.log.sure() < s.log.position()):
        c.output.put(&head, HEAD_BYTES)
        c.output.put(counted, head.payload_bytes)
        return
    held.position, held.conn, held.generation = s.log.position(), c.number, c.generation
    memcpy(&held.words[0], &head, HEAD_BYTES)
    if counted != NULL:
        memcpy(&held.words[HEAD_BYTES // 8], counted, PUSHED_BYTES)
    if not try_push(s.log.held, held):
        c.output.lost = True            # it is closed: its client retries, and learns that the
                                        # push was applied
    if s.log.polled() or s.python_waits.load(relaxed):
        eventfd_signal(s.log.fd)


cdef bint push_is_new(ShardLoopState* s, ShardConnection* c, const ShardHead* h,
                      double* scale) noexcept nogil:
    """Return whether a push is to be applied; else it is answered. scale: of the rate, by its
    age."""
    cdef bint full = False
    cdef Sighting sight
    cdef u64 lag = 0
    if not (h.scale > 0 and isfinite(h.scale)):
        shard_refuse(s, c, h, BAD_INPUT, 0)
        return False
    sight = _seen(s, h, &full)
    if sight == SEEN_PUSH:
        s.repeated.fetch_add(1, relaxed)
        s.log.guard.lock()
        answer_push(s, c, h, NULL)
        s.log.guard.unlock()
        return False
    if sight == OLD_PUSH:
        shard_refuse(s, c, h, TOO_OLD, <i64> h.sequence)
        return False
    if full:
        shard_refuse(s, c, h, FULL, <i64> s.log.held_max)
        return False
    scale[0] = _scale(s, h, &lag)
    if h.model:
        histogram_record(&s.counts.lags, lag)
    if s.lag_max.load(relaxed) and lag > s.lag_max.load(relaxed):
        shard_refuse(s, c, h, TOO_STALE, <i64> lag)
        return False
    return True
