"""The ten lines of the README, and every way to wait for an answer."""

import asyncio
import pickle
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout

import numpy as np
import pytest
import uvloop
from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier
from sklearn.svm import SVC

import clipper
from clipper.errors import DeadlineExceeded, InvalidInput
from tests.memory_container import wait_until

ROW = np.arange(4.0)


def total(xs):
    return xs.sum(axis=1)


def slow(seconds):
    import time

    def predict(xs):
        time.sleep(seconds)
        return xs.sum(axis=1)

    return predict


@pytest.fixture(scope="module")
def model(deploy_for_all):
    return deploy_for_all(total, input="f64[4]", cache=False)


def test_the_ten_lines():
    X, y = load_digits(return_X_y=True)
    svm, forest = (
        SVC().fit(X[:500], y[:500]),
        RandomForestClassifier(10, random_state=1).fit(X[:500], y[:500]),
    )
    with clipper.start() as server:
        server.deploy("svm", svm.predict)
        server.deploy("forest", forest, replicas=2, batching="aimd")
        app = server.app("digits", models=["svm"], slo_ms=20_000, default=-1)
        future = app.predict(X[600], user="u1")
        answer = future.result(timeout=30)
        assert answer.output == svm.predict(X[600:601])[0]
        assert (answer.is_default, answer.reason, answer.missing) == (False, "", ())
        assert [str(m) for m in answer.models] == ["svm:1"]
        assert answer.latency_us > 0
        assert answer.id
        assert np.array_equal(
            server.model("svm").predict_many(X[600:700]).result(20), svm.predict(X[600:700])
        )
        request = clipper.PredictionRequest(X[601], application="digits", slo_ms=20_000)
        assert server.schedule_prediction(request).result().output == svm.predict(X[601:602])[0]
        assert len(server.stats()["models"]["forest:1"]["replicas"]) == 2
        assert server.model("forest").describe_input() == "f64[64]"
    assert parts_of(pickle.loads(pickle.dumps(answer))) == parts_of(answer), "of a closed server"


def parts_of(answer):
    return [getattr(answer, name) for name in answer.__match_args__]


def test_blocking(model):
    future = model.predict(ROW)
    assert future.result(60) == 6.0
    assert future.done()
    assert not future.cancelled()
    assert future.exception() is None
    assert future.result() == 6.0


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_awaited(model, run):
    async def many():
        answers = await asyncio.gather(*(model.predict(ROW + i) for i in range(200)))
        one = await model.predict(ROW)
        return answers, one

    answers, one = run(many())
    assert answers == [6.0 + 4 * i for i in range(200)]
    assert one == 6.0


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_hundred_event_loops_one_after_another(model, run):
    """Each event loop is released; there is room for 32 at a time."""

    async def one():
        return await model.predict(ROW)

    assert [run(one()) for _ in range(100)] == [6.0] * 100


def test_wait_for_and_cancel_in_asyncio(gated):
    waits, gate = gated

    async def patience():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(waits.predict(ROW), 0.05)
        gate.touch()
        return await waits.predict(ROW)

    assert asyncio.run(patience()) == 6.0


def test_several_event_loops_in_threads(model):
    async def many(seed):
        return await asyncio.gather(*(model.predict(ROW + seed + i) for i in range(100)))

    def run(seed):
        return (asyncio.run if seed % 2 else uvloop.run)(many(seed))

    with ThreadPoolExecutor(8) as pool:
        for seed, answers in enumerate(pool.map(run, range(8))):
            assert answers == [6.0 + 4 * (seed + i) for i in range(100)]


def test_a_notebook_where_a_loop_runs_already(model):
    """result() blocks the cell, await gives way; both work while a loop runs."""

    async def cell():
        blocking = model.predict(ROW).result(60)
        return blocking, await model.predict(ROW)

    assert asyncio.run(cell()) == (6.0, 6.0)


def test_an_answer_of_an_application_is_awaited(model, app):
    handle = app(model, slo_ms=5000, default=-1)

    async def predict_all():
        return await asyncio.gather(*(handle.predict(ROW + i) for i in range(50)))

    assert [answer.output for answer in asyncio.run(predict_all())] == [
        6.0 + 4 * i for i in range(50)
    ]


def test_callbacks(model):
    results, all_done = [], threading.Event()

    def on_done(future):
        results.append(future.result())
        if len(results) == 100:
            all_done.set()

    def broken(future):
        raise ValueError("a callback that raises harms no other")

    for i in range(100):
        future = model.predict(ROW + i)
        future.add_done_callback(broken) if i == 50 else None
        future.add_done_callback(on_done)
    assert all_done.wait(60)
    assert sorted(results) == [6.0 + 4 * i for i in range(100)]


