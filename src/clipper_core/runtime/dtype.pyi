from enum import IntEnum

import numpy as np

class DType(IntEnum):
    ANY = 0
    BOOL = 1
    U8 = 2
    I8 = 3
    U16 = 4
    I16 = 5
    U32 = 6
    I32 = 7
    U64 = 8
    I64 = 9
    F16 = 10
    F32 = 11
    F64 = 12
    STR = 13
    BYTES = 14

NAMES: dict[str, DType]

def given_type(array: np.ndarray) -> str: ...
def item_bytes(dtype: int) -> int: ...
