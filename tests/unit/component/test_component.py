"""Threads, loops, pools and tasks: they start or raise, their state is known, and they end."""

import asyncio
import logging
import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from clipper.component import (
    TRANSITIONS,
    Components,
    Health,
    Lifecycle,
    Loop,
    Pool,
    State,
    Stop,
    Tasks,
    WakeFlag,
    Worker,
    require_descriptors,
)
from clipper.component.threads import SystemThreads
from clipper.errors import NotStarted, ShuttingDown
from clipper_container.backoff import Backoff

LIMIT_S = 20.0  # never reached: what is waited for comes


def soon() -> float:
    return time.monotonic() + LIMIT_S


class NoThreads(SystemThreads):
    """A system that has `count` threads and no more."""

    def __init__(self, count: int = 0) -> None:
        self.left = count

    def start(self, target: Callable[[], None], name: str) -> Any:
        if self.left == 0:
            raise RuntimeError("can't start new thread")
        self.left -= 1
        return super().start(target, name)


class SteppedThreads(SystemThreads):
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.s = 1000.0

    def now_s(self) -> float:
        return self.s


# -- the table of states


@pytest.mark.parametrize("known", State)
@pytest.mark.parametrize("to", State)
def test_a_state_changes_as_the_table_says(
    known: State, to: State, caplog: pytest.LogCaptureFixture
) -> None:
    path = {
        State.NEW: [],
        State.RUNNING: [State.RUNNING],
        State.DEGRADED: [State.RUNNING, State.DEGRADED],
        State.FAILED: [State.FAILED],
        State.ENDED: [State.ENDED],
    }[known]
    one = Lifecycle("one", vital=True)
    for step in path:
        assert one.move(step, "before")
    allowed = to in TRANSITIONS[known]
    with caplog.at_level(logging.ERROR):
        assert one.move(to, "why") is allowed
    assert one.health() == Health(
        "one", to if allowed else known, "why" if allowed else "before" if path else "", vital=True
    )
    # an end that comes twice is no error of the program; another change is
    assert bool(caplog.records) is (not allowed and known is not State.ENDED)


def test_every_state_leads_to_the_end() -> None:
    assert all(State.ENDED in TRANSITIONS[state] for state in State if state is not State.ENDED)
    assert not TRANSITIONS[State.ENDED]


# -- stop and flag


def test_a_stop_between_two_looks_is_not_lost() -> None:
    stop = Stop()
    flag = WakeFlag(stop)
    flag.set()
    stop.request()
    assert flag.take()  # what was set is taken, once
    assert not flag.take()  # and without a limit the stop ends the wait
    assert stop.wait(1e9)


def test_a_flag_that_is_set_while_work_runs_is_taken_next() -> None:
    stop, done = Stop(), threading.Semaphore(0)
    flag = WakeFlag(stop)

    def work() -> None:
        while not stop.requested:
            if flag.take():
                done.release()

    worker = threading.Thread(target=work)
    worker.start()
    for _ in range(2000):
        flag.set()
        assert done.acquire(timeout=LIMIT_S)
    stop.request()
    worker.join(LIMIT_S)
    assert not worker.is_alive()


# -- worker


def test_a_worker_runs_ends_and_says_so() -> None:
    ran = threading.Event()

    def run(stop: Stop) -> None:
        ran.set()
        stop.wait(LIMIT_S)

    worker = Worker("w", run)
    assert worker.health().state is State.NEW
    assert worker.join(0)  # not started: nothing to wait for
    worker.start()
    assert ran.wait(LIMIT_S)
    assert worker.health() == Health("w", State.RUNNING)
    assert not worker.join(0)
    assert worker.end()
    assert worker.end()
    assert worker.health().state is State.ENDED


@pytest.mark.parametrize("kind", [MemoryError, OSError, ValueError])
def test_a_worker_whose_function_raises_has_failed_and_says_why(kind: type[Exception]) -> None:
    def run(stop: Stop) -> None:
        raise kind("no more")

    over = threading.Event()
    worker = Worker("w", run, vital=True, on_end=over.set)
    worker.start()
    assert over.wait(LIMIT_S)
    assert worker.join(soon())
    assert worker.health() == Health("w", State.FAILED, f"{kind.__name__}: no more", vital=True)
    assert not worker.is_running


