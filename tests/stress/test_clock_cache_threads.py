"""Four threads in one cache: no hit returns another key's value, the size stays within its bound,
and every reference is released."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from clipper_core.cache.clock_cache import ClockCache, SharedBlob

THREADS = 4
OPERATIONS = 150_000
BLOB_COST = 64 + 8


def race(run: Callable[[int], tuple[int, int]]) -> list[tuple[int, int]]:
    start = threading.Barrier(THREADS)

    def one(seed: int) -> tuple[int, int]:
        start.wait()
        return run(seed)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(one, range(THREADS)))


@pytest.mark.parametrize(
    ("bytes_max", "key_max"),
    [(300, 12), (1_200, 40), (1_200, 4), (20_000, 600), (1 << 20, 20_000)],
    ids=["one-bucket", "four-buckets", "four-keys", "blobs-evicted", "roomy"],
)
def test_no_hit_returns_the_value_of_another_key(bytes_max: int, key_max: int) -> None:
    cache = ClockCache(bytes_max)
    bound, over, done = max(bytes_max, cache.bytes), [], threading.Event()

    def watch() -> None:
        while not done.is_set():
            if (seen := cache.bytes) > bound:
                over.append(seen)

    watcher = threading.Thread(target=watch)
    watcher.start()
    results = race(lambda seed: cache.race(seed, OPERATIONS, key_max))
    done.set()
    watcher.join()
    assert [wrong for _, wrong in results] == [0] * THREADS
    assert all(hits > OPERATIONS // 50 for hits, _ in results)
    assert over == []


def race_over(blobs: tuple[SharedBlob, ...], bytes_max: int) -> None:
    cache = ClockCache(bytes_max)
    table_bytes = cache.bytes
    results = race(lambda seed: cache.race(seed, OPERATIONS, len(blobs), blobs))
    assert [wrong for _, wrong in results] == [0] * THREADS
    resident = sum(blob.refs - 1 for blob in blobs)
    names = [name.to_bytes(8, "little") for name in range(len(blobs))]
    assert cache.bytes == table_bytes + resident * BLOB_COST
    assert sum(isinstance(cache.lookup(1, name), bytes) for name in names) == resident
    assert sum(cache.lookup(1, name) is not None for name in names) == cache.entries


@pytest.mark.parametrize(("bytes_max", "key_max"), [(1_200, 30), (6_000, 256)])
def test_every_reference_is_accounted_for(bytes_max: int, key_max: int) -> None:
    blobs = tuple(SharedBlob(name.to_bytes(8, "little")) for name in range(key_max))
    race_over(blobs, bytes_max)
    assert [blob.refs for blob in blobs] == [1] * key_max
