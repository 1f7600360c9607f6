"""Connections without heartbeats, thousands of them at which nothing happens, and models that
snapshots leave out."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from clipper_container.host.model_sizes import allocated_bytes
from clipper_core.engine.engine import Engine
from clipper_core.engine.model import Model
from clipper_core.runtime.status import Status, StatusError
from clipper_core.wire.codec import Kind, encode_frame

World = Any  # tests/core/conftest.py
BEAT_US = 10_000
STATIC = 3


def test_a_quiet_link_receives_no_heartbeat_and_may_be_silent_for_ever(
    new_world: Callable[..., World],
) -> None:
    world = new_world(heartbeat_ms=BEAT_US // 1000)
    model = world.model(cached=False)
    quiet, loud = world.container(model, quiet=True), world.container(model)
    for _ in range(20):
        world.step(26_000)
        quiet.read()
    assert world.engine.wants_close(loud.conn)
    assert not world.engine.wants_close(quiet.conn)
    assert Kind.HEARTBEAT not in quiet.kinds_received
    loud.lose()
    future = model.predict(2.0, 1000)
    world.serve()
    assert future.result() == 2.0


def test_a_quiet_replica_that_is_late_loses_its_rows_and_its_trust_until_it_answers(
    world: World,
) -> None:
    model = world.model(cached=False)
    late = world.container(model, quiet=True, size_max=1)
    for _ in range(5):  # it rests, and is looked after again with the next batch, every time
        for _ in range(6):  # for so long that its lateness is no longer held against it
            world.step(30_000)
        future = model.predict(1.0, 50)
        world.step()
        assert late.read()
        world.step(30_000)
        assert not world.engine.replica(late.conn)["suspect"]
        world.step(30_000)
        assert future.status() == Status.DEADLINE
        world.step(30_000)
        assert world.engine.replica(late.conn)["suspect"]
        late.reply()
        world.step()
        assert not world.engine.replica(late.conn)["suspect"]


def test_a_container_that_sent_goodbye_may_answer_what_it_has(world: World) -> None:
    model = world.model(cached=False)
    container = world.container(model, quiet=True)
    future = model.predict(3.0, 1000)
    world.step()
    assert container.read()
    assert container.send(encode_frame(Kind.GOODBYE))
    after = model.predict(4.0, 1000)
    for _ in range(4):
        world.step(30_000)
    assert not world.engine.wants_close(container.conn)
    assert len(container.read()) == 1, "nothing new is sent to it"
    container.reply()
    world.step(30_000)
    assert future.result() == 3.0
    assert world.engine.wants_close(container.conn)
    container.lose()
    world.container(model, quiet=True)
    world.serve()
    assert after.result() == 4.0


def test_a_container_that_sent_goodbye_is_closed_when_its_batch_is_late(world: World) -> None:
    model = world.model(cached=False)
    container = world.container(model, quiet=True)
    future = model.predict(3.0, 50)
    world.step()
    assert container.read()
    assert container.send(encode_frame(Kind.GOODBYE))
    for _ in range(4):
        world.step(30_000)
    assert world.engine.wants_close(container.conn)
    assert future.status() == Status.DEADLINE


def test_a_quiet_link_that_rested_takes_frames_in_pieces(world: World) -> None:
    model = world.model("f64", (700,), cached=False)
    container = world.container(model, quiet=True)
    for n in range(5):
        for _ in range(3):
            world.step(30_000)
        futures = [model.predict(np.full(700, float(n)), 1000) for _ in range(3)]
        world.step()
        answer = encode_frame(Kind.FAILURE, b"x" * 20_000, id=container.read()[0][0])
        container.inbox.pop()
        for at in range(0, len(answer), 997):
            assert container.send(answer[at : at + 997])
            world.step(30_000)  # a buffer that holds half a frame is kept
        assert {future.status() for future in futures} == {Status.MODEL_ERROR}


def test_rows_that_wait_end_at_their_deadline_though_nothing_else_happens(world: World) -> None:
    models = [world.model(cached=False) for _ in range(50)]
    futures = [model.predict(1.0, 40 + i) for i, model in enumerate(models)]
    for _ in range(4):
        world.step(30_000)
    counts = [world.engine.model_counts(model.index) for model in models]
    assert {future.status() for future in futures} == {Status.NO_REPLICA}
    assert [each["queued"] for each in counts] == [0] * 50
    assert [(each["submitted"], each["answered"], each["in_flight"]) for each in counts] == [
        (1, 1, 0)
    ] * 50
    futures = [model.predict(1.0, 40) for model in models]
    world.step(30_000)
    assert [world.engine.model_counts(model.index)["queued"] for model in models] == [1] * 50
    world.step(30_000)
    assert {future.status() for future in futures} == {Status.NO_REPLICA}


def test_an_unlisted_model_is_counted_when_it_is_named() -> None:
    engine = Engine(cache_bytes_max=1 << 20, tasks_max=1 << 10, manual_clock=True, seed=1)
    listed = Model(engine, "a", 1, "f64", ())
    unlisted = Model(engine, "b", 2, "f64", (), unlisted=True)
    conn = engine.open(1000)
    engine.receive(conn, encode_frame(Kind.HELLO, b"hello"), 1000)
    engine.attach(conn, unlisted.index, b"welcome", mode=STATIC, size_max=8, quiet=True)
    engine.step(1000)
    assert [each["index"] for each in engine.snapshot()["models"]] == [listed.index]
    future = unlisted.predict_many(np.arange(100.0), 1000)
    single = unlisted.predict(1.5, 1000)
    engine.step(1010)
    counts = engine.model_counts(unlisted.index)
    assert (counts["submitted"], counts["answered"], counts["in_flight"]) == (101, 0, 101)
    assert (counts["replicas"], counts["queued"]) == (1, 101 - 16)
    engine.finish()
    counts = engine.model_counts(unlisted.index)
    assert (counts["submitted"], counts["answered"], counts["in_flight"]) == (101, 101, 0)
    assert future.done()
    assert single.status() == Status.CLOSED
    assert engine.model_counts(listed.index)["submitted"] == 0
    with pytest.raises(StatusError, match="no model with index 2"):
        engine.model_counts(2)


def test_links_that_rest_keep_no_buffer(world: World) -> None:
    """The first bytes of a link are received into a buffer of 16 KiB, which is freed when the link
    is idle."""
    model = world.model(cached=False)
    before = allocated_bytes()
    conns = [world.engine.open(world.now_us) for _ in range(500)]
    for conn in conns:
        assert world.engine.receive(conn, encode_frame(Kind.HELLO, b"hello"), world.now_us)
    waiting = (allocated_bytes() - before) / len(conns)
    for conn in conns:
        world.engine.attach(conn, model.index, b"welcome", mode=STATIC, quiet=True)
    world.step()
    for conn in conns:
        world.engine.outgoing(conn, world.now_us)
        # needless, and no harm
        assert world.engine.receive(conn, encode_frame(Kind.HEARTBEAT), world.now_us)
    for _ in range(2):
        world.step(30_000)
    assert waiting < 2048
    kept = 256 * (16384 + 64)  # are handed around
    assert (allocated_bytes() - before - kept) / len(conns) < 4096


def test_a_connection_may_have_a_heartbeat_of_its_own(new_world: Callable[..., World]) -> None:
    """Its interval is ten times that of the others: it is pinged a tenth as often, and may be
    silent for ten times as long."""
    world = new_world(heartbeat_ms=BEAT_US // 1000)
    model = world.model(cached=False)
    sparse, usual = (
        world.container(model, heartbeat_ms=10 * BEAT_US // 1000),
        world.container(model),
    )
    for _ in range(10):
        world.step(26_000)
        sparse.read()
        usual.read()
    assert world.engine.wants_close(usual.conn)
    assert not world.engine.wants_close(sparse.conn)
    assert 1 <= sparse.kinds_received.count(Kind.HEARTBEAT) <= 3
    for _ in range(10):
        world.step(26_000)
        sparse.read()
    assert world.engine.wants_close(sparse.conn)
