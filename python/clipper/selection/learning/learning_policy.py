"""Policies that learn: calibration, prediction sets, changes of models, merging and storage.

The named policies (bandits, contextual, experts, ridge) derive from `LearningPolicy`
and only choose its parts.
"""

import copy
import math
import zlib
from collections.abc import Sequence
from typing import Self

import msgspec
import numpy as np

from clipper.selection.learning import prediction_sets
from clipper.selection.learning.learned_state import (
    BINS,
    NO_USERS,
    Answering,
    Array,
    Learn,
    LearnedState,
    RuleRows,
    StateRows,
    bin_of,
    label_bit,
)
from clipper.selection.learning.prediction_sets import INITIAL, SetThresholds
from clipper.selection.learning.user_differences import UserDifferences
from clipper.selection.model_changes import with_models
from clipper.selection.policy import (
    Combined,
    Observation,
    Plan,
    Policy,
    Predictions,
    Query,
    State,
    agrees,
    is_number,
    losses,
)
from clipper.selection.votes import label_key, sorted_models
from clipper.types import InputType, VersionedModel
from clipper_core.learning.bandit import Rule
from clipper_core.learning.first_states import FirstStates

_replace = msgspec.structs.replace

FADE = 0.998  # discount of a bin for each observation in it, so that calibration follows a drift
CARRIED = 0.25  # share of a model's evidence that its new version keeps


class _Stored(msgspec.Struct, array_like=True):
    """The stored form of a state, encoded as a MessagePack array."""

    policy: str
    schema: int
    models: tuple[VersionedModel, ...]
    rows: bytes
    seen: float
    labels: int
    sure: bytes
    tracked: SetThresholds = INITIAL
    differences: UserDifferences = NO_USERS


