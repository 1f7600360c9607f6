"""A write-ahead log of records that survives a crash; feedback is written here before its
acknowledgement.

A record is u32 length, u32 CRC-32 (of the length and the bytes), and the bytes. Records are
numbered from 1 and stored in segments, files named after their first record. A crash may leave an
incomplete record at the end of the last segment; it was never acknowledged, and opening removes it.
Damage anywhere else is not repaired: the rest of that segment is unreadable, `damaged` describes
it, and its record numbers are not reused.

Durability of a committed record by mode: `memory`, none; `os`, the kernel has it, so it survives a
kill of the process; `fsync`, the disk has it. Concurrent commits share one fsync (group commit).
After a failed fsync the journal refuses appends until the server restarts.

In mode `os` the end of the last segment is memory-mapped: an append is a copy into the page cache
without a system call (clipper_core.learning.label_feedback). The space is allocated before it is
mapped, so that a full disk is an error of the allocation and never a signal during a copy. Unused
space is truncated when the segment ends, or at the next start. The price: a process that truncates
the file kills the running server.
"""

import os
import re
import struct
import threading
import weakref
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Literal

from clipper.errors import Overloaded, StoreError
from clipper_core.learning.label_feedback import JournalEnd, framed

SEGMENT_BYTES: Final = 16 << 20
RECORD_BYTES_MAX: Final = 1 << 20
MAPPED_BYTES: Final = 512 << 10  # allocated at a time
_HEAD = struct.Struct("<II")
_SALT = 0xFFFFFFFF  # so that zeros are not a valid record

Mode = Literal["memory", "os", "fsync"]


