"""Costs of the cache of a model that reads tables: a query, and rows that move.

    pytest bench/micro/bench_moves.py --benchmark-columns=min,median,iqr

Beside a query of the same model that reads none; beside forgetting by a map of rows to predictions
that is told each moved row; and a whole server beside one that does not cache.
"""

import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import clipper
from clipper.params import Client
from clipper.params.client.row_drift import RowDrift
from clipper.params.client.row_watcher import RowWatcher, WatchedPredictions
from clipper.serving.models.reads import ids_of
from clipper_container import Model as ContainerModel
from clipper_core.engine.engine import Engine
from clipper_core.engine.model import Model

OPERATIONS = 10_000
ROWS = 256
DIM = 16
OUTSTANDING = 64
TABLES = {"t": {"dim": DIM, "initializer": "normal"}}


def measure(
    benchmark: Any,
    run: Callable[..., object],
    operations: int,
    setup: Callable[[], Any] | None = None,
) -> None:
    benchmark.pedantic(run, setup=setup, rounds=20, warmup_rounds=1)
    if benchmark.stats is not None:
        benchmark.extra_info["ns_per_operation"] = round(
            benchmark.stats.stats.min / operations * 1e9, 1
        )


def model_of(reads: bool) -> Model:
    model = Model(Engine(manual_clock=True, cache_bytes_max=1 << 24), "m:1", 1, "i64", (2,))
    if reads:
        knows = cast(RowWatcher, SimpleNamespace(knows=True, wake=lambda: None))
        forget = lambda key, number: model.forget(key[0], key[1], number)  # noqa: E731
        model.watch = WatchedPredictions(knows, ids_of({"t": (0, 1)}), 0.1, 1 << 16, forget)
    return model


@pytest.mark.benchmark(group="a query that is in the cache")
@pytest.mark.parametrize("reads", [False, True], ids=["reads nothing", "reads two rows"])
def test_hit(benchmark: Any, reads: bool) -> None:
    model, x = model_of(reads), np.array([1, 2])
    model.put(x, 1.0)

    def run() -> None:
        for _ in range(OPERATIONS):
            model.predict(x)

    measure(benchmark, run, OPERATIONS)


@pytest.mark.benchmark(group="a prediction that is new: it is put in the cache")
@pytest.mark.parametrize("reads", [False, True], ids=["reads nothing", "reads two rows"])
def test_new(benchmark: Any, reads: bool) -> None:
    model, next_id = model_of(reads), itertools.count()
    rows = np.zeros((OPERATIONS // 10, 2), np.int64)

    def setup() -> None:
        rows[:] = np.arange(rows.size).reshape(rows.shape) + next(next_id) * rows.size

    def run() -> None:
        for row in rows:
            model.put(row, 1.0)

    measure(benchmark, run, len(rows), setup)


def moves_of(predictions: int, tolerance: float) -> RowDrift:
    """Return predictions that each depend on two of the rows."""
    moves = RowDrift(tolerance, 1 << 20, 1 << 20, lambda key, number: None)
    for n in range(predictions):
        moves.enter((n, 0), {"t": np.array([n % ROWS, (n + 1) % ROWS])})
    moves.set_first_values("t", np.arange(ROWS), np.ones((ROWS, DIM), np.float32), [0])
    return moves


@pytest.mark.benchmark(group="256 rows of 16 that have moved, a row")
@pytest.mark.parametrize("predictions", [256, 65536])
@pytest.mark.parametrize("tolerance", [1e9, 0.0], ids=["all stay", "all go"])
def test_moved(benchmark: Any, predictions: int, tolerance: float) -> None:
    ids, turn = np.arange(ROWS), itertools.count(2)
    kept: list[Any] = [] if tolerance == 0.0 else [moves_of(predictions, tolerance)]

    def run(moves: RowDrift) -> None:
        step = float(next(turn))
        moves.moved("t", moves.followed("t", ids), np.full((ROWS, DIM), step, np.float32), 9)

    def setup() -> Any:
        return (kept[0] if kept else moves_of(predictions, tolerance),), {}

    measure(benchmark, run, ROWS, setup)


@pytest.mark.benchmark(group="256 rows of 16 that have moved, a row")
@pytest.mark.parametrize("predictions", [256, 65536])
def test_each_prediction_requested(benchmark: Any, predictions: int) -> None:
    """Measure the simple way: for each row that moved, the change of each prediction that depends
    on it is checked."""
    made: dict[int, list[list[float]]] = {id: [] for id in range(ROWS)}
    for n in range(predictions):
        way = [0.0]
        made[n % ROWS].append(way)
        made[(n + 1) % ROWS].append(way)
    values = np.ones((ROWS, DIM), np.float32)

    def run() -> None:
        after = values * np.float32(1.001)
        steps = np.linalg.norm(after - values, axis=1) / np.linalg.norm(values, axis=1)
        for id, step in enumerate(steps.tolist()):
            for way in made[id]:
                way[0] += step
        values[:] = after

    measure(benchmark, run, ROWS)


def scorer(row_us: int) -> type[ContainerModel]:
    """Return a model that adds up two rows of a table, and computes for `row_us` per input."""

    class Scorer(ContainerModel):
        input = "i64[2]"
        tables: Any = TABLES  # an instance has clipper_container.tables.Tables

        def predict_batch(self, inputs: Any) -> Any:
            rows = self.tables.pull("t", inputs.ravel())
            until_s = time.perf_counter() + len(inputs) * row_us * 1e-6
            while time.perf_counter() < until_s:
                pass
            return rows.reshape(len(inputs), -1).sum(axis=1)

    return Scorer


@pytest.mark.benchmark(group="popular inputs, 64 outstanding, while 100 rows a second are pushed")
@pytest.mark.parametrize("row_us", [0, 50, 200], ids=lambda us: f"{us} us of the model")
@pytest.mark.parametrize("cached", [True, False], ids=["reads=, tolerance=0.1", "cache=False"])
def test_cached_or_not(benchmark: Any, cached: bool, row_us: int, tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    share = [1 / np.arange(1, size + 1) ** 1.1 for size in (2000, 200)]
    x = np.stack([draw.choice(len(p), 400_000, p=p / p.sum()) for p in share], axis=1)
    options: dict[str, Any] = {"reads": {"t": [0, 1]}, "tolerance": 0.1} if cached else {}
    ended, rows = threading.Event(), itertools.cycle(x)
    with clipper.start(server={"params": str(tmp_path)}, params={"shards": 1}) as server:
        model = server.deploy("scorer", scorer(row_us), cache=cached, **options)

        def push() -> None:
            with Client(tmp_path) as client:
                while not ended.wait(0.01):
                    client.push("t", draw.choice(x)[:1], np.full((1, DIM), 0.01, np.float32))

        def run() -> None:
            for _ in range(2000 // OUTSTANDING):
                answers = [model.predict(next(rows)) for _ in range(OUTSTANDING)]
                for answer in answers:
                    answer.result(5.0)

        pusher = threading.Thread(target=push)
        pusher.start()
        try:
            for _ in range(20):
                run()
            measure(benchmark, run, 2000 // OUTSTANDING * OUTSTANDING)
        finally:
            ended.set()
            pusher.join()
