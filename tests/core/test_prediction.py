"""Predictions by value and by blob: they are the same after the cache or a reply, and their memory
is freed."""

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from clipper_core.engine.engine import Engine
from clipper_core.engine.model import Model
from clipper_core.wire.codec import Kind, encode_rows
from tests.memory import resident_bytes

World = Any  # tests/core/conftest.py
DTYPES = ["?", "u1", "i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f2", "<f4", "<f8"]


def same(left: Any, right: Any) -> bool:
    return type(left) is type(right) and bool(
        np.array_equal(left, right, equal_nan=isinstance(left, float))
    )


outputs = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.binary(max_size=300),
    st.text(max_size=100),
)


@given(st.lists(outputs, min_size=1, max_size=8))
@settings(max_examples=200, deadline=None)
def test_scalars_strings_and_bytes_come_back(values: list[Any]) -> None:
    model = Model(Engine(manual_clock=True, cache_bytes_max=1 << 16), "m:1", 1, "i64")
    for i, value in enumerate(values):
        model.put(i, value)
        found, output = model.cached(i)
        assert found
        assert same(output, value)
        assert same(model.predict(i).result(0), value)


arrays = hnp.arrays(
    st.sampled_from(DTYPES), hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
)


@given(arrays)
@settings(max_examples=200, deadline=None)
def test_arrays_come_back_with_dtype_and_shape(value: Any) -> None:
    model = Model(Engine(manual_clock=True, cache_bytes_max=1 << 16), "m:1", 1, "str")
    model.put("x", value)
    output = model.predict("x").result(0)
    if value.ndim == 0:
        assert np.array_equal(output, value.item(), equal_nan=value.dtype.kind == "f")
    else:
        assert (output.dtype, output.shape) == (value.dtype, value.shape)
        assert output.tobytes() == value.tobytes()


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        [1.0],
        1j,
        object(),
        np.zeros((1,) * 5),
        np.zeros(2, ">f8"),
        np.zeros(1, complex),
        np.array(["a"]),
    ],
    ids=str,
)
def test_what_no_prediction_can_be_is_refused(value: Any, world: World) -> None:
    with pytest.raises(TypeError, match=r"prediction"):
        world.model().put(1.0, value)


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 2**70])
def test_whole_numbers_beyond_64_bits_are_refused(value: int, world: World) -> None:
    with pytest.raises(OverflowError):
        world.model().put(1.0, value)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 2), (1, 2, 1, 2)], ids=str)
@pytest.mark.parametrize("confident", [False, True])
def test_replies_of_every_type_and_shape(
    world: World, dtype: str, shape: tuple[int, ...], confident: bool
) -> None:
    model = world.model("i64")
    container = world.container(model)
    rng = np.random.default_rng(3)
    wanted = rng.integers(0, 2 if dtype == "?" else 100, (5, *shape)).astype(dtype)
    futures = [model.predict(i) for i in range(5)]
    world.step()
    container.read()
    container.reply(lambda rows: wanted, confidence=np.arange(5) / 4 if confident else None)
    for i, future in enumerate(futures):
        assert np.array_equal(future.result(0), wanted[i])
        assert future.confidence() == (i / 4 if confident else None)
        assert np.array_equal(model.predict(i).result(0), wanted[i]), "the cache holds it too"
        assert model.predict(i).confidence() == (i / 4 if confident else None)
    if not shape and dtype in ("<f8", "<i8", "?"):
        assert type(futures[0].result(0)) is {"<f8": float, "<i8": int, "?": bool}[dtype]


@pytest.mark.parametrize(
    "rows",
    [
        ["", "a", "ü" * 300],
        [b"", b"\0\xff", b"x" * 3000],
        [np.arange(n, dtype="<f4") for n in (0, 3, 700)],
    ],
    ids=["str", "bytes", "f4"],
)
def test_replies_that_differ_in_length(world: World, rows: list[Any]) -> None:
    model = world.model("i64")
    container = world.container(model)
    futures = [model.predict(i) for i in range(3)]
    world.step()
    container.read()
    container.reply(lambda _: rows)
    for future, wanted in zip(futures, rows, strict=True):
        assert np.array_equal(future.result(0), wanted)


def churn(
    world: World, model: Model, container: Any, rounds: int, reply: Callable[[int, int], bytes]
) -> None:
    for _ in range(rounds):
        futures = [model.predict(i) for i in range(500)]
        world.step(10)
        for number, rows in container.read():
            assert container.send(reply(number, len(rows)))
        container.inbox.clear()
        assert all(future.done() for future in futures)
        for future in futures[::50]:
            future.exception(0)
        for future in futures[::7]:
            future.cancel()
    world.engine.events()


def vectors(number: int, n: int) -> bytes:
    return encode_rows(Kind.REPLY, np.zeros((n, 64)), id=number)


def texts(number: int, n: int) -> bytes:
    return encode_rows(
        Kind.REPLY,
        ["x" * 500] * n,
        id=number,
        status=[i % 50 != 0 and i % 2 for i in range(n)],
        text="t" * 500,
    )


@pytest.mark.parametrize("reply", [vectors, texts])
@pytest.mark.parametrize("cached", [False, True])
def test_memory_comes_back(
    new_world: Callable[..., World], reply: Callable[[int, int], bytes], cached: bool
) -> None:
    """There are 100,000 tasks of 500 bytes: a reference leaked in one of a hundred would cost half
    a megabyte."""
    world = new_world(cache_bytes_max=1 << 15)
    model = world.model("i64", cached=cached)
    container = world.container(model, size_max=500)
    churn(world, model, container, 40, reply)
    gc.collect()
    before = resident_bytes()
    churn(world, model, container, 200, reply)
    gc.collect()
    assert resident_bytes() - before < 1 << 20
