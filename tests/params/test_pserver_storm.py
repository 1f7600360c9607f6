"""The document's gRPC service with invalid messages, and with many workers at once."""

import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("grpc", reason="pip install 'clipper-serving[grpc]'")

import grpc

from clipper.frontend.params_grpc.server import ShardGrpc
from tests.params.conftest import TOKEN, Shards
from tests.params.document import CALLS, PATIENCE_S, Shard, array, document, tensor
from tests.threads import join

ANSWERS = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED"}
GRPC = {"grpc": "127.0.0.1:0", "grpc_optimizer": "sgd rate=1"}


@pytest.fixture
def front(shards: Shards) -> Iterator[Any]:
    shards.up(1, **GRPC)
    found = ShardGrpc(shards.servers[0].shard).start()
    yield found
    found.stop()


def seeds() -> list[tuple[str, bytes]]:
    """Return a valid message of each call."""
    made = document()
    info = made["EmbeddingTableInfo"](name="t", dim=[2], initializer="zeros")
    gradients = [tensor("w", [1.0, 2.0]), tensor("t", np.ones((3, 2)), [1, 2, 1 << 40])]
    said = {
        "pull_variable": {"version": 3},
        "pull_embedding_vector": {"name": "t", "ids": [1, -5, 1 << 62]},
        "push_model": {
            "version": 4,
            "variables": [tensor("w", [0.0, 0.0])],
            "embedding_table_info": [info],
        },
        "push_gradient": {"model_version": 2, "gradients": gradients},
        "get_replica": {"replica_index": 0},
        "synchronize_embedding": {"replica_index": 0},
    }
    return [
        (name, made[CALLS[name][0]](**fields).SerializeToString()) for name, fields in said.items()
    ]


def mangled(data: bytes, draw: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        if not found:
            break
        at = draw.randrange(len(found))
        match draw.randrange(4):
            case 0:
                found[at] = draw.randrange(256)
            case 1:
                del found[at : at + draw.randint(1, 5)]
            case 2:
                found[at:at] = draw.randbytes(draw.randint(1, 5))
            case _:
                found[at] ^= 1 << draw.randrange(8)
    return bytes(found)


def test_mangled_messages_are_rejected(front: ShardGrpc, stress: int) -> None:
    draw, seen = random.Random(5), set()
    token = [("authorization", f"Bearer {TOKEN}")]
    sound = seeds()
    with grpc.insecure_channel(front.address) as channel:
        calls = {name: channel.unary_unary(f"/PServer/{name}") for name, _ in sound}
        calls["push_model"](dict(sound)["push_model"], timeout=PATIENCE_S, metadata=token)
        for _ in range(400 * stress):
            name, data = draw.choice(sound)
            try:
                calls[name](mangled(data, draw), timeout=PATIENCE_S, metadata=token)
                seen.add("OK")
            except grpc.RpcError as error:
                seen.add(error.code().name)
                if error.code().name not in ANSWERS:
                    raise
        for name, data in sound:
            if name != "get_replica":  # there is none
                calls[name](data, timeout=PATIENCE_S, metadata=token)
    assert {"OK", "INVALID_ARGUMENT", "NOT_FOUND"} <= seen


def test_pushes_of_many_workers_at_once_are_applied_exactly_once(front: ShardGrpc) -> None:
    workers, pushes = 6, 30
    info = document()["EmbeddingTableInfo"](name="t", dim=[2], initializer="zeros")
    trouble: list[BaseException] = []

    def work(number: int) -> None:
        shard = Shard(front.address, TOKEN)
        try:
            shard.push_model(variables=[tensor("w", [0.0])], embedding_table_info=[info])
            for sequence in range(1, pushes + 1):
                ids = [number, 99]
                given = [tensor("t", -np.ones((2, 2)), ids), tensor("w", [-1.0])]
                for _ in range(2):  # the second is its repetition
                    assert shard.push_gradient(
                        gradients=given, metadata={"worker": number, "sequence": sequence}
                    ).accepted
                mine = array(shard.pull_embedding_vector(name="t", ids=[number]))
                assert (mine == sequence).all(), "a worker reads what it wrote"
        except BaseException as error:
            trouble.append(error)
        finally:
            shard.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, workers + 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        join(thread)
    assert not trouble
    shard = Shard(front.address, TOKEN)
    said = shard.pull_variable().model
    assert (said.version, array(said.variables[0]).tolist()) == (
        1 + workers * pushes,
        [workers * pushes],
    )
    assert (array(shard.pull_embedding_vector(name="t", ids=[99])) == workers * pushes).all()
    shard.close()
