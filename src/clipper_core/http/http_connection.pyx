"""Reading, answering in order, and handing over.

A connection is here as long as its requests are in the table of routes, in the plainest of HTTP.
The first other request goes to Python with the whole connection: its descriptor, the bytes not yet
used, and how long they have been waiting. That is done between two requests, when every response
before has left, so there is never more than one reader of the bytes, and no request has two. A
connection of HTTP/2 goes with its state and all its streams; the queries that are not answered go
before it, and Python answers them on their streams. Python, which knows all of HTTP and every
error, gives a connection back that has sent plain requests only for a while.

Memory that runs out costs one request, not the server: it is answered by 503, or its connection is
closed when there is no memory for that either.

With TLS, the bytes of a client are decrypted as they are read, and encrypted as they are sent; in
between nothing differs. A connection that goes to Python leaves its TLS here: Python gets one end
of a pair of sockets, whose bytes are relayed, and gives it back.

A query that ends in anything but a plain prediction stays here and has its response made there:
under overload, when many do, their connections must not all move.

Limits are Python's, from the same settings. Times are looked at every `check_us`; what is late goes
to Python, which reports it.
"""
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport int64_t
from posix.unistd cimport close as close_fd

from clipper_core.http.hot_calls cimport (
    SEVERAL, TAKEN, HotCall, hot_call_answer, hot_call_ask, hot_call_fail, hot_call_may_be_plain,
    hot_call_slot_ended, hot_calls_adopt, hot_calls_drop, hot_calls_give, hot_calls_lose,
    hot_calls_take,
)
from clipper_core.http.http2_protocol cimport (
    BEGAN, CALL_ENDED, CALLED, CANCEL, CONTROL_BYTES_MAX, ENDED as STREAM_ENDED, HALF_CLOSED,
    OPEN as OPEN_STREAM, INTERNAL_ERROR, SHUT, WENT_ON, Http2Event, Http2State, Http2Stream,
    http2_answer, http2_begins, http2_close, http2_consumed, http2_fail, http2_feed, http2_finish,
    http2_frames, http2_open, http2_unsent, http2_waits_since,
)
from clipper_core.http.http_head cimport HEAD_PLAIN, HEAD_UNFINISHED, Head, head_read
from clipper_core.http.http_route cimport (
    ENDED, OPEN, OTHER, READ, VALUE, Query, QueryOutcome, RouteState, key_in, query_answer,
    query_cancel, query_drop, query_submit, route_at, route_refuse,
)
from clipper_core.http.key_table cimport (
    ADMITTED, NO_KEY, Admission, key_admit, key_standing, key_take_back,
)
from clipper_core.http.json_value cimport large_body_drop, large_body_go_on
from clipper_core.http.query_waits cimport query_next_open, query_wait, query_wait_no_more
from clipper_core.runtime.allocation cimport make, make_room
from clipper_core.runtime.machine cimport acquire, i64, monotonic_us, relaxed, release
from clipper_core.runtime.reactor cimport EPOLLIN, EPOLLOUT, connection_tag, tag_number
from clipper_core.tls.libssl cimport TLS_DONE, TLS_FAILED, TlsOutcome, TlsSession
from clipper_core.tls.relay cimport relay_open
from clipper_core.tls.tls_context cimport (
    SHAKE_FAILED, SHAKE_GONE, SHAKE_PLAIN, SHAKE_SLOW, SHAKEN, HandshakeOutcome,
)
from clipper_core.wire.prediction cimport TAG_NONE

cdef extern from "<cctype>" nogil:
    int isalpha(int character) noexcept

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
    // The kernel, too, keeps no more than so many bytes that have not been sent: without it,
    // megabytes for a client that does not read. Fails on a unix socket, whose buffer is small.
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
    KEPT_BYTES = 65536          # room that an idle connection keeps
    KEPT_TEXT_BYTES = 4096      # and a spare exchange
    WORKER_FROM = 1048576       # bytes of a body from which on Python reads it, on a thread of its
                                # own

cdef const char* NO_MEMORY_RESPONSE = (
    "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/problem+json\r\nretry-after: "
    "1\r\n"
    "content-length: 106\r\nconnection: close\r\n\r\n"
    "{\"type\":\"urn:clipper:error:http-503\",\"title\":\"Service "
    "Unavailable\",\"status\":503,\"detail\":\"out of memory.\"}")

cdef const char* CONTINUE = "HTTP/1.1 100 Continue\r\n\r\n"


# -- coming and going
# --------------------------------------------------------------------------------------------------

cdef void _watch(Worker* w, HttpConnection* connection, u32 events) noexcept nogil:
    if events != connection.watched:
        connection.watched = events
        w.reactor.change(connection.fd, events, connection.tag)


cdef bint _place(Worker* w, HttpConnection* connection) noexcept nogil:
    """Give the connection an index. False: there is no memory. Once it has one, forgetting it needs
    no memory."""
    cdef u32 index = <u32> w.connections.size()
    if w.free_connections.size():
        index = w.free_connections.back()
        w.free_connections.pop_back()
        w.connections[index] = connection
    elif (make_room(w.connections, index + 1) and make_room(w.free_connections, index + 1)
          and make_room(w.touched, index + 1)):
        w.connections.push_back(connection)
    else:
        return False
    connection.tag = connection_tag(index, w.opened)
    w.opened += 1
    return True


cdef HttpConnection* _begin(Worker* w, int fd, u32 returns, LineState line,
                            TlsSession* tls) noexcept nogil:
    """Return a connection. NULL: there is no memory; the descriptor is closed."""
    cdef HttpConnection* connection = make[HttpConnection]()
    if connection == NULL or not _place(w, connection):
        del connection
        del tls
        close_fd(fd)
        return NULL
    connection.fd = fd
    connection.returns = returns
    connection.since_us = monotonic_us()
    connection.watched = EPOLLIN
    connection.line = line
    connection.begun = returns != 0
    connection.tls = tls
    w.shared.held.fetch_add(1, relaxed)
    w.count.fetch_add(1, relaxed)
    if not w.reactor.watch(fd, EPOLLIN, connection.tag):
        http_connection_close(w, connection)
        return NULL
    return connection


cdef HttpConnection* http_connection_open(Worker* w, int fd, u32 returns) noexcept nogil:
    clipper_send_at_once(fd)
    clipper_bound_unsent(fd, w.shared.settings.unsent_bytes_max)
    return _begin(w, fd, returns, UNSEEN if w.shared.secured else IN_PLAIN, NULL)


cdef HttpConnection* http_connection_resume(Worker* w, Relay* relay, u32 returns) noexcept nogil:
    cdef HttpConnection* connection = _begin(w, relay.client, returns, SECURED, relay.session)
    if connection != NULL:
        connection.ended = relay.client_ended
    return connection


cdef void _forget(Worker* w, HttpConnection* connection) noexcept nogil:
    """Drop a connection whose descriptor was handed over, or closed."""
    w.connections[tag_number(connection.tag)] = NULL
    w.free_connections.push_back(tag_number(connection.tag))
    w.shared.held.fetch_sub(1, relaxed)
    w.shared.kept.fetch_sub(connection.kept, relaxed)
    w.count.fetch_sub(1, relaxed)
    if connection.touched:
        _touch_no_more(w, connection)
    if connection.http2 != NULL:
        http2_close(connection.http2)
    del connection.tls
    del connection


