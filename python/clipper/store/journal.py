"""A log of records that survives a crash: feedback is in here before it is acknowledged.

A record is u32 length, u32 CRC-32 (of the length and the bytes), and the bytes. Records are numbered from 1. They lie in
segments, files named for their first record. A crash may leave half a record at the end of the last segment: it was
never acknowledged, and opening cuts it off. Damage anywhere else is not repaired: what follows it in that segment is not
readable, `damaged` says so, and the numbers it may have had are not given out again.

How sure a committed record is: `memory` nothing is written; `os` the kernel has it, so it survives a kill of the process; `fsync`
the disk has it. Those who commit together share one fsync (group commit): the first asks, the others of that moment are covered
by the next one.
"""

import os
import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Literal

from clipper.errors import Overloaded, StoreError

SEGMENT_BYTES: Final = 16 << 20
RECORD_BYTES_MAX: Final = 1 << 20
_HEAD = struct.Struct("<II")

Mode = Literal["memory", "os", "fsync"]


class Journal:
    """Threads: any. Records are appended, read again from any number on, and forgotten from the front.

    folder: None keeps nothing (mode `memory`).  bytes_max: of all segments; an append beyond it is refused with Overloaded.
    Errors: StoreError for a disk that fails, Overloaded when full.
    """

    def __init__(self, folder: Path | None, mode: Mode = "os", bytes_max: int = 1 << 30) -> None:
        self.mode: Mode = "memory" if folder is None else mode
        self.bytes_max = bytes_max
        self.damaged = ""
        self._folder = folder
        self._lock = threading.Lock()
        self._disk = threading.Lock()
        self._synced = 0  # records that the disk has
        self._segments: list[tuple[int, Path, int]] = []  # first record, file, bytes
        self._next = 1
        self._fd = -1
        if self.mode != "memory":
            self._open()

    # -- opening

    def _open(self) -> None:
        assert self._folder is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(self._folder.glob("*.log")):
            first = int(path.stem)
            if self._segments and first < self._next:
                raise StoreError(f"the journal's segment {path} begins at {first}, before {self._next}.")
            count, good = _scan(path)
            self._segments.append((first, path, good))
            self._next = first + count + self._cut(path, good)
        self._synced = self._next - 1
        self._continue()

    def _cut(self, path: Path, good: int) -> int:
        """Half a record at the very end was never acknowledged; anything else is damage, and is kept for a person to see.
        -> how many numbers may have been given out in what is unreadable."""
        lost = path.stat().st_size - good
        if lost and path == max(path.parent.glob("*.log")) and not _more_behind(path, good):
            os.truncate(path, good)
        elif lost:
            self.damaged = f"{path}: unreadable from byte {good} on"
            return lost // _HEAD.size + 1
        return 0

    def _continue(self, fresh: bool = False) -> None:
        """Append to the last segment, or to a new one."""
        assert self._folder is not None
        if fresh or not self._segments or self._segments[-1][2] >= SEGMENT_BYTES or self.damaged:
            path = self._folder / f"{self._next:020d}.log"
            self._segments.append((self._next, path, 0))
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        fd, self._fd = self._fd, os.open(self._segments[-1][1], flags, 0o600)
        if fd >= 0:
            os.close(fd)

    # -- appending

    def append(self, record: bytes) -> int:
        """-> the record's number. It is as sure as the mode says once `commit` of that number has returned."""
        return self.append_many((record,))

    def append_many(self, records: Sequence[bytes]) -> int:
        """Append all, in their order; -> the number of the last."""
        with self._lock:
            last = self._next + len(records) - 1
            if self.mode != "memory" and records:
                self._write(records)
            self._next = last + 1
        return last

    def commit(self, upto: int) -> None:
        """Wait until the records up to that number are as sure as the mode says."""
        if self.mode == "fsync":
            self._sync(upto)

    def skip_to(self, number: int) -> None:
        """Give out no number up to this one: somebody remembers records that the disk has lost."""
        with self._lock:
            if number >= self._next:
                self._next = number + 1
                if self._fd >= 0:
                    self._continue(fresh=True)

    def _write(self, records: Sequence[bytes]) -> None:
        if self._fd < 0:
            raise StoreError("the journal is closed.", hint="Start the server again.")
        if (longest := max(map(len, records))) > RECORD_BYTES_MAX:
            raise StoreError(f"a record of {longest} bytes: at most {RECORD_BYTES_MAX} are possible.")
        data = b"".join([part for record in records for part in (_head(record), record)])
        if self.nbytes + len(data) > self.bytes_max:
            raise Overloaded(
                f"the journal holds {self.nbytes} of {self.bytes_max} bytes.",
                hint="Its states are not written to the store fast enough; raise limits.journal_bytes_max.",
            )
        first, path, size = self._segments[-1]
        self._write_all(data, path, size)
        self._segments[-1] = (first, path, size + len(data))
        if size + len(data) >= SEGMENT_BYTES:
            if self.mode == "fsync":
                os.fdatasync(self._fd)
            self._next += len(records)
            self._continue()
            self._next -= len(records)

    def _write_all(self, data: bytes, path: Path, size: int) -> None:
        """Wholly, or not at all: a full disk leaves no half record that a later one would follow."""
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            os.truncate(path, size)
            raise StoreError(f"cannot write the journal {path}: {error.strerror}.", hint="Free some disk.") from None

    def _sync(self, last: int) -> None:
        with self._disk:
            if self._synced >= last:
                return
            with self._lock:
                upto, fd = self._next - 1, os.dup(self._fd)
            try:
                os.fdatasync(fd)
            finally:
                os.close(fd)
            self._synced = upto

    # -- reading and forgetting

    @property
    def last(self) -> int:
        """Number of the newest record; 0 when there was none ever."""
        return self._next - 1

    @property
    def nbytes(self) -> int:
        return sum(size for _, _, size in self._segments)

    def replay(self, after: int = 0) -> Iterator[tuple[int, bytes]]:
        """(number, record) of all records behind number `after` that are still there."""
        for first, path, size in list(self._segments):
            number = first
            for record in _records(path.read_bytes()[:size]):
                if number > after:
                    yield number, record
                number += 1

    def forget(self, upto: int) -> None:
        """Records up to that number are not needed any more; whole segments of such are deleted."""
        with self._lock:
            while len(self._segments) > 1 and self._segments[1][0] <= upto + 1:
                _, path, _ = self._segments.pop(0)
                path.unlink(missing_ok=True)

    def close(self) -> None:
        with self._lock:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)


def _head(record: bytes) -> bytes:
    size = len(record)
    return _HEAD.pack(size, zlib.crc32(record, size))


def _records(data: bytes) -> Iterator[bytes]:
    """The sound records at the start of `data`."""
    at = 0
    while at + _HEAD.size <= len(data):
        size, crc = _HEAD.unpack_from(data, at)
        record = data[at + _HEAD.size : at + _HEAD.size + size]
        if len(record) < size or zlib.crc32(record, size) != crc:
            return
        yield record
        at += _HEAD.size + size


def _scan(path: Path) -> tuple[int, int]:
    """-> how many sound records, in how many bytes."""
    count = good = 0
    for record in _records(path.read_bytes()):
        count += 1
        good += _HEAD.size + len(record)
    return count, good


def _more_behind(path: Path, good: int) -> bool:
    """Whether a sound record lies somewhere behind the first unsound byte: then it is damage, not a torn end."""
    data = path.read_bytes()[good:]
    return any(next(_records(data[at:]), b"") for at in range(1, max(1, len(data) - _HEAD.size)))
