"""Policies after very many observations, very heavy ones, and states that were damaged."""

import math
import random

import numpy as np
import pytest

from clipper.selection import Observation, Plan, Prediction, Query, Truth, create_policy
from clipper.selection.learning.batch_learning import native_update_of, observe
from clipper.selection.learning.learned_state import LearnedState
from clipper.selection.learning.learning_policy import LearningPolicy
from clipper.selection.policy import Policy
from clipper.types import VersionedModel

A, B = VersionedModel("a", 1), VersionedModel("b", 1)
CHOOSE_ONE = [
    "exp3",
    "squarecb",
    "bandit",
    "thompson",
    "kl_ucb",
    "tsallis_inf",
    "epsilon_greedy",
    "linucb",
    "lints",
]
QUERY_ALL = ["exp4", "stacking", "mixture", "logodds"]


def is_finite(state: LearnedState) -> bool:
    return bool(np.isfinite(state.rows).all() and np.isfinite(state.sure).all())


def trained(
    policy: Policy,
    state: LearnedState,
    n: int,
    right: dict[VersionedModel, float],
    draw: random.Random,
) -> tuple[LearnedState, float]:
    """Return the state after n queries with feedback, and the share of the last hundred answers
    that are those of model a."""
    native, from_a = native_update_of(policy), []
    for _ in range(n):
        plan = policy.select(state, Query(None, draw.random(), (1.0,)), (A, B))
        arrived = {model: Prediction(int(draw.random() < right[model])) for model in plan.models}
        from_a.append(plan.models == (A,))
        state = observe(policy, state, Observation(plan, arrived, Truth(1), None), native)
    return state, sum(from_a[-100:]) / 100


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOOSE_ONE)
def test_a_model_that_fails_is_left_however_long_it_was_good(name: str) -> None:
    """Checks that it is left within a few times the length of the policy's memory, as the theory of
    each policy says (docs/selection.md)."""
    policy, draw = create_policy(name), random.Random(1)
    state, before = trained(policy, policy.init((A, B)), 30_000, {A: 0.95, B: 0.7}, draw)
    assert before > 0.8
    _, after = trained(policy, state, 3_000, {A: 0.0, B: 0.7}, draw)
    assert after < 0.2


@pytest.mark.parametrize("weight", [1.0, 1000.0])
@pytest.mark.parametrize("in_the_core", [True, False])
def test_stacking_many_models_that_agree_stays_finite(weight: float, in_the_core: bool) -> None:
    models = tuple(VersionedModel(f"m{i}", 1) for i in range(50))
    policy = create_policy("stacking(rate=1.0)")
    assert isinstance(policy, LearningPolicy)
    fresh, native = policy.init(models), native_update_of(policy) if in_the_core else None
    # as large as they become
    state = LearnedState(models, np.full((50, 1), 20.0), fresh.seen, fresh.labels, fresh.sure)
    for turn in range(12):
        arrived = {model: Prediction(turn % 3 if i % 10 else 7) for i, model in enumerate(models)}
        state = observe(
            policy, state, Observation(Plan(models), arrived, Truth(turn % 3), None, weight), native
        )
        assert is_finite(state)
    found = policy.combine(state, arrived, ())
    assert found.output == 2
    assert math.isfinite(found.confidence)
    assert 0 <= found.confidence <= 1
    covering = create_policy("stacking(rate=1.0, coverage=0.9)")
    assert 2 in covering.combine(state, arrived, ()).set
    assert np.array_equal(policy.decode(policy.encode(state)).rows, state.rows)


@pytest.mark.parametrize("name", [*CHOOSE_ONE, *QUERY_ALL])
@pytest.mark.parametrize("how", ["observed", "decoded"])
def test_a_state_that_is_not_finite_heals(name: str, how: str) -> None:
    policy, draw = create_policy(name), random.Random(2)
    assert isinstance(policy, LearningPolicy)
    state, _ = trained(policy, policy.init((A, B)), 20, {A: 0.9, B: 0.1}, draw)
    rows, sure = state.rows.copy(), state.sure.copy()
    rows[0, 0], sure[3, 1] = math.nan, math.inf
    broken = LearnedState(state.models, rows, state.seen, state.labels, sure, state.tracked)
    if how == "decoded" and name.startswith("lin"):
        # whoever reads it begins anew
        with pytest.raises(ValueError, match="no factor of a positive matrix"):
            policy.decode(policy.encode(broken))
        return
    if how == "decoded":
        healed = policy.decode(policy.encode(broken))
    else:
        healed, _ = trained(policy, broken, 1, {A: 1.0, B: 1.0}, draw)
    assert is_finite(healed)
    if how == "decoded":
        assert np.array_equal(healed.rows[1], state.rows[1]), (
            "the other model keeps what it has learned"
        )
    arrived = {A: Prediction(1), B: Prediction(1)}
    assert math.isfinite(policy.combine(healed, arrived, ()).confidence)
