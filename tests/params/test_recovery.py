"""The files by which a shard knows whether it had state, and how often it was started; and how it
requests changes from a copy."""

import os
import stat
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clipper.errors import AlreadyExists, StoreError
from clipper.params.shard.durability import recovery
from clipper.params.shard.durability.recovery import EpochFile, StateMark, write_atomically
from clipper.params.shard.replication.followers import ReplicaFollower


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_files_of_a_shard_are_its_owners(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        StateMark(tmp_path).set()
        EpochFile(tmp_path).close()
        EpochFile(tmp_path / "new").close()
    finally:
        os.umask(before)
    assert [mode(tmp_path / name) for name in ("has-state", "lock", "new")] == [0o600, 0o600, 0o700]


def test_a_state_mark_persists_until_it_is_cleared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mark = StateMark(tmp_path)
    assert not mark.is_set
    for _ in range(2):
        mark.set()
        assert (mark.is_set, StateMark(tmp_path).is_set) == (True, True)
    for _ in range(2):
        mark.clear()
        assert (mark.is_set, StateMark(tmp_path).is_set) == (False, False)
    assert not caplog.records
    nowhere = StateMark(tmp_path / "none")
    nowhere.set()
    assert (nowhere.is_set, len(caplog.records)) == (False, 1)
    without = StateMark(None)
    without.set()
    without.clear()
    assert not without.is_set


def test_an_epoch_file_has_one_owner_at_a_time(tmp_path: Path) -> None:
    one = EpochFile(tmp_path)
    assert one.last == 0
    one.write(7)
    assert one.last == 7
    with pytest.raises(AlreadyExists, match=f"runs the shard in {tmp_path}"):
        EpochFile(tmp_path)
    one.close()
    one.close()
    again = EpochFile(tmp_path)
    assert again.last == 7
    (tmp_path / "epoch").write_text("seven")
    with pytest.raises(StoreError, match="epoch"):
        _ = again.last
    again.close()
    without = EpochFile(None)
    without.write(3)
    without.close()
    assert without.last == 0


def test_an_epoch_is_written_in_place_where_a_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    one = EpochFile(tmp_path)
    one.write(8)
    monkeypatch.setattr(recovery, "write_atomically", full)
    one.write(9)
    assert (one.last, "in place" in caplog.text) == (9, True)
    monkeypatch.setattr(recovery, "overwrite", full)
    with pytest.raises(StoreError, match="No space left"):
        one.write(10)
    assert one.last == 9
    one.close()


def test_a_file_that_cannot_be_replaced_is_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(5, "I/O error")))
    with pytest.raises(OSError, match="I/O error"):
        write_atomically(path, b"new")
    assert (path.read_bytes(), [one.name for one in tmp_path.iterdir()]) == (b"old", ["file"])


def test_changes_are_requested_in_chunks_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def call_once(connection: object, call: str, **words: Any) -> tuple[None, dict[str, Any]]:
        calls.append({"to": connection, "call": call, **words})
        number = words["cursor"][0]
        return None, {"number": number, "next": number + 1 if number < 3 else None}

    monkeypatch.setattr(recovery, "call_once", call_once)
    message = {"shape": {"specs": [1]}, "seen": b"s", "version": 5, "rest": 0}
    connection: Any = "copy"
    first, *pieces = recovery._changes_since(4, connection, message, 17)
    assert first == {"specs": [1], "seen": b"s", "version": 5}
    assert [piece["number"] for piece in pieces] == [0, 1, 2, 3]
    words = {"to": "copy", "call": "get_replica", "shard": 4, "since": 17}
    assert calls == [{**words, "cursor": [number, 0]} for number in range(4)]


@pytest.mark.parametrize("differs", [True, False])
def test_only_the_changes_since_a_snapshot_on_disk_are_copied(
    differs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Read(Exception):
        """Raised when the whole source is read."""

    def read() -> Any:
        raise Read

    made: Any = SimpleNamespace(parameters="rows")
    older = recovery.Source(3, 8, "snapshot", read, False, position=4)
    newer = recovery.Source(3, 9, "replica", read, False, copy_in=1, position=6)
    monkeypatch.setattr(recovery, "_find_copy", lambda *_: [])
    monkeypatch.setattr(recovery, "_claimed", lambda *_: [newer])
    monkeypatch.setattr(recovery, "_base_of", lambda source, older: older[0])

    def difference(base: object, source: object, epoch: int) -> Any:
        assert (base, source, epoch) == (older, newer, 4)
        if not differs:
            raise ValueError("torn")
        return made

    monkeypatch.setattr(recovery, "_difference", difference)
    settled: list[tuple[Any, ...]] = []
    epochs = EpochFile(tmp_path)

    def found() -> object:
        return recovery.recover(
            0,
            2,
            [],
            epochs,
            [older],
            patience_s=0.0,
            stopping=lambda: False,
            settle=lambda *words: settled.append(words),
        )

    if differs:
        assert found() is made
        assert (settled, caplog.text) == ([("rows", 3, 6)], "")
    else:
        with pytest.raises(Read):
            found()
        assert "copies all of replica: torn" in caplog.text
    assert epochs.last == 4
    epochs.close()


@pytest.mark.parametrize(
    ("before", "saved", "after"),
    [(None, "saved", "saved"), ("newer", "saved", "newer"), (None, None, None)],
)
def test_a_follower_starts_with_the_copy_on_its_disk(
    before: str | None, saved: str | None, after: str | None
) -> None:
    follower: Any = SimpleNamespace(
        of=1, _whole=before, _lock=threading.Lock(), _load=lambda: saved
    )
    ReplicaFollower.load(follower)
    assert follower._whole == after


def test_an_unreadable_copy_is_ignored_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    def load() -> str:
        raise OSError("the disk is gone")

    follower: Any = SimpleNamespace(of=7, _whole="newer", _lock=threading.Lock(), _load=load)
    ReplicaFollower.load(follower)
    assert follower._whole == "newer"
    assert "shard 7 is not used: the disk is gone" in caplog.text
