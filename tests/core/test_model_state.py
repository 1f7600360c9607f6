"""Models that have no user any more: their lanes and indexes are freed when nothing of them is in
flight."""

import gc
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from clipper_core.engine.engine import Engine
from clipper_core.engine.model import Model
from clipper_core.results.future import Future
from clipper_core.runtime.status import Status, StatusError
from clipper_core.wire.codec import Kind, decode_header, encode_frame, encode_rows, open_rows

CHORES_US = 25_000
FAR_US = 1 << 50


class World:
    """An engine on its own clock, models that are in no list, and their containers, which answer
    row + their model's uid."""

    def __init__(self, **limits: Any) -> None:
        self.engine = Engine(
            manual_clock=True,
            seed=1,
            **({"cache_bytes_max": 1 << 20, "tasks_max": 1 << 14} | limits),
        )
        self.now_us = 1000
        self.uids = 0
        self.step()

    def step(self, us: int = 0) -> None:
        self.now_us += us
        self.engine.step(self.now_us)

    def model(self, **options: Any) -> Model:
        self.uids += 1
        options = {"unlisted": True, "lane_rows": 64} | options
        return Model(self.engine, f"m:{self.uids}", self.uids, "f64", (2,), **options)

    def attach(self, model: Model) -> int:
        conn = self.engine.open(self.now_us)
        assert self.engine.receive(conn, encode_frame(Kind.HELLO, b"m"), self.now_us)
        self.engine.attach(conn, model.index, b"", mode=3, size_max=8)
        self.step()
        return conn

    def answer(self, conn: int, plus: float) -> int:
        """Answer what was sent to the container; return the number of batches."""
        batches, sent = 0, self.engine.outgoing(conn, self.now_us)
        while sent:
            header = decode_header(sent)
            assert header is not None
            payload, sent = sent[64 : 64 + header.payload_bytes], sent[64 + header.payload_bytes :]
            if header.kind == Kind.PREDICT:
                batches += 1
                outputs = open_rows(header, payload).data.reshape(-1, 2)[:, 0] + plus
                assert self.engine.receive(
                    conn, encode_rows(Kind.REPLY, outputs, id=header.id), self.now_us
                )
                self.step()
                sent += self.engine.outgoing(conn, self.now_us)
        return batches

    def chores(self) -> None:
        """Run housekeeping twice: the first run sees what was dropped, the second frees it."""
        for _ in range(2):
            self.step(CHORES_US)

    def counts(self) -> tuple[int, int]:
        found = self.engine.snapshot()
        return found["lanes"], found["unlisted"]


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.engine.finish()
    assert made.engine.completion.issued == made.engine.completion.answered


def row(x: float) -> Any:
    return np.array([x, 0.0])


def test_lanes_and_number_are_given_back(world: World) -> None:
    kept = world.model()
    for n in range(300):
        model = world.model()
        conn = world.attach(model)
        futures = [
            model.predict(row(n), 1),
            model.predict(row(n), 1000),
            model.predict_many(np.zeros((40, 2)), 50),
            model.predict(row(n + 0.5), 1000, band=n % 47 + 1),
            model.predict_many(np.ones((40, 2)), 50, band=47),
        ]
        world.step()
        assert world.answer(conn, n)
        assert world.counts() == (5, 2)
        assert futures[0].result() == futures[1].result() == 2 * n
        assert futures[2].result().tolist() == [n] * 40
        assert model.index == 1, "a number is used again"
        world.engine.lost(conn, world.now_us)
        del model, futures
        world.chores()
        assert world.counts() == (0, 1)
    assert kept.index == 0


def test_a_listed_model_stays(world: World) -> None:
    model = world.model(unlisted=False)
    waiting = model.predict(row(1.0), 1)
    del model
    world.step(FAR_US)
    world.chores()
    assert waiting.status() is Status.NO_REPLICA
    assert world.counts() == (1, 0)
    assert [one["ended"]["NO_REPLICA"] for one in world.engine.snapshot()["models"]] == [1]


def test_not_while_a_row_waits(world: World) -> None:
    model = world.model()
    waiting = model.predict(row(1.0), 1000)
    del model
    world.chores()
    assert world.counts() == (1, 1)
    world.step(1_000_000)
    assert waiting.status() is Status.NO_REPLICA
    world.chores()
    assert world.counts() == (0, 0)


@pytest.mark.parametrize("answered", [True, False])
def test_not_while_a_batch_is_on_its_way_or_a_replica_is_there(
    world: World, answered: bool
) -> None:
    model = world.model()
    conn = world.attach(model)
    waiting = model.predict(row(1.0), 1000)
    world.step()
    del model
    world.chores()
    assert world.counts() == (1, 1)
    if answered:
        world.answer(conn, 5)
        assert waiting.result() == 6.0
        world.chores()
        assert world.counts() == (1, 1), "its replica is there still"
    world.engine.lost(conn, world.now_us)
    world.chores()
    assert world.counts() == ((0, 0) if answered else (1, 1)), (
        "what was on its way waits for another replica"
    )
    world.step(1_000_000)
    world.chores()
    assert world.counts() == (0, 0)


