from collections.abc import Callable
from typing import Any, final

import numpy as np
from numpy.typing import ArrayLike

from clipper_core.learning.bandit import Rule

_Rows = np.ndarray[Any, np.dtype[np.float64]]

@final
class FeedbackUpdate:
    """The update of states by one rule. Takes states and returns new ones. Threads: any."""

    def __init__(
        self,
        rule: Rule,
        fade: float,
        make: Callable[..., Any],
        sets: object = None,
    ) -> None: ...
    def one(
        self,
        models: tuple[Any, ...],
        rows: _Rows,
        sure: _Rows,
        seen: float,
        labels: int,
        thresholds: object,
        queried: tuple[Any, ...],
        odds: tuple[float, ...],
        predictions: object,
        label: object,
        weight: float,
        features: tuple[float, ...] = (),
    ) -> Any: ...
    def many(
        self,
        rows: _Rows,
        sure: _Rows,
        seen: float,
        labels: int,
        values: ArrayLike,
        arrived: ArrayLike,
        confidence: ArrayLike,
        label: ArrayLike,
        bits: ArrayLike,
        chosen: ArrayLike,
        p: ArrayLike,
        cells: ArrayLike | None = None,
        threshold: float = 0.0,
        named: ArrayLike | None = None,
        known: ArrayLike = (),
        room: int = 0,
    ) -> tuple[_Rows, _Rows, float, int, float, np.ndarray[Any, np.dtype[np.uint8]]]: ...
    def graded(
        self, rows: _Rows, seen: float, losses: ArrayLike, chosen: ArrayLike, p: ArrayLike
    ) -> tuple[_Rows, float]: ...

@final
class OpenState:
    """A state while it learns several observations, in arrays of its own."""
