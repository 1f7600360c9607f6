"""Element types: the numbers are the wire's, the names the public notation's, the sizes numpy's."""

import numpy as np
import pytest

from clipper_core.runtime.dtype import NAMES, DType, item_bytes

NUMPY = {
    "bool": "?",
    "u8": "u1",
    "i8": "i1",
    "u16": "u2",
    "i16": "i2",
    "u32": "u4",
    "i32": "i4",
    "u64": "u8",
    "i64": "i8",
    "f16": "f2",
    "f32": "f4",
    "f64": "f8",
}


def test_numbers_are_those_of_the_wire() -> None:
    assert {name: int(number) for name, number in NAMES.items()} == {
        name: number for number, name in enumerate([*NUMPY, "str", "bytes"], start=1)
    }
    assert {dtype.name.lower(): int(dtype) for dtype in DType} == {"any": 0} | {
        k: int(v) for k, v in NAMES.items()
    }


@pytest.mark.parametrize("name", NUMPY)
def test_sizes_are_numpys(name: str) -> None:
    assert item_bytes(NAMES[name]) == np.dtype(NUMPY[name]).itemsize


@pytest.mark.parametrize(
    ("number", "nbytes"), [(13, 1), (14, 1), (0, 0), (15, 0), (255, 0), (-1, 0)]
)
def test_sizes_of_what_is_no_number(number: int, nbytes: int) -> None:
    assert item_bytes(number) == nbytes
