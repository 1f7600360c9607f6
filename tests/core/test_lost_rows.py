"""The rows of a container that died: sent again alone, blamed once, refused for a while."""

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from clipper_core.runtime.status import Status
from clipper_core.scheduling.scheduler import EngineEvent
from tests.core.conftest import Container, World

POISON = 666.0
BLAME = struct.Struct("<III16s")


class Dying:
    """Serves a model; its container dies on a batch with the poisoned row, and another follows."""

    def __init__(self, world: World, model: Any, **attach: Any) -> None:
        self.world = world
        self.model = model
        self.attach = attach
        self.container: Container = world.container(model, **attach)
        self.deaths: list[list[float]] = []
        self.blamed: list[bytes] = []

    def serve(self) -> None:
        """Serve until nothing is in flight."""
        for _ in range(10_000):
            self.world.step(1)
            if not self.container.read():
                return
            rows = np.asarray([float(np.sum(row)) for row in self.container.inbox[0][1]])
            if POISON in rows:
                self.deaths.append(rows.tolist())
                self.container.lose()
                self.blamed += keys(self.world)
                self.container = self.world.container(self.model, **self.attach)
            else:
                self.container.reply()
        raise AssertionError("it does not come to an end")


def keys(world: World) -> list[bytes]:
    """Return the keys of blamed rows, of connections that have ended."""
    found = []
    for kind, _, _, _, data in world.engine.events():
        if kind is EngineEvent.DISCONNECTED and data:
            rows, _, is_blamed, key = BLAME.unpack(data)
            assert rows > 0
            found += [key] * is_blamed
    return found


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["singles", "array", "by_cost"])
def test_one_row_ends_two_processes_and_only_its_query_fails(
    world: World, seed: int, kind: str
) -> None:
    random = np.random.default_rng(seed)
    count = int(random.integers(2, 300))
    rows = random.permutation(count).astype(float)
    rows[random.integers(count)] = POISON
    by_cost = kind == "by_cost"
    model = world.model("f64", (-1,) if by_cost else (), cached=False, **(
        {"cost": "length"} if by_cost else {}
    ))  # fmt: skip
    size = {"cost_max": 40} if by_cost else {"size_max": int(random.integers(1, 80))}
    served = Dying(world, model, **size)
    if kind == "array":
        future = model.predict_many(rows, slo_ms=10_000)
        served.serve()
        ended = [Status(int(status)) for status in future.statuses()]
    else:
        given = [np.array([row]) for row in rows] if by_cost else [float(row) for row in rows]
        futures = [model.predict(row, slo_ms=10_000) for row in given]
        served.serve()
        ended = [future.status() for future in futures]
        detail = futures[int(np.argmax(rows == POISON))].detail()
        assert "the process of its container ended twice" in detail
    assert ended == [Status.REPLICA_LOST if row == POISON else Status.OK for row in rows]
    assert len(served.deaths) == 2
    assert served.deaths[1] == [POISON]
    assert len(served.blamed) == 1


def test_rows_that_a_container_had_not_begun_are_not_blamed(world: World) -> None:
    model = world.model(cached=False)
    first = world.container(model, size_max=1)
    poisoned, after = model.predict(POISON, slo_ms=1000), model.predict(1.0, slo_ms=1000)
    world.step()
    in_flight = [rows.tolist() for _, rows in first.read()]
    assert in_flight == [[POISON], [1.0]]
    for _ in range(2):
        world.containers[0].lose()
        assert [len(found) for found in keys(world)] in ([], [16])
        world.container(model, size_max=1)
    world.containers[0].reply_all()
    assert (poisoned.status(), after.status()) == (Status.REPLICA_LOST, Status.OK)


def test_nothing_joins_a_row_whose_container_died(world: World) -> None:
    model = world.model(cached=False)
    first = world.container(model, size_max=8)
    old = model.predict(1.0)
    world.step()
    first.lose()
    second = world.container(model, size_max=8)
    later = [model.predict(float(i)) for i in range(2, 6)]
    world.step()
    assert [rows.tolist() for _, rows in second.read()] == [[1.0]]
    second.reply()
    world.step()
    assert [rows.tolist() for _, rows in second.read()] == [[2.0, 3.0, 4.0, 5.0]]
    second.reply()
    world.step()
    assert {future.status() for future in (old, *later)} == {Status.OK}


def test_where_time_is_short_rows_are_sent_again_together(world: World) -> None:
    model = world.model(cached=False)
    first = world.container(model, size_max=100)
    for i in range(40):  # it is seen to need 2 ms for a row
        model.predict(float(i))
        world.step()
        first.read()
        world.step(2000)
        first.reply()
        world.step()
    futures = [model.predict(float(i), slo_ms=60) for i in range(100)]
    world.step()
    first.read()
    first.lose()
    second = world.container(model, size_max=100)
    ((_, rows),) = second.read()
    assert 3 <= len(rows) <= 30
    while second.read():
        world.step(2000)
        second.reply()
        world.step()
    assert {future.status() for future in futures} == {Status.OK}


@pytest.mark.parametrize("array", [False, True])
@pytest.mark.parametrize("cached", [False, True])
def test_a_refused_row_is_sent_nowhere_until_its_time(
    world: World, array: bool, cached: bool
) -> None:
    model = world.model(cached=cached)
    served = Dying(world, model)
    model.predict(POISON, slo_ms=1000)
    served.serve()
    (key,) = served.blamed
    world.engine.refuse_row(model.index, key, world.now_us + 1_000_000)
    world.step()
    rows = np.array([1.0, 2.0, POISON, 3.0, POISON])
    if array:
        future = model.predict_many(rows)
        served.serve()
        ended = [Status(int(status)) for status in future.statuses()]
    else:
        futures = [model.predict(float(row)) for row in rows]
        served.serve()
        ended = [future.status() for future in futures]
        assert "is refused" in futures[2].detail()
    assert ended == [Status.REPLICA_LOST if row == POISON else Status.OK for row in rows]
    assert len(served.deaths) == 2, "it is not sent"
    world.step(1_000_001)
    model.predict(POISON, slo_ms=1000)
    served.serve()
    assert len(served.deaths) == 4, "it is sent again"


