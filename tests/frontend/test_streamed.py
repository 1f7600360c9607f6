"""Responses that are written in parts: chunks, turns, room in the buffers, clients that disconnect
or do not read; and server-sent events."""

import http.client
import socket
from typing import Any

import pytest

import clipper
from clipper.frontend.http.messages import (
    HandlerResult,
    HttpRequest,
    HttpResponse,
    StreamedResponse,
    WorkerTask,
)
from clipper.frontend.http.server_sent_events import (
    CONTENT_TYPE,
    HEARTBEAT,
    encode_event,
    last_event_id,
)
from clipper.frontend.http.streamed_body import UNREAD_BYTES_MAX, StreamedBody
from tests.frontend.conftest import PATIENCE_S, QUICK, InMemoryConnection


class Feed:
    """A handler that streams /feed (without an end) or /some (with one); the test has the
    bodies."""

    def __init__(self) -> None:
        self.bodies: list[StreamedBody] = []
        self.seen: list[str] = []

    def __call__(self, request: HttpRequest) -> HandlerResult:
        if request.path == b"/now":
            return HttpResponse(200, b"now")
        if request.path == b"/work":
            return WorkerTask(lambda: StreamedResponse(self.begin, b"text/plain"))
        return StreamedResponse(self.begin, CONTENT_TYPE, endless=request.path == b"/feed")

    def begin(self, body: StreamedBody) -> None:
        self.bodies.append(body)
        body.listen(room=lambda: self.seen.append("room"), gone=lambda: self.seen.append("gone"))


def get(path: str, *headers: str, version: str = "1.1") -> bytes:
    return "\r\n".join([f"GET {path} HTTP/{version}", "Host: here", *headers, "", ""]).encode()


def written(connection: InMemoryConnection) -> tuple[bytes, bytes]:
    """Return and remove (head, rest) of what was written."""
    head, _, rest = connection.transport.written.partition(b"\r\n\r\n")
    connection.transport.written = b""
    return head, rest


def test_what_is_written_leaves_at_once_in_chunks() -> None:
    feed = Feed()
    connection = InMemoryConnection(feed).feed(get("/some"))
    head, rest = written(connection)
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"content-type: text/event-stream" in head
    assert b"transfer-encoding: chunked" in head
    assert b"content-length" not in head
    assert b"connection: close" not in head
    assert rest == b""
    body = feed.bodies[0]
    assert body.write(b"hello")
    assert body.write(b"")
    assert body.write(b"x" * 300)
    assert connection.transport.written == b"5\r\nhello\r\n" + b"12c\r\n" + b"x" * 300 + b"\r\n"
    body.end()
    body.end()
    assert connection.transport.written.endswith(b"\r\n0\r\n\r\n")
    assert not connection.transport.closed
    assert not body.write(b"after the end")
    connection.transport.written = b""
    assert connection.feed(get("/now")).statuses == [200]  # the connection goes on


def test_it_waits_for_its_turn_and_others_for_its_end() -> None:
    feed = Feed()
    connection = InMemoryConnection(feed).feed(get("/some") + get("/now") + get("/some"))
    assert len(feed.bodies) == 1
    assert connection.transport.written.count(b"HTTP/1.1") == 1
    feed.bodies[0].write(b"a")
    feed.bodies[0].end()
    assert connection.transport.written.count(b"HTTP/1.1") == 3
    assert len(feed.bodies) == 2
    assert connection.transport.written.index(b"0\r\n\r\n") < connection.transport.written.index(
        b"now"
    )


def test_a_body_may_be_written_and_ended_before_start_returns() -> None:
    def begin(body: StreamedBody) -> None:
        body.write(b"all")
        body.end()

    connection = InMemoryConnection(lambda _: StreamedResponse(begin, b"text/plain")).feed(
        get("/a") + get("/b")
    )
    assert connection.transport.written.count(b"3\r\nall\r\n0\r\n\r\n") == 2
    assert not connection.protocol.is_busy


