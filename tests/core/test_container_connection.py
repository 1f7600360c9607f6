"""Connections of containers through the engine: bytes cut anywhere, large frames, checks, a full
socket, what must close a connection."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from clipper_core.runtime.status import Status
from clipper_core.scheduling.scheduler import EngineEvent
from clipper_core.wire.codec import Kind, encode_frame, encode_rows

World = Any  # tests/core/conftest.py


def send_cut(container: Any, data: bytes, rng: random.Random) -> None:
    while data:
        n = min(len(data), int(2 ** rng.uniform(0, 14)))
        assert container.send(data[:n])
        data = data[n:]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("checked", [False, True])
def test_replies_cut_anywhere(world: World, seed: int, checked: bool) -> None:
    """Replies of many sizes, heartbeats and the rest of a HELLO are received in pieces of 1 to 16
    thousand bytes."""
    rng = random.Random(seed)
    model = world.model(cached=False)
    container = world.container(model, checked=checked, size_max=16)
    for _ in range(25):
        n, width = rng.randrange(1, 17), rng.choice([0, 1, 3, 100, 5000])
        futures = [model.predict(float(i)) for i in range(n)]
        world.step(10)
        sent = b""
        for number, rows in container.read():
            texts = [f"{row:.0f}," * width for row in rows]
            sent += encode_frame(Kind.HEARTBEAT) * rng.randrange(3) + encode_rows(
                Kind.REPLY, texts, id=number, checked=checked
            )
        container.inbox.clear()
        send_cut(container, sent, rng)
        world.step()
        assert [future.result(0) for future in futures] == [f"{i}," * width for i in range(n)]


@pytest.mark.parametrize("n", [1, 15, 16, 63, 64, 65])
def test_hello_is_reported_once_whole(world: World, n: int) -> None:
    conn = world.engine.open(world.now_us)
    frame = encode_frame(Kind.HELLO, b"payload", checked=True)
    for at in range(0, len(frame), n):
        assert world.engine.events() == []
        assert world.engine.receive(conn, frame[at : at + n], world.now_us)
    assert world.engine.events() == [(EngineEvent.HELLO_RECEIVED, conn, 0, Status.OK, b"payload")]
    assert not world.engine.receive(conn, frame, world.now_us), "a second HELLO"


@pytest.mark.parametrize(
    "data",
    [
        b"x" * 64,
        encode_frame(Kind.REPLY, id=1),
        encode_frame(Kind.HELLO, b"abc", checked=True)[:-1] + b"x",
        encode_frame(Kind.HEARTBEAT)[:-1] + b"x",
        encode_frame(Kind.PREDICT),
        b"CLPR\x03" + bytes(59),
    ],
)
def test_a_frame_that_an_unattached_connection_may_not_send_closes_it(
    world: World, data: bytes
) -> None:
    conn = world.engine.open(world.now_us)
    assert not world.engine.receive(conn, data, world.now_us)


@pytest.mark.parametrize("claim", [2**20, 2**40, 2**63])
def test_a_declared_length_beyond_the_limit_reserves_nothing(
    new_world: Callable[..., World], claim: int
) -> None:
    world = new_world(frame_bytes_max=1 << 16)
    conn = world.engine.open(world.now_us)
    header = bytearray(encode_frame(Kind.HELLO))
    header[40:48] = claim.to_bytes(8, "little")
    assert not world.engine.receive(conn, bytes(header), world.now_us)


def test_an_answer_before_the_request_has_left_closes(world: World) -> None:
    """Its rows lie in the ring, and the kernel may still be reading them: they must not be
    freed."""
    model = world.model("f64", (100,), cached=False)
    container = world.container(model)
    future = model.predict(np.zeros(100))
    world.step()
    early = encode_rows(Kind.REPLY, np.zeros(1), id=1)
    assert not container.send(early)
    container.lose()
    world.container(model)
    world.serve()
    assert future.result(0) == 0.0


def test_late_twins_are_dropped_and_unknown_ids_close(world: World) -> None:
    model = world.model(cached=False)
    container = world.container(model)
    future = model.predict(1.0)
    world.step()
    number = container.read()[0][0]
    container.reply()
    assert container.send(encode_rows(Kind.REPLY, np.zeros(1), id=number))
    world.step()
    assert future.result(0) == 1.0
    assert not container.send(encode_rows(Kind.REPLY, np.zeros(1), id=number + 1))


def test_replies_of_another_count_or_type_end_as_bad_output(world: World) -> None:
    model = world.model(cached=False, output="f64", output_shape=(2,))
    container = world.container(model)
    for wrong in (
        np.zeros((2, 2)),
        np.zeros((1, 3)),
        np.zeros(1),
        np.zeros((1, 2), "f4"),
        ["text"],
    ):
        future = model.predict(1.0)
        world.step()
        container.read()
        container.reply(lambda rows, wrong=wrong: wrong)
        world.step()
        assert future.status() == Status.BAD_OUTPUT
        assert "the model returned another" in future.detail()
    future = model.predict(1.0)
    world.step()
    container.read()
    container.reply(lambda rows: np.ones((1, 2)))
    assert future.result(0).tolist() == [1, 1]


@pytest.mark.parametrize("dtype", ["f64", "str"])
def test_rows_on_the_heap_come_back_on_a_busy_link(world: World, dtype: str) -> None:
    model = world.model(dtype, cached=False, lane_rows=1024)
    container = world.container(model, size_max=4)
    rng = random.Random(1)
    row: Any = "x" * 4000 if dtype == "str" else 1.0
    for _ in range(3000):
        for _ in range(4):
            model.predict(row)
        world.step(5)
        container.read()
        while container.inbox and rng.random() < 0.9:
            container.reply(lambda rows: np.zeros(len(rows)))
            world.step()
    container.reply_all(lambda rows: np.zeros(len(rows)))
    assert world.engine.snapshot()["queue_bytes"] == 0


def test_silence_is_filled_with_heartbeats_and_ends_a_link(new_world: Callable[..., World]) -> None:
    world = new_world(heartbeat_ms=10)
    model = world.model(cached=False)
    container = world.container(model)
    for _ in range(10):
        world.step(26_000)
        container.read()
        if container.kinds_received[-1] == Kind.HEARTBEAT:
            container.send(encode_frame(Kind.HEARTBEAT))
        assert not world.engine.wants_close(container.conn)
    assert container.kinds_received.count(Kind.HEARTBEAT) == 10
    world.step(26_000)
    world.step(26_000)
    assert world.engine.wants_close(container.conn)


def test_a_silent_connection_is_closed(new_world: Callable[..., World]) -> None:
    world = new_world(hello_ms=50)
    conn = world.engine.open(world.now_us)
    world.step(49_000)
    assert not world.engine.wants_close(conn)
    world.step(30_000)
    assert world.engine.wants_close(conn)


def test_connections_are_bounded_and_their_numbers_never_come_back_at_once(
    new_world: Callable[..., World],
) -> None:
    world = new_world(connections_max=3)
    seen: set[int] = set()
    for _ in range(200):
        conns = [world.engine.open(world.now_us) for _ in range(4)]
        assert conns[3] == 0
        assert not set(conns[:3]) & seen
        seen.update(conns[:3])
        for conn in conns[:3]:
            world.engine.lost(conn, world.now_us)
            assert world.engine.outgoing(conn, world.now_us) == b""
            assert not world.engine.receive(conn, b"x", world.now_us)
    kinds = [kind for kind, *_ in world.engine.events()]
    assert kinds.count(EngineEvent.CONNECTION_REJECTED) == 200
    assert EngineEvent.DISCONNECTED not in kinds, "nobody was told that they came"


def test_a_refusal_is_sent_before_the_connection_is_closed(world: World) -> None:
    conn = world.engine.open(world.now_us)
    world.engine.refuse(conn, "no such model")
    world.step()
    frame = world.engine.outgoing(conn, world.now_us)
    assert frame[5] == Kind.REFUSE
    assert frame[64:] == b"no such model"
    assert world.engine.wants_close(conn)


def test_a_draining_replica_finishes_and_sends_goodbye(world: World) -> None:
    model = world.model(cached=False)
    container = world.container(model)
    future = model.predict(1.0)
    world.step()
    container.read()
    world.engine.drain(container.conn)
    later = model.predict(2.0)
    world.step()
    assert len(container.read()) == 1
    assert not world.engine.wants_close(container.conn)
    container.reply()
    world.step(30_000)
    container.read()
    assert container.kinds_received[-1] == Kind.GOODBYE
    assert world.engine.wants_close(container.conn)
    assert future.result(0) == 1.0
    assert not later.done()
