"""Arrays of queries: to models and to applications, whole, in part, and when things go wrong in the
middle."""

import asyncio
import io
import os
import signal
import threading
from concurrent.futures import CancelledError

import numpy as np
import pytest
import uvloop

import clipper
from clipper.errors import InvalidInput, UnknownModel
from clipper_core.runtime.status import Status
from tests.threads import join

STATIC = {"mode": "static", "size_max": 64}
ROWS = np.random.default_rng(1).random((5_000, 4))


def total(xs):
    return xs.sum(axis=1)


def slow(xs):
    import time

    time.sleep(0.05)
    return xs.sum(axis=1)


@pytest.fixture(scope="module")
def model(deploy_for_all):
    return deploy_for_all(total, input="f64[4]", cache=False)


def test_an_application_answers_an_array(deploy, app):
    handle = app(deploy(total, input="f64[4]"), policy="single", default=-1.0)
    answers = handle.predict_many(ROWS).result(20)
    assert len(answers) == len(ROWS)
    assert np.allclose(answers.outputs, ROWS.sum(axis=1))
    assert not answers.is_default.any()
    assert answers.confidence.tolist() == [1.0] * len(ROWS)
    assert answers.latency_us.dtype == np.uint32
    assert [str(m).rpartition(":")[2] for m in answers.models] == ["1"]
    assert (set(answers.missing.values()), answers.reasons) == ({0}, {})
    assert handle.predict_many(ROWS).done(), "the cache has them all"


def test_as_many_answers_as_rows_whatever_happens(deploy, app):
    handle = app(deploy(total, input="f64[4]", cache=False), default=-1.0, confidence_min=0.5)
    rows = ROWS[:100].copy()
    rows[7] = np.nan
    answers = handle.predict_many(rows).result(20)
    assert np.flatnonzero(answers.is_default).tolist() == [7]
    assert (answers.outputs[7], answers.confidence[7]) == (-1.0, 0.0)
    ((why, n),) = answers.reasons.items()
    assert (n, "not a finite value" in why) == (1, True)
    assert "1 defaults" in repr(answers)


def test_an_ensemble_combines_row_by_row(deploy, app):
    models = [
        deploy(lambda xs, k=k: xs.sum(axis=1) * k, input="f64[4]", cache=k == 1) for k in (1, 3)
    ]
    handle = app(*models, slo_ms=5000, default=-1.0)
    answers = handle.predict_many(ROWS[:200]).result(20)
    assert np.allclose(answers.outputs, 2 * ROWS[:200].sum(axis=1))
    one = handle.predict(ROWS[0]).result(20)
    assert (answers.outputs[0], answers.confidence[0]) == (
        pytest.approx(one.output),
        pytest.approx(one.confidence),
    )


def test_all_models_of_an_ensemble_get_the_rows_of_a_generator(deploy, app):
    models = [deploy(lambda xs, k=k: xs.sum(axis=1) * k, input="f64[4]") for k in (1, 3)]
    handle = app(*models, slo_ms=5000, default=-1.0)
    answers = handle.predict_many(row for row in ROWS[:3]).result(20)
    assert np.allclose(answers.outputs, 2 * ROWS[:3].sum(axis=1))


def test_one_model_of_an_ensemble_that_is_not_there(deploy, app, server, names):
    without_replica = deploy(total, name=next(names), input="f64[4]", replicas=0, wait=False)
    handle = app(deploy(total, input="f64[4]"), without_replica, default=-1.0)
    answers = handle.predict_many(ROWS[:50], slo_ms=1000).result(60)
    assert np.allclose(answers.outputs, ROWS[:50].sum(axis=1))
    assert sorted(answers.missing.values()) == [0, 50]
    assert set(answers.confidence.tolist()) != {1.0}


def test_nobody_is_there(deploy, app, names):
    handle = app(deploy(total, name=next(names), input="f64[4]", replicas=0, wait=False), default=9)
    answers = handle.predict_many(ROWS[:50], slo_ms=100).result(60)
    assert answers.outputs == [9] * 50 or list(answers.outputs) == [9] * 50
    assert answers.is_default.all()
    ((why, n),) = answers.reasons.items()
    assert (n, "no container" in why) == (50, True)


def test_schedule_predictions(deploy, server, app):
    model = deploy(total, input="f64[4]")
    handle = app(model, default=-1.0)
    for future in (
        server.schedule_predictions(ROWS[:40], handle.name),
        server.schedule_predictions(ROWS[:40], models=[model.name], slo_ms=5000, user="u", salt=3),
    ):
        assert np.allclose(future.result(20).outputs, ROWS[:40].sum(axis=1))
    with pytest.raises(UnknownModel):
        server.schedule_predictions(ROWS, models=["nobody"])


@pytest.mark.parametrize(
    "inputs",
    [
        *(np.zeros((3, 5)), np.zeros(4), np.zeros((2, 2, 2)), np.zeros((3, 4), complex)),
        *(["a", "b"], 3.0, None, object()),
    ],
)
def test_arrays_that_are_none_of_its_type(deploy, app, inputs):
    handle = app(deploy(total, input="f64[4]"), default=-1.0)
    with pytest.raises(InvalidInput):
        handle.predict_many(inputs)
    with pytest.raises(InvalidInput, match="slo_ms"):
        handle.predict_many(ROWS, slo_ms=0)


@pytest.mark.parametrize("inputs", [[], np.zeros((0, 4))], ids=["list", "array"])
def test_no_rows_have_no_outputs(deploy, app, inputs):
    handle = app(deploy(total, input="f64[4]"), default=-1.0)
    assert len(handle.predict_many(inputs).result(60).outputs) == 0


