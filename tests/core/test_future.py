"""Futures: their content at each time, compared with a dictionary; waiting, cancelling, and futures
that outlive the engine."""

import asyncio
import gc
import random
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from clipper_core.engine.engine import Engine
from clipper_core.engine.model import Model, predict_all
from clipper_core.results.future import Awaiting, Future
from clipper_core.runtime.status import Status, StatusError

World = Any  # tests/core/conftest.py


def test_futures_come_from_predictions_only() -> None:
    with pytest.raises(TypeError, match="predict"):
        Future()


def test_one_prediction(world: World) -> None:
    model = world.model(cached=False)
    container = world.container(model)
    future = model.predict(2.5)
    assert (future.done(), future.running(), future.status(), len(future)) == (
        False,
        False,
        Status.PENDING,
        1,
    )
    assert (future.output(), future.detail(), future.latency_us, repr(future)) == (
        None,
        "",
        0,
        "<Future 1 pending>",
    )
    world.step(30)
    assert container.read()[0][1].tolist() == [2.5]
    world.now_us += 12
    container.reply()
    world.step()
    assert (future.done(), future.running(), future.status(), future.cancelled()) == (
        True,
        False,
        Status.OK,
        False,
    )
    assert (future.result(), future.output(), future.latency_us, future.exception()) == (
        2.5,
        2.5,
        42,
        None,
    )
    assert repr(future) == "<Future 1 OK>"


def test_a_task_without_an_answer_ends_at_its_deadline_and_not_before(world: World) -> None:
    model = world.model()
    futures = {
        slo_ms: model.predict(float(slo_ms), slo_ms=slo_ms)
        for slo_ms in (0.001, 0.5, 1, 20, 1000, 86_400_000)
    }
    born = world.now_us
    for _ in range(200):
        world.step(150)
        for slo_ms, future in futures.items():
            late = world.now_us - born - slo_ms * 1000
            if late < 0:
                assert not future.done()
            elif late >= 64:
                assert future.status() == Status.NO_REPLICA


def test_time_that_is_over_before_the_loop_sees_the_task(world: World) -> None:
    model = world.model()
    world.container(model)
    future = model.predict(1.0, slo_ms=1)
    world.step(10_000)
    assert future.status() == Status.DEADLINE
    assert world.containers[0].read() == []


class Query:
    """The reference model of a future: how each task must have ended."""

    def __init__(self, future: Future, inputs: list[float]) -> None:
        self.future, self.inputs = future, inputs
        self.ended: dict[int, str] = {}
        self.cancelled = False

    def end(self, i: int, how: str) -> bool:
        return self.ended.setdefault(i, how) == how

    def check(self) -> None:
        assert self.future.done() == (len(self.ended) == len(self.inputs))
        for i, x in enumerate(self.inputs):
            status = self.future.status(i).name
            assert status == self.ended.get(i, "PENDING")
            assert self.future.output(i) == (2 * x if status == "OK" else None)
            assert self.future.detail(i) == ("no luck" if status == "MODEL_ERROR" else "")
        if not self.future.done():
            with pytest.raises(TimeoutError):
                self.future.result(0)
        elif self.cancelled:
            with pytest.raises(CancelledError):
                self.future.result(0)
        elif all(how == "OK" for how in self.ended.values()):
            assert np.array_equal(
                np.atleast_1d(self.future.result(0)), [2 * x for x in self.inputs]
            )
        else:
            first = next(self.ended[i] for i in range(len(self.inputs)) if self.ended[i] != "OK")
            with pytest.raises(CancelledError if first == "CANCELLED" else StatusError):
                self.future.result(0)


