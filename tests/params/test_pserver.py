"""The design document's gRPC service of a shard, by grpcio's own channel and messages that are the
document's word for word."""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("grpc", reason="pip install 'clipper-serving[grpc]'")

import grpc

from clipper.errors import AddressInUse, ConfigError
from clipper.frontend.params_grpc.followers import FOLLOWERS_MAX, FORGET_S, RowFollowers
from clipper.frontend.params_grpc.server import ShardGrpc
from clipper.frontend.protocols import message, methods_of, pool
from clipper.params import TableSpec
from clipper.params.partition import shard_of_name
from clipper.params.tables import optimizer_in
from clipper.settings.params import ParamsSettings, grpc_address
from tests.params.conftest import TOKEN, Shards, ones, until
from tests.params.document import PATIENCE_S, Shard, array, document, tensor

ON = {"grpc": "127.0.0.1:0", "grpc_optimizer": "sgd rate=1"}
W0, W1 = (
    next(f"w{k}" for k in range(99) if shard_of_name(f"w{k}", 2) == shard) for shard in (0, 1)
)


class Fronts:
    """Starts the service of each shard of a set, and a client of each."""

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        self._fronts: dict[int, ShardGrpc] = {}
        self._clients: list[Shard] = []

    def up(self, count: int, **settings: Any) -> list[Shard]:
        self.shards.up(count, **{**ON, **settings})
        return [self.begin(shard) for shard in range(count)]

    def begin(self, shard: int) -> Shard:
        self._fronts[shard] = ShardGrpc(self.shards.servers[shard].shard).start()
        self._clients.append(Shard(self._fronts[shard].address, TOKEN))
        return self._clients[-1]

    def address(self, shard: int) -> str:
        return self._fronts[shard].address

    def end(self, shard: int) -> None:
        self._fronts.pop(shard).stop()

    def close(self) -> None:
        for client in self._clients:
            client.close()
        for shard in list(self._fronts):
            self.end(shard)


@pytest.fixture
def fronts(shards: Shards) -> Iterator[Fronts]:
    found = Fronts(shards)
    yield found
    found.close()


def info(name: str, *dim: int, initializer: str = "zeros") -> Any:
    return document()["EmbeddingTableInfo"](name=name, dim=dim, initializer=initializer)


def test_the_service_has_the_methods_of_the_document() -> None:
    names = {method.name for method in methods_of("PServer")}
    workers = {"pull_variable", "pull_embedding_vector", "push_model", "push_gradient"}
    assert names == {*workers, "get_replica", "synchronize_embedding"}
    wider = {("PushGradientRequest", "model_version"), ("PushGradientResponse", "model_version")}
    for name, theirs in document().items():
        if name == "Empty":
            continue
        ours = pool().FindMessageTypeByName(name)
        assert len(ours.fields) == len(theirs.DESCRIPTOR.fields)
        for field in theirs.DESCRIPTOR.fields:
            match = ours.fields_by_name[field.name]
            assert (match.number, match.is_repeated) == (field.number, field.is_repeated), (
                field.full_name
            )
            assert match.type == field.type or (name, field.name) in wider, field.full_name
    kinds = pool().FindMessageTypeByName("Tensor").enum_types_by_name["DataType"]
    assert {one.name: one.number for one in kinds.values} == {
        one.name: one.number
        for one in document()["Tensor"].DESCRIPTOR.enum_types_by_name["DataType"].values
    }


