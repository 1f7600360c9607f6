"""Containers that work at several batches at the same time, and CANCEL of what nobody waits for,
with fake containers and a clock that the test sets."""

from typing import Any

import numpy as np
import pytest

from clipper_core.runtime.status import Status
from clipper_core.scheduling.scheduler import EngineEvent
from clipper_core.wire.codec import Kind, decode_header, encode_frame, encode_rows
from tests.core.conftest import Container, World, rows_of

MS = 1000
HOUSEKEEPING_US = 25 * MS
PLACES = 4
FIT = 1


class Concurrent(Container):
    """A fake container that works at several batches, and ends those that a test names."""

    def __init__(self, world: World, model: Any, **attach: Any) -> None:
        places = {"concurrency": PLACES, "cancels": True, "size_max": 1}
        super().__init__(world, model, **places | attach)
        self.cancelled: list[int] = []
        self.at_once = 0

    def read(self) -> list[tuple[int, Any]]:
        self.unread += self.world.engine.outgoing(self.conn, self.world.now_us)
        while (header := decode_header(self.unread)) is not None:
            end = 64 + header.payload_bytes
            payload, self.unread = self.unread[64:end], self.unread[end:]
            if header.kind == Kind.PREDICT:
                self.inbox.append((header.id, rows_of(header, payload)))
            elif header.kind == Kind.CANCEL:
                self.cancelled.append(header.id)
        self.at_once = max(self.at_once, len(self.inbox))
        return self.inbox

    def end(self, place: int) -> None:
        """Answer the batch at this place of the inbox."""
        self.inbox.insert(0, self.inbox.pop(place))
        self.reply()


def container_of(world: World, model: Any, **attach: Any) -> Concurrent:
    made = Concurrent(world, model, **attach)
    world.step()
    made.read()
    return made


def test_rows_are_in_flight_together_and_end_in_any_order(world: World) -> None:
    model = world.model(cached=False)
    container = container_of(world, model)
    futures = [model.predict(float(i), slo_ms=1000) for i in range(PLACES + 2)]
    world.step()
    assert [rows.tolist() for _, rows in container.read()] == [[0.0], [1.0], [2.0], [3.0]]
    container.end(2)
    world.step(MS)
    assert [future.done() for future in futures] == [False, False, True, False, False, False]
    # its place is taken at once
    assert [rows.tolist() for _, rows in container.read()] == [[0.0], [1.0], [3.0], [4.0]]
    container.end(3)
    world.step(MS)
    assert futures[4].result(0) == 4.0
    container.reply_all()
    assert [future.result(0) for future in futures] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_any_order_is_right(world: World) -> None:
    random = np.random.default_rng(5)
    model = world.model(cached=False)
    container = container_of(world, model, concurrency=16)
    futures = [model.predict(float(i), slo_ms=10_000) for i in range(300)]
    world.step()
    while container.read():
        container.end(int(random.integers(len(container.inbox))))
        world.step(100)
    assert [future.result(0) for future in futures] == [float(i) for i in range(300)]
    assert container.at_once == 16


def test_a_reply_to_what_was_never_sent_is_a_bad_frame(world: World) -> None:
    model = world.model(cached=False)
    container = container_of(world, model)
    future = model.predict(1.0)
    world.step()
    number, _ = container.read()[0]
    output = np.array([1.0])
    assert not container.send(encode_rows(Kind.REPLY, output, id=number + 1))
    assert not future.done()


def test_a_second_reply_to_a_batch_is_dropped(world: World) -> None:
    model = world.model(cached=False)
    container = container_of(world, model)
    futures = [model.predict(float(i)) for i in range(3)]
    world.step()
    number, _ = container.read()[1]
    container.end(1)
    assert container.send(encode_rows(Kind.REPLY, np.array([7.0]), id=number))
    container.reply_all()
    assert [future.result(0) for future in futures] == [0.0, 1.0, 2.0]


def test_a_failure_of_one_batch_ends_its_rows_only(world: World) -> None:
    model = world.model(cached=False)
    container = container_of(world, model)
    futures = [model.predict(float(i), slo_ms=100) for i in range(3)]
    world.step()
    container.read()
    container.inbox.insert(0, container.inbox.pop(1))
    container.fail("no")
    world.step()
    container.reply_all()
    assert [future.status() for future in futures] == [Status.OK, Status.MODEL_ERROR, Status.OK]