cdef void http_connection_close(Worker* w, HttpConnection* connection) noexcept nogil:
    _give_up(w, connection)
    if connection.http2 != NULL:
        hot_calls_lose(&w.calls, connection.http2)
        _tell_all_gone(w)
        _lose_exchanges(w, connection)
    if connection.line == SECURED:
        connection.tls.say_end()
        send(connection.fd, connection.tls.out.at(), connection.tls.out.size(), MSG_NOSIGNAL)
    w.reactor.close(connection.fd)
    _forget(w, connection)


cdef void _hand_over(Worker* w, HttpConnection* connection) noexcept nogil:
    cdef HandedOver* handed = make[HandedOver]()
    cdef int end = connection.fd
    if (handed != NULL and connection.http2 != NULL
            and not make_room(handed.tickets, 2 * connection.http2.streams.size())):
        del handed
        handed = NULL
    if handed != NULL and connection.http2 != NULL:
        _pass_all_to_python(w, connection.http2)
    if handed != NULL:
        w.reactor.unwatch(connection.fd)
        if connection.tls != NULL:
            handed.ticket = w.shared.tickets.fetch_add(1, relaxed)
            handed.ends.look_up(connection.fd)
            end = relay_open(&w.relays, connection.tls, connection.fd, handed.ticket,
                             connection.ended)
    if handed == NULL or end < 0:
        _stay(w, connection, handed)
        return
    connection.tls = NULL
    if connection.http2 != NULL:
        hot_calls_give(&w.calls, connection.http2, &handed.tickets)
        _give_exchanges(w, connection.http2, &handed.tickets)
        handed.http2 = connection.http2
        connection.http2 = NULL
    handed.kind = CONNECTION
    handed.fd = end
    handed.worker = w.number
    handed.returns = connection.returns
    handed.age_us = (w.now_us - connection.since_us if (connection.partial or handed.http2 != NULL)
                     and w.now_us > connection.since_us else 0)
    handed.bytes.take(connection.input)
    w.shared.handing.fetch_add(1, relaxed)
    _forget(w, connection)            # first: it is not to be counted here and there
    if not w.shared.away.put(handed):
        w.shared.handing.fetch_sub(1, relaxed)
        close_fd(handed.fd)
        if handed.http2 != NULL:
            hot_calls_drop(&w.calls, handed.http2)
            http2_close(handed.http2)
        del handed              # Python is at its end, with the queries that have tickets


cdef void _stay(Worker* w, HttpConnection* connection, HandedOver* handed) noexcept nogil:
    """Answer a request that was to be handed over, when there is no memory, or no descriptor, for
    that."""
    if handed != NULL:
        w.reactor.watch(connection.fd, connection.watched, connection.tag)
        del handed
    if connection.http2 != NULL:
        http2_fail(connection.http2, INTERNAL_ERROR, "no memory, or no descriptor is free")
        if _send(w, connection):
            http_connection_close(w, connection)
        return
    connection.leaving = False
    connection.starved = True
    http_connection_settle(w, connection)


# -- handshakes
# --------------------------------------------------------------------------------------------------

cdef void _count_handshake(Worker* w, HandshakeOutcome outcome) noexcept nogil:
    w.shared.handshakes[<int> outcome].fetch_add(1, relaxed)


cdef void _refuse_plain(Worker* w, HttpConnection* connection) noexcept nogil:
    """Let Python tell a client that it has to speak TLS."""
    cdef HandedOver* handed = make[HandedOver]()
    _count_handshake(w, SHAKE_PLAIN)
    if handed == NULL:
        http_connection_close(w, connection)
        return
    w.reactor.unwatch(connection.fd)
    handed.kind = WITHOUT_TLS
    handed.fd = connection.fd
    _forget(w, connection)
    if not w.shared.away.put(handed):
        close_fd(handed.fd)
        del handed


cdef bint _shake(Worker* w, HttpConnection* connection) noexcept nogil:
    """Go on with a handshake by the bytes that were given. Return whether it is done; if not, the
    connection may be closed."""
    cdef TlsOutcome outcome = connection.tls.shake()
    w.shakes += 1
    if outcome == TLS_FAILED:
        _count_handshake(w, SHAKE_FAILED)
        # what was wrong
        send(connection.fd, connection.tls.out.at(), connection.tls.out.size(), MSG_NOSIGNAL)
        http_connection_close(w, connection)
        return False
    if outcome == TLS_DONE:
        _count_handshake(w, SHAKEN)
        connection.line = SECURED
        connection.since_us = w.now_us
        return True
    _settle_handshake(w, connection)
    return False


cdef void _settle_handshake(Worker* w, HttpConnection* connection) noexcept nogil:
    """Send what a handshake has to say."""
    if _send(w, connection):
        _watch(w, connection, EPOLLOUT if connection_unsent(connection) else EPOLLIN)


cdef bint _open_session(Worker* w, HttpConnection* connection) noexcept nogil:
    """Begin a handshake. False: there is no memory, and the connection is closed."""
    connection.tls = make[TlsSession]()
    if connection.tls == NULL or not connection.tls.open(w.tls):
        http_connection_close(w, connection)
        return False
    connection.line = SHAKING
    return True


cdef void _read_secured(Worker* w, HttpConnection* connection) noexcept nogil:
    """Read from a client that speaks TLS."""
    cdef u8* plain = w.buffer + MORE_BYTES
    cdef ssize_t n
    cdef int64_t plain_bytes
    if connection.line != SECURED and w.shakes >= SHAKES_MAX:
        return                  # epoll reports it again
    n = _receive(w, connection, w.buffer, MORE_BYTES)
    if n <= 0:
        return
    if connection.line == UNSEEN:
        # the first byte of TLS is 0x16
        if isalpha(w.buffer[0]):
            _refuse_plain(w, connection)
            return
        if not _open_session(w, connection):
            return
    connection.tls.give(w.buffer, <u64> n)
    if connection.line == SHAKING and not _shake(w, connection):
        return
    plain_bytes = connection.tls.read(plain, BUFFER_BYTES - MORE_BYTES)
    if plain_bytes < 0:
        # it breaks the protocol; say_end would not say why
        send(connection.fd, connection.tls.out.at(), connection.tls.out.size(), MSG_NOSIGNAL)
        connection.tls.out.clear()
        http_connection_close(w, connection)
        return
    connection.ended = connection.ended or connection.tls.has_ended
    if plain_bytes:
        _take(w, connection, plain, <u64> plain_bytes)
    http_connection_settle(w, connection)


# -- exchanges
# --------------------------------------------------------------------------------------------------

cdef Exchange* _exchange(Worker* w) noexcept nogil:
    """Return an exchange; NULL when there is no memory."""
    cdef Exchange* x = w.spare
    if x == NULL:
        return make[Exchange]()
    w.spare = x.next
    return x


cdef void _put_back(Worker* w, Exchange* x) noexcept nogil:
    large_body_drop(x.rest)
    x.rest = NULL
    x.text.clear()
    x.text.shrink(KEPT_TEXT_BYTES)
    x.query.tag.clear()
    x.connection = NULL
    x.stream = 0
    x.next = w.spare
    w.spare = x


