"""Numbers in JSON: what is read is what Python's json reads, to the last bit; what is not such a
row is left alone."""

import json
import random
import struct
from typing import Any

import numpy as np
import pytest

from clipper_core.http.json_value import RowReader

SEEDS = range(5)


def scalar(dtype: str, text: str) -> Any:
    return RowReader(dtype, ()).read(text.encode())


@pytest.mark.parametrize("seed", SEEDS)
def test_doubles_are_those_of_python_to_the_last_bit(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(4000):
        kind = rng.randrange(8)
        if kind == 5:  # as float32.tolist() writes them
            text = repr(float(np.float32(rng.uniform(-1, 1) * 10.0 ** rng.randrange(-12, 12))))
        elif kind == 6:  # 19 digits, at the ends of the table of powers and beyond
            text = f"{rng.randrange(10**19)}e{rng.randrange(-70, 71)}"
        elif kind == 7:  # zeros that are no digits of the mantissa
            text = f"0.{'0' * rng.randrange(30)}{rng.getrandbits(60)}"
        elif kind == 0:  # any bits
            (value,) = struct.unpack("<d", rng.randbytes(8))
            text = repr(value) if np.isfinite(value) else "0"
        elif kind == 1:  # many digits
            text = f"{rng.randrange(10)}.{rng.randrange(10 ** rng.randrange(1, 30)):d}"
        elif kind == 2:  # near the bounds of the exact way
            text = f"{(1 << 53) + rng.randrange(-3, 4)}e{rng.randrange(-24, 25)}"
        elif kind == 3:
            text = f"{'-' * rng.randrange(2)}{rng.randrange(10 ** rng.randrange(1, 20))}{rng.choice(['', 'e5', 'E-7', 'e+3'])}"  # noqa: E501
        else:  # half way between two doubles
            text = str(((1 << 53) | rng.getrandbits(53)) * 2 + 1)
        found = scalar("f64", text)
        assert found is not None, text
        assert struct.pack("<d", found[0]) == struct.pack("<d", float(text)), text


@pytest.mark.parametrize("sign", ["", "-", "+"])
@pytest.mark.parametrize("wrap", [1 << 32, 1 << 63, 1 << 64, 1 << 65, 10 * (1 << 64)])
def test_an_exponent_beyond_64_bits_is_not_read_as_a_small_one(sign: str, wrap: int) -> None:
    for more in range(4):
        assert scalar("f64", f"-1e{sign}{wrap + more}") is None
        assert scalar("f64", f"1e{sign}{wrap + more}") is None


@pytest.mark.parametrize("seed", SEEDS)
def test_numbers_with_very_long_parts_are_those_of_python_or_none(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(2000):
        parts = [str(rng.getrandbits(rng.choice((3, 20, 63, 64, 65, 130)))) for _ in range(3)]
        text = f"{rng.choice(['', '-'])}{parts[0]}"
        text += f".{parts[1]}" if rng.random() < 0.5 else ""
        text += (
            f"{rng.choice('eE')}{rng.choice(['', '-', '+'])}{parts[2]}"
            if rng.random() < 0.7
            else ""
        )
        found = scalar("f64", text)
        if found is not None:
            assert struct.pack("<d", found[0]) == struct.pack("<d", float(text)), text


ENDS = [
    "1e400",
    "-1e400",
    "1e-400",
    "4.9e-324",
    "2.2250738585072014e-308",
    "1.7976931348623157e308",
    "0e0",
    "-0",
    "-0.0",
]


@pytest.mark.parametrize("text", ENDS)
def test_the_ends_of_the_doubles(text: str) -> None:
    found, value = scalar("f64", text), float(text)
    if found is not None:
        assert struct.pack("<d", found[0]) == struct.pack("<d", value)
    else:
        assert value in (0, float("inf"), float("-inf")) or abs(value) < 1e-300


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-",
        "+1",
        ".5",
        "5.",
        "01",
        "-01",
        "00",
        "1.e5",
        "1e",
        "1e+",
        "1e5.5",
        "--1",
        "NaN",
        "Infinity",
        "-Infinity",
        "nan",
        "inf",
        "0x10",
        "1_0",
        "true",
        "null",
        '"1"',
        "[1]",
        "{}",
        "1e99999",
    ],
)
def test_what_json_does_not_call_a_number_is_none(text: str) -> None:
    for dtype in ("f64", "f32", "i64"):
        found = scalar(dtype, text)
        assert found is None or found[1] < len(text)