@pytest.mark.parametrize("concurrency", [0, PLACES])
@pytest.mark.parametrize("array", [False, True])
def test_what_nobody_waits_for_is_cancelled_at_the_container(
    world: World, concurrency: int, array: bool
) -> None:
    model = world.model(cached=False)
    container = container_of(world, model, concurrency=concurrency, size_max=2)
    rows = np.array([1.0, 2.0])
    futures = [model.predict_many(rows, 1000)] if array else [model.predict(x) for x in rows]
    world.step()
    ids = [number for number, _ in container.read()]
    world.step(HOUSEKEEPING_US)
    container.read()
    assert container.cancelled == []
    for future in futures:
        assert future.cancel()
    world.step(HOUSEKEEPING_US)
    container.read()
    assert container.cancelled == ids
    for number in ids:
        assert container.send(encode_frame(Kind.FAILURE, b"cancelled", id=number))
    world.step()
    gauge = world.engine.replica(container.conn)
    assert gauge is not None
    assert (gauge["in_flight"], gauge["failures"]) == (0, 0)
    again = model.predict(5.0)
    container.inbox.clear()
    world.step()
    container.reply_all()
    assert again.result(0) == 5.0


def test_a_batch_with_a_row_that_is_wanted_goes_on(world: World) -> None:
    model = world.model(cached=False)
    container = container_of(world, model, size_max=2)
    wanted, other = model.predict(1.0, slo_ms=500), model.predict(2.0, slo_ms=500)
    world.step()
    assert len(container.read()[0][1]) == 2
    other.cancel()
    world.step(HOUSEKEEPING_US)
    container.read()
    assert container.cancelled == []
    container.reply()
    assert wanted.result(0) == 1.0


def test_a_row_that_another_query_joined_goes_on(world: World) -> None:
    model = world.model()
    container = container_of(world, model)
    first, second = model.predict(1.0, slo_ms=500), model.predict(1.0, slo_ms=500)
    world.step()
    assert len(container.read()) == 1
    first.cancel()
    world.step(HOUSEKEEPING_US)
    container.read()
    assert container.cancelled == []
    container.reply()
    assert second.result(0) == 1.0


def test_a_row_past_its_deadline_is_cancelled_and_others_go_on(world: World) -> None:
    model = world.model(cached=False)
    container = container_of(world, model)
    late, slow = model.predict(1.0, slo_ms=50), model.predict(2.0, slo_ms=60_000)
    world.step()
    first = container.read()[0][0]
    world.step(60 * MS)
    world.step(HOUSEKEEPING_US)
    container.read()
    assert (late.status(), container.cancelled) == (Status.DEADLINE, [first])
    more = model.predict(3.0, slo_ms=60_000)
    world.step()
    assert [rows.tolist() for _, rows in container.read()[2:]] == [[3.0]]
    container.end(2)
    container.end(1)
    assert (more.result(0), slow.result(0)) == (3.0, 2.0)


def test_a_container_that_does_not_cancel_gets_no_new_rows(world: World) -> None:
    model = world.model(cached=False)
    container = container_of(world, model)
    model.predict(1.0, slo_ms=50)
    world.step()
    container.read()
    for _ in range(50):
        world.step(HOUSEKEEPING_US)
    container.read()
    later = model.predict(2.0, slo_ms=60_000)
    world.step()
    assert len(container.read()) == 1
    container.reply()
    world.step()
    assert [rows.tolist() for _, rows in container.read()] == [[2.0]]
    container.reply()
    assert later.result(0) == 2.0


def test_a_container_that_takes_no_cancel_is_sent_none(world: World) -> None:
    model = world.model(cached=False)
    container = container_of(world, model, cancels=False, concurrency=0)
    future = model.predict(1.0, slo_ms=50)
    world.step()
    container.read()
    future.cancel()
    world.step(60 * MS)
    world.step(HOUSEKEEPING_US)
    container.read()
    assert container.cancelled == []