def test_a_command_from_before_it_was_dropped_finds_it(world: World) -> None:
    model = world.model()
    conn = world.engine.open(world.now_us)
    assert world.engine.receive(conn, encode_frame(Kind.HELLO, b"m"), world.now_us)
    world.engine.attach(conn, model.index, b"")
    del model
    world.chores()
    assert world.counts() == (0, 1)
    assert world.engine.replica(conn) is not None
    world.engine.lost(conn, world.now_us)
    world.chores()
    assert world.counts() == (0, 0)


def test_a_deadline_of_a_freed_model_does_not_affect_the_next_one(world: World) -> None:
    """Both have rows at the first positions of lanes of one id, and entries in the wheel."""
    first = world.model()
    conn = world.attach(first)
    early = [first.predict(row(x), 900) for x in range(8)]
    world.step()
    world.answer(conn, 0)
    world.engine.lost(conn, world.now_us)
    assert [f.result() for f in early] == [*range(8)]
    del first
    world.chores()
    second = world.model()
    conn = world.attach(second)
    late = [second.predict(row(x), 1000) for x in range(8)]
    world.step()
    world.step(900_000)  # the first's are due
    assert not any(f.done() for f in late)
    world.answer(conn, 1)
    assert [f.result() for f in late] == [x + 1 for x in range(8)]
    world.engine.lost(conn, world.now_us)


def test_a_future_outlives_its_model(world: World) -> None:
    model = world.model()
    many, given_up = model.predict_many(np.zeros((50, 2)), 100), model.predict(row(3.0), 500)
    given_up.cancel()
    del model
    world.step(100_000)
    world.chores()
    assert world.counts() == (0, 0)
    with pytest.raises(StatusError, match="no container"):
        many.result()


def test_no_number_is_left_only_while_all_are_in_use() -> None:
    world = World(models_max=3)
    models: list[Model | None] = [world.model() for _ in range(3)]
    with pytest.raises(StatusError, match="models_max"):
        world.model()
    models[1] = None
    with pytest.raises(StatusError, match="models_max"):
        world.model()
    world.chores()
    models[1] = world.model()
    assert [model.index for model in models if model is not None] == [0, 1, 2]


def test_more_than_are_kept_for_others_go_in_the_end() -> None:
    world = World(models_max=10_000)
    models = [world.model() for _ in range(6000)]
    models.clear()
    world.chores()
    assert 0 < world.counts()[1] < 6000
    models = [world.model() for _ in range(4096)]
    world.chores()
    assert world.counts() == (0, 4096)
    assert max(model.index for model in models) < 6000


@pytest.mark.parametrize("seed", range(8))
def test_models_come_and_go_and_each_query_has_its_own_answer(world: World, seed: int) -> None:
    """Random sequences by seed: models are made, queried, served, disconnected and dropped, in any
    order; at the end nothing is left."""
    rng = random.Random(seed)
    models: list[tuple[Model, list[int]]] = []
    requests: list[tuple[Future, int, float]] = []
    orphans: list[int] = []
    for _ in range(1500):
        match rng.randrange(8):
            case 0 if len(models) < 12:
                models.append((world.model(cached=rng.random() < 0.5), []))
            case 1 | 2 | 3 if models:
                model, _ = rng.choice(models)
                x, slo_ms = float(rng.randrange(4)), rng.choice([1, 20, 300, 2000])
                if rng.random() < 0.1:
                    model.predict_many(np.full((rng.randrange(1, 80), 2), x), slo_ms)
                else:
                    requests.append((model.predict(row(x), slo_ms), int(model.name[2:]), x))
            case 4 if models:
                model, conns = rng.choice(models)
                conns.append(world.attach(model))
            case 5 if models:
                model, conns = rng.choice(models)
                for conn in conns:
                    world.answer(conn, int(model.name[2:]))
            case 6 if models:
                _, conns = rng.choice(models)
                if conns:
                    world.engine.lost(conns.pop(rng.randrange(len(conns))), world.now_us)
            case 7 if models and rng.random() < 0.5:
                _, conns = models.pop(rng.randrange(len(models)))
                orphans += conns
                del _
            case _:
                pass
        model = None  # type: ignore[assignment]
        world.step(rng.choice([0, 10, 1000, 30_000]))
        if orphans and rng.random() < 0.3:
            world.engine.lost(orphans.pop(), world.now_us)
    for conn in [*orphans, *(conn for _, conns in models for conn in conns)]:
        world.engine.lost(conn, world.now_us)
    models.clear()
    gc.collect()
    for _ in range(100):
        world.step(CHORES_US)
    assert world.counts() == (0, 0)
    ok = [(future.result(), uid + x) for future, uid, x in requests if future.status() is Status.OK]
    assert len(ok) > 20
    assert all(got == wanted for got, wanted in ok)
