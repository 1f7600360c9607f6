"""The mesh over HTTP and through its client, which has the verbs, types and errors of the mesh
itself; and from a shell."""

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

import clipper
from clipper.cli import main
from clipper.errors import (
    AlreadyExists,
    Forbidden,
    InvalidInput,
    Overloaded,
    StillLinked,
    StoreConflict,
    UnknownModel,
)
from clipper.manage.client import Client
from clipper.manage.mesh.client import MeshClient
from clipper.mesh.decisions.vmodels import UnknownVModel
from clipper.mesh.membership import MeshMembership
from clipper.mesh.node.node import MeshNode
from clipper.mesh.records import MeshModel, Policy
from clipper.mesh.reports import Info
from tests.frontend.conftest import PATIENCE_S, QUICK, ask, warm_workers
from tests.frontend.fake_mesh import NODES, FakeMesh


@pytest.fixture(scope="module")
def fake() -> FakeMesh:
    return FakeMesh()


@pytest.fixture(scope="module")
def server(fake: FakeMesh) -> Iterator[clipper.ClipperServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MeshMembership, "node", fake)
        server = clipper.start(admin="127.0.0.1:0", **QUICK)
    warm_workers(server)
    with server:
        yield server


@pytest.fixture
def mesh_client(server: clipper.ClipperServer) -> MeshClient:
    return Client(f"http://{server.admin_address}", timeout_s=PATIENCE_S).mesh


# -- the client: what it says is what the mesh says


def test_the_client_has_the_face_of_the_mesh() -> None:
    verbs = {name for name in vars(FakeMesh) if not name.startswith("_")} - {"drain", "settle"}
    assert verbs <= set(dir(MeshClient))
    assert verbs - {"instance"} <= set(dir(MeshNode)), "`instance` is an attribute of each node"


def test_models(mesh_client: MeshClient, fake: FakeMesh) -> None:
    assert (mesh_client.instance, mesh_client.stats()) == ("a", {"instance": "a"})
    assert mesh_client.status("m").status == "NOT_FOUND"
    made = mesh_client.register(
        "m", "/models/m.onnx", policy=Policy(pinned=True, requires=("gpu",)), owner="ann", used_ms=5
    )
    assert made == fake.status("m")
    assert made.info is not None
    assert (made.info.policy.pinned, made.info.policy.requires, made.info.owner) == (
        True,
        ("gpu",),
        "ann",
    )
    assert fake.calls[-1] == ("register", {"load_now": False, "sync": False, "used_ms": 5})
    assert mesh_client.ensure_loaded("m", sync=True, used_ms=9).status == "LOADED"
    assert fake.calls[-1] == ("ensure_loaded", {"sync": True, "used_ms": 9})
    assert mesh_client.status("m") == fake.status("m")
    assert mesh_client.explain("m") == fake.explain("m")
    assert mesh_client.instances() == list(NODES)
    mesh_client.unregister("m")
    mesh_client.unregister("m")
    assert mesh_client.status("m").status == "NOT_FOUND"


def test_lists_come_page_by_page(
    mesh_client: MeshClient, fake: FakeMesh, server: clipper.ClipperServer
) -> None:
    for i in range(5):
        mesh_client.register(f"page{i}", "/m.onnx")
    assert [one.id for one in mesh_client.models("page", limit=2)] == ["page0", "page1"]
    assert [one.id for one in mesh_client.models("page", after="page1", limit=2)] == [
        "page2",
        "page3",
    ]
    page = ask(server.admin_address, "GET", "/v1/mesh/models?prefix=page&limit=5").json
    assert (len(page["models"]), page["next"]) == (5, "page4")
    page = ask(server.admin_address, "GET", "/v1/mesh/models?prefix=page&after=page4").json
    assert page == {"models": [], "next": ""}


