"""Which rows are sent to which replica, and when: sizes, order, a second batch, holding, shedding,
and replicas that get nothing."""

from typing import Any

import numpy as np
import pytest

from clipper_core.runtime.status import Status
from clipper_core.wire.codec import Kind, decode_header, encode_frame

World = Any  # tests/core/conftest.py
AIMD, STATIC = 0, 3
BEAT_US = 500_000


def teach(world: World, container: Any, model: Any, took_us: int, batches: int = 12) -> None:
    """Let the batcher measure that a single row takes this long."""
    for i in range(batches):
        future = model.predict(-1000.0 - i, 60_000)
        world.step()
        while not future.done():
            if container.read():
                world.step(took_us)
                container.reply()
            world.step(2_000)


def test_idle_replicas_go_first_and_by_turns(world: World) -> None:
    model = world.model(cached=False)
    crowd = [world.container(model) for _ in range(3)]
    for k in range(3):
        model.predict(float(k))
        world.step()
    assert [len(c.read()) for c in crowd] == [1, 1, 1]


def test_a_second_batch_goes_behind_only_when_it_is_full_and_never_a_third(world: World) -> None:
    model = world.model(cached=False)
    container = world.container(model, mode=STATIC, size_max=4)
    model.predict(0.0)
    world.step()
    for k in range(1, 4):
        model.predict(float(k))
        world.step()
    assert [len(rows) for _, rows in container.read()] == [1]
    for k in range(4, 20):
        model.predict(float(k))
    world.step()
    assert [len(rows) for _, rows in container.read()] == [1, 4]
    container.reply()
    world.step()
    assert [rows.tolist() for _, rows in container.read()] == [[1, 2, 3, 4], [5, 6, 7, 8]]


def test_version_1_has_one_batch_at_a_time(world: World) -> None:
    model = world.model(cached=False)
    container = world.container(model, mode=STATIC, size_max=1, protocol=1)
    futures = [model.predict(float(k)) for k in range(5)]
    for k in range(5):
        world.step()
        data = world.engine.outgoing(container.conn, world.now_us)
        assert data.endswith(np.float64(k).tobytes())
        world.step()
        assert world.engine.outgoing(container.conn, world.now_us) == b""
        assert container.send(np.float64(k * 2).tobytes())
    assert [future.result() for future in futures] == [0, 2, 4, 6, 8]
    assert not container.send(b"unasked!"), "it speaks when it is asked"


def test_the_time_left_is_that_of_the_first_deadline(world: World) -> None:
    model = world.model(cached=False)
    container = world.container(model)
    for slo_ms in (90, 10, 50):
        model.predict(1.0, slo_ms)
    world.step(1_000)
    data = world.engine.outgoing(container.conn, world.now_us)
    header = decode_header(data)
    assert header is not None
    assert header.rows == 3
    assert header.time_us == 9_000


def test_holding_ends_when_it_should(world: World) -> None:
    """A batch is held until the delay is over or it is full; the next step is due at that time."""
    model = world.model(cached=False, slo_us=50_000)
    container = world.container(model, mode=STATIC, size_max=4, delay_us=1_500)
    teach(world, container, model, 100)
    model.predict(1.0)
    begun = world.now_us
    assert world.step() == begun + 1_500
    assert world.step(1_499) == begun + 1_500
    assert not container.read()
    world.step(1)
    assert len(container.read()) == 1
    container.reply()
    world.step()
    for k in range(4):
        assert not container.read()
        model.predict(float(k))
        world.step(10)
    assert len(container.read()) == 1


def test_a_row_that_cannot_be_in_time_is_dropped_early_and_the_next_is_not(world: World) -> None:
    model = world.model(cached=False)
    container = world.container(model, mode=STATIC, size_max=8)
    teach(world, container, model, 10_000)
    tight, easy = model.predict(1.0, 5), model.predict(2.0, 500)
    world.step()
    assert tight.status() == Status.DROPPED
    assert [rows.tolist() for _, rows in container.read()] == [[2.0]]
    assert not easy.done()


def test_a_tight_row_in_the_middle_is_not_sent_either(world: World) -> None:
    """SLOs of one lane differ by up to a factor of two: rows behind a first row that is in time may
    be late."""
    model = world.model(cached=False)
    container = world.container(model, mode=STATIC, size_max=8)
    teach(world, container, model, 20_000)
    futures = [model.predict(float(k), slo_ms) for k, slo_ms in enumerate([31, 31, 17, 31])]
    world.step()
    assert [rows.tolist() for _, rows in container.read()] == [[0, 1, 3]]
    assert futures[2].status() == Status.DROPPED