class Game:
    """Random queries of one to many tasks with random ends; blocks of every size are allocated and
    freed."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.rng = world, random.Random(seed)
        self.model = world.model(cached=False, slo_us=10**9)
        self.container = world.container(self.model, size_max=7)
        self.queries: list[Query] = []
        self.owners: dict[float, tuple[Query, int]] = {}
        self.serial = 0

    def submit(self) -> None:
        n = self.rng.choice([1, 1, 1, 2, 5, 64, 65, 256, 300])
        inputs = [float(self.serial + i) for i in range(n)]
        self.serial += n
        future = (
            self.model.predict(inputs[0])
            if n == 1
            else self.model.predict_many(np.array(inputs), slo_ms=10**6)
        )
        query = Query(future, inputs)
        self.owners.update({x: (query, i) for i, x in enumerate(inputs)})
        self.queries.append(query)

    def answer(self) -> None:
        self.world.step(1)
        if not self.container.read():
            return
        rows = self.container.inbox[0][1]
        fails = self.rng.random() < 0.2
        if fails:
            self.container.fail("no luck")
        else:
            self.container.reply(lambda rows: 2 * rows)
        self.world.step()
        for x in rows.tolist():
            query, i = self.owners[x]
            query.ended.setdefault(i, "MODEL_ERROR" if fails else "OK")

    def cancel(self) -> None:
        if self.queries:
            query = self.rng.choice(self.queries)
            query.cancelled |= len(query.ended) < len(query.inputs)
            assert query.future.cancel() is query.cancelled is query.future.cancelled()
            for i in range(len(query.inputs)):
                query.ended.setdefault(i, "CANCELLED")

    def forget(self) -> None:
        if self.queries:
            query = self.queries.pop(self.rng.randrange(len(self.queries)))
            query.check()
            query.future = None  # type: ignore[assignment]

    def round(self) -> None:
        self.rng.choice(
            [self.submit, self.answer, self.answer, self.answer, self.cancel, self.forget]
        )()
        for query in self.rng.sample(self.queries, min(3, len(self.queries))):
            query.check()


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_ends_as_the_twin(world: World, seed: int) -> None:
    game = Game(world, seed)
    for _ in range(700):
        game.round()
    while game.container.read():
        game.answer()
    for query in game.queries:
        query.check()
    assert world.engine.completion.issued == game.serial


def test_ids_are_never_used_twice(world: World) -> None:
    model = world.model()
    world.container(model)
    seen: set[int] = set()
    for i in range(3000):
        n = (1, 3, 100)[i % 3]
        future = model.predict(float(i % 50)) if n == 1 else model.predict_many(np.arange(float(n)))
        ids = set(range(future.id, future.id + n))
        assert not ids & seen
        seen |= ids
        if i % 10 == 0:
            world.serve()


def test_many_is_one_array_in_order_or_the_first_error(world: World) -> None:
    model = world.model(cached=False)
    container = world.container(model, size_max=1000)
    future = model.predict_many(np.arange(100.0))
    assert (len(future), repr(future)) == (100, "<Future 1 pending>")
    world.serve()
    assert future.result(0).tolist() == list(range(100))
    assert (future.statuses().tolist(), repr(future)) == ([1] * 100, "<Future 1 done, 100 tasks>")
    with pytest.raises(IndexError, match="task 100 of a query with 100"):
        future.output(100)
    failing = model.predict_many(np.arange(4.0))
    world.step()
    container.read()
    container.reply(status=[0, 0, 1, 0], text="row two")
    assert [failing.output(i) for i in range(4)] == [0, 1, None, 3]
    assert failing.detail(2) == "row two"
    with pytest.raises(StatusError, match="row two"):
        failing.result(0)


def test_an_ensembles_finisher_runs_once(world: World) -> None:
    models = (world.model(), world.model(), world.model())
    for model in models:
        world.container(model)
    runs = []

    def finish(future: Future) -> float:
        runs.append(future)
        assert future.extra == "extra"
        return float(sum(future.output(i) for i in range(len(future))))

    future = predict_all(models, 3.0, finish=finish, extra="extra")
    assert not future.done()
    world.serve()
    assert [future.result(), future.result(0)] == [9.0, 9.0]
    assert len(runs) == 1
    again = predict_all(models, 3.0, finish=finish, extra="extra")
    assert again.done()
    assert again.result(0) == 9.0, "all three were in the cache"


def test_finish_runs_once_whoever_reads_and_again_after_an_error(world: World) -> None:
    """Readers on several threads get one outcome; those that come while it is made wait for it."""
    model = world.model()
    world.container(model)
    readers, laps = 4, 200
    for lap in range(laps):
        runs: list[int] = []
        begin = threading.Barrier(readers)

        def finish(future: Future, runs: list[int] = runs) -> object:
            runs.append(1)
            time.sleep(0)  # lets another thread run, as a policy that waits does
            return object()

        future = predict_all((model,), float(lap), finish=finish)
        world.serve()

        def read(future: Future = future, begin: threading.Barrier = begin) -> object:
            begin.wait()
            return future.result(0)

        with ThreadPoolExecutor(readers) as pool:
            found = {*pool.map(lambda _, read=read: read(), range(readers))}
        assert (len(found), len(runs)) == (1, 1)

    attempts = []

    def fail_once(future: Future) -> int:
        attempts.append(1)
        if len(attempts) == 1:
            raise ValueError("the first time")
        return 7

    future = predict_all((model,), -1.0, finish=fail_once)
    world.serve()
    with pytest.raises(ValueError, match="the first time"):
        future.result(0)
    assert [future.result(0), future.result(0), len(attempts)] == [7, 7, 2]


def test_a_finish_that_asks_for_its_own_result_is_refused(world: World) -> None:
    model = world.model()
    world.container(model)
    future = predict_all((model,), 1.0, finish=lambda future: future.result(0))
    world.serve()
    with pytest.raises(RuntimeError, match="by the function that makes it"):
        future.result(0)


@pytest.mark.parametrize("timeout", [0, -1, 0.001])
def test_waiting_is_bounded(world: World, timeout: float) -> None:
    future = world.model().predict(1.0)
    assert future.wait(timeout) is False
    for call in (future.result, future.exception):
        with pytest.raises(TimeoutError, match=f"within {timeout} s"):
            call(timeout)


@pytest.mark.parametrize("timeout", [None, 60, float("inf"), 1e300, threading.TIMEOUT_MAX])
def test_a_waiter_is_woken(world: World, timeout: float | None) -> None:
    model = world.model()
    world.container(model)
    future = model.predict(1.0)
    waiting = threading.Thread(target=future.result, args=(timeout,))
    waiting.start()
    world.serve()
    waiting.join()
    assert future.result() == 1.0


def test_cancel_wakes_a_waiter_and_ends_only_what_is_open(world: World) -> None:
    model = world.model(cached=False)
    container = world.container(model, size_max=2)
    done, future = model.predict(1.0), model.predict_many(np.arange(3.0))
    world.step()
    container.read()
    container.reply()
    world.step()
    assert done.done()
    assert not done.cancel()
    waiting = threading.Thread(target=future.wait)
    waiting.start()
    assert future.cancel()
    waiting.join()
    assert future.cancel()
    assert future.statuses().tolist() == [1, 9, 9]
    with pytest.raises(CancelledError):
        future.result()
    with pytest.raises(CancelledError):
        future.exception()


def test_a_cancelled_prediction_still_fills_the_cache(world: World) -> None:
    model = world.model()
    container = world.container(model)
    future = model.predict(5.0)
    world.step()
    container.read()
    future.cancel()
    container.reply()
    world.step()
    assert future.cancelled()
    assert model.predict(5.0).result(0) == 5.0


@pytest.mark.parametrize("end", ["finish", "forget"])
def test_a_future_outlives_its_engine(end: str) -> None:
    """The future has rows on the heap, in the ring, joined and in flight, and an answer that is a
    blob."""
    engine = Engine(manual_clock=True, cache_bytes_max=1 << 16)
    texts, numbers = Model(engine, "t:1", 1, "str"), Model(engine, "n:1", 2, "f64", (3,))
    numbers.put(np.ones(3), np.arange(5))
    futures = [
        texts.predict("x" * 1000),
        texts.predict("x" * 1000),
        texts.predict("y"),
        numbers.predict(np.zeros(3)),
        numbers.predict_many(np.zeros((400, 3))),
    ]
    hit = numbers.predict(np.ones(3))
    engine.step(1)
    completion = engine.completion
    if end == "finish":
        engine.finish()
    del engine, texts, numbers
    gc.collect()
    for future in futures:
        with pytest.raises(StatusError, match=r"CLOSED|shutting down"):
            future.result(60)
    assert completion.issued == completion.answered == 404
    assert hit.result().tolist() == list(range(5))


def test_a_waiter_is_notified_that_the_engine_is_dead(world: World) -> None:
    future = world.model().predict(1.0)
    raised: list[BaseException | None] = []
    waiting = threading.Thread(target=lambda: raised.append(future_error(future)))
    waiting.start()
    world.engine.kill(Status.FORKED)
    waiting.join()
    assert isinstance(raised[0], StatusError)
    assert raised[0].status == Status.FORKED
    assert world.engine.models == []
    assert world.model().predict(2.0).status() == Status.FORKED


def future_error(future: Future) -> BaseException | None:
    try:
        future.result()
    except StatusError as error:
        return error
    return None


WAIT_FOR_EVER = """
import _thread, os, signal, threading
from clipper_core.engine.engine import Engine
from clipper_core.engine.model import Model
model = Model(Engine(manual_clock=True), "m:1", 1, "f64")
future = model.predict(1.0)
signal.signal(signal.SIGALRM, signal.default_int_handler)
signal.setitimer(signal.ITIMER_REAL, 0.05)
try:
    future.result()
