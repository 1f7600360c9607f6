"""The interfaces of the mesh to a real node: HTTP, its client, a shell, gRPC; changes by one are
seen by the others."""

import contextlib
import functools
import itertools
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clipper
from clipper.cli import main
from clipper.errors import (
    AlreadyExists,
    ClipperError,
    InvalidInput,
    NoServer,
    Overloaded,
    ShuttingDown,
    StillLinked,
    UnknownModel,
)
from clipper.manage.client import Client
from clipper.manage.mesh.client import MeshClient
from clipper.mesh.decisions import vmodels
from clipper.mesh.records import MeshModel
from clipper.store.history import default_actor
from tests.frontend.conftest import ask, warm_workers
from tests.memory_container import wait_until
from tests.onnx_models import two_by_two
from tests.threads import join

grpc = pytest.importorskip("grpc", reason="pip install 'clipper-serving[grpc]'")
CliRunner = pytest.importorskip("click.testing").CliRunner

MESH = "mmesh.ModelMesh"
MODELS = """
def double(rows):
    return rows * 2

def triple(rows):
    return rows * 3
"""
QUICK = {"name": "", "publish_s": 0.05, "rate_s": 0.05, "drain_s": 1.0}
ROW = {"inputs": [{"name": "input", "shape": [1, 3], "datatype": "FP64", "data": [1.0, 2.0, 3.0]}]}
PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("models")
    (place / "models.py").write_text(MODELS)
    return str(place)


@pytest.fixture(scope="module")
def server() -> Iterator[clipper.ClipperServer]:
    addresses = dict.fromkeys(("http", "admin", "grpc"), "127.0.0.1:0")
    with clipper.start(mesh={"enabled": True, **QUICK}, drain_s=1.0, **addresses) as started:
        warm_workers(started)
        yield started


@pytest.fixture
def mesh_client(server: clipper.ClipperServer) -> MeshClient:
    return Client(f"http://{server.admin_address}", timeout_s=PATIENCE_S).mesh


def infer(server: clipper.ClipperServer, path: str, headers: dict[str, str] | None = None) -> Any:
    body = {**ROW, "parameters": {"timeout": 15_000_000}}
    reply = ask(server.http_address, "POST", f"/v2/models/{path}/infer", body, headers)
    assert reply.status == 200, reply.body
    return [output["data"] for output in reply.json["outputs"]]


def test_over_http_a_model_is_registered_queried_and_explained(
    server: clipper.ClipperServer, mesh_client: MeshClient, folder: str
) -> None:
    assert mesh_client.register("h1", "models.py:double", key=folder).status == "NOT_LOADED"
    assert infer(server, "h1") == [[2.0, 4.0, 6.0]]
    found = mesh_client.status("h1")
    assert (found.status, [copy.instance for copy in found.copies]) == (
        "LOADED",
        [server.mesh.instance],
    )
    assert found.copies[0].size_bytes > 0
    reply = ask(server.http_address, "POST", "/api/h1/predict", {"input": [1.0, 2.0, 3.0]}).json
    assert (reply["output"], reply["default"]) == ([2.0, 4.0, 6.0], False)
    why = mesh_client.explain("h1")
    assert [one.what for one in why.history][-1] == "loaded"
    assert server.mesh.instance in why.next
    (here,) = mesh_client.instances()
    assert (here.id, here.models) == (server.mesh.instance, len(server.mesh.joined.loader.held))
    with pytest.raises(AlreadyExists):
        mesh_client.register("h1", "models.py:triple", key=folder)
    with pytest.raises(InvalidInput, match="bad model name"):
        mesh_client.register("No Name", "models.py:triple", key=folder)
    with pytest.raises(InvalidInput, match="bad v-model name"):
        mesh_client.set_vmodel("No Name", "h1")
    mesh_client.unregister("h1")
    assert mesh_client.status("h1").status == "NOT_FOUND"
    wait_until(lambda: ask(server.http_address, "POST", "/v2/models/h1/infer", ROW).status == 404)


