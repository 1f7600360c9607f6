"""lookup: what does the cache by itself answer, from one thread and from two, beside Python's
caches?"""

import functools
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.harness import Goal, Row, Sample, absent, interleave, row
from bench.system.engine.effort import FULL, TINY, Effort, median
from bench.system.engine.peers import not_installed, peer
from clipper_core.cache.clock_cache import ClockCache

# package: module
PEERS = {"cachebox": "cachebox", "theine": "theine", "lru-dict": "lru", "functools": "functools"}
LEAST = {1: 15, 2: 50}  # times cachebox
MODEL, ROW_BYTES = 1, 8
CORE_TIMES = 20  # as many lookups as a peer makes: a run must be long beside a thread's start
Run = Callable[[], object]


def rows(effort: Effort) -> list[Row]:
    """Measure the rows. Every thread draws keys of its own for one pass, because a second pass
    would find them in the CPU's caches."""
    entries = 5000 if effort is TINY else 1_000_000 if effort is FULL else 50_000
    lookups = 1000 if effort is TINY else 100_000 if effort is FULL else 20_000
    names, rng = [struct.pack("<Q", name) for name in range(entries)], np.random.default_rng(1)
    cache = filled(names)
    cases: dict[str, Callable[[], float]] = {}
    alone: dict[int, list[float]] = {1: [], 2: []}
    for threads in (1, 2):
        arrays = [
            rng.integers(0, entries, CORE_TIMES * lookups).astype("<u8").tobytes()
            for _ in range(threads)
        ]
        cases[f"core {threads}"] = at_once(
            [core_lookup(cache, array) for array in arrays], CORE_TIMES * lookups, alone[threads]
        )
    missing = {}
    for package, module in PEERS.items():
        found_module = peer(module)
        if found_module is None:
            missing[package] = not_installed(package)
            continue
        lookup = FILLED[package](found_module, names)
        for threads in (1, 2):
            drawn = [[names[i] for i in rng.integers(0, entries, lookups)] for _ in range(threads)]
            cases[f"{package} {threads}"] = at_once(
                [python_lookup(lookup, some) for some in drawn], lookups
            )
    found = interleave(cases, effort.at_most(7))
    return [*rows_of(found, missing, entries), scaling(found, alone)]


def filled(names: list[bytes]) -> ClockCache:
    cache = ClockCache(len(names) * 128)
    for name in names:
        cache.fill(MODEL, name, 1.0)
    return cache


def core_lookup(cache: ClockCache, drawn: bytes) -> Run:
    return lambda: cache.lookup_many(MODEL, drawn, ROW_BYTES)


def python_lookup(lookup: Callable[[bytes], object], drawn: list[bytes]) -> Run:
    def run() -> None:
        for name in drawn:
            lookup(name)

    return run


def at_once(runs: list[Run], lookups: int, alone: list[float] | None = None) -> Callable[[], float]:
    """Return a function that measures million lookups per second of one thread for each of `runs`.

    The time is taken from the first thread's start to the last one's end. The rate by the threads'
    own CPU time, which is what they would reach with a core each, is appended to `alone`.
    """

    def measure() -> float:
        ready, times, cpu = threading.Barrier(len(runs), timeout=60.0), [], []

        def body(run: Run) -> None:
            ready.wait()
            begun, own = time.perf_counter(), time.thread_time()
            run()
            times.append((begun, time.perf_counter()))
            cpu.append(time.thread_time() - own)

        threads = [threading.Thread(target=body, args=(run,)) for run in runs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if alone is not None:
            alone.append(len(runs) * lookups / max(cpu) / 1e6)
        return (
            len(runs)
            * lookups
            / (max(end for _, end in times) - min(begun for begun, _ in times))
            / 1e6
        )

    return measure


def _cachebox(module: Any, names: list[bytes]) -> Callable[[bytes], object]:
    cache = module.LRUCache(len(names))
    for name in names:
        cache.insert(name, 1.0)
    return cache.get  # type: ignore[no-any-return]


def _theine(module: Any, names: list[bytes]) -> Callable[[bytes], object]:
    cache = module.Cache(len(names))
    for name in names:
        cache.set(name, 1.0)
    return cache.get  # type: ignore[no-any-return]


def _lru_dict(module: Any, names: list[bytes]) -> Callable[[bytes], object]:
    cache = module.LRU(len(names))
    for name in names:
        cache[name] = 1.0
    return cache.get  # type: ignore[no-any-return]


def _functools(_: Any, names: list[bytes]) -> Callable[[bytes], object]:
    @functools.lru_cache(maxsize=len(names))
    def predict(name: bytes) -> float:
        return 1.0

    for name in names:
        predict(name)
    return predict


FILLED: dict[str, Callable[[Any, list[bytes]], Callable[[bytes], object]]] = {
    "cachebox": _cachebox,
    "theine": _theine,
    "lru-dict": _lru_dict,
    "functools": _functools,
}


def rows_of(found: dict[str, Sample], missing: dict[str, str], entries: int) -> list[Row]:
    result = []
    note = (
        f"{entries} entries, keys of {ROW_BYTES} bytes drawn evenly; the core hashes them, a peer"
        " is given their hash"
    )
    for threads in (1, 2):
        words = "1 thread" if threads == 1 else "2 threads"
        for package in PEERS:
            goal = Goal("times_better", LEAST[threads]) if package == "cachebox" else None
            name, anchor = f"lookup, nogil, {words}, of {package}", f"{package} get, {words}"
            if package in missing:
                result.append(absent(name, "M/s", missing[package], anchor, goal))
                continue
            bounded = (
                "memory: a lookup misses the CPU's caches; and two threads need two idle cores,"
                " unlike the peers (one GIL)"
            )
            sample = found[f"core {threads}"]
            result.append(
                row(name, sample, "M/s", anchor, found[f"{package} {threads}"], goal, note, bounded)
            )
            note = ""
    return result


def scaling(found: dict[str, Sample], alone: dict[int, list[float]]) -> Row:
    by_cpu = median(alone[2]) / median(alone[1])
    note = f"by the threads' own CPU time, as if each had a core to itself: {by_cpu:.2f} x"
    shared = (
        "the second core, when other work is on it (see the ratio by CPU time); the lookups share"
        " no line that is written to"
    )
    one, goal = "1 thread", Goal("at_least", 1.8)
    return row(
        "lookup, 2 threads of 1", found["core 2"], "M/s", one, found["core 1"], goal, note, shared
    )
