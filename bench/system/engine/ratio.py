"""ratio: what share of the queries does the cache answer, beside simulators of global CLOCK and
SIEVE of the same size?

The traces are those of the study behind docs/design.md: zipf of three skews, and "drift", zipf 1.0
whose order of popularity moves on every 50 000 requests, with a fifth of the keys never seen again.
The first fifth of a trace warms the cache up.
"""

import struct
from collections.abc import Callable, Iterable
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from bench.harness import Goal, Row, absent, row
from bench.system.engine.effort import FULL, TINY, Effort
from clipper_core.cache.clock_cache import ClockCache

WAYS, BUCKET_BYTES = 5, 128
TRACES = {"zipf 0.9": 0.9, "zipf 1.0": 1.0, "zipf 1.1": 1.1, "drift": 0.0}
SHIFT_EVERY = 50_000
POINTS = Goal("value_at_most", 1.5)


def rows(effort: Effort) -> list[Row]:
    buckets = 16 if effort is TINY else 1024
    requests = 2000 if effort is TINY else 1_000_000 if effort is FULL else 60_000
    policies: dict[str, Callable[[list[int], int], float]] = {"CLOCK": clock, "SIEVE": sieve}
    result = []
    for policy, simulate in policies.items():
        for trace in TRACES:
            name = f"hit ratio below global {policy}, {trace}"
            shares = []
            for percent in (1, 10):
                keys = trace_of(trace, WAYS * buckets * 100 // percent, requests)
                ours = cached_share(policy.lower(), buckets, keys)
                if ours is None:
                    break
                shares.append((percent, 100 * ours, 100 * simulate(keys, WAYS * buckets)))
            else:
                result.append(row_of(name, policy, shares))
                continue
            result.append(
                absent(
                    name,
                    "points",
                    f"not in this build: no cache policy {policy.lower()!r}",
                    goal=POINTS,
                )
            )
    return result


def row_of(name: str, policy: str, shares: list[tuple[int, float, float]]) -> Row:
    """Return the row of the worse of the two sizes."""
    pairs = (
        f"cache of {size} % of the keys: {ours:.1f} %, global {policy} {other:.1f} %"
        for size, ours, other in shares
    )
    note = "; ".join(pairs)
    worst = max(other - ours for _, ours, other in shares)
    ways = f"the {WAYS} ways of a bucket: a victim is the oldest of {WAYS}, not of all"
    return row(name, worst, "points", goal=POINTS, note=note, bounded_by=ways)


def trace_of(name: str, keys: int, requests: int, seed: int = 1) -> list[int]:
    rng = np.random.default_rng(seed)
    ranks = zipf(rng, TRACES[name] or 1.0, keys, requests)
    found = rng.permutation(keys)[ranks]
    if name == "drift":
        found = drifting(rng, ranks, keys)
    return [int(key) for key in found]


def drifting(rng: np.random.Generator, ranks: NDArray[np.int64], keys: int) -> NDArray[np.int64]:
    requests = len(ranks)
    moved = rng.permutation(keys)[(ranks + np.arange(requests) // SHIFT_EVERY * (keys // 7)) % keys]
    once = rng.random(requests) < 0.2
    return np.where(once, keys + np.arange(requests), moved)


def zipf(rng: np.random.Generator, skew: float, keys: int, requests: int) -> NDArray[np.int64]:
    """Draw ranks from 0, the i-th with a probability proportional to 1 / (i + 1) ** skew."""
    share = np.cumsum(1.0 / np.arange(1, keys + 1) ** skew)
    ranks: NDArray[np.int64] = np.searchsorted(share, rng.random(requests) * share[-1])
    return ranks


def cached_share(policy: str, buckets: int, keys: list[int]) -> float | None:
    """Return the hit share of the core's cache: a lookup, and a fill after a miss. None if it has
    no such policy."""
    bytes_max = buckets * BUCKET_BYTES * 4 // 3 + 64
    try:
        cache = ClockCache(bytes_max, 1, policy=policy)
    except TypeError:
        return None
    assert cache.buckets == buckets, (
        f"{cache.buckets} buckets, not {buckets}: the layout of the cache is another one now"
    )
    lookup, fill = cache.lookup, cache.fill
    row_of = struct.Struct("<Q").pack

    def hits(some: Iterable[int]) -> int:
        found = 0
        for key in some:
            name = row_of(key)
            if lookup(1, name) is None:
                fill(1, name, 1.0)
            else:
                found += 1
        return found

    return _after_warm_up(hits, keys)


def _after_warm_up(hits: Callable[[Iterable[int]], int], keys: list[int]) -> float:
    warm = len(keys) // 5
    hits(islice(keys, warm))
    return hits(islice(keys, warm, None)) / (len(keys) - warm)


def clock(keys: list[int], capacity: int) -> float:
    """Return the hit share of global CLOCK: one hand over all entries; a referenced entry is kept
    once."""
    slots: dict[int, int] = {}
    held = [-1] * capacity
    referenced = bytearray(capacity)
    hand = 0

    def hits(some: Iterable[int]) -> int:
        nonlocal hand
        found = 0
        for key in some:
            slot = slots.get(key)
            if slot is not None:
                referenced[slot] = 1
                found += 1
                continue
            while referenced[hand]:
                referenced[hand] = 0
                hand = hand + 1 if hand + 1 < capacity else 0
            if held[hand] >= 0:
                del slots[held[hand]]
            held[hand], slots[key] = key, hand
            hand = hand + 1 if hand + 1 < capacity else 0
        return found

    return _after_warm_up(hits, keys)


def sieve(keys: list[int], capacity: int) -> float:
    """Return the hit share of global SIEVE (Zhang and others, NSDI 2024): a queue in order of
    insertion; the hand moves from old to new and spares the visited where they stand; new entries
    come in at the head."""
    newer: dict[int, int] = {}
    older: dict[int, int] = {}
    visited: dict[int, bool] = {}
    nobody = -1
    head = tail = hand = nobody

    def evict() -> None:
        nonlocal head, tail, hand
        victim = hand if hand != nobody else tail
        while visited[victim]:
            visited[victim] = False
            victim = newer[victim] if newer[victim] != nobody else tail
        after, before = newer.pop(victim), older.pop(victim)
        hand = after
        del visited[victim]
        if after != nobody:
            older[after] = before
        else:
            head = before
        if before != nobody:
            newer[before] = after
        else:
            tail = after

    def hits(some: Iterable[int]) -> int:
        nonlocal head, tail
        found = 0
        for key in some:
            if key in visited:
                visited[key] = True
                found += 1
                continue
            if len(visited) == capacity:
                evict()
            visited[key] = False
            older[key], newer[key] = head, nobody
            if head != nobody:
                newer[head] = key
            else:
                tail = key
            head = key
        return found

    return _after_warm_up(hits, keys)
