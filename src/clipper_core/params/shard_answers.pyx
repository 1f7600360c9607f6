"""Answers of a shard: refusals, room for rows, and pushes that wait for followers."""
from libc.math cimport isfinite
from libc.string cimport memcpy

from clipper_core.params.shard_state cimport (
    DUPLICATE, HEAD_BYTES, IN_REGION, NOT_SHARED, OLD_PUSH, PUSHED_BYTES, SEEN_PUSH, SHARD_ANSWER,
    SHARD_REFUSED, TOO_OLD, TOO_STALE, Held, Sighting, counts_refuse, shard_answer,
)
from clipper_core.runtime.allocation cimport try_push
from clipper_core.runtime.histogram cimport histogram_record
from clipper_core.runtime.machine cimport eventfd_signal, relaxed
from clipper_core.runtime.status cimport BAD_INPUT, FULL, TOO_LARGE


cdef void put_answer(ShardLoopState* s, ShardConnection* c, const ShardHead* to,
                      u8 flags) noexcept nogil:
    cdef ShardHead head = shard_answer(to[0], SHARD_ANSWER, s.epoch.load(relaxed),
                                       s.model.load(relaxed))
    head.flags = flags
    c.output.put(&head, HEAD_BYTES)


cdef void shard_refuse(ShardLoopState* s, ShardConnection* c, const ShardHead* to, u32 why,
                  i64 about) noexcept nogil:
    """`rows` says why; the payload is the id, the lag or the limit that it is about."""
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
    """Where the rows of an answer go, of which the head is put already. NULL: nowhere, and so it
    was said, or it is lost."""
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
    """There is memory for its worker, so that this push will be told from its repetition."""
    cdef bint known
    if h.sequence == 0:
        return True
    s.log.guard.lock()
    known = s.log.window(h.worker) != NULL
    s.log.guard.unlock()
    return known


cdef double _scale(ShardLoopState* s, const ShardHead* h, u64* lag) noexcept nogil:
    """What the rate is multiplied by: a gradient of a model that is `lag` pushes old counts for
    less."""
    cdef u64 now = s.model.load(relaxed)
    lag[0] = now - h.model if h.model and now > h.model else 0
    return <double> h.scale / max(<u64> 1, lag[0]) if s.slows.load(relaxed) else h.scale


cdef void answer_push(ShardLoopState* s, ShardConnection* c, const ShardHead* h,
                      const u32* counted) noexcept nogil:
    """It is applied and noted: answer now, or when those who follow have it. Under the log's guard.
    counted: [4]; NULL: it had been applied before."""
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
        c.output.lost = True            # it is closed: its client asks again, and hears that the
                                        # push was applied
    if s.log.polled() or s.python_waits.load(relaxed):
        eventfd_signal(s.log.fd)


cdef bint push_is_new(ShardLoopState* s, ShardConnection* c, const ShardHead* h,
                      double* scale) noexcept nogil:
    """Whether a push is to be applied; else it is answered. scale: of the rate, by its age."""
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
