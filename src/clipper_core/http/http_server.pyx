"""The turns of a worker, and the ways between it and Python.

A turn: sleep until a connection, the post or a mailbox has something; orders first, since a
request after a change must see it; then the connections, then the news of slots. A mailbox is armed
only before a sleep, so that a batch of answers costs one write of an eventfd, and none while the
worker is awake.

Several workers share nothing but the listener's count of connections. Python is notified of
connections and endings by one descriptor, once a batch; it gives them back by posts.
"""
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.errno cimport errno
from libc.stdlib cimport free, malloc
from libcpp.vector cimport vector
from posix.unistd cimport close as close_fd, usleep

import os
import socket
import threading
from typing import NamedTuple

from clipper_core.engine.engine cimport Engine
from clipper_core.http.hot_calls cimport HotCall, HotCalls, hot_calls_close, hot_calls_drop
from clipper_core.http.hpack cimport hpack_put
from clipper_core.http.http2_protocol cimport (
    Http2Protocol, Http2State, http2_close, http2_protocol_of, http2_protocol_release,
)
from clipper_core.http.http_connection cimport (
    CONNECTION, ENDING, GONE, LATE, ROWS, TURN_BYTES, WITHOUT_TLS,
    Exchange, HttpConnection, Settings, connection_unsent,
    exchange_answered, exchange_slot_ended, http_call_answered, http_call_slot_ended,
    http_connection_check_times,
    http_connection_close, http_connection_drain, http_connection_go_on, http_connection_open,
    http_connection_read, http_connection_resume, http_connection_settle,
    http_connections_check_held, http_connections_settle, sockaddr_storage,
)
from clipper_core.http.http_route cimport (
    CALL, FEEDBACK, INFER, PREDICT, HotRoute, HotTable, Query, plain_answers, query_drop,
    query_futures, query_schedule,
)
from clipper_core.http.infer_call cimport call_reply
from clipper_core.http.json_value cimport Text, json_read_f64, json_read_i64
from clipper_core.http.query_waits cimport query_next_ended, waits_add
from clipper_core.http.trace_parent cimport TRACE_PARENT_BYTES, span_new, trace_parent_put
from clipper_core.results.future cimport MailboxReader
from clipper_core.runtime.allocation cimport make
from clipper_core.runtime.histogram cimport Counter
from clipper_core.runtime.machine cimport (
    EFD_CLOEXEC, EFD_NONBLOCK, acquire, eventfd, eventfd_drain, i64, monotonic_us, relaxed, release,
    timer_slack_min, u8,
)
from clipper_core.runtime.reactor cimport (
    EPOLLIN, EPOLLOUT, LISTENER_TAG, RELAY_TAG, WAKE_UP_TAG, epoll_event, tag_kind, tag_number,
    tag_of,
)
from clipper_core.runtime.status cimport NO_MEMORY, raise_for
from clipper_core.tls.relay cimport (
    Relay, relay_handle, relay_take_back, relays_check_times, relays_close,
)
from clipper_core.tls.tls_context cimport HANDSHAKE_OUTCOMES, SHAKE_FULL, TlsContext

cdef extern from *:
    """
    #include <ctime>
    static inline unsigned long long clipper_wall_s() {
        timespec t;
        clock_gettime(CLOCK_REALTIME_COARSE, &t);
        return (unsigned long long) t.tv_sec;
    }
    // As RFC 9110 requires it: 29 characters.
    static inline void clipper_date(unsigned long long wall_s, char* to) {
        static const char* days = "SunMonTueWedThuFriSat";
        static const char* months = "JanFebMarAprMayJunJulAugSepOctNovDec";
        time_t seconds = (time_t) wall_s;
        tm at;
        gmtime_r(&seconds, &at);
        snprintf(to, 40, "%.3s, %02d %.3s %04d %02d:%02d:%02d GMT", days + 3 * at.tm_wday,
                 at.tm_mday, months + 3 * at.tm_mon,
                 1900 + at.tm_year, at.tm_hour, at.tm_min, at.tm_sec);
    }
    """
    u64 wall_s "clipper_wall_s"() noexcept nogil
    void write_date "clipper_date"(u64 wall_s, char* to) noexcept nogil

cdef enum:
    WORKERS_MAX = 64
    ACCEPTS_MAX = 64
    BUFFER_BYTES = 262144
    CHECK_US_MAX = 500000
    LOSE_TRIES = 100            # 1 ms apart: a connection that neither Python nor the core has
                                # memory to answer

cdef u64 NO_BOUND = <u64> -1
cdef u64 POST = tag_of(WAKE_UP_TAG, 0)          # mailboxes come after it


# -- connections
# --------------------------------------------------------------------------------------------------

cdef Worker* _least(Shared* s) noexcept nogil:
    """The worker with the fewest connections."""
    cdef size_t i
    cdef Worker* least = <Worker*> s.workers[0]
    cdef Worker* w
    for i in range(1, s.workers.size()):
        w = <Worker*> s.workers[i]
        if w.count.load(relaxed) < least.count.load(relaxed):
            least = w
    return least


