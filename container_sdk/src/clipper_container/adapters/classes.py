"""Converts probabilities to labels and confidences."""

from __future__ import annotations

import numpy as np

from clipper_container.model import Scored, UserValue


def labelled(scores: object, labels: object, confidence: bool) -> UserValue:
    """Return the label of each row, with its probability as confidence if requested.

    scores: (n,) of the second of two classes, or (n, classes). labels: the classes in order; None:
    their numbers.
    """
    scores = np.asarray(scores)
    if scores.ndim == 1:
        best, sure = (scores > 0.5).astype(np.intp), np.maximum(scores, 1 - scores)
    else:
        best, sure = np.argmax(scores, axis=1), np.max(scores, axis=1)
    outputs: object = best if labels is None else np.take(np.asarray(labels), best)
    return Scored(outputs, sure) if confidence else outputs
