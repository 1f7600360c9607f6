"""Properties of every policy, and the losses of each model by feedback."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clipper.errors import InvalidInput
from clipper.selection import (
    POLICIES,
    Observation,
    Plan,
    Policy,
    Prediction,
    Query,
    Truth,
    create_policy,
)
from clipper.selection.learning.learning_policy import LearningPolicy
from clipper.selection.policy import agrees, loss, losses
from clipper.types import VersionedModel

A, B, C = (VersionedModel(name, 1) for name in "abc")
A2 = VersionedModel("a", 2)
every_policy = pytest.mark.parametrize(
    "policy", [create_policy(name) for name in POLICIES], ids=POLICIES
)


@every_policy
def test_a_state_is_written_and_read(policy: Policy) -> None:
    state = policy.init([A, B, C])
    again = policy.decode(policy.encode(state))
    assert policy.encode(again) == policy.encode(state)
    assert policy.rank_models_desc(again, None) == policy.rank_models_desc(state, None)


@every_policy
@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93\x01\x02\x03", b"nonsense", bytes(100)])
def test_bytes_of_something_else_are_refused(policy: Policy, data: bytes) -> None:
    with pytest.raises(ValueError, match="state"):
        policy.decode(data)


@every_policy
def test_models_come_and_go(policy: Policy) -> None:
    state = policy.init([A, B])
    assert set(policy.rank_models_desc(policy.add_model(state, C), None)) == {A, B, C}
    assert policy.encode(policy.add_model(state, B)) == policy.encode(state)
    assert policy.rank_models_desc(policy.remove_model(state, B), None) == (A,)
    assert set(policy.rank_models_desc(policy.update_model_version(state, A, A2), None)) == {A2, B}
    assert set(policy.rank_models_desc(state, None)) == {A, B}, (
        "the state that was given is as it was"
    )


@every_policy
def test_servers_that_learned_apart_agree_in_the_end(policy: Policy) -> None:
    base = policy.init([A])
    mine, theirs = policy.add_model(base, B), policy.add_model(base, C)
    assert set(policy.rank_models_desc(policy.merge(base, mine, theirs), None)) == {A, B, C}


@every_policy
def test_candidates_alone_are_queried(policy: Policy) -> None:
    state = policy.init([A, B])
    for n, uniform in itertools.product(range(4), (0.0, 0.5, 1 - 2**-53)):
        for candidates in itertools.permutations([A, B, C], n):
            plan = policy.select(state, Query("u", uniform), candidates)
            assert set(plan.models) <= set(candidates)
            assert bool(plan.models) == bool(candidates)
            assert not plan.probabilities or all(
                0 < plan.probability(model) <= 1 for model in plan.models
            )


def test_the_probability_of_a_choice() -> None:
    assert [Plan((A, B), (0.25, 0.5)).probability(model) for model in (A, B, C)] == [0.25, 0.5, 0.0]
    assert [Plan((A, B)).probability(model) for model in (A, B, C)] == [1.0, 1.0, 0.0]


def seen(truth: Truth, answer: object = None, **outputs: object) -> dict[str, float]:
    predictions = {VersionedModel(name, 1): Prediction(output) for name, output in outputs.items()}
    model_losses = losses(Observation(Plan(tuple(predictions)), predictions, truth, answer))
    return {model.name: loss for model, loss in model_losses.items()}


def test_a_label_is_feedback_for_all_models_that_answered() -> None:
    assert seen(Truth(7), a=7, b=3, c="7") == {"a": 0.0, "b": 1.0, "c": 1.0}
    assert seen(Truth("cat"), a="cat", b=None) == {"a": 0.0}, "what is no answer has no loss"
    assert seen(Truth(1.0), a=1.0, b=3.0, c=math.nan) == {"a": 0.0, "b": 2 / 3}


def test_a_score_is_feedback_for_the_answer() -> None:
    assert seen(Truth(score=1.0), 7, a=7, b=3) == {"a": 0.0, "b": 1.0}
    assert seen(Truth(score=0.0), 7, a=7, b=3) == {"a": 1.0}, "the other may be right or wrong"
    assert seen(Truth(score=0.25), 7, a=7, b=3) == {"a": 0.75}


numbers = st.floats(-1e6, 1e6).map(lambda x: round(x, 9))  # none so small that its square vanishes


@given(numbers, numbers, st.floats(1e-3, 1e3))
def test_the_loss_of_numbers_is_bounded_and_has_no_unit(
    output: float, label: float, unit: float
) -> None:
    assert 0.0 <= loss(output, label) <= 1.0
    assert loss(label, label) == 0.0
    assert loss(output * unit, label * unit) == pytest.approx(
        loss(output, label), rel=1e-6, abs=1e-9
    )


def test_equal_outputs() -> None:
    assert agrees(np.array([1, 2]), np.array([1, 2]))
    assert not agrees(np.array([1, 2]), np.array([1, 2, 3]))
    assert not agrees(True, 1)
    assert agrees(np.int64(3), 3)


# -- weights that a person has chosen


def test_shares_are_kept() -> None:
    policy = create_policy("ab(shares={'a': 0.9, 'b:1': 0.1})")
    state = policy.init([A, B, C])
    plans = [policy.select(state, Query(uniform=(i + 0.5) / 1000), [C, A, B]) for i in range(1000)]
    queried = [plan.models[0] for plan in plans]
    assert (queried.count(A), queried.count(B), queried.count(C)) == (900, 100, 0)
    assert {plan.probability(plan.models[0]) for plan in plans} == {0.9, 0.1}
    assert policy.select(state, Query(uniform=0.9), [C, VersionedModel("b", 2)]).probabilities == (
        0.5,
    ), "nobody named"
    assert policy.select(state, Query(uniform=1 - 2**-53), [A, C]).models == (A,)
    assert policy.combine(state, {A: Prediction(3, 0.5)}, ()).output == 3


def test_votes_weigh_as_a_person_set() -> None:
    policy = create_policy("static(weights={'a': 2.5})")
    state, predictions = (
        policy.init([A, B, C]),
        {A: Prediction(1), B: Prediction(2), C: Prediction(2)},
    )
    combined = policy.combine(state, predictions, ())
    assert (combined.output, combined.confidence) == (1, 2.5 / 4.5)
    assert policy.combine(state, {B: predictions[B], C: predictions[C]}, [A]).confidence == 2 / 4.5
    assert policy.combine(
        state, {A: Prediction(1.0), B: Prediction(2.0)}, ()
    ).output == pytest.approx(4.5 / 3.5)
    only_a = create_policy("static(weights={'a': 1, 'b': 0})")
    assert only_a.combine(state, {B: predictions[B]}, [A]).output == 2, "better than nobody"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ab(shares={'a': -1})", "shares: -1 for 'a'; it must be a number from 0"),
        ("ab(shares={'a': 0})", "one of them must be above 0"),
        ("ab(shares={'A b': 1})", "bad model name"),
        ("ab(shares=[1])", "numbers by model, as in shares="),
        ("static(weights={'a': 1e999})", "weights: inf for 'a'"),
    ],
)
def test_weights_that_are_none(text: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        create_policy(text)


def test_kl_ucb_shares_are_defined_while_models_are_untried() -> None:
    """The rule stops at the first untried model; the shares of the others must not be uninitialized
    memory."""
    policy = create_policy("kl_ucb")
    assert isinstance(policy, LearningPolicy)
    models = [VersionedModel(name, 1) for name in "abc"]
    for _ in range(100):
        np.full(3, 7.0)  # freed at once, so that new arrays are likely to find it
        assert list(policy.portions(policy.init(models)).values()) == [1.0, 0.0, 0.0]


@every_policy
def test_portions_add_up_and_move_to_the_right_model(policy: Policy) -> None:
    portions = getattr(policy, "portions", None)
    if portions is None:
        pytest.skip("it learns nothing")
    state = policy.init([A, B, C])
    assert portions(policy.init([])) == {}
    for i in range(200):
        plan = policy.select(state, Query(None, (i * 0.37) % 1), (A, B, C))
        right: float = (i * 0.37) % 1 if policy.name == "ridge" else 1  # it blends numbers
        wrong = (i * 0.61) % 1 if policy.name == "ridge" else 2
        arrived = {model: Prediction(right if model == B else wrong) for model in plan.models}
        state = policy.observe(state, Observation(plan, arrived, Truth(right)))
    found = portions(state)
    assert sum(found.values()) == pytest.approx(1)
    assert set(found) == {A, B, C}
    assert max(found, key=lambda model: found[model]) == B
