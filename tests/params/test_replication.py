"""Replicas: a copy equals its primary, whatever messages are lost; a shard that died is restored
from it; a replaced shard that still runs is fenced."""

import contextlib
import errno
import os
import threading
from typing import Any

import numpy as np
import pytest

from clipper.errors import ClipperError, ShardAway
from clipper.params import TableSpec
from clipper.params.shard.durability import recovery
from clipper.params.shard.parameters import DENSE, Parameters
from clipper.params.shard.replication import followers as replication
from clipper.params.shard.replication.change_log import History, PrimaryLog
from clipper.params.shard.replication.followers import (
    FollowerSet,
    Origin,
    ReplicaFollower,
    ShardReplica,
)
from clipper.params.shard.training.asynchronous import AsyncTraining
from clipper_container.params.connection import ShardConnection
from clipper_container.params.frames import Head, MessageKind, packed, unpacked
from clipper_core.params.shard_loop import ShardLoop
from tests.params.conftest import Shards, ones, until, zeros
from tests.params.test_snapshots import all_of, train_tables

PLAIN = TableSpec("plain", 2, optimizer="sgd", initializer="zeros")
PATIENCE_S = 20.0


# -- a primary and its follower without sockets, under a seeded loss of questions and answers


class Primary:
    def __init__(
        self, epoch: int, draw: np.random.Generator, resync_ids_max: int = 1 << 20, **limits: int
    ) -> None:
        self.core = ShardLoop(**limits)
        self.core.epoch = epoch
        self.parameters = Parameters()
        self.parameters.serve()
        self.late: list[bytes] = []
        self.quiet = False
        self.changes = PrimaryLog(self.core, resync_ids_max)
        self.begin(History(), 0)
        self._draw, self._sequence = draw, 0

    def successor(self, copy: ShardReplica) -> "Primary":
        """Return a primary of the next epoch that has recovered from this copy."""
        found = Primary(self.core.epoch + 1, self._draw)
        found.parameters = Parameters()
        for piece in copy.parameters.pieces():
            found.parameters.take(piece)
        found.parameters.serve()
        found.core.version = copy.version
        for worker, window in copy.pushes_seen().items():
            found.core.saw(worker, window)
        found._sequence = self._sequence
        found.begin(copy.history, copy.position, Origin(1, copy.epoch, copy.version))
        return found

    def begin(self, history: History, position: int, origin: Origin | None = None) -> None:
        self.training = AsyncTraining(self.core, self.parameters)
        self.changes.start(history, position, position, {})
        self.followers = FollowerSet(
            0,
            2,
            1,
            waited=True,
            core=self.core,
            parameters=self.parameters,
            changes=self.changes,
            answer=lambda call_id, payload: self.late.append(payload),
        )
        self.followers.start_waiting(0.0, origin)

    def act(self) -> None:
        """Change the shard in a random way."""
        draw, parameters = self._draw, self.parameters
        what = draw.integers(0, 12)
        if what == 0 and len(parameters.specs) < 4:
            rows = {"rows_max": 25, "evicts": True} if draw.integers(2) else {}
            optimizer = ["adam", "sgd"][draw.integers(2)]
            parameters.create(
                TableSpec(f"t{len(parameters.specs)}", 3, optimizer=optimizer, **rows)
            )  # type: ignore[arg-type]
            self.core.note(DENSE, [])
        elif what == 1:
            if parameters.dense.initialize(
                {f"w{i}": ones(i + 1) for i in range(3)}, "momentum", {}, 1
            ):
                self.core.note(DENSE, range(3))
        elif what == 2 and parameters.specs:
            table = int(draw.integers(len(parameters.specs)))
            removed = draw.integers(0, 60, 5)
            parameters.tables[table].remove(removed)
            self.core.note(table, removed)
        else:
            self._sequence += int(draw.integers(1, 3))
            variables = (
                {"w1": draw.standard_normal(2)}
                if parameters.dense.initialized and draw.integers(2)
                else {}
            )
            rows = {}
            for spec in parameters.specs:
                ids = draw.integers(0, 60, int(draw.integers(0, 20)))
                rows[spec.name] = {"ids": ids, "gradients": draw.standard_normal((ids.size, 3))}
            self.training.push(
                {
                    "variables": variables,
                    "rows": rows,
                    "worker": 1 + int(what) % 3,
                    "sequence": self._sequence,
                }
            )

    def answer(self, request: dict[str, Any]) -> bytes | dict[str, Any]:
        if request["call"] == "walk":
            piece, following = self.parameters.piece(request["cursor"])
            if not self.quiet and self._draw.integers(30) == 0:
                self.act()  # between two pieces of a walk
            return {**piece, "next": following}
        found = self.followers.synchronize(request, None, 0.0)
        assert found is not None
        return found


