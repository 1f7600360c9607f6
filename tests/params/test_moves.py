"""Which cached predictions are invalidated when rows change, compared with a simple model that
stores all events and recomputes the result."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipper.params.client.row_drift import Key, RowDrift

SHARDS = 2
Event = tuple[str, int, int, float]  # what, row, question, step


class Reference:
    """A simple model: it stores all events and computes the invalidated predictions from them."""

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance
        self.events: list[tuple[str, int, float]] = []
        self.made: dict[Key, tuple[list[int], int]] = {}

    def enter(self, key: Key, ids: list[int]) -> None:
        self.made.setdefault(key, (ids, len(self.events)))

    def update(self) -> None:
        for key, (ids, since) in list(self.made.items()):
            for id in ids:
                steps = [step for what, row, step in self.events[since:] if row == id]
                if sum(steps) > self.tolerance:
                    del self.made[key]
                    break


class World:
    """The rows of two shards, a RowDrift that pulls them, and the simple model. The value of a row
    is its norm."""

    def __init__(self, tolerance: float, made_max: int = 1000, rows_max: int = 1000) -> None:
        self.values: dict[int, float] = {}
        self.request = [1, 7]
        self.dropped: list[tuple[Key, int]] = []
        self.moves = RowDrift(
            tolerance, made_max, rows_max, lambda key, number: self.dropped.append((key, number))
        )
        self.reference = Reference(tolerance)
        self.numbers: dict[Key, int] = {}
        self.doubted: dict[
            int, int
        ] = {}  # row -> the question from which on its changes came after it was pulled

    def pull(self, ids: np.ndarray) -> np.ndarray:
        return np.array([[self.values.get(id, 1.0), 0.0] for id in ids.tolist()], np.float32)

    def enter(self, name: int, ids: list[int]) -> int:
        key = (name, 7)
        self.numbers[key] = self.moves.enter(key, {"t": np.array(ids, np.int64)})
        self.reference.enter(key, ids)
        return self.numbers[key]

    def begin(self) -> None:
        surely = [request + 2 for request in self.request]
        for table, ids in self.moves.new.items():
            for id in ids.tolist():
                if any(id in rows for rows, _ in self.reference.made.values()):
                    self.doubted[id] = surely[id % SHARDS]
            self.moves.set_first_values(table, ids, self.pull(ids), surely)

    def receive(self, changed: dict[int, float]) -> None:
        """Let both shards answer with the rows that have changed and their values, and send them
        new requests."""
        for shard in range(SHARDS):
            mine = {id: value for id, value in changed.items() if id % SHARDS == shard}
            request = self.request[shard]
            for id, value in mine.items():
                before = self.values.get(id, 1.0)
                unsure = request < self.doubted.get(id, 1 << 62)
                step = float("inf") if unsure else abs(value - before) / before
                self.reference.events.append(("moved", id, step))
            self.values |= mine
            ids = self.moves.followed("t", np.array(sorted(mine), np.int64))
            self.moves.moved("t", ids, self.pull(ids), request)
            self.request[shard] += 1
        self.reference.update()
        used = {id for ids, _ in self.reference.made.values() for id in ids}
        self.doubted = {id: at for id, at in self.doubted.items() if id in used}

    def agree(self) -> None:
        for key, number in self.numbers.items():
            there = self.moves.find(key)
            assert (there is not None) == (key in self.reference.made), key
            assert (key, number) in self.dropped or (
                there is not None and there.generation == number
            )
        used = {id for ids, _ in self.reference.made.values() for id in ids}
        assert self.moves.rows == len(used)
        assert len(self.moves) == len(self.reference.made)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    tolerance=st.sampled_from([0.0, 0.25, 1.0, 3.0]),
    rows=st.integers(1, 12),
)
def test_predictions_are_invalidated_as_in_a_simple_model(
    seed: int, tolerance: float, rows: int
) -> None:
    rng, world = random.Random(seed), World(tolerance)
    for _ in range(120):
        what = rng.random()
        if what < 0.4:
            world.enter(rng.randrange(40), rng.choices(range(rows), k=rng.randint(1, 3)))
        elif what < 0.6:
            world.begin()
        else:
            some = rng.sample(range(rows), rng.randint(0, rows))
            world.receive(
                {id: world.values.get(id, 1.0) * 2.0 ** rng.choice((-1, 0, 0, 1, 2)) for id in some}
            )
        world.agree()


def settled_world(tolerance: float, ids: list[int], **bounds: int) -> World:
    world = World(tolerance, **bounds)
    world.enter(0, ids)
    world.begin()
    world.receive({})
    world.receive({})
    return world


def test_a_prediction_is_invalidated_when_one_of_its_rows_exceeds_the_tolerance() -> None:
    world = settled_world(0.5, [1, 2])
    number = world.numbers[0, 7]
    world.receive({1: 1.25})
    world.receive({2: 1.25})
    assert world.moves.find((0, 7)) is not None, "a quarter each: none has gone further than a half"
    world.receive({1: 1.25 * 1.3})
    assert world.moves.find((0, 7)) is None
    assert world.dropped == [((0, 7), number)]
    assert world.moves.forgotten == {"moved": 1}
    assert world.enter(0, [1, 2]) > number, "asked again, under another number"


def test_changes_in_opposite_directions_add_up() -> None:
    world = settled_world(0.5, [1])
    for value in (1.2, 1.0, 1.2):
        assert world.moves.find((0, 7)) is not None
        world.receive({1: value})
    assert world.moves.find((0, 7)) is None


def test_a_later_prediction_does_not_count_earlier_changes() -> None:
    world = settled_world(0.5, [1])
    world.receive({1: 1.4})
    world.enter(1, [1])
    world.receive({1: 1.4 * 1.2})
    assert [world.moves.find((name, 7)) is not None for name in (0, 1)] == [False, True]


def test_a_change_before_the_row_was_pulled_invalidates() -> None:
    world = World(100.0)
    world.enter(0, [1])
    world.receive({1: 1.1})  # not pulled yet
    assert world.moves.find((0, 7)) is None
    for silent in (0, 1, 2):
        world.enter(silent, [1])
        world.begin()
        for _ in range(silent):
            world.receive({})
        world.receive({1: world.values[1] * 1.1})
        assert (world.moves.find((silent, 7)) is not None) == (silent == 2), (
            "two answers later it is known"
        )
    assert world.moves.forgotten == {"unsure": 3}


def test_any_change_of_a_zero_row_invalidates() -> None:
    world = World(1e9)
    world.values[1] = 0.0
    world.enter(0, [1])
    world.begin()
    for _ in range(3):
        ids = world.moves.followed("t", np.array([1]))
        world.moves.moved("t", ids, world.pull(ids), 9)
    assert world.moves.find((0, 7)) is not None, "it has not moved"
    world.values[1] = 1e-9
    world.moves.moved("t", world.moves.followed("t", np.array([1])), world.pull(np.array([1])), 9)
    assert world.moves.find((0, 7)) is None


@pytest.mark.parametrize(("bounds", "kept"), [({"made_max": 5}, 5), ({"rows_max": 6}, 3)])
def test_the_oldest_predictions_are_removed_at_the_limit(bounds: dict[str, int], kept: int) -> None:
    world = World(1.0, **bounds)
    for name in range(20):
        world.enter(name, [2 * name, 2 * name + 1])
    assert [key[0] for key, _ in world.dropped] == list(range(20 - kept))
    assert (len(world.moves), world.moves.rows) == (kept, 2 * kept)
    assert world.moves.forgotten == {"room": 20 - kept}


def test_invalidated_predictions_leave_no_rows_behind() -> None:
    world = World(1.0)
    for round_ in range(50):
        for name in range(20):
            world.enter(name, [name % 3, 1000 + round_ * 20 + name])
        world.begin()
        assert world.moves.rows == 23
        world.moves.forget_all()
        assert (len(world.moves), world.moves.rows) == (0, 0)
    assert not any(world.moves._tables.values())


def test_a_row_drops_predictions_that_another_row_invalidated() -> None:
    world = settled_world(1.0, [0])
    for _ in range(500):
        world.enter(1, [0, 1])
        world.receive({1: 5.0})
    (still,) = world.moves._tables["t"].values()
    assert still.uses == 1
    assert len(still.made) < 40
