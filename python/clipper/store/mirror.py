"""An in-memory copy of a prefix of the store, kept up to date by a watch.

It serves data that is read thousands of times per change. Values are decoded on first use, so 20
000 records cost only their listing. While the store is unreachable the last content remains, and
`stale_s` says for how long. After a RESET everything is listed again and the differences are
reported as changes, so followers see no gap. A store that returns with other content can be
rejected (`accepts`); the known content then remains.
"""

import logging
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from types import TracebackType
from typing import Final, Generic, Self, TypeVar

from clipper.errors import StoreError
from clipper.store.store import Event, Record, Store, Watch

POLL_S: Final = 0.5  # timeout of one wait for events
PAUSE_S_MIN, PAUSE_S_MAX = 0.05, 1.0
DELETIONS_MIN: Final = 2  # fewer deletions at once are applied without calling `accepts`
_BATCH = 1000
_log = logging.getLogger(__name__)
T = TypeVar("T")


class KeyChange(Generic[T]):
    """A change of one key. Consecutive changes may be merged into one.

    old, new: the records; None if there was, or is, none.
    """

    __slots__ = ("_decode", "key", "new", "old")

    def __init__(
        self, key: str, old: Record | None, new: Record | None, decode: Callable[[Record], T | None]
    ) -> None:
        self.key, self.old, self.new, self._decode = key, old, new, decode

    @property
    def before(self) -> T | None:
        """The decoded value before the change; None without one."""
        return self._decode(self.old) if self.old is not None else None

    @property
    def after(self) -> T | None:
        """The decoded value after the change; None without one."""
        return self._decode(self.new) if self.new is not None else None

    def __repr__(self) -> str:
        return f"KeyChange({self.key!r}, {self.old!r}, {self.new!r})"


