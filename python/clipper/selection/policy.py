"""What a selection policy is: which models to ask, when to answer, what to make of their
predictions, what to learn.

Policies are stateless and pure: state in, state out; no I/O, no clock, no randomness but the number
a query brings. One object serves all applications and threads, and the same observations in the
same order always give the same state. Source: the paper, section 5; the design document, "Selection
policies".
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from clipper.types import InputType, Qualifiers, VersionedModel

# a policy's own; whoever keeps it never looks inside, and no policy changes one that it was given
State = Any


class Prediction(msgspec.Struct, frozen=True, eq=False):
    """One model's output: int, float, bool, str, bytes or ndarray; `confidence` 0 to 1 when the
    model gives one, and what else it says of it, by name."""

    output: Any
    confidence: float | None = None
    qualifiers: Qualifiers = {}


Predictions = Mapping[VersionedModel, Prediction]


class Query(msgspec.Struct, frozen=True, eq=False):
    """What a policy may know of a query before it is asked.

    user: whose state it is, for policies that care.  uniform: in [0, 1), drawn from the query's id:
    all the chance there is, so that a replay selects alike.  features: up to 32 finite numbers, for
    contextual policies; () when none were given.
    """

    user: str | None = None
    uniform: float = 0.0
    features: tuple[float, ...] = ()


class Plan(msgspec.Struct, frozen=True, eq=False):
    """Whom a query asks; kept with the query, because feedback may come long after the state has
    moved on.

    models: asked at once, best first.  probabilities: of each having been chosen, alike; () when
    all were for certain. observers: asked too, never answered from and never waited for (shadow,
    canary, decoy).  features: of the query, by which a contextual policy chose and will learn.
    """

    models: tuple[VersionedModel, ...]
    probabilities: tuple[float, ...] = ()
    observers: tuple[VersionedModel, ...] = ()
    features: tuple[float, ...] = ()

    def probability(self, model: VersionedModel) -> float:
        """Of `model` having been chosen; 0 when it was not asked."""
        if model not in self.models:
            return 0.0
        return self.probabilities[self.models.index(model)] if self.probabilities else 1.0


class Combined(msgspec.Struct, frozen=True, eq=False):
    """confidence: 0 to 1; of a policy that learns, calibrated: of answers given with .9, nine in
    ten are right.  agreement: how far the models agree, 0 to 1.  used: the models whose predictions
    entered; empty when there is nothing to answer with, and then `output` means nothing and the
    application's default is due.  set: labels, or (low, high), that hold the truth as often as was
    asked for; () when nobody asked."""

    output: Any
    confidence: float
    used: tuple[VersionedModel, ...]
    agreement: float = 1.0
    set: tuple[Any, ...] = ()


NOTHING = Combined(None, 0.0, (), 0.0)


class Truth(msgspec.Struct, frozen=True, eq=False):
    """What feedback says of a query: the right output (`label`), or how good the answer was
    (`score`, 0 to 1; right is 1, wrong is 0) when nobody knows the right one. `known` tells
    which."""

    label: Any = None
    score: float | None = None

    @property
    def known(self) -> bool:
        return self.score is None


class Observation(msgspec.Struct, frozen=True, eq=False):
    """A query whose truth has come. predictions: of all models heard, observers and late ones too.
    answer: the output that was returned, when `truth` is a score of it.  weight: of this
    observation, 1 for one feedback.
    """

    plan: Plan
    predictions: Predictions
    truth: Truth
    answer: Any = None
    weight: float = 1.0


class Policy(Protocol):
    """Threads: any; several at once.

    A policy of a user's own may raise: the query then gets its default answer
    (selection/user_defined.py). A policy may also have `decide(state, view)`
    (selection/decider.py), which says when to answer; without it, all models are waited for.
    Source: the design document, "Selection policies"; the paper, section 5.
    """

    name: str
    schema: int  # of the encoded state; a state of another is refused, never guessed at
    chance: bool  # whether `select` looks at query.uniform

    def init(self, models: Sequence[VersionedModel], prior: State | None = None) -> State:
        """The state before any feedback of its own, for an application that links `models`, in that
        order. prior: the state of the same models that all users share; what it knows counts as
        little evidence."""
        ...

    def select(self, state: State, query: Query, candidates: Sequence[VersionedModel]) -> Plan:
        """The models to ask, best first; some of `candidates`, and none only if there are none."""
        ...

    def combine(
        self, state: State, arrived: Predictions, missing: Sequence[VersionedModel]
    ) -> Combined:
        """The answer from the predictions that arrived, when those of `missing` did not. Order
        never matters. An output that is NaN or infinite, or holds one, counts as missing."""
        ...

    def observe(self, state: State, observation: Observation) -> State:
        """What is known after this observation. One that teaches nothing returns `state` itself."""
        ...

    def add_model(self, state: State, model: VersionedModel) -> State:
        """`model` may be asked from now on; it stands where the others do, and is tried. One that
        is known changes nothing."""
        ...

    def remove_model(self, state: State, model: VersionedModel) -> State:
        """`model` is asked no more. One that is not known changes nothing."""
        ...

    def update_model_version(self, state: State, old: VersionedModel, new: VersionedModel) -> State:
        """`new` takes the place of `old`: its standing stays, with less evidence behind it."""
        ...

    def merge(self, base: State, mine: State, theirs: State) -> State:
        """Two servers learned from `base` apart: a state that has learned from both."""
        ...

    def encode(self, state: State) -> bytes:
        """For the store: a fixed layout that is checked when it is read; never pickle."""
        ...

    def decode(self, data: bytes) -> State:
        """Raises ValueError for bytes that `encode` did not write."""
        ...

    def accepts_input_type(self, input: InputType) -> bool:
        """Asked once, when an application is set; False refuses it."""
        ...

    def rank_models_desc(self, state: State, user: str | None) -> tuple[VersionedModel, ...]:
        """The state's models, best first."""
        ...


