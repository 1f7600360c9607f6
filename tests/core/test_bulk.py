"""Submission of arrays: hits end at once, misses are packed in order, and rows that find no room
are refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from clipper.schema import InvalidTensor, Tensors
from clipper_core.engine.model import predict_rows
from clipper_core.runtime.status import Status, StatusError

World = Any  # tests/core/conftest.py


@pytest.mark.parametrize("n", [32, 33, 255, 256, 257, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
def test_hits_end_at_once_and_misses_go_on_in_order(
    new_world: Callable[..., World], n: int, share: float
) -> None:
    world = new_world(cache_bytes_max=1 << 24)
    model = world.model("f64", (2,))
    container = world.container(model, size_max=700)
    rng = np.random.default_rng(n)
    rows = rng.permutation(n)[:, None] * np.ones(2)
    known = rng.random(n) < share
    for row in rows[known]:
        model.put(row, float(row[0]))
    future = model.predict_many(rows)
    assert np.array_equal(future.statuses() == Status.OK, known)
    assert future.done() == known.all()
    world.step()
    sent = []
    while container.read():
        sent += container.inbox[0][1].tolist()
        container.reply(lambda rows: rows[:, 0])
        world.step()
    assert sent == rows[~known].tolist()
    assert future.result(0).tolist() == rows[:, 0].tolist()
    assert world.engine.snapshot()["models"][0]["hits"] == known.sum()
    assert (future.latencies_us()[known] == 0).all()
    assert model.predict_many(rows).done(), "all are known now"


@pytest.mark.parametrize("cached", [True, False])
def test_rows_of_named_tensors_are_made_of_their_columns(
    new_world: Callable[..., World], cached: bool
) -> None:
    tensors = Tensors.parse({"a": "f32[3]", "b": "u8", "c": "f64", "wide": "i16[2,150]"})
    world = new_world(cache_bytes_max=1 << 22)
    size = tensors.row_bytes
    model = world.model("u8", (size,), tensors=tensors, cached=cached)
    container = world.container(model, size_max=333)
    rng = np.random.default_rng(size)
    layouts = {
        "a": rng.random((1500, 6), np.float32)[:, ::2],
        "b": np.broadcast_to(np.uint8(7), 1500),
        "c": rng.random(3000)[::-2],
        "wide": np.asfortranarray(rng.integers(-9, 9, (1500, 2, 150), np.int16)),
    }
    records = tensors.pack_many(layouts)
    for i in range(0, 1500, 9) if cached else ():
        model.put({name: column[i] for name, column in layouts.items()}, 1)
    future = model.predict_many(layouts)
    world.step()
    sent = []
    while container.read():
        sent += container.inbox[0][1].tolist()
        container.reply(lambda rows: rows[:, 0])
        world.step()
    assert sent == [r.tolist() for i, r in enumerate(records) if not cached or i % 9]
    assert future.done()
    assert not cached or model.predict_many(layouts).done(), "all are known now"


@pytest.mark.parametrize("kind", ["array", "list", "str", "fixed", "free", "watched"])
def test_rows_are_cached_when_the_cache_has_each_of_them(
    new_world: Callable[..., World], kind: str
) -> None:
    world = new_world(cache_bytes_max=1 << 22)
    rows: Any = np.arange(80.0).reshape(40, 2)
    one_by_one: Any = rows
    if kind == "str":
        model = world.model("str")
        rows = one_by_one = ["x" * i for i in range(40)]
    elif kind in ("fixed", "free"):
        tensors = Tensors.parse({"a": "f64[2]", "b": "f64" if kind == "fixed" else "str"})
        dtype, shape = ("u8", (tensors.row_bytes,)) if kind == "fixed" else ("bytes", ())
        model = world.model(dtype, shape, tensors=tensors)
        rows = {"a": rows, "b": [*range(40)] if kind == "fixed" else ["y" * i for i in range(40)]}
        one_by_one = [{"a": a, "b": b} for a, b in zip(rows["a"], rows["b"], strict=True)]
    else:
        model = world.model("f64", (2,))
        rows = rows.tolist() if kind == "list" else rows
    if kind == "watched":
        model.watch = lambda row, *_: int(row[0]) + 1
    for i, row in enumerate(one_by_one):
        assert not model.cached_rows(rows), f"{i} of 40 are there"
        model.put(row, 1)
    assert model.cached_rows(rows)
    assert not model.cached_rows(rows, salt=1)
    assert model.predict_many(rows).done()


@pytest.mark.parametrize("types", [("f64", "f64"), ("i8", "f32", "u16"), ("bool",)])
@pytest.mark.parametrize("odd", ["", "gap", "type", "tuple", "array"])
def test_rows_of_free_lengths_are_packed_as_they_are_one_by_one(
    new_world: Callable[..., World], types: tuple[str, ...], odd: str
) -> None:
    tensors = Tensors.parse({f"t{i}": f"{type}[*]" for i, type in enumerate(types)})
    world = new_world()
    model = world.model("bytes", tensors=tensors, cached=False)
    container = world.container(model, size_max=100)
    rng = np.random.default_rng(len(types))
    columns: dict[str, Any] = {
        spec.name: [rng.integers(0, 2, n).astype(spec.numpy) for n in rng.integers(0, 9, 250)]
        for spec in tensors.specs
    }
    first = columns["t0"]
    if odd == "gap":
        first[7] = np.repeat(first[7], 2)[::2]
    elif odd == "type":
        first[7] = first[7].astype("?").tolist()
    elif odd == "tuple":
        columns["t0"] = tuple(first)
    elif odd == "array":
        columns["t0"] = rng.integers(0, 2, (250, 4)).astype(first[0].dtype)
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    future = model.predict_many(columns)
    world.step()
    sent: list[bytes] = []
    while container.read():
        sent += container.inbox[0][1]
        container.reply(lambda rows: np.arange(float(len(rows))))
        world.step()
    assert sent == [bytes(tensors.pack(row)) for row in rows]
    assert future.done()
    first = columns["t0"] = list(columns["t0"])
    for bad, says in ((["x"], "tensor 't0'"), (np.zeros((2, 2)), "tensor 't0'")):
        first[3] = bad
        with pytest.raises(InvalidTensor, match=says):
            model.predict_many(columns)


def test_hits_of_blobs_and_their_memory(world: World) -> None:
    model = world.model("f64", (1,))
    rows = np.arange(600.0)[:, None]
    for row in rows[::2]:
        model.put(row, f"text {row[0]}")
    world.container(model, size_max=64)
    for _ in range(3):
        future = model.predict_many(rows, salt=0)
        outputs = future.outputs("none")
        assert [outputs[i] for i in (0, 1, 598)] == ["text 0.0", "none", "text 598.0"]
        future.cancel()
    world.step()


def test_a_salt_separates_arrays_too(world: World) -> None:
    model = world.model("f64", (1,))
    rows = np.arange(100.0)[:, None]
    for row in rows:
        model.put(row, 1.0, salt=7)
    assert model.predict_many(rows, salt=7).done()
    assert not model.predict_many(rows, salt=8).progress()[0]


def test_what_finds_no_room_is_refused_but_not_what_the_cache_has(world: World) -> None:
    model = world.model("f64", (1000,), lane_bytes_max=1 << 20)
    rows = np.arange(600.0)[:, None] * np.ones(1000)
    model.put(rows[-1], "known")
    future = model.predict_many(rows)
    states = future.statuses()
    waiting = int((states == Status.PENDING).sum())
    assert 32 <= waiting < 599
    assert (states[:waiting] == Status.PENDING).all(), "the first rows are in"
    assert (states[waiting:-1] == Status.FULL).all()
    assert states[-1] == Status.OK
    world.container(model)
    world.serve()
    assert (future.statuses()[:waiting] == Status.OK).all()


def test_rows_as_large_as_a_piece(world: World) -> None:
    model = world.model("u8", (300_000,), cached=True)
    rows = np.random.default_rng(1).integers(0, 255, (40, 300_000), np.uint8)
    container = world.container(model)
    future = model.predict_many(rows)
    world.serve()
    assert future.result(0).tolist() == rows.sum(axis=1).tolist()
    assert container.kinds_received.count(4) == 1


@pytest.mark.parametrize(
    "make",
    [
        np.asfortranarray,
        lambda a: a.astype("f4"),
        lambda a: np.repeat(a, 2, 0)[::2],
        lambda a: a.tolist(),
    ],
)
def test_any_array_of_the_type(world: World, make: Callable[[Any], Any]) -> None:
    model = world.model("f64", (3,), cached=False)
    world.container(model, size_max=4096)
    rows = np.arange(300.0).reshape(100, 3)
    future = model.predict_many(make(rows))
    world.serve()
    assert np.array_equal(future.result(0), rows.sum(axis=1))


@pytest.mark.parametrize("n", [5, 100])
def test_an_array_for_several_models_goes_to_each(world: World, n: int) -> None:
    models = tuple(world.model("f64", (2,), cached=k == 1) for k in range(3))
    for model in models:
        world.container(model, size_max=64)
    rows = np.random.default_rng(1).random((n, 2))
    future = predict_rows(
        models, rows, 50_000, finish=lambda future: future.outputs().reshape(3, -1), extra="mine"
    )
    assert len(future) == 3 * n
    world.serve()
    assert np.allclose(future.result(0), np.broadcast_to(rows.sum(axis=1), (3, n)))
    assert future.extra == "mine"


def test_several_models_refuse_together(world: World) -> None:
    models = (world.model("f64", (2,)), world.model("f64", (3,)))
    with pytest.raises(StatusError, match="m:2"):
        predict_rows(models, np.zeros((50, 2)))
    with pytest.raises(StatusError, match="no models"):
        predict_rows((), np.zeros((50, 2)))
    assert world.engine.completion.issued == 0


def test_nothing_after_the_end_hits_neither(world: World) -> None:
    model = world.model("f64", (1,))
    model.put([3.0], 30.0)
    world.engine.refuse_new()
    future = model.predict_many(np.arange(100.0)[:, None])
    assert (future.statuses() == Status.CLOSED).all()


def test_a_million_rows_pass_in_pieces(world: World) -> None:
    model = world.model("f64", (), cached=False)
    container = world.container(model, size_max=4096)
    future = model.predict_many(np.arange(1e6))
    assert future.progress() == (0, 1_000_000), "all are in"
    world.step()
    container.reply_all(lambda rows: rows)
    assert np.array_equal(future.result(0), np.arange(1e6))
