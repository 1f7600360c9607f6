"""The interface of a selection policy, and the types that it exchanges with the server.

A policy chooses the models of a query, combines their predictions and learns from feedback. It is
pure: state in, state out; no I/O, no clock, and no randomness except the number that each query
brings. One object serves all applications and threads, and the same observations in the same order
always give the same state. Source: the Clipper paper, section 5; the design document, "Selection
policies".
"""

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np

from clipper.types import InputType, Qualifiers, UserValue, VersionedModel

# The policy's own value: the server only stores it, and no policy changes a state it was given.
State = UserValue


class Prediction(msgspec.Struct, frozen=True, eq=False):
    """The output of one model.

    output: int, float, bool, str, bytes or ndarray.
    confidence: 0 to 1, if the model reports one.
    qualifiers: further values that the model reports, by name.
    """

    output: UserValue
    confidence: float | None = None
    qualifiers: Qualifiers = {}


Predictions = Mapping[VersionedModel, Prediction]


class Query(msgspec.Struct, frozen=True, eq=False):
    """The part of a query that a policy sees before models are queried.

    user: name of the state, for policies that use it.
    uniform: in [0, 1), derived from the id that the caller gave the query, so that a replay with
    the same ids selects the same models; without an id it is drawn. The only source of randomness.
    features: up to 32 finite numbers for contextual policies; () if the query has none.
    """

    user: str | None = None
    uniform: float = 0.0
    features: tuple[float, ...] = ()


class Plan(msgspec.Struct, frozen=True, eq=False):
    """The models of a query; stored with it, because feedback may come after the state has changed.

    models: queried at once, best first.
    probabilities: probability that each was chosen; () if all were certain.
    observers: queried too, but never used or waited for (shadow, canary, decoy).
    features: of the query; a contextual policy learns from them.
    """

    models: tuple[VersionedModel, ...]
    probabilities: tuple[float, ...] = ()
    observers: tuple[VersionedModel, ...] = ()
    features: tuple[float, ...] = ()

    def probability(self, model: VersionedModel) -> float:
        """Return the probability that `model` was chosen; 0 if it was not queried."""
        if model not in self.models:
            return 0.0
        return self.probabilities[self.models.index(model)] if self.probabilities else 1.0


class Combined(msgspec.Struct, frozen=True, eq=False):
    """The answer to a query, combined from predictions.

    output: the answer; without meaning if `used` is empty.
    confidence: 0 to 1. Policies that learn calibrate it: of the answers given with 0.9, nine in ten
    are right.
    used: models whose predictions entered; if empty, the application's default is returned.
    agreement: share of the models, by weight, that agree with the answer, 0 to 1.
    set: labels, or (low, high), that contain the truth with the requested coverage; () without one.
    """

    output: UserValue
    confidence: float
    used: tuple[VersionedModel, ...]
    agreement: float = 1.0
    set: tuple[UserValue, ...] = ()


NO_ANSWER = Combined(None, 0.0, (), 0.0)


class Truth(msgspec.Struct, frozen=True, eq=False):
    """The content of feedback: the right output, or a score of the answer.

    label: the right output.  score: 0 (wrong) to 1 (right), if the right output is not known.
    """

    label: UserValue = None
    score: float | None = None

    @property
    def known(self) -> bool:
        """True if `label` is the right output, False if only the score is known."""
        return self.score is None


class Observation(msgspec.Struct, frozen=True, eq=False):
    """A query with its feedback.

    plan: the models that were queried.
    predictions: of all models that answered, observers and late ones included.
    truth: the feedback.
    answer: the output that was returned to the caller; a score rates it.
    weight: 1 for one feedback.
    """

    plan: Plan
    predictions: Predictions
    truth: Truth
    answer: UserValue = None
    weight: float = 1.0


