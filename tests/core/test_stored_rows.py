"""Tables whose weights are stored as f16, bf16 or i8, beside numpy's and torch's numbers."""

from typing import Any

import numpy as np
import pytest

from clipper_core.params.embedding import Table
from clipper_core.params.optimizer import Optimizer
from clipper_core.runtime.status import StatusError

SMALL = ("f16", "bf16", "i8")
DIM = 9
IDS = np.arange(300)
Array = np.ndarray[Any, Any]


def table(dtype: str, optimizer: str = "sgd", name: str = "t", **settings: float) -> Table:
    return Table(name, DIM, optimizer=Optimizer(optimizer, **settings), dtype=dtype)


def rows_of_all_sizes(seed: int) -> Array:
    draw = np.random.default_rng(seed)
    rows = draw.standard_normal((IDS.size, DIM)) * 10.0 ** draw.uniform(-42, 37, (IDS.size, 1))
    rows[:100] = draw.standard_normal((100, DIM)) * 10.0 ** draw.uniform(-9, 6, (100, DIM))
    rows[0], rows[1] = 0.0, np.finfo(np.float32).max
    found: Array = rows.astype(np.float32)
    return found


def step_of(dtype: str, rows: Array) -> Array:
    """Return the distance of the two numbers about each weight that the dtype has."""
    size = np.abs(rows.astype(np.float64))
    if dtype == "i8":
        top = np.maximum(size.max(axis=1, keepdims=True), 127 * 2.0**-126)
        return np.broadcast_to(2.0 ** np.ceil(np.log2(top / 127)), rows.shape)
    bits, least = {"f16": (10, -14), "bf16": (7, -126)}[dtype]
    found: Array = 2.0 ** (np.maximum(np.floor(np.log2(np.maximum(size, 1e-300))), least) - bits)
    return found


def nearest(dtype: str, rows: Array) -> Array:
    if dtype == "f16":
        return np.clip(rows, -65504, 65504).astype(np.float16).astype(np.float32)
    if dtype == "bf16":
        bits = rows.view(np.uint32).astype(np.uint64)
        most = np.uint64(0x7F7F0000)
        size = np.minimum((bits & 0x7FFFFFFF) + 0x7FFF + (bits >> 16 & 1), most) & 0x7FFF0000
        found: Array = (size | bits & 0x80000000).astype(np.uint32).view(np.float32)
        return found
    step = step_of("i8", rows)
    return (np.clip(np.floor(rows / step + 0.5), -127, 127) * step).astype(np.float32)


@pytest.mark.parametrize("dtype", SMALL)
def test_written_rows_are_the_nearest_and_are_written_again_with_the_same_bits(dtype: str) -> None:
    one, given = table(dtype), rows_of_all_sizes(3)
    if dtype == "i8":
        given = given[np.abs(given).max(axis=1) < 3.3e38]  # what is above stays at 127 / 128 of it
    ids = IDS[: len(given)]
    one.write(ids, given)
    stored = one.read(ids)[1]
    np.testing.assert_array_equal(stored, nearest(dtype, given))
    np.testing.assert_array_equal(one.pull(ids), stored)
    other = table(dtype)
    other.write(ids, stored)
    np.testing.assert_array_equal(other.read(ids)[1].view(np.uint32), stored.view(np.uint32))
    walked = one.walk(0, 4096)
    np.testing.assert_array_equal(stored[walked[0]], walked[1])


@pytest.mark.parametrize("dtype", SMALL)
def test_largest_float_stays_finite(dtype: str) -> None:
    one = table(dtype, rate=1e38)
    one.write([1], np.full((1, DIM), np.finfo(np.float32).max))
    for _ in range(3):
        one.push([1, 2], np.full((2, DIM), -1e30, np.float32))
    assert np.isfinite(one.pull([1, 2])).all()
    assert (one.pull([1, 2]) > 6e4).all()


