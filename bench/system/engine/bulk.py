"""bulk: what does a row cost in an array that is submitted as one, beside a memcpy of it?"""

from collections.abc import Callable
from typing import Any

import numpy as np

import clipper
from bench.harness import Goal, Row, Sample, absent, interleave, per_call_ns, row
from bench.system.anchors.floor import copy_ns
from bench.system.engine.effort import TINY, Effort, rate
from bench.system.engine.servers import WIDE, servers

TRANSPORTS = ("unix", "shm")
WORDS = {"unix": "unix socket", "shm": "shared memory"}
ROWS, WIDE_ROWS = 4096, 1024
CACHE_BYTES = 128 << 20
FLOOR = "memcpy of the rows"


def rows(effort: Effort) -> list[Row]:
    entries = 20_000 if effort is TINY else 1_000_000
    narrow, wide = (
        np.zeros((ROWS, 1)),
        np.random.default_rng(1).random((WIDE_ROWS, WIDE), dtype=np.float32),
    )
    with servers(
        TRANSPORTS, ("cold", "cold-wide", "hot"), limits={"cache_bytes_max": CACHE_BYTES}
    ) as (running, missing):
        cases: dict[str, Callable[[], float]] = {
            "copy": copy_ns(ROWS, 8),
            "copy wide": copy_ns(WIDE_ROWS, 4 * WIDE),
        }
        first = next(iter(running.values()))
        batches = fill(first, entries, effort.of(40, 2))
        submit = bulk_call(first, "hot")
        cases["hit"] = lambda: per_call_ns(submit, batches) / ROWS
        for transport, server in running.items():
            cases[transport] = bind(bulk_call(server, "cold"), narrow, effort.of(40, 2))
            cases[f"{transport} wide"] = bind(
                bulk_call(server, "cold-wide"), wide, effort.of(20, 2)
            )
        found = interleave(cases, effort.repetitions)
    return rows_of(found, missing, entries)


def bulk_call(server: clipper.ClipperServer, name: str) -> Callable[[Any], Any]:
    """Submit an array of rows by one call. Return the future."""
    return server.model(name).predict_many


def bind(submit: Callable[[Any], Any], batch: Any, times: int) -> Callable[[], float]:
    """Return a function that measures ns per row, with one array after another."""
    return lambda: per_call_ns(submit, [batch] * times) / len(batch)


def fill(server: clipper.ClipperServer, entries: int, batches: int) -> list[Any]:
    """Put `entries` rows into the cache; -> arrays of ROWS rows, drawn from those that it holds."""
    model, rng = server.model("hot"), np.random.default_rng(2)
    for x in np.arange(float(entries)).reshape(-1, 1):
        model.put(x, 1.0)
    drawn = rng.integers(0, entries, 2 * batches * ROWS).astype(np.float64).reshape(-1, 1)
    held = np.array([x for x in drawn if model.cached(x)[0]])[: batches * ROWS]
    return list(held[: len(held) // ROWS * ROWS].reshape(-1, ROWS, 1))


def rows_of(found: dict[str, Sample], missing: dict[str, str], entries: int) -> list[Row]:
    by_row = "what is done row by row: a slot, a deadline and a status each"
    note, memory = (
        f"{entries} entries, {ROWS} rows a call, drawn evenly",
        f"{by_row}; and a miss of the CPU's caches a lookup",
    )
    hit, goal = rate(found["hit"]), Goal("value_at_least", 30)
    result = [
        row(
            "bulk hit f64[1], 1 M entries",
            hit,
            "M/s",
            FLOOR,
            rate(found["copy"]),
            goal,
            note,
            memory,
        )
    ]
    for transport in TRANSPORTS:
        name, wide_name = (
            f"bulk miss f64[1], {WORDS[transport]}",
            f"bulk f32[{WIDE}], {WORDS[transport]}",
        )
        goal = Goal("value_at_least", 15)
        wide_goal = Goal("at_least", 0.5) if transport == "shm" else None
        if transport in missing:
            result += [absent(name, "M/s", missing[transport], FLOOR, goal)]
            result += [absent(wide_name, "M/s", missing[transport], FLOOR, wide_goal)]
            continue
        result += [
            row(
                name,
                rate(found[transport]),
                "M/s",
                FLOOR,
                rate(found["copy"]),
                goal,
                bounded_by=by_row,
            ),
            row(
                wide_name,
                rate(found[f"{transport} wide"]),
                "M/s",
                FLOOR,
                rate(found["copy wide"]),
                wide_goal,
                bounded_by=f"{by_row}; and a copy of each row into the lane",
            ),
        ]
    return result
