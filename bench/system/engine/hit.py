"""hit: what does a prediction cost that the cache holds? (CPU time: one thread does it all.)"""

from typing import Any

import numpy as np

from bench.harness import CPU, Goal, Row, Sample, interleave, per_call_ns, row
from bench.system.anchors.floor import method_ns
from bench.system.anchors.reference import Reference
from bench.system.engine.effort import Effort
from bench.system.engine.servers import WIDE, servers
from clipper_core.cache.clock_cache import ClockCache

KNOWN = 50


def rows(effort: Effort) -> list[Row]:
    n = effort.of(100) * KNOWN
    narrow: list[Any] = [np.array([float(i)]) for i in range(KNOWN)]
    wide: list[Any] = [np.full(WIDE, i, np.float32) for i in range(KNOWN)]
    hasher, image_bytes = ClockCache(0), np.stack(wide).tobytes()
    with (
        servers(("unix",), ("hot", "hot-wide")) as (running, _),
        Reference() as reference,
        Reference(dtype="f4") as reference_wide,
    ):
        hot, hot_wide = running["unix"].model("hot"), running["unix"].model("hot-wide")
        pairs: list[tuple[Any, list[Any]]] = [
            (hot.predict, narrow),
            (hot_wide.predict, wide),
            (reference.predict, narrow),
        ]
        for predict, inputs in [*pairs, (reference_wide.predict, wide)]:
            for x in inputs:
                predict(x).result()
        cases = {
            "hit": lambda: per_call_ns(hot.predict, narrow * (n // KNOWN), CPU),
            "call": lambda: method_ns(n),
            "reference": lambda: per_call_ns(reference.predict, narrow * (n // KNOWN), CPU),
            "predict": lambda: submit_ns(hot.predict, narrow * (n // KNOWN)),
            "hit wide": lambda: per_call_ns(hot_wide.predict, wide * (n // KNOWN), CPU),
            "hash": lambda: hash_ns(hasher, image_bytes, n // KNOWN),
            "reference wide": lambda: per_call_ns(reference_wide.predict, wide * (n // KNOWN), CPU),
        }
        found = interleave(cases, effort.repetitions)
    return rows_of(found)


def submit_ns(predict: Any, inputs: list[Any]) -> float:
    """Measure predict() alone; the rest of a hit is result() of the future."""

    class Alone:
        def result(self, timeout: float | None = None) -> None: ...

    alone = Alone()
    idle = per_call_ns(lambda _: (None, alone)[1], inputs, CPU)
    return per_call_ns(lambda x: (predict(x), alone)[1], inputs, CPU) - idle


def hash_ns(hasher: ClockCache, rows: bytes, times: int) -> float:
    """Measure the core's hash of one wide row, without the GIL, in ns."""
    begun = CPU()
    for _ in range(times):
        hasher.keys(1, rows, 4 * WIDE)
    return (CPU() - begun) / times / KNOWN


def rows_of(found: dict[str, Sample]) -> list[Row]:
    hit, wide, floor = found["hit"], found["hit wide"], found["call"].plus(found["hash"])
    call = found["call"].median
    parts = (
        "two calls from Python, with an input array and a future object: predict() is about"
        f" {found['predict'].median:.0f} ns, result() the rest; a call that does nothing is"
        f" {call:.0f} ns with the loop around it"
    )
    least = found["reference"].median / (2 * call)
    same = f"the same two calls: were they calls that do nothing, the ratio would be {least:.0f} x"
    return [
        row(
            "hit f64[1], of a no-op call",
            hit,
            "ns",
            "no-op method call",
            found["call"],
            Goal("at_most", 3),
            bounded_by=parts,
        ),
        row(
            "hit f64[1], of the reference",
            hit,
            "ns",
            "reference",
            found["reference"],
            Goal("times_better", 40),
            bounded_by=same,
        ),
        row(
            f"hit f32[{WIDE}], of no-op + hash",
            wide,
            "ns",
            "no-op call + hash",
            floor,
            Goal("at_most", 2.5),
            note="the hash is the core's own, of a row in the L2 cache: "
            f"{found['hash'].median:.0f} ns",
            bounded_by=parts,
        ),
        row(
            f"hit f32[{WIDE}], of the reference",
            wide,
            "ns",
            "reference",
            found["reference wide"],
            note="the reference's key is tobytes() of 3 kB",
        ),
    ]