def test_a_model_is_pushed_pulled_and_trained(fronts: Fronts) -> None:
    (shard,) = fronts.up(1)
    assert not shard.pull_variable().model_init_status
    first = {
        "variables": [tensor("w", [[1, 2], [3, 4]]), tensor("b", 5)],
        "embedding_table_info": [info("users", 3)],
    }
    shard.push_model(**first)
    assert shard.trailing["accepted"] == "true"
    shard.push_model(
        variables=[tensor("w", [[0, 0], [0, 0]])],
        embedding_table_info=[info("users", 3), info("items", 100, 2)],
    )
    assert shard.trailing["accepted"] == "false"
    reply = shard.pull_variable()
    assert (reply.model_init_status, reply.model.version) == (True, 1)
    assert {one.name: array(one).tolist() for one in reply.model.variables} == {
        "w": [[1, 2], [3, 4]],
        "b": 5,
    }
    assert not shard.pull_variable(version=1).model.variables, (
        "of the same version nothing comes again"
    )
    rows = shard.pull_embedding_vector(name="users", ids=[7, 9, 7])
    assert (rows.name, array(rows).tolist()) == ("users", [[0, 0, 0]] * 3)
    gradients = [
        tensor("w", [[1, 0], [0, 0]]),
        tensor("users", [[1, 1, 1], [2, 2, 2], [3, 3, 3]], [7, 9, 7]),
    ]
    reply = shard.push_gradient(model_version=1, gradients=gradients)
    assert (reply.accepted, reply.model_version) == (True, 2)
    reply = shard.pull_variable(version=1)
    assert {one.name: array(one).tolist() for one in reply.model.variables} == {
        "w": [[0, 2], [3, 4]]
    }
    assert array(shard.pull_embedding_vector(name="users", ids=[9, 7, 8])).tolist() == [
        [-2] * 3,
        [-4] * 3,
        [0] * 3,
    ]
    halves = shard.pull_embedding_vector(name="users", ids=[9], metadata={"dtype": "f16"})
    assert array(halves).tolist() == [[-2] * 3]
    assert list(shard.pull_embedding_vector(name="items").dim) == [0, 2]
    counted = fronts.shards.servers[0].shard.core.counts.table(0)
    assert (counted["pulled"], counted["missed"]) == (7, 4), "as by the other door"
    assert fronts.shards.client().pull("users", [9]).tolist() == [[-2] * 3], (
        "the same rows by the other door"
    )


def test_gradients_of_rows_of_a_variable_are_applied_and_invalid_rows_refused(
    fronts: Fronts,
) -> None:
    (shard,) = fronts.up(1)
    shard.push_model(variables=[tensor("w", np.zeros((4, 2)))], embedding_table_info=[info("t", 2)])
    gradients = [tensor("w", [[1, 1], [2, 2], [4, 4]], [3, 0, 3]), tensor("t", np.zeros((0, 2)))]
    assert shard.push_gradient(gradients=gradients).accepted
    (w,) = shard.pull_variable().model.variables
    assert array(w).tolist() == [[-2, -2], [0, 0], [0, 0], [-5, -5]]
    for ids in ([4], [-1]):
        code, text, _ = shard.refused("push_gradient", gradients=[tensor("w", [[1, 1]], ids)])
        assert (code, "rows 0 to 3" in text) == ("INVALID_ARGUMENT", True)


def test_a_push_is_applied_once(fronts: Fronts) -> None:
    (shard,) = fronts.up(1)
    shard.push_model(embedding_table_info=[info("t", 1)])
    push = {"gradients": [tensor("t", [[1]], [0])], "metadata": {"worker": 7, "sequence": 1}}
    assert shard.push_gradient(**push).accepted
    assert "repeated" not in shard.trailing
    assert shard.push_gradient(**push).accepted
    assert shard.trailing["repeated"] == "true"
    push["metadata"] = {"worker": 7, "sequence": 2, "scale": "0.5"}
    shard.push_gradient(**push)
    assert array(shard.pull_embedding_vector(name="t", ids=[0])).tolist() == [[-1.5]]
    for key, value in (("worker", "x"), ("sequence", "-1"), ("scale", "fast"), ("worker", 1 << 64)):
        code, text, _ = shard.refused("push_gradient", gradients=[], metadata={key: value})
        assert (code, key in text) == ("INVALID_ARGUMENT", True)


def test_a_shard_refuses_rows_and_variables_of_other_shards(fronts: Fronts) -> None:
    one, two = fronts.up(2)
    for shard, name in ((one, W0), (two, W1)):
        shard.push_model(variables=[tensor(name, [1, 1])], embedding_table_info=[info("t", 2)])
    assert array(one.pull_embedding_vector(name="t", ids=[0, -4])).shape == (2, 2)
    strange = [
        (
            one,
            "pull_embedding_vector",
            {"name": "t", "ids": [2, 5]},
            "id 5 of table 't' is not shard 0's",
            "1",
        ),
        (two, "pull_embedding_vector", {"name": "t", "ids": [-1, -2]}, "id -2", "0"),
        (one, "push_gradient", {"gradients": [tensor("t", ones((1, 2)), [3])]}, "id 3", "1"),
        (
            one,
            "push_gradient",
            {"gradients": [tensor(W1, [1, 1])]},
            f"variable {W1!r} is not shard 0's of 2",
            "1",
        ),
        (two, "push_model", {"variables": [tensor(W0, [1, 1])]}, f"variable {W0!r}", "0"),
    ]
    for shard, name, fields, expected, whose in strange:
        code, text, trailing = shard.refused(name, **fields)
        assert (code, trailing["shard"]) == ("INVALID_ARGUMENT", whose)
        assert expected in text
        assert f"Use shard {whose}" in text


