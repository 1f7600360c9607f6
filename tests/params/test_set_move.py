"""Tests of one shard while its rows move to another set, step by step."""

import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipper.errors import DoesNotFit
from clipper.params import Client
from clipper.params.local.address_file import write_address_file
from clipper.params.shard.durability.recovery import SEQUENCES
from clipper.params.shard.resharding import move as set_move
from clipper.params.shard.resharding.decision import decision_in, prepare_decision
from clipper.params.shard.resharding.move import CLOSED, MOVED, OPEN, SEALED, RowSender
from clipper.params.shard.server import ShardServer, folder_of
from clipper.params.shard.shard import ShardConfig
from clipper_container.params.push_identity import SEQUENCE_MAX, origin_worker
from clipper_container.params.shard_set import _at_host_of
from clipper_core.params.shard_loop import ShardLoop
from tests.params.conftest import TOKEN, Shards, ones, until
from tests.params.test_resharding import COUNTS


@pytest.fixture
def target(shards: Shards, tmp_path: Path) -> Iterator[ShardServer]:
    """Return the shard of a new set in set-1, which the shard of an old set can fill."""
    home = tmp_path / "set-1"
    home.mkdir()
    shards.up(1)
    addresses = [f"unix:{home}/0.sock"]
    write_address_file(home, {"addresses": addresses, "token": TOKEN, "generation": 1})
    prepare_decision(home)
    place = ShardConfig(0, tuple(addresses), shards.settings, TOKEN, folder_of(home, 0))
    given = {name: getattr(place, name) for name in place.__struct_fields__}
    server = ShardServer(ShardConfig(**{**given, "home": home, "generation": 1, "fills": True}))
    server.start()
    assert server.ready.wait(60)
    yield server
    server.close(snapshot=False)


def started_client(shards: Shards) -> Client:
    client = shards.client()
    client.create(COUNTS)
    client.push("counts", [1], -ones((1, 2)))
    client.call(0, "move_begin", to=str(shards.root / "set-1"), pause_s=1.0)
    until(lambda: phase(client) == "follow")
    return client


def phase(client: Client) -> str:
    return str(client.call(0, "move_state")["phase"])


def value(server: ShardServer) -> float:
    return float(server.shard.parameters.tables[0].read(np.array([1]))[1][0, 0])


class Steps:
    """Lets the messages of a sender through one by one, from `hold` on."""

    def __init__(self, real: Any) -> None:
        self._real, self.held, self.waiting = real, threading.Event(), threading.Event()
        self._allowed = threading.Semaphore(0)

    def send(self, sender: RowSender, each: list[Any]) -> None:
        if self.held.is_set() and each:
            self.waiting.set()
            self._allowed.acquire()
        self._real(sender, each)

    def pass_one(self) -> None:
        self.waiting.clear()
        self._allowed.release()


