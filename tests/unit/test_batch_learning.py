"""Observations in columns are learned as one by one, and as by the policies' own arithmetic in
Python."""

import random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipper.selection import Observation, Prediction, Query, Truth, create_policy
from clipper.selection.learning.batch_learning import (
    ObservationRows,
    column_of,
    losses_by_model,
    native_update_of,
    observe,
    observe_rows,
)
from clipper.selection.learning.learned_state import LearnedState
from clipper.selection.policy import losses
from clipper.types import VersionedModel
from tests.sizes import sized

MODELS = tuple(VersionedModel(name, 1) for name in "abcde")
POLICIES = [
    "exp3",
    "squarecb",
    "bandit",
    "epsilon_greedy",
    "thompson",
    "kl_ucb",
    "tsallis_inf",
    "exp4",
    "exp4(share=0)",
    "logodds",
    "stacking",
    "mixture",
    "linucb",
    "lints(discount=1)",
]
WITH_SETS = [
    f"{name}(coverage={coverage})"
    for name in ("exp3", "bandit", "exp4", "logodds", "stacking", "mixture", "linucb")
    for coverage in (0.6, 0.9)
]
every_policy = pytest.mark.parametrize("text", POLICIES)
LABELS: dict[str, list[Any]] = {
    "ints": [0, 1, 2, 63, -5],
    "bools": [True, False],
    "texts": ["cat", "dog", "é"],
    "bytes": [b"", b"a"],
    "both": [1, "1", b"1", 2**70],
    "all": [1, True, "x"],
    "numbers": [0.5, -3.0, 1e300, -1e300, 0.0, 1e-300],
}
MANY = {"many": [*range(90), "x" * 65]}  # more than sets remember, and one that is too long


def output(draw: random.Random, kind: str) -> Any:
    if kind == "numbers" and draw.random() < 0.1:
        return draw.choice([np.nan, np.inf])
    return draw.choice((LABELS | MANY)[kind])


def rows_of(
    draw: random.Random, policy: Any, state: LearnedState, kind: str, n: int
) -> ObservationRows:
    """Return rows as a policy would have queried: one model, or all; some are missing, some have
    confidences."""
    k = len(state.models)
    outputs = tuple(column_of([output(draw, kind) for _ in range(n)]) for _ in range(k))
    arrived = tuple(
        None if draw.random() < 0.5 else np.array([draw.random() < 0.8 for _ in range(n)])
        for _ in range(k)
    )
    sure = [
        (
            None
            if draw.random() < 0.5
            else np.array([draw.choice([np.nan, 0.0, 0.3, 1.5]) for _ in range(n)])
        )
        for _ in range(k)
    ]
    labels = column_of([draw.choice((LABELS | MANY)[kind]) for _ in range(n)])
    plans = [policy.select(state, Query(None, draw.random()), state.models) for _ in range(n)]
    queried = [
        state.models.index(plan.models[0]) if len(plan.models) == 1 else -1 for plan in plans
    ]
    odds = [plan.probabilities[0] if plan.probabilities else 1.0 for plan in plans]
    return ObservationRows(
        state.models,
        outputs,
        arrived,
        tuple(sure),
        labels,
        np.array(queried, np.int32),
        np.array(odds),
    )


def same(one: LearnedState, other: LearnedState) -> bool:
    numbers = np.array_equal(one.rows, other.rows) and np.array_equal(one.sure, other.sure)
    rest = [(state.models, state.seen, state.labels, state.tracked) for state in (one, other)]
    return numbers and rest[0] == rest[1]


