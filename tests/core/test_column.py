"""Columns: many predictions as one array, against a reference that reads them one by one and
converts them by numpy."""

import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipper_core.engine.engine import Engine
from clipper_core.engine.model import Model
from clipper_core.runtime.status import Status
from tests.memory import resident_bytes

World = Any  # tests/core/conftest.py


def column_of(outputs: list[Any]) -> Any:
    """Return a future whose row i holds outputs[i], or is still pending where that is None."""
    model = Model(Engine(manual_clock=True, cache_bytes_max=1 << 20), "m:1", 1, "f64", (1,))
    for i, output in enumerate(outputs):
        if output is not None:
            model.put([float(i)], output)
    return model.predict_many(np.arange(float(len(outputs)))[:, None])


def twin(outputs: list[Any]) -> Any:
    if isinstance(outputs[0], int | float | np.ndarray):
        try:
            return np.array(outputs)
        except ValueError:
            return outputs
    return outputs


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        if type(one) is not type(other) or one.dtype != other.dtype:
            return False
        return np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
    return len(one) == len(other) and all(
        np.array_equal(a, b) for a, b in zip(one, other, strict=True)
    )


scalars = [
    st.integers(-(2**63), 2**63 - 1),
    st.booleans(),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.integers(-5, 5).map(lambda n: np.full((2, 3), n, "i4")),
    st.floats(width=32).map(lambda x: np.full(2, x, "f4")),
]


@given(st.one_of([st.lists(kind, min_size=1, max_size=50) for kind in scalars]))
@settings(max_examples=300, deadline=None)
def test_a_column_is_what_numpy_makes_of_its_values(outputs: list[Any]) -> None:
    assert alike(column_of(outputs).result(0), twin(outputs))


@pytest.mark.parametrize("seed", range(30))
def test_mixed_kinds_are_as_they_were(seed: int) -> None:
    rng = random.Random(seed)
    kinds = [1, 2.5, True, "a", b"b", np.zeros(2), np.ones((2, 2), "i2")]
    outputs = [rng.choice(kinds[: rng.randint(1, 7)]) for _ in range(40)]
    assert alike(column_of(outputs).result(0), twin(outputs))


@pytest.mark.parametrize(
    ("outputs", "missing", "wanted"),
    [
        ([1.5, None, 3.5], None, np.array([1.5, math.nan, 3.5])),
        ([1.5, None, 3.5], -1, np.array([1.5, -1.0, 3.5])),
        ([1, None, 3], -1, np.array([1, -1, 3])),
        ([1, None, 3], 0.5, np.array([1, 0.5, 3])),
        ([1, None, 3], None, [1, None, 3]),
        ([1, None, 3], "no", [1, "no", 3]),
        ([True, None], False, np.array([True, False])),
        ([True, None], 0, [True, 0]),
        (["a", None], "no", ["a", "no"]),
        ([None, None], 4, [4, 4]),
        ([np.zeros(2), None], 7, np.array([[0.0, 0.0], [7.0, 7.0]])),
        ([np.zeros(2), None], [1, 2], np.array([[0.0, 0.0], [1.0, 2.0]])),
        ([np.zeros(2), None], [1, 2, 3], [np.zeros(2), [1, 2, 3]]),
        ([None, "a", 2.0], None, [None, "a", 2.0]),
    ],
    ids=str,
)
@pytest.mark.parametrize("copies", [1, 20])
def test_missing_rows_hold_the_given_value(
    outputs: list[Any], missing: Any, wanted: Any, copies: int
) -> None:
    future = column_of(outputs * copies)
    wanted = (
        np.concatenate([wanted] * copies) if isinstance(wanted, np.ndarray) else wanted * copies
    )
    assert alike(future.outputs(missing), wanted)
    future.cancel()


def test_parts_of_a_column() -> None:
    future = column_of([float(i) for i in range(100)])
    assert future.outputs(first=10, n=3).tolist() == [10.0, 11.0, 12.0]
    assert future.outputs(first=98).tolist() == [98.0, 99.0]
    assert future.outputs(first=100) == []
    assert np.isnan(future.confidences(first=97)).all()
    for first, n in ((101, 0), (0, 101), (99, 2)):
        with pytest.raises(IndexError, match="of a query with 100"):
            future.outputs(first=first, n=n)


