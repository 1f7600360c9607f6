"""User-defined deciders that run: their possible faults, and which queries are affected."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from clipper.selection import AnswerFrom, View, Wait
from clipper.selection.user_defined import UserCodeFailures
from clipper.serving.query.decider_threads import (
    LOST_MAX,
    OWN_STEP,
    THREADS_MAX,
    DeciderThreads,
    Listener,
    view_of,
)
from clipper.types import VersionedModel
from clipper_core.runtime.status import Status

A, B, C = (VersionedModel(name, 1) for name in "abc")
PATIENCE_S = 30.0


class FakeFuture:
    """A fake of a query's future: which models have arrived, and what was decided."""

    def __init__(self) -> None:
        self.statuses = [Status.PENDING] * 3
        self.outputs: list[Any] = [None] * 3
        self.ruled: tuple[int, int] | None = None
        self.decided = threading.Event()
        self.id = 7
        self.callbacks: list[Callable[[Any], None]] = []

    def done(self) -> bool:
        return self.decided.is_set()

    def status(self, i: int) -> Status:
        return self.statuses[i]

    def output(self, i: int) -> Any:
        return self.outputs[i]

    def confidence(self, i: int) -> None:
        return None

    def prediction(self, i: int) -> tuple[Any, None]:
        return self.outputs[i], None

    def on_vote(self, fn: Callable[[Any], None]) -> None:
        self.callbacks.append(fn)

    def rule(self, step: int, used: int, elapsed_us: int) -> bool:
        if self.done():
            return False
        self.ruled = (step, used)
        self.decided.set()
        return True

    def arrives(self, i: int, output: Any, status: Status = Status.OK) -> None:
        self.statuses[i], self.outputs[i] = status, output
        for fn in self.callbacks:
            fn(self)


@dataclass
class Speculating:
    """A fake of the members of an ensemble call that decider threads read."""

    decide: Callable[[View], Any]
    slo_us: int = 10_000_000
    models: tuple[VersionedModel, ...] = (A, B, C)
    started_s: float = field(default_factory=time.monotonic)
    failures: UserCodeFailures = field(default_factory=lambda: UserCodeFailures("decider 'd'"))

    @property
    def speculation(self) -> "Speculating":
        return self

    def own(self, state: Any, view: View) -> Any:
        return self.decide(view)


@pytest.fixture
def decider_threads() -> Iterator[DeciderThreads]:
    made = DeciderThreads()
    yield made
    made.close()


def listen(
    decider_threads: DeciderThreads,
    decide: Callable[[View], Any],
    slo_us: int = 10_000_000,
    name: str = "decider 'd'",
) -> tuple[FakeFuture, Speculating]:
    future, call = FakeFuture(), Speculating(decide, slo_us, failures=UserCodeFailures(name))
    decider_threads.listen(Listener(future, call, None))  # type: ignore[arg-type]
    return future, call


def two(view: View) -> Wait | AnswerFrom:
    return AnswerFrom(tuple(view.arrived)) if len(view.arrived) >= 2 else Wait()


def test_it_is_called_after_each_arrival(decider_threads: DeciderThreads) -> None:
    future, _ = listen(decider_threads, two)
    future.arrives(2, 7)
    future.arrives(0, 8)
    assert future.decided.wait(PATIENCE_S)
    assert future.ruled == (OWN_STEP, 0b101)


