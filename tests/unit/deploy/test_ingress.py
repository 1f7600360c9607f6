"""The ingress over real sockets: connections go to servers that are ready, and to no other."""

import asyncio
import contextlib
import errno
import http.client
import http.server
import socket
import threading
from collections.abc import Iterator

import pytest

from clipper.deploy import ingress
from clipper.deploy.ingress import Backend, Ingress
from clipper.errors import ConfigError
from tests.memory_container import wait_until

PATIENCE_S = 10.0


class FakeServer:
    """Answers with its name; ready: whether its probe is answered by 200."""

    def __init__(self, name: str) -> None:
        self.name, self.ready, self.held = name, True, threading.Event()
        self.closes = False
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                probe = self.path == "/v2/health/ready"
                if outer.closes and not probe:
                    self.close_connection = True
                    return
                if self.path == "/slow":
                    outer.held.wait(PATIENCE_S)
                self.send_response(200 if outer.ready or not probe else 503)
                body = b"x" * (64 << 20) if self.path == "/large" else outer.name.encode()
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                """Refuse the body before it has come, as a server does that it is too large for."""
                self.send_response(413)
                self.send_header("Content-Length", "0")
                self.end_headers()
                self.connection.shutdown(socket.SHUT_WR)
                while self.rfile.read(1 << 16):
                    pass
                self.close_connection = True

            def log_message(self, *_: object) -> None: ...

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def backend(self) -> Backend:
        return Backend(self.name, {"http": f"http://127.0.0.1:{self._server.server_port}"})

    def close(self) -> None:
        self.held.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def servers() -> Iterator[list[FakeServer]]:
    made = [FakeServer(name) for name in ("a", "b")]
    yield made
    for one in made:
        one.close()


@pytest.fixture
def front(servers: list[FakeServer]) -> Iterator[Ingress]:
    made = Ingress({"http": "127.0.0.1:0"})
    made.route(one.backend for one in servers)
    wait_until(lambda: made.ready == {"a", "b"}, "both are ready")
    yield made
    made.close()


def get(front: Ingress, path: str = "/") -> bytes:
    with contextlib.closing(http.client.HTTPConnection(front.addresses["http"])) as line:
        line.request("GET", path)
        return line.getresponse().read()


def test_connections_go_to_all_in_turn(front: Ingress) -> None:
    assert {get(front) for _ in range(4)} == {b"a", b"b"}


def test_a_server_that_is_not_ready_gets_no_new_connection_and_keeps_the_old(
    front: Ingress, servers: list[FakeServer]
) -> None:
    old = http.client.HTTPConnection(front.addresses["http"])
    while True:
        old.request("GET", "/")
        if old.getresponse().read() == b"a":
            break
        old.close()
    servers[0].ready = False
    wait_until(lambda: front.ready == {"b"}, "a is not ready")
    assert {get(front) for _ in range(4)} == {b"b"}
    old.request("GET", "/")
    assert old.getresponse().read() == b"a"
    servers[1].ready = False
    wait_until(lambda: not front.ready, "none is ready")
    assert get(front) in (b"a", b"b"), "better than none"
    old.close()


def test_a_connection_goes_past_servers_that_refuse(
    front: Ingress, servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingress, "PROBE_GAP_S", 60.0)  # it does not see what happens
    wait_until(lambda: {get(front) for _ in range(2)} == {b"a", b"b"}, "it works")
    servers[0].close()
    assert {get(front) for _ in range(6)} == {b"b"}