cdef WorkerCommand* _command_new(u32 kind) noexcept nogil:
    """Return a new command; NULL when there is no memory."""
    cdef WorkerCommand* command = make[WorkerCommand]()
    if command == NULL:
        return NULL
    command.kind, command.fd = kind, -1
    return command


cdef void _give_connection(Worker* w, int fd, u32 returns) noexcept nogil:
    cdef WorkerCommand* command = _command_new(ADOPT)
    if command != NULL:
        command.fd, command.returns = fd, returns
        if w.post.put(command):
            return
    close_fd(fd)
    del command


cdef void _to_python(Shared* s, int fd) noexcept nogil:
    """Hand over a connection beyond the limit: Python refuses it."""
    cdef HandedOver* handed = make[HandedOver]()
    if handed != NULL:
        handed.kind, handed.fd = CONNECTION, fd
        s.handing.fetch_add(1, relaxed)
        if s.away.put(handed):
            return
        s.handing.fetch_sub(1, relaxed)
    close_fd(fd)
    del handed


cdef u64 _held(Shared* s) noexcept nogil:
    """Return the number of connections, those that Python holds too."""
    cdef size_t i
    cdef u64 held = s.held.load(relaxed)
    if not s.secured:
        return held + s.outside.load(relaxed)
    for i in range(s.workers.size()):
        held += (<Worker*> s.workers[i]).relays.count.load(relaxed)
    return held


cdef void _accept(Worker* w, u32 listener) noexcept nogil:
    cdef Shared* s = w.shared
    cdef Worker* to
    cdef int fd, _i
    for _i in range(ACCEPTS_MAX):
        fd = w.reactor.accept(listener)
        if fd < 0:
            return
        if _held(s) >= s.settings.connections_max:
            if s.secured:
                s.handshakes[<int> SHAKE_FULL].fetch_add(1, relaxed)
                close_fd(fd)
            else:
                _to_python(s, fd)
            continue
        to = _least(s)
        if to == w:
            http_connection_open(w, fd, 0)
        else:
            _give_connection(to, fd, 0)


# -- orders
# --------------------------------------------------------------------------------------------------

cdef void _close_up(Worker* w) noexcept nogil:
    cdef size_t i
    w.reactor.close_listeners()
    w.draining = True
    for i in range(w.connections.size()):
        if w.connections[i] != NULL:
            http_connection_drain(w, w.connections[i])


cdef void _resume(Worker* w, WorkerCommand* command) noexcept nogil:
    """Take a connection back that Python has held."""
    cdef Relay* relay = relay_take_back(&w.relays, command.ticket, command.fd)
    cdef HttpConnection* connection = NULL
    cdef Bytes none
    if relay == NULL:
        http_connection_go_on(w, NULL, command.http2, &none)
        return
    connection = http_connection_resume(w, relay, command.returns)
    http_connection_go_on(w, connection, command.http2, &relay.received)
    del relay


cdef void _adopt(Worker* w, WorkerCommand* command) noexcept nogil:
    """Take a connection, or one back."""
    cdef HttpConnection* connection = http_connection_open(w, command.fd, command.returns)
    if command.http2 != NULL:
        http_connection_go_on(w, connection, command.http2, &command.bytes)


cdef void _set_calls(Worker* w, TableState* table) noexcept nogil:
    if w.calls_table != NULL:
        w.calls_table.users.fetch_sub(1, release)
    w.calls_table = table


cdef void _apply_command(Worker* w, WorkerCommand* command) noexcept nogil:
    if command.kind == ADOPT:
        _adopt(w, command)
    elif command.kind == ANSWERED:
        exchange_answered(w, command.ticket, &command.bytes, command.close)
    elif command.kind == CALL_ANSWERED:
        http_call_answered(w, command.ticket, command.bytes.at() if command.has_message else NULL,
                           command.bytes.size(), &command.fields)
    elif command.kind == SET_TABLE:
        w.table.users.fetch_sub(1, release)
        w.table = command.table
    elif command.kind == SET_CALLS:
        _set_calls(w, command.table)
    elif command.kind == SET_TLS:
        w.tls.share(command.tls)
    elif command.kind == RESUME:
        _resume(w, command)
    elif command.kind == DRAIN:
        _close_up(w)
    else:
        w.stopping = True
    del command


cdef void _apply_commands(Worker* w) noexcept nogil:
    cdef vector[void*] commands
    cdef size_t i
    w.version = w.shared.version.load(acquire)
    w.post.take_all(commands)
    for i in range(commands.size()):
        _apply_command(w, <WorkerCommand*> commands[i])


cdef void _look_up_table(Worker* w) noexcept nogil:
    """Take new tables in the middle of a turn; other orders wait for the next turn."""
    cdef size_t i, first = w.later.size()
    cdef u64 version = w.shared.version.load(acquire)
    if not w.post.append_to(w.later):
        return
    w.version = version
    for i in range(first, w.later.size()):
        if ((<WorkerCommand*> w.later[i]).kind == SET_TABLE
                or (<WorkerCommand*> w.later[i]).kind == SET_CALLS):
            _apply_command(w, <WorkerCommand*> w.later[i])
            w.later[i] = NULL


