from collections.abc import Mapping, Sequence
from typing import Any, Protocol, final

import numpy as np
from numpy.typing import NDArray

from clipper_core.runtime.dtype import NAMES as NAMES

class _Spec(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def numpy(self) -> np.dtype[Any]: ...

@final
class RecordLayout:
    names: tuple[str, ...]
    def __init__(self, specs: Sequence[_Spec], finite: bool = False) -> None: ...
    def pack(self, values: Mapping[str, Any]) -> bytes | None: ...
    def unpack(self, record: bytes) -> dict[str, Any] | None: ...

def pack_vectors(
    columns: list[Any], dtypes: list[np.dtype[Any]]
) -> tuple[NDArray[np.uint8], NDArray[np.int64]] | None: ...