def test_pulls_give_what_is_stored() -> None:
    halves, brains, bytes_ = (table(dtype) for dtype in SMALL)
    given = rows_of_all_sizes(4)[:100]
    for one in (halves, brains, bytes_):
        one.write(IDS[:100], given)
    assert (halves.pull(IDS[:100], "f16") == halves.pull(IDS[:100])).all()
    bits = brains.pull(IDS[:100], "bf16").astype(np.uint32) << 16
    np.testing.assert_array_equal(bits.view(np.float32), brains.pull(IDS[:100]))
    weights, scales = bytes_.pull(IDS[:100], "i8")
    np.testing.assert_array_equal(weights * scales[:, None], bytes_.pull(IDS[:100]))
    for one in (brains, bytes_):  # another dtype than the stored one is of the stored values
        with np.errstate(over="ignore"):
            expected = one.pull(IDS[:100]).astype(np.float16)
        np.testing.assert_array_equal(one.pull(IDS[:100], "f16"), expected)
    untrained = np.arange(1000, 1010)
    for one in (halves, brains, bytes_):
        before = one.pull(untrained)
        one.push(untrained, np.zeros((10, DIM)))
        np.testing.assert_array_equal(one.pull(untrained), before)
        assert np.abs(before - table("f32").pull(untrained)).max() < 4e-4


@pytest.mark.parametrize("dtype", SMALL)
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam", "rowwise_adagrad"])
def test_step_is_that_of_the_optimizer_rounded_to_one_of_two_neighbours(
    dtype: str, optimizer: str
) -> None:
    draw, one = np.random.default_rng(5), table(dtype, optimizer)
    plain = table("f32", optimizer)
    for step in range(1, 6):
        _, before, stamps = one.read(IDS)
        if step > 1:
            plain.write(IDS, before, stamps)
        else:
            plain.write(IDS, one.pull(IDS))
        gradients = draw.standard_normal((IDS.size, DIM)).astype(np.float32)
        for each in (one, plain):
            each.push(IDS, gradients, step=step)
        exact, found = plain.read(IDS)[1], one.read(IDS)[1]
        np.testing.assert_array_equal(found[:, DIM:], exact[:, DIM:])  # the state is f32
        away = np.abs(found[:, :DIM].astype(np.float64) - exact[:, :DIM])
        assert (away < step_of(dtype, exact[:, :DIM])).all()
        assert (away > 0).mean() > 0.2
        np.testing.assert_array_equal(nearest(dtype, found[:, :DIM]), found[:, :DIM])


@pytest.mark.parametrize("dtype", SMALL)
def test_steps_far_below_the_last_bit_are_taken_on_average(dtype: str) -> None:
    ids, values = np.arange(20_000), np.linspace(-1.0, 1.0, DIM, dtype=np.float32)
    one = table(dtype, rate=1.0, name=f"many-{dtype}")
    one.write(ids, np.tile(values, (ids.size, 1)))
    start = one.pull(ids[:1])[0].astype(np.float64)
    gradient = np.linspace(3e-5, 7e-5, DIM, dtype=np.float32)
    for _ in range(5):  # one is a hundredth of what i8 and bf16 can say
        one.push(ids, np.tile(gradient, (ids.size, 1)))
    found = one.pull(ids).astype(np.float64)
    error = found.mean(axis=0) - (start - 5 * gradient)
    assert (np.abs(error) < 4.5 * found.std(axis=0) / np.sqrt(ids.size) + 1e-7).all()
    before = one.pull(ids)
    one.push(ids, np.zeros((ids.size, DIM)))
    np.testing.assert_array_equal(one.pull(ids), before)  # no gradient, no change


@pytest.mark.parametrize("dtype", SMALL)
def test_rounding_goes_by_seed_id_and_step(dtype: str) -> None:
    gradients = np.full((IDS.size, DIM), 0.1, np.float32)
    first, other = table(dtype), Table("t", DIM, optimizer=Optimizer("sgd"), dtype=dtype, seed=1)
    again, later = table(dtype), table(dtype)
    for one in (first, again, later, other):
        one.write(IDS, np.full((IDS.size, DIM), 0.3))
        step = 7 if one is later else 1
        order = IDS if one is first else IDS[::-1]
        one.push(order, gradients, step=step)
    np.testing.assert_array_equal(first.pull(IDS), again.pull(IDS))
    for one in (later, other):
        assert (first.pull(IDS) != one.pull(IDS)).any()
    assert len(np.unique(first.pull(IDS), axis=0)) > 1  # not the same for each id


def test_rows_take_less_memory() -> None:
    sizes = {dtype: Table("t", 64, dtype=dtype).row_bytes for dtype in ("f32", *SMALL)}
    assert sizes == {"f32": 512, "f16": 384, "bf16": 384, "i8": 324}
    with pytest.raises(StatusError, match="no dtype 'f8'"):
        Table("t", 64, dtype="f8")
