"""The parts of a node by themselves: event loop, background tasks, periodic tasks, late join,
constraints, usage reports and drain."""

import asyncio
import json
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clipper.component import Backoff, State, Tasks
from clipper.errors import ShuttingDown, StoreError
from clipper.mesh.decision_log import DECISIONS_MAX, MODELS_MAX, DecisionLog
from clipper.mesh.decisions.model_cache import ModelCache
from clipper.mesh.decisions.usage import UsageCounter
from clipper.mesh.node.deferred_join import DeferredJoin
from clipper.mesh.node.usage_reports import UsageRecorder, UsageReporter
from clipper.mesh.node_loop import NodeLoop, ThreadedNodeLoop
from clipper.mesh.registry import now_ms
from clipper.mesh.tasks.constraints_file import ConstraintsFile
from clipper.mesh.tasks.periodic_tasks import PeriodicTasks
from clipper.metrics import MeshCounts
from tests.memory_container import wait_until


@pytest.fixture
def loop() -> Iterator[NodeLoop]:
    loop = ThreadedNodeLoop()
    loop.start()
    yield loop
    if not loop.stopping:
        loop.stop(nothing)
    loop.close()


async def nothing() -> None:
    pass


# -- the event loop


def test_coroutine_runs_on_the_thread_of_the_node(loop: NodeLoop) -> None:
    async def name() -> str:
        return threading.current_thread().name

    assert loop.run(name()) == "clipper-mesh"


def test_blocking_call_runs_in_another_thread(loop: NodeLoop) -> None:
    async def names() -> tuple[int, int]:
        return threading.get_ident(), await loop.run_blocking(threading.get_ident)

    own, other = loop.run(names())
    assert own != other


def test_thread_of_the_node_may_not_wait_for_itself(loop: NodeLoop) -> None:
    async def wait() -> None:
        with pytest.raises(RuntimeError, match="cannot wait"):
            loop.run(nothing())

    loop.run(wait())


def test_stop_ends_waiting_threads_and_refuses_new_work(loop: NodeLoop) -> None:
    errors: list[BaseException] = []

    begun = threading.Event()

    async def sleeps() -> None:
        begun.set()
        await asyncio.sleep(60)

    def wait() -> None:
        try:
            loop.run(sleeps())
        except ShuttingDown as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert begun.wait(60)
    loop.stop(nothing)
    thread.join(60)
    assert len(errors) == 1
    with pytest.raises(ShuttingDown):
        loop.run(nothing())
    loop.call(lambda: None)  # ignored


# -- tasks


def test_failed_background_task_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise ValueError("broken")

    async def run() -> None:
        tasks = Tasks("the mesh")
        done = tasks.spawn(fail())
        await asyncio.wait([done])
        await asyncio.sleep(0)

    asyncio.run(run())
    assert "a task of the mesh failed" in caplog.text


def test_cancel_waits_until_background_tasks_have_ended() -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            ended.append("work")

    async def run() -> None:
        tasks = Tasks("the mesh")
        tasks.spawn(work())
        await asyncio.sleep(0)
        await tasks.cancel()

    asyncio.run(run())
    assert ended == ["work"]


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (StoreError("away"), State.RUNNING),
        (ValueError("broken"), State.DEGRADED),
        (MemoryError("none left"), State.DEGRADED),
    ],
)
def test_periodic_task_that_fails_is_called_again(
    loop: NodeLoop, error: Exception, state: State
) -> None:
    calls: list[int] = []

    async def fail() -> None:
        calls.append(1)
        raise error

    tasks = PeriodicTasks(loop, {"clipper-mesh-failing": (0.001, fail)})

    async def start() -> None:
        tasks.start()

    async def stop() -> None:
        tasks.stop()

    def states() -> list[State]:
        return [one.state for one in loop.health() if one.name == "clipper-mesh-failing"]

    loop.run(start())
    wait_until(lambda: len(calls) > 2)
    assert states() == [state]
    loop.run(stop())
    wait_until(lambda: not states())


def test_kept_task_that_is_done_leaves_nothing() -> None:
    async def run() -> None:
        tasks = Tasks("the mesh")
        await tasks.keep("done", nothing, Backoff())
        await asyncio.sleep(0)
        assert tasks.health() == []

    asyncio.run(run())


# -- the late join


