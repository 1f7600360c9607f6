"""What a cached prediction costs: the hash, a lookup and a fill, beside dict and functools.lru_cache.

Rows named *_core run without the GIL and pay for one call per OPERATIONS; rows named *_python pay for a call each.
extra_info has ns_per_operation (of the fastest round), and gb_per_s where rows are hashed.

    pytest bench/micro/bench_clock_cache.py --benchmark-columns=min,median,iqr
"""

import functools
import os
import random
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from clipper_core.clock_cache import ClockCache

OPERATIONS = 50_000
ENTRIES = [10_000, 1_000_000]


def measure(benchmark: Any, run: Callable[[], object], operations: int = OPERATIONS, row_bytes: int = 0) -> None:
    benchmark.pedantic(run, rounds=15, warmup_rounds=1)
    if benchmark.stats is not None:
        ns = benchmark.stats.stats.min / operations * 1e9
        benchmark.extra_info["ns_per_operation"] = round(ns, 1)
        if row_bytes:
            benchmark.extra_info["gb_per_s"] = round(row_bytes / ns, 1)


@functools.cache
def rows_of(entries: int) -> list[bytes]:
    return [struct.pack("<Q", name) for name in range(entries)]


@functools.cache
def full_cache(entries: int) -> ClockCache:
    cache = ClockCache(entries * 128)
    for name, row in enumerate(rows_of(entries)):
        cache.fill(1, row, float(name))
    return cache


def drawn_rows(entries: int) -> list[bytes]:
    return random.Random(1).choices(rows_of(entries), k=OPERATIONS)


@pytest.mark.parametrize("row_bytes", [8, 16, 100, 784, 3136])
def test_key_core(benchmark: Any, row_bytes: int) -> None:
    operations = min(OPERATIONS, (1 << 20) // row_bytes)
    cache, rows = ClockCache(0), os.urandom(row_bytes * operations)
    measure(benchmark, lambda: cache.keys(1, rows, row_bytes), operations, row_bytes)


@pytest.mark.parametrize("row_bytes", [8, 784, 3136])
def test_hash_of_bytes_python_anchor(benchmark: Any, row_bytes: int) -> None:
    view = memoryview(os.urandom(row_bytes * 2000))
    rows = [view[i : i + row_bytes] for i in range(0, len(view), row_bytes)]

    def run() -> None:
        for row in rows:
            hash(row.tobytes())  # a bytes object remembers its hash; a new one has to compute it

    measure(benchmark, run, 2000, row_bytes)


@pytest.mark.parametrize("entries", ENTRIES)
@pytest.mark.parametrize("threads", [1, 2])
def test_hit_core(benchmark: Any, entries: int, threads: int) -> None:
    """Two threads together answer 2 x OPERATIONS; ns_per_operation is of the pair."""
    cache, rows = full_cache(entries), b"".join(drawn_rows(entries))
    with ThreadPoolExecutor(threads) as pool:

        def run() -> None:
            list(pool.map(lambda _: [cache.lookup_many(1, rows, 8) for _ in range(4)], range(threads)))

        measure(benchmark, run, 4 * OPERATIONS * threads)


def test_miss_core(benchmark: Any) -> None:
    cache, rows = full_cache(10_000), struct.pack(f"<{OPERATIONS}Q", *range(1 << 40, (1 << 40) + OPERATIONS))
    measure(benchmark, lambda: cache.lookup_many(1, rows, 8))


@pytest.mark.parametrize("entries", ENTRIES)
def test_hit_python(benchmark: Any, entries: int) -> None:
    cache, rows = full_cache(entries), drawn_rows(entries)

    def run() -> None:
        lookup = cache.lookup
        for row in rows:
            lookup(1, row)

    measure(benchmark, run)


@pytest.mark.parametrize("entries", ENTRIES)
def test_hit_dict_anchor(benchmark: Any, entries: int) -> None:
    held, rows = {row: float(name) for name, row in enumerate(rows_of(entries))}, drawn_rows(entries)

    def run() -> None:
        get = held.get
        for row in rows:
            get(row)

    measure(benchmark, run)


@pytest.mark.parametrize("entries", ENTRIES)
def test_hit_lru_cache_anchor(benchmark: Any, entries: int) -> None:
    @functools.lru_cache(maxsize=entries)
    def predict(model: int, row: bytes) -> float:
        return 1.0

    for row in rows_of(entries):
        predict(1, row)
    rows = drawn_rows(entries)

    def run() -> None:
        for row in rows:
            predict(1, row)

    measure(benchmark, run)


def test_fill_and_evict_python(benchmark: Any) -> None:
    cache, names = ClockCache(1 << 20), iter(range(1 << 60))

    def run() -> None:
        fill = cache.fill
        for _ in range(OPERATIONS):
            fill(1, next(names).to_bytes(8, "little"), 1.0)

    measure(benchmark, run)


def test_fill_and_evict_lru_cache_anchor(benchmark: Any) -> None:
    @functools.lru_cache(maxsize=32_768)
    def predict(model: int, row: bytes) -> float:
        return 1.0

    names = iter(range(1 << 60))

    def run() -> None:
        for _ in range(OPERATIONS):
            predict(1, next(names).to_bytes(8, "little"))

    measure(benchmark, run)


def test_fill_and_evict_blobs_python(benchmark: Any) -> None:
    cache, names, blob = ClockCache(1 << 22), iter(range(1 << 60)), bytes(200)

    def run() -> None:
        fill = cache.fill
        for _ in range(OPERATIONS):
            fill(1, next(names).to_bytes(8, "little"), blob)

    measure(benchmark, run)