class LossyLine(ShardConnection):
    """A fake connection that sometimes loses a request or its answer."""

    def __init__(self, draw: np.random.Generator, loss: int) -> None:
        super().__init__(0, lambda shard: "unix:nowhere", "", 0, 1.0)
        self._draw, self._loss = draw, loss
        self.primary: Primary | None = None

    def send(self, call: Any) -> None:
        if self.primary is None or self._draw.integers(self._loss) == 0:
            raise ConnectionError("the question is lost")
        found = self.primary.answer(unpacked(bytes(call.buffers[0])))
        if self._draw.integers(self._loss) == 0:
            raise ConnectionError("the answer is lost")
        payload = found if isinstance(found, bytes) else packed(found)
        call.body, call.answer = (
            memoryview(payload),
            Head(MessageKind.ANSWER, epoch=self.primary.core.epoch),
        )

    def wait(self, call: Any) -> Head:
        head: Head = call.answer
        return head


def same(one: Parameters, other: Parameters) -> None:
    assert one.specs == other.specs
    for mine, theirs in zip(one.tables, other.tables, strict=True):
        every = np.arange(-1, 61)
        for a, b in zip(mine.read(every), theirs.read(every), strict=True):
            assert a.tobytes() == b.tobytes()
        assert mine.steps == theirs.steps
    numbers = range(len(one.dense))
    assert str(one.dense.read(numbers)) == str(other.dense.read(numbers))
    assert one.dense.summary() == other.dense.summary()


def step(follower: ReplicaFollower) -> None:
    """Run one round of a follower, as its thread does."""
    try:
        follower._once()
    except (OSError, ClipperError):
        follower._drop()


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("still_bytes", [4 << 20, 400])
def test_a_copy_equals_its_primary_over_a_lossy_connection(
    seed: int, still_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replication, "STILL_BYTES_MAX", still_bytes)
    monkeypatch.setattr(replication, "WAIT_S", 0.0)
    monkeypatch.setattr("clipper.params.shard.parameters.PIECE_BYTES", 300)
    draw = np.random.default_rng(seed)
    line = LossyLine(draw, 6)
    primary = line.primary = Primary(1, draw, log_ids_max=int(draw.choice([120, 1 << 20])))
    follower = ReplicaFollower(1, 0, line, 0.0)
    for _ in range(150):
        primary.act()
        if draw.integers(2):
            step(follower)
        if draw.integers(40) == 0:
            sure, acknowledged = primary.core.sure(), primary.followers.each[0].acknowledged
            assert sure == min(acknowledged, primary.core.position) or sure == primary.core.position
    line._loss, primary.quiet = 1 << 30, True
    for _ in range(400):
        step(follower)
    copy = follower.replica
    assert copy is not None
    same(copy.parameters, primary.parameters)
    assert copy.version == primary.core.version
    assert primary.core.sure() == primary.core.position
    assert {w: s[16:] for w, s in copy.pushes_seen().items()} == {
        w: s[16:] for w, s in primary.core.pushes_seen().items()
    }


