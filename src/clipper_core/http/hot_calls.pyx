"""Taking calls out of the events of a connection, and answering them.

A call is taken if its head, its one message and its end came at once: clients send small calls so.
Others, and those that are not plain, are coroutines of Python (frontend/grpc/call_stream.py).
"""
cimport cython
from libcpp.vector cimport vector

import os
import threading
from typing import NamedTuple

from clipper_core.engine.engine cimport Engine
from clipper_core.http.http2_protocol cimport (
    CALL_ENDED, CALLED, ENDED, INTERNAL_ERROR, WENT_ON, Http2Event, Http2Protocol, Http2State,
    Http2Stream, http2_consumed, http2_fail, http2_finish, http2_reply,
)
from clipper_core.http.http_route cimport (
    OPEN, OTHER, READ, HotRoute, HotTable, Query, QueryOutcome,
    TableState, plain_answers, query_cancel, query_drop, query_futures, query_schedule,
)
from clipper_core.http.infer_call cimport (
    CallHead, call_answer, call_head_read, call_reply, call_submit, call_trailers,
)
from clipper_core.http.query_waits cimport (
    QueryWaits, query_next_ended, query_next_open, query_wait, query_wait_no_more, waits_add,
)
from clipper_core.http.trace_parent cimport TRACE_PARENT_BYTES
from clipper_core.results.future cimport MailboxReader
from clipper_core.runtime.allocation cimport make, make_room
from clipper_core.runtime.byte_buffer cimport Bytes
from clipper_core.runtime.histogram cimport Counter, count, histogram_record
from clipper_core.runtime.machine cimport (
    eventfd_drain, i64, monotonic_us, relaxed, release, u32, u64, u8,
)
from clipper_core.runtime.status cimport NO_MEMORY, raise_for

cdef enum:
    KEPT_BYTES = 4096           # of rows, that a call keeps for the next one


class HotEnding(NamedTuple):
    """A call whose answer Python makes: the query has no plain prediction. owner: of its
    connection. subject: of its route. futures: of its rows, done. request_id: the id in the
    request; id: of the query. trace: traceparent, if it names a trace; else empty."""

    owner: object
    stream: int
    subject: object
    futures: object
    request_id: str
    began_ns: int
    trace: bytes


class HotRead(NamedTuple):
    """A call whose query Python schedules, and answers by respond(), or like a HotEnding. futures:
    of its rows; None for one that is not scheduled. rows: their inputs then; else None. error: why
    one could not be scheduled. user: empty for nobody's. slo_us, id, band: of the query. The
    others are as of a HotEnding."""

    owner: object
    stream: int
    route: object
    futures: object
    rows: object
    error: object
    user: str
    slo_us: int
    id: str
    request_id: str
    began_ns: int
    trace: bytes
    band: int


# -- calls
# --------------------------------------------------------------------------------------------------

cdef HotCall* _new(HotCallState* c) noexcept nogil:
    """Return a call; NULL: there is no memory."""
    cdef HotCall* x = c.spare
    if x == NULL:
        return make[HotCall]()
    c.spare = x.next
    return x


cdef void _put_back(HotCallState* c, HotCall* x) noexcept nogil:
    x.query.tag.clear()
    x.rows.clear()
    x.rows.shrink(KEPT_BYTES)
    x.is_left = False
    x.ticket = 0
    x.next = c.spare
    c.spare = x


cdef void _drop(HotCallState* c, HotCall* x) noexcept nogil:
    """Release what the query holds."""
    query_drop(&x.query)
    x.query.route.users.fetch_sub(1, release)
    _put_back(c, x)


cdef void _count_open(HotCallState* c, i64 more) noexcept nogil:
    c.open += <u64> more            # modulo 2^64
    c.shared.open.fetch_add(<u64> more, relaxed)


cdef void _cancel(HotCallState* c, HotCall* x) noexcept nogil:
    """End a call for whose answer nobody waits any more."""
    if x.ticket:
        c.tickets.take(x.ticket)
        # there is room: Python counts it
        c.gone.push_back(x.ticket)
        _count_open(c, -1)
        _put_back(c, x)
        return
    if x.query.block != NULL:
        query_wait_no_more(c.waits, &x.query)
        query_cancel(&x.query)
    _count_open(c, -1)
    count(c.shared.cancelled, 1)
    histogram_record(x.query.route.requests, monotonic_us() - x.query.began_us)
    _drop(c, x)


