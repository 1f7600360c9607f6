"""Reading, answering in order, and handing over.

A line is here as long as it asks nothing but what the table of routes knows, in the plainest of
HTTP. The first request that is anything else goes to Python with the whole connection: its
descriptor, the bytes not yet used, and how long they have been waiting. That is done between two
requests, when every response before has left, so there is never more than one reader of the bytes,
and no request has two. Python, which knows all of HTTP and every error, gives a connection back
that has only asked plain things for a while.

Memory that runs out costs one request, not the server: it is answered by 503, or its connection is
closed when there is no memory for that either.

A query that ends in anything but a plain prediction stays here and has its response made there:
under overload, when many do, their connections must not all move.

Limits are Python's, from the same settings. Times are looked at every `look_us`; what is late goes
to Python, which says so.
"""
from libc.errno cimport EAGAIN, EINTR, errno
from libc.string cimport memcpy
from posix.unistd cimport close as close_fd

from clipper_core.http.http_head cimport HEAD_PLAIN, HEAD_UNFINISHED, Head, head_read
from clipper_core.http.http_route cimport (
    OPEN, OTHER, VALUE, Came, RouteState, query_answer, query_ask, query_drop, query_home,
    route_at,
)
from clipper_core.results.delivery cimport (
    DeliveryState, delivery_ring, delivery_tell_outside, slot_ask, slot_boxes, slot_state,
    slot_try_cancel,
)
from clipper_core.runtime.allocation cimport make, make_room
from clipper_core.runtime.machine cimport (
    EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, EPOLLIN, EPOLLOUT, acquire, epoll_ctl,
    epoll_event, monotonic_us, relaxed, release,
)
from clipper_core.runtime.status cimport CANCELLED, OK
from clipper_core.wire.prediction cimport TAG_NONE, Value

cdef extern from "<sys/socket.h>" nogil:
    int MSG_NOSIGNAL
    ssize_t recv(int fd, void* buffer, size_t n, int flags) noexcept
    ssize_t send(int fd, const void* buffer, size_t n, int flags) noexcept

cdef extern from *:
    """
    #include <netinet/in.h>
    #include <netinet/tcp.h>
    static inline void clipper_send_at_once(int fd) {
        int one = 1;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    }
    // The kernel, too, keeps no more than so many bytes that have not been sent: without it, megabytes for a client that does
    // not read. Fails on a unix socket, whose buffer is small.
    static inline void clipper_bound_unsent(int fd, unsigned long long bytes_max) {
    #ifdef TCP_NOTSENT_LOWAT
        int bound = bytes_max < 1 << 30 ? (int) bytes_max : 1 << 30;
        setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &bound, sizeof bound);
    #endif
    }
    """
    void clipper_send_at_once(int fd) noexcept nogil
    void clipper_bound_unsent(int fd, u64 bytes_max) noexcept nogil

cdef enum:
    BUFFER_BYTES = 262144       # of a read
    MORE_BYTES = 65536          # of a read that goes on with a request
    KEPT_BYTES = 65536          # room that an idle line keeps
    KEPT_TEXT_BYTES = 4096      # and a spare exchange
    WORKER_FROM = 1048576       # bytes of a body from which on Python reads it, on a thread of its
                                # own

cdef const char* NO_MEMORY_RESPONSE = (
    "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/problem+json\r\nretry-after: 1\r\n"
    "content-length: 106\r\nconnection: close\r\n\r\n"
    "{\"type\":\"urn:clipper:error:http-503\",\"title\":\"Service Unavailable\",\"status\":503,\"detail\":\"out of memory.\"}")


# -- coming and going
# --------------------------------------------------------------------------------------------------

cdef void _watch(Worker* w, Line* line, u32 events) noexcept nogil:
    cdef epoll_event event
    if events == line.watched:
        return
    line.watched = events
    event.events = events
    event.data.u64 = line.index
    epoll_ctl(w.epoll_fd, EPOLL_CTL_MOD, line.fd, &event)


