"""A worker as the design document has it trains a model against real shards by gRPC, while they are
killed."""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("grpc", reason="pip install 'clipper-serving[grpc]'")

import grpc

from clipper.errors import ConfigError
from clipper.params import Client
from clipper.params.local.local_set import LocalSet, read_address_file
from clipper.params.partition import shard_of_name
from clipper.settings.params import ParamsSettings
from tests.params.conftest import until
from tests.params.document import Shard, array, document, tensor
from tests.processes import Program, free_ports

PATIENCE_S = 60.0
USERS, DIM, BATCH, STEPS = 40, 4, 16, 60


class Worker:
    """A worker that trains a model of ratings: users' vectors in a table, and one dense vector. It
    knows only the addresses and the messages.

    A call that a shard does not answer is sent again to the same address, a push with the same
    sequence number.
    """

    def __init__(self, addresses: list[str], token: str, number: int) -> None:
        self.shards = [Shard(address, token) for address in addresses]
        self.number, self.sequence, self.again = number, 0, 0
        info = document()["EmbeddingTableInfo"](name="users", dim=[DIM], initializer="normal")
        for place, shard in enumerate(self.shards):
            if not self.call(shard, "pull_variable").model_init_status:
                mine = [tensor("v", np.full(DIM, 0.5))] if self.whose("v") == place else []
                self.call(shard, "push_model", variables=mine, embedding_table_info=[info])
                assert self.call(shard, "pull_variable").model_init_status

    def whose(self, name: str) -> int:
        return shard_of_name(name, len(self.shards))

    def call(self, shard: Shard, name: str, /, **fields: Any) -> Any:
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                return getattr(shard, name)(**fields)
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE or time.monotonic() > until:
                    raise
                self.again += 1
                time.sleep(0.02)

    def step(self, ids: Any, labels: Any) -> float:
        dense = self.call(self.shards[self.whose("v")], "pull_variable").model
        (v,) = [array(one) for one in dense.variables]
        rows, shards = np.empty((len(ids), DIM), np.float32), len(self.shards)
        for place, shard in enumerate(self.shards):
            mine = ids % shards == place
            rows[mine] = array(
                self.call(shard, "pull_embedding_vector", name="users", ids=ids[mine].tolist())
            )
        error = rows @ v - labels
        self.sequence += 1
        for place, shard in enumerate(self.shards):
            mine = ids % shards == place
            given = [tensor("users", error[mine, None] * v, ids[mine].tolist())]
            given += (
                [tensor("v", (error[:, None] * rows).sum(axis=0))]
                if self.whose("v") == place
                else []
            )
            said = {"worker": self.number, "sequence": self.sequence}
            assert self.call(shard, "push_gradient", gradients=given, metadata=said).accepted
        return float((error**2).mean())

    def close(self) -> None:
        for shard in self.shards:
            shard.close()


def has_copies(folder: Path) -> bool:
    """Return whether each shard has a copy in the other one, so that it may be killed."""
    with Client(folder, patience_s=PATIENCE_S) as client:
        return not any(client.call(shard, "stats")["exposed"] for shard in range(2))


def trained(folder: Path, kills: dict[int, int]) -> tuple[list[float], Any, Any, int]:
    """Train with one worker. kills: the shard that is killed, by step. Returns the losses, the
    rows, the dense vector and the number of repeated requests."""
    port = free_ports(2)[0]
    settings = ParamsSettings(
        folder=str(folder),
        shards=2,
        replicas=1,
        snapshot_s=0.0,
        grpc=f"127.0.0.1:{port}",
        grpc_optimizer="adagrad rate=0.3",
    )
    local = LocalSet(settings).start()
    try:
        local.wait_ready(PATIENCE_S)
        said = read_address_file(folder)
        assert said["grpc"] == [f"127.0.0.1:{port + k}" for k in range(2)]
        worker, draw = Worker(said["grpc"], said["token"], 7), np.random.default_rng(3)
        truth, losses = draw.standard_normal(USERS), []
        for step in range(STEPS):
            if step in kills:
                until(lambda: has_copies(folder))
                os.kill(local.pids()[kills[step]], signal.SIGKILL)
            ids = draw.integers(0, USERS, BATCH)
            losses.append(worker.step(ids, truth[ids]))
        worker.close()
        with Client(folder) as client:
            return (
                losses,
                client.pull("users", range(USERS)),
                client.pull_variables()[1]["v"],
                worker.again,
            )
    finally:
        local.stop(snapshot=False)


@pytest.mark.slow
def test_a_grpc_worker_trains_through_kills(tmp_path: Path) -> None:
    losses, rows, v, _ = trained(tmp_path / "calm", {})
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) / 4
    shaken = trained(tmp_path / "shaken", {20: 0, 40: 1})
    assert shaken[3] > 0, "it had to ask again"
    assert shaken[0] == losses
    assert (shaken[1] == rows).all()
    assert (shaken[2] == v).all()


def test_invalid_grpc_settings_of_a_set_are_refused(tmp_path: Path) -> None:
    for wrong in ({"grpc": "here"}, {"grpc": "127.0.0.1:0", "grpc_optimizer": "magic"}):
        with pytest.raises(ConfigError, match=r"params\.grpc"):
            LocalSet(ParamsSettings(folder=str(tmp_path), **wrong))


@pytest.mark.slow
def test_a_shard_started_from_a_shell_serves_grpc(tmp_path: Path) -> None:
    port = free_ports(1)[0]
    said = {
        "addresses": [f"unix:{tmp_path}/0.sock"],
        "token": "open",
        "settings": {"grpc": f"127.0.0.1:{port}", "snapshot_s": 0},
    }
    (tmp_path / "shards.json").write_text(json.dumps(said))
    words = [sys.executable, "-m", "clipper", "params", "shard", "0", "--folder", str(tmp_path)]
    shard = Shard(f"127.0.0.1:{port}", "open")

    def serves() -> bool:
        try:
            return not shard.pull_variable().model_init_status
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.UNAVAILABLE:
                raise
            return False

    with contextlib.closing(shard), Program(*words, until=serves) as running:
        assert running.stop() == 0, running.output
        assert shard.refused("pull_variable")[0] == "UNAVAILABLE"