def test_a_model_of_named_tensors_is_loaded_and_queried(
    server: clipper.ClipperServer, mesh_client: MeshClient, tmp_path: Path
) -> None:
    from tests.frontend.test_grpc import INFERENCE, Client

    pytest.importorskip("onnxruntime", reason="pip install onnxruntime")
    path = tmp_path / "pair.onnx"
    path.write_bytes(two_by_two())
    inputs, outputs = {"x": "f32[3]", "factor": "f32"}, {"scaled": "f32[3]", "total": "f32"}
    mesh_client.register("stated", str(path), input=json.dumps(inputs), output=json.dumps(outputs))
    mesh_client.register("found", str(path))
    tensors = [
        {"name": "x", "shape": [2, 3], "datatype": "FP32", "data": [1, 2, 3, 0, 0, 1]},
        {"name": "factor", "shape": [2], "datatype": "FP32", "data": [2, 5]},
    ]
    body = {"inputs": tensors, "parameters": {"timeout": 15_000_000}}
    mesh_client.register("described", str(path))
    mesh_client.register("away", str(tmp_path / "away.onnx"))
    about = ask(server.http_address, "GET", "/v2/models/described").json
    assert [one["name"] for one in about["inputs"]] == [*inputs], "it was loaded for that"
    client = Client(server.grpc_address)
    client(MESH, "registerModel", modelId="by-grpc", modelInfo={"type": "onnx", "path": str(path)})
    by_grpc = client(INFERENCE, "ModelMetadata", name="by-grpc")
    assert [one.name for one in by_grpc.outputs] == [*outputs]
    quick = {**body, "parameters": {"timeout": 200_000}}
    reply = ask(server.http_address, "POST", "/v2/models/away/infer", quick)
    assert (reply.status, "are known once its model" in reply.json["error"]) == (504, True)
    for name in ("stated", "found", "described", "by-grpc"):
        reply = ask(server.http_address, "POST", f"/v2/models/{name}/infer", body)
        found = {one["name"]: one["data"] for one in reply.json["outputs"]}
        assert found == {"scaled": [2, 4, 6, 0, 0, 5], "total": [12, 5]}
        about = ask(server.http_address, "GET", f"/v2/models/{name}").json
        assert [one["name"] for one in about["inputs"]] == [*inputs]
        assert [one["name"] for one in about["outputs"]] == [*outputs]
        mesh_client.unregister(name)
    mesh_client.unregister("away")


@pytest.mark.parametrize("given", ["input", "inputs", "columns", "stream"])
def test_over_rest_named_tensors_wait_for_the_first_load(
    server: clipper.ClipperServer, mesh_client: MeshClient, tmp_path: Path, given: str
) -> None:
    pytest.importorskip("onnxruntime", reason="pip install onnxruntime")
    path = tmp_path / "pair.onnx"
    path.write_bytes(two_by_two())
    mesh_client.register("first", str(path))
    server.app("first-load", models=["first"], slo_ms=20_000)
    row, route = {"x": [1, 2, 3], "factor": 2}, "/api/first-load/predict"
    body: dict[str, Any] = {"inputs": [row, row]}
    if given == "columns":
        body = {"inputs": {"x": [[1, 2, 3]] * 2, "factor": [2, 2]}}
    elif given != "inputs":
        body = {"input": row}
    if given == "stream":
        reply = ask(server.http_address, "POST", f"{route}/stream", body)
        assert (reply.status, b'"total":12.0' in reply.body) == (200, True)
    else:
        reply = ask(server.http_address, "POST", route, body)
        assert reply.status == 200, reply.json
        found = reply.json.get("predictions") or [reply.json]
        assert [one["output"]["scaled"] for one in found] == [[2, 4, 6]] * len(found)
    assert ask(server.http_address, "POST", route, {"input": {"x": [1]}}).status == 400
    server.remove_app("first-load")
    mesh_client.unregister("first")


