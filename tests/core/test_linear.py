"""Linear models against numpy's own linear algebra."""

import math

import numpy as np
import pytest

from clipper_core.learning.linear import Blend, Context
from clipper_core.runtime.status import StatusError


def bandit(sampled=False, width=1.0, discount=1.0, ridge=1.0):
    return Context(sampled=sampled, width=width, discount=discount, ridge=ridge)


def start(rule, d, k=3):
    return np.tile(rule.fresh(d), (k, 1))


@pytest.mark.parametrize("d", [1, 2, 7, 33])
def test_a_choice_is_the_one_that_numpy_makes(d):
    """Compare with LinUCB as in its paper: theta = A^-1 b, and the highest theta x + width sqrt(x'
    A^-1 x)."""
    rule, rng, k = bandit(width=0.7, ridge=2.0), np.random.default_rng(d), 3
    rows, a, b = start(rule, d), np.tile(2.0 * np.eye(d), (k, 1, 1)), np.zeros((k, d))
    for t in range(400):
        x = rng.standard_normal(d)
        inverse = np.linalg.inv(a)
        bounds = np.einsum("kij,kj,i->k", inverse, b, x) + 0.7 * np.sqrt(
            np.einsum("kij,i,j->k", inverse, x, x)
        )
        chosen = rule.choose(rows, x, rng.random())
        assert bounds[chosen] >= bounds.max() - 1e-9
        rewards = np.full(k, np.nan)
        rewards[chosen] = rng.random()
        weight = rng.uniform(0.1, 3)
        rows = rule.learn(rows, x, rewards, t, weight)
        a[chosen] += weight * np.outer(x, x)
        b[chosen] += weight * rewards[chosen] * x
    products, sums = rule.sums(rows, d)
    assert np.allclose(products, a - 2.0 * np.eye(d), atol=1e-9)
    assert np.allclose(sums, b)
    assert np.allclose(rule.rows(products, sums), rows, atol=1e-7)


def test_draws_of_lints_have_the_posterior_as_their_distribution():
    """One model is known well at .5, one is not known at all: it is queried as often as a draw of
    N(0, 1) is above."""
    rule = bandit(sampled=True)
    rows = start(rule, 1, 2)
    rows = rule.learn(rows, [1.0], [0.5, math.nan], 0, 1e9)
    queried = np.mean([rule.choose(rows, [1.0], (u + 0.5) / 20_000) for u in range(20_000)])
    assert queried == pytest.approx(0.3085, abs=0.01)


def test_discounting_keeps_the_ridge():
    rule, rng, d = bandit(discount=0.98, ridge=1.0), np.random.default_rng(1), 4
    rows = start(rule, d, 2)
    for t in range(2000):
        rows = rule.learn(rows, rng.standard_normal(d), [rng.random(), math.nan], t)
    products, sums = rule.sums(rows, d)
    assert np.abs(products[1]).max() < 0.1, (
        "the model that is not asked is forgotten, the ridge stays"
    )
    assert np.abs(sums[1]).max() == 0.0
    assert np.trace(products[0]) / d == pytest.approx(50, rel=0.3)


def test_features_that_are_alike_to_the_last_digit_keep_a_state_sound():
    rule, x = bandit(discount=0.9995), np.array([1.0, 1e6, 1e6 + 1e-3, 1e-6])
    rows = start(rule, 4, 1)
    for t in range(5000):
        rows = rule.learn(rows, x, [t % 2], t, 1000.0)
    assert np.isfinite(rows).all()
    products, _ = rule.sums(rows, 4)
    assert np.isfinite(rule.rows(products, np.zeros((1, 4)))).all()


def test_models_are_learned_by_their_features():
    rule, rng = bandit(), np.random.default_rng(2)
    rows, right = start(rule, 3, 2), 0
    for t in range(3000):
        x = np.array([1.0, *rng.uniform(-1, 1, 2)])
        best = int(x[1] > 0)
        chosen = rule.choose(rows, x, rng.random())
        rewards = [math.nan, math.nan]
        rewards[chosen] = float(rng.random() < (0.9 if chosen == best else 0.5))
        rows = rule.learn(rows, x, rewards, t)
        right += chosen == best and t >= 1000
    assert right > 1800


# -- blends


def slow_weights(p, y, ridge):
    """Return the weights by the normal equations, drawn to the mean."""
    k = p.shape[1]
    a, b = (p - p.mean(0)).T @ (p - p.mean(0)), (p - p.mean(0)).T @ (y - y.mean())
    even = np.full(k, 1 / k)
    plain = (y - y.mean()) - (p - p.mean(0)) @ even
    pull = ridge * (plain @ plain) / len(y) + 1e-9 * np.trace(a)
    w = even + np.linalg.solve(a + pull * np.eye(k), b - a @ even)
    return w, (y.mean() - w @ p.mean(0)) * len(y) / (len(y) + 3)


def outputs(rng, n, k=4):
    truth = rng.standard_normal(n) * 3 + 5
    return (
        truth[:, None] * rng.uniform(0.5, 1.5, k)
        + rng.standard_normal((n, k)) * rng.uniform(0.1, 2, k),
        truth,
    )


@pytest.mark.parametrize("k", [1, 2, 5, 64])
def test_weights_are_those_of_the_normal_equations(k):
    blend, rng = Blend(ridge=2.0, discount=1.0), np.random.default_rng(k)
    p, y = outputs(rng, 300, k)
    rows = np.zeros((k + 1, k + 3))
    for row, label in zip(p, y, strict=True):
        rows = blend.learn(rows, row[None], [label])
    w, left = blend.weights(rows)
    expected, constant = slow_weights(p, y, 2.0)
    assert np.allclose(w, [*expected, constant], atol=1e-6)
    errors = (y - y.mean()) - (p - p.mean(0)) @ expected
    assert left == pytest.approx(math.sqrt(errors @ errors / (300 - k - 1)), rel=1e-6)


