"""Event loops, callbacks and the end of an engine that is stepped by hand: nothing here depends on
time."""

import asyncio
import threading

import numpy as np
import pytest

import clipper
from clipper.errors import NoReplica, ShuttingDown
from clipper.serving.query.dispatch import Dispatch
from clipper_core.engine.engine import Engine
from clipper_core.engine.model import Model
from tests.memory_container import wait_until

ROW = np.arange(4.0)


@pytest.fixture
def engine():
    return Engine(manual_clock=True, cache_bytes_max=1 << 20, tasks_max=1024)


@pytest.fixture
def dispatch(engine):
    """Yield a Dispatch whose loop thread does not run: the test calls it and sets the time."""
    made = Dispatch(engine)
    yield made
    made.stop()


@pytest.fixture
def model(engine, dispatch):
    return Model(engine, "m:1", 1, "f64", (4,), slo_us=1000)


def expire(engine):
    engine.step(engine.now_us() + 1)
    engine.step(engine.now_us() + 1_000_000)


def test_an_await_ends_with_its_query(engine, model):
    async def both():
        futures = [model.predict(ROW + i) for i in range(10)]
        waiting = asyncio.gather(*futures, return_exceptions=True)
        await asyncio.sleep(0)
        expire(engine)
        return await waiting

    assert all(isinstance(error, NoReplica) for error in asyncio.run(both()))


def test_an_await_that_is_cancelled_gives_the_query_up(engine, model):
    async def cancel():
        future = model.predict(ROW)

        async def wait():
            return await future

        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return future

    assert asyncio.run(cancel()).cancelled()


def test_callbacks_run_once_each_on_one_thread(engine, model):
    done = []
    futures = [model.predict(ROW + i) for i in range(10)]
    for future in futures:
        future.add_done_callback(
            lambda future: done.append((future, threading.current_thread().name))
        )
    assert done == []
    expire(engine)
    wait_until(lambda: len(done) == 10)
    assert {future for future, _ in done} == set(futures)
    assert {name for _, name in done} == {"clipper-callbacks"}
    futures[0].add_done_callback(lambda future: done.append((future, "now")))
    assert done[-1] == (futures[0], "now")


def test_a_callback_that_raises_is_logged(engine, model, caplog):
    done = []
    before, raising, after = (model.predict(ROW + i) for i in range(3))
    before.add_done_callback(done.append)
    raising.add_done_callback(lambda _: 1 / 0)
    after.add_done_callback(done.append)
    expire(engine)  # all three at once; the order of their callbacks is not defined
    wait_until(lambda: "ZeroDivisionError" in caplog.text and len(done) == 2)
    assert set(done) == {before, after}
    caplog.clear()
    raising.add_done_callback(lambda _: 1 / 0)  # done already: on this thread, and no different
    assert "ZeroDivisionError" in caplog.text


def test_as_completed(engine, model):
    futures = [model.predict(ROW + i) for i in range(5)]
    with pytest.raises(TimeoutError, match=r"not all of 5 futures were done within 0\.01 s"):
        list(clipper.as_completed(futures, timeout=0.01))
    expire(engine)
    assert set(clipper.as_completed(futures, timeout=20)) == set(futures)
    assert list(clipper.as_completed([])) == []


def test_stop_ends_what_is_open(engine, dispatch, model):
    done, future = [], model.predict(ROW)
    future.add_done_callback(done.append)
    dispatch.stop()
    assert done == [future]
    assert isinstance(future.exception(0), ShuttingDown)
    assert isinstance(model.predict(ROW).exception(0), ShuttingDown)
    dispatch.stop()


def test_a_callback_may_stop_the_dispatch(dispatch, engine, model):
    stopped = threading.Event()

    def stop(_):
        dispatch.stop()
        stopped.set()

    model.predict(ROW).add_done_callback(stop)
    expire(engine)
    assert stopped.wait(20)


def test_a_loop_that_was_closed_makes_room(model, engine):
    closed = []  # loops that the garbage collector has not found yet

    async def one():
        closed.append(asyncio.get_running_loop())
        future = model.predict(ROW)
        waiting = asyncio.ensure_future(
            asyncio.wait_for(asyncio.shield(asyncio.gather(future, return_exceptions=True)), 20)
        )
        await asyncio.sleep(0)
        expire(engine)
        return await waiting

    for _ in range(40):
        assert isinstance(asyncio.run(one())[0], NoReplica)
