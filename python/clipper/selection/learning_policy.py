"""The state of policies that learn, and what all of them do with it: come and go of models,
calibration, writing and merging.

A state is a value: one row of numbers a model (its columns belong to the rule,
`clipper_core.learning.bandit`), the observations so far, which labels were seen, how often answers
given with a confidence were right, and, for sets, their threshold. Nothing in here is changed in
place."""

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np

from clipper.selection import prediction_sets
from clipper.selection.policy import Combined, Observation, Predictions, agrees, is_number, losses
from clipper.selection.prediction_sets import FRESH, Chances, Tracked
from clipper.selection.votes import in_order, label_key
from clipper.types import InputType, VersionedModel
from clipper_core.learning.bandit import Rule

Array = np.ndarray[Any, np.dtype[np.float64]]
_replace = msgspec.structs.replace

BINS = 10  # of confidence: more tell no more apart than a few hundred observations can fill
DOUBT = 20.0  # observations that a bin needs before it speaks louder than the raw figure
# of a bin's counts, an observation in it: calibration follows a drift, and what is rare is not
# forgotten meanwhile
FADE = 0.998
CARRIED = 0.25  # of the counts, into a new version
PRIOR_COUNTS = 30.0  # what the state that all users share counts as for a new one
LABEL_BITS = 64


class LearnedState(msgspec.Struct, frozen=True, eq=False):
    """models: sorted.  rows: f64[models, columns].  seen: weight of the observations.  labels: one
    bit a label seen. sure: f64[BINS, 2], right and all answers by confidence.  tracked: of the
    sets, where a coverage is asked for.
    """

    models: tuple[VersionedModel, ...]
    rows: Array
    seen: float
    labels: int
    sure: Array
    tracked: Tracked = FRESH

    @property
    def classes(self) -> float:
        """Labels seen, by linear counting: exact for a few, some per cent off for fifty, no more
        than 267 ever."""
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
    tracked: Tracked = FRESH  # since schema 2


