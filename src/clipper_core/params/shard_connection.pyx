"""The connections of a shard.

A connection that is not admitted yet is pending. The number of pending connections and their time
are limited, so that silent connections shut no worker out: when there is no room, the one that has
waited longest is closed for the new one. One whose call waits for Python is not closed, because
the wait is not its fault.

A connection may only make calls until Python has admitted it. Refusals change nothing.
"""
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset
from posix.unistd cimport close as close_fd

from clipper_core.params.embedding_rows cimport PULL_I8, Pulled, distinct_init, rows_pull, rows_push
from clipper_core.params.optimizer cimport all_finite, optimizer_step, stride_of
from clipper_core.params.shard_state cimport (
    ACCESS_MOVED, ACCESS_OPEN, ACCESS_SEALED, BY_PYTHON, DENSE_TABLE, HEAD_BYTES, MOVED,
    NOT_ADMITTED, NOT_READY, NOT_SHARED, OTHER_EPOCH, OVER_QUOTA, READS_ONLY, REGION_MAPPED,
    REGION_TOO_LARGE, SHARD_ANSWER, SHARD_CALL, SHARD_CHANGES, SHARD_PULL, SHARD_PULL_DENSE,
    SHARD_PULL_TABLES, SHARD_PUSH, SHARD_PUSH_STEP, SHARD_RECEIVED, SHARD_REFUSED, SHARD_REPLAY,
    SHARD_SHARE, STATE_LOST, TABLES_MAX, Call, DenseVariable, PartWork, Place, RegionFault,
    ShardPart, answer_push, answer_room, calm_loopback, counts_push, kDenseBit, padded, place_of,
    push_is_known, push_is_new, put_answer, quotas_exceeded, shard_head_is_one,
    shard_refuse,
)
from clipper_core.params.shard_stream cimport (
    replay_is_exact, replay_send, stream_closed, stream_received,
)
from clipper_core.runtime.allocation cimport make, make_room
from clipper_core.runtime.histogram cimport count, note
from clipper_core.runtime.machine cimport acq_rel, acquire, passes_descriptors, relaxed, u32
from clipper_core.runtime.reactor cimport EPOLLIN, REJECTED, connection_tag
from clipper_core.runtime.status cimport BAD_FRAME, BAD_INPUT, NO_MEMORY, TOO_LARGE, UNKNOWN

# -- Pulls and pushes of rows: of one table, or of several in one message, with dense variables.
#
# A pull is read where the rows lie into the bytes that leave; a push is applied from the bytes that
# came. A message about several tables is checked whole before it is applied: a refusal changes
# nothing. A message about one table means the same as one about several that has only this table.
#
# A step is applied as one: it makes one version, and whoever holds `still` sees all of it or
# nothing.

cdef int[4] _element = [4, 2, 2, 1]    # bytes, by kind of pull


# -- pull
# --------------------------------------------------------------------------------------------------

cdef inline u64 _data_bytes(Place* place, u64 n, u8 dtype) noexcept nogil:
    return padded(n * place.rows.dim * _element[dtype])


cdef inline u64 _scale_bytes(u64 n, u8 dtype) noexcept nogil:
    return padded(4 * n) if dtype == PULL_I8 else 0


cdef inline Place* _place(ShardLoopState* s, u32 table) noexcept nogil:
    """Return the place of a table whose number was checked."""
    return &s.places[table & (TABLES_MAX - 1)]


cdef void _pull(ShardLoopState* s, const ShardPart* part, const i64* ids, u8 dtype,
                u8* to) noexcept nogil:
    cdef u32 table = part.table & (TABLES_MAX - 1)
    cdef Place* place = &s.places[table]
    cdef u64 n = part.n, data = _data_bytes(place, n, dtype), scales = _scale_bytes(n, dtype)
    cdef u64 whole = data + scales, missed
    if whole:
        memset(to + data - min(<u64> 8, data), 0, min(<u64> 8, data))
        memset(to + whole - min(<u64> 8, whole), 0, min(<u64> 8, whole))
    missed = rows_pull(place.rows, ids, n, <Pulled> dtype, to, <float*> (to + data), place.spare,
                       s.stamp.load(relaxed))
    note(&s.counts.tables[table].pulled, n)
    note(&s.counts.tables[table].missed, missed)
    s.pulled.fetch_add(n, relaxed)