def test_over_rest_a_model_that_is_not_loaded_in_time_is_no_bad_request(
    server: clipper.ClipperServer, mesh_client: MeshClient, tmp_path: Path
) -> None:
    mesh_client.register("gone", "away.py:score", key=str(tmp_path))
    server.app("never", models=["gone"], slo_ms=200)
    reply = ask(server.http_address, "POST", "/api/never/predict", {"input": {"x": [1]}})
    assert reply.status == 504
    assert "are known once its model is loaded" in reply.json["error"]
    server.remove_app("never")
    mesh_client.unregister("gone")


def test_over_http_a_vmodel_stands_for_one_and_then_for_another(
    server: clipper.ClipperServer, mesh_client: MeshClient, folder: str
) -> None:
    for id, function in (("v1", "double"), ("v2", "triple")):
        mesh_client.register(id, f"models.py:{function}", key=folder)
    mesh_client.set_vmodel("best", "v1", load_now=True, sync=True)
    assert infer(server, "best") == [[2.0, 4.0, 6.0]]
    assert mesh_client.set_vmodel("best", "v2", sync=True).active == "v2"
    assert infer(server, "anything", {"mm-vmodel-id": "best"}) == [[3.0, 6.0, 9.0]]
    assert infer(server, "anything", {"mm-model-id": "v1, v2"}) == [
        [2.0, 4.0, 6.0],
        [3.0, 6.0, 9.0],
    ]
    with pytest.raises(StillLinked):
        mesh_client.unregister("v2")
    mesh_client.rollback_vmodel("best")
    wait_until(lambda: mesh_client.vmodel_status("best").active == "v1")
    assert infer(server, "best") == [[2.0, 4.0, 6.0]]
    mesh_client.delete_vmodel("best")
    assert mesh_client.vmodel_status("best").status == "NOT_FOUND"


def entered(server: clipper.ClipperServer, id: str) -> list[tuple[str, str]]:
    """Return the changes of a record with the actor of each."""
    rows = Client(f"http://{server.admin_address}", timeout_s=PATIENCE_S).history(1000)
    return [
        (row["actor"], row["verb"])
        for row in rows
        if any(id in one["key"].split("/") for one in row["changed"])
    ]


def leader(server: clipper.ClipperServer) -> str:
    return f"the mesh (node {server.mesh.instance})"


def test_a_rehearsal_changes_nothing_and_a_change_is_entered_as_its_makers(
    server: clipper.ClipperServer, mesh_client: MeshClient, folder: str
) -> None:
    def ask_as_ann(method: str, path: str, members: Any = None) -> Any:
        return ask(
            server.admin_address, method, f"/v1/mesh/{path}", members, {"Clipper-Actor": "ann"}
        )

    about = {"path": "models.py:double", "key": folder}
    rehearsed = ask_as_ann(
        "PUT", "models/d1?dry_run=true", {**about, "load_now": True, "sync": True}
    )
    assert (rehearsed.status, rehearsed.json["status"], rehearsed.json["info"]["type"]) == (
        200,
        "NOT_LOADED",
        "python",
    )
    assert mesh_client.status("d1").status == "NOT_FOUND"
    assert ask_as_ann("PUT", "models/d1", about).status == 200
    with pytest.raises(AlreadyExists):
        mesh_client.register("d1", "models.py:triple", key=folder, dry_run=True)
    assert (
        mesh_client.set_vmodel("dv", "d1", load_now=True, sync=True, dry_run=True).status
        == "DEFINED"
    )
    assert mesh_client.vmodel_status("dv").status == "NOT_FOUND"
    assert ask_as_ann("PUT", "vmodels/dv", {"target": "d1"}).status == 200
    with pytest.raises(StillLinked):
        mesh_client.unregister("d1", dry_run=True)
    assert ask_as_ann("DELETE", "vmodels/dv?dry_run=true").status == 204
    assert mesh_client.vmodel_status("dv").active == "d1"
    with pytest.raises(InvalidInput, match="nothing to go back to"):
        mesh_client.rollback_vmodel("dv", dry_run=True)
    assert ask_as_ann("DELETE", "vmodels/dv").status == 204
    mesh_client.unregister("d1", dry_run=True)
    assert mesh_client.status("d1").status == "NOT_LOADED"
    server.mesh.unregister("d1")
    assert entered(server, "dv") == [("ann", "mesh vmodel set"), ("ann", "mesh vmodel delete")]
    made, *_, gone = entered(server, "d1")
    assert (made, gone) == (("ann", "mesh register"), (default_actor(), "mesh unregister"))
    assert ask_as_ann("PUT", "models/d1?dryrun=1", about).status == 400


