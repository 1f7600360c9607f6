"""The store of one process: a dict, its sorted keys and a ring of changes, under one lock."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Sequence

from clipper.component.threads import SYSTEM_THREADS, Threads
from clipper.store.store import (
    EVENTS_MAX,
    Compare,
    Delete,
    Event,
    Get,
    Op,
    Put,
    Record,
    Store,
    TxnResult,
    Watch,
    check_txn,
    closed_error,
    lost_error,
)

_NEVER = float("inf")


class _Granted:
    """A granted lease: its time to live, its end by the store's clock, and its keys."""

    __slots__ = ("keys", "ttl_s", "until_s")

    def __init__(self, ttl_s: float, until_s: float) -> None:
        self.ttl_s, self.until_s, self.keys = ttl_s, until_s, set[str]()


class MemoryStore(Store):
    """A store that does not survive its process. Threads: any.

    events_max: changes kept for watches.  now_s: the clock of leases, None: that of
    the threads; each access ends those that are over.  threads: in which watches wait.
    """

    name = "memory://"

    def __init__(
        self,
        events_max: int = EVENTS_MAX,
        now_s: Callable[[], float] | None = None,
        threads: Threads = SYSTEM_THREADS,
    ) -> None:
        self.threads = threads
        self._records: dict[str, Record] = {}
        self._keys: list[str] = []
        self._revision = 0
        self._events: deque[Event] = deque()
        self._events_max = events_max
        self._forgotten = 0  # changes up to this revision are no longer in _events
        self._leases: dict[str, _Granted] = {}
        self._granted = 0
        self._until_s = _NEVER  # when the next lease ends
        self._now_s = now_s or threads.now_s
        self._changed = threads.condition()
        self._closed = False

    def get(self, key: str) -> Record | None:
        """Return the record; None if the key does not exist."""
        with self._changed:
            self._prepare()
            return self._records.get(key)

    def range(self, prefix: str) -> tuple[list[Record], int]:
        """Return the records under a prefix and the revision of the snapshot."""
        with self._changed:
            self._prepare()
            found = []
            for at in range(bisect_left(self._keys, prefix), len(self._keys)):
                if not self._keys[at].startswith(prefix):
                    break
                found.append(self._records[self._keys[at]])
            return found, self._revision

    def txn(
        self, compares: Sequence[Compare], then: Sequence[Op], orelse: Sequence[Op] = ()
    ) -> TxnResult:
        """Run a transaction; see `Store.txn`."""
        check_txn(compares, then, orelse)
        with self._changed:
            self._prepare()
            ok = all(compare.holds(self._records.get(compare.key)) for compare in compares)
            ops = then if ok else orelse
            found = {op.key: self._records.get(op.key) for op in ops if isinstance(op, Get)}
            for op in ops:
                if isinstance(op, Put) and op.lease and op.lease not in self._leases:
                    raise lost_error(self.name, op.lease)
            revision = self._revision + 1
            results = tuple(
                found[op.key] if isinstance(op, Get) else self._write(op, revision) for op in ops
            )
            self._commit(revision)
            return TxnResult(ok, results, self._revision)

    def _commit(self, revision: int) -> None:
        """Publish the changes that were written at a revision, if there are any."""
        if self._events and self._events[-1].revision == revision:
            self._revision = revision
            self._forget()
            self._changed.notify_all()

    def _write(self, op: Put | Delete, revision: int) -> Record | None:
        old = self._records.get(op.key)
        if old is not None and old.lease in self._leases:
            self._leases[old.lease].keys.discard(op.key)
        if isinstance(op, Put):
            if op.lease:
                self._leases[op.lease].keys.add(op.key)
            created, version = (old.created_revision, old.version + 1) if old else (revision, 1)
            new = self._records[op.key] = Record(
                op.key, op.value, revision, created, version, op.lease
            )
            if old is None:
                insort(self._keys, op.key)
            self._events.append(Event("PUT", revision, op.key, new))
            return new
        if old is not None:
            del self._records[op.key]
            del self._keys[bisect_left(self._keys, op.key)]
            self._events.append(Event("DELETE", revision, op.key))
        return old

    def _forget(self) -> None:
        """Drop the oldest changes, whole revisions at a time, but never the newest."""
        while len(self._events) > self._events_max:
            oldest = self._events[0].revision
            if oldest == self._revision:
                return
            while self._events[0].revision == oldest:
                self._events.popleft()
            self._forgotten = oldest

    def watch(self, prefix: str, from_revision: int | None = None) -> Watch:
        """Watch the keys under a prefix."""
        with self._changed:
            self._prepare()
            return _MemoryWatch(
                self, prefix, self._revision if from_revision is None else from_revision
            )

    @property
    def revision(self) -> int:
        """Return the revision of the newest change."""
        with self._changed:
            self._prepare()
            return self._revision

    def close(self) -> None:
        """End the watches."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _prepare(self) -> None:
        """Check that the store is open and end expired leases; the caller holds the lock."""
        if self._closed:
            raise closed_error(self.name)
        self._expire()

    # -- leases

    def grant(self, ttl_s: float) -> tuple[str, float]:
        """Grant a lease; return its id and its time to live in seconds."""
        with self._changed:
            self._prepare()
            self._granted += 1
            id = f"{self._granted:x}"
            self._leases[id] = _Granted(ttl_s, self._now_s() + ttl_s)
            self._until_s = min(self._until_s, self._leases[id].until_s)
            self._changed.notify_all()  # watches recompute their timeouts
            return id, ttl_s

    def renew(self, lease: str) -> float:
        """Renew a lease; return its time to live in seconds."""
        with self._changed:
            self._prepare()
            if (granted := self._leases.get(lease)) is None:
                raise lost_error(self.name, lease)
            granted.until_s = self._now_s() + granted.ttl_s
            return granted.ttl_s

    def revoke(self, lease: str) -> None:
        """End a lease and delete its keys."""
        with self._changed:
            self._prepare()
            if lease in self._leases:
                self._end(lease)

    def _expire(self) -> None:
        while self._until_s <= self._now_s():
            id, first = min(
                self._leases.items(), key=lambda item: item[1].until_s, default=("", None)
            )
            self._until_s = first.until_s if first else _NEVER
            if first and self._until_s <= self._now_s():
                self._end(id)

    def _end(self, lease: str) -> None:
        revision = self._revision + 1
        for key in sorted(self._leases.pop(lease).keys):
            self._write(Delete(key), revision)
        self._commit(revision)


class _MemoryWatch:
    """A cursor over the store's ring of changes; a slow reader costs the store nothing."""

    def __init__(self, store: MemoryStore, prefix: str, cursor: int) -> None:
        self._store = store
        self._prefix = prefix
        self._cursor = cursor  # changes up to this revision have been taken
        self._synced = False
        self._ready: deque[Event] = deque()
        self._closed = False
        self.contact_s = store.threads.now_s()

    def next(self, timeout_s: float | None = None) -> Event | None:
        give_up = None if timeout_s is None else self._store.threads.now_s() + timeout_s
        with self._store._changed:
            while not self.closed:
                self._collect()
                if self._ready:
                    return self._ready.popleft()
                if give_up is not None and give_up <= self._store.threads.now_s():
                    return None
                self._store._changed.wait(self._patience_s(give_up))
        return None

    def _patience_s(self, give_up: float | None) -> float | None:
        """Return the seconds until the timeout or the end of the next lease; None for no limit."""
        left = min(
            _NEVER if give_up is None else give_up - self._store.threads.now_s(),
            self._store._until_s - self._store._now_s(),
        )
        return None if left == _NEVER else max(left, 0.0)

    def _collect(self) -> None:
        self.contact_s = self._store.threads.now_s()
        if self._ready:
            return
        store = self._store
        store._expire()
        if self._cursor < store._forgotten or self._cursor > store._revision:
            self._ready.append(Event("RESET", store._revision))
        elif self._cursor < store._revision:
            self._ready.extend(
                e for e in _after(store._events, self._cursor) if e.key.startswith(self._prefix)
            )
        self._cursor = store._revision
        if not self._synced:
            self._synced = True
            self._ready.append(Event("SYNC", store._revision))

    @property
    def closed(self) -> bool:
        return self._closed or self._store._closed

    def close(self) -> None:
        with self._store._changed:
            self._closed = True
            self._store._changed.notify_all()


def _after(events: deque[Event], revision: int) -> list[Event]:
    """Return the events after `revision`, oldest first.

    Searches from the newest event back, because a watch is rarely far behind.
    """
    found: list[Event] = []
    for event in reversed(events):
        if event.revision <= revision:
            break
        found.append(event)
    found.reverse()
    return found
