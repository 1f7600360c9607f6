"""HTTP/2: the streams of one connection, each served as a connection of HTTP/1.1 with one request.

The rules of the protocol are in the core (clipper_core.http.http2_protocol): frames, fields, flow
control, and the bounds for clients. It makes a message of HTTP/1.1 of each request, and frames of
each response. So a `HttpConnection` on an `Http2Stream` answers it, with the same handlers,
limits, times and errors as over HTTP/1.1, and its bytes of a body are the same.

A connection speaks HTTP/2 if it begins with the preface of that protocol, in the clear or over TLS.
`http.pipeline_max` is the number of its streams at once. Streams take turns to send. A response
waits as bytes of its stream until the client's windows and the socket take it; while more than
`http.unsent_bytes_max` wait, without the longest response, no further one is made.

Calls of gRPC, where the service has `calls`, are streams of another kind: see
frontend/grpc/call_stream.py.
"""

import asyncio
import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from clipper_core.http.http2_protocol import Http2Error, Http2EventKind, Http2Protocol
from clipper_core.http.http_server import Ending, Handed, HttpServer, Late, Read
from clipper_core.results.future import Future

if TYPE_CHECKING:
    from clipper.frontend.http.connection import HttpConnection, HttpService

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
TURN_CALLS: Final = 16  # of one connection; more wait if the turn has taken its time
TURN_BYTES: Final = 64 << 10  # of frames that are made before the socket is asked for room
STREAM_BYTES: Final = 64 << 10  # of a response that wait; then no more of it is made
_LINGER_S = 2.0
_WARNED_S = 1.0  # for a client to answer the first GOAWAY of a drain
# plain requests, and reads with plain calls, in a row before the core gets the connection back;
# doubles each time
_PLAIN_FOR_RETURN = 2


def is_broken(transport: asyncio.BaseTransport) -> bool:
    """Return whether the connection was reset, or closed in both directions; the event loop does
    not notice it while it neither reads nor writes."""
    sock = transport.get_extra_info("socket")
    if sock is None:
        return False
    poll = select.poll()
    poll.register(sock.fileno(), 0)
    return bool(poll.poll(0))


class StreamAnswer(Protocol):
    """The answer to one stream, and the request so far. Threads: the event loop's."""

    is_full: bool

    def receive(self, text: bytes, credit: int) -> None:
        """Take bytes of the request. credit: the bytes of the window that they took."""

    def receive_end(self) -> None:
        """Note that the request is complete. Only for a call."""

    def lose(self) -> None:
        """Note that the stream has ended."""

    def hold(self, is_full: bool) -> None:
        """Make no more of the response, or go on."""

    def lose_client(self) -> None:
        """Note that the client sends nothing more on the whole connection."""

    def check(self, now_s: float) -> None:
        """Check the time limits of the request. now_s: the loop's time."""

    def drain(self) -> None:
        """End an answer that has no end of its own."""


class GrpcCalls(Protocol):
    """The server of the calls of gRPC. Threads: the event loop's."""

    @property
    def ping_s_min(self) -> float:
        """The shortest time between two pings of a client."""

    def open(self, connection: "Http2Connection", id: int, head: bytes) -> StreamAnswer:
        """Return what answers a call. head: as one of HTTP/1.1."""

    def refuse_head(self, connection: "Http2Connection", id: int) -> None:
        """Answer a call whose metadata is too large."""

    def take(self, connection: "Http2Connection") -> bool:
        """Answer calls without Python, among the events that have come. Return whether there were
        any."""

    def lose(self, connection: "Http2Connection") -> None:
        """Give up such calls of a connection that is gone."""

    def give(self, connection: "Http2Connection") -> None:
        """Let such calls go with their connection, which goes to the core."""

    def adopt(self, connection: "Http2Connection") -> None:
        """Take such calls that have come with their connection, or were given."""

    def drop(self, protocol: Http2Protocol) -> None:
        """Cancel such calls of a connection that was lost before they were adopted."""

    def serve_in(self, core_server: HttpServer) -> "CallReplies | None":
        """Let a server of the core answer calls on its own connections. Return what answers those
        that it gives to Python; None: it answers none."""


