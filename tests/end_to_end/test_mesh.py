"""The mesh on one node: models are registered, loaded on a query, evicted, fail, are restored."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clipper
from clipper.errors import (
    AlreadyExists,
    DoesNotFit,
    InvalidInput,
    StillLinked,
    StoreError,
    UnknownModel,
)
from clipper.mesh.decisions.maintenance import MeshView
from clipper.mesh.reports import MigrationProgress, ModelStatus
from clipper.mesh.routing import lookups
from clipper.metrics.stats import MeshStats
from tests.end_to_end.test_hosts import onnx_file
from tests.memory_container import wait_until
from tests.threads import join

MODELS = """
import os, pathlib, time

def double(rows):
    return rows * 2

def slow_to_import(rows):
    return rows

def pid(rows):
    return [os.getpid()] * len(rows)

def breaks(rows):
    raise ValueError("no")

def three(rows):
    assert len(rows[0]) == 3
    return rows * 2
"""
QUICK = {
    "name": "",
    "publish_s": 0.05,
    "rate_s": 0.1,
    "failure_s": 0.5,
    "tries": 1,
    "drain_s": 2.0,
    "lease_s": 60.0,
}
ROW = np.arange(3.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models")
    (place / "models.py").write_text(MODELS)
    return place


@pytest.fixture(scope="module")
def server() -> Iterator[clipper.ClipperServer]:
    with clipper.start(mesh={"enabled": True, **QUICK}, drain_s=1.0) as started:
        yield started


@pytest.fixture(scope="session")
def counter() -> Iterator[int]:
    return iter(range(1, 1_000_000))


@pytest.fixture
def register(
    server: clipper.ClipperServer, folder: Path, counter: Iterator[int]
) -> Iterator[Callable[..., str]]:
    """Yield a function that registers a function of models.py under a new id; unregister it after
    the test."""
    made: list[str] = []

    def do(function: str = "double", **settings: Any) -> str:
        id = f"meshed{next(counter)}"
        server.register_model(id, f"models.py:{function}", key=str(folder), **settings)
        made.append(id)
        return id

    yield do
    for id in made:
        server.mesh.unregister(id)
    wait_until(lambda: not set(made) & set(server.mesh.joined.loader.held))


def predict(server: clipper.ClipperServer, id: str, row: Any = ROW, slo_ms: float = 20_000) -> Any:
    answer = server.predict(id, row, slo_ms=slo_ms).result(30)
    assert not answer.is_default, answer.reason
    return answer.output


def test_a_model_is_loaded_when_it_is_requested(
    server: clipper.ClipperServer, register: Callable[..., str]
) -> None:
    id = register()
    assert server.mesh.status(id).status == "NOT_LOADED"
    assert predict(server, id).tolist() == [0.0, 2.0, 4.0]
    status = server.mesh.status(id)
    assert status.status == "LOADED"
    assert [copy.instance for copy in status.copies] == [server.mesh.instance]
    assert status.info is not None
    assert status.info.size_bytes > 0
    assert predict(server, id, ROW + 1).tolist() == [2.0, 4.0, 6.0]
    assert f"{id}:1" not in server.stats()["models"]


def test_queries_are_counted_as_hits_and_misses(
    server: clipper.ClipperServer, register: Callable[..., str]
) -> None:
    id = register()
    predict(server, id)
    wait_until(lambda: server.mesh.router.get(id).served)  # the node's loop may be late
    before = server.mesh.stats()
    for _ in range(3):
        predict(server, id)
    wait_until(lambda: server.mesh.stats()["queries_hit"] >= before["queries_hit"] + 3)


def test_stats_of_a_joined_node_have_the_declared_members(
    server: clipper.ClipperServer, register: Callable[..., str]
) -> None:
    """MeshStats lists the members; those of the leader come with its first round."""
    id = register()
    predict(server, id)
    stats = server.mesh.stats()
    of_leader = {"loaded_somewhere", "failing"}
    assert stats.keys() | of_leader == MeshStats.__annotations__.keys()
    assert stats["models_queried"] >= 1


def test_constraints_that_cannot_be_read_are_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"enabled": True, **QUICK, "constraints": str(tmp_path / "missing.json")}
    with clipper.start(mesh=settings, drain_s=0.0) as node:
        wait_until(lambda: "mesh.constraints" in caplog.text)
        node.mesh.joined.constraints.refresh()
        node.mesh.joined.constraints.refresh()
        assert caplog.text.count("mesh.constraints") == 1


def test_a_drain_that_does_not_reach_the_store_counts_no_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def publish(here: Any) -> None:
        raise StoreError("the store is away")

    with clipper.start(mesh={"enabled": True, **QUICK}, drain_s=0.0) as node:
        monkeypatch.setattr(node.mesh.joined.registry, "publish", publish)
        assert node.mesh.drain() == MigrationProgress(0, 0, 0, 0)


def test_many_at_once_make_one_load(
    server: clipper.ClipperServer, register: Callable[..., str]
) -> None:
    id = register()
    loads = server.mesh.stats()["loads"]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: predict(server, id, ROW + n)[0], range(200)))
    assert answers == [2.0 * n for n in range(200)]
    assert server.mesh.stats()["loads"] == loads + 1


def test_the_handle_of_a_model_loads_it_too(
    server: clipper.ClipperServer, register: Callable[..., str]
) -> None:
    id = register()
    model = server.model(id)
    assert model.predict(ROW, slo_ms=20_000).result(30).tolist() == [0.0, 2.0, 4.0]
    assert model.predict_many(np.stack([ROW, ROW + 1])).result(30)[1].tolist() == [2.0, 4.0, 6.0]
    assert model.cached(ROW)[0]


def test_first_query_of_a_wrong_shape_does_not_decide_the_type_of_a_model_that_states_its_own(
    server: clipper.ClipperServer, tmp_path: Path
) -> None:
    server.register_model("typed", onnx_file(tmp_path / "typed.onnx", 1.0))
    try:
        wrong = server.predict("typed", np.ones(4), slo_ms=20_000).result(30)
        assert wrong.is_default
        assert wrong.reason == "typed: it takes rows of f32[3], not f64[4]"
        assert predict(server, "typed") == 3.0
        with pytest.raises(InvalidInput, match=r"f32\[3\]"):
            server.predict("typed", np.ones(4))
    finally:
        server.mesh.unregister("typed")


def test_first_query_that_has_no_output_does_not_decide_the_type_of_a_model_that_states_none(
    server: clipper.ClipperServer, register: Callable[..., str]
) -> None:
    id = register("three")
    assert server.predict(id, np.ones(4), slo_ms=20_000).result(30).is_default
    # the next query already, since no output has confirmed the type
    assert not server.predict(id, ROW, slo_ms=20_000).result(30).is_default
    assert predict(server, id, ROW + 1).tolist() == [2.0, 4.0, 6.0]
    with pytest.raises(InvalidInput):
        server.predict(id, np.ones(4))


def test_unknown_names_delay_no_query_while_the_store_hangs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = threading.Event()
    monkeypatch.setattr(lookups, "WAIT_S", 0.25)
    monkeypatch.setattr(lookups, "LOOP_WAIT_S", 0.05)
    with clipper.start(mesh={"enabled": True, **QUICK}, http="127.0.0.1:0") as server:
        server.register_model("m1", "models.py:double", key=str(folder), input="f64[3]")
        predict(server, "m1")
        monkeypatch.setattr(server.mesh.joined.registry, "read", lambda id: hangs.wait(60))

        def over_http(name: str) -> int:
            tensor = {"name": "x", "shape": [1, 3], "datatype": "FP64", "data": [1, 2, 3]}
            url = f"http://{server.http_address}/v2/models/{name}/infer"
            try:
                with urllib.request.urlopen(
                    url, json.dumps({"inputs": [tensor]}).encode(), timeout=30
                ) as response:
                    return int(response.status)
            except urllib.error.HTTPError as error:
                return error.code

        assert [over_http(name) for name in ("unknown1", "m1", "unknown2", "m1")] == [
            404,
            200,
            404,
            200,
        ]
        with pytest.raises(UnknownModel):
            server.predict("unknown3", ROW)
        assert not hangs.is_set()
        hangs.set()
        monkeypatch.undo()


def is_known(server: clipper.ClipperServer, name: str) -> bool:
    """Return whether this node knows a model now."""
    with contextlib.suppress(clipper.ClipperError):
        server.model(name)
        return True
    return False


@pytest.mark.slow
def test_cold_query_without_a_deadline_of_its_own_waits_for_the_load(tmp_path: Path) -> None:
    """The load takes longer than `mesh.deadline_ms`, and it is this load that the query waits
    for."""
    gate = tmp_path / "gate"
    waits = f"import os, time\nwhile not os.path.exists({str(gate)!r}):\n    time.sleep(.01)\n"
    (tmp_path / "late.py").write_text(f"{waits}def f(rows):\n    return rows + 1")
    settings = {"enabled": True, **QUICK, "deadline_ms": 100.0}
    with clipper.start(mesh=settings, http="127.0.0.1:0") as server, ThreadPoolExecutor(3) as pool:
        server.register_model("late", "late.py:f", "python", str(tmp_path), input="f64[3]")
        # the first query over HTTP would wait for the store for a while only
        wait_until(lambda: is_known(server, "late"))
        tensor = {"name": "x", "shape": [1, 3], "datatype": "FP64", "data": [1, 2, 3]}
        url = f"http://{server.http_address}/v2/models/late/infer"
        body = json.dumps({"inputs": [tensor]}).encode()
        over_http = pool.submit(
            lambda: json.load(urllib.request.urlopen(urllib.request.Request(url, body)))
        )
        predicted = server.predict("late", ROW)
        of_handle = server.model("late").predict(ROW)
        ended = server.predict("late", ROW, slo_ms=300).result(30)
        assert ended.is_default
        assert not over_http.done()
        gate.touch()
        assert over_http.result(30)["outputs"][0]["data"] == [2.0, 3.0, 4.0]
        assert predicted.result(30).output.tolist() == [1.0, 2.0, 3.0]
        assert of_handle.result(30).tolist() == [1.0, 2.0, 3.0]


def test_over_http(folder: Path) -> None:
    tensor = {"name": "x", "shape": [1, 3], "datatype": "FP64", "data": [1, 2, 3]}
    body = {"inputs": [tensor], "parameters": {"timeout": 20_000_000}}
    with clipper.start(mesh={"enabled": True, **QUICK}, http="127.0.0.1:0") as server:
        server.register_model("m1", "models.py:double", key=str(folder), input="f64[3]")
        url = f"http://{server.http_address}/v2/models/m1"
        with urllib.request.urlopen(
            urllib.request.Request(f"{url}/infer", json.dumps(body).encode())
        ) as response:
            assert json.load(response)["outputs"][0]["data"] == [2.0, 4.0, 6.0]
        with urllib.request.urlopen(f"{url}/ready") as response:
            assert response.status == 200


def test_the_same_again_is_no_error_and_another_is(
    server: clipper.ClipperServer, register: Callable[..., str], folder: Path
) -> None:
    id = register()
    server.register_model(id, "models.py:double", key=str(folder))
    with pytest.raises(AlreadyExists, match="path"):
        server.register_model(id, "models.py:pid", key=str(folder))


def test_names_of_the_catalog_are_taken(server: clipper.ClipperServer) -> None:
    server.deploy("in_catalog", lambda xs: xs, input="f64[2]", replicas=0)
    with pytest.raises(AlreadyExists, match="catalog"):
        server.register_model("in_catalog", "models.py:double")
    with pytest.raises(InvalidInput, match="ending"):
        server.register_model("what", "models/thing")


def test_unregistered_is_unknown_and_its_memory_is_freed(
    server: clipper.ClipperServer, register: Callable[..., str]
) -> None:
    id = register()
    predict(server, id)
    server.mesh.unregister(id)
    server.mesh.unregister(id)
    wait_until(
        lambda: id not in server.mesh.joined.loader.held and server.mesh.router.get(id) is None
    )
    with pytest.raises(UnknownModel):
        server.predict(id, ROW)
    assert server.mesh.status(id).status == "NOT_FOUND"


def test_what_unregistered_models_took_is_given_back(
    server: clipper.ClipperServer, register: Callable[..., str]
) -> None:
    snapshot = server._engines.snapshot
    wait_until(lambda: snapshot()["unlisted"] == len(server.mesh.router))
    before = snapshot()
    for _ in range(3):
        ids = [register() for _ in range(8)]
        for id in ids:
            predict(server, id)
            assert server.model(id).predict_many(np.ones((64, 3))).result(30).sum() == 64 * 6
        assert snapshot()["lanes"] == before["lanes"] + 16
        for id in ids:
            server.mesh.unregister(id)
        wait_until(
            lambda: (
                (snapshot()["lanes"], snapshot()["unlisted"])
                == (before["lanes"], before["unlisted"])
            )
        )


def test_waiting_queries_end_when_the_load_fails_for_good_or_the_model_goes(tmp_path: Path) -> None:
    """Queries end at once, and not at their deadlines, which are much later."""
    (tmp_path / "broken.py").write_text("def f(")
    gate = tmp_path / "gate"
    waits = f"import os, time\nwhile not os.path.exists({str(gate)!r}):\n    time.sleep(.01)\n"
    (tmp_path / "slow.py").write_text(f"{waits}def f(x): ...")
    with clipper.start(mesh={"enabled": True, **QUICK, "failure_s": 3600.0}) as server:
        server.register_model("broken", "broken.py:f", "python", str(tmp_path))
        server.register_model("slow", "slow.py:f", "python", str(tmp_path))
        assert "broken.py" in server.predict("broken", ROW, slo_ms=60_000).result(30).reason
        assert "broken.py" in server.predict("broken", ROW, slo_ms=60_000).result(30).reason
        goes = server.predict("slow", ROW, slo_ms=60_000)
        server.mesh.unregister("slow")
        assert "registered" in goes.result(30).reason
        gate.touch()


def test_a_broken_artifact_is_reported_and_tried_again(
    server: clipper.ClipperServer, register: Callable[..., str], tmp_path: Path
) -> None:
    path = tmp_path / "late.py"
    path.write_text("def f(")
    server.register_model("broken", f"{path.name}:f", "python", str(tmp_path))
    try:

        def failed() -> ModelStatus | None:
            """Return the status after a query, unless the failure has expired by then."""
            answer = server.predict("broken", ROW, slo_ms=3000).result(30)
            assert answer.is_default
            assert "late.py" in answer.reason
            status = server.mesh.status("broken")
            return status if status.status == "LOADING_FAILED" else None

        for _ in range(2):
            assert "late.py" in wait_until(failed).errors[0]
        path.write_text("def f(rows):\n    return rows + 1\n")
        wait_until(lambda: not server.predict("broken", ROW, slo_ms=2000).result(30).is_default)
        assert predict(server, "broken").tolist() == [1.0, 2.0, 3.0]
    finally:
        server.mesh.unregister("broken")
        wait_until(lambda: "broken" not in server.mesh.joined.loader.held)


def test_queries_wait_for_the_model_when_its_host_is_killed(
    server: clipper.ClipperServer, register: Callable[..., str]
) -> None:
    id = register("pid")
    before = predict(server, id)
    stop, failed = threading.Event(), []

    def go_on() -> None:
        n = 0
        while not stop.is_set():
            n += 1
            answer = server.predict(id, ROW + n, slo_ms=20_000).result(30)
            if answer.is_default:
                failed.append(answer.reason)

    query_thread = threading.Thread(target=go_on)
    query_thread.start()
    os.kill(server.mesh.joined.hosts[0].pid, signal.SIGKILL)
    wait_until(lambda: predict(server, id, ROW - os.urandom(1)[0]) != before)
    stop.set()
    join(query_thread)
    assert not failed, failed
    assert server.mesh.joined.hosts[0].starts == 2


def test_ensure_loaded_waits(server: clipper.ClipperServer, register: Callable[..., str]) -> None:
    id = register()
    status = server.mesh.ensure_loaded(id, sync=True)
    assert status.status == "LOADED", status
    loaded = register(load_now=True, sync=True)
    assert server.mesh.status(loaded).status == "LOADED"
    with pytest.raises(UnknownModel):
        server.mesh.ensure_loaded("nobody")


def test_the_history_of_a_model_is_shown(
    server: clipper.ClipperServer, register: Callable[..., str]
) -> None:
    id = register()
    assert [v.ok for v in server.mesh.explain(id).verdicts] == [True]
    predict(server, id)
    reply = server.mesh.explain(id)
    assert [d.what for d in reply.history] == [f"placed in {server.mesh.instance}", "loaded"]
    assert server.mesh.instance in reply.next


def test_a_vmodel_stands_for_a_model(
    server: clipper.ClipperServer, register: Callable[..., str]
) -> None:
    one, other = register(), register("pid")
    server.mesh.set_vmodel("alias", one)
    try:
        assert predict(server, "alias").tolist() == [0.0, 2.0, 4.0]
        with pytest.raises(StillLinked):
            server.mesh.unregister(one)
        assert server.mesh.set_vmodel("alias", other, sync=True).active == other
        wait_until(lambda: np.ndim(predict(server, "alias")) == 0)
        assert server.mesh.status(other).status == "LOADED"
        with pytest.raises(AlreadyExists):
            server.register_model("alias", "models.py:double")
    finally:
        server.mesh.delete_vmodel("alias")
    wait_until(lambda: server.mesh.router.route("alias") is None)
    with pytest.raises(UnknownModel):
        server.predict("alias", ROW)


def test_events_are_delivered(server: clipper.ClipperServer, folder: Path) -> None:
    events = []
    done = threading.Event()

    def listen() -> None:
        for event in server.mesh.watch("watched", stop=done.is_set):
            events.append((event.kind, event.id))

    listening = threading.Thread(target=listen)
    listening.start()
    wait_until(lambda: ("SYNC", "") in events)
    server.register_model("watched", "models.py:double", key=str(folder))
    server.mesh.unregister("watched")
    wait_until(lambda: ("DELETE", "watched") in events)
    done.set()
    join(listening)
    assert events == [("SYNC", ""), ("PUT", "watched"), ("DELETE", "watched")]


def test_the_least_worthy_goes_where_there_is_no_room(folder: Path) -> None:
    with clipper.start(mesh={"enabled": True, **QUICK, "loaded_max": 2}) as server:
        for n in range(4):
            server.register_model(f"m{n}", "models.py:double", key=str(folder))
            predict(server, f"m{n}")
        # which of the others, measured load times say, once it is 200 ms old
        held = set(server.mesh.joined.loader.held)
        assert ("m3" in held, len(held)) == (True, 2)
        for n in (0, 1, 2, 3, 0):
            assert predict(server, f"m{n}", ROW + n)[0] == 2.0 * n
        wait_until(
            lambda: (
                {s.id for s in server.mesh.models("m") if s.status == "LOADED"}
                == set(server.mesh.joined.loader.held)
            )
        )


def test_without_a_mesh_there_is_none() -> None:
    with clipper.start() as server, pytest.raises(DoesNotFit, match="mesh=True"):
        _ = server.mesh


def test_a_target_whose_switch_was_waited_for_is_queried_at_once(
    server: clipper.ClipperServer, register: Callable[..., str]
) -> None:
    one, other = register("double"), register("slow_to_import")
    for id in (one, other):
        predict(server, id)
    server.mesh.set_vmodel("at-once", one, sync=True)
    assert predict(server, "at-once").tolist() == [0.0, 2.0, 4.0]
    server.mesh._loop.call(time.sleep, 0.5)  # the mesh's own thread hears of it late
    server.mesh.set_vmodel("at-once", other, sync=True)
    assert predict(server, "at-once", ROW + 1).tolist() == [1.0, 2.0, 3.0]
    server.mesh.delete_vmodel("at-once")


def test_a_target_that_the_mirror_does_not_know_is_not_gone(
    server: clipper.ClipperServer, register: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = register("double"), register("slow_to_import")
    predict(server, one)
    server.mesh.set_vmodel("ahead", one, sync=True)
    take, reads = server.mesh.joined.view.take, itertools.count()

    def behind(*args: Any) -> MeshView:
        seen = take(*args)
        return replace(
            seen, read=lambda id: None if id == other and next(reads) < 2 else seen.read(id)
        )

    monkeypatch.setattr(server.mesh.joined.view, "take", behind)
    reply = server.mesh.set_vmodel("ahead", other, sync=True)
    assert (reply.status, reply.active, next(reads) > 2) == ("DEFINED", other, True)
    server.mesh.delete_vmodel("ahead")