cdef bint _place(Worker* w, Line* line) noexcept nogil:
    """Give the line an index. False: there is no memory. Once it has one, forgetting it needs no
    memory."""
    cdef size_t n = w.lines.size() + 1
    if w.free_lines.size():
        line.index = w.free_lines.back()
        w.free_lines.pop_back()
        w.lines[line.index] = line
        return True
    if not (make_room(w.lines, n) and make_room(w.freed, n) and make_room(w.free_lines, n)):
        return False
    line.index = <u32> w.lines.size()
    w.lines.push_back(line)
    return True


cdef Line* line_open(Worker* w, int fd, u32 returns) noexcept nogil:
    cdef Line* line = make[Line]()
    cdef epoll_event event
    if line == NULL or not _place(w, line):
        del line
        close_fd(fd)
        return NULL
    line.fd, line.returns, line.since_us, line.watched = fd, returns, monotonic_us(), EPOLLIN
    clipper_send_at_once(fd)
    clipper_bound_unsent(fd, w.shared.settings.unsent_bytes_max)
    event.events = EPOLLIN
    event.data.u64 = line.index
    w.shared.held.fetch_add(1, relaxed)
    w.count.fetch_add(1, relaxed)
    if epoll_ctl(w.epoll_fd, EPOLL_CTL_ADD, fd, &event) < 0:
        line_close(w, line)
        return NULL
    return line


cdef void _forget(Worker* w, Line* line) noexcept nogil:
    """It is not here any more; its descriptor is another's, or closed."""
    w.lines[line.index] = NULL
    w.freed.push_back(line.index)
    w.shared.held.fetch_sub(1, relaxed)
    w.count.fetch_sub(1, relaxed)
    del line


cdef void line_close(Worker* w, Line* line) noexcept nogil:
    cdef epoll_event event
    _give_up(w, line)
    # a fork may hold the descriptor: epoll would not forget it
    epoll_ctl(w.epoll_fd, EPOLL_CTL_DEL, line.fd, &event)
    close_fd(line.fd)
    _forget(w, line)


cdef void _hand_over(Worker* w, Line* line) noexcept nogil:
    cdef Given* given = make[Given]()
    cdef epoll_event event
    if given == NULL:
        line.leaving, line.starved = False, True
        line_settle(w, line)
        return
    epoll_ctl(w.epoll_fd, EPOLL_CTL_DEL, line.fd, &event)
    given.kind, given.fd, given.returns = LINE, line.fd, line.returns
    given.age_us = w.now_us - line.since_us if line.partial and w.now_us > line.since_us else 0
    given.bytes.take(line.input)
    _forget(w, line)            # first: it is not to be counted here and there
    if not w.shared.away.put(given):
        close_fd(given.fd)
        del given


# -- exchanges
# --------------------------------------------------------------------------------------------------

cdef Exchange* _exchange(Worker* w) noexcept nogil:
    """NULL: there is no memory."""
    cdef Exchange* x = w.spare
    if x == NULL:
        return make[Exchange]()
    w.spare = x.next
    return x


cdef void _put_back(Worker* w, Exchange* x) noexcept nogil:
    x.text.clear()
    x.text.shrink(KEPT_TEXT_BYTES)
    x.query.tag.clear()
    x.line = NULL
    x.next = w.spare
    w.spare = x


cdef void _append(Line* line, Exchange* x, bint close) noexcept nogil:
    x.line = line
    x.next = NULL
    x.close = close
    if line.tail == NULL:
        line.first = x
    else:
        line.tail.next = x
    line.tail = x
    line.open += 1


cdef void _over(Exchange* x) noexcept nogil:
    """Its query has no user here any more."""
    query_drop(&x.query)
    x.query.route.users.fetch_sub(1, release)


cdef void _cancel(Exchange* x) noexcept nogil:
    cdef DeliveryState* d = query_home(&x.query)
    if slot_try_cancel(x.query.block[0], x.query.slot, CANCELLED):
        d.answered.fetch_add(1, relaxed)
        delivery_tell_outside(d, slot_boxes(x.query.block[0], x.query.slot))