cdef void _finish(HotCallState* c, HotCall* x) noexcept nogil:
    """Answer a call whose rows have all ended, or leave it for Python."""
    cdef Http2Stream* stream = <Http2Stream*> x.connection.by_id.get(x.stream)
    stream.call = NULL
    if not call_answer(&x.query, &c.body):
        c.left.push_back(x)
        return
    c.fields.clear()
    call_trailers(&x.query.fields, &c.fields)
    stream.silent = True
    if c.fields.lost:
        http2_finish(x.connection, x.stream, INTERNAL_ERROR)
    else:
        http2_reply(x.connection, x.stream, c.body.at(), c.body.size(), &c.fields)
    _drop(c, x)


cdef bint _wait(HotCallState* c, HotCall* x, u32 slot) noexcept nogil:
    """Wait for a slot of the query. False: there is no memory for that, and Python reports it as
    cancelled."""
    cdef Http2Stream* stream = <Http2Stream*> x.connection.by_id.get(x.stream)
    if query_wait(c.waits, &x.query, slot):
        stream.call = x
        _count_open(c, 1)
        c.awake = True
        return True
    stream.call = NULL
    query_cancel(&x.query)
    c.left.push_back(x)
    return False


cdef bint _serve(HotCallState* c, Http2State* h, const TableState* table, void* owner,
                 const Http2Event* called, const Http2Event* went) noexcept nogil:
    """Begin a call. Return False if it is Python's; then nothing has changed."""
    cdef CallHead head
    cdef HotCall* x
    cdef QueryOutcome came
    # for all that are open, so that their ends need no memory
    if (not call_head_read(h.text.at() + called.at, called.bytes, &head)
            or not make_room(c.left, c.left.size() + c.open + 1)
            or not make_room(c.touched, c.touched.size() + c.open + 1)
            or not make_room(c.gone, c.gone.size() + c.open + 1)):
        return False
    x = _new(c)
    if x == NULL:
        return False
    x.query.began_us = monotonic_us()
    came = call_submit(&x.query, table, &c.shared.limits, &head, h.text.at() + went.at, went.bytes,
                       &c.rows, &c.draws)
    x.is_read = came == READ
    if x.is_read:
        x.rows.put(c.rows.at(), c.rows.size())
    if came == OTHER or x.rows.lost:
        _put_back(c, x)
        return False
    x.query.route.users.fetch_add(1, relaxed)
    x.connection = h
    x.owner = owner
    x.stream = called.stream
    if came == OPEN:
        _wait(c, x, x.query.slot)
    elif came == READ:
        c.left.push_back(x)
    else:
        _finish(c, x)
    return True


# -- events
# --------------------------------------------------------------------------------------------------

cdef void _drop_taken(Http2State* h) noexcept nogil:
    """Keep the events that were not taken, and their text."""
    cdef Bytes text
    cdef Http2Stream* stream
    cdef size_t i, kept = 0
    cdef Http2Event event
    for i in range(h.events.size()):
        event = h.events[i]
        if event.kind == TAKEN:
            continue
        if event.kind == CALLED:
            stream = <Http2Stream*> h.by_id.get(event.stream)
            if stream != NULL:
                stream.called_at = 0
        text.put(h.text.at() + event.at, event.bytes)
        event.at = text.size() - event.bytes
        h.events[kept] = event
        kept += 1
    h.events.resize(kept)
    h.text.clear()
    h.text.put(text.at(), text.size())
    h.text.lost = h.text.lost or text.lost


cdef void _note(Http2State* h, size_t i) noexcept nogil:
    """Note where the head of a call, or its message, is."""
    cdef Http2Stream* stream = <Http2Stream*> h.by_id.get(h.events[i].stream)
    if stream == NULL:
        return
    if h.events[i].kind == CALLED:
        stream.called_at = <u32> (i + 1)
        stream.went_at = 0
    else:
        stream.went_at = <u32> (i + 1) if stream.went_at == 0 else SEVERAL


cdef bint _take_call(HotCallState* c, Http2State* h, const TableState* table, void* owner,
                     size_t i) noexcept nogil:
    """Take the call that has ended by this event, if it is plain."""
    cdef u32 id = h.events[i].stream
    cdef Http2Stream* stream = <Http2Stream*> h.by_id.get(id)
    cdef u32 called, went
    cdef u64 credit
    if (stream == NULL or stream.called_at == 0 or stream.went_at == 0
            or stream.went_at == SEVERAL):
        return False
    called = stream.called_at - 1
    went = stream.went_at - 1
    credit = h.events[went].credit
    if not _serve(c, h, table, owner, &h.events[called], &h.events[went]):
        return False
    h.events[called].kind = TAKEN
    h.events[went].kind = TAKEN
    h.events[i].kind = TAKEN
    http2_consumed(h, id, credit)
    return True