def test_a_server_that_closes_without_an_answer_gets_no_more_before_its_next_probe(
    front: Ingress, servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does that is about to end: the kernel still accepts for it."""
    monkeypatch.setattr(ingress, "PROBE_GAP_S", 60.0)
    servers[0].closes = True
    broken = 0
    for _ in range(6):
        try:
            assert get(front) == b"b"
        except ConnectionError:
            broken += 1
    assert broken == 1


def test_what_is_removed_ends_its_queries_first(front: Ingress, servers: list[FakeServer]) -> None:
    found: list[bytes] = []
    waiting = [threading.Thread(target=lambda: found.append(get(front, "/slow"))) for _ in range(2)]
    for one in waiting:
        one.start()
    front.route([servers[1].backend])
    wait_until(lambda: front.ready == {"b"})
    assert {get(front) for _ in range(3)} == {b"b"}
    for server in servers:
        server.held.set()
    for one in waiting:
        one.join(PATIENCE_S)
    assert len(found) == 2


def test_many_bytes_pass_to_a_slow_reader(front: Ingress) -> None:
    host, _, port = front.addresses["http"].rpartition(":")
    with socket.create_connection((host, int(port))) as line:
        line.sendall(b"GET /large HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        wait_until(
            lambda: any(one.is_paused for one in front._pipes), "its server is not read any more"
        )
        size = 0
        while data := line.recv(65536):
            size += len(data)
    assert size > 64 << 20


def test_a_client_that_reads_nothing_is_ended(
    front: Ingress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingress, "STALLED_S", 0.05)
    host, _, port = front.addresses["http"].rpartition(":")
    with socket.create_connection((host, int(port))) as line:
        line.sendall(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
        wait_until(lambda: bool(front._pipes), "it is there")
        wait_until(lambda: not front._pipes, "it is ended")


def test_a_client_that_writes_all_before_it_reads_gets_the_refusal(front: Ingress) -> None:
    with contextlib.closing(http.client.HTTPConnection(front.addresses["http"])) as line:
        line.request("POST", "/", bytes(16 << 20))
        assert line.getresponse().status == 413


def test_a_silent_server_does_not_delay_the_probes_of_others(
    front: Ingress, servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingress, "PROBE_S", 60.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        there = Backend("silent", {"http": f"127.0.0.1:{silent.getsockname()[1]}"})
        front.route([there, *(one.backend for one in servers)])
        wait_until(lambda: "silent" in front._in_probe, "it is asked")
        servers[0].ready = False
        wait_until(lambda: front.ready == {"b"}, "and a too")


def test_a_process_without_descriptors_ends_no_connection(
    front: Ingress, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = threading.Event()

    async def full(*_: object, **__: object) -> None:
        tried.set()
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(ingress, "SILENT_S", 0.0)
    with contextlib.closing(http.client.HTTPConnection(front.addresses["http"])) as line:
        line.request("GET", "/")
        assert line.getresponse().read() in (b"a", b"b")
        monkeypatch.setattr(asyncio, "open_connection", full)
        for _ in range(3):
            tried.clear()
            assert tried.wait(PATIENCE_S)
        assert front.ready == {"a", "b"}
        line.request("GET", "/")
        assert line.getresponse().read() in (b"a", b"b")


def test_connections_of_a_machine_that_is_silent_are_ended(
    front: Ingress, servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that accepts, and never says a word, stands for a machine that is gone."""
    monkeypatch.setattr(ingress, "SILENT_S", 0.05)
    monkeypatch.setattr(ingress, "PROBE_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as gone:
        front.route([Backend("gone", {"http": f"127.0.0.1:{gone.getsockname()[1]}"})])
        with pytest.raises(ConnectionError):
            get(front)


def test_without_a_server_connections_are_ended(front: Ingress) -> None:
    front.route([])
    with pytest.raises(ConnectionError):
        get(front)


def test_more_clients_than_the_limit_are_refused(
    front: Ingress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingress, "CONNECTIONS_MAX", 0)
    with pytest.raises(ConnectionError):
        get(front)


@pytest.mark.parametrize("address", ["here", "127.0.0.1", "127.0.0.1:99999", "256.0.0.1:1"])
def test_an_address_that_cannot_be_is_refused(address: str) -> None:
    with pytest.raises(ConfigError):
        Ingress({"http": address})
