"""All models, with equal weights: they vote on labels and average numbers.

Labels are int, bool, str and bytes; numbers are floats (and ints beside floats), and arrays, averaged by element. When
models disagree even on that, the kind that most of them gave is used and the others count as not agreeing.

Confidence of a vote: models that gave the winning label / models asked. So a missing prediction lowers it: it replaces
nothing, and agrees with nobody.
Confidence of a mean: models used / models asked x m / (m + s), where m is the mean size of the outputs (absolute value,
or Euclidean norm) and s their standard deviation. It is the share of models heard when all say the same, half of that
when they scatter as widely as they are large, and does not change with the unit of the output. A missing prediction is
taken to be the mean of those that arrived, which leaves the mean as it is.
Ties go to the label of the surer models (by their own confidences), then to that of the first model by name and
version: never to a label for its own sake, which costs accuracy. One model alone is believed as far as it believes
itself.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from clipper.selection.policy import NOTHING, Combined, Plan, Prediction, Predictions, Query, is_usable, sound_confidence
from clipper.selection.unlearned import Models, Unlearned
from clipper.types import VersionedModel

Votes = dict[VersionedModel, Prediction]


class Ensemble(Unlearned):
    """State: the linked models, sorted. Threads: any."""

    name = "ensemble"

    def init(self, models: Sequence[VersionedModel], prior: Models | None = None) -> Models:
        return _in_order(models)

    def select(self, state: Models, query: Query, candidates: Sequence[VersionedModel]) -> Plan:
        return Plan(_in_order(candidates))

    def combine(self, state: Models, arrived: Predictions, missing: Sequence[VersionedModel]) -> Combined:
        votes = {model: arrived[model] for model in _in_order(arrived) if is_usable(arrived[model].output)}
        asked = len({*arrived, *missing})
        if not votes:
            return NOTHING
        if asked == 1:
            ((model, only),) = votes.items()
            return Combined(only.output, sound_confidence(only.confidence), (model,))
        kind, chosen = _largest_group(votes)
        return _vote(chosen, asked) if kind == "label" else _mean(chosen, asked, kind)

def _in_order(models: Sequence[VersionedModel] | Mapping[VersionedModel, Any]) -> tuple[VersionedModel, ...]:
    return tuple(sorted(set(models), key=lambda model: (model.name, model.version or 0)))


def _largest_group(votes: Votes) -> tuple[object, Votes]:
    """The kind of output that most models gave (the first model's, when equally many), and the votes of that kind."""
    outputs = [vote.output for vote in votes.values()]
    floats = any(isinstance(output, float | np.floating) for output in outputs)
    kinds = {model: _kind(vote.output, floats) for model, vote in votes.items()}
    counted = list(kinds.values())
    best = max(counted, key=counted.count)
    return best, {model: votes[model] for model, kind in kinds.items() if kind == best}


def _kind(output: object, floats: bool) -> object:
    """What may be combined with what: "label", "number", or the shape of an array of numbers."""
    if isinstance(output, np.ndarray) and output.dtype.kind in "biuf":
        return output.shape
    is_int = isinstance(output, int | np.integer) and not isinstance(output, bool)
    if isinstance(output, float | np.floating) or (floats and is_int):
        return "number"
    return "label"


def _vote(votes: Votes, asked: int) -> Combined:
    tally: dict[object, list[float]] = {}
    for vote in votes.values():
        tally.setdefault(_label(vote.output), []).append(sound_confidence(vote.confidence, unknown=0.5))
    winner = max(tally, key=lambda label: (len(tally[label]), sum(tally[label])))  # max keeps the first of equals
    output = next(vote.output for vote in votes.values() if _label(vote.output) == winner)
    return Combined(output, len(tally[winner]) / asked, tuple(votes))


def _label(output: object) -> object:
    """A key under which equal labels meet, and True does not meet 1."""
    if isinstance(output, bool | np.bool_):
        return ("bool", bool(output))
    return output.tobytes() if isinstance(output, np.ndarray) else output


def _mean(votes: Votes, asked: int, kind: object) -> Combined:
    outputs = [np.asarray(vote.output) for vote in votes.values()]
    rows = np.stack([np.asarray(output, np.float64).reshape(-1) for output in outputs])
    largest = float(np.abs(rows).max(initial=0.0))
    unit = rows / largest if largest > 0 else rows  # so that squares neither overflow nor vanish
    mean = unit.mean(axis=0)
    size = float(np.linalg.norm(unit, axis=1).mean())
    spread = float(np.sqrt(np.square(unit - mean).sum(axis=1).mean()))
    agreement = size / (size + spread) if size > 0 else 1.0
    confidence = min(len(votes) / asked * agreement, 1.0)
    mean = mean * largest if largest > 0 else mean
    if kind == "number":
        return Combined(float(mean[0]), confidence, tuple(votes))
    dtype = np.result_type(*outputs)
    shaped = mean.reshape(outputs[0].shape).astype(dtype if dtype.kind == "f" else np.float64)
    return Combined(shaped, confidence, tuple(votes))
