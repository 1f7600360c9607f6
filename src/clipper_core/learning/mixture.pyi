import numpy as np
from numpy.typing import ArrayLike, NDArray

_Rows = NDArray[np.float64]
LABELS_MAX: int

def initial(k: int) -> _Rows: ...
def of_user(rows: _Rows) -> _Rows: ...
def limited(rows: _Rows, counts: float) -> _Rows: ...
def widened(rows: _Rows, cell: int, features: int = 0, pooled: bool = False) -> _Rows: ...
def shape(rows: _Rows) -> tuple[int, int, bool]: ...
def in_context(rows: _Rows, context: ArrayLike) -> _Rows: ...
def tallied(
    rows: _Rows,
    votes: ArrayLike,
    cells: ArrayLike,
    confidence: ArrayLike,
    classes: float,
    evidence: ArrayLike | None = None,
    label_cells: ArrayLike | None = None,
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
    context: ArrayLike = (),
    evidence: ArrayLike | None = None,
    label_cells: ArrayLike | None = None,
) -> _Rows: ...
def weights(rows: _Rows) -> _Rows: ...
