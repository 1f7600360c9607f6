"""A shard's requests. A pull is read where the rows lie into the bytes that leave; a push is
applied from the bytes that came.

Whether an answer to a push leaves at once or when followers have the rows is the log's to say
(shard_log.hpp). Refusals change nothing. A connection may only make calls until Python has admitted
it.
"""
from libc.math cimport isfinite
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from clipper_core.params.embedding_rows cimport (
    PULL_I8, Distinct, Pulled, Pushed, distinct_init, rows_pull, rows_push,
)
from clipper_core.params.optimizer cimport Stride, all_finite, stride_of
from clipper_core.params.shard_counts cimport counts_push, counts_refuse
from clipper_core.params.shard_log cimport OLD_PUSH, SEEN_PUSH, Held, Sighting
from clipper_core.params.shard_region cimport REGION_MAPPED, REGION_TOO_LARGE, RegionFault
from clipper_core.runtime.allocation cimport make, try_push
from clipper_core.runtime.histogram cimport histogram_record, note
from clipper_core.runtime.machine cimport acq_rel, acquire, eventfd_signal, i64, relaxed
from clipper_core.runtime.status cimport BAD_FRAME, BAD_INPUT, FULL, NO_MEMORY, TOO_LARGE, UNKNOWN

cdef enum:
    CALLS_MAX = 64               # of one connection, with Python at once
    STRANGER_CALLS_MAX = 1       # of one that is not admitted yet
    STRANGER_BYTES_MAX = 65536   # of a frame, before its sender is admitted
    OUTPUT_BYTES_MAX = 16777216  # unsent; then no more is read from that connection

cdef int[4] _element = [4, 2, 2, 1]    # bytes, by kind of pull


# -- answers
# --------------------------------------------------------------------------------------------------

cdef void _put_answer(ShardLoopState* s, ShardConnection* c, const ShardHead* to,
                      u8 flags) noexcept nogil:
    cdef ShardHead head = shard_answer(to[0], SHARD_ANSWER, s.epoch.load(relaxed),
                                       s.model.load(relaxed))
    head.flags = flags
    c.output.put(&head, HEAD_BYTES)