cdef bint _has_room(const HotCallState* c) noexcept nogil:
    """Return whether another call may be open."""
    cdef const HotCallsShared* s = c.shared
    return (not c.is_full
            and s.open.load(relaxed) + s.outside.load(relaxed) + c.left.size() < s.calls_max)


cdef bint hot_calls_take(HotCallState* c, Http2State* h, const TableState* table,
                         void* owner) noexcept nogil:
    cdef bint any = False
    cdef size_t i, n = h.events.size()
    cdef u32 kind
    for i in range(n):
        kind = h.events[i].kind
        if kind == CALLED or kind == WENT_ON:
            _note(h, i)
        elif kind == CALL_ENDED:
            any = (_has_room(c) and _take_call(c, h, table, owner, i)) or any
        elif kind == ENDED and h.events[i].call != NULL and h.events[i].is_call:
            _cancel(c, <HotCall*> h.events[i].call)
            h.events[i].kind = TAKEN
            any = True
    if n:
        _drop_taken(h)
    return any


cdef bint hot_call_may_be_plain(const Http2State* h, const Http2Event* called) noexcept nogil:
    cdef CallHead head
    return call_head_read(h.text.at() + called.at, called.bytes, &head)


cdef bint hot_call_slot_ended(HotCallState* c, HotCall* x) noexcept nogil:
    cdef u32 slot = query_next_open(&x.query)
    _count_open(c, -1)
    if slot != x.query.slot + x.query.rows:
        return not _wait(c, x, slot)
    _finish(c, x)
    return True


cdef void _news(HotCallState* c) noexcept nogil:
    """Answer the calls whose queries have ended, until the mailboxes are armed."""
    cdef HotCall* x
    cdef void* owner
    cdef Query* ended = query_next_ended(c.waits)
    while ended != NULL:
        x = <HotCall*> ended
        owner = x.owner
        if (hot_call_slot_ended(c, x)
                and (c.touched.size() == 0 or c.touched.back() != owner)):
            c.touched.push_back(owner)
        ended = query_next_ended(c.waits)
    c.awake = False


# -- connections
# --------------------------------------------------------------------------------------------------

cdef void hot_calls_close(HotCallState* c) noexcept nogil:
    cdef HotCall* x
    while c.spare != NULL:
        x = c.spare
        c.spare = x.next
        del x


cdef void hot_calls_lose(HotCallState* c, Http2State* h) noexcept nogil:
    cdef size_t i
    for i in range(h.streams.size()):
        if h.streams[i].call != NULL and h.streams[i].is_call:
            _cancel(c, <HotCall*> h.streams[i].call)
            h.streams[i].call = NULL


cdef bint hot_call_ask(HotCallState* c, HotCall* x, u64 ticket) noexcept nogil:
    if not c.tickets.put(ticket, x):
        return False
    x.ticket = ticket
    (<Http2Stream*> x.connection.by_id.get(x.stream)).call = x
    _count_open(c, 1)
    return True


cdef void* hot_call_answer(HotCallState* c, u64 ticket, const u8* message, u64 n,
                           Bytes* fields) noexcept nogil:
    cdef HotCall* x = <HotCall*> c.tickets.take(ticket)
    cdef Http2Stream* stream
    cdef void* owner
    if x == NULL:
        return NULL
    owner = x.owner
    stream = <Http2Stream*> x.connection.by_id.get(x.stream)
    stream.call = NULL
    stream.silent = True
    if fields.size() == 0 or fields.lost:
        http2_finish(x.connection, x.stream, INTERNAL_ERROR)
    else:
        http2_reply(x.connection, x.stream, message, n, fields)
    _count_open(c, -1)
    _put_back(c, x)
    return owner


cdef void hot_call_fail(HotCallState* c, HotCall* x) noexcept nogil:
    cdef Http2Stream* stream = <Http2Stream*> x.connection.by_id.get(x.stream)
    stream.silent = True
    http2_finish(x.connection, x.stream, INTERNAL_ERROR)
    _put_back(c, x)


