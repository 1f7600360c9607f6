"""Tests of clipper_core.params.shard_loop over real sockets, compared with the table that it
serves, and of SequenceWindow, compared with a set."""

import contextlib
import os
import resource
import select
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipper_core.params.embedding import Table
from clipper_core.params.optimizer import Optimizer
from clipper_core.params.shard_loop import ShardLoop
from clipper_core.params.shard_state import SequenceWindow
from clipper_core.runtime.status import StatusError

HEAD = struct.Struct("<4s4B2I5QfI")
PULL, PUSH, CALL, ANSWER, REFUSED = 1, 2, 3, 4, 5
BAD_INPUT, BAD_FRAME, TOO_LARGE, UNKNOWN = 12, 13, 14, 16
NOT_ADMITTED, NOT_READY, OTHER_EPOCH, TOO_STALE, TOO_OLD = 101, 102, 103, 104, 105
WORKER_IN_USE = 108
SEQUENCE_MAX = 2**64 - 1
DIM = 5
DTYPES = ["f32", "f16", "bf16", "i8"]


_LAST = st.integers(SEQUENCE_MAX - 2000, SEQUENCE_MAX)


class Shard:
    """A shard core with one table, its loop's thread, and echo(), which answers calls with their
    payload."""

    def __init__(self, folder: Path, table: Table | None = None, **limits: int) -> None:
        self.table = (
            table if table is not None else Table("users", DIM, optimizer=Optimizer("adagrad"))
        )
        self.core = ShardLoop(**limits)
        self.listener = socket.socket(socket.AF_UNIX)
        self.path = str(folder / "shard.sock")
        self.listener.bind(self.path)
        self.listener.listen()
        self.listener.setblocking(False)
        self.core.listen(self.listener.fileno())
        assert self.core.add_table(self.table) == 0
        self.core.ready = True
        self.thread = threading.Thread(target=self.core.run)
        self.thread.start()

    def echo(self, *, admit: bool = True, count: int = 1, **admission: int) -> list[Any]:
        """Answer so many calls with their payload; return them."""
        calls: list[Any] = []
        while len(calls) < count:
            select.select([self.core.calls_fd], [], [], 10)
            for caller, head, body in self.core.calls():
                calls.append((caller, head, body))
                self.core.answer(caller, body, admit=admit, **admission)
        return calls

    def close(self) -> None:
        self.core.stop()
        self.thread.join()
        self.listener.close()


class Worker:
    def __init__(self, shard: Shard, admitted: bool = True) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(10)
        self.socket.connect(shard.path)
        self.id = 0
        if admitted:
            self.send(CALL, payload=b"let me!!")
            shard.echo()
            assert self.receive()[1] == b"let me!!"

    def send(
        self,
        kind: int,
        payload: bytes = b"",
        *,
        table: int = 0,
        rows: int = 0,
        dtype: int = 0,
        epoch: int = 0,
        worker: int = 0,
        sequence: int = 0,
        model: int = 0,
        scale: float = 1.0,
        length: int = -1,
    ) -> None:
        self.id += 1
        payload += bytes(-len(payload) % 8)
        size = len(payload) if length < 0 else length
        head = HEAD.pack(
            b"CLPT",
            1,
            kind,
            dtype,
            0,
            table,
            rows,
            self.id,
            epoch,
            worker,
            sequence,
            model,
            scale,
            size,
        )
        self.socket.sendall(head + payload)

    def receive(self) -> tuple[dict[str, Any], bytes]:
        names = [
            "magic",
            "version",
            "kind",
            "dtype",
            "flags",
            "table",
            "rows",
            "id",
            "epoch",
            "worker",
            "sequence",
            "model",
            "scale",
            "bytes",
        ]
        head = dict(zip(names, HEAD.unpack(self.exactly(HEAD.size)), strict=True))
        return head, self.exactly(head["bytes"])

    def exactly(self, n: int) -> bytes:
        got = b""
        while len(got) < n:
            more = self.socket.recv(n - len(got))
            assert more, "closed"
            got += more
        return got

    def pull(self, ids: Any, dtype: int = 0) -> tuple[dict[str, Any], bytes]:
        self.send(PULL, np.asarray(ids, np.int64).tobytes(), rows=len(ids), dtype=dtype)
        return self.receive()

    def send_push(self, ids: Any, gradients: Any, **fields: Any) -> None:
        self.send(
            PUSH,
            np.asarray(ids, np.int64).tobytes() + np.asarray(gradients, np.float32).tobytes(),
            rows=len(ids),
            **fields,
        )

    def push(self, ids: Any, gradients: Any, **fields: Any) -> dict[str, Any]:
        self.send_push(ids, gradients, **fields)
        return self.receive()[0]

    def is_silent(self) -> bool:
        return not select.select([self.socket], [], [], 0.05)[0]


