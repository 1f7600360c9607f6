"""Decoys: what the models of an application saw, on disk, for a replay.

A query's thread packs the input and puts it into a bounded queue; one thread writes. When the disk
does not keep up, records are dropped and counted: a decoy delays nobody. Files are a ring: a
segment that is full is closed, and the oldest goes when all of them would be more than `bytes_max`.
A record is its length, its CRC-32 and a msgpack array; an array in it carries numpy's dtype and
shape. The answer comes later than the input and is a record of its own, joined when they are read;
a torn tail ends a segment.
"""

import logging
import queue
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from clipper.clock import wall_time_us
from clipper.component import Backoff, Health, Stop, Worker
from clipper.errors import NotStarted, StoreError
from clipper.serving.feedback.journal_records import packed, unpacked
from clipper.serving.rollout.roles import Role
from clipper.types import UserValue
from clipper_core.learning.answer_counts import Bucket

_log = logging.getLogger(__name__)
_HEAD = struct.Struct("<II")  # bytes of the record, their CRC-32
_SEGMENTS = 4
_WAITING_MAX = 4096  # records
_BYTES_MAX = 64 << 20  # of those
_SPREAD = 0.6180339887


class Recorded(msgspec.Struct, frozen=True, eq=False):
    """One recorded query. time_us: since 1970. answer: its output, if `answered`, with
    a mark for a default. request_id: the caller's `id`.
    """

    id: str
    time_us: int
    input: UserValue
    user: str = ""
    answer: UserValue = None
    answered: bool = False
    is_default: bool = False
    request_id: str = ""


class _Saw(msgspec.Struct, array_like=True, tag="saw"):
    id: str
    time_us: int
    user: str
    input: UserValue
    request_id: str = ""


class _Reply(msgspec.Struct, array_like=True, tag="said"):
    id: str
    output: UserValue
    is_default: bool


def _plain(value: object) -> object:
    if hasattr(value, "__array__") and not isinstance(value, np.generic):
        value = np.asarray(value)
    if isinstance(value, np.ndarray) and value.dtype.kind not in "biuf":
        raise TypeError(f"no record holds an array of {value.dtype}")
    return packed(value)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
_DECODER = msgspec.msgpack.Decoder(_Saw | _Reply, ext_hook=unpacked)


