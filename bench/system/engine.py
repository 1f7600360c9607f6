"""What one prediction costs from a Python caller, beside the pure-Python reference and the machine's floor.

Everything is measured in one run, interleaved: clipper with its container (a no-op model in a process of its own, over
a unix socket), the reference with its own, and the floors.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

import clipper
from bench.harness import Goal, Row, Sample, awaited_ns, interleave, per_call_ns, row, window_ns
from bench.system import reference
from bench.system.floor import PingPong, call_ns, copy_ns
from bench.system.reference import Reference, distinct

BULK_ROWS = 4096
WIDE = 784


def cases(server: clipper.ClipperServer, quick: bool) -> dict[str, Callable[[], float]]:
    """Name -> a run that returns ns a prediction."""
    n = 500 if quick else 5000
    hot, cold, wide = server.model("hot"), server.model("cold"), server.model("wide")
    known = [np.array([float(i)]) for i in range(100)]
    for x in known:
        hot.predict(x).result()
    hits, misses, trips = known * (n // 100), distinct(2 * n)(), distinct(n // 10)()
    images = [np.full(WIDE, i, np.float32) for i in range(2 * n // 5)]
    known_images = images[:50]
    server.model("wide-hot").predict_many(np.stack(known_images)).result()
    bulk, wide_bulk = np.zeros((BULK_ROWS, 1)), np.zeros((1024, WIDE), np.float32)

    async def awaited(x: Any) -> Any:
        return await cold.predict(x)

    return {
        "hit": lambda: per_call_ns(hot.predict, hits),
        "hit wide": lambda: per_call_ns(server.model("wide-hot").predict, known_images * (n // 50)),
        "miss": lambda: window_ns(cold.predict, misses),
        "miss wide": lambda: window_ns(wide.predict, images),
        "rtt": lambda: per_call_ns(cold.predict, trips),
        "rtt awaited": lambda: awaited_ns(awaited, trips),
        "bulk": lambda: per_call_ns(cold.predict_many, [bulk] * max(n // 1000, 2)) / BULK_ROWS,
        "bulk wide": lambda: per_call_ns(wide.predict_many, [wide_bulk] * 2) / len(wide_bulk),
    }


def deploy(server: clipper.ClipperServer) -> None:
    for name, type_, cache in (("hot", "f64[1]", True), ("cold", "f64[1]", False), ("wide", f"f32[{WIDE}]", False),
                               ("wide-hot", f"f32[{WIDE}]", True)):  # fmt: skip
        server.deploy(name, "bench.system.noop:first", input=type_, cache=cache, batching={"size_max": 4096})


def main(quick: bool) -> list[Row]:
    ping = PingPong()
    with clipper.start() as server, Reference() as cached, Reference(cache_entries=0) as uncached:
        deploy(server)
        ours = {f"ours {name}": run for name, run in cases(server, quick).items()}
        theirs = {f"ref {name}": run for name, run in reference.measures(cached, uncached, quick).items()}
        floors = {"call": call_ns, "ping": ping, "copy": copy_ns(BULK_ROWS, 8), "copy wide": copy_ns(1024, 4 * WIDE)}
        found = interleave({**ours, **theirs, **floors}, repetitions=3 if quick else 15)
    ping.close()
    return rows(found)


def rows(found: dict[str, Sample]) -> list[Row]:
    def versus(title: str, name: str, unit: str, goal: Goal | None, scale: float = 1.0, note: str = "") -> Row:
        ours, theirs = scaled(found[f"ours {name}"], scale), scaled(found[f"ref {name}"], scale)
        return row(title, ours, unit, "reference", theirs, goal, note)

    us = 1e-3
    return [
        versus("cache hit, schedule + result, f64[1]", "hit", "ns", Goal("times_better", 20)),
        row("cache hit, schedule + result, f64[1]", found["ours hit"], "ns", "no-op call", found["call"]),
        row(f"cache hit, schedule + result, f32[{WIDE}]", found["ours hit wide"], "ns", "no-op call", found["call"]),
        versus("miss, 1000 outstanding, f64[1]", "miss", "ns", Goal("times_better", 8)),
        row(f"miss, 1000 outstanding, f32[{WIDE}]", found["ours miss wide"], "ns", "memcpy of the row",
            found["copy wide"]),
        versus("RTT, one outstanding", "rtt", "us", Goal("at_most", 0.7), us),
        row("RTT, one outstanding", scaled(found["ours rtt"], us), "us", "bare ping-pong", scaled(found["ping"], us)),
        versus("RTT awaited on uvloop", "rtt awaited", "us", None, us),
        versus("bulk, a prediction, f64[1]", "bulk", "ns", None, note=f"{BULK_ROWS} rows in one call"),
        row("bulk, a prediction, f64[1]", found["ours bulk"], "ns", "memcpy of the row", found["copy"]),
        row(f"bulk, a prediction, f32[{WIDE}]", found["ours bulk wide"], "ns", "memcpy of the row",
            found["copy wide"]),
    ]  # fmt: skip


def scaled(sample: Sample, factor: float) -> Sample:
    return Sample(tuple(value * factor for value in sample.values))