class Journal:
    """A log of numbered records. Threads: any.

    folder: None keeps nothing (mode `memory`).  bytes_max: of all segments; beyond it an append
    raises Overloaded.
    Errors: StoreError when the disk fails, Overloaded when the journal is full.
    """

    def __init__(self, folder: Path | None, mode: Mode = "os", bytes_max: int = 1 << 30) -> None:
        self.mode: Mode = "memory" if folder is None else mode
        self.bytes_max = bytes_max
        self.damaged = ""
        self._folder = folder
        self._lock = threading.Lock()
        self._disk = threading.Lock()
        self._synced = 0  # number of the last record on disk
        # first record, file, bytes; of the last, bytes when it was opened
        self._segments: list[tuple[int, Path, int]] = []
        self._fd = -1
        self._failed = ""
        self.end = JournalEnd(self.mode != "memory")
        self._closed_bytes = 0  # of all segments but the last
        if self.mode != "memory":
            try:
                self._open()
            except OSError as error:
                raise StoreError(
                    f"the journal {folder} cannot be opened: {error.filename or 'its files'}:"
                    f" {error.strerror}.",
                    hint="Feedback that is not in the store yet is there: move away what is wrong.",
                ) from None
            ours = weakref.WeakMethod(self._detach_from_parent)
            os.register_at_fork(after_in_child=lambda: (method := ours()) and method())

    def _detach_from_parent(self) -> None:
        """Detach a forked child, which must not write to its parent's files."""
        self._lock, self._fd = threading.Lock(), -1
        self.end.unmap()

    # -- opening

    def _open(self) -> None:
        assert self._folder is not None
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path in _segments_in(self._folder):
            first = int(path.stem)
            if self._segments and first < self.end.next:
                raise StoreError(
                    f"the journal's segment {path} begins at {first}, before {self.end.next}."
                )
            count, good = _scan(path)
            self._segments.append((first, path, good))
            self.end.next = first + count + self._cut(path, good)
        self._synced = self.last
        self._continue()

    def _cut(self, path: Path, good: int) -> int:
        """Remove an incomplete record at the very end; report any other damage and keep it.

        Returns an upper bound of the record numbers in the unreadable part.
        """
        lost = path.stat().st_size - good
        if lost and path == _segments_in(path.parent)[-1] and not _has_later_record(path, good):
            os.truncate(path, good)
        elif lost:
            self.damaged = f"{path}: unreadable from byte {good} on"
            return lost // _HEAD.size + 1
        return 0

    def _continue(self, fresh: bool = False) -> None:
        """Append to the last segment, or to a new one."""
        assert self._folder is not None
        self._end_segment()
        if fresh or not self._segments or self._segments[-1][2] >= SEGMENT_BYTES or self.damaged:
            path = self._folder / f"{self.end.next:020d}.log"
            self._segments.append((self.end.next, path, 0))
        self._fd = os.open(self._segments[-1][1], os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.end.at = self._segments[-1][2]
        self._closed_bytes = sum(size for _, _, size in self._segments[:-1])

    def _end_segment(self) -> None:
        """Truncate the last segment to its records and close it."""
        fd, was_mapped = self._fd, self.end.mapped > 0
        if fd < 0:
            return
        self.end.unmap()
        first, path, _ = self._segments[-1]
        self._segments[-1] = (first, path, self.end.at)
        self._fd = -1
        if was_mapped:
            os.ftruncate(fd, self.end.at)
        os.close(fd)

    # -- appending

    def append(self, record: bytes) -> int:
        """Append a record and return its number.

        The record is durable as the mode says after `commit` of that number.
        """
        _check_size(len(record))
        return self.end.append(record) or self.append_framed(framed((record,)), 1)

    def append_many(self, records: Sequence[bytes]) -> int:
        """Append records in their order and return the number of the last."""
        if not records:
            return self.last
        _check_size(max(map(len, records)))
        return self.append_framed(framed(records), len(records))

    def append_framed(self, data: bytes, count: int) -> int:
        """Append `count` records, each with its head and not too long, and return the number of the
        last."""
        number = self.end.append_framed(data, count)
        if not number:
            with self._lock:
                self.end.room = 0  # until there is more, everybody waits here
                self._write(data, count)
                number = self.last
        return number

    def commit(self, upto: int) -> None:
        """Wait until the records up to a number are durable as the mode says."""
        if self.mode == "fsync":
            self._sync(upto)

    def skip_to(self, number: int) -> None:
        """Reserve all numbers up to this one, because others remember records that the disk has
        lost.
        """
        with self._lock:
            if number >= self.end.next:
                self.end.room, self.end.next = 0, number + 1
                if self._fd >= 0:
                    self._continue(fresh=True)

    def _write(self, data: bytes, count: int) -> None:
        if self._fd < 0:
            raise StoreError("the journal is closed.", hint="Restart the server.")
        if self._failed:
            raise StoreError(self._failed, hint="Check the disk, then restart the server.")
        if self.nbytes + len(data) > self.bytes_max:
            raise Overloaded(
                f"the journal holds {self.nbytes} of {self.bytes_max} bytes.",
                hint=(
                    "Its states are not written to the store fast enough; raise"
                    " feedback.journal_bytes_max."
                ),
            )
        if self.mode == "os":
            self._make_room(len(data))
        if not self.end.append_framed(data, count):
            self._write_all(data)
            self.end.at += len(data)
            self.end.next += count
        if self.end.at >= SEGMENT_BYTES:
            if self.mode == "fsync":
                os.fdatasync(self._fd)
            self._continue()

    def _make_room(self, nbytes: int) -> None:
        """Allocate and map space for an append; without a map, appends are written."""
        need = self.end.at + nbytes
        if self.end.mapped < need:
            self.end.unmap()
            more = max(need, min(need + MAPPED_BYTES, SEGMENT_BYTES))
            try:
                os.posix_fallocate(self._fd, 0, more)
                self.end.map(self._fd, more)
            except OSError:
                os.ftruncate(self._fd, self.end.at)
                return
        most = min(SEGMENT_BYTES - 1, self.bytes_max - self._closed_bytes)
        self.end.room = min(self.end.mapped, most)

    def _write_all(self, data: bytes) -> None:
        """Write all data or none: a full disk leaves no incomplete record before a later one."""
        view, at = memoryview(data), self.end.at
        try:
            while view:
                count = os.pwrite(self._fd, view, at)
                view, at = view[count:], at + count
        except OSError as error:
            os.ftruncate(self._fd, self.end.at)
            path = self._segments[-1][1]
            raise StoreError(
                f"cannot write the journal {path}: {error.strerror}.", hint="Free some disk."
            ) from None

    def _sync(self, last: int) -> None:
        with self._disk:
            if self._synced >= last:
                return
            with self._lock:
                upto, fd = self.last, os.dup(self._fd)
            try:
                if self._failed:
                    raise StoreError(self._failed, hint="Check the disk, then restart the server.")
                os.fdatasync(fd)
            # the kernel has dropped the data: a second fsync would wrongly succeed
            except OSError as error:
                self._failed = (
                    f"the journal in {self._folder} could not be synced: {error.strerror}."
                )
                raise StoreError(
                    self._failed, hint="Check the disk, then restart the server."
                ) from None
            finally:
                os.close(fd)
            self._synced = upto

    # -- reading and forgetting

    @property
    def last(self) -> int:
        """Number of the newest record; 0 if there never was one."""
        return self.end.next - 1

    @property
    def nbytes(self) -> int:
        """Bytes of all segments."""
        return self._closed_bytes + self.end.at

    def replay(self, after: int = 0) -> Iterator[tuple[int, bytes]]:
        """Yield (number, record) of the stored records after number `after`."""
        with self._lock:
            segments, end = list(self._segments), self.end.at
        for place, (first, path, opened) in enumerate(segments):
            number, size = first, end if place == len(segments) - 1 else opened
            for record in _records(path.read_bytes()[:size]):
                if number > after:
                    yield number, record
                number += 1

    def forget(self, upto: int) -> None:
        """Delete the segments whose records all have numbers up to `upto`."""
        with self._lock:
            while len(self._segments) > 1 and self._segments[1][0] <= upto + 1:
                _, path, size = self._segments.pop(0)
                self._closed_bytes -= size
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the last segment."""
        with self._lock:
            self._end_segment()


def read_journal(folder: Path) -> Iterator[bytes]:
    """Yield the sound records of a journal, oldest first, and change nothing.

    Another process may append meanwhile; what it appends may or may not be seen.
    """
    for path in _segments_in(folder):
        yield from _records(path.read_bytes())


def _check_size(nbytes: int) -> None:
    if nbytes > RECORD_BYTES_MAX:
        raise StoreError(f"a record of {nbytes} bytes: at most {RECORD_BYTES_MAX} are possible.")


def _records(data: bytes, at: int = 0) -> Iterator[bytes]:
    """Yield the valid records from offset `at` to the first invalid one."""
    while at + _HEAD.size <= len(data):
        size, crc = _HEAD.unpack_from(data, at)
        if size > len(data) - at - _HEAD.size:
            return
        record = data[at + _HEAD.size : at + _HEAD.size + size]
        if zlib.crc32(record, _SALT ^ size) != crc:
            return
        yield record
        at += _HEAD.size + size


def _segments_in(folder: Path) -> list[Path]:
    """Return the segments of the journal in order; other files in the folder are ignored."""
    return sorted(path for path in folder.glob("*.log") if re.fullmatch("[0-9]{20}", path.stem))


def _scan(path: Path) -> tuple[int, int]:
    """Return the number of valid records and their size in bytes."""
    count = good = 0
    for record in _records(path.read_bytes()):
        count += 1
        good += _HEAD.size + len(record)
    return count, good


def _has_later_record(path: Path, good: int) -> bool:
    """Return True if a valid record follows the first invalid byte: then it is damage, not a torn
    end.
    """
    data = path.read_bytes()
    end = len(data.rstrip(b"\0"))  # zeros: allocated and not used
    return any(next(_records(data, at), b"") for at in range(good + 1, end))
