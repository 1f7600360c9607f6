"""A server with HTTP for each module of tests, and a client that is http.client; and a connection
without a socket."""

import copy
import http.client
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

import clipper
from clipper.frontend.http.connection import HttpConnection, HttpService
from clipper.frontend.http.messages import HandlerResult, HttpRequest
from clipper.settings.http import HttpSettings
from clipper_container.model import Scored

QUICK = {
    # after three, a container that sends them counts as lost: no time that a busy machine needs
    "heartbeat_ms": 2000,
    "warmup": False,
    "restart_ms_min": 20,
    "restart_ms_max": 200,
    "drain_s": 1.0,
    "stop_grace_s": 1.0,
}
PATIENCE_S = 30.0


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def ask(
    address: str, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> Reply:
    """Send a request on a new connection and return the reply."""
    connection = http.client.HTTPConnection(address, timeout=PATIENCE_S)
    try:
        data = body if body is None or isinstance(body, bytes | str) else json.dumps(body)
        connection.request(method, path, data, headers or {})
        response = connection.getresponse()
        return Reply(
            response.status,
            {name.lower(): value for name, value in response.getheaders()},
            response.read(),
        )
    finally:
        connection.close()


Ask = Callable[..., Reply]


def total(rows: Any) -> Any:
    return np.asarray(rows).sum(axis=1)


def beside(rows: Any) -> Any:
    return Scored(total(rows), qualifiers=[{"quality": 3, "note": "fine"}] * len(rows))


@pytest.fixture(autouse=True, scope="session")
def patient_queries() -> Iterator[None]:
    """Give a query that names no SLO half a minute, for a machine that is busy; and the look-up of
    a model that was just registered."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("clipper.serving.models.running_models._MODEL_SLO_US", 30_000_000)
        for limit in ("WAIT_S", "LOOP_WAIT_S"):
            patch.setattr(f"clipper.mesh.routing.lookups.{limit}", 20.0)
        yield


@pytest.fixture(scope="module")
def server() -> Iterator[clipper.ClipperServer]:
    with clipper.start(http="127.0.0.1:0", admin="127.0.0.1:0", **QUICK) as started:
        started._learning.states.start_writing()  # its thread stays
        started.deploy("sum", total, input="f64[3]")
        started.deploy("beside", beside, input="f64[3]")
        started.app("total", models=["sum"], slo_ms=5000)
        started.app("beside", models=["beside"], slo_ms=5000)
        started.app("learns", models=["sum"], slo_ms=5000, policy="stacking")
        warm_workers(started)
        yield started


def warm_workers(server: clipper.ClipperServer) -> None:
    """Start all worker threads, so that none starts during a test."""
    frontends: Any = server._endpoints.frontends
    pools = [*frontends._listeners._pools.values()] if frontends._listeners is not None else []
    if frontends._grpc is not None:
        pools += [frontends._grpc._workers, frontends._grpc._managers]
    for pool in pools:
        barrier = threading.Barrier(5)
        waiting = [pool.submit(barrier.wait) for _ in range(4)]
        barrier.wait(PATIENCE_S)
        for one in waiting:
            one.result(PATIENCE_S)


@pytest.fixture
def query(server: clipper.ClipperServer) -> Ask:
    """Return a function query(method, path, body, headers) -> Reply, which sends to the query
    listener."""
    return lambda *words, **more: ask(server.http_address, *words, **more)


@pytest.fixture
def manage(server: clipper.ClipperServer) -> Ask:
    return lambda *words, **more: ask(server.admin_address, *words, **more)


# -- without sockets


class FakeTransport:
    """An asyncio transport that keeps what is written and records the calls."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = self.aborted = self.eof = self.paused = False
        self.unread = 0
        self.protocol: Any = None

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol

    def get_write_buffer_size(self) -> int:
        return self.unread

    def get_extra_info(self, name: str, default: Any = None) -> None:
        """Return None: there is no socket."""

    def write(self, data: bytes) -> None:
        assert not self.closed
        assert not self.eof, "written after the end"
        self.written += data

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.eof = True

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def replies(self) -> list[tuple[int, bytes, bytes]]:
        """Return and remove (status, head, body) of each response."""
        found, rest = [], self.written
        while rest:
            head, _, rest = rest.partition(b"\r\n\r\n")
            status = int(head.split()[1])
            size = 0
            for line in head.split(b"\r\n")[1:]:
                name, _, value = line.partition(b": ")
                size = int(value) if name == b"content-length" else size
            body, rest = rest[:size], rest[size:]
            found.append((status, head, body))
        return found


class FakeWatcher:
    """A FutureWatcher that runs callbacks when the test calls turn()."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Any, Any]] = []
        self.posted: list[Callable[[], object]] = []

    def post(self, step: Callable[[], object]) -> None:
        self.posted.append(step)

    def turn(self) -> int:
        """Call what was posted before this turn; returns how many."""
        posted, self.posted = self.posted, []
        for step in posted:
            step()
        return len(posted)

    def on_done(self, future: Any, callback: Any) -> bool:
        if future.done():
            return False
        self.waiting.append((future, callback))
        return True


class InMemoryConnection:
    """An HttpConnection over a fake transport: feed() it bytes, and read `transport`."""

    def __init__(
        self,
        handle: Callable[[HttpRequest], HandlerResult],
        turn_s: float = 60.0,
        admit: Callable[[HttpRequest], None] | None = None,
        **settings: Any,
    ) -> None:
        self.watcher, self.transport = FakeWatcher(), FakeTransport()
        self.work: list[tuple[Any, Any]] = []
        run = lambda work, exchange: self.work.append((work, exchange))  # noqa: E731
        self.service = HttpService(
            HttpSettings(**settings),
            handle,
            self.watcher,  # type: ignore[arg-type]
            run,
            turn_s=turn_s,
            admit=admit,
        )
        self.service.check(0.0, b"Thu, 01 Jan 1970 00:00:00 GMT")
        self._connect()

    def _connect(self) -> None:
        self.protocol = HttpConnection(self.service)
        self.protocol.connection_made(self.transport)  # type: ignore[arg-type]

    def beside(self) -> "InMemoryConnection":
        """Return another connection of the same service."""
        other = copy.copy(self)
        other.transport = FakeTransport()
        other._connect()
        return other

    def feed(self, data: bytes) -> "InMemoryConnection":
        """Receive `data`, and run the loop until it is idle."""
        (self.transport.protocol or self.protocol).data_received(data)
        while self.watcher.turn():
            pass
        return self

    def at(self, now_s: float) -> "InMemoryConnection":
        self.service.check(now_s, b"later")
        return self

    @property
    def statuses(self) -> list[int]:
        return [status for status, _, _ in self.transport.replies()]
