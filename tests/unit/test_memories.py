"""The policy `bandit`: four memories of each model's loss, and how much it explores."""

from typing import Any

import numpy as np
import pytest

from clipper.selection import Observation, Prediction, Query, Truth, create_policy
from clipper.types import VersionedModel

MODELS = tuple(VersionedModel(name, 1) for name in "abc")
POLICY: Any = create_policy("bandit")
DISCOUNTS = np.array([1.0, 0.9995, 0.998, 0.99])


class Reference:
    """A reference model in numpy: right and wrong answers by model and memory, and weights of
    memories."""

    def __init__(self) -> None:
        self.right, self.wrong = np.zeros((3, 4)), np.zeros((3, 4))
        self.weights = np.full((3, 4), 0.25)

    def expected(self) -> Any:
        longest = (self.wrong[:, :1] + 0.5) / (self.right[:, :1] + self.wrong[:, :1] + 1)
        return (self.wrong + longest) / (self.right + self.wrong + 1)

    def probabilities(self) -> Any:
        mean = (self.weights * self.expected()).sum(axis=1)
        width = 20 * np.sqrt(1 + (self.right + self.wrong)[:, 0].sum())
        p = 1 / (3 + width * (mean - mean.min()))
        best = int(mean.argmin())
        p[best] = 1 - p.sum() + p[best]
        return p

    def learn(self, model: int, loss: float) -> None:
        expected = self.expected()[model]
        found = self.weights[model] * (loss * expected + (1 - loss) * (1 - expected))
        self.weights[model] = 0.01 / 4 + 0.99 * found / found.sum()
        self.right *= DISCOUNTS
        self.wrong *= DISCOUNTS
        self.right[model] += 1 - loss
        self.wrong[model] += loss


def served(state: Any, rng: np.random.Generator, errors: tuple[float, ...]) -> tuple[Any, bool]:
    plan = POLICY.select(state, Query(uniform=float(rng.random())), MODELS)
    loss = bool(rng.random() < errors[MODELS.index(plan.models[0])])
    predictions = {plan.models[0]: Prediction(int(loss))}
    return POLICY.observe(state, Observation(plan, predictions, Truth(0))), loss


def test_it_chooses_and_learns_as_its_definition_states() -> None:
    rng, state, reference = np.random.default_rng(1), POLICY.init(MODELS), Reference()
    for _ in range(1000):
        uniform, p = float(rng.random()), reference.probabilities()
        plan = POLICY.select(state, Query(uniform=uniform), MODELS)
        model = MODELS.index(plan.models[0])
        assert plan.probabilities[0] == pytest.approx(p[model], abs=1e-9)
        loss = int(rng.random() < (0.5, 0.3, 0.2)[model])
        predictions = {plan.models[0]: Prediction(loss)}
        state = POLICY.observe(state, Observation(plan, predictions, Truth(0)))
        reference.learn(model, loss)
    assert POLICY.rank_models_desc(state, None)[0] == MODELS[2]


def test_it_leaves_a_model_that_fails_and_returns_to_it() -> None:
    rng, state = np.random.default_rng(2), POLICY.init(MODELS)
    loss: dict[str, int] = {}
    phases = {"good": (0.4, 0.3, 0.1), "bad": (0.4, 0.3, 0.9), "good again": (0.4, 0.3, 0.1)}
    for phase, errors in phases.items():
        loss[phase] = 0
        for t in range(2000):
            state, wrong = served(state, rng, errors)
            loss[phase] += wrong and t >= 1000
    assert loss["good"] < 150
    assert loss["bad"] < 400
    assert loss["good again"] < 180


def test_without_feedback_it_queries_all_alike() -> None:
    """Late feedback cannot make it settle on a model."""
    state = POLICY.init(MODELS)
    queried = [POLICY.select(state, Query(uniform=u / 300), MODELS).models[0] for u in range(300)]
    assert {queried.count(model) for model in MODELS} <= {99, 100, 101}


def test_a_new_model_is_tried() -> None:
    rng, state = np.random.default_rng(3), POLICY.init(MODELS[:2])
    for _ in range(3000):
        plan = POLICY.select(state, Query(uniform=float(rng.random())), MODELS[:2])
        predictions = {plan.models[0]: Prediction(int(rng.random() < 0.3))}
        state = POLICY.observe(state, Observation(plan, predictions, Truth(0)))
    state, found = POLICY.add_model(state, MODELS[2]), 0
    for _ in range(1000):
        plan = POLICY.select(state, Query(uniform=float(rng.random())), MODELS)
        found += plan.models[0] == MODELS[2]
        loss = plan.models[0] != MODELS[2] and rng.random() < 0.3
        predictions = {plan.models[0]: Prediction(int(loss))}
        state = POLICY.observe(state, Observation(plan, predictions, Truth(0)))
    assert found > 300


def test_a_merge_adds_what_both_servers_saw() -> None:
    rng, base = np.random.default_rng(4), POLICY.init(MODELS)
    for _ in range(50):
        base, _ = served(base, rng, (0.5, 0.3, 0.2))
    mine = base
    for _ in range(50):
        mine, _ = served(mine, rng, (0.5, 0.3, 0.2))
    merged = POLICY.merge(base, mine, base)
    assert merged.rows == pytest.approx(mine.rows, abs=1e-9)
    assert POLICY.merge(base, mine, mine).rows[:, :2].sum() == pytest.approx(150)