class CallReplies(Protocol):
    """The replies to calls whose queries the core has read. Threads: the event loop's."""

    def reply_of(
        self, call: Ending | Read, futures: Sequence[Future], error: Exception | None
    ) -> tuple[bytes | None, Sequence[tuple[bytes, bytes]]]:
        """Return the message of a reply, or None, and the fields that end the call, and count it.
        futures: of the query, done. error: why one could not be scheduled."""

    def note_cancelled(self, call: Ending | Read) -> None:
        """Count a call that its client has given up."""

    def note_moved(self, more: int) -> None:
        """Count calls that have left the core with their connection, or have ended since."""


class MovedStream:
    """The stream of a query that was the core's, and whose connection has come to Python before its
    answer (StreamAnswer). Threads: the event loop's.

    ended: called when the stream has ended.
    """

    def __init__(self, ended: Callable[[], None]) -> None:
        self.is_full = False
        self._ended = ended
        self._connection: Http2Connection | None = None
        self._id = 0
        self._early: Late | None = None

    def begin(self, connection: "Http2Connection", id: int) -> None:
        """Take the connection; an answer that came before it is sent."""
        self._connection, self._id = connection, id
        if self._early is not None:
            self.send(self._early)

    def send(self, late: Late) -> None:
        """Answer the query."""
        connection = self._connection
        if connection is None:
            self._early = late
            return
        if late.trailers is None:
            connection.protocol.answer(self._id, late.message or b"")
        elif late.trailers:
            connection.protocol.reply(self._id, late.message, late.trailers)
        else:
            connection.protocol.finish(self._id, Http2Error.INTERNAL_ERROR)
        connection.settle_soon()

    def lose(self) -> None:
        """Note that the stream has ended, answered or not."""
        self._ended()

    def receive(self, text: bytes, credit: int) -> None:
        """Do nothing: the request is complete."""

    def receive_end(self) -> None:
        """Do nothing: the request is complete."""

    def hold(self, is_full: bool) -> None:
        """Do nothing: the answer comes as a whole."""
        self.is_full = is_full

    def lose_client(self) -> None:
        """Do nothing: the query is answered. A client that is gone resets the connection."""

    def check(self, now_s: float) -> None:
        """Do nothing: the query ends by its deadline."""

    def drain(self) -> None:
        """Do nothing: the query ends by itself."""


