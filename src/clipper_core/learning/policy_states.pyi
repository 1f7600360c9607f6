from typing import Any, final

import numpy as np

_Doubles = np.ndarray[Any, np.dtype[np.float64]]

@final
class StateBlock:
    """The numbers of a learned state as one immutable block of memory. Threads: any."""

    @property
    def seen(self) -> float: ...
    @property
    def labels(self) -> int: ...
    @property
    def rows(self) -> _Doubles: ...
    @property
    def sure(self) -> _Doubles: ...

def state_block(rows: _Doubles, sure: _Doubles, seen: float, labels: int) -> StateBlock:
    """Return a block with copies of f64[rows, columns] and f64[bins, 2]."""

def block_of(array: object) -> StateBlock | None:
    """Return the block whose view an array is; None: it is of none."""

@final
class StateParts:
    """The part of a state that is no numbers: models, thresholds, users."""

@final
class Held:
    """The state of a context in memory, and the cell of its newest block."""

    base: Any
    prior: Any
    origin: Any
    applied: dict[str, int]
    doubts: dict[int, Any]
    revision: int
    since: int
    own: int
    touched: bool
    is_listed: bool
    is_late: bool

    def __init__(
        self, state: Any, base: Any, revision: int, applied: dict[str, int], *, own: int = 0
    ) -> None: ...
    @property
    def state(self) -> Any: ...
    def publish(self, state: Any) -> None: ...
    def copied(self) -> tuple[_Doubles, _Doubles] | None: ...
