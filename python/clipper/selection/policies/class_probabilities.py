"""Class probabilities that models report beside a label, as evidence for the labels.

A model reports them as qualifiers (docs/speculation.md) whose names begin with `p:`, followed by
the text of the label: {"p:cat": 0.7, "p:dog": 0.3}. A label that is not named has none.
"""

from collections.abc import Sequence

import numpy as np

from clipper.selection.votes import Votes, label_key
from clipper.types import VersionedModel
from clipper_core.learning.class_evidence import class_evidence, reports_probabilities
from clipper_core.learning.mixture import LABELS_MAX

Evidence = np.ndarray[tuple[int, int], np.dtype[np.float64]]


def has_probabilities(votes: Votes) -> bool:
    """Return True if a model reports class probabilities."""
    return reports_probabilities(votes)


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
    kind = _kind(next(type(one.output) for one in votes.values()))
    return class_evidence(models, votes, numbers, kind, label_key, LABELS_MAX)


def label_of(key: object) -> object:
    """Return the label of a label key."""
    return key[1] if isinstance(key, tuple) else key


def _kind(found: type) -> type:
    """Return the plain type of labels of this type."""
    if issubclass(found, bool | np.bool_):
        return bool
    if issubclass(found, int | np.integer):
        return int
    return bytes if issubclass(found, bytes) else str
