"""Snapshots: `snapshots/version-V/shard-I-of-N/`, a file of pieces and a manifest with its
checksum.

A part is written under another name, flushed, and renamed when it is whole, so a torn one is never
used. The manifest holds the size and the checksum of the file, so a damaged one is noticed. Rows
are written beside pushes, then what changed meanwhile. The last changes, a megabyte as a rule, are
read while pushes are paused, together with the version and the pushes seen: a part is its shard as
it was at that moment. Deltas after a whole part have the rows that changed since, and the ids that
were removed.
"""

import contextlib
import json
import logging
import os
import re
import shutil
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from clipper.clock import wall_time_us
from clipper.component import Backoff, Health, Stop, Worker
from clipper.errors import AlreadyExists, ClipperError, StoreError
from clipper.params.shard.durability.disk_log import (
    DiskLog,
    check_other_sizes,
    log_files,
    remove_logs,
    with_log,
)
from clipper.params.shard.durability.recovery import Source, fsync_folder, write_atomically
from clipper.params.shard.parameters import DENSE, Ids, Piece
from clipper.params.shard.replication.followers import pushes_paused
from clipper_container.params.connection import call_once
from clipper_container.params.frames import packed, unpacked
from clipper_core.params.shard_loop import ShardLoop, each_once

if TYPE_CHECKING:
    from clipper.params.shard.shard import Shard

log = logging.getLogger("clipper.params")
FORMAT = 1
SLOT = 7  # follower number in the shard's log, for deltas
ROUNDS_MAX = 8
SLOW_ROUND = 2  # from this round on pushes are paused while a piece is read
SLOW_TURN = 32  # after so many reads pushes are paused for each
LAST_BYTES_MAX = 1 << 20  # read while pushes are paused: below a millisecond
WAITING_BYTES_MAX = 512 << 20  # changes in memory, not yet written
TURN_S = 0.005  # longest wait for a paused push to run
PAUSE_S = 0.0001
DRAINED_IDS = 1 << 16  # per read; a push waits some tens of microseconds for it
DIRTY_IDS_MAX = 1 << 22
SNAPSHOT_S = 600.0  # longest snapshot of another shard
AGAIN_S = 0.1  # after an error of the thread, doubling up to the next
AGAIN_S_MAX = 5.0
BLOCK = struct.Struct("<QII")  # size, crc32, unused
FILE, MANIFEST = "pieces.bin", "manifest.json"
_PART = re.compile(r"shard-(\d+)-of-(\d+)")
_VERSION = re.compile(r"version-(\d+)")
SnapshotCallback = Callable[[Piece | Exception], None]


class Part(NamedTuple):
    """One shard's part of a snapshot.

    base: number of the snapshot that it is a delta to; 0: it is whole. position: in the history of
    the shard (change_log); -1: unknown.
    """

    number: int
    shard: int
    shards: int
    folder: Path
    base: int
    epoch: int
    version: int
    rows: int
    nbytes: int
    crc: int
    created_us: int
    position: int = -1


class SnapshotSet(NamedTuple):
    """A snapshot of a set. complete: each shard has a part, and the parts that it is a delta to."""

    number: int
    shards: int
    parts: tuple[Part, ...]
    complete: bool


# -- reading


