"""The core's means and blends of numbers, beside the same in Python by numpy."""

import math
import random
from typing import Any

import numpy as np
import pytest

from clipper.selection import Combined, Observation, Plan, Prediction, Truth
from clipper.selection.policies.ensemble import Ensemble
from clipper.selection.policies.ridge import Ridge
from clipper.selection.policies.weighted import StaticWeights
from clipper.selection.votes import combine, heaviest_kind, mean, usable, vote
from clipper.types import VersionedModel
from clipper_core.learning.number_votes import mean_of_numbers

MODELS = tuple(VersionedModel(name, 1) for name in "abcdef")
NUMBERS: list[Any] = [0.0, -0.0, 1.5, -2.0, 3, -7, 0, 1e308, -1e308, 5e-324, 1e-200, 2**62, 0.1]


def random_votes(rng: random.Random, others: float) -> dict[VersionedModel, Prediction]:
    """Return predictions of some models; a share of `others` is no finite number."""
    found: dict[VersionedModel, Prediction] = {}
    for model in MODELS[: rng.randrange(1, 7)]:
        output: Any = rng.choice(NUMBERS) if rng.random() < 0.3 else rng.gauss(5.0, 2.0)
        if rng.random() < others:
            output = rng.choice([math.nan, math.inf, "a", True, np.float64(2.5), 2**64, b"c"])
        found[model] = Prediction(output, rng.choice([None, 0.5]))
    return found


def in_python(
    votes: dict[VersionedModel, Prediction], weights: dict[VersionedModel, float], selected: float
) -> Combined:
    kind, chosen = heaviest_kind(votes, weights)
    if kind == "label":
        return vote(chosen, weights, selected)
    return mean(chosen, weights, selected, kind)


def assert_same(
    found: Combined, expected: Combined, votes: dict[VersionedModel, Prediction]
) -> None:
    """Compare answers; numbers to 1e-12 of the largest output."""
    assert type(found.output) is type(expected.output)
    assert found.used == expected.used
    if not found.used:
        return
    if isinstance(expected.output, float):
        sizes = [abs(one.output) for one in votes.values() if isinstance(one.output, int | float)]
        assert abs(found.output - expected.output) <= 1e-12 * max(sizes)  # type: ignore[operator]
    else:
        assert found.output == expected.output
    assert found.confidence == pytest.approx(expected.confidence, rel=1e-12, abs=1e-12)
    assert found.agreement == pytest.approx(expected.agreement, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("others", [0.0, 0.15])
def test_numbers_are_averaged_as_in_python(others: float) -> None:
    rng = random.Random(1)
    averaged = 0
    for _ in range(2000):
        votes = usable(random_votes(rng, others))
        if not votes:
            continue
        weights = {model: rng.choice([0.0, 1.0, rng.random()]) for model in MODELS}
        selected = rng.choice([sum(weights.values()), sum(weights.values()) + 1.0])
        found = combine(votes, weights, selected)
        assert_same(found, in_python(votes, weights, selected), votes)
        averaged += isinstance(found.output, float)
    assert averaged > 1000


@pytest.mark.parametrize("others", [0.0, 0.15])
def test_the_ensemble_averages_what_arrived(others: float) -> None:
    rng = random.Random(2)
    policy = Ensemble()
    for _ in range(1000):
        arrived = random_votes(rng, others)
        absent = [model for model in MODELS if model not in arrived][: rng.randrange(6)]
        state = policy.init((*arrived, *absent))
        if len(state) == 1:
            continue
        found = policy.combine(state, arrived, absent)
        votes = usable(arrived)
        even = dict.fromkeys(votes, 1.0)
        if votes:
            assert_same(found, in_python(votes, even, len(state)), votes)
        else:
            assert not found.used


def test_weights_that_a_person_set() -> None:
    policy = StaticWeights({"a": 3.0, "b": 1.0})
    arrived = {MODELS[0]: Prediction(1.0), MODELS[1]: Prediction(5)}
    found = policy.combine(policy.init(MODELS[:2]), arrived, [])
    assert found.output == pytest.approx(2.0)
    assert type(found.output) is float
    assert found.used == MODELS[:2]


def test_a_blend_of_numbers_is_that_of_arrays_of_one() -> None:
    """Arrays are blended by numpy. States are fresh and learned, models are missing or unknown."""
    rng = random.Random(3)
    policy = Ridge()
    for world in range(40):
        models = MODELS[: rng.randrange(1, 7)]
        state = policy.init(models)
        for _ in range(rng.choice([0, 1, 30])):
            arrived = {model: Prediction(rng.gauss(5.0, 2.0)) for model in models}
            state = policy.observe(
                state, Observation(Plan(models), arrived, Truth(rng.gauss(4.0, 1.0)))
            )
        for _ in range(20):
            arrived = random_votes(rng, 0.0)
            arrived = {
                model: Prediction(float(one.output), one.confidence)
                for model, one in arrived.items()
                if world % 4 == 0 or model in models
            }
            missing = [model for model in models if model not in arrived]
            if not arrived:
                continue
            found = policy.combine(state, arrived, missing)
            arrays = {model: Prediction(np.array([one.output])) for model, one in arrived.items()}
            with np.errstate(all="ignore"):
                whole = policy.combine(state, arrays, missing)
            assert isinstance(whole.output, np.ndarray)
            one = Combined(whole.output.item(), whole.confidence, whole.used, whole.agreement)
            assert_same(found, one, arrived)


def test_what_is_left_to_python() -> None:
    number = Prediction(1.0)
    known = {MODELS[0]: number, MODELS[1]: Prediction(2)}
    assert mean_of_numbers(MODELS[:2], known, None, 2.0) is not None
    for models, predictions, weights in [
        (MODELS[:1], known, None),
        ((), {}, None),
        (MODELS[:2], {MODELS[0]: Prediction(1), MODELS[1]: Prediction(2)}, None),
        (MODELS[:2], {MODELS[0]: number, MODELS[1]: Prediction(2**63)}, None),
        (MODELS[:2], {MODELS[0]: number, MODELS[1]: Prediction(math.nan)}, None),
        (MODELS[:2], {MODELS[0]: number, MODELS[1]: Prediction("a")}, None),
        (MODELS[:2], {MODELS[0]: number, MODELS[1]: Prediction(True)}, None),
        (MODELS[:2], list(known.items()), None),
        (MODELS[:2], known, {MODELS[0]: 1.0}),
        (MODELS[:2], known, [1.0, 1.0]),
        (tuple(range(257)), known, None),
    ]:
        given: list[Any] = [models, predictions, weights, 2.0]
        assert mean_of_numbers(*given) is None
    found = mean_of_numbers(MODELS[:2], known, None, 0.0)
    assert found is not None
    assert found[1] == 0.0, "no weight was selected"