BAD_GRADIENTS = [
    ("unknown-table", "NOT_FOUND", tensor("who", ones((1, 2)), [0])),
    ("unknown-variable", "NOT_FOUND", tensor("who", [1, 2])),
    ("shape", "INVALID_ARGUMENT", tensor("w", [1, 2, 3])),
    ("width", "INVALID_ARGUMENT", tensor("t", ones((1, 3)), [0])),
    ("ids", "INVALID_ARGUMENT", tensor("t", ones((1, 2)), [0, 1])),
    ("no ids", "INVALID_ARGUMENT", tensor("t", ones((1, 2)))),
    ("rank", "INVALID_ARGUMENT", tensor("t", [1, 2], [0, 1])),
    ("nan", "INVALID_ARGUMENT", tensor("w", [1, np.nan])),
    ("infinite row", "INVALID_ARGUMENT", tensor("t", [[1, np.inf]], [0])),
    ("too large for f32", "INVALID_ARGUMENT", tensor("t", [[1, 1e300]], [0], "float64")),
    ("twice", "INVALID_ARGUMENT", tensor("v", [1.0])),
    ("no type", "INVALID_ARGUMENT", document()["Tensor"](name="w", dim=[2], content=bytes(2))),
    (
        "no such type",
        "INVALID_ARGUMENT",
        document()["Tensor"](name="w", data_type=9, dim=[2], content=bytes(2)),
    ),
    (
        "short",
        "INVALID_ARGUMENT",
        document()["Tensor"](name="w", data_type=5, dim=[2], content=bytes(7)),
    ),
    (
        "negative",
        "INVALID_ARGUMENT",
        document()["Tensor"](name="w", data_type=5, dim=[-1, -2], content=bytes(8)),
    ),
    (
        "immense",
        "INVALID_ARGUMENT",
        document()["Tensor"](name="w", data_type=5, dim=[1 << 62, 1 << 62], content=bytes(8)),
    ),
    (
        "rank",
        "INVALID_ARGUMENT",
        document()["Tensor"](name="w", data_type=5, dim=[1] * 40, content=bytes(4)),
    ),
]


def test_a_refused_push_changes_nothing(fronts: Fronts) -> None:
    (shard,) = fronts.up(1)
    shard.push_model(
        variables=[tensor("w", [0, 0]), tensor("v", [0.0])], embedding_table_info=[info("t", 2)]
    )
    good = [tensor("v", [1.0]), tensor("t", ones((1, 2)), [5])]
    for what, code, bad in BAD_GRADIENTS:
        assert shard.refused("push_gradient", gradients=[*good, bad])[0] == code, what
    assert shard.refused("push_gradient", gradients=good, model_version=-1)[0] == "INVALID_ARGUMENT"
    assert (
        shard.refused(
            "push_gradient",
            gradients=[tensor("t", ones((1, 2)), [5]), tensor("t", ones((1, 1)), [5])],
        )[0]
        == "INVALID_ARGUMENT"
    )
    reply = shard.pull_variable()
    assert reply.model.version == 1
    assert {one.name: array(one).tolist() for one in reply.model.variables} == {
        "w": [0, 0],
        "v": [0],
    }
    assert array(shard.pull_embedding_vector(name="t", ids=[5])).tolist() == [[0, 0]]
    assert shard.push_gradient(gradients=good).accepted


