"""The stores that the laws are held against, and a real Redis server, with a log so that it survives a kill."""

import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clipper.store import MemoryStore, RedisStore, SqliteStore, Store

OpenStore = Callable[[int], Store]


class RedisServer:
    """One redis-server process that can be killed, frozen and started again on the same folder."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._folder, self._options = folder, options
        self.url = f"unix://{folder}/redis.sock"
        self.start()

    def start(self, *options: str) -> None:
        command = ["redis-server", "--port", "0", "--unixsocket", f"{self._folder}/redis.sock", "--dir", str(self._folder),
                   "--save", "", "--appendonly", "yes", "--enable-debug-command", "local", *self._options, *options]  # fmt: skip
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 20
        while self._ask("PING") != b"+PONG":
            assert self.process.poll() is None, "redis-server ended at once; run it by hand to see why"
            assert time.monotonic() < until, "redis-server did not come up within 20 s"
            time.sleep(0.01)

    def _ask(self, command: str) -> bytes:
        import socket

        with socket.socket(socket.AF_UNIX) as line:
            try:
                line.settimeout(1)
                line.connect(f"{self._folder}/redis.sock")
                line.sendall(command.encode() + b"\r\n")
                return line.recv(64).strip()
            except OSError:
                return b""

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def started(*options: str) -> Iterator[RedisServer]:
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server on this machine. apt-get install redis-server")
    folder = Path(tempfile.mkdtemp(prefix="redis-"))
    server = RedisServer(folder, *options)
    yield server
    server.kill()
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    """Shared by a module of tests; each takes a prefix of its own."""
    yield from started()


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """A test's own, to be killed: by default Redis answers before it writes while a sync takes its time."""
    yield from started("--appendfsync", "always")


@pytest.fixture(params=["memory", "sqlite", "redis"])
def open_with(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenStore]:
    """A function from events_max to a fresh store."""
    opened: list[Store] = []

    def build(events_max: int) -> Store:
        if request.param == "memory":
            store: Store = MemoryStore(events_max)
        elif request.param == "redis":
            server = request.getfixturevalue("redis_server")
            store = RedisStore(f"{server.url}?prefix={tmp_path.name}/{len(opened)}:", events_max)
        else:
            store = SqliteStore(tmp_path / f"{len(opened)}.db", durable=False, events_max=events_max)
        opened.append(store)
        return store

    yield build
    for store in opened:
        store.close()


@pytest.fixture
def store(open_with: OpenStore) -> Store:
    return open_with(1000)


@pytest.fixture
def short_s(store: Store) -> float:
    """A lease so short that a test can wait for its end."""
    return 0.3