cdef void _apply_later_commands(Worker* w) noexcept nogil:
    cdef vector[void*] commands
    cdef size_t i
    commands.swap(w.later)
    for i in range(commands.size()):
        if commands[i] != NULL:
            _apply_command(w, <WorkerCommand*> commands[i])


# -- ended queries
# --------------------------------------------------------------------------------------------------

cdef void _news(Worker* w) noexcept nogil:
    """Handle all ended queries, until the mailboxes are armed."""
    cdef Query* ended = query_next_ended(&w.waits)
    while ended != NULL:
        if ended.route.form == CALL:
            http_call_slot_ended(w, <HotCall*> ended)
        else:
            exchange_slot_ended(w, <Exchange*> ended)
        ended = query_next_ended(&w.waits)


# -- turns
# --------------------------------------------------------------------------------------------------

cdef void _handle(Worker* w, const epoll_event* event) noexcept nogil:
    cdef u64 tag = event.data.u64
    cdef u32 number = tag_number(tag)
    cdef HttpConnection* connection
    if tag == POST:
        _apply_commands(w)
    elif tag_kind(tag) == LISTENER_TAG:
        if not w.draining:
            _accept(w, number)
    elif tag_kind(tag) == WAKE_UP_TAG:
        eventfd_drain(w.waits.inboxes[number - 1].box.fd)
    elif tag_kind(tag) == RELAY_TAG:
        relay_handle(&w.relays, tag, event.events, w.now_us)
    else:
        connection = w.connections[number]
        if connection == NULL or connection.tag != tag:
            return
        if connection.full and connection_unsent(connection) == 0 and w.turn_bytes >= TURN_BYTES:
            return                          # the others come first; epoll reports it again
        if event.events & EPOLLOUT:
            http_connection_settle(w, connection)
        elif event.events & EPOLLIN or connection.watched & EPOLLIN:
            http_connection_read(w, connection)
        else:
            http_connection_close(w, connection)             # it broke while nothing was to be read


cdef void _look(Worker* w) noexcept nogil:
    cdef size_t i
    for i in range(w.connections.size()):
        if w.connections[i] != NULL:
            http_connection_check_times(w, w.connections[i])
    http_connections_settle(w)
    relays_check_times(&w.relays, w.now_us, w.shared.settings.idle_us)


cdef void _turn(Worker* w, u64 until_us) noexcept nogil:
    cdef const epoll_event* events = w.reactor.events
    cdef u64 now = monotonic_us(), second
    cdef int i, k, n
    cdef int first = -1
    n = w.reactor.wait(until_us - now if until_us > now else 0)
    w.now_us = monotonic_us()
    w.turn_bytes, w.turns = 0, w.turns + 1
    w.shakes = 0
    second = wall_s()
    if second != w.date_s:
        w.date_s = second
        write_date(second, w.date)
    for i in range(n):
        if events[i].data.u64 == POST:
            first = i
    if first >= 0:
        _handle(w, &events[first])
    for i in range(n):
        k = <int> ((i + w.turns) % <u64> n)     # another begins in each turn
        if k != first:
            _handle(w, &events[k])
    if w.later.size():
        _apply_later_commands(w)
    _news(w)
    http_connections_settle(w)


cdef void _run(Worker* w) noexcept nogil:
    cdef u64 check_us
    cdef size_t i
    timer_slack_min()
    w.now_us = monotonic_us()
    check_us = w.now_us + w.shared.settings.check_us
    while not w.stopping:
        _turn(w, min(check_us, w.holds_until_us) if w.holds_until_us else check_us)
        if w.holds_until_us and w.now_us >= w.holds_until_us:
            http_connections_check_held(w)
        if w.now_us >= check_us:
            _look(w)
            check_us = w.now_us + w.shared.settings.check_us
    _close_up(w)
    for i in range(w.connections.size()):
        if w.connections[i] != NULL:
            http_connection_close(w, w.connections[i])
    relays_close(&w.relays)


# -- for Python
# --------------------------------------------------------------------------------------------------

class Handed(NamedTuple):
    """A connection that is Python's from now on. data: read and not used.  age_s: since its first
    byte came.  returns: how often it has been here before.  http2: its state, if it speaks HTTP/2,
    for HotCalls.adopt(); age_s is then since its last request was answered; None: it speaks
    HTTP/1.1. queries: the ticket and the stream of each of its queries that were given before: it
    is answered on that stream, no more by its ticket.

    With TLS, fd is one end of a relay, for resume(worker, relay, ...), and ends has the addresses
    of the client and of this server; else relay is 0, and ends empty."""

    fd: int
    data: bytes
    age_s: float
    returns: int
    worker: int
    relay: int
    ends: tuple
    http2: object = None
    queries: tuple = ()


class WithoutTls(NamedTuple):
    """A connection that is Python's from now on: its client has to be told to speak TLS."""

    fd: int


