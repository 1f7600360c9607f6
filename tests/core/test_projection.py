"""Keys that similar rows share, against numpy; answers of a model with such keys, and its measured
error."""

import math
from typing import Any

import numpy as np
import pytest

from clipper_core.cache.clock_cache import Similarity, difference
from clipper_core.runtime.status import StatusError
from tests.memory import resident_bytes

World = Any  # tests/core/conftest.py
MASK = 2**64 - 1


class SlowProjection:
    """A slow projection: the same random draws, one at a time, with sums by numpy in double."""

    def __init__(self, n: int, count: int, width: float, seed: int) -> None:
        self.state = seed
        self.planes, self.offsets = np.zeros((count, n)), np.zeros(count)
        for side in range(0, count, 8):
            for i in range(n):
                for cell in range(side, side + 8):
                    self.planes[cell, i] = self.normal() / width
            for cell in range(side, side + 8):
                self.offsets[cell] = 1 - self.unit()

    def unit(self) -> float:
        self.state = z = (self.state + 0x9E3779B97F4A7C15) & MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        z ^= z >> 31
        return ((z >> 11) + 1) / 2**53

    def normal(self) -> float:
        radius = math.sqrt(-2 * math.log(self.unit()))
        return radius * math.cos(2 * math.pi * self.unit())

    def sums(self, row: np.ndarray) -> np.ndarray:
        sums: np.ndarray = self.planes @ row.astype("f8") + self.offsets
        return sums


@pytest.mark.parametrize(
    ("dtype", "n", "count"), [("f32", 1, 8), ("f32", 7, 16), ("f64", 64, 24), ("f32", 300, 32)]
)
def test_cells_are_those_of_the_twin(dtype: str, n: int, count: int) -> None:
    near = Similarity(0.7, count)
    near.bind(dtype, n, seed=n)
    twin = SlowProjection(n, count, 0.7, n)
    rng = np.random.default_rng(n)
    for _ in range(50):
        row = rng.normal(size=n).astype(dtype.replace("f32", "f4").replace("f64", "f8"))
        cells, sums = near.cells(row), twin.sums(row)
        assert cells is not None
        assert len(cells) == count
        inside = np.abs(sums - np.round(sums)) > 1e-3  # elsewhere a float's last bits decide
        assert (np.floor(sums) == cells)[inside].all()
        assert np.abs(np.floor(sums) - cells).max() <= 1


@pytest.mark.parametrize("apart", [0.0, 0.02, 0.1, 0.3])
def test_rows_share_as_often_as_their_distance_predicts(apart: float) -> None:
    rng = np.random.default_rng(3)
    shared = 0
    for seed in range(400):
        near = Similarity(1.0, 8)
        near.bind("f64", 20, seed)
        row, step = rng.normal(size=20), rng.normal(size=20)
        shared += near.cells(row) == near.cells(row + step / np.linalg.norm(step) * apart)
    expected = (1 - math.sqrt(2 / math.pi) * apart) ** 8
    assert abs(shared / 400 - expected) <= 4 * math.sqrt(expected * (1 - expected) / 400)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, 1e30])
def test_a_row_without_a_place_has_no_cells(odd: float) -> None:
    near = Similarity(0.1)
    near.bind("f32", 5, 1)
    assert near.cells(np.array([1, 2, odd, 4, 5], "f4")) is None
    assert near.cells(np.zeros(5, "f4")) == near.cells(-np.zeros(5, "f4")) is not None


def test_what_a_similarity_refuses() -> None:
    for wrong in (
        {"width": 0},
        {"width": math.nan},
        {"width": 1, "projections": 7},
        {"width": 1, "check_share": 1.5},
    ):
        with pytest.raises(StatusError):
            Similarity(**wrong)  # type: ignore[arg-type]
    near = Similarity(1)
    with pytest.raises(StatusError, match="not str"):
        near.bind("str", 3, 1)
    near.bind("f32", 3, 1)
    with pytest.raises(StatusError, match="belongs to one model"):
        near.bind("f32", 3, 1)
    with pytest.raises(StatusError, match="3 elements"):
        near.cells(np.zeros(4, "f4"))


