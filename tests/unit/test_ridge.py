"""The blend of numbers: as near as the best linear one, whichever models are late, added or
removed."""

import math

import numpy as np
import pytest

from clipper.selection import Observation, Plan, Prediction, Truth, create_policy
from clipper.types import VersionedModel

A, B, C = MODELS = [VersionedModel(name, 1) for name in "abc"]
RIDGE = create_policy("ridge")


def predictions(values, models=MODELS):
    return {model: Prediction(value) for model, value in zip(models, values, strict=True)}


def observation(values, label, models=MODELS, weight=1.0):
    return Observation(Plan(tuple(models)), predictions(values, models), Truth(label), None, weight)


def world(seed, n):
    """Return outputs of three models and the labels. a is 2 too high, b is half as far from 5 as
    the label, c is noise plus the errors of a."""
    rng = np.random.default_rng(seed)
    y = 5 + 3 * rng.standard_normal(n)
    ea, eb = rng.standard_normal(n), 0.3 * rng.standard_normal(n)
    return np.stack([y + 2 + ea, 5 + (y - 5) / 2 + eb, ea + 10 * rng.standard_normal(n)], axis=1), y


def trained(policy, seed, n, models=MODELS):
    state, (outputs, labels) = policy.init(models), world(seed, n)
    errors = []
    for row, y in zip(outputs.tolist(), labels.tolist(), strict=True):
        errors.append(policy.combine(state, predictions(row), ()).output - y)
        state = policy.observe(state, observation(row, y))
    return state, np.array(errors)


def test_the_blend_comes_near_the_best_one_there_is():
    _, errors = trained(RIDGE, 1, 2000)
    outputs, labels = world(1, 2000)
    x = np.column_stack([outputs, np.ones(2000)])
    best = labels - x @ np.linalg.lstsq(x, labels, rcond=None)[0]
    models = np.sqrt(np.mean((outputs - labels[:, None]) ** 2, axis=0))
    assert np.sqrt(np.mean(errors[500:] ** 2)) <= 1.05 * np.sqrt(np.mean(best**2))
    assert np.sqrt(np.mean(errors[500:] ** 2)) < 0.5 * models.min()


def test_it_is_never_far_from_the_mean_before_it_knows_better():
    found, plain = [], []
    for seed in range(30):
        _, errors = trained(RIDGE, seed, 15)
        outputs, labels = world(seed, 15)
        found.append(np.mean(errors**2))
        plain.append(np.mean((outputs.mean(axis=1) - labels) ** 2))
    assert np.mean(found) <= 1.1 * np.mean(plain)


def test_confidence_grows_as_the_errors_shrink():
    state, _ = trained(RIDGE, 2, 1000)
    row = [12.0, 7.5, 3.0]
    fresh, learned = (
        RIDGE.combine(RIDGE.init(MODELS), predictions(row), ()),
        RIDGE.combine(state, predictions(row), ()),
    )
    assert learned.confidence > fresh.confidence
    assert learned.confidence > 0.8
    late = RIDGE.combine(state, {B: Prediction(7.5)}, [A, C])
    assert 0 < late.confidence <= 1 / 3
    assert late.used == (B,)


def test_a_late_model_is_estimated_from_the_others():
    state, _ = trained(RIDGE, 3, 2000)
    outputs, labels = world(4, 500)
    full = [RIDGE.combine(state, predictions(row), ()).output for row in outputs.tolist()]
    without = [
        RIDGE.combine(state, predictions(row[:2], [A, B]), [C]).output for row in outputs.tolist()
    ]
    alone = [
        RIDGE.combine(state, predictions(row[1:2], [B]), [A, C]).output for row in outputs.tolist()
    ]
    errors = [np.sqrt(np.mean((np.array(one) - labels) ** 2)) for one in (full, without, alone)]
    assert errors[1] < 1.5 * errors[0]
    assert errors[2] < np.sqrt(np.mean((outputs[:, 1] - labels) ** 2)), (
        "b by itself is still corrected"
    )


