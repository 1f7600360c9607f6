"""Keys and distances of outputs, beside the same in Python: random outputs of every kind."""

import itertools
import math
import random
from typing import Any

import numpy as np
import pytest

from clipper.selection.learning.learned_state import label_bit
from clipper.selection.policy import agrees, is_number, is_usable, loss
from clipper.selection.votes import label_key
from clipper.serving.query.stats import closeness
from clipper_core.wire import comparison
from clipper_core.wire.comparison import OutputKey, label_hash

DTYPES = ["?", "u1", "i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f2", "<f4", "<f8"]
INTS = [0, 1, 2, 7, 63, 64, -1, -2, 255, 2**31, -(2**31), 2**53, 2**53 + 1, 2**63 - 1, -(2**63)]
LARGE = [2**63, 2**63 + 1, 2**64 - 1]
FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 7.0, 65504.0, 2.0**53, 2.0**63, -(2.0**63), 2.0**64]
EXTREMES = [math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324, 1e-200, 1e200, 6e-8]
TEXTS = ["", "a", "b", "1", "True", "äöü", "😀", "a" * 300]
SHAPES = [(0,), (1,), (2,), (3,), (2, 1), (1, 2), (1, 2, 1, 2)]


def random_array(rng: random.Random) -> Any:
    """Return an array of small numbers, so that equal ones are frequent."""
    shape = rng.choice(SHAPES)
    numbers = [rng.choice([0, 1, 2]) for _ in range(math.prod(shape))]
    array = np.array(numbers, rng.choice(DTYPES)).reshape(shape)
    if array.size and rng.random() < 0.3:
        special: list[Any] = [0]
        if array.dtype.kind == "f":
            special = [-0.0, math.nan, math.inf, 5e-324]
        elif array.dtype.itemsize == 8:
            special = [2**53, 2**53 + 1, 2**63 - 1]
        array.reshape(-1)[rng.randrange(array.size)] = rng.choice(special)
    return array


def random_output(rng: random.Random) -> Any:
    kind = rng.randrange(7)
    if kind == 0:
        return rng.choice([True, False])
    if kind == 1:
        return rng.choice(INTS + LARGE)
    if kind == 2:
        return rng.choice(FLOATS + EXTREMES) * rng.choice([1.0, 1.0, rng.random()])
    if kind == 3:
        return rng.choice(TEXTS)
    if kind == 4:
        return rng.choice(TEXTS).encode()
    if kind == 5:
        return random_array(rng)
    with np.errstate(over="ignore"):
        return np.array(rng.choice([0, 1, 2, 100, 0.5, -0.0])).astype(rng.choice(DTYPES))


def in_python(output: Any) -> Any:
    """Return an output as Python gets it: a number without dimensions is a Python number."""
    return output.item() if isinstance(output, np.ndarray) and output.ndim == 0 else output


def same_key(one: Any, other: Any) -> bool:
    """Return whether two outputs are one label, or equal numbers of one type."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if is_number(one) or is_number(other):
        return type(one) is type(other) and bool(one == other)
    return bool(label_key(one) == label_key(other))


def near(found: float, expected: float) -> bool:
    return found == pytest.approx(expected, rel=1e-12, abs=1e-12, nan_ok=True)


@pytest.mark.parametrize("seed", range(6))
def test_outputs_are_compared_as_in_python(seed: int) -> None:
    rng = random.Random(seed)
    outputs = [random_output(rng) for _ in range(120)]
    keys = [OutputKey(output) for output in outputs]
    values = [in_python(output) for output in outputs]
    for value, key in zip(values, keys, strict=True):
        assert key.is_usable == is_usable(value), value
        is_scalar = isinstance(value, int | float)
        assert near(key.number, float(value) if is_scalar else 0.0), value
    pairs = itertools.product(range(len(keys)), repeat=2)
    with np.errstate(all="ignore"):
        for i, j in pairs:
            one, other = values[i], values[j]
            pair = f"{one!r}, {other!r}"
            assert (keys[i] == keys[j]) == same_key(one, other), pair
            assert keys[i].agrees(keys[j]) == agrees(one, other), pair
            assert near(keys[i].loss(keys[j]), loss(one, other)), pair
            assert near(keys[i].closeness(keys[j]), closeness(one, other)), pair


@pytest.mark.parametrize("seed", range(6))
def test_labels_are_grouped_and_hashed_as_in_python(seed: int) -> None:
    rng = random.Random(100 + seed)
    outputs = [random_output(rng) for _ in range(400)]
    labels = [one for one in outputs if not is_number(in_python(one))]
    first: dict[OutputKey, int] = {}
    expected: dict[object, int] = {}
    for i, label in enumerate(labels):
        found = first.setdefault(OutputKey(label), i)
        assert found == expected.setdefault(label_key(in_python(label)), i), label
        value = in_python(label)
        bit = label_bit(value).bit_length() - 1
        assert hash(OutputKey(label)) == bit, label
        assert label_hash(value, type(value)) == bit, label
    assert len(first) == len(expected) > 20


@pytest.mark.parametrize("seed", range(3))
def test_objects_are_read_without_a_copy(seed: int) -> None:
    """Closeness of objects is that of their keys; what is read elsewhere is None."""
    rng = random.Random(200 + seed)
    outputs = [in_python(random_output(rng)) for _ in range(80)]
    for one, other in itertools.product(outputs, repeat=2):
        found = comparison.closeness(one, other)
        if any(type(value) is int and value >= 2**63 for value in (one, other)):
            assert found is None
        else:
            assert found == OutputKey(one).closeness(OutputKey(other)), f"{one!r}, {other!r}"
    for value in [
        None,
        2**70,
        "\ud800",
        np.float64(1.0),
        np.array(1.0),
        np.arange(4)[::2],
        np.ones(2, ">f8"),
        np.ones((1,) * 5),
        np.array(["a"]),
        np.array([None]),
        np.ones(1, np.longdouble),
        np.ones(1, complex),
    ]:
        assert comparison.closeness(value, 1.0) is None, repr(value)
        assert comparison.closeness(1.0, value) is None, repr(value)


def test_what_is_no_output() -> None:
    assert OutputKey(1) != 1
    for output, error in [
        (None, TypeError),
        ([1], TypeError),
        (2**64, OverflowError),
        (-(2**63) - 1, OverflowError),
    ]:
        with pytest.raises(error):
            OutputKey(output)  # type: ignore[arg-type]
    assert label_hash(2**70 + 5, int) == 5, "an int of any size has a hash"
    with pytest.raises(UnicodeEncodeError):
        label_hash("\ud800", str)


def test_floats_of_half_precision() -> None:
    """All 65 536 of them, by their value."""
    halves = np.arange(65536, dtype=np.uint16).view(np.float16)
    for half in halves:
        key = OutputKey(np.array(half))
        number = float(half)
        assert key.number == number or (math.isnan(number) and math.isnan(key.number))
        assert key.is_usable == math.isfinite(number)
