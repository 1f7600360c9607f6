"""The check of histories of pushes and reads finds the errors that it is meant for."""

import random

import numpy as np
import pytest

from bench.system.faults.params_history import PushHistory, Read
from clipper.params import TableSpec
from clipper.params.client import client as client_module
from clipper.params.shard.replication.followers import ShardReplica
from tests.params.conftest import Shards, ones, until
from tests.params.test_streams import SGD

INF = float("inf")


def history(pushes: list[list[float]], *reads: tuple[float, float, float, float, int]) -> list[str]:
    each = [
        Read(0, start, end, value, age_s, least, "it") for start, end, value, age_s, least in reads
    ]
    return PushHistory({0: pushes}, each).errors()


def test_impossible_histories_are_detected() -> None:
    pushes = [[1.0, 2.0], [3.0, 4.0], [5.0, INF]]
    fine = [(0.0, 0.5, 0, 0.0, 0), (1.0, 1.5, 1, 0.0, 0), (2.5, 3.5, 1, 0.0, 0)]
    fine += [(4.5, 4.6, 2, 0.0, 0), (6.0, 7.0, 2, 0.0, 0), (8.0, 9.0, 3, 0.0, 0)]
    assert not history(pushes, *fine)
    assert not history(pushes, (4.5, 4.6, 1, 1.0, 0)), "as old as it may be"
    for bad in (
        (2.5, 2.6, 0, 0.0, 0),  # lost
        (2.5, 2.6, 2, 0.0, 0),  # applied twice
        (4.5, 4.6, 1, 0.4, 0),  # older than it may be
        (4.5, 4.6, 1, INF, 2),  # without one's own push
    ):
        assert len(history(pushes, bad)) == 1


@pytest.mark.parametrize("planted", [False, True])
def test_a_planted_bug_of_replicas_is_detected(
    shards: Shards, planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers detect replicas that answer without having the required pushes."""
    client = shards.up(2, replicas=1, replication="periodic", period_s=0.03).client()
    client.create(TableSpec("counts", 2, **SGD))
    client.push("counts", np.arange(4), np.zeros((4, 2)))
    copies = [copy for server in shards.servers.values() for copy in server.shard.copies.values()]
    until(lambda: all(one.replica and one.replica.parameters.specs for one in copies))
    if planted:
        # they lag, and answer, however busy this machine is
        monkeypatch.setattr(ShardReplica, "has", lambda *_: True)
        monkeypatch.setattr(client_module, "REPLICA_WAIT_S", 60.0)
        for copy in copies:
            monkeypatch.setattr(copy, "_once", list)
    record, draw, token = PushHistory(), random.Random(1), {}
    for turn in range(40):

        def push() -> None:
            token.update(client.push("counts", np.arange(4), -ones((4, 2))).token)

        def read() -> float:
            return float(client.pull("counts", [draw.randrange(4)], after=token)[0, 0])

        record.push(0, push)
        record.read(0, read, "a replica", age_s=1e9, least=turn + 1)
    found = record.errors()
    assert bool(found) == planted, found[:3]