def test_a_thread_that_cannot_start_is_not_counted(
    decider_threads: DeciderThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, left = threading.Thread.start, [3]

    def start(self: threading.Thread) -> None:
        if self.name == "clipper-deciding" and left[0]:
            left[0] -= 1
            raise RuntimeError("can't start new thread")
        known(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    for _ in range(3):  # their default answers at the deadline, as without a decider's ruling
        listen(decider_threads, two)
    future, _ = listen(decider_threads, two)
    future.arrives(2, 7)
    future.arrives(0, 8)
    assert future.decided.wait(PATIENCE_S)


def test_the_view_of_a_decider() -> None:
    future, call = FakeFuture(), Speculating(two)
    future.statuses = [Status.OK, Status.MODEL_ERROR, Status.PENDING]
    future.outputs[0] = 7
    view = view_of(future, call, call.started_s + 0.25)  # type: ignore[arg-type]
    assert (view.models, list(view.arrived), view.failed, view.outstanding) == (
        (A, B, C),
        [A],
        (B,),
        (C,),
    )
    assert (view.arrived[A].output, view.elapsed_ms, view.slo_ms) == (7, pytest.approx(250), 10_000)
    future.outputs[0] = float("nan")
    assert view_of(future, call, 0.0).failed == (A, B), "no answer is made of it"  # type: ignore[arg-type]


def test_it_is_called_at_the_time_it_returned(decider_threads: DeciderThreads) -> None:
    seen: list[float] = []

    def patient(view: View) -> Wait | AnswerFrom:
        seen.append(view.elapsed_ms)
        return AnswerFrom(tuple(view.arrived)) if view.elapsed_ms >= 30 else Wait(until_ms=30)

    future, _ = listen(decider_threads, patient)
    future.arrives(1, 7)
    assert future.decided.wait(PATIENCE_S)
    assert future.ruled == (OWN_STEP, 0b010)
    assert all(elapsed < 30 for elapsed in seen[:-1])


@pytest.mark.parametrize(
    "returned", ["yes", None, AnswerFrom(()), AnswerFrom((C,)), Wait(float("nan")), KeyError("x")]
)
def test_a_decider_that_returns_nonsense_is_ignored(
    decider_threads: DeciderThreads, returned: Any, caplog: pytest.LogCaptureFixture
) -> None:
    called = threading.Event()
    count = []

    def wrong(view: View) -> Any:
        if not view.arrived:
            return Wait()
        count.append(1)
        called.set()
        if isinstance(returned, Exception):
            raise returned
        return returned

    with caplog.at_level(logging.ERROR):
        future, _ = listen(decider_threads, wrong)
        future.arrives(0, 7)
        assert called.wait(PATIENCE_S)
        other, _ = listen(decider_threads, two)
        other.arrives(0, 7)
        other.arrives(1, 7)
        assert other.decided.wait(PATIENCE_S)
        while "decide failed (1 times so far)" not in caplog.text:  # on another thread
            threading.Event().wait(0.001)
        future.arrives(1, 7)
    assert future.ruled is None
    assert count == [1], "it is not asked about this query again"


class Hanging:
    """A decider that returns once it is released."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.entered = threading.Semaphore(0)

    def decide(self, view: View) -> Wait:
        self.entered.release()
        self.release.wait(60)
        return Wait()


def test_a_decider_that_hangs_does_not_delay_others(
    decider_threads: DeciderThreads, caplog: pytest.LogCaptureFixture
) -> None:
    hanging = Hanging()
    try:
        for _ in range(THREADS_MAX):
            listen(decider_threads, hanging.decide, slo_us=1000)
            assert hanging.entered.acquire(timeout=PATIENCE_S)
        # their queries' time
        while time.monotonic() < max(decider_threads.pool("decider 'd'")._at_work.values()):
            threading.Event().wait(0.001)
        with caplog.at_level(logging.ERROR):
            future, _ = listen(decider_threads, two)
            future.arrives(0, 7)
            future.arrives(1, 7)
            assert future.decided.wait(PATIENCE_S)
        assert "has not returned by its query's deadline; another thread continues" in caplog.text
    finally:
        hanging.release.set()


def test_one_that_hangs_keeps_no_other_decider_waiting(decider_threads: DeciderThreads) -> None:
    """Many of its queries hang for long: another decider is called at once, and so is the one that
    replaces it."""
    hanging = Hanging()
    try:
        for _ in range(THREADS_MAX + LOST_MAX + 8):
            listen(decider_threads, hanging.decide, slo_us=3_600_000_000, name="decider 'hangs'")
        for _ in range(THREADS_MAX):
            assert hanging.entered.acquire(timeout=PATIENCE_S)
        for name in ("decider 'other'", "decider 'new'"):
            future, _ = listen(decider_threads, two, name=name)
            future.arrives(0, 7)
            future.arrives(1, 7)
            assert future.decided.wait(PATIENCE_S), (
                "within its time, not that of the queries that hang"
            )
    finally:
        hanging.release.set()


def test_a_decider_that_loses_its_threads_is_not_called_again(
    decider_threads: DeciderThreads,
) -> None:
    hanging = Hanging()
    pool = decider_threads.pool("decider 'd'")
    try:
        for lost in range(LOST_MAX):
            listen(decider_threads, hanging.decide, slo_us=1)
            assert hanging.entered.acquire(timeout=PATIENCE_S)
            while time.monotonic() < max(pool._at_work.values()):
                threading.Event().wait(0.001)
            assert pool.threads == lost + 1
        called, _ = listen(decider_threads, two)
        assert pool.threads == LOST_MAX, "no thread more"
        assert not called.decided.is_set()
        other, _ = listen(
            decider_threads, lambda view: AnswerFrom(tuple(view.arrived)), name="decider 'new'"
        )
        other.arrives(0, 7)
        assert other.decided.wait(PATIENCE_S)
    finally:
        hanging.release.set()


def test_those_that_are_lost_are_counted_until_they_return(
    decider_threads: DeciderThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, entered = threading.Event(), threading.Event()
    now_s = time.monotonic() + 1.0  # after the query's time: it has one millisecond then
    monkeypatch.setattr(
        "clipper.serving.query.decider_threads.time", SimpleNamespace(monotonic=lambda: now_s)
    )

    def hangs(view: View) -> Wait:
        entered.set()
        release.wait(60)
        return Wait()

    listen(decider_threads, hangs, slo_us=1)
    assert entered.wait(PATIENCE_S)
    pool = decider_threads.pool("decider 'd'")
    now_s += 0.002
    listen(decider_threads, two)
    assert pool._lost == 1
    release.set()
    while pool._lost:
        threading.Event().wait(0.001)


def test_no_decider_is_called_after_close(decider_threads: DeciderThreads) -> None:
    decider_threads.close()
    future, _ = listen(decider_threads, lambda view: AnswerFrom(tuple(view.arrived)))
    future.arrives(0, 7)
    assert future.ruled is None
    assert not decider_threads.pool("decider 'd'").threads
