"""Labels of classifiers: as JSON beside a model's file, and for each row, with its confidence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from clipper_container.model import Scored, UserValue
from clipper_container.schema import Array


def labels_of(estimator: object) -> list[object] | None:
    """Return the classes of a classifier as values of Python; None if it has none, or one list
    for each of several outputs.
    """
    found = getattr(estimator, "classes_", None)
    return found.tolist() if isinstance(found, np.ndarray) else None


def are_plain(labels: Sequence[object] | None) -> bool:
    """Return whether JSON can hold these labels as they are."""
    return labels is None or all(isinstance(label, bool | int | float | str) for label in labels)


def dtype_of(estimator: object) -> str:
    """Return the numpy type of a classifier's labels as text, "" if its values tell it."""
    found = getattr(estimator, "classes_", None)
    text = str(found.dtype) if isinstance(found, np.ndarray) else ""
    return text if text != "int64" else ""


def label_array(labels: Sequence[object] | None, dtype: str = "") -> Array | None:
    """Return labels as an array, of the numpy type that the classifier has them in."""
    return None if labels is None else np.array(labels, dtype or None)


def labelled(scores: object, labels: Array | None, confidence: bool) -> UserValue:
    """Return the label of each row, with its probability as confidence if requested.

    scores: (n,) of the second of two classes, or (n, classes). labels: the classes in order; None:
    their numbers.
    """
    scores = np.asarray(scores)
    if scores.ndim == 1:
        best, sure = (scores > 0.5).astype(np.intp), np.maximum(scores, 1 - scores)
    else:
        best, sure = np.argmax(scores, axis=1), np.max(scores, axis=1)
    outputs: object = best if labels is None else np.take(labels, best)
    return Scored(outputs, sure) if confidence else outputs


def probabilities_of(outputs: object, probabilities: object, classes: Array) -> Array | None:
    """Return the probability of each row's own label, (n,).

    outputs: labels (n,). probabilities: (n, classes). classes: the labels of the columns. Returns
    None if these are no probabilities of these labels.
    """
    outputs, probabilities = np.asarray(outputs), np.asarray(probabilities)
    if outputs.ndim != 1 or probabilities.shape != (len(outputs), len(classes)):
        return None
    is_label = outputs[:, None] == classes[None, :]
    if is_label.shape != probabilities.shape or not (is_label.sum(axis=1) == 1).all():
        return None
    sure: Array = probabilities[is_label]
    return sure if ((sure >= 0) & (sure <= 1)).all() else None
