"""Log of one shard on disk: what makes an acknowledged push survive the death of the process when
`params.durability` is `disk`.

The log is a follower of the shard that is waited for. One thread takes all that has changed, writes
it as one record, syncs the file once, and acknowledges the position; pushes that came meanwhile
make the next record (group commit). A record has whole rows with their state, the pushes that were
seen, and the version, as they were at one moment, so it can be applied after the snapshot that
precedes it, and twice does no harm.

A file holds records of one life of the shard: `changes-EPOCH-POSITION-of-SHARDS.log`. A snapshot
begins a new file at the moment that it is of, and removes the files before it when it is whole. A
record is synced before the next one is written, so a crash can spoil the last record alone: it was
not acknowledged, and is cut off. Anything else that is damaged is refused.

Source: group commit as in Gray and Reuter, Transaction Processing, section 9.4, and PostgreSQL's
write-ahead log, whose records hold pages where these hold rows.
"""

import contextlib
import itertools
import logging
import mmap
import os
import re
import select
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from clipper.component import Health, Stop, Worker
from clipper.errors import StoreError
from clipper.params.shard.durability.recovery import Recovered, Source, fsync_folder
from clipper.params.shard.parameters import Ids, Piece
from clipper.params.shard.replication.change_log import History
from clipper.params.shard.replication.followers import note_pushes, pushes_paused
from clipper.settings.params import LOG_FULL
from clipper.spec.table import TableSpec
from clipper_container.params.frames import packed, unpacked
from clipper_core.params.shard_loop import ShardLoop

if TYPE_CHECKING:
    from clipper.params.shard.shard import Shard

log = logging.getLogger("clipper.params")
END_S = 60.0  # for a sync that is under way when the shard ends
SLOT = 10  # follower number in the shard's log
# Fields: magic, crc32 of what follows it, flags, unused, size, epoch, start, position, version.
RECORD = struct.Struct("<4sIIIQQQQQ")
MAGIC, CRC_END = b"CLPL", 8
MORE, EMPTY = 1, 2  # flags: the next record belongs to it; the shard was empty before it
BODY_BYTES = 64 << 20  # of rows in one record; more of one moment are several
IDLE_S = 0.5  # between two looks, if nothing changes
RETRY_S = 0.5  # after a write that failed
_NAME = re.compile(r"changes-(\d+)-(\d+)-of-(\d+)\.log")


class LogFile(NamedTuple):
    """A file of the log. epoch, position: where it begins. shards: size of the set then."""

    epoch: int
    position: int
    shards: int
    path: Path


class LogRecord(NamedTuple):
    """A whole record. at, end: bytes in its file. start, position: the changes after the first, up
    to the second."""

    path: Path
    at: int
    end: int
    flags: int
    epoch: int
    start: int
    position: int
    version: int

    def piece(self) -> Piece:
        """Read what it says. Raises OSError."""
        with open(self.path, "rb") as file:
            file.seek(self.at + RECORD.size)
            found: Piece = unpacked(file.read(self.end - self.at - RECORD.size))
        return found


# -- reading


def log_files(folder: Path) -> list[LogFile]:
    """Return the files of the log in a shard's folder, in the order of their making."""
    found = ((path, _NAME.fullmatch(path.name)) for path in folder.glob("changes-*.log"))
    return sorted(LogFile(int(n[1]), int(n[2]), int(n[3]), path) for path, n in found if n)


def records_in(path: Path) -> tuple[list[LogRecord], int, int]:
    """Return (the records of a file up to the first that is not whole, the bytes up to there, the
    bytes of the file).

    Raises StoreError if a whole record comes after one that is not; OSError.
    """
    size = path.stat().st_size
    if not size:
        return [], 0, 0
    found: list[LogRecord] = []
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = 0
        while (one := _record_at(path, data, at)) is not None:
            found.append(one)
            at = one.end
        after = data.find(MAGIC, at + 1)
        while after >= 0:
            if _record_at(path, data, after) is not None:
                raise _damaged(path, f"is damaged at byte {at}, and whole records follow")
            after = data.find(MAGIC, after + 1)
    while found and found[-1].flags & MORE:  # the rest of its moment is not there
        at = found.pop().at
    return found, at, size


def _record_at(path: Path, data: mmap.mmap, at: int) -> LogRecord | None:
    if at + RECORD.size > len(data):
        return None
    magic, crc, flags, _, size, *rest = RECORD.unpack_from(data, at)
    end = at + RECORD.size + size
    if magic != MAGIC or end > len(data):
        return None
    with memoryview(data) as view, view[at + CRC_END : end] as what:
        if zlib.crc32(what) != crc:
            return None
    return LogRecord(path, at, end, flags, *rest)


