"""The methods of a model for callers: conversion of inputs to rows (against a reference by numpy),
classes of SLO, many rows, bounds."""

import math
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from clipper_core.engine.engine import Engine
from clipper_core.engine.model import Model, predict_all, predict_ensemble, predict_rows
from clipper_core.results.decider import Decider, Rule, Step
from clipper_core.runtime.status import Status, StatusError
from tests.core.test_dtype import NUMPY

World = Any  # tests/core/conftest.py


@pytest.mark.parametrize("name", NUMPY)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (2, 1, 3), (2, 1, 3, 2)], ids=str)
def test_a_row_arrives_byte_for_byte(world: World, name: str, shape: tuple[int, ...]) -> None:
    model = world.model(name, shape)
    assert model.describe_input() == name + (f"[{','.join(map(str, shape))}]" if shape else "")
    container = world.container(model, checked=True)
    rows = (
        np.random.default_rng(1)
        .integers(0, 2 if name == "bool" else 100, (7, *shape))
        .astype(NUMPY[name])
    )
    for row in rows:
        model.predict(row)
    model.predict_many(rows[::-1])
    world.step()
    sent = np.concatenate([rows for _, rows in container.read()])
    assert sent.dtype == rows.dtype
    assert {row.tobytes() for row in sent} == {row.tobytes() for row in rows}


@pytest.mark.parametrize(
    ("dtype", "shape", "rows"),
    [
        ("str", (), ["", "a", "ü€😀" * 40, "x\0y"]),
        ("bytes", (), [b"", b"\0\1", b"z" * 5000]),
        ("f32", (-1,), [np.zeros(0, "f4"), np.arange(3, dtype="f4"), np.ones(1000, "f4")]),
        ("i64", (-1,), [np.arange(n) for n in (1, 0, 7)]),
    ],
)
def test_rows_that_differ_in_length_arrive(
    world: World, dtype: str, shape: tuple[int, ...], rows: list[Any]
) -> None:
    model = world.model(dtype, shape)
    container = world.container(model)
    futures = [model.predict(row) for row in rows]
    world.step()
    sent = [row for _, rows in container.read() for row in rows]
    assert all(np.array_equal(left, right) for left, right in zip(sent, rows, strict=True))
    container.reply_all(lambda rows: np.array([float(len(row)) for row in rows]))
    assert [future.result(0) for future in futures] == [len(row) for row in rows]
    assert model.predict_many(rows).result(0).tolist() == [len(row) for row in rows]


def accepted(x: Any, name: str, shape: tuple[int, ...]) -> Any:
    """Return the row that the reference model makes of x, or None. Whole numbers are accepted
    wherever their values fit, except those of signed arrays for an unsigned type; other types only
    by casts of the same kind."""
    array, wanted = np.asarray(x), np.dtype(NUMPY[name])
    if isinstance(x, np.ma.MaskedArray) and np.any(x.mask):
        if x.dtype.kind != "f":
            return None
        array = x.filled(np.nan)
    if isinstance(x, list) and wanted.kind == "u" and all(type(each) is int for each in x):
        fits = all(0 <= each < 2 ** (8 * wanted.itemsize) for each in x)
        return np.array(x, wanted) if fits and len(x) == shape[0] else None
    whole = array.dtype.kind in "iu" and wanted.kind in "iu"
    if array.shape != shape:
        return None
    if (
        whole
        and array.size
        and not (
            int(array.min()) >= np.iinfo(wanted).min and int(array.max()) <= np.iinfo(wanted).max
        )
    ):
        return None
    if whole and not isinstance(x, np.ndarray):
        return array.astype(wanted)
    if not np.can_cast(array.dtype, wanted, "same_kind"):
        return None
    row = array.astype(wanted)
    if wanted.kind == "f" and (np.isinf(row) & np.isfinite(array)).any():
        return None
    return row.view(np.uint8) != 0 if wanted.kind == "b" else row