@pytest.mark.parametrize("once", [True, False])
def test_a_function_that_returns_has_ended_only_if_it_runs_once(once: bool) -> None:
    worker = Worker("w", lambda stop: None, once=once)
    worker.start()
    assert worker.join(soon())
    why = "RuntimeError: it ended without having been told to"
    ended, failed = Health("w", State.ENDED), Health("w", State.FAILED, why)
    assert worker.health() == (ended if once else failed)


def test_a_worker_that_is_tried_again_is_degraded_until_it_has_run_a_while() -> None:
    threads = SteppedThreads()
    calls = list[int]()
    works = threading.Event()

    def run(stop: Stop) -> None:
        calls.append(1)
        if len(calls) < 4:
            raise KeyError("once more")
        works.set()
        Stop.wait(stop, LIMIT_S)

    worker = Worker("w", run, again=Backoff(0.0, 0.0), threads=threads)
    worker.start()
    assert works.wait(LIMIT_S)
    assert worker.health() == Health("w", State.DEGRADED, "KeyError: 'once more'")
    threads.s += 1000
    assert worker.health() == Health("w", State.RUNNING)
    assert len(calls) == 4
    assert worker.end()


def test_a_stop_ends_the_pause_of_a_worker() -> None:
    failed = threading.Event()

    def run(stop: Stop) -> None:
        failed.set()
        raise OSError("away")

    worker = Worker("w", run, again=Backoff(1e6, 1e6))
    worker.start()
    assert failed.wait(LIMIT_S)
    assert worker.end()
    assert worker.health().state in (State.ENDED, State.FAILED)


def test_a_thread_that_the_system_does_not_have_is_an_error_of_start() -> None:
    worker = Worker("w", lambda stop: None, threads=NoThreads())
    with pytest.raises(NotStarted, match="the thread w cannot start: can't start new thread"):
        worker.start()
    assert worker.health().state is State.FAILED
    assert worker.end()  # nothing to join


def test_a_worker_that_was_stopped_before_does_not_start() -> None:
    worker = Worker("w", lambda stop: None)
    worker.request_stop()
    with pytest.raises(ShuttingDown):
        worker.start()
    assert worker.health().state is State.ENDED
    assert worker.join(0)


def test_a_worker_does_not_wait_for_itself() -> None:
    found = list[bool]()
    worker = Worker("w", lambda stop: found.append(worker.end()), once=True)
    worker.start()
    assert worker.join(soon())
    assert found == [False]


# -- loop


def test_start_of_a_loop_is_the_result_of_opening() -> None:
    closed = list[str]()

    async def open(loop: asyncio.AbstractEventLoop) -> int:
        return 42

    async def close() -> None:
        closed.append("closed")

    loop = Loop("l", open, close)
    assert loop.start() == 42
    assert loop.is_running
    called = threading.Event()
    assert loop.call(called.set)
    assert called.wait(LIMIT_S)
    assert loop.health().state is State.RUNNING
    assert loop.end()
    assert loop.end()
    assert closed == ["closed"]
    assert loop.health().state is State.ENDED
    assert not loop.call(called.set)


@pytest.mark.parametrize("where", ["make", "open"])
def test_start_of_a_loop_raises_what_opening_raised(where: str) -> None:
    def make() -> asyncio.AbstractEventLoop:
        if where == "make":
            raise MemoryError("in make")
        return asyncio.new_event_loop()

    async def open(loop: asyncio.AbstractEventLoop) -> None:
        raise MemoryError(f"in {where}")

    loop = Loop("l", open, make=make)
    with pytest.raises(MemoryError, match=where):
        loop.start()
    assert loop.health() == Health("l", State.FAILED, f"MemoryError: in {where}")
    assert loop.end()


def test_a_loop_that_has_no_thread_is_an_error_of_start() -> None:
    async def open(loop: asyncio.AbstractEventLoop) -> None: ...

    loop = Loop("l", open, threads=NoThreads())
    with pytest.raises(NotStarted):
        loop.start()
    assert loop.end()