@pytest.fixture(params=[0, 50], ids=["sleeps", "polls"])
def shard(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shard]:
    with contextlib.closing(
        Shard(tmp_path, frame_bytes_max=1 << 16, log_ids_max=64, spin_us=request.param)
    ) as shard:
        yield shard


@pytest.fixture
def worker(shard: Shard) -> Iterator[Worker]:
    worker = Worker(shard)
    with contextlib.closing(worker.socket):
        yield worker


def ones(n: int) -> Any:
    return np.ones((n, DIM), np.float32)


@pytest.mark.parametrize("n", [0, 1, 7, 600])
@pytest.mark.parametrize("dtype", range(4))
def test_a_pull_returns_the_rows_of_the_table(
    shard: Shard, worker: Worker, n: int, dtype: int
) -> None:
    ids = np.random.default_rng(n).integers(-50, 50, n)
    shard.table.push(ids[::2], np.random.default_rng(1).standard_normal((len(ids[::2]), DIM)))
    head, payload = worker.pull(ids, dtype)
    assert (head["kind"], head["rows"], head["id"]) == (ANSWER, n, worker.id)
    expected = shard.table.pull(ids, DTYPES[dtype])
    rows, scales = expected if dtype == 3 else (expected, None)
    assert payload[: rows.nbytes] == rows.tobytes()
    if scales is not None:
        assert payload[-(-rows.nbytes // 8) * 8 :][: scales.nbytes] == scales.tobytes()
    assert len(payload) % 8 == 0


def test_pushes_do_what_the_table_would_do(shard: Shard, worker: Worker) -> None:
    twin, draw = Table("users", DIM, optimizer=Optimizer("adagrad")), np.random.default_rng(3)
    for i in range(1, 60):
        n = int(draw.integers(0, 40))
        ids, gradients = (
            draw.integers(-20, 20, n),
            draw.standard_normal((n, DIM)).astype(np.float32),
        )
        head = worker.push(ids, gradients, worker=9, sequence=i, scale=0.5)
        assert (head["kind"], head["flags"], head["model"], head["sequence"]) == (ANSWER, 0, i, i)
        twin.push(ids, gradients, scale=0.5)
    every = np.arange(-20, 20)
    assert (shard.table.pull(every) == twin.pull(every)).all()
    assert shard.core.version == 59
    assert shard.core.stats()["pushes"] == 59


def test_a_repeated_push_counts_once_in_any_order(shard: Shard, worker: Worker) -> None:
    for sequence in (3, 1, 3, 2, 1, 2, 3):
        head = worker.push([sequence], ones(1), worker=4, sequence=sequence)
        assert head["kind"] == ANSWER
    assert shard.core.stats()["repeated"] == 4
    assert shard.core.version == 3
    assert worker.push([1], ones(1), worker=5, sequence=1)["flags"] == 0, "another worker's first"
    worker.push([1], ones(1), worker=4, sequence=5000)
    before = shard.table.pull([2])
    assert worker.push([2], ones(1), worker=4, sequence=2)["rows"] == TOO_OLD
    assert (shard.table.pull([2]) == before).all()


def test_what_is_refused_changes_nothing(shard: Shard, worker: Worker) -> None:
    bad = ones(3)
    bad[1, 2] = np.nan
    shard.core.epoch = 7
    shard.core.stale(lag_max=2)
    for i in range(5):
        worker.push([40 + i], ones(1))
    before, model = shard.table.pull(range(8)).copy(), shard.core.version
    refusals = [
        (lambda: worker.send_push([5, 6, 7], bad), BAD_INPUT, 6),
        (lambda: worker.send_push([1], ones(1), scale=0.0), BAD_INPUT, 0),
        (lambda: worker.send_push([1], ones(1), scale=float("nan")), BAD_INPUT, 0),
        (lambda: worker.send_push([1], ones(1)[:, :3]), BAD_FRAME, 8 + 16),
        (lambda: worker.send(PULL, bytes(16), rows=1), BAD_FRAME, 16),
        (lambda: worker.send(PULL, bytes(8), rows=1, dtype=9), BAD_FRAME, 8),
        (lambda: worker.send(PULL, bytes(8 * 8000), rows=8000), TOO_LARGE, 1 << 16),
        (lambda: worker.send_push([1], ones(1), table=3), UNKNOWN, 3),
        (lambda: worker.send_push([1], ones(1), epoch=6), OTHER_EPOCH, 7),
        (lambda: worker.send_push([1], ones(1), model=2), TOO_STALE, 3),
    ]
    for send, why, about in refusals:
        send()
        head, payload = worker.receive()
        assert (head["kind"], head["rows"], head["id"]) == (REFUSED, why, worker.id)
        assert int.from_bytes(payload, "little") == about
    shard.core.ready = False
    assert worker.push([1], ones(1))["rows"] == NOT_READY
    assert (shard.table.pull(range(8)) == before).all()
    assert shard.core.version == model
    assert shard.core.stats()["refused"] == len(refusals) + 1


def test_a_stale_push_has_a_smaller_rate(shard: Shard, worker: Worker) -> None:
    shard.core.stale(slows=True)
    for _ in range(4):
        worker.push([9], ones(1))
    worker.push([1], ones(1), model=1)
    twin = Table("users", DIM, optimizer=Optimizer("adagrad"))
    twin.push([1], ones(1), scale=1 / 3, step=5)
    assert (shard.table.pull([1]) == twin.pull([1])).all()


def test_unadmitted_connections_are_not_served(shard: Shard) -> None:
    unadmitted = Worker(shard, admitted=False)
    assert unadmitted.pull([1])[0]["rows"] == NOT_ADMITTED
    unadmitted.send(CALL, length=1 << 20)
    assert unadmitted.receive()[0]["rows"] == TOO_LARGE
    assert unadmitted.socket.recv(1) == b"", "closed: the next frame's start is unknown"
    other = Worker(shard, admitted=False)
    other.socket.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(64))
    assert other.socket.recv(1) == b""
    for one in (unadmitted, other):
        one.socket.close()


def test_frames_may_come_in_pieces_and_many_at_once(shard: Shard, worker: Worker) -> None:
    ids = np.arange(3, dtype=np.int64)
    whole = b"".join(
        HEAD.pack(b"CLPT", 1, PULL, 0, 0, 0, 3, i, 0, 0, 0, 0, 1.0, ids.nbytes) + ids.tobytes()
        for i in range(100)
    )
    for at in range(0, len(whole), 37):
        worker.socket.sendall(whole[at : at + 37])
    for i in range(100):
        head, payload = worker.receive()
        assert head["id"] == i
        assert payload[: 12 * DIM] == shard.table.pull(ids).tobytes()


def test_an_answer_waits_for_followers_that_are_waited_for(shard: Shard, worker: Worker) -> None:
    core = shard.core
    core.follow(0, waited=True)
    core.follow(1)
    worker.send_push([4, 4, 8], ones(3), worker=2, sequence=1)
    select.select([core.log_fd], [], [], 10)
    position, changed, pushes = core.changed(0) or pytest.fail("lost")
    assert {table: ids.tolist() for table, ids in changed.items()} == {0: [4, 8]}
    assert pushes == [(2, 1)]
    assert worker.is_silent()
    worker.send_push([4], ones(1), worker=2, sequence=1)
    assert worker.is_silent(), "nor is its repetition sure"
    core.acknowledge(1, position)
    assert worker.is_silent(), "the other is not waited for"
    core.acknowledge(0, position)
    assert [worker.receive()[0]["flags"] for _ in range(2)] == [0, 1]
    worker.send_push([5], ones(1))
    assert worker.is_silent()
    core.unfollow(0)
    assert worker.receive()[0]["kind"] == ANSWER, "nobody is waited for any more"
    assert {
        table: ids.tolist() for table, ids in (core.changed(1) or pytest.fail("lost"))[1].items()
    } == {0: [4, 5, 8]}


def test_a_follower_too_far_behind_begins_anew(shard: Shard, worker: Worker) -> None:
    core = shard.core
    core.follow(0)
    core.follow(1)
    for i in range(10):
        worker.push(range(10 * i, 10 * i + 10), ones(10))
        if i < 8:
            assert core.changed(1) is not None
    assert core.changed(0) is None, "64 ids are kept"
    found = core.changed(1)
    assert found is not None
    assert found[1][0].tolist() == list(range(80, 100))
    core.follow(0)
    worker.push([1], ones(1))
    again = core.changed(0)
    assert again is not None
    assert again[1][0].tolist() == [1]


def test_what_python_changed_is_followed_too(shard: Shard) -> None:
    shard.core.follow(2, waited=True)
    position = shard.core.note(0, [3, 1, 3], worker=8, sequence=2)
    assert shard.core.look(8, 2) == 1
    assert shard.core.look(8, 1) == 0
    assert shard.core.sure() < position
    found = shard.core.changed(2)
    assert found is not None
    assert found[0] == position
    assert found[1][0].tolist() == [1, 3]
    assert found[2] == [(8, 2)]
    shard.core.acknowledge(2, position)
    assert shard.core.sure() == position
    other = ShardLoop()
    for worker_id, seen in shard.core.pushes_seen().items():
        other.saw(worker_id, seen)
    assert other.look(8, 2) == 1
    assert other.look(8, 3) == 0


def test_an_answer_for_a_closed_connection_reaches_no_other_client(shard: Shard) -> None:
    first = Worker(shard, admitted=False)
    first.send(CALL, payload=b"mine....")
    select.select([shard.core.calls_fd], [], [], 10)
    ((caller, _, body),) = shard.core.calls()
    first.socket.close()
    second = Worker(shard)
    shard.core.answer(caller, body)
    second.send(CALL, payload=b"theirs..")
    shard.echo()
    assert second.receive()[1] == b"theirs.."
    second.socket.close()


def test_pushes_that_python_applies_are_calls(shard: Shard, worker: Worker) -> None:
    table = Table("items", 2)
    assert shard.core.add_table(table, by_python=True) == 1
    worker.send(
        PUSH,
        np.int64(5).tobytes() + np.float32([1, 2]).tobytes(),
        rows=1,
        table=1,
        worker=6,
        sequence=9,
        model=3,
    )
    ((_, head, body),) = shard.echo()
    assert head == (PUSH, 1, 1, 0, 6, 9, 3, 1.0)
    assert body[:8] == np.int64(5).tobytes()
    assert worker.receive()[0]["kind"] == ANSWER
    assert len(table) == 0


def test_its_bounds_have_names(shard: Shard, worker: Worker) -> None:
    with pytest.raises(StatusError, match="follower 12"):
        shard.core.follow(12)
    worker.send(CALL, payload=b"x" * 8)
    select.select([shard.core.calls_fd], [], [], 10)
    ((caller, _, _),) = shard.core.calls()
    with pytest.raises(StatusError, match="frame_bytes_max"):
        shard.core.answer(caller, bytes(1 << 17))
    with pytest.raises(StatusError, match="144"):
        shard.core.saw(1, b"short")


def test_a_gate_stops_pushes_then_pulls_then_all(shard: Shard, worker: Worker) -> None:
    ids, rows = np.arange(3), np.ones((3, DIM), np.float32)
    refused = {1: (102, 0), 2: (102, 102), 3: (112, 112), 0: (0, 0)}
    for access, (of_push, of_pull) in refused.items():
        shard.core.access = access
        assert shard.core.access == access
        for head, code in (
            (worker.push(ids, rows, worker=9, sequence=1), of_push),
            (worker.pull(ids, 0)[0], of_pull),
        ):
            assert (head["kind"] == REFUSED) == bool(code)
            assert not code or head["rows"] == code
    assert shard.table.steps == 1


def test_connections_are_bounded(tmp_path: Path) -> None:
    with contextlib.closing(Shard(tmp_path, connections_max=2)) as shard:
        workers = [Worker(shard) for _ in range(2)]
        third = socket.socket(socket.AF_UNIX)
        third.connect(shard.path)
        assert third.recv(1) == b""
        for one in (*(worker.socket for worker in workers), third):
            one.close()
        while shard.core.stats()["connections"]:  # until it has noticed that they are closed
            os.sched_yield()
        again = Worker(shard)
        assert again.pull([1])[0]["kind"] == ANSWER
        again.socket.close()


def test_silent_connections_shut_no_worker_out(tmp_path: Path) -> None:
    with (
        contextlib.closing(Shard(tmp_path, connections_max=8)) as shard,
        contextlib.ExitStack() as stack,
    ):
        silent = [
            stack.enter_context(contextlib.closing(Worker(shard, admitted=False).socket))
            for _ in range(20)
        ]
        workers = [Worker(shard) for _ in range(5)]
        for worker in workers:
            stack.enter_context(contextlib.closing(worker.socket))
            assert worker.pull([1])[0]["kind"] == ANSWER
        assert silent[0].recv(1) == b"", "the one that has waited longest goes"
        assert shard.core.stats()["turned_away"] >= 16


def test_connection_without_hello_is_closed_in_time(tmp_path: Path) -> None:
    with contextlib.closing(Shard(tmp_path, hello_us=1)) as shard:
        silent = Worker(shard, admitted=False)
        assert silent.socket.recv(1) == b""
        silent.socket.close()


def test_unadmitted_connection_whose_hello_waits_for_python_is_not_closed(tmp_path: Path) -> None:
    with (
        contextlib.closing(Shard(tmp_path, connections_max=8)) as shard,
        contextlib.ExitStack() as stack,
    ):
        slow = Worker(shard, admitted=False)
        slow.send(CALL, payload=b"let me!!")
        select.select([shard.core.calls_fd], [], [], 10)
        late = [
            stack.enter_context(contextlib.closing(Worker(shard, admitted=False).socket))
            for _ in range(5)
        ]
        assert late[0].recv(1) == b"", "of the others, the one that has waited longest goes"
        shard.echo()
        assert slow.receive()[1] == b"let me!!"
        assert slow.pull([1])[0]["kind"] == ANSWER
        slow.socket.close()


def test_stranger_has_one_call_at_a_time(tmp_path: Path) -> None:
    with contextlib.closing(Shard(tmp_path)) as shard:
        unadmitted = Worker(shard, admitted=False)
        for _ in range(10):
            unadmitted.send(CALL, payload=b"hello me")
        assert len(shard.echo(admit=False)) == 1
        assert len(shard.echo(admit=False, count=9)) == 9
        unadmitted.socket.close()


def test_connections_beyond_descriptors_are_refused_at_once(tmp_path: Path) -> None:
    with contextlib.closing(Shard(tmp_path)) as shard, contextlib.ExitStack() as stack:
        worker = Worker(shard)
        late = stack.enter_context(contextlib.closing(socket.socket(socket.AF_UNIX)))
        late.settimeout(10)
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8, before[1])
        )
        with contextlib.suppress(OSError):
            while True:
                stack.callback(os.close, os.dup(0))
        late.connect(shard.path)
        assert late.recv(1) == b"", "the connection is closed, and does not stay in the backlog"
        assert worker.pull([1])[0]["kind"] == ANSWER
        worker.socket.close()


