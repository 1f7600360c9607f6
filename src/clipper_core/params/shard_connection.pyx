"""The connections of a shard.

A connection that is not admitted yet is a stranger. Strangers have a number and a time of their
own, so that connections that never say anything shut no worker out: when there is no room, the
stranger that has waited longest is closed for the new one. One whose call waits for Python is not
closed: that it waits is not its fault.

A connection may only make calls until Python has admitted it. Refusals change nothing.
"""
from libc.errno cimport EMFILE, ENFILE, errno
from posix.fcntl cimport O_RDONLY, open
from posix.unistd cimport close as close_fd, usleep

from clipper_core.params.shard_answers cimport put_answer, shard_refuse
from clipper_core.params.shard_state cimport (
    BY_PYTHON, HEAD_BYTES, NOT_ADMITTED, NOT_READY, NOT_SHARED, OTHER_EPOCH, READS_ONLY,
    REGION_MAPPED, REGION_TOO_LARGE, SHARD_ANSWER, SHARD_CALL, SHARD_CHANGES, SHARD_PULL,
    SHARD_PULL_DENSE, SHARD_PULL_TABLES, SHARD_PUSH, SHARD_PUSH_STEP, SHARD_RECEIVED, SHARD_REFUSED,
    SHARD_REPLAY, SHARD_SHARE, STATE_LOST, Call, RegionFault, ShardHead, calm_loopback, is_local,
    place_of, shard_head_is_one,
)
from clipper_core.params.shard_rows cimport pull_dense, pull_rows, pull_tables, push_rows, push_step
from clipper_core.params.shard_stream cimport stream_closed, stream_received
from clipper_core.runtime.allocation cimport make
from clipper_core.runtime.machine cimport (
    EPOLLIN, EPOLLOUT, EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, acquire, epoll_ctl, epoll_event,
    i64, relaxed, u32, u64, u8,
)
from clipper_core.runtime.status cimport NO_MEMORY, TOO_LARGE, UNKNOWN

cdef extern from "<fcntl.h>" nogil:
    int O_CLOEXEC

cdef extern from "<sys/socket.h>" nogil:
    int SOCK_NONBLOCK
    int SOCK_CLOEXEC
    int SOL_SOCKET
    int SO_KEEPALIVE
    int accept4(int fd, void* address, void* length, int flags) noexcept
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

cdef void connection_watch(ShardLoopState* s, ShardConnection* c, int op) noexcept nogil:
    cdef epoll_event event
    event.events = ((0 if is_busy(c) or c.closing or c.behind else EPOLLIN)
                    | (EPOLLOUT if c.watched else 0))
    if op == EPOLL_CTL_MOD and event.events == c.events:
        return
    c.events = event.events
    event.data.u64 = c.number
    epoll_ctl(s.epoll_fd, op, c.fd, &event)


cdef void connection_close(ShardLoopState* s, ShardConnection* c) noexcept nogil:
    cdef epoll_event event
    if not c.admitted:
        _stranger_remove(s, c)
    stream_closed(s, c)
    epoll_ctl(s.epoll_fd, EPOLL_CTL_DEL, c.fd, &event)
    close_fd(c.fd)
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
    """Admit it, unless a live connection of another client has its worker number. A client that
    does not say its incarnation (0) is one of an older version: whether it is another cannot be
    told."""
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


cdef void _out_of_descriptors(ShardLoopState* s, int listener) noexcept nogil:
    """A connection left in the backlog would wake the loop for ever: the spare descriptor is used
    to close it."""
    cdef int fd
    close_fd(s.spare_fd)
    fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC)
    if fd >= 0:
        close_fd(fd)
        s.turned_away.fetch_add(1, relaxed)
    else:
        usleep(1000)            # somebody else took it: do not spin until they let go
    s.spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC)


cdef void _set_options(int fd) noexcept nogil:
    """Of a unix socket all of them fail, and none is needed."""
    cdef int yes = 1, count = KEEPALIVE_COUNT
    cdef int idle = KEEPALIVE_IDLE_S, interval = KEEPALIVE_INTERVAL_S
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes))
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &yes, sizeof(yes))
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof(idle))
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof(interval))
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof(count))
    calm_loopback(fd)


cdef void connection_accept(ShardLoopState* s, int listener, u64 now_us) noexcept nogil:
    cdef ShardConnection* c
    cdef bint is_full
    cdef int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)
    if fd < 0:
        if errno == EMFILE or errno == ENFILE:
            _out_of_descriptors(s, listener)
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
    c.fd, c.admitted, c.closing, c.watched, c.calls, c.local = (fd, False, False, False, 0,
            is_local(fd))
    c.skip, c.worker, c.incarnation, c.since_us, c.stream = 0, 0, 0, now_us, 0
    c.behind = False
    _stranger_add(s, c)
    s.connections.fetch_add(1, relaxed)
    connection_watch(s, c, EPOLL_CTL_ADD)


# -- messages
# --------------------------------------------------------------------------------------------------

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


cdef bint take_frames(ShardLoopState* s, ShardConnection* c, i64* left) noexcept nogil:
    """Obey frames that have come whole, until `left` bytes of them and their answers are used up.
    False: what came is no frame.

    The payload of one that is too large is read and dropped, so that its sender hears why: a
    connection that is closed with unread bytes loses its last answer. A stranger's connection is
    closed.
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