class Decoy:
    """One application's recorder. Threads: any."""

    __slots__ = ("_bucket", "_clock", "_writer", "name", "role", "seen")

    def __init__(
        self, name: str, role: Role, writer: "Segments", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name, self.role = name, role
        self._writer, self._clock = writer, clock
        rate = role.rate_max
        self._bucket = None if rate == float("inf") else Bucket(rate, 1.0 + rate / 10, clock())

    def takes(self, number: int) -> bool:
        """Return whether the query of that number is recorded; the recorded ones are spread
        evenly.
        """
        return self.role.share >= 1.0 or (number * _SPREAD) % 1.0 < self.role.share

    def saw(self, number: int, id: str, x: object, user: str, request_id: str = "") -> None:
        """Record a query, if it is in the share and within the rate."""
        if not self.takes(number):
            return
        if self._bucket is not None and not self._bucket.take(self._clock()):
            self._writer.over_budget += 1
            return
        self._writer.put(_Saw(id, wall_time_us(), user, x, request_id))

    def add_reply(self, number: int, id: str, output: object, is_default: bool) -> None:
        """Record the answer of a query; ignored for a query that was not recorded."""
        if self.takes(number):
            self._writer.put(_Reply(id, output, is_default))

    def stats(self) -> dict[str, int]:
        """Return counters of the decoy."""
        return self._writer.stats()


class Segments:
    """A ring of files in one folder, and the queue before it. Threads: any; `write` one at a
    time."""

    def __init__(self, folder: Path, bytes_max: int, ring: "Recorder") -> None:
        self.folder, self.bytes_max = folder, bytes_max
        self._ring = ring
        self._file: BinaryIO | None = None
        self._used = 0
        self.written = self.dropped = self.over_budget = 0

    def put(self, record: _Saw | _Reply) -> None:
        """Queue a record; drop it if the queue is full or it cannot be encoded."""
        try:
            body = _ENCODER.encode(record)
        except (
            TypeError,
            ValueError,
            OverflowError,
            msgspec.MsgspecError,
        ):  # an input that no record holds
            self.dropped += 1
            return
        if len(body) + _HEAD.size > self.bytes_max // _SEGMENTS or not self._ring.put(self, body):
            self.dropped += 1

    def write(self, body: bytes) -> None:
        """Append a record to the current segment."""
        record = _HEAD.pack(len(body), zlib.crc32(body)) + body
        try:
            if self._file is None or self._used + len(record) > self.bytes_max // _SEGMENTS:
                self._file = self._next_segment()
            self._file.write(record)
            self._used += len(record)
            self.written += 1
        except OSError as error:
            if not self.dropped:
                _log.warning("a decoy cannot write to %s: %s", self.folder, error)
            self.dropped += 1

    def _next_segment(self) -> BinaryIO:
        self.close()
        self.folder.mkdir(parents=True, exist_ok=True)
        there = segments_of(self.folder)
        number = int(there[-1].stem) + 1 if there else 1
        for old in there[: max(0, len(there) - _SEGMENTS + 1)]:
            old.unlink(missing_ok=True)
        self._used = 0
        return open(self.folder / f"{number:012}.records", "xb", buffering=0)  # until the next

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def stats(self) -> dict[str, int]:
        """Return counters of the ring."""
        return {"written": self.written, "dropped": self.dropped, "over_budget": self.over_budget}


class Recorder:
    """The thread that writes for all decoys of a server; it starts with the first record. Threads:
    any."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._queue: queue.SimpleQueue[tuple[Segments, bytes] | threading.Event | None] = (
            queue.SimpleQueue()
        )
        self._bytes = 0  # that wait; a guess, as threads add to it at once
        self._lock = threading.Lock()
        self._rings: dict[tuple[str, str], Segments] = {}
        self._worker: Worker | None = None
        self._closed = False

    def decoy(self, application: str, name: str, role: Role) -> Decoy:
        """Return the decoy of an application, made at first use."""
        with self._lock:
            ring = self._rings.get((application, name))
            if ring is None:
                ring = self._rings[application, name] = Segments(
                    self._place(application) / name, role.bytes_max, self
                )
            ring.bytes_max = role.bytes_max
        return Decoy(name, role, ring)

    def _place(self, application: str) -> Path:
        return self._folder / application

    def put(self, ring: Segments, body: bytes) -> bool:
        """Queue a record to be written. Return False if there is no room."""
        if (
            self._queue.qsize() >= _WAITING_MAX
            or self._bytes + len(body) > _BYTES_MAX
            or self._closed
        ):
            return False
        self._bytes += len(body)
        self._queue.put((ring, body))
        if self._worker is None:
            self._start()
        return True

    def _start(self) -> None:
        with self._lock:
            if self._worker is None and not self._closed:
                worker = Worker("clipper-recorder", self._run, again=Backoff(0.1, 5.0))
                try:
                    worker.start()
                except NotStarted as error:  # the next record tries again
                    _log.error("decoys are not written yet: %s", error)
                    return
                self._worker = worker

    def health(self) -> list[Health]:
        """Return the state of the thread, if there is one."""
        worker = self._worker
        return [] if worker is None else [worker.health()]

    def _run(self, stop: Stop) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            ring, body = item
            self._bytes -= len(body)
            ring.write(body)

    def flush(self) -> None:
        """Wait until everything that was put before is written."""
        if self._worker is not None:
            written = threading.Event()
            self._queue.put(written)
            written.wait(10.0)

    def recorded(self, application: str) -> Iterator[Recorded]:
        """Iterate over the records of an application's decoys that the ring still holds, oldest
        first per decoy. Raises StoreError when they cannot be read.
        """
        self.flush()
        place = self._place(application)
        for folder in sorted(place.iterdir()) if place.is_dir() else ():
            yield from read_folder(folder)

    def close(self) -> None:
        """Write what waits. Idempotent."""
        with self._lock:
            self._closed = True
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.request_stop()
            self._queue.put(None)
            worker.end()
        for ring in self._rings.values():
            ring.close()


def segments_of(folder: Path) -> list[Path]:
    """Return the segments of a folder, oldest first."""
    return sorted(folder.glob("*.records"))


def read_folder(folder: Path) -> Iterator[Recorded]:
    """Yield what a folder has recorded. Answers come after their inputs, in the same segment or the
    next, so there are two passes, and only ids of answers are held."""
    answers: dict[str, _Reply] = {}
    for path in segments_of(folder):
        answers |= {record.id: record for record in _records(path) if isinstance(record, _Reply)}
    for path in segments_of(folder):
        for record in _records(path):
            if isinstance(record, _Saw):
                answer = answers.get(record.id)
                more = (
                    {"answer": answer.output, "answered": True, "is_default": answer.is_default}
                    if answer
                    else {}
                )
                yield Recorded(
                    record.id,
                    record.time_us,
                    record.input,
                    record.user,
                    request_id=record.request_id,
                    **more,
                )


def _records(path: Path) -> Iterator[_Saw | _Reply]:
    """Yield the records up to the first that is torn or damaged."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:  # the ring went on meanwhile
        return
    except OSError as error:
        raise StoreError(f"cannot read the records of {path}: {error.strerror}.") from None
    at = 0
    while at + _HEAD.size <= len(data):
        size, crc = _HEAD.unpack_from(data, at)
        body = data[at + _HEAD.size : at + _HEAD.size + size]
        if len(body) < size or zlib.crc32(body) != crc:
            return
        try:
            yield _DECODER.decode(body)
        except (msgspec.MsgspecError, ValueError):
            return
        at += _HEAD.size + size
