"""The number of shards changes while the set serves: no acknowledged push is lost or applied twice,
whoever is killed at whatever step, and everything that belongs to a row moves with it."""

import contextlib
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from bench.system.faults import params_reshard
from clipper.cli import main
from clipper.errors import DoesNotFit, StalePush
from clipper.params import Client, TableSpec
from clipper.params.client.client import ModelStep, _divided_step
from clipper.params.client.row_watcher import RowWatcher
from clipper.params.local import live_reshard
from clipper.params.local.address_file import write_address_file
from clipper.params.local.live_reshard import ReshardState, request, request_in, state_in
from clipper.params.local.local_set import LocalSet, reshard
from clipper.params.local.served_set import ServedSet
from clipper.params.partition import shard_of_name
from clipper.params.shard.resharding.decision import decide, decision_in, prepare_decision
from clipper.processes import Supervisor
from clipper.processes.forked import ForkedChild
from clipper.settings.params import ParamsSettings
from clipper_container.params.connection import (
    ShardConnection,
    ShardRequest,
    addresses_in,
    call_once,
)
from clipper_container.params.frames import Head, MessageKind
from clipper_container.params.push_identity import origin_worker
from clipper_container.params.shard_set import ShardSet
from clipper_container.tables import Tables
from tests.params.conftest import ones, until, zeros
from tests.params.test_watching import SPEC, Cache
from tests.processes import free_ports
from tests.sizes import sized
from tests.threads import join

PATIENCE_S = 60.0
SHARDS_MAX = 4  # that a set with addresses has: each takes the next port
COUNTS = TableSpec(
    "counts", 2, optimizer="sgd", optimizer_settings={"rate": 1.0}, initializer="zeros"
)
IDS = np.arange(40)
ODD = 1001 + 2 * np.arange(20)  # of two shards the second has them


@contextlib.contextmanager
def running(folder: Path, shards: int, **settings: Any) -> Iterator[LocalSet]:
    given = {"snapshot_s": 0.0, "reshard_keep_s": 0.2, **settings}
    local = LocalSet(ParamsSettings(folder=str(folder), shards=shards, **given)).start()
    try:
        local.wait_ready(PATIENCE_S)
        yield local
    finally:
        local.stop(snapshot=False)


def resharded(folder: Path, shards: int) -> ReshardState:
    request(folder, shards)
    until(lambda: not request_in(folder))
    found = state_in(folder)
    assert found is not None
    return found


def kill(home: Path, number: int) -> None:
    os.kill(pid(home, number), signal.SIGKILL)


def pid(home: Path, number: int) -> int:
    addresses, token = addresses_in(home)
    connection = ShardConnection(number, addresses.__getitem__, token, None, 5.0)
    found = call_once(connection, "stats")[1]["pid"]
    connection.close()
    return int(found)


def until_it_serves(home: Path, number: int) -> None:
    def serves() -> bool:
        addresses, token = addresses_in(home)
        connection = ShardConnection(number, addresses.__getitem__, token, None, 5.0)
        try:
            return bool(call_once(connection, "stats")[1]["ready"])
        except OSError:
            return False
        finally:
            connection.close()

    until(serves)
    time.sleep(0.3)  # for pushes to come, if it takes them


class Load(threading.Thread):
    """Pushes minus ones to all rows, and, if to those of all shards, a step with two variables
    every third time. pause_s: between two pushes. Without one a push meets each step of a change,
    and a core is busy."""

    def __init__(self, shards: Any, ids: Any = IDS, pause_s: float = 0.0) -> None:
        super().__init__()
        self.ids, self.pause_s = ids, pause_s
        self.client = Client(shards, patience_s=PATIENCE_S)
        self.pushes = self.steps = 0
        self.enough = threading.Event()
        self.failed: Exception | None = None

    def run(self) -> None:
        minus = -ones((self.ids.size, 2))
        try:
            while not self.enough.wait(self.pause_s):
                if self.pushes % 3 == 2 and self.ids is IDS:
                    each = {name: -ones(1) for name in "ab"}
                    self.client.push_gradients(each, {"counts": (self.ids, minus)})
                    self.steps += 1
                else:
                    self.client.push("counts", self.ids, minus)
                self.pushes += 1
        except Exception as error:
            self.failed = error

    def end(self) -> None:
        self.enough.set()
        join(self)
        self.client.close()


def begin(client: Client) -> None:
    client.create(COUNTS)
    client.push_model(
        {"a": zeros(1), "b": zeros(1)}, optimizer="sgd", optimizer_settings={"rate": 1.0}
    )