cdef void _append(HttpConnection* connection, Exchange* x, bint close) noexcept nogil:
    x.connection = connection
    x.next = NULL
    x.close = close
    if connection.tail == NULL:
        connection.first = x
    else:
        connection.tail.next = x
    connection.tail = x
    connection.open += 1


cdef void _release(Query* q) noexcept nogil:
    """Release a query, which is over."""
    query_drop(q)
    q.route.users.fetch_sub(1, release)


cdef void _over(Exchange* x) noexcept nogil:
    """Release the query, which the exchange does not use any more."""
    _release(&x.query)


cdef void _tell_gone(Worker* w, u64 ticket) noexcept nogil:
    """Have the query of a client cancelled that does not wait any more. Without memory it goes on
    to its deadline."""
    cdef HandedOver* handed = make[HandedOver]()
    if handed == NULL:
        return
    handed.kind = GONE
    handed.ticket = ticket
    handed.fd = -1
    if not w.shared.away.put(handed):
        del handed


cdef void _abandon(Worker* w, Exchange* x) noexcept nogil:
    """Give up a query: no client waits for its response any more."""
    if x.how == NOT_YET:
        query_wait_no_more(&w.waits, &x.query)
        query_cancel(&x.query)
        _over(x)
    elif x.how == BY_PYTHON:
        w.tickets.take(x.key)
    elif x.how == SCHEDULED:
        w.tickets.take(x.key)
        _tell_gone(w, x.key)
    _put_back(w, x)


cdef void _give_up(Worker* w, HttpConnection* connection) noexcept nogil:
    """Give up the queries of a connection."""
    cdef Exchange* x
    while connection.first != NULL:
        x = connection.first
        connection.first = x.next
        _abandon(w, x)
    connection.tail = NULL
    connection.open = 0
    connection.ready_bytes = 0


cdef void _set_ready(Worker* w, Exchange* x) noexcept nogil:
    """Mark an exchange as ready: its response is in `text` and `rest`, and is sent after those
    before it, or on its stream; then it may be over."""
    x.how = READY
    if x.stream:
        _send_on_stream(w, x)
        return
    x.connection.ready_bytes += x.text.size() + (x.rest.bytes if x.rest != NULL else 0)


cdef void _starve(Worker* w, Exchange* x) noexcept nogil:
    """Set the response that there is no memory."""
    x.text.clear()
    x.text.put_text(NO_MEMORY_RESPONSE)
    x.close = True
    _set_ready(w, x)


cdef void _leave(Worker* w, HttpConnection* connection) noexcept nogil:
    """The first response is sent, or in `out`."""
    cdef Exchange* x = connection.first
    connection.first = x.next
    if connection.first == NULL:
        connection.tail = NULL
    connection.open -= 1
    connection.last = x.close
    _put_back(w, x)


cdef void _flush(Worker* w, HttpConnection* connection) noexcept nogil:
    """Write ready responses in the order of their requests, up to one that is not complete."""
    cdef Exchange* x
    while connection.first != NULL and connection.first.how == READY and not connection.last:
        x = connection.first
        connection.ready_bytes -= x.text.size()
        connection.out.put(x.text.at(), x.text.size())
        connection.out.lost = connection.out.lost or x.text.lost
        x.text.clear()
        if x.rest != NULL:
            return
        _leave(w, connection)
    if connection.last:
        _give_up(w, connection)
        connection.input.clear()
        connection.partial = False


cdef inline bint _has_rest(const HttpConnection* connection) noexcept nogil:
    """Return whether a large response has begun to leave."""
    return (connection.first != NULL and connection.first.how == READY
            and connection.first.rest != NULL and not connection.last)


cdef void _go_on(Worker* w, HttpConnection* connection) noexcept nogil:
    """Make the next piece of a large response."""
    cdef Exchange* x = connection.first
    cdef u64 before = connection.out.size()
    cdef bint ended = large_body_go_on(x.rest, &connection.out, PIECE_BYTES, &w.body)
    w.turn_bytes += PIECE_COST * (connection.out.size() - before)
    if ended:
        connection.ready_bytes -= x.rest.bytes
        _leave(w, connection)
        _flush(w, connection)


cdef void _pass_to_python(Worker* w, Exchange* x, const Bytes* rows) noexcept nogil:
    """Pass the query to Python, which returns the response as bytes. rows: of a query that was only
    read; NULL: they have slots."""
    x.key = w.shared.tickets.fetch_add(1, relaxed)
    x.how = BY_PYTHON if rows == NULL else SCHEDULED
    if not w.tickets.put(x.key, x):
        _over(x)
        _starve(w, x)
    elif not _give_query(w, &x.query, rows, x.key, False):
        w.tickets.take(x.key)
        _starve(w, x)


cdef bint _give_query(Worker* w, Query* q, const Bytes* rows, u64 ticket,
                      bint is_call) noexcept nogil:
    """Give a query to Python, which has it from then on. False: there is no memory, or the server
    is at its end; then the query is over. rows: as of `_pass_to_python`"""
    cdef HandedOver* handed = make[HandedOver]()
    if handed == NULL:
        _release(q)
        return False
    handed.kind = ENDING if rows == NULL else ROWS
    handed.worker = w.number
    handed.fd = -1
    handed.ticket = ticket
    handed.is_call = is_call
    handed.query.route = q.route
    handed.query.block = q.block
    handed.query.slot = q.slot
    handed.query.rows = q.rows
    handed.query.binary = q.binary
    handed.query.value = q.value
    handed.query.number = q.number
    handed.query.began_us = q.began_us
    handed.query.fields = q.fields
    handed.query.user.put(q.user.at(), q.user.size())
    handed.query.tag.put(q.tag.at(), q.tag.size())
    q.block = NULL
    q.value.tag = TAG_NONE
    if rows != NULL:
        handed.bytes.put(rows.at(), rows.size())
        w.shared.kept.fetch_add(rows.size(), relaxed)
    if (not (handed.bytes.lost or handed.query.user.lost or handed.query.tag.lost)
            and w.shared.away.put(handed)):
        return True
    if rows != NULL:
        w.shared.kept.fetch_sub(rows.size(), relaxed)
    _release(&handed.query)
    del handed
    return False


cdef void _made_up(Worker* w) noexcept nogil:
    """An id for a request that brought none, as frontend/http/messages makes them."""
    w.made.clear()
    w.made.put(w.shared.prefix.at(), w.shared.prefix.size())
    w.made.put_hex(w.shared.tickets.fetch_add(1, relaxed))


cdef bint _answer(Worker* w, Exchange* x, Bytes* out) noexcept nogil:
    cdef u64 before = out.size()
    x.close = x.close or w.draining
    if x.query.route.form and x.query.fields.id_bytes == 0:
        _made_up(w)
    if not query_answer(&x.query, w.date, &w.made, x.close, &w.body, out, &x.rest):
        return False
    if out.lost:
        out.end -= out.size() - before
    w.turn_bytes += out.size() - before
    if x.rest != NULL:
        w.turn_bytes += x.rest.bytes // LOOKED_THROUGH
    return True


cdef void exchange_slot_ended(Worker* w, Exchange* x) noexcept nogil:
    cdef HttpConnection* connection = x.connection
    if _wait_for_next(w, x):
        return
    if x.how == NOT_YET:
        if _answer(w, x, &x.text):
            _over(x)
            _set_ready(w, x)
        else:
            _pass_to_python(w, x, NULL)
    if connection.first == x and x.how == READY:
        _flush(w, connection)
        http_connection_settle(w, connection)


