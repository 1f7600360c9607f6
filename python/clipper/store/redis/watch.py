"""Watches of a Redis store: one thread reads the stream of changes for all of them.

The thread blocks in XREAD until something changes, a lease is granted, or the first lease ends;
then one script ends what is over and returns the changes. An idle server sends one request
in BLOCK_S, however many watches it has.
"""

import logging
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from time import monotonic
from typing import Final, NamedTuple, Protocol

from clipper.component import Backoff, Stop, Worker
from clipper.errors import ShuttingDown, StoreError
from clipper.store.store import Event, Record

BLOCK_S: Final = 1.0  # the longest time without a word from the server
DUE_S_MAX: Final = 5.0  # between two looks at the ends of leases
PAUSE_S_MIN, PAUSE_S_MAX = 0.05, 1.0
_log = logging.getLogger(__name__)
Entry = tuple[bytes, Sequence[bytes]]  # of the stream: its id, then names and values in turn


class Changes(NamedTuple):
    """Changes after a revision.

    forgotten: changes up to this revision are not in the stream any more.  revision: of the store.
    due_ms: until the first lease ends; negative without leases.  born: time of the store's first
    write; empty before it.  run: id of the server's process; empty if it does not tell.
    """

    forgotten: int
    revision: int
    due_ms: int
    entries: Sequence[Entry]
    born: bytes
    run: bytes


class Waited(NamedTuple):
    """The end of a wait for changes.

    revision: of the store when the wait began.  has_changes: whether there are some.  granted: of
    the newest lease that was granted, the id in the stream of leases, and its time to live in ms.
    """

    revision: int
    has_changes: bool
    granted: tuple[bytes, int] | None


class ChangeStream(Protocol):
    """The part of the store that the reader needs. Both raise StoreError."""

    def changes(self, after: int) -> Changes:
        """Return what changed after a revision."""

    def wait(self, after: int, granted: bytes, block_s: float) -> Waited:
        """Wait until something changes, or a lease is granted."""


class ChangeReader:
    """Reads the changes of a store for all its watches, in a thread of its own. Threads: any.

    events_max: changes that wait for the reader of a watch; with more it gets RESET.  block_s: the
    longest wait for the server's word.
    """

    def __init__(self, stream: ChangeStream, events_max: int, block_s: float) -> None:
        self._stream, self._block_s = stream, min(BLOCK_S, block_s)
        self.events_max = events_max
        self.changed = threading.Condition(threading.RLock())
        self.closed = False
        self.contact_s = monotonic()
        self._watches: weakref.WeakSet[RedisWatch] = weakref.WeakSet()
        self._cursor = 0  # changes up to this revision were handed to the watches
        self._born = self._run_id = b""
        self._due_s = 0.0
        self._granted = b"0"
        self._worker = Worker("clipper-redis-watch", self._run, once=True)

    def join(self, watch: "RedisWatch") -> None:
        """Hand a watch what it has not seen, and from then on what changes. Raises StoreError."""
        with self.changed:
            found = self._stream.changes(watch.cursor)
            self.contact_s = monotonic()
            if not self._watches:
                self._cursor, self._born, self._run_id = found.revision, found.born, found.run
            watch.take(found, watch.cursor, self._is_new(found))
            self._watches.add(watch)
            if not self._worker.is_started:
                self._worker.start()
            self.changed.notify_all()

    def leave(self, watch: "RedisWatch") -> None:
        """Hand a watch nothing any more, and wake who waits for it."""
        with self.changed:
            self._watches.discard(watch)
            self.changed.notify_all()

    def _run(self, stop: Stop) -> None:
        backoff = Backoff(PAUSE_S_MIN, PAUSE_S_MAX)
        while not stop.requested:
            with self.changed:
                if not len(self._watches):
                    self.changed.wait(self._block_s)
                    continue
                cursor = self._cursor
            try:
                self._follow(cursor)
                backoff.reset()
            except StoreError as error:
                self._has_failed(error)
                stop.wait(backoff.next_s())
            except Exception as error:  # the watches must not wait for a thread that has ended
                _log.exception("changes of the store cannot be read")
                self._has_failed(StoreError(f"changes of the store cannot be read: {error!r}."))
                stop.wait(backoff.next_s())

    def _has_failed(self, error: StoreError) -> None:
        with self.changed:
            for watch in list(self._watches):
                watch.error = error
            self._due_s = 0.0
            self.changed.notify_all()

    def _follow(self, cursor: int) -> None:
        """Wait for a change, or the end of a lease, and hand it on."""
        left_s = self._due_s - monotonic()
        if left_s > 0:
            waited = self._stream.wait(cursor, self._granted, min(left_s, self._block_s))
            self.contact_s = now = monotonic()
            if waited.granted is not None:
                self._granted, ttl_ms = waited.granted
                self._due_s = min(self._due_s, now + ttl_ms / 1000)
            if not waited.has_changes and waited.revision >= cursor and now < self._due_s:
                return
        found = self._stream.changes(cursor)
        self.contact_s = now = monotonic()
        due_s = found.due_ms / 1000 + 0.001 if found.due_ms >= 0 else DUE_S_MAX
        with self.changed:
            self._due_s = now + min(due_s, DUE_S_MAX)
            is_new = self._is_new(found)
            for watch in list(self._watches):
                watch.take(found, cursor, is_new)
            self._cursor, self._born, self._run_id = found.revision, found.born, found.run
            self.changed.notify_all()

    def _is_new(self, found: Changes) -> bool:
        """Return True if the store was emptied since the last look, whatever its revision is, or
        if its server was started again, perhaps from an older copy.
        """
        known = (self._born, found.born), (self._run_id, found.run)
        return any(was and now and was != now for was, now in known)

    def close(self) -> None:
        """End all watches. The thread ends when its connection is closed. Idempotent."""
        self.closed = True
        self._worker.request_stop()
        with self.changed:
            self.changed.notify_all()

    def has_ended(self, timeout_s: float) -> bool:
        """Wait for the end of the thread after `close`; return False on timeout."""
        return self._worker.join(monotonic() + timeout_s)