def _damaged(path: Path, what: str) -> StoreError:
    return StoreError(
        f"the log {path} {what}: pushes that were acknowledged are in it.",
        hint=f"Restore the file from a copy. To start from the last snapshot without these pushes, "
        f"run `mv {path} {path}.damaged`, and `clipper params up` again.",
    )


def cut_torn_end(path: Path) -> list[LogRecord]:
    """Return the records of the last file of a log, and cut off what follows them: one record that
    was never acknowledged. Raises StoreError, OSError."""
    found, end, size = records_in(path)
    if end < size:
        log.warning("%s: %d bytes of a record that was not finished are cut off", path, size - end)
        with open(path, "r+b") as file:
            file.truncate(end)
            os.fsync(file.fileno())
    return found


def records_after(files: list[LogFile], epoch: int, position: int) -> tuple[list[LogRecord], bool]:
    """Return (the records to apply to a state of that epoch and position, whether to apply them to
    nothing instead). -1: there is no such state.

    The last file is cut where a crash has torn it. Raises StoreError for a log that is damaged, or
    does not follow that state; OSError.
    """
    found: list[LogRecord] = []
    from_nothing = False
    for file in files:
        if file is files[-1]:
            records = cut_torn_end(file.path)
        else:
            records, end, size = records_in(file.path)
            if end < size:
                raise _damaged(file.path, f"is damaged at byte {end}")
        for one in records:
            if one.epoch < epoch or (one.epoch == epoch and one.position <= position):
                continue
            if one.flags & EMPTY and one.epoch > epoch:
                found, from_nothing, position = [], True, one.start
            follows = one.start <= position if one.epoch == epoch else one.start == position
            if not follows:
                raise _damaged(
                    one.path, f"begins at change {one.start}, and {position} is the last before it"
                )
            found.append(one)
            if not one.flags & MORE:
                epoch, position = one.epoch, one.position
    return found, from_nothing


def with_log(base: Source | None, files: list[LogFile]) -> Source | None:
    """Return the source that has a snapshot and the records after it; `base` if there are none.

    Raises StoreError, OSError: see `records_after`.
    """
    records, from_nothing = records_after(
        files, base.epoch if base else -1, base.position if base else -1
    )
    if not records:
        return base
    last, before = records[-1], None if from_nothing else base
    return Source(
        last.epoch,
        last.version,
        f"{before.name} and {len(records)} records of its log" if before else "its log",
        lambda: _pieces(before.read() if before else (), records),
        False,
        position=last.position,
        history=before.history if before else History(),
    )


def _pieces(before: Iterable[Piece], records: list[LogRecord]) -> Iterator[Piece]:
    seen = ShardLoop()
    for piece in itertools.chain(before, (one.piece() for one in records)):
        note_pushes(seen, piece)
        yield piece
    yield {"seen": seen.pushes_seen()}


def check_other_sizes(
    root: Path, shards: int, known: Callable[[int, int], tuple[int, int]]
) -> None:
    """Raise StoreError if a log of a set of another size has changes that no snapshot has.

    root: folder of the set. known: by (shard, shards), epoch and position of its newest snapshot.
    """
    for folder in sorted(root.glob("shard-*")):
        number = folder.name.removeprefix("shard-")
        files = [one for one in log_files(folder) if one.shards != shards]
        for size in {one.shards for one in files} if number.isdecimal() else ():
            mine = [one for one in files if one.shards == size]
            if records_after(mine, *known(int(number), size))[0]:
                raise StoreError(
                    f"{mine[-1].path} has changes of a set of {size} shards that no snapshot has.",
                    hint=f"Run `clipper params up --shards {size} --folder {root}` and end it with"
                    " Ctrl-C, which takes a snapshot; then change the number of shards.",
                )


# -- writing


