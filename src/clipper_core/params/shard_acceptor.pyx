"""The connections of a shard.

A connection that is not admitted yet is a stranger. Strangers have a number and a time of their
own, so that connections that never say anything shut no worker out: when there is no room, the
stranger that has waited longest is closed for the new one. One whose call waits for Python is not
closed: that it waits is not its fault.
"""
from libc.errno cimport EMFILE, ENFILE, errno
from posix.fcntl cimport O_RDONLY, open
from posix.unistd cimport close as close_fd, usleep

from clipper_core.params.shard_connection cimport is_busy
from clipper_core.params.shard_region cimport calm_loopback, is_local
from clipper_core.params.shard_stream cimport stream_closed
from clipper_core.runtime.allocation cimport make
from clipper_core.runtime.machine cimport (
    EPOLLIN, EPOLLOUT, EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, epoll_ctl, epoll_event,
    relaxed, u32,
)

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
    event.events = (0 if is_busy(c) or c.closing else EPOLLIN) | (EPOLLOUT if c.watched else 0)
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
    _stranger_add(s, c)
    s.connections.fetch_add(1, relaxed)
    connection_watch(s, c, EPOLL_CTL_ADD)