def test_a_loop_that_ends_by_itself_has_failed() -> None:
    async def open(loop: asyncio.AbstractEventLoop) -> None:
        loop.call_soon(loop.call_soon, loop.stop)

    loop = Loop("l", open)
    loop.start()
    assert loop.join(soon())
    assert loop.health() == Health(
        "l", State.FAILED, "RuntimeError: the event loop ended by itself"
    )


def test_tasks_that_are_left_are_cancelled_with_the_loop() -> None:
    seen = list[str]()

    async def work() -> None:
        try:
            await asyncio.sleep(LIMIT_S)
        finally:
            seen.append("cancelled")

    async def open(loop: asyncio.AbstractEventLoop) -> "asyncio.Task[None]":
        task = loop.create_task(work())
        await asyncio.sleep(0)
        return task

    loop = Loop("l", open)
    loop.start()
    assert loop.end()
    assert seen == ["cancelled"]


# -- pool


def test_a_pool_runs_calls_and_passes_on_errors() -> None:
    pool = Pool("p", 3)
    pool.start()
    assert [pool.submit(divmod, 7, n).result(LIMIT_S) for n in (1, 2, 3)] == [
        (7, 0),
        (3, 1),
        (2, 1),
    ]
    with pytest.raises(ZeroDivisionError):
        pool.submit(divmod, 1, 0).result(LIMIT_S)
    with pytest.raises(SystemExit):
        pool.submit(exit, 3).result(LIMIT_S)
    assert pool.submit(divmod, 9, 3).result(LIMIT_S) == (3, 0)
    assert pool.health().state is State.RUNNING
    pool.shutdown()
    assert pool.health().state is State.ENDED
    with pytest.raises(RuntimeError, match="p has been stopped"):
        pool.submit(divmod, 1, 1)


def test_a_thread_of_a_pool_that_fails_takes_calls_again() -> None:
    pool = Pool("p", 1)
    known, errors = pool._calls.get, [MemoryError("once"), KeyError("twice")]

    class Failing:
        put = pool._calls.put

        def get(self) -> Any:
            if errors:
                raise errors.pop()
            return known()

    pool._calls = Failing()  # type: ignore[assignment]
    pool.start()
    assert pool.submit(divmod, 7, 2).result(LIMIT_S) == (3, 1)
    assert pool.health().state is State.DEGRADED
    pool.shutdown()


def test_calls_that_were_submitted_before_the_stop_are_run() -> None:
    for seed in range(20):
        pool, rng = Pool("p", 2), random.Random(seed)
        pool.start()
        futures = [pool.submit(int, str(n)) for n in range(rng.randrange(20))]
        pool.request_stop()
        pool.request_stop()
        assert pool.join(soon())
        assert [future.result(0) for future in futures] == list(range(len(futures)))


@pytest.mark.parametrize("count", range(3))
def test_a_pool_starts_all_threads_or_none(count: int) -> None:
    pool = Pool("p", 3, threads=NoThreads(count))
    with pytest.raises(NotStarted):
        pool.start()
    assert pool.join(soon())
    assert pool.health().state is State.FAILED


# -- tasks


def test_a_task_that_is_kept_runs_again_and_its_state_is_known() -> None:
    async def scenario() -> None:
        tasks = Tasks("t")
        calls = list[int]()
        works = asyncio.Event()

        async def run() -> None:
            calls.append(1)
            if len(calls) < 3:
                raise OSError("away")
            works.set()
            await asyncio.sleep(LIMIT_S)

        tasks.keep("accepting", run, Backoff(0.0, 0.0))
        await asyncio.wait_for(works.wait(), LIMIT_S)
        assert tasks.health() == [Health("accepting", State.DEGRADED, "OSError: away")]
        await tasks.cancel()
        assert tasks.health() == []

    asyncio.run(scenario())


def test_a_task_that_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async def fail() -> None:
            raise ValueError("broken")

        await asyncio.wait({Tasks("the test").spawn(fail())})
        await asyncio.sleep(0)

    asyncio.run(scenario())
    assert "a task of the test failed" in caplog.text
    assert "broken" in caplog.text


# -- the stack


