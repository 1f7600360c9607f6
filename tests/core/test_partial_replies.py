"""Replies that answer a part of their batch, because the outputs of all rows are too large for one
frame or of several types."""

import random
from typing import Any

import numpy as np
import pytest

from clipper_core.results.future import Future
from clipper_core.runtime.status import Status
from clipper_core.scheduling.batcher import BatchSizer
from clipper_core.wire.codec import Kind, encode_rows

Container = Any  # tests/core/conftest.py
World = Any


def send_parts(container: Container, parts: list[Any], number: int) -> list[bool]:
    """Answer a batch with one reply a part; return whether the engine took each."""
    return [
        container.send(
            encode_rows(
                Kind.REPLY, part, id=number, checked=container.checked, partial=i + 1 < len(parts)
            )
        )
        for i, part in enumerate(parts)
    ]


def cuts(rng: random.Random, rows: list[Any]) -> list[list[Any]]:
    """Return rows in random parts, none empty."""
    parts, rows = [], list(rows)
    while rows:
        n = rng.randrange(1, len(rows) + 1)
        parts.append(rows[:n])
        rows = rows[n:]
    return parts


@pytest.mark.parametrize("seed", range(40))
def test_every_row_gets_its_own_output_in_whatever_parts_they_come(
    new_world: Any, seed: int
) -> None:
    rng = random.Random(seed)
    world = new_world()
    model = world.model(cached=bool(seed & 1))
    container = world.container(model, size_max=rng.choice([7, 64, 200]), checked=bool(seed & 2))
    n = rng.randrange(1, 120)
    if seed & 4:
        singles = [model.predict(float(i)) for i in range(n)]
        ask = lambda: [future.result(0) for future in singles]  # noqa: E731
    else:
        many = model.predict_many(np.arange(float(n)))
        ask = lambda: many.result(0).tolist()  # noqa: E731
    world.step()
    while container.read():
        number, rows = container.inbox.pop(0)
        outputs = [2.0 * float(row) for row in rows]
        parts = [np.array(part) for part in cuts(rng, outputs)]
        assert all(send_parts(container, parts, number))
        world.step()
    assert ask() == [2.0 * i for i in range(n)]
    assert world.engine.model_counts(model.index)["in_flight"] == 0


def test_outputs_of_several_types_come_in_parts(world: World) -> None:
    model = world.model(cached=False)
    container = world.container(model)
    futures = in_flight(world, model, container, [0.0, 1.0, 2.0, 3.0])
    (number, _), container.inbox = container.inbox[0], []
    parts = [np.array([1]), ["a", "b"], np.array([[0.5, 0.25]])]
    assert all(send_parts(container, parts, number))
    found = [future.result(0) for future in futures]
    assert found[:3] == [1, "a", "b"]
    assert found[3].tolist() == [0.5, 0.25]


def test_a_part_of_another_type_than_declared_fails_alone(world: World) -> None:
    model = world.model(cached=False, output="f64", output_shape=())
    container = world.container(model)
    futures = in_flight(world, model, container, [0.0, 1.0, 2.0])
    (number, _), container.inbox = container.inbox[0], []
    assert all(send_parts(container, [np.array([1.5]), ["a"], np.array([2.5])], number))
    assert [future.status() for future in futures] == [Status.OK, Status.BAD_OUTPUT, Status.OK]


def test_too_many_rows_in_parts_fail_the_rest(world: World) -> None:
    model = world.model(cached=False)
    container = world.container(model)
    futures = in_flight(world, model, container, [0.0, 1.0, 2.0])
    (number, _), container.inbox = container.inbox[0], []
    assert all(send_parts(container, [np.array([9.0]), np.array([9.0] * 4)], number))
    assert [future.status() for future in futures] == [
        Status.OK,
        Status.BAD_OUTPUT,
        Status.BAD_OUTPUT,
    ]
    (future,) = in_flight(world, model, container, [5.0])
    container.reply()
    assert future.result(0) == 5.0


def test_the_rest_of_a_batch_goes_to_another_replica_if_the_container_is_lost(world: World) -> None:
    model = world.model(cached=False)
    first, second = world.container(model), world.container(model)
    futures = [model.predict(float(i)) for i in range(6)]
    world.step()
    first.read(), second.read()
    holder, other = (first, second) if first.inbox else (second, first)
    number, rows = holder.inbox[0]
    part = np.array([10.0 * float(row) for row in rows[:2]])
    assert holder.send(encode_rows(Kind.REPLY, part, id=number, partial=True))
    holder.lose()
    world.step()
    other.reply_all(lambda rows: np.array([10.0 * float(row) for row in rows]))
    assert [future.result(0) for future in futures] == [10.0 * i for i in range(6)]


def test_a_variable_output_too_large_fails_alone(new_world: Any) -> None:
    world = new_world(output_bytes_max=8)
    model = world.model(cached=False)
    container = world.container(model)
    futures = in_flight(world, model, container, [0.0, 1.0, 2.0])
    container.reply(lambda rows: ["short", "far too long for it", "ok"])
    assert [future.status() for future in futures] == [Status.OK, Status.TOO_LARGE, Status.OK]
    assert "output_bytes_max" in futures[1].detail()
    assert futures[2].result(0) == "ok"


def in_flight(world: World, model: Any, container: Container, rows: list[float]) -> list[Future]:
    """Return the futures of rows that are in flight in one batch."""
    futures = [model.predict(row) for row in rows]
    world.step()
    (batch,) = container.read()
    assert len(batch[1]) == len(rows)
    return futures


@pytest.mark.parametrize("mode", ["aimd", "fit", "quantile"])
def test_the_limit_falls_to_what_fits_into_a_reply_and_rises_again(mode: str) -> None:
    sizer = BatchSizer(mode, size_max=512)
    for n in (1, 1, 1, 2, 4, 8, 16, 32, 64):
        sizer.learn(n, 100 + n, 1e6, 0)
    assert sizer.limit > 8
    sizer.fits(8)
    assert sizer.limit == 8
    for step in range(1, 20):
        sizer.learn(int(sizer.limit), 100 + sizer.limit, 1e6, step)
    assert 8 < sizer.limit < 16, "a batch whose outputs are smaller is allowed again, slowly"


def test_a_fixed_size_stays() -> None:
    sizer = BatchSizer("static", size_max=64)
    sizer.fits(8)
    assert sizer.limit == 64
