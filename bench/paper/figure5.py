"""Figure 5: what a batch delay of up to 2 ms does to a linear SVM at a moderate load."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np

import clipper
from bench.harness import Row, interleave, open_loop, row
from bench.paper.figure4 import linear_svm
from clipper.load.open_loop import arrivals

RATE = 4000.0
SLO_MS = 20.0
DELAYS_US = (0, 500, 1000, 2000)


def main(quick: bool) -> list[Row]:
    seconds = 0.5 if quick else 2.0
    model = linear_svm()
    with clipper.start() as server:
        for delay in DELAYS_US:
            batching = {"mode": "aimd", "size_max": 4096, "delay_us": delay}
            server.deploy(f"delay-{delay}", model.predict, batching=batching, cache=False)
        cases = {}
        for delay in DELAYS_US:
            for what, measure in (("rows", rows_a_batch), ("cpu", cpu_us_a_query), ("p99", p99_ms)):
                cases[f"{what} {delay}"] = bind(measure, server, f"delay-{delay}", seconds)
        found = interleave(cases, repetitions=1 if quick else 3, warmups=0)
    result = []
    for what, unit in (("rows", "rows/batch"), ("cpu", "us"), ("p99", "ms")):
        title = {"rows": "rows a batch", "cpu": "container CPU a query", "p99": "latency p99"}[what]
        for delay in DELAYS_US:
            name = f"linear SVM at {RATE:g}/s, delay {delay} us: {title}"
            result.append(row(name, found[f"{what} {delay}"], unit, "no delay", found[f"{what} 0"]))
    return result


def bind(measure: Callable[..., float], *args: Any) -> Callable[[], float]:
    return lambda: measure(*args)


def offer(server: clipper.ClipperServer, name: str, seconds: float) -> Any:
    handle = server.model(name)
    inputs = list(np.random.default_rng(1).random((2000, 64)))
    return open_loop(
        lambda x: handle.predict(x, slo_ms=SLO_MS), inputs, arrivals(RATE, seconds, seed=1)
    )


def rows_a_batch(server: clipper.ClipperServer, name: str, seconds: float) -> float:
    before = server.stats()["models"][f"{name}:1"]["batch_rows"]
    offer(server, name, seconds)
    after = server.stats()["models"][f"{name}:1"]["batch_rows"]
    return float((after - before).mean)


def cpu_us_a_query(server: clipper.ClipperServer, name: str, seconds: float) -> float:
    """Return the CPU time of the container's process."""
    pid = server.stats()["models"][f"{name}:1"]["replicas"][0]["pid"]
    before = cpu_s(pid)
    load = offer(server, name, seconds)
    return float((cpu_s(pid) - before) / load.offered * 1e6)


def cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def p99_ms(server: clipper.ClipperServer, name: str, seconds: float) -> float:
    return float(offer(server, name, seconds).quantile_us(0.99)) / 1000
