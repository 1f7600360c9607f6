"""Changes that are sent to followers as they come."""

import functools
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from clipper.errors import FrameError
from clipper.params import TableSpec
from clipper.params.shard.parameters import Parameters
from clipper.params.shard.replication.followers import ReplicaFollower, ShardReplica
from clipper_container.params.frames import HEAD, MAGIC, VERSION, Head, MessageKind
from clipper_core.params.change_receiver import ChangeReceiver
from clipper_core.params.embedding import Table
from clipper_core.params.shard_loop import ShardLoop
from tests.params.conftest import Shards, ones, until, zeros

Settings = Any
SGD: Settings = {"optimizer": "sgd", "optimizer_settings": {"rate": 1.0}, "initializer": "zeros"}
TABLES = (
    TableSpec("plain", 3, **SGD),
    TableSpec("adam", 5, optimizer="adam"),
    TableSpec("evicts", 2, rows_max=30, evicts=True),
)


def streams(shards: Shards) -> bool:
    """Return whether every follower is sent changes as they are made."""
    each = [one for server in shards.servers.values() for one in server.shard.followers.each]
    return all(server.shard.core.streams(0)[0] for server in shards.servers.values()) and all(
        one.is_whole for one in each
    )


def state(parameters: Parameters) -> dict[object, object]:
    """Return every row and variable with its state."""
    found: dict[object, object] = {}
    for spec, table in zip(parameters.specs, parameters.tables, strict=True):
        found[spec.name] = table.steps
        position: int | None = 0
        while position is not None:
            ids, rows, stamps, position = table.walk(position)
            for id, row, stamp in zip(ids.tolist(), rows, stamps.tolist(), strict=True):
                found[spec.name, id] = (row.tobytes(), stamp)
    for variable in parameters.dense.read(range(len(parameters.dense))):
        kept = variable["value"].tobytes(), variable["state"].tobytes()
        found[variable["name"]] = (*kept, variable["steps"], variable["changed"])
    return found


def copy_of(shards: Shards, shard: int) -> ShardReplica:
    """Return the copy of a shard, where every shard has one of its predecessor."""
    copy = shards.servers[(shard + 1) % len(shards.servers)].shard.copies[shard].replica
    assert copy is not None
    return copy


def cut(follower: ReplicaFollower) -> None:
    """Break the connection of a follower."""
    with socket.socket(fileno=socket.dup(follower._connection.fileno())) as connection:
        connection.shutdown(socket.SHUT_RDWR)


def assert_copied(shards: Shards) -> None:
    for number, server in shards.servers.items():
        copy = copy_of(shards, number)
        assert state(copy.parameters) == state(server.shard.parameters)
        assert copy.version == server.shard.core.version
        assert copy.pushes_seen().keys() == server.shard.core.pushes_seen().keys()
        for worker in copy.pushes_seen():
            core, seen = server.shard.core, copy._seen
            assert seen.highest(worker) == core.highest(worker)


@pytest.mark.parametrize("seed", range(3))
def test_a_streamed_copy_equals_its_primary(shards: Shards, seed: int) -> None:
    draw, client = np.random.default_rng(seed), shards.up(2, replicas=1).client()
    client.push_model({"w": zeros(3), "b": zeros((2, 2))}, optimizer="adam")
    for spec in TABLES:
        client.create(spec)
    until(lambda: streams(shards))
    for turn in range(40):
        spec = TABLES[draw.integers(0, len(TABLES))]
        ids = draw.integers(-60, 60, draw.integers(0, 40))
        gradients = draw.standard_normal((ids.size, spec.dim)).astype(np.float32)
        if turn % 3:
            client.push(spec.name, ids, gradients)
        else:
            dense: Settings = {"w": draw.standard_normal(3), "b": draw.standard_normal((2, 2))}
            client.push_gradients(
                dense if turn % 2 else {"w": dense["w"]}, {spec.name: (ids, gradients)}
            )
        if turn % 10 == 0:
            assert_copied(shards)  # a push is acknowledged when its follower has it
        if turn == 20:
            client.create(TableSpec("late", 4, **SGD))
            client.push("late", range(10), ones((10, 4)))
            assert_copied(shards)
    until(lambda: streams(shards))
    client.push("plain", [1, 2], ones((2, 3)))
    assert_copied(shards)


def test_rows_that_are_removed_are_removed_from_the_copy(shards: Shards) -> None:
    client = shards.up(2, replicas=1).client()
    client.create(TABLES[0])
    client.push("plain", range(20), ones((20, 3)))
    until(lambda: streams(shards))
    shard = shards.servers[0].shard

    def remove() -> None:
        shard.core.hold()
        shard.parameters.tables[0].remove([0, 2, 4])
        shard.core.resume()
        shard.core.note(0, [0, 2, 4])

    shard.post(remove)
    until(lambda: len(copy_of(shards, 0).parameters.tables[0]) == 7)
    until(lambda: state(copy_of(shards, 0).parameters) == state(shard.parameters))


