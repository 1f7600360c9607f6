"""The state of a learning policy, and the interfaces of the parts that read and update it.

A state is an immutable value: one row of f64 numbers per model, the number of observations, the
labels seen, the calibration of the confidence, and the thresholds of the prediction sets. A policy
(selection/learning/learning_policy.py) holds three parts: `StateRows` changes the rows when models
come and go, `Answering` chooses models and combines their predictions, and `Learn` updates the
rows with an observation. Their columns belong to the rule (clipper_core.learning.bandit).
"""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from clipper.selection.learning.prediction_sets import INITIAL, LabelProbabilities, SetThresholds
from clipper.selection.learning.user_differences import MODELS_MAX, UserDifferences
from clipper.selection.policy import (
    Combined,
    Observation,
    Plan,
    Predictions,
    Query,
    is_number,
)
from clipper.types import UserValue, VersionedModel
from clipper_core.learning.bandit import Rule
from clipper_core.learning.policy_states import block_of, state_block

Array = NDArray[np.float64]
BINS = 10  # bins of confidence; a few hundred observations cannot fill more
DOUBT = 20.0  # observations in a bin from which on it outweighs the raw confidence
NO_USERS = UserDifferences()
LABEL_BITS = 64  # bits of the set of labels seen


class LearnedState(msgspec.Struct, frozen=True, eq=False):
    """The learned state of a policy; immutable. In a server `rows` and `sure` are read-only views
    of one block of the core.

    models: sorted by name and version.
    rows: f64[models, columns]; the columns depend on the policy.
    seen: summed weight of the observations.
    labels: bit set of the labels seen, one hashed bit per label.
    sure: f64[10, 2], per bin of confidence the weight of right answers and of all answers.
    tracked: thresholds of the prediction sets; unused without a coverage.
    differences: of users; only the state that all share has learned them.
    """

    models: tuple[VersionedModel, ...]
    rows: Array
    seen: float
    labels: int
    sure: Array
    tracked: SetThresholds = INITIAL
    differences: UserDifferences = NO_USERS

    @property
    def classes(self) -> float:
        """Estimate the number of distinct labels by linear counting (Whang et al. 1990).

        Exact for a few labels, some per cent off for fifty, at least 2 and at most 267.
        """
        free = LABEL_BITS - self.labels.bit_count()
        return max(2.0, round(LABEL_BITS * math.log(LABEL_BITS / max(free, 1))))

    def wants(self, user: str) -> bool:
        """Return whether the next observation of this user is to be added to `differences`."""
        return len(self.models) <= MODELS_MAX and self.differences.wants(user)


def on_block(state: LearnedState) -> LearnedState:
    """Return the state with its numbers in a block of the core; itself if they are in one."""
    block = block_of(state.rows)
    if (
        block is not None
        and block_of(state.sure) is block
        and block.seen == state.seen
        and block.labels == state.labels
    ):
        return state
    block = state_block(state.rows, state.sure, state.seen, state.labels)
    return msgspec.structs.replace(state, rows=block.rows, sure=block.sure)


def label_bit(label: object) -> int:
    """Return the bit of a label in `LearnedState.labels`; the same in every process."""
    if is_number(label):
        return 0
    if isinstance(label, int | np.integer):
        return 1 << (int(label) % LABEL_BITS)
    text = label if isinstance(label, bytes) else str(label).encode()
    return 1 << (zlib.crc32(text) % LABEL_BITS)


class StateRows(Protocol):
    """Maintains the rows of a state while the set of models changes. Threads: any."""

    per_model: bool  # each row depends on one model only, so that a damaged one can be reset alone

    def initial(self, k: int) -> Array:
        """Return the rows of `k` models without observations."""

    def insert(self, rows: Array, at: int) -> Array:
        """Add a model at index `at` that starts at the average of the others, without evidence."""

    def delete(self, rows: Array, at: int) -> Array:
        """Remove the model at index `at`."""

    def reorder(self, rows: Array, order: Sequence[int]) -> Array:
        """Permute the models: the new model i is the former model `order[i]`."""

    def limited(self, rows: Array, counts: float) -> Array:
        """Reduce the evidence of each row to at most so many observations, if the rows count them.
        The rows may be returned as they are."""

    def faded(self, rows: Array, share: Array) -> Array:
        """Reduce the evidence of each row to `share` of it."""

    def merged(self, base: Array, mine: Array, theirs: Array) -> Array:
        """Merge the rows of two servers that both started from `base`."""

    def parse(self, numbers: Array, k: int) -> Array:
        """Reshape stored numbers into the rows of `k` models. Raises ValueError if impossible."""

    def standing(self, state: LearnedState) -> Array:
        """Return f64[models], higher is better."""


class Answering(Protocol):
    """Chooses the models of a query and combines their predictions. Threads: any."""

    random: bool  # `select` uses query.uniform

    def select(
        self, state: LearnedState, query: Query, candidates: Sequence[VersionedModel]
    ) -> Plan:
        """Choose the models of a query."""

    def combine(
        self, state: LearnedState, arrived: Predictions, missing: Sequence[VersionedModel]
    ) -> Combined:
        """Combine predictions into an answer with a calibrated confidence."""

    def raw_confidence(
        self, state: LearnedState, arrived: Predictions, missing: Sequence[VersionedModel]
    ) -> tuple[UserValue, float]:
        """Return the output and its confidence before calibration; (None, 0) without one."""

    def probabilities(
        self, state: LearnedState, arrived: Predictions, missing: Sequence[VersionedModel]
    ) -> LabelProbabilities:
        """Return the probability of each label, given at least one usable prediction."""

    def shares(self, state: LearnedState) -> dict[VersionedModel, float]:
        """Return the share of each model in the answers, or in the queries; the sum is 1."""


