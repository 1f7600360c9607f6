"""Combining outputs with weights: a vote over labels, a mean of numbers.

Labels are int, bool, str and bytes. Numbers are floats (and ints beside floats), and arrays, which
are averaged by element. If the models return different kinds of output, the kind with the largest
weight is used, and the others count as disagreeing.
"""

from collections.abc import Iterable, Mapping

import numpy as np

from clipper.selection.policy import Combined, Prediction, Predictions, is_usable, sound_confidence
from clipper.types import VersionedModel
from clipper_core.learning.number_votes import mean_of_numbers

Votes = dict[VersionedModel, Prediction]
Weights = Mapping[VersionedModel, float]


def sorted_models(models: Iterable[VersionedModel]) -> tuple[VersionedModel, ...]:
    """Return the distinct models, sorted by name and version."""
    return tuple(sorted(set(models), key=lambda model: (model.name, model.version or 0)))


def usable(arrived: Predictions) -> Votes:
    """Return the predictions that may be answered with, sorted by model."""
    return {
        model: arrived[model]
        for model in sorted_models(arrived)
        if is_usable(arrived[model].output)
    }


def answer_of_first(arrived: Predictions, models: Iterable[VersionedModel]) -> Combined | None:
    """Return the first usable output in the order of `models`, with its model's confidence.

    A model that reports no confidence counts as sure. None if no output is usable.
    """
    for model in models:
        prediction = arrived[model]
        if is_usable(prediction.output):
            return Combined(prediction.output, sound_confidence(prediction.confidence), (model,))
    return None


def combine(votes: Votes, weights: Weights, selected: float) -> Combined:
    """Vote on labels or average numbers. selected: total weight, missing models included."""
    numbers = mean_of_numbers(tuple(votes), votes, weights, selected)
    if numbers is not None:
        return Combined(*numbers)
    kind, chosen = heaviest_kind(votes, weights)
    if kind == "label":
        return vote(chosen, weights, selected)
    return mean(chosen, weights, selected, kind)


def heaviest_kind(votes: Votes, weights: Weights) -> tuple[object, Votes]:
    """Return the kind of output with the largest weight, and the votes of that kind.

    The kind is "label", "number", or the shape of an array. The first model's kind wins a tie.
    """
    if all(type(vote.output) in (int, str) for vote in votes.values()):
        return "label", votes
    floats = any(isinstance(vote.output, float | np.floating) for vote in votes.values())
    kinds = {model: _kind(vote.output, floats) for model, vote in votes.items()}
    by_kind: dict[object, float] = {}
    for model, kind in kinds.items():
        by_kind[kind] = by_kind.get(kind, 0.0) + weights[model]
    best = max(by_kind, key=lambda kind: by_kind[kind])
    return best, {model: votes[model] for model, kind in kinds.items() if kind == best}


def _kind(output: object, floats: bool) -> object:
    if isinstance(output, np.ndarray) and output.dtype.kind in "biuf":
        return output.shape
    is_int = isinstance(output, int | np.integer) and not isinstance(output, bool)
    if isinstance(output, float | np.floating) or (floats and is_int):
        return "number"
    return "label"


def label_key(output: object) -> object:
    """Return a hashable key that equal labels share; True and 1 have different keys."""
    if type(output) in (int, str):
        return output
    if isinstance(output, bool | np.bool_):
        return ("bool", bool(output))
    return output.tobytes() if isinstance(output, np.ndarray) else output


def label_weights(votes: Votes, weights: Weights) -> dict[object, float]:
    """Return the summed weight of the votes for each label, by label key."""
    found: dict[object, float] = {}
    for model, vote in votes.items():
        key = label_key(vote.output)
        found[key] = found.get(key, 0.0) + weights[model]
    return found


def vote(votes: Votes, weights: Weights, selected: float) -> Combined:
    """Return the label with the largest weight; its confidence is its share of `selected`.

    A tie goes to the label whose models are more confident, then to the first model by name and
    version. It never goes to the smaller label, which would cost accuracy.
    """
    by_label = label_weights(votes, weights)
    top = max(by_label.values())
    sure: dict[object, float] = {}
    for model in votes:
        key = label_key(votes[model].output)
        if by_label[key] >= top * (1 - 1e-12):
            sure[key] = sure.get(key, 0.0) + sound_confidence(votes[model].confidence, unknown=0.5)
    winner = max(sure, key=lambda key: sure[key])  # max returns the first of equals
    output = next(vote.output for vote in votes.values() if label_key(vote.output) == winner)
    share = min(by_label[winner] / selected, 1.0) if selected > 0 else 0.0
    return Combined(output, share, tuple(votes), agreement=share)


def mean(votes: Votes, weights: Weights, selected: float, kind: object) -> Combined:
    """Return the weighted mean of numbers, or of arrays of one shape.

    The confidence is the share of the weight that arrived times m / (m + s), where m is the mean
    size of the outputs (absolute value, or Euclidean norm) and s their standard deviation. It does
    not depend on the unit, and is one half when the outputs scatter as widely as they are large.
    """
    outputs = [np.asarray(vote.output) for vote in votes.values()]
    share = np.array([weights[model] for model in votes])
    arrived = float(share.sum())
    share = share / arrived if arrived > 0 else np.full(len(share), 1 / len(share))
    rows = np.stack([np.asarray(output, np.float64).reshape(-1) for output in outputs])
    largest = float(np.abs(rows).max(initial=0.0))
    unit = rows / largest if largest > 0 else rows  # so that squares neither overflow nor vanish
    middle = share @ unit
    size = float(share @ np.linalg.norm(unit, axis=1))
    spread = float(np.sqrt(share @ np.square(unit - middle).sum(axis=1)))
    agreement = size / (size + spread) if size > 0 else 1.0
    confidence = min(arrived / selected * agreement, 1.0) if selected > 0 else 0.0
    middle = middle * largest if largest > 0 else middle
    if kind == "number":
        return Combined(float(middle[0]), confidence, tuple(votes), agreement=agreement)
    dtype = np.result_type(*outputs)
    shaped = middle.reshape(outputs[0].shape).astype(dtype if dtype.kind == "f" else np.float64)
    return Combined(shaped, confidence, tuple(votes), agreement=agreement)
