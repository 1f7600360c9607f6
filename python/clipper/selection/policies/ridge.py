"""The policy for models that predict numbers: ridge regression on their predictions.

`exp4` weights each model by its own losses. A regression also uses how the errors are correlated:
two models with the same errors count as one, a constant bias is corrected, and two models that err
to opposite sides are both used.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from clipper.selection.learning.learned_state import Array, LearnedState, share_of
from clipper.selection.learning.learning_policy import LearningPolicy
from clipper.selection.learning.prediction_sets import LabelProbabilities
from clipper.selection.policies.bandits import check_range
from clipper.selection.policy import (
    NO_ANSWER,
    Combined,
    Observation,
    Plan,
    Predictions,
    Query,
    is_number,
)
from clipper.selection.votes import (
    Votes,
    combine,
    heaviest_kind,
    label_key,
    label_weights,
    sorted_models,
    usable,
)
from clipper.types import UserValue, VersionedModel
from clipper_core.learning.linear import Blend

MODELS_MAX = 64
SPREAD_COUNTS = 5.0  # observations that the spread of the models counts as, beside observed errors


class Ridge(LearningPolicy):
    """Ask all models and answer with the linear blend, and a constant, that fitted best so far.

    The weights start at the mean of the models and move as labels show. Arrays share one set of
    weights across their elements. A missing number is replaced by what the others let expect, or
    by the model's running mean. Labels that are not numbers are put to an equal vote; the numbers
    of more than 64 models are averaged.

    The confidence is m / (m + s) times the share of models that arrived, where m is the size of
    the answer and s the standard deviation of past errors.

    strength: of the pull towards the mean, in observations.
    discount: of what was learned, per observation; 0.999 forgets half in 700 observations.

    State: f64[K + 1, K + 3], see `BlendRows`.
    Cost: K^3 / 3 operations per query; 0.7 us for 5 models.
    Regret: O(K ln T) in squared loss without a discount (Vovk 2001, Azoury and Warmuth 2001).
    Source: Hoerl and Kennard 1970, shrunk to equal weights as in Diebold and Shin 2019.
    """

    name = "ridge"

    def __init__(self, strength: float = 2.0, discount: float = 0.999) -> None:
        self.strength = check_range("strength", strength, 0.0, 1e6)
        blend = Blend(
            ridge=self.strength,
            discount=check_range("discount", discount, 0.5, 1.0),
        )
        answering = BlendedNumbers(blend)
        super().__init__(BlendRows(), answering, answering.learn)


class BlendedNumbers:
    """Queries all models, blends their numbers, and updates the regression. Threads: any."""

    random = False

    def __init__(self, blend: Blend) -> None:
        self._blend = blend

    def select(
        self, state: LearnedState, query: Query, candidates: Sequence[VersionedModel]
    ) -> Plan:
        """Ask all candidates."""
        return Plan(sorted_models(candidates))

    def combine(
        self, state: LearnedState, arrived: Predictions, missing: Sequence[VersionedModel]
    ) -> Combined:
        """Blend the numbers of the largest kind; vote on labels."""
        if 0 < len(state.models) <= MODELS_MAX:
            numbers = self._blend.blended_numbers(state.rows, state.models, arrived)
            if numbers is not None and math.isfinite(numbers[0] + numbers[2]):
                number, residual, scatter, used = numbers
                size = abs(number)
                agreement, sure = _confidences(state, size, residual, scatter)
                share = len(used) / len({*arrived, *missing})
                return Combined(number, min(sure * share, 1.0), used, agreement)
        votes, selected = usable(arrived), len({*arrived, *missing})
        if not votes:
            return NO_ANSWER
        even = dict.fromkeys(votes, 1.0)
        kind, chosen = heaviest_kind(votes, even)
        outputs = None if kind == "label" else _outputs(state, chosen)
        if outputs is None:
            return combine(votes, even, selected)
        answer, residual, scatter = self._blend.blended(state.rows, outputs)
        size = float(np.abs(answer).mean())
        if not math.isfinite(size + scatter):
            return combine(votes, even, selected)
        agreement, sure = _confidences(state, size, residual, scatter)
        first = next(iter(chosen.values())).output
        output: object = (
            float(answer[0])
            if kind == "number"
            else answer.reshape(np.shape(first)).astype(_float_of(chosen))
        )
        return Combined(output, min(sure * len(chosen) / selected, 1.0), tuple(chosen), agreement)

    def raw_confidence(
        self, state: LearnedState, arrived: Predictions, missing: Sequence[VersionedModel]
    ) -> tuple[UserValue, float]:
        """Return the answer; the raw confidence of a number is 0."""
        found = self.combine(state, arrived, missing)
        if not found.used:
            return None, 0.0
        return found.output, 0.0 if is_number(found.output) else found.confidence

    def probabilities(
        self, state: LearnedState, arrived: Predictions, missing: Sequence[VersionedModel]
    ) -> LabelProbabilities:
        """Return each label's share of the votes."""
        votes = usable(arrived)
        shares = label_weights(votes, dict.fromkeys(votes, 1.0 / len(votes)))
        outputs = {label_key(vote.output): vote.output for vote in votes.values()}
        return LabelProbabilities({key: (outputs[key], shares[key]) for key in outputs}, 0.0)

    def shares(self, state: LearnedState) -> dict[VersionedModel, float]:
        """Return each model's share of the absolute weights."""
        if not 0 < len(state.models) <= MODELS_MAX:
            return dict.fromkeys(state.models, 1.0 / max(len(state.models), 1))
        weights = np.abs(self._blend.weights(state.rows)[0][:-1])
        return dict(zip(state.models, (weights / (weights.sum() or 1.0)).tolist(), strict=True))

    def learn(
        self, state: LearnedState, observation: Observation, losses: Mapping[VersionedModel, float]
    ) -> Array:
        """Update the regression with a number, or an array, as label; ignore other labels."""
        label = observation.truth.label
        if not observation.truth.known or isinstance(label, str | bytes):
            return state.rows
        votes = usable({model: observation.predictions[model] for model in losses})
        kind, chosen = heaviest_kind(votes, dict.fromkeys(votes, 1.0))
        outputs = None if kind == "label" else _outputs(state, chosen)
        if outputs is None or np.shape(label) != (() if kind == "number" else kind):
            return state.rows
        target = np.asarray(label, np.float64).reshape(-1)
        return self._blend.learn(state.rows, outputs, target, observation.weight)