def test_vmodels(mesh_client: MeshClient, fake: FakeMesh) -> None:
    assert mesh_client.vmodel_status("best").status == "NOT_FOUND"
    made = mesh_client.set_vmodel(
        "best", "b1", model=Info("/b1.onnx", "onnx"), owner="ann", auto_delete=True, load_now=True
    )
    assert made == fake.vmodel_status("best")
    assert (made.active, made.active_status, made.owner) == ("b1", "LOADED", "ann")
    mesh_client.register("b2", "/b2.onnx")
    assert (
        mesh_client.set_vmodel("best", "b2", owner="ann", expected="b1", share=0.25).share == 0.25
    )
    assert mesh_client.vmodel_status("best", "bob").status == "NOT_FOUND"
    assert (
        mesh_client.rollback_vmodel("best").active,
        mesh_client.vmodel_status("best").active,
    ) == ("b1", "b1")
    assert [one.id for one in mesh_client.vmodels("be")] == ["best"]
    with pytest.raises(Forbidden, match="another owner"):
        mesh_client.delete_vmodel("best", "bob")
    mesh_client.delete_vmodel("best", "ann")
    mesh_client.delete_vmodel("best")


def test_errors_are_those_of_the_mesh(mesh_client: MeshClient) -> None:
    mesh_client.register("known", "/k.onnx")
    mesh_client.set_vmodel("names-it", "known", owner="ann")
    for error, call in (
        (AlreadyExists, lambda: mesh_client.register("known", "/other.onnx")),
        (InvalidInput, lambda: mesh_client.register("No Name", "/m.onnx")),
        (InvalidInput, lambda: mesh_client.register("new", "/m.onnx", sync=True)),
        (InvalidInput, lambda: mesh_client.status("")),
        (UnknownModel, lambda: mesh_client.ensure_loaded("nobody")),
        (UnknownModel, lambda: mesh_client.explain("nobody")),
        (UnknownModel, lambda: mesh_client.set_vmodel("new", "nobody")),
        (UnknownVModel, lambda: mesh_client.set_vmodel("new", "known", update_only=True)),
        (StillLinked, lambda: mesh_client.unregister("known")),
        (Forbidden, lambda: mesh_client.set_vmodel("names-it", "known", owner="bob")),
        (StoreConflict, lambda: mesh_client.set_vmodel("names-it", "known", expected="other")),
    ):
        with pytest.raises(error):
            call()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "part"),
    [
        ("GET", "models/nobody", None, 404, "no model 'nobody'"),
        ("GET", "vmodels/nobody", None, 404, "no v-model 'nobody'"),
        ("PUT", "models/m", {}, 400, "path"),
        ("PUT", "models/m", {"path": "/m", "lode_now": True}, 400, "lode_now"),
        ("PUT", "models/m", {"path": "/m", "used_ms": -1}, 400, "used_ms"),
        ("PUT", "vmodels/v", {"target": "m", "share": 1.5}, 400, "share"),
        ("GET", "models?limit=0", None, 400, "limit=0"),
        ("GET", "models?limt=5", None, 400, "did you mean 'limit'?"),
        ("GET", "modles", None, 404, ""),
    ],
)
def test_what_is_wrong_is_reported(
    server: clipper.ClipperServer, method: str, path: str, body: Any, status: int, part: str
) -> None:
    reply = ask(server.admin_address, method, f"/v1/mesh/{path}", body)
    assert reply.status == status
    assert part in reply.json["error"]