cdef void _return_late(Worker* w, u64 ticket, const u8* message, u64 n,
                       Bytes* fields) noexcept nogil:
    """Return an answer to Python whose connection has gone there, or is gone. fields: of a call;
    NULL: it is a response."""
    cdef HandedOver* handed = make[HandedOver]()
    if handed == NULL:
        return
    handed.kind = LATE
    handed.fd = -1
    handed.ticket = ticket
    handed.has_message = message != NULL
    handed.bytes.put(message, n)
    if fields != NULL:
        handed.is_call = True
        handed.fields.take(fields[0])
    if not w.shared.away.put(handed):
        del handed


cdef void exchange_answered(Worker* w, u64 ticket, const Bytes* text, bint close) noexcept nogil:
    cdef Exchange* x = <Exchange*> w.tickets.take(ticket)
    cdef HttpConnection* connection
    if x == NULL:
        _return_late(w, ticket, text.at(), text.size(), NULL)
        return
    connection = x.connection
    x.text.put(text.at(), text.size())
    x.close = close or x.close
    _set_ready(w, x)
    if connection.first == x:
        _flush(w, connection)
        http_connection_settle(w, connection)


# -- reading
# --------------------------------------------------------------------------------------------------

cdef inline QueryOutcome _submit(Worker* w, Exchange* x, RouteState* route, const Head* head,
                                 const u8* body, i64 number) noexcept nogil:
    """Submit the query of a request. OTHER: it is Python's, and the exchange is over. number: of
    its key."""
    cdef QueryOutcome came
    x.query.route = route
    x.query.began_us = monotonic_us()
    x.query.binary = False
    x.query.standing = key_standing(w.table.keys, number)
    came = query_submit(&x.query, w.table, head, body, &w.rows, &w.draws)
    if came == OTHER or (came == READ and not _has_memory(w.shared, w.rows.size())):
        _put_back(w, x)
        return OTHER
    route.users.fetch_add(1, relaxed)
    x.close = False
    return came


cdef bint _request(Worker* w, HttpConnection* connection, RouteState* route, const Head* head,
                   const u8* body, i64 number) noexcept nogil:
    """Submit the query, and answer if that is possible at once. False: nothing was submitted,
    Python must handle it. number: of its key."""
    cdef Exchange* x = _exchange(w)
    cdef QueryOutcome came
    if x == NULL:
        connection.starved = True
        return True
    came = _submit(w, x, route, head, body, number)
    if came == OTHER:
        return False
    if (came == VALUE or came == ENDED) and _answer(
            w, x, &connection.out if connection.first == NULL else &x.text):
        _over(x)
        if connection.first == NULL and x.rest == NULL:
            connection.last = x.close
            _put_back(w, x)
            return True
        _append(connection, x, x.close)
        _set_ready(w, x)
        return True
    _append(connection, x, False)
    if came == OPEN:
        _wait(w, x, x.query.slot)
    else:
        _pass_to_python(w, x, &w.rows if came == READ else NULL)
    return True


cdef bint _has_memory(const Shared* s, u64 nbytes) noexcept nogil:
    """Return whether so many more bytes of requests may be kept."""
    return (s.kept.load(relaxed) + s.kept_outside.load(relaxed) + nbytes
            <= s.settings.bodies_bytes_max)


cdef void _wait(Worker* w, Exchange* x, u32 slot) noexcept nogil:
    """Wait for a slot of the query. The slots are waited for one after another: when one has ended,
    those that ended meanwhile need no wait."""
    x.how = NOT_YET
    if not query_wait(&w.waits, &x.query, slot):
        query_cancel(&x.query)
        _over(x)
        _starve(w, x)


cdef bint _wait_for_next(Worker* w, Exchange* x) noexcept nogil:
    """Wait for the next slot, after one that has ended. Return False if there is none."""
    cdef u32 slot = query_next_open(&x.query)
    if slot == x.query.slot + x.query.rows:
        return False
    _wait(w, x, slot)
    return x.how == NOT_YET


cdef bint _has_room(Worker* w, HttpConnection* connection) noexcept nogil:
    """Return whether another request of the connection may be answered: a client that sends without
    end, or does not read, waits."""
    cdef u64 unsent = connection_unsent(connection) + connection.ready_bytes
    if connection.http2 != NULL:
        unsent += http2_unsent(connection.http2)
    return (connection.open < w.shared.settings.pipeline_max
            and unsent < w.shared.settings.unsent_bytes_max)


cdef inline bint _must_wait(const Worker* w, const HttpConnection* connection,
                            bint taken) noexcept nogil:
    """Return whether the next request of the connection must wait for another turn, because this
    turn has made enough. taken: a request of it was taken in this turn."""
    return w.turn_bytes >= TURN_BYTES and (taken or not connection.small)


cdef inline bint _knows_key(Worker* w, const Head* head, i64* number) noexcept nogil:
    """Return whether a request has the key that it needs, if it needs one, and which."""
    if w.table.keys == NULL:
        return True
    number[0] = key_in(w.table, head)
    return number[0] != NO_KEY


cdef void _refuse(Worker* w, HttpConnection* connection, RouteState* route, const Head* head,
                  const Admission* admission) noexcept nogil:
    """Answer a request that its key does not allow."""
    cdef Exchange* x = _exchange(w)
    if x == NULL:
        connection.starved = True
        return
    _made_up(w)
    route_refuse(route, w.table, head, admission, w.date, &w.made, w.draining, &x.text)
    w.turn_bytes += x.text.size()
    _append(connection, x, w.draining)
    _set_ready(w, x)
    if connection.first == x:
        _flush(w, connection)


cdef u64 _parse(Worker* w, HttpConnection* connection, const u8* at, u64 n) noexcept nogil:
    """Parse the complete requests at the beginning of `at`. Return how many bytes they had."""
    cdef Head head
    cdef RouteState* route
    cdef Admission admission
    cdef i64 number = NO_KEY
    cdef u64 used = 0, whole, before
    cdef int found
    connection.full = False
    connection.accepted = True
    if not connection.begun and _begins_http2(w, connection, at, n):
        _feed(w, connection, at, n)
        return n
    while used < n and not connection.last and not connection.starved:
        if not _has_room(w, connection) or _must_wait(w, connection, used != 0):
            connection.full = True
            break
        found = head_read(at + used, n - used, &head)
        if found == HEAD_UNFINISHED and n - used <= w.shared.settings.header_bytes_max:
            connection.accepted = False
            break
        if found != HEAD_PLAIN or head.bytes > w.shared.settings.header_bytes_max:
            connection.leaving = True
            break
        route = route_at(w.table, head.path, head.path_bytes)
        if (route == NULL or head.body_bytes >= WORKER_FROM
            or head.body_bytes > w.shared.settings.body_bytes_max
            or not _knows_key(w, &head, &number)):
            connection.leaving = True
            connection.accepted = connection.open != 0      # otherwise it goes to Python at once
            break
        whole = head.bytes + head.body_bytes
        if whole > n - used:
            break
        admission.outcome = ADMITTED
        if w.table.keys != NULL:
            admission = key_admit(w.table.keys, number, head.path, head.path_bytes,
                                  monotonic_us() * 1000)
        if admission.outcome != ADMITTED:
            _refuse(w, connection, route, &head, &admission)
            used += whole
            continue
        before = w.turn_bytes
        if not _request(w, connection, route, &head, at + used + head.bytes, number):
            if w.table.keys != NULL:
                key_take_back(w.table.keys, &admission)     # Python asks again
            connection.leaving = True
            break
        connection.small = w.turn_bytes - before < SMALL_BYTES and not _has_rest(connection)
        used += whole
    connection.begun = connection.begun or used != 0
    return used


