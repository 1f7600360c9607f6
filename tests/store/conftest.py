"""The stores of the conformance tests."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.system.fixtures.store_servers import Redis
from clipper.store import MemoryStore, RedisStore, SqliteStore, Store, open_store
from tests.store import etcd_server as etcd
from tests.store.etcd_server import EtcdServer
from tests.store.rebased import Rebased

OpenStore = Callable[[int], Store]


class RedisServer(Redis):
    """A Redis that takes DEBUG commands."""

    def __init__(self, folder: Path, *options: str) -> None:
        super().__init__(folder, "--enable-debug-command", "local", *options)


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