def test_arrays_share_their_weights():
    rng, state = np.random.default_rng(5), RIDGE.init(MODELS)
    for _ in range(300):
        y = rng.standard_normal((2, 3)).astype(np.float32) * 4
        state = RIDGE.observe(
            state, observation([y + 1, 2 * y, rng.standard_normal((2, 3)).astype(np.float32)], y)
        )
    y = np.arange(6, dtype=np.float32).reshape(2, 3)
    found = RIDGE.combine(state, predictions([y + 1, 2 * y, np.zeros((2, 3), np.float32)]), ())
    assert found.output.dtype == np.float32
    assert np.allclose(found.output, y, atol=0.1)
    assert RIDGE.observe(state, observation([y, y, y], np.zeros(5))).rows is state.rows, (
        "a label of another shape teaches nothing"
    )
    assert RIDGE.combine(state, predictions([np.zeros(0)] * 3), ()).output.shape == (0,)


def test_models_come_and_go():
    state, _ = trained(RIDGE, 6, 1000)
    two = RIDGE.remove_model(state, C)
    alone = RIDGE.init([A, B])
    outputs, labels = world(6, 1000)
    for row, y in zip(outputs.tolist(), labels.tolist(), strict=True):
        alone = RIDGE.observe(alone, observation(row[:2], y, [A, B]))
    assert np.allclose(two.rows, alone.rows, rtol=1e-9)
    again = RIDGE.add_model(two, C)
    row = outputs[0].tolist()
    mean = (row[0] + row[1]) / 2
    before, after = (
        RIDGE.combine(two, predictions(row[:2], [A, B]), ()),
        RIDGE.combine(again, predictions([*row[:2], mean]), ()),
    )
    assert after.output == pytest.approx(before.output, rel=0.02), (
        "one who says the mean changes nothing"
    )
    newer = RIDGE.update_model_version(state, A, VersionedModel("z", 1))
    assert newer.models[-1].name == "z"
    assert newer.rows[-1, 1] == pytest.approx(state.rows[-1, 1] / 4)
    assert RIDGE.rank_models_desc(state, None)[-1] == C


def test_servers_that_learned_apart_add_up():
    policy = create_policy("ridge(discount=1.0)")
    outputs, labels = world(7, 300)
    rows = list(zip(outputs.tolist(), labels.tolist(), strict=True))
    base = mine = theirs = every = policy.init(MODELS)
    for i, (row, y) in enumerate(rows):
        seen = observation(row, y)
        every = policy.observe(every, seen)
        if i < 100:
            base = mine = theirs = every
        elif i % 2:
            mine = policy.observe(mine, seen)
        else:
            theirs = policy.observe(theirs, seen)
    assert np.allclose(policy.merge(base, mine, theirs).rows, every.rows, rtol=1e-6, atol=1e-6)


def test_what_is_no_number_is_voted_on():
    state, _ = trained(RIDGE, 8, 50)
    assert RIDGE.combine(state, predictions(["x", "y", "x"]), ()).output == "x"
    assert RIDGE.combine(state, predictions([1, 2, 1]), ()).output == 1
    assert RIDGE.observe(state, observation(["x", "y", "x"], "x")).rows is state.rows
    assert RIDGE.observe(state, observation([1.0, 2.0, 3.0], "x")).rows is state.rows
    assert RIDGE.combine(state, predictions([math.nan] * 3), ()).used == ()
    assert RIDGE.combine(state, predictions([math.inf, 4.0, math.nan]), ()).used == (B,)
    assert math.isfinite(RIDGE.combine(state, predictions([1e308, -1e308, 1e308]), ()).output)
    assert np.isfinite(RIDGE.observe(state, observation([1e308, -1e308, 1e308], 1.0)).rows).all()


def test_of_more_models_than_can_be_blended_the_mean_is_answered():
    many = [VersionedModel(f"m{i}", 1) for i in range(65)]
    state = RIDGE.init(many)
    row = [float(i) for i in range(65)]
    assert RIDGE.combine(
        RIDGE.observe(state, observation(row, 1.0, many)), predictions(row, many), ()
    ).output == pytest.approx(32.0)
