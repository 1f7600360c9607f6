"""The policy for models that predict numbers: it learns how to blend them.

Where `exp4` weighs models by their own losses, a regression uses how their errors go together: two
models that err alike count as one, one that is always too high is corrected, and of two that err to
opposite sides both are wanted.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from clipper.selection.bandits import within
from clipper.selection.learning_policy import CARRIED, Array, LearnedState, LearningPolicy
from clipper.selection.policy import (
    NOTHING,
    Combined,
    Observation,
    Plan,
    Predictions,
    Query,
    is_number,
)
from clipper.selection.prediction_sets import Chances
from clipper.selection.votes import (
    Votes,
    combine,
    heaviest_kind,
    in_order,
    label_key,
    scores,
    usable,
)
from clipper.types import VersionedModel
from clipper_core.learning.linear import Blend

MODELS_MAX = 64
SPREAD_COUNTS = (
    5.0  # observations that the models' own spread counts as, beside the errors that were seen
)


class Ridge(LearningPolicy):
    """All models are asked; the answer is the blend of their numbers, and a constant, that would
    have been nearest so far.

    The weights begin at the mean and leave it as labels show how. Arrays share them across their
    elements. A model that was not heard is taken to have said what the others let expect: its
    running mean, when they tell nothing. Confidence: m / (m + s) of the answer's size m and the
    standard deviation s of the errors so far, times the share of models heard. Labels that are no
    numbers are voted on, each vote alike; numbers of more than 64 models are averaged.

    strength: of the pull to the mean, in observations.  discount: of what was known, an
    observation; .999 forgets half in 700. Cost: all models a query, K^3 / 3 operations: .7 us in
    the core for 5 models.  Use: numbers and arrays.  Source: Hoerl and Kennard 1970, drawn to equal
    weights as in Diebold and Shin 2019.
    """

    name = "ridge"
    fresh = ()

    def __init__(self, strength: float = 2.0, discount: float = 0.999) -> None:
        self.blend = Blend(
            ridge=within("strength", strength, 0.0, 1e6),
            discount=within("discount", discount, 0.5, 1.0),
        )

    def select(
        self, state: LearnedState, query: Query, candidates: Sequence[VersionedModel]
    ) -> Plan:
        return Plan(in_order(candidates))

    def combine(
        self, state: LearnedState, arrived: Predictions, missing: Sequence[VersionedModel]
    ) -> Combined:
        found = self._combined(state, arrived, missing)
        return self.with_set(state, found, lambda: self.chances(state, arrived, missing))

    def _combined(
        self, state: LearnedState, arrived: Predictions, missing: Sequence[VersionedModel]
    ) -> Combined:
        votes, asked = usable(arrived), len({*arrived, *missing})
        if not votes:
            return NOTHING
        even = dict.fromkeys(votes, 1.0)
        kind, chosen = heaviest_kind(votes, even)
        outputs = None if kind == "label" else self._outputs(state, chosen)
        if outputs is None:
            return combine(votes, even, asked)
        answer, left, scatter = self.blend.blended(state.rows, outputs)
        size = float(np.abs(answer).mean())
        if not math.isfinite(size + scatter):
            return combine(votes, even, asked)
        count = float(state.rows[-1, 1])
        share = count / (count + SPREAD_COUNTS)
        spread = math.hypot(math.sqrt(share) * left, math.sqrt(1.0 - share) * scatter)
        agreement = size / (size + scatter) if size > 0 else 1.0
        sure = size / (size + spread) if size > 0 else float(spread == 0.0)
        first = next(iter(chosen.values())).output
        shaped: object = (
            float(answer[0])
            if kind == "number"
            else answer.reshape(np.shape(first)).astype(_float_of(chosen))
        )
        return Combined(shaped, min(sure * len(chosen) / asked, 1.0), tuple(chosen), agreement)

    def _outputs(self, state: LearnedState, votes: Predictions) -> Array | None:
        """f64[elements, models]; None when the state knows none of them, or not how to."""
        if not any(model in votes for model in state.models) or len(state.models) > MODELS_MAX:
            return None
        first = next(iter(votes.values())).output
        if not isinstance(first, np.ndarray):
            return np.array(
                [[votes[m].output if m in votes else math.nan for m in state.models]], np.float64
            )
        heard = {
            model: np.asarray(vote.output, np.float64).reshape(-1) for model, vote in votes.items()
        }
        size = len(next(iter(heard.values())))
        if size == 0:
            return None
        nothing = np.full(size, np.nan)
        return np.stack([heard.get(model, nothing) for model in state.models], axis=1)

    def _learned(
        self, state: LearnedState, observation: Observation, told: Mapping[VersionedModel, float]
    ) -> Array:
        label = observation.truth.label
        if not observation.truth.known or isinstance(label, str | bytes):
            return state.rows
        votes = usable({model: observation.predictions[model] for model in told})
        kind, chosen = heaviest_kind(votes, dict.fromkeys(votes, 1.0))
        outputs = None if kind == "label" else self._outputs(state, chosen)
        if outputs is None or np.shape(label) != (() if kind == "number" else kind):
            return state.rows
        return self.blend.learn(
            state.rows, outputs, np.asarray(label, np.float64).reshape(-1), observation.weight
        )

    def raw_confidence(
        self, state: LearnedState, heard: Predictions, missing: Sequence[VersionedModel]
    ) -> tuple[object, float]:
        found = self._combined(state, heard, missing)
        return (
            (found.output, 0.0 if is_number(found.output) else found.confidence)
            if found.used
            else (None, 0.0)
        )

    def chances(
        self, state: LearnedState, heard: Predictions, missing: Sequence[VersionedModel]
    ) -> Chances:
        votes = usable(heard)
        behind = scores(votes, dict.fromkeys(votes, 1.0 / len(votes)))
        return Chances(
            {
                label_key(vote.output): (vote.output, behind[label_key(vote.output)])
                for vote in votes.values()
            },
            0.0,
        )

    def portions(self, state: LearnedState) -> dict[VersionedModel, float]:
        """By the size of the weights."""
        if not 0 < len(state.models) <= MODELS_MAX:
            return dict.fromkeys(state.models, 1.0 / max(len(state.models), 1))
        weights = np.abs(self.blend.weights(state.rows)[0][:-1])
        return dict(zip(state.models, (weights / (weights.sum() or 1.0)).tolist(), strict=True))

    # -- rows: k models and the label by mean, count, and sums of products with each of them

    def _fresh_rows(self, k: int) -> Array:
        return np.zeros((k + 1, k + 3))

    def _evidence(self, rows: Array) -> Array | None:
        return rows[:, 1]

    def _faded(self, rows: Array, share: Array) -> Array:
        """Counts and sums by the least of the shares: they speak of the models together."""
        rows = rows.copy()
        rows[:, 1:] *= float(share.min(initial=1.0))
        return rows

    def add_model(self, state: LearnedState, model: VersionedModel) -> LearnedState:
        """The newcomer stands as one who always said the mean of the others."""
        if model in state.models:
            return state
        models, k = in_order((*state.models, model)), len(state.models)
        move = np.insert(np.eye(k + 1), models.index(model), [*[1.0 / max(k, 1)] * k, 0.0], axis=0)
        return _moved(state, models, move)

    def remove_model(self, state: LearnedState, model: VersionedModel) -> LearnedState:
        if model not in state.models:
            return state
        move = np.delete(np.eye(len(state.models) + 1), state.models.index(model), axis=0)
        return _moved(state, tuple(other for other in state.models if other != model), move)

    def update_model_version(
        self, state: LearnedState, old: VersionedModel, new: VersionedModel
    ) -> LearnedState:
        if old not in state.models or new in state.models:
            return state
        faded = LearnedState(
            state.models,
            self._faded(state.rows, np.array([CARRIED])),
            state.seen,
            state.labels,
            state.sure,
            state.tracked,
        )
        models = [new if model == old else model for model in state.models]
        ordered = in_order(models)
        order = [*(models.index(model) for model in ordered), len(models)]
        return _moved(faded, ordered, np.eye(len(models) + 1)[order])

    def _merged(self, base: Array, mine: Array, theirs: Array) -> Array:
        """By sums around zero, which add up."""
        (n0, s0, p0), (n1, s1, p1), (n2, s2, p2) = map(_sums, (base, mine, theirs))
        count = n1 + n2 - n0
        if count <= 0:
            return mine
        mean = (s1 + s2 - s0) / count
        products = p1 + p2 - p0 - count * np.outer(mean, mean)
        at = np.arange(len(mean))
        products[at, at] = np.maximum(products[at, at], 0.0)
        return np.column_stack([mean, np.full(len(mean), count), products])

    def _shaped(self, numbers: Array, k: int) -> Array:
        return numbers.reshape(k + 1, k + 3)

    def standing(self, state: LearnedState) -> Array:
        """Less the mean square of each model's own errors."""
        mean, count, products = (
            state.rows[:-1, 0],
            max(float(state.rows[-1, 1]), 1.0),
            state.rows[:, 2:],
        )
        around = np.diag(products)[:-1] - 2 * products[:-1, -1] + products[-1, -1]
        return np.asarray(-(around / count + (mean - state.rows[-1, 0]) ** 2))


def _moved(state: LearnedState, models: tuple[VersionedModel, ...], move: Array) -> LearnedState:
    """The state of `models`, each of which says what a row of `move` makes of the former ones, the
    label the last."""
    count = np.full(len(move), state.rows[-1, 1])
    rows = np.column_stack([move @ state.rows[:, 0], count, move @ state.rows[:, 2:] @ move.T])
    return LearnedState(
        models, np.ascontiguousarray(rows), state.seen, state.labels, state.sure, state.tracked
    )


def _sums(rows: Array) -> tuple[float, Array, Array]:
    mean, count = rows[:, 0], float(rows[-1, 1])
    return count, count * mean, rows[:, 2:] + count * np.outer(mean, mean)


def _float_of(votes: Votes) -> "np.dtype[Any]":
    """The dtype of an answer: the outputs' own if they are floats, else f64."""
    dtype = np.result_type(*(np.asarray(vote.output).dtype for vote in votes.values()))
    return dtype if dtype.kind == "f" else np.dtype(np.float64)
