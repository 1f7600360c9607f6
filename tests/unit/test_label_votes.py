"""Combining labels in the core gives what combining them in Python gives."""

import math
from typing import Any

import numpy as np
import pytest

from clipper.selection import Combined, Observation, Plan, Prediction, Truth, create_policy
from clipper.selection.policy import Predictions
from clipper.types import VersionedModel

MODELS = tuple(VersionedModel(name, 1) for name in ("a", "b", "c", "d"))
LABELS: dict[str, Any] = {
    "int": lambda i: i + 60,
    "str": lambda i: f"label {i}",
    "bytes": lambda i: b"label %d" % i,
    "bool": lambda i: i % 2 == 0,
    "float": lambda i: i / 2,
    "mixed": lambda i: i if i % 2 else str(i),
}


class NotADict(dict[VersionedModel, Prediction]):
    """Predictions that the core leaves to Python."""


def drawn(rng: np.random.Generator, label: Any) -> Predictions:
    sure = (None, math.nan, 0.2, 0.9, 1.0, 3.0)
    return {
        model: Prediction(label(int(rng.integers(0, 4))), sure[int(rng.integers(0, 6))])
        for model in MODELS
        if rng.random() < 0.8
    }


@pytest.mark.parametrize("name", ["ensemble", "mixture", "stacking", "exp4", "logodds"])
@pytest.mark.parametrize("kind", LABELS)
def test_the_core_answers_as_python_does(name: str, kind: str) -> None:
    policy, rng = create_policy(name), np.random.default_rng(6)
    state, plan = policy.init(MODELS), Plan(MODELS)
    for t in range(200):
        arrived = drawn(rng, LABELS[kind])
        missing = [model for model in MODELS if model not in arrived]
        fast = policy.combine(state, arrived, missing)
        slow = policy.combine(state, NotADict(arrived), missing)
        assert same(fast, slow), t
        truth = Truth(LABELS[kind](int(rng.integers(0, 4))))
        state = policy.observe(state, Observation(plan, arrived, truth, fast.output))


def same(fast: Combined, slow: Combined) -> bool:
    if isinstance(slow.output, float):
        return (fast.output, fast.used) == (slow.output, slow.used)
    return (
        (type(fast.output), fast.output, fast.used) == (type(slow.output), slow.output, slow.used)
        and abs(fast.confidence - slow.confidence) < 1e-12
        and abs(fast.agreement - slow.agreement) < 1e-12
    )


@pytest.mark.parametrize("name", ["mixture", "stacking"])
def test_other_models_than_those_of_the_state_are_combined_too(name: str) -> None:
    policy = create_policy(name)
    state = policy.init(MODELS)
    new = VersionedModel("e", 1)
    arrived = {MODELS[0]: Prediction(1), new: Prediction(1), MODELS[1]: Prediction(2)}
    assert policy.combine(state, arrived, ()).output == 1
    assert policy.combine(state, {MODELS[2]: Prediction(7)}, ()).used == (MODELS[2],)
    assert policy.combine(state, {}, MODELS).used == ()
