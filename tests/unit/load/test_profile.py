"""Latency profiles: the fitted line and the advice; and a measured one, of a model that sleeps by a
formula."""

import random
import re
import time
from typing import Any

import numpy as np
import pytest

from clipper.errors import InvalidInput
from clipper.load.profile import Point, _times, advice, bars, fit_latency, profile, seen_by


def points(
    base_ms: float, row_ms: float, most: int = 256, noise: float = 0.0, seed: int = 0
) -> list[Point]:
    rng = random.Random(seed)
    found, size = [], 1
    while size <= most:
        ms = (base_ms + row_ms * size) * (1 + noise * rng.uniform(-1, 1))
        found.append(Point(size, ms, ms * 1.2, 10))
        size *= 2
    return found


@pytest.mark.parametrize(("base", "row"), [(1.0, 0.05), (0.0, 1.0), (30.0, 0.0), (0.2, 0.001)])
def test_the_line_is_found(base: float, row: float) -> None:
    line = fit_latency(points(base, row))
    assert line.base_ms == pytest.approx(base, abs=1e-6)
    assert line.row_ms == pytest.approx(row, abs=1e-6)
    assert line.error < 1e-6
    rough = fit_latency(points(base, row, noise=0.1))
    assert 0 <= rough.error < 0.15
    assert rough.base_ms >= 0 <= rough.row_ms


def test_a_line_through_less() -> None:
    assert fit_latency(points(1, 0.5, most=1)).base_ms == 1.5
    falling = [Point(1, 9.0, 9.0, 1), Point(2, 5.0, 5.0, 1), Point(4, 1.0, 1.0, 1)]
    assert fit_latency(falling).row_ms == 0
    with pytest.raises(InvalidInput):
        fit_latency([])


def test_advice_serves_most_within_the_slo() -> None:
    measured = points(1.0, 0.05)
    found = advice("svm", measured, 20.0, 50_000)
    assert found.batch == 128  # two batches of 256 at p99 take 33 ms, two of 128 take 17.8 ms
    capacity = 128 / 7.4 * 1000 * 0.8
    assert found.replicas == -(-50_000 // capacity)
    assert f"50000 rows a second need {found.replicas} replicas" in found.message
    assert advice("svm", measured, 20.0).replicas == 1


def test_advice_where_the_slo_is_too_short() -> None:
    found = advice("svm", points(31.0, 0.0), 20.0, 100)
    assert (found.batch, found.replicas) == (0, 0)
    assert found.message.startswith(
        "svm needs 31 ms for one row; the SLO is 20 ms, so every answer will be the default. Raise "
    )
    assert "but not behind another batch" in advice("svm", points(15.0, 0.0), 20.0).message


def test_what_a_server_has_seen_is_weighed_over_replicas() -> None:
    stats = {
        "replicas": [
            {"profile": [(1, 100, 10), (4, 400, 1)]},
            {"profile": [(1, 400, 30)]},
            {"state": "starting"},
        ]
    }
    assert [(one.batch, one.p50_ms, one.turns) for one in seen_by(stats)] == [
        (1, 0.325, 40),
        (4, 0.4, 1),
    ]
    assert seen_by({}) == []


def test_the_bars_grow_with_what_they_show() -> None:
    lines = bars(points(1.0, 0.05))
    lengths = [line.count("█") for line in lines]
    assert lengths == sorted(lengths)
    assert lengths[0] > 0
    assert all(re.match(r" *\d+ █+─*│? +[\d.]+ ms$", line) for line in lines)


@pytest.mark.slow
def test_a_model_is_measured_batch_by_batch() -> None:
    sizes: list[int] = []

    def sleeper(rows: Any) -> Any:
        time.sleep(0.002 + 0.0005 * len(rows))
        return np.asarray(rows).sum(axis=1)

    found = profile(
        sleeper, "f32[4]", "random", 32, (), 0.05, lambda batch, turn, of: sizes.append(batch)
    )
    assert [one.batch for one in found] == [1, 2, 4, 8, 16, 32]
    assert sorted(set(sizes)) == [1, 2, 4, 8, 16, 32]
    # it never takes less
    assert all(one.turns >= 1 and one.p50_ms >= 2 + 0.5 * one.batch - 0.05 for one in found)
    assert [
        one.batch
        for one in profile(sleeper, "f32[4]", "random", 32, (), 0.01, lambda *_: None, slo_ms=1.0)
    ] == [1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("type_", "text"), [("str", "random"), ("i32[*]", "random"), ("any", "[1, 2]")]
)
def test_rows_that_are_no_array(type_: str, text: str) -> None:
    found = profile(
        lambda rows: [len(row) for row in rows], type_, text, 2, (), 0.01, lambda *_: None
    )
    assert [one.batch for one in found] == [1, 2]


class CountingServer:
    """A fake server that reports the mean time of the batches that a model was sent so far, as an
    engine does."""

    def __init__(self, took_us: list[int], split: int) -> None:
        self._took_us, self._split, self._seen_us = took_us, split, []

    def predict(self, rows: object, slo_ms: float) -> "CountingServer":
        assert slo_ms == 120_000
        turn = len(self._seen_us)
        self._seen_us += self._took_us[turn : turn + 1 + (turn == self._split)]
        return self

    predict_many = predict

    def result(self, patience_s: float) -> None:
        assert patience_s == 120

    def stats(self) -> dict[str, object]:
        n = len(self._seen_us)
        row = (3, sum(self._seen_us) / n, n) if n else (3, 0.0, 0)
        profiles = [{"profile": [(1, 5.0, 7)]}, {}, {"profile": [(2, 6.0, 8), row]}]
        return {"models": {"profiled:1": {"replicas": profiles}}}


@pytest.mark.parametrize("split", [-1, 3])
def test_a_turn_is_the_growth_of_the_mean_and_one_that_was_split_is_left_out(split: int) -> None:
    took_us = [900, 800, 100, 200, 300, 500, 400, 600]
    server, turns = CountingServer(took_us, split), list[tuple[int, int]]()
    times = _times(server, server, [1, 2, 3], 0.0, lambda turn, of: turns.append((turn, of)))
    kept = [0.1, 0.2, 0.3, 0.5, 0.4] if split < 0 else [0.1, 0.5, 0.4, 0.6]
    assert times.tolist() == pytest.approx(kept)
    assert turns == [(turn, 60) for turn in ((1, 2, 3, 4, 5) if split < 0 else (1, 3, 4, 5))]
