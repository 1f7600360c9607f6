"""Benchmark of the time from feedback until a pull, and another container, see what it changed.

A server has one shard and two containers. Each round sends one feedback about a new input, and the
model pushes its gradient. A separate client pulls the row until it has changed.
"""

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

import clipper
from bench.harness import Goal, Row, Sample, row
from clipper.params import Client
from clipper_container import Model

PATIENCE_S = 30.0
PUSHED = 1 << 40  # ids that no feedback is about
TABLES = {
    "told": {
        "dim": 16,
        "optimizer": "sgd",
        "optimizer_settings": {"rate": 1.0},
        "initializer": "zeros",
    }
}


class RowPusher(Model):
    """Answers by the row of its input; feedback adds one to that."""

    input = "i64[1]"
    tables: Any = TABLES  # an instance has clipper_container.tables.Tables

    def predict_batch(self, inputs: Any) -> Any:
        return self.tables.pull("told", inputs[:, 0])[:, 0]

    def correct(self, inputs: Any, labels: Any, sessions: Any) -> None:
        self.tables.push("told", inputs[:, 0], -np.ones((len(inputs), 16), np.float32))


def rows(quick: bool = False) -> list[Row]:
    n = 50 if quick else 1000
    with world() as (server, client):
        app = server.app("told", models=["told"], policy="stacking", slo_ms=PATIENCE_S * 1000)
        pushed, told, answered = [], [], []
        gradient = -np.ones((1, 16), np.float32)
        with Client(server.stats()["params"]["folder"]) as other:
            for turn in range(-5, n):
                begun = time.perf_counter()
                other.push("told", [PUSHED + turn], gradient)
                pushed.append(until(partial(is_one, client, PUSHED + turn), begun))
                answer = app.predict([turn]).result(PATIENCE_S)
                begun = time.perf_counter()
                app.feedback(answer, label=1.0)
                told.append(until(partial(is_one, client, turn), begun))
                answer = app.predict([-turn - 100]).result(PATIENCE_S)
                begun = time.perf_counter()
                app.feedback(answer, label=1.0)
                answered.append(until(partial(answers_one, app, -turn - 100), begun))
    return [
        *_rows("push, until another client's pull sees it", pushed[5:], None),
        *_rows(
            "feedback, until a pull sees what the model pushed",
            told[5:],
            Goal("value_at_most", 1000),
        ),
        *_rows("feedback, until a query is answered by it (two containers)", answered[5:], None),
    ]


def is_one(client: Client, id: int) -> bool:
    """Return whether the first value of a row is 1."""
    return bool(client.pull("told", [id])[0, 0] == 1)


def answers_one(app: clipper.ApplicationHandle, id: int) -> bool:
    """Return whether the application answers 1 for this id."""
    return bool(app.predict([id]).result(PATIENCE_S).output == 1)


def until(seen: Callable[[], bool], begun: float) -> float:
    while not seen():
        if time.perf_counter() > begun + PATIENCE_S:
            raise TimeoutError("nothing changed")
    return (time.perf_counter() - begun) * 1e3


def _rows(name: str, took_ms: list[float], goal: Goal | None) -> list[Row]:
    """Return the rows of p50, and of p99 with the goal (G10: at once on the same shard, within a
    second where it is served)."""
    note, p99 = f"{len(took_ms)} turns", float(np.percentile(took_ms, 99))
    return [
        row(f"{name}: p50", Sample(tuple(took_ms)), "ms", note=note),
        row(f"{name}: p99", p99, "ms", goal=goal, note=note),
    ]


@contextlib.contextmanager
def world() -> Iterator[tuple[clipper.ClipperServer, Client]]:
    with tempfile.TemporaryDirectory(prefix="feedback-") as folder:
        params = {"shards": 1, "snapshot_s": 0}
        with clipper.start(server={"params": folder}, params=params) as server:
            server.deploy("told", RowPusher, cache=False, replicas=2)
            with Client(folder) as client:
                yield server, client