@pytest.mark.parametrize("dtype", ["u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64"])
def test_integers_keep_to_their_bounds(dtype: str) -> None:
    bounds = np.iinfo(np.dtype(f"{dtype[0]}{int(dtype[1:]) // 8}"))
    for value in {
        bounds.min,
        bounds.max,
        bounds.min - 1,
        bounds.max + 1,
        0,
        -1,
        1,
        10**17,
        -(10**17),
        10**18 - 1,
    }:
        found = scalar(dtype, str(value))
        if found is None:
            assert not bounds.min <= value <= bounds.max or abs(value) >= 10**18
        else:
            assert bounds.min <= value <= bounds.max
            assert int(found[0]) == value
            assert found[0].dtype == bounds.dtype
    for text in ("1.0", "1e2", "1.5"):  # for the general way
        assert scalar(dtype, text) is None


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_of_any_shape_and_any_blanks(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        shape = tuple(rng.randrange(1, 5) for _ in range(rng.randrange(5)))
        dtype = rng.choice(["f64", "f32", "i32", "u8"])
        values = np.array([rng.randrange(100) for _ in range(int(np.prod(shape)))]).reshape(shape)
        text = json.dumps(
            values.tolist(),
            indent=rng.choice([None, 1]),
            separators=rng.choice([(",", ":"), (" , ", ": ")]),
        )
        before, after = " \n\t"[: rng.randrange(4)], rng.choice(["", " ", "}", ", 1]"])
        found = RowReader(dtype, shape).read((before + text + after).encode())
        assert found is not None
        row, end = found
        np.testing.assert_array_equal(row, values)
        assert row.shape == shape
        assert end == len(before) + len(text)
        assert RowReader(dtype, shape).read(b"xx" + text.encode(), 2)[1] == 2 + len(text)  # type: ignore[index]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_row_that_is_not_that_row_is_none(seed: int) -> None:
    rng = random.Random(seed)
    reader = RowReader("f64", (2, 3))
    whole = b"[[1, 2.5, 3], [4, -5e1, 6]]"
    assert reader.read(whole) is not None
    for cut in range(len(whole)):
        assert reader.read(whole[:cut]) is None
    for _ in range(2000):
        broken = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            broken[rng.randrange(len(broken))] = rng.choice(b'[],."0123 -e\x00\xff{}:')
        found = reader.read(broken)
        try:
            value = json.loads(bytes(broken))
            expected = np.array(value, np.float64) if np.shape(value) == (2, 3) else None
        except (ValueError, TypeError):
            expected = None
        if found is not None and found[1] == len(broken):
            assert expected is not None, bytes(broken)
            np.testing.assert_array_equal(found[0], expected)
    for wrong in (
        b"[[1,2,3]]",
        b"[[1,2,3],[4,5,6],[7,8,9]]",
        b"[[1,2],[3,4],[5,6]]",
        b"[1,2,3,4,5,6]",
        b"[[1,2,3],[4,5,null]]",
    ):
        assert reader.read(wrong) is None


def test_flat_rows_of_any_length() -> None:
    reader = RowReader("i32", (-1,))
    for n in (0, 1, 2, 1000):
        row, end = reader.read(json.dumps(list(range(n))).encode())  # type: ignore[misc]
        np.testing.assert_array_equal(row, np.arange(n))
        assert end == len(json.dumps(list(range(n))))
    for wrong in (b"[", b"[,]", b"[1,]", b"[,1]", b"[[1]]", b"1", b"[1 2]", b"[1,2", b""):
        assert reader.read(wrong) is None


def test_a_large_shape_allocates_no_memory_before_there_is_text_for_it() -> None:
    assert RowReader("f64", (1 << 20, 1 << 20)).read(b"[[1]]") is None


def test_the_text_may_be_any_buffer_and_the_place_any_number() -> None:
    reader = RowReader("f64", (1,))
    for text in (b"[1]", bytearray(b"[1]"), memoryview(b"[1]")):
        assert reader.read(text) is not None
    assert reader.read(b"[1]", 10) is None
    assert reader.read(b"[1]", -5) is not None
    with pytest.raises(TypeError):
        reader.read("[1]")


@pytest.mark.parametrize(
    ("dtype", "shape"), [("bool", (1,)), ("f16", (1,)), ("str", ()), ("any", ()), ("f64", (1,) * 5)]
)
def test_types_that_it_does_not_read(dtype: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(Exception, match="are read from JSON here"):
        RowReader(dtype, shape)
