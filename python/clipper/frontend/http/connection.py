"""HTTP/1.1: requests from bytes, responses to bytes, and the limits for clients. A connection that
begins as one of HTTP/2 becomes an `Http2Connection`, whose streams come here.

On the query address the fast path (frontend/http/fast_path.py) reads first. A request that it does
not handle comes here together with its connection. This is the one place that knows all of HTTP,
and every error.

The protocol class runs on uvloop and parses with the core (clipper_core.http.http_head); a web
framework costs four to ten times the CPU of a query. The parser rejects heads that two parsers
could read differently: a known header that comes twice, signs and commas in a length, folded
headers, a bare LF or CR, blanks before a colon. This module also rejects Transfer-Encoding in
HTTP/1.0, or with Content-Length, and requests without a Host. An offer of another protocol
(Upgrade) is ignored. A request that its sender may not make is rejected at the end of its head.
Everything that a client can make grow has a limit in `[http]`, and everything that it can delay has
a time limit. One periodic check of all connections enforces the times, instead of a timer for each.

A connection answers its requests in order: each has an `Exchange`, and responses leave from the
front of the queue. A request is handled at once on the loop's thread, unless its body is large or
its handler needs a worker thread. The work for one connection in one turn of the loop is bounded
(`PIECE_BYTES` read, `http.pipeline_max` requests, `http.unsent_bytes_max` of responses, one request
when the turn has taken `TURN_S`); the rest waits for the next turn, or until the client has read
its responses. A response is made only when it can leave: those of a client that does not read stay
predictions, which the cache shares. All connections together get one large response, or one
piece of one that is streamed, in a turn (`LARGE_BYTES`), one connection after another. A
client that ends its sending side gets its responses first. One whose connection breaks, or that
leaves an endless stream, cancels its queries. A rejected
connection is read a little longer, or the client's kernel would discard the response.
"""

import asyncio
import contextlib
import logging
import os
import re
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import cast

from clipper.errors import ClipperError, OutOfMemory, TooLarge
from clipper.frontend.access_log import AccessLog
from clipper.frontend.auth.peer_user import is_own_user
from clipper.frontend.http.body_memory import BodyMemory
from clipper.frontend.http.exchange import Exchange
from clipper.frontend.http.http2 import (
    PREFACE,
    GrpcCalls,
    Http2Connection,
    Http2Stream,
    MovedStream,
    is_broken,
)
from clipper.frontend.http.messages import (
    KNOWN_HEADERS,
    REPEATED,
    HandlerResult,
    HttpError,
    HttpRequest,
    WorkerTask,
    problem,
    settled,
)
from clipper.frontend.tracing.context import Trace, start_trace
from clipper.frontend.tracing.exporter import SpanExporter
from clipper.host_port import join_host_port
from clipper.metrics.http_counts import HttpCounts, now_ns
from clipper.serving.query.future_watcher import FutureWatcher
from clipper.settings.http import HttpSettings
from clipper_core.http.http2_protocol import Http2Protocol
from clipper_core.http.http_head import (
    ChunkedBody,
    HttpSyntaxError,
    MessageHead,
    read_request,
)
from clipper_core.http.http_server import Handed, HttpServer

_log = logging.getLogger(__name__)
_LINGER_S = 2.0
REFUSED_MAX = 16  # of connections beyond the limit; more are closed without a response
# 25 on Linux; not defined in Python 3.11
_TCP_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", 25)
_WORKER_FROM = 1 << 20  # larger bodies are handled by a worker thread
PIECE_BYTES = 4 << 10  # of many requests; after them the connection waits for its next turn
# from here a response, or a piece of one, is large: one of these is made in a turn of the loop
LARGE_BYTES = 32 << 10
TURN_S = 0.001  # then connections with more than one request wait for the next turn of the loop
_HEAD_END = b"\r\n\r\n"
_CR, _EMPTY_LINES = 13, re.compile(rb"(?:\r\n)*")
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_IDLE, _HEAD, _BODY = range(3)
_FROM_CLIENT = Handed(-1, b"", 0.0, 0, 0, 0, ())
# eligible requests in a row before the fast path gets the connection back; doubles each time
_PLAIN_FOR_RETURN = 2


