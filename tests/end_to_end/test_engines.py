"""A server of two engines: models on both, queries to both, and every fault on either side."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clipper
from clipper.errors import ClipperError, ForkedProcess, ShuttingDown
from clipper.serving.models import engines as engines_module
from tests.frontend.conftest import QUICK
from tests.memory_container import wait_until
from tests.threads import join

ROW = np.array([1.0, 2.0])


def double(rows: Any) -> Any:
    return 2 * rows


def triple(rows: Any) -> Any:
    return 3 * rows


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines_module, "_cores", lambda: 8)


@pytest.fixture
def start() -> Iterator[Callable[..., clipper.ClipperServer]]:
    """Yield a function that starts servers with two engines; close them at the end and check that
    no task is left."""
    started: list[clipper.ClipperServer] = []

    def do(**settings: Any) -> clipper.ClipperServer:
        server = clipper.start(engines=2, **{**QUICK, **settings})
        started.append(server)
        return server

    yield do
    for server in started:
        server.close()
        for engine in server._engines:
            assert engine.completion.issued == engine.completion.answered


@pytest.fixture
def server(start: Callable[..., clipper.ClipperServer]) -> clipper.ClipperServer:
    """Yield a server with model `one` on the first engine and `two` on the second."""
    server = start()
    for name, model in (("one", double), ("two", triple)):
        server.deploy(name, model, input="f64[2]", cache=False)
    return server


def both(server: clipper.ClipperServer, **settings: Any) -> clipper.ApplicationHandle:
    models = settings.pop("models", ["one", "two"])
    return server.app("both", models=models, **{"policy": "ensemble", "slo_ms": 5000, **settings})


def engine_of(server: clipper.ClipperServer, name: str) -> int:
    return int(server.stats()["models"][f"{name}:1"]["engine"])


def pids(server: clipper.ClipperServer, name: str) -> list[int]:
    return [
        row["pid"]
        for row in server.stats()["models"][f"{name}:1"]["replicas"]
        if row["state"] == "ready"
    ]


def test_models_are_spread_and_the_versions_of_one_stay_together(server):
    server.deploy("one", triple, input="f64[2]")
    stats = server.stats()["models"]
    assert {key: row["engine"] for key, row in stats.items()} == {
        "one:1": 0,
        "one:2": 0,
        "two:1": 1,
    }
    assert all(row["has"] == 1 for row in stats.values())
    assert server.model("one:1").predict(ROW).result(60).tolist() == [2, 4]
    assert server.model("one:2").predict(ROW).result(60).tolist() == [3, 6]
    assert server.model("two").predict(ROW).result(60).tolist() == [3, 6]
    assert server.model("two").predict_many(np.ones((500, 2))).result(60).tolist() == [[3, 3]] * 500
    assert server.stats()["issued"] == server.stats()["answered"] == 503


@pytest.mark.parametrize("order", [["one", "two"], ["two", "one"]])
def test_an_ensemble_of_both(server, order):
    app = both(server, models=order)
    for i in range(50):
        answer = app.predict(ROW + i).result(60)
        assert {model.name for model in answer.models} == {"one", "two"}
        np.testing.assert_allclose(answer.output, 2.5 * (ROW + i))
    wait_until(lambda: server.stats()["issued"] == server.stats()["answered"])


def test_awaited_called_back_and_as_completed(server):
    app = both(server)

    async def predict(i):
        answer = await app.predict(ROW + i)
        one, two = await asyncio.gather(
            server.model("one").predict(ROW + i), server.model("two").predict(ROW + i)
        )
        return answer.output, (one + two) / 2

    async def everything():
        return await asyncio.gather(*(predict(i) for i in range(300)))

    for got, expected in asyncio.run(everything()):
        np.testing.assert_allclose(got, expected)

    named = threading.Event()
    futures = [app.predict(ROW + i) for i in range(200)] + [
        server.model("two").predict(ROW) for _ in range(50)
    ]
    names: list[str] = []
    for future in futures:
        future.add_done_callback(lambda _: names.append(threading.current_thread().name))
    futures[0].add_done_callback(lambda _: named.set())
    assert named.wait(60)
    assert len(list(clipper.as_completed(futures, timeout=60))) == 250
    wait_until(lambda: len(names) == 250)
    assert set(names) <= {"clipper-callbacks", threading.current_thread().name}


def test_arrays_over_both(server):
    app = both(server)
    rows = np.random.default_rng(1).random((2000, 2))
    answers = app.predict_many(rows).result(20)
    np.testing.assert_allclose(np.asarray(answers.outputs), 2.5 * rows)
    np.testing.assert_allclose(server.model("two").predict_many(rows).result(20), 3 * rows)
    wait_until(lambda: server.stats()["issued"] == server.stats()["answered"])


def test_ids_of_answers_differ_between_engines(server):
    ids = [both(server).predict(ROW).result(60).id for _ in range(2)]
    alone = server.app("alone", models=["two"], slo_ms=5000)
    ids += [alone.predict(ROW).result(60).id for _ in range(2)]
    assert len(set(ids)) == 4


def test_feedback_reaches_a_policy_over_both(server):
    app = both(server, policy="exp4")
    answers = [app.predict(ROW).result(60) for _ in range(3)]
    assert all(app.feedback(answer, score=1.0) for answer in answers)
    assert not app.feedback(answers[0], score=1.0)
    assert app.feedback(input=ROW, score=0.5)


@pytest.mark.parametrize("victim", ["one", "two"])
def test_a_killed_container_costs_its_own_answers_only(server, victim):
    app = both(server, slo_ms=3000, default=None)
    old = pids(server, victim)
    futures = [app.predict(ROW + i) for i in range(50)]
    os.kill(old[0], signal.SIGKILL)
    futures += [app.predict(ROW + i) for i in range(50, 100)]
    survivor = "two" if victim == "one" else "one"
    for future in futures:
        assert survivor in {model.name for model in future.result(60).models}
    wait_until(lambda: pids(server, victim) not in ([], old), 20)
    wait_until(lambda: not app.predict(ROW).result(60).missing, 20)
    assert engine_of(server, "two") == 1


def test_a_cancelled_query_over_both(server):
    app = both(server)
    futures = [app.predict(ROW + i) for i in range(200)]
    for future in futures[::2]:
        future.cancel()
    for i, future in enumerate(futures):
        if i % 2:
            assert not future.result(60).missing
    wait_until(lambda: server.stats()["issued"] == server.stats()["answered"])


def stall(rows: Any) -> Any:
    import time

    time.sleep(30)
    return rows


@pytest.mark.parametrize("names", [["fast", "slow"], ["slow", "fast"], ["slow", "slower"]])
def test_closing_with_queries_in_flight(start, names):
    server = start()
    for name in names:
        server.deploy(name, double if name == "fast" else stall, input="f64[2]", cache=False)
    app = server.app("all", models=names, policy="ensemble", slo_ms=60_000)
    futures = [app.predict(ROW + i) for i in range(20)]
    ended: list[Any] = []

    def wait(future):
        ended.append(future.result(20))

    def call_back(future):
        ended.append(future.result(0))

    threads = [threading.Thread(target=wait, args=(future,)) for future in futures]
    for thread in threads:
        thread.start()
    for future in futures:
        future.add_done_callback(call_back)
    server.close(drain_s=0)
    for thread in threads:
        join(thread)
    assert len(ended) == 40
    for answer in ended:
        assert answer.is_default == ("fast" not in [model.name for model in answer.models])
        assert "slow" in [model.name for model in answer.missing]
    with pytest.raises(ShuttingDown):
        app.predict(ROW)
    with pytest.raises(ShuttingDown):
        server.model(names[1]).predict(ROW).result(60)


def test_a_restart_on_a_state_folder(start, tmp_path):
    with start(state=str(tmp_path)) as server:
        for name, model in (("one", double), ("two", triple), ("three", double)):
            server.deploy(name, model, input="f64[2]")
        both(server)
        placed = {key: row["engine"] for key, row in server.stats()["models"].items()}
    again = start(state=str(tmp_path))
    app = again.app("both")
    wait_until(lambda: all(row["has"] == 1 for row in again.stats()["models"].values()), 30)
    np.testing.assert_allclose(app.predict(ROW).result(60).output, 2.5 * ROW)
    assert (
        sorted(placed.values())
        == sorted(row["engine"] for row in again.stats()["models"].values())
        == [0, 0, 1]
    )


@pytest.mark.parametrize("address", ["unix", "tcp://127.0.0.1:0"])
def test_containers_of_every_kind_dial_in_at_one_address(start, address):
    server = start(address=address)
    for i in range(4):
        server.deploy(f"m{i}", double, input="f64[64]", replicas=2, cache=False)
    assert [engine_of(server, f"m{i}") for i in range(4)] == [0, 1, 0, 1]
    for i in range(4):
        assert server.model(f"m{i}").predict(np.ones(64)).result(60).tolist() == [2.0] * 64
        assert len(pids(server, f"m{i}")) == 2


def test_a_fork_is_dead_in_all_engines(server):
    app = both(server)
    futures = app.predict(ROW), server.model("two").predict(ROW)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        outcome = "nothing raised"
        try:
            server.model("two").predict(ROW).result(60)
        except ForkedProcess:
            outcome = "dead"
        except ClipperError as error:
            outcome = repr(error)
        os.write(write, outcome.encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as child_output:
        assert child_output.read() == "dead"
    assert not futures[0].result(60).missing
    futures[1].result(60)


def test_more_engines_than_cores_is_a_note(monkeypatch, caplog, tmp_path: Path):
    monkeypatch.setattr(engines_module, "_cores", lambda: 1)
    with clipper.start(engines=3, **QUICK) as server:
        assert len(server._engines) == 1
    assert "server.engines = 3" in caplog.text
    assert "1 cores" in caplog.text