@pytest.fixture
def gated(deploy, tmp_path):
    """Yield a model that answers once a file exists, and the file; it exists after the test."""
    gate = tmp_path / "gate"

    def predict(xs):
        while not gate.exists():
            time.sleep(0.005)
        return xs.sum(axis=1)

    yield deploy(predict, input="f64[4]", cache=False, warmup=False), gate
    gate.touch()


def test_as_completed(model, gated):
    waits, gate = gated
    late = waits.predict(ROW)
    early = [model.predict(ROW + i) for i in range(20)]
    done = clipper.as_completed([late, *early], timeout=60)
    assert {next(done) for _ in early} == {*early}
    gate.touch()
    assert list(done) == [late]


def test_not_all_are_completed_in_time(gated):
    waits, _ = gated
    with pytest.raises(TimeoutError, match="not all of 1 futures"):
        list(clipper.as_completed([waits.predict(ROW)], timeout=0.05))


def test_a_timeout_is_not_the_end_of_the_query(gated):
    waits, gate = gated
    future = waits.predict(ROW)
    with pytest.raises((TimeoutError, FutureTimeout), match="deadline"):
        future.result(0.01)
    gate.touch()
    assert future.result(60) == 6.0


def test_cancel(gated):
    future = gated[0].predict(ROW)
    assert future.cancel()
    assert future.cancelled()
    assert future.cancel()
    with pytest.raises(CancelledError):
        future.result(60)


def test_many_threads_wait_for_one_future(deploy):
    future = deploy(slow(0.1), input="f64[4]").predict(ROW)
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(lambda _: future.result(60), range(16))) == [6.0] * 16


# -- many rows


def test_predict_many(model, server):
    rows = np.random.default_rng(1).random((20_000, 4))
    assert np.allclose(model.predict_many(rows).result(30), rows.sum(axis=1))
    assert model.predict_many([[1, 2, 3, 4], [0, 0, 0, 1]]).result(60).tolist() == [10.0, 1.0]
    assert server.stats()["models"][model.name]["batches"] < 20_000 / 4


def test_predict_many_refuses_all_or_nothing(model):
    issued = model.engine.completion.issued
    with pytest.raises(InvalidInput):
        model.predict_many(np.zeros((3, 5)))
    assert len(model.predict_many([]).result(60)) == 0
    assert model.engine.completion.issued == issued


def test_predict_many_in_asyncio(model):
    async def predict_all():
        return await model.predict_many(np.ones((500, 4)))

    assert asyncio.run(predict_all()).tolist() == [4.0] * 500


# -- deadlines side by side


def test_slos_side_by_side(deploy):
    """Each query keeps its own deadline, however long the model takes for the others."""
    model = deploy(
        slow(0.15), input="f64[4]", cache=False, batching={"mode": "static", "size_max": 1}
    )
    model.predict(ROW).result(60)
    start = time.monotonic()
    futures = {slo: model.predict(ROW, slo_ms=slo) for slo in (10_000, 40, 5_000, 80)}
    with pytest.raises(DeadlineExceeded):
        futures[40].result(60)
    with pytest.raises(DeadlineExceeded):
        futures[80].result(60)
    ended = time.monotonic() - start
    assert {slo for slo in (40, 80) if futures[slo].latency_us >= slo * 1000} == {40, 80}
    assert futures[5_000].result(60) == futures[10_000].result(60) == 6.0
    assert ended < 5  # they did not wait for the slow ones' deadlines


def test_an_answer_comes_at_its_deadline(deploy, app):
    """No sooner; and one of 20 not later than the machine makes the latest of 20 sleeps.
    bench/system/load/deadlines.py measures how late they are."""
    handle = app(deploy(slow(1.0), input="f64[4]", cache=False), slo_ms=50, default=-1)
    late, sleeps = [], []
    for _ in range(20):
        start = time.monotonic()
        time.sleep(0.05)
        sleeps.append(time.monotonic() - start - 0.05)
        start = time.monotonic()
        answer = handle.predict(ROW).result(60)
        late.append(time.monotonic() - start - 0.05)
        assert answer.is_default
        assert answer.output == -1
    assert min(late) > -0.001
    assert min(late) < max(sleeps) + 0.01, (late, sleeps)


def test_every_query_is_answered_exactly_once(model, server):
    results = []
    futures = [model.predict(ROW + i, slo_ms=[2, 20, 5000][i % 3]) for i in range(3000)]
    for future in futures:
        future.add_done_callback(results.append)
    wait_until(lambda: len(results) == 3000)
    assert set(results) == set(futures)
    assert all(future.done() for future in futures)
    wait_until(lambda: server.stats()["issued"] == server.stats()["answered"])