class Mirror(Mapping[str, T]):
    """A mapping from key (without the prefix) to decoded value. Threads: any.

    decode: converts a value. One that raises is logged once, and the key is missing in `get`,
    `values` and `items`; `record` has it.
    wait: list the records in the constructor and raise StoreError if that fails; else they appear
    when the store answers.
    accepts: called before a listing replaces known content, and before many deletions at once are
    applied. It raises StoreError if the store is not the same as before, and is called again later.
    It returns what the store's content goes back to: a listing during which that changes, because
    the store was emptied and restored, is repeated.

    A single key never goes back in time. Keys that were written by one transaction may appear one
    after another.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        decode: Callable[[bytes], T],
        *,
        wait: bool = True,
        accepts: Callable[[], object] = lambda: None,
    ) -> None:
        self._accepts = accepts
        self._store, self._prefix, self._decode_value = store, prefix, decode
        self._records: dict[str, Record] = {}
        self._decoded: dict[str, tuple[Record, T | None]] = {}
        self._revision = -1
        self._contact_s = float("-inf")
        self._trouble: StoreError | None = None
        self._threads = threads = store.threads
        self._changed = threads.condition()
        self._callbacks: list[Callable[[list[KeyChange[T]]], object]] = []
        self._watch: Watch | None = None
        self._stop = threads.event()
        if wait:
            self._list()
        self._thread = threads.start(self._run, "clipper-mirror")

    # -- reading

    def __getitem__(self, key: str) -> T:
        record = self._records.get(key)
        value = self._value(record) if record is not None else None
        if value is None:
            raise KeyError(key)
        return value

    def record(self, key: str) -> Record | None:
        """Return the stored record, whose revision a Compare needs; None if there is none."""
        return self._records.get(key)

    def records(self) -> dict[str, Record]:
        """Return a copy of all stored records, by key."""
        return dict(self._records)

    def __contains__(self, key: object) -> bool:
        return key in self._records

    def __iter__(self) -> Iterator[str]:
        """Iterate over a copy of the keys, in no particular order."""
        return iter(list(self._records))

    def __len__(self) -> int:
        return len(self._records)

    def values(self) -> ValuesView[T]:
        """Return the values that can be decoded."""
        return dict(self.items()).values()

    def items(self) -> ItemsView[str, T]:
        """Return the keys and values that can be decoded."""
        return {
            key: value
            for key, record in list(self._records.items())
            if (value := self._value(record)) is not None
        }.items()

    def _value(self, record: Record) -> T | None:
        known = self._decoded.get(record.key)
        if known is not None and known[0] is record:
            return known[1]
        try:
            value: T | None = self._decode_value(record.value)
        except Exception as error:
            _log.error(
                "the record %r at revision %d cannot be read: %s",
                record.key,
                record.revision,
                error,
            )
            value = None
        self._decoded[record.key] = (
            record,
            value,
        )  # stored with its record, so that it never hides a newer one
        return value

    @property
    def revision(self) -> int:
        """Revision of the newest change or listing; -1 before the first."""
        return self._revision

    @property
    def stale_s(self) -> float:
        """Seconds since the store last answered, normally below 2; infinite before the first
        listing.
        """
        return self._threads.now_s() - self._contact_s

    @property
    def trouble(self) -> StoreError | None:
        """The error that keeps the mirror stale; None while the store answers."""
        return self._trouble

    def wait_for(self, predicate: Callable[[Self], object], timeout_s: float | None = None) -> bool:
        """Wait until `predicate(self)` is true; return False on timeout.

        It is called after each change, under a lock, so it must be quick.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._stop.is_set() or predicate(self), timeout_s)
            return bool(predicate(self))

    def on_change(self, callback: Callable[[list[KeyChange[T]]], object]) -> None:
        """Call `callback` with the changes on the mirror's thread, after they are visible here.

        Its exceptions are logged.
        """
        self._callbacks.append(callback)

    # -- following

    def _run(self) -> None:
        pause_s = PAUSE_S_MIN
        while not self._stop.is_set():
            try:
                if self._watch is None:
                    self._notify(self._differences(self._list()))
                if not self._follow():
                    return  # the store was closed
            except StoreError as error:
                if self._trouble is None and not self._stop.is_set():
                    _log.warning("the mirror of %r is stale: %s", self._prefix, error)
                    pause_s = PAUSE_S_MIN
                self._trouble = error
                self._stop.wait(pause_s)
                pause_s = min(2 * pause_s, PAUSE_S_MAX)

    def _follow(self) -> bool:
        """Apply events until the mirror is closed (False) or must list everything again (True)."""
        watch = self._watch
        assert watch is not None
        while not self._stop.is_set():
            event = watch.next(POLL_S)
            if event is None and watch.closed:
                return False
            self._on_contact(watch.contact_s)
            batch = []
            while event is not None and event.kind != "RESET":
                batch.append(event)
                event = watch.next(0) if len(batch) < _BATCH else None
            if self._are_many_deletions(batch):
                self._check(watch)
            self._take(batch)
            if event is not None:  # the listing is newer than all pending events
                watch.close()
                self._watch = None
                return True
        return False

    def _are_many_deletions(self, events: Sequence[Event]) -> bool:
        """Return True if the events delete most of the known keys, as emptying a store does."""
        deletions = sum(event.kind == "DELETE" for event in events)
        return deletions >= DELETIONS_MIN and 2 * deletions > len(self._records)

    def _check(self, watch: Watch) -> None:
        """Call `accepts`; if it refuses, list everything again later."""
        try:
            self._accepts()
        except StoreError:
            watch.close()
            self._watch = None
            raise

    def _on_contact(self, at_s: float) -> None:
        """Record the time of the store's last answer; a timeout is no answer."""
        if at_s <= self._contact_s:
            return
        self._contact_s = at_s
        if self._trouble is not None:
            self._trouble = None
            _log.info("the mirror of %r is up to date again", self._prefix)

    def _list(self) -> dict[str, Record]:
        """List all records and start a watch after them; return the content before."""
        origin = self._accepts() if self._revision >= 0 else None
        records, revision = self._store.range(self._prefix)
        if self._revision >= 0 and self._accepts() != origin:
            raise StoreError(
                f"store {self._store.name} was restored while {self._prefix!r} was listed.",
                hint="It is listed again.",
            )
        skip = len(self._prefix)
        fresh = {record.key[skip:]: record for record in records}
        old = self._records
        self._watch = self._store.watch(self._prefix, revision)
        with self._changed:
            self._records, self._revision = fresh, revision
            for key in old.keys() - fresh.keys():
                self._decoded.pop(self._prefix + key, None)
            self._changed.notify_all()
        self._on_contact(self._threads.now_s())
        return old

    def _differences(self, old: dict[str, Record]) -> list[KeyChange[T]]:
        """Return the changes since `old`, if there are callbacks."""
        if not self._callbacks:
            return []
        fresh = self._records
        gone = [
            KeyChange(key, record, None, self._value_of_change)
            for key, record in old.items()
            if key not in fresh
        ]
        new = ((key, old.get(key), record) for key, record in fresh.items())
        return gone + [
            KeyChange(key, was, now, self._value_of_change) for key, was, now in new if was != now
        ]

    def _value_of_change(self, record: Record) -> T | None:
        if self._records.get(record.key[len(self._prefix) :]) is record:
            return self._value(record)
        try:
            return self._decode_value(record.value)
        except Exception:
            return None  # logged when it was current

    def _take(self, events: Iterable[Event]) -> None:
        with self._changed:
            changes = [self._apply(event) for event in events if event.kind != "SYNC"]
            self._changed.notify_all()
        self._notify(changes)

    def _apply(self, event: Event) -> KeyChange[T]:
        key = event.key[len(self._prefix) :]
        old = self._records.get(key)
        if event.record is not None:
            self._records[key] = event.record
        else:
            self._records.pop(key, None)
            self._decoded.pop(event.key, None)
        self._revision = event.revision
        return KeyChange(key, old, event.record, self._value_of_change)

    def _notify(self, changes: list[KeyChange[T]]) -> None:
        for callback in self._callbacks if changes else ():
            try:
                callback(changes)
            except Exception:
                _log.exception("a callback of the mirror of %r failed", self._prefix)

    # -- the end

    def close(self) -> None:
        """Stop following; the known content stays readable. Calling it twice is fine."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        watch = self._watch
        if watch is not None:
            watch.close()
        if not self._threads.is_current(self._thread):
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