@contextlib.contextmanager
def loaded(folder: Path, pause_s: float = 0.0) -> Iterator[Client]:
    """Yield a client while others push; check at the end that each of their pushes was applied
    once. pause_s: between two pushes of each."""
    with Client(folder, patience_s=PATIENCE_S) as client:
        begin(client)
        loads = [Load(folder, IDS, pause_s), Load(folder, ODD, pause_s)]
        for load in loads:
            load.start()
        try:
            yield client
            for load in loads:
                least = load.pushes + 3
                until(lambda one=load, n=least: one.pushes > n or one.failed is not None)
        finally:
            for load in loads:
                load.end()
        for load in loads:
            if load.failed is not None:
                raise load.failed
            assert np.unique(client.pull("counts", load.ids)).tolist() == [load.pushes]
        steps = [loads[0].steps]
        assert client.pull_variables()[1] == {"a": steps, "b": steps}


@pytest.mark.parametrize("seed", range(20))
def test_each_part_of_a_push_has_one_source_and_one_target_shard(seed: int) -> None:
    draw = np.random.default_rng(seed)
    old, new = draw.integers(1, 9, 2)
    ids = draw.integers(-(1 << 62), 1 << 62, 200)
    rows = draw.normal(size=(200, 3)).astype(np.float32)
    names = {f"w{i}": np.full(1, i, np.float32) for i in range(20)}
    found: dict[int, list[float]] = {}
    variables: list[str] = []
    for shard, part in _divided_step(ModelStep(names, {"t": (ids, rows)}, None, 1.0), int(old)):
        mine, values = part.tables["t"]
        assert (np.mod(mine, old) == shard).all()
        assert all(shard_of_name(name, int(old)) == shard for name in part.variables)
        variables += part.variables
        for _, again in _divided_step(part, int(new)):
            each = again.tables.get("t", (ids[:0], rows[:0]))
            found |= dict(zip(each[0].tolist(), each[1].tolist(), strict=True))
        assert values.shape == (mine.size, 3)
    assert sorted(variables) == sorted(names)
    assert found == dict(zip(ids.tolist(), rows.tolist(), strict=True))
    origins = {origin_worker(w, g, s) for w in range(1, 9) for g in range(5) for s in range(8)}
    assert len(origins) == 8 * 5 * 8


def test_ports_are_above_those_of_the_set_and_not_those_of_earlier_ones(tmp_path: Path) -> None:
    host: Any = SimpleNamespace(
        folder=tmp_path,
        settings=ParamsSettings(address="127.0.0.1:7000"),
        addresses=["tcp:127.0.0.1:7000", "tcp:127.0.0.1:7001"],
        addresses_of=lambda _, settings: [settings.address],
    )

    def planned(former: list[int]) -> str:
        content: Any = {"former": [f"tcp:127.0.0.1:{port}" for port in former]}
        write_address_file(tmp_path, content)
        return live_reshard.LiveReshard(host)._plan(2)[1].address

    assert planned([]) == "127.0.0.1:7002"
    assert planned([7003]) == "127.0.0.1:7004"
    assert planned([65534]) == "127.0.0.1:7002"  # as after many changes, a stop and a start
    host.addresses[1] = "tcp:127.0.0.1:65534"
    with pytest.raises(DoesNotFit, match="no 2 ports above 65534"):
        planned([])


def test_the_first_of_two_decisions_is_final(tmp_path: Path) -> None:
    words: list[Any] = ["commit", "abort"] * 8
    prepare_decision(tmp_path)
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda w=word: found.append(decide(tmp_path, w))) for word in words
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        join(thread)
    assert len(set(found)) == 1
    assert decision_in(tmp_path) == found[0]
    assert decide(tmp_path / "removed", "commit") == "abort"


def files_of(folder: Path, first: int, shards: int) -> None:
    for i in range(shards):
        (folder / f"shard-{i}").mkdir(parents=True)
        (folder / f"shard-{i}" / "epoch").write_text(str(first + i))
    (folder / "snapshots").mkdir()
    (folder / "snapshots" / "mine").write_text(str(first))