@pytest.mark.parametrize("seed", range(15))
def test_acknowledged_pushes_are_in_a_complete_copy(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The complete copy of a follower has all pushes that its primary has acknowledged, at every
    moment, also while the follower starts a new copy."""
    monkeypatch.setattr(replication, "WAIT_S", 0.0)
    draw = np.random.default_rng(seed)
    line = LossyLine(draw, 5)
    primary = line.primary = Primary(1, draw, log_ids_max=200)
    primary.parameters.create(TableSpec("counts", 3, optimizer="sgd", initializer="zeros"))
    follower = ReplicaFollower(1, 0, line, 0.0)
    given: list[int] = []  # positions after each push
    for sequence in range(1, 300):
        pushed = primary.training.push(
            {
                "rows": {"counts": {"ids": np.array([sequence]), "gradients": ones((1, 3))}},
                "worker": 9,
                "sequence": sequence,
            }
        )
        given.append(pushed.position)
        if draw.integers(3):
            step(follower)
        if draw.integers(30) == 0:
            step(follower)
            # it is lost, and with it the copy
            follower._drop(follower.replica if draw.integers(2) else None)
            if follower.replica is None:
                primary.followers.each[0].start_full_sync()
        sure, copy = primary.core.sure(), follower.replica
        for number, position in enumerate(given, 1):
            if position <= sure and copy is not None:
                assert copy.parameters.tables[0].read([number])[0][0], (
                    f"push {number} is sure, and not in the copy"
                )


def test_table_that_a_follower_does_not_know_is_announced_before_its_rows() -> None:
    draw = np.random.default_rng(1)
    line = LossyLine(draw, 1 << 30)
    primary = line.primary = Primary(1, draw)
    follower, (state,) = ReplicaFollower(1, 0, line, 0.0), primary.followers.each
    for _ in range(3):
        primary.core.note(DENSE, [])
        step(follower)
    primary.core.note(DENSE, [])
    assert state.can_stream, "what a stream can say may be missing"
    primary.parameters.create(PLAIN)
    primary.followers.end_streams()
    primary.core.note(DENSE, [])
    assert not state.can_stream
    for _ in range(2):
        step(follower)
        primary.core.note(DENSE, [])
    assert state.can_stream
    assert follower.replica is not None
    same(follower.replica.parameters, primary.parameters)


# -- over sockets


def test_acknowledged_pushes_are_on_the_replica(shards: Shards) -> None:
    shards.up(3, replicas=2)
    client = shards.client()
    client.create(PLAIN)
    for round_ in range(1, 20):
        client.push("plain", np.arange(30), -ones((30, 2)))
        for shard, server in shards.servers.items():
            mine = np.arange(shard, 30, 3)
            expected = server.shard.parameters.tables[0].pull(mine)
            for holder in ((shard + 1) % 3, (shard + 2) % 3):
                copy = shards.servers[holder].shard.copies[shard].replica
                assert copy is not None
                assert (copy.parameters.tables[0].pull(mine) == expected).all(), f"round {round_}"


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_lost_shard_is_recovered_from_its_replica(shards: Shards, replicas: int) -> None:
    client = shards.up(3, replicas=replicas).client()
    train_tables(client, 1)
    for shard in (0, 2, 1, 1):
        before = all_of(shards)
        shards.wait_for_copies()
        shards.lose(shard)
        shards.begin(shard)
        assert shards.servers[shard].ready.wait(PATIENCE_S)
        assert "its replica" in shards.servers[shard].shard.recovery[1]
        assert all_of(shards) == before
        train_tables(client, 5 + shard, count=2)
    epochs = [client.call(shard, "stats")["server"]["epoch"] for shard in range(3)]
    assert epochs == [2, 3, 2]


def test_a_push_is_not_applied_again_after_a_kill(shards: Shards) -> None:
    client = shards.up(2, replicas=1).client(worker=77)
    client.create(PLAIN)
    for _ in range(2):
        client.push("plain", [2, 4], -ones((2, 2)))
    client.push_model({"w": zeros(1)})
    rows = {"plain": {"ids": np.array([2]), "gradients": -ones((1, 2), np.float32)}}
    client.call(0, "push_gradients", rows=rows, worker=5, sequence=3)
    before = client.pull("plain", [2, 4])
    shards.lose(0)
    shards.begin(0)
    reply = client.call(0, "push_gradients", rows=rows, worker=5, sequence=3)
    assert reply["repeated"] is True
    # as one that did not hear the second answer
    again = client.push("plain", [2, 4], -ones((2, 2)), sequence=2)
    assert again.repeated == (0,)
    assert (client.pull("plain", [2, 4]) == before).all()


def test_pushes_wait_for_an_unavailable_replica(shards: Shards) -> None:
    client = shards.up(2, replicas=1, without_replica_s=0.0).client()
    client.create(PLAIN)
    client.push("plain", [0], -ones((1, 2)))
    shards.lose(1)
    done = threading.Event()

    def work() -> None:
        client.push("plain", [0], -ones((1, 2)))
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    core = shards.servers[0].shard.core
    until(lambda: core.version == 2)
    assert not done.is_set(), "it is applied, and not on the replica"
    shards.begin(1)
    thread.join(PATIENCE_S)
    assert done.is_set()
    copy = shards.servers[1].shard.copies[0].replica
    assert copy is not None
    assert (copy.parameters.tables[0].pull([0]) == client.pull("plain", [0])).all()


def test_pushes_continue_without_a_replica_after_a_timeout(shards: Shards) -> None:
    client = shards.up(2, replicas=1, without_replica_s=0.3).client()
    client.create(PLAIN)
    client.push("plain", [0], -ones((1, 2)))
    shards.lose(1)
    client.push("plain", [0], -ones((1, 2)))
    assert client.call(0, "stats")["exposed"]
    shards.begin(1)

    def has_replica() -> bool:
        """Return whether it has one again, which it loses while this machine has no time for it."""
        found = client.call(0, "stats")
        return not found["exposed"] and found["followers"][0]["on"]

    until(has_replica)
    before = client.pull("plain", [0])
    shards.lose(0)
    shards.begin(0)
    assert (client.pull("plain", [0]) == before).all(), "the replica has caught up"


def test_periodic_replicas_are_synchronized_in_the_background(shards: Shards) -> None:
    client = shards.up(2, replicas=1, replication="periodic", period_s=0.05).client()
    train_tables(client, 2)
    before = all_of(shards)
    for shard in range(2):
        version = shards.servers[shard].shard.core.version

        def level(shard: int = shard, version: int = version) -> bool:
            copy = shards.servers[1 - shard].shard.copies[shard].replica
            return copy is not None and copy.version == version

        until(level)
    shards.lose(0)
    shards.begin(0)
    assert shards.servers[0].ready.wait(PATIENCE_S)
    assert all_of(shards) == before


def test_recovery_uses_the_newer_of_replica_and_snapshot(shards: Shards) -> None:
    client = shards.up(2, replicas=1, replication="periodic", period_s=3600.0).client()
    until(lambda: all(s.shard.copies[1 - i].replica is not None for i, s in shards.servers.items()))
    train_tables(client, 3)
    before = all_of(shards)
    shards.end(0)
    shards.begin(0)
    assert shards.servers[0].ready.wait(PATIENCE_S)
    assert shards.servers[0].shard.recovery[1] == "snapshot 1", "the replica is an hour behind"
    assert all_of(shards) == before


def test_a_replaced_shard_that_still_runs_acknowledges_nothing(shards: Shards) -> None:
    """A shard is replaced while it still runs, as when a host was declared dead too early: its
    later pushes are not acknowledged."""
    shards.up(2, replicas=1, without_replica_s=0.4)
    client = shards.client(answer_s=1.0, patience_s=60.0)
    client.create(PLAIN)
    client.push("plain", [0, 2], -ones((2, 2)))
    before = client.pull("plain", [0])
    zombie = shards.servers.pop(0)
    shards.begin(0, shards.root / "another-host" / "shard-0")
    assert shards.servers[0].ready.wait(PATIENCE_S)
    assert shards.servers[0].shard.core.epoch == 2
    client.push("plain", [0], -ones((1, 2)))
    assert client.connections[0].epoch == 2, "only the successor acknowledges"
    assert np.allclose(client.pull("plain", [0]), 2 * before)
    until(lambda: bool(zombie.shard.ended))
    assert "fenced by epoch 2" in zombie.shard.ended
    zombie.close()
    assert not list(shards.root.glob("snapshots/*")), "nor does it write a snapshot"


def test_a_client_refuses_a_lower_epoch(shards: Shards) -> None:
    client = shards.up(1).client(patience_s=0.2)
    client.create(PLAIN)
    client.connections[0].epoch = 9
    client.connections[0].close()
    with pytest.raises(ShardAway, match="should be dead"):
        client.pull("plain", [1])


def test_a_follower_refuses_a_lower_epoch(shards: Shards) -> None:
    shards.up(2, replicas=1)
    follower = shards.servers[1].shard.copies[0]
    until(lambda: follower.replica is not None)
    assert follower.fence(5) == 1
    assert follower.fence(5) == 5
    assert follower.fence(0) == 5
    with contextlib.suppress(OSError):
        until(lambda: bool(shards.servers[0].shard.ended))
    assert "fenced by epoch 5" in shards.servers[0].shard.ended, (
        "it was told when it was next asked"
    )


def test_pushes_do_not_wait_for_a_long_copy_and_the_shard_reports_that_it_has_no_replica(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = shards.up(2, replicas=1, without_replica_s=0.0).client(patience_s=5.0)
    client.create(
        TableSpec(
            "wide", 1024, optimizer="sgd", optimizer_settings={"rate": 1.0}, initializer="zeros"
        )
    )
    client.push("wide", range(0, 4000, 2), -ones((2000, 1024)))  # 8 MB in shard 0
    shards.lose(1)
    walks, walked, call = threading.Event(), threading.Event(), ReplicaFollower._call

    def slow_call(follower: ReplicaFollower, name: str, **fields: Any) -> Any:
        if name == "walk" and follower.of == 0:
            walks.set()
            assert walked.wait(60)
        return call(follower, name, **fields)

    monkeypatch.setattr(ReplicaFollower, "_call", slow_call)
    shards.begin(1)
    try:
        assert walks.wait(20)
        for _ in range(3):
            client.push("wide", [0], -ones((1, 1024)))
        (reply,) = client.call(0, "stats")["followers"]
        assert client.call(0, "stats")["exposed"]
        assert not reply["whole"]
        assert reply["behind"] >= 4, "all pushes that there were"
    finally:
        walked.set()
    until(lambda: not client.call(0, "stats")["exposed"])
    client.push("wide", [0], -ones((1, 1024)))
    (reply,) = client.call(0, "stats")["followers"]
    assert (reply["whole"], reply["behind"]) == (True, 0)
    shards.lose(0)
    shards.begin(0)
    rows = client.pull("wide", range(0, 4000, 2))
    assert (rows[0] == 5).all()
    assert (rows[1:] == 1).all()


def test_pushes_wait_for_a_follower_that_stops_during_its_copy() -> None:
    draw = np.random.default_rng(1)
    primary = Primary(3, draw)
    primary.parameters.create(TableSpec("wide", 1024, optimizer="sgd", initializer="zeros"))
    primary.parameters.tables[0].push(np.arange(2000), np.ones((2000, 1024), np.float32))
    primary.followers.synchronize({"shard": 1, "mine": 1, "epoch": 0, "serial": -1}, "whom", 10.0)
    assert primary.core.sure() == primary.core.position, "nobody is waited for"
    primary.core.note(0, [1])
    primary.followers.answer_open_questions(12.0)
    assert primary.core.sure() == primary.core.position
    primary.followers.answer_open_questions(14.0)
    assert primary.core.sure() < primary.core.position, (
        "it may follow another life of this shard by now"
    )
    assert primary.followers.exposed


def test_shard_with_a_replica_restarts_while_the_disk_is_full(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = shards.up(2, replicas=1).client()
    client.create(PLAIN)
    client.push("plain", [2, 4], -ones((2, 2)))
    before = client.pull("plain", [2, 4])
    until(lambda: not client.call(0, "stats")["exposed"])

    def is_full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(recovery, "write_atomically", is_full)
    epoch = int(client.call(0, "stats")["server"]["epoch"])
    for life in (1, 2):
        shards.lose(0)
        shards.begin(0)
        assert (client.pull("plain", [2, 4]) == before).all()
        assert shards.servers[0].shard.core.epoch == epoch + life
        assert (shards.root / "shard-0" / "epoch").read_text() == str(epoch + life)
        until(lambda: not client.call(0, "stats")["exposed"])


def test_follower_that_a_shard_recovered_from_keeps_its_copy(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = shards.up(2, replicas=1).client()
    client.create(PLAIN)
    client.push("plain", range(0, 100, 2), -ones((50, 2)))
    until(lambda: not client.call(0, "stats")["exposed"])
    walked: list[int] = []
    call = ReplicaFollower._call

    def counting(follower: ReplicaFollower, name: str, **fields: Any) -> Any:
        if name == "walk":
            walked.append(follower.of)
        return call(follower, name, **fields)

    monkeypatch.setattr(ReplicaFollower, "_call", counting)
    for life in range(3):
        shards.lose(0)
        shards.begin(0)
        client.push("plain", [life, 200 + 2 * life], -ones((2, 2)))
        until(lambda: not client.call(0, "stats")["exposed"])
        (copy,) = client.call(1, "stats")["replicas"]
        assert (copy["whole"], copy["epoch"]) == (True, shards.servers[0].shard.core.epoch)
        assert 0 not in walked, "the copy of shard 0 in shard 1 was there"
    before = client.pull("plain", range(300))
    shards.lose(0)
    shards.begin(0)
    assert (client.pull("plain", range(300)) == before).all()
    shards.wait_for_copies()
    shards.lose(1)
    shards.begin(1)
    # shard 1 has nothing: it copies all
    until(lambda: 0 in walked and not client.call(0, "stats")["exposed"])
    shards.lose(0)
    shards.begin(0)
    assert (client.pull("plain", range(300)) == before).all()
