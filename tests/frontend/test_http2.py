"""HTTP/2 gives the same answers as HTTP/1.1: without sockets, where the test says what time it is
and what the client reads; then over sockets, with a client that others wrote."""

import http.client
import json
import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable
from typing import Any

import h2.config
import h2.connection
import h2.events
import pytest

import clipper
from clipper.errors import ClipperError
from clipper.frontend.http.http2 import PREFACE, STREAM_BYTES, TURN_CALLS
from clipper.frontend.http.messages import (
    DeferredResponse,
    HandlerResult,
    HttpError,
    HttpRequest,
    HttpResponse,
    StreamedResponse,
)
from clipper_core.http.http2_protocol import Http2Error
from tests.core.test_http2_protocol import frames_of
from tests.frontend.conftest import PATIENCE_S, InMemoryConnection, Reply
from tests.frontend.test_connection import Pending, Waiting, echo

MADE_UP = re.compile(rb"[0-9a-f]{12}-[0-9a-f]+")  # ids of requests that brought none
OF_HTTP_1 = ("connection", "transfer-encoding", "content-length")


def client_of_others() -> h2.connection.H2Connection:
    config = h2.config.H2Configuration(client_side=True, header_encoding="utf-8")
    return h2.connection.H2Connection(config)


class Client:
    """A client of the library `h2`, and what it has received. send: takes its bytes and returns the
    server's. reads: whether it opens its windows again for what it receives."""

    def __init__(
        self, send: Callable[[bytes], bytes], reads: bool = True, authority: str = "here"
    ) -> None:
        self._send = send
        self._reads = reads
        self._authority = authority
        self.h2 = client_of_others()
        self.replies: dict[int, tuple[int, dict[str, str], bytes]] = {}
        self.ended: list[int] = []
        self.resets: dict[int, int] = {}
        self.informed: list[int] = []
        self.gone: h2.events.ConnectionTerminated | None = None
        self.h2.initiate_connection()
        self.flush()

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        ends: bool = True,
    ) -> int:
        """Send a request; return its stream."""
        stream = self.h2.get_next_available_stream_id()
        fields = [
            (":method", method),
            (":scheme", "http"),
            (":path", path),
            (":authority", self._authority),
        ]
        fields += [(name.lower(), value) for name, value in (headers or {}).items()]
        self.h2.send_headers(stream, fields, end_stream=body is None and ends)
        self.flush()
        if body is not None:
            self.send(stream, body, ends)
        return stream

    def send(self, stream: int, body: bytes, ends: bool = True) -> None:
        while len(body) > 16384:
            if self.h2.local_flow_control_window(stream) < 16384:
                self.flush(b"")
            if stream in self.ended:
                return
            self.h2.send_data(stream, body[:16384])
            body = body[16384:]
            self.flush()
        if stream not in self.ended:
            self.h2.send_data(stream, body, end_stream=ends)
            self.flush()

    def flush(self, more: bytes = b"") -> None:
        """Send what waits, and heed what comes."""
        data = self.h2.data_to_send() + more
        while True:
            came = self._send(data)
            for event in self.h2.receive_data(came):
                self._heed(event)
            data = self.h2.data_to_send()
            if not data:
                return

    def _heed(self, event: Any) -> None:
        if isinstance(event, h2.events.ResponseReceived):
            fields = dict(event.headers)
            self.replies[event.stream_id] = (int(fields.pop(":status")), fields, b"")
        elif isinstance(event, h2.events.InformationalResponseReceived):
            self.informed.append(event.stream_id)
        elif isinstance(event, h2.events.DataReceived):
            status, fields, body = self.replies[event.stream_id]
            self.replies[event.stream_id] = (status, fields, body + event.data)
            if self._reads:
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, h2.events.StreamEnded):
            self.ended.append(event.stream_id)
        elif isinstance(event, h2.events.StreamReset):
            self.resets[event.stream_id] = event.error_code
        elif isinstance(event, h2.events.ConnectionTerminated):
            self.gone = event