def blamed(world: World, model: Any, row: Any) -> bytes:
    """Let a row end two containers. Returns its key; no container is left."""
    served = Dying(world, model)
    model.predict(row, slo_ms=1000)
    served.serve()
    served.container.lose()
    (key,) = served.blamed
    return key


def submit(model: Any, rows: list[Any], kind: str) -> Callable[[], list[Status]]:
    """Submit rows as an array, or one by one. Returns what gives their statuses."""
    if kind == "array":
        future = model.predict_many(np.array(rows), slo_ms=10_000)
        return lambda: [Status(int(status)) for status in future.statuses()]
    futures = [model.predict(row, slo_ms=10_000) for row in rows]
    return lambda: [future.status() for future in futures]


KINDS = ["singles", "array", "by_cost"]
GIVEN = [1.0, POISON, *(float(i) for i in range(2, 40)), POISON]


def mixed(world: World, kind: str, cached: bool) -> tuple[Any, list[Any], list[Any]]:
    """Return a model, a row that ends containers, and some rows, two of them such ones."""
    if kind != "by_cost":
        return world.model(cached=cached), [POISON], list(GIVEN)
    model = world.model("f64", (-1,), cached=cached, cost="length")
    return model, [np.array([POISON])], [np.array([row]) for row in GIVEN]


def ends(bad: Status, good: Status) -> list[Status]:
    """Return what the rows of `mixed` end with."""
    return [bad if row == POISON else good for row in GIVEN]


def check_served(world: World, model: Any, statuses: Callable[[], list[Status]]) -> None:
    """Check that another container serves all rows but the refused ones, and nothing waits."""
    served = Dying(world, model)
    served.serve()
    assert statuses() == ends(Status.REPLICA_LOST, Status.OK)
    assert not served.deaths
    counts = world.engine.model_counts(model.index)
    assert counts["submitted"] == counts["answered"]
    assert model.waiting == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cached", [False, True])
def test_a_refused_row_ends_as_it_comes_in(world: World, kind: str, cached: bool) -> None:
    model, (poisoned,), rows = mixed(world, kind, cached)
    key = blamed(world, model, poisoned)
    world.engine.refuse_row(model.index, key, world.now_us + 1_000_000)
    world.step()
    statuses = submit(model, rows, kind)
    world.step()
    assert statuses() == ends(Status.REPLICA_LOST, Status.PENDING), "it waits for no replica"
    world.step(1_000_001)  # it is refused no more, but these have ended
    check_served(world, model, statuses)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("retried", [False, True])
def test_waiting_rows_end_when_their_row_is_refused(world: World, kind: str, retried: bool) -> None:
    model, (poisoned,), rows = mixed(world, kind, cached=False)
    key = blamed(world, model, poisoned)
    statuses = submit(model, rows, kind)
    world.step()
    if retried:  # they were in a container that died, and wait for the next one
        container = world.container(model)
        assert container.read()
        container.lose()
    assert statuses() == [Status.PENDING] * len(rows)
    world.engine.refuse_row(model.index, key, world.now_us + 1_000_000)
    world.step()
    assert statuses() == ends(Status.REPLICA_LOST, Status.PENDING)
    check_served(world, model, statuses)


def test_queries_joined_to_a_waiting_row_end_with_it(world: World) -> None:
    model = world.model()
    key = blamed(world, model, POISON)
    futures = [model.predict(POISON, slo_ms=slo_ms) for slo_ms in (10_000, 10_000, 100, 5000)]
    world.step()
    world.engine.refuse_row(model.index, key, world.now_us + 1_000_000)
    world.step()
    assert {future.status() for future in futures} == {Status.REPLICA_LOST}
    assert all("is refused" in future.detail() for future in futures)
    assert model.predict(1.0).status() == Status.PENDING


def test_so_many_rows_are_refused_at_most(world: World) -> None:
    model = world.model(cached=False)
    served = Dying(world, model)
    for i in range(400):
        key = struct.pack("<QQ", i + 1, 0)
        world.engine.refuse_row(model.index, key, world.now_us + 10_000_000 + i)
        world.step()
    future = model.predict(1.0)
    served.serve()
    assert future.status() == Status.OK


def test_a_key_has_its_length(world: World) -> None:
    with pytest.raises(Exception, match="16 bytes"):
        world.engine.refuse_row(0, b"short", 0)
    with pytest.raises(Exception, match="no model with index 7"):
        world.engine.refuse_row(7, bytes(16), 0)


def test_a_row_is_the_same_whatever_its_query(new_world: Callable[..., World]) -> None:
    world = new_world()
    model = world.model(cached=False)
    served = Dying(world, model)
    model.predict(POISON, slo_ms=1000)
    served.serve()
    world.engine.refuse_row(model.index, served.blamed[0], world.now_us + 1_000_000)
    world.step()
    again = model.predict(POISON, slo_ms=5000)
    served.serve()
    assert again.status() == Status.REPLICA_LOST
    other = world.model(cached=False)
    of_other = other.predict(POISON)
    container = world.container(other)
    world.step()
    container.reply_all()
    assert of_other.status() == Status.OK, "another model's"