def test_http_1_0_gets_no_chunks_and_a_close() -> None:
    feed = Feed()
    connection = InMemoryConnection(feed).feed(
        get("/some", "Connection: keep-alive", version="1.0")
    )
    feed.bodies[0].write(b"plain")
    feed.bodies[0].end()
    head, rest = written(connection)
    assert b"chunked" not in head
    assert b"connection: close" in head
    assert rest == b"plain"
    assert connection.transport.closed


def test_head_gets_the_head() -> None:
    feed = Feed()
    connection = InMemoryConnection(feed).feed(get("/some").replace(b"GET", b"HEAD"))
    assert b"chunked" in connection.transport.written
    assert not feed.bodies
    assert not connection.protocol.is_busy


def test_a_worker_may_decide_to_stream() -> None:
    feed = Feed()
    connection = InMemoryConnection(feed).feed(get("/work"))
    work, exchange = connection.work.pop()
    exchange.settle(work.run())
    assert len(feed.bodies) == 1
    assert b"chunked" in connection.transport.written


def test_a_disconnect_is_reported_once_and_nothing_more_is_written() -> None:
    feed = Feed()
    connection = InMemoryConnection(feed).feed(get("/feed"))
    feed.bodies[0].write(b"x")
    before = connection.transport.written
    connection.protocol.connection_lost(None)  # type: ignore[arg-type]
    assert feed.seen == ["gone"]
    assert feed.bodies[0].gone
    assert not feed.bodies[0].write(b"y")
    feed.bodies[0].end()
    assert connection.transport.written == before
    assert feed.seen == ["gone"]


def test_a_client_that_ends_its_sending_side_gets_the_rest_of_a_stream_with_an_end() -> None:
    """An endless stream is closed: a client that has left looks the same."""
    feed = Feed()
    connection = InMemoryConnection(feed).feed(get("/some"))
    assert connection.protocol.eof_received()
    feed.bodies[0].write(b"x")
    assert not connection.transport.closed
    feed.bodies[0].end()
    assert connection.transport.written.endswith(b"1\r\nx\r\n0\r\n\r\n")
    assert connection.transport.closed
    assert not InMemoryConnection(feed).feed(get("/feed")).protocol.eof_received()
    waits = InMemoryConnection(feed).feed(get("/some") + get("/feed"))
    assert waits.protocol.eof_received()
    feed.bodies[-1].end()
    assert waits.transport.written.count(b"HTTP/1.1 200") == 1, "one that waits does not begin"
    assert waits.transport.closed


def test_there_is_no_room_until_the_client_reads() -> None:
    feed = Feed()
    connection = InMemoryConnection(feed).feed(get("/feed"))
    connection.protocol.pause_writing()
    assert not feed.bodies[0].write(b"x")
    assert not connection.transport.aborted
    connection.protocol.resume_writing()
    assert feed.seen == ["room"]
    assert feed.bodies[0].write(b"x")


def test_a_client_that_reads_nothing_for_long_is_disconnected() -> None:
    feed = Feed()
    connection = InMemoryConnection(feed, idle_s=1.0).feed(get("/feed"))
    connection.at(5.0)
    assert not connection.transport.aborted  # nothing is written, and it is waited for
    connection.protocol.pause_writing()
    connection.at(5.9)
    assert not connection.transport.aborted
    connection.at(6.1)
    assert connection.transport.aborted


def test_writing_on_without_room_loses_the_client_not_the_memory() -> None:
    feed = Feed()
    connection = InMemoryConnection(feed).feed(get("/feed"))
    connection.transport.unread = UNREAD_BYTES_MAX + 1
    assert not feed.bodies[0].write(b"x")
    assert connection.transport.aborted


def test_a_start_that_fails_ends_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    def begin(body: StreamedBody) -> None:
        raise RuntimeError("at the beginning")

    connection = InMemoryConnection(lambda _: StreamedResponse(begin, b"text/plain")).feed(
        get("/a")
    )
    assert connection.transport.aborted
    assert "at the beginning" in caplog.text