def test_two_may_wait_for_loads_and_others_are_given_a_time_to_retry(
    mesh_client: MeshClient, fake: FakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, go_on = threading.Semaphore(0), threading.Event()

    def ensure_loaded(id: str, **_: Any) -> Any:
        started.release()
        assert go_on.wait(PATIENCE_S)
        return fake.status(id)

    mesh_client.register("slow", "/slow.onnx")
    monkeypatch.setattr(fake, "ensure_loaded", ensure_loaded)
    waiting = [
        threading.Thread(target=lambda: mesh_client.ensure_loaded("slow", sync=True))
        for _ in range(2)
    ]
    try:
        for thread in waiting:
            thread.start()
            assert started.acquire(timeout=PATIENCE_S)
        with pytest.raises(Overloaded):
            mesh_client.ensure_loaded("slow", sync=True)
        assert mesh_client.status("slow").id == "slow", "others are answered meanwhile"
    finally:
        go_on.set()
        for thread in waiting:
            thread.join(PATIENCE_S)
    assert mesh_client.ensure_loaded("slow", sync=True).id == "slow"


def test_it_is_described(server: clipper.ClipperServer) -> None:
    document = ask(server.admin_address, "GET", "/openapi.json").json
    frontends: Any = server._endpoints.frontends
    routes = frontends.admin_routes
    assert {route for route in routes if route not in routes.about} == set()
    assert "Registering" in document["components"]["schemas"]
    validator = pytest.importorskip(
        "openapi_spec_validator", reason="pip install openapi-spec-validator"
    )
    validator.validate(document)


# -- watching


def test_a_watcher_gets_a_snapshot_and_then_changes(
    mesh_client: MeshClient, fake: FakeMesh
) -> None:
    mesh_client.register("seen1", "/1.onnx")
    mesh_client.register("other", "/1.onnx")
    events = mesh_client.watch("seen")
    first = next(events)
    assert (first.kind, first.of, first.id, first.record) == (
        "PUT",
        "model",
        "seen1",
        fake.registered["seen1"],
    )
    assert next(events).kind == "SYNC"
    mesh_client.register("seen2", "/2.onnx")
    new = next(events)
    assert (new.id, new.revision) == ("seen2", fake.revision)
    assert isinstance(new.record, MeshModel)
    mesh_client.unregister("seen2")
    deleted = next(events)
    assert (deleted.kind, deleted.id, deleted.record) == ("DELETE", "seen2", None)
    events.close()


def test_a_snapshot_larger_than_any_buffer_arrives_whole(
    mesh_client: MeshClient, fake: FakeMesh
) -> None:
    """About 8 MB are sent to a client that starts reading late: writes wait for room."""
    many = {
        f"many{i:05}": MeshModel(f"many{i:05}", "onnx", "/" + "x" * 800, registered_ms=i + 1)
        for i in range(9_000)
    }
    fake.registered |= many
    try:
        events = mesh_client.watch("many")
        ids = []
        for event in events:
            if event.kind == "SYNC":
                break
            ids.append(event.id)
        events.close()
        assert ids == list(many)
    finally:
        for id in many:
            del fake.registered[id]


def test_a_watcher_that_disconnects_leaves_nothing(
    server: clipper.ClipperServer, mesh_client: MeshClient
) -> None:
    connection = http.client.HTTPConnection(server.admin_address, timeout=PATIENCE_S)
    connection.request("GET", "/v1/mesh/watch?prefix=none")
    response = connection.getresponse()
    assert response.getheader("content-type") == "text/event-stream; charset=utf-8"
    assert response.readline() == b"event: sync\n"
    assert any(thread.name == "clipper-mesh-watch" for thread in threading.enumerate())
    response.close()
    connection.close()  # what is left running, the fixture of all tests sees


def test_a_server_that_closes_ends_its_watchers() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MeshMembership, "node", FakeMesh())
        server = clipper.start(admin="127.0.0.1:0", **QUICK)
    events = Client(f"http://{server.admin_address}").mesh.watch()
    assert next(events).kind == "SYNC"
    server.close()
    with pytest.raises(clipper.errors.NoServer):
        next(events)


# -- from a shell


