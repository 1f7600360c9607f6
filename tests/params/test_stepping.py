"""Synchronous training: several workers' gradients make one step, the same on every shard, whoever
comes first or dies."""

import random
import threading
from typing import Any

import numpy as np
import pytest

from clipper.errors import ClipperError, DoesNotFit, InvalidInput, Overloaded
from clipper.params import Client, TableSpec
from clipper.params.shard.training import synchronous as stepping
from tests.params.conftest import Shards, full, ones, zeros
from tests.params.test_replication import until
from tests.threads import join

COUNTS = TableSpec(
    "counts", 2, optimizer="sgd", optimizer_settings={"rate": 1.0}, initializer="zeros"
)


def started_client(shards: Shards, count: int, grads_to_wait: int, **settings: Any) -> Client:
    shards.up(count, mode="sync", grads_to_wait=grads_to_wait, **settings)
    client = shards.client()
    client.create(COUNTS)
    client.push_model(
        {f"w{i}": zeros(1) for i in range(4)}, optimizer="sgd", optimizer_settings={"rate": 1.0}
    )
    return client


def variables(client: Client) -> list[float]:
    return [float(value[0]) for _, value in sorted(client.pull_variables()[1].items())]


@pytest.mark.parametrize("count", [1, 3])
def test_a_step_averages_dense_gradients_and_sums_rows(shards: Shards, count: int) -> None:
    client = started_client(shards, count, 2)
    other = shards.client()
    versions = client.pull_variables()[0]
    assert versions == [1] * count
    reply = client.push_gradients(
        {f"w{i}": -ones(1) for i in range(4)},
        {"counts": ([1, 2, 2], -ones((3, 2)))},
        versions=versions,
    )
    assert reply["accepted"]
    assert reply["versions"] == versions, "the first of two changes nothing"
    assert variables(client) == [0] * 4
    reply = other.push_gradients(
        {"w0": full(1, -3)}, {"counts": ([2, 5], full((2, 2), -10))}, versions=versions
    )
    assert reply["accepted"]
    assert reply["versions"] == [2] * count
    assert variables(client) == [2, 0.5, 0.5, 0.5]
    assert client.pull("counts", [1, 2, 5])[:, 0].tolist() == [1, 12, 10]
    reply = client.push_gradients({"w0": -ones(1)}, versions=versions)
    assert not reply["accepted"]
    assert "is of version 1, and 2 is gathered" in reply["why"][0]
    assert variables(client) == [2, 0.5, 0.5, 0.5]


def test_lag_max_accepts_slightly_stale_pushes(shards: Shards) -> None:
    client = started_client(shards, 2, 1, lag_max=1)
    for _ in range(2):
        client.push_gradients({"w0": -ones(1)})
    assert client.push_gradients({"w0": -ones(1)}, versions=[2, 2])["accepted"]
    assert not client.push_gradients({"w0": -ones(1)}, versions=[2, 2])["accepted"]
    assert variables(client)[0] == 3


def test_a_push_refused_by_one_shard_is_applied_by_none(shards: Shards) -> None:
    client = started_client(shards, 3, 1)
    for wrong in ({"w0": ones(2)}, {"nothing": ones(1)}):
        with pytest.raises(ClipperError):
            client.push_gradients(
                {**{f"w{i}": ones(1) for i in range(1, 4)}, **wrong},
                {"counts": (range(9), ones((9, 2)))},
            )
    bad = ones((9, 2))
    bad[4] = np.nan
    with pytest.raises(InvalidInput, match="NaN"):
        client.push_gradients({}, {"counts": (range(9), bad)})
    assert variables(client) == [0] * 4
    assert (client.pull("counts", range(9)) == 0).all()
    assert client.pull_variables()[0] == [1, 1, 1]