lists = st.one_of(
    st.lists(st.integers(-(2**40), 2**40), min_size=2, max_size=3),
    st.lists(st.integers(0, 300), min_size=3, max_size=3),
    st.lists(st.booleans(), min_size=3, max_size=3),
    st.lists(st.floats(-1e4, 1e4), min_size=3, max_size=3),
    hnp.arrays(st.sampled_from(list(NUMPY.values())), st.just((3,)), elements=st.integers(0, 1)),
    hnp.arrays(st.sampled_from(["i2", "i8"]), st.just((3,)), elements=st.integers(-130, 300)),
    hnp.arrays(st.sampled_from(["u2", "u8"]), st.just((3,)), elements=st.integers(0, 40_000)),
    hnp.arrays(
        st.sampled_from(["f8", "i2"]),
        hnp.array_shapes(max_dims=2, max_side=3),
        elements=st.integers(0, 1),
    ),
    st.lists(st.floats(), min_size=3, max_size=3),
    st.lists(st.sampled_from([0, 2**53 + 1, 2**63, 2**64 - 1, -1]), min_size=3, max_size=3),
    hnp.arrays(st.sampled_from(["f8", "f4", ">f8"]), st.just((3,)), elements=st.floats(width=32)),
    hnp.arrays("u1", st.just((3,)), elements=st.sampled_from([0, 1, 2, 255])).map(
        lambda array: array.view(bool)
    ),
    st.just(np.ma.masked_array([1.0, 2.0, 3.0], [False, True, False])),
    st.just(np.ma.masked_array([1, 2, 3], [False, True, False])),
    st.just(np.ma.masked_array([1, 2, 3], [False, False, False])),
    st.just("abc"),
    st.just(None),
    st.just([[1], [2, 3]]),
    st.just(b"abc"),
    st.just({1, 2, 3}),
    st.just([None] * 3),
)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@given(st.sampled_from(list(NUMPY)), lists)
@settings(max_examples=400, deadline=None)
def test_inputs_become_rows_as_in_the_reference(name: str, x: Any) -> None:
    model = Model(Engine(manual_clock=True, cache_bytes_max=1 << 12), "m:1", 1, name, (3,))
    ragged = isinstance(x, list) and x and isinstance(x[0], list)
    row = None if ragged else accepted(x, name, (3,))
    if row is None:
        with pytest.raises(StatusError, match=r"input for m:1: expected .*\[3\], got"):
            model.predict(x)
    else:
        model.put(x, 1)
        assert model.cached(row) == (True, 1), "the same key: the same bytes"


@pytest.mark.parametrize("rows", [np.array([[1, 127, -128], [1, 2, 128]]), [[1, -129, 0]]])
def test_whole_numbers_of_an_array_that_the_type_cannot_hold_are_refused(rows: Any) -> None:
    """All rows are refused, and none is submitted: numpy would keep the last bits only."""
    model = Model(Engine(manual_clock=True), "m:1", 1, "i8", (3,))
    for x, ask in ((rows, model.predict_many), (np.asarray(rows)[-1], model.predict)):
        with pytest.raises(StatusError, match=r"a value lies beyond -128 to 127$"):
            ask(x)
    model.predict_many(np.array([[1, 127, -128]]))


def test_whole_numbers_of_a_list_of_rows_are_taken_by_their_values(
    new_world: Callable[..., World],
) -> None:
    """A list is checked by its values, as one row is; an array is refused by its type."""
    world = new_world()
    model = world.model("u8", (3,))
    container = world.container(model)
    model.predict_many([[1, 2, 255]])
    world.step()
    assert [rows.tolist() for _, rows in container.read()] == [[[1, 2, 255]]]
    for rows in ([[1, 2, 256]], [[-1, 0, 0]]):
        with pytest.raises(StatusError, match=r"a value lies beyond 0 to 255$"):
            model.predict_many(rows)
    with pytest.raises(StatusError, match=r"got i64\[1,3\]"):
        model.predict_many(np.array([[1, 2, 3]], "i8"))


@pytest.mark.parametrize(
    "make",
    [
        np.ascontiguousarray,
        np.asfortranarray,
        lambda a: a.astype(">f8"),
        lambda a: a.astype("f4"),
        lambda a: np.repeat(a, 2, 1)[:, ::2],
        lambda a: a.tolist(),
    ],
)
def test_layout_does_not_matter(world: World, make: Callable[[Any], Any]) -> None:
    model = world.model("f64", (2, 3))
    array = np.arange(6.0).reshape(2, 3)
    model.put(array, 1)
    assert model.cached(make(array)) == (True, 1)


