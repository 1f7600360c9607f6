"""Measures what a deadline costs: the wheel beside asyncio's and uvloop's timers and a heap.

Each row runs OPERATIONS operations a round; divide by them (extra_info has ns_per_operation).

    pytest bench/micro/bench_timer_wheel.py --benchmark-columns=min,median,iqr
"""

import asyncio
import heapq
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvloop

from clipper_core.runtime.timer_wheel import TimerWheel, churn

OPERATIONS = 100_000


def measure(
    benchmark: Any,
    run: Callable[..., object],
    setup: Callable[[], Any] | None = None,
    operations: int = OPERATIONS,
) -> None:
    benchmark.pedantic(run, setup=setup, rounds=7, warmup_rounds=1)
    if benchmark.stats is not None:
        benchmark.extra_info["ns_per_operation"] = round(
            benchmark.stats.stats.min / operations * 1e9, 1
        )


@pytest.mark.parametrize(
    ("slo_us", "answer_us"),
    [(20_000, 5_000), (20_000, 30_000), (1_000_000, 5_000), (1_000_000, 999_000)],
    ids=["20ms-answered", "20ms-all-late", "1M-outstanding", "1M-outstanding-answered-last"],
)
def test_core_query_at_1M_per_s(benchmark: Any, slo_us: int, answer_us: int) -> None:
    """Insert, forget, meet the dead entry (or fire), advance every tick: everything a query costs,
    without Python."""
    measure(benchmark, lambda: churn(3_000_000, 1_000_000, slo_us, answer_us), operations=3_000_000)


def test_wheel_insert_cancel_from_python(benchmark: Any) -> None:
    def run(wheel: TimerWheel) -> None:
        for ticket in range(OPERATIONS):
            wheel.insert(20_000, ticket)
            wheel.cancel(ticket)

    measure(benchmark, run, lambda: ((TimerWheel(0),), {}))


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def loop(request: pytest.FixtureRequest) -> Iterator[asyncio.AbstractEventLoop]:
    loop: asyncio.AbstractEventLoop = request.param()
    yield loop
    loop.close()


def test_call_later_cancel(benchmark: Any, loop: asyncio.AbstractEventLoop) -> None:
    def nothing() -> None:
        pass

    def run() -> None:
        for _ in range(OPERATIONS):
            loop.call_later(20.0, nothing).cancel()
        loop.run_until_complete(asyncio.sleep(0))

    measure(benchmark, run)


def test_heapq_push_pop(benchmark: Any) -> None:
    """A heap of 100,000 outstanding deadlines: push one, pop the first."""
    rng = random.Random(1)
    heap = [(rng.randrange(20_000), ticket) for ticket in range(100_000)]
    heapq.heapify(heap)

    def run() -> None:
        for ticket in range(OPERATIONS):
            heapq.heappush(heap, (heap[0][0] + 20_000, ticket))
            heapq.heappop(heap)

    measure(benchmark, run)


def crowd(count: int, cancelled: bool) -> TimerWheel:
    rng = random.Random(2)
    wheel = TimerWheel(0)
    for ticket in range(count):
        wheel.insert(20_000 + rng.randrange(1_000_000), ticket)
    if cancelled:
        for ticket in range(count):
            wheel.cancel(ticket)
    return wheel


@pytest.mark.parametrize("cancelled", [True, False], ids=["all-cancelled", "all-due"])
def test_longest_call_with_1M_timers(benchmark: Any, cancelled: bool) -> None:
    """The stop that a loop makes at worst: one bounded call over a million timers; each round is
    one call."""
    wheel = crowd(1_000_000, cancelled)
    calls = 0

    def run() -> None:
        nonlocal calls
        calls += 1
        wheel.step(2_000_000, 1024)

    benchmark.pedantic(run, rounds=50)
    benchmark.extra_info["entries_left"] = wheel.entries
