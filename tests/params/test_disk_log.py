"""A log on disk: a push is acknowledged when it is synced, what was acknowledged comes back, and a
damaged log is refused."""

import errno
import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.system.faults import params_kills
from clipper.cli.params.shown import held
from clipper.errors import StoreError
from clipper.params import Client, TableSpec
from clipper.params.local.local_set import LocalSet, reshard, restore
from clipper.params.shard.durability import disk_log
from clipper.params.shard.durability.disk_log import MORE, RECORD, log_files, records_in
from clipper.params.shard.durability.recovery import write_atomically
from clipper.settings.params import ParamsSettings
from tests.params.conftest import Shards, ones, until
from tests.threads import join

COUNTS = TableSpec(
    "counts", 2, optimizer="sgd", optimizer_settings={"rate": 1.0}, initializer="zeros"
)
IDS = np.arange(6)


def push(client: Client, ids: Any = IDS, **options: Any) -> Any:
    return client.push("counts", ids, -ones((len(ids), 2)), **options)


def counted(client: Client) -> list[float]:
    return sorted({float(n) for n in client.pull("counts", IDS).ravel()})


def up(shards: Shards, count: int = 1, **settings: Any) -> Client:
    client = shards.up(count, **{"durability": "disk", "recover_s": 0.0, **settings}).client()
    client.create(COUNTS)
    return client


def again(shards: Shards, *which: int) -> None:
    for shard in which or tuple(shards.servers):
        shards.lose(shard)
        assert shards.begin(shard).ready.wait(60)