cdef void _count_kept(Worker* w, HttpConnection* connection) noexcept nogil:
    """Count the bytes that wait for the rest of their request, after its head. If all connections
    together keep too many, this one goes to Python, which refuses it."""
    cdef Shared* s = w.shared
    cdef u64 kept = connection.input.size() if connection.accepted else 0
    if connection.http2 != NULL:
        kept = connection.http2.text.size()
    if kept == connection.kept:
        return
    s.kept.fetch_add(kept - connection.kept, relaxed)      # modulo 2^64: it may be less than before
    connection.kept = kept
    if s.kept.load(relaxed) + s.kept_outside.load(relaxed) > s.settings.bodies_bytes_max:
        connection.leaving = connection.leaving or kept != 0


cdef void _note_partial(Worker* w, HttpConnection* connection, bint begins) noexcept nogil:
    """Return whether a request has begun that is not complete; `begins`: not before this turn."""
    cdef bint partial = connection.input.size() != 0 and not connection.full
    if partial and (begins or not connection.partial):
        connection.since_us = w.now_us
    connection.partial = partial


cdef void _advance(Worker* w, HttpConnection* connection) noexcept nogil:
    """Go on with the bytes that are kept."""
    cdef u64 used = _parse(w, connection, connection.input.at(), connection.input.size())
    connection.input.drop(used)
    _note_partial(w, connection, used != 0)
    _count_kept(w, connection)


cdef ssize_t _receive(Worker* w, HttpConnection* connection, u8* to, u64 most) noexcept nogil:
    """Return how many bytes were read. 0 or less: none; then the connection was dealt with."""
    cdef ssize_t n = -1
    while n < 0:
        n = recv(connection.fd, to, most, 0)
        if n < 0 and errno == EAGAIN:
            return n
        if n == 0 and connection.line <= SECURED:       # it may still read: it is answered first
            connection.ended = True
            http_connection_settle(w, connection)
            return n
        if n == 0 or (n < 0 and errno != EINTR):
            if connection.line > SECURED:
                _count_handshake(w, SHAKE_GONE)
            http_connection_close(w, connection)
            return n
    if w.version != w.shared.version.load(acquire):
        w.apply_commands(w)
    return n


cdef void _take(Worker* w, HttpConnection* connection, const u8* at, u64 n) noexcept nogil:
    """Take bytes of requests."""
    cdef u64 used
    if connection.http2 != NULL:
        _feed(w, connection, at, n)
        _count_kept(w, connection)
        return
    if connection.input.size():
        connection.input.put(at, n)
        _advance(w, connection)
        return
    used = _parse(w, connection, at, n)
    connection.input.put(at + used, n - used)
    _note_partial(w, connection, True)
    _count_kept(w, connection)


cdef void http_connection_read(Worker* w, HttpConnection* connection) noexcept nogil:
    cdef bint fresh = connection.input.size() == 0
    cdef u8* to
    cdef ssize_t n
    if connection.line != IN_PLAIN:
        _read_secured(w, connection)
        return
    to = w.buffer if fresh else connection.input.reserve(MORE_BYTES)
    if to == NULL:
        http_connection_settle(w, connection)                    # its input says that it is lost
        return
    n = _receive(w, connection, to, BUFFER_BYTES if fresh else MORE_BYTES)
    if n <= 0:
        return
    if fresh:
        _take(w, connection, to, <u64> n)
    else:
        connection.input.end += <u64> n
        _advance(w, connection)
    http_connection_settle(w, connection)


# -- HTTP/2
# --------------------------------------------------------------------------------------------------

cdef void _tell_all_gone(Worker* w) noexcept nogil:
    """Have the calls cancelled that Python has, and for whose answers nobody waits any more."""
    cdef size_t i
    for i in range(w.calls.gone.size()):
        _tell_gone(w, w.calls.gone[i])
    w.calls.gone.clear()


cdef void _pass_call(Worker* w, HotCall* x) noexcept nogil:
    """Pass a call's query to Python, which returns the reply. Without memory the call fails."""
    cdef u64 ticket = w.shared.tickets.fetch_add(1, relaxed)
    cdef Bytes none
    if not hot_call_ask(&w.calls, x, ticket):
        _release(&x.query)
        hot_call_fail(&w.calls, x)
    elif not _give_query(w, &x.query, &x.rows if x.is_read else NULL, ticket, True):
        hot_call_answer(&w.calls, ticket, NULL, 0, &none)


cdef void _pass_calls(Worker* w) noexcept nogil:
    """Pass on what calls have left for Python."""
    cdef size_t i
    for i in range(w.calls.left.size()):
        _pass_call(w, w.calls.left[i])
    w.calls.left.clear()
    _tell_all_gone(w)


cdef void http_call_answered(Worker* w, u64 ticket, const u8* message, u64 n,
                             Bytes* fields) noexcept nogil:
    cdef void* owner = hot_call_answer(&w.calls, ticket, message, n, fields)
    if owner != NULL:
        _touch(w, <HttpConnection*> owner)
    else:
        _return_late(w, ticket, message, n, fields)


# -- requests on its streams

cdef void _send_on_stream(Worker* w, Exchange* x) noexcept nogil:
    """Send a response, which is made. One that has a rest takes its turns."""
    cdef HttpConnection* connection = x.connection
    cdef Http2State* h = connection.http2
    cdef Http2Stream* stream = <Http2Stream*> h.by_id.get(x.stream)
    cdef bint is_sent
    stream.call = NULL
    stream.silent = True
    if x.text.lost:
        http2_finish(h, x.stream, INTERNAL_ERROR)
        is_sent = False
    else:
        is_sent = http2_answer(h, x.stream, x.text.at(), x.text.size())
    _touch(w, connection)
    x.text.clear()
    if not is_sent or x.rest == NULL:
        _put_back(w, x)
        return
    stream.call = x
    stream.silent = False
    x.next = NULL
    if connection.rests == NULL:
        connection.rests = x
    else:
        connection.last_rest.next = x
    connection.last_rest = x


cdef void _forget_rest(HttpConnection* connection, Exchange* x) noexcept nogil:
    """Remove an exchange from those that have rests."""
    cdef Exchange* before = NULL
    cdef Exchange* at = connection.rests
    while at != NULL and at != x:
        before = at
        at = at.next
    if at == NULL:
        return
    if before == NULL:
        connection.rests = x.next
    else:
        before.next = x.next
    if connection.last_rest == x:
        connection.last_rest = before


cdef bint _has_rest_room(Worker* w, HttpConnection* connection) noexcept nogil:
    """Return whether more of a large response may be written: one whose client reads."""
    cdef Exchange* x = connection.rests
    cdef Http2Stream* stream
    if x == NULL or http2_unsent(connection.http2) >= w.shared.settings.unsent_bytes_max:
        return False
    while x != NULL:
        stream = <Http2Stream*> connection.http2.by_id.get(x.stream)
        if stream.answer.body.size() < STREAM_BYTES:
            return True
        x = x.next
    return False


