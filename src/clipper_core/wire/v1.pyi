from collections.abc import Iterable
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

V1_HEAD_BYTES: int

class V1(IntEnum):
    V1_I32 = 1
    V1_F64 = 2
    V1_U8 = 3
    V1_VAR_I32 = 4
    V1_VAR_F64 = 5
    V1_VAR_U8 = 6
    V1_STR = 7

_Bytes: TypeAlias = bytes | bytearray | memoryview

def encode_v1(format: int, rows: Iterable[Any], search: int = 0) -> bytes: ...
def message_bytes_v1(
    head: _Bytes, *, bytes_max: int = 67108864, rows_max: int = 1048576
) -> int: ...
def decode_v1(
    message: _Bytes, *, bytes_max: int = 67108864, rows_max: int = 1048576
) -> list[NDArray[np.int32] | NDArray[np.float64]] | list[bytes] | list[str]: ...
