"""An application always answers: with its default, and with the reason, when its models do not."""

import os
import signal
import time

import numpy as np
import pytest

from clipper.errors import BadOutput, DeadlineExceeded, ModelFailed, NoReplica, UnknownModel
from tests.memory_container import wait_until
from tests.signals import freeze

ROW = np.arange(4.0)


def total(xs):
    return xs.sum(axis=1)


def predict(handle, row=ROW, **options):
    """Query and return the default answer, which must be the declared one."""
    answer = handle.predict(row, **options).result(60)
    assert answer.is_default
    assert answer.output == "none"
    assert answer.models == ()
    return answer


def test_no_replica(deploy, app):
    model = deploy(total, input="f64[4]", replicas=0)
    start = time.monotonic()
    answer = predict(app(model, slo_ms=50, default="none"))
    assert time.monotonic() - start >= 0.049
    assert answer.reason == f"no container of {model.name} is connected"
    assert [str(m) for m in answer.missing] == [model.name]
    with pytest.raises(NoReplica):
        model.predict(ROW, slo_ms=20).result(60)


def test_a_slow_model(deploy, app):
    def slow(xs):
        time.sleep(0.3)
        return xs.sum(axis=1)

    model = deploy(slow, input="f64[4]", cache=False)
    assert model.name in predict(app(model, slo_ms=30, default="none")).reason
    with pytest.raises(DeadlineExceeded):
        model.predict(ROW, slo_ms=20).result(60)


def test_a_frozen_model(deploy, app, server):
    model = deploy(total, input="f64[4]", cache=False)
    pid = server.stats()["models"][model.name]["replicas"][0]["pid"]
    freeze(pid)
    try:
        assert model.name in predict(app(model, slo_ms=40, default="none")).reason
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_model_that_dies_of_a_query(deploy, app, server):
    def mortal(xs):
        if (xs < 0).any():
            os._exit(7)
        return xs.sum(axis=1)

    model = deploy(mortal, input="f64[4]", cache=False)
    handle = app(model, slo_ms=400, default="none")
    answer = predict(handle, -ROW)
    assert model.name in answer.reason
    wait_until(lambda: not handle.predict(ROW).result().is_default, "it comes back")


def test_a_model_that_raises(deploy, app):
    def broken(xs):
        raise KeyError("no such feature")

    model = deploy(broken, input="f64[4]", cache=False)
    assert (
        predict(app(model, slo_ms=2000, default="none")).reason
        == f"{model.name} failed: KeyError: 'no such feature'"
    )
    with pytest.raises(ModelFailed) as caught:
        model.predict(ROW).result(60)
    assert "Traceback (most recent call last):" in caught.value.traceback
    assert "in broken" in caught.value.traceback
    assert "clipper_container" not in caught.value.traceback


def test_only_the_bad_row_fails_with_retry_singly(deploy):
    def picky(xs):
        if (xs[:, 0] == 13).any():
            raise ValueError("thirteen")
        return xs[:, 0]

    model = deploy(picky, input="f64[1]", cache=False, retry_singly=True)
    futures = {i: model.predict([float(i)], slo_ms=5000) for i in range(20)}
    assert {i: futures[i].result(60) for i in futures if i != 13} == {
        i: i for i in futures if i != 13
    }
    with pytest.raises(ModelFailed, match="thirteen"):
        futures[13].result(60)


def test_row_by_row(deploy):
    model = deploy(lambda x: float(x.max()), input="f64[4]", cache=False, row_by_row=True)
    assert model.predict(ROW).result(60) == 3.0
    assert model.predict_many(np.eye(4)).result(60).tolist() == [1.0] * 4


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_a_wrong_number_of_outputs(deploy, app, count):
    model = deploy(lambda xs: np.zeros(count), input="f64[4]", cache=False)
    handle = app(model, slo_ms=3000, default="none")
    rows = 3
    futures = model.predict_many(np.zeros((rows, 4)), slo_ms=3000)
    if count == 1:  # a first batch of one row is answered with one output, and that is right
        futures.wait(60)
        return
    with pytest.raises(
        (ModelFailed, BadOutput), match=r"batch of \d+ and returned|number of outputs"
    ):
        futures.result(60)
    assert "returned" in predict(handle).reason


@pytest.mark.parametrize(
    ("declared", "wrong"),
    [("i64", "xs[:, 0]"), ("f64[2]", "xs[:, :3]"), ("str", "xs[:, 0]"), ("f64", "xs[:, :2]")],
)
def test_another_output_than_was_declared(deploy, app, declared, wrong):
    body = {
        "xs[:, 0]": lambda xs: xs[:, 0],
        "xs[:, :3]": lambda xs: xs[:, :3],
        "xs[:, :2]": lambda xs: xs[:, :2],
    }
    model = deploy(body[wrong], input="f64[4]", output=declared, cache=False)
    answer = predict(app(model, slo_ms=3000, default="none"))
    assert "type or shape" in answer.reason
    with pytest.raises(BadOutput, match="declared"):
        model.predict(ROW).result(60)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_output_that_is_no_number(deploy, app, bad):
    model = deploy(lambda xs: xs[:, 0] * bad + bad, input="f64[4]", cache=False)
    answer = predict(app(model, slo_ms=3000, default="none"))
    assert answer.reason == f"the output of {model.name} is not a finite value"


def test_a_confidence_below_the_threshold(deploy, app):
    agree, differ = (
        deploy(lambda xs, n=n: [n] * len(xs), input="f64[4]", cache=False) for n in (1, 2)
    )
    answer = (
        app(agree, differ, slo_ms=3000, default="none", confidence_min=0.9).predict(ROW).result(60)
    )
    assert answer.is_default
    assert answer.output == "none"
    assert answer.reason == "confidence 0.50 is below the application's 0.90"


def test_an_ensemble_answers_without_its_slow_model(deploy, app, tmp_path):
    gate = tmp_path / "gate"

    def slow(xs):
        while not gate.exists():
            time.sleep(0.01)
        return xs[:, 0] * 0

    quick, late = (
        deploy(lambda xs: xs[:, 0], input="f64[4]", cache=False),
        deploy(slow, input="f64[4]", cache=False),
    )
    answer = app(quick, late, slo_ms=1500, default="none").predict(ROW + 7).result(20)
    gate.touch()
    assert not answer.is_default
    assert answer.output == 7.0
    assert [str(m) for m in answer.models] == [quick.name]
    assert [str(m) for m in answer.missing] == [late.name]


def test_the_default_may_be_of_any_kind(deploy, app):
    model = deploy(total, input="f64[4]", replicas=0)
    for default in (None, 0, -1.5, "none", b"\0", [1, [2.5, "x"]]):
        assert app(model, slo_ms=5, default=default).predict(ROW).result(60).output == default


def test_no_model_at_all(app):
    with pytest.raises(UnknownModel, match=r"links no model. Link one"):
        app(slo_ms=50, default="none").predict(ROW)
