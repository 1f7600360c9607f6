"""An in-memory copy of a prefix of the store, kept up to date by a watch.

It serves data that is read thousands of times per change. Values are decoded on first use, so 20
000 records cost only their listing. While the store is unreachable the last content remains, and
`stale_s` says for how long. After a RESET everything is listed again and the differences are
reported as changes, so followers see no gap. It is a sink of store/follower.py.
"""

import logging
from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence, ValuesView
from types import TracebackType
from typing import Generic, Self, TypeVar

from clipper.component import Stop
from clipper.errors import StoreError
from clipper.store.follower import Follower
from clipper.store.store import Event, Record, Store

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
    accepts: see Follower.

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
        accepts: Callable[[], object] | None = None,
    ) -> None:
        self._prefix, self._decode_value = prefix, decode
        self._records: dict[str, Record] = {}
        self._decoded: dict[str, tuple[Record, T | None]] = {}
        # Of the newest change or listing; -1 before the first.
        self.revision = -1
        self._threads = store.threads
        self._changed = store.threads.condition()
        self._callbacks: list[Callable[[list[KeyChange[T]]], object]] = []
        self._follower = Follower(store, prefix, self, name="clipper-mirror", accepts=accepts)
        if wait:
            self._follower.list()
        self._follower.start()

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
        # stored with its record, so that it never hides a newer one
        self._decoded[record.key] = (
            record,
            value,
        )
        return value

    @property
    def stale_s(self) -> float:
        """Seconds since the store last answered, normally below 2; infinite before the first
        listing.
        """
        return self._threads.now_s() - self._follower.contact_s

    @property
    def trouble(self) -> StoreError | None:
        """The error that keeps the mirror stale; None while the store answers."""
        return self._follower.trouble

    def wait_for(self, predicate: Callable[[Self], object], timeout_s: float | None = None) -> bool:
        """Wait until `predicate(self)` is true; return False on timeout.

        It is called after each change, under a lock, so it must be quick.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._follower.is_stopping or predicate(self), timeout_s)
            return bool(predicate(self))

    def on_change(self, callback: Callable[[list[KeyChange[T]]], object]) -> None:
        """Call `callback` with the changes on the mirror's thread, after they are visible here.

        Its exceptions are logged.
        """
        self._callbacks.append(callback)

    # -- the sink of the follower

    @property
    def known(self) -> int:
        """Return the number of records."""
        return len(self._records)

    def begin(self, stop: Stop) -> bool:
        """Follow again."""
        return True

    def reset(self, records: Sequence[Record], revision: int) -> None:
        """Replace the content, and report the differences."""
        skip = len(self._prefix)
        fresh = {record.key[skip:]: record for record in records}
        with self._changed:
            old = self._records
            self._records, self.revision = fresh, revision
            for key in old.keys() - fresh.keys():
                self._decoded.pop(self._prefix + key, None)
            self._changed.notify_all()
        self._notify(self._differences(old))

    def changed(self, events: Sequence[Event]) -> None:
        """Apply changes, and report them."""
        with self._changed:
            changes = [self._apply(event) for event in events]
            self._changed.notify_all()
        self._notify(changes)

    def poll(self) -> None:
        """Do nothing: nothing else can change."""

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

    def _apply(self, event: Event) -> KeyChange[T]:
        key = event.key[len(self._prefix) :]
        old = self._records.get(key)
        if event.record is not None:
            self._records[key] = event.record
        else:
            self._records.pop(key, None)
            self._decoded.pop(event.key, None)
        self.revision = event.revision
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
        self._follower.request_stop()
        with self._changed:
            self._changed.notify_all()
        self._follower.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
