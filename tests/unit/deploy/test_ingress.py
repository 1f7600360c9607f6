"""The ingress over real sockets: connections go to servers that are ready, and to no other."""

import asyncio
import contextlib
import errno
import http.client
import http.server
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from clipper.deploy.ray import ingress
from clipper.deploy.ray.ingress import Backend, Ingress
from clipper.errors import ConfigError
from tests.memory_container import wait_until
from tests.processes import Program
from tests.threads import join

PATIENCE_S = 30.0


class FakeServer:
    """Answers with its name; ready: whether its probe is answered by 200."""

    def __init__(self, name: str) -> None:
        self.name, self.ready, self.held = name, True, threading.Event()
        self.closes = False
        self.answers: threading.Semaphore | None = None  # of probes, which wait for it
        self.probes = 0
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                probe = self.path == "/v2/health/ready"
                if outer.closes and not probe:
                    self.close_connection = True
                    return
                if probe and outer.answers is not None:
                    outer.probes += 1
                    outer.answers.acquire(timeout=PATIENCE_S)
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
        join(self._thread)


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
    """A server that is about to end does so: the kernel still accepts for it."""
    monkeypatch.setattr(ingress, "PROBE_S", PATIENCE_S)
    servers[0].answers = threading.Semaphore(0)
    wait_until(lambda: servers[0].probes == 1, "a probe waits, so that no other begins")
    servers[0].closes = True
    broken = 0
    for _ in range(6):
        try:
            assert get(front) == b"b"
        except ConnectionError:
            broken += 1
    servers[0].answers.release(1000)
    assert broken == 1


