"""Under load: more than fits, memory over many queries, and an application that floods beside one
that does not."""

import threading
import time
from collections import Counter

import numpy as np
import pytest

import clipper
from clipper.errors import ClipperError
from clipper_core.runtime.status import Status
from tests.memory import resident_bytes
from tests.memory_container import wait_until
from tests.threads import join

ROW = np.arange(4.0)
ROW_MS = 1.0  # what one row costs the model below


def costly(xs):
    import time

    time.sleep(len(xs) * 0.001)
    return xs.sum(axis=1)


def offer(model, per_s, seconds, slo_ms):
    """Send queries at an even rate, whatever comes back; return their futures."""
    futures, start, query_count = [], time.monotonic(), 0
    while (now := time.monotonic() - start) < seconds:
        while query_count < now * per_s:
            query_count += 1
            futures.append(model.predict(ROW + query_count, slo_ms=slo_ms))
        threading.Event().wait(0.001)
    return futures


def outcomes(futures):
    for future in futures:
        future.wait(20)
    return Counter(future.status() for future in futures)


def test_overload_sheds(deploy, server):
    """The load is five times the model's capacity: every query ends once. That no fewer are
    answered than without the overload is a test of the simulation."""
    model = deploy(costly, input="f64[4]", cache=False)
    # it learns
    outcomes(offer(model, 400, 0.5, 100))
    futures = offer(model, 5000, 2.0, 100)
    ended = outcomes(futures)
    assert sum(ended.values()) == len(futures)
    assert set(ended) <= {Status.OK, Status.DROPPED, Status.DEADLINE, Status.FULL}
    assert ended[Status.OK]
    assert ended[Status.DROPPED] + ended[Status.FULL] + ended[Status.DEADLINE] > 0.5 * len(futures)
    ended_by_status = server.stats()["models"][model.name]["ended"]
    assert ended_by_status["OK"] >= ended[Status.OK]
    assert (
        sum(ended_by_status.get(status.name, 0) for status in ended if status is not Status.OK) > 0
    )
    assert model.predict(ROW, slo_ms=5000).result(60) == 6.0  # and afterwards all is well


def test_a_full_queue_is_an_answer(tmp_path):
    gate = tmp_path / "gate"

    def waits(xs):
        while not gate.exists():
            time.sleep(0.001)
        return xs.sum(axis=1)

    with clipper.start(limits={"queue_rows_max": 64}, heartbeat_ms=100, warmup=False) as server:
        model = server.deploy(
            "m", waits, input="f64[4]", cache=False, batching={"mode": "static", "size_max": 1}
        )
        app = server.app("a", models=["m"], slo_ms=20_000, default=-1)
        futures = [model.predict(ROW + i, slo_ms=20_000) for i in range(500)]
        answer = app.predict(ROW)
        gate.touch()
        ended = outcomes(futures)
        assert ended[Status.FULL] > 300
        assert ended[Status.OK] >= 64
        assert ended[Status.FULL] + ended[Status.OK] == 500
        refused = next(future for future in futures if future.status() is Status.FULL)
        assert isinstance(refused.exception(), clipper.errors.Overloaded)
        answer = answer.result(20)
        assert answer.output == 6.0 or "m:1 is overloaded" in answer.reason
        rows = np.random.default_rng(1).random((500, 4))  # waits for room instead
        assert np.allclose(model.predict_many(rows).result(30), rows.sum(axis=1))


def test_a_slow_model_does_not_slow_another(deploy):
    """One model's queue is always full; the other answers as it does alone, within what the
    machine's cores allow."""
    busy = deploy(costly, input="f64[4]", cache=False)
    quick = deploy(lambda xs: xs.sum(axis=1), input="f64[4]", cache=False)
    stop = threading.Event()

    def flood():
        while not stop.is_set():
            for i in range(50):
                busy.predict(ROW + i, slo_ms=200)
            stop.wait(0.005)

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        assert all(
            quick.predict(ROW + i, slo_ms=5000).result(60) == 6.0 + 4 * i for i in range(300)
        )
    finally:
        stop.set()
        join(thread)


@pytest.mark.slow
def test_memory_stays_flat(deploy):
    """Memory is measured over 200 000 queries: single ones and lists, hits and misses, numbers and
    blobs, answered and abandoned ones."""
    number = deploy(lambda xs: xs.sum(axis=1), input="f64[4]")
    blob = deploy(lambda xs: [x * 20 for x in xs], input="str", cache=False)

    def round(seed):
        rng = np.random.default_rng(seed)
        for _ in range(10):
            futures = [number.predict(ROW + i % 500) for i in range(1000)]
            futures += [blob.predict(f"text {i}") for i in range(200)]
            futures[-1].cancel()
            for future in futures[:-1]:
                future.result(20)
            number.predict_many(rng.random((800, 4))).result(20)

    for seed in range(4):
        round(seed)  # blocks, caches and lanes reach their size
    before = resident_bytes()
    for seed in range(4, 14):
        round(seed)
    grown = resident_bytes() - before
    assert grown < 24 << 20, f"{grown / 1e6:.1f} MB more after 200 000 queries"


def test_many_threads_query_at_once(deploy, server):
    model = deploy(lambda xs: xs.sum(axis=1), input="f64[4]", cache=False)
    wrong = []

    def send_queries(seed):
        for i in range(300):
            try:
                if model.predict(ROW + seed * 1000 + i, slo_ms=20_000).result(30) != 6.0 + 4 * (
                    seed * 1000 + i
                ):
                    wrong.append((seed, i))
            except ClipperError as error:
                wrong.append(error)

    threads = [threading.Thread(target=send_queries, args=(seed,)) for seed in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        join(thread)
    assert wrong == []
    wait_until(lambda: server.stats()["issued"] == server.stats()["answered"])