cdef void _give_up(Worker* w, Line* line) noexcept nogil:
    """Nobody waits for its responses any more: its queries are given up."""
    cdef Exchange* x
    while line.first != NULL:
        x = line.first
        line.first = x.next
        if x.how == NOT_YET:
            w.waiting.take(x.key)
            _cancel(x)
            _over(x)
        elif x.how == BY_PYTHON:
            w.tickets.take(x.key)
        _put_back(w, x)
    line.tail = NULL
    line.open = 0
    line.ready_bytes = 0


cdef void _set_ready(Exchange* x) noexcept nogil:
    """Its response is in `text`, and leaves after those before it."""
    x.how = READY
    x.line.ready_bytes += x.text.size()


cdef void _starve(Exchange* x) noexcept nogil:
    """Its response is that there is no memory."""
    x.text.clear()
    x.text.put_text(NO_MEMORY_RESPONSE)
    x.close = True
    _set_ready(x)


cdef void _flush(Worker* w, Line* line) noexcept nogil:
    """What is ready goes out in the order it was asked for."""
    cdef Exchange* x
    while line.first != NULL and line.first.how == READY and not line.last:
        x = line.first
        line.first = x.next
        if line.first == NULL:
            line.tail = NULL
        line.open -= 1
        line.ready_bytes -= x.text.size()
        line.out.put(x.text.at(), x.text.size())
        line.out.lost = line.out.lost or x.text.lost
        line.last = x.close
        _put_back(w, x)
    if line.last:
        _give_up(w, line)
        line.input.clear()
        line.partial = False


cdef void _ask_python(Worker* w, Exchange* x) noexcept nogil:
    """Its future goes there, and comes back as bytes."""
    cdef Given* given = make[Given]()
    if given == NULL:
        _over(x)
        _starve(x)
        return
    given.kind, given.worker, given.fd = ENDING, w.number, -1
    given.ticket = w.shared.tickets.fetch_add(1, relaxed)
    given.query.route, given.query.block, given.query.slot = x.query.route, x.query.block, x.query.slot
    given.query.binary, given.query.value, given.query.number = x.query.binary, x.query.value, x.query.number
    given.query.began_us, given.query.id_bytes = x.query.began_us, x.query.id_bytes
    memcpy(given.query.id, x.query.id, x.query.id_bytes)
    given.query.tag.put(x.query.tag.at(), x.query.tag.size())
    x.query.block = NULL
    x.query.value.tag = TAG_NONE
    x.how, x.key = BY_PYTHON, given.ticket
    # no memory, or the server is at its end
    if not w.tickets.put(x.key, x) or not w.shared.away.put(given):
        w.tickets.take(x.key)
        _over_given(given)
        _starve(x)


cdef void _over_given(Given* given) noexcept nogil:
    query_drop(&given.query)
    given.query.route.users.fetch_sub(1, release)
    del given


cdef void _made_up(Worker* w) noexcept nogil:
    """An id for a request that brought none, as frontend/http/messages makes them."""
    w.made.clear()
    w.made.put(w.shared.prefix.at(), w.shared.prefix.size())
    w.made.put_hex(w.shared.tickets.fetch_add(1, relaxed))


cdef bint _answer(Worker* w, Exchange* x, const Value* value, u32 latency_us,
                  Bytes* out) noexcept nogil:
    cdef u64 before = out.size()
    x.close = x.close or w.draining
    if x.query.route.form and x.query.id_bytes == 0:
        _made_up(w)
    if not query_answer(&x.query, value, latency_us, w.date, &w.made, x.close, &w.body, out):
        return False
    if out.lost:
        out.end -= out.size() - before
    return True


cdef void exchange_news(Worker* w, Exchange* x) noexcept nogil:
    cdef Line* line = x.line
    cdef Value value
    cdef u32 slot = x.query.slot
    value.word, value.tag = x.query.block.word[slot], x.query.block.tag[slot]
    if (slot_state(x.query.block[0], slot) == OK
            and _answer(w, x, &value, x.query.block.latency_us[slot], &x.text)):
        _over(x)
        _set_ready(x)
    else:
        _ask_python(w, x)
    if line.first == x and x.how == READY:
        _flush(w, line)
        line_settle(w, line)


