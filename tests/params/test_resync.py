"""A replica that was away for a while catches up by the rows that changed, not by all rows."""

import socket
from typing import Any

import numpy as np
import pytest

from clipper.errors import ClipperError
from clipper.params import Client, TableSpec
from clipper.params.shard.replication import followers as replication
from clipper.params.shard.replication.change_log import ChangeLog, History
from clipper.params.shard.replication.followers import ReplicaFollower, ShardReplica
from clipper.params.shard.shard import Shard
from clipper_container.params import connection
from clipper_container.params.frames import packed
from tests.params.conftest import Shards, ones, until
from tests.params.test_replication import LossyLine, Primary, same, step

ROWS, DIM = 4000, 128  # of each shard: 2 MB
EVERY = np.arange(2 * ROWS + 10_000)
PLAIN = TableSpec("plain", DIM, optimizer="sgd", initializer="zeros")
BOUNDED = TableSpec("bounded", DIM, optimizer="sgd", initializer="zeros", rows_max=300, evicts=True)


class Traffic:
    """Counts the bytes of answers between shards, by the call that they answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._nbytes: dict[str, int] = {}
        once = connection.call_once

        def counted(line: Any, name: str, **fields: Any) -> Any:
            head, piece = once(line, name, **fields)
            self._nbytes[name] = self._nbytes.get(name, 0) + len(packed(piece))
            return head, piece

        monkeypatch.setattr("clipper.params.shard.replication.followers.call_once", counted)
        monkeypatch.setattr("clipper.params.shard.durability.recovery.call_once", counted)

    def since_last(self) -> dict[str, int]:
        found, self._nbytes = self._nbytes, {}
        return found


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Traffic:
    return Traffic(monkeypatch)


def filled(shards: Shards, **settings: Any) -> Client:
    """Start two shards that have a copy of each other, with 2 MB of rows in each."""
    given = {"replicas": 1, "without_replica_s": 0.2, **settings}
    client = shards.up(2, **given).client()
    for spec in (PLAIN, BOUNDED):
        client.create(spec)
    client.push("plain", range(2 * ROWS), -ones((2 * ROWS, DIM)))
    client.push("bounded", range(600), -ones((600, DIM)))
    shards.wait_for_copies()
    for server in shards.servers.values():
        # changes are noted once a tick; one is over when the next begins
        for _ in range(2):
            wait_for_tick(server.shard)
    return client


def wait_for_tick(shard: Shard) -> None:
    before_s = shard._checked_s
    until(lambda: shard._checked_s > before_s)


def change_shard_0(shards: Shards, client: Client) -> None:
    """Move 50 rows, evict 50, and remove 25."""
    client.push("plain", range(0, 100, 2), -ones((50, DIM)))
    client.push("bounded", range(5000, 5100, 2), -ones((50, DIM)))
    shard, removed = shards.servers[0].shard, list(range(200, 250, 2))

    def remove() -> None:
        shard.parameters.tables[0].remove(removed)
        shard.core.note(0, removed)

    before = shard.core.position
    shard.post(remove)
    until(lambda: shard.core.position > before)


def rows_of(shards: Shards, shard: int) -> list[bytes]:
    tables = shards.servers[shard].shard.parameters.tables
    return [part.tobytes() for table in tables for part in table.read(EVERY)]


def copied_rows(shards: Shards, shard: int) -> list[bytes]:
    shards.wait_for_copies()
    copy = shards.servers[1 - shard].shard.copies[shard].replica
    assert copy is not None
    return [part.tobytes() for table in copy.parameters.tables for part in table.read(EVERY)]


def come_back(shards: Shards, traffic: Traffic) -> dict[str, int]:
    """Start shard 1, and wait for its copy of shard 0; return the bytes that were sent for it."""
    traffic.since_last()
    shards.begin(1)
    assert shards.servers[1].ready.wait(60)
    assert copied_rows(shards, 0) == rows_of(shards, 0)
    return traffic.since_last()


# -- a follower comes back


def test_a_follower_that_shut_down_is_sent_only_the_changes(
    shards: Shards, traffic: Traffic
) -> None:
    client = filled(shards)
    whole = ROWS * DIM * 4
    for _ in range(2):
        shards.end(1)
        change_shard_0(shards, client)
        moved = come_back(shards, traffic)
        assert "walk" not in moved
        assert sum(moved.values()) < whole / 10, moved
    before = client.pull("plain", EVERY)
    shards.lose(0)
    shards.begin(0)
    assert (client.pull("plain", EVERY) == before).all()


def test_a_killed_follower_starts_with_the_snapshot_of_its_primary(
    shards: Shards, traffic: Traffic
) -> None:
    client = filled(shards)
    client.call(0, "snapshot")
    change_shard_0(shards, client)
    shards.lose(1)
    change_shard_0(shards, client)
    moved = come_back(shards, traffic)
    assert "walk" not in moved
    assert moved["synchronize"] < ROWS * DIM * 4 / 10


def test_follower_that_was_cut_off_keeps_its_copy(
    shards: Shards, traffic: Traffic, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = filled(shards)
    follower, once = shards.servers[1].shard.copies[0], ReplicaFollower._once

    def cut_off(one: ReplicaFollower) -> bool:
        if one is follower:
            raise ConnectionError("cut off")
        return once(one)

    monkeypatch.setattr(ReplicaFollower, "_once", cut_off)
    with socket.socket(fileno=socket.dup(follower._connection.fileno())) as one:
        one.shutdown(socket.SHUT_RDWR)
    each = shards.servers[0].shard.followers.each
    until(lambda: not any(one.waiting_call or one.streaming for one in each))
    change_shard_0(shards, client)
    assert client.call(0, "stats")["exposed"], "it was given up"
    traffic.since_last()
    monkeypatch.setattr(ReplicaFollower, "_once", once)
    assert copied_rows(shards, 0) == rows_of(shards, 0)
    moved = traffic.since_last()
    assert "walk" not in moved
    assert sum(moved.values()) < ROWS * DIM * 4 / 10


def test_everything_is_copied_when_the_log_does_not_reach_back(
    shards: Shards, traffic: Traffic
) -> None:
    client = filled(shards, resync_ids_max=60)
    shards.end(1)
    change_shard_0(shards, client)
    assert come_back(shards, traffic)["walk"] > ROWS * DIM * 4


def test_damaged_copy_on_disk_is_not_used(shards: Shards, traffic: Traffic) -> None:
    client = filled(shards)
    shards.end(1)
    (saved,) = (shards.root / "shard-1" / "copies").glob("*/*/pieces.bin")
    data = bytearray(saved.read_bytes())
    data[len(data) // 2] ^= 1
    saved.write_bytes(data)
    change_shard_0(shards, client)
    assert come_back(shards, traffic)["walk"] > ROWS * DIM * 4


# -- a primary comes back


def test_killed_shard_reads_its_snapshot_and_the_changes_since(
    shards: Shards, traffic: Traffic
) -> None:
    client = filled(shards)
    client.call(0, "snapshot")
    for life in range(3):
        change_shard_0(shards, client)
        client.create(TableSpec(f"new{life}", 2))
        client.push(f"new{life}", [0, 2], ones((2, 2)))
        client.push_model({"w": ones(5)})
        shards.wait_for_copies()
        before = rows_of(shards, 0)
        shards.lose(0)
        traffic.since_last()
        shards.begin(0)
        assert shards.servers[0].ready.wait(60)
        assert "changes since" in shards.servers[0].shard.recovery[1]
        assert rows_of(shards, 0) == before
        assert copied_rows(shards, 0) == before
        moved = traffic.since_last()
        assert moved["get_replica"] < ROWS * DIM * 4 / 10
        assert moved["synchronize"] < ROWS * DIM * 4 / 10


def test_a_shard_that_shut_down_reads_its_snapshot(shards: Shards, traffic: Traffic) -> None:
    client = filled(shards)
    change_shard_0(shards, client)
    before = rows_of(shards, 0)
    shards.end(0)
    traffic.since_last()
    shards.begin(0)
    assert shards.servers[0].ready.wait(60)
    assert rows_of(shards, 0) == before
    assert copied_rows(shards, 0) == before
    moved = traffic.since_last()
    assert sum(moved.get(call, 0) for call in ("walk", "get_replica", "synchronize")) < 100_000


# -- without sockets: a follower that ends and begins at any moment


@pytest.mark.parametrize("seed", range(30))
def test_copy_that_was_saved_at_any_moment_becomes_equal(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The primary gives the follower up, and both start again, at random; answers are lost."""
    monkeypatch.setattr(replication, "STILL_BYTES_MAX", 400 if seed % 2 else 4 << 20)
    monkeypatch.setattr(replication, "WAIT_S", 0.0)
    monkeypatch.setattr("clipper.params.shard.parameters.PIECE_BYTES", 300)
    draw = np.random.default_rng(seed)
    line = LossyLine(draw, 8)
    primary = line.primary = Primary(1, draw, resync_ids_max=int(draw.choice([100, 1 << 20])))
    follower = ReplicaFollower(1, 0, line, 0.0, resync_ids_max=1 << 20)
    for _ in range(200):
        primary.act()
        if draw.integers(2):
            step(follower)
        what = draw.integers(25)
        if what == 0:
            primary.followers.each[0].give_up()
        elif what == 1 and (copy := follower.replica) is not None:
            pieces = list(copy.saved())
            for _ in range(int(draw.integers(5))):
                primary.act()
            loaded = ShardReplica.loaded(0, copy.epoch, pieces, 1 << 20)
            follower = ReplicaFollower(
                1, 0, line, 0.0, load=lambda one=loaded: one, resync_ids_max=1 << 20
            )
            follower.load()
        elif what == 2 and (copy := follower.replica) is not None:
            primary = line.primary = primary.successor(copy)
    line._loss, primary.quiet = 1 << 30, True
    for _ in range(400):
        step(follower)
    copy = follower.replica
    assert copy is not None
    same(copy.parameters, primary.parameters)
    assert copy.position == primary.changes.position
    assert copy.exact
    assert primary.core.sure() == primary.core.position