class BlendRows:
    """The sufficient statistics of a regression on K models: f64[K + 1, K + 3].

    Row i is a model, the last row the label. Columns: mean, weight of the observations, then the
    centred sums of products with each model and with the label. Threads: any.
    """

    per_model = False

    def initial(self, k: int) -> Array:
        """Return zeros."""
        return np.zeros((k + 1, k + 3))

    def insert(self, rows: Array, at: int) -> Array:
        """Add a model that is taken to have predicted the mean of the others."""
        k = len(rows) - 1
        mean = [*[1.0 / max(k, 1)] * k, 0.0]
        return _transformed(rows, np.insert(np.eye(k + 1), at, mean, axis=0))

    def delete(self, rows: Array, at: int) -> Array:
        """Remove a model from the statistics."""
        return _transformed(rows, np.delete(np.eye(len(rows)), at, axis=0))

    def reorder(self, rows: Array, order: Sequence[int]) -> Array:
        """Permute the models; the label stays last."""
        return _transformed(rows, np.eye(len(rows))[[*order, len(order)]])

    def limited(self, rows: Array, counts: float) -> Array:
        """Fade all rows if the weight of the observations is larger."""
        return self.faded(rows, share_of(rows[:, 1], counts))

    def faded(self, rows: Array, share: Array) -> Array:
        """Reduce all evidence by the smallest share: the statistics are joint."""
        rows = rows.copy()
        rows[:, 1:] *= float(share.min(initial=1.0))
        return rows

    def merged(self, base: Array, mine: Array, theirs: Array) -> Array:
        """Add the sums around zero, then centre them again."""
        (n0, s0, p0), (n1, s1, p1), (n2, s2, p2) = map(_sums, (base, mine, theirs))
        count = n1 + n2 - n0
        if count <= 0:
            return mine
        mean = (s1 + s2 - s0) / count
        products = p1 + p2 - p0 - count * np.outer(mean, mean)
        at = np.arange(len(mean))
        products[at, at] = np.maximum(products[at, at], 0.0)
        return np.column_stack([mean, np.full(len(mean), count), products])

    def parse(self, numbers: Array, k: int) -> Array:
        """Reshape stored numbers."""
        return numbers.reshape(k + 1, k + 3)

    def standing(self, state: LearnedState) -> Array:
        """Return the negative mean squared error of each model."""
        rows = state.rows
        mean, count, products = rows[:-1, 0], max(float(rows[-1, 1]), 1.0), rows[:, 2:]
        around = np.diag(products)[:-1] - 2 * products[:-1, -1] + products[-1, -1]
        return np.asarray(-(around / count + (mean - rows[-1, 0]) ** 2))


def _confidences(
    state: LearnedState, size: float, residual: float, scatter: float
) -> tuple[float, float]:
    """Return the agreement of the models, and the confidence when all have arrived.

    size: of the answer.  residual: of past errors.  scatter: of the outputs around their mean.
    """
    count = state.rows.item(-1, 1)
    share = count / (count + SPREAD_COUNTS)
    spread = math.hypot(math.sqrt(share) * residual, math.sqrt(1.0 - share) * scatter)
    if size == 0:
        return 1.0, float(spread == 0.0)
    return size / (size + scatter), size / (size + spread)


def _outputs(state: LearnedState, votes: Predictions) -> Array | None:
    """Return f64[elements, models], NaN for a missing model; None if the state cannot use them."""
    if not any(model in votes for model in state.models) or len(state.models) > MODELS_MAX:
        return None
    first = next(iter(votes.values())).output
    if not isinstance(first, np.ndarray):
        return np.array(
            [[votes[m].output if m in votes else math.nan for m in state.models]], np.float64
        )
    flat = {model: np.asarray(vote.output, np.float64).reshape(-1) for model, vote in votes.items()}
    size = len(next(iter(flat.values())))
    if size == 0:
        return None
    nothing = np.full(size, np.nan)
    return np.stack([flat.get(model, nothing) for model in state.models], axis=1)


def _transformed(rows: Array, move: Array) -> Array:
    """Return the statistics of the linear combinations in `move`: f64[new rows, old rows]."""
    count = np.full(len(move), rows[-1, 1])
    moved = np.column_stack([move @ rows[:, 0], count, move @ rows[:, 2:] @ move.T])
    return np.ascontiguousarray(moved)


def _sums(rows: Array) -> tuple[float, Array, Array]:
    mean, count = rows[:, 0], float(rows[-1, 1])
    return count, count * mean, rows[:, 2:] + count * np.outer(mean, mean)


def _float_of(votes: Votes) -> "np.dtype":
    """Return the outputs' own dtype if it is a float, else f64."""
    dtype = np.result_type(*(np.asarray(vote.output).dtype for vote in votes.values()))
    return dtype if dtype.kind == "f" else np.dtype(np.float64)
