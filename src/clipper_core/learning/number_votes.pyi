from collections.abc import Mapping
from typing import TypeVar

_Model = TypeVar("_Model")

def mean_of_numbers(
    models: tuple[_Model, ...],
    predictions: object,
    weights: Mapping[_Model, float] | None,
    selected: float,
) -> tuple[float, float, tuple[_Model, ...], float] | None:
    """Return (mean, confidence, models used, agreement) of numbers; None for other predictions."""