cdef void hot_calls_give(HotCallState* c, Http2State* h, vector[u64]* tickets) noexcept nogil:
    cdef Http2Stream* stream
    cdef HotCall* x
    cdef size_t i, kept = 0
    for i in range(h.streams.size()):
        stream = h.streams[i]
        x = <HotCall*> stream.call
        if x == NULL or not stream.is_call:
            continue
        if x.ticket:
            tickets.push_back(x.ticket)
            tickets.push_back(x.stream)
            c.tickets.take(x.ticket)
            stream.call = NULL
            _count_open(c, -1)
            _put_back(c, x)
        else:                       # it waits
            query_wait_no_more(c.waits, &x.query)
            c.open -= 1
    for i in range(c.left.size()):
        x = c.left[i]
        if x.connection != h:
            c.left[kept] = x
            kept += 1
            continue
        stream = <Http2Stream*> h.by_id.get(x.stream)
        if stream == NULL:
            _count_open(c, 1)
            _cancel(c, x)
            continue
        stream.call = x
        x.is_left = True
    c.left.resize(kept)


cdef void hot_calls_drop(HotCallState* c, Http2State* h) noexcept nogil:
    cdef HotCall* x
    cdef size_t i
    for i in range(h.streams.size()):
        x = <HotCall*> h.streams[i].call
        if x != NULL:
            c.open += 1
            c.shared.open.fetch_add(x.is_left, relaxed)
    hot_calls_lose(c, h)


cdef void hot_calls_adopt(HotCallState* c, Http2State* h, void* owner) noexcept nogil:
    cdef HotCall* x
    cdef size_t i
    cdef u64 n = c.left.size() + c.open + h.streams.size()
    if not (make_room(c.left, n) and make_room(c.touched, n) and make_room(c.gone, n)):
        hot_calls_drop(c, h)
        http2_fail(h, INTERNAL_ERROR, "no memory for the calls of a connection")
        return
    for i in range(h.streams.size()):
        x = <HotCall*> h.streams[i].call
        if x == NULL:
            continue
        x.owner = owner
        if x.is_left:
            x.is_left = False
            h.streams[i].call = NULL
            c.left.push_back(x)
        else:
            c.shared.open.fetch_sub(1, relaxed)
            _wait(c, x, <u32> (x.query.waits_for - x.query.block.first_id))


# -- for Python
# --------------------------------------------------------------------------------------------------