@pytest.mark.parametrize(
    "inputs", [ROWS[:1], [ROWS[0]], ROWS[:1].astype("f4")], ids=["array", "list", "f4"]
)
def test_one_row(deploy, app, model, inputs):
    wanted = np.asarray(inputs, "f8").sum(axis=1)
    assert np.allclose(model.predict_many(inputs).result(60), wanted)
    assert np.allclose(app(model, default=-1.0).predict_many(inputs).result(60).outputs, wanted)


def test_texts_and_vectors(deploy, app):
    shout = app(deploy(lambda xs: [x.upper() for x in xs], input="str"), default="?")
    assert shout.predict_many(["a", "b"] * 50).result(60).outputs == ["A", "B"] * 50
    twice = app(deploy(lambda xs: xs * 2, input="f64[4]"), policy="single", default=[0, 0, 0, 0])
    assert np.array_equal(twice.predict_many(ROWS).result(60).outputs, 2 * ROWS)


def test_three_hundred_thousand_rows_and_more_than_the_queue_holds(model, server):
    rows = np.random.default_rng(2).random((300_000, 4))
    assert np.allclose(model.predict_many(rows).result(60), rows.sum(axis=1))
    many = np.resize(rows, (2_500_000, 4))
    assert np.allclose(model.predict_many(many).result(60), many.sum(axis=1))


def test_other_threads_run_while_an_array_waits_for_room(model):
    """The GIL is not held: a thread counts on."""
    counts, stop = [0], threading.Event()

    def work():
        while not stop.wait(0.001):
            counts[0] += 1

    thread = threading.Thread(target=work)
    thread.start()
    try:
        before = counts[0]
        assert len(model.predict_many(np.ones((2_500_000, 4))).result(60)) == 2_500_000
        assert counts[0] > before
    finally:
        stop.set()
        join(thread)


def test_the_deadline_in_the_middle(deploy):
    model = deploy(slow, input="f64[4]", cache=False, batching=STATIC)
    future = model.predict_many(ROWS, slo_ms=1000)
    states = future.statuses() if future.wait(60) else None
    assert states is not None
    done = states == Status.OK
    assert 64 <= done.sum() < len(ROWS)
    assert np.allclose(future.outputs(-1.0)[done], ROWS.sum(axis=1)[done])
    assert (future.outputs(-1.0)[~done] == -1).all()


def test_a_container_killed_in_the_middle(deploy, server):
    model = deploy(slow, input="f64[4]", cache=False, batching=STATIC)
    future = model.predict_many(ROWS[:1000], slo_ms=20_000)
    while future.progress()[0] == 0:
        future.wait(0.01)
    (row,) = server.stats()["models"][model.name]["replicas"]
    os.kill(row["pid"], signal.SIGKILL)
    assert future.wait(20)
    states = future.statuses()
    assert set(states.tolist()) <= {Status.OK, Status.REPLICA_LOST}
    assert (states == Status.OK).sum() >= 1000 - 2 * 64
    assert np.allclose(
        future.outputs(0.0)[states == Status.OK], ROWS[:1000].sum(axis=1)[states == Status.OK]
    )


def test_cancel_in_the_middle(deploy, server):
    model = deploy(slow, input="f64[4]", cache=False, batching=STATIC)
    future = model.predict_many(ROWS)
    while future.progress()[0] == 0:
        future.wait(0.01)
    assert future.cancel()
    assert future.done()
    done, total_ = future.progress()
    assert (done, total_) == (5000, 5000)
    assert {Status.OK, Status.CANCELLED} == set(future.statuses().tolist())
    with pytest.raises(CancelledError):
        future.result()


def test_a_model_that_raises_for_one_row(deploy):
    def fussy(x):
        if x[0] < 0:
            raise ValueError("negative")
        return float(x.sum())

    model = deploy(fussy, input="f64[4]", cache=False, row_by_row=True, retry_singly=True)
    rows = ROWS[:100].copy()
    rows[42, 0] = -1
    future = model.predict_many(rows)
    assert future.wait(20)
    assert np.flatnonzero(future.statuses() != Status.OK).tolist() == [42]
    assert "negative" in future.detail(42)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_awaited_and_as_completed(deploy, app, run):
    handle = app(deploy(total, input="f64[4]"), policy="single", default=-1.0)

    async def ask():
        return await asyncio.gather(*[handle.predict_many(ROWS[i:]) for i in range(5)])

    assert [len(answers) for answers in run(ask())] == [5000, 4999, 4998, 4997, 4996]
    futures = [handle.predict_many(ROWS, salt=i) for i in range(3)]
    assert {len(future.result(0)) for future in clipper.as_completed(futures)} == {5000}
    called = threading.Event()
    handle.predict_many(ROWS, salt=9).add_done_callback(lambda future: called.set())
    assert called.wait(60)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_shown_on_a_terminal_only(deploy, monkeypatch):
    monkeypatch.setattr("clipper.serving.query.progress._AFTER_S", 0.05)
    monkeypatch.setattr("clipper.serving.query.progress._EVERY_S", 0.02)
    model = deploy(slow, input="f64[4]", cache=False, batching=STATIC)
    terminal, pipe = Terminal(), io.StringIO()
    assert len(clipper.progress(model.predict_many(ROWS[:400]), stream=terminal).result(0)) == 400
    assert " of 400 rows, " in terminal.getvalue()
    assert terminal.getvalue().endswith("\x1b[K"), "and taken away again"
    clipper.progress(model.predict_many(ROWS[:200]), stream=pipe)
    quick = Terminal()
    clipper.progress(model.predict_many(ROWS[:1]), "queries", stream=quick)
    assert pipe.getvalue() == ""