def test_a_refused_model_initializes_nothing(fronts: Fronts) -> None:
    (shard,) = fronts.up(1)
    fine = [tensor("w", [1.0])]
    for wrong in (
        {"variables": [tensor("w", [np.nan])]},
        {"variables": [tensor("w", [1.0]), tensor("w", [2.0])]},
        {"variables": [tensor("", [1.0])]},
        {"variables": fine, "embedding_table_info": [info("t")]},
        {"variables": fine, "embedding_table_info": [info("t", 0)]},
        {"variables": fine, "embedding_table_info": [info("t", 1 << 40)]},
        {"variables": fine, "embedding_table_info": [info("t", 2, initializer="magic")]},
        {"variables": fine, "embedding_table_info": [info("No Name", 2)]},
        {"variables": fine, "embedding_table_info": [info("t", 2), info("t", 3)]},
    ):
        assert shard.refused("push_model", **wrong)[0] == "INVALID_ARGUMENT", wrong
    assert not shard.pull_variable().model_init_status
    assert shard.refused("pull_embedding_vector", name="t", ids=[1])[0] == "NOT_FOUND"
    shard.push_model(variables=fine, embedding_table_info=[info("t", 2, initializer="ones")])
    assert array(shard.pull_embedding_vector(name="t", ids=[3])).tolist() == [[1, 1]]
    code, text, _ = shard.refused("push_model", embedding_table_info=[info("t", 5)])
    assert (code, "rows of 2 floats, not 5" in text) == ("FAILED_PRECONDITION", True)


def test_gradients_that_are_too_old_are_refused(fronts: Fronts) -> None:
    (shard,) = fronts.up(1, lag_max=2)
    shard.push_model(variables=[tensor("w", [0.0])], version=10)
    for _ in range(3):
        assert shard.push_gradient(model_version=10, gradients=[tensor("w", [1.0])]).accepted
    reply = shard.push_gradient(model_version=10, gradients=[tensor("w", [1.0])])
    assert (reply.accepted, reply.model_version) == (False, 13)
    assert shard.trailing["why"] == "the gradient is 3 versions old, and at most 2 are accepted"
    assert array(shard.pull_variable().model.variables[0]).tolist() == [-3]


def test_gradients_of_two_workers_make_a_step(fronts: Fronts) -> None:
    one, two = fronts.up(2, mode="sync", grads_to_wait=2)
    for shard, name in ((one, W0), (two, W1)):
        shard.push_model(variables=[tensor(name, [0.0])], embedding_table_info=[info("t", 1)])
    for worker, value in ((1, 2.0), (2, 4.0)):
        mine = {"worker": worker, "sequence": 1}
        rows = {0: [tensor(W0, [value]), tensor("t", [[value]], [0])], 1: [tensor(W1, [value])]}
        assert two.push_gradient(
            model_version=1, gradients=rows[1], metadata={**mine, "check": "true"}
        ).accepted
        reply = one.push_gradient(model_version=1, gradients=rows[0], metadata=mine)
        assert (reply.accepted, reply.model_version) == (True, worker)
        step = one.trailing["step"]
        assert two.push_gradient(
            model_version=1, gradients=rows[1], metadata={**mine, "step": step}
        ).accepted
    for shard in (one, two):
        assert array(shard.pull_variable().model.variables[0]).tolist() == [-3], "averaged"
    assert array(one.pull_embedding_vector(name="t", ids=[0])).tolist() == [[-6]], "summed"
    reply = one.push_gradient(model_version=1, gradients=[tensor(W0, [1.0])])
    assert (reply.accepted, reply.model_version) == (False, 2)
    assert "version 1" in one.trailing["why"]
    code, text, _ = two.refused("push_gradient", gradients=[tensor(W1, [1.0])])
    assert (code, "steps of several workers" in text) == ("FAILED_PRECONDITION", True)