def test_a_seal_is_not_valid_for_a_later_resharding(
    shards: Shards, target: ShardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(RowSender._send)
    monkeypatch.setattr(RowSender, "_send", lambda sender, each: steps.send(sender, each))
    client = started_client(shards)
    try:
        steps.held.set()
        client.call(0, "move_seal", sealed=True)
        assert steps.waiting.wait(20)  # all is sent but the last message
        client.call(0, "move_seal", sealed=False)
        client.push("counts", [1], -ones((1, 2)))  # acknowledged between two seals
        client.call(0, "move_seal", sealed=True)
        steps.pass_one()
        assert steps.waiting.wait(20)  # it is about to send the push
        assert phase(client) == "follow"
    finally:
        steps.held.clear()
        for _ in range(9):
            steps.pass_one()
    until(lambda: phase(client) == "sealed")
    assert value(target) == 2.0
    client.call(0, "move_close")
    assert shards.servers[0].shard.core.access == CLOSED


def test_only_a_sealed_shard_times_out(shards: Shards, target: ShardServer) -> None:
    client, move = started_client(shards), shards.servers[0].shard.move
    move.tick(1e12)
    assert decision_in(shards.root / "set-1") == ""
    client.call(0, "move_seal", sealed=True)
    assert shards.servers[0].shard.core.access == SEALED
    move.tick(1e12)
    assert decision_in(shards.root / "set-1") == "abort"
    assert shards.servers[0].shard.core.access == OPEN


def test_a_sealed_shard_times_out_on_a_full_disk(shards: Shards, target: ShardServer) -> None:
    client, move = started_client(shards), shards.servers[0].shard.move
    client.call(0, "move_seal", sealed=True)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            (shards.root / "file").write_bytes(b"no file can be written")
        move.tick(1e12)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert decision_in(shards.root / "set-1") == "abort"
    client.push("counts", [1], -ones((1, 2)))


def test_a_shard_that_has_moved_refuses_to_be_a_source(shards: Shards, target: ShardServer) -> None:
    client = shards.client()
    client.create(COUNTS)
    shards.servers[0].shard.core.access = MOVED
    with pytest.raises(DoesNotFit, match="has moved"):
        client.call(0, "move_begin", to=str(shards.root / "set-1"), pause_s=1.0)
    shards.servers[0].shard.core.access = OPEN


def test_many_small_pushes_are_sent_in_chunks(
    shards: Shards, target: ShardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(set_move, "PUSHES_IN_PIECE", 2)
    steps = Steps(RowSender._send)
    monkeypatch.setattr(RowSender, "_send", lambda sender, each: steps.send(sender, each))
    client = started_client(shards)
    steps.held.set()
    each = [client.push("counts", [1], -ones((1, 2))).sequence for _ in range(7)]
    steps.held.clear()
    steps.pass_one()
    until(lambda: value(target) == 8.0)
    origin, core = origin_worker(client.worker, 1, 0), target.shard.core
    until(lambda: [core.look(origin, one) for one in each] == [1] * 7)


@pytest.mark.parametrize("moment", ["before", "meanwhile"])
def test_the_last_sequence_of_a_worker_moves(
    shards: Shards, target: ShardServer, moment: str
) -> None:
    client = shards.client()
    client.create(COUNTS)
    if moment == "before":
        client.push("counts", [1], -ones((1, 2)), sequence=SEQUENCE_MAX)
    started_client(shards)
    if moment == "meanwhile":
        client.push("counts", [1], -ones((1, 2)), sequence=SEQUENCE_MAX)
    until(lambda: value(target) == 2.0)
    until(lambda: target.shard.core.look(origin_worker(client.worker, 1, 0), SEQUENCE_MAX) == 1)
    assert target.shard.core.highest(client.worker) == SEQUENCE_MAX


def test_the_order_of_workers_survives_a_restart() -> None:
    core, again = ShardLoop(), ShardLoop()
    core.saw(7, SEQUENCES.pack(5, 0, *[0] * 16))
    for worker in (3, 1, 2, 1):
        core.note(0, [], worker, core.highest(worker) + 1)

    def order(one: ShardLoop) -> list[int]:
        touched = {w: SEQUENCES.unpack(seen)[1] for w, seen in one.pushes_seen().items()}
        return sorted(touched, key=lambda worker: touched[worker])

    assert order(core) == order(core) == [7, 3, 2, 1]
    for worker, window in core.pushes_seen().items():
        again.saw(worker, window)
    again.note(0, [], 3, 2)
    assert order(again) == [7, 2, 1, 3]


@pytest.mark.parametrize(
    ("own", "other", "found"),
    [
        ("unix:/a/0.sock", "unix:/b/1.sock", "unix:/b/1.sock"),
        ("tcp:shards:7000", "tcp:0.0.0.0:7003", "tcp:shards:7003"),
        ("tcp:[::1]:7000", "tcp:[::]:7003", "tcp:[::1]:7003"),
        ("tls:h:1?ca=/mine", "tls:10.0.0.1:2?ca=/theirs&key=/secret", "tls:h:2?ca=/mine"),
    ],
)
def test_the_addresses_that_a_shard_sends_are_those_of_the_client(
    own: str, other: str, found: str
) -> None:
    assert _at_host_of(own, other) == found
