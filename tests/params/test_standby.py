"""The process that shards are forked from: what it says of them, and that its death costs nothing;
their supervisor's death."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clipper.errors import ShardAway
from clipper.params import Client, TableSpec
from clipper.params.local import local_set
from clipper.params.local.address_file import running_shards
from clipper.params.local.fork_server import ForkServer
from clipper.params.local.local_set import LocalSet
from clipper.params.shard.durability.snapshots import parts_in
from clipper.settings.params import ParamsSettings
from tests.params.conftest import ones, until

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
        before, template = local.pids(), local._fork_server.popen.pid
        assert template not in before.values()
        os.kill(template, signal.SIGKILL)
        until(lambda: local._fork_server.popen.pid != template)
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
        for pid in (local._fork_server.popen.pid, local.pids()[0]):
            os.kill(pid, signal.SIGKILL)
        assert (client.pull("counts", range(10)) == 1).all()
    until(lambda: len(local.pids()) == 2)


@pytest.mark.slow
def test_shards_shut_down_when_their_supervisor_is_killed(tmp_path: Path) -> None:
    words = ["--shards", "2", "--replicas", "1", "--folder", str(tmp_path)]
    up = subprocess.Popen(
        [sys.executable, "-m", "clipper", "params", "up", *words], stdout=subprocess.PIPE, text=True
    )
    try:
        assert up.stdout is not None
        assert "2 shards serve" in up.stdout.readline()
        with Client(tmp_path) as client:
            client.create(COUNTS)
            client.push("counts", range(10), -ones((10, 2)))
        assert running_shards(tmp_path) == [0, 1]
    finally:
        up.kill()
        up.communicate()
    until(lambda: not running_shards(tmp_path))
    assert {part.shard for part in parts_in(tmp_path / "snapshots")} == {0, 1}
    again = LocalSet(ParamsSettings(folder=str(tmp_path), shards=2, snapshot_s=0.0)).start()
    try:
        with Client(tmp_path, patience_s=PATIENCE_S) as client:
            assert (client.pull("counts", range(10)) == 1).all()
    finally:
        again.stop(snapshot=False)


def heard(line: socket.socket) -> tuple[Any, list[int]]:
    data, fds, _, _ = socket.recv_fds(line, 1 << 16, 1)
    return json.loads(data), fds


def test_a_failed_fork_is_reported_and_retried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def no() -> int:
        raise BlockingIOError("too many processes")

    monkeypatch.setattr(os, "fork", no)
    with ours, theirs:
        ForkServer(theirs, -1, None)._fork(3, "nowhere")  # type: ignore[arg-type]
        error = {"number": 3, "folder": "nowhere", "error": "too many processes"}
        assert heard(ours) == (error, [])
    local = LocalSet(ParamsSettings(folder=str(tmp_path), shards=1))
    try:
        local._wanted.add((local.folder, 0))
        again = {"number": 0, "folder": str(local.folder), "error": "too many processes"}
        local._received((again, -1))
        assert not local._wanted
        assert len(local._due) == 1
    finally:
        local.stop(snapshot=False)


def test_a_fork_server_that_never_comes_up_is_named_as_the_cause(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(local_set, "PROGRAM", "clipper.params.no_such_program")
    local = LocalSet(ParamsSettings(folder=str(tmp_path), shards=1)).start()
    try:
        with pytest.raises(ShardAway, match=r"exit 1: .*No module named.*no_such_program"):
            local.wait_ready(PATIENCE_S)
    finally:
        local.stop(snapshot=False)  # though a shard was requested


def test_processes_that_fail_again_and_again_start_after_a_pause_that_grows(
    tmp_path: Path,
) -> None:
    local = LocalSet(ParamsSettings(folder=str(tmp_path), shards=1))
    try:
        for key in (None, (tmp_path, 0)):
            pauses_s = [local._pause_s(key, True) for _ in range(2000)]
            assert pauses_s[:7] == [0, 0, 0.1, 0.2, 0.4, 0.8, 1]
            assert pauses_s[-1] == 1
            assert local._pause_s(key, False) == local._pause_s(key, True) == 0
    finally:
        local.stop(snapshot=False)


def test_a_fork_server_is_started_again_when_there_was_no_memory_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no(*_: object) -> None:
        raise OSError("cannot allocate memory")

    local = LocalSet(ParamsSettings(folder=str(tmp_path), shards=1))
    try:
        monkeypatch.setattr(local_set, "_ForkServerProcess", no)
        local._start_fork_server()
        assert [work for _, work in local._due] == [local._start_fork_server]
    finally:
        local.stop(snapshot=False)
