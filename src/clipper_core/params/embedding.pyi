from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from clipper_core.params.optimizer import Initializer, Optimizer

_F32 = npt.NDArray[np.float32]

def key_of(name: str, seed: int = 0) -> int: ...

class Table:
    name: str
    seed: int
    rows_max: int
    optimizer: Optimizer
    initializer: Initializer
    steps: int
    def __init__(
        self,
        name: str,
        dim: int,
        *,
        optimizer: Optimizer | None = None,
        initializer: Initializer | None = None,
        seed: int = 0,
        dtype: str = "f32",
        rows_max: int = 4294967296,
        evicts: bool = False,
        admit_after: int = 1,
    ) -> None: ...
    def __len__(self) -> int: ...
    @property
    def dim(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def row_bytes(self) -> int: ...
    def alter(self, optimizer: Optimizer, *, rows_max: int, evicts: bool) -> None: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def bounded(self) -> bool: ...
    @bounded.setter
    def bounded(self, value: bool) -> None: ...
    @overload
    def pull(
        self,
        ids: npt.ArrayLike,
        dtype: Literal["f32"] = "f32",
        out: _F32 | None = None,
        *,
        stamp: int = 0,
    ) -> _F32: ...
    @overload
    def pull(
        self, ids: npt.ArrayLike, dtype: Literal["f16"], out: None = None, *, stamp: int = 0
    ) -> npt.NDArray[np.float16]: ...
    @overload
    def pull(
        self, ids: npt.ArrayLike, dtype: Literal["bf16"], out: None = None, *, stamp: int = 0
    ) -> npt.NDArray[np.uint16]: ...
    @overload
    def pull(
        self, ids: npt.ArrayLike, dtype: Literal["i8"], out: None = None, *, stamp: int = 0
    ) -> tuple[npt.NDArray[np.int8], _F32]: ...
    @overload
    def pull(self, ids: npt.ArrayLike, dtype: str, out: Any = None, *, stamp: int = 0) -> Any: ...
    def push(
        self,
        ids: npt.ArrayLike,
        gradients: npt.ArrayLike,
        *,
        scale: float = 1.0,
        step: int = 0,
        stamp: int = 0,
        gone: list[Any] | None = None,
    ) -> dict[str, int]: ...
    def write(
        self, ids: npt.ArrayLike, values: npt.ArrayLike, stamps: npt.ArrayLike | None = None
    ) -> dict[str, int]: ...
    def read(
        self, ids: npt.ArrayLike
    ) -> tuple[npt.NDArray[np.bool_], _F32, npt.NDArray[np.uint32]]: ...
    def walk(
        self, position: int = 0, rows: int = 4096
    ) -> tuple[npt.NDArray[np.int64], _F32, npt.NDArray[np.uint32], int | None]: ...
    def remove(self, ids: npt.ArrayLike) -> int: ...
    def expire(self, before: int) -> int: ...
    def reserve(self, rows: int) -> None: ...