def test_second_live_client_of_a_worker_number_is_refused(shard: Shard) -> None:
    def hello(worker: int, incarnation: int) -> tuple[Worker, dict[str, Any]]:
        one = Worker(shard, admitted=False)
        one.send(CALL, payload=b"let me!!")
        shard.echo(worker=worker, incarnation=incarnation)
        return one, one.receive()[0]

    first, head = hello(7, 1)
    assert head["kind"] == ANSWER
    again, head = hello(7, 1)
    assert head["kind"] == ANSWER, "another connection of the same client"
    second, head = hello(7, 2)
    assert (head["kind"], head["rows"]) == (REFUSED, WORKER_IN_USE)
    assert second.socket.recv(1) == b""
    older, head = hello(7, 0)
    assert head["kind"] == ANSWER, "a client of an older version does not send its id"
    for one in (first, again, older):
        one.socket.close()
    third, head = hello(7, 2)
    assert head["kind"] == ANSWER, "its number is free again"
    for one in (second, third):
        one.socket.close()


def test_too_large_push_is_reported_and_the_connection_goes_on(
    shard: Shard, worker: Worker
) -> None:
    n = 4000
    answer = worker.push(range(n), ones(n), worker=7, sequence=1)
    assert (answer["kind"], answer["rows"]) == (REFUSED, TOO_LARGE)
    assert len(shard.table) == 0
    assert worker.push([1], ones(1), worker=7, sequence=2)["kind"] == ANSWER