@pytest.mark.parametrize("step", range(14))
def test_a_start_completes_a_decided_resharding(
    tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    files_of(tmp_path, 10, 2)
    left = [step]

    def limited(real: Callable[..., Any]) -> Callable[..., Any]:
        def work(*args: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise OSError("killed")
            return real(*args, **options)

        return work

    for generation, shards, word in ((1, 3, "commit"), (2, 4, "abort"), (3, 1, "commit")):
        home = tmp_path / f"set-{generation}"
        files_of(home, 100 * generation, shards)
        addresses = [f"unix:{home}/{i}" for i in range(shards)]
        content: Any = {"addresses": addresses, "generation": generation, "settings": {}}
        write_address_file(home, content)
        decide(home, word)  # type: ignore[arg-type]
        with monkeypatch.context() as patched, contextlib.suppress(OSError):
            for place, name in ((os, "rename"), (os, "symlink"), (shutil, "rmtree")):
                patched.setattr(place, name, limited(getattr(place, name)))
            live_reshard.complete_move(tmp_path)
        live_reshard.complete_move(tmp_path)
        if word == "commit":
            names = sorted(path.name for path in tmp_path.glob("shard-*"))
            assert names == [f"shard-{i}" for i in range(shards)]
            epoch = (tmp_path / f"shard-{shards - 1}" / "epoch").read_text()
            assert epoch == str(100 * generation + shards - 1)
            assert addresses_in(tmp_path)[0] == addresses
            assert (tmp_path / "snapshots" / "mine").read_text() == str(100 * generation)
        assert len(live_reshard.sets_of(tmp_path)) == 1
    kept = [path.name for path in tmp_path.glob("snapshots-before-*")]
    assert sorted(kept) == ["snapshots-before-1", "snapshots-before-3"]


def test_snapshots_on_another_disk_stay_there(tmp_path: Path) -> None:
    folder, home, disk = tmp_path / "set", tmp_path / "set" / "set-1", tmp_path / "disk"
    files_of(folder, 10, 1)
    files_of(home, 100, 2)
    (folder / "snapshots").rename(disk)
    (folder / "snapshots").symlink_to(disk)
    content: Any = {"addresses": ["unix:/0", "unix:/1"], "generation": 1, "settings": {}}
    write_address_file(home, content)
    (folder / "reshard.json").write_text('{"shards": 2}')
    decide(home, "commit")
    live_reshard.complete_move(folder)
    assert (disk / "mine").read_text() == (folder / "snapshots-before-1" / "mine").read_text()
    assert (folder / "snapshots" / "mine").read_text() == "100"
    assert not request_in(folder), "it has been done"
    state = state_in(folder)
    assert state is not None
    assert (state.phase, state.shards) == ("done", 2)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"replicas": 1}, {"durability": "disk"}])