def test_a_replica_is_requested(fronts: Fronts) -> None:
    one, two = fronts.up(2, replicas=1)
    for shard in (one, two):
        shard.push_model(embedding_table_info=[info("t", 2), info("s", 1)])
    gradients = [
        tensor("t", -np.arange(20).reshape(10, 2), range(0, 20, 2)),
        tensor("s", [[-5.0]], [8]),
    ]
    assert one.push_gradient(gradients=gradients).accepted, "and its replica has it"
    for name in ("get_replica", "GetReplica"):
        rows = {each.name: each for each in getattr(two, name)(replica_index=0).embedding_vectors}
        order = np.argsort(rows["t"].indices)
        assert array(rows["t"])[order].tolist() == np.arange(20).reshape(10, 2).tolist()
        assert (list(rows["s"].indices), array(rows["s"]).tolist()) == ([8], [[5]])
    fronts.shards.servers[1].shard.core.ready = False
    assert len(two.get_replica(replica_index=0).embedding_vectors) == 2, "others recover by it"
    fronts.shards.servers[1].shard.core.ready = True
    code, text, _ = two.refused("get_replica", replica_index=1)
    assert (code, "Those of shard 1 are in 0" in text) == ("INVALID_ARGUMENT", True)
    assert two.refused("get_replica", replica_index=9)[0] == "INVALID_ARGUMENT"


def test_replies_above_the_message_limit_are_refused_or_split(fronts: Fronts) -> None:
    one, two = fronts.up(2, replicas=1, grpc_message_bytes_max=65_536)
    for shard in (one, two):
        shard.push_model(embedding_table_info=[info("a", 100), info("b", 100)])
    ids = np.arange(0, 280, 2)
    for name in ("a", "b"):
        assert one.push_gradient(gradients=[tensor(name, -ones((140, 100)), ids)]).accepted
    code, text, _ = one.refused("pull_embedding_vector", name="a", ids=[0] * 200)
    assert (code, "80000 bytes, and 65536" in text) == ("RESOURCE_EXHAUSTED", True)
    code, _, _ = one.refused(
        "push_gradient", gradients=[tensor("a", ones((200, 100)), range(0, 400, 2))]
    )
    assert code == "RESOURCE_EXHAUSTED"
    code, text, _ = two.refused("get_replica", replica_index=0)
    assert (code, "cursor" in text) == ("RESOURCE_EXHAUSTED", True)
    found, cursor = {}, "0,0"
    while cursor:
        for each in two.get_replica(replica_index=0, metadata={"cursor": cursor}).embedding_vectors:
            found[each.name] = sorted(each.indices)
        cursor = two.trailing.get("cursor", "")
    assert found == {"a": ids.tolist(), "b": ids.tolist()}
    for cursor in ("x", "1", "-1,0", "9" * 30 + ",0"):
        assert (
            two.refused("get_replica", replica_index=0, metadata={"cursor": cursor})[0]
            == "INVALID_ARGUMENT"
        )


def test_permissions_and_a_shard_that_is_not_ready(fronts: Fronts) -> None:
    (shard,) = fronts.up(1)
    for metadata in ({"authorization": "Bearer nonsense"}, {"authorization": ""}):
        code, text, _ = shard.refused("pull_variable", metadata=metadata)
        assert (code, "token" in text) == ("UNAUTHENTICATED", True)
    core = fronts.shards.servers[0].shard.core
    core.ready = False
    try:
        for name in ("pull_variable", "push_gradient", "push_model", "pull_embedding_vector"):
            code, _, trailing = shard.refused(name)
            assert (code, "grpc-retry-pushback-ms" in trailing) == ("UNAVAILABLE", True)
        assert health(shard) == 2
    finally:
        core.ready = True
    assert health(shard) == health(shard, "PServer") == 1
    with pytest.raises(grpc.RpcError, match="NOT_FOUND"):
        health(shard, "nobody")
    broken = shard.channel.unary_unary("/PServer/push_model")
    with pytest.raises(grpc.RpcError, match=r"no Model|INVALID_ARGUMENT"):
        broken(b"\xff\xff", metadata=[("authorization", f"Bearer {TOKEN}")], timeout=PATIENCE_S)


def health(shard: Shard, service: str = "") -> int:
    request_type, response_type = (
        message(f"grpc.health.v1.HealthCheck{kind}") for kind in ("Request", "Response")
    )
    check = shard.channel.unary_unary(
        "/grpc.health.v1.Health/Check", request_type.SerializeToString, response_type.FromString
    )
    return int(check(request_type(service=service), timeout=PATIENCE_S).status)