def test_a_file_that_is_not_there_is_a_failure_with_its_reason(
    server: clipper.ClipperServer, mesh_client: MeshClient
) -> None:
    failed = mesh_client.register("gone", "/nowhere/gone.onnx", load_now=True, sync=True)
    assert failed.status == "LOADING_FAILED"
    assert "gone.onnx" in failed.errors[0]
    reply = ask(server.http_address, "POST", "/api/gone/predict", {"input": [1.0, 2.0, 3.0]})
    assert "could not be loaded" in reply.body.decode()


def test_a_watcher_sees_a_load(
    server: clipper.ClipperServer, mesh_client: MeshClient, folder: str
) -> None:
    mesh_client.register("w1", "models.py:double", key=folder)
    seen = []
    with contextlib.closing(mesh_client.watch("w1")) as events:
        mesh_client.ensure_loaded("w1")
        for event in events:  # what a node hears of may be told before SYNC or after it
            record: Any = event.record
            seen.append(event.kind if record is None else record.status())
            if {"SYNC", "LOADED"} <= {*seen}:
                break
    assert seen.count("SYNC") == 1
    assert {*seen} <= {"SYNC", "NOT_LOADED", "LOADING", "LOADED"}


def test_a_watcher_over_grpc_sees_what_one_over_http_does(
    server: clipper.ClipperServer, mesh_client: MeshClient, folder: str
) -> None:
    from tests.frontend.test_grpc import Client

    client = Client(server.grpc_address)
    call = client("clipper.v1.Mesh", "Watch", prefix="told")
    by_grpc, by_http = (
        (event for reply in call for event in reply.events),
        mesh_client.watch("told"),
    )
    assert (next(by_grpc).kind, next(by_http).kind) == (3, "SYNC")
    mesh_client.register("told", "models.py:double", key=folder, load_now=True)
    seen: list[Any] = []
    while not seen or not seen[-1].copies or not seen[-1].copies[server.mesh.instance].loaded_ms:
        event, other = next(by_grpc), next(by_http)
        assert isinstance(other.record, MeshModel)
        assert (event.id, event.revision, set(event.model.copies)) == (
            other.id,
            other.revision,
            set(other.record.copies),
        )
        assert (event.model.type, event.model.key, event.model.size_bytes) == (
            "python",
            folder,
            other.record.size_bytes,
        )
        seen.append(event.model)
    call.cancel()
    by_http.close()
    client.channel.close()


def test_hits_misses_and_loads_are_counted(
    server: clipper.ClipperServer, mesh_client: MeshClient, folder: str
) -> None:
    before = mesh_client.stats()
    mesh_client.register("c1", "models.py:double", key=folder)
    infer(server, "c1")
    wait_until(lambda: server.mesh.router.get("c1").served)  # the node's loop may be late
    for _ in range(4):
        infer(server, "c1")
    wait_until(lambda: mesh_client.stats()["queries_hit"] >= before["queries_hit"] + 4)
    after = mesh_client.stats()
    assert after["queries_missed"] == before["queries_missed"] + 1
    assert after["loads"] == before["loads"] + 1
    assert after["load_wait_us"]["count"] == after["loads"]
    text = ask(server.admin_address, "GET", "/metrics").body.decode()
    (hits,) = re.findall(r'^clipper_mesh_queries_total\{outcome="hit"\} (\d+)$', text, re.M)
    assert int(hits) >= after["queries_hit"]
    assert f"clipper_mesh_models_held {len(server.mesh.joined.loader.held)}\n" in text
    assert "c1" not in text, "no series for each model"


