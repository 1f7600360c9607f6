"""Reads of replicas: how old they may be, and one's own pushes."""

import math
import threading
import time
from functools import partial
from typing import Any

import numpy as np
import pytest

from clipper.errors import InvalidInput
from clipper.params import Client, TableSpec
from clipper.params.client import client as client_module
from clipper.params.shard.replication import replica_reads
from clipper.params.shard.replication.followers import ReplicaFollower
from clipper_container.params.connection import call_once
from tests.params.conftest import Shards, ones, until
from tests.params.test_streams import SGD, streams

PLAIN = TableSpec("plain", 2, **SGD)
IDS = np.arange(10)


def has_push(follower: ReplicaFollower, push: tuple[int, int]) -> bool:
    return follower.replica is not None and follower.replica.has(0.0, push)


def served(shards: Shards) -> int:
    return sum(server.shard.replica_reads.served for server in shards.servers.values())


def pull(client: Client, **fields: Any) -> dict[str, Any]:
    """Ask shard 1 for a row of its copy of shard 0."""
    request = {"shard": 0, "table": "plain", "ids": IDS[:1], "wait_s": 1.0, **fields}
    return call_once(client.connections[1], "pull_replica", **request)[1]


def pulls(shards: Shards) -> int:
    return sum(server.shard.core.stats()["pulls"] for server in shards.servers.values())


def wait_for_replicas(monkeypatch: pytest.MonkeyPatch, wait_s: float = 60.0) -> None:
    """Have clients wait so long for a replica, before they ask the shard itself."""
    monkeypatch.setattr(client_module, "REPLICA_WAIT_S", wait_s)


@pytest.mark.parametrize("settings", [{"replicas": 2}, {"replication": "periodic"}])
def test_own_pushes_are_read_from_replicas(
    shards: Shards, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    client = shards.up(3, **{"replicas": 1, "period_s": 0.01, **settings}).client()
    client.create(PLAIN)
    token: dict[int, tuple[int, int]] = {}
    for turn in range(1, 21):
        if turn % 2:
            token |= client.push("plain", IDS, -ones((10, 2))).token
        else:
            token |= client.push_gradients(rows={"plain": (IDS, -ones((10, 2)))})["token"]
        assert (client.pull("plain", IDS, after=token) == turn).all()
        assert (client.pull("plain", IDS, max_staleness_s=0.0) == turn).all()
    if settings.get("replicas"):
        before, there = pulls(shards), served(shards)
        until(lambda: streams(shards))
        wait_for_replicas(monkeypatch)
        for dtype in ("f32", "f16", "i8"):
            rows = client.pull("plain", [*IDS, 3, 1 << 50], dtype, after=token, unique=True)
            assert rows[:, 0].tolist() == [20.0] * 11 + [0.0]
        for _ in range(5):
            client.pull("plain", IDS, max_staleness_s=5.0)
        assert (pulls(shards), served(shards)) == (before, there + 24), "shards read nothing"


def test_replica_that_lags_answers_only_clients_that_accept_the_lag(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = shards.up(2, replicas=1, replication="periodic", period_s=0.3).client()
    client.create(PLAIN)
    first = client.push("plain", IDS, -ones((10, 2))).token
    until(lambda: bool((client.pull("plain", IDS, max_staleness_s=math.inf) == 1).all()))
    asks_in_vain = []
    for server in shards.servers.values():
        for shard, follower in server.shard.copies.items():
            until(partial(has_push, follower, first[shard]))
            asks_in_vain.append(threading.Event())
            monkeypatch.setattr(follower, "_once", asks_in_vain[-1].set)
    assert all(each.wait(60) for each in asks_in_vain)
    start_s = time.monotonic()
    token = client.push("plain", IDS, -ones((10, 2))).token
    wait_for_replicas(monkeypatch)
    assert (client.pull("plain", IDS, max_staleness_s=math.inf) == 1).all()
    assert (client.pull("plain", IDS, after=first) == 1).all()
    assert (client.pull("plain", IDS, max_staleness_s=30.0) == 1).all()

    def behind() -> int:
        return sum(server.shard.replica_reads.behind for server in shards.servers.values())

    before = behind()
    wait_for_replicas(monkeypatch, 0.05)
    assert (client.pull("plain", IDS, after=token) == 2).all(), "the shards answer"
    assert (client.pull("plain", IDS, max_staleness_s=0.05) == 2).all()
    assert (client.pull("plain", IDS, max_staleness_s=30.0, after=token) == 2).all()
    monkeypatch.setattr(replica_reads, "OPEN_MAX", 0)
    assert (client.pull("plain", IDS, after=token) == 2).all()
    until(lambda: behind() == before + 8)
    assert time.monotonic() - start_s < 30
    other = {shard: (epoch - 1, version) for shard, (epoch, version) in token.items()}
    assert (client.pull("plain", IDS, after=other) == 2).all(), "a token of another life"


def test_replica_waits_for_a_push_that_is_on_its_way(shards: Shards) -> None:
    client = shards.up(2, replicas=1).client()
    client.create(PLAIN)
    until(lambda: streams(shards))
    version = client.push("plain", [0], -ones((1, 2))).token[0]
    found: list[Any] = []
    after = [version[0], version[1] + 1]

    def read() -> None:
        with shards.client() as other:
            found.append(pull(other, after=after))

    reader = threading.Thread(target=read)
    reader.start()
    until(lambda: bool(shards.servers[1].shard.replica_reads._open))
    client.push("plain", [0], -ones((1, 2)))
    reader.join(20)
    assert found[0]["rows"].tolist() == [[2.0, 2.0]]
    assert pull(client, after=[9, 9], wait_s=0.0)["behind"]
    assert pull(client, shard=1)["behind"], "it has no such copy"


def test_rows_are_read_from_a_replica_while_their_shard_is_unavailable(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = shards.up(3, replicas=1).client(patience_s=0.2)
    client.create(PLAIN)
    client.push("plain", IDS, -ones((10, 2)))
    until(lambda: streams(shards))
    shards.lose(1)
    wait_for_replicas(monkeypatch)
    assert (client.pull("plain", [1, 4, 7], max_staleness_s=math.inf) == 1).all()
    assert (client.pull("plain", [1, 4, 7], max_staleness_s=60.0) == 1).all()


@pytest.mark.parametrize(
    ("field", "value"), [("ids", [1]), ("dtype", "f8"), ("after", 3), ("after", [1])]
)
def test_bad_reads_are_refused(shards: Shards, field: str, value: object) -> None:
    client = shards.up(2, replicas=1).client()
    with pytest.raises(InvalidInput):
        pull(client, **{field: value})
