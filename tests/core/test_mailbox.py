"""Mailboxes: every future that was added is drained once, when it is done, even if its notice was
lost."""

import gc
import random
import select
from typing import Any

import numpy as np
import pytest

from clipper_core.results.future import Future, MailboxReader

World = Any  # tests/core/conftest.py
MAILBOX_WORDS = 8192
MAILBOXES_MAX = 31


def readable(mailbox: MailboxReader) -> bool:
    return bool(select.select([mailbox.fd], [], [], 0)[0])


def test_an_ended_future_is_reported_once_by_a_readable_descriptor(world: World) -> None:
    model = world.model(cached=False)
    world.container(model)
    mailbox = MailboxReader(world.engine.completion)
    futures = [model.predict(float(i)) for i in range(10)]
    assert all(mailbox.add(future, i) for i, future in enumerate(futures))
    assert (len(mailbox), readable(mailbox), mailbox.drain()) == (10, False, [])
    world.serve()
    assert readable(mailbox)
    assert mailbox.drain() == [(future, i) for i, future in enumerate(futures)]
    assert (len(mailbox), readable(mailbox), mailbox.drain()) == (0, False, [])


def test_a_done_future_is_not_added(world: World) -> None:
    model = world.model()
    world.container(model)
    mailbox = MailboxReader(world.engine.completion)
    future = model.predict(1.0)
    world.serve()
    assert not mailbox.add(future, None)
    assert not mailbox.add(model.predict(1.0), None), "a hit"
    assert len(mailbox) == 0


def test_a_future_of_many_tasks_is_reported_when_the_last_has_ended(world: World) -> None:
    model = world.model(cached=False)
    container = world.container(model, size_max=1)
    mailbox = MailboxReader(world.engine.completion)
    future = model.predict_many(np.arange(20.0))
    assert mailbox.add(future, "item")
    drained: list[tuple[Future, Any]] = []
    world.step()
    for _ in range(20):
        assert drained == []
        container.read()
        container.reply()
        world.step()
        drained += mailbox.drain()
    assert drained == [(future, "item")]


def test_a_cancelled_future_is_reported(world: World) -> None:
    model = world.model()
    mailbox = MailboxReader(world.engine.completion)
    future, other = model.predict(1.0), model.predict(2.0)
    mailbox.add(future, 1), mailbox.add(other, 2)
    future.cancel()
    assert readable(mailbox)
    assert mailbox.drain() == [(future, 1)]
    assert len(mailbox) == 1


def test_the_end_of_the_engine_is_reported(world: World) -> None:
    mailbox = MailboxReader(world.engine.completion)
    future = world.model().predict(1.0)
    mailbox.add(future, None)
    world.engine.finish()
    assert readable(mailbox)
    assert mailbox.drain() == [(future, None)]


def test_more_ended_futures_than_the_mailbox_holds_are_not_lost(world: World) -> None:
    model = world.model(cached=False)
    container = world.container(model, size_max=4096)
    mailbox = MailboxReader(world.engine.completion)
    futures = [model.predict(float(i)) for i in range(2 * MAILBOX_WORDS - 100)]
    for future in futures:
        mailbox.add(future, None)
    world.step()
    container.reply_all()
    assert all(future.done() for future in futures)
    assert {id(future) for future, _ in mailbox.drain()} == {id(future) for future in futures}
    assert len(mailbox) == 0


def test_as_many_event_loops_as_there_are_mailboxes(world: World) -> None:
    model = world.model(cached=False)
    world.container(model)
    mailboxes = [MailboxReader(world.engine.completion) for _ in range(MAILBOXES_MAX)]
    with pytest.raises(RuntimeError, match="31 event loops"):
        MailboxReader(world.engine.completion)
    shared = model.predict(0.0)
    own = [model.predict(float(i)) for i in range(MAILBOXES_MAX)]
    for i, mailbox in enumerate(mailboxes):
        mailbox.add(shared, "shared")
        mailbox.add(own[i], i)
    world.serve()
    for i, mailbox in enumerate(mailboxes):
        assert readable(mailbox)
        assert mailbox.drain() == [(shared, "shared"), (own[i], i)]


def test_a_mailbox_that_is_given_back_serves_the_next_loop(world: World) -> None:
    model = world.model(cached=False)
    world.container(model)
    for i in range(3 * MAILBOXES_MAX):
        mailbox = MailboxReader(world.engine.completion)
        left, future = model.predict(float(i)), model.predict(-1.0)
        mailbox.add(left, "left")
        if i % 3 == 0:
            world.serve()
        del mailbox
        mailbox = MailboxReader(world.engine.completion)
        mailbox.add(future, i)
        world.serve()
        assert not future.done() or readable(mailbox) or i % 3 == 0
        assert mailbox.drain() == ([(future, i)] if i % 3 else [])
        del mailbox
        gc.collect(0)


@pytest.mark.parametrize("seed", range(6))
def test_several_readers_and_random_ends_as_the_twin(world: World, seed: int) -> None:
    rng = random.Random(seed)
    model = world.model(cached=False, slo_us=5_000)
    container = world.container(model, size_max=5)
    mailboxes = [MailboxReader(world.engine.completion) for _ in range(3)]
    waiting: list[dict[int, Future]] = [{} for _ in mailboxes]
    serial = 0
    for _ in range(600):
        move = rng.randrange(5)
        if move == 0:
            future = (
                model.predict(1.0)
                if rng.random() < 0.7
                else model.predict_many(np.zeros(rng.choice([2, 70])), slo_ms=5)
            )
            for which in rng.sample(range(3), rng.randrange(1, 4)):
                for _ in range(rng.choice([1, 1, 2])):
                    serial += 1
                    if mailboxes[which].add(future, serial):
                        waiting[which][serial] = future
        elif move == 1:
            container.read()
            if container.inbox:
                container.reply()
        elif move == 2 and any(waiting):
            rng.choice(list(rng.choice([w for w in waiting if w]).values())).cancel()
        elif move == 3:
            world.step(rng.choice([0, 500, 6000]))
        else:
            check(rng.randrange(3), mailboxes, waiting)
    world.engine.finish()
    for which in range(3):
        check(which, mailboxes, waiting)
        assert waiting[which] == {}


def check(which: int, mailboxes: list[MailboxReader], waiting: list[dict[int, Future]]) -> None:
    """Check that a drained mailbox has returned exactly the done futures, each once."""
    mailbox, mine = mailboxes[which], waiting[which]
    done = {item for item, future in mine.items() if future.done()}
    drained = mailbox.drain()
    drained_items = [item for _, item in drained]
    assert all(mine[item] is future for future, item in drained)
    assert set(drained_items) == done or set(drained_items) <= done, (
        "news that is not flushed yet comes with the next step"
    )
    assert len(drained_items) == len(set(drained_items))
    for item in drained_items:
        del mine[item]
    assert sum(1 for future in mine.values() if not future.done()) >= (
        1 if len(mailbox) and not done - set(drained_items) else 0
    )