cdef void exchange_answered(Worker* w, Exchange* x, const Bytes* text, bint close) noexcept nogil:
    cdef Line* line = x.line
    x.text.put(text.at(), text.size())
    x.close = close or x.close
    _set_ready(x)
    if line.first == x:
        _flush(w, line)
        line_settle(w, line)


# -- reading
# --------------------------------------------------------------------------------------------------

cdef bint _request(Worker* w, Line* line, RouteState* route, const Head* head,
                   const u8* body) noexcept nogil:
    """Ask, and answer if that can be done at once. False: it is Python's, and nothing was asked."""
    cdef Exchange* x = _exchange(w)
    cdef Came came
    if x == NULL:
        line.starved = True
        return True
    x.query.route, x.query.began_us, x.query.binary = route, monotonic_us(), False
    came = query_ask(&x.query, head, body, &w.row)
    if came == OTHER:
        _put_back(w, x)
        return False
    route.users.fetch_add(1, relaxed)
    x.close = False
    if came == VALUE and _answer(w, x, &x.query.value, 0,
                                 &line.out if line.first == NULL else &x.text):
        _over(x)
        if line.first == NULL:
            line.last = x.close
            _put_back(w, x)
            return True
        _append(line, x, x.close)
        _set_ready(x)
        return True
    _append(line, x, False)
    if came == OPEN:
        _wait(w, x)
    else:
        _ask_python(w, x)
    return True


cdef void _wait(Worker* w, Exchange* x) noexcept nogil:
    cdef size_t i
    cdef DeliveryState* d = query_home(&x.query)
    x.how = NOT_YET
    x.key = x.query.block.first_id + x.query.slot
    if not (make_room(w.over, w.over.size() + 1) and w.waiting.put(x.key, x)):
        _cancel(x)
        _over(x)
        _starve(x)
        return
    for i in range(w.inboxes.size()):
        if w.inboxes[i].delivery == d:
            if slot_ask(x.query.block[0], x.query.slot, w.inboxes[i].bit):
                delivery_ring(d)
                return
    w.over.push_back(x.key)     # it has ended already


cdef bint _has_room(Worker* w, Line* line) noexcept nogil:
    """Whether another request of the line may be answered: a client that asks without end, or does
    not read, waits."""
    return (line.open < w.shared.settings.pipeline_max
            and line.out.size() + line.ready_bytes < w.shared.settings.unsent_bytes_max)


cdef u64 _parse(Worker* w, Line* line, const u8* at, u64 n) noexcept nogil:
    """Take the whole requests at the beginning of `at`; -> how many bytes they were."""
    cdef Head head
    cdef RouteState* route
    cdef u64 used = 0, whole, before
    cdef int found
    line.full = False
    while used < n and not line.last and not line.starved:
        if not _has_room(w, line) or (used and w.turn_bytes >= TURN_BYTES):
            line.full = True
            break
        found = head_read(at + used, n - used, &head)
        if found == HEAD_UNFINISHED and n - used <= w.shared.settings.header_bytes_max:
            break
        if found != HEAD_PLAIN or head.bytes > w.shared.settings.header_bytes_max:
            line.leaving = True
            break
        route = route_at(w.table, head.path, head.path_bytes)
        if route == NULL or head.body_bytes >= WORKER_FROM or head.body_bytes > w.shared.settings.body_bytes_max:
            line.leaving = True
            break
        whole = head.bytes + head.body_bytes
        if whole > n - used:
            break
        before = line.out.size() + line.ready_bytes
        if not _request(w, line, route, &head, at + used + head.bytes):
            line.leaving = True
            break
        w.turn_bytes += line.out.size() + line.ready_bytes - before
        used += whole
    return used


cdef void _note_partial(Worker* w, Line* line, bint begins) noexcept nogil:
    """Whether a request has begun that is not complete; `begins`: not before this turn."""
    cdef bint partial = line.input.size() != 0 and not line.full
    if partial and (begins or not line.partial):
        line.since_us = w.now_us
    line.partial = partial


cdef void _advance(Worker* w, Line* line) noexcept nogil:
    """Go on with the bytes that are kept."""
    cdef u64 used = _parse(w, line, line.input.at(), line.input.size())
    line.input.drop(used)
    _note_partial(w, line, used != 0)


