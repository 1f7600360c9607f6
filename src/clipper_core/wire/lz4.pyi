from enum import IntEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

LZ4_BYTES_MAX: int
LZ4_GROWTH_MAX: int

class Search(IntEnum):
    LITERALS = 0
    THOROUGH = 1
    QUICK = 8

_Bytes: TypeAlias = bytes | bytearray | memoryview

def bound_lz4(n: int) -> int: ...
def encode_lz4(data: _Bytes, search: int = 0) -> bytes: ...
def decode_lz4(block: _Bytes | NDArray[np.uint8], size: int) -> bytes: ...
