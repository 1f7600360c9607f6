from collections.abc import Callable
from typing import TypeVar, final

import numpy as np
from numpy.typing import NDArray

from clipper_core.learning.bandit import Rule

_Model = TypeVar("_Model")

@final
class LabelVotes:
    """Combines labels by the weights of one rule. Threads: any."""

    def __init__(self, rule: Rule, bit_of: Callable[[object], int], doubt: float) -> None: ...
    def answer(
        self,
        models: tuple[_Model, ...],
        rows: NDArray[np.float64],
        sure: NDArray[np.float64],
        labels: int,
        arrived: object,
        missing: int,
    ) -> tuple[object, float, tuple[_Model, ...], float] | None: ...
