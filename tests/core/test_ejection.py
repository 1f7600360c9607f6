"""A replica whose model fails batch after batch: it is ejected, probed and used again; its rows are
sent to another replica once."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from clipper_core.runtime.status import Status

World = Any  # tests/core/conftest.py
STATIC = 3
EJECT_US_MIN = 100_000


def serve(world: World, good: Any, bad: Any, took_us: int = 5_000) -> None:
    """Fail what the bad replica has at once, and answer what the good one has after a while."""
    while bad.read() or good.read():
        while bad.inbox:
            bad.fail("boom")
        world.step()
        if good.read():
            world.step(took_us)
            good.reply()
        world.step()


def pair(world: World, **options: Any) -> tuple[Any, Any, Any]:
    model = world.model(cached=False)
    return (model, *(world.container(model, mode=STATIC, size_max=4, **options) for _ in range(2)))


def ask(world: World, model: Any, good: Any, bad: Any, queries: int) -> list[Any]:
    futures = []
    for k in range(queries):
        futures.append(model.predict(float(k), 500))
        world.step()
        serve(world, good, bad)
    return futures


def test_a_replica_that_fails_fast_costs_no_query(world: World) -> None:
    model, good, bad = pair(world)
    futures = ask(world, model, good, bad, 100)
    assert [future.status() for future in futures] == [Status.OK] * 100
    seen = world.engine.replica(bad.conn)
    assert seen["ejected"]
    assert 3 <= seen["failures"] <= 10, "after three in a row it gets probes only"
    counts = world.engine.model_counts(model.index)
    assert counts["retried"] == seen["failures"]
    assert not world.engine.replica(good.conn)["ejected"]


def test_probes_come_at_growing_intervals_and_a_success_takes_the_replica_back(
    world: World,
) -> None:
    model, good, bad = pair(world, quiet=True)
    ask(world, model, good, bad, 10)
    probed_us = []
    for _ in range(400):
        before = world.engine.replica(bad.conn)["failures"]
        ask(world, model, good, bad, 1)
        if world.engine.replica(bad.conn)["failures"] > before:
            probed_us.append(world.now_us)
        world.step(10_000)
    pauses = [b - a for a, b in pairwise(probed_us)]
    assert len(pauses) >= 3
    assert all(b >= 1.5 * a for a, b in pairwise(pauses)), pauses
    world.step(30_000_000)
    future = model.predict(1.0, 500)
    world.step()
    ((_, rows),) = bad.read()
    assert len(rows) == 1, "a probe is a single row"
    bad.reply()
    world.step()
    assert future.status() == Status.OK
    assert not world.engine.replica(bad.conn)["ejected"]


def test_rows_are_tried_elsewhere_only_once_and_only_in_time(world: World) -> None:
    """Both replicas fail: a query is tried on each, never a third time, and its error is the
    model's."""
    model, one, other = pair(world)
    future = model.predict(1.0, 500)
    tries = 0
    world.step()
    while not future.done():
        for container in (one, other):
            while container.read():
                tries += 1
                container.fail("boom")
                world.step()
    assert (future.status(), tries) == (Status.MODEL_ERROR, 2)
    assert "boom" in future.detail()
    late = model.predict(2.0, 10)
    world.step()
    world.step(11_000)
    for container in (one, other):
        while container.read():
            container.fail("boom")
            world.step()
    assert late.status() == Status.DEADLINE


def test_queries_that_every_replica_fails_eject_none_but_the_first(world: World) -> None:
    """A row that fails on two replicas is itself the cause: its failure is not counted against the
    second."""
    model, one, other = pair(world)
    for k in range(20):
        future = model.predict(float(k), 500)
        world.step()
        while not future.done():
            for container in (one, other):
                while container.read():
                    container.fail("boom")
                    world.step()
    ejected = [world.engine.replica(container.conn)["ejected"] for container in (one, other)]
    assert sorted(ejected) == [False, True]
    good = model.predict(1.0, 500)
    world.step()
    one.reply_all()
    other.reply_all()
    assert good.status() == Status.OK


def test_the_last_replica_is_never_left_alone(world: World) -> None:
    model = world.model(cached=False)
    container = world.container(model, mode=STATIC, size_max=4)
    for k in range(20):
        future = model.predict(float(k), 500)
        world.step()
        assert len(container.read()) == 1
        container.fail("boom")
        world.step()
        assert future.status() == Status.MODEL_ERROR
    answered = model.predict(1.0, 500)
    world.step()
    container.reply_all()
    assert answered.status() == Status.OK


def test_an_ejected_replica_serves_when_all_others_have_disconnected(world: World) -> None:
    model, good, bad = pair(world)
    ask(world, model, good, bad, 10)
    assert world.engine.replica(bad.conn)["ejected"]
    good.lose()
    future = model.predict(1.0, 500)
    world.step()
    bad.reply_all()
    assert future.status() == Status.OK


def test_rows_of_an_array_go_elsewhere_as_well(world: World) -> None:
    model, good, bad = pair(world)
    many = model.predict_many([float(k) for k in range(200)], 60_000)
    world.step()
    serve(world, good, bad)
    assert {many.status(i) for i in range(200)} == {Status.OK}


def test_an_output_of_another_type_than_declared_counts_as_a_failure(world: World) -> None:
    model = world.model(cached=False, output="f64", output_shape=())
    good, bad = (world.container(model, mode=STATIC, size_max=4) for _ in range(2))
    futures = []
    for k in range(20):
        futures.append(model.predict(float(k), 500))
        world.step()
        while bad.read() or good.read():
            if bad.inbox:
                bad.reply(lambda rows: ["text"] * len(rows))
            else:
                world.step(2_000)
                good.reply()
            world.step()
    assert [future.status() for future in futures] == [Status.OK] * 20
    assert world.engine.replica(bad.conn)["ejected"]


def test_it_can_be_turned_off(new_world: Callable[..., World]) -> None:
    world = new_world(eject_after=0)
    model, good, bad = pair(world)
    ask(world, model, good, bad, 20)
    seen = world.engine.replica(bad.conn)
    assert seen["failures"] > 10
    assert not seen["ejected"]
