"""`clipper.v1.Mesh/Watch` by grpcio's own channel: the events of HTTP's watch, to readers that
leave, stall, or are too many."""

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

pytest.importorskip("grpc", reason="pip install 'clipper-serving[grpc]'")

import grpc
from google.protobuf.json_format import MessageToDict

import clipper
from clipper.errors import StoreConflict
from clipper.frontend.grpc import mesh_watch
from clipper.frontend.grpc.mesh_watch import event_message
from clipper.mesh.records import Copy, Failure, Instance, MeshModel, Policy, VModel
from clipper.mesh.reports import MeshEvent
from tests.frontend.conftest import QUICK
from tests.frontend.fake_mesh import FakeMesh
from tests.frontend.test_grpc import Client, details_of
from tests.frontend.test_mesh_grpc import MESH, ONNX, served, start
from tests.memory_container import wait_until

WATCH = "clipper.v1.Mesh"
__all__ = ["served"]
KINDS = ("KIND_UNSPECIFIED", "PUT", "DELETE", "SYNC", "RESET")
RECORDS: dict[str, Any] = {
    "model": MeshModel(
        "m",
        "onnx",
        "/m",
        "k",
        "f64[3]",
        "i64",
        Policy(1, 2, True, 3.5, 4, ("gpu",), ("fast", "near")),
        5,
        "ann",
        {"a": Copy(6), "b": Copy(7, 8, 9)},
        {"c": Failure(10, "no file", "artifact", 11)},
        12,
        True,
        13,
        14,
    ),
    "vmodel": VModel("v", "m1", "m2", "ann", 0.5, "m0", True, "why", True, 1, 2),
    "instance": Instance(
        "i",
        1 << 40,
        "unix:/p",
        "tcp:c:1",
        "host",
        ("gpu", "x"),
        ("onnx",),
        "z",
        "v",
        1,
        2,
        3,
        4,
        5,
        6,
        7,
        8,
        9.5,
        True,
        10,
    ),
}


def watching(client: Client, **more: Any) -> tuple[Any, Iterator[Any]]:
    """Return the call and an iterator over its events."""
    call = client(WATCH, "Watch", **more)
    return call, (event for reply in call for event in reply.events)


def watchers() -> int:
    return sum(thread.name == "clipper-grpc-watch" for thread in threading.enumerate())


def ended(stream: Any) -> Any:
    """Read the events to the end of the call; return its error."""
    with pytest.raises(grpc.RpcError) as caught:
        for _ in stream:
            pass
    return caught.value


@pytest.mark.parametrize(("name", "record"), RECORDS.items(), ids=RECORDS)
def test_a_record_has_all_its_members(name: str, record: Any) -> None:
    """The test also fails for a new member that the message lacks."""
    event = event_message(MeshEvent("PUT", name, record.id, 7, record))  # type: ignore[arg-type]
    assert (KINDS[event.kind], event.of, event.id, event.revision) == ("PUT", name, record.id, 7)
    assert event.WhichOneof("record") == name
    about = getattr(event, name)
    assert tuple(field.name for field in about.DESCRIPTOR.fields) == record.__struct_fields__
    assert (
        msgspec.convert(
            MessageToDict(about, preserving_proto_field_name=True), type(record), strict=False
        )
        == record
    )


def test_a_watcher_gets_a_snapshot_and_then_changes(served: tuple[FakeMesh, Client]) -> None:
    mesh, client = served
    client(MESH, "registerModel", modelId="seen1", modelInfo=ONNX)
    client(MESH, "registerModel", modelId="other", modelInfo=ONNX)
    call, events = watching(client, prefix="seen")
    first = next(events)
    assert (KINDS[first.kind], first.of, first.id, first.model.path) == (
        "PUT",
        "model",
        "seen1",
        ONNX["path"],
    )
    assert KINDS[next(events).kind] == "SYNC"
    client(MESH, "registerModel", modelId="seen2", modelInfo=ONNX)
    new = next(events)
    assert (new.id, new.revision, new.model.type) == ("seen2", mesh.revision, "onnx")
    client(MESH, "setVModel", vModelId="seen-v", targetModelId="seen1")
    named = next(events)
    assert (named.of, named.vmodel.active, named.WhichOneof("record")) == (
        "vmodel",
        "seen1",
        "vmodel",
    )
    client(MESH, "unregisterModel", modelId="seen2")
    deleted = next(events)
    assert (KINDS[deleted.kind], deleted.of, deleted.id, deleted.WhichOneof("record")) == (
        "DELETE",
        "model",
        "seen2",
        None,
    )
    call.cancel()


def test_a_snapshot_larger_than_any_buffer_arrives_whole(served: tuple[FakeMesh, Client]) -> None:
    mesh, client = served
    many = much(mesh)
    try:
        call, events = watching(client, prefix="many")
        ids = [
            event.id
            for event in itertools.takewhile(lambda event: KINDS[event.kind] != "SYNC", events)
        ]
        call.cancel()
        assert ids == list(many)
    finally:
        for id in many:
            del mesh.registered[id]