cdef void pull_rows(ShardLoopState* s, ShardConnection* c, const ShardHead* h,
                    const u8* payload) noexcept nogil:
    cdef ShardPart part
    cdef u8* to
    part.table, part.n = h.table, h.rows
    if h.dtype > PULL_I8 or h.payload_bytes != 8 * <u64> part.n:
        shard_refuse(s, c, h, BAD_FRAME, h.payload_bytes)
        return
    to = answer_room(s, c, h, _data_bytes(_place(s, part.table), part.n, h.dtype)
                     + _scale_bytes(part.n, h.dtype))
    if to == NULL:
        return
    _pull(s, &part, <const i64*> payload, h.dtype, to)
    s.pulls.fetch_add(1, relaxed)


cdef void pull_tables(ShardLoopState* s, ShardConnection* c, const ShardHead* h,
                      const u8* payload) noexcept nogil:
    cdef const ShardPart* parts = <const ShardPart*> payload
    cdef u64 i, n = h.rows, expected = 8 * n, whole = 0
    cdef const i64* ids = <const i64*> (payload + 8 * n)
    cdef u8* to
    if h.dtype > PULL_I8 or expected > h.payload_bytes:
        shard_refuse(s, c, h, BAD_FRAME, h.payload_bytes)
        return
    for i in range(n):
        if place_of(s, parts[i].table) < 0:
            shard_refuse(s, c, h, UNKNOWN, parts[i].table)
            return
        expected += 8 * <u64> parts[i].n
        if expected > h.payload_bytes:
            break
        whole += (_data_bytes(_place(s, parts[i].table), parts[i].n, h.dtype)
                  + _scale_bytes(parts[i].n, h.dtype))
    if expected != h.payload_bytes:
        shard_refuse(s, c, h, BAD_FRAME, h.payload_bytes)
        return
    to = answer_room(s, c, h, whole)
    if to == NULL:
        return
    for i in range(n):
        _pull(s, &parts[i], ids, h.dtype, to)
        ids += parts[i].n
        to += (_data_bytes(_place(s, parts[i].table), parts[i].n, h.dtype)
               + _scale_bytes(parts[i].n, h.dtype))
    s.pulls.fetch_add(1, relaxed)


cdef void pull_dense(ShardLoopState* s, ShardConnection* c, const ShardHead* h) noexcept nogil:
    """Answer with the dense variables that a version from `model` on has changed. The payload
    starts with whether there is a model at all."""
    cdef ShardHead request = h[0]
    cdef ShardPart part
    cdef const DenseVariable* one
    cdef u64 i, floats = 0
    cdef u64 has_model
    cdef u8* to
    cdef u8* values
    s.still.lock()
    has_model = s.has_model
    request.rows, request.flags = 0, 0
    for i in range(s.variables.size()):
        one = &s.variables[i]
        if one.marks[1] >= h.model:
            request.rows += 1
            floats += padded(4 * one.n)
    to = answer_room(s, c, &request, 8 + 8 * <u64> request.rows + floats)
    if to != NULL:
        memcpy(to, &has_model, 8)
        values = to + 8 + 8 * <u64> request.rows
        to += 8
        for i in range(s.variables.size()):
            one = &s.variables[i]
            if one.marks[1] >= h.model:
                part.table, part.n = <u32> i, <u32> one.n
                memcpy(to, &part, 8)
                memcpy(values, one.value, 4 * one.n)
                memset(values + 4 * one.n, 0, padded(4 * one.n) - 4 * one.n)
                to += 8
                values += padded(4 * one.n)
    s.still.unlock()


# -- push
# --------------------------------------------------------------------------------------------------

cdef i64 _first_bad(const i64* ids, const float* gradients, u64 n, u64 dim) noexcept nogil:
    cdef u64 i
    for i in range(n):
        if not all_finite(gradients + i * dim, dim):
            return ids[i]
    return 0


