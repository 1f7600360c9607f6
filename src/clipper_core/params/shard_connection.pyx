"""What a shard does with each message that has come whole.

A connection may only make calls until Python has admitted it. Refusals change nothing.
"""
from clipper_core.params.shard_answers cimport put_answer, shard_refuse
from clipper_core.params.shard_region cimport REGION_MAPPED, REGION_TOO_LARGE, RegionFault
from clipper_core.params.shard_rows cimport (
    pull_dense, pull_rows, pull_tables, push_rows, push_step,
)
from clipper_core.params.shard_stream cimport stream_received
from clipper_core.params.shard_state cimport (
    BY_PYTHON, HEAD_BYTES, NOT_ADMITTED, NOT_READY, NOT_SHARED, OTHER_EPOCH, READS_ONLY,
    SHARD_ANSWER, SHARD_CALL, SHARD_CHANGES, SHARD_PULL, SHARD_PULL_DENSE, SHARD_PULL_TABLES,
    SHARD_PUSH, SHARD_PUSH_STEP,
    SHARD_RECEIVED, SHARD_REFUSED, SHARD_REPLAY, SHARD_SHARE, STATE_LOST, Call, ShardHead, place_of,
    shard_head_is_one,
)
from clipper_core.runtime.allocation cimport make
from clipper_core.runtime.machine cimport acquire, i64, relaxed, u64, u8
from clipper_core.runtime.status cimport NO_MEMORY, TOO_LARGE, UNKNOWN

cdef enum:
    CALLS_MAX = 64               # of one connection, with Python at once
    STRANGER_CALLS_MAX = 1       # of one that is not admitted yet
    STRANGER_BYTES_MAX = 65536   # of a frame, before its sender is admitted
    OUTPUT_BYTES_MAX = 16777216  # unsent; then no more is read from that connection


cdef void _share(ShardLoopState* s, ShardConnection* c, const ShardHead* h) noexcept nogil:
    """Its memory, that it will have rows in; instead of what it shared before."""
    cdef u64 others = s.shared_bytes.load(relaxed) - c.region.bytes
    cdef RegionFault fault = c.region.map(s.shared_bytes_max - min(others, s.shared_bytes_max))
    s.shared_bytes.store(others + c.region.bytes, relaxed)
    if fault == REGION_TOO_LARGE:
        shard_refuse(s, c, h, TOO_LARGE, <i64> s.shared_bytes_max)
    elif fault != REGION_MAPPED:
        shard_refuse(s, c, h, NOT_SHARED, 0)
    else:
        put_answer(s, c, h, 0)


# -- frames
# --------------------------------------------------------------------------------------------------

cdef void _to_python(ShardLoopState* s, ShardConnection* c, const ShardHead* h,
                     const u8* payload) noexcept nogil:
    cdef Call* call = make[Call]()
    if call == NULL:
        shard_refuse(s, c, h, NO_MEMORY, 0)
        return
    call.conn, call.generation, call.head = c.number, c.generation, h[0]
    call.body.put(payload, h.payload_bytes)
    c.calls += 1
    if call.body.lost or not s.calls.put(call):
        c.calls -= 1
        del call
        shard_refuse(s, c, h, NO_MEMORY, 0)


cdef void _handle_frame(ShardLoopState* s, ShardConnection* c, const ShardHead* h,
                        const u8* payload) noexcept nogil:
    cdef u64 epoch = s.epoch.load(acquire)
    if h.kind == SHARD_CALL:
        _to_python(s, c, h, payload)
        return
    if not c.admitted:
        shard_refuse(s, c, h, NOT_ADMITTED, 0)
        return
    if not c.pushes and (h.kind == SHARD_PUSH or h.kind == SHARD_PUSH_STEP):
        shard_refuse(s, c, h, READS_ONLY, 0)
        return
    if h.kind == SHARD_SHARE:
        _share(s, c, h)
        return
    if h.kind == SHARD_RECEIVED:
        stream_received(s, c, h)
        return
    if h.epoch and h.epoch != epoch:
        shard_refuse(s, c, h, OTHER_EPOCH, <i64> epoch)
        return
    if not s.ready.load(acquire):
        shard_refuse(s, c, h, STATE_LOST if s.state_lost.load(acquire) else NOT_READY, 0)
        return
    if h.kind == SHARD_PULL_TABLES:
        pull_tables(s, c, h, payload)
    elif h.kind == SHARD_PULL_DENSE:
        pull_dense(s, c, h)
    elif h.kind == SHARD_PUSH_STEP:
        if s.steps_by_python:
            _to_python(s, c, h, payload)
        else:
            push_step(s, c, h, payload)
    else:
        _one_table(s, c, h, payload)


cdef void _one_table(ShardLoopState* s, ShardConnection* c, const ShardHead* h,
                     const u8* payload) noexcept nogil:
    cdef i64 place = place_of(s, h.table)
    if place < 0:
        shard_refuse(s, c, h, UNKNOWN, h.table)
    elif h.kind == SHARD_PULL:
        pull_rows(s, c, h, payload)
    elif s.places[place].flags & BY_PYTHON:
        _to_python(s, c, h, payload)
    else:
        push_rows(s, c, h, payload)


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
        if not shard_head_is_one(h[0]) or h.kind in (SHARD_ANSWER, SHARD_REFUSED, SHARD_CHANGES,
                                                     SHARD_REPLAY):
            return False
        if h.payload_bytes > limit:
            shard_refuse(s, c, h, TOO_LARGE, <i64> limit)
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