def test_a_set_grows_moves_and_shrinks_while_it_is_trained(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    with running(tmp_path, 2, **options) as local, loaded(tmp_path) as client:
        for shards in (3, 3, 1, 2):
            state = resharded(tmp_path, shards)
            assert (state.phase, state.error) == ("done", "")
            assert len(client.pull("counts", IDS)) == IDS.size
            assert len(client) == len(local.addresses) == shards
            until(lambda n=shards: len(local.pids()) == n)
        assert local.settings.replicas == options.get("replicas", 0)


@pytest.mark.slow
def test_rows_keep_their_state_steps_and_stamps(tmp_path: Path) -> None:
    specs = [
        TableSpec("adam", 3, optimizer="adam", dtype="f16"),
        TableSpec("kept", 2, optimizer="ftrl", expire_s=3600),
    ]
    with running(tmp_path, 2, replicas=1), Client(tmp_path) as client:
        begin(client)
        draw = np.random.default_rng(1)
        for spec in specs:
            client.create(spec)
            for _ in range(3):
                client.push(spec.name, IDS, draw.normal(size=(IDS.size, spec.dim)))
        client.erase("kept", IDS[:5])
        client.alter("adam", optimizer_settings={"rate": 0.5})
        before = {spec.name: rows_of(client, spec.name) for spec in specs}
        values = client.pull_variables()[1]
        resharded(tmp_path, 3)
        for spec in specs:
            assert rows_of(client, spec.name) == before[spec.name]
            steps = {s["tables"][spec.name]["steps"] for _, s in client.call_all("stats")}
            assert steps == {3}
        assert client.pull_variables()[1] == values
        client.call_all("tables")
        with Client(tmp_path) as another:
            assert another.spec("adam").optimizer_settings == {"rate": 0.5}
        token = client.push("kept", IDS, ones((IDS.size, 2))).token
        fresh = client.pull("kept", IDS, after=token)
        assert (fresh == client.pull("kept", IDS)).all()
        until(lambda: (tmp_path / "snapshots").is_symlink())
    with running(tmp_path, 3, replicas=1), Client(tmp_path) as client:
        assert (client.pull("kept", IDS) == fresh).all()


def rows_of(client: Client, table: str) -> dict[int, list[float]]:
    client.pull(table, IDS[:1])  # follows the set
    return {
        int(i): row.tolist()
        for ids, rows in client.walk(table)
        for i, row in zip(ids, rows, strict=True)
    }


@pytest.mark.slow
def test_a_push_that_some_shards_have_is_applied_once_after_the_move(tmp_path: Path) -> None:
    with running(tmp_path, 2), Client(tmp_path) as client, Tables(tmp_path) as tables:
        begin(client)
        client.push("counts", IDS, -ones((IDS.size, 2)))
        tables.push("counts", IDS, -ones((IDS.size, 2)))
        sequence = client._shards.new_sequence()
        apply_at(client, 0, sequence)  # the other shard never gets its part
        old_client = Client(tmp_path, worker=7)
        once = old_client.push("counts", IDS[:1], zeros((1, 2))).sequence
        resharded(tmp_path, 3)
        for _ in range(2):
            client.push("counts", IDS, -ones((IDS.size, 2)), sequence=sequence)
            assert np.unique(client.pull("counts", IDS)).tolist() == [3]
        tables.push("counts", IDS, -ones((IDS.size, 2)))
        resharded(tmp_path, 2)
        assert np.unique(client.pull("counts", IDS)).tolist() == [4]
        with pytest.raises(StalePush, match=r"too old to know|resharded twice"):
            client.push("counts", IDS, -ones((IDS.size, 2)), sequence=sequence)
        with pytest.raises(StalePush, match="resharded twice"):
            old_client.push("counts", IDS, ones((IDS.size, 2)), sequence=once)
        old_client.close()
        assert np.unique(client.pull("counts", IDS)).tolist() == [4]


def apply_at(client: Client, shard: int, sequence: int) -> None:
    """Push to one shard only, as if the client had been cut off from the others."""
    mine = IDS[IDS % len(client) == shard]
    rows = -ones((mine.size, 2), np.float32)
    head = Head(
        MessageKind.PUSH,
        rows=mine.size,
        worker=client.worker,
        sequence=sequence,
        payload_bytes=mine.nbytes + rows.nbytes,
    )
    client._shards.check_tables(shard, ["counts"])
    pushed = ShardRequest(head, (mine, rows.reshape(-1)), table="counts")
    client._shards.request_all([(shard, pushed)])


STEPS = ("_check_room", "_copy", "_keep_as_before", "_switch", "decide", "publish")


def kills_at(*steps: str) -> list[tuple[str, str]]:
    """Return each step with whose shard is killed at it: the old and the new set's by turns, or
    both where sizes are full."""
    both = [(step, whose) for step in steps for whose in ("old", "new")]
    return sized([one for i, one in enumerate(both) if i % 4 in (1, 2)], both)


@pytest.mark.slow
@pytest.mark.parametrize(("step", "whose"), kills_at(*STEPS))
def test_resharding_survives_a_kill_of_a_shard_at_any_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, whose: str
) -> None:
    killed: list[int] = []

    def before(real: Callable[..., Any]) -> Callable[..., Any]:
        def work(*args: Any) -> Any:
            homes = live_reshard.sets_of(tmp_path)
            if not killed and "abort" not in args:
                killed.append(1)
                if step != "_check_room" or whose == "old":
                    kill(tmp_path if whose == "old" else homes[0], 1)
                if (step, whose) == ("decide", "old"):
                    until_it_serves(tmp_path, 1)  # its next life must not take pushes in vain
            return real(*args)

        return work

    place: Any = live_reshard if step in ("decide", "publish") else live_reshard.LiveReshard
    monkeypatch.setattr(place, step, before(getattr(place, step)))
    with running(tmp_path, 2, replicas=1), loaded(tmp_path):
        assert resharded(tmp_path, 3).phase == "done"
    assert killed


