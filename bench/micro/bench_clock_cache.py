"""Measures what a cached prediction costs: the hash, a lookup and a fill, beside dict,
functools.lru_cache and the caches of others.

Rows named *_core run without the GIL and pay for one call per OPERATIONS; the others pay for a call
each. extra_info has ns_per_operation (of the fastest round), gb_per_s where rows are hashed,
hit_percent where a trace is run. Caches that are not installed are left out (the extra `peers` has
them).

    pytest bench/micro/bench_clock_cache.py --benchmark-columns=min,median,iqr
"""

import functools
import importlib.util
import os
import random
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from clipper_core.cache.clock_cache import POLICIES, VARIANTS, ClockCache

OPERATIONS = 50_000
ENTRIES = [10_000, 1_000_000]


def measure(
    benchmark: Any, run: Callable[[], object], operations: int = OPERATIONS, row_bytes: int = 0
) -> None:
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


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("row_bytes", [8, 16, 100, 784, 3136])
def test_key_core(benchmark: Any, row_bytes: int, variant: str) -> None:
    operations = min(OPERATIONS, (1 << 20) // row_bytes)
    cache, rows = ClockCache(0, variant=variant), os.urandom(row_bytes * operations)
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
            list(
                pool.map(
                    lambda _: [cache.lookup_many(1, rows, 8) for _ in range(4)], range(threads)
                )
            )

        measure(benchmark, run, 4 * OPERATIONS * threads)


def test_miss_core(benchmark: Any) -> None:
    cache, rows = (
        full_cache(10_000),
        struct.pack(f"<{OPERATIONS}Q", *range(1 << 40, (1 << 40) + OPERATIONS)),
    )
    measure(benchmark, lambda: cache.lookup_many(1, rows, 8))


# -- beside the caches of others


class Cached:
    """One cache of `entries` entries, as get(row) -> float or None and put(row, float)."""

    def __init__(
        self, entries: int, get: Callable[[bytes], Any], put: Callable[[bytes, float], Any]
    ) -> None:
        self.entries, self.get, self.put = entries, get, put


def clipper_cache(entries: int, policy: str = "clock") -> Cached:
    """The power of two of buckets of five that is next above, so that it holds at least as many."""
    cache = ClockCache(128 * (1 << (entries // 5 - 1).bit_length()) * 4 // 3 + 128, policy=policy)
    return Cached(
        cache.buckets * 5, functools.partial(cache.lookup, 1), functools.partial(cache.fill, 1)
    )


def dict_anchor(entries: int) -> Cached:
    held: dict[bytes, float] = {}
    return Cached(entries, held.get, held.__setitem__)


def functools_anchor(entries: int) -> Cached:
    """Look up a key; a lookup that misses records the miss."""
    cached = functools.lru_cache(entries)(lambda row: 1.0)
    return Cached(entries, cached, lambda row, value: cached(row))


def cachebox_anchor(entries: int) -> Cached:
    cache = importlib.import_module("cachebox").LRUCache(entries)
    return Cached(entries, cache.get, cache.insert)


def lru_dict_anchor(entries: int) -> Cached:
    cache = importlib.import_module("lru").LRU(entries)
    return Cached(entries, cache.get, cache.__setitem__)


def theine_anchor(entries: int) -> Cached:
    cache = importlib.import_module("theine").Cache(entries)

    def get(row: bytes) -> Any:
        value, found = cache.get(row)
        return value if found else None

    return Cached(entries, get, cache.set)


INSTALLED = {"cachebox": cachebox_anchor, "lru": lru_dict_anchor, "theine": theine_anchor}
PEERS = [
    clipper_cache,
    functools_anchor,
    *(make for name, make in INSTALLED.items() if importlib.util.find_spec(name)),
]


@functools.cache
def filled(make: Callable[[int], Cached], entries: int) -> Cached:
    cache = make(entries)
    for name, row in enumerate(rows_of(entries)):
        cache.put(row, float(name))
    return cache


@pytest.mark.parametrize("entries", ENTRIES)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("make", [*PEERS, dict_anchor], ids=lambda make: make.__name__)
def test_hit(benchmark: Any, make: Callable[[int], Cached], entries: int, threads: int) -> None:
    cache, rows = filled(make, entries), drawn_rows(entries)

    def ask(_: int) -> None:
        get = cache.get
        for row in rows:
            get(row)

    with ThreadPoolExecutor(threads) as pool:
        measure(benchmark, lambda: list(pool.map(ask, range(threads))), OPERATIONS * threads)


@pytest.mark.parametrize("make", PEERS, ids=lambda make: make.__name__)
def test_fill_and_evict(benchmark: Any, make: Callable[[int], Cached]) -> None:
    cache, names = make(32_768), iter(range(1 << 60))

    def run() -> None:
        put = cache.put
        for _ in range(OPERATIONS):
            put(next(names).to_bytes(8, "little"), 1.0)

    measure(benchmark, run)


@functools.cache
def trace(kind: str) -> list[bytes]:
    """200 000 requests for 50 000 keys: zipf 1.0; `drift` moves the order of popularity ten times
    and sees a fifth once."""
    rng = np.random.default_rng(7)
    weights = 1 / np.arange(1, 50_001)
    names = rng.choice(50_000, 200_000, p=weights / weights.sum())
    if kind == "drift":
        names = (names + np.arange(200_000) // 20_000 * 7919) % 50_000
        names = np.where(rng.random(200_000) < 0.2, 50_000 + np.arange(200_000), names)
    return [struct.pack("<Q", name) for name in names.tolist()]


def sieve_cache(entries: int) -> Cached:
    return clipper_cache(entries, POLICIES[1])


@pytest.mark.parametrize("kind", ["zipf", "drift"])
@pytest.mark.parametrize(
    "make",
    [sieve_cache, *(m for m in PEERS if m is not functools_anchor)],
    ids=lambda m: m.__name__,
)
def test_hit_ratio(benchmark: Any, make: Callable[[int], Cached], kind: str) -> None:
    """All with room for 5120 entries, a tenth of the keys; time is of a whole trace, get and on a
    miss put."""
    requests = trace(kind)
    misses = 0

    def run() -> None:
        nonlocal misses
        cache, misses = make(5120), 0
        assert cache.entries == 5120
        for row in requests:
            if cache.get(row) is None:
                misses += 1
                cache.put(row, 1.0)

    benchmark.pedantic(run, rounds=3)
    benchmark.extra_info["hit_percent"] = round(100 - 100 * misses / len(requests), 1)


def test_fill_and_evict_blobs_python(benchmark: Any) -> None:
    cache, names, blob = ClockCache(1 << 22), iter(range(1 << 60)), bytes(200)

    def run() -> None:
        fill = cache.fill
        for _ in range(OPERATIONS):
            fill(1, next(names).to_bytes(8, "little"), blob)

    measure(benchmark, run)