class Pair:
    """A client and a server's connection, without a socket."""

    def __init__(
        self, handle: Callable[[HttpRequest], HandlerResult], reads: bool = True, **settings: Any
    ) -> None:
        self.connection = InMemoryConnection(handle, **settings)
        self.transport = self.connection.transport
        self.client = Client(self._exchange, reads)

    def _exchange(self, data: bytes) -> bytes:
        if data:
            self.connection.feed(data)
        while self.connection.watcher.turn():
            pass
        written, self.transport.written = self.transport.written, b""
        return written

    def at(self, now_s: float) -> "Pair":
        self.connection.at(now_s)
        self.client.flush()
        return self

    def body(self, stream: int) -> bytes:
        return self.client.replies[stream][2]


# -- without sockets


def test_a_connection_that_begins_so_speaks_http_2_however_it_is_cut() -> None:
    client = client_of_others()
    client.initiate_connection()
    client.send_headers(
        1,
        [(":method", "GET"), (":scheme", "http"), (":path", "/a"), (":authority", "here")],
        end_stream=True,
    )
    data = client.data_to_send()
    assert data.startswith(PREFACE)
    for cut in range(1, len(PREFACE) + 5):
        connection = InMemoryConnection(echo).feed(data[:cut]).feed(data[cut:])
        assert b"/a|" in connection.transport.written
    connection = InMemoryConnection(echo)
    for i in range(len(data)):
        connection.feed(data[i : i + 1])
    assert b"/a|" in connection.transport.written
    assert connection.service.connections == {connection.transport.protocol}