@every_policy
@pytest.mark.parametrize("kind", LABELS)
@settings(max_examples=sized(6, 15), deadline=None)
@given(seed=st.integers(0, 2**32), k=st.integers(1, 5))
def test_columns_train_what_their_rows_would(text: str, kind: str, seed: int, k: int) -> None:
    draw, policy = random.Random(seed), create_policy(text)
    state = expected = single = policy.init(MODELS[:k])
    for n in (1, 30, 7):
        rows = rows_of(draw, policy, state, kind, n)
        state = observe_rows(policy, state, rows)
        for i in range(n):
            single = observe(policy, single, rows.observation(i), native_update_of(policy))
            expected = policy.observe(expected, rows.observation(i))
        assert same(state, single), "bit for bit"
        assert np.allclose(state.rows, expected.rows, rtol=1e-12, atol=1e-12)
        assert np.allclose(state.sure, expected.sure, rtol=1e-12, atol=1e-12)
        assert (state.seen, state.labels, state.tracked) == (
            expected.seen,
            expected.labels,
            expected.tracked,
        )


@pytest.mark.parametrize("text", WITH_SETS)
@pytest.mark.parametrize("kind", ["ints", "both", "all", "texts", "many", "numbers"])
def test_thresholds_of_sets_move_as_in_python_and_stay_when_no_set_is_requested(
    text: str, kind: str
) -> None:
    draw, policy, plain = random.Random(5), create_policy(text), create_policy(text.split("(")[0])
    state = expected = policy.init(MODELS[:3])
    for n in (1, 60, 200):
        rows = rows_of(draw, policy, state, kind, n)
        state = observe_rows(policy, state, rows)
        for i in range(n):
            expected = policy.observe(expected, rows.observation(i))
        assert state.tracked == expected.tracked
    assert np.allclose(state.rows, expected.rows, rtol=1e-12, atol=1e-12)
    assert np.allclose(state.sure, expected.sure, rtol=1e-12, atol=1e-12)
    assert state.tracked != policy.init(MODELS[:3]).tracked
    after = observe_rows(plain, state, rows)
    assert after.tracked == state.tracked
    assert (
        observe(plain, state, rows.observation(0), native_update_of(plain)).tracked == state.tracked
    )
    assert after.seen > state.seen


@pytest.mark.parametrize(
    "text", ["mixture", "linucb", "lints", "stacking", "mixture(coverage=0.8)"]
)
def test_contexts_are_learned_in_the_core(text: str) -> None:
    """Contexts of the first length are learned; of another length, or none, they count as zeros or
    nothing."""
    draw, policy = random.Random(9), create_policy(text)
    native = native_update_of(policy)
    state = expected = policy.init(MODELS[:3])
    for i in range(80):
        features = tuple(
            draw.uniform(-1, 1) for _ in range(3 if i < 40 else draw.choice((0, 2, 3)))
        )
        plan = policy.select(state, Query(None, draw.random()), MODELS[:3])
        plan = msgspec.structs.replace(plan, features=features)
        arrived = {model: Prediction(draw.randrange(70)) for model in plan.models}
        seen = Observation(
            plan, arrived, Truth(draw.choice([1, 5, 69])), None, draw.choice([1, 2.5])
        )
        assert native is not None
        state, before = observe(policy, state, seen, native), state
        expected = policy.observe(expected, seen)
        assert before.rows is not state.rows
    assert np.allclose(state.rows, expected.rows, rtol=1e-12, atol=1e-12)
    assert np.allclose(state.sure, expected.sure, rtol=1e-12, atol=1e-12)
    assert (state.seen, state.tracked) == (expected.seen, expected.tracked)


@pytest.mark.parametrize("kind", LABELS)
def test_losses_of_columns_are_those_of_their_rows(kind: str) -> None:
    draw, policy = random.Random(11), create_policy("exp4")
    rows = rows_of(draw, policy, policy.init(MODELS[:4]), kind, 50)
    found = losses_by_model(rows)
    if kind not in ("ints", "bools", "numbers"):
        assert found is None
        return
    assert found is not None
    for i in range(50):
        model_losses = losses(rows.observation(i))
        assert [model_losses.get(model, np.nan) for model in rows.models] == pytest.approx(
            found[:, i].tolist(), abs=0, nan_ok=True
        )