@pytest.mark.parametrize(
    "x", [3, 3.0, True, np.float32(3), np.array(3), np.array(3.0), np.int8(3)], ids=repr
)
def test_scalars_of_any_kind(world: World, x: Any) -> None:
    model = world.model("f64")
    model.put(float(x), 1)
    assert model.cached(x) == (True, 1)


@pytest.mark.parametrize(
    ("dtype", "x"),
    [
        ("str", 1),
        ("str", b"a"),
        ("bytes", "a"),
        ("bytes", 1),
        ("f64", "1"),
        ("f64", [1.0]),
        ("any", 1.0),
    ],
)
def test_inputs_of_another_type_are_refused(world: World, dtype: str, x: Any) -> None:
    model = world.model(dtype)
    with pytest.raises(StatusError, match="input for m:1: expected"):
        model.predict(x)
    with pytest.raises(StatusError, match="input for m:1: expected"):
        model.predict_many([x])


@pytest.mark.parametrize("x", [bytearray(b"ab"), memoryview(b"ab"), b"ab"])
def test_bytes_of_any_kind(world: World, x: Any) -> None:
    model = world.model("bytes")
    model.put(b"ab", 1)
    assert model.cached(x) == (True, 1)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_finite_models_refuse_what_is_not(world: World, dtype: str, value: float) -> None:
    row = np.array([1, value, 2], NUMPY[dtype])
    world.model(dtype, (3,)).predict(row)
    strict = world.model(dtype, (3,), finite=True)
    with pytest.raises(StatusError, match="NaN or an infinity"):
        strict.predict(row)
    with pytest.raises(StatusError, match="NaN or an infinity"):
        strict.predict_many(np.stack([np.zeros(3), row]))
    assert world.engine.completion.issued == 1


