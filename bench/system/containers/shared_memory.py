"""Shared memory: what it saves for wide rows on one host, beside the same container over its unix
socket.

Two servers in one process, alike but for `shared_memory`, each with a container of a model that
costs nothing; their runs alternate with a memcpy of the same rows, which is what any way of handing
them over costs at least.
"""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

import clipper
from bench.harness import Goal, Row, Sample, interleave, per_call_ns, row, window_ns
from bench.system.anchors.floor import copy_ns
from bench.system.anchors.reference import distinct

WIDE = 784
BULK_ROWS = 1024
WIDTHS = (16, 64, 256)


def cpu_ns(pid: int) -> float:
    """Return the processor time of a process so far."""
    return sum(
        float(task.read_text().split()[0]) for task in Path(f"/proc/{pid}/task").glob("*/schedstat")
    )


class Way:
    """One server and its models."""

    def __init__(self, shared: bool) -> None:
        self.server = clipper.start(shared_memory=shared)
        for width in (1, WIDE, *WIDTHS):
            name = f"w{width}"
            type_ = "f64[1]" if width == 1 else f"f32[{width}]"
            self.server.deploy(
                name,
                "bench.system.fixtures.noop:first",
                input=type_,
                cache=False,
                batching={"size_max": 4096},
            )
        (replica,) = self.server.stats()["models"][f"w{WIDE}:1"]["replicas"]
        self.pid = replica["pid"]
        self.cpu: dict[str, list[float]] = {}

    def cases(self, quick: bool) -> dict[str, Callable[[], float]]:
        wide, narrow = self.server.model(f"w{WIDE}"), self.server.model("w1")
        images = [np.full(WIDE, i, np.float32) for i in range(2000)]
        stack = np.stack(images[:BULK_ROWS])
        trips = distinct(100 if quick else 500)()
        turns = 5 if quick else 20

        def widths(width: int) -> Callable[[], float]:
            model, rows = self.server.model(f"w{width}"), np.zeros((BULK_ROWS, width), np.float32)
            return lambda: per_call_ns(model.predict_many, [rows] * turns) / BULK_ROWS

        return {
            "miss": self.counted(
                "miss", lambda: window_ns(wide.predict, images * turns), len(images) * turns
            ),
            "bulk": self.counted(
                "bulk",
                lambda: per_call_ns(wide.predict_many, [stack] * 4 * turns) / BULK_ROWS,
                BULK_ROWS * 4 * turns,
            ),
            "rtt": lambda: per_call_ns(narrow.predict, trips),
            "rtt wide": lambda: per_call_ns(wide.predict, images[: len(trips)]),
            **{f"bulk {width}": widths(width) for width in WIDTHS},
        }

    def counted(self, name: str, run: Callable[[], float], predictions: int) -> Callable[[], float]:
        """Return the run, with the container's processor time per prediction."""

        def both() -> float:
            before = cpu_ns(self.pid)
            figure = run()
            self.cpu.setdefault(name, []).append((cpu_ns(self.pid) - before) / predictions)
            return figure

        return both


def main(quick: bool) -> list[Row]:
    shared, unix = Way(True), Way(False)
    with shared.server, unix.server:
        cases = {f"shared {name}": run for name, run in shared.cases(quick).items()}
        for name, run in unix.cases(quick).items():
            cases[f"unix {name}"] = run
        cases |= {"copy": copy_ns(BULK_ROWS, 4 * WIDE)}
        order = sorted(cases, key=lambda name: name.split(" ", 1)[-1])
        found = interleave({name: cases[name] for name in order}, repetitions=3 if quick else 15)
    per_s = {
        name: Sample(tuple(1e9 / ns for ns in sample.values)) for name, sample in found.items()
    }
    rows = []
    threads = (
        f"submitter, loop and container share {os.cpu_count()} cores; the container alone needs"
        f" {mean(shared.cpu['miss']):.0f} ns a row with shared memory, {mean(unix.cpu['miss']):.0f}"
        " without"
    )
    copy = f"a copy of a row takes {found['copy'].median:.0f} ns"
    for way, goal in (("shared", 1.5e6), ("unix", 0.7e6)):
        rows.append(
            row(
                f"miss, 1000 outstanding, f32[{WIDE}], {way}",
                per_s[f"{way} miss"],
                "/s",
                "unix",
                per_s["unix miss"],
                Goal("value_at_least", goal),
                bounded_by=threads,
            )
        )
    for way in ("shared", "unix"):
        goal_bulk = Goal("at_least", 0.5) if way == "shared" else None
        rows.append(
            row(
                f"bulk, f32[{WIDE}], {way}",
                per_s[f"{way} bulk"],
                "/s",
                "memcpy",
                per_s["copy"],
                goal_bulk,
                bounded_by=f"{copy}: one is made into the region, and one in the container",
            )
        )
        rows.append(
            row(
                f"bulk, {way}",
                float(4 * WIDE / found[f"{way} bulk"].median),
                "GB/s",
                "memcpy",
                float(4 * WIDE / found["copy"].median),
            )
        )
    for name in ("miss", "bulk"):
        rows.append(
            row(
                f"container's CPU, {name}",
                mean(shared.cpu[name]),
                "ns",
                "unix",
                mean(unix.cpu[name]),
                Goal("at_most", 0.1) if name == "bulk" else None,
                bounded_by=f"{copy}: a batch of rows of several arrays is joined in the container",
            )
        )
    for name, title in (("rtt", "RTT, f64[1]"), ("rtt wide", f"RTT, f32[{WIDE}]")):
        rows.append(
            row(
                title,
                scaled(found[f"shared {name}"], 1e-3),
                "us",
                "unix",
                scaled(found[f"unix {name}"], 1e-3),
            )
        )
    for width in WIDTHS:
        rows.append(
            row(
                f"bulk, f32[{width}]",
                found[f"shared bulk {width}"],
                "ns",
                "unix",
                found[f"unix bulk {width}"],
            )
        )
    return rows


def mean(values: list[float]) -> float:
    return sum(values[1:]) / max(len(values) - 1, 1)  # the first is the warm-up


def scaled(sample: Sample, factor: float) -> Sample:
    return Sample(tuple(value * factor for value in sample.values))