def test_answer_to_a_push_reports_the_outcome_of_its_ids(tmp_path: Path) -> None:
    with contextlib.closing(Shard(tmp_path, table=Table("small", DIM, rows_max=128))) as shard:
        worker = Worker(shard)
        worker.send_push(range(4000), ones(4000), worker=7, sequence=1)
        head, counted = worker.receive()
        applied, unadmitted, refused, evicted = struct.unpack("<4I", counted)
        assert (head["flags"], applied, unadmitted, refused, evicted) == (
            0,
            len(shard.table),
            0,
            4000 - len(shard.table),
            0,
        )
        assert refused > 0
        worker.send_push(range(4000), ones(4000), worker=7, sequence=1)
        head, counted = worker.receive()
        assert (head["flags"], counted) == (1, b""), "of a repetition it is not known any more"
        shard.core.follow(0, waited=True)
        worker.send_push([0, 0, 5000], ones(3), worker=7, sequence=2)
        assert worker.is_silent()
        shard.core.acknowledge(0, shard.core.position)
        assert struct.unpack("<4I", worker.receive()[1]) == (1, 0, 1, 0)
        worker.socket.close()


def test_follower_that_starts_anew_is_not_waited_for_until_it_is_synchronized(
    shard: Shard, worker: Worker
) -> None:
    shard.core.follow(0, waited=True)
    worker.send_push([1], ones(1))
    assert worker.is_silent()
    shard.core.follow(0)
    assert worker.receive()[0]["kind"] == ANSWER, "nobody is waited for any more"
    shard.core.wait_for(0)
    worker.send_push([1], ones(1))
    assert worker.is_silent()
    shard.core.acknowledge(0, shard.core.position)
    assert worker.receive()[0]["kind"] == ANSWER


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 60), st.integers(1, 4000), _LAST), max_size=120))
def test_the_window_is_a_set_that_forgets_the_old(sequences: list[int]) -> None:
    window, seen, high = SequenceWindow(), set[int](), 0
    for one in sequences:
        expected = 2 if one <= high and high - one >= 1024 else int(one in seen)
        assert window.look(one) == expected
        if expected == 0:
            window.mark(one)
            seen.add(one)
            high = max(high, one)


