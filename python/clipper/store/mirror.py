"""A part of the store in this process's memory, kept fresh by a watch: what is read a thousand
times for each change.

Values are decoded when they are first looked at, so that 20 000 records cost their listing only.
While the store is away the last known content stays, and `stale_s` says for how long. A watch that
missed changes (RESET) lists everything again, and what differs is told as changes: whoever follows
them sees no gap. A store that came back with another content can be refused (`accepts`): then what
was known stays, as while it is away.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from time import monotonic
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

from clipper.errors import StoreError
from clipper.store.store import Event, Record, Store, Watch

POLL_S: Final = 0.5  # so often is the watch asked what it has heard
PAUSE_S_MIN, PAUSE_S_MAX = 0.05, 1.0
DELETIONS_MIN: Final = 2  # at once, and most of what is known: the store is looked at first
_BATCH = 1000
_log = logging.getLogger(__name__)
T = TypeVar("T")


class KeyChange(Generic[T]):
    """One key's change. old, new: the records; None: there was, or is, none. Several changes in a
    row may be told as one."""

    __slots__ = ("_decode", "key", "new", "old")

    def __init__(
        self, key: str, old: Record | None, new: Record | None, decode: Callable[[Record], T | None]
    ) -> None:
        self.key, self.old, self.new, self._decode = key, old, new, decode

    @property
    def before(self) -> T | None:
        return self._decode(self.old) if self.old is not None else None

    @property
    def after(self) -> T | None:
        return self._decode(self.new) if self.new is not None else None

    def __repr__(self) -> str:
        return f"KeyChange({self.key!r}, {self.old!r}, {self.new!r})"


class Mirror(Mapping[str, T]):
    """key -> what `decode` made of its value. Keys are without the prefix. Threads: any.

    A value that `decode` refuses (any exception) is logged once and is not there for `get`,
    `values` and `items`; `record` has it. Each key by itself never goes back in time; several keys
    that a transaction wrote together may be seen one by one. wait: list the records before the
    constructor returns, StoreError when that fails; else they come when the store does. accepts:
    called before a listing replaces what is known, and before many deletions at once are taken; it
    raises StoreError when the store is not the one that it was, and is asked again.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        decode: Callable[[bytes], T],
        *,
        wait: bool = True,
        accepts: Callable[[], None] = lambda: None,
    ) -> None:
        self._accepts = accepts
        self._store, self._prefix, self._decode_value = store, prefix, decode
        self._records: dict[str, Record] = {}
        self._decoded: dict[str, tuple[Record, T | None]] = {}
        self._revision = -1
        self._heard_s = float("-inf")
        self._trouble: StoreError | None = None
        self._changed = threading.Condition()
        self._callbacks: list[Callable[[list[KeyChange[T]]], Any]] = []
        self._watch: Watch | None = None
        self._stop = threading.Event()
        if wait:
            self._list()
        self._thread = threading.Thread(target=self._run, name="clipper-mirror", daemon=True)
        self._thread.start()

    # -- reading

    def __getitem__(self, key: str) -> T:
        record = self._records.get(key)
        value = self._value(record) if record is not None else None
        if value is None:
            raise KeyError(key)
        return value

    def get(self, key: str, default: Any = None) -> Any:
        record = self._records.get(key)
        value = self._value(record) if record is not None else None
        return default if value is None else value

    def record(self, key: str) -> Record | None:
        """As the store has it: its revision is what a Compare wants."""
        return self._records.get(key)

    def records(self) -> dict[str, Record]:
        """All of them, as the store has them, by key; a copy."""
        return dict(self._records)

    def __contains__(self, key: object) -> bool:
        return key in self._records

    def __iter__(self) -> Iterator[str]:
        """The keys there are now, in no order."""
        return iter(list(self._records))

    def __len__(self) -> int:
        return len(self._records)

    def values(self) -> Any:
        return [value for _, value in self.items()]

    def items(self) -> Any:
        found = ((key, self._value(record)) for key, record in list(self._records.items()))
        return [(key, value) for key, value in found if value is not None]

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
        )  # with its record: a newer one that came meanwhile is not hidden by it
        return value

    @property
    def revision(self) -> int:
        """Of the newest change that is in here, or of the listing; -1 before the first."""
        return self._revision

    @property
    def stale_s(self) -> float:
        """Seconds since the store last answered: little more than one while it is there; infinite
        before the first listing."""
        return monotonic() - self._heard_s

    @property
    def trouble(self) -> StoreError | None:
        """Why the store is not heard of; None while it is."""
        return self._trouble

    def wait_for(self, predicate: Callable[[Self], Any], timeout_s: float | None = None) -> bool:
        """Whether `predicate(self)` came to be true in time. It is asked again after each change,
        under a lock: be brief."""
        with self._changed:
            self._changed.wait_for(lambda: self._stop.is_set() or predicate(self), timeout_s)
            return bool(predicate(self))

    def on_change(self, callback: Callable[[list[KeyChange[T]]], Any]) -> None:
        """Call it with what has changed, on the mirror's thread, when it can be read here already.
        What it raises is logged."""
        self._callbacks.append(callback)

    # -- following

    def _run(self) -> None:
        pause_s = PAUSE_S_MIN
        while not self._stop.is_set():
            try:
                if self._watch is None:
                    self._tell(self._differing(self._list()))
                if not self._follow():
                    return  # the store was closed
            except StoreError as error:
                if self._trouble is None and not self._stop.is_set():
                    _log.warning("the mirror of %r is not fresh: %s", self._prefix, error)
                    pause_s = PAUSE_S_MIN
                self._trouble = error
                self._stop.wait(pause_s)
                pause_s = min(2 * pause_s, PAUSE_S_MAX)

    def _follow(self) -> bool:
        """Until the end (False), or until everything has to be listed again (True)."""
        watch = self._watch
        assert watch is not None
        while not self._stop.is_set():
            event = watch.next(POLL_S)
            if event is None and watch.closed:
                return False
            self._heard(watch.heard_s)
            batch = []
            while event is not None and event.kind != "RESET":
                batch.append(event)
                event = watch.next(0) if len(batch) < _BATCH else None
            if self._are_many_deletions(batch):
                self._check(watch)
            self._take(batch)
            if event is not None:  # the listing will be newer than whatever else the watch holds
                watch.close()
                self._watch = None
                return True
        return False

    def _are_many_deletions(self, events: Sequence[Event]) -> bool:
        """Whether they take away most of what is known, as somebody does who empties the store."""
        deletions = sum(event.kind == "DELETE" for event in events)
        return deletions >= DELETIONS_MIN and 2 * deletions > len(self._records)

    def _check(self, watch: Watch) -> None:
        """Where the store is not accepted, everything is listed again, until it is."""
        try:
            self._accepts()
        except StoreError:
            watch.close()
            self._watch = None
            raise

    def _heard(self, at_s: float) -> None:
        """The store has answered then. Silence is no answer, and ends no trouble."""
        if at_s <= self._heard_s:
            return
        self._heard_s = at_s
        if self._trouble is not None:
            self._trouble = None
            _log.info("the mirror of %r is fresh again", self._prefix)

    def _list(self) -> dict[str, Record]:
        """Read everything, and begin a watch behind it; -> what was known before."""
        records, revision = self._store.range(self._prefix)
        if self._revision >= 0:
            self._accepts()
        skip = len(self._prefix)
        fresh = {record.key[skip:]: record for record in records}
        old = self._records
        self._watch = self._store.watch(self._prefix, revision)
        with self._changed:
            self._records, self._revision = fresh, revision
            for key in old.keys() - fresh.keys():
                self._decoded.pop(self._prefix + key, None)
            self._changed.notify_all()
        self._heard(monotonic())
        return old

    def _differing(self, old: dict[str, Record]) -> list[KeyChange[T]]:
        """What has changed since that content, if anybody wants to know."""
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
            return None  # it was logged when it was current

    def _take(self, events: Iterable[Event]) -> None:
        with self._changed:
            changes = [self._apply(event) for event in events if event.kind != "SYNC"]
            self._changed.notify_all()
        self._tell(changes)

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

    def _tell(self, changes: list[KeyChange[T]]) -> None:
        for callback in self._callbacks if changes else ():
            try:
                callback(changes)
            except Exception:
                _log.exception("a callback of the mirror of %r", self._prefix)

    # -- the end

    def close(self) -> None:
        """What was known stays readable. Closing twice is fine."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        watch = self._watch
        if watch is not None:
            watch.close()
        if self._thread is not threading.current_thread():
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
