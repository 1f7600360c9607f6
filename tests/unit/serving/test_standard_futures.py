"""A future of ours behaves as `concurrent.futures.Future` documents, also in the functions of the
standard library."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, FIRST_EXCEPTION, CancelledError

import numpy as np
import pytest

from clipper.errors import Cancelled, NoReplica
from clipper.serving.query.dispatch import Dispatch
from clipper_core.engine.engine import Engine
from clipper_core.engine.model import Model, predict_all
from clipper_core.results.future import Future
from tests.threads import join

ROW = np.arange(4.0)


@pytest.fixture
def engine() -> Engine:
    return Engine(manual_clock=True, cache_bytes_max=1 << 20, tasks_max=1024)


@pytest.fixture
def model(engine: Engine) -> Iterator[Model]:
    dispatch = Dispatch(engine)
    yield Model(engine, "m:1", 1, "f64", (4,), slo_us=1000)
    dispatch.stop()


def expire(engine: Engine) -> None:
    engine.step(engine.now_us() + 1)
    engine.step(engine.now_us() + 1_000_000)


def predict(model: Model, finish: Callable[[Future], object] | None) -> Future:
    return predict_all((model, model), ROW, 1000, 0, finish, None)


@pytest.mark.parametrize(
    "finish", [None, lambda future: "default"], ids=["a model's", "an application's"]
)
def test_a_cancelled_future_has_no_result(
    model: Model, finish: Callable[[Future], object] | None
) -> None:
    future = predict(model, finish)
    assert (future.running(), future.cancelled(), future.done()) == (False, False, False)
    assert future.cancel()
    assert future.cancel()  # as the standard library's: it is cancelled
    assert (future.running(), future.cancelled(), future.done()) == (False, True, True)
    with pytest.raises(Cancelled):
        future.result()
    with pytest.raises(CancelledError):
        future.exception()


def test_a_future_that_is_done_cannot_be_cancelled(engine: Engine, model: Model) -> None:
    future = predict(model, lambda future: "default")
    expire(engine)
    assert not future.cancel()
    assert (future.cancelled(), future.result(), future.exception()) == (False, "default", None)


def test_a_finisher_that_ends_its_query_itself_still_gives_a_result(model: Model) -> None:
    future = predict(model, lambda future: "default")
    assert future.end_now()
    assert not future.end_now()
    assert not future.cancel()
    assert (future.cancelled(), future.result()) == (False, "default")


def test_awaiting_a_cancelled_future(model: Model) -> None:
    async def wait() -> object:
        future = predict(model, lambda future: "default")
        future.cancel()
        return await future

    with pytest.raises(Cancelled):
        asyncio.run(wait())


@pytest.mark.parametrize("done_before", [0, 2, 3])
@pytest.mark.parametrize("return_when", [ALL_COMPLETED, FIRST_COMPLETED, FIRST_EXCEPTION])
def test_wait(engine: Engine, model: Model, done_before: int, return_when: str) -> None:
    futures = [predict(model, lambda future: "default") for _ in range(3)]
    for future in futures[:done_before]:
        future.cancel()
    has_polled = threading.Event()

    def wait() -> concurrent.futures._base.DoneAndNotDoneFutures[object]:
        concurrent.futures.wait(futures, 0, return_when)
        has_polled.set()
        return concurrent.futures.wait(futures, 60, return_when)  # type: ignore[arg-type]

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        assert has_polled.wait(60)
        if done_before == 0 and return_when == FIRST_COMPLETED:
            futures[1].cancel()
            assert futures[1] in waiting.result(60).done
        expire(engine)
        done, not_done = waiting.result(60)
    if return_when == FIRST_COMPLETED:
        assert done >= set(futures[:done_before])
        assert done | not_done == set(futures)
    else:
        assert (done, not_done) == (set(futures), set())


def test_wait_returns_at_the_first_error(engine: Engine, model: Model) -> None:
    failed, other = model.predict(ROW), concurrent.futures.Future[int]()
    expire(engine)
    assert isinstance(failed.exception(), NoReplica)
    done, not_done = concurrent.futures.wait([failed, other], 60, FIRST_EXCEPTION)  # type: ignore[list-item]
    assert (done, not_done) == ({failed}, {other})
    pending = model.predict(ROW)
    timer = threading.Timer(0.05, expire, [engine])
    timer.start()
    done, not_done = concurrent.futures.wait([pending, other], 60, FIRST_EXCEPTION)  # type: ignore[list-item]
    join(timer)
    assert (done, not_done) == ({pending}, {other})


def test_wait_without_time_sees_what_is_done(model: Model) -> None:
    futures = [predict(model, None) for _ in range(2)]
    for count in range(3):
        done, not_done = concurrent.futures.wait(futures, timeout=0)  # type: ignore[var-annotated, arg-type]
        assert (len(done), len(not_done)) == (count, 2 - count)
        futures[min(count, 1)].cancel()


def test_as_completed_of_the_standard_library(engine: Engine, model: Model) -> None:
    futures = [predict(model, lambda future: "default") for _ in range(5)]
    futures[3].cancel()
    pool = concurrent.futures.Future[int]()
    pool.set_result(7)
    order = concurrent.futures.as_completed([*futures, pool], timeout=60)  # type: ignore[list-item]
    first = {next(order), next(order)}
    assert first == {futures[3], pool}
    expire(engine)
    assert set(order) == set(futures) - {futures[3]}
    with pytest.raises(TimeoutError):
        list(concurrent.futures.as_completed([predict(model, None)], timeout=0.01))  # type: ignore[list-item]


def test_wrap_future(engine: Engine, model: Model) -> None:
    async def wait() -> list[object]:
        futures = [predict(model, lambda future: "default"), model.predict(ROW)]
        wrapped = [asyncio.wrap_future(future) for future in futures]  # type: ignore[var-annotated, arg-type]
        given_up = predict(model, None)
        cancelled = asyncio.wrap_future(given_up)  # type: ignore[var-annotated, arg-type]
        cancelled.cancel()
        await asyncio.sleep(0)
        assert given_up.cancelled()
        source = predict(model, None)
        wrapped_source = asyncio.wrap_future(source)  # type: ignore[var-annotated, arg-type]
        source.cancel()
        with pytest.raises(asyncio.CancelledError):
            await wrapped_source
        expire(engine)
        return await asyncio.gather(*wrapped, return_exceptions=True)

    result, error = asyncio.run(wait())
    assert result == "default"
    assert isinstance(error, NoReplica)


def test_callbacks_are_called_in_the_order_in_which_they_were_added(
    engine: Engine, model: Model
) -> None:
    future, order, last = predict(model, None), [], threading.Event()
    for number in range(20):
        future.add_done_callback(lambda _, number=number: order.append(number))  # type: ignore[misc]
    future.add_done_callback(lambda _: last.set())
    expire(engine)
    assert last.wait(60)
    assert order == list(range(20))


def test_types(model: Model) -> None:
    future = predict(model, None)
    assert isinstance(future, Future)
    assert isinstance(future, concurrent.futures.Future)
    assert type(future) is Future
