from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

def reports_probabilities(votes: dict[Any, Any]) -> bool:
    """Return whether a prediction of a dict of them has a class probability."""

def class_evidence(
    models: Sequence[Any],
    votes: dict[Any, Any],
    numbers: dict[object, int],
    kind: type,
    label_key: Callable[[object], object],
    labels_max: int,
) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Return how much each model is for each label, 0 to 1, by its class probabilities."""