def deferred(
    loop: NodeLoop, join: Callable[[], Awaitable[None]], enter_s: float = 60.0
) -> tuple[DeferredJoin, list[bool]]:
    joined: list[bool] = []

    async def joining() -> None:
        await join()
        joined.append(True)

    return DeferredJoin("n", "redis", enter_s, loop, joining, lambda: bool(joined)), joined


def test_node_joins_once_its_store_is_back(loop: NodeLoop) -> None:
    node, joined = deferred(loop, nothing)
    assert not node.store_is_back()  # it was not started late
    node.start()
    assert node.awaits == "the store redis"
    with pytest.raises(StoreError, match="it awaits the store redis"):
        node.check()
    assert node.store_is_back()
    assert (joined, node.awaits) == ([True], "")
    assert not node.store_is_back()
    node.check()


def test_node_keeps_waiting_while_its_store_goes_again(loop: NodeLoop) -> None:
    async def unreachable() -> None:
        raise StoreError("away")

    node, _ = deferred(loop, unreachable)
    node.start()
    with pytest.raises(StoreError, match="away"):
        node.store_is_back()
    assert (node.awaits, node.given_up) == ("the store redis", "")


def test_node_gives_up_when_its_time_is_over_or_it_cannot_join(loop: NodeLoop) -> None:
    async def refuse() -> None:
        raise ValueError("its name is taken")

    node, joined = deferred(loop, nothing, enter_s=0.0)
    node.start()
    wait_until(lambda: node.given_up)
    assert not node.store_is_back()
    assert not joined
    other, _ = deferred(loop, refuse)
    other.start()
    assert not other.store_is_back()
    assert "its name is taken" in other.awaits


# -- constraints, decisions, usage


def test_unreadable_constraints_leave_the_previous_ones_and_are_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "constraints.json"
    path.write_text(json.dumps({"onnx": {"required": ["gpu"]}}))
    file = ConstraintsFile(str(path))
    file.refresh()
    assert file.constraints["onnx"].required == ("gpu",)
    path.unlink()
    with caplog.at_level(logging.ERROR):
        file.refresh()
        file.refresh()
    assert caplog.text.count("mesh.constraints") == 1
    assert file.constraints["onnx"].required == ("gpu",)


def test_decision_log_keeps_the_latest_decisions_of_the_latest_models() -> None:
    log = DecisionLog()
    for n in range(DECISIONS_MAX + 5):
        log.note("m", f"decision {n}")
    assert log.of("m")[0].what == "decision 5"
    for n in range(MODELS_MAX):
        log.note(f"other{n}", "loaded")
    assert log.of("m") == ()


def test_usage_is_counted_here_and_reported_to_the_nodes_that_hold_copies() -> None:
    cache, counter, counts = ModelCache(1000), UsageCounter(), MeshCounts()
    cache.add("m", 10, 1, 1)
    loader: Any = SimpleNamespace(cache=cache, counts=counts)
    route = SimpleNamespace(
        id="m", type_known=False, lenders={1, 2}, waited=3, used_ms=now_ms(), queue_ms=lambda: 2.0
    )
    router: Any = SimpleNamespace(touched=SimpleNamespace(take=lambda: [(route, 10)]))
    instances = [SimpleNamespace(id="a", number=1), SimpleNamespace(id="b", number=2)]
    registration: Any = SimpleNamespace(id="a", instances=lambda: instances)
    sent: list[tuple[str, list[Any]]] = []
    untyped: list[Any] = []

    class Peers:
        async def notify(self, instance: str, *, event: str, used: list[Any]) -> None:
            sent.append((instance, used))

    peers: Any = Peers()
    recorder = UsageRecorder(loader, counter)
    reporter = UsageReporter(router, loader, peers, registration, recorder, untyped.append)
    asyncio.run(reporter.report())
    stats = counts.stats()
    assert (stats["queries_hit"], stats["queries_missed"]) == (7, 3)
    assert sent == [("b", [["m", route.used_ms, 5, 2.0, 10]])]
    assert untyped == [route]
    usage = counter.read(now_ms())["m"]
    assert (usage.used_ms, usage.queue_ms, usage.rate) == (route.used_ms, 2.0, 10)
    assert counter.rate == 5
    assert cache.get("m").used_ms == route.used_ms  # type: ignore[union-attr]
