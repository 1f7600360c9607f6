"""Linked engines: one future over models of several engines, without sockets, threads or time."""

import gc

import numpy as np
import pytest

from clipper_core.engine.engine import Engine
from clipper_core.engine.model import Model, predict_all, predict_rows
from clipper_core.results.future import MailboxReader
from clipper_core.runtime.status import Status, StatusError
from clipper_core.wire.codec import Kind, decode_header, encode_frame, encode_rows, open_rows

ROW = np.arange(2.0)


class World:
    """Engines that the test steps, with a model in each. The test acts as the container of each
    model."""

    def __init__(self, count: int = 2) -> None:
        self.engines = [
            Engine(manual_clock=True, cache_bytes_max=1 << 20, tasks_max=1024, number=i)
            for i in range(count)
        ]
        for i, engine in enumerate(self.engines):
            for other in self.engines[:i]:
                engine.link_peer(other)
        self.models = tuple(
            Model(engine, f"m{i}", i + 1, "f64", (2,)) for i, engine in enumerate(self.engines)
        )
        self.conns = [self.attach(engine) for engine in self.engines]

    def attach(self, engine: Engine) -> int:
        conn = engine.open(0)
        assert engine.receive(conn, encode_frame(Kind.HELLO, b"m"), 0)
        engine.attach(conn, 0, b"", mode=3)
        engine.step(0)
        engine.outgoing(conn, 0)
        return conn

    def answer(self, which: int) -> None:
        """Answer all batches that an engine has sent: each row times its number, plus one."""
        engine, conn = self.engines[which], self.conns[which]
        engine.step(engine.now_us())
        while sent := engine.outgoing(conn, engine.now_us()):
            while sent:
                header = decode_header(sent)
                assert header is not None
                payload, sent = (
                    sent[64 : 64 + header.payload_bytes],
                    sent[64 + header.payload_bytes :],
                )
                if header.kind == Kind.PREDICT:
                    rows = (which + 1) * open_rows(header, payload).data
                    assert engine.receive(
                        conn, encode_rows(Kind.REPLY, rows, id=header.id), engine.now_us()
                    )
            engine.step(engine.now_us())

    def check(self) -> None:
        assert [engine.completion.issued for engine in self.engines] == [
            engine.completion.answered for engine in self.engines
        ]


@pytest.fixture
def world() -> World:
    return World()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("reverse", [False, True])
def test_it_is_done_when_all_are(world: World, order: tuple[int, int], reverse: bool) -> None:
    future = predict_all((world.models[reverse], world.models[not reverse]), ROW)
    assert world.engines[reverse].completion.issued == 2
    assert world.engines[not reverse].completion.issued == 0
    world.answer(order[0])
    assert not future.done()
    world.answer(order[1])
    assert future.done()
    assert future.result(0).tolist() == [
        ((1 + reverse) * ROW).tolist(),
        ((2 - reverse) * ROW).tolist(),
    ]
    world.check()


def test_each_cache_has_its_own(world: World) -> None:
    predict_all(world.models, ROW)
    world.answer(0)
    world.answer(1)
    assert all(model.cached(ROW)[0] for model in world.models)
    again = predict_all(world.models, ROW)
    assert again.done()
    assert again.latency_us == 0
    mixed = predict_all((world.models[1], world.models[0]), ROW)
    assert mixed.result(0).tolist() == [(2 * ROW).tolist(), ROW.tolist()]
    world.check()


def test_a_peer_that_refuses_or_expires(world: World) -> None:
    world.engines[1].refuse_new()
    future = predict_all(world.models, ROW)
    assert [future.status(i) for i in range(2)] == [Status.PENDING, Status.CLOSED]
    for engine in world.engines:
        engine.step(engine.now_us() + 1)
        engine.step(engine.now_us() + 10_000_000)
    assert [future.status(i) for i in range(2)] == [Status.DEADLINE, Status.CLOSED]
    world.check()


@pytest.mark.parametrize("home", [0, 1])
def test_given_up(world: World, home: int) -> None:
    future = predict_all((world.models[home], world.models[1 - home]), ROW)
    assert future.cancel()
    world.check()
    world.answer(0)
    world.answer(1)
    assert future.cancelled()
    world.check()


