"""Moving bytes between clients and their readers.

A turn moves what one read of each side gives; epoll reports what is left. A side is read only when
all that was read of it before has left.
"""
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport int64_t
from posix.unistd cimport close as close_fd

from clipper_core.runtime.allocation cimport make, make_room
from clipper_core.runtime.machine cimport relaxed
from clipper_core.runtime.reactor cimport (
    EPOLLERR, EPOLLHUP, EPOLLIN, EPOLLOUT, relay_tag, tag_number,
)

cdef extern from *:
    """
    #include <sys/socket.h>
    static inline bool clipper_pair(int* ends, int bytes) {
        if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends)) return false;
        for (int i = 0; i < 2; ++i)
            setsockopt(ends[i], SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
        return true;
    }
    """
    bint make_pair "clipper_pair"(int* ends, int nbytes) noexcept nogil

cdef extern from "<sys/socket.h>" nogil:
    int MSG_NOSIGNAL
    int SHUT_WR
    ssize_t recv(int fd, void* buffer, size_t n, int flags) noexcept
    ssize_t send(int fd, const void* buffer, size_t n, int flags) noexcept
    int shutdown(int fd, int how) noexcept

cdef enum:
    CLIENT = 0                  # the sides of a relay, in its tags
    INNER = 1
    BLOCKED = -1                # of a read or a write
    BROKEN = -2


# -- coming and going
# --------------------------------------------------------------------------------------------------

cdef u64 _tag(const Relay* r, u32 side) noexcept nogil:
    return relay_tag(r.index << 1 | side, r.generation)


cdef bint _place(Relays* relays, Relay* r) noexcept nogil:
    """Give the relay an index, and find it by its id. False: there is no memory."""
    r.index = <u32> relays.relays.size()
    if relays.spare.size():
        r.index = relays.spare.back()
    elif not (make_room(relays.relays, r.index + 1) and make_room(relays.spare, r.index + 1)):
        return False
    if not relays.by_id.put(r.id, r):
        return False
    if relays.spare.size():
        relays.spare.pop_back()
        relays.relays[r.index] = r
    else:
        relays.relays.push_back(r)
    r.generation = relays.opened
    relays.opened += 1
    relays.count.store(relays.by_id.size(), relaxed)
    return True


cdef void _forget(Relays* relays, Relay* r) noexcept nogil:
    relays.by_id.take(r.id)
    relays.relays[r.index] = NULL
    relays.spare.push_back(r.index)
    relays.count.store(relays.by_id.size(), relaxed)


cdef int relay_open(Relays* relays, TlsSession* session, int client, u64 id,
                    bint ended) noexcept nogil:
    cdef int[2] ends
    cdef Relay* r = make[Relay]()
    if r == NULL or not make_pair(ends, RELAY_BYTES):
        del r
        return -1
    r.id = id
    if not _place(relays, r):
        close_fd(ends[0])
        close_fd(ends[1])
        del r
        return -1
    r.client = client
    r.inner = ends[0]
    r.client_ended = ended
    if not (relays.reactor.watch(client, 0, _tag(r, CLIENT))
            and relays.reactor.watch(r.inner, 0, _tag(r, INNER))):
        relays.reactor.unwatch(client)
        _forget(relays, r)
        close_fd(ends[0])
        close_fd(ends[1])
        del r
        return -1
    r.session = session
    _watch(relays, r)
    return ends[1]


cdef void _close(Relays* relays, Relay* r) noexcept nogil:
    """Close both sides. Who reads the inner end sees its end."""
    relays.reactor.close(r.client)
    relays.reactor.close(r.inner)
    _forget(relays, r)
    del r.session
    del r


cdef void relays_close(Relays* relays) noexcept nogil:
    cdef size_t i
    for i in range(relays.relays.size()):
        if relays.relays[i] != NULL:
            _close(relays, relays.relays[i])


cdef Relay* relay_take_back(Relays* relays, u64 id, int end) noexcept nogil:
    cdef Relay* r = <Relay*> relays.by_id.get(id)
    cdef Bytes unread
    cdef ssize_t n = 0
    if r == NULL:
        close_fd(end)
        return NULL
    while n >= 0:
        n = _read(end, relays.buffer)
        if n <= 0:
            break
        unread.put(relays.buffer, <u64> n)
    unread.put(r.received.at(), r.received.size())
    unread.lost = unread.lost or r.received.lost
    r.received.take(unread)
    n = 0
    while n >= 0:
        n = _read(r.inner, relays.buffer)
        if n <= 0:
            break
        r.session.write(relays.buffer, <u64> n)
    close_fd(end)
    relays.reactor.unwatch(r.client)
    relays.reactor.close(r.inner)
    _forget(relays, r)
    return r


# -- moving
# --------------------------------------------------------------------------------------------------