def test_by_the_names_of_model_mesh(
    server: clipper.ClipperServer, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.frontend.test_grpc import INFERENCE, Client, tensor_of

    client = Client(server.grpc_address)
    about = {"type": "python", "path": "models.py:double", "key": folder}
    loaded = client(MESH, "registerModel", modelId="g1", modelInfo=about, loadNow=True, sync=True)
    assert (loaded.status, loaded.modelCopyInfos[0].location) == (3, server.mesh.instance)
    broken = client(
        MESH,
        "registerModel",
        modelId="g0",
        modelInfo={"type": "onnx", "path": "/g0"},
        loadNow=True,
        sync=True,
    )
    assert (broken.status, len(broken.errors)) == (4, 1)
    nobody = {
        "modelId": "g9",
        "modelInfo": {"type": "pmml", "path": "/g9"},
        "loadNow": True,
        "sync": True,
    }
    refused = client.refused(MESH, "registerModel", **nobody)
    assert (refused.code(), "no instance can hold it" in refused.details()) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        True,
    )
    other = {**about, "path": "models.py:triple"}
    assert (
        client.refused(MESH, "registerModel", modelId="g1", modelInfo=other).code()
        is grpc.StatusCode.ALREADY_EXISTS
    )
    assert (
        client.refused(MESH, "ensureLoaded", modelId="nobody").code() is grpc.StatusCode.NOT_FOUND
    )
    new = client(MESH, "setVModel", vModelId="gv", targetModelId="g1", owner="ann")
    assert (new.status, new.activeModelId) == (1, "g1")
    fields = {
        "vModelId": "gv",
        "targetModelId": "g2",
        "modelInfo": other,
        "autoDeleteTargetModel": True,
    }
    assert (
        client.refused(MESH, "setVModel", owner="bob", **fields).code()
        is grpc.StatusCode.ALREADY_EXISTS
    )
    unmet = client.refused(MESH, "setVModel", owner="ann", expectedTargetModelId="x", **fields)
    assert unmet.code() is grpc.StatusCode.FAILED_PRECONDITION
    switched = client(
        MESH, "setVModel", owner="ann", expectedTargetModelId="g1", sync=True, **fields
    )
    assert (switched.status, switched.activeModelId, switched.activeModelStatus.status) == (
        1,
        "g2",
        3,
    )
    for ids, expected in (("gv", [[3.0, 6.0, 9.0]]), ("g1", [[2.0, 4.0, 6.0]])):
        named = Client(
            server.grpc_address, metadata=[("mm-vmodel-id" if ids == "gv" else "mm-model-id", ids)]
        )
        answer = named(INFERENCE, "ModelInfer", tensor_of("", [[1.0, 2.0, 3.0]]))
        assert np.frombuffer(answer.raw_output_contents[0]).reshape(1, 3).tolist() == expected
        named.channel.close()
    assert (
        client.refused(MESH, "unregisterModel", modelId="g2").code()
        is grpc.StatusCode.FAILED_PRECONDITION
    )
    monkeypatch.setattr(vmodels, "LINGER_MS", 0)
    client(MESH, "deleteVModel", vModelId="gv", owner="ann")
    assert client(MESH, "getVModelStatus", vModelId="gv").status == 0
    wait_until(lambda: client(MESH, "getModelStatus", modelId="g2").status == 0)
    bob = Client(server.grpc_address, metadata=[("clipper-actor", "bob")])
    bob(MESH, "unregisterModel", modelId="g1")
    bob.channel.close()
    client.channel.close()
    assert entered(server, "gv") == [
        ("grpc", "mesh vmodel set"),
        ("grpc", "mesh vmodel set"),
        (leader(server), "mesh vmodel switched"),
        ("grpc", "mesh vmodel delete"),
    ]
    assert (entered(server, "g1")[0], entered(server, "g1")[-1]) == (
        ("grpc", "mesh register"),
        ("bob", "mesh unregister"),
    )