@every_policy
def test_an_observation_of_labels_is_learned_in_the_core(text: str) -> None:
    policy = create_policy(text)
    state, native = policy.init(MODELS[:3]), native_update_of(policy)
    assert native is not None
    plan = policy.select(state, Query(None, 0.5), MODELS[:3])
    arrived = {model: Prediction("x") for model in plan.models}

    def learned(models: Any, arrived: Any, label: Any, weight: float = 1.0) -> Any:
        return native.one(
            state.models,
            state.rows,
            state.sure,
            0.0,
            0,
            state.tracked,
            models,
            (),
            arrived,
            label,
            weight,
        )

    assert isinstance(learned(plan.models, arrived, "x"), LearnedState)
    assert learned(plan.models, {}, "x") is False, "nobody was heard"
    for models, label, weight in (
        (plan.models, 1, 1.0),
        (plan.models, 1.5, 1.0),
        (plan.models, "x", -1.0),
        (plan.models, "x", float("nan")),
        ((VersionedModel("z", 1),), "x", 1.0),
    ):
        assert learned(models, arrived, label, weight) is None
    assert native_update_of(create_policy("ensemble")) is None


@every_policy
def test_the_weight_of_an_observation(text: str) -> None:
    policy, draw = create_policy(text), random.Random(3)
    state = expected = policy.init(MODELS[:3])
    for _ in range(50):
        plan = policy.select(state, Query(None, draw.random()), MODELS[:3])
        arrived = {model: Prediction(draw.randrange(3)) for model in plan.models}
        seen = Observation(
            plan, arrived, Truth(draw.randrange(3)), None, draw.choice([0.5, 1.0, 7.0])
        )
        state, expected = (
            observe(policy, state, seen, native_update_of(policy)),
            policy.observe(expected, seen),
        )
    assert np.allclose(state.rows, expected.rows, rtol=1e-12, atol=1e-12)
    assert state.seen == expected.seen


@every_policy
def test_a_million_of_the_worst_leave_every_number_finite(text: str) -> None:
    """Right and wrong answers come in several orders, with the least possible probability."""
    policy, rng, n = create_policy(text), np.random.default_rng(7), sized(1 << 17, 1 << 20)
    state = policy.init(MODELS[:2])
    alone = policy.select(state, Query(None, 0.5), MODELS[:2]).models != MODELS[:2]
    outputs = (np.zeros(n, np.int64), rng.integers(-(2**63), 2**63 - 1, n))
    for labels in (np.zeros(n, np.int64), np.ones(n, np.int64), rng.integers(0, 2, n)):
        queried = rng.integers(0, 2, n).astype(np.int32) if alone else np.array([-1], np.int32)
        rows = ObservationRows(
            MODELS[:2],
            outputs,
            (None, None),
            (np.full(n, np.nan), None),
            labels,
            queried,
            np.array([1e-300]),
        )
        state = observe_rows(policy, state, rows)
        assert np.isfinite(state.rows).all()
        assert np.isfinite(state.sure).all()
        chosen = policy.select(state, Query(None, 0.5), MODELS[:2])
        assert all(0 < p <= 1 for p in chosen.probabilities)
        policy.decode(policy.encode(state))


@pytest.mark.parametrize("text", ["exp3", "exp4", "stacking", "mixture"])
@pytest.mark.parametrize(
    "label", [np.array([1.0, 2.0]), np.array([1e308, -1e308, 1e308]), 1e308, -5.0]
)
def test_a_label_of_another_shape_or_out_of_all_bounds(text: str, label: Any) -> None:
    policy = create_policy(text)
    state = policy.init(MODELS[:2])
    arrived = {MODELS[0]: Prediction(np.array([-1e308, 1.0, 1.0])), MODELS[1]: Prediction(-1e308)}
    for _ in range(10):
        plan = policy.select(state, Query(None, 0.1), MODELS[:2])
        state = observe(
            policy, state, Observation(plan, arrived, Truth(label)), native_update_of(policy)
        )
    assert np.isfinite(state.rows).all()
    assert state.seen == 10