cdef ssize_t _read(int fd, u8* to) noexcept nogil:
    """Return how many bytes were read, 0 at their end, BLOCKED or BROKEN."""
    cdef ssize_t n = -1
    while n < 0:
        n = recv(fd, to, RELAY_BYTES, 0)
        if n < 0 and errno != EINTR:
            return BLOCKED if errno == EAGAIN else BROKEN
    return n


cdef ssize_t _write(int fd, Bytes* what) noexcept nogil:
    """Return how many bytes are left, or BROKEN."""
    cdef ssize_t n
    while what.size():
        n = send(fd, what.at(), what.size(), MSG_NOSIGNAL)
        if n >= 0:
            what.drop(<u64> n)
        elif errno == EAGAIN:
            break
        elif errno != EINTR:
            return BROKEN
    return <ssize_t> what.size()


cdef bint _receive(Relays* relays, Relay* r) noexcept nogil:
    """Move bytes from the client to its reader. False: the connection is broken."""
    cdef ssize_t n
    cdef int64_t read
    if r.received.size() == 0 and not r.client_ended:
        n = _read(r.client, relays.buffer)
        if n == BROKEN:
            return False
        r.client_ended = n == 0
        if n > 0:
            r.session.give(relays.buffer, <u64> n)
            read = r.session.read(relays.buffer + RELAY_BYTES, RELAY_BUFFER_BYTES - RELAY_BYTES)
            if read < 0:
                # what was wrong is said in `out`
                _write(r.client, &r.session.out)
                return False
            r.client_ended = r.session.has_ended
            if not r.inner_gone:
                r.received.put(relays.buffer + RELAY_BYTES, <u64> read)
    if r.received.size() and _write(r.inner, &r.received) == BROKEN:
        r.inner_gone = True
        r.received.clear()
    if r.client_ended and not r.client_told and r.received.size() == 0:
        r.client_told = True
        shutdown(r.inner, SHUT_WR)
    return not r.received.lost


cdef bint _answer(Relays* relays, Relay* r, u64 now_us) noexcept nogil:
    """Move bytes from the reader to the client. False: the connection is broken."""
    cdef ssize_t n
    if r.session.out.size() == 0 and not r.inner_ended:
        n = _read(r.inner, relays.buffer)
        if n > 0 and not r.session.write(relays.buffer, <u64> n):
            return False
        if n == 0 or n == BROKEN:
            r.inner_ended = True
            r.session.say_end()
    n = _write(r.client, &r.session.out)
    if n == BROKEN:
        return False
    if n:
        r.stalled_us = r.stalled_us or now_us
        return True
    r.stalled_us = 0
    r.session.out.shrink(RELAY_BYTES)
    if r.inner_ended and not r.inner_told:
        r.inner_told = True
        r.told_us = now_us
        shutdown(r.client, SHUT_WR)
    return True


cdef void _watch(Relays* relays, Relay* r) noexcept nogil:
    """Have the reactor report what can be moved next."""
    cdef u32 client = EPOLLOUT if r.session.out.size() else 0
    cdef u32 inner = EPOLLOUT if r.received.size() else 0
    if r.received.size() == 0 and not r.client_ended:
        client |= EPOLLIN
    if r.session.out.size() == 0 and not r.inner_ended:
        inner |= EPOLLIN
    if client != r.client_watched:
        r.client_watched = client
        relays.reactor.change(r.client, client, _tag(r, CLIENT))
    if inner != r.inner_watched and not r.inner_gone:
        r.inner_watched = inner
        relays.reactor.change(r.inner, inner, _tag(r, INNER))


cdef void relay_handle(Relays* relays, u64 tag, u32 events, u64 now_us) noexcept nogil:
    cdef u32 index = tag_number(tag) >> 1
    cdef u32 side = tag_number(tag) & 1
    cdef Relay* r = relays.relays[index]
    if r == NULL or _tag(r, side) != tag:
        return
    if side == CLIENT and events & (EPOLLERR | EPOLLHUP):
        # it is broken, or both of its directions have ended
        _close(relays, r)
        return
    if side == INNER and events & (EPOLLERR | EPOLLHUP) and not r.inner_gone:
        # it would be reported again and again; what it has written can still be read
        r.inner_gone = True
        relays.reactor.unwatch(r.inner)
    if not _receive(relays, r):
        _close(relays, r)
        return
    while True:
        if not _answer(relays, r, now_us):
            _close(relays, r)
            return
        if not r.inner_gone or r.inner_ended or r.session.out.size():
            break
    if r.inner_told and r.client_ended:
        _close(relays, r)
        return
    _watch(relays, r)


cdef void relays_check_times(Relays* relays, u64 now_us, u64 idle_us) noexcept nogil:
    cdef size_t i
    cdef Relay* r
    for i in range(relays.relays.size()):
        r = relays.relays[i]
        if r == NULL:
            continue
        if (r.session.out.size() and now_us > r.stalled_us + idle_us) or (
                r.inner_told and r.inner_gone and now_us > r.told_us + LINGER_US):
            _close(relays, r)
