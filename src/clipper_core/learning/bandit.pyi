from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

_Rows = np.ndarray[Any, np.dtype[np.float64]]

class RuleKind(IntEnum):
    EXP3 = 1
    HEDGE = 2
    GREEDY = 3
    SQUARECB = 4
    THOMPSON = 5
    KL_UCB = 6
    TSALLIS = 7
    LOGODDS = 8
    STACKING = 9
    MIXTURE = 10
    MEMORIES = 11
    LINEAR = 12

class Rule:
    """A rule with its parameters. Takes rows f64[k, columns] and returns new ones; nothing is
    changed in place. Threads: any."""

    def __init__(
        self,
        kind: int,
        *,
        eta: float = 0.0,
        share: float = 0.0,
        floor: float = 0.0,
        discount: float = 1.0,
    ) -> None: ...
    @property
    def kind(self) -> int: ...
    @property
    def columns(self) -> int: ...
    def choose(self, rows: _Rows, seen: float, uniform: float) -> tuple[int, float]: ...
    def probabilities(self, rows: _Rows, seen: float) -> _Rows: ...
    def weights(self, rows: _Rows, classes: float = 2.0) -> _Rows: ...
    def limited(
        self, rows: _Rows, columns: NDArray[np.uint32], least: float, counts: float
    ) -> _Rows: ...
    def learn(
        self,
        rows: _Rows,
        seen: float,
        losses: ArrayLike,
        chosen: int = -1,
        p: float = 1.0,
        weight: float = 1.0,
    ) -> _Rows: ...
    def learn_many(
        self,
        rows: _Rows,
        seen: float,
        losses: ArrayLike,
        chosen: ArrayLike | None = None,
        p: ArrayLike | None = None,
    ) -> _Rows: ...
    def stack(
        self,
        rows: _Rows,
        votes: ArrayLike,
        label: ArrayLike,
        classes: float = 2.0,
        weight: float = 1.0,
        right: float = 1.0,
    ) -> _Rows: ...
    def stack_evidence(
        self,
        rows: _Rows,
        evidence: ArrayLike,
        label: int,
        classes: float,
        weight: float = 1.0,
        right: float = 1.0,
    ) -> _Rows: ...