except KeyboardInterrupt:
    print("heard")
"""


def test_a_signal_interrupts_a_waiter() -> None:
    assert hasattr(signal, "SIGALRM")
    run = subprocess.run(
        [sys.executable, "-c", WAIT_FOR_EVER],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (run.stdout, run.stderr) == ("heard\n", "")


@pytest.fixture
def answered(world: World) -> Callable[[Any], Future]:
    """Return a done future, whose model returns its input."""
    model = world.model(cached=False)
    container = world.container(model)

    def ask(x: float) -> Future:
        future = model.predict(x)
        world.step()
        container.reply_all()
        return future

    return ask


async def awaits(future: Any) -> Any:
    return await future


@types.coroutine
def yields_from(future: Any) -> Any:
    return (yield from future.__await__())


def run_to_the_end(coroutine: Any) -> Any:
    with pytest.raises(StopIteration) as end:
        coroutine.send(None)
    return end.value.value


@pytest.mark.parametrize("how", [awaits, yields_from])
def test_await_of_a_finished_one_never_suspends(
    answered: Callable[[Any], Future], world: World, how: Any
) -> None:
    future = answered(2.5)
    assert [run_to_the_end(how(future)) for _ in range(3)] == [2.5] * 3
    unanswered = world.model().predict(1.0, slo_ms=1)
    world.pass_deadline(2000)
    for _ in range(2):
        with pytest.raises(StatusError, match="no container of the model"):
            how(unanswered).send(None)


@pytest.mark.parametrize("value", [(1, 2), None, StopIteration(3)])
def test_await_gives_any_value_as_it_is(world: World, value: object) -> None:
    """A tuple is one value, and an exception that is a result is not raised."""
    future = predict_all((world.model(),), 1.0, slo_us=1, finish=lambda _: value)
    world.pass_deadline(2000)
    assert run_to_the_end(awaits(future)) is value
    assert future.__await__().__iter__() is not future
    with pytest.raises(StopIteration) as end:
        future.__await__().send(None)
    assert end.value.value is value


def test_await_under_a_tracer(answered: Callable[[Any], Future]) -> None:
    """A traced coroutine is driven by another slot of the type than one that is not."""
    future, before = answered(2.5), sys.gettrace()
    sys.settrace(lambda *_: None)
    try:
        assert run_to_the_end(awaits(future)) == 2.5
    finally:
        sys.settrace(before)


class Suspended:
    """A fake of what the asyncio interface returns to await, which only the test reads."""

    _asyncio_future_blocking = False


def test_a_suspended_await(world: World) -> None:
    """An await yields what its loop made, continues when the future is done, and keeps it alive."""
    model = world.model(cached=False)
    world.container(model)
    lengths: list[Any] = []
    world.engine.completion.on_await = lambda future: lengths.append(len(future)) or Suspended()
    coroutine = awaits(model.predict(2.5))
    gc.collect()
    for n in (1, 2):  # resumed too early, it waits again
        assert coroutine.send(None)._asyncio_future_blocking is True
        assert lengths == [1] * n
    world.serve()
    gc.collect()
    assert run_to_the_end(coroutine) == 2.5


class GiveUp(Exception):
    pass


@pytest.mark.parametrize("error", [GiveUp, GiveUp("so"), asyncio.CancelledError])
def test_an_error_thrown_into_an_await_gives_the_query_up(world: World, error: Any) -> None:
    world.engine.completion.on_await = lambda _: Suspended()
    future = world.model().predict(1.0)
    coroutine = awaits(future)
    coroutine.send(None)
    with pytest.raises(error if isinstance(error, type) else GiveUp):
        coroutine.throw(error)
    assert future.cancelled()


def test_closing(world: World) -> None:
    world.engine.completion.on_await = lambda _: Suspended()
    for begin in (False, True):
        future = world.model().predict(1.0)
        coroutine = awaits(future)
        if begin:
            coroutine.send(None)
        else:
            future.__await__().close()
        coroutine.close()
        assert future.cancelled() is begin
    with pytest.raises(TypeError, match="await"):
        Awaiting()


def test_awaiting_and_callbacks_need_a_face(world: World) -> None:
    future = world.model().predict(1.0)

    async def wait() -> None:
        await future

    with pytest.raises(RuntimeError, match="no asyncio interface"):
        asyncio.run(wait())
    with pytest.raises(RuntimeError, match="no callback thread"):
        future.add_done_callback(print)
    future.cancel()
    called: list[Future] = []
    future.add_done_callback(called.append)
    assert called == [future]


def test_two_waiters_never_skip_a_task_between_them(world: World) -> None:
    """Both read the tasks without the GIL; the count of the slower one must not replace that of the
    faster one."""
    model = world.model(cached=False)
    container = world.container(model, size_max=1)
    early: list[int] = []

    def wait(future: Future) -> None:
        future.wait()
        early.append(int((future.statuses() == 0).sum()))

    for _ in range(60):
        future = model.predict_many(np.arange(16.0))
        waiters = [threading.Thread(target=wait, args=(future,)) for _ in range(3)]
        for waiter in waiters:
            waiter.start()
        container.reply_all() if world.step() else None
        for waiter in waiters:
            waiter.join()
    assert set(early) == {0}


def test_statuses_fixture_reads_names(world: World, statuses: Callable[..., list[str]]) -> None:
    assert statuses([world.model().predict(1.0)]) == ["PENDING"]