def test_a_drain_ends_what_has_no_end_and_waits_for_the_rest() -> None:
    feed = Feed()
    endless, some = (
        InMemoryConnection(feed).feed(get("/feed")),
        InMemoryConnection(feed).feed(get("/some")),
    )
    for connection in (endless, some):
        connection.service.drain()
    assert endless.transport.closed
    assert endless.transport.written.endswith(b"0\r\n\r\n")
    assert not some.transport.closed
    feed.bodies[1].end()
    assert some.transport.closed
    late = InMemoryConnection(feed)
    late.service.draining = True
    late.feed(get("/feed"))
    assert late.transport.closed
    assert b"connection: close" in late.transport.written


# -- events


def parse(stream: bytes) -> list[dict[str, str]]:
    """Parse server-sent events as the HTML standard does, with LF as the only line end."""
    found: list[dict[str, str]] = []
    event: dict[str, str] = {}
    for line in stream.decode().split("\n"):
        if not line:
            if "data" in event:
                found.append(event)
            event = {}
        elif not line.startswith(":"):
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            event[name] = (
                event["data"] + "\n" + value if name == "data" and "data" in event else value
            )
    return found


def test_an_event_reads_as_it_was_written() -> None:
    stream = (
        encode_event(b'{"a":1}', name=b"second", id=7)
        + HEARTBEAT
        + encode_event("zwei\nZeilen ü".encode(), retry_ms=500)
    )
    assert parse(stream) == [
        {"event": "second", "id": "7", "data": '{"a":1}'},
        {"retry": "500", "data": "zwei\nZeilen ü"},
    ]
    assert parse(encode_event(b"a\rb\r\nc")) == [{"data": "a\nb\nc"}]
    assert parse(encode_event(b"")) == [{"data": ""}]
    with pytest.raises(ValueError, match="one line"):
        encode_event(b"", name=b"a\ndata: b")


@pytest.mark.parametrize(
    ("given", "id"),
    [(b"17", 17), (b"", 0), (b"-1", 0), (b"abc", 0), (b"9" * 21, 0), ("٣".encode(), 0)],
)
def test_the_last_event_id_is_a_number_of_ours(given: bytes, id: int) -> None:
    assert last_event_id(HttpRequest("GET", b"/", b"", {b"last-event-id": given}, b"")) == id


# -- over a socket


def ticking(request: HttpRequest) -> HandlerResult:
    def begin(body: StreamedBody) -> None:
        for i in range(int(request.query or b"3")):
            body.post(body.write, encode_event(b"%d" % i, id=i + 1))
        body.post(body.end)

    return StreamedResponse(begin, CONTENT_TYPE)


def test_http_client_reads_a_stream_to_its_end_and_an_endless_one_until_the_server_closes() -> None:
    bodies: list[StreamedBody] = []
    with clipper.start(http="127.0.0.1:0", **QUICK) as server:
        frontends: Any = server._endpoints.frontends
        frontends.routes.add("GET", "/ticks", ticking)
        frontends.routes.add(
            "GET", "/feed", lambda _: StreamedResponse(bodies.append, CONTENT_TYPE, endless=True)
        )
        connection = http.client.HTTPConnection(server.http_address, timeout=PATIENCE_S)
        for _ in range(2):  # on one connection
            connection.request("GET", "/ticks")
            assert [event["id"] for event in parse(connection.getresponse().read())] == [
                "1",
                "2",
                "3",
            ]
        connection.close()
        host, _, port = server.http_address.rpartition(":")
        with socket.create_connection((host, int(port)), PATIENCE_S) as feed:
            feed.sendall(get("/feed"))
            found = b""
            while b"\r\n\r\n" not in found:
                found += feed.recv(4096)
            bodies[0].post(bodies[0].write, encode_event(b"on"))
            while b"data: on\n\n" not in found:
                found += feed.recv(4096)
            server.close()
            while more := feed.recv(4096):
                found += more
    assert found.endswith(b"0\r\n\r\n")