class Read(NamedTuple):
    """A query that was read, and is scheduled and answered by Python, or by respond(). futures: of
    its rows; None for one that is not scheduled.  rows: their inputs then; else None.  error: why
    one could not be scheduled.  user: empty for nobody's.  slo_us, band: of the query.  The others
    are as of an Ending.
    """

    route: object
    futures: object
    rows: object
    error: object
    user: str
    slo_us: int
    id: bytes
    trace: bytes
    began_ns: int
    worker: int
    ticket: int
    tag: bytes
    binary: bool
    band: int


class Feedback(NamedTuple):
    """A label of an answer, which Python learns, and answers by answer() or respond_feedback().
    answer: the answer's id.  The others are as of an Ending."""

    route: object
    answer: str
    label: object
    id: bytes
    trace: bytes
    began_ns: int
    worker: int
    ticket: int


class Gone(NamedTuple):
    """Says that nobody waits for the response of a query that was Read."""

    ticket: int


class Late(NamedTuple):
    """The answer to a query whose connection was Handed before it came, or is gone. message: a
    response; trailers is None. Of a call, both are as of Http2Protocol.reply(), and with empty
    trailers it has failed."""

    ticket: int
    message: object
    trailers: object


class Ending(NamedTuple):
    """A query whose response Python makes, for answer(worker, ticket, ...). futures: of its rows,
    done.  id: X-Request-Id; empty: none came. tag, binary: of infer: the request's own id, as JSON,
    and whether its output goes back as bytes. trace: traceparent, if it names a trace; else
    empty."""

    route: object
    futures: object
    id: bytes
    began_ns: int
    worker: int
    ticket: int
    tag: bytes
    binary: bool
    trace: bytes


cdef object _end_of(const sockaddr_storage* at):
    """Return an address as Python's sockets do; None if it is not known."""
    cdef const u8* raw = <const u8*> at
    cdef u32 port = raw[2] << 8 | raw[3]
    if at.ss_family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, (<const char*> raw)[4:8]), port
    if at.ss_family == socket.AF_INET6:
        return socket.inet_ntop(socket.AF_INET6, (<const char*> raw)[8:24]), port
    return None


cdef tuple _ends_of(const HandedOver* handed):
    if handed.ticket == 0:
        return ()
    return _end_of(&handed.ends.peer), _end_of(&handed.ends.own)


cdef bytes _tag_of(const Query* q):
    """Return the request's own id, of infer as JSON; empty: it is another request."""
    if q.route.form != INFER and q.route.form != CALL or q.tag.size() == 0:
        return b""
    return (<const char*> q.tag.at())[:q.tag.size()]


cdef bytes _id_of(const Query* q):
    """Return X-Request-Id as given; empty: none came."""
    return (<const char*> q.fields.id)[:q.fields.id_bytes]


cdef object _label_of(const Bytes* text):
    """Return the label of feedback, of which this is the JSON."""
    cdef Text rest
    cdef i64 whole = 0
    cdef double real = 0.0
    rest.at = text.at()
    rest.end = rest.at + text.size()
    if rest.at[0] == 34:
        return (<const char*> rest.at)[1:text.size() - 1].decode("ascii")
    if rest.at[0] == 116 or rest.at[0] == 102:
        return rest.at[0] == 116
    if json_read_i64(&rest, &whole):
        return whole
    json_read_f64(&rest, &real)
    return real


cdef str _user_of(Query* q):
    """Return the name of the user; empty: nobody's."""
    return (<const char*> q.user.at())[:q.user.size()].decode("ascii") if q.user.size() else ""


cdef bytes _trace_of(const Query* q):
    """Return traceparent, if it names a trace; else empty."""
    return (<const char*> q.fields.trace)[:TRACE_PARENT_BYTES] if q.fields.traced else b""


