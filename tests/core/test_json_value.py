"""Predictions as JSON: byte for byte what msgspec writes, or nothing."""

import math
import random
import struct
from typing import Any

import msgspec
import numpy as np
import pytest

from clipper_core.http.json_value import JsonArray, json_of

SEEDS = range(5)
DTYPES = ("?", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8")


def as_msgspec(value: Any) -> bytes:
    return msgspec.json.encode(
        value.tolist() if isinstance(value, np.ndarray | np.generic) else value
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_doubles_are_written_as_msgspec_does(seed: int) -> None:
    rng = random.Random(seed)
    for i in range(8000):
        if i % 4 == 0:
            (value,) = struct.unpack("<d", rng.randbytes(8))
        elif i % 4 == 1:
            value = round(rng.uniform(-1e3, 1e3), rng.randrange(6))
        elif i % 4 == 2:
            value = rng.choice([1, -1]) * 10.0 ** rng.randrange(-20, 25) * rng.randrange(1, 1000)
        else:
            value = float(rng.randrange(-(1 << 60), 1 << 60))
        found = json_of(value)
        assert found == (as_msgspec(value) if math.isfinite(value) else None), value


@pytest.mark.parametrize(
    "value",
    [0.0, -0.0, 1e-5, 9.99e-6, 1e15, 1e16, 1e17, 5e-324, 1.7976931348623157e308, 123456.0, 0.1],
)
def test_the_ends_of_the_layouts(value: float) -> None:
    assert json_of(value) == as_msgspec(value)


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_every_type(dtype: str) -> None:
    rng = np.random.default_rng(3)
    for shape in [(1,), (7,), (2, 3), (2, 2, 2), (3, 0), (0,)]:
        raw = rng.integers(0, 256, int(np.prod(shape)) * np.dtype(dtype).itemsize, np.uint8)
        array = (
            (raw % 2).astype(bool).reshape(shape)
            if dtype == "?"
            else raw.view(dtype).reshape(shape)
        )
        if array.dtype.kind == "f":
            array = np.where(np.isfinite(array), array, 1).astype(dtype)
        assert json_of(array) == as_msgspec(array)


@pytest.mark.parametrize(
    "value", [0, -1, (1 << 63) - 1, -(1 << 63), True, False, "", "plain text", "~!#"]
)
def test_whole_numbers_and_plain_text(value: Any) -> None:
    assert json_of(value) == as_msgspec(value)


@pytest.mark.parametrize(
    "value",
    [
        b"bytes",
        'a "quote"',
        "back\\slash",
        "line\n",
        "caf\u00e9",
        math.nan,
        math.inf,
        np.array([1.0, math.nan]),
        np.array([[1.0], [math.inf]], "f4"),
        np.array([1.0], "f2"),
    ],
)
def test_what_is_not_plain_is_left_alone(value: Any) -> None:
    assert json_of(value) is None


@pytest.mark.parametrize("seed", range(40))
def test_an_array_in_pieces_is_what_msgspec_writes(seed: int) -> None:
    rng = random.Random(seed)
    dtype = np.dtype(rng.choice([*DTYPES, "f2"]))
    shape = [rng.choice([0, 1, 2, 3, 40]) for _ in range(rng.randrange(5))]
    count = int(np.prod(shape))
    raw = np.frombuffer(rng.randbytes(count * dtype.itemsize), np.uint8)
    array = ((raw % 2).astype(bool) if dtype.kind == "b" else raw.view(dtype)).reshape(shape)
    if rng.random() < 0.3:
        array = array.T
    for flat in (False, True):
        text, pieces, most = JsonArray(array, flat), [], rng.choice([1, 20, 300, 1 << 14])
        while piece := text.take(most):
            pieces.append(piece)
        wanted = as_msgspec(array.ravel())[1:-1] if flat else as_msgspec(array)
        assert b"".join(pieces) == wanted
        assert count == 0 or max(map(len, pieces)) <= most + 60
        assert text.take(most) == b""


@pytest.mark.parametrize(
    "array", [np.array(["a"]), np.array([1j]), np.zeros((1,) * 9), np.array([1], ">f8")]
)
def test_arrays_that_are_not_written_in_pieces(array: Any) -> None:
    with pytest.raises(TypeError, match="is not written as JSON here"):
        JsonArray(array)
