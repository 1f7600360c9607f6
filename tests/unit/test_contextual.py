"""Policies that look at a query's features: what they learn, what they refuse, and what they make
of states of another width."""

import math
import random
from typing import Any

import numpy as np
import pytest

from clipper.errors import InvalidInput
from clipper.selection import (
    Observation,
    Plan,
    Policy,
    Prediction,
    Query,
    Truth,
    create_policy,
    features_of,
)
from clipper.selection.policies.contextual import LARGEST, features_in
from clipper.types import VersionedModel

A, B, C = (VersionedModel(name, 1) for name in "abc")
A2 = VersionedModel("a", 2)
every_policy = pytest.mark.parametrize(
    "policy", [create_policy("linucb"), create_policy("lints")], ids=["linucb", "lints"]
)


def observation(features=(), chosen=A, output=1, label=1, weight=1.0):
    return Observation(
        Plan((chosen,), (), (), features),
        {chosen: Prediction(output)},
        Truth(label),
        output,
        weight,
    )


def trained(policy: Policy, seed: int, n: int, models=(A, B), begin=None):
    """Train a policy on queries where a is right if the feature is negative, and b if it is
    positive."""
    draw, state, right = random.Random(seed), begin or policy.init(models), 0
    for t in range(n):
        x = draw.uniform(-1, 1)
        plan = policy.select(state, Query(None, draw.random(), (x, x * x)), models)
        good = plan.models[0] == (B if x > 0 else A)
        ok = draw.random() < (0.95 if good else 0.4)
        right += good and t >= n // 2
        state = policy.observe(state, observation(plan.features, plan.models[0], int(ok)))
    return state, right


@every_policy
def test_each_query_goes_to_the_model_that_is_good_at_it(policy):
    state, right = trained(policy, 1, 3000)
    assert right >= 1350
    assert policy.select(state, Query(None, 0.5, (0.9, 0.81)), [A, B]).models == (B,)
    assert policy.select(state, Query(None, 0.5, (-0.9, 0.81)), [B, A]).models == (A,)
    assert policy.select(state, Query(None, 0.5, (-0.9, 0.81)), [B, C]).models == (B,), (
        "of those there are"
    )


@every_policy
def test_without_features_it_is_a_bandit(policy):
    draw, state = random.Random(2), policy.init([A, B])
    queried = []
    for _ in range(1000):
        plan = policy.select(state, Query(None, draw.random()), [A, B])
        queried.append(plan.models[0])
        state = policy.observe(
            state,
            observation(
                (), plan.models[0], int(draw.random() < (0.2 if plan.models[0] == A else 0.8))
            ),
        )
    assert queried[200:].count(B) > 700
    assert policy.rank_models_desc(state, None) == (B, A)
    assert features_in(state.rows) == 0


@every_policy
def test_the_first_feedback_with_features_fixes_their_number(policy):
    state = policy.observe(policy.init([A, B]), observation())
    plan = policy.select(state, Query(None, 0.5, (1.0, 2.0)), [A, B])
    assert plan.features == (1.0, 2.0), "kept for feedback"
    state = policy.observe(state, observation((1.0, 2.0)))
    assert features_in(state.rows) == 2
    with pytest.raises(InvalidInput, match=r"context has 3 features; .* has learned with 2"):
        policy.select(state, Query(None, 0.5, (1.0, 2.0, 3.0)), [A, B])
    assert policy.select(state, Query(), [A, B]).models, "none at all are zeros"
    assert policy.observe(state, observation((1.0,))).rows is state.rows, (
        "two answers of the beginning, the second told late"
    )
    assert policy.rank_models_desc(policy.decode(policy.encode(state)), None) == (A, B)


@every_policy
def test_servers_that_learned_apart_add_up(policy):
    sure: Any = create_policy(f"{policy.name}(discount=1.0)")
    base, _ = trained(sure, 3, 50)
    mine, theirs = trained(sure, 4, 200, begin=base)[0], trained(sure, 5, 300, begin=base)[0]
    merged = sure.merge(base, mine, theirs)
    products = [sure.linear.sums(state.rows, 3) for state in (base, mine, theirs, merged)]
    for base_sums, mine_sums, their_sums, merged_sums in zip(*products, strict=True):
        assert np.allclose(merged_sums, mine_sums + their_sums - base_sums, atol=1e-6)
    assert merged.seen == 550
    fresh = sure.init([A, B])
    wide = sure.merge(
        fresh, sure.observe(fresh, observation()), sure.observe(fresh, observation((1.0, 2.0)))
    )
    assert features_in(wide.rows) == 2
    assert wide.rows[0, 0] ** 2 == pytest.approx(3.0), "both are counted"
    theirs = sure.observe(sure.observe(fresh, observation((1.0, 2.0))), observation((1.0, 2.0)))
    other = sure.merge(fresh, sure.observe(fresh, observation((1.0,))), theirs)
    assert features_in(other.rows) == 2, "those of more feedback stay"


@every_policy
def test_models_come_and_go_with_their_features(policy):
    state, _ = trained(policy, 6, 500)
    count = state.rows[0, 0] ** 2 - 1
    newer = policy.update_model_version(state, A, A2)
    assert newer.rows[0, 0] ** 2 - 1 == pytest.approx(count / 4)
    assert policy.select(newer, Query(None, 0.5, (-0.9, 0.81)), [A2, B]).models == (A2,)
    more = policy.add_model(state, C)
    assert more.rows.shape == (3, state.rows.shape[1])
    assert np.array_equal(policy.remove_model(more, C).rows, state.rows)
    own = policy.init([A, B], state)
    assert own.rows.shape == state.rows.shape
    assert (own.rows[:, 0] ** 2 - 1).max() <= 30 + 1e-6


@every_policy
def test_wild_feedback_leaves_a_state_sound(policy):
    draw, state = random.Random(7), policy.init([A, B])
    for _ in range(300):
        features = tuple(draw.choice([0.0, 1e6, -1e6, 1e-300, draw.gauss(0, 1)]) for _ in range(4))
        label = draw.choice([1, 0, "x", 1.5])
        state = policy.observe(
            state,
            observation(features, draw.choice([A, B]), 1, label, draw.choice([1e-3, 1.0, 1000.0])),
        )
    assert np.isfinite(state.rows).all()
    assert policy.encode(policy.decode(policy.encode(state))) == policy.encode(state)
    assert policy.select(state, Query(None, 0.5, (1e6, 0.0, 1.0, -1e6)), [A, B]).models


@every_policy
def test_bytes_that_hold_no_factor_are_refused(policy):
    state = policy.observe(policy.init([A]), observation((1.0,)))
    state.rows[0, 0] = -1.0
    with pytest.raises(ValueError, match="wrong size"):
        policy.decode(policy.encode(state))


def test_what_a_context_may_be():
    assert features_of(None) == ()
    assert features_of([1, 2.5]) == (1.0, 2.5)
    assert features_of([LARGEST, -LARGEST]) == (LARGEST, -LARGEST)
    assert features_of(np.array([True, False])) == (1.0, 0.0)
    for context in ("abc", [[1.0]], 3.0, [], [0.0] * 33, {"a": 1}, [1.0, "x"]):
        with pytest.raises(InvalidInput, match="context"):
            features_of(context)
    for value in (math.nan, math.inf, 1e7):
        with pytest.raises(InvalidInput, match=r"context\[1\]"):
            features_of([0.0, value])
