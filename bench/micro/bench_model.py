"""Cost of predict() for its caller: a hit and a miss by size of the row, beside functools.lru_cache
and a queue.

pytest bench/micro/bench_model.py --benchmark-columns=min,median,iqr
"""

import functools
import queue
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from clipper_core.engine.engine import Engine
from clipper_core.engine.model import Model, predict_all
from clipper_core.wire.codec import Kind, encode_frame, encode_rows

OPERATIONS = 10_000
ROW_FLOATS = [1, 64, 784]


def measure(
    benchmark: Any, run: Callable[..., object], setup: Callable[[], Any] | None = None
) -> None:
    benchmark.pedantic(run, setup=setup, rounds=20, warmup_rounds=1)
    if benchmark.stats is not None:
        benchmark.extra_info["ns_per_operation"] = round(
            benchmark.stats.stats.min / OPERATIONS * 1e9, 1
        )


def model_of(floats: int, cached: bool, **options: Any) -> Model:
    engine = Engine(manual_clock=True, cache_bytes_max=1 << 24)
    return Model(engine, "m:1", 1, "f64", (floats,), cached=cached, lane_rows=1 << 14, **options)


def calls(fn: Callable[[Any], object], x: object) -> Callable[[], None]:
    def run() -> None:
        for _ in range(OPERATIONS):
            fn(x)

    return run


@pytest.mark.parametrize("floats", ROW_FLOATS)
def test_hit(benchmark: Any, floats: int) -> None:
    model, x = model_of(floats, True), np.arange(float(floats))
    model.put(x, 1.0)
    measure(benchmark, calls(model.predict, x))


def test_hit_and_result(benchmark: Any) -> None:
    model, x = model_of(64, True), np.arange(64.0)
    model.put(x, 1.0)
    measure(benchmark, calls(lambda x: model.predict(x).result(), x))


def test_hit_of_text(benchmark: Any) -> None:
    model, x = (
        Model(Engine(manual_clock=True), "m:1", 1, "str"),
        "a sentence of some sixty characters, as a user may type it in",
    )
    model.put(x, 1.0)
    measure(benchmark, calls(model.predict, x))


def test_hit_of_a_list(benchmark: Any) -> None:
    """Measure a hit whose input is converted to an array first."""
    model, x = model_of(64, True), [float(i) for i in range(64)]
    model.put(x, 1.0)
    measure(benchmark, calls(model.predict, x))


def misses(benchmark: Any, model: Model, run: Callable[[], object]) -> None:
    """Empty the lane before each round, by advancing the time beyond the deadlines."""
    engine, now = model.engine, [0]

    def setup() -> None:
        now[0] += 10_000_000
        for _ in range(3):
            now[0] += 30_000
            engine.step(now[0])

    measure(benchmark, run, setup)


@pytest.mark.parametrize("floats", ROW_FLOATS)
@pytest.mark.parametrize("cached", [True, False], ids=["keyed", "unkeyed"])
def test_miss(benchmark: Any, floats: int, cached: bool) -> None:
    """Measure a miss: the row is copied into the lane. The end of the task is not included, that of
    the future is."""
    model, x = model_of(floats, cached), np.arange(float(floats))
    misses(benchmark, model, calls(model.predict, x))


@pytest.mark.parametrize("floats", ROW_FLOATS)
@pytest.mark.parametrize("cached", [True, False], ids=["keyed", "unkeyed"])
def test_miss_as_one_array(benchmark: Any, floats: int, cached: bool) -> None:
    """Submit alone: hashed, looked up and packed."""
    model, rows = model_of(floats, cached), np.zeros((OPERATIONS, floats))
    misses(benchmark, model, lambda: model.predict_many(rows))


@pytest.mark.parametrize("floats", ROW_FLOATS)
def test_hit_as_one_array_and_result(benchmark: Any, floats: int) -> None:
    model, rows = model_of(floats, True), np.zeros((OPERATIONS, floats))
    model.put(rows[0], 1.0)
    measure(benchmark, lambda: model.predict_many(rows).result())


def test_the_loop_s_part_of_an_array(benchmark: Any) -> None:
    """Measure the work of the loop thread for each row of an array of f64[1]: it reads the row,
    sends it in one batch, and ends it by the reply. Copies of the frames between bytes objects are
    included."""
    model = model_of(1, False)
    engine, rows, now = model.engine, np.zeros((OPERATIONS, 1)), [0]
    conn = engine.open(0)
    engine.receive(conn, encode_frame(Kind.HELLO, b""), 0)
    engine.attach(conn, model.index, b"", mode=3, size_max=OPERATIONS)
    engine.step(1)
    engine.outgoing(conn, 1)
    number = [0]

    def setup() -> tuple[tuple[Any], dict[str, Any]]:
        number[0] += 1
        model.predict_many(rows)
        return (encode_rows(Kind.REPLY, rows[:, 0], id=number[0]),), {}

    def run(reply: bytes) -> None:
        now[0] += 10
        engine.step(now[0])
        engine.outgoing(conn, now[0])
        engine.receive(conn, reply, now[0])

    measure(benchmark, run, setup)
    assert engine.snapshot()["models"][0]["ended"]["OK"] == engine.completion.answered > 0


@pytest.mark.parametrize("floats", ROW_FLOATS)
def test_anchor_copy_of_the_array(benchmark: Any, floats: int) -> None:
    rows = np.zeros((OPERATIONS, floats))
    to = np.empty_like(rows)
    measure(benchmark, lambda: np.copyto(to, rows))


def test_three_models_at_once(benchmark: Any) -> None:
    """Measure predict_all over three models with hits only, per ensemble."""
    engine = Engine(manual_clock=True)
    models = tuple(Model(engine, f"m:{i}", i + 1, "f64", (64,)) for i in range(3))
    x = np.arange(64.0)
    for model in models:
        model.put(x, 1.0)
    measure(benchmark, calls(lambda x: predict_all(models, x), x))


@pytest.mark.parametrize("floats", ROW_FLOATS)
def test_anchor_lru_cache(benchmark: Any, floats: int) -> None:
    """Measure a hit of functools.lru_cache, keyed by the row's bytes."""
    x = np.arange(float(floats))
    cached = functools.lru_cache(maxsize=1 << 16)(lambda key: 1.0)
    measure(benchmark, calls(lambda x: cached(x.tobytes()), x))


def test_anchor_simple_queue_of_rows(benchmark: Any) -> None:
    """Measure a miss in plain Python: a copy of the row is put on a queue."""
    line: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    measure(benchmark, calls(lambda x: line.put(x.tobytes()), np.arange(64.0)))


@pytest.mark.benchmark(group="one query of 64 floats, not cached")
def test_admitted(benchmark: Any) -> None:
    """Measure a row that is admitted to the lane: the anchor of a refusal."""

    def setup() -> tuple[tuple[Callable[[], None]], dict[str, Any]]:
        model = model_of(64, False)
        return (calls(model.predict, np.arange(64.0)),), {}

    measure(benchmark, lambda run: run(), setup)


@pytest.mark.benchmark(group="one query of 64 floats, not cached")
def test_refused(benchmark: Any) -> None:
    """Measure a row that is refused, because no replica connects before the deadline. A refusal by
    an overloaded model costs the same few loads, and no copy."""
    model, x = model_of(64, False), np.arange(64.0)
    model.predict(x)
    model.engine.step(1)
    model.engine.set_earliest_replica(model.index, 1 << 60)
    model.engine.step(2)
    assert model.predict(x).done()
    measure(benchmark, calls(model.predict, x))
