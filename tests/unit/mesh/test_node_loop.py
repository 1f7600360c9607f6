"""The loop of a node: it starts whole or not at all, and it ends whatever its tasks do."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from clipper.component.threads import SystemThreads
from clipper.errors import NotStarted, ShuttingDown
from clipper.mesh import node_loop
from clipper.mesh.node_loop import STORE_THREADS, ThreadedNodeLoop

LIMIT_S = 20.0


async def nothing() -> None: ...


@pytest.mark.parametrize("count", range(STORE_THREADS + 1))
def test_a_thread_that_the_system_does_not_have_is_an_error_of_start(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, left = SystemThreads.start, [count]

    def start(self: SystemThreads, target: Callable[[], None], name: str) -> Any:
        if left[0] == 0:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        return known(self, target, name)

    monkeypatch.setattr(SystemThreads, "start", start)
    before = threading.active_count()
    loop = ThreadedNodeLoop()
    with pytest.raises(NotStarted):
        loop.start()
    loop.stop(nothing)
    loop.close()
    assert threading.active_count() == before
    with pytest.raises(ShuttingDown):
        loop.run(nothing())


def test_a_task_that_swallows_its_cancellation_does_not_hold_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("clipper.component.event_loop.CLOSE_S", 0.1)
    monkeypatch.setattr(node_loop, "STOP_S", 5.0)
    loop, ends = ThreadedNodeLoop(), threading.Event()
    loop.start()

    begun = threading.Event()

    async def stubborn() -> None:
        begun.set()
        while not ends.is_set():
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue

    waiting = threading.Thread(target=_ignoring, args=(loop, stubborn))
    waiting.start()
    assert begun.wait(LIMIT_S)
    closing = threading.Thread(target=loop.stop, args=(nothing,))
    closing.start()
    closing.join(LIMIT_S)
    assert not closing.is_alive()
    waiting.join(LIMIT_S)
    assert not waiting.is_alive()
    ends.set()
    loop.close()


def test_a_leave_that_hangs_or_fails_does_not_hold_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_loop, "STOP_S", 0.2)
    hanging, failing = ThreadedNodeLoop(), ThreadedNodeLoop()
    hanging.start()
    hanging.stop(lambda: asyncio.sleep(LIMIT_S))  # type: ignore[arg-type, return-value]
    hanging.close()

    async def fail() -> None:
        raise KeyError("injected")

    failing.start()
    with pytest.raises(KeyError):
        failing.stop(fail)
    failing.close()
    assert [each.health()[0].state for each in (hanging, failing)] == ["ended", "ended"]


def test_who_waits_for_a_loop_that_died_is_told() -> None:
    loop = ThreadedNodeLoop()
    loop.start()
    waiting = list[BaseException]()

    begun = threading.Event()

    async def sleeps() -> None:
        begun.set()
        await asyncio.sleep(LIMIT_S)

    def wait() -> None:
        try:
            loop.run(sleeps())
        except ShuttingDown as error:
            waiting.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert begun.wait(LIMIT_S)
    loop.call(loop._event_loop.stop)  # as an error that ends it
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert len(waiting) == 1
    assert loop._loop.join(time.monotonic() + LIMIT_S)
    assert loop.health()[0].state == "failed"
    loop.stop(nothing)
    loop.close()


def _ignoring(loop: ThreadedNodeLoop, work: Callable[[], Any]) -> None:
    with contextlib.suppress(ShuttingDown):
        loop.run(work())
