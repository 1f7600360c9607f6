"""An error at the entry of a thread of a stream, and within one: the stream goes on, says that it
does, and ends within its time."""

import threading
from typing import Any

import pytest

from clipper.component import State
from clipper.frontend.streams.scoring import ScoringStream
from tests.memory_container import wait_until
from tests.streams.conftest import World
from tests.thread_faults import ERRORS, injected, names_seen

LIMIT_S = 60.0


def answer(world: World) -> int:
    """Run a stream until ten records are answered, and stop it; return how many were."""
    before = world.client.xlen(world.answers)
    world.add_many(10)
    stream = world.stream()
    try:
        wait_until(lambda: world.client.xlen(world.answers) >= before + 10)
    finally:
        stop(stream)
    return int(world.client.xlen(world.answers)) - int(before)


def stop(stream: ScoringStream) -> None:
    stopping = threading.Thread(target=stream.stop)
    stopping.start()
    stopping.join(LIMIT_S)
    assert not stopping.is_alive()


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_at_the_entry_of_a_thread_of_a_stream(kind: str, world: World) -> None:
    with names_seen() as seen:
        assert answer(world) == 10
    names = [name for name in seen if "stream-sums" in name]
    assert len(names) == 2, seen
    for name in names:
        with injected(name, kind) as fault:
            assert answer(world) == 10
        assert fault.count == 1


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("method", ["read", "settle"])
def test_an_error_within_a_thread_of_a_stream_is_seen_and_no_record_is_lost(
    method: str, kind: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = world.stream(claim_s=0.5)
    group = stream._scoring._group
    known, failed = getattr(group, method), list[bool]()

    def fail(*words: Any) -> Any:
        if len(failed) < 2 and (method == "read" or words[0]):
            failed.append(True)
            raise ERRORS[kind]()
        return known(*words)

    monkeypatch.setattr(group, method, fail)
    for i in range(5):
        world.add(id=f"r{i}", input=f"[{i}, 1, 2.5]")
    wait_until(lambda: State.DEGRADED in {one.state for one in stream.health()})
    world.wait(5)
    wait_until(lambda: stream.stats()["in_flight"] == 0)
    stop(stream)
    assert {one.state for one in stream.health()} == {State.ENDED}
    assert sorted(one["id"] for one in world.rows(world.answers)) == [f"r{i}" for i in range(5)]