@pytest.mark.parametrize(
    ("dtype", "shape", "options"),
    [
        ("f64", (0,), {}),
        ("f64", (3, 0), {}),
        ("f64", (-2,), {}),
        ("f64", (2, -1), {}),
        ("f64", (1,) * 5, {}),
        ("f64", (2**32,), {}),
        ("u8", (2**16,) * 4, {}),
        ("f128", (), {}),
        ("", (), {}),
        ("f64", (), {"output": "f64", "output_shape": (1,) * 9}),
        ("f64", (), {"output": "f128"}),
        ("f64", (), {"slo_us": 0}),
        ("f64", (), {"slo_us": 2**60}),
    ],
)
def test_models_that_cannot_be_are_refused(
    world: World, dtype: str, shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    with pytest.raises(StatusError):
        Model(world.engine, "m:1", 1, dtype, shape, **options)
    assert world.engine.snapshot()["models"] == []


@pytest.mark.parametrize(
    "slo_ms",
    [
        0,
        -1,
        2**43 / 1000,
        1e30,
        10**400,
        math.nan,
        math.inf,
        -math.inf,
        1e308,
        "100",
        b"1",
        [1],
        {},
        True,
    ],
)
def test_slos_have_bounds(world: World, slo_ms: Any) -> None:
    model = world.model()
    for predict in (
        lambda: model.predict(1.0, slo_ms=slo_ms),
        lambda: model.predict_many([1.0], slo_ms=slo_ms),
    ):
        with pytest.raises(StatusError, match="it must lie above 0") as refused:
            predict()
        assert len(str(refused.value)) < 200


@pytest.mark.parametrize("slo_ms", [None, 1e-9, np.int64(500), np.float32(500)])
def test_an_slo_is_any_number(world: World, slo_ms: Any) -> None:
    model = world.model()
    assert model.predict(1.0, slo_ms=slo_ms).status() == Status.PENDING
    assert model.predict_many([1.0], slo_ms=slo_ms).status() == Status.PENDING


def test_every_class_of_slo_has_a_lane(world: World) -> None:
    model = world.model(cached=False)
    futures = [model.predict(1.0, slo_ms=2**power / 1000) for power in range(43)]
    assert all(future.status() == Status.PENDING for future in futures)
    container = world.container(model)
    world.step()
    assert [len(rows) for _, rows in container.read()] == [
        sum(not future.done() for future in futures)
    ]
    world.serve()
    assert all(future.done() for future in futures)


def test_models_are_bounded(new_world: Callable[..., World]) -> None:
    world = new_world(models_max=2)
    world.model(), world.model()
    with pytest.raises(StatusError, match="models_max = 2"):
        world.model()


def test_a_hit_is_answered_at_submit_and_by_salt(world: World) -> None:
    model = world.model("f64", (2,), cached=True)
    model.put([1.0, 2.0], "one")
    model.put([1.0, 2.0], b"two", salt=7)
    assert model.predict([1.0, 2.0]).result(0) == "one"
    assert model.predict([1.0, 2.0], salt=7).result(0) == b"two"
    assert model.cached([1.0, 2.0], salt=8) == (False, None)
    assert world.engine.snapshot()["models"][0]["hits"] == 2
    assert world.engine.completion.issued == 0, "a hit needs no slot"


@pytest.mark.parametrize("salt", [-1, 2**64, 1.5, "1", None])
def test_a_salt_is_a_whole_number(world: World, salt: Any) -> None:
    model, row = world.model("f64", (2,), cached=True), [1.0, 2.0]
    calls: list[Callable[[], object]] = [
        partial(model.predict, row, salt=salt),
        partial(model.predict_many, [row], salt=salt),
        partial(model.put, row, 1.0, salt=salt),
        partial(model.cached, row, salt=salt),
        partial(model.cached_rows, [row], salt=salt),
        partial(predict_all, (model,), row, None, salt),
        partial(predict_rows, (model,), [row], None, salt),
    ]
    for call in calls:
        with pytest.raises(StatusError, match="salt="):
            call()
    assert world.engine.completion.issued == 0


def test_a_model_without_a_cache_evaluates_each(world: World) -> None:
    model = world.model(cached=False)
    container = world.container(model)
    for _ in range(3):
        model.predict(1.0)
    world.serve()
    assert container.kinds_received.count(4) == 1
    assert world.engine.snapshot()["models"][0]["evaluated"] == 3


# -- a model of type any


def settle(x: Any) -> tuple[str, tuple[int, ...]]:
    return "f64", np.shape(x)


def test_the_first_input_settles_the_type(world: World) -> None:
    model = world.model("any")
    with pytest.raises(StatusError, match="not known yet"):
        model.predict([1.0])
    model.on_untyped = settle
    container = world.container(model)
    future = model.predict([1.0, 2.0])
    assert model.describe_input() == "f64[2]"
    with pytest.raises(StatusError, match="already"):
        model.settle("f64")
    world.serve()
    assert future.result(0) == 3.0
    assert container.inbox == []


def test_a_refusal_by_the_type_of_a_query_that_failed_says_so(world: World) -> None:
    model = world.model("any")
    model.on_untyped = settle
    container = world.container(model)
    failed = model.predict([1.0, 2.0])
    world.step()
    container.read()
    container.fail("three, please")
    world.step()
    assert failed.status() == Status.MODEL_ERROR
    with pytest.raises(StatusError, match="no query has been answered yet") as caught:
        model.predict([1.0, 2.0, 3.0])
    assert "f64[2] is what its first query had" in str(caught.value)
    answered = model.predict([3.0, 4.0])
    world.serve()
    assert answered.result(0) == 7.0
    with pytest.raises(StatusError) as caught:
        model.predict([1.0, 2.0, 3.0])
    assert "first query" not in str(caught.value)


@pytest.mark.parametrize(
    "rows", [[[1.0, 2.0], [3.0, 4.0]], np.array([[1.0, 2.0], [3.0, 4.0]])], ids=type
)
def test_many_rows_settle_the_type_by_the_first(world: World, rows: Any) -> None:
    model = world.model("any")
    model.on_untyped = settle
    world.container(model)
    future = model.predict_many(rows)
    world.serve()
    assert future.result(0).tolist() == [3.0, 7.0]


def test_two_threads_that_settle_at_once_agree(world: World) -> None:
    model = world.model("any")
    both = threading.Barrier(2)

    def slow(x: Any) -> tuple[str, tuple[int, ...]]:
        both.wait()
        return settle(x)

    model.on_untyped = slow
    futures: list[Any] = []
    threads = [
        threading.Thread(target=lambda: futures.append(model.predict([1.0]))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(futures) == 2


# -- many rows


@pytest.mark.parametrize("n", [1, 63, 64, 65, 255, 256, 257, 5000])
def test_many_in_order(world: World, n: int) -> None:
    model = world.model("f64", (2,), cached=n % 2 == 0)
    world.container(model, size_max=1000)
    rows = np.random.default_rng(n).random((n, 2))
    future = model.predict_many(rows)
    world.serve()
    assert np.allclose(future.result(0), rows.sum(1))


def test_many_holds_hits_and_refusals_too(world: World) -> None:
    model = world.model(lane_rows=4)
    world.container(model)
    model.put(2.0, 20.0)
    future = model.predict_many(np.arange(7.0))
    assert [future.status(i).name for i in range(7)] == [
        "PENDING",
        "PENDING",
        "OK",
        "PENDING",
        "PENDING",
        "FULL",
        "FULL",
    ]
    world.serve()
    assert [future.output(i) for i in range(7)] == [0, 1, 20, 3, 4, None, None]


@pytest.mark.parametrize(
    "rows",
    [
        np.zeros((3, 3)),
        np.zeros(2),
        np.zeros((1, 2, 1)),
        [[1.0], [1.0, 2.0]],
        ["ab", "cd"],
        np.zeros((2, 2), complex),
    ],
)
def test_many_of_another_shape_are_refused_whole(world: World, rows: Any) -> None:
    with pytest.raises(StatusError, match="input for m:1: expected f64"):
        world.model("f64", (2,)).predict_many(rows)
    assert world.engine.completion.issued == 0


@pytest.mark.parametrize("rows", [[], np.zeros((0, 2))], ids=["list", "array"])
def test_no_rows_have_no_outputs(world: World, rows: Any) -> None:
    future = world.model("f64", (2,)).predict_many(rows)
    assert (future.done(), len(future), len(future.result(0))) == (True, 0, 0)
    assert world.engine.completion.issued == 0


def test_what_fails_half_way_leaves_nothing_open(world: World) -> None:
    model = world.model("bytes", cached=False)
    reads = 0

    class Torn(bytearray):
        def __bytes__(self) -> bytes:
            nonlocal reads
            reads += 1
            raise ValueError("torn")

    with pytest.raises(ValueError, match="torn"):
        model.predict_many([b"a", b"b", Torn(b"c"), b"d"])
    world.pass_deadline(60_000_000)
    assert world.engine.completion.issued == world.engine.completion.answered == 0
    assert reads == 1


# -- the end


def test_nothing_after_the_end_hits_neither(world: World) -> None:
    model = world.model()
    model.put(1.0, 10.0)
    open_still = model.predict(2.0)
    world.engine.refuse_new()
    assert model.predict(3.0).status() == Status.CLOSED
    assert model.predict(1.0).status() == Status.CLOSED
    assert predict_all((model, model), 4.0).statuses().tolist() == [Status.CLOSED] * 2
    assert not open_still.done()
    world.container(model)
    world.serve()
    assert open_still.result(0) == 2.0


@pytest.mark.parametrize("models", [1, 2, 5, 64, 65])
def test_an_ensemble_of_any_size(world: World, models: int) -> None:
    all_models = tuple(world.model("f64" if i % 2 else "f32") for i in range(models))
    for model in all_models:
        world.container(model)
    future = predict_all(all_models, 2.0)
    world.serve()
    assert [future.output(i) for i in range(models)] == [2.0] * models


# -- rows that are watched
# ---------------------------------------------------------------------------------------------


class Numbers:
    """A watcher that returns a number for each row by its key, and keeps the rows."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[int, int], int] = {}
        self.seen: list[Any] = []

    def __call__(self, x: Any, lo: int, hi: int) -> int:
        self.seen.append(x.tolist())
        return self.numbers.setdefault((lo, hi), 1)


ASKERS: dict[str, Callable[[Model, Any], Any]] = {
    "predict": lambda model, x: model.predict(x),
    "put": lambda model, x: model.put(x, 1.0),
    "one_of_many": lambda model, x: model.predict_many([x]),
    "an_array": lambda model, x: model.predict_many(np.array([x] * 40)),
    "all": lambda model, x: predict_all((model, model), x),
    "heard": lambda model, x: predict_ensemble((model, model), Decider([Step(Rule.FIRST)]), x),
}


@pytest.mark.parametrize("how", ASKERS)
def test_a_watched_row_is_another_with_another_number(world: World, how: str) -> None:
    model, watcher = world.model("f64", (2,)), Numbers()
    world.container(model)
    model.watch = watcher

    def ask() -> int:
        """Send a query; return the rows that the container was sent so far."""
        ASKERS[how](model, [1, 2])
        world.serve()
        return int(world.engine.snapshot()["models"][0]["evaluated"])

    once = {"put": 0, "an_array": 40}.get(how, 1)  # rows of a piece do not join
    assert [ask(), ask()] == [once, once], "the second time it is there"
    assert watcher.seen[0] == [1, 2]
    assert model.cached([1, 2])[0]
    ((lo, hi),) = watcher.numbers
    watcher.numbers[lo, hi] = 2
    assert not model.cached([1, 2])[0]
    assert ask() == 2 * once, "under another number it is asked again"
    assert model.cached([1, 2])[0]
    assert [model.forget(lo, hi, n) for n in (1, 2, 1, 2, 3)] == [True, True, False, False, False]
    assert not model.cached([1, 2])[0]


@pytest.mark.parametrize("shape", [(), (2,)])
def test_each_row_of_an_array_has_a_number_of_its_own(world: World, shape: tuple[int, ...]) -> None:
    """The array has more rows than are looked up together, and than one piece holds."""
    model, watcher, n = world.model("f64", shape), Numbers(), 2000
    world.container(model)
    model.watch = watcher
    rows = np.arange(n, dtype=np.float64) if not shape else np.arange(2.0 * n).reshape(n, 2)
    sums = rows if not shape else rows.sum(axis=1)

    def ask() -> int:
        before = int(world.engine.snapshot()["models"][0]["evaluated"])
        future = model.predict_many(rows)
        while not future.done():
            world.serve()
        assert future.result().tolist() == sums.tolist()
        return int(world.engine.snapshot()["models"][0]["evaluated"]) - before

    assert [ask(), ask()] == [n, 0]
    assert [np.asarray(x).tolist() for x in watcher.seen[:n]] == rows.tolist()
    keys = list(watcher.numbers)
    for i in range(0, n, 3):
        watcher.numbers[keys[i]] = 2
        assert model.forget(*keys[i], 1)
    assert [ask(), ask()] == [len(range(0, n, 3)), 0]
    assert [model.cached(rows[i])[0] for i in (0, 1, 3, n - 1)] == [True] * 4
    watcher.numbers[keys[1]] = 2
    assert not model.cached(rows[1])[0]


def test_a_late_prediction_is_not_found_under_a_new_number(world: World) -> None:
    """A query of the new number neither joins a prediction in flight nor hits its cache entry: it
    was made of other rows."""
    model, watcher = world.model("f64", (2,)), Numbers()
    container = world.container(model)
    model.watch = watcher
    first = model.predict([1, 2])
    world.step()
    ((lo, hi),) = watcher.numbers
    watcher.numbers[lo, hi] = 2
    second = model.predict([1, 2])
    container.reply_all(lambda rows: np.array([7.0] * len(rows)))
    assert world.engine.snapshot()["models"][0]["evaluated"] == 2
    assert first.result(0) == second.result(0) == 7.0
    assert model.forget(lo, hi, 1)
    assert model.cached([1, 2])[0]


def test_a_watcher_that_fails_leaves_nothing_open(world: World) -> None:
    model = world.model("f64", (2,))
    world.container(model)

    def fails(x: Any, lo: int, hi: int) -> int:
        raise KeyError("watched")

    model.watch = fails
    for ask in ASKERS.values():
        with pytest.raises(KeyError, match="watched"):
            ask(model, [1, 2])
    model.watch = None
    future = model.predict([1, 2])
    world.serve()
    assert future.result(0) == 3.0