def test_from_a_shell(
    server: clipper.ClipperServer, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLIPPER_URL", f"http://{server.admin_address}")

    def run(*words: str) -> Any:
        return CliRunner().invoke(main, words, prog_name="clipper")

    about = ("models.py:double", "--type", "python", "--key", folder)
    would = run("mesh", "register", "s1", *about, "--sync", "--dry-run")
    assert (would.exit_code, would.output.startswith("dry run: s1: NOT_LOADED")) == (0, True)
    assert server.mesh.status("s1").status == "NOT_FOUND"
    assert run("mesh", "register", "s1", *about).output.startswith("s1: NOT_LOADED")
    assert run("mesh", "vmodel", "set", "sv", "s1", "--dry-run").output.startswith(
        "dry run: sv: DEFINED, refers to s1"
    )
    assert (
        run("mesh", "vmodel", "delete", "sv", "--dry-run").output
        == "dry run: v-model sv is deleted\n"
    )
    assert "no v-model 'sv'" in run("mesh", "vmodel", "rollback", "sv", "--dry-run").output
    assert run("mesh", "unregister", "s1", "--dry-run").output == "dry run: s1 is unregistered\n"
    assert " mesh register " in run("history", "-n", "1").output
    assert run("predict", "s1", "[1, 2, 3]").output.startswith("[2, 4, 6]\tby s1:1")
    assert run("mesh", "status", "s1").output.startswith("s1: LOADED")
    assert json.loads(run("mesh", "explain", "s1", "-o", "json").output)["status"] == "LOADED"
    assert server.mesh.instance[:10] in run("mesh", "ps").output
    assert run("mesh", "unregister", "s1").exit_code == 0
    with pytest.raises(UnknownModel):
        server.mesh.ensure_loaded("s1")


def test_a_server_that_closes_does_not_wait_for_who_waits_for_a_load(tmp_path: Path) -> None:
    began = tmp_path / "began"
    (tmp_path / "slow.py").write_text(
        f"open({str(began)!r}, 'w').close()\nimport time\ntime.sleep(60)\ndef f(rows): return rows"
    )
    raised: list[Any] = []
    server = clipper.start(
        mesh={"enabled": True, **QUICK, "drain_s": 0.0}, drain_s=0.2, admin="127.0.0.1:0"
    )

    def wait(register: Any) -> None:
        try:
            register("slow", "slow.py:f", "python", str(tmp_path), load_now=True, sync=True)
        except ClipperError as error:
            raised.append(error)

    mesh_clients = (
        server.mesh,
        Client(f"http://{server.admin_address}", timeout_s=PATIENCE_S).mesh,
    )
    waiting = [
        threading.Thread(target=wait, args=(mesh_client.register,)) for mesh_client in mesh_clients
    ]
    for thread in waiting:
        thread.start()
    wait_until(began.exists)
    server.close()
    for thread in waiting:
        join(thread)
    assert len(raised) == 2
    assert all(isinstance(error, Overloaded | ShuttingDown | NoServer) for error in raised), raised


def test_the_first_example_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    pytest.importorskip("skops")
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "mesh.md").read_text()
    known: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)[:2]:
        exec(block, known)
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == "LOADED"
    output, is_default, *_ = printed[0].split()
    assert float(output) == pytest.approx(6.0)  # its last digits depend on the processor
    assert is_default == "False"


