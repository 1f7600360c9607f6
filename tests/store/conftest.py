"""The stores of the conformance tests, and a real Redis server with a log, so that its data
survives a kill."""

import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clipper.store import MemoryStore, RedisStore, SqliteStore, Store, open_store
from tests.store import etcd_server as etcd
from tests.store.etcd_server import EtcdServer
from tests.store.rebased import Rebased

OpenStore = Callable[[int], Store]


class RedisServer:
    """A redis-server process that can be killed, frozen and started again on the same folder."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder, self._options = folder, options
        self.url = f"unix://{folder}/redis.sock"
        self.start()

    def start(self, *options: str) -> None:
        command = [
            "redis-server",
            "--port",
            "0",
            "--unixsocket",
            f"{self.folder}/redis.sock",
            "--dir",
            str(self.folder),
            "--save",
            "",
            "--appendonly",
            "yes",
            "--enable-debug-command",
            "local",
            *self._options,
            *options,
        ]
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until = time.monotonic() + 20
        while self._ask("PING") != b"+PONG":
            assert self.process.poll() is None, (
                "redis-server ended at once; run it by hand to see why"
            )
            assert time.monotonic() < until, "redis-server did not come up within 20 s"
            time.sleep(0.01)

    def _ask(self, command: str) -> bytes:
        import socket

        with socket.socket(socket.AF_UNIX) as line:
            try:
                line.settimeout(1)
                line.connect(f"{self.folder}/redis.sock")
                line.sendall(command.encode() + b"\r\n")
                return line.recv(64).strip()
            except OSError:
                return b""

    def signal(self, number: signal.Signals) -> None:
        etcd.send(self.process, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def started(*options: str) -> Iterator[RedisServer]:
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server: python tools/fetch.py redis")
    folder = Path(tempfile.mkdtemp(prefix="redis-"))
    server = RedisServer(folder, *options)
    yield server
    server.kill()
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    """Yield a Redis server shared by a module of tests; each test uses its own prefix."""
    yield from started()


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """Start a Redis that a test may kill. It syncs each write before it answers, which is not the
    default."""
    yield from started("--appendfsync", "always")


@pytest.fixture
def own_etcd() -> Iterator[EtcdServer]:
    """Start an etcd that a test may kill."""
    for servers in etcd.started():
        yield servers[0]


@pytest.fixture(params=["memory", "sqlite", "redis"])
def open_with(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenStore]:
    """Yield a function that opens an empty store with a given events_max, for each kind of store
    that has this setting."""
    opened: list[Store] = []

    def build(events_max: int) -> Store:
        opened.append(_fresh(request, request.param, tmp_path, len(opened), events_max))
        return opened[-1]

    yield build
    for store in opened:
        store.close()


@pytest.fixture(params=["memory", "sqlite", "redis", "etcd"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with _fresh(request, request.param, tmp_path, 0, 1000) as store:
        yield store


def _fresh(
    request: pytest.FixtureRequest, kind: str, folder: Path, number: int, events_max: int
) -> Store:
    if kind == "memory":
        return MemoryStore(events_max)
    if kind == "sqlite":
        return SqliteStore(folder / f"{number}.db", durable=False, events_max=events_max)
    if kind == "redis":
        return RedisStore(
            f"{request.getfixturevalue('redis_server').url}?prefix={folder.name}/{number}:",
            events_max,
        )
    return Rebased(
        open_store(f"{request.getfixturevalue('etcd_server').url}/{folder.name}/{number}")
    )


@pytest.fixture
def short_s(store: Store) -> float:
    """Return the time of a lease that is short enough for a test to wait for its end; etcd counts
    whole seconds."""
    return 1.0 if isinstance(store, Rebased) else 0.5
