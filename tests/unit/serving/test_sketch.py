"""Statistics of streams, compared with those of all values."""

import math

import numpy as np
import pytest

from clipper.serving.rollout.sketch import Drift, Quantiles, ks_distance
from clipper_core.learning.answer_counts import Bucket

WORLDS = {
    "normal": lambda rng: rng.normal(0, 1, 5000),
    "lognormal": lambda rng: rng.lognormal(0, 3, 5000),
    "far": lambda rng: 1e6 + rng.normal(0, 1, 5000),
    "few values": lambda rng: rng.integers(-3, 4, 5000).astype(float),
    "one": lambda rng: np.full(5000, -7.25),
    "heavy": lambda rng: rng.standard_cauchy(5000),
}


@pytest.mark.parametrize("world", WORLDS)
def test_quantiles_are_within_two_per_cent(world):
    numbers = WORLDS[world](np.random.default_rng(5))
    sketch = Quantiles()
    for number in numbers:
        sketch.add(float(number))
    for q in (0.01, 0.1, 0.5, 0.9, 0.99):
        true = float(np.quantile(numbers, q, method="inverted_cdf"))
        assert sketch.quantile(q) == pytest.approx(true, rel=0.0201)
    assert (sketch.smallest, sketch.largest, sketch.count) == (numbers.min(), numbers.max(), 5000)


def test_the_figures_of_a_sketch_by_name():
    sketch = Quantiles()
    assert sketch.stats() == {}
    for number in range(1, 101):
        sketch.add(float(number))
    found = sketch.stats()
    expected = {"min": 1, "p1": 1, "p10": 10, "p50": 50, "p90": 90, "p99": 99, "max": 100}
    assert list(found) == list(expected)
    assert found == pytest.approx(expected, rel=0.0201)


def test_a_sketch_is_bounded_and_takes_anything():
    sketch = Quantiles()
    for exponent in range(-300, 300):
        sketch.add(10.0**exponent)
        sketch.add(-(10.0**exponent))
    sketch.add(math.inf)
    sketch.add(math.nan)
    assert sketch.count == 1201
    assert len(sketch) <= 2 * 1410 + 1
    assert sketch.quantile(1.0) == pytest.approx(1e12, rel=0.02), (
        "sizes beyond count as the largest"
    )
    assert math.isnan(Quantiles().quantile(0.5))
    assert Quantiles().stats() == {}


def drifted(first, then, window=500):
    drift = Drift(window)
    for score in [*first, *then]:
        drift.add(score)
    return drift.stats()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", ["numbers", "labels", "many labels", "arrays"])
def test_what_stays_does_not_drift(seed, kind):
    rng = np.random.default_rng(seed)
    scores = {
        "numbers": rng.normal(3, 2, 1500).tolist(),
        "labels": rng.integers(0, 5, 1500).tolist(),
        "many labels": rng.integers(0, 500, 1500).tolist(),
        "arrays": list(rng.normal(0, 1, (1500, 4))),
    }[kind]
    found = drifted(scores[:500], scores[500:])
    assert found["psi"] < 0.25
    if "ks" in found:
        assert found["ks"] <= 1.3 * found["ks_bound"], "one in a hundred is above the bound itself"


@pytest.mark.parametrize("seed", range(5))
def test_what_moves_drifts(seed):
    rng = np.random.default_rng(seed)
    assert drifted(rng.normal(0, 1, 500).tolist(), rng.normal(1, 1, 500).tolist())["drifted"]
    assert drifted(rng.normal(0, 1, 500).tolist(), rng.normal(0, 3, 500).tolist())["drifted"]
    assert drifted(["cat"] * 250 + ["dog"] * 250, ["cat"] * 450 + ["dog"] * 50)["drifted"]
    assert drifted([1] * 500, [2] * 500)["drifted"]


def test_drift_is_reported_when_there_is_enough_data():
    assert drifted([1.0] * 300, []) == {"first": 300, "latest": 0}
    early = drifted(list(range(500)), [9000.5] * 10)
    assert early == {"first": 500, "latest": 0} or not early["drifted"]
    drift = Drift(10)
    for score in [1.0, 2.0] * 5 + ["a", 3, True] * 10:
        drift.add(score)
    assert drift.stats() == {"first": 10, "latest": 0}, "numbers and labels are not mixed"


def test_only_the_latest_window_counts():
    drift = Drift(100)
    for score in [0.0, 1.0] * 50 + [5.0] * 300 + [0.0, 1.0] * 50:
        drift.add(score)
    found = drift.stats()
    assert (found["latest"], found["psi"], found["ks"], found["drifted"]) == (100, 0.0, 0.0, False)


def test_ks_by_hand():
    assert ks_distance(np.array([1.0, 2, 3, 4]), np.array([3.0, 4, 5, 6])) == 0.5
    assert ks_distance(np.array([1.0]), np.array([1.0])) == 0.0


def test_a_bucket_keeps_its_rate():
    bucket = Bucket(rate=10, burst=5, now_s=0.0)
    assert sum(bucket.take(0.0) for _ in range(100)) == 5
    assert sum(bucket.take(i / 100) for i in range(1000)) == pytest.approx(100, abs=2), (
        "10 a second, whoever asks"
    )
    assert sum(bucket.take(1000.0) for _ in range(100)) == 5, (
        "what was not used is not kept beyond the burst"
    )
    assert Bucket(1, 10, 0.0).take(0.0, 10)
    assert not Bucket(1, 10, 0.0).take(0.0, 10.5)