@pytest.mark.parametrize("first", [0, 1])
def test_the_end_of_both(world: World, first: int) -> None:
    futures = [predict_all(world.models, ROW + i) for i in range(5)]
    world.engines[first].end_tasks()
    assert not any(future.done() for future in futures)
    world.engines[1 - first].end_tasks()
    assert all([future.status(i) for i in range(2)] == [Status.CLOSED] * 2 for future in futures)
    assert all(future.wait(60) for future in futures)
    world.check()
    for engine in world.engines:
        engine.finish()


@pytest.mark.parametrize("home", [0, 1])
def test_a_mailbox_is_notified_of_both(world: World, home: int) -> None:
    mailbox = MailboxReader(world.engines[home].completion)
    models = (world.models[home], world.models[1 - home])
    for order in ((0, 1), (1, 0)):
        futures = [predict_all(models, ROW, salt=10 * home + order[0] + i * 100) for i in range(20)]
        for i, future in enumerate(futures):
            assert mailbox.add(future, i)
        world.answer(order[0])
        assert mailbox.drain() == []
        world.answer(order[1])
        assert [item for _, item in mailbox.drain()] == list(range(20))


@pytest.mark.parametrize("n", [1, 5, 300, 1000])
def test_rows_over_both(n: int) -> None:
    world = World()
    rows = np.arange(2.0 * n).reshape(n, 2)
    future = predict_rows((world.models[1], world.models[0]), rows, 10_000_000)
    alone = world.models[1].predict_many(rows)
    for which in (0, 1, 0, 1):
        world.answer(which)
    assert future.result(0).tolist() == [*(2 * rows).tolist(), *rows.tolist()]
    assert np.asarray(alone.result(0)).reshape(n, 2).tolist() == (2 * rows).tolist()
    world.check()
    del future, alone
    again = predict_rows(world.models, rows)
    assert again.done()
    world.check()


def test_ids_differ(world: World) -> None:
    ids = {model.predict(ROW, salt=i).id for model in world.models for i in range(10)}
    assert len(ids) == 20


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_whichever_is_freed_first(order: tuple[int, int]) -> None:
    """Its open tasks end in slots of the other engine, whose future may be freed as well."""
    for keep in (False, True):
        world = World()
        engines, models = list(world.engines), list(world.models)
        futures = [predict_all((models[i], models[1 - i]), ROW + i) for i in range(2)]
        if not keep:
            futures.clear()
        del world
        models[order[0]] = engines[order[0]] = None  # type: ignore[call-overload]
        gc.collect()
        models.clear()
        engines.clear()
        gc.collect()
        assert all(
            [future.status(i) for i in range(2)] == [Status.CLOSED] * 2 for future in futures
        )


def test_models_of_engines_that_are_not_linked_are_refused(world: World) -> None:
    other_model = World().models[1]
    alone = Model(Engine(manual_clock=True, cache_bytes_max=1 << 20), "alone", 1, "f64", (2,))
    for other in (other_model, alone):
        with pytest.raises(StatusError, match="know nothing of each other"):
            predict_all((world.models[0], other), ROW)
    world.check()


def test_numbers() -> None:
    with pytest.raises(StatusError, match="numbered from 0 to 63, not 64"):
        Engine(manual_clock=True, number=64)
    one, same = Engine(manual_clock=True), Engine(manual_clock=True)
    with pytest.raises(StatusError, match="numbers of their own"):
        one.link_peer(same)
    other = Engine(manual_clock=True, number=1)
    one.link_peer(other)
    with pytest.raises(StatusError, match="numbers of their own"):
        other.link_peer(one)
    assert one.peers == [other.completion]


def test_the_most_engines_that_may_be() -> None:
    world = World(64)
    future = predict_all(world.models, ROW)
    for i in reversed(range(64)):
        assert not future.done()
        world.answer(i)
    assert future.result(0).tolist() == [((i + 1) * ROW).tolist() for i in range(64)]
    world.check()