def test_a_vector_is_as_many_observations_of_a_part():
    blend, rng = Blend(ridge=1.0, discount=1.0), np.random.default_rng(3)
    p, y = outputs(rng, 60)
    whole = blend.learn(np.zeros((5, 7)), p, y, 60.0)
    single = np.zeros((5, 7))
    for row, label in zip(p, y, strict=True):
        single = blend.learn(single, row[None], [label])
    assert np.allclose(whole, single)


def test_nothing_known_is_the_mean():
    blend = Blend(ridge=1.0, discount=0.99)
    w, left = blend.weights(np.zeros((4, 6)))
    assert (w.tolist(), left) == ([1 / 3, 1 / 3, 1 / 3, 0.0], 0.0)
    assert blend.filled(np.zeros((4, 6)), [[1.0, math.nan, 3.0]]).tolist() == [[1.0, 2.0, 3.0]]


def test_a_missing_model_is_imputed_from_the_others():
    blend, rng = Blend(ridge=0.0, discount=1.0), np.random.default_rng(4)
    x = rng.standard_normal(200)
    p = np.stack([x, 2 * x + 7, rng.standard_normal(200) + 100], axis=1)
    rows = np.zeros((4, 6))
    for row, label in zip(p, x, strict=True):
        rows = blend.learn(rows, row[None], [label])
    filled = blend.filled(rows, [[1.0, math.nan, math.nan], [-1.0, math.nan, math.nan]])
    assert np.allclose(filled[:, 1], [9.0, 5.0], atol=1e-3)
    assert np.allclose(filled[:, 2], 100, atol=0.5), (
        "its running mean, when the others tell nothing"
    )


def test_answers_are_the_weights_times_the_outputs():
    blend, rng = Blend(ridge=2.0, discount=1.0), np.random.default_rng(6)
    p, y = outputs(rng, 100)
    rows = np.zeros((5, 7))
    for row, label in zip(p, y, strict=True):
        rows = blend.learn(rows, row[None], [label])
    queried = p[:7].copy()
    queried[:, 2] = np.nan
    answers, left, scatter = blend.blended(rows, queried)
    weights, expected_left = blend.weights(rows)
    filled = blend.filled(rows, queried)
    assert np.allclose(answers, filled @ weights[:-1] + weights[-1])
    assert left == expected_left
    assert scatter == pytest.approx(np.std(filled, axis=1).mean())
    assert np.isnan(queried[:, 2]).all(), "what was given is as it was"


def test_a_drift_is_followed():
    blend, rng = Blend(ridge=1.0, discount=0.99), np.random.default_rng(5)
    rows = np.zeros((3, 5))
    for t in range(2000):
        y = rng.standard_normal()
        p = [y + 0.1 * rng.standard_normal(), rng.standard_normal()]
        rows = blend.learn(rows, [p if t < 1000 else p[::-1]], [y])
    w, _ = blend.weights(rows)
    assert np.allclose(w, [0, 1, 0], atol=0.1)


def test_an_observation_that_overflows_is_not_learned():
    blend = Blend(ridge=1.0, discount=1.0)
    rows = blend.learn(np.zeros((3, 5)), [[1.0, 2.0]], [1.5])
    for value in (1e300, -1e308):
        assert blend.learn(rows, [[value, 0.0]], [0.0]) is rows
    assert blend.learn(rows, [[math.nan, math.nan]], [0.0]) is rows


@pytest.mark.parametrize(
    "call",
    [
        lambda: Context(sampled=True, width=-1, discount=1, ridge=1),
        lambda: Context(sampled=True, width=1, discount=0, ridge=1),
        lambda: Context.columns(0),
        lambda: Context.columns(34),
        lambda: bandit().choose(start(bandit(), 2), [1.0], 0.5),
        lambda: bandit().choose(start(bandit(), 2), [1.0, math.nan], 0.5),
        lambda: bandit().choose(start(bandit(), 2), ["a", "b"], 0.5),
        lambda: bandit().learn(start(bandit(), 2), [1.0, 2.0], [0.0], 0),
        lambda: bandit().rows(np.zeros((2, 3, 3)), np.zeros((2, 2))),
        lambda: Blend(ridge=-1, discount=1),
        lambda: Blend(ridge=1, discount=1).weights(np.zeros((3, 3))),
        lambda: Blend(ridge=1, discount=1).weights(np.zeros((66, 68))),
        lambda: Blend(ridge=1, discount=1).learn(np.zeros((3, 5)), [[1.0, 2.0]], [math.inf]),
        lambda: Blend(ridge=1, discount=1).learn(np.zeros((3, 5)), [[1.0, math.inf]], [1.0]),
        lambda: Blend(ridge=1, discount=1).learn(
            np.zeros((3, 5)), [[1.0, 2.0], [math.nan, 2.0]], [1.0, 1.0]
        ),
    ],
)
def test_wrong_arguments_are_refused(call):
    with pytest.raises(StatusError):
        call()


def test_rows_are_never_changed_in_place():
    rule, blend = bandit(discount=0.9), Blend(ridge=1.0, discount=0.9)
    rows, rows2 = start(rule, 2), np.zeros((3, 5))
    for array in (rows, rows2):
        array.setflags(write=False)
    rule.learn(rows, [1.0, 2.0], [1.0, 0.0, math.nan], 0)
    blend.learn(rows2, [[1.0, 2.0]], [1.0])
    assert np.array_equal(rows, start(rule, 2))
    assert not rows2.any()
