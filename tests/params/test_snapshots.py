"""Snapshots: what is read back is what was written, with any number of shards; incomplete or
damaged snapshots are refused."""

import contextlib
import errno
import json
import queue
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipper.errors import AlreadyExists, StoreError
from clipper.params import Client, TableSpec
from clipper.params.shard.durability import snapshots
from clipper.params.shard.durability.recovery import (
    SEQUENCES,
    EpochFile,
    Recovered,
    Source,
    merge_windows,
    recover,
)
from clipper.params.shard.durability.snapshots import FILE, MANIFEST, part_of, parts_in, sets_in
from clipper.params.shard.parameters import Parameters
from clipper_core.params.shard_loop import ShardLoop
from tests.params.conftest import Shards, full, ones, zeros
from tests.threads import join

TABLES = (
    TableSpec("users", 5, optimizer="adam"),
    TableSpec("items", 3, optimizer="momentum", admit_after=2),
)


def train_tables(client: Client, seed: int, *, count: int = 12) -> None:
    draw = np.random.default_rng(seed)
    for spec in TABLES:
        client.create(spec)
    client.push_model({f"w{i}": full(i + 1, i, np.float32) for i in range(5)}, optimizer="adagrad")
    for _ in range(count):
        for spec in TABLES:
            ids = draw.integers(-40, 40, 20)
            client.push(spec.name, ids, draw.standard_normal((20, spec.dim)))
        client.push_gradients(
            {f"w{i}": draw.standard_normal(i + 1).astype(np.float32) for i in range(5)}
        )


def all_of(shards: Shards) -> dict[Any, Any]:
    """Return each row and variable of all shards with its state, by table and id."""
    found: dict[Any, Any] = {}
    for server in shards.servers.values():
        parameters = server.shard.parameters
        for spec, table in zip(parameters.specs, parameters.tables, strict=True):
            position: int | None = 0
            while position is not None:
                ids, rows, stamps, position = table.walk(position)
                found |= {
                    (spec.name, int(i)): (row.tobytes(), int(at))
                    for i, row, at in zip(ids, rows, stamps, strict=True)
                }
        for said in parameters.dense.read(range(len(parameters.dense))):
            found[said["name"]] = (said["value"].tobytes(), said["state"].tobytes(), said["steps"])
    return found


def versions(shards: Shards) -> list[int]:
    return [shards.servers[i].shard.core.version for i in sorted(shards.servers)]


def test_a_shard_is_restored_from_its_snapshot(shards: Shards) -> None:
    client = shards.up(2).client()
    train_tables(client, 1)
    before, version = all_of(shards), versions(shards)
    seen = [server.shard.core.pushes_seen() for server in shards.servers.values()]
    shards.down()
    shards.up(2)
    assert all_of(shards) == before
    assert versions(shards) == version
    assert [
        {w: s[16:] for w, s in server.shard.core.pushes_seen().items()}
        for server in shards.servers.values()
    ] == [{w: s[16:] for w, s in one.items()} for one in seen]
    assert [server.shard.recovery[1] for server in shards.servers.values()] == [
        "snapshot 1",
        "snapshot 2",
    ]
    assert [t.steps for t in shards.servers[0].shard.parameters.tables] == [12, 12]
    train_tables(client, 2)
    assert versions(shards)[0] > version[0]


@pytest.mark.parametrize("now", [1, 2, 5])
def test_a_set_is_restored_at_any_number_of_shards(shards: Shards, now: int) -> None:
    client = shards.up(3).client()
    train_tables(client, 3)
    client.call(1, "snapshot")
    train_tables(client, 4)
    before, version = all_of(shards), max(versions(shards))
    shards.down()
    shards.up(now)
    assert all_of(shards) == before
    assert versions(shards) == [version] * now
    again = shards.client()
    train_tables(again, 5)
    for shard, server in shards.servers.items():
        for table in server.shard.parameters.tables:
            assert (np.mod(table.walk(0, 1000)[0], now) == shard).all(), "each row is on one shard"


