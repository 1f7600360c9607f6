"""A connection without a socket: order, limits, times, and every message that two readers might
read differently."""

import gc
import gzip
import hashlib
import socket
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clipper.errors import ClipperError
from clipper.frontend.auth.credential_files import CredentialFiles
from clipper.frontend.http import json_body
from clipper.frontend.http.connection import PIECE_BYTES, REFUSED_MAX, HttpConnection
from clipper.frontend.http.messages import (
    DeferredResponse,
    HandlerResult,
    HttpRequest,
    HttpResponse,
    WorkerTask,
    head_of,
    inflating,
)
from clipper_core.http.http_head import read_request
from clipper_core.http.http_server import Handed
from tests.frontend.conftest import InMemoryConnection


def echo(request: HttpRequest) -> HandlerResult:
    return HttpResponse(200, request.path + b"|" + bytes(request.body))


class Pending:
    """A future that is done when the test says so."""

    def __init__(self) -> None:
        self.is_done = self.is_cancelled = False

    def done(self) -> bool:
        return self.is_done

    def cancel(self) -> bool:
        self.is_cancelled = True
        return True


class Waiting:
    """A handler that answers requests by futures and keeps them."""

    def __init__(self) -> None:
        self.futures: list[Pending] = []

    def __call__(self, request: HttpRequest) -> HandlerResult:
        if request.path == b"/now":
            return HttpResponse(200, b"now")
        future = Pending()
        self.futures.append(future)
        return DeferredResponse((future,), lambda: HttpResponse(200, request.path))  # type: ignore[arg-type]

    def finish(self, connection: InMemoryConnection, which: int) -> None:
        future = self.futures[which]
        future.is_done = True
        waiting = [pair for pair in connection.watcher.waiting if pair[0] is future]
        connection.watcher.waiting = [
            pair for pair in connection.watcher.waiting if pair[0] is not future
        ]
        for _, callback in waiting:
            callback(future)
        while connection.watcher.turn():
            pass