cdef void _write_rest(Worker* w, HttpConnection* connection) noexcept nogil:
    """Write a piece of the first large response that has room. It is the last one then."""
    cdef Http2State* h = connection.http2
    cdef Exchange* x = connection.rests
    while (<Http2Stream*> h.by_id.get(x.stream)).answer.body.size() >= STREAM_BYTES:
        x = x.next
    _forget_rest(connection, x)
    if large_body_go_on(x.rest, &x.text, PIECE_BYTES, &w.body):
        large_body_drop(x.rest)
        x.rest = NULL
    w.turn_bytes += PIECE_COST * x.text.size()
    _send_on_stream(w, x)


cdef void _drop_rests(Worker* w, HttpConnection* connection) noexcept nogil:
    """Reset the streams of large responses whose windows can open no more: the client sends
    nothing. One that is gone answers that by a reset of its connection."""
    cdef Exchange* x
    cdef Http2Stream* stream
    while connection.rests != NULL:
        x = connection.rests
        connection.rests = x.next
        stream = <Http2Stream*> connection.http2.by_id.get(x.stream)
        stream.call = NULL
        stream.silent = True
        http2_finish(connection.http2, x.stream, CANCEL)
        _put_back(w, x)
    _touch(w, connection)


cdef bint _may_be_plain(Worker* w, const u8* at, u64 n) noexcept nogil:
    """Return whether a request, which begins so, may be plain. Its head is complete."""
    cdef Head head
    cdef i64 number = NO_KEY
    return (head_read(at, n, &head) == HEAD_PLAIN
            and head.body_bytes <= min(HELD_BYTES_MAX, w.shared.settings.body_bytes_max)
            and route_at(w.table, head.path, head.path_bytes) != NULL
            and _knows_key(w, &head, &number))


cdef bint _begin_exchange(Worker* w, HttpConnection* connection, Http2Stream* stream,
                          RouteState* route, const Head* head, const u8* body,
                          i64 number) noexcept nogil:
    """Submit the query of a stream, and answer if that is possible at once. False: nothing was
    submitted, Python must handle it. number: of its key."""
    cdef Exchange* x = _exchange(w)
    cdef QueryOutcome came = OTHER
    if x != NULL:
        came = _submit(w, x, route, head, body, number)
    if came == OTHER:
        return False
    x.connection = connection
    x.stream = stream.id
    stream.call = x
    if (came == VALUE or came == ENDED) and _answer(w, x, &x.text):
        _over(x)
        _set_ready(w, x)
    elif came == OPEN:
        _wait(w, x, x.query.slot)
    else:
        _pass_to_python(w, x, &w.rows if came == READ else NULL)
    return True


cdef bint _take_request(Worker* w, HttpConnection* connection, const Http2Event* began,
                        const Http2Event* went) noexcept nogil:
    """Begin a request, which is complete. went: the rest of its body; NULL: there is none. Return
    False if it is Python's; then nothing has changed."""
    cdef Http2State* h = connection.http2
    cdef Http2Stream* stream = <Http2Stream*> h.by_id.get(began.stream)
    cdef const u8* body
    cdef u64 body_bytes
    cdef Head head
    cdef RouteState* route
    cdef Admission admission
    cdef i64 number = NO_KEY
    cdef Exchange* x
    if head_read(h.text.at() + began.at, began.bytes, &head) != HEAD_PLAIN:
        return False
    body = h.text.at() + began.at + head.bytes
    body_bytes = began.bytes - head.bytes
    if went != NULL and body_bytes == 0:
        body = h.text.at() + went.at
        body_bytes = went.bytes
    route = route_at(w.table, head.path, head.path_bytes)
    if (route == NULL or head.body_bytes != body_bytes
            or body_bytes > w.shared.settings.body_bytes_max or not _knows_key(w, &head, &number)):
        return False
    admission.outcome = ADMITTED
    if w.table.keys != NULL:
        admission = key_admit(w.table.keys, number, head.path, head.path_bytes,
                              monotonic_us() * 1000)
    if admission.outcome == ADMITTED:
        if _begin_exchange(w, connection, stream, route, &head, body, number):
            return True
        if w.table.keys != NULL:
            key_take_back(w.table.keys, &admission)     # Python asks again
        return False
    x = _exchange(w)
    if x == NULL:
        return False
    x.connection = connection
    x.stream = stream.id
    _made_up(w)
    route_refuse(route, w.table, &head, &admission, w.date, &w.made, w.draining, &x.text)
    w.turn_bytes += x.text.size()
    _set_ready(w, x)
    return True


cdef bint _note_requests(Worker* w, HttpConnection* connection) noexcept nogil:
    """Note where the heads of requests are, and their bodies; give up those that their clients
    have reset, and forget those that nobody has begun. Return whether there are heads."""
    cdef Http2State* h = connection.http2
    cdef Http2Stream* stream
    cdef Http2Event* event
    cdef Exchange* x
    cdef size_t i
    cdef bint found = False
    for i in range(h.events.size()):
        event = &h.events[i]
        if event.kind == STREAM_ENDED and event.call != NULL and not event.is_call:
            x = <Exchange*> event.call
            _forget_rest(connection, x)
            _abandon(w, x)
            event.kind = TAKEN
            continue
        stream = <Http2Stream*> h.by_id.get(event.stream)
        if stream == NULL and event.call == NULL:
            http2_consumed(h, event.stream, event.credit)
            event.kind = TAKEN
        elif (event.kind == BEGAN or event.kind == WENT_ON) and not stream.is_call:
            if event.kind == BEGAN:
                found = True
                stream.called_at = <u32> (i + 1)
                stream.went_at = 0
            else:
                stream.went_at = <u32> (i + 1) if stream.went_at == 0 else SEVERAL
    return found


cdef bint _take_requests(Worker* w, HttpConnection* connection) noexcept nogil:
    """Take the events of plain requests that are complete, and answer them, or wait. Return whether
    there were any."""
    cdef Http2State* h = connection.http2
    cdef Http2Stream* stream
    cdef Http2Event* began
    cdef Http2Event* went
    cdef size_t i
    cdef u64 before, credit
    cdef bint taken = False
    connection.full = False
    if not _note_requests(w, connection):
        return False
    for i in range(h.events.size()):
        began = &h.events[i]
        if began.kind != BEGAN:
            continue
        stream = <Http2Stream*> h.by_id.get(began.stream)
        if stream == NULL or stream.state != HALF_CLOSED or stream.went_at == SEVERAL:
            continue
        if not _has_room(w, connection) or _must_wait(w, connection, taken):
            connection.full = True
            break
        went = &h.events[stream.went_at - 1] if stream.went_at else NULL
        credit = began.credit + (went.credit if went != NULL else 0)
        before = w.turn_bytes
        if not _take_request(w, connection, began, went):
            continue
        connection.small = w.turn_bytes - before < SMALL_BYTES
        taken = True
        began.kind = TAKEN
        if went != NULL:
            went.kind = TAKEN
        http2_consumed(h, began.stream, credit)
    return taken