def test_a_delta_has_changed_and_removed_rows(shards: Shards) -> None:
    client = shards.up(1, deltas_max=2).client()
    train_tables(client, 6)
    shard = shards.servers[0].shard
    first = client.call(0, "snapshot")
    client.push("users", [1000, 1001], ones((2, 5)))
    removed = shard.parameters.tables[0].walk(0, 100)[0][:3]
    shard.parameters.tables[0].remove(removed)
    shard.core.note(0, removed)
    client.push_gradients({"w4": ones(5)})
    second = client.call(0, "snapshot")
    assert (first["base"], second["base"]) == (0, first["number"])
    assert second["rows"] == 2
    third = client.call(0, "snapshot")
    assert third["base"] == second["number"]
    assert client.call(0, "snapshot")["base"] == 0, "two deltas, then a whole one"
    before = all_of(shards)
    assert ("users", int(removed[0])) not in before
    root = shards.root / "snapshots"
    shutil.rmtree(root / "version-000000000004")
    shards.lose(0)
    shards.up(1)
    assert shards.servers[0].shard.recovery[1] == "snapshot 3"
    assert all_of(shards) == before


def test_a_small_delta_is_one_chunk(shards: Shards) -> None:
    """The delta is read in one step, so no push waits for further rounds."""
    client = shards.up(1, deltas_max=2).client()
    train_tables(client, 6)
    client.call(0, "snapshot")
    client.push("users", [1000, 1001], ones((2, 5)))
    client.call(0, "snapshot")
    whole, delta = sorted(parts_in(shards.root / "snapshots"), key=lambda part: part.number)
    assert (whole.base, delta.base) == (0, whole.number)
    assert len([*snapshots.pieces_of(delta)]) == 1


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_evicted_rows_are_in_no_delta(shards: Shards, mode: str) -> None:
    """Rows are pushed by the core and by a call; replicas and what is read back have exactly the
    same rows."""
    client = shards.up(2, replicas=1, deltas_max=9, mode=mode).client()
    client.create(TableSpec("few", 2, rows_max=40, evicts=True))
    client.push_model({"w": zeros(1)})
    draw, before = np.random.default_rng(12), {}
    for turn in range(5):
        for _ in range(10):
            ids = draw.integers(-300, 300, 30)
            if mode == "async":
                client.push("few", ids, draw.standard_normal((30, 2)))
            rows = {"few": (ids, draw.standard_normal((30, 2)))}
            client.push_gradients({"w": ones(1)}, rows, versions=client.pull_variables()[0])
        said = [client.call(shard, "snapshot", number=turn + 1) for shard in range(2)]
        assert [one["base"] for one in said] == [turn] * 2
        before = all_of(shards)
    assert len(before) == 2 * 40 + 1
    for of, server in shards.servers.items():
        copy = shards.servers[1 - of].shard.copies[of].replica
        table = server.shard.parameters.tables[0]
        ids, rows, _, _ = table.walk(0, 1000)
        assert copy is not None
        theirs = copy.parameters.tables[0]
        assert len(theirs) == len(table) == 40
        assert (theirs.read(ids)[1] == rows).all()
    shards.down(snapshot=False)
    shards.up(2)
    assert {one.shard.recovery[1] for one in shards.servers.values()} == {"snapshot 5"}
    assert all_of(shards) == before
    shards.down(snapshot=False)
    shards.up(1)
    assert len(shards.servers[0].shard.parameters.tables[0]) == 40, (
        "one shard has room for the rows of one"
    )


def test_old_snapshots_are_deleted_except_those_that_deltas_need(shards: Shards) -> None:
    client = shards.up(2, snapshots_max=2, deltas_max=1).client()
    train_tables(client, 7, count=1)
    for number in range(1, 9):
        for shard in range(2):
            client.call(shard, "snapshot", number=number)
    found = sets_in(shards.root / "snapshots")
    assert [one.number for one in found] == [5, 6, 7, 8]
    assert all(one.complete for one in found)
    assert [one.parts[0].base for one in found] == [0, 5, 0, 7]


def torn(folder: Path) -> None:
    whole = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(whole[:-9])


def spoiled(folder: Path) -> None:
    whole = bytearray((folder / FILE).read_bytes())
    whole[len(whole) // 2] ^= 4
    (folder / FILE).write_bytes(whole)


def of_another(folder: Path) -> None:
    said = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**said, "version": said["version"] + 5}))