@pytest.mark.parametrize("seed", range(4))
def test_one_row_ends_two_processes_and_only_its_query_fails(world: World, seed: int) -> None:
    random = np.random.default_rng(seed)
    count = int(random.integers(2, 40))
    poison = int(random.integers(count))
    model = world.model(cached=False)
    container = container_of(world, model, concurrency=16)
    futures = [model.predict(float(i), slo_ms=60_000) for i in range(count)]
    deaths = 0
    for _ in range(1000):
        world.step(MS)
        if not container.read():
            break
        place = int(random.integers(len(container.inbox)))
        if container.inbox[place][1][0] == poison:
            container.lose()
            deaths += 1
            container = container_of(world, model, concurrency=16)
        else:
            container.end(place)
    failed = [i for i, future in enumerate(futures) if future.status() != Status.OK]
    assert failed == [poison]
    assert deaths == 2


def test_a_burst_is_admitted_up_to_the_places(world: World) -> None:
    model = world.model(cached=False)
    container = container_of(world, model, mode=FIT, concurrency=100)
    for i in range(20):  # a row takes 50 ms
        future = model.predict(float(i), slo_ms=200)
        world.step()
        world.step(50 * MS)
        container.reply_all()
        assert future.done()
    burst = [model.predict(float(i), slo_ms=200) for i in range(1000)]
    taken = [future for future in burst if future.status() == Status.PENDING]
    # 200 ms are four times the time of a row: with 100 places not more than 400, and not one
    assert 100 <= len(taken) <= 400
    world.step()
    container.read()
    for _ in range(8):
        world.step(50 * MS)
        container.reply_all()
    assert all(future.status() in (Status.OK, Status.DROPPED) for future in taken)
    assert sum(future.status() == Status.OK for future in taken) >= 100


def test_the_places_of_all_replicas_are_used(world: World) -> None:
    model = world.model(cached=False)
    containers = [container_of(world, model) for _ in range(3)]
    futures = [model.predict(float(i), slo_ms=60_000) for i in range(3 * PLACES)]
    world.step()
    assert [len(container.read()) for container in containers] == [PLACES] * 3
    for container in containers:
        container.reply_all()
    assert all(future.done() for future in futures)


# -- calls of models


def test_calls_are_reported_and_answered(world: World) -> None:
    model = world.model(cached=False)
    container = container_of(world, model, calls_max=2)
    for id in (7, 8):
        assert container.send(encode_frame(Kind.CALL, b"ask", id=id))
    assert container.send(encode_frame(Kind.CANCEL, b"", id=8))
    received, cancelled = EngineEvent.CALL_RECEIVED, EngineEvent.CALL_CANCELLED
    assert world.engine.calls() == [
        (received, container.conn, 7, b"ask"),
        (received, container.conn, 8, b"ask"),
        (cancelled, container.conn, 8, b""),
    ]
    assert world.engine.calls() == []
    world.engine.send_answer(container.conn, 7, b"answer")
    world.step()
    data = world.engine.outgoing(container.conn, world.now_us)
    header = decode_header(data)
    assert header is not None
    assert (header.kind, header.id, data[64:]) == (Kind.ANSWER, 7, b"answer")
    assert container.send(encode_frame(Kind.CALL, b"", id=9))
    # a third one that is open
    assert not container.send(encode_frame(Kind.CALL, b"", id=10))


def test_the_end_of_a_container_with_open_calls_is_reported(world: World) -> None:
    model = world.model(cached=False)
    container = container_of(world, model, calls_max=2)
    other = container_of(world, model, calls_max=2)
    assert container.send(encode_frame(Kind.CALL, b"ask", id=1))
    world.engine.calls()
    container.lose()
    other.lose()
    world.step()
    assert world.engine.calls() == [(EngineEvent.DISCONNECTED, container.conn, 0, b"")]
    world.engine.send_answer(container.conn, 1, b"too late")
    world.step()


@pytest.mark.parametrize("kind", [Kind.CALL, Kind.CANCEL, Kind.ANSWER])
def test_a_container_that_may_not_call_sends_a_bad_frame(world: World, kind: int) -> None:
    model = world.model(cached=False)
    container = container_of(world, model)
    assert not container.send(encode_frame(kind, b"", id=1))
