"""The output and the confidence of an answer that a decider gave."""

import itertools

import numpy as np
import pytest

from clipper.selection import Observation, Plan, Prediction, Truth, create_policy
from clipper.selection.deciders.answer import (
    DecisionInputs,
    decided_answer,
    rank_models,
    vote_weights,
)
from clipper.types import VersionedModel

A, B, C, D = (VersionedModel(name, 1) for name in "abcd")


def arrivals(
    arrived: dict, policy: str = "ensemble", queried=(A, B, C), plan=None, state=None
) -> DecisionInputs:
    chosen = create_policy(policy)
    predictions = {
        m: out if isinstance(out, Prediction) else Prediction(out) for m, out in arrived.items()
    }
    state = chosen.init(queried) if state is None else state
    return DecisionInputs(chosen, state, Plan(plan or tuple(queried)), queried, predictions)


@pytest.mark.parametrize("rule", ["all", "majority", "quorum", "weighted"])
def test_votes_give_output_confidence_and_agreement(rule: str) -> None:
    found = decided_answer(rule, arrivals({A: 1, B: 1}), [A, B])
    assert (found.output, found.confidence, found.used, found.agreement) == (
        1,
        2 / 3,
        (A, B),
        2 / 3,
    )


def test_votes_are_equal_whatever_the_policy_weighs() -> None:
    three = arrivals({A: 1, B: 2, C: 2}, "static(weights={'a': 9})")
    assert decided_answer("majority", three, [A, B, C]).output == 2
    assert decided_answer("weighted", three, [A, B, C]).output == 1
    assert decided_answer("weighted", three, [A, B, C]).confidence == pytest.approx(9 / 11)


SINGLE = [
    "first",
    "best_quality",
    "surest",
    "cascade",
    "hedged",
    "tied",
    "floor",
    "row",
    "guaranteed_time",
]


@pytest.mark.parametrize("rule", SINGLE)
def test_an_answer_from_one_model_has_its_confidence(rule: str) -> None:
    found = decided_answer(rule, arrivals({A: 1, B: 2, C: 2}), [A])
    assert (found.output, found.used, found.confidence, found.agreement) == (1, (A,), 1 / 3, 1 / 3)
    found = decided_answer(rule, arrivals({A: Prediction(1, 0.9), B: 1}), [A])
    assert (found.output, found.confidence, found.agreement) == (1, 0.9, 2 / 3)


def test_no_used_models_give_no_answer() -> None:
    assert decided_answer("floor", arrivals({B: 1}), []).used == ()
    assert decided_answer("first", arrivals({A: float("nan")}), [A]).used == ()
    assert decided_answer("majority", arrivals({A: float("nan")}), [A]).used == ()
    assert decided_answer("median", arrivals({A: "x"}), [A]).used == ()


@pytest.mark.parametrize(("rule", "middle"), [("mean", 3.0), ("median", 2.0)])
def test_numbers_are_combined_into_a_mean_or_median(rule: str, middle: float) -> None:
    for outputs in itertools.permutations([1, 2.0, 6.0]):
        found = decided_answer(
            rule, arrivals(dict(zip((A, B, C), outputs, strict=True))), [A, B, C]
        )
        assert (found.output, found.used) == (pytest.approx(middle), (A, B, C))
        assert 0 < found.confidence < 1
    two = decided_answer(rule, arrivals({A: 2.0, B: 2.0}), [A, B])
    assert (two.output, two.confidence) == (2.0, pytest.approx(2 / 3))


def test_a_median_of_arrays() -> None:
    found = decided_answer(
        "median",
        arrivals({A: np.array([1.0, 9.0]), B: np.array([2.0, 8.0]), C: np.array([7.0, 1.0])}),
        [A, B, C],
    )
    assert found.output.tolist() == [2.0, 8.0]


def test_user_defined_decider_answers_from_the_used_models_only() -> None:
    found = decided_answer("own", arrivals({A: 1, B: 2, C: 2}), [A])
    assert (found.output, found.used) == (1, (A,))
    assert decided_answer("own", arrivals({A: 1, B: 2, C: 2}), [B, C]).output == 2


def test_models_queried_beside_the_choice_of_the_policy() -> None:
    """The chosen model's output is the answer; another's, if that one is missing."""
    assert decided_answer("all", arrivals({A: 1, B: 2}, "exp3", plan=(B,)), [A, B]).output == 2
    assert decided_answer("all", arrivals({A: 1}, "exp3", plan=(B,)), [A]).output == 1


def learned_state(policy: str, rounds: int = 400):
    """Return a state that has learned from queries in which A is right, and B and C agree on a
    wrong label."""
    chosen = create_policy(policy)
    state = chosen.init([A, B, C])
    for i in range(rounds):
        said = {A: Prediction(i % 10), B: Prediction((i + 1) % 10), C: Prediction((i + 1) % 10)}
        plan = Plan((A, B, C)) if policy == "stacking" else Plan((A,), (1.0,))
        state = chosen.observe(state, Observation(plan, said, Truth(i % 10)))
    return state


def test_confidence_is_calibrated_where_the_policy_learns() -> None:
    state = learned_state("stacking")
    right = decided_answer("first", arrivals({A: 1, B: 2, C: 2}, "stacking", state=state), [A])
    wrong = decided_answer(
        "majority", arrivals({A: 1, B: 2, C: 2}, "stacking", state=state), [A, B, C]
    )
    assert (right.output, wrong.output) == (1, 2)
    assert right.confidence > 0.9
    assert wrong.confidence <= 1 - right.confidence + 1e-12, (
        "two thirds of the votes, and known to be wrong"
    )


def test_models_are_ranked_by_the_policy() -> None:
    assert rank_models(create_policy("ensemble"), None, None, (C, A, B)) == (C, A, B)
    assert rank_models(create_policy("static(weights={'b': 2})"), None, None, (C, A, B)) == (
        B,
        C,
        A,
    )
    stacking = create_policy("stacking")
    assert rank_models(stacking, stacking.init([A, B, C]), None, (C, A, B)) == (C, A, B), (
        "nobody stands out yet"
    )
    assert rank_models(stacking, learned_state("stacking"), None, (C, B, A))[0] == A
    assert set(rank_models(stacking, stacking.init([A, B]), None, (C, A, B))) == {A, B, C}


def test_vote_weights_are_those_of_the_policy() -> None:
    weights = vote_weights(create_policy("stacking"), learned_state("stacking"), [A, B, C])
    assert weights[A] > weights[B]
    assert vote_weights(create_policy("static(weights={'b': 2})"), None, [A, B]) == {A: 1.0, B: 2.0}
    assert vote_weights(create_policy("static(weights={'b': 2, 'a': 0})"), None, [A]) == {A: 1.0}
    assert vote_weights(create_policy("exp3"), None, [A, B]) == {A: 1.0, B: 1.0}