def test_a_query_whose_load_would_be_late_is_refused_at_once(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    waits = f"import os, time\nwhile not os.path.exists({str(gate)!r}):\n    time.sleep(0.01)\n"
    for n in range(8):
        first = waits if n else "import time\ntime.sleep(0.3)\n"
        (tmp_path / f"slow{n}.py").write_text(f"{first}def same(rows): return rows\n")
    addresses = dict.fromkeys(("http", "admin"), "127.0.0.1:0")
    settings = {"enabled": True, **QUICK, "loading_max": 1}
    with clipper.start(mesh=settings, drain_s=1.0, **addresses) as server:
        about = {"type": "python", "key": str(tmp_path), "input": "f64[3]", "output": "f64[3]"}
        for n in range(8):
            server.register_model(f"m{n}", f"slow{n}.py:same", **about)

        def infer_within(n: int, ms: int) -> Any:
            body = {**ROW, "parameters": {"timeout": 1000 * ms}}
            return ask(server.http_address, "POST", f"/v2/models/m{n}/infer", body)

        assert infer_within(0, 25_000).status == 200  # the node knows its pace now
        patient = [
            threading.Thread(target=infer_within, args=(n, 25_000)) for n in (1, 2, 3, 5, 6, 7)
        ]
        for thread in patient:
            thread.start()
        loader: Any = server.mesh.joined.loader
        wait_until(lambda: loader.queue.waiting == 5)
        reply = infer_within(4, 200)
        assert (reply.status, int(reply.headers["retry-after"]) >= 1) == (429, True)
        assert re.search(
            r"model 'm4' is not loaded: [1-5] loads wait in \S+, which makes [0-9.]+ in",
            reply.body.decode(),
        )
        assert server.mesh.status("m4").status == "NOT_LOADED"
        with pytest.raises(Overloaded, match="the query has 150 ms"):
            server.predict("m4", [1.0, 2.0, 3.0], slo_ms=150)
        server.model("m4").put([1.0, 2.0, 3.0], np.array([4.0, 5.0, 6.0]))
        for predict in (server.model("m4").predict, functools.partial(server.predict, "m4")):
            found = predict([1.0, 2.0, 3.0], slo_ms=150).result(30)  # from the cache
            assert list(getattr(found, "output", found)) == [4.0, 5.0, 6.0]
        cached = [[1.0, 2.0, 3.0]] * 40
        found = server.model("m4").predict_many(cached, slo_ms=150).result(30)
        assert found.tolist() == [[4.0, 5.0, 6.0]] * 40
        found = server.model("m4").predict_many(iter(cached), slo_ms=150).result(30)
        assert found.tolist() == [[4.0, 5.0, 6.0]] * 40, "a generator is read once"
        found = server.schedule_predictions(iter(cached), models=["m4"], slo_ms=150).result(30)
        assert found.outputs.tolist() == [[4.0, 5.0, 6.0]] * 40
        numbers = [*itertools.chain(*cached)]
        many = {"name": "input", "shape": [40, 3], "datatype": "FP64", "data": numbers}
        body = {"inputs": [many], "parameters": {"timeout": 150_000}}
        reply = ask(server.http_address, "POST", "/v2/models/m4/infer", body)
        assert json.loads(reply.body)["outputs"][0]["data"] == [4.0, 5.0, 6.0] * 40
        many["data"][-1] = 4.0  # of the last row, which is not cached
        assert ask(server.http_address, "POST", "/v2/models/m4/infer", body).status == 429
        core: Any = server.model("m4")._route.core
        for predict in (server.model("m4").predict, functools.partial(server.predict, "m4")):
            lookups = itertools.count()
            core.watch = lambda *_, lookups=lookups: next(lookups)  # the second finds nothing
            with pytest.raises(Overloaded, match="the query has 150 ms"):
                predict([1.0, 2.0, 3.0], slo_ms=150)
        core.watch = None
        gate.touch()
        for thread in patient:
            join(thread)
        assert infer_within(4, 25_000).status == 200  # no load waits: it is loaded
        assert server.mesh.stats()["refusals"] == 11  # of loads: six answers were in the cache