def test_a_preface_after_a_request_or_half_of_one_is_no_http_2() -> None:
    connection = InMemoryConnection(echo).feed(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" + PREFACE)
    assert connection.statuses == [200, 400]
    assert InMemoryConnection(echo).feed(PREFACE[:-3] + b"xyz").statuses == [400]
    connection = InMemoryConnection(echo).feed(PREFACE[:20]).at(6.0)
    assert connection.statuses == [408]


def answer(request: HttpRequest) -> HandlerResult:
    """Answer by path: by every kind of response there is."""
    if request.path == b"/refused":
        raise HttpError(429, "too many.", "Wait.", ((b"retry-after", b"1"),))
    if request.path == b"/failed":
        raise ClipperError("it failed.")
    if request.path == b"/empty":
        return HttpResponse(204, b"")
    if request.path == b"/large":
        return HttpResponse(200, b"x" * 300_000)
    if request.path == b"/stream":

        def start(body: Any) -> None:
            for i in range(3):
                body.write(b"%d" % i * 50)
            body.end()

        return StreamedResponse(start, b"text/plain")
    return echo(request)


REQUESTS: list[tuple[str, str, bytes | None, dict[str, str]]] = [
    ("GET", "/a?b=c", None, {}),
    ("POST", "/a", b"body", {"Content-Length": "4"}),
    ("POST", "/a", b"body", {}),
    ("POST", "/a", b"", {}),
    ("POST", "/a", b"b" * 100_000, {}),
    ("HEAD", "/a", None, {}),
    ("HEAD", "/large", None, {}),
    ("HEAD", "/stream", None, {}),
    ("GET", "/large", None, {"X-Request-Id": "mine"}),
    ("GET", "/stream", None, {}),
    ("GET", "/empty", None, {}),
    ("GET", "/refused", None, {"X-Request-Id": "mine"}),
    ("GET", "/failed", None, {"X-Request-Id": "mine"}),
    ("POST", "/a", b"body", {"Expect": "something", "X-Request-Id": "mine"}),
    ("GET", "/a", None, {"X-Long": "x" * 20_000}),
    ("POST", "/a", b"b" * 100_001, {}),
    ("POST", "/a", b"b", {"Content-Length": "100001"}),
]


def over_http_1(method: str, path: str, body: bytes | None, headers: dict[str, str]) -> Any:
    lines = [f"{method} {path} HTTP/1.1", "Host: here", *(f"{k}: {v}" for k, v in headers.items())]
    text = body or b""
    if body is not None and "Content-Length" not in headers:
        lines.append("Transfer-Encoding: chunked")
        text = (b"%x\r\n%s\r\n" % (len(text), text) if text else b"") + b"0\r\n\r\n"
    connection = InMemoryConnection(answer, body_bytes_max=100_000)
    connection.feed("\r\n".join([*lines, "", ""]).encode() + text)
    while connection.watcher.turn():
        pass
    head, _, rest = connection.transport.written.partition(b"\r\n\r\n")
    status, *fields = head.decode().split("\r\n")
    names = dict(field.split(": ", 1) for field in fields)
    if "transfer-encoding" in names and method != "HEAD":
        chunks = b""
        while rest and not rest.startswith(b"0\r\n"):
            size, _, rest = rest.partition(b"\r\n")
            chunks, rest = chunks + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
        rest = chunks
    return int(status.split()[1]), names, rest


@pytest.mark.parametrize("number", range(len(REQUESTS)))
def test_answers_are_those_of_http_1(number: int) -> None:
    method, path, body, headers = REQUESTS[number]
    pair = Pair(answer, body_bytes_max=100_000)
    stream = pair.client.ask(method, path, body, headers)
    status, fields, data = pair.client.replies[stream]
    expected = over_http_1(method, path, body, headers)
    assert (status, MADE_UP.sub(b"ID", data)) == (expected[0], MADE_UP.sub(b"ID", expected[2]))
    for name in {*fields, *expected[1]} - {*OF_HTTP_1, "x-request-id"}:
        assert fields.get(name) == expected[1].get(name)
    assert "connection" not in fields
    assert pair.client.ended == [stream]
    assert pair.client.resets.get(stream, 0) == Http2Error.NO_ERROR
    assert pair.body(pair.client.ask("GET", "/next")) == b"/next|"
    assert len(pair.connection.service.connections) == 1


def test_expectations_are_met_before_the_body() -> None:
    pair = Pair(echo)
    stream = pair.client.ask("POST", "/a", None, {"expect": "100-continue"}, ends=False)
    assert pair.client.informed == [stream]
    pair.client.send(stream, b"body")
    assert pair.body(stream) == b"/a|body"


def test_requests_are_answered_in_any_order() -> None:
    handle = Waiting()
    pair = Pair(handle)
    first, second = pair.client.ask("GET", "/1"), pair.client.ask("GET", "/2")
    now = pair.client.ask("GET", "/now")
    assert pair.client.ended == [now]
    handle.finish(pair.connection, 1)
    handle.finish(pair.connection, 0)
    pair.client.flush()
    assert pair.client.ended == [now, second, first]
    assert pair.body(first) == b"/1"


def test_a_request_without_a_key_is_refused_at_its_head() -> None:
    def admit(request: HttpRequest) -> None:
        raise HttpError(401, "no key.", "")

    pair = Pair(echo)
    pair.connection.service.admit = admit
    stream = pair.client.ask("POST", "/a", None, ends=False)
    assert pair.client.replies[stream][0] == 401
    assert pair.client.resets == {stream: Http2Error.NO_ERROR}
    assert pair.connection.service.bodies.held == 0


def test_a_stream_that_is_reset_cancels_its_query_only() -> None:
    handle = Waiting()
    pair = Pair(handle)
    first, second = pair.client.ask("GET", "/1"), pair.client.ask("GET", "/2")
    pair.client.h2.reset_stream(first)
    pair.client.flush()
    assert [future.is_cancelled for future in handle.futures] == [True, False]
    handle.finish(pair.connection, 1)
    pair.client.flush()
    assert pair.body(second) == b"/2"


def test_a_connection_that_breaks_cancels_all_its_queries() -> None:
    handle = Waiting()
    pair = Pair(handle)
    pair.client.ask("GET", "/1")
    pair.client.ask("POST", "/2", b"half", ends=False)
    assert pair.connection.service.bodies.held == 4
    pair.transport.protocol.connection_lost(None)
    assert handle.futures[0].is_cancelled
    assert pair.connection.service.bodies.held == 0
    assert not pair.connection.service.connections


def test_a_client_that_ends_its_side_gets_its_responses() -> None:
    handle = Waiting()
    pair = Pair(handle)
    stream = pair.client.ask("GET", "/1")
    assert pair.transport.protocol.eof_received()
    assert not pair.transport.closed
    handle.finish(pair.connection, 0)
    pair.client.flush()
    assert pair.body(stream) == b"/1"
    assert pair.transport.closed
    pair = Pair(handle)
    assert not pair.transport.protocol.eof_received()


def test_a_client_that_says_it_goes_gets_its_responses() -> None:
    handle = Waiting()
    pair = Pair(handle)
    stream = pair.client.ask("GET", "/1")
    pair.client.h2.close_connection()
    pair.connection.feed(pair.client.h2.data_to_send())
    assert not pair.transport.eof
    handle.finish(pair.connection, 0)
    assert b"/1" in pair.transport.written
    assert pair.transport.eof
    assert stream == 1


def test_a_drain_answers_what_is_open_and_takes_nothing_more() -> None:
    handle = Waiting()
    pair = Pair(handle)
    first = pair.client.ask("GET", "/1")
    pair.connection.service.drain()
    handle.finish(pair.connection, 0)
    sent = list(frames_of(pair.transport.written))
    assert [(kind, stream) for kind, _, stream, _ in sent] == [(7, 0), (6, 0), (1, 1), (0, 1)]
    assert sent[-1][1:] == (1, first, b"/1")
    assert not pair.transport.eof  # the client may have sent more before it knew
    pair.connection.at(0.5)
    assert not pair.transport.eof
    pair.connection.at(1.6)
    assert pair.transport.eof
    idle = Pair(handle)
    idle.connection.service.drain()
    assert idle.transport.eof


def test_a_large_response_leaves_as_its_client_reads() -> None:
    pair = Pair(answer, reads=False)
    stream = pair.client.ask("GET", "/large")
    assert len(pair.body(stream)) == 65535
    small = pair.client.ask("GET", "/empty")
    assert small in pair.client.ended
    pair.client.h2.acknowledge_received_data(65535, stream)
    pair.client.flush()
    assert len(pair.body(stream)) == 2 * 65535
    pair.at(61.0)
    assert pair.client.resets == {stream: Http2Error.INTERNAL_ERROR}
    pair.client.h2.increment_flow_control_window(1000)
    assert pair.body(pair.client.ask("GET", "/next")) == b"/next|"


def test_streams_take_turns() -> None:
    """Two large responses leave side by side, whatever the transport takes at a time."""
    pair = Pair(answer, unsent_bytes_max=1 << 20)
    link = pair.transport.protocol
    link.pause_writing()
    first, second = pair.client.ask("GET", "/large"), pair.client.ask("GET", "/large")
    assert first not in pair.client.replies
    while second not in pair.client.ended:
        link.resume_writing()
        link.pause_writing()
        pair.client.flush()
        if second in pair.client.replies and first not in pair.client.ended:
            assert abs(len(pair.body(first)) - len(pair.body(second))) <= 65536


def test_no_more_responses_are_made_than_wait() -> None:
    made: list[bytes] = []
    futures: list[Pending] = []

    def handle(request: HttpRequest) -> HandlerResult:
        def make() -> HttpResponse:
            made.append(request.path)
            return HttpResponse(200, bytes(40_000))

        futures.append(Pending())
        return DeferredResponse((futures[-1],), make)  # type: ignore[arg-type]

    pair = Pair(handle, reads=False, unsent_bytes_max=100_000)
    streams = [pair.client.ask("GET", f"/{i}") for i in range(20)]
    waiting = Waiting()
    waiting.futures = futures
    for i in range(20):
        waiting.finish(pair.connection, i)
    pair.client.flush()
    # 65535 bytes have left; the longest response, and the one that reaches the limit, come on top
    assert len(made) <= (65535 + 100_000 + 40_000) // 40_000 + 1
    for _ in range(40):
        for stream in streams:
            window = pair.client.h2.remote_flow_control_window(stream)
            unread = min(65535 - window, len(pair.client.replies.get(stream, (0, {}, b""))[2]))
            if stream not in pair.client.ended and unread > 0:
                pair.client.h2.acknowledge_received_data(unread, stream)
        left = 65535 - pair.client.h2._inbound_flow_control_window_manager.current_window_size
        if left > 0:
            pair.client.h2.increment_flow_control_window(left)
        pair.client.flush()
    assert len(made) == 20
    assert sorted(pair.client.ended) == streams


def test_a_streamed_response_waits_for_its_client() -> None:
    rooms: list[bool] = []

    def handle(request: HttpRequest) -> HandlerResult:
        def start(body: Any) -> None:
            def go_on() -> None:
                while len(rooms) < 50:
                    rooms.append(body.write(bytes(20_000)))
                    if not rooms[-1]:
                        return
                body.end()

            body.listen(room=go_on)
            go_on()

        return StreamedResponse(start, b"text/plain")

    pair = Pair(handle, reads=False)
    stream = pair.client.ask("GET", "/")
    assert rooms[-1] is False
    assert len(rooms) * 20_000 <= 65535 + STREAM_BYTES + 20_000
    while stream not in pair.client.ended:
        pair.client.h2.acknowledge_received_data(
            65535 - pair.client.h2.remote_flow_control_window(stream), stream
        )
        pair.client.flush()
    assert len(pair.body(stream)) == 50 * 20_000


def test_slow_clients_are_told_so() -> None:
    pair = Pair(echo)
    pair.connection.feed(b"\0\0\x05\x01\x04\0\0\0\x01ab")  # HEADERS that are cut off
    pair.at(4.0)
    assert pair.client.gone is None
    pair.at(6.0)
    assert pair.client.gone is not None
    assert pair.client.gone.error_code == Http2Error.ENHANCE_YOUR_CALM
    assert pair.transport.eof
    pair = Pair(echo)
    stream = pair.client.ask("POST", "/", b"x", ends=False)
    pair.at(7.0)
    assert pair.client.replies[stream][0] == 408
    assert pair.client.gone is None


def test_an_idle_connection_is_closed() -> None:
    pair = Pair(Waiting())
    pair.client.ask("GET", "/now")
    pair.at(59.0)
    assert pair.client.gone is None
    pair.client.h2.ping(b"12345678")
    pair.client.flush()
    pair.at(61.0)
    assert pair.client.gone is not None
    assert pair.client.gone.error_code == Http2Error.NO_ERROR
    pair = Pair(Waiting())
    pair.client.ask("GET", "/1")
    pair.at(100.0)
    assert pair.client.gone is None


def test_a_client_that_reads_nothing_is_not_read_on() -> None:
    pair = Pair(echo)
    link = pair.transport.protocol
    link.pause_writing()
    ping = b"\0\0\x08\x06\0\0\0\0\0" + bytes(8)
    pair.connection.feed(ping * 500)
    assert not pair.transport.paused
    pair.connection.feed(ping * 600)
    assert pair.transport.paused
    link.resume_writing()
    assert not pair.transport.paused
    link.pause_writing()
    pair.connection.at(61.0)
    assert pair.transport.aborted


def test_an_error_of_the_connection_is_told_with_its_reason() -> None:
    handle = Waiting()
    pair = Pair(handle)
    pair.client.ask("GET", "/1")
    pair.client.flush(b"\0\0\x07\x06\0\0\0\0\0" + bytes(7))
    assert handle.futures[0].is_cancelled
    assert pair.client.gone is not None
    assert pair.client.gone.error_code == Http2Error.FRAME_SIZE_ERROR
    assert pair.client.gone.additional_data == b"PING has eight bytes"
    assert pair.transport.eof
    pair.connection.feed(b"more")
    pair.connection.at(3.0)
    assert pair.transport.aborted


def test_calls_of_a_connection_let_those_of_others_pass() -> None:
    pair = Pair(echo)
    other = pair.connection.beside()
    other.feed(PREFACE + bytes(3) + b"\4" + bytes(5))
    pair.connection.service._turn_s = 0.0
    order: list[str] = []
    many, few = (each.transport.protocol for each in (pair.connection, other))
    for i in range(2 * TURN_CALLS + 2):
        many.begin_call(lambda i=i: order.append(f"many {i}"))
    assert len(order) == TURN_CALLS
    few._begun = TURN_CALLS
    few.begin_call(lambda: order.append("few"))
    while pair.connection.watcher.turn():
        pass
    first, last = (f"many {i}" for i in (2 * TURN_CALLS - 1, 2 * TURN_CALLS))
    assert order.index(first) < order.index("few") < order.index(last)
    assert len(order) == 2 * TURN_CALLS + 3
    many.begin_call(lambda: order.append("late"))
    many.begin_call(lambda: order.append("later"))
    many.connection_lost(None)
    while pair.connection.watcher.turn():
        pass
    assert "later" not in order


# -- over sockets


class Line:
    """A client on a socket."""

    def __init__(self, address: str, context: ssl.SSLContext | None = None) -> None:
        host, _, port = address.rpartition(":")
        self.socket: Any = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
        if context is not None:
            self.socket = context.wrap_socket(self.socket, server_hostname="localhost")
        self.client = Client(self._exchange, authority=address)

    def _exchange(self, data: bytes) -> bytes:
        if data:
            self.socket.sendall(data)
        return b""

    def wait(self, *streams: int) -> None:
        """Read until these streams have ended."""
        while not set(streams) <= {*self.client.ended, *self.client.resets}:
            data = self.socket.recv(1 << 16)
            assert data, "the server has closed the connection"
            for event in self.client.h2.receive_data(data):
                self.client._heed(event)
            self.client.flush()

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Reply:
        """Send a request and return its reply."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        more = {} if data is None else {"content-length": str(len(data))}
        stream = self.client.ask(method, path, data, {**more, **(headers or {})})
        self.wait(stream)
        return Reply(*self.client.replies[stream])

    def __enter__(self) -> "Line":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


SENT: list[tuple[str, str, Any, dict[str, str]]] = [
    ("POST", "/api/total/predict", {"input": [1, 2, 3.5]}, {"X-Request-Id": "mine"}),
    ("POST", "/api/total/predict", {"inputs": [[1, 2, 3], [4, 5, 6]]}, {"X-Request-Id": "mine"}),
    ("POST", "/api/total/predict", b"no JSON", {"X-Request-Id": "mine"}),
    ("POST", "/api/totl/predict", {"input": [1, 2, 3]}, {"X-Request-Id": "mine"}),
    ("GET", "/api/total", None, {"X-Request-Id": "mine"}),
    ("DELETE", "/api/total", None, {"X-Request-Id": "mine"}),
    ("GET", "/v2/models/sum", None, {"X-Request-Id": "mine"}),
    ("GET", "/v2/health/ready", None, {"X-Request-Id": "mine"}),
    (
        "POST",
        "/v2/models/total/infer",
        {
            "inputs": [
                {"name": "input", "shape": [1, 3], "datatype": "FP64", "data": [1, 2, 3]},
            ]
        },
        {"X-Request-Id": "mine"},
    ),
    ("HEAD", "/openapi.json", None, {"X-Request-Id": "mine"}),
    ("OPTIONS", "/api/total", None, {"X-Request-Id": "mine"}),
]
MANAGED: list[tuple[str, str, Any, dict[str, str]]] = [
    ("GET", "/admin/applications/total", None, {"X-Request-Id": "mine"}),
    ("PUT", "/admin/applications/more", {"models": ["none"]}, {"X-Request-Id": "mine"}),
    ("GET", "/admin/nothing", None, {"X-Request-Id": "mine"}),
    ("POST", "/v2/repository/index", {}, {"X-Request-Id": "mine"}),
]
CHANGING = ("id", "latency_us", "date", "etag", "prediction_id", "parameters")


def steady(reply: Reply) -> Any:
    """Return a reply without what differs each time."""
    headers = {
        name: value
        for name, value in reply.headers.items()
        if name not in (*OF_HTTP_1, *CHANGING, "x-clipper-id")
    }
    try:
        body = json.loads(reply.body)
    except ValueError:
        return reply.status, headers, reply.body
    for answer_body in body.get("predictions", [body]) if isinstance(body, dict) else []:
        for name in CHANGING:
            answer_body.pop(name, None)
    return reply.status, headers, body


def test_rest_and_oip_over_both(server: clipper.ClipperServer, query: Any) -> None:
    with Line(server.http_address) as line:
        for method, path, body, headers in SENT:
            ours = line.ask(method, path, body, headers)
            assert steady(ours) == steady(query(method, path, body, headers)), path


def test_management_over_both(server: clipper.ClipperServer, manage: Any) -> None:
    with Line(server.admin_address) as line:
        for method, path, body, headers in MANAGED:
            ours = line.ask(method, path, body, headers)
            assert steady(ours) == steady(manage(method, path, body, headers)), path


def test_many_requests_at_once(server: clipper.ClipperServer) -> None:
    with Line(server.http_address) as line:
        streams = {}
        for i in range(60):
            body = json.dumps({"input": [i, 1, 2]}).encode()
            streams[line.client.ask("POST", "/api/total/predict", body)] = i
        line.wait(*streams)
        for stream, i in streams.items():
            assert json.loads(line.client.replies[stream][2])["output"] == i + 3


def test_half_a_connection_is_answered(server: clipper.ClipperServer) -> None:
    with Line(server.http_address) as line:
        stream = line.client.ask("POST", "/api/total/predict", b'{"input": [1, 2, 3]}')
        line.socket.shutdown(socket.SHUT_WR)
        while stream not in line.client.ended:
            data = line.socket.recv(1 << 16)
            assert data
            for event in line.client.h2.receive_data(data):
                line.client._heed(event)
        assert json.loads(line.client.replies[stream][2])["output"] == 6


def has_http_2(curl: str) -> bool:
    run = subprocess.run([curl, "--version"], capture_output=True, timeout=PATIENCE_S, check=True)
    return b"HTTP2" in run.stdout


def test_curl(server: clipper.ClipperServer) -> None:
    curl = shutil.which("curl")
    if curl is None or not has_http_2(curl):
        pytest.skip("no curl with HTTP/2 is installed")
    url = f"http://{server.http_address}/api/total/predict"
    for option, version in (("--http2-prior-knowledge", "2"), ("--http2", "1.1")):
        run = subprocess.run(
            [curl, "-s", option, "-w", " %{http_version}", url, "-d", '{"input": [1, 2, 3.5]}'],
            capture_output=True,
            timeout=PATIENCE_S,
            check=True,
        )
        body, _, spoken = run.stdout.rpartition(b" ")
        assert json.loads(body)["output"] == 6.5
        assert spoken.decode() == version


def test_a_connection_counts_once(server: clipper.ClipperServer, manage: Any) -> None:
    connection = http.client.HTTPConnection(server.http_address, timeout=PATIENCE_S)
    connection.connect()
    with Line(server.http_address) as line:
        assert line.ask("GET", "/api").status == 200
        counts = [each.counts for each in server._endpoints.frontends._listeners._each]
        assert counts[0].connections == 1
    connection.close()
