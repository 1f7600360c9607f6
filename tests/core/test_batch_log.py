"""The log of the batch and the time of each task, compared with a reference model that keeps
everything."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from clipper_core.engine.engine import BatchLog
from clipper_core.runtime.status import StatusError

World = Any  # tests/core/conftest.py


def test_a_batch_and_its_times(world: World) -> None:
    log = BatchLog(world.engine)
    model = world.model(cached=False)
    container = world.container(model, number=7)
    futures = [model.predict(float(i), 100_000) for i in range(3)]
    world.step(10)
    sent_us = world.now_us
    assert log.find([future.id for future in futures]) == {}, "it is not back yet"
    container.read()
    world.step(500)
    container.reply()
    world.step()
    assert [future.result(0) for future in futures] == [0.0, 1.0, 2.0]
    expected = (7, 3, sent_us, sent_us, world.now_us)
    assert log.find([futures[1].id, 10**15]) == {futures[1].id: expected}
    assert log.find(future.id for future in futures) == {future.id: expected for future in futures}
    assert log.lost == 0


def test_a_second_batch_begins_when_the_first_is_back(world: World) -> None:
    log = BatchLog(world.engine)
    model = world.model(cached=False)
    container = world.container(model, size_max=1)
    one, two = (model.predict(float(i), 100_000) for i in range(2))
    world.step(10)
    sent_us = world.now_us
    container.read()
    world.step(300)
    container.reply()
    world.step()
    back_us = world.now_us
    container.read()
    world.step(200)
    container.reply()
    world.step()
    found = log.find([one.id, two.id])
    assert found[one.id][2:] == (sent_us, sent_us, back_us)
    assert found[two.id][3:] == (back_us, back_us + 200)


def test_a_joined_row_is_logged_with_its_batch(world: World) -> None:
    log = BatchLog(world.engine)
    model = world.model()
    container = world.container(model)
    futures = [model.predict(5.0, 100_000) for _ in range(4)]
    world.step(10)
    container.reply_all()
    assert [future.result(0) for future in futures] == [5.0] * 4
    found = log.find([future.id for future in futures])
    assert len(set(found.values())) == 1
    assert len(found) == 4
    assert next(iter(found.values()))[1] == 1, "one row"


def test_a_batch_that_failed_is_there_and_one_that_was_lost_is_not(world: World) -> None:
    log = BatchLog(world.engine)
    model = world.model(cached=False)
    container = world.container(model)
    failed = model.predict(1.0, 100_000)
    world.step(10)
    container.read()
    container.fail("no")
    world.step()
    expired = model.predict(2.0, 100_000)
    world.step(10)
    container.read()
    container.lose()
    world.step()
    world.pass_deadline(200_000)
    assert set(log.find([failed.id, expired.id])) == {failed.id}


def test_an_array_is_known_by_its_first_row(world: World) -> None:
    log = BatchLog(world.engine)
    model = world.model(cached=False)
    container = world.container(model)
    future = model.predict_many(np.arange(10.0), 100_000)
    world.step(10)
    container.reply_all()
    assert log.find([future.id])[future.id][1] == 10


@pytest.mark.parametrize("seed", range(4))
def test_the_last_are_remembered(new_world: Callable[..., Any], seed: int) -> None:
    rng = random.Random(seed)
    world = new_world()
    keep = rng.choice([64, 128, 1024])
    log = BatchLog(world.engine, keep)
    model = world.model(cached=False)
    container = world.container(model, number=1)
    kept: list[tuple[int, list[int], Any]] = []  # words, ids, record
    for _ in range(300):
        n = rng.randint(1, 12)
        futures = [model.predict(rng.random(), 100_000) for _ in range(n)]
        world.step(rng.randint(1, 50))
        sent_us = world.now_us
        container.read()
        world.step(rng.randint(1, 50))
        container.reply()
        world.step()
        kept.append(
            (n + 5, [future.id for future in futures], (1, n, sent_us, sent_us, world.now_us))
        )
        assert log.find([futures[0].id]) == {futures[0].id: kept[-1][2]}, (
            "the last one is always there"
        )
        room, expected = keep, {}
        for words, ids, record in reversed(kept):
            room -= words
            if room < 0:
                break
            expected.update(dict.fromkeys(ids, record))
        recent_ids = [id for _, ids, _ in kept[-40:] for id in ids]
        found = log.find(recent_ids)
        assert found == {id: expected[id] for id in recent_ids if id in expected}
    assert log.lost == 0


def test_batches_that_do_not_fit_into_the_log_are_counted(world: World) -> None:
    log = BatchLog(world.engine, 64)
    model = world.model(cached=False)
    container = world.container(model)
    for i in range(30):
        future = model.predict(float(i), 100_000)
        world.step(10)
        container.reply_all()
        assert future.result(0) == i
    assert log.lost == 20  # six words each
    large = [model.predict(float(i), 100_000) for i in range(64)]
    log.find([])
    world.step(10)
    container.reply_all()
    assert log.find([large[0].id]) == {}
    assert log.lost == 21


@pytest.mark.parametrize("keep", [0, 63, 65, 1 << 27])
def test_how_many_words_there_can_be(world: World, keep: int) -> None:
    with pytest.raises(StatusError, match="power of two"):
        BatchLog(world.engine, keep)


def test_an_engine_has_one(world: World) -> None:
    log = BatchLog(world.engine)
    with pytest.raises(StatusError, match="already"):
        BatchLog(world.engine)
    assert log.lost == 0
