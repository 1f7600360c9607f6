"""Tests of clipper_core.params.embedding, compared with a dict of rows."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipper_core.params.embedding import Table, key_of
from clipper_core.params.optimizer import Initializer, Optimizer
from clipper_core.runtime.status import StatusError

OPTIMIZERS = list(Optimizer.SETTINGS)
I64 = np.iinfo(np.int64)
Array = np.ndarray[Any, Any]


class Twin:
    """A reference model of Embedding: rows in a dict, updated one by one; test_optimizer checks the
    arithmetic."""

    def __init__(self, table: Table) -> None:
        self.table, self.rows = table, {}  # type: ignore[var-annotated]
        self.key, self.t = key_of(table.name, table.seed), 0

    def fresh(self, id_: int) -> Array:
        start = self.table.initializer.rows(self.key, [id_], self.table.dim)[0]
        return np.concatenate([start, self.table.optimizer.state(self.table.dim).ravel()])

    def pull(self, ids: Array) -> Array:
        return np.array(
            [self.rows.get(int(i), self.fresh(int(i)))[: self.table.dim] for i in ids]
        ).reshape(-1, self.table.dim)

    def push(self, ids: Array, gradients: Array, scale: float) -> int:
        self.t += 1
        sums: dict[int, Array] = {}
        for id_, gradient in zip(ids.tolist(), gradients, strict=True):
            sums[id_] = sums[id_] + gradient if id_ in sums else gradient
        made = 0
        for id_, gradient in sums.items():
            made += id_ not in self.rows
            row = self.rows.setdefault(id_, self.fresh(id_))
            d = self.table.dim
            shape = self.table.optimizer.state(d).shape
            w, state = row[:d].copy(), row[d:].reshape(shape).copy()
            self.table.optimizer.step(w, state, gradient, self.t, scale)
            self.rows[id_] = np.concatenate([w, state.ravel()])
        return made


def walked(table: Table, rows: int = 128) -> Iterator[tuple[int, Array, int]]:
    position: int | None = 0
    while position is not None:
        ids, values, stamps, position = table.walk(position, rows)
        yield from zip(ids.tolist(), values, stamps.tolist(), strict=True)


@pytest.mark.parametrize("name", OPTIMIZERS)
@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    dim=st.sampled_from([1, 3, 8, 17, 64]),
    span=st.sampled_from([3, 50, 2**62]),
)
def test_it_does_what_a_dict_of_rows_would(name: str, seed: int, dim: int, span: int) -> None:
    draw = np.random.default_rng(seed)
    table = Table(
        "users", dim, optimizer=Optimizer(name), initializer=Initializer("normal"), seed=seed
    )
    twin = Twin(table)
    for _ in range(12):
        n = int(draw.integers(0, 90))
        ids = draw.integers(-span, span, n)
        choice = draw.random()
        if choice < 0.6:
            g, scale = (
                draw.standard_normal((n, dim)).astype(np.float32),
                float(draw.choice([1.0, 0.25])),
            )
            counts = table.push(ids, g, scale=scale)
            assert counts == {
                "applied": len(set(ids.tolist())),
                "made": twin.push(ids, g, scale),
                "unadmitted": 0,
                "refused": 0,
                "evicted": 0,
            }
        elif choice < 0.7:
            assert table.remove(ids) == sum(
                twin.rows.pop(i, None) is not None for i in set(ids.tolist())
            )
        assert (table.pull(ids) == twin.pull(ids)).all()
        assert len(table) == len(twin.rows)
    found = {id_: row for id_, row, _ in walked(table)}
    assert found.keys() == twin.rows.keys()
    assert all((found[id_] == twin.rows[id_]).all() for id_ in found)
    ids = np.array([*twin.rows, 2**61 + 1], np.int64)
    there, rows, _ = table.read(ids)
    assert there.tolist() == [int(i) in twin.rows for i in ids]
    assert all((rows[i] == twin.rows[id_]).all() for i, id_ in enumerate(twin.rows))


@pytest.mark.parametrize("count", [1, 5, 6, 1000, 60_000, 400_000])
def test_it_grows_and_loses_nothing(count: int) -> None:
    draw = np.random.default_rng(count)
    ids = np.unique(draw.integers(I64.min, I64.max, count))
    table = Table("t", 2, optimizer=Optimizer("sgd"))
    values = np.stack([ids % 1000, ids % 77], axis=1).astype(np.float32)
    for i in range(0, len(ids), 5000):
        table.write(ids[i : i + 5000], values[i : i + 5000])
    assert len(table) == len(ids)
    order = draw.permutation(len(ids))
    assert (table.pull(ids[order]) == values[order]).all()
    if count >= 60_000:
        assert table.nbytes / len(ids) - 4 * table.width <= 24, (
            "a row costs its floats and 24 bytes"
        )
    seen = np.array([id_ for id_, _, _ in walked(table, 4096)])
    assert len(seen) == len(ids)
    assert (np.sort(seen) == ids).all()


def test_ids_are_any_64_bits() -> None:
    table = Table("t", 1, optimizer=Optimizer("sgd", rate=1.0), initializer=Initializer("zeros"))
    ids = np.array([0, -1, I64.min, I64.max, 1 << 32, 1], np.int64)
    table.push(ids, -np.arange(1.0, 7.0, dtype=np.float32)[:, None])
    assert table.pull(ids).ravel().tolist() == [1, 2, 3, 4, 5, 6]
    assert table.pull(np.array([2**64 - 1, 2**63], np.uint64)).ravel().tolist() == [2, 3]
    assert table.pull([]).shape == (0, 1)
    assert table.push(np.empty(0, np.int64), np.empty((0, 1)))["applied"] == 0


def test_pulling_makes_no_rows_and_shards_agree() -> None:
    one, other = Table("t", 16, seed=3), Table("t", 16, seed=3)
    ids = np.arange(-500, 500)
    assert (one.pull(ids) == other.pull(ids[::-1])[::-1]).all()
    assert len(one) == 0
    other.push(ids[:1], np.ones((1, 16)))
    assert (one.pull(ids[1:]) == other.pull(ids[1:])).all()
    assert (Table("t", 16, seed=4).pull(ids) != one.pull(ids)).any(axis=1).all()
    assert (Table("u", 16, seed=3).pull(ids) != one.pull(ids)).any(axis=1).all()


def test_a_key_is_the_same_for_ever() -> None:
    assert [key_of("users"), key_of("users", 7), key_of("Bücher")] == KEYS


KEYS = [4494661601655233416, 6492130589628174431, 8264418478552050710]


def test_duplicates_are_summed_before_the_step() -> None:
    summed, separate = Table("t", 3), Table("t", 3)
    ids, g = np.array([9, 4, 9, 9]), np.float32([[1, 2, 3], [7, 7, 7], [0.5, 0, -1], [0.25, 0, 0]])
    separate.push(ids, g)
    summed.push([9, 4], np.float32([[1.75, 2, 2], [7, 7, 7]]))
    assert (summed.pull(ids) == separate.pull(ids)).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_push_that_is_no_number_changes_nothing(bad: float) -> None:
    table = Table("t", 4)
    table.push([1], np.ones((1, 4)))
    before = table.pull([1, 2])
    g = np.ones((2, 4))
    g[1, 3] = bad
    with pytest.raises(StatusError, match="table 't': the gradient of id 2 holds NaN or infinity"):
        table.push([1, 2], g)
    with pytest.raises(StatusError, match="a row holds NaN or infinity"):
        table.write([1, 2], g)
    assert (table.pull([1, 2]) == before).all()
    assert len(table) == 1
    assert table.steps == 1


def test_what_is_wrong_with_a_call_is_reported() -> None:
    table = Table("t", 4)
    for call, message in [
        (
            lambda: table.push([1, 2], np.ones((1, 4))),
            r"expected contiguous f32\[2, 4\], got f32\[1,4\]",
        ),
        (lambda: table.push([1], np.ones((1, 5))), r"expected contiguous f32\[1, 4\]"),
        (lambda: table.push([1.5], np.ones((1, 4))), "ids are whole numbers, not float64"),
        (lambda: table.pull([[1]]), r"ids: expected \[n\]"),
        (lambda: table.pull([1], "f64"), "no dtype 'f64'"),
        (
            lambda: table.pull([1], out=np.zeros((2, 4), np.float32)),
            r"expected contiguous f32\[1, 4\]",
        ),
        (lambda: table.push([1], np.ones((1, 4)), scale=0.0), "scale = 0.0"),
        (lambda: table.write([1], np.ones((1, 4)), [1, 2]), "1 ids, and 2 stamps"),
        (lambda: Table("t", 0), "a row of 0 floats"),
        (lambda: Table("t", 1 << 20), "1 to 1048576 floats"),
        (lambda: Table("t", 1, rows_max=0), "rows_max is 1 to 2"),
        (lambda: Table("t", 1, admit_after=256), "admit_after 1 to 255"),
    ]:
        with pytest.raises(StatusError, match=message):
            call()
    assert len(table) == 0


def test_half_precision_is_numpys() -> None:
    draw = np.random.default_rng(1)
    table = Table("t", 64, optimizer=Optimizer("sgd"))
    values = (draw.standard_normal((300, 64)) * 10.0 ** draw.uniform(-9, 6, (300, 64))).astype(
        np.float32
    )
    values[0, :6] = [65504, 65519.996, 65520, -65520, 0.0, -0.0]
    values[1, :4] = [2.0**-24, 2.0**-25, 1.5 * 2.0**-25, 6.1e-05]
    table.write(np.arange(300), values)
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16)
    assert (table.pull(np.arange(300), "f16").view(np.uint16) == expected.view(np.uint16)).all()
    bf16 = table.pull(np.arange(300), "bf16").astype(np.uint32)
    back = (bf16 << 16).view(np.float32)
    assert (np.abs(back - values) <= np.abs(values) * 2.0**-8).all()
    assert (values.view(np.uint32) >> 16 <= bf16).all()
    assert (bf16 <= (values.view(np.uint32) >> 16) + 1).all()
    eighths, scales = table.pull(np.arange(300), "i8")
    assert (
        np.abs(eighths * scales[:, None] - values)
        <= np.abs(values).max(axis=1, keepdims=True) / 127 * 0.5001
    ).all()


def test_a_full_table_refuses_or_lets_the_oldest_go() -> None:
    strict = Table("t", 1, rows_max=10)
    counts = strict.push(np.arange(15), np.ones((15, 1)))
    assert (counts["made"], counts["refused"], len(strict)) == (10, 5, 10)
    assert strict.push([0], np.ones((1, 1)))["applied"] == 1
    moving = Table("t", 1, rows_max=10, evicts=True)
    for now in range(1, 31):
        counts = moving.push([now], np.ones((1, 1)), stamp=now)
        assert counts["evicted"] == (now > 10)
    assert len(moving) == 10
    assert sorted(id_ for id_, _, _ in walked(moving)) == list(range(21, 31)), (
        "ten rows are all looked at"
    )
    assert moving.push([99], np.ones((1, 1)), stamp=31)["evicted"] == 1


def test_evicted_ids_are_reported() -> None:
    table, draw = Table("t", 1, rows_max=50, evicts=True), np.random.default_rng(4)
    there: set[int] = set()
    for now in range(1, 60):
        ids, gone = draw.integers(0, 200, 30), list[Array]()
        counts = table.push(ids, np.ones((30, 1)), stamp=now, gone=gone)
        assert sum(each.size for each in gone) == counts["evicted"]
        there = (there | set(ids.tolist())) - {int(i) for each in gone for i in each}
        kept = {id_ for id_, _, _ in walked(table)}
        assert kept >= there, "none went unsaid"
        there = kept
    quiet = list[Array]()
    Table("t", 1).push([1], np.ones((1, 1)), gone=quiet)
    assert quiet == []


def test_a_copy_has_room_for_ids_that_will_be_reported_as_evicted() -> None:
    for evicts in (True, False):
        copy = Table("t", 1, rows_max=10, evicts=evicts)
        copy.bounded = False
        counts = copy.write(np.arange(25), np.ones((25, 1)), np.arange(25))
        assert (counts["made"], counts["refused"], counts["evicted"], len(copy)) == (25, 0, 0, 25)
        copy.remove(np.arange(12))
        copy.bounded = True
        assert len(copy) == (10 if evicts else 13)
        assert sorted(id_ for id_, _, _ in walked(copy))[-10:] == list(range(15, 25))
        counts = copy.push([99], np.ones((1, 1)), stamp=99)
        assert (counts["evicted"], counts["refused"]) == ((1, 0) if evicts else (0, 1))
        copy.remove(np.arange(20))
        assert len(copy) == (6 if evicts else 5)
        counts = copy.push(np.arange(200, 220), np.ones((20, 1)), stamp=99)
        assert len(copy) == 10, "what was given back is no more room than it had"


def test_the_oldest_of_many_is_old() -> None:
    table = Table("t", 1, rows_max=2000, evicts=True)
    for now in range(1, 6001):
        table.push([now], np.ones((1, 1)), stamp=now)
    kept = np.array([id_ for id_, _, _ in walked(table)])
    assert len(kept) == 2000
    assert np.median(kept) > 4500
    assert (kept <= 3000).mean() < 0.05


def test_rows_expire_by_their_stamp() -> None:
    table = Table("t", 2)
    for now in (1, 2, 3):
        table.push(np.arange(now * 100, now * 100 + 100), np.ones((100, 2)), stamp=now)
    table.pull(np.arange(100, 110), stamp=9)
    assert table.expire(3) == 190
    assert sorted(id_ for id_, _, _ in walked(table)) == [*range(100, 110), *range(300, 400)]
    assert table.push([500], np.ones((1, 2)))["made"] == 1, "its memory is taken again"
    assert table.nbytes < 400 * (4 * table.width + 64)


def test_ids_are_admitted_when_they_were_seen_often_enough() -> None:
    table = Table("t", 2, admit_after=3, rows_max=100_000)
    g = np.ones((1, 2))
    before = table.pull([5])
    assert [table.push([5], g)["unadmitted"] for _ in range(4)] == [1, 1, 0, 0]
    assert len(table) == 1
    assert (table.pull([5]) != before).all()
    table.push(np.arange(1000, 6000), np.ones((5000, 2)))
    table.push(np.arange(1000, 6000), np.ones((5000, 2)))
    assert len(table) <= 3, "a sketch errs to one side, and seldom"


def test_whole_rows_travel() -> None:
    here = Table("t", 4, optimizer=Optimizer("adam"))
    here.push(np.arange(500), np.random.default_rng(0).standard_normal((500, 4)), stamp=7)
    there = Table("t", 4, optimizer=Optimizer("adam"))
    position: int | None = 0
    while position is not None:
        ids, rows, stamps, position = here.walk(position, 100)
        there.write(ids, rows, stamps)
    there.steps = here.steps
    for table in (here, there):
        table.push(np.arange(500), np.ones((500, 4)))
    assert (here.pull(np.arange(500)) == there.pull(np.arange(500))).all()
    assert {stamp for _, _, stamp in walked(there)} == {7}


def test_memory_that_is_reserved_is_no_row() -> None:
    table = Table("t", 64, rows_max=100_000)
    table.reserve(1000)
    table.reserve(200_000)
    assert len(table) == 0
    assert table.push([1], np.ones((1, 64)))["made"] == 1
    assert repr(table).startswith("Table('t', 64, optimizer=Optimizer('adagrad'), rows=1)")