class LearningPolicy(Policy):
    """The base of all policies that learn. Threads: any.

    It is the one level between the interface and the named policies: the stored form, calibration
    and the migration of states are the same for all of them, and their names, settings and
    docstrings are what users see.

    rows, answering, learn: the parts (selection/learning/learned_state.py).
    rule: the rule of the core that also learns batches natively; None: Python learns them.
    coverage: share of the prediction sets that must hold the truth; None: no sets.
    """

    schema = 2
    coverage: float | None = None

    def __init__(
        self, rows: StateRows, answering: Answering, learn: Learn, rule: Rule | None = None
    ) -> None:
        self.rows, self.answering, self.rule = rows, answering, rule
        self.chance = answering.random
        self._learn = learn

    def with_coverage(self, coverage: float) -> Self:
        """Return a copy that makes prediction sets with this coverage, 0.5 to 0.999."""
        found = copy.copy(self)
        found.coverage = prediction_sets.check_coverage(coverage)
        return found

    # -- changes of models

    def init(
        self, models: Sequence[VersionedModel], prior: LearnedState | None = None
    ) -> LearnedState:
        """Return the initial state; with a prior, its rows, as so many observations as the
        differences between users suggest."""
        if prior is None:
            ordered = sorted_models(models)
            rows = self.rows.initial(len(ordered))
            return LearnedState(ordered, rows, 0.0, 0, np.zeros((BINS, 2)))
        if prior.models != models:
            prior = self.fitted(prior, sorted_models(models))
        rows = self.rows.limited(prior.rows, prior.differences.prior_counts)
        return LearnedState(prior.models, rows, 0.0, prior.labels, prior.sure, prior.tracked)

    def first_states(self, models: tuple[VersionedModel, ...]) -> FirstStates:
        """Return what makes the state of users without an observation, as `init` does."""
        rows = self.rows
        if type(rows) is not RuleRows or type(self).init is not LearningPolicy.init:
            return FirstStates(models, self.init, LearnedState)
        return FirstStates(
            models, self.init, LearnedState, rows.rule, rows.count_columns, rows.count_min
        )

    def add_model(self, state: LearnedState, model: VersionedModel) -> LearnedState:
        """Add a model at the average of the others, without evidence."""
        if model in state.models:
            return state
        models = sorted_models((*state.models, model))
        rows = self.rows.insert(state.rows, models.index(model))
        return _replace(state, models=models, rows=rows, differences=NO_USERS)

    def remove_model(self, state: LearnedState, model: VersionedModel) -> LearnedState:
        """Remove a model and its row."""
        if model not in state.models:
            return state
        rows = self.rows.delete(state.rows, state.models.index(model))
        left = tuple(m for m in state.models if m != model)
        return _replace(state, models=left, rows=rows, differences=NO_USERS)

    def update_model_version(
        self, state: LearnedState, old: VersionedModel, new: VersionedModel
    ) -> LearnedState:
        """Give the row of `old` to `new`, with a quarter of its evidence."""
        if old not in state.models or new in state.models:
            return state
        share = np.array([CARRIED if model == old else 1.0 for model in state.models])
        models = [new if model == old else model for model in state.models]
        ordered = sorted_models(models)
        rows = self.rows.faded(state.rows, share)
        rows = self.rows.reorder(rows, [models.index(model) for model in ordered])
        return _replace(state, models=ordered, rows=rows, differences=NO_USERS)

    def fitted(self, state: LearnedState, models: Sequence[VersionedModel]) -> LearnedState:
        """Convert a state to exactly these models (selection/model_changes.py)."""
        found: LearnedState = with_models(self, state, state.models, models)
        return found

    # -- answering

    def select(
        self, state: LearnedState, query: Query, candidates: Sequence[VersionedModel]
    ) -> Plan:
        """Choose the models of a query."""
        return self.answering.select(state, query, candidates)

    def combine(
        self, state: LearnedState, arrived: Predictions, missing: Sequence[VersionedModel]
    ) -> Combined:
        """Return the answer with its calibrated confidence and, with a coverage, its set."""
        found = self.answering.combine(state, arrived, missing)
        if self.coverage is None or not found.used:
            return found
        if is_number(found.output):
            held = prediction_sets.interval(state.tracked, found.output)
        else:
            probabilities = self.answering.probabilities(state, arrived, missing)
            held = prediction_sets.label_set(state.tracked, probabilities, found.output)
        return _replace(found, set=held)

    def standing(self, state: LearnedState) -> Array:
        """Return f64[models]: the score of each model of the state, higher is better."""
        return self.rows.standing(state)

    def portions(self, state: LearnedState) -> dict[VersionedModel, float]:
        """Return each model's share of the answer, or of the queries; the sum is 1."""
        return self.answering.shares(state)

    def rank_models_desc(self, state: LearnedState, user: str | None) -> tuple[VersionedModel, ...]:
        """Return the models by their standing, best first."""
        if not state.models:
            return ()
        order = np.argsort(-self.standing(state), kind="stable")
        return tuple(state.models[i] for i in order)

    def accepts_input_type(self, input: InputType) -> bool:
        """Accept every input type."""
        return True

    def in_context(self, state: LearnedState, context: Sequence[float]) -> LearnedState:
        """Return the state to combine the predictions of a query with this context by."""
        return state

    # -- learning

    def observe(self, state: LearnedState, observation: Observation) -> LearnedState:
        """Return the state after one observation.

        `state` itself is returned when the observation is about none of its models, or
        when its weight is not a positive finite number. Rows that are not finite are reset first.
        """
        if not (np.isfinite(state.rows).all() and np.isfinite(state.sure).all()):
            state = self._repaired(state)
        by_model = losses(observation)
        known = {model: by_model[model] for model in state.models if model in by_model}
        weight, truth = observation.weight, observation.truth
        if not known or not math.isfinite(weight) or weight <= 0:
            return state
        rows = self._learn(state, observation, known)
        label = observation.answer if truth.score == 1.0 else truth.label
        has_label = truth.known or (truth.score == 1.0 and not is_number(label))
        labels = state.labels | label_bit(label) if has_label else state.labels
        sure, tracked = self._calibration_after(state, observation)
        seen, differences = state.seen + weight, state.differences
        return LearnedState(state.models, rows, seen, labels, sure, tracked, differences)

    def with_user(self, state: LearnedState, user: str, observation: Observation) -> LearnedState:
        """Return the shared state, with an observation of this user in its differences."""
        by_model = losses(observation)
        lost = [by_model.get(model) for model in state.models]
        if lost.count(None) == len(lost):
            return state
        return _replace(state, differences=state.differences.with_losses(user, lost))

    def initial_like(self, state: LearnedState) -> LearnedState:
        """Return an initial state, if possible with rows as long as those of `state`."""
        return self.init(state.models)

    def _repaired(self, state: LearnedState) -> LearnedState:
        """Reset what is not finite; sound rows are kept where each belongs to one model."""
        initial = self.initial_like(state)
        if not self.rows.per_model or initial.rows.shape != state.rows.shape:
            return initial
        rows = state.rows.copy()
        broken = ~np.isfinite(rows).all(axis=1)
        rows[broken] = initial.rows[broken]
        sure = np.where(np.isfinite(state.sure), state.sure, 0.0)
        return _replace(state, rows=rows, sure=sure)

    def _calibration_after(
        self, state: LearnedState, observation: Observation
    ) -> tuple[Array, SetThresholds]:
        """Return the bins of confidence and the thresholds of the sets after one observation."""
        plan, truth = observation.plan, observation.truth
        state = self.in_context(state, plan.features)
        sure, tracked = state.sure, state.tracked
        arrived = {
            model: observation.predictions[model]
            for model in plan.models
            if model in observation.predictions
        }
        if not arrived:
            return sure, tracked
        missing = [model for model in plan.models if model not in arrived]
        output, raw = self.answering.raw_confidence(state, arrived, missing)
        if output is None:
            return sure, tracked
        if is_number(output):
            if self.coverage is not None and truth.known:
                tracked = prediction_sets.update_with_number(
                    tracked, self.coverage, output, truth.label
                )
            return sure, tracked
        if self.coverage is not None and truth.known:
            probabilities = self.answering.probabilities(state, arrived, missing)
            tracked = prediction_sets.update_with_label(
                tracked, self.coverage, probabilities, output, truth.label
            )
        right = _rightness(output, observation)
        if right is not None:
            sure = sure.copy()
            sure[bin_of(raw)] = FADE * sure[bin_of(raw)] + (right, 1.0)
        return sure, tracked

    def merge(self, base: LearnedState, mine: LearnedState, theirs: LearnedState) -> LearnedState:
        """Add what both servers learned since `base`."""
        models = sorted_models((*mine.models, *theirs.models))
        base, mine, theirs = (self.fitted(state, models) for state in (base, mine, theirs))
        return LearnedState(
            models,
            self.rows.merged(base.rows, mine.rows, theirs.rows),
            mine.seen + theirs.seen - base.seen,
            mine.labels | theirs.labels,
            np.maximum(mine.sure + theirs.sure - base.sure, 0.0),
            prediction_sets.merge(base.tracked, mine.tracked, theirs.tracked),
            mine.differences.merged(base.differences, theirs.differences),
        )

    # -- storage

    def encode(self, state: LearnedState) -> bytes:
        """Return the u32 CRC-32 of the body (little-endian), then the body in MessagePack."""
        stored = _Stored(
            self.name,
            self.schema,
            state.models,
            state.rows.tobytes(),
            state.seen,
            state.labels,
            state.sure.tobytes(),
            state.tracked,
            state.differences,
        )
        body = msgspec.msgpack.encode(stored)
        return zlib.crc32(body).to_bytes(4, "little") + body

    def decode(self, data: bytes) -> LearnedState:
        """Read a stored state. Raises ValueError that names what is wrong."""
        if len(data) < 4 or zlib.crc32(data[4:]).to_bytes(4, "little") != data[:4]:
            raise ValueError(
                f"no state of {self.name}: the checksum does not fit its {len(data)} bytes"
            )
        try:
            stored = msgspec.msgpack.decode(data[4:], type=_Stored)
        except msgspec.MsgspecError as error:
            raise ValueError(f"no state of {self.name}: {error}") from None
        if stored.policy != self.name or stored.schema != self.schema:
            raise ValueError(
                f"a state of {stored.policy}/{stored.schema}, not of {self.name}/{self.schema}"
            )
        try:
            rows = self.rows.parse(np.frombuffer(stored.rows), len(stored.models))
            sure = np.frombuffer(stored.sure).reshape(BINS, 2)
        except ValueError as error:
            raise ValueError(f"a state of {self.name} of the wrong size: {error}") from None
        if not math.isfinite(stored.seen):
            raise ValueError(f"a state of {self.name} holds numbers that are not finite")
        tracked = stored.tracked if prediction_sets.is_valid(stored.tracked) else INITIAL
        is_valid = stored.differences.is_valid(len(stored.models))
        differences = stored.differences if is_valid else NO_USERS
        state = LearnedState(
            stored.models, rows, stored.seen, stored.labels, sure, tracked, differences
        )
        is_finite = np.isfinite(rows).all() and np.isfinite(sure).all()
        return state if is_finite else self._repaired(state)


def state_in_context(policy: Policy, state: State, context: Sequence[float]) -> State:
    """Return the state to combine the predictions of a query with this context by."""
    if context and isinstance(policy, LearningPolicy):
        return policy.in_context(state, context)
    return state


def _rightness(output: object, observation: Observation) -> float | None:
    """Return how right an output would have been, 0 to 1; None when the feedback does not show it.

    A score rates the answer that was returned, which may have been the default. It is
    about another output only if the answer was right.
    """
    truth, answer = observation.truth, observation.answer
    if truth.known:
        return float(label_key(output) == label_key(truth.label))
    if answer is None:
        return None
    if agrees(output, answer):
        return float(truth.score or 0.0)
    return 0.0 if truth.score == 1.0 else None
