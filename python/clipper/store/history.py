"""Who changed what, and when: one entry for each change of the catalog, written in the same transaction as the change.

So there is no change without its entry, nor an entry without its change. The last `ENTRIES_MAX` are kept: an entry's number is
that of the catalog's write, and its key is the number modulo `ENTRIES_MAX`.
"""

import contextlib
import getpass
import os
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from clipper.store.store import Delete, Op, Put, Record, Store

ENTRIES_MAX: Final = 1000
_PREFIX: Final = "history/"
_BYTES_MAX: Final = 16 << 10  # of the records before and after; larger ones are left out
_LEFT_OUT: Final = msgspec.Raw(b'"(too long to keep)"')


class Changed(msgspec.Struct, frozen=True):
    """One record before and after; null: it was not there. They are JSON, as the store has them."""

    key: str
    before: msgspec.Raw
    after: msgspec.Raw


class Entry(msgspec.Struct, frozen=True):
    """number: of the catalog's writes, from 1.  time_us: microseconds since 1970 by the wall clock.  actor: who, as they say."""

    number: int
    time_us: int
    actor: str
    verb: str
    changed: tuple[Changed, ...]


@dataclass(slots=True)
class Acting:
    """Who acts, and by which verb. dry: nothing is written.  entries: what was written (or would have been)."""

    actor: str
    verb: str
    dry: bool = False
    entries: list[Entry] = field(default_factory=list)


_acting: ContextVar[Acting | None] = ContextVar("clipper_acting", default=None)


@contextlib.contextmanager
def acting(actor: str, verb: str, *, dry: bool = False) -> Iterator[Acting]:
    """What this thread changes in the block is entered under this name. dry: it is checked, and not written."""
    now = Acting(actor, verb, dry)
    token = _acting.set(now)
    try:
        yield now
    finally:
        _acting.reset(token)


def actor_here() -> str:
    """Who acts when nobody is named: the user and the process."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user} (process {os.getpid()})"


def enter(number: int, time_us: int, verb: str, ops: Sequence[Op], records: Mapping[str, Record], prefix: str) -> Put | None:
    """The operation that records a change by `ops`; None when the change must not be made, for this is a rehearsal."""
    who = _acting.get() or Acting(actor_here(), verb)
    entry = Entry(number, time_us, who.actor, who.verb or verb, tuple(_changed(ops, records, prefix)))
    who.entries.append(entry)
    return None if who.dry else Put(f"{_PREFIX}{number % ENTRIES_MAX:04}", msgspec.json.encode(entry))


def _changed(ops: Sequence[Op], records: Mapping[str, Record], prefix: str) -> Iterator[Changed]:
    for op in ops:
        if isinstance(op, Put | Delete):
            old = records.get(op.key)
            before, after = _kept(old.value if old else b""), _kept(op.value if isinstance(op, Put) else b"")
            yield Changed(op.key.removeprefix(prefix), before, after)


def _kept(value: bytes) -> msgspec.Raw:
    if len(value) > _BYTES_MAX:
        return _LEFT_OUT
    try:
        msgspec.json.decode(value or b"null")
    except msgspec.MsgspecError:
        return msgspec.Raw(b'"(not readable)"')
    return msgspec.Raw(value or b"null")


def entries(store: Store, count: int = ENTRIES_MAX) -> list[Entry]:
    """The last `count`, the oldest first. What cannot be read is left out."""
    found: list[Entry] = []
    for record in store.range(_PREFIX)[0]:
        with contextlib.suppress(msgspec.MsgspecError):
            found.append(msgspec.json.decode(record.value, type=Entry))
    return sorted(found, key=lambda entry: entry.number)[-count:] if count > 0 else []


def plain(entry: Entry) -> dict[str, Any]:
    """An entry of builtins."""
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(entry))
    return found
