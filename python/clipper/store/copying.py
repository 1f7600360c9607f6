"""From one store into another: a server that outgrows its file moves to Redis or etcd, or back.

Keys and values move; revisions begin anew, for they are the store's own. Keys on a lease stay
behind: they say which nodes live, and those write theirs anew. What is in the target and not in the
source is deleted only if that was asked for.
"""

from collections.abc import Callable, Iterable, Iterator

import msgspec

from clipper.errors import InvalidInput
from clipper.store.store import Delete, Event, Op, Put, Record, Store

_OPS_MAX, _BYTES_MAX = 100, 512 << 10  # of a transaction: what the smallest of the servers takes


class Copied(msgspec.Struct, frozen=True):
    """records: in the source, without those on a lease.  leased: left behind.  written, deleted: in
    the target. revision: of the source that the target has."""

    records: int
    leased: int
    written: int
    deleted: int
    revision: int


def copy(source: Store, target: Store, prefix: str = "", *, replace: bool = False) -> Copied:
    """Make the target's keys those of the source. InvalidInput when it holds others, unless they
    may be replaced."""
    records, revision = source.range(prefix)
    ours = {record.key: record for record in records if not record.lease}
    theirs = {record.key: record for record in target.range(prefix)[0] if not record.lease}
    foreign = [
        key for key, record in theirs.items() if key not in ours or ours[key].value != record.value
    ]
    if foreign and not replace:
        raise InvalidInput(
            f"{target.name} is not empty: {len(foreign)} of its records are others, as"
            f" {foreign[0]!r}.",
            hint="Name an empty one, or replace what is there: --replace.",
        )
    ops: list[Op] = [Delete(key) for key in theirs if key not in ours]
    deleted = len(ops)
    ops += [
        Put(key, record.value)
        for key, record in ours.items()
        if key not in theirs or theirs[key].value != record.value
    ]
    _carry_out(target, ops)
    return Copied(len(ours), len(records) - len(ours), len(ops) - deleted, deleted, revision)


def different(source: Store, target: Store, prefix: str = "") -> list[str]:
    """The keys that one has and the other has not, or with another value; those on a lease do not
    count."""
    ours, theirs = (
        {record.key: record.value for record in store.range(prefix)[0] if not record.lease}
        for store in (source, target)
    )
    return sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))


def follow(
    source: Store,
    target: Store,
    revision: int,
    prefix: str = "",
    *,
    on_change: Callable[[int], bool],
    look_s: float = 0.5,
) -> None:
    """Carry over what changes in the source after `revision`. on_change: called with the number of
    changes, 0 at a quiet look; it ends when that returns False."""
    watch = source.watch(prefix, revision)
    try:
        while True:
            changes, reset = _next_changes(watch.next(look_s), lambda: watch.next(0))
            if reset:
                count = sum(_counts(copy(source, target, prefix, replace=True)))
            else:
                _carry_out(target, list(changes.values()))
                count = len(changes)
            if not on_change(count) or watch.closed:
                return
    finally:
        watch.close()


def _counts(copied: Copied) -> tuple[int, int]:
    return copied.written, copied.deleted


def _next_changes(
    event: Event | None, more: Callable[[], Event | None]
) -> tuple[dict[str, Op], bool]:
    """What is there now: the last change of each key; and whether some were missed."""
    changes: dict[str, Op] = {}
    while event is not None and len(changes) < _OPS_MAX:
        if event.kind == "RESET":
            return {}, True
        if event.kind != "SYNC":
            changes[event.key] = _op(event.key, event.record)
        event = more()
    return changes, False


def _op(key: str, record: Record | None) -> Op:
    return Delete(key) if record is None or record.lease else Put(key, record.value)


def _carry_out(target: Store, ops: list[Op]) -> None:
    for some in _transactions(ops):
        target.txn((), some)


def _transactions(ops: Iterable[Op]) -> Iterator[list[Op]]:
    some: list[Op] = []
    nbytes = 0
    for op in ops:
        size = len(op.key) + (len(op.value) if isinstance(op, Put) else 0)
        if some and (len(some) == _OPS_MAX or nbytes + size > _BYTES_MAX):
            yield some
            some, nbytes = [], 0
        some.append(op)
        nbytes += size
    if some:
        yield some
