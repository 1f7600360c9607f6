"""The state of policies that learn, and what all of them do with it: come and go of models, calibration, writing and merging.

A state is a value: one row of numbers a model (its columns belong to the rule, `clipper_core.bandit`), the observations so far,
which labels were seen, and how often answers given with a confidence were right. Nothing in here is changed in place.
"""

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np

from clipper.selection.policy import Observation, Predictions, is_number, losses
from clipper.selection.votes import in_order, label_key
from clipper.types import InputType, VersionedModel
from clipper_core.bandit import Rule

Array = np.ndarray[Any, np.dtype[np.float64]]

BINS = 20  # of confidence
DOUBT = 20.0  # observations that a bin needs before it speaks louder than the raw figure
FADE = 0.998  # of a bin's counts, an observation: calibration follows a drift
CARRIED = 0.25  # of the counts, into a new version
PRIOR_COUNTS = 30.0  # what the state that all users share counts as for a new one
LABEL_BITS = 64


class Learned(msgspec.Struct, frozen=True, eq=False):
    """models: sorted.  rows: f64[models, columns].  seen: weight of the observations.  labels: one bit a label seen.
    sure: f64[BINS, 2], right and all answers by confidence."""

    models: tuple[VersionedModel, ...]
    rows: Array
    seen: float
    labels: int
    sure: Array

    @property
    def classes(self) -> float:
        """Labels seen, by linear counting: exact for a few, some per cent off for fifty, no more than 267 ever."""
        free = LABEL_BITS - self.labels.bit_count()
        return max(2.0, round(LABEL_BITS * math.log(LABEL_BITS / max(free, 1))))


class _Written(msgspec.Struct, array_like=True):
    policy: str
    schema: int
    models: tuple[VersionedModel, ...]
    rows: bytes
    seen: float
    labels: int
    sure: bytes