class Fake:
    """A component that says what is done with it."""

    vital = False

    def __init__(self, name: str, seen: list[str], fails_in: str = "", ends: bool = True) -> None:
        self.name = name
        self.seen = seen
        self.fails_in = fails_in
        self.ends = ends
        self.until_s = 0.0

    def _do(self, what: str) -> None:
        self.seen.append(f"{what} {self.name}")
        if self.fails_in == what:
            raise OSError(f"{what} {self.name}")

    def start(self, limit_s: float) -> None:
        self._do("start")

    def request_stop(self) -> None:
        self._do("stop")

    def join(self, until_s: float) -> bool:
        self.until_s = until_s
        self._do("join")
        return self.ends

    def health(self) -> Health:
        return Health(self.name, State.RUNNING)


@pytest.mark.parametrize("fails_in", ["stop", "join"])
@pytest.mark.parametrize("broken", range(4))
def test_close_goes_on_after_an_error_and_raises_it_at_the_end(broken: int, fails_in: str) -> None:
    seen = list[str]()
    components = Components("the test")
    parts = [Fake(str(n), seen, fails_in if n == broken else "") for n in range(4)]
    for part in parts:
        components.enter(part)
    components.callback("lock", lambda: seen.append("unlock"))
    seen.clear()
    with pytest.raises(ExceptionGroup) as raised:
        components.close(soon())
    assert [str(error) for error in raised.value.exceptions] == [f"{fails_in} {broken}"]
    assert seen[0] == "unlock"
    assert [line for line in seen if line.startswith("stop")] == [f"stop {n}" for n in "3210"]
    assert components.close(soon()) == []
    assert components.health() == []


@pytest.mark.parametrize("broken", range(4))
def test_what_started_before_an_error_is_closed(broken: int) -> None:
    seen = list[str]()
    components = Components("the test")
    for n in range(broken):
        components.enter(Fake(str(n), seen))
    with pytest.raises(OSError, match=f"start {broken}"):
        components.enter(Fake(str(broken), seen, "start"))
    assert [line for line in seen if line.startswith("join")] == [
        f"join {n}" for n in reversed(range(broken))
    ]


def test_an_error_of_closing_does_not_hide_the_first() -> None:
    seen = list[str]()
    components = Components("the test")
    components.enter(Fake("a", seen, "join"))
    with pytest.raises(OSError, match="start b"):
        components.enter(Fake("b", seen, "start"))
    with pytest.raises(ShuttingDown):
        components.enter(Fake("c", seen))


def test_each_component_has_the_time_that_the_others_leave(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen = list[str]()
    components = Components("the test")
    parts = [Fake(str(n), seen, ends=n != 1) for n in range(3)]
    for part in parts:
        components.enter(part)
    until_s = soon()
    assert components.close(until_s) == ["1"]
    assert [round(until_s - part.until_s, 3) for part in parts] == [0.0, 0.2, 0.4]
    assert "not ended in time: 1" in caplog.text
    parts[1].ends = True
    seen.clear()
    assert components.close(until_s) == []
    assert seen == ["stop 1", "join 1"]


def test_health_is_of_all_that_was_entered_and_watched() -> None:
    components = Components("the test")
    components.enter(Fake("a", []))
    components.callback("file", lambda: None)
    components.watch(lambda: [Health("far", State.FAILED, "why")])
    assert components.health() == [Health("a", State.RUNNING), Health("far", State.FAILED, "why")]


def test_close_in_a_child_of_fork_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[str]()
    components = Components("the test")
    components.callback("lock", lambda: seen.append("unlock"))
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: -1)
        assert components.close() == []
    assert seen == []
    components.close()
    assert seen == ["unlock"]


def test_a_component_may_close_its_owner() -> None:
    components, found = Components("the test"), list[list[str]]()
    worker = Worker("w", lambda stop: found.append(components.close()), once=True)
    components.enter(worker)
    assert worker.join(soon())
    assert found == [["w"]]
    assert components.close(soon()) == []


# -- time and descriptors


def test_too_few_descriptors_are_an_error_that_names_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    require_descriptors(8, "gRPC")
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(NotStarted, match=r"gRPC needs 1000000000 file descriptors.*ulimit -n"):
        _with_few_descriptors(lambda: require_descriptors(1_000_000_000, "gRPC"))
    assert len(os.listdir("/proc/self/fd")) == before


def _with_few_descriptors(call: Callable[[], None]) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 20, hard))
    try:
        call()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