cdef bint _look_through(ShardLoopState* s, ShardConnection* c, const ShardHead* h,
                        const ShardPart* parts, u64 n, const u8* at,
                        const u8* end) noexcept nogil:
    """Return whether all parts fit their tables and variables, and their gradients are finite; else
    it is refused. What is to be done with each is in `works` then."""
    cdef PartWork work
    cdef u64 i, floats
    cdef i64 place
    s.works.clear()
    if not make_room(s.works, n):
        shard_refuse(s, c, h, NO_MEMORY, <i64> n)
        return False
    memset(&work, 0, sizeof(work))
    for i in range(n):
        work.table, work.n = parts[i].table, parts[i].n
        if work.table & kDenseBit:
            work.table ^= kDenseBit
            if work.table >= s.variables.size() or s.variables[work.table].n != work.n:
                shard_refuse(s, c, h, BAD_FRAME, work.n)
                return False
            floats, work.variable = work.n, True
        else:
            place = place_of(s, work.table)
            if place < 0:
                shard_refuse(s, c, h, UNKNOWN, work.table)
                return False
            work.table = <u32> place
            floats, work.variable = <u64> work.n * s.places[work.table].rows.dim, False
            work.ids = <const i64*> at
            if <u64> (end - at) < 8 * <u64> work.n:
                shard_refuse(s, c, h, BAD_FRAME, h.payload_bytes)
                return False
            at += 8 * <u64> work.n
        work.gradients = <const float*> at
        if <u64> (end - at) < padded(4 * floats):
            shard_refuse(s, c, h, BAD_FRAME, h.payload_bytes)
            return False
        at += padded(4 * floats)
        s.works.push_back(work)
    if at != end:
        shard_refuse(s, c, h, BAD_FRAME, h.payload_bytes)
        return False
    return True


cdef bint _is_finite(ShardLoopState* s, ShardConnection* c, const ShardHead* h) noexcept nogil:
    cdef PartWork* work
    cdef u64 dim
    cdef u64 i
    for i in range(s.works.size()):
        work = &s.works[i]
        dim = 1 if work.variable else s.places[work.table].rows.dim
        if not all_finite(work.gradients, work.n * dim):
            shard_refuse(s, c, h, BAD_INPUT, 0 if work.variable
                         else _first_bad(work.ids, work.gradients, work.n, dim))
            return False
    return True


cdef void _forget_works(ShardLoopState* s) noexcept nogil:
    cdef u64 i
    for i in range(s.works.size()):
        free(s.works[i].distinct.slots)
        free(s.works[i].pushed.gone)
    s.works.clear()


cdef bint _has_memory(ShardLoopState* s) noexcept nogil:
    cdef PartWork* work
    cdef u64 i
    for i in range(s.works.size()):
        work = &s.works[i]
        if work.variable:
            continue
        if not distinct_init(&work.distinct, work.ids, work.n):
            work.distinct.slots = NULL
            return False
        if s.places[work.table].rows.evicts:
            work.pushed.gone = <i64*> malloc((<u64> work.n + 1) * sizeof(i64))
            work.pushed.gone_max = work.n
            if work.pushed.gone == NULL:
                return False
    return True


cdef void _count_steps(ShardLoopState* s, double scale) noexcept nogil:
    """Count the step of each part, and compute its factors."""
    cdef PartWork* work
    cdef u64 i
    cdef u32 stamp = s.stamp.load(relaxed)
    for i in range(s.works.size()):
        work = &s.works[i]
        work.stamp = stamp
        if work.variable:
            s.variables[work.table].marks[0] += 1
            work.steps = s.variables[work.table].marks[0]
            work.stride = stride_of(&s.dense_rule, work.steps, scale)
        else:
            work.steps = s.places[work.table].pushes.fetch_add(1, acq_rel) + 1
            work.stride = stride_of(&s.places[work.table].rows.rule, work.steps, scale)


cdef void _apply_rows(ShardLoopState* s, PartWork* work) noexcept nogil:
    cdef Place* place = &s.places[work.table]
    rows_push(place.rows, &work.stride, work.ids, &work.distinct, work.gradients, place.spare,
              work.steps, work.stamp, &work.pushed)
    s.pushed.fetch_add(work.pushed.applied, relaxed)
    counts_push(s.counts, work.table, work.pushed.applied, work.pushed.made,
                work.pushed.unadmitted, work.pushed.refused, work.pushed.evicted)


