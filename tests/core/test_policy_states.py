"""Blocks of learned states: what they have, who keeps them, and that nobody can write into one."""

import gc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from clipper_core.learning.policy_states import Held, StateBlock, block_of, state_block
from clipper_core.runtime.status import StatusError


def state_of(number: float, shape: tuple[int, int] = (3, 4)) -> Any:
    block = state_block(np.full(shape, number), np.full((10, 2), number), number, int(number))
    return SimpleNamespace(rows=block.rows, sure=block.sure)


@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (4, 66)])
def test_a_block_has_copies_that_nobody_can_write(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(1)
    rows, sure = rng.random(shape), rng.random((10, 2))
    block = state_block(rows, sure, 2.5, 2**64 - 1)
    expected = rows.copy(), sure.copy()
    rows += 1
    sure += 1
    assert np.array_equal(block.rows, expected[0])
    assert np.array_equal(block.sure, expected[1])
    assert (block.seen, block.labels) == (2.5, 2**64 - 1)
    for array in (block.rows, block.sure):
        assert block_of(array) is block
        assert not array.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
        with pytest.raises(ValueError, match="read-only"):
            array[:] = 1


def test_arrays_keep_their_block() -> None:
    rows = state_of(7.0).rows
    gc.collect()
    others = [state_of(float(i)) for i in range(100)]
    assert (rows == 7.0).all()
    assert (rows[1:].T == 7.0).all()
    assert len(others) == 100


@pytest.mark.parametrize(
    ("rows", "sure"), [(np.zeros(3), np.zeros((10, 2))), (np.zeros((3, 1)), np.zeros((10, 3)))]
)
def test_arrays_of_other_shapes_are_refused(rows: Any, sure: Any) -> None:
    with pytest.raises(StatusError, match="rows must be"):
        state_block(rows, sure, 0.0, 0)


def test_a_block_is_made_by_a_function_only() -> None:
    with pytest.raises(StatusError, match="state_block"):
        _ = StateBlock().rows


def test_no_block_is_found_where_none_is() -> None:
    array = np.zeros((3, 4))
    assert [block_of(each) for each in (None, "x", array, array[1:], state_of(1.0).rows[1:])] == [
        None
    ] * 5


def test_a_cell_has_the_newest_block_and_frees_those_before() -> None:
    held = Held(None, None, 0, {})
    assert held.copied() is None
    newest = None
    for i in range(200):
        if i % 7 == 3:
            held.publish("a state of a user's own policy")
            assert held.copied() is None
        else:
            held.publish(newest if i % 5 == 4 and newest is not None else state_of(float(i)))
            newest = held.state
            copied = held.copied()
            assert copied is not None
            assert np.array_equal(copied[0], newest.rows)
            assert np.array_equal(copied[1], newest.sure)
            assert copied[0].flags.writeable
    other = Held(newest, None, 0, {})
    del held
    gc.collect()
    copied = other.copied()
    assert copied is not None
    assert np.array_equal(copied[0], newest.rows)