cdef void _pass_all_to_python(Worker* w, Http2State* h) noexcept nogil:
    """Pass the queries that wait here to Python, which waits for them."""
    cdef size_t i
    cdef Exchange* x
    # from the last one: a stream that ends takes the last one to its place
    for i in range(h.streams.size(), 0, -1):
        x = <Exchange*> h.streams[i - 1].call
        if x != NULL and not h.streams[i - 1].is_call and x.how == NOT_YET:
            query_wait_no_more(&w.waits, &x.query)
            _pass_to_python(w, x, NULL)


cdef void _give_exchanges(Worker* w, Http2State* h, vector[u64]* tickets) noexcept nogil:
    """Let the queries that Python has go with their connection. tickets: as of hot_calls_give"""
    cdef size_t i
    cdef Exchange* x
    for i in range(h.streams.size()):
        x = <Exchange*> h.streams[i].call
        if x == NULL or h.streams[i].is_call:
            continue
        tickets.push_back(x.key)
        tickets.push_back(x.stream)
        w.tickets.take(x.key)
        h.streams[i].call = NULL
        _put_back(w, x)


cdef void _lose_exchanges(Worker* w, HttpConnection* connection) noexcept nogil:
    """Give up the queries of a connection that is gone."""
    cdef Http2State* h = connection.http2
    cdef size_t i
    connection.rests = NULL
    for i in range(h.streams.size()):
        if h.streams[i].call != NULL and not h.streams[i].is_call:
            _abandon(w, <Exchange*> h.streams[i].call)
            h.streams[i].call = NULL


# -- a connection of HTTP/2

cdef void _touch(Worker* w, HttpConnection* connection) noexcept nogil:
    """Settle the connection at the end of this turn, so that what the turn answers leaves
    together."""
    if not connection.touched:
        connection.touched = True
        w.touched.push_back(connection)         # there is room for all


cdef void _touch_no_more(Worker* w, HttpConnection* connection) noexcept nogil:
    cdef size_t i
    for i in range(w.touched.size()):
        if w.touched[i] == connection:
            w.touched[i] = w.touched.back()
            w.touched.pop_back()
            return


cdef bint _begins_http2(Worker* w, HttpConnection* connection, const u8* at, u64 n) noexcept nogil:
    """Return whether the connection speaks HTTP/2 from here on. Without memory for that, it is
    Python's."""
    if w.draining or not http2_begins(at, n):
        return False
    connection.http2 = http2_open(&w.shared.http2, w.now_us)
    return connection.http2 != NULL


cdef void _feed(Worker* w, HttpConnection* connection, const u8* at, u64 n) noexcept nogil:
    """Read frames, and answer the calls that they complete."""
    cdef Http2State* h = connection.http2
    http2_feed(h, at, n, w.now_us)
    if h.events.size():
        _take_calls(w, connection)
    connection.leaving = connection.leaving or h.state == SHUT


cdef bint _is_partial(Worker* w, Http2State* h, const Http2Event* event) noexcept nogil:
    """Return whether an event is that of a request that may be plain, and is not complete."""
    cdef const Http2Stream* stream = <const Http2Stream*> h.by_id.get(event.stream)
    if stream == NULL or event.kind == CALL_ENDED:
        return False
    if event.kind == CALLED:
        return hot_call_may_be_plain(h, event)
    if event.kind == BEGAN:
        return stream.state == OPEN_STREAM and _may_be_plain(w, h.text.at() + event.at, event.bytes)
    return event.kind == WENT_ON


cdef bint _are_partial(Worker* w, Http2State* h) noexcept nogil:
    """Return whether all events that are left are those of such requests."""
    cdef size_t i
    for i in range(h.events.size()):
        if not _is_partial(w, h, &h.events[i]):
            return False
    return True


cdef void _hold(Worker* w, HttpConnection* connection) noexcept nogil:
    """Wait for the rest of the requests whose events are left."""
    cdef Http2State* h = connection.http2
    cdef u64 until_us = w.now_us + HELD_US
    cdef size_t i
    for i in range(h.events.size()):
        if h.events[i].kind == CALLED:
            until_us = w.now_us + HELD_CALL_US
            break
    if (connection.held_until_us == 0 or connection.held_stream != h.events[0].stream
            or until_us < connection.held_until_us):
        connection.held_stream = h.events[0].stream
        connection.held_until_us = until_us
    if w.holds_until_us == 0 or connection.held_until_us < w.holds_until_us:
        w.holds_until_us = connection.held_until_us


cdef void _take_calls(Worker* w, HttpConnection* connection) noexcept nogil:
    """Answer the plain requests among the events, and the plain calls."""
    cdef Http2State* h = connection.http2
    cdef bint found = _take_requests(w, connection)
    w.calls.is_full = not _has_memory(w.shared, 0)      # then Python refuses them
    if hot_calls_take(&w.calls, h, w.calls_table, connection) or found:
        connection.since_us = w.now_us
    _pass_calls(w)
    if h.events.size() == 0 or connection.full:
        connection.held_until_us = 0
    elif h.text.size() > HELD_BYTES_MAX or not _are_partial(w, h):
        connection.leaving = True
    else:
        _hold(w, connection)


cdef void http_connection_go_on(Worker* w, HttpConnection* connection, Http2State* state,
                                Bytes* received) noexcept nogil:
    if connection == NULL:
        if state != NULL:
            hot_calls_drop(&w.calls, state)
            http2_close(state)
        return
    if state == NULL:
        connection.input.take(received[0])
        _advance(w, connection)
        http_connection_settle(w, connection)
        return
    connection.http2 = state
    hot_calls_adopt(&w.calls, state, connection)
    _pass_calls(w)
    connection.leaving = w.draining
    if received.lost:
        http2_fail(state, INTERNAL_ERROR, "no memory for the connection")
    _feed(w, connection, received.at(), received.size())
    _count_kept(w, connection)
    _touch(w, connection)


cdef void http_call_slot_ended(Worker* w, HotCall* call) noexcept nogil:
    cdef HttpConnection* connection = <HttpConnection*> call.owner
    if hot_call_slot_ended(&w.calls, call):
        _pass_calls(w)
        _touch(w, connection)


cdef void _settle_http2(Worker* w, HttpConnection* connection) noexcept nogil:
    """Send frames, or go, or close."""
    cdef Http2State* h = connection.http2
    cdef bint more, sent
    if h.state == SHUT:
        _lose_exchanges(w, connection)
    if connection.rests == NULL and (
            connection.leaving or (connection.ended and h.streams.size())):
        _hand_over(w, connection)
        return
    http2_frames(h, TURN_BYTES)
    if h.out.lost:
        http_connection_close(w, connection)
        return
    more = (h.out.size() >= TURN_BYTES or _has_rest_room(w, connection)
            or (connection.full and _has_room(w, connection)))
    sent = connection_unsent(connection) != 0
    if sent and not _send(w, connection):
        return
    if connection.rests != NULL:
        connection.stalled_us = connection.stalled_us or w.now_us
        if connection.ended and not more and connection_unsent(connection) == 0:
            _drop_rests(w, connection)
            return
    if connection_unsent(connection) == 0 and h.streams.size() == 0:
        if connection.ended or h.left:
            http_connection_close(w, connection)
            return
        h.out.shrink(KEPT_BYTES)
        if sent:
            connection.since_us = w.now_us
    _watch(w, connection, (EPOLLOUT if more or connection_unsent(connection) else 0)
           | (0 if connection.ended or connection_unsent(connection) > CONTROL_BYTES_MAX
              else EPOLLIN))