cdef void _apply_dense(ShardLoopState* s, const PartWork* work, u64 version) noexcept nogil:
    cdef DenseVariable* one = &s.variables[work.table]
    one.marks[1] = version
    optimizer_step(s.dense_rule, work.stride, one.value, one.state, one.n, work.gradients, one.n)


cdef void _note(ShardLoopState* s, const ShardHead* h) noexcept nogil:
    """Append the changes of a push to the log. The caller holds the log's guard. The last entry is
    the push's own, so followers know of the push when they have all of it."""
    cdef PartWork* work
    cdef u64 i, last = s.works.size() - 1 if s.works.size() else 0
    cdef u64 worker, sequence
    cdef i64 number = 0
    for i in range(s.works.size()):
        work = &s.works[i]
        if work.pushed.gone != NULL and work.pushed.evicted:
            s.log.append(work.table, work.pushed.gone, <u32> work.pushed.evicted, 0, 0)
        worker, sequence = (h.worker if i == last else 0), (h.sequence if i == last else 0)
        if work.variable:
            number = work.table
            s.log.append(DENSE_TABLE, &number, 1, worker, sequence)
        else:
            s.log.append(work.table, work.ids, work.n, worker, sequence)
    if not s.works.size():
        s.log.append(DENSE_TABLE, &number, 0, h.worker, h.sequence)


cdef bint _send_ahead(ShardLoopState* s, const ShardHead* h, u64 version, const u8* data,
                      const u8* end) noexcept nogil:
    """Send a push to followers that apply it themselves, and note it."""
    cdef u64 begin
    if not (s.replays and replay_is_exact(s, <u64> (end - data))):
        return False
    s.log.guard.lock()
    begin = s.log.position()
    _note(s, h)
    s.log.guard.unlock()
    replay_send(s, h, begin, version, data, end)
    return True


cdef bint _apply(ShardLoopState* s, ShardConnection* c, const ShardHead* h, double scale,
                 const u8* data, const u8* end) noexcept nogil:
    """Apply a push. Return False if it is refused, and nothing has changed."""
    cdef u32[4] counted = [0, 0, 0, 0]
    cdef i64 about = 0
    cdef PartWork* work
    cdef u64 i, version
    cdef bint noted
    s.still.lock()
    if s.access.load(acquire) != ACCESS_OPEN:   # since it was looked at
        s.still.unlock()
        shard_refuse(s, c, h, NOT_READY, 0)
        return False
    if quotas_exceeded(s, s.works.data(), s.works.size(), &about):
        s.still.unlock()
        shard_refuse(s, c, h, OVER_QUOTA, about)
        return False
    version = s.model.load(relaxed) + 1
    _count_steps(s, scale)
    noted = _send_ahead(s, h, version, data, end)
    for i in range(s.works.size()):
        work = &s.works[i]
        if work.variable:
            _apply_dense(s, work, version)
            continue
        _apply_rows(s, work)
        counted[0] += <u32> work.pushed.applied
        counted[1] += <u32> work.pushed.unadmitted
        counted[2] += <u32> work.pushed.refused
        counted[3] += <u32> work.pushed.evicted
    s.model.store(version, relaxed)
    s.log.guard.lock()
    if not noted or counted[2] or counted[3]:   # it went otherwise: their rows follow
        _note(s, h)
    answer_push(s, c, h, counted)
    s.log.guard.unlock()
    s.still.unlock()
    return True


cdef bint _push(ShardLoopState* s, ShardConnection* c, const ShardHead* h, const ShardPart* parts,
                u64 n, const u8* data, const u8* end) noexcept nogil:
    """Return whether it was applied now."""
    cdef double scale = 1.0
    cdef bint ready
    if not (_look_through(s, c, h, parts, n, data, end) and push_is_new(s, c, h, &scale)
            and _is_finite(s, c, h)):
        return False
    ready = push_is_known(s, h) and _has_memory(s)
    if ready:
        ready = _apply(s, c, h, scale, data, end)
    else:
        shard_refuse(s, c, h, NO_MEMORY, h.rows)
    _forget_works(s)
    return ready