def test_a_slow_replica_drops_nothing_that_a_busy_fast_one_can_do(world: World) -> None:
    model = world.model(cached=False)
    slow = world.container(model, mode=STATIC, size_max=4)
    teach(world, slow, model, 50_000)
    world.engine.drain(slow.conn)
    fast = world.container(model, mode=STATIC, size_max=4)
    teach(world, fast, model, 1_000)
    slow.lose()
    slow = world.container(model, mode=STATIC, size_max=4)
    busy = model.predict(1.0, 60_000)  # to either; its answer teaches nothing new
    world.step()
    served = fast if fast.read() else slow
    assert served.read()
    futures = [model.predict(float(k), 20) for k in range(2)]
    world.step()
    assert not any(future.done() for future in futures)
    world.step(1_000)
    for container in (fast, slow):
        container.reply_all()
    assert busy.done()
    assert [future.result() for future in futures] == [0, 1]


def test_a_silent_replica_gets_nothing_and_is_closed_after_three_heartbeats(world: World) -> None:
    model = world.model(cached=False)
    container = world.container(model)
    for _ in range(44):
        world.step(25_000)
    assert world.engine.replica(container.conn)["suspect"]
    future = model.predict(1.0, 10)
    world.step()
    assert not container.read()
    assert container.send(encode_frame(Kind.HEARTBEAT))
    world.step()
    assert container.read(), "heard again: trusted again"
    assert not world.engine.wants_close(container.conn)
    for _ in range(70):
        world.step(25_000)
    assert world.engine.wants_close(container.conn)
    assert future.status() == Status.DEADLINE


def test_containers_are_not_silent_while_the_loop_does_not_read(world: World) -> None:
    """Frames of containers wait unread while this process is stopped or has no CPU: those
    containers do not count as silent."""
    container = world.container(world.model(cached=False))
    for _ in range(3):
        world.step(10 * BEAT_US)
        assert not world.engine.wants_close(container.conn)
        assert not world.engine.replica(container.conn)["suspect"]
    for _ in range(3 * BEAT_US // 25_000 + 2):
        world.step(25_000)
    assert world.engine.wants_close(container.conn), "silence that we did hear still counts"


def test_heartbeats_are_sent_when_there_is_nothing_else_to_send(world: World) -> None:
    model = world.model()
    container = world.container(model)
    for _ in range(10 * BEAT_US // 25_000):
        world.step(25_000)
        container.read()
        container.send(encode_frame(Kind.HEARTBEAT))
    assert 8 <= container.kinds_received.count(Kind.HEARTBEAT) <= 10


@pytest.mark.parametrize("hello", [False, True])
def test_a_connection_that_never_becomes_a_replica_is_closed(world: World, hello: bool) -> None:
    conn = world.engine.open(world.now_us)
    if hello:
        assert world.engine.receive(conn, encode_frame(Kind.HELLO, b""), world.now_us)
    for _ in range(399):
        world.step(25_000)
        assert world.engine.receive(conn, encode_frame(Kind.HEARTBEAT), world.now_us)
    assert not world.engine.wants_close(conn)
    world.step(50_000)
    assert world.engine.wants_close(conn)


def test_draining_answers_what_it_has_and_sends_goodbye(world: World) -> None:
    model = world.model(cached=False)
    container = world.container(model)
    future = model.predict(3.0, 500)
    world.step()
    container.read()
    world.engine.drain(container.conn)
    late = model.predict(4.0, 50)
    world.step(30_000)
    assert not world.engine.wants_close(container.conn)
    container.reply()
    world.step(1)
    assert not container.read(), "no more batches"
    world.step(30_000)
    assert future.result() == 3.0
    container.read()
    assert container.kinds_received[-1] == Kind.GOODBYE
    assert world.engine.wants_close(container.conn)
    world.pass_deadline(50_000)
    assert late.status() == Status.DEADLINE


def test_a_container_that_sends_goodbye_gives_its_rows_back(world: World) -> None:
    model = world.model(cached=False)
    container = world.container(model)
    future = model.predict(3.0, 500)
    world.step()
    container.read()
    assert container.send(encode_frame(Kind.GOODBYE))
    world.step()
    assert world.engine.wants_close(container.conn)
    container.lose()
    other = world.container(model)
    other.reply_all()
    assert future.result() == 3.0


def test_no_replica_at_the_deadline(world: World) -> None:
    model, other = world.model(), world.model()
    world.container(other)
    future = model.predict(1.0, 10)
    world.step(9_999)
    assert not future.done()
    world.step(1 + 64)
    assert future.status() == Status.NO_REPLICA
