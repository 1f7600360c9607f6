"""Checks what `correct=` and `score=` teach each policy, in worlds of which only the answers are
rated."""

import random
from collections.abc import Sequence

import numpy as np
import pytest

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
from clipper.selection.learning.batch_learning import native_update_of, observe
from clipper.selection.learning.learned_state import LearnedState
from clipper.selection.policies.stateless_policy import learns
from clipper.types import VersionedModel

A, B, C = (VersionedModel(name, 1) for name in "abc")
MODELS = (A, B, C)
# docs/selection.md: it learns a blend of numbers, from labels
FROM_LABELS = {"ridge"}
LEARNING = [name for name in POLICIES if learns(create_policy(name)) and name not in FROM_LABELS]
every_policy = pytest.mark.parametrize("name", LEARNING)


class World:
    """Queries with one right label of `labels`. accuracy: of each model; errors are independent,
    unless `alike`, when the models after the first always agree."""

    def __init__(
        self, seed: int, accuracy: Sequence[float], labels: int = 10, alike: bool = False
    ) -> None:
        self._draw, self._accuracy = random.Random(seed), accuracy
        self._labels, self._alike = labels, alike

    def query(self) -> tuple[int, dict[VersionedModel, Prediction]]:
        draw = self._draw
        label = draw.randrange(self._labels)
        wrong = [each for each in range(self._labels) if each != label]
        said = [label if draw.random() < p else draw.choice(wrong) for p in self._accuracy]
        if self._alike:
            said[1:] = said[1:2] * (len(said) - 1)
        return label, {model: Prediction(one) for model, one in zip(MODELS, said, strict=True)}

    def play(self, policy: Policy, queries: int, graded: bool = False) -> tuple[float, object]:
        """Return the share of right answers in the last third of the queries, and the last state.
        Each answer is rated: right or wrong, or, if `graded`, by 0.9 or 0.1."""
        state = policy.init(MODELS)
        right = 0
        native = native_update_of(policy)
        for turn in range(queries):
            label, predictions = self.query()
            plan = policy.select(state, Query(uniform=self._draw.random()), MODELS)
            arrived = {model: predictions[model] for model in plan.models}
            answer = policy.combine(state, arrived, ()).output
            right += answer == label and turn >= queries * 2 // 3
            score = float(answer == label)
            truth = Truth(score=0.1 + 0.8 * score if graded else score)
            state = observe(policy, state, Observation(plan, arrived, truth, answer), native)
        return right / (queries - queries * 2 // 3), state


@every_policy
@pytest.mark.parametrize("labels", [2, 10])
@pytest.mark.parametrize("graded", [False, True])
def test_a_model_that_is_right_wins_against_two_that_agree(
    name: str, labels: int, graded: bool
) -> None:
    """The majority is always wrong; nothing but ratings of the answers shows it."""
    policy = create_policy(name)
    turns = 3000 if graded or policy.chance or name == "kl_ucb" else 600
    found, _ = World(1, (1.0, 0.0, 0.0), labels, alike=True).play(policy, turns, graded)
    assert found > 0.9


@every_policy
@pytest.mark.parametrize("accuracy", [(0.95, 0.6, 0.6), (0.6, 0.6, 0.95), (0.7, 0.5, 0.5)])
def test_the_answers_become_as_good_as_the_best_model(
    name: str, accuracy: tuple[float, ...]
) -> None:
    found, _ = World(2, accuracy).play(create_policy(name), 4000)
    assert found > max(accuracy) - 0.06


def test_ridge_learns_from_labels_only() -> None:
    policy = create_policy("ridge")
    arrived = {A: Prediction(1.0), B: Prediction(2.0)}
    state = policy.init((A, B))
    after = policy.observe(state, Observation(Plan((A, B)), arrived, Truth(score=0.0), 1.5))
    assert np.array_equal(after.rows, state.rows)


@pytest.mark.parametrize("name", ["exp4", "stacking", "logodds", "mixture", "thompson"])
def test_a_score_of_one_is_the_label_that_was_answered(name: str) -> None:
    policy, draw = create_policy(name), random.Random(3)
    by_score = by_label = policy.init(MODELS)
    for _ in range(100):
        arrived = {model: Prediction(draw.randrange(3)) for model in MODELS}
        answer = draw.choice([*arrived.values()]).output
        for truth in (Truth(answer), Truth(score=1.0)):
            seen = Observation(Plan(MODELS), arrived, truth, answer)
            if truth.known:
                by_label = policy.observe(by_label, seen)
            else:
                by_score = policy.observe(by_score, seen)
    assert np.array_equal(by_score.rows, by_label.rows)
    assert by_score.labels == by_label.labels


def test_stacking_takes_the_gradient_of_the_score() -> None:
    """Compare with numerical derivatives of -s ln(p) - (1 - s) ln(1 - p)."""
    rng = np.random.default_rng(4)
    policy = create_policy("stacking(rate=1.0)")
    for _ in range(200):
        votes = [int(v) for v in rng.integers(0, 4, 3)]
        w, s = rng.uniform(2, 3, 3), float(rng.choice([0.0, 0.3, 0.9]))
        answer = votes[0]
        state = policy.init(MODELS)
        state = LearnedState(state.models, w[:, None].copy(), 0.0, (1 << 10) - 1, state.sure)
        seen = Observation(
            Plan(MODELS),
            {model: Prediction(vote) for model, vote in zip(MODELS, votes, strict=True)},
            Truth(score=s),
            answer,
        )
        after = policy.observe(state, seen).rows[:, 0]

        def cost(w: np.ndarray, votes=votes, answer=answer, s=s, classes=state.classes) -> float:
            scores = {v: sum(w[i] for i in range(3) if votes[i] == v) for v in votes}
            total = sum(np.exp(x) for x in scores.values()) + classes - len(scores)
            p = np.exp(scores[answer]) / total
            return float(-s * np.log(p) - (1 - s) * np.log(1 - p))

        slope = [(cost(w + d) - cost(w - d)) / 2e-5 for d in 1e-5 * np.eye(3)]
        assert np.allclose(after, np.clip(w - slope, 0, 20), atol=1e-6)