def test_the_window_has_an_edge_and_forgets_what_leaves_it() -> None:
    window = SequenceWindow()
    for one in (5, 6, 1500):
        window.mark(one)
    assert [
        window.look(one) for one in (1500 - 1024, 1500 - 1023, 5, 5 + 1024, 6 + 1024, 1500)
    ] == [2, 0, 2, 0, 0, 1]


def test_highest_sequence_number_is_a_push_like_any_other(shard: Shard, worker: Worker) -> None:
    worker.push([1], ones(1), worker=7, sequence=3)
    assert worker.push([1], ones(1), worker=7, sequence=SEQUENCE_MAX)["kind"] == ANSWER
    assert worker.push([1], ones(1), worker=7, sequence=SEQUENCE_MAX)["flags"] == 1
    late = worker.push([1], ones(1), worker=7, sequence=4)
    assert (late["kind"], late["rows"]) == (REFUSED, TOO_OLD)
    assert worker.push([1], ones(1), worker=8, sequence=1)["flags"] == 0
    assert shard.table.steps == 3


def test_numbers_of_connections_are_used_again(shard: Shard) -> None:
    for _ in range(20):
        one = Worker(shard, admitted=False)
        one.send(CALL)
        ((caller, _, _),) = shard.echo()
        assert one.receive()[0]["kind"] == ANSWER
        assert caller[0] <= 1
        one.socket.close()