class Http2Stream(asyncio.Transport):
    """The transport below the connection that answers one stream. Threads: the event loop's."""

    def __init__(self, owner: "Http2Connection", id: int) -> None:
        super().__init__()
        self.id = id
        self.is_full = False  # its connection was told to make no more
        self._owner = owner
        self._is_closing = self._is_reading_paused = self._is_lost = False
        self._held = 0  # bytes of the window that are given back when it is read again
        self.connection: HttpConnection = owner.serve(owner.service)

    def receive(self, text: bytes, credit: int) -> None:
        """Pass on bytes of the request. credit: the bytes of the window that they took."""
        if text and not self._is_lost:
            self.connection.data_received(text)
        self._held += credit
        if not self._is_reading_paused:
            self._give_back()

    def receive_end(self) -> None:
        """Do nothing: a message of HTTP/1.1 tells its end."""

    def note_request(self, is_plain: bool) -> None:
        """Note that the request is complete. is_plain: the core could have answered it."""
        self._owner.note_request(is_plain)

    def lose_client(self) -> None:
        """Tell the connection; it answers what it has."""
        if not self.connection.eof_received():
            self.abort()

    def check(self, now_s: float) -> None:
        """Check the time limits of the request."""
        self.connection.check(now_s)

    def drain(self) -> None:
        """End a response that has no end of its own."""
        self.connection.drain()

    def _give_back(self) -> None:
        if self._held:
            self._owner.protocol.consumed(self.id, self._held)
            self._held = 0

    def lose(self) -> None:
        """The stream has ended: tell the connection."""
        self._is_closing = self._is_lost = True
        self._give_back()
        self.connection.connection_lost(None)

    def hold(self, is_full: bool) -> None:
        """Let the connection make no more of its response, or go on."""
        if self.is_full != is_full and not self._is_lost:
            self.is_full = is_full
            if is_full:
                self.connection.pause_writing()
            else:
                self.connection.resume_writing()

    # -- what a connection asks of its transport

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Take bytes of the response."""
        if not self._is_lost:
            self._owner.protocol.answer(self.id, bytes(data))
            self._owner.hold_back(self, self.id)
            self._owner.settle()

    def get_write_buffer_size(self) -> int:
        """Return how many bytes of the body wait."""
        return self._owner.protocol.unsent(self.id)

    def pause_reading(self) -> None:
        """Let the client send no more than its window."""
        self._is_reading_paused = True

    def resume_reading(self) -> None:
        """Let it send again."""
        self._is_reading_paused = False
        self._give_back()
        self._owner.settle()

    def write_eof(self) -> None:
        """End the response."""
        self.close()

    def can_write_eof(self) -> bool:
        """Return whether the connection may go on in one direction."""
        return self._owner.transport.can_write_eof()

    def close(self) -> None:
        """End the response, after what was written."""
        self._is_closing = True
        self._owner.protocol.finish(self.id)
        self._owner.settle()

    def abort(self) -> None:
        """Reset the stream."""
        self._is_closing = True
        self._owner.protocol.finish(self.id, Http2Error.INTERNAL_ERROR)
        self._owner.settle()

    def is_closing(self) -> bool:
        """Return whether nothing more is sent."""
        return self._is_closing

    def get_extra_info(self, name: str, default: object = None) -> object:
        """Return what is known of the connection of all streams."""
        return self._owner.get_extra_info(name, default)


class Http2Connection(asyncio.Protocol):
    """One client. Threads: the event loop's.

    transport: that of the client; it was read up to the preface, or further if the connection was
    the core's. serve: makes the connection that answers a stream. handed: what the core knows of
    it.
    """

    def __init__(
        self,
        service: "HttpService",
        transport: asyncio.Transport,
        serve: "Callable[[HttpService], HttpConnection]",
        handed: Handed,
    ) -> None:
        settings = service.settings
        self._ends = dict(zip(("peername", "sockname"), handed.ends, strict=False))
        self._handed = handed
        self._plain = 0  # reads in a row with plain calls only
        self.service = service
        self.transport = transport
        self.serve = serve
        self._calls = calls = service.calls
        self.protocol = handed.http2 or Http2Protocol(
            settings.pipeline_max,
            settings.header_bytes_max,
            self._now_us(),
            calls is not None,
            0 if calls is None else round(calls.ping_s_min * 1e6),
        )
        self._streams: dict[int, StreamAnswer] = {}
        self._stalled_s = service.now_s
        self._since_s = service.now_s - (0.0 if handed.http2 is None else handed.age_s)
        self._warned_s = 0.0
        self._is_full = False  # the transport's buffer is
        self._is_crowded = False  # responses that wait have `unsent_bytes_max`
        self._is_paused = False
        self._is_settling = False
        self._is_posted = False  # `settle` is called in this turn of the loop
        self._is_returning = False  # `_return` is
        self._held: set[int] = set()  # streams that were told to make no more
        self._waiting: deque[Callable[[], object]] = deque()  # calls, for the next turns
        self._begun = 0  # calls of this turn
        self.is_small = True  # a call does not wait for large responses of others
        self._ended = False  # the client sends no more
        self._gone = False  # nothing more is read
        service.connections.add(self)
        service.changed()

    def _now_us(self) -> int:
        # the times of pings are looked at, so that of the last check is too old
        now_s = self.service.now_s if self._calls is None else time.monotonic()
        return int(now_s * 1e6)

    @property
    def is_busy(self) -> bool:
        """True while a request is being read or answered."""
        return not self._gone and self.protocol.streams > 0

    @property
    def is_open(self) -> bool:
        """True until its last frame has left; the client may close it later."""
        return not self._gone or self.transport.get_write_buffer_size() > 0

    def get_extra_info(self, name: str, default: object = None) -> object:
        """Return an address, or what the transport knows."""
        found = self._ends.get(name)
        return self.transport.get_extra_info(name, default) if found is None else found

    # -- reading

    def begin(self, data: bytes) -> None:
        """Go on with what has come: bytes, or the state that the core has left."""
        if self._handed.http2 is not None:
            for ticket, id in self._handed.queries:
                self._streams[id] = moved = self.service.moved[ticket]
                moved.begin(self, id)
            if self._calls is not None:
                self._calls.adopt(self)
            if self.service.draining:
                self.drain()
        self.data_received(data)

    def data_received(self, data: bytes) -> None:
        """Read frames, and answer what they complete."""
        if self._gone:
            return
        self._read(data)
        self.settle()
        if self._plain:
            self._return()

    def _read(self, data: bytes) -> None:
        self._begun = 0
        self._is_settling = True  # answers to all of them leave together
        try:
            self.protocol.feed(data, self._now_us())
            self._take_events()
        except MemoryError:
            self.abort()
        finally:
            self._is_settling = False

    def _take_events(self) -> bool:
        """Pass on what has come. Return whether there was anything."""
        if not self.protocol.has_events:
            return False
        found = self._calls is not None and self._calls.take(self)
        if found:
            self._since_s = self.service.now_s
            self._plain += 1
        while events := self.protocol.events():
            found = True
            for kind, id, text, credit in events:
                if kind == Http2EventKind.ENDED:
                    self._end_stream(id)
                elif kind == Http2EventKind.WENT_ON:
                    self._receive(id, text, credit)
                elif kind >= Http2EventKind.CALLED:
                    self._plain = 0
                    self._take_call(kind, id, text)
                else:
                    self._begin(id, text, credit, kind == Http2EventKind.TOO_LARGE)
        return found

    def _begin(self, id: int, text: bytes, credit: int, is_large: bool) -> None:
        self._streams[id] = stream = Http2Stream(self, id)
        stream.connection.open_stream(stream)
        if self._is_crowded:
            self._hold(id, stream, True)
        if is_large:
            stream.connection.refuse_head()
        stream.receive(text, credit)

    def begin_call(self, run: Callable[[], object]) -> None:
        """Run a call whose request is complete. After the first ones of a turn, and once the turn
        has taken its time, calls wait, and connections take turns."""
        self._begun += 1
        is_first = not self._waiting
        if is_first and not (self._begun > TURN_CALLS and self.service.is_late()):
            run()
            return
        self._waiting.append(run)
        if is_first:
            self.service.take_turn(self)

    def advance(self) -> None:
        """Run calls that waited. Called by the service."""
        for _ in range(min(TURN_CALLS, len(self._waiting))):
            self._waiting.popleft()()
        if self._waiting:
            self.service.take_turn(self)
        self.settle()

    def _take_call(self, kind: int, id: int, head: bytes) -> None:
        """Begin a call, or end its request."""
        assert self._calls is not None
        if kind == Http2EventKind.CALL_ENDED:
            if (known := self._streams.get(id)) is not None:
                known.receive_end()
            return
        if kind == Http2EventKind.CALL_TOO_LARGE:
            self._calls.refuse_head(self, id)
            return
        stream = self._streams[id] = self._calls.open(self, id, head)
        if self._is_crowded:
            self._hold(id, stream, True)

    def note_request(self, is_plain: bool) -> None:
        """Note a request, which is complete. is_plain: the core could have answered it."""
        self._plain = self._plain + 1 if is_plain else 0

    def add(self, id: int, stream: StreamAnswer) -> None:
        """Have a stream answered whose request was taken from the events."""
        self._streams[id] = stream
        self._plain = 0

    def _receive(self, id: int, text: bytes, credit: int) -> None:
        stream = self._streams.get(id)
        if stream is None:
            self.protocol.consumed(id, credit)
        else:
            stream.receive(text, credit)

    def _end_stream(self, id: int) -> None:
        stream = self._streams.pop(id, None)
        self._held.discard(id)
        if stream is not None:
            stream.lose()
        if not self._streams:
            self._since_s = self.service.now_s
            if self._plain and not self._is_returning:
                self._is_returning = True
                asyncio.get_running_loop().call_soon(self._return)

    def eof_received(self) -> bool:
        """Note that the client sends no more; return whether it has responses to read."""
        self._ended = True
        if self._gone or not self.transport.can_write_eof():
            return False
        for stream in tuple(self._streams.values()):
            stream.lose_client()
        self.settle()
        return not self.transport.is_closing()

    def connection_lost(self, error: Exception | None) -> None:
        """Cancel the open requests."""
        self._gone = True
        self._waiting.clear()
        self.service.connections.discard(self)
        self._lose_streams()
        self.service.changed()

    def _lose_streams(self) -> None:
        for id in tuple(self._streams):
            self._end_stream(id)
        if self._calls is not None:
            self._calls.lose(self)

    def _return(self) -> None:
        """Give the connection back to the core after enough plain requests, and reads with plain
        calls only. Calls that wait go with it."""
        self._is_returning = False
        if (
            self._plain < _PLAIN_FOR_RETURN << min(self._handed.returns, 20)
            or not self._is_quiet()
            or not self.service.can_give_back(self.transport)
        ):
            return
        returned = False
        if self._calls is not None:
            self._calls.give(self)
        try:
            returned = self.service.give_back(self.transport, self._handed, self.protocol)
        finally:
            if not returned and self._calls is not None:
                self._calls.adopt(self)
        if returned:
            self._gone = True
            self.transport.abort()  # closes this descriptor; the core has a duplicate

    def _is_quiet(self) -> bool:
        """Return whether nothing of the connection is Python's to do."""
        protocol = self.protocol
        return not (
            self._gone
            or self._ended
            or self._streams
            or self._waiting
            or self._is_full
            or self._is_paused
            or protocol.has_events
            or protocol.is_shut
            or protocol.has_left
            or protocol.is_going
        )

    # -- writing

    def pause_writing(self) -> None:
        """Make no more frames of responses, because the client does not read."""
        self._is_full, self._stalled_s = True, self.service.now_s

    def resume_writing(self) -> None:
        """Make frames of what waits."""
        self._is_full = False
        self.settle()

    def hold_back(self, stream: StreamAnswer, id: int) -> None:
        """Let no more of a response be made if too much waits. The stream has just written."""
        if self.protocol.unsent(id) >= STREAM_BYTES:
            self._hold(id, stream, True)
        most = self.service.settings.unsent_bytes_max
        if not self._is_crowded and self.protocol.unsent_bytes >= most:
            self._is_crowded = True
            for other, each in tuple(self._streams.items()):
                self._hold(other, each, True)

    def _hold(self, id: int, stream: StreamAnswer, is_full: bool) -> None:
        if is_full:
            self._held.add(id)
        else:
            self._held.discard(id)
        stream.hold(is_full)

    def settle_soon(self) -> None:
        """Settle at the end of this turn of the loop, so that what it answers leaves together."""
        if not (self._is_posted or self._is_settling):
            self._is_posted = True
            asyncio.get_running_loop().call_soon(self._settle_posted)

    def _settle_posted(self) -> None:
        self._is_posted = False
        self.settle()

    def settle(self) -> None:
        """Send what may be sent, tell streams whether there is room, and close the connection when
        it is at its end."""
        if self._is_settling or self.transport.is_closing():
            return
        self._is_settling = True
        try:
            while self._send() or self._take_events() or self._tell_room():
                pass
        except MemoryError:
            self.abort()
        finally:
            self._is_settling = False
        self._regulate()
        if self._gone:
            return
        is_last = self._ended or self.protocol.has_left or self.protocol.is_going
        if self.protocol.is_shut or (is_last and not self.is_busy):
            self._end()

    def _send(self) -> bool:
        """Send frames while the transport has room. Return whether there were any."""
        if self._is_full:
            return False
        data = self.protocol.take(TURN_BYTES)
        if data:
            self.transport.write(data)
        return bool(data)

    def _tell_room(self) -> bool:
        """Let streams go on, or wait. Return whether one may go on."""
        unsent, most = self.protocol.unsent_bytes, self.service.settings.unsent_bytes_max
        was_crowded = self._is_crowded
        self._is_crowded = unsent >= (most // 2 if was_crowded else most)
        resumed = False
        changed = self._held if self._is_crowded == was_crowded else self._streams
        for id in tuple(changed):
            stream = self._streams.get(id)
            if stream is None:
                continue
            own = self.protocol.unsent(id)
            is_full = self._is_crowded or own >= STREAM_BYTES
            if stream.is_full and not is_full and own > STREAM_BYTES // 4:
                continue
            resumed = resumed or (stream.is_full and not is_full)
            self._hold(id, stream, is_full)
        return resumed

    def _regulate(self) -> None:
        """Pause reading while answers to frames of the client wait, or resume it."""
        wanted = self._is_full and self.protocol.is_crowded
        if wanted != self._is_paused and not (self._ended or self.transport.is_closing()):
            self._is_paused = wanted
            (self.transport.pause_reading if wanted else self.transport.resume_reading)()

    def _end(self) -> None:
        """Send no more, but read on: the client's kernel could discard the last frames if we closed
        now."""
        self._gone = True
        self._lose_streams()
        self.transport.write(self.protocol.take(0))
        self._stalled_s = self.service.now_s
        if self._is_paused:
            self._is_paused = False
            self.transport.resume_reading()
        if not self._ended and self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()

    # -- time

    def drain(self) -> None:
        """Answer the streams that are open, and those that were sent before the client knows."""
        self.protocol.go_away(warn=self.is_busy)
        self._warned_s = self.service.now_s
        for stream in tuple(self._streams.values()):
            stream.drain()
        self.settle()

    def abort(self) -> None:
        """Close the connection at once."""
        self.transport.abort()

    def check(self, now_s: float) -> None:
        """Check the time limits of the connection and of its streams. now_s: the loop's time."""
        settings, waits_since_us = self.service.settings, self.protocol.waits_since_us
        if self._gone:
            if now_s - self._stalled_s > _LINGER_S:
                self.abort()
            return
        if self._is_full and now_s - self._stalled_s > settings.idle_s:
            self.abort()
            return
        if self._ended:
            if is_broken(self.transport):
                self.abort()
                return
            if not self._is_full:
                self.protocol.ping()  # a client that has closed its connection resets it
        for stream in tuple(self._streams.values()):
            stream.check(now_s)
        is_idle = not self.is_busy and now_s - self._since_s > settings.idle_s
        is_warned = self.service.draining and now_s - self._warned_s > _WARNED_S
        if waits_since_us and now_s - waits_since_us / 1e6 > settings.header_s:
            self.protocol.fail(Http2Error.ENHANCE_YOUR_CALM)
        elif is_idle or is_warned:
            self.protocol.go_away()
        self.settle()
