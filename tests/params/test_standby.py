"""The process that shards are forked from: what it says of them, and that its death costs nothing;
their supervisor's death."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clipper.errors import ShardAway
from clipper.params import Client, TableSpec
from clipper.params.local import local_set
from clipper.params.local.address_file import running_shards
from clipper.params.local.local_set import LocalSet
from clipper.params.shard.durability.snapshots import parts_in
from clipper.processes.restarts import Restarts
from clipper.settings.params import ParamsSettings
from tests.params.conftest import ones, until
from tests.processes import Program

PATIENCE_S = 60.0
COUNTS = TableSpec(
    "counts", 2, optimizer="sgd", optimizer_settings={"rate": 1.0}, initializer="zeros"
)


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalSet]:
    found = LocalSet(
        ParamsSettings(folder=str(tmp_path), shards=2, replicas=1, snapshot_s=0.0)
    ).start()
    try:
        found.wait_ready(PATIENCE_S)
        yield found
    finally:
        found.stop(snapshot=False)


@pytest.mark.slow
def test_shards_continue_when_their_fork_server_is_killed(local: LocalSet) -> None:
    with Client(local.folder, patience_s=PATIENCE_S) as client:
        client.create(COUNTS)
        before, (template,) = local.pids(), local._fork_servers.pids
        assert template not in before.values()
        os.kill(template, signal.SIGKILL)
        until(lambda: local._fork_servers.pids not in ([], [0], [template]))
        client.push("counts", range(10), -ones((10, 2)))
        assert local.pids() == before
        until(
            lambda: all(
                one["whole"] for _, said in client.call_all("stats") for one in said["followers"]
            )
        )
        os.kill(before[1], signal.SIGKILL)  # now it takes the new one
        client.push("counts", range(10), -ones((10, 2)))
        assert (client.pull("counts", range(10)) == 2).all()
        until(lambda: local.pids().get(1, before[1]) != before[1])
    assert local.restarts == 1


@pytest.mark.slow
def test_shard_and_fork_server_killed_at_once_are_restarted(local: LocalSet) -> None:
    with Client(local.folder, patience_s=PATIENCE_S) as client:
        client.create(COUNTS)
        client.push("counts", range(10), -ones((10, 2)))
        until(
            lambda: all(
                one["whole"] for _, said in client.call_all("stats") for one in said["followers"]
            )
        )
        for pid in (local._fork_servers.pids[0], local.pids()[0]):
            os.kill(pid, signal.SIGKILL)
        assert (client.pull("counts", range(10)) == 1).all()
    until(lambda: len(local.pids()) == 2)


@pytest.mark.slow
def test_shards_shut_down_when_their_supervisor_is_killed(tmp_path: Path) -> None:
    words = ["--shards", "2", "--replicas", "1", "--folder", str(tmp_path)]
    words = [sys.executable, "-m", "clipper", "params", "up", *words]
    with Program(*words, until="2 shards serve"):
        with Client(tmp_path) as client:
            client.create(COUNTS)
            client.push("counts", range(10), -ones((10, 2)))
        assert running_shards(tmp_path) == [0, 1]
    until(lambda: not running_shards(tmp_path))
    assert {part.shard for part in parts_in(tmp_path / "snapshots")} == {0, 1}
    again = LocalSet(ParamsSettings(folder=str(tmp_path), shards=2, snapshot_s=0.0)).start()
    try:
        with Client(tmp_path, patience_s=PATIENCE_S) as client:
            assert (client.pull("counts", range(10)) == 1).all()
    finally:
        again.stop(snapshot=False)


def test_shards_that_cannot_be_started_are_named_as_the_cause(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(local_set, "MODULE", "clipper.params.no_such_program")
    local = LocalSet(ParamsSettings(folder=str(tmp_path), shards=1)).start()
    try:
        with pytest.raises(ShardAway, match=r"exit 1: .*No module named.*no_such_program"):
            local.wait_ready(PATIENCE_S)
    finally:
        local.stop(snapshot=False)


def test_shards_that_fail_again_and_again_start_after_a_pause_that_grows() -> None:
    restarts = Restarts(local_set.POLICY)
    pauses_s = [restarts.ended(0.0).pause_s for _ in range(2000)]
    assert pauses_s[:2] == [0, 0]
    assert pauses_s[2:] == [0.1, 0.2, 0.4, 0.8, *[1.0] * 1994]
    assert restarts.ended(2.0, 1.0).pause_s == 0