class RedisWatch:
    """A watch on a prefix. Threads: any may close it; one reads it.

    cursor: changes up to this revision have been taken.
    """

    def __init__(self, reader: ChangeReader, prefix: str, cursor: int) -> None:
        self._reader, self._prefix, self.cursor = reader, prefix, cursor
        self._ready: deque[Event] = deque()
        self._has_joined = self._closed = False
        self._since_s = monotonic()
        self.error: StoreError | None = None

    def take(self, found: Changes, start: int, is_new: bool) -> None:
        """Take what was found after the revision `start`. Under the reader's lock.

        is_new: the store may have another history before.
        """
        had_some = bool(self._ready)
        if start < found.forgotten or start > found.revision or is_new:
            self._ready.clear()
            self._ready.append(Event("RESET", found.revision))
            self.cursor = found.revision
        else:
            events = _events(found.entries, self._prefix, self.cursor)
            if events is None:
                self._ready.append(Event("RESET", found.revision))
            else:
                self._ready.extend(events)
            self.cursor = max(self.cursor, found.revision)
        if had_some and len(self._ready) > self._reader.events_max:
            self._ready.clear()
            self._ready.append(Event("RESET", self.cursor))
        if not self._has_joined:
            self._has_joined = True
            self._ready.append(Event("SYNC", found.revision))

    def next(self, timeout_s: float | None = None) -> Event | None:
        """Return the next event; None on timeout or after `close`.

        Raises StoreError once for each failed look at the server; later calls continue.
        """
        give_up = float("inf") if timeout_s is None else monotonic() + timeout_s
        changed = self._reader.changed
        if not self._has_joined and not self.closed:
            try:
                self._reader.join(self)
            except (StoreError, ShuttingDown):
                if self.closed:
                    return None
                raise
        with changed:
            while not self.closed:
                if self._ready:
                    return self._ready.popleft()
                if self.error is not None:
                    error, self.error = self.error, None
                    raise error
                left_s = give_up - monotonic()
                if left_s <= 0:
                    return None
                changed.wait(min(left_s, BLOCK_S))
        return None

    @property
    def contact_s(self) -> float:
        """Time at which the server last answered."""
        return max(self._since_s, self._reader.contact_s if self._has_joined else self._since_s)

    @property
    def closed(self) -> bool:
        """True once the watch or its store is closed."""
        return self._closed or self._reader.closed

    def close(self) -> None:
        """End the watch and wake its reader."""
        self._closed = True
        self._reader.leave(self)


def _events(entries: Sequence[Entry], prefix: str, cursor: int) -> list[Event] | None:
    """Return the changes of a prefix after a revision; None if an entry is not as this version
    writes it, so that everything has to be read again."""
    try:
        events = [
            _event(id, dict(zip(parts[::2], parts[1::2], strict=True))) for id, parts in entries
        ]
    except (KeyError, ValueError) as error:
        _log.warning("a change of the store cannot be read, so all is read again: %r", error)
        return None
    return [one for one in events if one.revision > cursor and one.key.startswith(prefix)]


def _event(id: bytes, fields: dict[bytes, bytes]) -> Event:
    revision, key = int(id.partition(b"-")[0]), fields[b"key"].decode()
    if fields[b"kind"] == b"DELETE":
        return Event("DELETE", revision, key)
    lease = fields.get(b"lease", b"").decode()
    record = Record(
        key, fields[b"value"], revision, int(fields[b"created"]), int(fields[b"version"]), lease
    )
    return Event("PUT", revision, key, record)
