"""Clients that fork, share a worker number, lose a shard or push too much: a push is applied once,
or an error says why not."""

import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from clipper.errors import AlreadyExists, ShardAway, TooLarge
from clipper.params import Client, TableSpec
from clipper_container.params.frames import (
    HEAD_BYTES,
    Head,
    MessageKind,
    packed,
    read_head,
    unpacked,
)
from clipper_container.params.push_identity import SEQUENCE_MAX
from clipper_container.tables import Tables
from tests.params.conftest import TOKEN, Shards, full, ones, until, zeros
from tests.threads import join

_SGD: dict[str, Any] = {
    "optimizer": "sgd",
    "optimizer_settings": {"rate": 1.0},
    "initializer": "zeros",
}
COUNTS = TableSpec("counts", 1, **_SGD)


def in_children(count: int, work: Callable[[], None]) -> None:
    """Do the work in so many forked processes, one after the other; each must end without an
    error."""
    for _ in range(count):
        pid = os.fork()
        if pid == 0:
            try:
                work()
                os._exit(0)
            except BaseException as error:
                os.write(2, f"{error!r}\n".encode())
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def client_of(shards: Shards, kind: str, **options: Any) -> Client | Tables:
    if kind == "client":
        return shards.client(**options)
    return Tables(shards.addresses, token=TOKEN, patience_s=20.0, **options)


@pytest.mark.parametrize("kind", ["client", "tables"])
@pytest.mark.parametrize("closed", [True, False])
def test_pushes_of_forked_children_are_all_applied(shards: Shards, kind: str, closed: bool) -> None:
    shards.up(2).client().create(COUNTS)
    client = client_of(shards, kind)
    client.push("counts", [1, 2], -ones((2, 1)))
    if closed:
        client.close()
    number = client.worker

    def work() -> None:
        assert client.worker != number
        for _ in range(10):
            client.push("counts", [1, 2], -ones((2, 1)))

    in_children(4, work)
    client.push("counts", [1, 2], -ones((2, 1)))
    assert client.pull("counts", [1, 2]).ravel().tolist() == [42, 42]
    client.close()


def test_child_forked_during_a_request_of_another_thread_has_locks_of_its_own(
    shards: Shards,
) -> None:
    client = shards.up(1).client()
    client.create(COUNTS)
    client.connections[0].lock.acquire()
    try:
        in_children(1, lambda: client.push("counts", [1], -ones((1, 1))) and None)
    finally:
        client.connections[0].lock.release()
    assert client.pull("counts", [1])[0, 0] == 1


@pytest.mark.parametrize("kind", ["client", "tables"])
def test_second_live_client_of_one_number_is_refused(shards: Shards, kind: str) -> None:
    shards.up(2).client().create(COUNTS)
    first, second = (client_of(shards, kind, worker=7) for _ in range(2))
    first.push("counts", [1, 2], -ones((2, 1)))
    with pytest.raises(AlreadyExists, match="worker number 7"):
        second.push("counts", [1, 2], -ones((2, 1)))
    first.close()
    for _ in range(3):
        second.push("counts", [1, 2], -ones((2, 1)))
    assert second.pull("counts", [1, 2]).ravel().tolist() == [4, 4]
    second.close()


@pytest.mark.parametrize("kind", ["client", "tables"])
def test_client_whose_number_was_taken_over_gets_an_error(shards: Shards, kind: str) -> None:
    shards.up(1).client().create(COUNTS)
    first, second = (client_of(shards, kind, worker=7) for _ in range(2))
    first.push("counts", [1], -ones((1, 1)))
    first.close()
    second.push("counts", [1], -ones((1, 1)))
    second.close()
    with pytest.raises(AlreadyExists, match="another client pushes as worker 7"):
        first.push("counts", [1], -ones((1, 1)))
    assert shards.client().pull("counts", [1])[0, 0] == 2
    first.close()


def test_number_without_a_sequence_left_is_refused(shards: Shards) -> None:
    client = shards.up(1).client(worker=7)
    client.create(COUNTS)
    client.push("counts", [1], -ones((1, 1)), sequence=SEQUENCE_MAX)
    again = shards.client(worker=7)
    client.close()
    with pytest.raises(ValueError, match="no sequence left"):
        again.push("counts", [1], -ones((1, 1)))
    assert again.pull("counts", [1])[0, 0] == 1


def test_client_of_an_older_version_is_served_beside(shards: Shards) -> None:
    client = shards.up(1).client(worker=7)
    client.create(COUNTS)
    client.push("counts", [1], -ones((1, 1)))
    with socket.socket(socket.AF_UNIX) as older:
        older.connect(shards.addresses[0].removeprefix("unix:"))
        hello = packed({"call": "hello", "token": TOKEN, "worker": 7, "protocol": 1})
        older.sendall(Head(MessageKind.CALL, payload_bytes=len(hello)).packed() + hello)
        head = read_head(older.recv(HEAD_BYTES, socket.MSG_WAITALL))
        answer = unpacked(older.recv(head.payload_bytes, socket.MSG_WAITALL))
    assert (head.kind, answer["sequence"], answer["tables"]) == (
        MessageKind.ANSWER,
        1,
        {"counts": 0},
    )


# -- what is too large


