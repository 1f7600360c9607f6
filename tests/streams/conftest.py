"""A server of predictions and one of Redis for each module; streams of a test's own."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import clipper
from clipper.frontend.streams.scoring import ScoringStream
from tests.memory_container import MemoryContainer, wait_until
from tests.store.conftest import RedisServer, own_redis, redis_server

redis = pytest.importorskip("redis")
Client = Any

__all__ = ["own_redis", "redis_server"]


def total(xs: Any) -> Any:
    return xs.sum(axis=1)


def twice(xs: Any) -> Any:
    return xs * 2


def shout(xs: Any) -> Any:
    return [x.upper() for x in xs]


@pytest.fixture(scope="module")
def server() -> Iterator[clipper.ClipperServer]:
    with clipper.start(
        heartbeat_ms=2000, warmup=False, restart_ms_min=20, restart_ms_max=200, drain_s=1.0
    ) as started:
        started.deploy("total", total, input="f64[3]")
        started.app("sums", models=["total"], slo_ms=30_000, default=-1)
        started.deploy("twice", twice, input="f32[2,2]")
        started.app("doubles", models=["twice"], slo_ms=30_000)
        started.deploy("shout", shout, input="str")
        started.app("loud", models=["shout"], slo_ms=30_000)
        started._learning.states.start_writing()  # its thread stays too
        yield started


@pytest.fixture(scope="session")
def fresh() -> Callable[[], str]:
    """Return a function that makes names of streams that no test has used."""
    numbers = itertools.count()
    return lambda: f"s{next(numbers)}"


class World:
    """A server, a Redis, and the names of a stream there that no other test has."""

    def __init__(self, server: clipper.ClipperServer, url: str, client: Client, name: str) -> None:
        self.server = server
        self.url = url
        self.client = client
        self.source = f"{name}.in"
        self.answers = f"{name}.out"
        self.names: Any = {"source": self.source, "answers": self.answers}
        self.feedback = f"{name}.told"
        self.refused = f"{name}.in.refused"

    def stream(self, app: str = "sums", **settings: Any) -> ScoringStream:
        """Begin to answer the records."""
        return self.server.stream(app, self.url, **self.names, **settings)

    def add(self, **fields: Any) -> Any:
        """Add a record; return its entry."""
        return self.client.xadd(self.source, fields)

    def add_many(self, count: int, first: int = 0) -> None:
        """Add records whose outputs are the numbers from `first` on."""
        pipe = self.client.pipeline(transaction=False)
        for i in range(first, first + count):
            pipe.xadd(self.source, {"input": f"[{i},0,0]"})
        pipe.execute()

    def tell(self, **fields: Any) -> None:
        """Add feedback."""
        self.client.xadd(self.feedback, fields)

    def rows(self, name: str) -> list[dict[str, str]]:
        """Return what a stream holds."""
        return [fields for _, fields in self.client.xrange(name)]

    def outputs(self) -> list[float]:
        """Return the numbers that were answered."""
        return [float(one["output"]) for one in self.rows(self.answers)]

    def wait(self, count: int, name: str = "") -> None:
        """Wait until there are so many answers, or entries of a stream."""
        wait_until(lambda: self.client.xlen(name or self.answers) == count)

    def container(self, name: str) -> MemoryContainer:
        return MemoryContainer(self.server.address, self.server.token, name, input="f64[3]")

    def pending(self) -> int:
        """Return the number of records that are read and not acknowledged."""
        return int(self.client.xpending(self.source, "clipper")["pending"])


def connected(url: str) -> Client:
    return redis.Redis.from_url(url, decode_responses=True, encoding_errors="replace")


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[Client]:
    with connected(redis_server.url) as made:
        yield made


@pytest.fixture
def world(
    server: clipper.ClipperServer,
    redis_server: RedisServer,
    client: Client,
    fresh: Callable[[], str],
) -> World:
    return World(server, redis_server.url, client, fresh())


@pytest.fixture
def own(
    server: clipper.ClipperServer, own_redis: RedisServer, fresh: Callable[[], str]
) -> Iterator[World]:
    """Yield a world whose Redis is the test's own."""
    with connected(own_redis.url) as client:
        yield World(server, own_redis.url, client, fresh())