class LearningPolicy(ABC):
    """Threads: any. What a policy that learns adds: `rule`, `fresh`, select and combine."""

    name: ClassVar[str]
    schema: ClassVar[int] = 1
    chance: ClassVar[bool] = False
    fresh: ClassVar[tuple[float, ...]]  # the row of a model that nothing is known of
    counts: ClassVar[tuple[int, ...]] = ()  # columns that count observations
    least: ClassVar[float] = 0.0  # of a count
    rule: Rule

    def init(self, models: Sequence[VersionedModel], prior: Learned | None = None) -> Learned:
        ordered = in_order(models)
        rows = np.tile(np.array(self.fresh), (len(ordered), 1)).reshape(len(ordered), len(self.fresh))
        nobody = Learned(ordered, rows, 0.0, 0, np.zeros((BINS, 2)))
        return nobody if prior is None else self._believing(nobody, prior)

    def _believing(self, state: Learned, prior: Learned) -> Learned:
        """What all users taught, with little evidence behind it."""
        known = dict(zip(prior.models, prior.rows, strict=True))
        rows = np.array([known.get(m, row) for m, row in zip(state.models, state.rows, strict=True)]).reshape(state.rows.shape)
        return Learned(state.models, self._discounted(rows, PRIOR_COUNTS), 0.0, prior.labels, prior.sure)

    def _discounted(self, rows: Array, most: float) -> Array:
        """Counts brought down to `most` a model, in proportion."""
        rows = rows.copy()
        if self.counts and len(rows):
            columns = list(self.counts)
            extra = rows[:, columns] - self.least
            total = extra.max(axis=1, keepdims=True)
            rows[:, columns] = self.least + extra * np.minimum(1.0, most / np.maximum(total, 1e-300))
        return rows

    # -- models come and go

    def add_model(self, state: Learned, model: VersionedModel) -> Learned:
        """The newcomer stands where the others do on average, with no evidence: it is tried."""
        if model in state.models:
            return state
        row = self._newcomer(state.rows)
        at = in_order((*state.models, model)).index(model)
        rows = np.insert(state.rows, at, row, axis=0)
        return Learned(in_order((*state.models, model)), rows, state.seen, state.labels, state.sure)

    def _newcomer(self, rows: Array) -> Array:
        return np.array(self.fresh)

    def remove_model(self, state: Learned, model: VersionedModel) -> Learned:
        if model not in state.models:
            return state
        rows = np.delete(state.rows, state.models.index(model), axis=0)
        return Learned(tuple(m for m in state.models if m != model), rows, state.seen, state.labels, state.sure)

    def update_model_version(self, state: Learned, old: VersionedModel, new: VersionedModel) -> Learned:
        if old not in state.models or new in state.models:
            return state
        rows = state.rows.copy()
        at = state.models.index(old)
        for column in self.counts:
            rows[at, column] = self.least + CARRIED * (rows[at, column] - self.least)
        models = [new if model == old else model for model in state.models]
        ordered = in_order(models)
        rows = rows[[models.index(model) for model in ordered]]
        return Learned(ordered, rows, state.seen, state.labels, state.sure)

    def fitting(self, state: Learned, models: Sequence[VersionedModel]) -> Learned:
        """The state for exactly these models: versions follow their names, the rest is added and removed."""
        for new in (model for model in models if model not in state.models):
            old = [m for m in state.models if m.name == new.name and m not in models]
            state = self.update_model_version(state, old[-1], new) if old else self.add_model(state, new)
        for gone in (model for model in state.models if model not in models):
            state = self.remove_model(state, gone)
        return state

    # -- learning

    def observe(self, state: Learned, observation: Observation) -> Learned:
        told = losses(observation)
        mine = {model: told[model] for model in state.models if model in told}
        weight = observation.weight
        if not mine or not math.isfinite(weight) or weight <= 0:
            return state
        rows = self._learned(state, observation, mine)
        labels = state.labels | label_bit(observation.truth.label) if observation.truth.known else state.labels
        return Learned(state.models, rows, state.seen + weight, labels, self._calibrated(state, observation))

    def _learned(self, state: Learned, observation: Observation, told: Mapping[VersionedModel, float]) -> Array:
        lost = np.array([told.get(model, math.nan) for model in state.models])
        asked = observation.plan.models
        if len(asked) == 1 and asked[0] in state.models:
            chosen = state.models.index(asked[0])
            p = observation.plan.probability(asked[0])
            return self.rule.learn(state.rows, state.seen, lost, chosen, p, observation.weight)
        return self.rule.learn(state.rows, state.seen, lost, weight=observation.weight)

    # -- confidence

    @abstractmethod
    def raw_confidence(self, state: Learned, heard: Predictions, missing: Sequence[VersionedModel]) -> tuple[Any, float]:
        """-> what would be answered, and how sure the policy is before calibration."""

    def sureness(self, state: Learned, raw: float) -> float:
        """`raw` as experience has it: the share of answers given with it that were right."""
        right, count = state.sure[bin_of(raw)]
        return float((right + DOUBT * raw) / (count + DOUBT))

    def _calibrated(self, state: Learned, observation: Observation) -> Array:
        plan, truth = observation.plan, observation.truth
        heard = {model: observation.predictions[model] for model in plan.models if model in observation.predictions}
        if not heard:
            return state.sure
        output, raw = self.raw_confidence(state, heard, [model for model in plan.models if model not in heard])
        if output is None or is_number(output):
            return state.sure
        right = 1.0 - losses_of(output, observation) if truth.known else float(truth.score or 0.0)
        sure = state.sure * FADE
        sure[bin_of(raw)] += (right, 1.0)
        return sure

    # -- the rest

    def merge(self, base: Learned, mine: Learned, theirs: Learned) -> Learned:
        """What both learned since `base`, added up."""
        models = in_order((*mine.models, *theirs.models))
        base, mine, theirs = (self.fitting(state, models) for state in (base, mine, theirs))
        rows = self._merged(base.rows, mine.rows, theirs.rows)
        sure = np.maximum(mine.sure + theirs.sure - base.sure, 0.0)
        return Learned(models, rows, mine.seen + theirs.seen - base.seen, mine.labels | theirs.labels, sure)

    def _merged(self, base: Array, mine: Array, theirs: Array) -> Array:
        """Counts and weights add up; an average is weighed by the count beside it, when there is one."""
        rows = mine + theirs - base
        for column in self.counts:
            rows[:, column] = np.maximum(rows[:, column], self.least)
        return rows

    def encode(self, state: Learned) -> bytes:
        written = _Written(
            self.name, self.schema, state.models, state.rows.tobytes(), state.seen, state.labels, state.sure.tobytes()
        )
        body = msgspec.msgpack.encode(written)
        return zlib.crc32(body).to_bytes(4, "little") + body

    def decode(self, data: bytes) -> Learned:
        if len(data) < 4 or zlib.crc32(data[4:]).to_bytes(4, "little") != data[:4]:
            raise ValueError(f"no state of {self.name}: the checksum does not fit its {len(data)} bytes")
        try:
            written = msgspec.msgpack.decode(data[4:], type=_Written)
        except msgspec.MsgspecError as error:
            raise ValueError(f"no state of {self.name}: {error}") from None
        if (written.policy, written.schema) != (self.name, self.schema):
            raise ValueError(f"a state of {written.policy}/{written.schema}, not of {self.name}/{self.schema}")
        try:
            rows = np.frombuffer(written.rows).reshape(len(written.models), len(self.fresh))
            sure = np.frombuffer(written.sure).reshape(BINS, 2)
        except ValueError as error:
            raise ValueError(f"a state of {self.name} of the wrong size: {error}") from None
        if not (np.isfinite(rows).all() and np.isfinite(sure).all()):
            raise ValueError(f"a state of {self.name} holds numbers that are not finite")
        return Learned(written.models, rows, written.seen, written.labels, sure)

    def accepts_input_type(self, input: InputType) -> bool:
        return True

    def standing(self, state: Learned) -> Array:
        """f64[models]: higher is better."""
        return self.rule.weights(state.rows, state.classes)

    def portions(self, state: Learned) -> dict[VersionedModel, float]:
        """Of an answer, or (of those that ask one model) of the queries: each model's; they add up to 1."""
        weights = self.rule.weights(state.rows, state.classes) if len(state.models) else np.zeros(0)
        return dict(zip(state.models, (weights / (weights.sum() or 1.0)).tolist(), strict=True))

    def rank_models_desc(self, state: Learned, user: str | None) -> tuple[VersionedModel, ...]:
        if not state.models:
            return ()
        order = np.argsort(-self.standing(state), kind="stable")
        return tuple(state.models[i] for i in order)


def bin_of(confidence: float) -> int:
    return min(int(confidence * BINS), BINS - 1)


def label_bit(label: object) -> int:
    """The bit of a label in `Learned.labels`; the same in every process."""
    if is_number(label):
        return 0
    if isinstance(label, int | np.integer):
        return 1 << (int(label) % LABEL_BITS)
    text = label if isinstance(label, bytes) else str(label).encode()
    return 1 << (zlib.crc32(text) % LABEL_BITS)


def losses_of(output: object, observation: Observation) -> float:
    return 0.0 if label_key(output) == label_key(observation.truth.label) else 1.0
