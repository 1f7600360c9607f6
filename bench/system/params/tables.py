"""Benchmark of many small tables in one message, beside one table with as many rows.

26 tables are what a model of the Criteo data set has. All are on one shard, over a unix socket.
"""

import time
from collections.abc import Callable

import numpy as np

from bench.harness import Goal, Row, interleave, row
from bench.system.params.wire import ours
from clipper.params import Client, TableSpec

TABLES, IDS, DIM = 26, 256, 16


def rows(quick: bool = False) -> list[Row]:
    n, turns = (30, 3) if quick else (200, 7)
    draw = np.random.default_rng(1)
    names = [f"t{i}" for i in range(TABLES)]
    ids = {name: draw.integers(0, 1 << 40, IDS) for name in names}
    gradients = {name: draw.standard_normal((IDS, DIM)).astype(np.float32) for name in names}
    together = {name: (ids[name], gradients[name]) for name in names}
    every, all_gradients = (
        np.concatenate(list(ids.values())),
        np.concatenate(list(gradients.values())),
    )
    with ours() as client:
        for name in (*names, "one"):
            client.create(TableSpec(name, DIM))

        def push_each(client: Client = client) -> None:
            for name in names:
                client.push(name, ids[name], gradients[name])

        cases: dict[str, Callable[[], object]] = {
            "pull": lambda: client.pull_tables(ids),
            "pull one": lambda: client.pull("one", every),
            "push": lambda: client.push_gradients(rows=together),
            "push one": lambda: client.push("one", every, all_gradients),
            "push each": push_each,
        }
        for run in cases.values():
            run()
        found = interleave({name: _median_us(run, n) for name, run in cases.items()}, turns)
    what = f"of {TABLES} tables of {IDS} rows of {DIM} floats"
    one = f"one table, {TABLES * IDS} rows"
    goal = Goal("at_most", 1.5)
    return [
        row(f"pull {what}", found["pull"], "us", one, found["pull one"], goal),
        row(f"push {what}", found["push"], "us", one, found["push one"], goal),
        row(f"push {what}", found["push"], "us", f"{TABLES} pushes", found["push each"]),
    ]


def _median_us(run: Callable[[], object], n: int) -> Callable[[], float]:
    def once() -> float:
        took = []
        for _ in range(n):
            begun = time.perf_counter_ns()
            run()
            took.append(time.perf_counter_ns() - begun)
        return float(np.median(took)) / 1e3

    return once