def test_a_server_that_owes_an_answer_and_closes_an_old_connection_gets_no_more(
    front: Ingress, servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the client's next try, over a new connection, could meet the same server."""
    monkeypatch.setattr(ingress, "PROBE_S", PATIENCE_S)
    old = http.client.HTTPConnection(front.addresses["http"])
    while True:
        old.request("GET", "/")
        if old.getresponse().read() == b"a":
            break
        old.close()
    servers[0].answers = threading.Semaphore(0)
    wait_until(lambda: servers[0].probes == 1, "a probe waits, so that no other begins")
    servers[0].closes = True
    old.request("GET", "/")
    with pytest.raises(ConnectionError):
        old.getresponse()
    assert {get(front) for _ in range(4)} == {b"b"}
    servers[0].answers.release(1000)
    old.close()


def test_a_probe_that_began_before_a_broken_connection_does_not_make_a_server_ready(
    front: Ingress, servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer says what was so before the server ended."""
    monkeypatch.setattr(ingress, "PROBE_S", PATIENCE_S)
    ending = servers[0]
    ending.answers, ending.closes = threading.Semaphore(0), True
    wait_until(lambda: ending.probes == 1, "a probe waits")
    while "a" in front.ready:
        with contextlib.suppress(ConnectionError):
            get(front)
    ending.answers.release()
    wait_until(lambda: ending.probes == 2, "the next probe waits")
    assert front.ready == {"b"}
    ending.answers.release(1000)
    wait_until(lambda: front.ready == {"a", "b"}, "it is ready by a new probe")


def test_a_server_that_has_moved_is_not_ready_before_a_probe(
    front: Ingress, servers: list[FakeServer]
) -> None:
    moved = FakeServer("moved")
    moved.answers = threading.Semaphore(0)
    try:
        front.route([Backend("a", moved.backend.addresses), servers[1].backend])
        wait_until(lambda: moved.probes == 1, "a probe waits")
        assert front.ready == {"b"}
        moved.answers.release(1000)
        wait_until(lambda: front.ready == {"a", "b"}, "it is ready by its probe")
    finally:
        moved.answers.release(1000)
        moved.close()


def test_a_connection_that_is_made_too_late_leaves_the_client_to_the_next_server(
    front: Ingress, servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncio makes one if the time ends between the connection and its first turn."""
    create, slow = front._loop.create_connection, servers[0].backend.addresses["http"]

    async def late(made: Callable[[], ingress._Pipe], *place: Any, **more: Any) -> Any:
        transport, pipe = await create(made, *place, **more)
        if place == ingress.host_port(slow) and isinstance(pipe, ingress._ServerPipe):
            transport.close()
            raise TimeoutError
        return transport, pipe

    monkeypatch.setattr(front._loop, "create_connection", late)
    assert {get(front) for _ in range(4)} == {b"b"}
    assert front.ready == {"a", "b"}


@pytest.mark.parametrize("address", ["nowhere", f"{'x' * 64}:80"])
def test_a_client_of_a_server_without_a_usable_address_is_ended(
    front: Ingress, address: str
) -> None:
    front.route([Backend("lost", {"http": address})])
    with socket.create_connection(ingress.host_port(front.addresses["http"]), PATIENCE_S) as line:
        line.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert line.recv(1) == b""


def test_a_client_that_has_sent_all_gets_its_answer(
    front: Ingress, servers: list[FakeServer]
) -> None:
    with socket.create_connection(ingress.host_port(front.addresses["http"]), PATIENCE_S) as line:
        line.sendall(b"GET /slow HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        line.shutdown(socket.SHUT_WR)
        wait_until(lambda: [one.has_ended for one in front._pipes] == [True], "its end has come")
        for server in servers:
            server.held.set()
        assert b"".join(iter(lambda: line.recv(1 << 16), b"")).startswith(b"HTTP/1.1 200 ")
    wait_until(lambda: not front._pipes, "nothing is kept of it")
    assert front.ready == {"a", "b"}


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
        wait_until(lambda: there.place in front._in_probe, "it is asked")
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


@contextlib.contextmanager
def plain_server(probed: FakeServer) -> Iterator[tuple[socket.socket, Ingress]]:
    """Yield a listening socket, and an ingress to it at the port `grpc`; `probed` is asked whether
    it is ready."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        contextlib.closing(Ingress({"grpc": "127.0.0.1:0"})) as front,
    ):
        grpc = {"grpc": f"127.0.0.1:{listening.getsockname()[1]}"}
        front.route([Backend("plain", {**probed.backend.addresses, **grpc})])
        wait_until(lambda: front.ready == {"plain"}, "it is ready")
        listening.settimeout(PATIENCE_S)
        yield listening, front


def client_of(front: Ingress, timeout_s: float = PATIENCE_S) -> socket.socket:
    return socket.create_connection(ingress.host_port(front.addresses["grpc"]), timeout_s)


def send_until_full(client: socket.socket) -> int:
    """Send until nobody has taken more for a while; return how many bytes."""
    sent = 0
    with contextlib.suppress(TimeoutError):
        while True:
            sent += client.send(bytes(1 << 16))
    return sent


def test_a_server_that_answers_probes_and_takes_no_bytes_keeps_its_connections(
    servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingress, "SILENT_S", 0.05)
    with plain_server(servers[0]) as (busy, front), client_of(front, 1.0) as client:
        sent = send_until_full(client)
        client.shutdown(socket.SHUT_WR)
        with busy.accept()[0] as server:
            taken = 0
            while data := server.recv(1 << 20):
                taken += len(data)
        assert taken == sent


def test_closing_ends_a_connection_whose_server_takes_no_bytes(servers: list[FakeServer]) -> None:
    with plain_server(servers[0]) as (busy, front), client_of(front, 0.2) as client:
        send_until_full(client)
        front.close()
        with busy.accept()[0] as server, contextlib.suppress(ConnectionResetError):
            server.settimeout(PATIENCE_S)
            while server.recv(1 << 20):
                pass


def test_a_client_that_leaves_without_a_query_leaves_its_server_ready(
    servers: list[FakeServer],
) -> None:
    with plain_server(servers[0]) as (listening, front):
        servers[0].answers = threading.Semaphore(0)
        wait_until(lambda: servers[0].probes == 1, "a probe waits, so that no other begins")
        client_of(front).close()
        with listening.accept()[0] as server:
            assert server.recv(1) == b""
        wait_until(lambda: not front._pipes, "it is forgotten")
        assert front.ready == {"plain"}
        servers[0].answers.release(1000)


def test_a_client_that_closes_its_connection_ends_that_of_its_server(
    servers: list[FakeServer],
) -> None:
    """The client sends all, closes, and resets the connection when the server writes to it."""
    with plain_server(servers[0]) as (listening, front):
        with client_of(front) as client, listening.accept()[0] as server:
            client.sendall(b"a query")
            assert server.recv(16) == b"a query"
            client.close()
            assert server.recv(1) == b""
            server.sendall(b"wait")
            broken = partial(server.getsockopt, socket.SOL_SOCKET, socket.SO_ERROR)
            wait_until(broken, "it is reset")
        wait_until(lambda: not front._pipes, "nothing is kept of it")
        assert front.ready == {"plain"}


FAR = """
import http.server, sys, threading
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/hold":
            print("held", flush=True)
            threading.Event().wait()
        self.send_response(200)
        self.end_headers()
server = http.server.ThreadingHTTPServer((sys.argv[1], 8000), Handler)
print("listens", flush=True)
server.serve_forever()
"""


@contextlib.contextmanager
def machine() -> Iterator[tuple[Program, str, str]]:
    """Run FAR in a network of its own, which no other run of the tests has; yield its process, the
    name of the link to it, and its address."""
    if os.getuid() != 0 or shutil.which("ip") is None:
        pytest.skip("only root can make a network, with iproute2")
    link, number = f"far{os.getpid()}", os.getpid() % (1 << 14)
    here, there = (f"10.213.{number >> 6}.{(number & 63) * 4 + end}" for end in (1, 2))
    for words in (
        ("netns", "add", link),
        ("link", "add", f"{link}h", "type", "veth", "peer", "name", "eth0", "netns", link),
        ("addr", "add", f"{here}/30", "dev", f"{link}h"),
        ("link", "set", f"{link}h", "up"),
        ("-n", link, "addr", "add", f"{there}/30", "dev", "eth0"),
        ("-n", link, "link", "set", "eth0", "up"),
    ):
        subprocess.run(["ip", *words], check=True)
    inside = ["ip", "netns", "exec", link, sys.executable, "-c", FAR, there]
    with Program(*inside, until="listens\n") as process:
        try:
            yield process, link, there
        finally:
            subprocess.run(["ip", "link", "del", f"{link}h"], check=True)
            subprocess.run(["ip", "netns", "del", link], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("sends", [False, True], ids=["silent", "sending"])
def test_a_connection_to_a_server_that_was_taken_out_ends_with_its_machine(
    front: Ingress, monkeypatch: pytest.MonkeyPatch, sends: bool
) -> None:
    monkeypatch.setattr(ingress, "SILENT_S", 1.0)
    with machine() as (process, link, address):
        front.route([Backend("far", {"http": f"http://{address}:8000"})])
        wait_until(lambda: front.ready == {"far"}, "it is ready")
        host, port = ingress.host_port(front.addresses["http"])
        with socket.create_connection((host, port), timeout=3 * PATIENCE_S) as client:
            client.sendall(b"GET /hold HTTP/1.1\r\nHost: far\r\n\r\n")
            process.until("held\n")
            front.route([])
            subprocess.run(["ip", "-n", link, "link", "set", "eth0", "down"], check=True)
            if sends:
                client.sendall(b"GET / HTTP/1.1\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(1) == b""


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