@pytest.mark.slow
def test_an_old_shard_that_starts_after_resharding_does_not_disturb_the_new_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old shard is killed at the decision, and reads the addresses of the new set."""
    killed, held, new = list[bool](), list[Callable[[], None]](), dict[int, int]()
    supervisors = list[Supervisor]()
    started = ForkedChild.start
    decides = decide
    publishes = live_reshard.publish

    def hold(handle: Any, number: int, told: Any) -> None:
        again = partial(started, handle, number, told)
        if killed and handle._work._key[0] == tmp_path:
            held.append(again)
        else:
            again()

    def kills(home: Path, word: Any) -> Any:
        if word == "commit":
            killed.append(True)
            kill(tmp_path, 1)
            until(lambda: held)
        return decides(home, word)

    def then_starts(folder: Path, home: Path) -> None:
        publishes(folder, home)
        new.update({number: pid(home, number) for number in range(3)})
        for start in held:
            supervisors[0].post(start)

    monkeypatch.setattr(ForkedChild, "start", hold)
    monkeypatch.setattr(live_reshard, "decide", kills)
    monkeypatch.setattr(live_reshard, "publish", then_starts)
    with running(tmp_path, 2, replicas=1) as local, loaded(tmp_path):
        supervisors.append(local._supervisor)
        assert resharded(tmp_path, 3).phase == "done"
        until(lambda: "has moved to set-1" in (tmp_path / "shard-1.log").read_text())
        assert (local.pids(), local.restarts) == (new, 1)


@pytest.mark.slow
def test_a_sealed_shard_whose_supervisor_hangs_serves_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, hangs = live_reshard.LiveReshard._switch, list[bool]()

    def switch(self: Any, sources: Any, home: Path, pause_s: float) -> float:
        if hangs:
            return real(self, sources, home, pause_s)
        hangs.append(True)
        sources.call_all("move_seal", sealed=True)
        until(lambda: all(one["phase"] == "sealed" for one in sources.call_all("move_state")))
        sources.call_all("move_close")
        until(lambda: decision_in(home) == "abort")
        return real(self, sources, home, pause_s)

    monkeypatch.setattr(live_reshard.LiveReshard, "_switch", switch)
    with running(tmp_path, 2, reshard_pause_s=0.1), loaded(tmp_path):
        state = resharded(tmp_path, 3)
        assert (state.phase, state.attempt) == ("done", 2)


@pytest.mark.slow
@pytest.mark.parametrize(("step", "attempt"), [("publish", 1), ("decide", 2)])
def test_resharding_survives_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, attempt: int
) -> None:
    real, left = getattr(live_reshard, step), [2]

    def full(*args: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError("no room")
        return real(*args)

    monkeypatch.setattr(live_reshard, step, full)
    with running(tmp_path, 2), loaded(tmp_path):
        state = resharded(tmp_path, 3)
        assert state.phase == "done"
        assert state.attempt >= attempt
        assert (state.attempt == 1) == (attempt == 1)


@pytest.mark.slow
def test_a_client_that_missed_three_changes_pushes_again(tmp_path: Path) -> None:
    with running(tmp_path, 1) as local, Client(tmp_path, patience_s=PATIENCE_S) as client:
        begin(client)
        sequence = client.push("counts", IDS, -ones((IDS.size, 2))).sequence
        for _ in range(3):
            assert resharded(tmp_path, 1).phase == "done"
            until(lambda: len(local.pids()) == 1)
        assert np.unique(client.pull("counts", IDS)).tolist() == [1]
        client.push("counts", IDS, -ones((IDS.size, 2)))
        with pytest.raises(StalePush):
            client.push("counts", IDS, -ones((IDS.size, 2)), sequence=sequence)
        assert np.unique(client.pull("counts", IDS)).tolist() == [2]


@pytest.mark.slow
@pytest.mark.parametrize("address", ["unix", "127.0.0.1:0"])
def test_a_push_that_was_never_sent_is_made_after_several_changes(
    tmp_path: Path, address: str
) -> None:
    if address != "unix":
        address = f"127.0.0.1:{free_ports(SHARDS_MAX)[0]}"
    with (
        running(tmp_path, 1, address=address) as local,
        Client(tmp_path, patience_s=PATIENCE_S) as client,
        Client(tmp_path, patience_s=PATIENCE_S) as steps,
        Tables(tmp_path, patience_s=PATIENCE_S) as tables,
    ):
        begin(client)
        each = [client.push("counts", IDS, -ones((IDS.size, 2))).sequence]
        steps.push_gradients({"a": -ones(1)}, {"counts": (IDS, -ones((IDS.size, 2)))})
        tables.push("counts", IDS, -ones((IDS.size, 2)))
        for shards in (2, 1):
            assert resharded(tmp_path, shards).phase == "done"
            until(lambda n=shards: len(local.pids()) == n)
        time.sleep(1.0)  # the connections count as idle
        each.append(client.push("counts", IDS, -ones((IDS.size, 2))).sequence)
        steps.push_gradients({"a": -ones(1)}, {"counts": (IDS, -ones((IDS.size, 2)))})
        tables.push("counts", IDS, -ones((IDS.size, 2)))
        assert np.unique(client.pull("counts", IDS)).tolist() == [6]
        client.push("counts", IDS, -ones((IDS.size, 2)), sequence=each[1])
        with pytest.raises(StalePush):
            client.push("counts", IDS, -ones((IDS.size, 2)), sequence=each[0])
        assert np.unique(client.pull("counts", IDS)).tolist() == [6]


class SynchronousWorker(Load):
    """Pushes steps to shards that make one of two workers' gradients, by turns with another one."""

    def run(self) -> None:
        minus = -ones((self.ids.size, 2))
        try:
            while not self.enough.is_set():
                versions = self.client.pull_variables()[0]
                each = {name: -ones(1) for name in "ab"}
                rows = {"counts": (self.ids, minus)}
                found = self.client.push_gradients(each, rows, versions=versions)
                self.pushes += found["accepted"]
        except Exception as error:
            self.failed = error


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"replicas": 1}, {"durability": "disk"}])
def test_a_set_with_synchronous_steps_is_resharded(tmp_path: Path, options: dict[str, Any]) -> None:
    with synchronous(tmp_path, **options) as workers:
        for shards in (3, 1, 2):
            assert resharded(tmp_path, shards).phase == "done"
            before = [worker.pushes for worker in workers]
            until(lambda n=before: all(w.pushes > k for w, k in zip(workers, n, strict=True)))


