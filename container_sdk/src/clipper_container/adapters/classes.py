"""Labels and confidences out of probabilities, as an estimator's predict() and predict_proba()
would give them."""

from __future__ import annotations

from typing import Any

import numpy as np

from clipper_container.model import Scored


def labelled(scores: Any, labels: Any, confidence: bool) -> Any:
    """scores: (n,) of the second of two classes, or (n, classes).  labels: of the classes, in
    order; None: their numbers."""
    scores = np.asarray(scores)
    if scores.ndim == 1:
        best, sure = (scores > 0.5).astype(np.intp), np.maximum(scores, 1 - scores)
    else:
        best, sure = np.argmax(scores, axis=1), np.max(scores, axis=1)
    outputs: Any = best if labels is None else np.take(np.asarray(labels), best)
    return Scored(outputs, sure) if confidence else outputs