cdef void push_rows(ShardLoopState* s, ShardConnection* c, const ShardHead* h,
                    const u8* payload) noexcept nogil:
    cdef ShardPart part
    part.table, part.n = h.table, h.rows
    if _push(s, c, h, &part, 1, payload, payload + h.payload_bytes):
        s.pushes.fetch_add(1, relaxed)


cdef void push_step(ShardLoopState* s, ShardConnection* c, const ShardHead* h,
                    const u8* payload) noexcept nogil:
    cdef u64 n = h.rows
    if 8 * n > h.payload_bytes:
        shard_refuse(s, c, h, BAD_FRAME, h.payload_bytes)
        return
    if _push(s, c, h, <const ShardPart*> payload, n, payload + 8 * n, payload + h.payload_bytes):
        count(&s.counts.taken, 1)


cdef extern from "<sys/socket.h>" nogil:
    int SOL_SOCKET
    int SO_KEEPALIVE
    int setsockopt(int fd, int level, int name, const void* value, u32 length) noexcept

cdef extern from "<netinet/in.h>" nogil:
    int IPPROTO_TCP

cdef extern from "<netinet/tcp.h>" nogil:
    int TCP_NODELAY
    int TCP_KEEPIDLE
    int TCP_KEEPINTVL
    int TCP_KEEPCNT

cdef enum:
    KEEPALIVE_IDLE_S = 10       # a worker whose host is lost is noticed after 25 s, and its number
                                # is free again
    KEEPALIVE_INTERVAL_S = 5
    KEEPALIVE_COUNT = 3


# -- strangers
# --------------------------------------------------------------------------------------------------

cdef void _stranger_add(ShardLoopState* s, ShardConnection* c) noexcept nogil:
    c.older = s.newest
    c.newer = NULL
    if s.newest != NULL:
        s.newest.newer = c
    else:
        s.oldest = c
    s.newest = c
    s.strangers += 1


cdef void _stranger_remove(ShardLoopState* s, ShardConnection* c) noexcept nogil:
    if c.older != NULL:
        c.older.newer = c.newer
    else:
        s.oldest = c.newer
    if c.newer != NULL:
        c.newer.older = c.older
    else:
        s.newest = c.older
    c.older = NULL
    c.newer = NULL
    s.strangers -= 1


cdef bint _make_room(ShardLoopState* s) noexcept nogil:
    """Close the stranger that has waited longest. False: there is none that may be closed."""
    cdef ShardConnection* c = s.oldest
    while c != NULL and c.calls:
        c = c.newer
    if c == NULL:
        return False
    s.turned_away.fetch_add(1, relaxed)
    connection_close(s, c)
    return True


cdef void strangers_expire(ShardLoopState* s, u64 now_us) noexcept nogil:
    cdef ShardConnection* c = s.oldest
    cdef ShardConnection* newer
    while c != NULL and c.since_us + s.hello_us <= now_us:
        newer = c.newer
        if not c.calls:
            s.turned_away.fetch_add(1, relaxed)
            connection_close(s, c)
        c = newer


# -- connections
# --------------------------------------------------------------------------------------------------

cdef void connection_close(ShardLoopState* s, ShardConnection* c) noexcept nogil:
    if not c.admitted:
        _stranger_remove(s, c)
    stream_closed(s, c)
    s.reactor.close(c.fd)
    c.fd = -1
    c.generation += 1
    s.shared_bytes.fetch_sub(c.region.bytes, relaxed)
    c.region.drop()
    c.input.clear()
    c.output.clear()
    c.input.shrink(0)
    c.output.shrink(0)
    s.unused.push_back(c.number)
    s.connections.fetch_sub(1, relaxed)


cdef bint connection_admit(ShardLoopState* s, ShardConnection* c, u64 worker,
                           u64 incarnation) noexcept nogil:
    """Admit a connection, unless a live connection of another client has its worker number. Clients
    of older versions send no incarnation (0), so they cannot be distinguished."""
    cdef ShardConnection* other
    cdef size_t i
    if c.admitted:
        return True
    if worker and incarnation:
        for i in range(s.callers.size()):
            other = s.callers[i]
            if (other.fd >= 0 and other.admitted and other.worker == worker
                and other.incarnation not in (0, incarnation)):
                return False
    _stranger_remove(s, c)
    c.admitted, c.worker, c.incarnation = True, worker, incarnation
    return True