@pytest.mark.slow
@pytest.mark.parametrize(("step", "whose"), kills_at("_sealed", "decide", "publish"))
def test_resharding_of_synchronous_shards_survives_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, whose: str
) -> None:
    place: Any = live_reshard.LiveReshard if step == "_sealed" else live_reshard
    real, killed = getattr(place, step), list[bool]()

    def work(*args: Any) -> Any:
        found = real(*args) if step == "_sealed" else None  # all are sealed, or nothing is decided
        if not killed and "abort" not in args:
            killed.append(True)
            kill(tmp_path if whose == "old" else live_reshard.sets_of(tmp_path)[0], 1)
        return found if step == "_sealed" else real(*args)

    monkeypatch.setattr(place, step, work)
    with synchronous(tmp_path, replicas=1):
        assert resharded(tmp_path, 3).phase == "done"
    assert killed


@contextlib.contextmanager
def synchronous(folder: Path, **options: Any) -> Iterator[list["SynchronousWorker"]]:
    """Yield three workers of two shards; check at the end that each of their pushes was applied
    once."""
    wait = {"mode": "sync", "grads_to_wait": 3, "lag_max": 1000}
    with running(folder, 2, **wait, **options), Client(folder, patience_s=PATIENCE_S) as client:
        begin(client)
        workers = [SynchronousWorker(folder) for _ in range(3)]
        for worker in workers:
            worker.start()
        try:
            yield workers
        finally:
            for worker in workers:
                worker.end()
        assert not [worker.failed for worker in workers if worker.failed]
        pushed = sum(worker.pushes for worker in workers)
        while pushed % 3:
            pushed += client.push_gradients(
                {name: -ones(1) for name in "ab"}, {"counts": (IDS, -ones((IDS.size, 2)))}
            )["accepted"]
        values = client.pull_variables()[1]
        assert np.unique(client.pull("counts", IDS)).tolist() == [pushed]
        for name in "ab":
            np.testing.assert_allclose(values[name], pushed / 3, rtol=1e-3)


def hanging(client: Client) -> tuple[threading.Event, threading.Event]:
    """Have the first push of a client hang between shard 0 and the others. Return two events: the
    first is set when it hangs; setting the second lets it continue."""
    real, hangs, goes = client._shards.call_all, threading.Event(), threading.Event()

    def call_all(name: str, **fields: Any) -> Any:
        if fields.get("each") and "step" in fields["each"][0] and not hangs.is_set():
            hangs.set()
            goes.wait(2 * PATIENCE_S)
        return real(name, **fields)

    client._shards.call_all = call_all  # type: ignore[method-assign]
    return hangs, goes