@pytest.mark.parametrize("kind", ["client", "tables"])
def test_push_above_a_frame_is_refused_at_once_by_all(shards: Shards, kind: str) -> None:
    shards.up(2, frame_bytes_max=1 << 16).client().create(COUNTS)
    client = client_of(shards, kind)
    ids = [2, *range(1, 40_000, 2)]  # shard 1 has too many, shard 0 has one
    with pytest.raises(TooLarge, match="it takes 65536"):
        client.push("counts", ids, -ones((len(ids), 1)))
    assert client.pull("counts", [2])[0, 0] == 0
    with pytest.raises(TooLarge, match="65536"):
        client.pull("counts", list(range(0, 40_000, 2)))
    client.push("counts", [1, 2], -ones((2, 1)))
    assert client.pull("counts", [1, 2]).ravel().tolist() == [1, 1]
    client.close()


def test_gradients_above_a_frame_are_refused_before_any_shard_has_them(shards: Shards) -> None:
    client = shards.up(2, frame_bytes_max=1 << 16).client()
    client.create(COUNTS)
    ids = [2, *range(1, 40_000, 2)]
    with pytest.raises(TooLarge):
        client.push_gradients(rows={"counts": (ids, -ones((len(ids), 1)))})
    assert client.pull("counts", [2])[0, 0] == 0


# -- what there is no room for


@pytest.mark.parametrize("kind", ["client", "tables"])
def test_push_returns_how_many_ids_found_no_room(shards: Shards, kind: str) -> None:
    shards.up(2).client().create(TableSpec("few", 1, rows_max=128, **_SGD))
    client = client_of(shards, kind)
    pushed = client.push("few", [*range(500), 0], -ones((501, 1)))
    there = sum(server.shard.parameters.rows for server in shards.servers.values())
    assert (pushed.applied, pushed.no_room, pushed.unadmitted, pushed.evicted) == (
        there,
        500 - there,
        0,
        0,
    )
    assert 0 < there < 500
    client.close()


def test_push_returns_what_was_not_admitted_and_what_was_evicted(shards: Shards) -> None:
    client = shards.up(1).client()
    client.create(TableSpec("late", 1, admit_after=2))
    client.create(TableSpec("few", 1, rows_max=128, evicts=True))
    assert client.push("late", [1, 2], ones((2, 1))).unadmitted == 2
    assert client.push("late", [1], ones((1, 1))).applied == 1
    there = client.push("few", range(200), ones((200, 1)))
    assert (there.applied, there.no_room) == (200, 0)
    assert there.evicted > 0


def test_step_of_the_model_returns_how_many_ids_found_no_room(shards: Shards) -> None:
    client = shards.up(2).client()
    client.create(TableSpec("few", 1, rows_max=128, **_SGD))
    answer = client.push_gradients(rows={"few": (range(500), -ones((500, 1)))})
    there = sum(server.shard.parameters.rows for server in shards.servers.values())
    assert answer["accepted"]
    assert answer["no_room"] == 500 - there > 0


# -- one shard of several


def test_push_sent_again_with_its_sequence_is_applied_where_it_was_not(shards: Shards) -> None:
    client = shards.up(2).client(patience_s=0.5)
    client.create(COUNTS)
    client.push("counts", [1, 2], -ones((2, 1)))
    shards.end(1)
    with pytest.raises(ShardAway) as away:
        client.push("counts", [1, 2], -ones((2, 1)))
    assert away.value.sequence > 0
    assert shards.begin(1).ready.wait(60)
    again = client.push("counts", [1, 2], -ones((2, 1)), sequence=away.value.sequence)
    assert again.repeated == (0,)
    assert client.pull("counts", [1, 2]).ravel().tolist() == [2, 2]


def test_gradients_computed_anew_go_only_to_the_shard_that_refused(shards: Shards) -> None:
    client = shards.up(2, lag_max=2).client()
    client.create(COUNTS)
    client.push_model({"a": zeros(1)})
    versions, _ = client.pull_variables()
    for _ in range(4):
        client.push("counts", [1], zeros((1, 1)))  # shard 1 goes ahead
    rows = {"counts": ([1, 2], -ones((2, 1)))}
    answer = client.push_gradients(rows=rows, versions=[max(1, v) for v in versions])
    assert not answer["accepted"]
    versions, _ = client.pull_variables()
    rows = {"counts": ([1, 2], -full((2, 1), 5.0))}
    answer = client.push_gradients(rows=rows, versions=versions, sequence=answer["sequence"])
    assert answer["accepted"]
    assert client.pull("counts", [1, 2]).ravel().tolist() == [5, 1]


@pytest.mark.parametrize("kind", ["client", "tables"])
def test_request_to_a_healthy_shard_waits_for_no_other(shards: Shards, kind: str) -> None:
    shards.up(2).client().create(COUNTS)
    client = client_of(shards, kind)
    client.push("counts", [1, 2], -ones((2, 1)))
    core = shards.servers[1].shard.core
    core.hold()  # its loop waits with the next push
    try:
        stuck = threading.Thread(target=client.push, args=("counts", [1, 2], -ones((2, 1))))
        stuck.start()
        until(lambda: shards.servers[0].shard.core.stats()["pushes"] == 2)
        for _ in range(3):
            assert client.pull("counts", [2])[0, 0] == 2
        client.push("counts", [2], -ones((1, 1)))
        assert stuck.is_alive(), "it still waits for shard 1"
    finally:
        core.resume()
    join(stuck)
    assert client.pull("counts", [1, 2]).ravel().tolist() == [2, 3]
    client.close()