@cython.final
cdef class HotCalls:
    """The calls of ModelInfer that the core answers, of the connections of one event loop.

    engines: of the models. calls_max: of calls that are open at once, with those outside; further
    ones are Python's. message_bytes_max: of a request; longer ones are Python's. way_back_us,
    slo_us_max: see CallLimits. finish: what futures of queries that Python answers are made with.
    cancelled: counts calls that their clients have given up.
    """

    def __cinit__(self, engines, *, u64 calls_max, u64 message_bytes_max, u64 way_back_us,
                  u64 slo_us_max, finish, Counter cancelled):
        self.state = make[HotCallState]()
        self.shared = make[HotCallsShared]()
        self.waits = make[QueryWaits]()
        if self.state == NULL or self.shared == NULL or self.waits == NULL:
            raise_for(NO_MEMORY, "no memory for the calls of gRPC")
        self.state.shared = self.shared
        self.state.waits = self.waits
        self.shared.calls_max = calls_max
        self.shared.limits.message_bytes_max = message_bytes_max
        self.shared.limits.way_back_us = way_back_us
        self.shared.limits.slo_us_max = slo_us_max
        self.state.draws = int.from_bytes(os.urandom(8), "little")
        self.finish = finish
        self.counter = cancelled
        self.shared.cancelled = &cancelled.n
        self.retired = []
        self.guard = threading.Lock()
        self.table = HotTable({})
        self.mailboxes = [MailboxReader((<Engine?> engine).completion) for engine in engines]
        for reader in self.mailboxes:
            waits_add(self.waits, reader)

    def __dealloc__(self):
        if self.state != NULL:
            hot_calls_close(self.state)
        del self.state
        del self.shared
        del self.waits

    @property
    def fds(self):
        """Descriptors that are readable when news() has something."""
        return [reader.fd for reader in self.mailboxes]

    @property
    def open(self):
        """The number of calls that wait for their queries, on all threads."""
        return self.shared.open.load(relaxed)

    @property
    def outside(self):
        """The number of calls that Python answers: they count for the limit."""
        return self.shared.outside.load(relaxed)

    @outside.setter
    def outside(self, u64 n):
        self.shared.outside.store(n, relaxed)

    @property
    def has_news(self):
        """True if calls were taken that are not answered."""
        return self.state.awake or self.state.left.size() != 0

    def set_table(self, HotTable table):
        """Set the table of routes, by the name of a model, or its name and version with a slash
        between them. Calls that are read after this returns are answered by it."""
        with self.guard:
            self.retired.append(self.table)
            self.table = table

    def sweep(self):
        """Free former tables that no call uses any more. Return how many are kept."""
        with self.guard:
            self.retired = [table for table in self.retired if table.users]
            return len(self.retired)

    def take(self, Http2Protocol protocol, owner):
        """Take the plain calls among the events that `protocol` has left. Return whether there were
        any. If `has_news` is true after that, news() has to be called.

        owner: of the connection: it has to live until lose() or give().
        """
        cdef HotTable table = self.table
        cdef bint any
        if protocol.state.events.size() == 0:
            return False
        with nogil:
            any = hot_calls_take(self.state, protocol.state, table.state, <void*> owner)
        return any

    def news(self):
        """Answer the calls whose queries have ended.

        Return the owners whose connections have something to send, and calls for Python: a
        HotEnding or a HotRead each.
        """
        cdef HotCallState* c = self.state
        cdef size_t i
        with nogil:
            for i in range(self.waits.inboxes.size()):
                eventfd_drain(self.waits.inboxes[i].box.fd)
            _news(c)
        owners = {<object> c.touched[i] for i in range(c.touched.size())}
        c.touched.clear()
        return owners, self._endings(owners)

    cdef list _endings(self, set owners):
        """Return what is left for Python. A call for which there is no memory is reset."""
        cdef HotCallState* c = self.state
        cdef HotCall* x
        cdef list endings = []
        while c.left.size():
            x = c.left.front()
            c.left.erase(c.left.begin())
            owners.add(<object> x.owner)
            try:
                endings.append(_read(x) if x.is_read else _ending(x, self.finish))
            except MemoryError:
                http2_finish(x.connection, x.stream, INTERNAL_ERROR)
            finally:
                _drop(c, x)
        return endings

    def lose(self, Http2Protocol protocol):
        """Cancel the calls of a connection that is gone."""
        hot_calls_lose(self.state, protocol.state)

    def give(self, Http2Protocol protocol):
        """Let the calls of a connection go with it to another thread."""
        hot_calls_give(self.state, protocol.state, NULL)

    def drop(self, Http2Protocol protocol):
        """Cancel the calls of a connection that was given, and is gone before it was adopted."""
        hot_calls_drop(self.state, protocol.state)

    def adopt(self, Http2Protocol protocol, owner):
        """Take the calls that have come with a connection. If `has_news` is true after that, news()
        has to be called."""
        hot_calls_adopt(self.state, protocol.state, <void*> owner)

    def respond(self, read, list futures):
        """Answer a call that was a HotRead and whose futures are done. Return False if its reply is
        to be made in Python; then nothing was sent or counted."""
        cdef HotRoute route = read.route
        cdef Http2Protocol protocol = read.owner.protocol
        cdef Bytes body
        cdef Bytes fields
        cdef bytes request_id = read.request_id.encode("ascii")
        if not call_reply(route.state, plain_answers(futures), request_id, read.trace,
                          &self.state.draws, &body, &fields):
            return False
        http2_reply(protocol.state, read.stream, body.at(), body.size(), &fields)
        route._count_answer(<u64> read.began_ns // 1000)
        return True


cdef str _text_of(const void* at, u64 n):
    return (<const char*> at)[:n].decode("ascii") if n else ""


cdef bytes _trace_of(const Query* q):
    return (<const char*> q.fields.trace)[:TRACE_PARENT_BYTES] if q.fields.traced else b""


cdef object _ending(HotCall* x, object finish):
    cdef Query* q = &x.query
    cdef HotRoute route = <HotRoute> q.route.object
    id = _text_of(q.fields.id, q.fields.id_bytes)
    user = _text_of(q.user.at(), q.user.size())
    request_id = _text_of(q.tag.at(), q.tag.size())
    futures = query_futures(q, finish, route.subject(id, b"", user))
    return HotEnding(<object> x.owner, x.stream, route.subject, futures, request_id,
                     q.began_us * 1000, _trace_of(q))


cdef object _read(HotCall* x):
    """Schedule a query that was read."""
    cdef Query* q = &x.query
    cdef HotRoute route = <HotRoute> q.route.object
    id = _text_of(q.fields.id, q.fields.id_bytes)
    user = _text_of(q.user.at(), q.user.size())
    request_id = _text_of(q.tag.at(), q.tag.size())
    futures, rows, error = query_schedule(q, &x.rows, user, id)
    return HotRead(<object> x.owner, x.stream, route, futures, rows, error, user, q.fields.slo_us,
                   id, request_id, q.began_us * 1000, _trace_of(q), q.fields.band)