def unfinished(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def empty(folder: Path) -> None:
    (folder / MANIFEST).write_text("")


@pytest.mark.parametrize("harm", [torn, spoiled, of_another, unfinished, empty])
def test_a_damaged_snapshot_is_not_used(shards: Shards, harm: Any) -> None:
    client = shards.up(1, deltas_max=0).client()
    train_tables(client, 8)
    client.call(0, "snapshot")
    before = all_of(shards)
    train_tables(client, 9)
    client.call(0, "snapshot")
    shards.lose(0)
    harm(sorted(shards.root.glob("snapshots/version-*/shard-*"))[-1])
    shards.up(1)
    assert shards.servers[0].shard.recovery[1] == "snapshot 1"
    assert all_of(shards) == before


def test_a_full_disk_keeps_earlier_snapshots(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = shards.up(1).client()
    train_tables(client, 10)
    client.call(0, "snapshot")
    first = all_of(shards)
    add = snapshots.PartWriter.add
    write_atomically = 0

    def no_room(self: snapshots.PartWriter, piece: Any) -> None:
        nonlocal write_atomically
        write_atomically += 1
        if write_atomically == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        add(self, piece)

    monkeypatch.setattr(snapshots.PartWriter, "add", no_room)
    for whole in (True, False):
        write_atomically = 1 if not whole else 0
        with pytest.raises(StoreError, match="No space left"):
            client.call(0, "snapshot", whole=whole)
    said = client.call(0, "stats")["snapshots"]
    assert (said["failed"], said["taken"]) == (2, 1)
    assert sorted(path.name for path in shards.root.glob("snapshots/*/*")) == ["shard-0-of-1"], (
        "no half of one is left"
    )
    train_tables(client, 11)
    monkeypatch.undo()
    assert client.call(0, "snapshot")["base"] == 0, "what was lost count of is not left out"
    latest = all_of(shards)
    assert latest != first
    shards.lose(0)
    shards.up(1)
    assert all_of(shards) == latest


def test_a_snapshot_is_consistent(shards: Shards) -> None:
    """Two workers push to the same rows of two tables meanwhile: each row of the snapshot has
    exactly the pushes that the snapshot states."""
    shards.up(1, deltas_max=3, snapshots_max=9)
    clients = [shards.client(worker=k + 1) for k in range(2)]
    for name in ("a", "b"):
        clients[0].create(TableSpec(name, 2, optimizer="sgd", initializer="zeros"))
    clients[0].push_model({"w": zeros(2)}, optimizer="sgd")
    ids, stop = np.arange(3000), threading.Event()

    def work(client: Client) -> None:
        while not stop.is_set():
            gradients = full((3000, 2), -100, np.float32)
            client.push_gradients(
                {"w": full(2, -100)}, {"a": (ids, gradients), "b": (ids, gradients)}
            )
            client.push("a", ids, gradients)

    threads = [threading.Thread(target=work, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    asks, written = shards.client(), 0
    try:
        for _ in range(100):
            if written == 10:
                break
            with contextlib.suppress(StoreError):  # too much changed; the next one is a whole one
                asks.call(0, "snapshot")
                written += 1
    finally:
        stop.set()
        for thread in threads:
            join(thread)
    shards.lose(0)
    parts = parts_in(shards.root / "snapshots")
    assert len(parts) == 10
    for source in snapshots.sources_of(shards.root / "snapshots", 0, 1):
        restored, core = Parameters(), ShardLoop()
        for piece in source.read():
            restored.take(piece)
            for worker, window in piece.get("seen", {}).items():
                core.saw(worker, window)
        pushes = {
            worker: SEQUENCES.unpack(window)[0] for worker, window in core.pushes_seen().items()
        }
        models = sum((n + 1) // 2 for n in pushes.values())
        alone = sum(n // 2 for n in pushes.values())
        assert source.version - 1 == models + alone
        rate = float(restored.dense.variables[0].value[0]) / models if models else 0.0
        for number, count in ((0, models + alone), (1, models)):
            rows = restored.tables[number].pull(ids)
            assert np.allclose(rows, rate * count, rtol=1e-4), (source.name, number)


def test_a_second_process_of_one_shard_is_refused(tmp_path: Path) -> None:
    first = EpochFile(tmp_path / "shard-0")
    with pytest.raises(AlreadyExists, match="another process"):
        EpochFile(tmp_path / "shard-0")
    first.write(4)
    first.close()
    again = EpochFile(tmp_path / "shard-0")
    assert again.last == 4
    (tmp_path / "shard-0" / "epoch").write_text("")
    with pytest.raises(StoreError, match="epoch"):
        _ = again.last
    again.close()


def test_sequences_of_applied_pushes_are_merged() -> None:
    draw = np.random.default_rng(5)
    for _ in range(50):
        loops, sets = [ShardLoop(), ShardLoop()], [set[int](), set[int]()]
        for core, seen in zip(loops, sets, strict=True):
            for one in draw.integers(1, 3000, int(draw.integers(0, 200))).tolist():
                if core.look(1, one) == 0:
                    core.note(0, [], 1, one)
                    seen.add(one)
        windows = [core.pushes_seen().get(1) for core in loops]
        if windows[0] is None or windows[1] is None:
            continue
        both = ShardLoop()
        both.saw(1, merge_windows(windows[0], windows[1]))
        high = max(max(seen) for seen in sets)
        for one in range(1, high + 1):
            assert both.look(1, one) == (2 if high - one >= 1024 else int(one in sets[0] | sets[1]))


def test_a_snapshot_part_has_one_writer(tmp_path: Path) -> None:
    first = snapshots.PartWriter(tmp_path, 1, 0, 1)
    first.add({"tables": []})
    part = first.finish(base=0, epoch=1, version=2)
    assert part_of(part.folder) == part
    with pytest.raises(AlreadyExists):
        snapshots.PartWriter(tmp_path, 1, 0, 1)


def source(epoch: int, version: int, name: str, error: Exception | None = None) -> Source:
    def read() -> list[dict[str, Any]]:
        if error is not None:
            raise error
        return [{"version": version}]

    return Source(epoch, version, name, read, False)


def recovered(folder: Path, *sources: Source) -> Recovered:
    epochs = EpochFile(folder)
    try:
        return recover(0, 1, [], epochs, sources, patience_s=0.0, stopping=lambda: False)
    finally:
        epochs.close()


def test_recovery_prefers_a_later_epoch_to_a_higher_version(tmp_path: Path) -> None:
    old, new = source(1, 90, "old"), source(2, 50, "new")
    found = recovered(tmp_path, old, new)
    assert (found.source, found.version, found.epoch) == ("new", 50, 3)
    spoiled = source(7, 99, "spoiled", StoreError("its checksum is another"))
    found = recovered(tmp_path, old, spoiled, new)
    assert (found.source, found.epoch) == ("new", 8)


def test_a_shard_that_can_read_no_source_does_not_start_empty(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="can read none of them"):
        recovered(tmp_path, source(1, 5, "torn", OSError(5, "Input/output error")))


def test_each_start_has_a_higher_epoch(tmp_path: Path) -> None:
    assert [recovered(tmp_path).epoch for _ in range(4)] == [1, 2, 3, 4]


def test_an_unexpected_error_of_a_snapshot_is_told_and_the_next_one_is_taken(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log on disk that is full waits for a snapshot: its thread must not end without a word."""
    shards.up(1, durability="disk", recover_s=0.0)
    snapshots: Any = shards.servers[0].shard.snapshots
    known, errors = snapshots._take, [KeyError("injected"), RuntimeError("injected")]

    def take(*words: Any) -> Any:
        if errors:
            raise errors.pop()
        return known(*words)

    monkeypatch.setattr(snapshots, "_take", take)
    monkeypatch.setattr(snapshots, "_prune", lambda: 1 / 0)
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for _ in range(3):
        snapshots.request(0, answers.put, whole=True)
    found = [answers.get(timeout=20) for _ in range(3)]
    assert [isinstance(one, StoreError) for one in found] == [True, True, False]
    snapshots.request(0, answers.put, whole=True)
    assert "number" in answers.get(timeout=20)