def much(mesh: FakeMesh) -> dict[str, MeshModel]:
    """Add records of about 8 MB together to the mesh and return them."""
    many = {
        f"many{i:05}": MeshModel(f"many{i:05}", "onnx", "/" + "x" * 800, registered_ms=i + 1)
        for i in range(9_000)
    }
    mesh.registered |= many
    return many


def test_a_watcher_that_reads_nothing_is_disconnected_and_delays_no_other(
    served: tuple[FakeMesh, Client],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    mesh, client = served
    many = much(mesh)
    monkeypatch.setattr(mesh_watch, "STALLED_S", 0.2)
    caplog.set_level("INFO", mesh_watch.__name__)
    try:
        call = client(WATCH, "Watch", prefix="many", timeout=60)
        next(call)
        wait_until(lambda: "cut off" in caplog.text and not watchers())
        error = ended(call)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.details().startswith("nothing was read for 0.2 s.")
    finally:
        for id in many:
            del mesh.registered[id]


@pytest.mark.parametrize("how", ["cancelled", "deadline", "hung up"])
def test_a_watcher_that_disconnects_leaves_nothing(how: str) -> None:
    with start(FakeMesh()) as server:
        client = Client(server.grpc_address)
        if how == "deadline":
            assert (
                ended(client(WATCH, "Watch", timeout=1)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
            )
        else:
            call, events = watching(client)
            assert (KINDS[next(events).kind], watchers()) == ("SYNC", 1)
            (call.cancel if how == "cancelled" else client.channel.close)()
        wait_until(lambda: not watchers())
        client.channel.close()


def test_a_server_that_closes_ends_its_watchers() -> None:
    with start(FakeMesh()) as server:
        client = Client(server.grpc_address)
        call, events = watching(client)
        assert KINDS[next(events).kind] == "SYNC"
        server.close()
        error = ended(call)
        assert (error.code(), error.details()) == (
            grpc.StatusCode.UNAVAILABLE,
            "the server is closing.",
        )
        client.channel.close()


def test_more_than_so_many_do_not_watch(
    served: tuple[FakeMesh, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, client = served
    wait_until(lambda: not watchers())
    monkeypatch.setattr(mesh_watch, "WATCHERS_MAX", 1)
    call, events = watching(client, prefix="none")
    assert KINDS[next(events).kind] == "SYNC"
    error = ended(client(WATCH, "Watch"))
    assert (error.code(), details_of(error)[1].retry_delay.seconds) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        5,
    )
    call.cancel()
    wait_until(lambda: not watchers())
    call, events = watching(client, prefix="none")
    assert KINDS[next(events).kind] == "SYNC"
    call.cancel()


def test_what_the_mesh_ends_by_ends_the_watch(
    served: tuple[FakeMesh, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh, client = served

    def watch(prefix: str, *, stop: Any) -> Iterator[MeshEvent]:
        yield MeshEvent("SYNC", "", "", -1)
        yield MeshEvent("RESET", "", "", 9)
        if prefix == "store":
            raise StoreConflict("it has changed.")
        if prefix == "bug":
            raise KeyError("a secret")

    monkeypatch.setattr(mesh, "watch", watch)
    codes = {"": "UNAVAILABLE", "store": "ABORTED", "bug": "INTERNAL"}
    for prefix, code in codes.items():
        call, events = watching(client, prefix=prefix)
        assert [(KINDS[one.kind], one.revision) for one in (next(events), next(events))] == [
            ("SYNC", -1),
            ("RESET", 9),
        ]
        error = ended(call)
        assert error.code().name == code
        assert "secret" not in error.details()


def test_a_watch_needs_the_token() -> None:
    """The place of a model's files is for management only."""
    with start(FakeMesh(), http={"token": "secret"}) as server:
        for metadata, ends in ((), True), ([("authorization", "Bearer secret")], False):
            client = Client(server.grpc_address, metadata=metadata)
            call, events = watching(client)
            if ends:
                assert ended(call).code() is grpc.StatusCode.UNAUTHENTICATED
            else:
                assert KINDS[next(events).kind] == "SYNC"
            client.channel.close()
    with start(FakeMesh(), grpc="0.0.0.0:0") as server:
        client = Client(f"127.0.0.1:{server.grpc_address.rpartition(':')[2]}")
        assert ended(client(WATCH, "Watch")).code() is grpc.StatusCode.PERMISSION_DENIED
        client.channel.close()


def test_without_a_mesh_there_is_no_such_service() -> None:
    with clipper.start(grpc="127.0.0.1:0", **QUICK) as server:
        client = Client(server.grpc_address)
        assert ended(client(WATCH, "Watch")).code() is grpc.StatusCode.UNIMPLEMENTED
        client.channel.close()