class LearningPolicy(ABC):
    """Threads: any. What a policy that learns adds: `rule`, `fresh`, select and combine.

    coverage: share of the sets (`Combined.set`) that shall hold the truth; None: no sets.
    """

    name: ClassVar[str]
    schema: ClassVar[int] = 2
    chance: ClassVar[bool] = False
    fresh: ClassVar[tuple[float, ...]]  # the row of a model that nothing is known of
    counts: ClassVar[tuple[int, ...]] = ()  # columns that count observations
    least: ClassVar[float] = 0.0  # of a count
    rule: Rule
    coverage: float | None = None

    def init(
        self, models: Sequence[VersionedModel], prior: LearnedState | None = None
    ) -> LearnedState:
        ordered = in_order(models)
        nobody = LearnedState(ordered, self._fresh_rows(len(ordered)), 0.0, 0, np.zeros((BINS, 2)))
        return nobody if prior is None else self._believing(nobody, prior)

    def _fresh_rows(self, k: int) -> Array:
        return np.tile(np.array(self.fresh), (k, 1)).reshape(k, len(self.fresh))

    def _believing(self, state: LearnedState, prior: LearnedState) -> LearnedState:
        """What all users taught, with little evidence behind it."""
        rows = self._discounted(self.fitting(prior, state.models).rows, PRIOR_COUNTS)
        return LearnedState(state.models, rows, 0.0, prior.labels, prior.sure, prior.tracked)

    def _discounted(self, rows: Array, most: float) -> Array:
        """Evidence brought down to that of `most` observations a model, in proportion."""
        evidence = self._evidence(rows)
        return (
            rows
            if evidence is None
            else self._faded(rows, np.minimum(1.0, most / np.maximum(evidence, 1e-300)))
        )

    def _evidence(self, rows: Array) -> Array | None:
        """f64[models]: how many observations each row speaks of; None for a rule that counts
        none."""
        if not self.counts:
            return None
        found: Array = (rows[:, list(self.counts)] - self.least).max(axis=1, initial=0.0)
        return found

    def _faded(self, rows: Array, share: Array) -> Array:
        """Rows with `share` f64[models] of their evidence."""
        rows = rows.copy()
        for column in self.counts:
            rows[:, column] = self.least + share * (rows[:, column] - self.least)
        return rows

    # -- models come and go

    def add_model(self, state: LearnedState, model: VersionedModel) -> LearnedState:
        """The newcomer stands where the others do on average, with no evidence: it is tried."""
        if model in state.models:
            return state
        row = self._newcomer(state.rows)
        at = in_order((*state.models, model)).index(model)
        rows = np.insert(state.rows, at, row, axis=0)
        return _replace(state, models=in_order((*state.models, model)), rows=rows)

    def _newcomer(self, rows: Array) -> Array:
        return np.array(self.fresh)

    def remove_model(self, state: LearnedState, model: VersionedModel) -> LearnedState:
        if model not in state.models:
            return state
        rows = np.delete(state.rows, state.models.index(model), axis=0)
        return _replace(state, models=tuple(m for m in state.models if m != model), rows=rows)

    def update_model_version(
        self, state: LearnedState, old: VersionedModel, new: VersionedModel
    ) -> LearnedState:
        if old not in state.models or new in state.models:
            return state
        rows = self._faded(
            state.rows, np.array([CARRIED if model == old else 1.0 for model in state.models])
        )
        models = [new if model == old else model for model in state.models]
        ordered = in_order(models)
        return _replace(
            state, models=ordered, rows=rows[[models.index(model) for model in ordered]]
        )

    def fitting(self, state: LearnedState, models: Sequence[VersionedModel]) -> LearnedState:
        """The state for exactly these models: versions follow their names, the rest is added and
        removed."""
        for new in (model for model in models if model not in state.models):
            old = [m for m in state.models if m.name == new.name and m not in models]
            state = (
                self.update_model_version(state, old[-1], new)
                if old
                else self.add_model(state, new)
            )
        for gone in (model for model in state.models if model not in models):
            state = self.remove_model(state, gone)
        return state

    # -- learning

    def observe(self, state: LearnedState, observation: Observation) -> LearnedState:
        if not (np.isfinite(state.rows).all() and np.isfinite(state.sure).all()):
            state = self._healed(state)
        told = losses(observation)
        mine = {model: told[model] for model in state.models if model in told}
        weight = observation.weight
        if not mine or not math.isfinite(weight) or weight <= 0:
            return state
        rows = self._learned(state, observation, mine)
        labels = (
            state.labels | label_bit(observation.truth.label)
            if observation.truth.known
            else state.labels
        )
        sure, tracked = self._experience(state, observation)
        return LearnedState(state.models, rows, state.seen + weight, labels, sure, tracked)

    def _healed(self, state: LearnedState) -> LearnedState:
        """The state with what is not finite begun anew: models that are sound keep what they have
        learned."""
        anew = self.init(state.models)
        if not self.fresh or anew.rows.shape != state.rows.shape:  # rows that belong together
            return anew
        rows = state.rows.copy()
        broken = ~np.isfinite(rows).all(axis=1)
        rows[broken] = anew.rows[broken]
        sure = np.where(np.isfinite(state.sure), state.sure, 0.0)
        return _replace(state, rows=rows, sure=sure)

    def _learned(
        self, state: LearnedState, observation: Observation, told: Mapping[VersionedModel, float]
    ) -> Array:
        lost = np.array([told.get(model, math.nan) for model in state.models])
        asked = observation.plan.models
        if len(asked) == 1 and asked[0] in state.models:
            chosen = state.models.index(asked[0])
            p = observation.plan.probability(asked[0])
            return self.rule.learn(state.rows, state.seen, lost, chosen, p, observation.weight)
        return self.rule.learn(state.rows, state.seen, lost, weight=observation.weight)

    # -- confidence

    @abstractmethod
    def raw_confidence(
        self, state: LearnedState, heard: Predictions, missing: Sequence[VersionedModel]
    ) -> tuple[Any, float]:
        """-> what would be answered, and how sure the policy is before calibration."""

    def sureness(self, state: LearnedState, raw: float) -> float:
        """`raw` as experience has it: the share of answers given with it that were right."""
        right, count = state.sure[bin_of(raw)]
        return float((right + DOUBT * raw) / (count + DOUBT))

    def _experience(self, state: LearnedState, observation: Observation) -> tuple[Array, Tracked]:
        """How sure one may be, and how wide a set must be, now that the truth about one more answer
        is known."""
        plan, truth = observation.plan, observation.truth
        heard = {
            model: observation.predictions[model]
            for model in plan.models
            if model in observation.predictions
        }
        if not heard:
            return state.sure, state.tracked
        missing = [model for model in plan.models if model not in heard]
        output, raw = self.raw_confidence(state, heard, missing)
        if output is None:
            return state.sure, state.tracked
        tracked = state.tracked
        if is_number(output):
            if self.coverage is not None and truth.known:
                tracked = prediction_sets.after_number(tracked, self.coverage, output, truth.label)
            return state.sure, tracked
        if self.coverage is not None and truth.known:
            chances = self.chances(state, heard, missing)
            tracked = prediction_sets.after_label(
                tracked, self.coverage, chances, output, truth.label
            )
        right = _right(output, observation)
        if right is None:
            return state.sure, tracked
        sure = state.sure.copy()
        sure[bin_of(raw)] = FADE * sure[bin_of(raw)] + (right, 1.0)
        return sure, tracked

    # -- sets

    @abstractmethod
    def chances(
        self, state: LearnedState, heard: Predictions, missing: Sequence[VersionedModel]
    ) -> Chances:
        """Of the labels, before any set is made of them; called when a usable label was heard."""

    def with_set(
        self, state: LearnedState, found: Combined, chances: Callable[[], Chances]
    ) -> Combined:
        """`found` with its set, where a coverage is asked for and there is an answer."""
        if self.coverage is None or not found.used:
            return found
        if is_number(found.output):
            return _replace(found, set=prediction_sets.interval_of(state.tracked, found.output))
        return _replace(
            found, set=prediction_sets.labels_of(state.tracked, chances(), found.output)
        )

    # -- the rest

    def merge(self, base: LearnedState, mine: LearnedState, theirs: LearnedState) -> LearnedState:
        """What both learned since `base`, added up."""
        models = in_order((*mine.models, *theirs.models))
        base, mine, theirs = (self.fitting(state, models) for state in (base, mine, theirs))
        rows = self._merged(base.rows, mine.rows, theirs.rows)
        sure = np.maximum(mine.sure + theirs.sure - base.sure, 0.0)
        tracked = prediction_sets.merged(base.tracked, mine.tracked, theirs.tracked)
        return LearnedState(
            models,
            rows,
            mine.seen + theirs.seen - base.seen,
            mine.labels | theirs.labels,
            sure,
            tracked,
        )

    def _merged(self, base: Array, mine: Array, theirs: Array) -> Array:
        """Counts and weights add up; an average is weighed by the count beside it, when there is
        one."""
        rows = mine + theirs - base
        for column in self.counts:
            rows[:, column] = np.maximum(rows[:, column], self.least)
        return rows

    def encode(self, state: LearnedState) -> bytes:
        written = _Written(
            self.name,
            self.schema,
            state.models,
            state.rows.tobytes(),
            state.seen,
            state.labels,
            state.sure.tobytes(),
            state.tracked,
        )
        body = msgspec.msgpack.encode(written)
        return zlib.crc32(body).to_bytes(4, "little") + body

    def decode(self, data: bytes) -> LearnedState:
        if len(data) < 4 or zlib.crc32(data[4:]).to_bytes(4, "little") != data[:4]:
            raise ValueError(
                f"no state of {self.name}: the checksum does not fit its {len(data)} bytes"
            )
        try:
            written = msgspec.msgpack.decode(data[4:], type=_Written)
        except msgspec.MsgspecError as error:
            raise ValueError(f"no state of {self.name}: {error}") from None
        if written.policy != self.name or not 1 <= written.schema <= self.schema:
            raise ValueError(
                f"a state of {written.policy}/{written.schema}, not of {self.name}/{self.schema}"
            )
        try:
            rows = self._shaped(np.frombuffer(written.rows), len(written.models))
            sure = (
                np.frombuffer(written.sure).reshape(BINS, -1, 2).sum(axis=1)
            )  # schema 1 had twice as many bins
            if len(written.sure) != BINS * 16 * (2 if written.schema == 1 else 1):
                raise ValueError("the bins of confidence")
        except ValueError as error:
            raise ValueError(f"a state of {self.name} of the wrong size: {error}") from None
        if not math.isfinite(written.seen):
            raise ValueError(f"a state of {self.name} holds numbers that are not finite")
        tracked = written.tracked if prediction_sets.sound(written.tracked) else FRESH
        state = LearnedState(written.models, rows, written.seen, written.labels, sure, tracked)
        return state if np.isfinite(rows).all() and np.isfinite(sure).all() else self._healed(state)

    def _shaped(self, numbers: Array, k: int) -> Array:
        """The rows of k models as they were before they were written; ValueError when they cannot
        be."""
        return numbers.reshape(k, len(self.fresh))

    def accepts_input_type(self, input: InputType) -> bool:
        return True

    def standing(self, state: LearnedState) -> Array:
        """f64[models]: higher is better."""
        return self.rule.weights(state.rows, state.classes)

    def portions(self, state: LearnedState) -> dict[VersionedModel, float]:
        """Of an answer, or (of those that ask one model) of the queries: each model's; they add up
        to 1."""
        weights = self.rule.weights(state.rows, state.classes) if len(state.models) else np.zeros(0)
        return dict(zip(state.models, (weights / (weights.sum() or 1.0)).tolist(), strict=True))

    def rank_models_desc(self, state: LearnedState, user: str | None) -> tuple[VersionedModel, ...]:
        if not state.models:
            return ()
        order = np.argsort(-self.standing(state), kind="stable")
        return tuple(state.models[i] for i in order)


def bin_of(confidence: float) -> int:
    """On an edge, as one half is, it is the bin above, whatever was rounded on the way."""
    return min(int(confidence * BINS + 1e-9), BINS - 1)


def label_bit(label: object) -> int:
    """The bit of a label in `LearnedState.labels`; the same in every process."""
    if is_number(label):
        return 0
    if isinstance(label, int | np.integer):
        return 1 << (int(label) % LABEL_BITS)
    text = label if isinstance(label, bytes) else str(label).encode()
    return 1 << (zlib.crc32(text) % LABEL_BITS)


def _right(output: object, observation: Observation) -> float | None:
    """How right an output would have been, 0 to 1. A score is of the answer that was returned,
    which may have been the default: of another output it tells only when the answer was surely
    right. None when nothing is known."""
    if observation.truth.known:
        return 1.0 - losses_of(output, observation)
    if observation.answer is not None and agrees(output, observation.answer):
        return float(observation.truth.score or 0.0)
    return 0.0 if observation.answer is not None and observation.truth.score == 1.0 else None


def losses_of(output: object, observation: Observation) -> float:
    return 0.0 if label_key(output) == label_key(observation.truth.label) else 1.0