cdef void http_connections_settle(Worker* w) noexcept nogil:
    cdef HttpConnection* connection
    while w.touched.size():
        connection = w.touched.back()
        w.touched.pop_back()
        connection.touched = False
        _settle_http2(w, connection)


cdef void http_connections_check_held(Worker* w) noexcept nogil:
    cdef size_t i
    cdef HttpConnection* connection
    w.holds_until_us = 0
    for i in range(w.connections.size()):
        connection = w.connections[i]
        if connection == NULL or connection.held_until_us == 0:
            continue
        if w.now_us >= connection.held_until_us:
            connection.leaving = True
            _touch(w, connection)
        elif w.holds_until_us == 0 or connection.held_until_us < w.holds_until_us:
            w.holds_until_us = connection.held_until_us
    http_connections_settle(w)


cdef void _check_http2_times(Worker* w, HttpConnection* connection) noexcept nogil:
    """Close a client that does not read. Python says goodbye to others whose time is over."""
    cdef const Settings* s = &w.shared.settings
    cdef u64 since_us = http2_waits_since(connection.http2)
    if connection_unsent(connection) or connection.rests != NULL:
        if w.now_us > connection.stalled_us + s.idle_us:
            http_connection_close(w, connection)
        return
    if (since_us and w.now_us > since_us + s.header_us) or (
            connection.http2.streams.size() == 0 and w.now_us > connection.since_us + s.idle_us):
        connection.leaving = True
        _touch(w, connection)


# -- settling
# --------------------------------------------------------------------------------------------------

cdef inline Bytes* _out_of(HttpConnection* connection) noexcept nogil:
    """Return what is to be sent, before it is encrypted."""
    return &connection.out if connection.http2 == NULL else &connection.http2.out


cdef bint _encrypt(Worker* w, HttpConnection* connection) noexcept nogil:
    """Encrypt what is queued, as far as it is sent at once. Return False if the connection was
    closed."""
    cdef Bytes* out = _out_of(connection)
    cdef u64 n = min(out.size(), <u64> TURN_BYTES)
    if connection.tls.out.size() == 0 and n:
        if not connection.tls.write(out.at(), n):
            http_connection_close(w, connection)
            return False
        out.drop(n)
    return True


cdef bint _send(Worker* w, HttpConnection* connection) noexcept nogil:
    """Send what is queued. Return False if the connection was closed."""
    cdef ssize_t n
    cdef Bytes* out = _out_of(connection) if connection.tls == NULL else &connection.tls.out
    while connection_unsent(connection):
        if connection.tls != NULL and not _encrypt(w, connection):
            return False
        n = send(connection.fd, out.at(), out.size(), MSG_NOSIGNAL)
        if n < 0 and errno == EINTR:
            continue
        if n < 0 and errno == EAGAIN:
            connection.stalled_us = connection.stalled_us or w.now_us
            return True
        if n < 0:
            http_connection_close(w, connection)
            return False
        connection.stalled_us = 0
        out.drop(<u64> n)
    connection.stalled_us = 0
    return True


cdef void _answer_starved(HttpConnection* connection) noexcept nogil:
    """Answer 503 after the earlier responses, and nothing after it."""
    connection.input.clear()
    connection.partial = connection.full = connection.leaving = False
    connection.starved = True
    if connection.open == 0 and not connection.last:
        connection.out.put_text(NO_MEMORY_RESPONSE)
        connection.last = True


cdef void http_connection_settle(Worker* w, HttpConnection* connection) noexcept nogil:
    cdef bint sent
    if connection.line > SECURED:
        _settle_handshake(w, connection)
        return
    if connection.http2 != NULL:
        if connection.full and w.turn_bytes < TURN_BYTES:
            _take_calls(w, connection)
        if w.turn_bytes < TURN_BYTES and _has_rest_room(w, connection):
            _write_rest(w, connection)
        _touch(w, connection)
        return
    if connection.first != NULL and connection.first.how == READY:
        _flush(w, connection)
    if connection.starved or connection.input.lost:
        _answer_starved(connection)
    sent = connection_unsent(connection) != 0
    if connection.out.lost:
        http_connection_close(w, connection)
        return
    if sent and not _send(w, connection):
        return
    if connection_unsent(connection) == 0 and _has_rest(connection) and w.turn_bytes < TURN_BYTES:
        sent = True
        _go_on(w, connection)
        if connection.out.lost:
            http_connection_close(w, connection)
            return
        if not _send(w, connection):
            return
    if connection.full and connection_unsent(connection) == 0 and _has_room(w,
            connection) and not connection.last and w.turn_bytes < TURN_BYTES:
        _advance(w, connection)
        if connection.out.size() and not _send(w, connection):
            return
    if connection_unsent(connection) == 0:
        if connection.open == 0 and (connection.last or (
                connection.ended and not connection.leaving and not connection.full)):
            http_connection_close(w, connection)
            return
        if connection.leaving and connection.open == 0:
            _hand_over(w, connection)
            return
        if sent and connection.open == 0 and not connection.partial:
            connection.since_us = w.now_us
            connection.input.shrink(KEPT_BYTES)
            connection.out.shrink(KEPT_BYTES)
            if connection.tls != NULL:
                connection.tls.out.shrink(KEPT_BYTES)
    if connection_unsent(connection) or _has_rest(connection) or (
            connection.full and not connection.last and _has_room(w, connection)):
        # nothing to send, but more to answer: in the next turn, after the others
        if _has_rest(connection):
            connection.stalled_us = connection.stalled_us or w.now_us
        _watch(w, connection, EPOLLOUT)
    else:
        _watch(w, connection, 0 if connection.leaving or connection.last or connection.full
               or connection.starved or connection.ended else EPOLLIN)


cdef void _probe(Worker* w, HttpConnection* connection) noexcept nogil:
    """Send what a client skips that waits for a response: one that has closed its connection, not
    only its sending side, resets it."""
    connection.probed = True
    connection.out.put_text(CONTINUE)
    http_connection_settle(w, connection)


cdef void http_connection_check_times(Worker* w, HttpConnection* connection) noexcept nogil:
    cdef Settings* s = &w.shared.settings
    if connection.line > SECURED:
        if w.now_us > connection.since_us + s.header_us:
            _count_handshake(w, SHAKE_SLOW)
            http_connection_close(w, connection)
    elif connection.http2 != NULL:
        _check_http2_times(w, connection)
    elif connection_unsent(connection) or _has_rest(connection):
        if w.now_us > connection.stalled_us + s.idle_us:
            http_connection_close(w, connection)
    elif connection.open:
        if connection.ended and not connection.probed:
            _probe(w, connection)
    elif connection.partial:
        if w.now_us > connection.since_us + s.header_us:
            _hand_over(w, connection)
    elif w.now_us > connection.since_us + s.idle_us:
        http_connection_close(w, connection)


cdef void http_connection_drain(Worker* w, HttpConnection* connection) noexcept nogil:
    if connection.http2 != NULL:
        connection.leaving = True
        _touch(w, connection)
        return
    if connection.tail != NULL:
        connection.tail.close = True
    if connection.open or connection_unsent(connection):
        return
    if connection.partial:
        _hand_over(w, connection)
    else:
        http_connection_close(w, connection)