cdef void _refuse(ShardLoopState* s, ShardConnection* c, const ShardHead* to, u32 why,
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


# -- pull
# --------------------------------------------------------------------------------------------------

cdef void _share(ShardLoopState* s, ShardConnection* c, const ShardHead* h) noexcept nogil:
    """Its memory, that it will have rows in; instead of what it shared before."""
    cdef u64 others = s.shared_bytes.load(relaxed) - c.region.bytes
    cdef RegionFault fault = c.region.map(s.shared_bytes_max - min(others, s.shared_bytes_max))
    s.shared_bytes.store(others + c.region.bytes, relaxed)
    if fault == REGION_TOO_LARGE:
        _refuse(s, c, h, TOO_LARGE, <i64> s.shared_bytes_max)
    elif fault != REGION_MAPPED:
        _refuse(s, c, h, NOT_SHARED, 0)
    else:
        _put_answer(s, c, h, 0)


cdef u8* _room(ShardLoopState* s, ShardConnection* c, const ShardHead* h, u64 whole) noexcept nogil:
    """Where the rows of an answer go, of which the head is put already. NULL: nowhere, and so it
    was said, or it is lost."""
    cdef ShardHead head = shard_answer(h[0], SHARD_ANSWER, s.epoch.load(relaxed),
                                       s.model.load(relaxed))
    cdef u8* to
    if h.flags & IN_REGION:
        to = c.region.at(h.sequence, whole)
        if to == NULL:
            _refuse(s, c, h, NOT_SHARED, <i64> c.region.bytes)
            return NULL
        head.flags = IN_REGION
        c.output.put(&head, HEAD_BYTES)
        return to
    if whole > s.frame_bytes_max:
        _refuse(s, c, h, TOO_LARGE, <i64> s.frame_bytes_max)
        return NULL
    to = c.output.reserve(HEAD_BYTES + whole)
    if to == NULL:
        return NULL
    head.payload_bytes = <u32> whole
    memcpy(to, &head, HEAD_BYTES)
    c.output.end += HEAD_BYTES + whole
    return to + HEAD_BYTES


cdef void _pull(ShardLoopState* s, ShardConnection* c, const ShardHead* h,
                const u8* payload) noexcept nogil:
    cdef Place* place = &s.places[h.table]
    cdef u64 dim = place.rows.dim, n = h.rows, data, scales = 0, whole, missed
    cdef u8* to
    if h.dtype > PULL_I8 or h.payload_bytes != 8 * n:
        _refuse(s, c, h, BAD_FRAME, h.payload_bytes)
        return
    data = padded(n * dim * _element[h.dtype])
    if h.dtype == PULL_I8:
        scales = padded(4 * n)
    whole = data + scales
    to = _room(s, c, h, whole)
    if to == NULL:
        return
    if whole:
        memset(to + data - min(<u64> 8, data), 0, min(<u64> 8, data))
        memset(to + whole - min(<u64> 8, whole), 0, min(<u64> 8, whole))
    missed = rows_pull(place.rows, <const i64*> payload, n, <Pulled> h.dtype, to,
                       <float*> (to + data), place.spare,
                       s.stamp.load(relaxed))
    note(&s.counts.tables[h.table].pulled, n)
    note(&s.counts.tables[h.table].missed, missed)
    s.pulls.fetch_add(1, relaxed)
    s.pulled.fetch_add(n, relaxed)


# -- push
# --------------------------------------------------------------------------------------------------

cdef Sighting _seen(ShardLoopState* s, const ShardHead* h, bint* full) noexcept nogil:
    cdef Sighting sight
    s.log.guard.lock()
    sight = s.log.look(h.worker, h.sequence)
    full[0] = s.log.waits() and s.log.held.size() >= s.log.held_max
    s.log.guard.unlock()
    return sight


cdef bint _is_known(ShardLoopState* s, const ShardHead* h) noexcept nogil:
    """There is memory for its worker, so that this push will be told from its repetition."""
    cdef bint known
    if h.sequence == 0:
        return True
    s.log.guard.lock()
    known = s.log.window(h.worker) != NULL
    s.log.guard.unlock()
    return known


cdef void _hold_or_answer(ShardLoopState* s, ShardConnection* c, const ShardHead* h,
                          const i64* ids, u32 n,
                          const Pushed* pushed) noexcept nogil:
    """It is applied: note it, and answer now or when those who follow have it. pushed: NULL: it had
    been applied before."""
    cdef u32[4] counted = [0, 0, 0, 0]
    cdef Held held
    cdef ShardHead head
    cdef bint waits
    if pushed != NULL:
        counted = [<u32> pushed.applied, <u32> pushed.unadmitted, <u32> pushed.refused,
                   <u32> pushed.evicted]
    s.log.guard.lock()
    if pushed != NULL and pushed.gone != NULL and pushed.evicted:
        s.log.append(h.table, pushed.gone, <u32> pushed.evicted, 0, 0)
    if pushed != NULL:
        s.log.append(h.table, ids, n, h.worker, h.sequence)
    waits = s.log.waits() and s.log.sure() < s.log.position()
    head = shard_answer(h[0], SHARD_ANSWER, s.epoch.load(relaxed), s.model.load(relaxed))
    head.flags = DUPLICATE if pushed == NULL else 0
    head.payload_bytes = 0 if pushed == NULL else PUSHED_BYTES
    if waits:
        held.position, held.conn, held.generation = s.log.position(), c.number, c.generation
        memcpy(&held.words[0], &head, HEAD_BYTES)
        memcpy(&held.words[HEAD_BYTES // 8], &counted[0], PUSHED_BYTES)
        if not try_push(s.log.held, held):
            c.output.lost = True        # it is closed: its client asks again, and hears that the
                                        # push was applied
        eventfd_signal(s.log.fd)
    s.log.guard.unlock()
    if not waits:
        c.output.put(&head, HEAD_BYTES)
        c.output.put(&counted[0], head.payload_bytes)


cdef i64 _first_bad(const i64* ids, const float* gradients, u64 n, u64 dim) noexcept nogil:
    cdef u64 i
    for i in range(n):
        if not all_finite(gradients + i * dim, dim):
            return ids[i]
    return 0


cdef double _scale(ShardLoopState* s, const ShardHead* h, u64* lag) noexcept nogil:
    """What the rate is multiplied by: a gradient of a model that is `lag` pushes old counts for
    less."""
    cdef u64 now = s.model.load(relaxed)
    lag[0] = now - h.model if h.model and now > h.model else 0
    return <double> h.scale / max(<u64> 1, lag[0]) if s.slows.load(relaxed) else h.scale


cdef void _apply(ShardLoopState* s, ShardConnection* c, const ShardHead* h, const i64* ids,
                 const float* gradients,
                 double scale) noexcept nogil:
    cdef Place* place = &s.places[h.table]
    cdef Distinct distinct
    cdef Pushed pushed
    cdef Stride stride
    memset(&pushed, 0, sizeof(pushed))
    if not distinct_init(&distinct, ids, h.rows):
        _refuse(s, c, h, NO_MEMORY, h.rows)
        return
    if place.rows.evicts:
        pushed.gone, pushed.gone_max = <i64*> malloc((h.rows + 1) * sizeof(i64)), h.rows
        if pushed.gone == NULL:
            free(distinct.slots)
            _refuse(s, c, h, NO_MEMORY, h.rows)
            return
    s.still.lock()
    stride = stride_of(&place.rows.rule, place.pushes.fetch_add(1, acq_rel) + 1, scale)
    rows_push(place.rows, &stride, ids, &distinct, gradients, place.spare, s.stamp.load(relaxed),
              &pushed)
    free(distinct.slots)
    s.model.fetch_add(1, relaxed)
    s.pushes.fetch_add(1, relaxed)
    s.pushed.fetch_add(pushed.applied, relaxed)
    counts_push(s.counts, h.table, pushed.applied, pushed.made, pushed.unadmitted, pushed.refused,
                pushed.evicted)
    _hold_or_answer(s, c, h, ids, h.rows, &pushed)
    s.still.unlock()
    free(pushed.gone)


cdef void _push(ShardLoopState* s, ShardConnection* c, const ShardHead* h,
                const u8* payload) noexcept nogil:
    cdef u64 dim = s.places[h.table].rows.dim, n = h.rows, lag = 0
    cdef const i64* ids = <const i64*> payload
    cdef const float* gradients = <const float*> (payload + 8 * n)
    cdef bint full = False
    cdef Sighting sight
    cdef double scale
    if h.payload_bytes != 8 * n + padded(4 * n * dim):
        _refuse(s, c, h, BAD_FRAME, h.payload_bytes)
        return
    if not (h.scale > 0 and isfinite(h.scale)):
        _refuse(s, c, h, BAD_INPUT, 0)
        return
    sight = _seen(s, h, &full)
    if sight == SEEN_PUSH:
        s.repeated.fetch_add(1, relaxed)
        _hold_or_answer(s, c, h, ids, 0, NULL)
        return
    if sight == OLD_PUSH:
        _refuse(s, c, h, TOO_OLD, <i64> h.sequence)
        return
    if full:
        _refuse(s, c, h, FULL, <i64> s.log.held_max)
        return
    scale = _scale(s, h, &lag)
    if h.model:
        histogram_record(&s.counts.lags, lag)
    if s.lag_max.load(relaxed) and lag > s.lag_max.load(relaxed):
        _refuse(s, c, h, TOO_STALE, <i64> lag)
        return
    if not all_finite(gradients, n * dim):
        _refuse(s, c, h, BAD_INPUT, _first_bad(ids, gradients, n, dim))
        return
    if not _is_known(s, h):
        _refuse(s, c, h, NO_MEMORY, h.rows)
        return
    _apply(s, c, h, ids, gradients, scale)


# -- frames
# --------------------------------------------------------------------------------------------------

cdef void _to_python(ShardLoopState* s, ShardConnection* c, const ShardHead* h,
                     const u8* payload) noexcept nogil:
    cdef Call* call = make[Call]()
    if call == NULL:
        _refuse(s, c, h, NO_MEMORY, 0)
        return
    call.conn, call.generation, call.head = c.number, c.generation, h[0]
    call.body.put(payload, h.payload_bytes)
    c.calls += 1
    if call.body.lost or not s.calls.put(call):
        c.calls -= 1
        del call
        _refuse(s, c, h, NO_MEMORY, 0)


cdef void _handle_frame(ShardLoopState* s, ShardConnection* c, const ShardHead* h,
                        const u8* payload) noexcept nogil:
    cdef u64 epoch = s.epoch.load(acquire)
    if h.kind == SHARD_CALL:
        _to_python(s, c, h, payload)
        return
    if not c.admitted:
        _refuse(s, c, h, NOT_ADMITTED, 0)
        return
    if h.kind == SHARD_SHARE:
        _share(s, c, h)
        return
    if h.epoch and h.epoch != epoch:
        _refuse(s, c, h, OTHER_EPOCH, <i64> epoch)
        return
    if not s.ready.load(acquire):
        _refuse(s, c, h, STATE_LOST if s.state_lost.load(acquire) else NOT_READY, 0)
        return
    if h.table >= s.place_count.load(acquire):
        _refuse(s, c, h, UNKNOWN, h.table)
        return
    if h.kind == SHARD_PULL:
        _pull(s, c, h, payload)
    elif s.places[h.table].flags & BY_PYTHON:
        _to_python(s, c, h, payload)
    else:
        _push(s, c, h, payload)


cdef bint is_busy(ShardConnection* c) noexcept nogil:
    return c.output.size() > OUTPUT_BYTES_MAX or c.calls >= (CALLS_MAX if c.admitted
                                                             else STRANGER_CALLS_MAX)


cdef bint take_frames(ShardLoopState* s, ShardConnection* c) noexcept nogil:
    """Obey all frames that have come whole. False: what came is no frame.

    The payload of one that is too large is read and dropped, so that its sender hears why: a
    connection that is closed with unread bytes loses its last answer. A stranger's connection is
    closed.
    """
    cdef const ShardHead* h
    cdef u64 limit = s.frame_bytes_max if c.admitted else <u64> STRANGER_BYTES_MAX
    cdef u64 dropped
    while not is_busy(c) and not c.closing:
        if c.skip:
            dropped = min(c.skip, c.input.size())
            c.input.drop(dropped)
            c.skip -= dropped
        if c.skip or c.input.size() < HEAD_BYTES:
            return True
        h = <const ShardHead*> c.input.at()
        if not shard_head_is_one(h[0]) or (h.kind > SHARD_CALL and h.kind != SHARD_SHARE):
            return False
        if h.payload_bytes > limit:
            _refuse(s, c, h, TOO_LARGE, <i64> limit)
            c.closing = not c.admitted
            c.skip = h.payload_bytes
            c.input.drop(HEAD_BYTES)
            continue
        if c.input.size() < HEAD_BYTES + h.payload_bytes:
            return c.input.reserve(HEAD_BYTES + h.payload_bytes - c.input.size()) != NULL
        _handle_frame(s, c, h, c.input.at() + HEAD_BYTES)
        h = <const ShardHead*> c.input.at()
        c.input.drop(HEAD_BYTES + h.payload_bytes)
    return True
