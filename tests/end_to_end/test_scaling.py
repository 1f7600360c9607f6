"""The number of containers follows the load, and one that is stuck is restarted: real processes,
nothing lost."""

import collections
import os
import signal
import threading
import time

import numpy as np
import pytest

import clipper
from clipper.errors import InvalidInput
from clipper_core.runtime.status import Status
from tests.memory_container import wait_until
from tests.threads import join

ROW = np.arange(4.0)
SLO_MS = 10_000
PATIENT_MS = 60_000  # sixty queries are in time, also on a busy machine
QUICK = {
    "heartbeat_ms": 100,
    "warmup": False,
    "restart_ms_min": 20,
    "restart_ms_max": 200,
    "scale_interval_ms": 20,
    "scale_up_after_ms": 200,
    "scale_down_after_ms": 400,
    "scale_delay_share": 0.01,
    "stuck_s": 0.5,
}


def slowly(xs):
    time.sleep(0.02)
    return xs.sum(axis=1)


def hanging(place):
    """Return a model that writes the file `place` for a row of 13, and does not answer it."""

    def predict(xs):
        if xs[0, 0] == 13:
            place.touch()
            threading.Event().wait()
        return xs.sum(axis=1)

    return predict


class Load:
    """A load of `outstanding` queries at all times, or one now and then; keeps every failure."""

    def __init__(self, model):
        self.model, self.outstanding, self.failed = model, 1, []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        waiting = collections.deque()
        while not self._stop.is_set():
            while len(waiting) < self.outstanding:
                waiting.append(self.model.predict(ROW, slo_ms=PATIENT_MS))
            self._count(waiting.popleft())
            if self.outstanding == 1:
                self._stop.wait(0.03)
        for future in waiting:
            self._count(future)

    def _count(self, future):
        future.wait(PATIENT_MS / 1000)
        if future.status() is not Status.OK:
            self.failed.append(future.exception())

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exc):
        self._stop.set()
        join(self._thread)


@pytest.fixture
def server():
    with clipper.start(**QUICK) as started:
        yield started


def row_of(server, model):
    return server.stats()["models"][model.name]


def test_load_starts_a_second_container_and_calm_retires_it(server):
    batching = {"mode": "static", "size_max": 1}
    model = server.deploy(
        "m", slowly, input="f64[4]", cache=False, batching=batching, replicas=(1, 2)
    )
    assert (row_of(server, model)["wanted"], row_of(server, model)["has"]) == (1, 1)
    with Load(model) as load:
        load.outstanding = 60
        wait_until(lambda: row_of(server, model)["has"] == 2, 30)
        assert row_of(server, model)["wanted"] == 2
        load.outstanding = 1
        wait_until(lambda: row_of(server, model)["wanted"] == row_of(server, model)["has"] == 1, 30)
    assert load.failed == []


def test_a_fixed_number_stays_and_bounds_can_be_given_later(server):
    batching = {"mode": "static", "size_max": 1}
    model = server.deploy("m", slowly, input="f64[4]", cache=False, batching=batching, replicas=1)
    with Load(model) as load:
        load.outstanding = 60
        for future in [model.predict(ROW, slo_ms=PATIENT_MS) for _ in range(100)]:
            assert future.wait(PATIENT_MS / 1000)
        assert row_of(server, model)["wanted"] == 1
        server.scale("m", (1, 2))
        wait_until(lambda: row_of(server, model)["has"] == 2, 30)
        server.scale("m", 1)
        wait_until(lambda: row_of(server, model)["has"] == 1, 30)
        assert server.catalog.view.model("m").replicas_max == 0
    assert load.failed == []
    with pytest.raises(InvalidInput, match="no bounds"):
        server.scale("m", (2, 1))


def test_a_container_that_is_stuck_is_restarted(server, tmp_path):
    has = tmp_path / "has"
    model = server.deploy("m", hanging(has), input="f64[4]", cache=False)
    (before,) = row_of(server, model)["replicas"]

    def is_stuck():
        """Return whether it has the row. On a busy machine the deadline may come before it."""
        stuck = model.predict(np.full(4, 13.0), slo_ms=100)
        assert stuck.wait(20)
        return has.exists() and stuck

    stuck = wait_until(is_stuck)
    assert stuck.status() in (Status.DEADLINE, Status.REPLICA_LOST)
    assert model.predict(ROW, slo_ms=SLO_MS).result(20) == 6.0
    (after,) = row_of(server, model)["replicas"]
    assert after["pid"] != before["pid"]
    assert after["restart_count"] == 1
    assert "SIGKILL" in after["detail"]


def test_a_query_does_not_wait_for_a_container_that_cannot_be_back_in_time():
    """The restart is twenty seconds away. An ensemble answers with the other at once, and a patient
    query still waits."""
    with clipper.start(**QUICK | {"restart_ms_min": 20_000, "restart_ms_max": 20_000}) as server:
        models = [
            server.deploy(name, slowly, input="f64[4]", cache=False) for name in ("dies", "stays")
        ]
        app = server.app("a", models=["dies", "stays"], slo_ms=SLO_MS)
        os.kill(row_of(server, models[0])["replicas"][0]["pid"], signal.SIGKILL)
        hopeless = wait_until(
            lambda: (future := models[0].predict(ROW, slo_ms=SLO_MS)).done() and future, 8.0
        )
        assert hopeless.status() is Status.NO_REPLICA
        future = app.predict(ROW)
        answer = future.result(20)
        assert answer.output == 6.0
        assert [str(model) for model in answer.missing] == ["dies:1"]
        assert answer.latency_us < SLO_MS * 1000, "not at the deadline"
        patient = models[0].predict(ROW, slo_ms=60_000)
        assert not patient.done()
        patient.cancel()
