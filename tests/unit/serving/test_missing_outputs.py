"""Means in the place of numbers that are missing at the deadline."""

import itertools

import numpy as np
import pytest

from clipper.errors import InvalidInput
from clipper.selection import POLICIES, Combined, Prediction, create_policy
from clipper.serving.query.missing_outputs import averages, check_missing, combine
from clipper.types import VersionedModel
from clipper_core.application.output_means import OutputMeans

A, B = VersionedModel("a", 1), VersionedModel("b", 1)
MODELS = tuple(VersionedModel(f"m{i}", 1) for i in range(4))
AVERAGING = ["ensemble", "static", "exp4", "stacking", "logodds"]


def predictions(numbers):
    return {
        model: Prediction(number)
        for model, number in zip(MODELS, numbers, strict=False)
        if number is not None
    }


def learned(policy, rounds):
    """Return means after rounds in which every model answered."""
    means, state = OutputMeans(), policy.init(MODELS)
    for numbers in rounds:
        combine(policy, state, means, predictions(numbers), [])
    return state, means


def test_means_are_those_of_the_past():
    rng = np.random.default_rng(1)
    means, past = OutputMeans(), rng.normal(3, 2, 500)
    for number in past:
        means.add(A, float(number))
    assert means.of(A) == pytest.approx(past.mean())
    assert means.of(B) is None


def test_means_of_arrays_and_of_what_has_none():
    means = OutputMeans()
    rows = np.random.default_rng(2).normal(size=(20, 3)).astype(np.float32)
    for row in rows:
        means.add(A, row)
    assert means.of(A) == pytest.approx(rows.mean(axis=0), abs=1e-6)
    for nothing in (
        "cat",
        3,
        b"x",
        True,
        None,
        float("nan"),
        float("inf"),
        np.array([np.nan]),
        np.zeros(5000),
    ):
        means.add(B, nothing)
    assert means.of(B) is None
    means.add(A, 2.0)
    assert means.of(A) == 2.0, "another shape begins anew"
    for number in (1e308, -1e308, 1.7e308):
        means.add(B, number)
    assert np.isfinite(means.of(B))


def test_a_mean_follows():
    means = OutputMeans()
    for _ in range(30_000):
        means.add(A, 0.0)
    for _ in range(30_000):
        means.add(A, 1.0)
    assert means.of(A) > 0.9, "not the mean of all time"


@pytest.mark.parametrize("name", AVERAGING)
@pytest.mark.parametrize(
    "late", [late for n in (1, 2, 3) for late in itertools.combinations(range(4), n)]
)
def test_an_answer_with_stragglers_is_that_with_their_means(name, late):
    policy = create_policy(name)
    rng = np.random.default_rng(7)
    rounds = (rng.normal(size=(50, 4)) + np.array([0, 10, 20, 30])).tolist()
    state, means = learned(policy, rounds)
    now = [0.5, 10.5, 20.5, 30.5]
    arrived = predictions([None if i in late else number for i, number in enumerate(now)])
    missing = [MODELS[i] for i in late]
    expected = {i: means.of(MODELS[i]) for i in late}
    whole = policy.combine(
        state, predictions([expected.get(i, number) for i, number in enumerate(now)]), []
    )
    without = policy.combine(state, arrived, missing)
    found = combine(policy, state, means, arrived, missing)
    later = {i: means.of(MODELS[i]) for i in late}
    assert later == expected, "a mean that was put in teaches nothing"
    assert found.output == pytest.approx(whole.output)
    assert (found.confidence, found.used, found.agreement) == (
        without.confidence,
        without.used,
        without.agreement,
    )
    assert abs(found.output - 15.5) < abs(without.output - 15.5) or late in ((1, 2), (0, 3)), (
        "nearer than without"
    )
    assert combine(policy, state, None, arrived, missing).output == without.output


@pytest.mark.parametrize("name", AVERAGING)
def test_votes_are_combined_without(name):
    policy = create_policy(name)
    state, means = learned(policy, [["cat", "cat", "dog", "cat"]] * 5)
    arrived, missing = predictions(["dog", None, "dog", "cat"]), [MODELS[1]]
    found, without = (
        combine(policy, state, means, arrived, missing),
        policy.combine(state, arrived, missing),
    )
    assert (found.output, found.confidence) == (without.output, without.confidence)


def test_a_number_of_the_past_is_no_vote():
    policy = create_policy("ensemble")
    state, means = learned(policy, [[0.5, 0.5, 0.5, 7.5]])
    for label in (3, "cat", True):
        arrived, missing = predictions([label, label]), list(MODELS[2:])
        found, without = (
            combine(policy, state, means, arrived, missing),
            policy.combine(state, arrived, missing),
        )
        assert (found.output, type(found.output), found.confidence) == (
            label,
            type(label),
            without.confidence,
        )


def test_what_means_nothing_is_left_alone():
    class Undecided:
        def combine(self, state, arrived, missing):
            return Combined(float(len(arrived)), 0.0, ())

    means = OutputMeans()
    means.add(B, 1.0)
    assert combine(Undecided(), None, means, {A: Prediction(2.0)}, [B]).output == 1.0


def test_no_output_is_imputed_without_a_mean():
    policy = create_policy("ensemble")
    state, means = learned(policy, [[1.0, 2.0, 3.0, 4.0]])
    assert combine(policy, state, means, {}, MODELS).used == (), (
        "all are missing: the default is due"
    )
    fresh = combine(policy, state, OutputMeans(), predictions([1.0]), list(MODELS[1:]))
    assert fresh.output == 1.0, "nothing is known of the others"
    arrays = {MODELS[0]: Prediction(np.ones(3))}
    assert combine(policy, state, means, arrays, list(MODELS[1:])).output == pytest.approx(
        np.ones(3)
    ), "means of other shapes"


def test_which_policies_average():
    assert {name for name, kind in POLICIES.items() if averages(kind())} >= set(AVERAGING)
    assert not any(
        averages(create_policy(name)) for name in ("single", "ab", "exp3", "squarecb", "thompson")
    )

    class Mine:
        def combine(self, state, arrived, missing):
            return Combined(1.0, 1.0, tuple(arrived))

    assert not averages(Mine())


@pytest.mark.parametrize("value", ["maen", None, 3, "", []])
def test_what_to_do_about_the_missing(value):
    assert check_missing("skip") == "skip"
    with pytest.raises(InvalidInput, match=r"no such way.*'mean' or 'skip'"):
        check_missing(value)
