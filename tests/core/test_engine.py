"""The engine's Python methods: connections are accepted, attached, refused and closed, and reported
as events; the engine ends."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from clipper_core.engine.engine import Engine
from clipper_core.engine.model import Model
from clipper_core.runtime.status import Status, StatusError
from clipper_core.scheduling.scheduler import EngineEvent
from clipper_core.wire.codec import Kind, decode_header, encode_frame

World = Any  # tests/core/conftest.py


def test_a_connection_from_hello_to_its_end(world: World) -> None:
    model = world.model()
    engine = world.engine
    conn = engine.open(world.now_us)
    assert engine.receive(conn, encode_frame(Kind.HELLO, b"who I am"), world.now_us)
    assert engine.replica(conn) is None
    engine.attach(conn, model.index, b"you are in", number=7)
    world.step()
    assert engine.outgoing(conn, world.now_us).endswith(b"you are in")
    assert engine.replica(conn)["number"] == 7
    assert engine.snapshot()["models"][0]["replicas"] == 1
    engine.lost(conn, world.now_us)
    assert engine.replica(conn) is None
    events = engine.events()
    assert [(kind, c) for kind, c, *_ in events] == [
        (EngineEvent.HELLO_RECEIVED, conn),
        (EngineEvent.ATTACHED, conn),
        (EngineEvent.DISCONNECTED, conn),
    ]
    assert events[0][4] == b"who I am"
    assert events[2][3] == Status.REPLICA_LOST
    assert engine.events() == []
    assert engine.snapshot()["models"][0]["replicas"] == 0


def test_a_number_of_a_connection_is_never_used_twice(world: World) -> None:
    """A command to a closed connection does not reach the one that has its slot now."""
    model = world.model()
    seen = set()
    for _ in range(200):
        conn = world.engine.open(world.now_us)
        assert conn not in seen
        seen.add(conn)
        world.engine.lost(conn, world.now_us)
    fresh = world.engine.open(world.now_us)
    for conn in seen:
        world.engine.attach(conn, model.index, b"")
        world.engine.disconnect(conn)
        assert not world.engine.receive(conn, b"x", world.now_us)
        assert world.engine.outgoing(conn, world.now_us) == b""
        assert world.engine.wants_close(conn)
        world.engine.lost(conn, world.now_us)
    world.step()
    assert not world.engine.wants_close(fresh)
    assert world.engine.snapshot()["models"][0]["replicas"] == 0


def test_refusing_gives_the_reason_and_closes(world: World) -> None:
    conn = world.engine.open(world.now_us)
    world.engine.refuse(conn, "no such model: näme")
    world.step()
    data = world.engine.outgoing(conn, world.now_us)
    header = decode_header(data)
    assert header is not None
    assert header.kind == Kind.REFUSE
    assert data[64:].decode() == "no such model: näme"
    assert world.engine.wants_close(conn)


@pytest.mark.parametrize("first", [Kind.REPLY, Kind.FAILURE, Kind.PREDICT, Kind.WELCOME])
def test_a_container_that_sends_an_unexpected_frame_is_closed(world: World, first: int) -> None:
    conn = world.engine.open(world.now_us)
    frame = (
        encode_frame(first, bytes(8), dtype=12, rows=1)
        if first in (Kind.REPLY, Kind.PREDICT)
        else encode_frame(first, b"x")
    )
    assert not world.engine.receive(conn, frame, world.now_us)


def test_hello_is_reported_once(world: World) -> None:
    conn = world.engine.open(world.now_us)
    hello = encode_frame(Kind.HELLO, b"")
    assert world.engine.receive(conn, hello, world.now_us)
    assert not world.engine.receive(conn, hello, world.now_us)


def test_attaching_to_a_model_that_is_not_there(world: World) -> None:
    conn = world.engine.open(world.now_us)
    with pytest.raises(StatusError) as caught:
        world.engine.attach(conn, 3, b"")
    assert caught.value.status == Status.UNKNOWN


def test_links_max(new_world: Callable[..., World]) -> None:
    world = new_world(connections_max=3)
    conns = [world.engine.open(world.now_us) for _ in range(3)]
    assert world.engine.open(world.now_us) == 0
    assert world.engine.events()[-1][0] == EngineEvent.CONNECTION_REJECTED
    world.engine.lost(conns[1], world.now_us)
    assert world.engine.open(world.now_us)


def test_models_max() -> None:
    engine = Engine(manual_clock=True, models_max=2, cache_bytes_max=1 << 20, tasks_max=64)
    for i in range(2):
        Model(engine, "m", i + 1, "f64")
    with pytest.raises(StatusError) as caught:
        Model(engine, "m", 3, "f64")
    assert caught.value.status == Status.FULL
    engine.finish()


def test_commands_are_bounded(world: World) -> None:
    conn = world.engine.open(world.now_us)
    for _ in range(8192):
        world.engine.drain(conn)
    with pytest.raises(StatusError) as caught:
        world.engine.drain(conn)
    assert caught.value.status == Status.FULL
    world.step()
    world.engine.drain(conn)


def test_refuse_new_lets_those_in_flight_end(world: World) -> None:
    model = world.model(cached=False)
    container = world.container(model)
    before = model.predict(2.0, 50)
    world.step()
    world.engine.refuse_new()
    after = model.predict(3.0, 50)
    assert after.status() == Status.CLOSED
    container.read()
    container.reply()
    world.step()
    assert before.result() == 2.0


@pytest.mark.parametrize("seed", range(10))
def test_finish_ends_all_wherever_they_are(world: World, seed: int) -> None:
    """Tasks that are not taken in, waiting, joined across lanes, in flight, or in flight and
    cancelled end as CLOSED, each once."""
    rng = random.Random(seed)
    model = world.model(cached=rng.random() < 0.7)
    if rng.random() < 0.7:
        world.container(model, size_max=3)
    futures = []
    for _ in range(60):
        futures.append(model.predict(float(rng.randrange(12)), rng.choice([5, 9, 40, 400])))
        if rng.random() < 0.2:
            futures[-1].cancel()
        if rng.random() < 0.3:
            world.step(rng.randrange(1_000))
    world.engine.finish()
    assert {future.status() for future in futures} <= {
        Status.CLOSED,
        Status.CANCELLED,
        Status.DEADLINE,
        Status.NO_REPLICA,
    }
    assert any(future.status() == Status.CLOSED for future in futures)
    world.engine.finish()


def test_an_unknown_cache_policy_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ValueError, match="no cache policy 'lru'; there are clock and sieve"):
        Engine(cache_policy="lru")
    assert Engine(cache_policy="sieve", cache_bytes_max=1 << 16).snapshot()["cache"]["entries"] == 0