def test_a_lost_shard_is_recovered_from_a_streamed_copy(shards: Shards) -> None:
    client = shards.up(2, replicas=1).client()
    client.create(TABLES[0])
    client.push_model({"w": zeros(3)}, optimizer="sgd", optimizer_settings={"rate": 1.0})
    until(lambda: streams(shards))
    for turn in range(4):
        for _ in range(5):
            client.push_gradients({"w": -ones(3)}, {"plain": (np.arange(8), -ones((8, 3)))})
        shards.lose(turn % 2)
        shards.begin(turn % 2)
        assert (client.pull("plain", np.arange(8)) == 5 * turn + 5).all()
        assert client.pull_variables()[1]["w"].tolist() == [5 * turn + 5] * 3
    until(lambda: streams(shards))


def test_follower_whose_stream_breaks_is_sent_the_rest(shards: Shards) -> None:
    client = shards.up(2, replicas=1).client()
    client.create(TABLES[0])
    until(lambda: streams(shards))
    for _ in range(3):
        client.push("plain", range(10), ones((10, 3)))
        cut(shards.servers[1].shard.copies[0])
        client.push("plain", range(10), ones((10, 3)))
        assert_copied(shards)
        until(lambda: streams(shards))


def test_a_hung_follower_is_dropped_and_synchronized_again(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = shards.up(2, replicas=1, without_replica_s=0.3).client()
    client.create(TABLES[0])
    until(lambda: streams(shards))
    lock = shards.servers[1].shard.copies[0]._lock
    with lock:  # it receives, and writes nothing
        client.push("plain", [2], ones((1, 3)))  # acknowledged without it, after a while
        assert client.call(0, "stats")["exposed"]
    until(lambda: streams(shards))
    client.push("plain", [2], ones((1, 3)))
    until(lambda: is_copied(shards))


def is_copied(shards: Shards) -> bool:
    """Return whether the copies equal their shards; one that is slow is dropped once more."""
    return all(
        state(copy_of(shards, number).parameters) == state(server.shard.parameters)
        for number, server in shards.servers.items()
    )


def test_follower_that_falls_out_of_the_log_is_resynced(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = functools.partial(ShardLoop, log_ids_max=8)
    monkeypatch.setattr("clipper.params.shard.shard.ShardLoop", small)
    client = shards.up(2, replicas=1).client()
    client.create(TABLES[0])
    for turn in range(10):
        client.push("plain", range(30 + turn), ones((30 + turn, 3)))
    assert_copied(shards)


# -- messages of a primary that is broken


@pytest.fixture
def receiver() -> Iterator[tuple[socket.socket, ChangeReceiver]]:
    ours, theirs = socket.socketpair()
    copy = ShardLoop()
    copy.add_table(Table("t", 2))
    with ours, theirs:
        yield ours, ChangeReceiver(theirs.fileno(), copy, frame_bytes_max=1 << 16)


def message(rows: int, worker: int, payload: bytes, kind: int = MessageKind.CHANGES) -> bytes:
    head = Head(kind, rows=rows, worker=worker, payload_bytes=len(payload))
    return HEAD.pack(MAGIC, VERSION, *head) + payload


def test_changes_that_do_not_fit_the_copy_are_refused(
    receiver: tuple[socket.socket, ChangeReceiver],
) -> None:
    ours, one = receiver
    assert one.receive(0.0) is None
    row = np.array([0 | 1 << 32, 0], np.uint64).tobytes()  # table 0, one id
    bad = [
        message(1, 0, b""),
        message(1, 0, row),
        message(1, 0, np.array([7 | 1 << 32, 0], np.uint64).tobytes() + bytes(64)),
        message(1, 0, np.array([1 << 31 | 1 << 32, 0], np.uint64).tobytes() + bytes(64)),
        message(1, 0, np.array([0xFFFFFFFF << 32, 0], np.uint64).tobytes() + bytes(64)),
        message(0, 9, bytes(64)),
        message(0, 0, bytes(8)),
    ]
    for data in bad:
        ours.sendall(data)
        assert one.receive(1.0) is not None
        with pytest.raises(FrameError, match="do not fit"):
            one.apply()
    ours.sendall(message(0, 0, b""))
    assert one.receive(1.0) is not None
    one.apply()


@pytest.mark.parametrize("data", [b"x" * 64, message(0, 0, b"", MessageKind.PULL)])
def test_invalid_bytes_of_changes_are_refused(
    receiver: tuple[socket.socket, ChangeReceiver], data: bytes
) -> None:
    ours, one = receiver
    ours.sendall(data)
    with pytest.raises(FrameError):
        one.receive(1.0)


def test_a_stream_that_ends_inside_a_message_is_an_error(
    receiver: tuple[socket.socket, ChangeReceiver],
) -> None:
    ours, one = receiver
    ours.sendall(message(0, 0, bytes(8))[:40])
    assert one.receive(0.01) is None
    ours.close()
    with pytest.raises(ConnectionError):
        one.receive(1.0)


def test_replicas_of_synchronous_shards_poll(shards: Shards) -> None:
    client = shards.up(2, replicas=1, mode="sync", grads_to_wait=1).client()
    client.create(TABLES[0])
    shards.wait_for_copies()
    client.push_gradients(rows={"plain": (np.arange(4), ones((4, 3)))}, versions=client.versions)
    assert not any(server.shard.core.streams(0)[0] for server in shards.servers.values())
    assert state(copy_of(shards, 0).parameters) == state(shards.servers[0].shard.parameters)