# (state, observation, loss of each model that has one) -> the updated rows
Learn = Callable[[LearnedState, Observation, Mapping[VersionedModel, float]], Array]


class RuleRows:
    """One row of constant length per model, updated by a rule of the core.

    initial_row: the row of a model without observations.  counts: indices of the columns that count
    observations.  count_min: smallest value of such a count.  newcomer: the row of a model that
    joins the given rows; default the initial row.  merge: default adds both servers' differences
    to `base`.  rank: f64[models] from the rows, higher is better; default the rule's weights.
    """

    per_model = True

    def __init__(
        self,
        rule: Rule,
        initial_row: tuple[float, ...],
        *,
        counts: Sequence[int] = (),
        count_min: float = 0.0,
        newcomer: Callable[[Array], Array] | None = None,
        merge: Callable[[Array, Array, Array], Array] | None = None,
        rank: Callable[[Array], Array] | None = None,
    ) -> None:
        self.rule, self._row = rule, np.array(initial_row)
        self.count_columns, self.count_min = list(counts), count_min
        self._columns = np.array(self.count_columns, np.uint32)
        self._newcomer, self._merge, self._rank = newcomer, merge, rank

    def initial(self, k: int) -> Array:
        """Return initial rows."""
        return np.tile(self._row, (k, 1)).reshape(k, len(self._row))

    def insert(self, rows: Array, at: int) -> Array:
        """Insert a row for a new model."""
        row = self._row if self._newcomer is None else self._newcomer(rows)
        return np.insert(rows, at, row, axis=0)

    def delete(self, rows: Array, at: int) -> Array:
        """Delete a row."""
        return np.delete(rows, at, axis=0)

    def reorder(self, rows: Array, order: Sequence[int]) -> Array:
        """Permute the rows."""
        return rows[list(order)]

    def limited(self, rows: Array, counts: float) -> Array:
        """Scale the counts of rows whose largest one is above the limit."""
        if not self.count_columns or not len(rows):
            return rows
        return self.rule.limited(rows, self._columns, self.count_min, counts)

    def faded(self, rows: Array, share: Array) -> Array:
        """Scale the counts."""
        rows = rows.copy()
        for column in self.count_columns:
            rows[:, column] = self.count_min + share * (rows[:, column] - self.count_min)
        return rows

    def merged(self, base: Array, mine: Array, theirs: Array) -> Array:
        """Add both servers' differences to `base`, or call the given merge."""
        if self._merge is not None:
            return self._merge(base, mine, theirs)
        rows = mine + theirs - base
        for column in self.count_columns:
            rows[:, column] = np.maximum(rows[:, column], self.count_min)
        return rows

    def parse(self, numbers: Array, k: int) -> Array:
        """Reshape stored numbers."""
        return numbers.reshape(k, len(self._row))

    def standing(self, state: LearnedState) -> Array:
        """Return the given rank, or the rule's weights."""
        if self._rank is not None:
            return self._rank(state.rows)
        return self.rule.weights(state.rows, state.classes)


def learn_by_rule(rule: Rule) -> Learn:
    """Return the update of `rule` by losses: of the chosen model, or of all models."""

    def learn(
        state: LearnedState, observation: Observation, losses: Mapping[VersionedModel, float]
    ) -> Array:
        by_model = np.array([losses.get(model, math.nan) for model in state.models])
        plan = observation.plan
        if len(plan.models) == 1 and plan.models[0] in state.models:
            chosen, p = state.models.index(plan.models[0]), plan.probability(plan.models[0])
            return rule.learn(state.rows, state.seen, by_model, chosen, p, observation.weight)
        return rule.learn(state.rows, state.seen, by_model, weight=observation.weight)

    return learn


def share_of(evidence: Array, counts: float) -> Array:
    """Return the share of each row's evidence that is no more than so many observations."""
    return np.minimum(1.0, counts / np.maximum(evidence, 1e-300))


def calibrated(state: LearnedState, raw: float) -> float:
    """Return the share of answers with this raw confidence, 0 to 1, that were right."""
    right, count = state.sure[bin_of(raw)]
    return float((right + DOUBT * raw) / (count + DOUBT))


def bin_of(confidence: float) -> int:
    """Return the bin of a confidence; an edge, such as one half, belongs to the bin above."""
    return min(int(confidence * BINS + 1e-9), BINS - 1)


def log_mean(rows: Array) -> Array:
    """Return the logarithm of the mean of the weights whose logarithms are `rows`."""
    if not len(rows):
        return np.zeros(1)
    high: Array = rows.max(axis=0)
    return np.asarray(high + np.log(np.exp(rows - high).mean(axis=0)))


def row_of(state: LearnedState, model: VersionedModel) -> Array | None:
    """Return the row of a model; None if the state does not have it."""
    return state.rows[state.models.index(model)] if model in state.models else None