def get(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: here", *headers, "", ""]).encode()


def post(path: str, body: bytes, *headers: str) -> bytes:
    return (
        "\r\n".join(
            [
                f"POST {path} HTTP/1.1",
                "Host: here",
                f"Content-Length: {len(body)}",
                *headers,
                "",
                "",
            ]
        ).encode()
        + body
    )


# -- requests and their order


def test_a_request_is_read_however_its_bytes_are_cut() -> None:
    whole = post("/a?b=c", b"12345")
    for cut in range(1, len(whole)):
        connection = InMemoryConnection(echo).feed(whole[:cut]).feed(whole[cut:])
        assert connection.transport.replies()[0][2] == b"/a|12345"
    connection = InMemoryConnection(echo)
    for i in range(len(whole)):
        connection.feed(whole[i : i + 1])
    assert connection.statuses == [200]


def test_a_chunked_body_is_one_body() -> None:
    head = b"POST /a HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n"
    connection = InMemoryConnection(echo).feed(
        head + b"3;x=y\r\nabc\r\n" + b"2\r\nde\r\n" + b"1\r\nf\r\n0\r\nTrailer: x\r\n\r\n"
    )
    assert connection.transport.replies()[0][2] == b"/a|abcdef"


def test_pipelined_requests_are_answered_in_order() -> None:
    handle = Waiting()
    connection = InMemoryConnection(handle).feed(get("/1") + get("/now") + get("/2"))
    assert connection.transport.written == b""
    handle.finish(connection, 1)
    assert connection.transport.written == b""
    handle.finish(connection, 0)
    assert [body for _, _, body in connection.transport.replies()] == [b"/1", b"now", b"/2"]
    assert not connection.transport.closed


def test_a_response_of_several_futures_waits_for_the_last() -> None:
    futures = [Pending(), Pending(), Pending()]

    def handle(request: HttpRequest) -> HandlerResult:
        return DeferredResponse(futures, lambda: HttpResponse(200, b"all"))  # type: ignore[arg-type]

    connection = InMemoryConnection(handle).feed(get("/"))
    for future in (futures[2], futures[0], futures[1]):
        assert connection.transport.written == b""
        future.is_done = True
        due = [callback for waited, callback in connection.watcher.waiting if waited.done()]
        connection.watcher.waiting = [
            pair for pair in connection.watcher.waiting if not pair[0].done()
        ]
        for callback in due:
            callback(None)
    assert connection.statuses == [200]


def test_a_client_that_ends_its_sending_side_is_answered_before_it_is_closed() -> None:
    """All of its complete requests are answered, also those that waited for room; an incomplete one
    is dropped."""
    handle = Waiting()
    connection = InMemoryConnection(handle, pipeline_max=2)
    connection.feed(get("/1") + get("/now") + get("/2") + get("/now") + b"GET /")
    assert connection.protocol.eof_received()
    handle.finish(connection, 0)
    assert not connection.transport.closed
    handle.finish(connection, 1)
    bodies = [body for _, _, body in connection.transport.replies()]
    assert bodies == [b"/1", b"now", b"/2", b"now"]
    assert connection.transport.closed
    assert not connection.transport.eof, "nothing is left to be read"


def test_requests_that_wait_for_their_turn_are_answered_after_the_end_of_the_sending_side() -> None:
    """uvloop reads once after `connection_made`, so the end may come before they are parsed."""
    connection = InMemoryConnection(echo)
    protocol = HttpConnection(connection.service, Handed(-1, get("/a") * 200, 0.0, 0, 0, 0, ()))
    protocol.connection_made(connection.transport)  # type: ignore[arg-type]
    assert protocol.eof_received()
    while connection.watcher.turn():
        pass
    assert connection.statuses == [200] * 200
    assert connection.transport.closed


def test_a_client_that_ends_its_sending_side_when_all_is_answered_is_closed() -> None:
    connection = InMemoryConnection(echo).feed(get("/a"))
    assert not connection.protocol.eof_received()
    assert connection.transport.closed


def test_a_half_closed_connection_that_breaks_is_aborted() -> None:
    """Nothing is read from it any more, so its error is read from the socket."""
    client, ours = socket.socketpair()
    handle = Waiting()
    connection = InMemoryConnection(handle)
    connection.transport.get_extra_info = lambda name: ours  # type: ignore[method-assign]
    connection.feed(get("/1"))
    assert connection.protocol.eof_received()
    assert not connection.at(1e9).transport.aborted, "its queries may take their time"
    ours.send(b"unread")
    client.close()  # with bytes unread: a reset
    assert connection.at(2e9).transport.aborted
    ours.close()


def test_a_half_closed_connection_is_sent_one_response_that_is_skipped() -> None:
    """A client that has closed it resets it then. In HTTP/1.0 there is no such response."""
    handle = Waiting()
    connection = InMemoryConnection(handle).feed(get("/1") + get("/2"))
    assert not connection.at(1.0).statuses
    assert connection.protocol.eof_received()
    assert connection.at(2.0).at(3.0).statuses == [100]
    handle.finish(connection, 0)
    assert connection.at(4.0).statuses == [100, 200]
    old = InMemoryConnection(Waiting()).feed(b"GET /1 HTTP/1.0\r\n\r\n")
    assert old.protocol.eof_received()
    assert not old.at(1.0).statuses


def test_tls_ends_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    connection = InMemoryConnection(Waiting()).feed(get("/1"))
    monkeypatch.setattr(connection.transport, "can_write_eof", lambda: False)
    assert not connection.protocol.eof_received()


def test_a_client_that_hangs_up_cancels_its_queries() -> None:
    handle = Waiting()
    connection = InMemoryConnection(handle).feed(get("/1") + get("/2"))
    connection.protocol.connection_lost(None)
    assert [future.is_cancelled for future in handle.futures] == [True, True]
    handle.finish(connection, 0)
    assert connection.transport.written == b""
    assert not connection.service.connections


def test_work_goes_to_a_worker_and_so_does_a_large_body() -> None:
    connection = InMemoryConnection(
        lambda request: (
            WorkerTask(lambda: HttpResponse(200, b"done"))
            if request.path == b"/w"
            else echo(request)
        )
    )
    connection.feed(get("/w"))
    ((work, exchange),) = connection.work
    exchange.settle(work.run())
    assert connection.statuses == [200]
    connection.feed(post("/large", bytes(1 << 20)))
    assert len(connection.work) == 2
    assert connection.work[1][0].run().status == 200


def test_an_error_is_a_response_and_foreign_errors_are_not_disclosed() -> None:
    def handle(request: HttpRequest) -> HandlerResult:
        raise ValueError("secret: /etc/path")

    ((status, head, body),) = InMemoryConnection(handle).feed(get("/")).transport.replies()
    assert status == 500
    assert b"secret" not in body
    assert b"application/problem+json" in head
    assert b'"error":' in body


def test_keep_alive_and_its_end() -> None:
    connection = InMemoryConnection(echo).feed(get("/a")).feed(get("/b", "Connection: close"))
    assert connection.statuses == [200, 200]
    assert b"connection: close" in connection.transport.replies()[1][1]
    assert connection.transport.closed
    old = InMemoryConnection(echo).feed(b"GET /a HTTP/1.0\r\n\r\n")
    assert old.statuses == [200]
    assert old.transport.closed


def test_nothing_is_read_after_the_last_request() -> None:
    connection = InMemoryConnection(echo).feed(get("/a", "Connection: close") + get("/b"))
    assert connection.statuses == [200]


@pytest.mark.parametrize(
    "last", [get("/1", "Connection: close"), b"GET /1 HTTP/1.0\r\nHost: here\r\n\r\n"]
)
def test_no_request_after_the_last_one_is_handled(last: bytes) -> None:
    handle = Waiting()
    connection = InMemoryConnection(handle).feed(last + get("/2")).feed(get("/3"))
    assert len(handle.futures) == 1
    handle.finish(connection, 0)
    assert [body for _, _, body in connection.transport.replies()] == [b"/1"]
    assert connection.transport.closed


def test_head_has_the_length_and_no_body() -> None:
    connection = InMemoryConnection(echo).feed(b"HEAD /abc HTTP/1.1\r\nHost: here\r\n\r\n")
    assert b"content-length: 5\r\n" in connection.transport.written
    assert connection.transport.written.endswith(b"\r\n\r\n")


def test_an_offer_of_another_protocol_is_declined() -> None:
    offer = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")
    assert InMemoryConnection(echo).feed(get("/a", *offer)).feed(get("/b")).statuses == [200, 200]
    whole = post("/a", b"12345", *offer) + get("/b") + get("/c", *offer)
    for cut in range(1, len(whole)):
        connection = InMemoryConnection(echo).feed(whole[:cut]).feed(whole[cut:])
        assert [body for _, _, body in connection.transport.replies()] == [
            b"/a|12345",
            b"/b|",
            b"/c|",
        ]
    assert InMemoryConnection(echo).feed(
        b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n" + get("/b")
    ).statuses == [405]
    smuggled = (
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\nUpgrade:"
        b" x\r\n\r\n0\r\n\r\n"
    )
    assert InMemoryConnection(echo).feed(smuggled).statuses == [400]


OFFER = ("Connection: upgrade", "Upgrade: websocket")
REFUSED_WITH_OFFER = {
    "two hosts": b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n",
    "no host": b"GET / HTTP/1.1\r\n",
    "Transfer-Encoding in HTTP/1.0": (
        b"POST / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n"
    ),
    "a body that is too long": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9999999999\r\n",
    "an unknown expectation": b"POST / HTTP/1.1\r\nHost: a\r\nExpect: x\r\nContent-Length: 1\r\n",
    "two codings": (
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: gzip\r\n"
    ),
}


@pytest.mark.parametrize("head", REFUSED_WITH_OFFER.values(), ids=REFUSED_WITH_OFFER.keys())
def test_what_is_refused_without_an_offer_of_another_protocol_is_refused_with_one(
    head: bytes,
) -> None:
    (alone,) = InMemoryConnection(echo).feed(head + b"\r\n" + b"1\r\na\r\n0\r\n\r\n").statuses
    offered = head + "\r\n".join([*OFFER, "", ""]).encode() + b"1\r\na\r\n0\r\n\r\n"
    assert alone >= 400
    assert InMemoryConnection(echo).feed(offered).statuses == [alone]


def test_an_offer_of_another_protocol_keeps_the_other_connection_options() -> None:
    connection = InMemoryConnection(echo).feed(
        get("/a", "Connection: upgrade, close", "Upgrade: h2c") + get("/b")
    )
    assert connection.statuses == [200]
    assert b"connection: close" in connection.transport.written
    connection = InMemoryConnection(echo).feed(
        b"GET /a HTTP/1.0\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n"
    )
    assert b"connection: close" in connection.transport.written


def test_many_offers_of_another_protocol_are_answered_without_recursion() -> None:
    connection = InMemoryConnection(echo).feed(get("/a", *OFFER) * 3000 + get("/b"))
    replies = connection.transport.replies()
    assert [status for status, _, _ in replies] == [200] * 3001
    assert replies[-1][2] == b"/b|"


def test_a_request_that_finds_no_memory_is_answered_503() -> None:
    def handle(request: HttpRequest) -> HandlerResult:
        raise MemoryError

    connection = InMemoryConnection(handle).feed(get("/") * 2)
    assert connection.statuses == [503, 503]
    assert b"retry-after" in connection.transport.written
    connection = InMemoryConnection(echo)
    connection.service.is_plain = handle  # type: ignore[assignment]
    assert connection.feed(get("/")).statuses == [503]


# -- what one client may cost the others


def test_a_client_is_not_sent_more_than_it_takes() -> None:
    received: list[int] = []

    def handle(request: HttpRequest) -> HandlerResult:
        received.append(1)
        return HttpResponse(200, bytes(30_000))

    connection = InMemoryConnection(handle, unsent_bytes_max=100_000)
    whole = get("/a") * 60
    connection.protocol.data_received(whole)
    assert len(received) == 4, "of one turn of the loop"
    assert connection.transport.paused
    connection.watcher.turn()
    assert len(received) == 8
    connection.protocol.pause_writing()
    while connection.watcher.turn():
        pass
    assert len(received) == 8, "while the client does not read"
    connection.protocol.resume_writing()
    while connection.watcher.turn():
        pass
    assert len(received) == 60
    assert not connection.transport.paused


def test_responses_are_made_when_the_client_takes_them() -> None:
    made: list[bytes] = []

    def make(path: bytes) -> HttpResponse:
        made.append(path)
        return HttpResponse(200, bytes(200_000))

    futures = [Pending() for _ in range(20)]
    given = iter(futures)

    def handle(request: HttpRequest) -> HandlerResult:
        return DeferredResponse((next(given),), lambda: make(request.path))  # type: ignore[arg-type]

    connection = InMemoryConnection(handle)
    connection.protocol.data_received(b"".join(get(f"/{i}") for i in range(20)))
    for future in futures:
        future.is_done = True
    waiting, connection.watcher.waiting = connection.watcher.waiting, []
    assert len(waiting) == 20
    for future, callback in reversed(waiting):
        callback(future)
    assert made == [b"/0"], "a large one in a turn of the loop, in order"
    connection.watcher.turn()
    assert made == [b"/0", b"/1"]
    connection.protocol.pause_writing()
    while connection.watcher.turn():
        pass
    assert len(made) == 2, "while the client does not read"
    connection.protocol.resume_writing()
    while connection.watcher.turn():
        pass
    assert made == [b"/%d" % i for i in range(20)]
    assert connection.statuses == [200] * 20


def test_a_response_that_cannot_be_made_is_an_error_in_its_place() -> None:
    waiting = Waiting()

    def make() -> HttpResponse:
        raise ValueError("it cannot be made")

    connection = InMemoryConnection(
        lambda request: (
            waiting(request)
            if request.path != b"/bad"
            else DeferredResponse((waiting.futures[0],), make)  # type: ignore[arg-type]
        )
    )
    connection.feed(get("/a") + get("/bad") + get("/now"))
    first = waiting.futures[0]
    first.is_done = True
    for _ in range(2):  # the two that wait for it
        pending, connection.watcher.waiting = connection.watcher.waiting, []
        for future, callback in pending:
            callback(future)
    assert connection.statuses == [200, 500, 200]


def test_connections_share_the_large_responses_of_a_turn() -> None:
    made: list[bytes] = []

    def handle(request: HttpRequest) -> HandlerResult:
        made.append(request.path)
        return HttpResponse(200, bytes(100_000 if request.path.startswith(b"/large") else 10))

    first = InMemoryConnection(handle)
    connections = [first.beside() for _ in range(3)]
    small = first.beside()
    small.protocol.data_received(get("/small"))
    made.clear()
    for i, connection in enumerate(connections):
        connection.protocol.data_received(get(f"/large{i}") * 4)
    assert made == [b"/large0"], "one, whoever asks"
    small.protocol.data_received(get("/small"))
    assert made == [b"/large0", b"/small"], "small ones go on"
    for _ in range(5):
        first.watcher.turn()
    assert made[2:] == [b"/large0", b"/large1", b"/large2", b"/large0", b"/large1"]
    while first.watcher.turn():
        pass
    assert [connection.statuses for connection in connections] == [[200] * 4] * 3


def test_a_turn_that_has_taken_its_time_ends() -> None:
    received: list[bytes] = []

    def handle(request: HttpRequest) -> HandlerResult:
        received.append(request.path)
        return HttpResponse(200, b"")

    first = InMemoryConnection(handle, turn_s=0.0)
    second = first.beside()
    first.protocol.data_received(get("/1") * 3)
    second.protocol.data_received(get("/2") * 3)
    assert received == [b"/1", b"/2"], "one request of a connection"
    turns = 0
    while first.watcher.turn():
        turns += 1
    assert received == [b"/1", b"/2"] * 3
    assert 4 <= turns < 9, "a connection in a turn"
    assert first.statuses == second.statuses == [200] * 3


def test_a_large_response_is_made_piece_by_piece_and_the_next_one_after_it() -> None:
    taken: list[bytes] = []

    def texts(path: bytes) -> Iterator[bytes]:
        for _ in range(10):
            taken.append(path)
            yield path * (json_body.PIECE_BYTES // 2)

    def handle(request: HttpRequest) -> HandlerResult:
        if request.path == b"/s":
            return HttpResponse(200, b"small")
        return json_body.answer_texts(texts(request.path))

    connection = InMemoryConnection(handle)
    other = connection.beside().feed(get("/s"))
    other.transport.written = b""
    connection.protocol.data_received(get("/a") + get("/b") + get("/s"))
    assert taken == [b"/a"], "a piece"
    other.protocol.data_received(get("/s"))
    assert other.transport.written.endswith(b"small"), "small ones go on"
    connection.watcher.turn()
    assert taken == [b"/a"] * 2
    connection.protocol.pause_writing()
    while connection.watcher.turn():
        pass
    assert taken == [b"/a"] * 2, "while the client does not read"
    connection.protocol.resume_writing()
    while connection.watcher.turn():
        pass
    assert taken == [b"/a"] * 10 + [b"/b"] * 10
    a, b, small = connection.transport.written.split(b"HTTP/1.1 200 OK")[1:]
    assert b"transfer-encoding: chunked" in a
    size = 10 * json_body.PIECE_BYTES // 2
    assert (a.count(b"/a"), b.count(b"/b")) == (size, size)
    assert a.endswith(b"0\r\n\r\n")
    assert b.endswith(b"0\r\n\r\n")
    assert small.endswith(b"small")
    assert not connection.protocol.is_busy


def test_a_client_that_leaves_in_the_middle_of_a_large_response_ends_it() -> None:
    ended: list[bool] = []

    def texts() -> Iterator[bytes]:
        try:
            for _ in range(100):
                yield bytes(json_body.PIECE_BYTES)
        finally:
            ended.append(True)

    connection = InMemoryConnection(lambda _: json_body.answer_texts(texts()))
    connection.protocol.data_received(get("/a") * 3)
    connection.watcher.turn()
    assert not ended
    connection.protocol.connection_lost(None)
    while connection.watcher.turn():
        pass
    gc.collect()
    assert ended == [True], "and the others have not begun"


def test_the_requests_of_one_turn_are_bounded_whatever_they_cost() -> None:
    connection = InMemoryConnection(echo, pipeline_max=8)
    connection.protocol.data_received(get("/a") * 1000)
    seen = connection.transport.written.count(b"HTTP/1.1 200")
    assert seen == 8
    while connection.watcher.turn():
        now = connection.transport.written.count(b"HTTP/1.1 200")
        assert now - seen <= 8
        seen = now
    assert seen == 1000


def test_a_refusal_comes_after_the_requests_before_it() -> None:
    connection = InMemoryConnection(echo, pipeline_max=2).feed(get("/a") * 5 + b"nonsense\r\n\r\n")
    assert connection.statuses == [200] * 5 + [400]


def test_a_trailer_without_end_is_refused() -> None:
    connection = InMemoryConnection(echo, header_bytes_max=1000, body_bytes_max=1 << 20)
    connection.feed(
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nX: "
    )
    for _ in range(20):
        connection.feed(b"a" * 100)
    assert connection.statuses == [431]
    connection = InMemoryConnection(echo, header_bytes_max=1000)
    connection.feed(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1;")
    for _ in range(20):
        connection.feed(b"a" * 100)
    assert connection.statuses == [431]


def test_a_chunked_body_of_many_pieces_is_read_whole() -> None:
    chunks = b"".join(b"%x\r\n%s\r\n" % (n, b"x" * n) for n in (1, 5, 3 * PIECE_BYTES, 2))
    connection = InMemoryConnection(echo, header_bytes_max=512)
    connection.feed(
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        + chunks
        + b"0\r\n\r\n"
        + get("/b")
    )
    assert [len(body) for _, _, body in connection.transport.replies()] == [
        2 + 8 + 3 * PIECE_BYTES,
        3,
    ]


def test_continue_is_sent_when_it_is_expected() -> None:
    connection = InMemoryConnection(echo).feed(
        b"POST / HTTP/1.1\r\nHost: here\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n"
    )
    assert connection.transport.written == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert connection.feed(b"ab").statuses == [100, 200]
    assert InMemoryConnection(echo).feed(get("/", "Expect: more")).statuses == [417]
    old = b"POST / HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n"
    assert InMemoryConnection(echo).feed(old + b"ab").statuses == [200], "RFC 9110, section 10.1.1"


IDS = [("abc-1", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("é", False)]


@pytest.mark.parametrize(("given", "echoed"), IDS)
def test_a_request_id_comes_back_or_is_made_up(given: str, echoed: bool) -> None:
    request = f"GET /a HTTP/1.1\r\nHost: here\r\nX-Request-Id: {given}\r\n\r\n".encode()
    ((_, head, _),) = InMemoryConnection(echo).feed(request).transport.replies()
    assert (f"x-request-id: {given}\r\n".encode() in head + b"\r\n") is echoed
    assert head.count(b"x-request-id: ") == 1


def test_absolute_targets_are_read() -> None:
    assert (
        InMemoryConnection(echo).feed(get("http://here/a/b?c")).transport.replies()[0][2]
        == b"/a/b|"
    )


# -- what is refused


SMUGGLED = {
    "length and chunked": (
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nTransfer-Encoding:"
        b" chunked\r\n\r\n0\r\n\r\n"
    ),
    "chunked and length": (
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length:"
        b" 3\r\n\r\n0\r\n\r\n"
    ),
    "two lengths": (
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\nabc"
    ),
    "a list of lengths": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3, 3\r\n\r\nabc",
    "a signed length": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: +3\r\n\r\nabc",
    "a negative length": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -3\r\n\r\nabc",
    "a hexadecimal length": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0x3\r\n\r\nabc",
    "a length beyond 64 bits": (
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999999\r\n\r\nabc"
    ),
    "a bare LF": b"GET / HTTP/1.1\nHost: a\n\n",
    "a bare LF after a header": b"GET / HTTP/1.1\r\nHost: a\nX: b\r\n\r\n",
    "a bare CR in a header": b"GET / HTTP/1.1\r\nHost: a\rb\r\n\r\n",
    "a folded header": b"GET / HTTP/1.1\r\nHost: a\r\nX: b\r\n c\r\n\r\n",
    "a blank before the colon": b"GET / HTTP/1.1\r\nHost : a\r\n\r\n",
    "NUL in a header": b"GET / HTTP/1.1\r\nHost: a\0b\r\n\r\n",
    "an unknown coding before chunked": (
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"0\r\n\r\n"
    ),
    "chunked twice": (
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n"
    ),
    "another coding": b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\nabc",
    "chunked is not last": (
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked, identity\r\n\r\nabc"
    ),
    "two codings": (
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding:"
        b" identity\r\n\r\n0\r\n\r\n"
    ),
    "nearly chunked": b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunked in HTTP/1.0": b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a negative chunk": b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
    "a chunk ended by LF": (
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\nabc\n0\n\n"
    ),
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "two hosts": b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "half of the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n",
    "a version there is not": b"GET / HTTP/3.0\r\nHost: a\r\n\r\n",
    "no version": b"GET /\r\nHost: a\r\n\r\n",
    "a version that lost its first letters": (
        b"POST /a pTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n"
    ),
    "a target that took the version": b"POST /a/pTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}",
    "HTTP/2.0": b"GET / HTTP/2.0\r\nHost: a\r\n\r\n",
    "no method": b" / HTTP/1.1\r\nHost: a\r\n\r\n",
    "a method that is no token": b"G(T / HTTP/1.1\r\nHost: a\r\n\r\n",
    "a method without end": b"G" * 40 + b" / HTTP/1.1\r\nHost: a\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
}


@pytest.mark.parametrize("name", SMUGGLED)
def test_what_two_readers_could_read_differently_is_refused(name: str) -> None:
    received: list[HttpRequest] = []

    def handle(request: HttpRequest) -> HandlerResult:
        received.append(request)
        return echo(request)

    connection = InMemoryConnection(handle).feed(SMUGGLED[name] + get("/smuggled"))
    assert connection.statuses == [400]
    assert not received
    assert connection.protocol.gone
    connection.feed(get("/later"))
    assert connection.statuses == [400]


def test_a_refusal_waits_for_the_responses_before_it() -> None:
    handle = Waiting()
    connection = InMemoryConnection(handle).feed(get("/1") + b"nonsense\r\n\r\n")
    assert connection.transport.written == b""
    handle.finish(connection, 0)
    assert connection.statuses == [200, 400]


def test_a_client_is_read_on_for_a_moment_after_its_refusal() -> None:
    connection = InMemoryConnection(echo, body_bytes_max=1024).feed(
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5000\r\n\r\n"
    )
    assert connection.statuses == [413]
    assert connection.transport.eof
    assert not connection.transport.closed
    connection.feed(bytes(5000)).at(1.0)
    assert not connection.transport.closed
    connection.at(60.0)
    assert connection.transport.aborted


def test_a_body_has_a_bound_however_it_comes() -> None:
    connection = InMemoryConnection(echo, body_bytes_max=1024).feed(
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1025\r\n\r\n"
    )
    assert connection.statuses == [413]
    chunked = InMemoryConnection(echo, body_bytes_max=1024)
    chunked.feed(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(1024):
        chunked.feed(b"1\r\nx\r\n")
    assert chunked.statuses == []
    assert chunked.feed(b"1\r\nx\r\n").statuses == [413]
    assert InMemoryConnection(echo, body_bytes_max=1024).feed(post("/", bytes(1024))).statuses == [
        200
    ]


@pytest.mark.parametrize("cut", [1 << 20, 100])
def test_a_head_has_a_bound_however_it_comes(cut: int) -> None:
    def fed(data: bytes) -> list[int]:
        connection = InMemoryConnection(echo, header_bytes_max=1000)
        for at in range(0, len(data), cut):
            connection.feed(data[at : at + cut])
        return connection.statuses

    assert fed(get("/" + "a" * 800)) == [200]
    assert fed(get("/" + "a" * 1100)) == [431]
    assert fed(get("/", "X: " + "a" * 1100)) == [431]
    assert fed(get("/", *[f"X{i}: {i}" for i in range(200)])) == [431]


def test_a_head_in_single_bytes_is_parsed_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[int] = []

    def counted(data: bytes, at: int, *names: Any) -> Any:
        parsed.append(len(data) - at)
        return read_request(data, at, *names)

    monkeypatch.setattr("clipper.frontend.http.connection.read_request", counted)
    request = get("/a", *["Accept: x"] * 1000)
    connection = InMemoryConnection(echo)
    for i in range(len(request)):
        connection.feed(request[i : i + 1])
    assert connection.statuses == [200]
    assert sum(parsed) < 4 * len(request)


def test_a_head_without_end_is_not_kept() -> None:
    connection = InMemoryConnection(echo, header_bytes_max=1000).feed(b"GET / HTTP/1.1\r\nX: ")
    for _ in range(20):
        connection.feed(b"a" * 100)
    assert connection.statuses == [431]


def test_many_small_requests_at_once_are_no_long_head() -> None:
    connection = InMemoryConnection(echo, header_bytes_max=512, pipeline_max=1000)
    connection.feed(get("/a") * 100 + get("/b")[:-2]).feed(b"\r\n")
    assert connection.statuses == [200] * 101


def test_trailers_change_nothing_and_have_a_bound() -> None:
    head = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n"
    ((_, reply, _),) = (
        InMemoryConnection(echo).feed(head + b"X-Request-Id: late\r\n\r\n").transport.replies()
    )
    assert b"late" not in reply
    for framing in (b"Content-Length: 1", b"content-length: 9", b"Transfer-Encoding: chunked"):
        for cut in (len(head), len(head) + 5):
            text = head + framing + b"\r\n\r\n"
            assert InMemoryConnection(echo).feed(text[:cut]).feed(text[cut:]).statuses == [400], (
                framing
            )
    many = b"".join(b"X%d: y\r\n" % i for i in range(300))
    assert InMemoryConnection(echo, header_bytes_max=1000).feed(head + many + b"\r\n").statuses == [
        431
    ]


# -- times


def test_slow_heads_and_bodies_end() -> None:
    connection = InMemoryConnection(echo, header_s=5.0).feed(b"GET / HT").at(4.9)
    assert connection.statuses == []
    assert connection.feed(b"TP/1.1\r\n").at(5.1).statuses == [408]
    body = InMemoryConnection(echo, header_s=5.0, body_bytes_s_min=100).feed(
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5000\r\n\r\n"
    )
    assert body.at(5.5).statuses == [408]
    steady = InMemoryConnection(echo, header_s=5.0, body_bytes_s_min=100).feed(
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5000\r\n\r\n"
    )
    for second in range(1, 26):
        steady.feed(bytes(200)).at(second)
    assert steady.statuses == [200]


def test_times_count_from_the_request_and_not_from_the_start_of_the_server() -> None:
    first = InMemoryConnection(echo, header_s=5.0, idle_s=60.0, body_bytes_s_min=100).at(1000.0)
    head = first.beside().feed(b"GET / HT").at(1004.9)
    assert head.statuses == []
    assert head.at(1005.1).statuses == [408]
    body = first.beside().feed(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5000\r\n\r\n")
    assert body.at(1010.0).statuses == []
    assert body.at(1011.0).statuses == [408]
    idle = first.beside()
    assert not idle.at(1070.9).transport.closed
    assert idle.at(1071.1).transport.closed


def test_an_idle_connection_is_closed_and_one_that_waits_for_an_answer_is_not() -> None:
    handle = Waiting()
    connection = InMemoryConnection(handle, idle_s=60.0).feed(get("/1")).at(1000.0)
    assert not connection.transport.closed
    handle.finish(connection, 0)
    assert not connection.at(1059.0).transport.closed
    assert connection.at(1061.0).transport.closed
    assert connection.statuses == [200]


def test_a_client_that_reads_nothing_is_not_read_and_then_dropped() -> None:
    connection = InMemoryConnection(echo, idle_s=60.0)
    connection.protocol.pause_writing()
    assert connection.transport.paused
    connection.protocol.resume_writing()
    assert not connection.transport.paused
    connection.protocol.pause_writing()
    assert connection.at(61.0).transport.aborted


def test_the_last_response_has_the_time_that_its_client_needs() -> None:
    connection = InMemoryConnection(echo, idle_s=60.0)
    connection.transport.unread = 4000
    connection.feed(get("/a", "Connection: close"))
    for second in range(1, 200, 50):
        connection.transport.unread -= 1000
        assert not connection.at(second).transport.aborted
    assert connection.at(154.0).transport.aborted, "all has left, and it does not close"
    stuck = InMemoryConnection(echo, idle_s=60.0)
    stuck.transport.unread = 1000
    stuck.feed(get("/a", "Connection: close"))
    assert not stuck.at(59.0).transport.aborted
    assert stuck.at(61.0).transport.aborted


def test_an_idle_connection_that_does_not_read_its_last_bytes_is_aborted() -> None:
    connection = InMemoryConnection(echo, idle_s=60.0).feed(get("/a"))
    connection.transport.unread = 1
    assert connection.at(61.0).transport.aborted
    slow = InMemoryConnection(echo, idle_s=60.0).feed(get("/a")).at(61.0)
    assert (slow.transport.closed, slow.transport.aborted) == (True, False)
    assert slow.at(64.0).transport.aborted, "it does not answer a close_notify"


def test_a_connection_that_fails_does_not_end_the_turns_of_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise MemoryError

    first = InMemoryConnection(echo, turn_s=0.0)
    second = first.beside()
    monkeypatch.setattr(first.protocol, "advance", fail)
    first.protocol.data_received(get("/1") * 3)
    second.protocol.data_received(get("/2") * 3)
    while first.watcher.turn():
        pass
    assert first.transport.aborted
    assert second.statuses == [200] * 3
    assert "a connection cannot go on" in caplog.text


def test_empty_lines_between_requests_are_no_request() -> None:
    connection = (
        InMemoryConnection(echo, header_s=5.0, idle_s=60.0).feed(post("/a", b"1") + b"\r\n").at(6.0)
    )
    assert connection.statuses == [200]
    assert not connection.protocol.is_busy
    assert connection.feed(b"\r\n\r\n" + get("/b")).statuses == [200, 200]
    assert connection.feed(b"\n").at(12.0).statuses == [200, 200, 400]


def test_a_client_that_sends_without_end_is_not_read_until_it_is_answered() -> None:
    handle = Waiting()
    connection = InMemoryConnection(handle, pipeline_max=4).feed(get("/") * 6)
    assert connection.transport.paused
    for i in range(2):
        handle.finish(connection, i)
    assert connection.transport.paused
    handle.finish(connection, 2)
    assert not connection.transport.paused


def test_too_many_connections_are_rejected_with_a_message() -> None:
    connection = InMemoryConnection(echo, connections_max=1)
    other = InMemoryConnection(echo)
    other.service = connection.service
    second = type(connection.protocol)(connection.service)
    second.connection_made(other.transport)  # type: ignore[arg-type]
    ((status, head, _),) = other.transport.replies()
    assert status == 503
    assert b"retry-after: " in head
    second.connection_lost(None)
    assert connection.feed(get("/")).statuses == [200]


def test_of_a_flood_beyond_the_limit_few_are_told_and_linger() -> None:
    first = InMemoryConnection(echo, connections_max=1)
    told = [first.beside() for _ in range(REFUSED_MAX)]
    more = [first.beside() for _ in range(5)]
    assert all(one.statuses == [503] for one in told)
    assert all(one.transport.aborted for one in more)
    assert not any(one.transport.replies() for one in more)


def test_draining_closes_what_is_idle_and_the_rest_after_its_answer() -> None:
    idle, handle = InMemoryConnection(echo), Waiting()
    idle.service.drain()
    assert idle.transport.closed
    busy = InMemoryConnection(handle).feed(get("/1"))
    busy.service.drain()
    assert not busy.transport.closed
    handle.finish(busy, 0)
    ((_, head, _),) = busy.transport.replies()
    assert b"connection: close" in head
    assert busy.transport.closed


# -- bodies that are compressed


def test_a_compressed_body_is_read_up_to_its_bound() -> None:
    def fed(data: bytes, coding: str) -> InMemoryConnection:
        connection = InMemoryConnection(inflating(echo, 1 << 20)).feed(
            post("/", data, f"Content-Encoding: {coding}")
        )
        for work, exchange in connection.work:
            try:
                exchange.settle(work.run())
            except ClipperError as error:
                exchange.fail(error)
        return connection

    for coding, data in (
        ("gzip", gzip.compress(b"plain")),
        ("deflate", zlib.compress(b"plain")),
        ("identity", b"plain"),
    ):
        assert fed(data, coding).transport.replies()[0][2] == b"/|plain"
    bomb = gzip.compress(bytes(10 << 20))
    assert fed(bomb, "gzip").statuses == [413]
    broken: dict[str, Any] = {
        "gzip": b"no gzip",
        "br": b"x",
        "deflate": zlib.compress(b"plain")[:-3],
    }
    for coding, data in broken.items():
        assert fed(data, coding).statuses in ([400], [415])


def test_a_compressed_body_is_decompressed_by_a_worker_and_only_with_permission(
    tmp_path: Path,
) -> None:
    body = gzip.compress(bytes(1 << 20))
    received: list[int] = []

    def handle(request: HttpRequest) -> HandlerResult:
        received.append(len(request.body))
        return HttpResponse(200, b"")

    access = CredentialFiles()
    (tmp_path / "keys").write_text(f"ann sha256:{hashlib.sha256(b'secret').hexdigest()}\n")
    access.add_keys(str(tmp_path / "keys"), "")
    connection = InMemoryConnection(inflating(handle, 2 << 20), admit=access.key_check())
    other = connection.beside()
    connection.feed(post("/", body, "Content-Encoding: gzip"))
    assert (connection.statuses, connection.work) == ([401], [])
    other.feed(post("/", body, "Content-Encoding: gzip", "Authorization: Bearer secret"))
    assert received == []
    ((work, exchange),) = other.work
    exchange.settle(work.run())
    assert (other.statuses, received) == ([200], [1 << 20])


@pytest.mark.parametrize("value", [b"b\nc", b"b\r\nX: c", b"b\0"])
def test_a_header_of_ours_never_splits_a_response(value: bytes) -> None:
    with pytest.raises(ValueError, match="CR, LF or NUL"):
        head_of(HttpResponse(200, b"", headers=((b"a", value),)), b"id", b"now", False)
