"""Who changed what, and when: one entry for each change of the catalog, written in the same
transaction as the change.

So there is no change without its entry, nor an entry without its change. The last `ENTRIES_MAX` are
kept: an entry's number is that of the catalog's write, and its key is the number modulo
`ENTRIES_MAX`.

What management changes of the mesh has entries of its own, as many, so that thousands of
registrations do not drive out those of the catalog. There is no one write that all of these pass:
who writes them takes numbers from a counter, some at a time, and those it does not use are left
out. They are in the order of their times.
"""

import contextlib
import getpass
import heapq
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from clipper.store.store import Delete, Op, Put, Record, Store

ENTRIES_MAX: Final = 1000
_PREFIX: Final = "history/"
MESH: Final = "mesh/history/"
_COUNTER: Final = "mesh/history-number"
_AT_ONCE: Final = 16  # numbers
_BYTES_MAX: Final = 16 << 10  # of the records before and after; larger ones are left out
_LEFT_OUT: Final = msgspec.Raw(b'"(too long to keep)"')


class Changed(msgspec.Struct, frozen=True):
    """One record before and after; null: it was not there. They are JSON, as the store has them."""

    key: str
    before: msgspec.Raw
    after: msgspec.Raw


class HistoryEntry(msgspec.Struct, frozen=True):
    """number: of the catalog's writes, from 1; one of the mesh has a number of its own.
    time_us: microseconds since 1970 by the wall clock.  actor: who, as they say."""

    number: int
    time_us: int
    actor: str
    verb: str
    changed: tuple[Changed, ...]


@dataclass(slots=True)
class AuditContext:
    """Who acts, and by which verb. dry: nothing is written.  entries: what was written (or would
    have been)."""

    actor: str
    verb: str
    dry: bool = False
    entries: list[HistoryEntry] = field(default_factory=list)


_acting: ContextVar[AuditContext | None] = ContextVar("clipper_acting", default=None)


@contextlib.contextmanager
def audit_context(actor: str, verb: str, *, dry: bool = False) -> Iterator[AuditContext]:
    """What this thread changes in the block is entered under this name. dry: it is checked, and not
    written."""
    now = AuditContext(actor, verb, dry)
    token = _acting.set(now)
    try:
        yield now
    finally:
        _acting.reset(token)


def is_dry_run() -> bool:
    """Whether what this thread changes now is only checked."""
    who = _acting.get()
    return who is not None and who.dry


class MeshEntryNumbers:
    """Of entries of the mesh. Threads: any; StoreError."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._next = self._end = 0
        self._lock = threading.Lock()

    def next(self) -> int:
        with self._lock:
            if self._next == self._end:
                taken = self._store.update(
                    _COUNTER, lambda value: str(int(value or b"0") + _AT_ONCE).encode()
                )
                self._end = int(taken.value) + 1
                self._next = self._end - _AT_ONCE
            self._next += 1
            return self._next - 1


def default_actor() -> str:
    """Who acts when nobody is named: the user and the process."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user} (process {os.getpid()})"


def enter(
    number: int,
    time_us: int,
    verb: str,
    ops: Sequence[Op],
    records: Mapping[str, Record],
    prefix: str,
    under: str = _PREFIX,
) -> Put | None:
    """The operation that records a change by `ops`; None when the change must not be made, for this
    is a rehearsal. records: before, by key.  prefix: of their keys, which the entry is not told.
    under: where it is kept, `MESH` for the mesh's.
    """
    who = _acting.get() or AuditContext(default_actor(), verb)
    entry = HistoryEntry(
        number, time_us, who.actor, who.verb or verb, tuple(_changed(ops, records, prefix))
    )
    who.entries.append(entry)
    return None if who.dry else Put(f"{under}{number % ENTRIES_MAX:04}", msgspec.json.encode(entry))


def _changed(ops: Sequence[Op], records: Mapping[str, Record], prefix: str) -> Iterator[Changed]:
    for op in ops:
        if isinstance(op, Put | Delete):
            old = records.get(op.key)
            before, after = (
                _kept(old.value if old else b""),
                _kept(op.value if isinstance(op, Put) else b""),
            )
            yield Changed(op.key.removeprefix(prefix), before, after)


def _kept(value: bytes) -> msgspec.Raw:
    if len(value) > _BYTES_MAX:
        return _LEFT_OUT
    try:
        msgspec.json.decode(value or b"null")
    except msgspec.MsgspecError:
        return msgspec.Raw(b'"(not readable)"')
    return msgspec.Raw(value or b"null")


def entries(store: Store, count: int = ENTRIES_MAX) -> list[HistoryEntry]:
    """The last `count`, the oldest first. What cannot be read is left out."""
    of_catalog = sorted(_read(store, _PREFIX), key=lambda entry: entry.number)
    of_mesh = sorted(_read(store, MESH), key=lambda entry: (entry.time_us, entry.number))
    found = [*heapq.merge(of_catalog, of_mesh, key=lambda entry: entry.time_us)]
    return found[-count:] if count > 0 else []


def _read(store: Store, under: str) -> Iterator[HistoryEntry]:
    for record in store.range(under)[0]:
        with contextlib.suppress(msgspec.MsgspecError):
            yield msgspec.json.decode(record.value, type=HistoryEntry)


def plain(entry: HistoryEntry) -> dict[str, Any]:
    """An entry of builtins."""
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(entry))
    return found