def test_a_push_of_rows_alone_is_refused_in_synchronous_training(shards: Shards) -> None:
    client = started_client(shards, 2, 1)
    with pytest.raises(DoesNotFit, match="push_gradients"):
        client.push("counts", [1], ones((1, 2)))
    with pytest.raises(DoesNotFit, match="push_gradients"):
        client.call(1, "push_gradients", variables={}, worker=1, sequence=1)


@pytest.mark.parametrize("seed", range(3))
def test_workers_that_race_agree_on_every_shard(shards: Shards, seed: int) -> None:
    client = started_client(shards, 3, 2)
    taken = [0] * 4

    def work(number: int) -> None:
        mine, draw = shards.client(), random.Random(seed * 10 + number)
        while taken[number] < 8:
            versions = mine.pull_variables()[0]
            threading.Event().wait(draw.random() * 0.003)
            reply = mine.push_gradients(
                {f"w{i}": full(1, -2) for i in range(4)},
                {"counts": (range(6), -ones((6, 2)))},
                versions=[min(versions)] * 3,
            )
            taken[number] += reply["accepted"]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        join(thread)
    assert client.pull_variables()[0] == [17] * 3, "32 pushes, two a step, from version 1"
    assert variables(client) == [32.0] * 4
    assert (client.pull("counts", range(6)) == 32).all()


def test_accepted_gradients_survive_a_kill_of_a_shard(shards: Shards) -> None:
    client = started_client(shards, 3, 2, replicas=1)
    assert client.push_gradients(
        {f"w{i}": full(1, -2) for i in range(4)}, {"counts": (range(6), -ones((6, 2)))}
    )["accepted"]
    for shard in range(3):
        shards.lose(shard)
        shards.begin(shard)
        until(
            lambda: all(
                f["whole"] for _, reply in client.call_all("stats") for f in reply["followers"]
            )
        )
    assert variables(client) == [0] * 4
    assert client.push_gradients({}, {})["accepted"]
    assert variables(client) == [1.0] * 4
    assert (client.pull("counts", range(6)) == 1).all()
    assert client.pull_variables()[0] == [2, 2, 2]
    assert client.push_gradients({}, {})["accepted"]
    shards.down()
    shards.up(3, mode="sync", grads_to_wait=2, replicas=1)
    assert client.push_gradients({}, {})["versions"] == [3, 3, 3], "a snapshot has it too"


def test_a_step_does_not_wait_for_a_dead_worker_forever(shards: Shards) -> None:
    client = started_client(shards, 2, 1)
    for server in shards.servers.values():
        server.shard.training._late_s = 0.05  # type: ignore[attr-defined]
    for sequence in (1, 2):  # a worker that reached shard 0 alone, twice
        client.call(0, "push_gradients", variables={}, worker=9, sequence=sequence)
    assert client.push_gradients({"w0": -ones(1), "w1": -ones(1), "w2": -ones(1)})["accepted"]
    until(lambda: client.pull_variables()[0] == [4, 4])
    assert variables(client)[:3] == [1, 1, 1]


def test_pending_gradients_of_incomplete_steps_are_bounded(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stepping, "GATHERED_MAX", 3)
    client = started_client(shards, 2, 1)

    def push(sequence: int) -> None:
        client.call(
            1,
            "push_gradients",
            worker=5,
            sequence=sequence,
            step=10**6 + sequence,
            rows={},
            variables={},
        )

    for sequence in range(1, 6):
        push(sequence)
    with pytest.raises(Overloaded, match="5 gradients wait"):
        push(6)
    assert len(shards.servers[1].shard.parameters.gathered) == 5


@pytest.mark.parametrize("version", [2**63, -1, "new"])
def test_model_of_an_impossible_version_initializes_nothing(shards: Shards, version: Any) -> None:
    client = shards.up(1).client()
    with pytest.raises(InvalidInput, match="version"):
        client.call(0, "push_model", variables={"w": zeros(1)}, version=version)
    assert not client.call(0, "stats")["initialized"]