cdef void line_given(Worker* w, Line* line, const void* data, u64 n) noexcept nogil:
    line.input.put(data, n)
    _advance(w, line)
    line_settle(w, line)


cdef void line_read(Worker* w, Line* line) noexcept nogil:
    cdef bint fresh = line.input.size() == 0
    cdef u8* to = w.buffer if fresh else line.input.reserve(MORE_BYTES)
    cdef ssize_t n = -1
    cdef u64 used
    if to == NULL:
        line_settle(w, line)                    # its input says that it is lost
        return
    while n < 0:
        n = recv(line.fd, to, BUFFER_BYTES if fresh else MORE_BYTES, 0)
        if n < 0 and errno == EAGAIN:
            return
        if n == 0 or (n < 0 and errno != EINTR):
            line_close(w, line)                 # the client is gone, as far as anybody can tell
            return
    if w.version != w.shared.version.load(acquire):
        w.obey(w)
    if fresh:
        used = _parse(w, line, to, <u64> n)
        line.input.put(to + used, <u64> n - used)
        _note_partial(w, line, True)
    else:
        line.input.end += <u64> n
        _advance(w, line)
    line_settle(w, line)


# -- settling
# --------------------------------------------------------------------------------------------------

cdef bint _send(Worker* w, Line* line) noexcept nogil:
    """False: the line is closed."""
    cdef ssize_t n
    while line.out.size():
        n = send(line.fd, line.out.at(), line.out.size(), MSG_NOSIGNAL)
        if n < 0 and errno == EINTR:
            continue
        if n < 0 and errno == EAGAIN:
            line.stalled_us = line.stalled_us or w.now_us
            return True
        if n < 0:
            line_close(w, line)
            return False
        line.stalled_us = 0
        line.out.drop(<u64> n)
    line.stalled_us = 0
    return True


cdef void _answer_starved(Line* line) noexcept nogil:
    """503, once it is this one's turn, and nothing after it."""
    line.input.clear()
    line.partial = line.full = line.leaving = False
    line.starved = True
    if line.open == 0 and not line.last:
        line.out.put_text(NO_MEMORY_RESPONSE)
        line.last = True


cdef void line_settle(Worker* w, Line* line) noexcept nogil:
    cdef bint sent
    if line.first != NULL and line.first.how == READY:
        _flush(w, line)
    if line.starved or line.input.lost:
        _answer_starved(line)
    sent = line.out.size() != 0
    if line.out.lost:
        line_close(w, line)
        return
    if sent and not _send(w, line):
        return
    if line.full and line.out.size() == 0 and _has_room(w, line) and not line.last and w.turn_bytes < TURN_BYTES:
        _advance(w, line)
        if line.out.size() and not _send(w, line):
            return
    if line.out.size() == 0:
        if line.last and line.open == 0:
            line_close(w, line)
            return
        if line.leaving and line.open == 0:
            _hand_over(w, line)
            return
        if sent and line.open == 0 and not line.partial:
            line.since_us = w.now_us
            line.input.shrink(KEPT_BYTES)
            line.out.shrink(KEPT_BYTES)
    if line.out.size() or (line.full and not line.last and _has_room(w, line)):
        _watch(w, line, EPOLLOUT)               # nothing to send, but more to answer: in the next
                                                # turn, after the others
    else:
        _watch(w, line, 0 if line.leaving or line.last or line.full or line.starved else EPOLLIN)


cdef void line_look(Worker* w, Line* line) noexcept nogil:
    cdef Settings* s = &w.shared.settings
    if line.out.size():
        if w.now_us > line.stalled_us + s.idle_us:
            line_close(w, line)
    elif line.open:
        return
    elif line.partial:
        if w.now_us > line.since_us + s.header_us:
            _hand_over(w, line)
    elif w.now_us > line.since_us + s.idle_us:
        line_close(w, line)


cdef void line_drain(Worker* w, Line* line) noexcept nogil:
    if line.open or line.out.size():
        return
    if line.partial:
        _hand_over(w, line)
    else:
        line_close(w, line)