@pytest.mark.slow
def test_a_synchronous_push_left_out_of_its_step_is_not_acknowledged(tmp_path: Path) -> None:
    """Its worker hangs between shard 0 and the others for longer than they wait."""
    failed: list[StalePush] = []
    with (
        running(tmp_path, 2, mode="sync", grads_to_wait=2, lag_max=9, reshard_pause_s=1.0),
        Client(tmp_path, patience_s=PATIENCE_S) as client,
        Client(tmp_path, patience_s=PATIENCE_S) as another,
    ):
        begin(client)
        hangs, goes = hanging(client)
        step = {"a": -ones(1)}, {"counts": (IDS, -ones((IDS.size, 2)))}

        def push() -> None:
            try:
                client.push_gradients(*step)
            except StalePush as error:
                failed.append(error)

        thread = threading.Thread(target=push)
        thread.start()
        assert hangs.wait(PATIENCE_S)
        for _ in range(2):
            assert another.push_gradients(*step)["accepted"]
        assert resharded(tmp_path, 3).phase == "done"
        goes.set()
        join(thread)
        assert len(failed) == 1, "it was acknowledged"
        assert "applied in part" in failed[0].message
        assert another.push_gradients(*step)["accepted"]
        assert client.pull("counts", IDS)[:, 0].tolist() == [4, 3] * (IDS.size // 2)


@pytest.mark.slow
def test_a_synchronous_push_that_shard_0_has_alone_is_not_lost(tmp_path: Path) -> None:
    """The worker hangs between shard 0 and the others: the set is not sealed until it goes on."""
    with (
        running(tmp_path, 2, mode="sync", grads_to_wait=2, reshard_pause_s=0.2),
        Client(tmp_path, patience_s=PATIENCE_S) as client,
    ):
        begin(client)
        hangs, goes = hanging(client)
        rows = {"counts": (IDS, -ones((IDS.size, 2)))}
        push = threading.Thread(target=lambda: client.push_gradients({"a": -ones(1)}, rows))
        push.start()
        assert hangs.wait(PATIENCE_S)
        request(tmp_path, 3)
        until(lambda: getattr(state_in(tmp_path), "phase", "") == "switch")
        time.sleep(1.0)  # for some seals
        assert request_in(tmp_path)
        goes.set()
        join(push)
        until(lambda: not request_in(tmp_path))
        client.push_gradients({"a": -ones(1)}, rows)
        assert np.unique(client.pull("counts", IDS)).tolist() == [2]
        assert client.pull_variables()[1]["a"].tolist() == [1]


@pytest.mark.slow
def test_a_container_with_a_copy_of_the_addresses_finds_the_new_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ServedSet, "out_of_reach", "")
    copy = tmp_path / "copy"
    copy.mkdir()
    with running(tmp_path, 1, reshard_keep_s=3.0), Client(tmp_path) as client:
        begin(client)
        assert resharded(tmp_path, 1).phase == "done"
        ((_, content),) = ServedSet(ParamsSettings(folder=str(tmp_path))).carried({})[1].items()
        (copy / "shards.json").write_text(content)
        load = Load(copy)
        load.start()
        for shards in (2, 1):
            assert resharded(tmp_path, shards).phase == "done"
            least = load.pushes + 3
            until(lambda n=least: load.pushes > n or load.failed is not None)
        load.end()
        assert load.failed is None
        assert np.unique(client.pull("counts", IDS)).tolist() == [load.pushes]


@pytest.mark.parametrize(
    "answer", [{}, {"addresses": None}, {"addresses": [], "generation": "?", "before": 0}]
)
def test_a_shard_that_sends_no_addresses_is_skipped(
    monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any]
) -> None:
    monkeypatch.setattr("clipper_container.params.shard_set.call_once", lambda *_: (None, answer))
    shards: ShardSet[Any] = ShardSet(["unix:/nowhere"], dict)
    assert shards._place_from(0, "unix:/nowhere", 1.0) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "place", [(live_reshard.LiveReshard, "_check_room"), (LocalSet, "end_set")]
)
def test_an_unexpected_error_does_not_end_the_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: tuple[Any, str]
) -> None:
    real, failed = getattr(*place), list[bool]()

    def work(*args: Any) -> None:
        if not failed:
            failed.append(True)
            raise ValueError("of the engine")
        real(*args)

    monkeypatch.setattr(*place, work)
    with running(tmp_path, 1), Client(tmp_path, patience_s=PATIENCE_S) as client:
        begin(client)
        for shards in (2, 1):
            assert resharded(tmp_path, shards).phase == "done"
            client.push("counts", IDS, -ones((IDS.size, 2)))
        assert failed
        assert np.unique(client.pull("counts", IDS)).tolist() == [2]


@pytest.mark.slow
def test_a_container_that_starts_long_after_the_changes_finds_the_set(tmp_path: Path) -> None:
    folder, address = tmp_path / "set", f"127.0.0.1:{free_ports(SHARDS_MAX)[0]}"
    copies = [tmp_path / name for name in ("first", "second")]

    def copy(to: Path) -> None:
        to.mkdir()
        shutil.copy(folder / "shards.json", to)

    def pushed() -> None:
        for one in copies:
            with Client(one, patience_s=PATIENCE_S) as client:
                client.push("counts", IDS, -ones((IDS.size, 2)))
                assert len(client) == 2

    with (
        running(folder, 2, address=address, reshard_keep_s=0.0) as local,
        Client(folder, patience_s=PATIENCE_S) as client,
    ):
        begin(client)
        for one in copies:
            copy(one)
            assert resharded(folder, 2).phase == "done"
        until(lambda: len(local.pids()) == 2 and (folder / "snapshots").is_symlink())
        pushed()
        assert np.unique(client.pull("counts", IDS)).tolist() == [2]
    with running(folder, 2, address=address), Client(folder) as client:
        pushed()
        assert np.unique(client.pull("counts", IDS)).tolist() == [4]