def test_pushes_wait_while_it_is_held(shard: Shard, worker: Worker) -> None:
    shard.core.hold()
    worker.send_push([1, 2], ones(2))
    assert worker.is_silent()
    assert len(shard.table) == 0
    shard.core.resume()
    assert worker.receive()[0]["kind"] == ANSWER
    assert len(shard.table) == 2


def test_a_worker_with_much_at_once_lets_others_between(tmp_path: Path) -> None:
    """After TURN_BYTES of messages and answers of one connection the loop serves the next one: the
    pull of the second worker is executed before the last push of the first."""
    dim = 1024
    table = Table("wide", dim, optimizer=Optimizer("adagrad"))
    with contextlib.closing(Shard(tmp_path, table)) as shard:
        blocker, busy, other = (Worker(shard) for _ in range(3))
        before = other.pull([3])[1]
        pieces: list[bytes] = []
        line, busy.socket = busy.socket, SimpleNamespace(sendall=pieces.append)  # type: ignore[assignment]
        for _ in range(600):
            busy.send(PULL, np.int64(3).tobytes(), rows=1)
        busy.send_push([3], np.ones((1, dim)))
        busy.socket = line
        shard.core.hold()
        blocker.send_push([9], np.ones((1, dim)))
        assert blocker.is_silent(), "the loop waits in it"
        busy.socket.sendall(b"".join(pieces))
        other.send(PULL, np.int64(3).tobytes(), rows=1)
        shard.core.resume()
        assert other.receive()[1] == before
        calls = [busy.receive() for _ in pieces]
        first = busy.id - len(pieces) + 1
        assert [head["id"] for head, _ in calls] == list(range(first, busy.id + 1))
        assert {payload for _, payload in calls[:-1]} == {before}
        assert other.pull([3])[1] != before
        for one in (blocker, busy, other):
            one.socket.close()