class Disk:
    """Replaces the syncs of the log: each waits until the event `open` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.entered, self.count = threading.Event(), threading.Event(), 0
        real = os.fdatasync

        def sync(file: int) -> None:
            self.entered.set()
            assert self.open.wait(20)
            self.count += 1
            real(file)

        monkeypatch.setattr(os, "fdatasync", sync)


def test_push_is_acknowledged_when_it_is_synced_and_many_share_a_sync(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = [up(shards), *(shards.client() for _ in range(3))]
    disk = Disk(monkeypatch)
    done = threading.Semaphore(0)

    def work(client: Client) -> None:
        push(client)
        done.release()

    threads = [threading.Thread(target=work, args=(one,)) for one in clients]
    threads[0].start()
    assert disk.entered.wait(20)
    for one in threads[1:]:
        one.start()
    until(lambda: shards.servers[0].shard.core.stats()["pushes"] == 4)
    assert not done.acquire(timeout=0.1), "nothing is on disk"
    disk.open.set()
    for one in threads:
        join(one)
    assert disk.count == 2, "the first, and the three that came meanwhile"
    stats = clients[0].call(0, "stats")
    assert (stats["log"]["pushes"], stats["log"]["records"] >= 3) == (4, True)


def test_acknowledged_pushes_are_recovered(shards: Shards) -> None:
    client = up(shards, 2)
    client.push_model({"w": np.zeros(3, np.float32), "v": np.zeros(2, np.float32)})
    for turn in range(1, 4):
        first = push(client)
        client.push_gradients({"w": -ones(3, np.float32), "v": -ones(2, np.float32)})
        client.write("counts", [100 + turn], ones((1, 2)))
        client.erase("counts", [99 + turn])
        client.alter("counts", expire_s=1000 + turn)
        if turn == 2:
            client.call_all("snapshot")
            push(client)
        before = client.pull_variables()[1]
        again(shards)
        after = client.pull_variables()[1]
        assert all((before[name] == after[name]).all() for name in before)
        assert counted(client) == [turn + (turn >= 2)]
        assert client.call(0, "tables")["tables"]["counts"]["expire_s"] == 1000 + turn
        rows = client.pull("counts", [100, 101, 102, 103])[:, 0].tolist()
        assert rows == [float(99 + turn < 100 + k <= 100 + turn) for k in range(4)]
        assert push(client, sequence=first.sequence).repeated
        assert counted(client) == [turn + (turn >= 2)]


def test_snapshot_cuts_the_log_and_a_large_log_has_one_taken(shards: Shards) -> None:
    client = up(shards, log_bytes_max=1 << 20)
    folder = shards.root / "shard-0"
    wide = TableSpec("wide", 256, initializer="zeros")
    client.create(wide)
    server = shards.servers[0].shard
    pushes = 0
    while not server.snapshots.stats()["taken"]:
        client.push("wide", np.arange(64), ones((64, 256)))
        pushes += 1
        assert pushes < 100
    assert pushes >= 8, "each has 131 KB"
    client.call(0, "snapshot")
    assert not log_files(folder)
    assert server.snapshots.log.stats()["nbytes"] == 0
    push(client)
    assert len(log_files(folder)) == 1
    again(shards)
    assert counted(client) == [1]


def test_full_disk_makes_pushes_wait_and_loses_none(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = up(shards)
    push(client)
    real, room = os.write, threading.Event()

    def write(file: int, data: Any) -> int:
        if room.is_set():
            return real(file, data)
        real(file, bytes(data)[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(disk_log, "RETRY_S", 0.01)
    worker = threading.Thread(target=push, args=(client,))
    worker.start()
    log = shards.servers[0].shard.snapshots.log
    until(lambda: "No space" in log.stats()["error"])
    assert worker.is_alive()
    with shards.client() as other:
        assert "does not write its log: " in held([other.call(0, "stats")], [])
    room.set()
    join(worker)
    assert not log.stats()["error"]
    again(shards)
    assert counted(client) == [2]


@pytest.fixture
def files(shards: Shards) -> Iterator[list[Path]]:
    """Return the files of the log of three runs; the last one has 5 pushes."""
    client = up(shards)
    for life in range(3):
        for _ in range(3 + life):
            push(client)
        again(shards)
    shards.down(snapshot=False)
    return [one.path for one in log_files(shards.root / "shard-0")]


def test_torn_record_is_cut_off_and_a_damaged_one_is_refused(
    shards: Shards, files: list[Path], tmp_path: Path
) -> None:
    whole, ends = files[-1].read_bytes(), [one.end for one in records_in(files[-1])[0]]
    assert len(ends) == 5
    copy = tmp_path / files[-1].name
    draw = np.random.default_rng(1)
    for cut in [0, 1, *ends, *(end - 1 for end in ends), *draw.integers(0, len(whole), 40)]:
        copy.write_bytes(whole[:cut])
        found, end, size = records_in(copy)
        assert [one.end for one in found] == [one for one in ends if one <= cut]
        assert (end, size) == (max([0, *(one for one in ends if one <= cut)]), cut)
    for _ in range(40):
        at = int(draw.integers(0, len(whole)))
        copy.write_bytes(
            whole[:at] + bytes([whole[at] ^ 1 << draw.integers(0, 8)]) + whole[at + 1 :]
        )
        if at >= ends[-2]:
            assert len(records_in(copy)[0]) == 4, "the last one may not have been acknowledged"
        else:
            with pytest.raises(StoreError, match="damaged"):
                records_in(copy)
    flags = RECORD.unpack_from(whole, ends[-2])[2]
    assert not flags & MORE
    files[-1].write_bytes(whole[: ends[-1] - 3])
    server = shards.begin(0)
    assert server.ready.wait(60)
    assert counted(shards.client()) == [3 + 4 + 4]


@pytest.mark.parametrize("which", [0, 1])
def test_error_of_a_damaged_log_names_the_next_step(
    shards: Shards, files: list[Path], which: int
) -> None:
    data = bytearray(files[which].read_bytes())
    data[-20] ^= 1  # of the last record, which others follow
    files[which].write_bytes(data)
    server = shards.begin(0)
    until(lambda: server.failed is not None)
    assert re.search(rf"{files[which]}.* damaged .*mv {files[which]} ", str(server.failed))
    shards.lose(0)


def test_missing_file_is_noticed(shards: Shards, files: list[Path]) -> None:
    files[1].unlink()
    server = shards.begin(0)
    until(lambda: server.failed is not None)
    assert "begins at change" in str(server.failed)
    shards.lose(0)


def test_set_of_another_size_is_refused_while_a_log_exists(shards: Shards) -> None:
    push(up(shards, 2))
    shards.down(snapshot=False)
    shards.settings = ParamsSettings(durability="disk", recover_s=0.0)
    shards.addresses = shards.addresses[:1]
    server = shards.begin(0)
    until(lambda: server.failed is not None)
    assert "--shards 2" in str(server.failed)
    shards.lose(0)
    shards.up(2, durability="disk", recover_s=0.0)
    shards.down()
    assert counted(shards.up(1, durability="disk", recover_s=0.0).client()) == [1]


def test_shard_that_recovers_from_a_replica_makes_it_durable_first(shards: Shards) -> None:
    client = up(shards, 2, replicas=1, recover_s=1.0)
    push(client)
    shards.wait_for_copies()
    shards.lose(0)
    shutil.rmtree(shards.root / "shard-0")
    (shards.root / "shard-0").mkdir()
    write_atomically(shards.root / "shard-0" / "epoch", b"1")
    assert shards.begin(0).ready.wait(60)
    push(client)
    shards.wait_for_copies()
    shards.down(snapshot=False)
    shards.up(2, durability="disk", recover_s=0.0)
    assert counted(shards.client()) == [2]


def test_restored_snapshot_is_read_without_the_log_and_a_log_is_not_resharded(
    tmp_path: Path,
) -> None:
    given = {"shards": 1, "snapshot_s": 0.0, "durability": "disk", "recover_s": 0.0}
    settings = ParamsSettings(folder=str(tmp_path), **given)

    def run() -> tuple[LocalSet, Client]:
        local = LocalSet(settings).start()
        local.wait_ready(60.0)
        return local, Client(tmp_path)

    local, client = run()
    with client:
        client.create(COUNTS)
        push(client)
        number = client.call(0, "snapshot")["number"]
        push(client)
        (file,) = log_files(tmp_path / "shard-0")
        data = file.path.read_bytes()
    local.stop(snapshot=False)
    shutil.rmtree(tmp_path / "snapshots" / f"version-{number + 1:012d}")  # as after a kill
    file.path.write_bytes(data)
    with pytest.raises(StoreError, match="--shards 1"):
        reshard(tmp_path, 2)
    assert restore(tmp_path, tmp_path) == number
    local, client = run()
    with client:
        assert counted(client) == [1]
    local.stop(snapshot=False)


@pytest.mark.slow
def test_no_acknowledged_push_is_lost_to_kills_without_replicas(stress: int) -> None:
    found = params_kills.life(
        4 * stress, 15, pause_s=0.5, **params_kills.MODES["a log on disk, no replica"]
    )
    assert not found.wrong
    assert found.acknowledged > 0