def losses(observation: Observation) -> dict[VersionedModel, float]:
    """Loss in [0, 1] of each model whose loss the observation tells. A label tells of all that were
    heard; a score tells of those that said what was answered, and of the others only if the answer
    was surely right. A score of no answer (None, the default of an application that has none) tells
    of nobody."""
    truth, told = observation.truth, {}
    if not truth.known and observation.answer is None:
        return {}
    for model, prediction in observation.predictions.items():
        if not is_usable(prediction.output):
            continue
        if truth.known:
            told[model] = loss(prediction.output, truth.label)
        elif agrees(prediction.output, observation.answer):
            told[model] = 1.0 - float(truth.score or 0.0)
        elif truth.score == 1.0:
            told[model] = 1.0
    return told


def loss(output: Any, label: Any) -> float:
    """0 for right, 1 for wrong; between numbers |output - label| / (|output - label| + |label|), or
    of norms for arrays: 0 to 1 and the same in any unit; 1 for arrays of different shapes."""
    if not is_number(output) or not is_number(label):
        return 0.0 if agrees(output, label) else 1.0
    if isinstance(output, float) and isinstance(label, float):
        distance, size = (
            abs(output / 4 - label / 4),
            abs(label / 4),
        )  # a quarter of what might overflow
    else:
        found, right = np.asarray(output, np.float64), np.asarray(label, np.float64)
        if found.shape != right.shape:
            return 1.0
        unit = (
            max(float(np.abs(found).max(initial=0.0)), float(np.abs(right).max(initial=0.0))) or 1.0
        )
        right = right / unit
        distance, size = float(np.linalg.norm(found / unit - right)), float(np.linalg.norm(right))
    return 0.0 if distance == 0.0 else distance / (distance + size)


_PLAIN = frozenset((int, str, bytes, bool))  # labels as they nearly always come: asked for first


def is_number(value: object) -> bool:
    """Whether it is averaged rather than voted on: a float, or an array of numbers."""
    if type(value) in _PLAIN:
        return False
    return isinstance(value, float | np.floating) or (
        isinstance(value, np.ndarray) and value.dtype.kind in "biuf"
    )


def agrees(one: object, other: object) -> bool:
    """Whether two outputs are the same answer. True is not 1."""
    if type(one) is type(other) and type(one) in _PLAIN:
        return one == other
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return bool(np.array_equal(one, other))  # type: ignore[arg-type]  # whatever it is, numpy tells
    if isinstance(one, bool | np.bool_) != isinstance(other, bool | np.bool_):
        return False
    return bool(one == other)


def is_usable(output: object) -> bool:
    """Whether an output may be answered with: something, and finite throughout."""
    if type(output) in _PLAIN:
        return True
    if isinstance(output, float | np.floating):
        return math.isfinite(output)
    if isinstance(output, np.ndarray) and output.dtype.kind == "f":
        return bool(np.isfinite(output).all())
    return output is not None


def sound_confidence(confidence: float | None, unknown: float = 1.0) -> float:
    """A model's own confidence, brought into 0 to 1; `unknown` when it gives none, 0 when it gives
    NaN."""
    if confidence is None:
        return unknown
    return 0.0 if math.isnan(confidence) else min(max(float(confidence), 0.0), 1.0)