cdef void _set_options(int fd) noexcept nogil:
    """Set options of TCP; on a unix socket they fail, and none is needed."""
    cdef int yes = 1, probes = KEEPALIVE_COUNT
    cdef int idle = KEEPALIVE_IDLE_S, interval = KEEPALIVE_INTERVAL_S
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes))
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &yes, sizeof(yes))
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof(idle))
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof(interval))
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof(probes))
    calm_loopback(fd)


cdef void connection_accept(ShardLoopState* s, u32 listener, u64 now_us) noexcept nogil:
    cdef ShardConnection* c
    cdef bint is_full
    cdef int fd = s.reactor.accept(listener)
    if fd == REJECTED:
        s.turned_away.fetch_add(1, relaxed)
    if fd < 0:
        return
    is_full = s.strangers >= s.strangers_max or s.connections.load(relaxed) >= s.connections_max
    if is_full and not _make_room(s):
        s.turned_away.fetch_add(1, relaxed)
        close_fd(fd)
        return
    _set_options(fd)
    if s.unused.size():
        c = s.callers[s.unused.back()]
        s.unused.pop_back()
    else:
        c = make[ShardConnection]()
        if c == NULL:
            s.turned_away.fetch_add(1, relaxed)
            close_fd(fd)
            return
        c.number, c.generation = <u32> s.callers.size(), 1
        s.callers.push_back(c)
    c.fd, c.admitted, c.closing, c.behind, c.calls = fd, False, False, False, 0
    c.local, c.watched = passes_descriptors(fd), EPOLLIN
    c.skip, c.worker, c.incarnation, c.since_us, c.stream = 0, 0, 0, now_us, 0
    _stranger_add(s, c)
    s.connections.fetch_add(1, relaxed)
    s.reactor.watch(fd, EPOLLIN, connection_tag(c.number, c.generation))


# -- messages
# --------------------------------------------------------------------------------------------------

cdef enum:
    CALLS_MAX = 64               # of one connection, with Python at once
    STRANGER_CALLS_MAX = 1       # of one that is not admitted yet
    STRANGER_BYTES_MAX = 65536   # of a frame, before its sender is admitted
    OUTPUT_BYTES_MAX = 16777216  # unsent; then no more is read from that connection


cdef void _share(ShardLoopState* s, ShardConnection* c, const ShardHead* h) noexcept nogil:
    """Map the memory in which the worker will receive rows, instead of what it shared before."""
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
    cdef u32 access = s.access.load(acquire)
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
    if access == ACCESS_MOVED:
        shard_refuse(s, c, h, MOVED, 0)
    elif access > ACCESS_SEALED or (access == ACCESS_SEALED
                                    and (h.kind == SHARD_PUSH or h.kind == SHARD_PUSH_STEP)):
        shard_refuse(s, c, h, NOT_READY, 0)
    elif h.kind == SHARD_PULL_TABLES:
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


cdef bint take_frames(ShardLoopState* s, ShardConnection* c, i64* left) noexcept nogil:
    """Obey frames that have come whole, until `left` bytes of them and their answers are used up.
    False: what came is no frame.

    The payload of one that is too large is read and dropped, so that its sender receives the
    reason: a connection that is closed with unread bytes loses its last answer. A pending
    connection is closed.
    """
    cdef const ShardHead* h
    cdef u64 limit = s.frame_bytes_max if c.admitted else <u64> STRANGER_BYTES_MAX
    cdef u64 dropped, before
    while not is_busy(c) and not c.closing and left[0] > 0:
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
        before = c.output.size()
        _handle_frame(s, c, h, c.input.at() + HEAD_BYTES)
        h = <const ShardHead*> c.input.at()
        left[0] -= <i64> (HEAD_BYTES + h.payload_bytes + c.output.size() - before)
        c.input.drop(HEAD_BYTES + h.payload_bytes)
    return True
