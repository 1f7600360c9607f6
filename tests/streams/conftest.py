"""A server of predictions and one of Redis for each module; streams of a test's own."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import clipper
from tests.store.conftest import own_redis, redis_server

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
        heartbeat_ms=100, warmup=False, restart_ms_min=20, restart_ms_max=200, drain_s=1.0
    ) as started:
        started.deploy("total", total, input="f64[3]")
        started.app("sums", models=["total"], slo_ms=5000, default=-1)
        started.deploy("twice", twice, input="f32[2,2]")
        started.app("doubles", models=["twice"], slo_ms=5000)
        started.deploy("shout", shout, input="str")
        started.app("loud", models=["shout"], slo_ms=5000)
        started._learning.states.start_writing()  # its thread stays too
        yield started


@pytest.fixture(scope="session")
def fresh() -> Callable[[], str]:
    """Return a function that makes names of streams that no test has used."""
    numbers = itertools.count()
    return lambda: f"s{next(numbers)}"