def test_difference_between_a_snapshot_and_a_replica() -> None:
    copy = ShardReplica(0, 1, 100)
    copy.parameters.create(TableSpec("t", 2, optimizer="sgd"))
    rows = {
        "table": 0,
        "ids": np.arange(3),
        "rows": ones((3, 2), "f4"),
        "stamps": np.zeros(3, "u4"),
    }
    copy.take({"rows": [rows], "position": 5, "whole": True})
    copy.take({"rows": [{**rows, "gone": np.array([7])}], "position": 6, "whole": True})
    piece, following = copy.difference(5, 0)
    (part,) = piece["rows"]
    assert following is None
    assert part["ids"].tolist() == [0, 1, 2]
    assert part["gone"].tolist() == [7]
    assert copy.difference(6, 0) == ({}, None)
    with pytest.raises(ClipperError, match="changes since 4 are not known"):
        copy.difference(4, 0)


# -- the log and the history


def test_log_forgets_the_oldest_changes() -> None:
    log = ChangeLog(5)
    assert log.since(0) is None
    log.restart(10)
    log.add({0: np.array([1, 2])}, 12)
    log.add({0: np.array([2, 3]), 1: np.array([9])}, 13)
    found = log.since(10) or {}
    assert {table: ids.tolist() for table, ids in found.items()} == {0: [1, 2, 3], 1: [9]}
    assert log.since(13) == {}
    assert log.since(14) is None
    log.add({0: np.array([4])})
    assert (log.since(13) or {})[0].tolist() == [4], "it is part of no position yet"
    assert log.since(10) is None
    assert log.first == 12


def test_history_contains_the_start_of_a_later_epoch() -> None:
    history = History().then(3, 0).then(4, 100).then(7, 150)
    assert history.contains(3, 100)
    assert not history.contains(3, 101), "given up when epoch 4 began"
    assert history.contains(7, 10_000)
    assert not history.contains(5, 120)
    assert History.decode(history.encode()) == history
