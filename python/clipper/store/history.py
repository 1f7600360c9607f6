"""The audit log: one entry for each change of the catalog or the mesh.

An entry is written in the same transaction as the change, so neither exists without the other. The
last `ENTRIES_MAX` are kept: an entry's number is that of the catalog's write, and its key is the
number modulo `ENTRIES_MAX`.

Management changes of the mesh have as many entries of their own, so that thousands of registrations
do not displace those of the catalog. Their writers reserve numbers from a shared counter, several
at a time; unused numbers are skipped. These entries are ordered by time.
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
_AT_ONCE: Final = 16  # numbers reserved at a time
_BYTES_MAX: Final = 16 << 10  # of a record before or after; larger ones are omitted
_OMITTED: Final = msgspec.Raw(b'"(too long to keep)"')


class Changed(msgspec.Struct, frozen=True):
    """One record before and after a change, as JSON; null if it did not exist."""

    key: str
    before: msgspec.Raw
    after: msgspec.Raw


class HistoryEntry(msgspec.Struct, frozen=True):
    """One entry of the audit log.

    number: of the catalog's writes, from 1; entries of the mesh are numbered separately.
    time_us: microseconds since 1970 by the wall clock.  actor: the name that the caller gave.
    """

    number: int
    time_us: int
    actor: str
    verb: str
    changed: tuple[Changed, ...]


@dataclass(slots=True)
class AuditContext:
    """The actor and the verb of the changes in a block.

    dry: changes are checked and not written.  entries: those written, or that would have been.
    """

    actor: str
    verb: str
    dry: bool = False
    entries: list[HistoryEntry] = field(default_factory=list)


_acting: ContextVar[AuditContext | None] = ContextVar("clipper_acting", default=None)


@contextlib.contextmanager
def audit_context(actor: str, verb: str, *, dry: bool = False) -> Iterator[AuditContext]:
    """Record changes that this thread makes in the block under this actor and verb.

    dry: check the changes without writing them.
    """
    now = AuditContext(actor, verb, dry)
    token = _acting.set(now)
    try:
        yield now
    finally:
        _acting.reset(token)


def is_dry_run() -> bool:
    """Return True if changes of this thread are only checked."""
    context = _acting.get()
    return context is not None and context.dry


class MeshEntryNumbers:
    """Numbers for the mesh's entries, reserved in blocks. Threads: any. Errors: StoreError."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._next = self._end = 0
        self._lock = threading.Lock()

    def next(self) -> int:
        """Return the next number; every 16th call writes to the store."""
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
    """Return the user and the process, for changes without a named actor."""
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
    """Return the operation that records a change; None in a dry run, which must write nothing.

    ops: the change.  records: the records before it, by key.  prefix: of the keys; omitted in the
    entry.  under: where entries are kept; `MESH` for those of the mesh.
    """
    context = _acting.get() or AuditContext(default_actor(), verb)
    entry = HistoryEntry(
        number, time_us, context.actor, context.verb or verb, tuple(_changed(ops, records, prefix))
    )
    context.entries.append(entry)
    return (
        None
        if context.dry
        else Put(f"{under}{number % ENTRIES_MAX:04}", msgspec.json.encode(entry))
    )


def _changed(ops: Sequence[Op], records: Mapping[str, Record], prefix: str) -> Iterator[Changed]:
    for op in ops:
        if isinstance(op, Put | Delete):
            old = records.get(op.key)
            before, after = (
                _json_of(old.value if old else b""),
                _json_of(op.value if isinstance(op, Put) else b""),
            )
            yield Changed(op.key.removeprefix(prefix), before, after)


def _json_of(value: bytes) -> msgspec.Raw:
    if len(value) > _BYTES_MAX:
        return _OMITTED
    try:
        msgspec.json.decode(value or b"null")
    except msgspec.MsgspecError:
        return msgspec.Raw(b'"(not readable)"')
    return msgspec.Raw(value or b"null")


def entries(store: Store, count: int = ENTRIES_MAX) -> list[HistoryEntry]:
    """Return the last `count` entries, oldest first; unreadable ones are omitted."""
    of_catalog = sorted(_read(store, _PREFIX), key=lambda entry: entry.number)
    of_mesh = sorted(_read(store, MESH), key=lambda entry: (entry.time_us, entry.number))
    found = [*heapq.merge(of_catalog, of_mesh, key=lambda entry: entry.time_us)]
    return found[-count:] if count > 0 else []


def _read(store: Store, under: str) -> Iterator[HistoryEntry]:
    for record in store.range(under)[0]:
        with contextlib.suppress(msgspec.MsgspecError):
            yield msgspec.json.decode(record.value, type=HistoryEntry)


def plain(entry: HistoryEntry) -> dict[str, Any]:
    """Return an entry as builtins (dicts, lists, strings and numbers)."""
    return dict(msgspec.json.decode(msgspec.json.encode(entry)))
