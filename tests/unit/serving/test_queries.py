"""Tests of what a query has besides its input: its SLO, and the id of its random number."""

import math
from typing import Any

import numpy as np
import pytest

import clipper
from clipper.errors import InvalidInput
from clipper.serving.query.application import slo_in_us
from clipper.serving.query.processor import uniform_of


@pytest.mark.parametrize(
    "slo_ms", [0, -1, math.nan, math.inf, 1e308, 10**400, 60_001, "100", "9" * 999, None, True, [5]]
)
def test_an_slo_out_of_range_is_refused(slo_ms: Any) -> None:
    with pytest.raises(InvalidInput, match="it must lie above 0") as refused:
        slo_in_us(slo_ms, 60_000)
    assert len(str(refused.value)) < 250


@pytest.mark.parametrize(
    ("slo_ms", "us"), [(1e-9, 1), (5, 5000), (np.int64(500), 500_000), (np.float32(0.5), 500)]
)
def test_an_slo_is_any_number(slo_ms: Any, us: int) -> None:
    assert slo_in_us(slo_ms, 60_000) == us


def test_the_random_number_of_a_query_comes_from_its_id() -> None:
    numbers = [uniform_of(f"query {i}") for i in range(4000)]
    assert numbers == [uniform_of(f"query {i}") for i in range(4000)]
    assert all(0 <= number < 1 for number in numbers)
    counts, _ = np.histogram(numbers, 10, (0, 1))
    assert 320 < counts.min() <= counts.max() < 480
    assert uniform_of("") != uniform_of(""), "one without an id draws"


def test_the_same_ids_select_the_same_models_on_another_server() -> None:
    chosen: list[list[Any]] = []
    for _ in range(2):
        with clipper.start() as server:
            for name in ("one", "two"):
                server.deploy(name, lambda rows: rows[:, 0], input="f64[1]", warmup=False)
            app = server.app("a", models=["one", "two"], policy="ab", slo_ms=10_000)
            answers = [app.predict([1.0], id=f"q{i}").result(20) for i in range(30)]
            chosen.append([answer.models for answer in answers])
    assert chosen[0] == chosen[1]
    assert len(set(chosen[0])) == 2


def test_no_rows_have_no_answers() -> None:
    with clipper.start() as server:
        server.deploy("m", lambda rows: rows.sum(axis=1), input="f64[4]", warmup=False)
        server.deploy(
            "n", lambda batch: batch["x"], inputs={"x": "f64[2]"}, output="f64", warmup=False
        )
        app = server.app("a", models=["m"])
        two = server.app("b", models=["m", "m:1"])
        for rows in ([], (), np.empty((0, 4)), np.empty(0)):
            assert len(server.model("m").predict_many(rows).result(60)) == 0
            assert len(app.predict_many(rows).result(60).outputs) == 0
            assert len(two.predict_many(rows).result(60).outputs) == 0
        assert len(server.model("n").predict_many({"x": np.empty((0, 2))}).result(60)) == 0