def test_one_hit_is_a_column_of_one(world: World) -> None:
    model = world.model()
    model.put(1.0, 5.0)
    future = model.predict(1.0)
    assert (future.outputs().tolist(), future.statuses().tolist(), future.progress()) == (
        [5.0],
        [1],
        (1, 1),
    )
    assert future.latencies_us().tolist() == [0]


def test_confidences_in_a_column(world: World) -> None:
    model = world.model(cached=False)
    container = world.container(model, size_max=40)
    future = model.predict_many(np.arange(80.0))
    world.step()
    container.read()
    container.reply(lambda rows: rows, confidence=np.linspace(0, 1, 40, dtype="f4"))
    container.read()
    assert np.allclose(future.confidences(n=40), np.linspace(0, 1, 40))
    container.reply(lambda rows: rows, confidence=np.full(40, np.nan, "f4"))
    world.step()
    assert future.confidences(first=40).tolist() == [0.0] * 40
    assert future.result(0).tolist() == list(range(80))


@pytest.mark.parametrize("shape", [(), (3,), (2, 2), (600,)])
@pytest.mark.parametrize("seed", range(4))
def test_outputs_of_an_array_are_what_its_rows_have_one_by_one(
    world: World, shape: tuple[int, ...], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    model = world.model(cached=False)
    container = world.container(model, size_max=300)
    future = model.predict_many(np.arange(3000.0), slo_ms=50)
    single = [model.predict(-1.0 - i, slo_ms=50) for i in range(5)]

    def output(rows: Any) -> Any:
        return (rows[:, None] * np.ones(int(np.prod(shape)), "f4")).reshape(len(rows), *shape)

    world.step()
    confident = bool(rng.integers(2))
    while container.read() and future.progress()[0] < 2400:
        rows = container.inbox[0][1]
        fields: dict[str, Any] = {}
        if confident:
            fields["confidence"] = np.where(rows % 7, rows / 3000, np.nan).astype("f4")
        if rng.random() < 0.3:
            fields |= {"status": (rows % 5 == 0).astype("u1"), "text": "each fifth"}
        container.reply(lambda rows: output(rows).astype("f4"), **fields)
        world.step()
    world.pass_deadline(50_000)
    container.reply_all(lambda rows: output(rows).astype("f4"))
    states = future.statuses()
    assert {Status.OK, Status.DEADLINE} <= set(states.tolist())
    found = future.outputs(-2.0)
    confidences = future.confidences()
    for i, state in enumerate(states.tolist()):
        value, confidence = future.prediction(i)
        assert (value is None) == (state != Status.OK)
        assert np.array_equal(found[i], np.full(shape, -2.0 if value is None else i))
        assert value is None or np.array_equal(value, output(np.array([float(i)]))[0])
        assert (confidence is not None) == (confident and state == Status.OK)
        if confidence is not None:
            assert confidence == np.float32(i / 3000) if i % 7 else np.isnan(confidence)
        assert np.array_equal(future.confidence(i), confidence, equal_nan=confidence is not None)
        wanted = np.nan if confidence is None else np.nan_to_num(confidence)
        assert np.array_equal(confidences[i], wanted, equal_nan=True), "what is no number is 0"
        assert future.detail(i) == ("each fifth" if state == Status.MODEL_ERROR else "")
    for i, each in enumerate(single):
        assert each.status() is not Status.OK or np.all(each.output() == -1.0 - i)


def test_memory_comes_back_from_outputs_of_arrays(world: World) -> None:
    model = world.model(cached=False)
    world.container(model, size_max=512)

    for i in range(150):
        future = model.predict_many(np.arange(1000.0), slo_ms=50)
        world.step()
        world.containers[0].read()
        if i % 3 == 1:
            future.cancel()
        if i % 3 == 2:
            world.pass_deadline(50_000)
        world.containers[0].reply_all(lambda rows: rows[:, None] * np.ones(200, "f4"))
        del future
        if i == 20:
            before = resident_bytes()
    assert resident_bytes() - before < 16 << 20, "130 arrays of 800 kB"
