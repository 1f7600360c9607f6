"""miss: what does a prediction cost that a container has to make, with 1000 outstanding? Cache
off."""

from collections.abc import Callable

import numpy as np

from bench.harness import Goal, Row, Sample, absent, interleave, row, window_ns
from bench.system.anchors.floor import copy_ns
from bench.system.anchors.reference import Reference, distinct
from bench.system.engine.effort import Effort, rate
from bench.system.engine.servers import WIDE, servers

TRANSPORTS = ("unix", "shm")
WORDS = {"unix": "unix socket", "shm": "shared memory"}
LEAST_WIDE = {"unix": 0.7, "shm": 1.5}  # M/s
FLOOR = "memcpy of the row"


def rows(effort: Effort) -> list[Row]:
    misses = distinct(effort.of(10_000, 200))()
    images = list(np.random.default_rng(1).random((effort.of(4000, 100), WIDE), dtype=np.float32))
    with (
        servers(TRANSPORTS, ("cold", "cold-wide")) as (running, missing),
        Reference(cache_entries=0) as reference,
        Reference(cache_entries=0, dtype="f4") as reference_wide,
    ):
        cases: dict[str, Callable[[], float]] = {
            "reference": lambda: window_ns(reference.predict, misses),
            "reference wide": lambda: window_ns(reference_wide.predict, images),
            "copy wide": copy_ns(1024, 4 * WIDE),
        }
        for transport, server in running.items():
            narrow, wide = server.model("cold"), server.model("cold-wide")
            cases[transport] = lambda predict=narrow.predict: window_ns(predict, misses)  # type: ignore[misc]
            cases[f"{transport} wide"] = lambda predict=wide.predict: window_ns(predict, images)  # type: ignore[misc]
        found = interleave(cases, effort.repetitions)
    return [
        one
        for transport in TRANSPORTS
        for one in rows_of(transport, found, missing.get(transport, ""))
    ]


def rows_of(transport: str, found: dict[str, Sample], missing: str) -> list[Row]:
    where = WORDS[transport]
    names = [
        f"miss f64[1], {where}",
        f"miss f64[1], {where}, of the reference",
        f"miss f32[{WIDE}], {where}",
        f"miss f32[{WIDE}], {where}, of the reference",
    ]
    goals = [
        Goal("value_at_least", 4),
        Goal("times_better", 20),
        Goal("value_at_least", LEAST_WIDE[transport]),
        Goal("times_better", 5),
    ]
    if missing:
        return [
            absent(name, "M/s", missing, goal=goal) for name, goal in zip(names, goals, strict=True)
        ]
    narrow, wide = rate(found[transport]), rate(found[f"{transport} wide"])
    threads = (
        "three threads that run at once (submitter, loop, container) on the cores there are, and"
        " the 1000 rows outstanding: each time one of them sleeps, a wake across cores of 20-50 us"
        " is waited for"
    )
    copies = (
        "the copies of 3 kB: into the lane, through the kernel to the container, and the same"
        " threads as for f64[1]"
    )
    return [
        row(names[0], narrow, "M/s", goal=goals[0], bounded_by=threads),
        row(
            names[1],
            narrow,
            "M/s",
            "reference",
            rate(found["reference"]),
            goals[1],
            bounded_by=threads,
        ),
        row(names[2], wide, "M/s", FLOOR, rate(found["copy wide"]), goals[2], bounded_by=copies),
        row(
            names[3],
            wide,
            "M/s",
            "reference",
            rate(found["reference wide"]),
            goals[3],
            bounded_by=copies,
        ),
    ]
