"""Class probabilities that models report beside a label, as evidence for the labels.

A model reports them as qualifiers (docs/speculation.md) whose names begin with `p:`, followed by
the text of the label: {"p:cat": 0.7, "p:dog": 0.3}. A label that is not named has none.
"""

import math
from collections.abc import Sequence

import numpy as np

from clipper.selection.policy import Prediction
from clipper.selection.votes import Votes, label_key
from clipper.types import VersionedModel
from clipper_core.learning.mixture import LABELS_MAX

PREFIX = "p:"
P_MIN = 0.01  # a smaller probability counts as this one, so that no model can rule out a label
_SCALE = -math.log(P_MIN)

Evidence = np.ndarray[tuple[int, int], np.dtype[np.float64]]


def has_probabilities(votes: Votes) -> bool:
    """Return True if a model reports class probabilities."""
    return any(one.qualifiers and _named(one) for one in votes.values())


def evidence_of(
    models: Sequence[VersionedModel], votes: Votes, numbers: dict[object, int]
) -> Evidence | None:
    """Return f64 (models, labels), how much each model is for each label; None if no model reports
    probabilities.

    It is 1 + ln(p) / ln(100), which is 1 for a certain label and 0 for a probability of at most
    0.01. A model that reports none is certain of its vote; one without a vote has zeros.
    numbers: codes of the labels from 1, by label key; labels that are only named are added, at most
    LABELS_MAX in all.
    """
    if not has_probabilities(votes) or len(numbers) > LABELS_MAX:
        return None
    kind = next(type(one.output) for one in votes.values())
    found: list[dict[int, float]] = []
    for model in models:
        one = votes.get(model)
        if one is None:
            found.append({})
            continue
        row = dict[int, float]()
        for text, p in _named(one).items():
            key = _key_of(text, kind)
            if key in numbers or (key is not None and len(numbers) < LABELS_MAX):
                row[numbers.setdefault(key, len(numbers) + 1)] = 1.0 + math.log(p) / _SCALE
        found.append(row or {numbers[label_key(one.output)]: 1.0})
    evidence = np.zeros((len(models), len(numbers)))
    for i, row in enumerate(found):
        for code, x in row.items():
            evidence[i, code - 1] = x
    return evidence


def label_of(key: object) -> object:
    """Return the label of a label key."""
    return key[1] if isinstance(key, tuple) else key


def _named(one: Prediction) -> dict[str, float]:
    """Return the probabilities, P_MIN to 1, by the text of the label."""
    return {
        name[len(PREFIX) :]: min(max(float(p), P_MIN), 1.0)
        for name, p in one.qualifiers.items()
        if name.startswith(PREFIX) and isinstance(p, int | float) and p == p
    }


def _key_of(text: str, kind: type) -> object:
    """Return the label key of a text; None if it is no label of this kind."""
    if issubclass(kind, bool | np.bool_):
        return {"True": ("bool", True), "False": ("bool", False)}.get(text)
    if issubclass(kind, int | np.integer):
        return int(text) if text.removeprefix("-").isdecimal() and len(text) < 20 else None
    if issubclass(kind, bytes):
        return text.encode()
    return text
