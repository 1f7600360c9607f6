"""What a verdict comes to, and how sure it says it is."""

import itertools

import numpy as np
import pytest

from clipper.selection import Observation, Plan, Prediction, Truth, policy_named
from clipper.selection.verdicts import Heard, answer_by, ranked, vote_weights
from clipper.types import VersionedModel

A, B, C, D = (VersionedModel(name, 1) for name in "abcd")


def heard(arrived: dict, policy: str = "ensemble", asked=(A, B, C), plan=None, state=None) -> Heard:
    chosen = policy_named(policy)
    predictions = {
        m: out if isinstance(out, Prediction) else Prediction(out) for m, out in arrived.items()
    }
    state = chosen.init(asked) if state is None else state
    return Heard(chosen, state, Plan(plan or tuple(asked)), asked, predictions)


@pytest.mark.parametrize("rule", ["all", "majority", "quorum", "weighted"])
def test_votes(rule: str) -> None:
    found = answer_by(rule, heard({A: 1, B: 1}), [A, B])
    assert (found.output, found.confidence, found.used, found.agreement) == (
        1,
        2 / 3,
        (A, B),
        2 / 3,
    )


def test_votes_are_equal_whatever_the_policy_weighs() -> None:
    three = heard({A: 1, B: 2, C: 2}, "static(weights={'a': 9})")
    assert answer_by("majority", three, [A, B, C]).output == 2
    assert answer_by("weighted", three, [A, B, C]).output == 1
    assert answer_by("weighted", three, [A, B, C]).confidence == pytest.approx(9 / 11)


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
def test_one_models_word(rule: str) -> None:
    found = answer_by(rule, heard({A: 1, B: 2, C: 2}), [A])
    assert (found.output, found.used, found.confidence, found.agreement) == (1, (A,), 1 / 3, 1 / 3)
    found = answer_by(rule, heard({A: Prediction(1, 0.9), B: 1}), [A])
    assert (found.output, found.confidence, found.agreement) == (1, 0.9, 2 / 3)


def test_nobody_was_used() -> None:
    assert answer_by("floor", heard({B: 1}), []).used == ()
    assert answer_by("first", heard({A: float("nan")}), [A]).used == ()
    assert answer_by("majority", heard({A: float("nan")}), [A]).used == ()
    assert answer_by("median", heard({A: "x"}), [A]).used == ()


@pytest.mark.parametrize(("rule", "middle"), [("mean", 3.0), ("median", 2.0)])
def test_numbers(rule: str, middle: float) -> None:
    for outputs in itertools.permutations([1, 2.0, 6.0]):
        found = answer_by(rule, heard(dict(zip((A, B, C), outputs, strict=True))), [A, B, C])
        assert (found.output, found.used) == (pytest.approx(middle), (A, B, C))
        assert 0 < found.confidence < 1
    two = answer_by(rule, heard({A: 2.0, B: 2.0}), [A, B])
    assert (two.output, two.confidence) == (2.0, pytest.approx(2 / 3))


def test_a_median_of_arrays() -> None:
    found = answer_by(
        "median",
        heard({A: np.array([1.0, 9.0]), B: np.array([2.0, 8.0]), C: np.array([7.0, 1.0])}),
        [A, B, C],
    )
    assert found.output.tolist() == [2.0, 8.0]


def test_only_whoever_was_used_speaks_for_a_decider_of_your_own() -> None:
    found = answer_by("own", heard({A: 1, B: 2, C: 2}), [A])
    assert (found.output, found.used) == (1, (A,))
    assert answer_by("own", heard({A: 1, B: 2, C: 2}), [B, C]).output == 2


def test_who_was_asked_beside_the_policys_choice() -> None:
    """The chosen one's word; another's, if it was not heard."""
    assert answer_by("all", heard({A: 1, B: 2}, "exp3", plan=(B,)), [A, B]).output == 2
    assert answer_by("all", heard({A: 1}, "exp3", plan=(B,)), [A]).output == 1


def taught(policy: str, rounds: int = 400):
    """A is right, B and C are wrong, and agree."""
    chosen = policy_named(policy)
    state = chosen.init([A, B, C])
    for i in range(rounds):
        said = {A: Prediction(i % 10), B: Prediction((i + 1) % 10), C: Prediction((i + 1) % 10)}
        plan = Plan((A, B, C)) if policy == "stacking" else Plan((A,), (1.0,))
        state = chosen.observe(state, Observation(plan, said, Truth(i % 10)))
    return state


def test_confidence_is_calibrated_where_the_policy_learns() -> None:
    state = taught("stacking")
    right = answer_by("first", heard({A: 1, B: 2, C: 2}, "stacking", state=state), [A])
    wrong = answer_by("majority", heard({A: 1, B: 2, C: 2}, "stacking", state=state), [A, B, C])
    assert (right.output, wrong.output) == (1, 2)
    assert right.confidence > 0.9
    assert wrong.confidence <= 1 - right.confidence + 1e-12, (
        "two thirds of the votes, and known to be wrong"
    )


def test_ranks() -> None:
    assert ranked(policy_named("ensemble"), None, None, (C, A, B)) == (C, A, B)
    assert ranked(policy_named("static(weights={'b': 2})"), None, None, (C, A, B)) == (B, C, A)
    stacking = policy_named("stacking")
    assert ranked(stacking, stacking.init([A, B, C]), None, (C, A, B)) == (
        C,
        A,
        B,
    ), "nobody stands out yet"
    assert ranked(stacking, taught("stacking"), None, (C, B, A))[0] == A
    assert set(ranked(stacking, stacking.init([A, B]), None, (C, A, B))) == {A, B, C}


def test_weights() -> None:
    weights = vote_weights(policy_named("stacking"), taught("stacking"), [A, B, C])
    assert weights[A] > weights[B]
    assert vote_weights(policy_named("static(weights={'b': 2})"), None, [A, B]) == {A: 1.0, B: 2.0}
    assert vote_weights(policy_named("static(weights={'b': 2, 'a': 0})"), None, [A]) == {A: 1.0}
    assert vote_weights(policy_named("exp3"), None, [A, B]) == {A: 1.0, B: 1.0}