@pytest.mark.parametrize(
    ("cached", "fresh", "apart"),
    [
        (1.0, 1.5, 0.5),
        (3, 5, 2.0),
        (True, False, 1.0),
        (math.nan, math.nan, 0.0),
        (math.inf, math.inf, 0.0),
        (1.0, math.nan, math.inf),
        (np.array([1.0, math.inf, 3.0]), np.array([1.0, math.inf, 2.75]), 0.25),
        (np.zeros(2), np.zeros(3), math.inf),
        (np.zeros(0), np.zeros(0), 0.0),
        ("cat", "cat", 0.0),
        ("cat", "dog", math.inf),
        (b"1", "1", math.inf),
    ],
)
def test_difference(cached: Any, fresh: Any, apart: float) -> None:
    assert difference(cached, fresh) == difference(fresh, cached) == apart


# -- in a model


def near_model(world: World, **options: Any) -> tuple[Any, Any]:
    model = world.model("f32", (4,), similar=Similarity(1.0, 8, **options))
    return model, world.container(model)


def sums_of(rows: Any) -> np.ndarray:
    sums: np.ndarray = np.asarray(rows).sum(axis=1).astype("f8")
    return sums


def test_near_rows_share_a_prediction_and_far_ones_do_not(world: World) -> None:
    model, container = near_model(world, check_share=0.0)
    row = np.array([1, 2, 3, 4], "f4")
    first = model.predict(row)
    world.step()
    container.reply_all(sums_of)
    assert first.result(0) == 10
    assert model.predict(row + np.float32(1e-6)).result(0) == 10
    assert model.cached(row - np.float32(1e-6)) == (True, 10)
    assert model.cached(row + 100) == (False, None)
    assert model.cached(row, salt=1) == (False, None)
    assert model.similar.stats() == {"hits": 1, "checked": 0, "disagreed": 0, "worst": 0.0}


def test_rows_without_cells_are_keyed_by_their_bytes(world: World) -> None:
    model, _ = near_model(world)
    model.put(np.array([1, math.nan, 0, 0], "f4"), 1.0)
    assert model.cached(np.array([1, math.nan, 0, 0], "f4")) == (True, 1.0)
    assert model.cached(np.array([2, math.nan, 0, 0], "f4")) == (False, None)


def test_hits_are_checked_at_their_share_and_the_error_is_reported(world: World) -> None:
    model, container = near_model(world, check_share=0.25, tolerance=0.5)
    row = np.array([1, 2, 3, 4], "f4")
    model.put(row, 10.0)
    for hit in range(40):
        assert model.predict(row).result(0) == 10.0
        world.step()
        container.reply_all(lambda rows, hit=hit: sums_of(rows) + (2.5 if hit == 39 else 0.25))
    assert model.similar.stats() == {"hits": 40, "checked": 10, "disagreed": 1, "worst": 2.5}
    assert model.cached(row) == (True, 10.0)


def test_a_check_without_an_answer_counts_for_nothing_and_few_wait(world: World) -> None:
    model, container = near_model(world, check_share=1.0)
    row = np.array([1, 2, 3, 4], "f4")
    model.put(row, 10.0)
    for _ in range(50):
        assert model.predict(row).result(0) == 10.0
    world.step()
    assert sum(len(rows) for _, rows in container.read()) == 8
    world.step(model.slo_us + 1000)
    assert model.similar.stats() == {"hits": 50, "checked": 0, "disagreed": 0, "worst": 0.0}
    assert world.engine.completion.issued == world.engine.completion.answered


def test_a_cost_function_that_raises_in_a_check_keeps_no_output(world: World) -> None:
    def cost(_: Any) -> float:
        raise ValueError("no cost today")

    model = world.model("f32", (4,), similar=Similarity(1.0, 8, check_share=1.0), cost=cost)
    before = resident_bytes()
    for i in range(8000):  # a hundredth of the cache each: the next ones replace it
        row = np.full(4, 100 * i, "f4")
        model.put(row, b"x" * 10_000)
        assert model.cached(row)[0]
        with pytest.raises(StatusError, match="no cost today"):
            model.predict(row)
    assert resident_bytes() - before < 64 << 20


def test_a_model_of_other_rows_refuses_and_one_of_any_type_settles(world: World) -> None:
    for dtype, shape in (("i32", (4,)), ("str", ()), ("f32", (-1,))):
        with pytest.raises(StatusError, match="similar rows are f32 or f64 of one shape"):
            world.model(dtype, shape, similar=Similarity(1.0))
    model = world.model("any", similar=Similarity(1.0))
    with pytest.raises(StatusError, match="similar rows are f32"):
        model.settle("bytes")
    model.settle("f64", (2, 2))
    model.put(np.zeros((2, 2)), 1)
    assert model.cached(np.full((2, 2), 1e-12)) == (True, 1)