@pytest.fixture
def run(server: clipper.ClipperServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Result:
        env = {"CLIPPER_URL": f"http://{server.admin_address}", "CLIPPER_ADMIN_TOKEN": ""}
        return CliRunner().invoke(main, ["mesh", *words], prog_name="clipper", env=env)

    return run


def test_the_way_of_a_model_in_a_shell(run: Any, fake: FakeMesh, tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"")
    result = run("register", "shell1", "m.onnx", "--copies-min", "2", "--requires", "gpu")
    assert (result.exit_code, result.output.splitlines()[0]) == (0, "shell1: NOT_LOADED")
    made = fake.registered["shell1"]
    assert (made.path, made.policy.copies_min, made.policy.requires) == (
        str(tmp_path / "m.onnx"),
        2,
        ("gpu",),
    )
    result = run("ensure", "shell1", "--sync")
    assert result.exit_code == 0
    assert result.output.splitlines()[0] == "shell1: LOADED"
    assert "  a: LOADED" in result.output
    assert "3 MiB" in result.output
    (row,) = [line.split() for line in run("ls", "shell").output.splitlines() if "shell1" in line]
    assert row[:5] == ["shell1", "onnx", "LOADED", "a", "3"]
    assert json.loads(run("status", "shell1", "-o", "json").output) == json.loads(
        msgspec.json.encode(fake.status("shell1"))
    )
    assert "next: it waits for its first query" in run("explain", "shell1").output
    assert run("unregister", "shell1").output == "shell1 is unregistered\n"
    deleted = run("status", "shell1")
    assert deleted.exit_code == 1
    assert deleted.output.startswith("error: the mesh has no model 'shell1'.")


def test_a_load_that_fails_is_an_exit_code(run: Any, fake: FakeMesh) -> None:
    fake.fails["shell-broken"] = "it is no ONNX"
    result = run("register", "shell-broken", "/nowhere.onnx", "--sync")
    assert result.exit_code == 1
    assert "error: it is no ONNX" in result.output


def test_the_way_of_a_vmodel_in_a_shell(run: Any, fake: FakeMesh) -> None:
    result = run(
        "vmodel", "set", "shell-best", "sv1", "--path", "/sv1.onnx", "--type", "onnx", "--load"
    )
    assert result.output == "shell-best: DEFINED, refers to sv1 (LOADED)\n"
    fake.loads_at_once = False
    try:
        result = run("vmodel", "set", "shell-best", "sv2", "--path", "/sv2.onnx", "--type", "onnx")
    finally:
        fake.loads_at_once = True
    assert "on its way to sv2 (LOADING)" in result.output
    fake.settle("sv2")
    assert (
        "previous model sv1: clipper mesh vmodel rollback shell-best"
        in run("vmodel", "status", "shell-best").output
    )
    assert run("vmodel", "rollback", "shell-best").output.startswith(
        "shell-best: DEFINED, refers to sv1"
    )
    assert "shell-best" in run("vmodel", "ls").output
    assert run("vmodel", "delete", "shell-best").output == "v-model shell-best is deleted\n"
    assert run("vmodel", "status", "shell-best").exit_code == 1


def test_instances_with_their_memory(run: Any) -> None:
    lines = run("ps").output.splitlines()
    (first,) = [line for line in lines if line.strip().startswith("a ")]
    assert "███████████████····· " in first
    assert "75 %" in first
    assert "100 MiB" in first
    assert any("b (stops)" in line for line in lines)
    assert [row["id"] for row in json.loads(run("ps", "-o", "json").output)] == ["a", "b"]


def test_longer_lists_print_the_command_for_the_next_page(
    run: Any, mesh_client: MeshClient
) -> None:
    for i in range(3):
        mesh_client.register(f"long{i}", "/m.onnx")
    assert (
        run("ls", "long", "-n", "2").output.splitlines()[-1]
        == "more: clipper mesh ls long --after long1"
    )
    assert (
        run("ls", "nothing-so").output
        == "no models. To register one: clipper mesh register ID PATH\n"
    )


def test_watching_in_a_shell(
    run: Any, fake: FakeMesh, mesh_client: MeshClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh_client.register("watched", "/m.onnx")
    whole = MeshClient.watch

    def until_synced(self: MeshClient, prefix: str = "") -> Iterator[Any]:
        for event in whole(self, prefix):
            yield event
            if event.kind == "SYNC":
                raise KeyboardInterrupt

    monkeypatch.setattr(MeshClient, "watch", until_synced)
    result = run("watch", "watched")
    assert result.exit_code == 130
    now, then = result.output.splitlines()
    assert (now, then[:16]) == (f"{fake.revision}  model watched NOT_LOADED", "-- that was all;")
    lines = [json.loads(line) for line in run("watch", "watched", "-o", "json").output.splitlines()]
    assert [line["kind"] for line in lines] == ["PUT", "SYNC"]


def test_a_server_without_a_mesh_reports_it() -> None:
    with clipper.start(admin="127.0.0.1:0", **QUICK) as server:
        mesh_client = Client(f"http://{server.admin_address}").mesh
        for call in (
            lambda: mesh_client.instances(),
            lambda: mesh_client.register("m", "/m.onnx"),
            lambda: next(mesh_client.watch()),
        ):
            with pytest.raises(clipper.errors.NoServer, match="not a node of a mesh"):
                call()