@pytest.mark.slow
def test_a_client_with_a_copy_of_the_addresses_learns_of_the_new_set_whatever_rows_it_needs(
    tmp_path: Path,
) -> None:
    """The old set has ended; the new shard 0 listens where the old one did, and no other does."""
    folder, copy = tmp_path / "set", tmp_path / "copy"
    address = f"127.0.0.1:{free_ports(SHARDS_MAX)[0]}"
    with running(folder, 2, address=address, reshard_keep_s=0.0):
        shutil.copytree(folder, copy, ignore=lambda _, names: {*names} - {"shards.json"})
        with Client(copy, patience_s=PATIENCE_S) as client:
            begin(client)
            client.push("counts", IDS, -ones((IDS.size, 2)))
            assert resharded(folder, 3).phase == "done"
            until(lambda: (folder / "snapshots").is_symlink())
            client.push("counts", ODD, -ones((ODD.size, 2)))
            assert np.unique(client.pull("counts", ODD)).tolist() == [1]
            assert len(client) == 3


@pytest.mark.slow
def test_no_acknowledged_push_is_lost_to_kills_during_resharding(stress: int) -> None:
    seen = params_reshard.life(2 * stress, 3, params_reshard.MODES["a waited replica"])
    assert not seen.found.wrong
    assert seen.found.acknowledged > 0


@pytest.mark.slow
def test_a_client_with_addresses_learns_the_new_ones_from_the_old_shards(tmp_path: Path) -> None:
    with running(tmp_path, 1, reshard_keep_s=20.0) as local, Client(tmp_path) as client:
        begin(client)
        load = Load(local.addresses)
        load.client.close()
        load.client = Client(local.addresses, token=local.token, patience_s=PATIENCE_S)
        load.start()
        resharded(tmp_path, 2)
        least = load.pushes + 3
        until(lambda: load.pushes > least or load.failed is not None)
        load.end()
        assert load.failed is None
        assert np.unique(client.pull("counts", IDS)).tolist() == [load.pushes]


@pytest.mark.slow
def test_impossible_resharding_is_refused(tmp_path: Path) -> None:
    grpc = f"127.0.0.1:{free_ports(1)[0]}"
    with running(tmp_path, 1, grpc=grpc), pytest.raises(DoesNotFit, match=r"params\.grpc"):
        request(tmp_path, 2)
    with running(tmp_path / "full", 2) as local, Client(local.folder) as client:
        client.create(TableSpec("small", 1, rows_max=20))
        client.push("small", np.arange(38), ones((38, 1)))
        state = resharded(local.folder, 1)
        assert state.phase == "failed"
        assert "raise its rows_max" in state.error.lower()
        assert len(rows_of_small(client)) == 38
        request(local.folder, 3)
        with pytest.raises(DoesNotFit, match="being resharded to 3"):
            request(local.folder, 4)
        until(lambda: not request_in(local.folder))


def rows_of_small(client: Client) -> list[int]:
    return [int(i) for ids, _ in client.walk("small") for i in ids]


@pytest.mark.slow
def test_the_command_reshards_running_and_stopped_sets(tmp_path: Path) -> None:
    def clipper(*words: str) -> Any:
        done = CliRunner().invoke(main, ["params", *words, "--folder", str(tmp_path), "--json"])
        assert done.exit_code == 0, done.output
        return json.loads(done.output)

    with running(tmp_path, 1):
        client = Client(tmp_path, patience_s=PATIENCE_S)
        begin(client)
        client.push("counts", IDS, -ones((IDS.size, 2)))
        assert clipper("reshard", "--shards", "2")["phase"] == "done"
        assert clipper("ps")["resharding"] is None
        assert np.unique(client.pull("counts", IDS)).tolist() == [1]
        clipper("snapshot")
    assert reshard(tmp_path, 3)
    with running(tmp_path, 3), client:  # it has lived through both
        assert np.unique(client.pull("counts", IDS)).tolist() == [1]
        client.push("counts", IDS, -ones((IDS.size, 2)))
        assert np.unique(client.pull("counts", IDS)).tolist() == [2]


@pytest.mark.slow
def test_row_watchers_follow_a_resharded_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clipper.params.client.row_watcher.WAIT_S", 0.02)
    with running(tmp_path, 1), Client(tmp_path, patience_s=PATIENCE_S) as client:
        client.create(SPEC)
        watching = RowWatcher(tmp_path)
        try:
            cache = Cache(watching)
            before = cache.watch(2, 3)
            resharded(tmp_path, 2)
            until(lambda: before in cache.dropped)
            until(lambda: watching.knows)
            kept = [cache.watch(id) for id in (2, 3)]
            cache.settle()
            for id in (2, 3):  # one on each shard
                client.push(SPEC.name, [id], -ones((1, 2)))
            until(lambda: set(kept) <= set(cache.dropped))
        finally:
            watching.stop()
