"""The load generator of the HTTP benchmarks, against a server of the test."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bench.system.frontends.http_load import NUMBER, closed, paced
from tests.threads import join

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"


def request(path: str, body: str = NUMBER) -> bytes:
    return f"POST {path} HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


class Answers(asyncio.Protocol):
    """Answers /ok, /chunked in chunks, /bad with 500, and closes the connection of /close."""

    def __init__(self, bodies: list[bytes]) -> None:
        self._bodies = bodies

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        head, _, body = data.partition(b"\r\n\r\n")
        self._bodies.append(body)
        if b"/close " in head:
            self._transport.close()
        elif b"/chunked " in head:
            self._transport.write(CHUNKED[:50])
            asyncio.get_running_loop().call_later(0.001, self._transport.write, CHUNKED[50:])
        else:
            self._transport.write(
                ANSWER if b"/ok " in head else ANSWER.replace(b"200 OK", b"500 No")
            )


@contextmanager
def serving() -> Iterator[tuple[str, list[bytes]]]:
    bodies: list[bytes] = []
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(loop.create_server(lambda: Answers(bodies), "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield "{}:{}".format(*server.sockets[0].getsockname()), bodies
    finally:
        loop.call_soon_threadsafe(loop.stop)
        join(thread)
        server.close()
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()


def test_every_request_of_a_closed_loop_is_answered_and_has_a_number_of_its_own() -> None:
    with serving() as (address, bodies):
        found = closed(address, request("/ok"), 4, 0.2)
        assert found.bad == 0
        assert len(found.records) == len(bodies) == len(set(bodies)) > 4
        assert closed(address, request("/chunked"), 4, 0.1).bad == 0
        assert len(bodies) == len(set(bodies))


def test_a_paced_run_sends_what_is_due_and_marks_the_other_requests() -> None:
    with serving() as (address, _):
        found = paced(address, request("/ok"), 500, 0.4, 8, other=request("/bad", "x"), every=10)
    count = len(found.records)
    assert 120 < count < 280  # 200 on average, by Poisson's law
    other = found.records["other"] == 1
    assert other.sum() == count // 10 == found.bad
    assert set(found.records["status"][other]) == {500}
    assert (found.records["late_us"] <= found.latency_us).all()


def test_connections_that_are_closed_count_as_failed_and_are_opened_again() -> None:
    with serving() as (address, _):
        found = paced(address, request("/ok"), 500, 0.4, 4, other=request("/close", "x"), every=20)
    other = found.records["other"] == 1
    assert set(found.records["status"][other]) == {0}
    assert set(found.records["status"][~other]) == {200}


def test_an_address_without_a_server_is_an_error() -> None:
    with serving() as (address, _):
        pass
    with pytest.raises(RuntimeError, match=address):
        closed(address, request("/ok"), 1, 0.1)