cdef tuple _queries_of(const HandedOver* handed):
    cdef size_t i
    return tuple([(handed.tickets[2 * i], handed.tickets[2 * i + 1])
                  for i in range(handed.tickets.size() // 2)])


cdef bytes _bytes_of(const Bytes* of):
    return (<const char*> of.at())[:of.size()] if of.size() else b""


cdef object _late(const HandedOver* handed):
    return Late(handed.ticket, _bytes_of(&handed.bytes) if handed.has_message else None,
                _bytes_of(&handed.fields) if handed.is_call else None)


cdef Worker* _worker_new(Shared* s, u32 number) except NULL:
    cdef Worker* w = make[Worker]()
    if w == NULL:
        raise_for(NO_MEMORY, "no memory for a worker of the HTTP server")
    w.shared, w.number = s, number
    w.draws = int.from_bytes(os.urandom(8), "little")
    w.apply_commands = &_look_up_table
    w.post.fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)
    w.buffer = <u8*> malloc(BUFFER_BYTES)
    if w.buffer == NULL or not (w.reactor.open() and w.reactor.watch(w.post.fd, EPOLLIN, POST)):
        raise_for(NO_MEMORY, "no memory (or no file descriptor) for the HTTP server")
    w.relays.reactor = &w.reactor
    w.relays.buffer = w.buffer
    return w


cdef WorkerCommand* _checked(WorkerCommand* command) except NULL:
    if command == NULL:
        raise_for(NO_MEMORY, "no memory for a command to the HTTP server")
    return command


cdef class HttpServer:
    """The HTTP workers of a server. Threads: run(i) is the body of worker i, one each; the other
    methods any, `take` one at a time.

    finish: what futures of queries that end in Python are made with.  encode: makes JSON of a
    value.  prefix: of request ids that are made up here. Limits are those of `[http]`, of all
    workers together. tls: all connections speak it; None: none does. handshakes: counters, by
    HANDSHAKES.
    """

    def __cinit__(self, engines, u32 workers, bytes prefix, *, double header_s, double idle_s,
                  u64 connections_max,
                  u64 header_bytes_max, u64 body_bytes_max, u32 pipeline_max, u64 unsent_bytes_max,
                  finish, encode, u64 bodies_bytes_max=NO_BOUND, TlsContext tls=None,
                  handshakes=()):
        cdef Settings* s
        cdef u32 i
        if not 1 <= workers <= WORKERS_MAX:
            raise ValueError(f"workers={workers} of the HTTP server: 1 to {WORKERS_MAX}")
        self.engines, self.mailboxes, self.retired, self.finish = list(engines), [], [], finish
        self.encode = encode
        self.draws = int.from_bytes(os.urandom(8), "little")
        self.guard = threading.Lock()
        self.shared = make[Shared]()
        if self.shared == NULL:
            raise_for(NO_MEMORY, "no memory for the HTTP server")
        self.shared.away.fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)
        self.shared.prefix.put(<const char*> prefix, len(prefix))
        self.shared.prefix.put_byte(45)
        self.shared.tickets.store(1, relaxed)
        s = &self.shared.settings
        s.header_us, s.idle_us = <u64> (header_s * 1e6), <u64> (idle_s * 1e6)
        s.check_us = min(<u64> CHECK_US_MAX, min(s.header_us // 4, s.idle_us // 4))
        s.connections_max, s.header_bytes_max, s.body_bytes_max = (connections_max,
                header_bytes_max, body_bytes_max)
        s.bodies_bytes_max = bodies_bytes_max
        s.pipeline_max, s.unsent_bytes_max = pipeline_max, unsent_bytes_max
        self.shared.http2.streams_max = pipeline_max
        self.shared.http2.list_bytes_max = header_bytes_max
        self.table = HotTable({})
        for i in range(workers):
            self.shared.workers.push_back(_worker_new(self.shared, i))
            (<Worker*> self.shared.workers[i]).table = (<HotTable> self.table).state
            (<HotTable> self.table).state.users.fetch_add(1, relaxed)
            for engine in self.engines:
                self._add_mailbox(<Worker*> self.shared.workers[i], engine)
        if tls is not None:
            self._secure(tls, tuple(handshakes))

    cdef int _secure(self, TlsContext tls, tuple handshakes) except -1:
        """Speak TLS. Before run()."""
        cdef int k
        cdef Counter counter
        self.handshakes = handshakes
        for k in range(HANDSHAKE_OUTCOMES):
            counter = handshakes[k]
            self.shared.handshakes[k] = &counter.n
        for k in range(<int> self.shared.workers.size()):
            (<Worker*> self.shared.workers[k]).tls.share(tls.state)
        self.shared.secured = True
        return 0

    cdef int _add_mailbox(self, Worker* w, Engine engine) except -1:
        cdef MailboxReader reader = MailboxReader(engine.completion)
        self.mailboxes.append(reader)
        waits_add(&w.waits, reader)
        w.reactor.watch(reader.box.fd, EPOLLIN, tag_of(WAKE_UP_TAG, <u32> w.waits.inboxes.size()))
        return 0

    def __dealloc__(self):
        cdef size_t i
        cdef Worker* w
        cdef Exchange* x
        if self.shared == NULL:
            return
        for i in range(self.shared.workers.size()):
            w = <Worker*> self.shared.workers[i]
            while w.spare != NULL:
                x = w.spare
                w.spare = x.next
                del x
            hot_calls_close(&w.calls)
            close_fd(w.post.fd)
            free(w.buffer)
            del w
        close_fd(self.shared.away.fd)
        del self.shared

    def run(self, u32 number):
        """Serve until stop(). Takes no GIL in between."""
        cdef Worker* w = <Worker*> self.shared.workers[number]
        with nogil:
            _run(w)

    @property
    def fd(self):
        """An eventfd, readable when take() has something."""
        return self.shared.away.fd

    @property
    def connections(self):
        """Connections that all workers hold."""
        return self.shared.held.load(relaxed)

    @property
    def handing(self):
        """Connections that are on their way to Python: take() has them next."""
        return self.shared.handing.load(relaxed)

    @property
    def outside(self):
        """Connections that Python holds: they count for the limit."""
        return self.shared.outside.load(relaxed)

    @outside.setter
    def outside(self, u64 n):
        self.shared.outside.store(n, relaxed)

    @property
    def kept(self):
        """Bytes of requests that are not complete and that all workers hold."""
        return self.shared.kept.load(relaxed)

    @property
    def kept_outside(self):
        """Bytes of request bodies that Python holds: they count for the limit."""
        return self.shared.kept_outside.load(relaxed)

    @kept_outside.setter
    def kept_outside(self, u64 n):
        self.shared.kept_outside.store(n, relaxed)

    @property
    def relays(self):
        """Connections with TLS that Python holds, or has just let go."""
        cdef size_t i
        cdef u64 count = 0
        for i in range(self.shared.workers.size()):
            count += (<Worker*> self.shared.workers[i]).relays.count.load(relaxed)
        return count

    def listen(self, int fd):
        """Accept from listening socket `fd`, which belongs to the server now. Once, before
        run()."""
        if not (<Worker*> self.shared.workers[0]).reactor.listen(fd):
            raise OSError(errno, f"descriptor {fd} cannot be listened at")

    # -- what is answered here

    def set_table(self, HotTable table):
        """Set the table. Requests that arrive after this call returns are answered by it.

        Raises MemoryError; then some of the workers may have the table before.
        """
        with self.guard:
            self.retired.append(self.table)
            self.table = table
            self._post_table(SET_TABLE, table.state)

    def serve_calls(self, HotCalls calls, u64 ping_us_min):
        """Answer connections of HTTP/2 here, as far as they have plain calls only. Once, before
        run(). calls: of the event loop that serves the others; it has the table of calls, which
        set_calls_table() tells too. ping_us_min: between two pings of a client."""
        cdef size_t i
        cdef Worker* w
        self.calls = calls
        self.shared.calls = calls.shared
        self.shared.http2.calls = True
        self.shared.http2.ping_us_min = ping_us_min
        for i in range(self.shared.workers.size()):
            w = <Worker*> self.shared.workers[i]
            w.calls.shared = calls.shared
            w.calls.waits = &w.waits
            w.calls.draws = int.from_bytes(os.urandom(8), "little")

    def set_calls_table(self, HotTable table):
        """Set the table of calls, as set_table(); the HotCalls keeps it as long as it is used."""
        with self.guard:
            self._post_table(SET_CALLS, table.state)

    cdef int _post_table(self, u32 kind, TableState* table) except -1:
        cdef WorkerCommand* command
        cdef Worker* w
        cdef u32 i
        for i in range(<u32> self.shared.workers.size()):
            w = <Worker*> self.shared.workers[i]
            command = _checked(_command_new(kind))
            command.table = table
            table.users.fetch_add(1, relaxed)
            if w.post.put(command):
                continue
            del command
            table.users.fetch_sub(1, relaxed)
            if not w.post.closed:
                raise_for(NO_MEMORY, "no memory for a command to the HTTP server")
        self.shared.version.fetch_add(1, release)
        return 0

    def set_tls(self, TlsContext tls):
        """Use another certificate for new connections. Of a server that speaks TLS. Raises
        MemoryError; then some of the workers may have it before."""
        cdef WorkerCommand* command
        cdef u32 i
        for i in range(<u32> self.shared.workers.size()):
            command = _checked(_command_new(SET_TLS))
            command.tls.share(tls.state)
            self._command(i, command)

    def sweep(self):
        """Free former tables that no thread uses any more. Return how many are kept."""
        with self.guard:
            self.retired = [table for table in self.retired if table.users]
            return len(self.retired)

    cdef int _command(self, u32 number, WorkerCommand* command) except -1:
        if not (<Worker*> self.shared.workers[number]).post.put(command):
            if command.fd >= 0:
                close_fd(command.fd)
            del command
        return 0

    # -- what is not

    def take(self):
        """Return what is now for Python, in its order: Handed, WithoutTls, Ending, Feedback, Gone,
        Late, and Read for what is not answered at once."""
        cdef vector[void*] items
        cdef size_t i
        cdef HandedOver* handed
        cdef list taken = []
        self.shared.away.take_all(items)
        for i in range(items.size()):
            handed = <HandedOver*> items[i]
            try:
                if handed.kind == CONNECTION:
                    self.shared.handing.fetch_sub(1, relaxed)
                    data = PyBytes_FromStringAndSize(<const char*> handed.bytes.at(),
                                                     <Py_ssize_t> handed.bytes.size())
                    protocol = None
                    if handed.http2 != NULL:
                        protocol = http2_protocol_of(handed.http2)
                        handed.http2 = NULL
                    taken.append(Handed(handed.fd, data, handed.age_us / 1e6, handed.returns,
                                        handed.worker, handed.ticket, _ends_of(handed), protocol,
                                        _queries_of(handed)))
                elif handed.kind == WITHOUT_TLS:
                    taken.append(WithoutTls(handed.fd))
                elif handed.kind == GONE:
                    taken.append(Gone(handed.ticket))
                elif handed.kind == LATE:
                    taken.append(_late(handed))
                elif handed.kind == ROWS and handed.query.route.form == FEEDBACK:
                    taken.append(self._feedback(handed))
                elif handed.kind == ROWS:
                    read = self._schedule(handed)
                    if not self.respond(read):
                        taken.append(read)
                else:
                    taken.append(self._ending(handed))
            except MemoryError:
                self._lose(handed)
            del handed
        return taken

    cdef int _lose(self, HandedOver* handed) except -1:
        """Close the connection of something for which Python has no memory."""
        cdef WorkerCommand* command
        if handed.kind == CONNECTION or handed.kind == WITHOUT_TLS:
            close_fd(handed.fd)
            if handed.http2 != NULL:
                if self.calls is not None:
                    hot_calls_drop(self.calls.state, handed.http2)
                http2_close(handed.http2)
            return 0
        if handed.kind == GONE or handed.kind == LATE:
            return 0
        if handed.kind == ENDING:
            query_drop(&handed.query)
            handed.query.route.users.fetch_sub(1, release)
        for _ in range(LOSE_TRIES):
            command = _command_new(CALL_ANSWERED if handed.is_call else ANSWERED)
            if command != NULL:
                command.ticket, command.close = handed.ticket, True
                if (<Worker*> self.shared.workers[handed.worker]).post.put(command):
                    return 0
                del command
            usleep(1000)
        return 0

    cdef object _ending(self, HandedOver* handed):
        cdef HotRoute route = <HotRoute> handed.query.route.object
        cdef bytes id = _id_of(&handed.query)
        cdef bytes tag = _tag_of(&handed.query)
        cdef object extra = route.subject(id.decode("ascii"), b"" if handed.is_call else tag,
                                          _user_of(&handed.query))
        cdef list futures = query_futures(&handed.query, self.finish, extra)
        ending = Ending(route, futures, id, handed.query.began_us * 1000, handed.worker,
                        handed.ticket,
                        tag, bool(handed.query.binary), _trace_of(&handed.query))
        handed.query.route.users.fetch_sub(1, release)
        return ending

    cdef object _schedule(self, HandedOver* handed):
        """Schedule a query that was read."""
        cdef HotRoute route = <HotRoute> handed.query.route.object
        cdef Query* query = &handed.query
        cdef bytes tag = _tag_of(query)
        # the route is held by this call from here on
        query.route.users.fetch_sub(1, release)
        self.shared.kept.fetch_sub(handed.bytes.size(), relaxed)
        id = _id_of(query)
        name = _user_of(query)
        own = (id or tag[1:-1]).decode("ascii")
        futures, rows, failed = query_schedule(query, &handed.bytes, name, own)
        return Read(route, futures, rows, failed, name, query.fields.slo_us, id, _trace_of(query),
                    query.began_us * 1000, handed.worker, handed.ticket, tag, bool(query.binary),
                    query.fields.band)

    cdef object _feedback(self, HandedOver* handed):
        cdef Query* query = &handed.query
        cdef HotRoute route = <HotRoute> query.route.object
        # the route is held by this call from here on
        query.route.users.fetch_sub(1, release)
        self.shared.kept.fetch_sub(handed.bytes.size(), relaxed)
        answer = (<const char*> query.tag.at())[:query.tag.size()].decode("ascii")
        return Feedback(route, answer, _label_of(&handed.bytes), _id_of(query), _trace_of(query),
                        query.began_us * 1000, handed.worker, handed.ticket)

    def respond_feedback(self, feedback, bint counted):
        """Answer a Feedback that was learned, or that was known. Raises MemoryError."""
        cdef Bytes body
        body.put_text("{\"counted\":true}" if counted else "{\"counted\":false}")
        self._send(feedback.route, feedback, b"", 0, &body)

    def respond(self, read, list futures=None):
        """Answer a query that was Read and whose futures are done. Return False if its response is
        to be made in Python. futures: None: those of `read`."""
        cdef HotRoute route = read.route
        cdef Bytes body
        cdef u64 json_bytes = 0
        cdef list answers
        if futures is None:
            futures = read.futures
        if read.error is not None:
            return False
        answers = plain_answers(futures)
        if route.state.form == CALL:
            return self._respond_to_call(route, read, answers)
        if answers is None or not route._answer_body(answers, read.id, read.tag, read.binary,
                                                     self.encode, &json_bytes, &body):
            return False
        own = answers[0].id.encode("ascii") if route.state.form == PREDICT else b""
        self._send(route, read, own, json_bytes, &body)
        return True

    cdef bint _respond_to_call(self, HotRoute route, object read, list answers) except -1:
        """Count and send the reply to a call that was read. False: Python must make it."""
        cdef WorkerCommand* command = _checked(_command_new(CALL_ANSWERED))
        cdef bint made = False
        command.ticket = read.ticket
        command.has_message = True
        try:
            made = call_reply(route.state, answers, read.tag, read.trace, &self.draws,
                              &command.bytes, &command.fields)
        finally:
            if not made:
                del command
        if not made:
            return False
        route._count_answer(<u64> read.began_ns // 1000)
        self._post(read.worker, command)
        return True

    cdef int _send(self, HotRoute route, object read, bytes own, u64 json_bytes,
                   const Bytes* body) except -1:
        """Count and send the response to what was read. own: its own id; empty: it has none."""
        cdef WorkerCommand* command
        cdef u64 second = wall_s()
        cdef bint written = False
        if second != self.date_s:
            self.date_s = second
            write_date(second, self.date)
        command = _checked(_command_new(ANSWERED))
        command.ticket, command.close = read.ticket, self.draining
        try:
            self._write(route, read, own, json_bytes, body, &command.bytes)
            written = True
        finally:
            if not written:
                del command
        route._count_answer(<u64> read.began_ns // 1000)
        return self._post(read.worker, command)

    cdef int _write(self, HotRoute route, object read, bytes own, u64 json_bytes,
                    const Bytes* body, Bytes* out) except -1:
        """Write a response. Raises NO_MEMORY."""
        cdef bytes trace = read.trace, id = read.id or own
        if not id:
            id = b"%s%x" % ((<const char*> self.shared.prefix.at())[:self.shared.prefix.size()],
                            self.shared.tickets.fetch_add(1, relaxed))
        route._answer_head(id, self.date, json_bytes, body.size(), out)
        if trace:
            out.put_text("\r\ntraceparent: ")
            trace_parent_put(out, <const u8*> (<const char*> trace), span_new(&self.draws))
        if self.draining:
            out.put_text("\r\nconnection: close")
        out.put_text("\r\n\r\n")
        out.put(body.at(), body.size())
        if body.lost or out.lost:
            raise_for(NO_MEMORY, "no memory for a response")
        return 0

    def adopt(self, int fd, u32 returns=0, Http2Protocol protocol=None):
        """Take a connection that is between two requests; the descriptor is the server's now.
        protocol: its state, after HotCalls.give(), if it speaks HTTP/2. False: it takes none any
        more, and nothing was done."""
        cdef WorkerCommand* command = _checked(_command_new(ADOPT))
        command.fd, command.returns = fd, returns
        return bool(self._post_connection(_least(self.shared), command, protocol))

    def resume(self, u32 worker, u64 relay, int fd, u32 returns, Http2Protocol protocol=None):
        """Take a connection with TLS back, as adopt(); the descriptor, a relay's end, is the
        server's now."""
        cdef WorkerCommand* command = _checked(_command_new(RESUME))
        command.ticket = relay
        command.fd = fd
        command.returns = returns
        return bool(self._post_connection(<Worker*> self.shared.workers[worker], command, protocol))

    cdef int _post_connection(self, Worker* w, WorkerCommand* command,
                              Http2Protocol protocol) except -1:
        """Give a connection to a worker. False: it takes none any more, and nothing was done."""
        cdef Http2State* state = NULL
        if protocol is not None:
            try:
                state = http2_protocol_release(protocol)
            except MemoryError:
                del command
                raise
        command.http2 = state
        if w.post.put(command):
            return True
        del command
        if state != NULL:
            http2_close(protocol.state)
            protocol.state = state
        return False

    def answer(self, u32 worker, u64 ticket, bytes response, bint close):
        """The response of an Ending. close: the connection's last."""
        cdef WorkerCommand* command = _checked(_command_new(ANSWERED))
        command.ticket, command.close = ticket, close
        command.bytes.put(<const char*> response, len(response))
        self._post(worker, command)

    def reply(self, u32 worker, u64 ticket, message, trailers):
        """The reply of an Ending that is a call's: a message, or None, and what ends it, pairs
        (name, value) of bytes. Raises MemoryError."""
        cdef WorkerCommand* command = _checked(_command_new(CALL_ANSWERED))
        cdef bytes data, name, value
        command.ticket = ticket
        if message is not None:
            data = message
            command.has_message = True
            command.bytes.put(<const char*> data, <u64> len(data))
        for name, value in trailers:
            hpack_put(&command.fields, <const u8*> (<const char*> name), <u32> len(name),
                      <const u8*> (<const char*> value), <u32> len(value))
        self._post(worker, command)

    cdef int _post(self, u32 worker, WorkerCommand* command) except -1:
        """Give a response to its worker. Raises NO_MEMORY."""
        cdef Worker* w = <Worker*> self.shared.workers[worker]
        if command.bytes.lost or command.fields.lost or not w.post.put(command):
            del command
            if not w.post.closed:
                raise_for(NO_MEMORY, "no memory for a response")
        return 0

    # -- the end

    def drain(self):
        """Accept no more, close what is idle, the others after their responses."""
        cdef u32 i
        self.draining = True
        for i in range(<u32> self.shared.workers.size()):
            self._command(i, _checked(_command_new(DRAIN)))

    def stop(self):
        """Ask run() to return; it closes what is open."""
        cdef u32 i
        for i in range(<u32> self.shared.workers.size()):
            self._command(i, _checked(_command_new(STOP)))