def test_health_is_watched_to_the_end_and_the_service_is_described(fronts: Fronts) -> None:
    (shard,) = fronts.up(1)
    request_type, response_type = (
        message(f"grpc.health.v1.HealthCheck{kind}") for kind in ("Request", "Response")
    )
    watch = shard.channel.unary_stream(
        "/grpc.health.v1.Health/Watch", request_type.SerializeToString, response_type.FromString
    )
    statuses = watch(request_type(), timeout=PATIENCE_S)
    assert next(statuses).status == 1
    request_type, response_type = (
        message(f"grpc.reflection.v1.ServerReflection{kind}") for kind in ("Request", "Response")
    )
    for version in ("v1", "v1alpha"):
        name = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
        info = shard.channel.stream_stream(
            name, request_type.SerializeToString, response_type.FromString
        )
        requests = [request_type(list_services="*"), request_type(file_containing_symbol="PServer")]
        token = [("authorization", f"Bearer {TOKEN}")]
        services, files = info(iter(requests), timeout=PATIENCE_S, metadata=token)
        assert "PServer" in {one.name for one in services.list_services_response.service}
        assert len(files.file_descriptor_response.file_descriptor_proto) == 2
    fronts.end(0)
    assert [one.status for one in statuses] == [2]


def test_pushes_that_wait_when_the_shard_ends_get_an_error(fronts: Fronts) -> None:
    one, _ = fronts.up(2, replicas=1, without_replica_s=0.0)
    one.push_model(embedding_table_info=[info("t", 1)])
    fronts.end(1)
    fronts.shards.lose(1)
    reply: list[Any] = []
    thread = threading.Thread(
        target=lambda: reply.append(
            one.refused("push_gradient", gradients=[tensor("t", [[1.0]], [0])])
        )
    )
    thread.start()
    core = fronts.shards.servers[0].shard.core
    until(lambda: core.position >= 3)  # taken: its replica is waited for
    fronts.end(0)
    thread.join(PATIENCE_S)
    assert (reply[0][0], "shard 0" in reply[0][1]) == ("UNAVAILABLE", True)


def test_invalid_grpc_settings_are_refused(fronts: Fronts) -> None:
    for text in ("", "nobody", "sgd speed=2", "sgd rate", "adam rate=x"):
        with pytest.raises(ConfigError, match="grpc_optimizer"):
            optimizer_in(text)
    assert optimizer_in("adam rate=0.1") == ("adam", {"rate": 0.1})
    for text in ("here", ":80", "h:x", "h:65535"):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            grpc_address(ParamsSettings(grpc=text, shards=3), 0)
    assert grpc_address(ParamsSettings(grpc="[::1]:70", shards=3), 2) == "[::1]:72"
    fronts.up(1)
    taken = ParamsSettings(grpc=fronts.address(0))
    other = Shards(fronts.shards.root / "other")
    other.root.mkdir()
    try:
        other.up(1, grpc=taken.grpc)
        with pytest.raises(AddressInUse, match=r"params\.grpc"):
            ShardGrpc(other.servers[0].shard).start()
    finally:
        other.close()


def test_tables_created_by_one_protocol_are_used_by_the_other(fronts: Fronts) -> None:
    (shard,) = fronts.up(1)
    client = fronts.shards.client()
    client.create(TableSpec("t", 3, optimizer="adam", seed=4))
    shard.push_model(embedding_table_info=[info("t", 3, initializer="uniform")])
    assert (array(shard.pull_embedding_vector(name="t", ids=[5])) == client.pull("t", [5])).all()
    assert client.spec("t").optimizer == "adam"


class Copy:
    """A copy of a shard's rows, as a follower has it."""

    def __init__(self, shard: Shard, number: int, follower: str = "") -> None:
        self.shard, self.number = shard, number
        self.metadata: dict[str, Any] = {"follower": follower} if follower else {}
        self.tables: dict[str, dict[int, list[float]]] = {}

    def synchronize(
        self, name: str = "synchronize_embedding", receives: bool = True, **more: Any
    ) -> bool:
        """Synchronize; return whether all rows were sent, instead of the changed ones only."""
        answer = getattr(self.shard, name)(
            replica_index=self.number, metadata={**self.metadata, **more}
        )
        trailing = self.shard.trailing
        if not receives:
            return "anew" in trailing
        if "anew" in trailing:
            self.tables = {}
        if self.metadata:
            self.metadata["serial"] = trailing["serial"]
        for each in answer.embedding_vectors:
            rows = self.tables.setdefault(each.name, {})
            if each.dim[1]:
                rows |= dict(zip(each.indices, array(each).tolist(), strict=True))
            else:
                for one in each.indices:
                    rows.pop(one, None)
        return "anew" in trailing