class Policy(Protocol):
    """The interface of a selection policy. Threads: any; several at once.

    A user-defined policy may raise: the query then gets its default answer
    (selection/user_defined.py). A policy may also have `decide(state, view)`
    (selection/deciders/decider.py), which decides when to answer; without it, all models are waited
    for. Source: the design document, "Selection policies"; the Clipper paper, section 5.
    """

    name: str
    schema: int  # version of the encoded state; a state of another schema is refused
    chance: bool  # True if `select` uses query.uniform

    def init(self, models: Sequence[VersionedModel], prior: State | None = None) -> State:
        """Return the state before any feedback.

        models: those of the application, in the order of its links.  prior: the state that all
        users share, for the same models; it enters with little evidence. All users without
        feedback are answered from one such state, which `select` and `combine` leave as it is.
        """

    def select(self, state: State, query: Query, candidates: Sequence[VersionedModel]) -> Plan:
        """Choose models from `candidates`, best first; none only if there are no candidates."""

    def combine(
        self, state: State, arrived: Predictions, missing: Sequence[VersionedModel]
    ) -> Combined:
        """Combine the predictions that arrived; those of `missing` did not.

        The result does not depend on their order. An output that is, or contains, NaN or an
        infinity counts as missing.
        """

    def observe(self, state: State, observation: Observation) -> State:
        """Return the state after an observation; `state` itself if nothing was learned."""

    def add_model(self, state: State, model: VersionedModel) -> State:
        """Add a model with an average standing, so that it is tried. No effect if it is known."""

    def remove_model(self, state: State, model: VersionedModel) -> State:
        """Remove a model. No effect if it is unknown."""

    def update_model_version(self, state: State, old: VersionedModel, new: VersionedModel) -> State:
        """Replace a version; the new one keeps the standing of the old one with less evidence."""

    def merge(self, base: State, mine: State, theirs: State) -> State:
        """Merge the states of two servers that both started from `base`."""

    def encode(self, state: State) -> bytes:
        """Encode a state for the store, in a fixed layout that `decode` checks; never pickle."""

    def decode(self, data: bytes) -> State:
        """Decode a stored state. Raises ValueError for bytes that `encode` did not write."""

    def accepts_input_type(self, input: InputType) -> bool:
        """Return False to refuse an application with this input type; called when it is set."""

    def rank_models_desc(self, state: State, user: str | None) -> tuple[VersionedModel, ...]:
        """Return the models of the state, best first."""


def losses(observation: Observation) -> dict[VersionedModel, float]:
    """Return the loss, 0 to 1, of each model whose loss the feedback determines.

    A label determines the loss of every model that answered. A score determines the loss of the
    models that gave the returned answer, and of the others only if that answer was right (1.0). A
    score of an answer that is None determines nothing.
    """
    truth, found = observation.truth, {}
    if not truth.known and observation.answer is None:
        return {}
    for model, prediction in observation.predictions.items():
        if not is_usable(prediction.output):
            continue
        if truth.known:
            found[model] = loss(prediction.output, truth.label)
        elif agrees(prediction.output, observation.answer):
            found[model] = 1.0 - float(truth.score or 0.0)
        elif truth.score == 1.0:
            found[model] = 1.0
    return found


def loss(output: object, label: object) -> float:
    """Return the loss of an output: 0 (right) to 1 (wrong).

    For numbers it is d / (d + |label|), where d = |output - label|; for arrays, the same with
    Euclidean norms. It does not depend on the unit. Arrays of different shapes have loss 1.
    """
    if not is_number(output) or not is_number(label):
        return 0.0 if agrees(output, label) else 1.0
    if isinstance(output, float) and isinstance(label, float):
        # a quarter of each, so that the difference cannot overflow
        distance, size = abs(output / 4 - label / 4), abs(label / 4)
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


_PLAIN = frozenset((int, str, bytes, bool))  # the common types of labels, tested first


def is_number(value: object) -> bool:
    """Return True for a float or an array of numbers: these are averaged, not voted on."""
    if type(value) in _PLAIN:
        return False
    return isinstance(value, float | np.floating) or (
        isinstance(value, np.ndarray) and value.dtype.kind in "biuf"
    )


def agrees(one: object, other: object) -> bool:
    """Return True if two outputs are the same answer. True and 1 are different answers."""
    if type(one) is type(other) and type(one) in _PLAIN:
        return one == other
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return bool(np.array_equal(one, other))  # type: ignore[arg-type]  # numpy takes any object
    if isinstance(one, bool | np.bool_) != isinstance(other, bool | np.bool_):
        return False
    return bool(one == other)


def is_usable(output: object) -> bool:
    """Return True if an output may be answered with: not None, and finite throughout."""
    if type(output) in _PLAIN:
        return True
    if isinstance(output, float | np.floating):
        return math.isfinite(output)
    if isinstance(output, np.ndarray) and output.dtype.kind == "f":
        return bool(np.isfinite(output).all())
    if isinstance(output, dict):
        return all(map(is_usable, output.values()))
    return output is not None


def sound_confidence(confidence: float | None, unknown: float = 1.0) -> float:
    """Clip a model's confidence to 0..1; `unknown` if it reports none, 0 for NaN."""
    if confidence is None:
        return unknown
    return 0.0 if math.isnan(confidence) else min(max(float(confidence), 0.0), 1.0)
