"""Combining outputs with weights: a vote over labels, a mean of numbers.

Labels are int, bool, str and bytes; numbers are floats (and ints beside floats), and arrays,
averaged by element. When models disagree even on that, the kind that weighs most is used and the
others count as not agreeing.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from clipper.selection.policy import Combined, Prediction, Predictions, is_usable, sound_confidence
from clipper.types import VersionedModel

Votes = dict[VersionedModel, Prediction]
Weights = Mapping[VersionedModel, float]


def in_order(models: Any) -> tuple[VersionedModel, ...]:
    """Sorted by name and version: an order that no caller chose."""
    return tuple(sorted(set(models), key=lambda model: (model.name, model.version or 0)))


def usable(arrived: Predictions) -> Votes:
    """What may be answered with, in order."""
    return {
        model: arrived[model] for model in in_order(arrived) if is_usable(arrived[model].output)
    }


def combine(votes: Votes, weights: Weights, asked: float) -> Combined:
    """asked: the weight of all that were asked, missing ones too."""
    kind, chosen = heaviest_kind(votes, weights)
    if kind == "label":
        return vote(chosen, weights, asked)
    return mean(chosen, weights, asked, kind)


def heaviest_kind(votes: Votes, weights: Weights) -> tuple[object, Votes]:
    """The kind of output with most weight (the first model's, of equals), and the votes of that
    kind."""
    if all(type(vote.output) in (int, str) for vote in votes.values()):
        return "label", votes
    floats = any(isinstance(vote.output, float | np.floating) for vote in votes.values())
    kinds = {model: _kind(vote.output, floats) for model, vote in votes.items()}
    heavy: dict[object, float] = {}
    for model, kind in kinds.items():
        heavy[kind] = heavy.get(kind, 0.0) + weights[model]
    best = max(heavy, key=lambda kind: heavy[kind])
    return best, {model: votes[model] for model, kind in kinds.items() if kind == best}


def _kind(output: object, floats: bool) -> object:
    """What may be combined with what: "label", "number", or the shape of an array of numbers."""
    if isinstance(output, np.ndarray) and output.dtype.kind in "biuf":
        return output.shape
    is_int = isinstance(output, int | np.integer) and not isinstance(output, bool)
    if isinstance(output, float | np.floating) or (floats and is_int):
        return "number"
    return "label"


def label_key(output: object) -> object:
    """A key under which equal labels meet, and True does not meet 1."""
    if type(output) in (int, str):
        return output
    if isinstance(output, bool | np.bool_):
        return ("bool", bool(output))
    return output.tobytes() if isinstance(output, np.ndarray) else output


def scores(votes: Votes, weights: Weights) -> dict[object, float]:
    """By label key: the weight behind it."""
    found: dict[object, float] = {}
    for model, vote in votes.items():
        key = label_key(vote.output)
        found[key] = found.get(key, 0.0) + weights[model]
    return found


def vote(votes: Votes, weights: Weights, asked: float) -> Combined:
    """The label with most weight behind it. Ties go to the surer models, then to the first model by
    name and version: never to a label for its own sake, which costs accuracy. Confidence: the
    winner's share of the weight that was asked.
    """
    heavy = scores(votes, weights)
    top = max(heavy.values())
    sure: dict[object, float] = {}
    for model in votes:
        key = label_key(votes[model].output)
        if heavy[key] >= top * (1 - 1e-12):
            sure[key] = sure.get(key, 0.0) + sound_confidence(votes[model].confidence, unknown=0.5)
    winner = max(sure, key=lambda key: sure[key])  # max keeps the first of equals
    output = next(vote.output for vote in votes.values() if label_key(vote.output) == winner)
    share = min(heavy[winner] / asked, 1.0) if asked > 0 else 0.0
    return Combined(output, share, tuple(votes), agreement=share)


def mean(votes: Votes, weights: Weights, asked: float, kind: object) -> Combined:
    """Confidence: share of the weight heard x m / (m + s), where m is the mean size of the outputs
    (absolute value, or Euclidean norm) and s their standard deviation: half when they scatter as
    widely as they are large, the same in any unit.
    """
    outputs = [np.asarray(vote.output) for vote in votes.values()]
    share = np.array([weights[model] for model in votes])
    heard = float(share.sum())
    share = share / heard if heard > 0 else np.full(len(share), 1 / len(share))
    rows = np.stack([np.asarray(output, np.float64).reshape(-1) for output in outputs])
    largest = float(np.abs(rows).max(initial=0.0))
    unit = rows / largest if largest > 0 else rows  # so that squares neither overflow nor vanish
    middle = share @ unit
    size = float(share @ np.linalg.norm(unit, axis=1))
    spread = float(np.sqrt(share @ np.square(unit - middle).sum(axis=1)))
    agreement = size / (size + spread) if size > 0 else 1.0
    confidence = min(heard / asked * agreement, 1.0) if asked > 0 else 0.0
    middle = middle * largest if largest > 0 else middle
    if kind == "number":
        return Combined(float(middle[0]), confidence, tuple(votes), agreement=agreement)
    dtype = np.result_type(*outputs)
    shaped = middle.reshape(outputs[0].shape).astype(dtype if dtype.kind == "f" else np.float64)
    return Combined(shaped, confidence, tuple(votes), agreement=agreement)