def part_of(folder: Path) -> Part | None:
    """Return the part in a folder; None if there is none, or a damaged one."""
    try:
        message = json.loads((folder / MANIFEST).read_bytes())
        checksum = message.pop("checksum")
        if (
            checksum != _checksum(message)
            or message["format"] != FORMAT
            or (folder / FILE).stat().st_size != message["nbytes"]
        ):
            return None
        message.setdefault("position", -1)  # snapshots of earlier releases have none
        return Part(
            folder=folder, **{key: int(message[key]) for key in Part._fields if key != "folder"}
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def folders_in(root: Path) -> Iterator[Path]:
    """Yield the folders of parts, damaged ones too.

    Other shards write and remove parts meanwhile; a folder that has been removed is skipped.
    """
    for version in entries_of(root):
        if _VERSION.fullmatch(version.name):
            yield from (part for part in entries_of(version) if _PART.fullmatch(part.name))


def entries_of(folder: Path) -> list[Path]:
    """Return the entries of a folder; none if it does not exist."""
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def parts_in(root: Path) -> list[Part]:
    """Return all parts with sound manifests, by number."""
    found = [part_of(folder) for folder in folders_in(root)]
    return sorted(part for part in found if part is not None)


def sets_in(root: Path) -> list[SnapshotSet]:
    """Return all snapshots, by number."""
    parts, grouped = parts_in(root), dict[tuple[int, int], list[Part]]()
    for part in parts:
        grouped.setdefault((part.number, part.shards), []).append(part)
    return [
        SnapshotSet(
            number,
            shards,
            tuple(some),
            len(some) == shards and all(chain_of(part, parts) for part in some),
        )
        for (number, shards), some in sorted(grouped.items())
    ]


def chain_of(part: Part, parts: Iterable[Part]) -> list[Part]:
    """Return a part and what it is a delta to, the whole one first; empty if one is missing."""
    by_number = {
        one.number: one for one in parts if (one.shard, one.shards) == (part.shard, part.shards)
    }
    chain = [part]
    while chain[0].base:
        before = by_number.get(chain[0].base)
        if before is None or before.number >= chain[0].number:
            return []
        chain.insert(0, before)
    return chain


def newest_of(parts: list[Part], shards: int) -> list[list[Part]]:
    """Return the newest chain of each shard of a set of this size; empty if one has none."""
    newest: dict[int, list[Part]] = {}
    for part in parts:
        if part.shards == shards and (chain := chain_of(part, parts)):
            newest[part.shard] = chain
    return [newest[shard] for shard in range(shards)] if len(newest) == shards else []


def pieces_of(part: Part) -> Iterator[Piece]:
    """Yield the pieces of one part. Raises StoreError for damaged data, OSError."""
    whole = 0
    with open(part.folder / FILE, "rb") as file:
        while head := file.read(BLOCK.size):
            try:
                size, crc, _ = BLOCK.unpack(head)
            except struct.error:
                raise StoreError(f"{file.name} ends within a block.") from None
            body = file.read(size) if size <= part.nbytes else b""
            if len(body) != size or zlib.crc32(body) != crc:
                raise StoreError(
                    f"{file.name} is spoiled: a block of {size} bytes has another checksum."
                )
            whole = zlib.crc32(head, whole)
            yield unpacked(body)
    if whole != part.crc:
        raise StoreError(f"{part.folder / FILE} is not the file that its manifest speaks of.")


def sources_of(root: Path, shard: int, shards: int) -> list[Source]:
    """Return the snapshots that a shard can recover from, newest first.

    They are its own parts, and the newest parts of sets of another size.
    """
    parts = parts_in(root)
    found = []
    for part in parts:
        chain = chain_of(part, parts)
        if (part.shard, part.shards) == (shard, shards) and chain:
            name = f"snapshot {part.number}"
            found.append(
                (
                    part.number,
                    Source(
                        part.epoch,
                        part.version,
                        name,
                        partial(pieces_in, chain),
                        False,
                        position=part.position,
                    ),
                )
            )
    for size in {part.shards for part in parts} - {shards}:
        chains = newest_of(parts, size)
        last = [chain[-1] for chain in chains]
        if last:
            number, epoch, version = (
                max(each)
                for each in zip(*((p.number, p.epoch, p.version) for p in last), strict=True)
            )
            found.append(
                (
                    number,
                    Source(
                        epoch,
                        version,
                        f"snapshot {number} of {size} shards",
                        partial(_every, chains),
                        True,
                    ),
                )
            )
    return [source for _, source in sorted(found, key=lambda one: one[0], reverse=True)]


def newest_position(root: Path, shard: int, shards: int) -> tuple[int, int]:
    """Return epoch and position of the newest snapshot of a shard; -1 and -1 if it has none."""
    parts = parts_in(root)
    for part in reversed(parts):
        if (part.shard, part.shards) == (shard, shards) and chain_of(part, parts):
            return part.epoch, part.position
    return -1, -1


def pieces_in(chain: list[Part]) -> Iterator[Piece]:
    """Return the pieces of a whole part and of its deltas, in order."""
    for part in chain:
        yield from pieces_of(part)


def _every(chains: list[list[Part]]) -> Iterator[Piece]:
    for chain in chains:
        yield from pieces_in(chain)


def _checksum(message: Piece) -> str:
    return sha256(json.dumps(message, sort_keys=True).encode()).hexdigest()


# -- writing


class PartWriter:
    """Writer of one part: add pieces, then finish; or abandon. Raises OSError, AlreadyExists.

    The part has its name only when it is finished.
    """

    def __init__(self, root: Path, number: int, shard: int, shards: int) -> None:
        version = root / f"version-{number:012d}"
        version.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.folder = version / f"shard-{shard}-of-{shards}"
        if self.folder.exists():
            raise AlreadyExists(
                f"{self.folder} is there already.", hint="Take a snapshot of a higher number."
            )
        self._status = {"format": FORMAT, "number": number, "shard": shard, "shards": shards}
        self._new = version / f".{self.folder.name}.{os.getpid()}"
        shutil.rmtree(self._new, ignore_errors=True)
        self._new.mkdir(mode=0o700)
        self._file = open(self._new / FILE, "wb", buffering=0)  # noqa: SIM115
        self._crc = self._rows = self.nbytes = 0

    def add(self, piece: Piece) -> None:
        """Write one piece."""
        body = packed(piece)
        head = BLOCK.pack(len(body), zlib.crc32(body), 0)
        for data in (head, body):
            rest = memoryview(data)
            while rest:
                rest = rest[self._file.write(rest) :]
        self._crc = zlib.crc32(head, self._crc)
        self.nbytes += len(head) + len(body)
        self._rows += sum(len(part["ids"]) for part in piece.get("rows", ()))

    def finish(self, **more: int) -> Part:
        """Write the manifest, and give the part its name. more: base, epoch, version, position."""
        os.fsync(self._file.fileno())
        self._file.close()
        message: Piece = {
            **self._status,
            **more,
            "rows": self._rows,
            "nbytes": self.nbytes,
            "crc": self._crc,
        }
        message["created_us"] = wall_time_us()
        write_atomically(
            self._new / MANIFEST,
            json.dumps({**message, "checksum": _checksum(message)}, indent=1).encode(),
        )
        os.rename(self._new, self.folder)
        fsync_folder(self.folder.parent)
        fsync_folder(self.folder.parent.parent)
        found = part_of(self.folder)
        if found is None:
            raise StoreError(f"{self.folder} cannot be read back.", hint="Is the disk sound?")
        return found

    def abandon(self) -> None:
        """Remove what was written."""
        self._file.close()
        shutil.rmtree(self._new, ignore_errors=True)


class Dirty:
    """Set of changed ids by table. Threads: one at a time."""

    def __init__(self) -> None:
        self._each: dict[int, list[Ids]] = {}
        self._count = 0

    def add(self, changed: Mapping[int, Ids]) -> None:
        """Add ids."""
        for number, ids in changed.items():
            self._each.setdefault(number, []).append(ids)
            self._count += ids.size
        if self._count > DIRTY_IDS_MAX:
            self._each = {number: [ids] for number, ids in self.take().items()}

    def take(self) -> dict[int, Ids]:
        """Return all ids, each once, and empty the set."""
        found = {number: each_once(np.concatenate(some)) for number, some in self._each.items()}
        self._each, self._count = {}, 0
        return found


@contextlib.contextmanager
def _slowed(core: ShardLoop, share: float) -> Iterator[None]:
    """Pause pushes for a block, then give them a share of its time."""
    with pushes_paused(core):
        began_s, position = time.monotonic(), core.position
        yield
        until_s = time.monotonic() + TURN_S
        took_s = time.monotonic() - began_s
    time.sleep(took_s * share)
    while core.position == position and time.monotonic() < until_s:
        time.sleep(PAUSE_S)


def _flush(pieces: list[Piece], writer: PartWriter) -> None:
    for piece in pieces:
        writer.add(piece)
    pieces.clear()


class Snapshots:
    """Takes the snapshots of one shard. Threads: its own; ask, stats: any.

    Shard 0 keeps the schedule of the set: it requests snapshots of all other shards, then its own.
    """

    def __init__(self, config: Any, shard: "Shard") -> None:
        self._config, self._shard, self.root = config, shard, config.folder.parent / "snapshots"
        settings = config.settings
        self.log = (
            DiskLog(shard, config.folder, config.shards, settings.log_bytes_max)
            if settings.durability == "disk"
            else None
        )
        self._requested: list[tuple[int, bool, SnapshotCallback]] = []
        self._due = threading.Condition()
        self._closed = False
        self._deltas = 0
        self._drops = 0  # as of the last part
        self._dirty = Dirty()
        self._follows = False
        self._last: Part | None = None
        self._status: Piece = {
            "taken": 0,
            "failed": 0,
            "last": 0,
            "at_us": 0,
            "nbytes": 0,
            "seconds": 0.0,
            "error": "",
        }
        self._worker = Worker(
            "clipper-shard-snapshots", self._run, once=True, again=Backoff(AGAIN_S, AGAIN_S_MAX)
        )

    def sources(self) -> list[Source]:
        """Return what this shard can recover from."""
        number, shards = self._config.number, self._config.shards
        mine = [
            part for part in parts_in(self.root) if (part.shard, part.shards) == (number, shards)
        ]
        if mine:
            self._status |= {
                "last": mine[-1].number,
                "at_us": mine[-1].created_us,
                "nbytes": mine[-1].nbytes,
            }
        return self._with_log(sources_of(self.root, number, shards))

    def _with_log(self, found: list[Source]) -> list[Source]:
        """Put the log on disk to the newest snapshot. Then, and if pushes are acknowledged when
        they are on disk, no older snapshot may take its place. Raises StoreError, OSError."""
        config, base = self._config, next((one for one in found if not one.others), None)
        check_other_sizes(config.folder.parent, config.shards, partial(newest_position, self.root))
        files = [one for one in log_files(config.folder) if one.shards == config.shards]
        whole = with_log(base, files)
        if whole is not None and whole is not base:
            return [whole]
        if base is None or config.settings.durability != "disk":
            return found
        name = f"shard-{config.number}-of-{config.shards}"
        newest = max(one for one in folders_in(self.root) if one.name == name)
        if part_of(newest) is None:
            raise StoreError(
                f"{newest} is damaged, and no older snapshot has all acknowledged pushes.",
                hint=f"Restore it, or run `mv {newest} {newest}.damaged` to do without them.",
            )
        return [base]

    def start(self) -> None:
        """Start the thread. Raises NotStarted."""
        self._worker.start()

    def close(self, *, last: bool) -> None:
        """End the thread. last: take one more snapshot, if something has changed."""
        with self._due:
            self._closed = True
            self._due.notify()
        if not self._worker.end(SNAPSHOT_S):  # it still writes: what it leaves is not whole
            last = False
        version = self._last.version if self._last else 0
        is_old = self._last is not None and self._last.position != self._shard.resync_log.position
        parameters = self._shard.parameters
        is_first = self._last is None and bool(parameters.specs or parameters.dense.initialized)
        if last and (self._shard.core.version != version or is_old or is_first):
            self._try(0, True, lambda answer: None)
        for _, _, on_done in self._requested:
            on_done(StoreError("the shard is ending."))

    def request(self, number: int, on_done: SnapshotCallback, *, whole: bool = False) -> None:
        """Have a snapshot taken. number: 0 for the next one.

        on_done: called by the snapshot thread with the result or the error.
        """
        with self._due:
            self._requested.append((number, whole, on_done))
            self._due.notify()

    def health(self) -> Health:
        """Return the state of the thread."""
        return self._worker.health()

    def stats(self) -> Piece:
        """Return statistics of the snapshots."""
        return dict(self._status)

    # -- its thread

    def _run(self, stop: Stop) -> None:
        every_s = self._config.settings.snapshot_s if self._config.number == 0 else 0.0
        next_s = time.monotonic() + every_s
        while True:
            with self._due:
                if not self._requested and not self._closed:
                    self._due.wait(max(0.0, next_s - time.monotonic()) if every_s else None)
                if self._closed:
                    return
                work = self._requested.pop(0) if self._requested else None
            if work is not None:
                self._try(*work)
            elif every_s and time.monotonic() >= next_s:
                next_s = time.monotonic() + every_s
                if not self._shard.core.access:
                    self._all()

    def _all(self) -> None:
        """Ask all other shards for a snapshot of one number; those that are away are skipped."""
        number, config = self._next(), self._config
        for shard in range(1, config.shards):
            try:
                with self._shard.connection(shard, SNAPSHOT_S) as connection:
                    call_once(connection, "snapshot", number=number)
            except (OSError, ClipperError) as error:
                log.warning("snapshot %d: %s", number, error)
        self._try(number, False, lambda answer: None)

    def _next(self) -> int:
        found = (_VERSION.fullmatch(folder.name) for folder in self.root.glob("version-*"))
        return 1 + max((int(one[1]) for one in found if one), default=0)

    def _try(self, number: int, whole: bool, on_done: SnapshotCallback) -> None:
        began_s = time.monotonic()
        try:
            part = self._take(number or self._next(), whole)
        except Exception as error:  # whoever waits for it is told of any
            expected = isinstance(error, OSError | ClipperError | MemoryError)
            log.warning(
                "shard %d has no snapshot: %s",
                self._config.number,
                error,
                exc_info=None if expected else error,
            )
            self._status |= {"failed": self._status["failed"] + 1, "error": str(error)}
            ours = isinstance(error, ClipperError)
            on_done(
                error
                if ours
                else StoreError(f"no snapshot: {error}.", hint="Those before it are as they were.")
            )
            return
        self._cut_log()
        self._last = part
        seconds = time.monotonic() - began_s
        message = {
            "number": part.number,
            "version": part.version,
            "rows": part.rows,
            "nbytes": part.nbytes,
            "base": part.base,
        }
        self._status |= {
            "taken": self._status["taken"] + 1,
            "last": part.number,
            "seconds": seconds,
            "error": "",
            "at_us": part.created_us,
            "nbytes": part.nbytes,
        }
        on_done({**message, "seconds": seconds})
        try:
            self._prune()
        except Exception:  # the next one tries again
            log.exception("shard %d does not remove old snapshots", self._config.number)

    def _cut_log(self) -> None:
        """Remove what the log on disk has of the time before the snapshot."""
        try:
            if self.log is not None:
                self.log.cut()
            else:
                remove_logs(self._config.folder)
        except Exception as error:  # the next snapshot tries again
            log.warning("shard %d does not cut its log: %s", self._config.number, error)

    def _take(self, number: int, whole: bool) -> Part:
        config, core, parameters = self._config, self._shard.core, self._shard.parameters
        most = config.settings.deltas_max
        base = self._last
        drops = parameters.drops
        if whole or base is None or not self._follows or self._deltas >= most:
            base = None
        if drops != self._drops:
            base = None  # no chain of parts has two tables in one place: another set may read it
        writer = PartWriter(self.root, number, config.number, config.shards)
        try:
            if base is None:
                core.follow(SLOT)
                self._dirty = Dirty()
                self._follows = True
                for piece in parameters.pieces():
                    writer.add(piece)
                    self._drain()
            self._catch_up(writer)
            if parameters.drops != drops:
                hint = "Take another one."
                raise StoreError("no snapshot: a table was dropped meanwhile.", hint=hint)
            part = writer.finish(
                base=base.number if base else 0,
                epoch=core.epoch,
                version=self._version,
                position=self._position,
            )
        except BaseException:
            writer.abandon()
            self._forget()
            raise
        self._deltas, self._drops = self._deltas + 1 if base else 0, drops
        if not most:
            self._forget()
        return part

    def _forget(self) -> None:
        """Keep no changes for a delta; the next snapshot is whole."""
        self._shard.core.unfollow(SLOT)
        self._follows = False

    def _catch_up(self, writer: PartWriter) -> None:
        """Write what has changed since; read the last of it while pushes are paused.

        A disk may be slower than the pushes that change rows again. Then changes are read into
        memory and written at the end, and pushes get less time in each round. Variables change with
        every step, so they are read last.
        """
        core, parameters = self._shard.core, self._shard.parameters
        stored, size, dense = list[Piece](), 0, dict[int, Ids]()
        for round_ in range(ROUNDS_MAX + 1):
            self._drain()
            changed = self._dirty.take()
            if round_ and DENSE in changed:
                dense[DENSE] = changed.pop(DENSE)
                self._dirty.add(dense)
            nbytes, slow = parameters.size_of(changed), round_ >= SLOW_ROUND
            if nbytes <= LAST_BYTES_MAX or round_ == ROUNDS_MAX:
                break
            size += nbytes if slow else 0
            stored.append(parameters.named())
            for chunk in parameters.chunks(changed, LAST_BYTES_MAX << min(round_, 2)):
                with _slowed(core, 0.1 ** (round_ - 1)) if slow else contextlib.nullcontext():
                    stored.append(parameters.of(chunk))
                if not slow or size > WAITING_BYTES_MAX:
                    _flush(stored, writer)
        with pushes_paused(core):
            self._drain(still=True)
            self._dirty.add(changed)
            self._version, self._position = core.version, self._shard.resync_log.position
            if self.log is not None:
                self.log.mark(self._position)
            last = parameters.of(self._dirty.take())
            piece = {
                **parameters.shape(),
                **last,
                "version": self._version,
                "seen": core.pushes_seen(),
                "position": self._position,
                "history": self._shard.resync_log.history.encode(),
            }
        _flush(stored, writer)
        writer.add(piece)

    def _drain(self, *, still: bool = False) -> None:
        """Take the changes from the log, some at a time, so that no push waits long. Raises
        StoreError.

        Pushes that come faster than their ids are taken are slowed. still: pushes are paused
        already.
        """
        core = self._shard.core
        until, position, turn = core.position, -1, 0
        while position < until:
            turn += 1
            with _slowed(core, 1.0) if turn > SLOW_TURN and not still else contextlib.nullcontext():
                found = core.changed(SLOT, DRAINED_IDS)
            if found is None:
                raise StoreError(
                    "too much changed meanwhile to keep count of it.",
                    hint="The next snapshot is a whole one.",
                )
            position = found[0]
            self._dirty.add(found[1])

    def _prune(self) -> None:
        """Remove parts older than the oldest whole part that is kept."""
        config = self._config
        mine = [
            part
            for part in parts_in(self.root)
            if (part.shard, part.shards) == (config.number, config.shards)
        ]
        whole = [part.number for part in mine if not part.base]
        oldest = (
            whole[-config.settings.snapshots_max :][:1]
            if len(whole) >= config.settings.snapshots_max
            else []
        )
        for folder in folders_in(self.root):
            version, part = _VERSION.fullmatch(folder.parent.name), _PART.fullmatch(folder.name)
            if not oldest or version is None or part is None or int(version[1]) >= oldest[0]:
                continue
            ours = int(part[1]) == config.number and int(part[2]) == config.shards
            if ours or (int(part[2]) != config.shards and config.number == 0):
                shutil.rmtree(folder, ignore_errors=True)
                try:
                    folder.parent.rmdir()
                except OSError:
                    continue  # it has parts of other shards