def pushed(shard: Shard, table: str, ids: Any, by: float = 1.0) -> None:
    ids = list(ids)
    assert shard.push_gradient(gradients=[tensor(table, -np.full((len(ids), 2), by), ids)]).accepted


def test_a_follower_gets_the_changed_rows(fronts: Fronts) -> None:
    one, two = fronts.up(2, replicas=1)
    for shard in (one, two):
        shard.push_model(variables=[], embedding_table_info=[info("t", 2), info("s", 2)])
    pushed(one, "t", [0, 2])
    stock, careful = Copy(one, 0), Copy(one, 0, "careful")
    assert stock.synchronize()
    assert careful.synchronize()
    pushed(one, "t", [2, 4, -6])
    pushed(one, "s", [8])
    assert not stock.synchronize("SynchronizeEmbedding")
    assert stock.tables == {"t": {0: [1, 1], 2: [2, 2], 4: [1, 1], -6: [1, 1]}, "s": {8: [1, 1]}}
    assert not careful.synchronize(receives=False), "it does not receive the answer"
    pushed(one, "t", [10])
    assert not careful.synchronize()
    assert careful.tables == {"t": {**stock.tables["t"], 10: [1, 1]}, "s": {8: [1, 1]}}
    fronts.shards.servers[0].shard.parameters.tables[0].remove([4])
    fronts.shards.servers[0].shard.core.note(0, [4])
    assert not stock.synchronize()
    assert not careful.synchronize()
    assert 4 not in stock.tables["t"]
    assert stock.tables == careful.tables
    assert not one.synchronize_embedding(replica_index=0).embedding_vectors, "nothing has changed"
    assert careful.synchronize(serial=0), "an answer that nobody remembers"
    assert careful.tables == stock.tables
    code, text, _ = one.refused("synchronize_embedding", replica_index=1)
    assert (code, "Use shard 1" in text) == ("INVALID_ARGUMENT", True)


def test_changes_above_the_message_limit_reach_a_follower(fronts: Fronts) -> None:
    (one,) = fronts.up(1, grpc_message_bytes_max=65_536)
    one.push_model(embedding_table_info=[info("t", 200)])
    ids = range(100)
    for half in (ids[:50], ids[50:]):
        one.push_gradient(gradients=[tensor("t", -ones((50, 200)), half)])
    for _ in range(2):
        copy = Copy(one, 0, "far")
        code, text, _ = one.refused(
            "synchronize_embedding", replica_index=0, metadata={"follower": "new"}
        )
        assert (code, "cursor" in text) == ("RESOURCE_EXHAUSTED", True)
        assert copy.synchronize(cursor="0,0")
        while "cursor" in one.trailing:
            assert not copy.synchronize(cursor=one.trailing["cursor"])
    for half in (ids[:50], ids[50:]):
        one.push_gradient(gradients=[tensor("t", -ones((50, 200)), half)])
    copy.synchronize()
    request_count = 1
    while "more" in one.trailing:
        copy.synchronize()
        request_count += 1
    assert request_count == 2
    assert copy.tables == {"t": {k: [2.0] * 200 for k in ids}}


def test_followers_are_bounded(fronts: Fronts, monkeypatch: pytest.MonkeyPatch) -> None:
    (one,) = fronts.up(1)
    shard = fronts.shards.servers[0].shard
    one.push_model(embedding_table_info=[info("t", 2)])
    now = [0.0]
    each = RowFollowers(shard, lambda: now[0])
    for k in range(FOLLOWERS_MAX + 1):
        now[0] += 1
        each.start_sync(f"f{k}")
    assert each.of("f0", 0) is None
    kept = each.of("f1", 0)
    assert kept is not None
    pushed(one, "t", range(10))
    monkeypatch.setattr("clipper.frontend.params_grpc.followers.IDS_MAX", 9)
    assert each.of("f1", 0) is kept
    assert each.of("f1", 0) is None, "it was to be told too much"
    each.start_sync("f1")
    now[0] += FORGET_S
    each.gather()
    assert each.of("f1", 0) is None
    assert not each._on
