import numpy as np
from numpy.typing import ArrayLike, NDArray

_Rows = NDArray[np.float64]

def initial(k: int) -> _Rows: ...
def widened(rows: _Rows, cell: int) -> _Rows: ...
def tallied(
    rows: _Rows, votes: ArrayLike, cells: ArrayLike, confidence: ArrayLike, classes: float
) -> tuple[_Rows, float]: ...
def learned(
    rows: _Rows,
    votes: ArrayLike,
    cells: ArrayLike,
    confidence: ArrayLike,
    classes: float,
    label: int,
    cell: int,
    right: float = 1.0,
    weight: float = 1.0,
) -> _Rows: ...
def weights(rows: _Rows) -> _Rows: ...