class DiskLog:
    """Writes the log of one shard. Threads: its own; `mark`, the one that holds pushes; `cut` and
    `stats`, any.

    folder: of the shard. shards: size of the set. bytes_max: size at which a snapshot is taken, so
    that the log can be cut; at LOG_FULL times that size pushes wait for the snapshot.
    """

    def __init__(self, shard: "Shard", folder: Path, shards: int, bytes_max: int) -> None:
        self._shard, self._folder, self._shards, self._bytes_max = shard, folder, shards, bytes_max
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._guard = threading.Lock()
        self._changed = threading.Event()  # a snapshot was taken, or failed
        self._file = -1
        self._path = folder
        self._end = 0  # bytes of the file that are synced
        self._taken = 0  # position of the last record
        self._needs_snapshot = self._empty = self._snapshot_requested = False
        self._marks = 0  # snapshots that were begun
        self._file_marks = -1  # how many there were when the file was begun
        self._marked: tuple[int, int] | None = None  # (marks, position) of the last one
        self._marks_of: dict[Path, int] = {}
        self._specs: tuple[list[TableSpec], list[TableSpec], list[int]] = ([], [], [])
        self._stats: Piece = {"records": 0, "pushes": 0, "nbytes": 0, "seconds": 0.0, "error": ""}
        self._worker = Worker("clipper-shard-log", self._run, once=True, vital=True)

    def start(self, found: Recovered) -> None:
        """Have pushes wait for the log from now on. Threads: the answering one, before the shard
        serves. found: what it starts with."""
        self._follow()
        self._empty = found.is_new
        self._needs_snapshot = not (found.is_new or found.on_disk)
        self._stats["nbytes"] = sum(one.path.stat().st_size for one in log_files(self._folder))
        self._worker.start()

    def _follow(self) -> None:
        core = self._shard.core
        with pushes_paused(core):
            core.follow(SLOT, waited=True)
            core.sleep_at(SLOT, -1)
            self._taken = core.position

    def close(self) -> None:
        """End the thread."""
        self._worker.request_stop()
        self._changed.set()
        os.eventfd_write(self._wake, 1)
        if self._worker.is_started:
            if not self._worker.end(END_S):  # a disk that hangs: it still uses the file
                return
            self._shard.core.sleep_at(SLOT, -1)
        if self._file >= 0:
            os.close(self._file)
        os.close(self._wake)
        self._file = self._wake = -1

    def health(self) -> Health:
        """Return the state of the thread; without it no push is acknowledged."""
        return self._worker.health()

    def stats(self) -> Piece:
        """Return the records and pushes written since the start, the seconds that this took, the
        bytes of all files, and the last error."""
        with self._guard:
            return dict(self._stats)

    # -- snapshots

    def mark(self, position: int) -> None:
        """Begin a new file with the next record: a snapshot is of this moment."""
        self._marks += 1
        self._marked = (self._marks, position)

    def cut(self) -> None:
        """Remove the files before the last mark: the snapshot of that moment is whole."""
        if self._marked is None:
            return
        marks, position = self._marked
        core = self._shard.core
        core.acknowledge(SLOT, position - self._shard.resync_log.position_of(0))
        with self._guard:
            for one in log_files(self._folder):
                if self._marks_of.get(one.path, 0) < marks:
                    self._stats["nbytes"] -= one.path.stat().st_size
                    one.path.unlink()
                    self._marks_of.pop(one.path, None)
        fsync_folder(self._folder)
        self._changed.set()

    # -- the thread

    def _run(self, stop: Stop) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        try:
            while not self._worker.stop.requested:
                if self._needs_snapshot:
                    self._take_snapshot()
                elif self._stats["nbytes"] > self._bytes_max:
                    self._request_cut()
                if not self._needs_snapshot and not self._commit():
                    if self._shard.core.sleep_at(SLOT, self._wake):
                        poll.poll(IDLE_S * 1000)
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
        except Exception as error:
            self._stats["error"] = str(error)
            log.exception("shard %d cannot write its log", self._shard.config.number)
            self._shard.post(partial(_fail, StoreError(f"the log in {self._folder}: {error}.")))

    def _take_snapshot(self) -> None:
        """Take a whole snapshot, since the log does not follow what is on disk."""
        done, failed = threading.Event(), list[Exception]()

        def on_done(answer: Piece | Exception) -> None:
            if isinstance(answer, Exception):
                failed.append(answer)
            done.set()

        self._shard.snapshots.request(0, on_done, whole=True)
        while not done.wait(IDLE_S) and not self._worker.stop.requested:
            pass
        if failed:
            self._stats["error"] = str(failed[0])
            self._worker.stop.wait(RETRY_S)
        elif done.is_set():
            self._needs_snapshot = False

    def _request_cut(self) -> None:
        """Have a snapshot taken; wait for it if the log is too large."""

        def on_done(_: Piece | Exception) -> None:
            self._snapshot_requested = False
            self._changed.set()

        self._changed.clear()
        if not self._snapshot_requested:
            self._snapshot_requested = True
            self._shard.snapshots.request(0, on_done)
        while self._stats["nbytes"] > LOG_FULL * self._bytes_max and self._snapshot_requested:
            self._stats["error"] = "pushes wait for a snapshot: the log is full"
            self._changed.wait(RETRY_S)
            if self._worker.stop.requested:
                return

    def _commit(self) -> bool:
        """Write and sync what has changed. Return whether something has."""
        shard, core = self._shard, self._shard.core
        with pushes_paused(core):
            found = core.changed(SLOT)
            if found is not None and found[0] == self._taken:
                return False
            if found is not None:
                position, version, marks = found[0], core.version, self._marks
                pieces = list(self._pieces(found[1], found[2], marks != self._file_marks))
        if found is None:  # more has changed than the core keeps count of
            self._follow()
            self._needs_snapshot = True
            return True
        of = shard.resync_log.position_of
        start, end = of(self._taken), of(position)
        data: list[bytes] = []
        for i, piece in enumerate(pieces):
            body = packed(piece)
            flags = (MORE if i + 1 < len(pieces) else 0) | (EMPTY if self._empty else 0)
            head = RECORD.pack(MAGIC, 0, flags, 0, len(body), core.epoch, start, end, version)
            crc = zlib.crc32(body, zlib.crc32(head[CRC_END:]))
            data += [head[:4] + crc.to_bytes(4, "little") + head[CRC_END:], body]
        began_s = time.monotonic()
        if not self._write(data, start, marks):
            return True
        with self._guard:
            self._stats["records"] += 1
            self._stats["pushes"] += len(found[2])
            self._stats["seconds"] += time.monotonic() - began_s
            self._stats["error"] = ""
        self._taken, self._empty = position, False
        core.acknowledge(SLOT, position)
        if core.python_waits:
            shard.post(_nothing)  # calls are answered by another thread
        return True

    def _pieces(
        self, changed: dict[int, Ids], pairs: list[tuple[int, int]], begins: bool
    ) -> Iterator[Piece]:
        parameters = self._shard.parameters
        specs = (parameters.specs[:], parameters.created[:], parameters.table_numbers[:])
        shape = parameters.shape(tables=begins or specs != self._specs)
        self._specs = specs
        version = self._shard.core.version
        first = {**shape, "version": version, "told": [n for pair in pairs for n in pair]}
        if begins:
            first["history"] = self._shard.resync_log.history.encode()
        if parameters.size_of(changed) <= BODY_BYTES:
            yield {**first, **parameters.of(changed)}
        else:
            yield first
            for chunk in parameters.chunks(changed, BODY_BYTES):
                yield parameters.of(chunk)

    def _write(self, data: list[bytes], start: int, marks: int) -> bool:
        """Append and sync; a write that fails is tried again, until the end. Return whether it is
        done. Raises OSError if it cannot be known what is on disk."""
        while True:
            try:
                if marks != self._file_marks:
                    self._open(start, marks)
                _write_all(self._file, data)
                break
            except OSError as error:
                self._stats["error"] = str(error)
                log.warning("%s: %s; pushes wait", self._path, error)
                if self._file >= 0 and marks == self._file_marks:
                    os.ftruncate(self._file, self._end)
                if self._worker.stop.wait(RETRY_S):
                    return False
        os.fdatasync(self._file)
        size = sum(map(len, data))
        self._end += size
        with self._guard:
            self._stats["nbytes"] += size
        return True

    def _open(self, start: int, marks: int) -> None:
        epoch = self._shard.core.epoch
        path = self._folder / f"changes-{epoch:012d}-{start:020d}-of-{self._shards}.log"
        with self._guard:  # before the file is there, so that `cut` does not take it for an old one
            self._marks_of[path] = marks
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        file = os.open(path, flags, 0o600)
        fsync_folder(self._folder)
        if self._file >= 0:
            os.close(self._file)
        self._file, self._path, self._file_marks, self._end = file, path, marks, 0


def remove_logs(folder: Path) -> None:
    """Remove all files of a shard's log: a snapshot of a later life is whole."""
    for one in log_files(folder):
        one.path.unlink()


def _write_all(file: int, data: list[bytes]) -> None:
    for each in data:
        rest = memoryview(each)
        while rest:
            rest = rest[os.write(file, rest) :]


def _fail(error: StoreError) -> None:
    raise error


def _nothing() -> None:
    """Do nothing: wakes a thread."""
