"""The state of users without an observation: the core makes what the policy's `init` makes."""

import random

import numpy as np
import pytest

from clipper.selection import create_policy
from clipper.selection.learning.batch_learning import first_states_of, observe
from clipper.selection.learning.learned_state import LearnedState, on_block
from clipper.selection.learning.user_differences import UserDifferences
from clipper.selection.policy import Observation, Plan, Policy, Prediction, Truth
from clipper.types import VersionedModel
from clipper_core.learning.bandit import Rule, RuleKind
from clipper_core.learning.first_states import FirstStates
from clipper_core.learning.policy_states import Held
from clipper_core.runtime.status import StatusError

POLICIES = (
    "mixture",
    "stacking",
    "logodds",
    "exp3",
    "exp4",
    "thompson",
    "kl_ucb",
    "squarecb",
    "tsallis_inf",
    "bandit",
    "epsilon_greedy",
    "linucb",
    "lints",
    "ridge",
)


def models_of(k: int) -> tuple[VersionedModel, ...]:
    return tuple(VersionedModel("m", i + 1) for i in range(k))


def observation(draw: random.Random, models: tuple[VersionedModel, ...]) -> Observation:
    """Return a random answer with its label; of one model half of the time."""
    label = draw.randrange(4)
    queried = models if draw.random() < 0.5 else (draw.choice(models),)
    arrived = {model: Prediction(draw.randrange(4), draw.random()) for model in queried}
    odds = () if len(queried) > 1 or len(models) == 1 else (0.5,)
    return Observation(Plan(queried, odds), arrived, Truth(label), label)


def learned(policy: Policy, draw: random.Random, state: LearnedState, n: int) -> LearnedState:
    for _ in range(n):
        state = observe(policy, state, observation(draw, state.models), None)
    return state


def differing(state: LearnedState, counts: float) -> LearnedState:
    """Return a shared state that counts as so many observations for a user."""
    differences = UserDifferences(0, counts)
    return LearnedState(
        state.models,
        state.rows,
        state.seen,
        state.labels,
        state.sure,
        state.tracked,
        differences,
    )


def assert_equal(found: LearnedState, expected: LearnedState) -> None:
    assert found.models == expected.models
    assert np.array_equal(found.rows, expected.rows)
    assert np.array_equal(found.sure, expected.sure)
    assert (found.seen, found.labels) == (expected.seen, expected.labels)
    assert found.tracked == expected.tracked
    assert found.differences == expected.differences


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("k", [1, 3, 6])
def test_it_is_what_the_policy_makes_of_each_version_of_the_shared_state(name: str, k: int) -> None:
    draw, models = random.Random(f"{name} {k}"), models_of(k)
    policy = create_policy(name)
    state = policy.init(models)
    held = Held(on_block(state), state, 0, {})
    firsts = first_states_of(policy, models)
    for _ in range(12):
        state = learned(policy, draw, state, draw.choice((0, 1, 40)))
        state = on_block(differing(state, draw.choice((1.0, 8.0, 500.0))))
        held.publish(state)
        first = firsts.of(held)
        assert_equal(first.state, policy.init(models, state))
        assert firsts.of(held) is first
        assert firsts.of(held).state is first.state


@pytest.mark.parametrize("name", ["mixture", "exp3"])
def test_it_changes_with_the_block_and_with_what_users_differ_by(name: str) -> None:
    draw = random.Random(name)
    models = models_of(3)
    policy = create_policy(name)
    state = on_block(learned(policy, draw, policy.init(models), 30))
    held = Held(state, state, 0, {})
    firsts = first_states_of(policy, models)
    first = firsts.of(held)
    held.publish(on_block(differing(state, 3.0)))  # the same block
    second = firsts.of(held)
    assert second is not first
    assert_equal(second.state, policy.init(models, held.state))
    held.publish(on_block(learned(policy, draw, state, 1)))
    assert_equal(firsts.of(held).state, policy.init(models, held.state))
    # what was made before stays as it was
    assert_equal(first.state, policy.init(models, state))


def test_a_shared_state_of_other_models_is_converted_by_the_policy() -> None:
    draw, policy = random.Random(1), create_policy("mixture")
    state = on_block(learned(policy, draw, policy.init(models_of(2)), 20))
    first = first_states_of(policy, models_of(3)).of(Held(state, state, 0, {}))
    assert_equal(first.state, policy.init(models_of(3), state))


def test_a_state_without_a_block_is_the_policys() -> None:
    made = []

    def init(models: object, shared: object) -> object:
        made.append(shared)
        return ("begun", shared)

    held = Held("one", "one", 0, {})
    firsts = FirstStates(models_of(1), init, LearnedState)
    assert firsts.of(held).state == ("begun", "one")
    assert firsts.of(held) is firsts.of(held)
    held.publish("two")
    assert firsts.of(held).state == ("begun", "two")
    assert made == ["one", "two"]


def test_columns_that_a_row_lacks_are_refused() -> None:
    rule = Rule(RuleKind.THOMPSON)
    with pytest.raises(StatusError, match="columns"):
        FirstStates(models_of(1), None, LearnedState, rule, (7,))
    with pytest.raises(StatusError, match="at most 16"):
        FirstStates(models_of(1), None, LearnedState, rule, [0] * 17)