def test_a_follower_that_begins_has_nothing(shard: Shard, worker: Worker) -> None:
    worker.push([1], ones(1))
    shard.core.follow(0, waited=True)
    worker.send_push([2], ones(1))
    assert worker.is_silent()
    shard.core.acknowledge(0, 1)
    assert worker.is_silent()
    shard.core.follow(0, waited=True)
    assert shard.core.sure() == 0, "it began anew, and what it had is not counted on"
    shard.core.acknowledge(0, shard.core.position)
    assert worker.receive()[0]["kind"] == ANSWER


def test_connections_are_closed_at_the_end(shard: Shard, worker: Worker) -> None:
    shard.core.stop()
    assert worker.socket.recv(1) == b""


@pytest.mark.parametrize("spin_us", [0, 50])
def test_polling_begins_after_a_message_only(tmp_path: Path, spin_us: int) -> None:
    polls = bool(spin_us) and len(os.sched_getaffinity(0)) > 1
    with contextlib.closing(Shard(tmp_path, spin_us=spin_us)) as shard:
        assert not select.select([shard.core.calls_fd], [], [], 0.05)[0]  # nobody asks anything
        assert shard.core.spins == 0
        worker = Worker(shard)
        with contextlib.closing(worker.socket):
            for _ in range(100):
                worker.pull([1])
            calls = 103  # a connection, a call and its answer, and those
            assert polls <= shard.core.spins <= polls * calls
