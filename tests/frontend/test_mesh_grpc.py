"""`mmesh.ModelMesh` by grpcio's own channel: each call, its errors by the codes that clients of
model-mesh know, who may."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("grpc", reason="pip install 'clipper-serving[grpc]'")

import grpc

import clipper
from clipper.frontend.protocols import methods_of
from clipper.mesh.membership import MeshMembership
from tests.frontend.conftest import PATIENCE_S, QUICK, warm_workers
from tests.frontend.fake_mesh import MIB, FakeMesh
from tests.frontend.test_grpc import Client, details_of
from tests.memory_container import wait_until

MESH = "mmesh.ModelMesh"
STATES = ("NOT_FOUND", "NOT_LOADED", "LOADING", "LOADED", "LOADING_FAILED", "UNKNOWN")
ONNX = {"type": "onnx", "path": "/models/m.onnx"}


def start(mesh: FakeMesh, **grpc: Any) -> clipper.ClipperServer:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MeshMembership, "node", mesh)
        server = clipper.start(**QUICK, **({"grpc": "127.0.0.1:0"} | grpc))
    warm_workers(server)
    return server


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeMesh, Client]]:
    mesh = FakeMesh()
    with start(mesh) as server:
        client = Client(server.grpc_address)
        yield mesh, client
        client.channel.close()


def state_of(response: Any) -> str:
    return STATES[response.status]


def test_the_service_has_the_calls_of_the_document() -> None:
    assert {method.name for method in methods_of(MESH)} == {
        "registerModel",
        "unregisterModel",
        "getModelStatus",
        "ensureLoaded",
        "setVModel",
        "deleteVModel",
        "getVModelStatus",
    }


def test_a_model_is_registered_loaded_and_forgotten(served: tuple[FakeMesh, Client]) -> None:
    mesh, client = served
    assert state_of(client(MESH, "getModelStatus", modelId="one")) == "NOT_FOUND"
    for _ in range(2):  # the same once more changes nothing
        response = client(MESH, "registerModel", modelId="one", modelInfo=ONNX, lastUsedTime=77)
        assert (state_of(response), list(response.errors), list(response.modelCopyInfos)) == (
            "NOT_LOADED",
            [],
            [],
        )
    assert mesh.calls[-1] == ("register", {"load_now": False, "sync": False, "used_ms": 77})
    response = client(MESH, "ensureLoaded", modelId="one", lastUsedTime=78)
    assert mesh.calls[-1] == ("ensure_loaded", {"sync": False, "used_ms": 78})
    (copy,) = response.modelCopyInfos
    assert (state_of(response), copy.location, STATES[copy.copyStatus], copy.time) == (
        "LOADED",
        "a",
        "LOADED",
        9,
    )
    assert copy.sizeBytes == 3 * MIB
    client(MESH, "unregisterModel", modelId="one")
    client(MESH, "unregisterModel", modelId="one")  # gone already
    assert state_of(client(MESH, "getModelStatus", modelId="one")) == "NOT_FOUND"


@pytest.mark.parametrize(
    ("method", "fields", "code"),
    [
        (
            "registerModel",
            {"modelId": "taken", "modelInfo": {"type": "onnx", "path": "/other"}},
            "ALREADY_EXISTS",
        ),
        ("registerModel", {"modelId": "new"}, "INVALID_ARGUMENT"),  # no type
        ("registerModel", {"modelId": "No Name", "modelInfo": ONNX}, "INVALID_ARGUMENT"),
        ("registerModel", {"modelId": "new", "modelInfo": ONNX, "sync": True}, "INVALID_ARGUMENT"),
        ("ensureLoaded", {"modelId": "nobody"}, "NOT_FOUND"),
        ("unregisterModel", {"modelId": "taken"}, "FAILED_PRECONDITION"),
        ("setVModel", {"vModelId": "v", "targetModelId": "nobody"}, "NOT_FOUND"),
        (
            "setVModel",
            {"vModelId": "none", "targetModelId": "taken", "updateOnly": True},
            "NOT_FOUND",
        ),
        (
            "setVModel",
            {"vModelId": "v", "targetModelId": "taken", "owner": "bob"},
            "ALREADY_EXISTS",
        ),
        (
            "setVModel",
            {"vModelId": "v", "targetModelId": "taken", "expectedTargetModelId": "x"},
            "FAILED_PRECONDITION",
        ),
        (
            "setVModel",
            {"vModelId": "v", "targetModelId": "t", "modelInfo": {"path": "/x"}},
            "INVALID_ARGUMENT",
        ),
    ],
)
def test_errors_have_the_codes_of_the_document(
    served: tuple[FakeMesh, Client], method: str, fields: dict[str, Any], code: str
) -> None:
    _, client = served
    client(MESH, "registerModel", modelId="taken", modelInfo=ONNX)
    client(MESH, "setVModel", vModelId="v", targetModelId="taken", owner="ann")
    error = client.refused(MESH, method, **fields)
    assert error.code().name == code
    assert details_of(error)[0].domain == "clipper"


def test_a_call_that_waits_for_a_load_blocks_no_other_and_is_answered_after_it(
    served: tuple[FakeMesh, Client],
) -> None:
    """More calls wait than there are worker threads; another call is answered meanwhile."""
    mesh, client = served
    mesh.loads_at_once = False
    try:
        fields = {"modelInfo": ONNX, "loadNow": True, "sync": True}
        response: list[Any] = []
        waiting = [
            threading.Thread(
                target=lambda i=i: response.append(
                    client(MESH, "registerModel", modelId=f"slow{i}", **fields)
                )
            )
            for i in range(6)
        ]
        for thread in waiting:
            thread.start()
        wait_until(lambda: all(mesh.status(f"slow{i}").status == "LOADING" for i in range(6)))
        assert state_of(client(MESH, "getModelStatus", modelId="slow0")) == "LOADING"
        assert not response
        for i in range(6):
            mesh.settle(f"slow{i}")
        for thread in waiting:
            thread.join(PATIENCE_S)
        assert [state_of(one) for one in response] == ["LOADED"] * 6
    finally:
        mesh.loads_at_once = True


def test_a_load_that_fails_ends_the_wait_and_gives_the_reason(
    served: tuple[FakeMesh, Client],
) -> None:
    mesh, client = served
    mesh.fails["broken"] = "no such file"
    response = client(
        MESH, "registerModel", modelId="broken", modelInfo=ONNX, loadNow=True, sync=True
    )
    assert (state_of(response), list(response.errors)) == ("LOADING_FAILED", ["no such file"])
    assert STATES[response.modelCopyInfos[0].copyStatus] == "LOADING_FAILED"


def test_a_caller_does_not_wait_beyond_its_deadline(served: tuple[FakeMesh, Client]) -> None:
    mesh, client = served
    mesh.loads_at_once = False
    client(MESH, "registerModel", modelId="never", modelInfo=ONNX)
    try:
        assert (
            client.refused(MESH, "ensureLoaded", modelId="never", sync=True, timeout=0.2)
            .code()
            .name
            == "DEADLINE_EXCEEDED"
        )
    finally:
        mesh.loads_at_once = True
        mesh.settle("never")


def test_more_than_so_many_do_not_wait(
    served: tuple[FakeMesh, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, client = served
    monkeypatch.setattr("clipper.frontend.grpc.mesh.WAITING_MAX", 0)
    client(MESH, "registerModel", modelId="waits", modelInfo=ONNX)
    assert (
        client.refused(MESH, "ensureLoaded", modelId="waits", sync=True).code().name
        == "RESOURCE_EXHAUSTED"
    )
    assert state_of(client(MESH, "ensureLoaded", modelId="waits")) == "LOADED"


def test_a_vmodel_is_set_switched_and_deleted(served: tuple[FakeMesh, Client]) -> None:
    mesh, client = served
    for id in ("x1", "x2"):
        client(MESH, "registerModel", modelId=id, modelInfo=ONNX)
    none = client(MESH, "getVModelStatus", vModelId="x")
    assert (none.status, none.activeModelId, none.activeModelStatus.status) == (0, "", 0)
    response = client(
        MESH, "setVModel", vModelId="x", targetModelId="x1", owner="ann", loadNow=True, sync=True
    )
    assert (response.status, response.activeModelId, response.targetModelId, response.owner) == (
        1,
        "x1",
        "x1",
        "ann",
    )
    assert state_of(response.activeModelStatus) == "LOADED"
    assert not response.HasField("targetModelStatus")
    mesh.loads_at_once = False
    try:
        response = client(MESH, "setVModel", vModelId="x", targetModelId="x2", owner="ann")
        assert (response.status, response.activeModelId, response.targetModelId) == (2, "x1", "x2")
        assert (state_of(response.activeModelStatus), state_of(response.targetModelStatus)) == (
            "LOADED",
            "LOADING",
        )
        mesh.settle("x2")
        response = client(MESH, "getVModelStatus", vModelId="x")
        assert (response.status, response.activeModelId, response.previousModelId) == (
            1,
            "x2",
            "x1",
        )
    finally:
        mesh.loads_at_once = True
    assert client(MESH, "getVModelStatus", vModelId="x", owner="bob").status == 0
    # another's is left alone, without a word
    client(MESH, "deleteVModel", vModelId="x", owner="bob")
    assert client(MESH, "getVModelStatus", vModelId="x").status == 1
    client(MESH, "deleteVModel", vModelId="x", owner="ann")
    client(MESH, "deleteVModel", vModelId="x", owner="ann")
    assert client(MESH, "getVModelStatus", vModelId="x").status == 0


def test_a_switch_that_cannot_be_ends_the_wait_and_gives_the_reason(
    served: tuple[FakeMesh, Client],
) -> None:
    mesh, client = served
    for id in ("y1", "y2"):
        client(MESH, "registerModel", modelId=id, modelInfo=ONNX)
    client(MESH, "setVModel", vModelId="y", targetModelId="y1")
    mesh.fails["y2"] = "it is no model"
    response = client(MESH, "setVModel", vModelId="y", targetModelId="y2", sync=True)
    assert (response.status, response.activeModelId, response.why) == (3, "y1", "it is no model")
    assert list(response.targetModelStatus.errors) == ["it is no model"]


def test_reflection_and_health_know_it(served: tuple[FakeMesh, Client]) -> None:
    _, client = served
    assert client("grpc.health.v1.Health", "Check", service=MESH).status == 1


def test_with_a_token_anyone_reads_and_its_holder_manages() -> None:
    mesh = FakeMesh()
    with start(mesh, http={"token": "secret"}) as server:
        reader, manager = (
            Client(server.grpc_address),
            Client(server.grpc_address, metadata=[("authorization", "Bearer secret")]),
        )
        wrong = Client(server.grpc_address, metadata=[("authorization", "Bearer secre")])
        for client in (reader, wrong):
            for method, fields in (
                ("registerModel", {"modelId": "m", "modelInfo": ONNX}),
                ("unregisterModel", {"modelId": "m"}),
                ("setVModel", {"vModelId": "v", "targetModelId": "m"}),
                ("deleteVModel", {"vModelId": "v"}),
            ):
                assert (
                    client.refused(MESH, method, **fields).code() is grpc.StatusCode.UNAUTHENTICATED
                )
        assert not mesh.registered
        assert state_of(manager(MESH, "registerModel", modelId="m", modelInfo=ONNX)) == "NOT_LOADED"
        assert state_of(reader(MESH, "ensureLoaded", modelId="m")) == "LOADED"
        assert state_of(reader(MESH, "getModelStatus", modelId="m")) == "LOADED"
        assert reader(MESH, "getVModelStatus", vModelId="v").status == 0
        for client in (reader, manager, wrong):
            client.channel.close()


def test_management_off_loopback_needs_a_token() -> None:
    mesh = FakeMesh()
    with start(mesh, grpc="0.0.0.0:0") as server:
        client = Client(f"127.0.0.1:{server.grpc_address.rpartition(':')[2]}")
        assert (
            client.refused(MESH, "registerModel", modelId="m", modelInfo=ONNX).code()
            is grpc.StatusCode.PERMISSION_DENIED
        )
        assert state_of(client(MESH, "getModelStatus", modelId="m")) == "NOT_FOUND"
        client.channel.close()


def test_without_a_mesh_there_is_no_such_service() -> None:
    with clipper.start(grpc="127.0.0.1:0", **QUICK) as server:
        client = Client(server.grpc_address)
        assert (
            client.refused(MESH, "getModelStatus", modelId="m").code()
            is grpc.StatusCode.UNIMPLEMENTED
        )
        client.channel.close()
