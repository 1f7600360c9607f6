"""Measures what a row through the work ring costs, beside the standard library's queues.

pytest bench/micro/bench_ring.py --benchmark-columns=min,median,iqr
"""

import collections
import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest

from clipper_core.runtime.ring import SpscRing, WorkRing

OPERATIONS = 100_000
ROW = bytes(512)


def measure(benchmark: Any, run: Callable[[], object], operations: int = OPERATIONS) -> None:
    benchmark.pedantic(run, rounds=7, warmup_rounds=1)
    if benchmark.stats is not None:
        benchmark.extra_info["ns_per_operation"] = round(
            benchmark.stats.stats.min / operations * 1e9, 1
        )


def pairs(
    push: Callable[[Any], object], pop: Callable[[], object], item: object
) -> Callable[[], None]:
    """One thread: each operation is a push and a pop."""

    def run() -> None:
        for _ in range(OPERATIONS):
            push(item)
            pop()

    return run


def test_core_push_and_pop(benchmark: Any) -> None:
    """Claim, write a word, publish, see it, release: without Python."""
    ring = WorkRing(1 << 17, 8)

    def run() -> None:
        ring.churn(0, OPERATIONS)
        ring.drain(OPERATIONS)

    measure(benchmark, run)


@pytest.mark.parametrize("producers", [1, 3])
def test_core_across_threads(benchmark: Any, producers: int) -> None:
    """Producers and the consumer at once, none with the GIL. On a machine of few cores this is the
    scheduler's price too."""
    ring = WorkRing(1 << 15, 8)

    def run() -> None:
        threads = [
            threading.Thread(target=ring.churn, args=(0, OPERATIONS)) for _ in range(producers)
        ]
        for thread in threads:
            thread.start()
        ring.drain(producers * OPERATIONS)
        for thread in threads:
            thread.join()

    measure(benchmark, run, producers * OPERATIONS)


def test_work_ring_from_python(benchmark: Any) -> None:
    """512 bytes copied in and out."""
    ring = WorkRing(1024, len(ROW))
    measure(benchmark, pairs(ring.push, ring.pop, ROW))


def test_spsc_ring_from_python(benchmark: Any) -> None:
    ring = SpscRing(1024)
    measure(benchmark, pairs(ring.push, ring.pop, 7))


def test_anchor_simple_queue(benchmark: Any) -> None:
    anchor: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    measure(benchmark, pairs(anchor.put, anchor.get, ROW))


def test_anchor_queue(benchmark: Any) -> None:
    anchor: queue.Queue[bytes] = queue.Queue()
    measure(benchmark, pairs(anchor.put, anchor.get, ROW))


def test_anchor_deque(benchmark: Any) -> None:
    anchor: collections.deque[bytes] = collections.deque()
    measure(benchmark, pairs(anchor.append, anchor.popleft, ROW))