def _bound_unsent(transport: asyncio.Transport, bytes_max: int) -> None:
    """Limit the unsent bytes in the kernel's buffer, which could take megabytes for a slow
    reader."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        with contextlib.suppress(OSError):  # not Linux, or not TCP
            sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, min(bytes_max, 1 << 30))


class HttpService:
    """The shared state of the connections of one listener.

    handle: returns the result of a request, or raises. admit: raises for a request that may not be
    made; it is called as soon as the head is there, before a byte of the body is kept. now_s, date:
    of the last periodic check. bodies: the memory that request bodies take. calls: answers calls of
    gRPC; None: they are requests like others.
    exporter: exports spans; None for none. access_log: logs requests; None: those whose callers
    sample them. own_user: only processes of this server's user, and of
    root, are served. turn_s: time of a turn of the loop after which those who have had a request
    answered in it wait.
    """

    def __init__(
        self,
        settings: HttpSettings,
        handle: Callable[[HttpRequest], HandlerResult],
        watcher: FutureWatcher,
        run: Callable[..., object],
        counts: HttpCounts | None = None,
        exporter: SpanExporter | None = None,
        own_user: bool = False,
        turn_s: float = TURN_S,
        admit: Callable[[HttpRequest], None] | None = None,
        bodies: BodyMemory | None = None,
        access_log: AccessLog | None = None,
        calls: GrpcCalls | None = None,
    ) -> None:
        self.admit, self.calls = admit, calls
        self.access_log = AccessLog(0) if access_log is None else access_log
        self.bodies = BodyMemory(settings.bodies_bytes_max) if bodies is None else bodies
        self.exporter, self.own_user = exporter, own_user
        self.settings, self.handle, self.watcher, self.run = settings, handle, watcher, run
        self.counts = HttpCounts("") if counts is None else counts
        self.connections: set[HttpConnection | Http2Connection] = set()
        self.core_server: HttpServer | None = None
        # by ticket: of connections that were the core's
        self.moved: dict[int, MovedStream] = {}
        # True for requests that the fast path could answer
        self.is_plain: Callable[[HttpRequest], bool] = lambda request: False
        self.draining = False
        self.now_s = 0.0
        self.date = b""
        # for the next turn of the loop
        self._waiting: deque[HttpConnection | Http2Connection] = deque()
        self._is_posted = False
        self._has_made_large = False  # in this turn
        self._turn_s, self._until_s = turn_s, 0.0

    # -- turns of the loop

    def take_turn(self, connection: "HttpConnection | Http2Connection") -> None:
        """Call the connection's `advance` in the next turn of the loop, or in a later one if it
        has to wait."""
        self._waiting.append(connection)
        self._post()

    def must_wait(self, connection: "HttpConnection | Http2Connection") -> bool:
        """Return whether a large response has been made in this turn, and the connection may ask
        for another one: its last response was large, or it has had none."""
        return self._has_made_large and not connection.is_small

    def is_late(self) -> bool:
        """Return whether the turn has taken its time."""
        now_s = time.monotonic()
        if not self._is_posted:  # the first call in a turn
            self._until_s = now_s + self._turn_s
            self._post()
        return now_s >= self._until_s

    def note_large(self) -> None:
        """Tell that a large response was made in this turn."""
        self._has_made_large = True
        self._post()

    def _post(self) -> None:
        if not self._is_posted:
            self._is_posted = True
            self.watcher.post(self._turn)

    def _turn(self) -> None:
        self._has_made_large = False
        self._until_s = time.monotonic() + self._turn_s
        passed: list[HttpConnection | Http2Connection] = []
        for i in range(len(self._waiting)):
            if i and self.is_late():
                break
            connection = self._waiting.popleft()
            if self.must_wait(connection):
                passed.append(connection)
            else:
                try:
                    connection.advance()
                except Exception:  # else no connection would have another turn
                    _log.exception("a connection cannot go on")
                    connection.abort()
        self._waiting.extendleft(reversed(passed))  # before those that had their turn
        self._is_posted = False
        if self._waiting or self._has_made_large:
            self._post()

    def trace_for(self, headers: dict[bytes, bytes]) -> Trace | None:
        """Return the trace of a request with these headers, if it has one."""
        sample = None if self.exporter is None else self.exporter.sample
        return start_trace(
            sample, headers.get(b"traceparent", b""), headers.get(b"tracestate", b"")
        )

    def changed(self) -> None:
        """Update the counts after a connection was opened or closed."""
        self.counts.connections = len(self.connections)
        if self.core_server is not None:
            self.core_server.outside = len(self.connections)

    def is_full(self, beyond: int = 0) -> bool:
        """Return whether the limit of connections is exceeded by more than `beyond`."""
        held = self.core_server.connections if self.core_server is not None else 0
        return len(self.connections) + held > self.settings.connections_max + beyond

    def can_give_back(self, transport: asyncio.Transport) -> bool:
        """Return whether the fast path may get a connection back."""
        return not (
            self.core_server is None
            or self.draining
            or transport.is_closing()
            or transport.get_write_buffer_size()
        )

    def give_back(
        self, transport: asyncio.Transport, handed: Handed, protocol: Http2Protocol | None = None
    ) -> bool:
        """Give a connection back to the fast path. Return False if it takes none; then nothing has
        changed. protocol: its state, if it speaks HTTP/2."""
        core_server = self.core_server
        assert core_server is not None
        try:
            line = os.dup(transport.get_extra_info("socket").fileno())
        except OSError:  # no descriptor is free
            return False
        transport.pause_reading()
        adopted, returns = False, handed.returns + 1
        try:
            if handed.relay:
                relay = handed.relay
                adopted = core_server.resume(handed.worker, relay, line, returns, protocol)
            else:
                adopted = core_server.adopt(line, returns, protocol)
        finally:
            if not adopted:
                os.close(line)
                transport.resume_reading()
        return adopted

    def drain(self) -> None:
        """Close idle connections now, and the others after their responses."""
        self.draining = True
        for connection in tuple(self.connections):
            connection.drain()

    def check(self, now_s: float, date: bytes) -> None:
        """Check the time limits of all connections. now_s: the loop's time; date: value of the
        header Date."""
        self.now_s, self.date = now_s, date
        for connection in tuple(self.connections):
            connection.check(now_s)


class HttpConnection(asyncio.Protocol):
    """One client. Threads: the event loop's.

    handed: what the fast path knows of it, if it comes from there.
    """

    def __init__(self, service: HttpService, handed: Handed = _FROM_CLIENT) -> None:
        self.service = service
        self._handed = handed
        self._plain = 0
        self._feeding = False
        self.gone = False  # no more responses are sent
        self.is_small = False  # its last response was
        self._transport: asyncio.Transport
        self._open: deque[Exchange] = deque()
        self._unparsed = b""  # received; waits for the connection's turn
        self._partial = b""  # the beginning of a head
        self._seen = 0  # its size when it was last searched for the end
        self._parse_from = 0  # it is parsed when it has so many bytes
        self._is_waiting = False  # `advance` is scheduled
        self._turn_requests = self._turn_bytes = 0
        self._phase = _IDLE
        self._since_s = 0.0
        self._stalled_s = 0.0
        self._unsent = 0  # bytes of the last response that had not left at that time
        self._deaf = False  # further bytes are discarded
        self._ended = False  # the client sends no more: closed once all requests are answered
        self._probed = False
        self._is_first = True  # no request has come before the one that is read
        self._is_stream = False  # of a connection of HTTP/2
        self._paused = False
        self.full = False  # the transport's buffer is full
        self._head: MessageHead
        self._request: HttpRequest  # whose body is being read
        self._chunks: ChunkedBody | None = None
        self._body: bytes | bytearray = b""
        self._body_bytes = 0
        self._held_bytes = 0  # of `_body`, taken from the memory for bodies

    @property
    def is_busy(self) -> bool:
        """True while a request is being read or answered."""
        return bool(self._open or self._unparsed) or self._phase != _IDLE

    @property
    def is_open(self) -> bool:
        """True: it is one of its service's until it is lost."""
        return True

    @property
    def is_chunking(self) -> bool:
        """True if the client understands chunked bodies; HTTP/1.0 does not."""
        return self._head.minor > 0

    # -- the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # of TCP there is no other
        """Register the connection; reject it if there are too many, or if it is another user's."""
        self._transport = transport
        service = self.service
        if self._handed.http2 is not None:
            self._speak_http2(b"")
            return
        _bound_unsent(transport, service.settings.unsent_bytes_max)
        self._since_s = service.now_s
        service.connections.add(self)
        service.changed()
        if service.is_full(REFUSED_MAX):  # to tell each of a flood would take all descriptors
            transport.abort()
            return
        if service.is_full():
            hint = "See http.connections_max."
            self._refuse(
                HttpError(503, "too many connections are open.", hint, ((b"retry-after", b"1"),))
            )
        elif service.own_user and (stranger := self._stranger()) is not None:
            self._refuse(stranger)
        data, self._handed = self._handed.data, self._handed._replace(data=b"")
        if data:
            self.data_received(data)
        if self._phase != _IDLE:
            self._since_s -= self._handed.age_s

    def open_stream(self, transport: asyncio.Transport) -> None:
        """Serve one request of a connection of HTTP/2, which counts for this one."""
        self._transport = transport
        self._since_s = self.service.now_s
        self._is_first, self._is_stream = False, True

    @property
    def client(self) -> str:
        """The address of the client, `HOST:PORT`; empty if it is not known any more."""
        peer = self._ends()[0]
        return join_host_port(*peer[:2]) if peer else ""

    def _ends(self) -> tuple[tuple[str, int], ...]:
        """Return the addresses of the client and of this server, as far as they are known."""
        return cast("tuple[tuple[str, int], ...]", self._handed.ends) or tuple(
            map(self._transport.get_extra_info, ("peername", "sockname"))
        )

    def _stranger(self) -> ClipperError | None:
        """Return why a client without a token is refused; None if it is the server's own user."""
        try:
            if is_own_user(*self._ends()):
                return None
        except ClipperError as shortage:
            return shortage
        hint = "Set http.token, or http.tokens_file, and send Authorization: Bearer TOKEN."
        return HttpError(403, "without a token, only the server's own user may manage it.", hint)

    def connection_lost(self, error: Exception | None) -> None:
        """Cancel the open requests."""
        self.gone = self._deaf = True
        self.service.connections.discard(self)
        self.service.changed()
        for exchange in self._open:
            exchange.cancel()
        self._open.clear()
        self._forget_waiting()
        self._forget_body()

    def pause_again(self) -> None:
        """Pause reading if that is wanted: uvloop has begun it after `connection_made`."""
        if self._paused:
            self._transport.pause_reading()

    def _forget_waiting(self) -> None:
        self._unparsed = self._partial = b""

    def _forget_body(self) -> None:
        """Drop the part of a body that was read."""
        self.service.bodies.give_back(self._held_bytes)
        self._body, self._held_bytes = b"", 0

    def eof_received(self) -> bool:
        """Note that the client sends no more; return whether it has responses to read.

        A client that has closed its connection looks the same, until it is written to (`_probe`).
        So an endless stream ends. TLS cannot go on in one direction.
        """
        transport = self._transport
        if self.gone or self._is_endless() or not transport.can_write_eof() or is_broken(transport):
            return False
        self._ended = True
        self._end_if_answered()
        return not self.gone

    def _is_endless(self) -> bool:
        """Return whether it is the turn of a stream without end."""
        streamed = self._open[0].streamed if self._open else None
        return streamed is not None and streamed.endless

    def _end_if_answered(self) -> None:
        """Close the connection of a client that sends no more and has all its responses."""
        if self._ended and not (self.gone or self._feeding or self._open or self._unparsed):
            self._end()

    def pause_writing(self) -> None:
        """Stop reading, because the client does not read its responses."""
        self.full = True
        self._stalled_s = self.service.now_s
        self._regulate()

    def resume_writing(self) -> None:
        """Go on with the requests that waited."""
        self.full = False
        self._regulate()
        self._go_on()
        if self._open and (body := self._open[0].body) is not None:
            body.room()

    def _regulate(self) -> None:
        """Pause or resume reading: a client that does not read, or sends without end, is not
        read."""
        wanted = (
            self.full
            or bool(self._unparsed)
            or len(self._open) >= self.service.settings.pipeline_max
        )
        is_read = not (self.gone or self._ended or self._transport.is_closing())
        if is_read and wanted != self._paused:
            self._paused = wanted
            (self._transport.pause_reading if wanted else self._transport.resume_reading)()

    # -- reading

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, or keep them while earlier ones wait."""
        if self._deaf:
            return
        if self._unparsed:
            self._unparsed += data
            return
        self._turn_requests = self._turn_bytes = 0
        self._read(data)

    def _read(self, data: bytes) -> None:
        """Parse requests. After `PIECE_BYTES` of them, let other connections take their turn."""
        at, data, self._partial = 0, self._partial + data, b""
        self._feeding = True
        try:
            while at < len(data) and not (
                self._deaf or self._must_wait() or (self._turn_requests and at >= PIECE_BYTES)
            ):
                at = (self._read_body if self._phase == _BODY else self._read_head)(data, at)
        except HttpSyntaxError as error:
            if self._is_first and PREFACE.startswith(data[at : at + len(PREFACE)]):
                self._read_preface(data[at:])
                at = len(data)
            else:
                self._refuse(HttpError(400, f"the request is no HTTP/1.1: {error}."))
        except Exception as error:
            self._refuse(_unreadable(error))
        finally:
            self._feeding = False
        self._unparsed = b"" if self._deaf else data[at:]
        if self._unparsed:
            self._regulate()
            self._go_on()
        elif self._plain:
            self._return()

    def _read_preface(self, data: bytes) -> None:
        """Let the connection speak HTTP/2 from here on, once all of its preface is there."""
        if len(data) < len(PREFACE):
            self._partial = data
            return
        self._speak_http2(data)

    def _speak_http2(self, data: bytes) -> None:
        """Give the transport to a connection of HTTP/2."""
        self.gone = self._deaf = True
        self.service.connections.discard(self)
        connection = Http2Connection(self.service, self._transport, HttpConnection, self._handed)
        self._transport.set_protocol(connection)
        connection.begin(data)

    def _must_wait(self) -> bool:
        """Return whether the next request has to wait, for responses to leave or for the next
        turn."""
        settings = self.service.settings
        return (
            len(self._open) >= settings.pipeline_max
            or self._turn_requests >= settings.pipeline_max
            or (self._turn_requests > 0 and self.service.is_late())
            or self._must_hold()
        )

    def _must_hold(self) -> bool:
        """Return whether the next response has to wait."""
        return (
            self.full
            or self._turn_bytes >= self.service.settings.unsent_bytes_max
            or self.service.must_wait(self)
        )

    def _has_ready(self) -> bool:
        """Return whether the next response can be made."""
        return bool(self._open) and self._open[0].ready

    def _go_on(self) -> None:
        """Schedule `advance` for the loop's next turn, if there is anything to do."""
        if self._has_ready() or (
            self._unparsed and len(self._open) < self.service.settings.pipeline_max
        ):
            self.request_turn()

    def advance(self) -> None:
        """Continue with the requests that waited, as far as there is room. Called by the
        service."""
        self._is_waiting = False
        self._turn_requests = self._turn_bytes = 0
        if self._has_ready():
            self.flush()
        elif self._open and (body := self._open[0].body) is not None and not self.full:
            body.take_turn()
        if self._unparsed and not (self._deaf or self._must_wait()):
            stored, self._unparsed = self._unparsed, b""
            self._read(stored)
        self._regulate()
        self._go_on()
        self._end_if_answered()

    def _read_head(self, data: bytes, at: int) -> int:
        """Read the head of a request; return where it ends: `len(data)` if it is not complete.

        One that arrives in pieces is parsed when its end has arrived, and when its size has
        doubled, so that a client pays for each of its bytes.
        """
        if self._phase == _IDLE:
            if data[at] == _CR and (lines := _EMPTY_LINES.match(data, at)):
                at = lines.end()  # RFC 9112, section 2.2: after a body they are no request
                if at == len(data):
                    return at
            self._phase, self._since_s = _HEAD, self.service.now_s
            self._seen = self._parse_from = 0
        size, head = len(data) - at, None
        if size >= self._parse_from or data.find(_HEAD_END, at + max(0, self._seen - 3)) >= 0:
            head = read_request(data, at, KNOWN_HEADERS, REPEATED)
            self._parse_from = 2 * size
        end = len(data) if head is None else head.end
        if end - at > self.service.settings.header_bytes_max:
            self.refuse_head()
        elif head is None:
            self._partial, self._seen = data[at:], size
        else:
            self._phase, self._head, self._body, self._body_bytes = _BODY, head, b"", 0
            is_chunked = b"transfer-encoding" in head.headers
            self._chunks = ChunkedBody() if is_chunked else None
            self._request = _request_of(head)
            if (refusal := self._refusal(head)) is not None:
                self._refuse(refusal)
            elif not self._is_admitted():
                return end
            elif b"expect" in head.headers and head.minor and not self._open:
                self._transport.write(_CONTINUE)
            if not is_chunked and head.length <= 0 and not self._deaf:
                self._complete()
        return end

    def _is_admitted(self) -> bool:
        """Return whether the request of the head that was read may be made. If not, it is answered,
        and nothing more of the connection is read: so a client without a key takes no memory."""
        if self.service.admit is None:
            return True
        try:
            self.service.admit(self._request)
        except Exception as error:
            self._deaf = True
            self._turn_requests += 1
            if self._chunks is None and self._head.length <= 0:
                self._phase = _IDLE
            exchange = Exchange(self, self._request, True)
            self._open.append(exchange)
            exchange.fail(error)
            return False
        return True

    def _refusal(self, head: MessageHead) -> ClipperError | None:
        """Return why a request with this head is rejected; None if it is not."""
        headers, settings = head.headers, self.service.settings
        coding = headers.get(b"transfer-encoding")
        if head.method == "CONNECT":
            return HttpError(
                405, "this server is not a proxy.", headers=((b"allow", b"GET, POST"),)
            )
        if head.hosts != 1 and (head.hosts or head.minor):
            return HttpError(400, f"the request has {head.hosts} Host headers: it needs one.")
        if coding is not None and not head.minor:
            return HttpError(400, "HTTP/1.0 knows no Transfer-Encoding.")
        if coding is not None and coding.lower() != b"chunked":
            named = coding[:80].decode("latin-1")
            return HttpError(400, f"Transfer-Encoding: {named!r} is not supported: send chunked.")
        if coding is not None and head.length >= 0:
            return HttpError(400, "the request has Content-Length and Transfer-Encoding.")
        if head.length > settings.body_bytes_max:
            return self._too_large()
        if headers.get(b"expect", b"100-continue").lower() != b"100-continue":
            return HttpError(417, "the only expectation known here is 100-continue.")
        return None

    def _read_body(self, data: bytes, at: int) -> int:
        """Read bytes of the body; return where they end."""
        chunks, settings = self._chunks, self.service.settings
        if chunks is None:
            part = data[at : at + self._head.length - self._body_bytes]
            at += len(part)
        else:
            part, at = chunks.feed(data, at)
            if chunks.overhead > settings.header_bytes_max:
                self.refuse_head()
                return at
        self._body_bytes += len(part)
        if self._body_bytes > settings.body_bytes_max:
            self._refuse(self._too_large())
            return at
        if not self.service.bodies.take(len(part)):
            self._refuse(self._no_memory())
            return at
        self._held_bytes += len(part)
        if not self._body:
            self._body = part
        elif isinstance(self._body, bytearray):
            self._body += part
        else:
            self._body = bytearray(self._body) + part
        if chunks.done if chunks is not None else self._body_bytes == self._head.length:
            self._complete()
        return at

    def _complete(self) -> None:
        """Handle the request, which has been read in full."""
        head = self._head
        service = self.service
        request = self._request
        self._phase, self._since_s = _IDLE, service.now_s
        self._is_first = False
        request.body, request.began_ns = self._body, now_ns()
        if service.exporter is not None or b"traceparent" in head.headers:
            request.trace = service.trace_for(head.headers)
        self._deaf = not head.keep_alive  # RFC 9112, section 9.6: no further request is handled
        is_plain = service.is_plain(request)
        if self._is_stream:
            cast("Http2Stream", self._transport).note_request(is_plain)
        self._plain = self._plain + 1 if is_plain else 0
        exchange = Exchange(self, request, not head.keep_alive, self._held_bytes)
        self._body, self._held_bytes = b"", 0
        self._start(exchange)

    def _start(self, item: Exchange | ClipperError) -> None:
        """Handle a request, or respond with its rejection. It is its turn."""
        self._turn_requests += 1
        if isinstance(item, ClipperError):
            exchange = Exchange(self, HttpRequest("GET", b"", b"", {}, b""), True)
            self._open.append(exchange)
            exchange.answer(problem(item, exchange.request.id))
            return
        self._open.append(item)
        self._handle(item)
        if len(self._open) >= self.service.settings.pipeline_max:
            self._regulate()

    def _handle(self, exchange: Exchange) -> None:
        service, request = self.service, exchange.request
        try:
            if len(request.body) >= _WORKER_FROM:
                exchange.settle(WorkerTask(lambda: settled(service.handle(request))))
            else:
                exchange.settle(service.handle(request))
        except Exception as error:
            exchange.fail(error)

    # -- writing

    def flush(self) -> None:
        """Send the responses that are ready, in the order of their requests."""
        transport, waiting = self._transport, self._open
        while waiting:
            exchange = waiting[0]
            if exchange.data is None:
                if not exchange.ready:
                    break
                if self._must_hold():
                    self._go_on()
                    break
                exchange.make()
            if self._ended and self._is_endless():
                self._end()
                return
            if exchange.streamed is not None and not self.gone and not self._has_streamed(exchange):
                break
            waiting.popleft()
            assert exchange.data is not None
            if self.gone:
                continue
            if exchange.data:
                self._turn_bytes += len(exchange.data)
                self._note_size(len(exchange.data))
                transport.write(exchange.data)
            if exchange.close:
                self._end()
                return
        if (self._paused or self._ended) and not self.full:
            self._regulate()
            self._go_on()
        if self._phase == _IDLE:
            self._since_s = self.service.now_s
        if self._ended:
            self._end_if_answered()
        elif self._plain and not self._feeding:
            self._return()

    def _note_size(self, size: int) -> None:
        """Note the size of a response, or of a piece, that is written."""
        self.is_small = size < LARGE_BYTES
        if not self.is_small:
            self.service.note_large()

    def _return(self) -> None:
        """Give the connection back to the fast path, between two requests, after enough eligible
        requests."""
        service, transport = self.service, self._transport
        if (
            self._plain < _PLAIN_FOR_RETURN << min(self._handed.returns, 20)
            or self.is_busy
            or self.full
            or self._paused
            or self._is_stream
            or self.gone
            or self._deaf
            or not service.can_give_back(transport)
        ):
            return
        if service.give_back(transport, self._handed):
            self.gone = self._deaf = True
            transport.abort()  # closes this descriptor; the fast path has a duplicate

    def _has_streamed(self, exchange: Exchange) -> bool:
        """Return whether the exchange's streamed body is complete; start it if it has not
        started."""
        if exchange.data:
            exchange.start_body()
        return exchange.body is not None and exchange.body.ended

    def write_body(self, data: bytes) -> int:
        """Send bytes of a streamed body; return how many bytes the client has not taken yet."""
        if self.gone or self._transport.is_closing():
            return 0
        if len(data) >= LARGE_BYTES:
            self._note_size(len(data))
        self._transport.write(data)
        return self._transport.get_write_buffer_size()

    def request_turn(self) -> None:
        """Call `advance` in a turn of the loop, for the body that is being streamed."""
        if not (self._is_waiting or self.full or self.gone):
            self._is_waiting = True
            self.service.take_turn(self)

    def finish_body(self) -> None:
        """Send the next responses after the last byte of a streamed body."""
        self.flush()

    def _end(self) -> None:
        """Send no more responses, but read on: the client's kernel could discard them if we
        closed now."""
        self.gone = self._deaf = True
        for exchange in self._open:
            exchange.cancel()
        self._open.clear()
        self._forget_body()
        reads_on = not self._ended and (
            self._phase != _IDLE or self._paused or bool(self._unparsed)
        )
        self._forget_waiting()
        self._stalled_s = self.service.now_s
        self._unsent = self._transport.get_write_buffer_size()
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        if reads_on and self._transport.can_write_eof():
            self._transport.write_eof()
        else:  # TLS sends close_notify and reads on
            self._transport.close()

    def _refuse(self, error: ClipperError) -> None:
        """Respond with an error, as the last response: the rest of the connection cannot be
        parsed."""
        if self.gone or self._deaf:
            return
        self._deaf = True
        self._forget_body()
        if self._phase == _IDLE:
            self._phase = _HEAD
        self._start(error)

    def refuse_head(self) -> None:
        """Respond that the head is too large, as the last response."""
        most = self.service.settings.header_bytes_max
        self._refuse(
            HttpError(
                431,
                f"request line and headers have more than {most} bytes.",
                "See http.header_bytes_max.",
            )
        )

    def _too_large(self) -> ClipperError:
        most = self.service.settings.body_bytes_max
        return TooLarge(f"the body has more than {most} bytes.", hint="See http.body_bytes_max.")

    def _no_memory(self) -> ClipperError:
        most = self.service.bodies.bytes_max
        return HttpError(
            503,
            f"the bodies of all requests under way have {most} bytes already.",
            "Send it again. See http.bodies_bytes_max.",
        )

    # -- time

    def drain(self) -> None:
        """Close the connection, or its streams, after the open responses."""
        if not self.is_busy:
            self._end()
        for exchange in tuple(self._open):
            if exchange.streamed is not None and exchange.body is not None:
                exchange.close = True
                if exchange.streamed.endless and not exchange.data:
                    exchange.body.end()

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    def _probe(self) -> None:
        """Send once what a client skips that waits for a response: one that has closed its
        connection, not only its sending side, resets it."""
        waits = bool(self._open) and self._open[0].data is None and self._head.minor > 0
        if waits and not self._probed:
            self._probed = True
            self._transport.write(_CONTINUE)

    def check(self, now_s: float) -> None:
        """Check the time limits of this connection. now_s: the loop's time."""
        settings, unsent = self.service.settings, self._transport.get_write_buffer_size()
        if self.gone:
            if unsent < self._unsent:
                self._unsent, self._stalled_s = unsent, now_s
            elif now_s - self._stalled_s > (settings.idle_s if unsent else _LINGER_S):
                self._transport.abort()
        elif self.full:
            if now_s - self._stalled_s > settings.idle_s:
                self._transport.abort()
        elif self._ended:
            if is_broken(self._transport):
                self._transport.abort()
            else:
                self._probe()
        elif self._deaf or self._open or self._unparsed:
            return
        elif self._phase == _IDLE:
            if now_s - self._since_s > settings.idle_s:
                # `close` would wait until they have left
                (self._transport.abort if unsent else self._end)()
        elif self._phase == _HEAD:
            if now_s - self._since_s > settings.header_s:
                self._refuse(
                    HttpError(
                        408,
                        f"the headers did not arrive within {settings.header_s:g} s.",
                        "See http.header_s.",
                    )
                )
        elif (
            late_s := now_s - self._since_s - settings.header_s
        ) > 0 and self._body_bytes < late_s * settings.body_bytes_s_min:
            slow = f"the body came with less than {settings.body_bytes_s_min} bytes a second."
            self._refuse(HttpError(408, slow, "See http.body_bytes_s_min."))


def _unreadable(error: BaseException) -> ClipperError:
    """Return the rejection of a request whose parsing raised `error`."""
    if isinstance(error, MemoryError):
        return OutOfMemory(
            "no memory for the request.", hint="Send it again, or less in one request."
        )
    _log.exception("reading a request failed", exc_info=error)
    return HttpError(400, "the request cannot be read.")


def _request_of(head: MessageHead) -> HttpRequest:
    """Return the request of a head, still without a body."""
    path, query = head.target, b""
    if b"?" in path:
        path, _, query = path.partition(b"?")
    if path[:1] != b"/":
        path = _origin_form(path)
    return HttpRequest(head.method, path, query, head.headers, b"")


def _origin_form(target: bytes) -> bytes:
    """Return the path of `http://host/path`, as proxies write it; other targets are unchanged."""
    scheme, found, rest = target.partition(b"://")
    return (
        b"/" + rest.partition(b"/")[2]
        if found and scheme.lower() in (b"http", b"https")
        else target
    )
