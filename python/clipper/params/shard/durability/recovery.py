"""Recovery: how a shard starts again, with the newest of what its replicas and snapshots have.

A shard starts under a higher epoch than any before it. "Newest" is by (epoch, version). A snapshot
of an earlier epoch is older than a replica of a later one, even if its version is higher, since the
pushes between the two belong to a past that was given up. If a replica is the newest, and the shard
has a snapshot of its own, only the changes since the snapshot are read from the replica.

A shard that finds nothing starts empty if it never had anything. If it had, it waits for
`begin_anew`, so that nobody takes trained rows for untrained ones.
"""

import errno
import logging
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from clipper.errors import AlreadyExists, ClipperError, StoreError
from clipper.params.partition import shard_of_name
from clipper.params.shard.parameters import Cursor, Ids, Parameters, Piece
from clipper.params.shard.replication.change_log import History, ids_in, union
from clipper.params.shard.replication.followers import Origin
from clipper.state_dir import lock_file
from clipper_container.params.connection import ShardConnection, call_once

log = logging.getLogger("clipper.params")
PAUSE_S = 0.02
WINDOW = 1024  # remembered pushes of a worker
SEQUENCES = struct.Struct("<QQ16Q")


class StateMark:
    """File in a shard's folder that says that the shard has had a table or a variable. Threads:
    one.

    A shard that finds the file, and neither replica nor snapshot, has lost its state. folder: None
    keeps no file.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = folder / "has-state" if folder is not None else None
        self._is_set = self._path is not None and self._path.exists()

    @property
    def is_set(self) -> bool:
        """Tell whether the shard has had state."""
        return self._is_set

    def set(self) -> None:
        """Create the file. A failure is logged."""
        if self._path is None or self._is_set:
            return
        try:
            self._path.touch(0o600)
            fsync_folder(self._path.parent)
            self._is_set = True
        except OSError as error:
            log.warning(
                "%s: %s; a loss of all that this shard has would not be noticed", self._path, error
            )

    def clear(self) -> None:
        """Remove the file."""
        self._is_set = False
        if self._path is not None:
            self._path.unlink(missing_ok=True)


class Recovered(NamedTuple):
    """The state that a shard starts with.

    source: description for the log. is_new: nothing of an earlier life was found. origin: the copy
    that has the same rows. history, position: where the new epoch begins. changed: ids that changed
    since the position `first`, for followers that come back. on_disk: it is the newest that this
    shard's own snapshots and log have.
    """

    parameters: Parameters
    version: int
    seen: dict[int, bytes]
    epoch: int
    source: str
    is_new: bool = False
    origin: Origin | None = None
    history: History = History()
    position: int = 0
    first: int = 0
    changed: Mapping[int, Ids] = MappingProxyType({})
    on_disk: bool = False


class Source(NamedTuple):
    """A replica or snapshot to recover from.

    read: yields its pieces; raises OSError, ClipperError. others: it is of a set with another
    number of shards, and has rows of other shards. copy_in: the shard that has the replica; -1: a
    snapshot. position, history, first: how far it has come, and from which position on its changes
    are known; -1: unknown. since: yields the pieces that have changed since a position.
    """

    epoch: int
    version: int
    name: str
    read: Callable[[], Iterable[Piece]]
    others: bool
    copy_in: int = -1
    position: int = -1
    history: History = History()
    first: int = -1
    since: Callable[[int], Iterable[Piece]] | None = None

    def reaches(self, base: "Source") -> bool:
        """Return whether this replica knows what has changed since the state of `base`."""
        return (
            self.since is not None
            and 0 <= self.first <= base.position <= self.position
            and self.history.contains(base.epoch, base.position)
        )


class EpochFile:
    """The epoch of a shard, and the lock that makes one process at a time be the shard.

    folder: None keeps nothing. Raises AlreadyExists.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._lock = folder, -1
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        taken = f"another process runs the shard in {folder}."
        self._lock = lock_file(folder / "lock", AlreadyExists(taken, hint="End it first."))

    @property
    def last(self) -> int:
        """The last epoch; 0 if there was none. Raises StoreError."""
        if self._folder is None:
            return 0
        try:
            return int((self._folder / "epoch").read_text())
        except FileNotFoundError:
            return 0
        except (OSError, ValueError) as error:
            raise StoreError(
                f"{self._folder / 'epoch'}: {error}.", hint="Write a number higher than any before."
            ) from None

    def write(self, epoch: int) -> None:
        """Write a new epoch, before it is sent to anybody. Raises StoreError."""
        if self._folder is None:
            return
        path, data = self._folder / "epoch", str(epoch).encode()
        try:
            write_atomically(path, data)
        except OSError as error:
            try:
                overwrite(path, data)
            except OSError:
                raise StoreError(f"{path}: {error.strerror}.") from None
            log.warning("%s: %s; it was written in place", path, error.strerror)

    def close(self) -> None:
        """Release the lock."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file by new contents, or leave it as it was. Raises OSError."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(new, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(new, path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def overwrite(path: Path, data: bytes) -> None:
    """Overwrite the beginning of a file, which a full disk has room for. Raises OSError.

    data: at most one sector, and at least as long as what was there.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        if os.pwrite(fd, data, 0) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_folder(folder: Path) -> None:
    """Flush the names in a folder to disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def recover(
    shard: int,
    shards: int,
    connections: list[ShardConnection],
    epochs: EpochFile,
    snapshots: Iterable[Source],
    *,
    patience_s: float,
    stopping: Callable[[], bool],
    settle: Callable[[Parameters, int, int], None] = lambda *_: None,
) -> Recovered:
    """Return what the shard starts with. Raises StoreError.

    connections: to shards that may have a replica; they are closed. snapshots: newest first.
    patience_s: time to wait for shards that do not answer, unless this is the first life. settle:
    drops from parameters of an epoch and position what was dropped since.
    """
    try:
        before = epochs.last
        found = _find_copy(shard, connections, patience_s if before else 0.0, stopping)
        older, why = list(snapshots), ""
        epoch = 1 + max(
            [
                before,
                *(int(message.get("known", 0)) for _, message in found),
                *(one.epoch for one in older),
            ]
        )
        epochs.write(epoch)
        copies = _claimed(shard, epoch, found)
        for source in sorted(
            [*copies, *older], key=lambda one: (one.epoch, one.version), reverse=True
        ):
            try:
                base = _base_of(source, older)
                if base is not None:
                    found_all = _difference(base, source, epoch)
                    settle(found_all.parameters, source.epoch, source.position)
                    return found_all
            except (OSError, ClipperError, ValueError, KeyError) as error:
                log.warning("shard %d copies all of %s: %s", shard, source.name, error)
            try:
                found_here = source in older[:1] and not source.others and source.position >= 0
                found_all = _read(source, epoch, shard, shards)._replace(on_disk=found_here)
                if not source.others:
                    settle(found_all.parameters, source.epoch, source.position)
                return found_all
            except (OSError, ClipperError, ValueError, KeyError) as error:
                log.warning("shard %d does not recover from %s: %s", shard, source.name, error)
                why = why or f" {source.name}: {error}"
        if copies or older:
            hint = "Restore a snapshot, or take them away."
            raise StoreError(
                f"shard {shard} has replicas or snapshots, and can read none of them.{why}",
                hint=hint,
            )
        return Recovered(Parameters(), 0, {}, epoch, "nothing: it starts empty", is_new=True)
    finally:
        for connection in connections:
            connection.close()


def _find_copy(
    shard: int, connections: list[ShardConnection], patience_s: float, stopping: Callable[[], bool]
) -> list[tuple[ShardConnection, Piece]]:
    """Ask each shard what it has of this one. Returns the answers."""
    until, found, rest = time.monotonic() + patience_s, [], list(connections)
    while rest:
        for connection in list(rest):
            try:
                found.append((connection, call_once(connection, "replica", shard=shard)[1]))
                rest.remove(connection)
            except (OSError, ClipperError):
                connection.close()
        if time.monotonic() >= until or stopping():
            break
        if rest:
            time.sleep(PAUSE_S)
    return found


def _claimed(shard: int, epoch: int, found: list[tuple[ShardConnection, Piece]]) -> list[Source]:
    """Announce the new epoch. Followers refuse earlier ones from then on, and their copies stand
    still."""
    sources = []
    for connection, _ in found:
        try:
            message = call_once(connection, "replica", shard=shard, epoch=epoch)[1]
        except (OSError, ClipperError) as error:
            log.warning("shard %d: %s: %s", shard, connection.name, error)
            continue
        if int(message["known"]) >= epoch:
            raise StoreError(
                f"shard {shard} runs already, with epoch {message['known']}.",
                hint="End that process, or wait.",
            )
        if message["whole"]:
            name = f"its replica in shard {connection.number}"
            first = message.get("first")
            sources.append(
                Source(
                    message["epoch"],
                    message["version"],
                    name,
                    _walk(shard, connection, message),
                    False,
                    connection.number,
                    int(message.get("position", -1)),
                    History.decode(message.get("history")),
                    -1 if first is None else int(first),
                    partial(_changes_since, shard, connection, message),
                )
            )
    return sources


def _changes_since(
    shard: int, connection: ShardConnection, message: Piece, position: int
) -> Iterator[Piece]:
    yield {**message["shape"], "seen": message["seen"], "version": message["version"]}
    number: int | None = 0
    while number is not None:
        piece = call_once(
            connection, "get_replica", shard=shard, since=position, cursor=[number, 0]
        )[1]
        number = piece["next"]
        yield piece


def _base_of(source: Source, older: list[Source]) -> Source | None:
    """Return the newest snapshot to which a replica can tell the difference, if there is one."""
    bases = [one for one in older if not one.others and source.reaches(one)]
    return max(bases, key=lambda one: one.position, default=None)


def _difference(base: Source, source: Source, epoch: int) -> Recovered:
    """Read a snapshot, and from a replica only what has changed since."""
    assert source.since is not None
    parameters, seen, changed = Parameters(), dict[int, bytes](), list[dict[int, Ids]]()
    for piece in base.read():
        parameters.take(piece)
        seen.update(piece.get("seen", {}))
    for piece in source.since(base.position):
        parameters.take(piece)
        seen.update(piece.get("seen", {}))
        changed.append(ids_in(piece, parameters))
    return Recovered(
        parameters,
        source.version,
        seen,
        epoch,
        f"{base.name} and the changes since then in {source.name}",
        origin=Origin(source.copy_in, source.epoch, source.version),
        history=source.history,
        position=source.position,
        first=base.position,
        changed=union(changed),
    )


def _walk(shard: int, connection: ShardConnection, message: Piece) -> Callable[[], Iterable[Piece]]:
    def read() -> Iterable[Piece]:
        yield {**message["shape"], "seen": message["seen"], "version": message["version"]}
        cursor: Cursor | None = [0, 0]
        while cursor is not None:
            piece = call_once(connection, "get_replica", shard=shard, cursor=cursor)[1]
            cursor = piece["next"]
            yield piece

    return read


def _read(source: Source, epoch: int, shard: int, shards: int) -> Recovered:
    parameters, version, seen = Parameters(), 0, dict[int, bytes]()
    history, position = source.history, max(0, source.position)
    for piece in source.read():
        if source.others:
            parameters.take(piece, shard, shards, shard_of_name)
            seen.update(
                {
                    worker: merge_windows(window, seen.get(worker))
                    for worker, window in piece.get("seen", {}).items()
                }
            )
        else:
            parameters.take(piece)
            seen.update(piece.get("seen", {}))
            history = History.decode(piece["history"]) if "history" in piece else history
        version = max(version, int(piece.get("version", 0)))
    origin = Origin(source.copy_in, source.epoch, source.version) if source.copy_in >= 0 else None
    return Recovered(
        parameters,
        version,
        seen,
        epoch,
        source.name,
        origin=origin,
        history=history,
        position=position,
        first=position,
    )


def merge_windows(one: bytes, other: bytes | None) -> bytes:
    """Return the pushes of a worker that either window contains.

    A set with another number of shards merges what the old shards have seen.
    """
    if other is None:
        return one
    (high, touched, *bits), (high_, touched_, *bits_) = (
        SEQUENCES.unpack(one),
        SEQUENCES.unpack(other),
    )
    most, whole = max(high, high_), [0] * len(bits)
    for top, words in ((high, bits), (high_, bits_)):
        for n in range(max(1, most - WINDOW + 1), top + 1):
            if top - n < WINDOW and words[n % WINDOW // 64] >> n % 64 & 1:
                whole[n % WINDOW // 64] |= 1 << n % 64
    return SEQUENCES.pack(most, max(touched, touched_), *whole)
