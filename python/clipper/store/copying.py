"""Copying one store to another, for example from a SQLite file to Redis or etcd.

Keys and values are copied. Revisions are not: they belong to the store. Keys on a lease are not
copied either, because the nodes that own them write them again. Keys that exist only in the target
are deleted if the caller requests it.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator

import msgspec

from clipper.errors import InvalidInput, StoreError
from clipper.store.continuity import GUARD, Continuity
from clipper.store.follower import DELETIONS_MIN
from clipper.store.store import Delete, Event, Op, Put, Record, Store

_OPS_MAX, _BYTES_MAX = 100, 512 << 10  # of one transaction: within the limits of every backend


class Copied(msgspec.Struct, frozen=True):
    """The result of a copy.

    records: in the source, without those on a lease.  leased: records not copied because of a
    lease.
    written, deleted: in the target.  revision: of the source that the target now matches.
    """

    records: int
    leased: int
    written: int
    deleted: int
    revision: int


def copy(
    source: Store,
    target: Store,
    prefix: str = "",
    *,
    replace: bool = False,
    dry_run: bool = False,
) -> Copied:
    """Make the target's keys equal to those of the source. dry_run: only count what that takes.

    Raises InvalidInput when the target has other records, unless `replace` is True.
    """
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
    if not dry_run:
        _apply(target, ops)
    return Copied(len(ours), len(records) - len(ours), len(ops) - deleted, deleted, revision)


def different(source: Store, target: Store, prefix: str = "") -> list[str]:
    """Return the keys that are missing in one store or have different values; leased keys are
    ignored.
    """
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
    check_s: float = 0.5,
) -> None:
    """Copy the changes of the source after `revision`, until `on_change` returns False.

    on_change: called with the number of changes copied; 0 when none came within `check_s` seconds.
    Raises StoreError, and leaves the target as it is, when the source came back empty, older or as
    another one.
    """
    with contextlib.closing(source.watch(prefix, revision)) as watch:
        while True:
            changes, reset = _next_changes(watch.next(check_s), lambda: watch.next(0))
            if reset or isinstance(changes.get(GUARD), Delete):  # no server deletes the guard
                _check_continues(source, target, prefix)
            if reset:
                copied = copy(source, target, prefix, replace=True)
                count = copied.written + copied.deleted
            else:
                _apply(target, list(changes.values()))
                count = len(changes)
            if not on_change(count) or watch.closed:
                return


def _check_continues(source: Store, target: Store, prefix: str) -> None:
    """Raise StoreError unless the source, whose watch was reset, continues what the target has."""
    if GUARD.startswith(prefix):
        continuity = Continuity(source.name)
        continuity.judge(target.get(GUARD))
        continuity.judge(source.get(GUARD))
    there = {record.key for record in source.range(prefix)[0]}
    kept = [record.key for record in target.range(prefix)[0] if not record.lease]
    gone = sum(key not in there for key in kept)
    if gone >= DELETIONS_MIN and 2 * gone > len(kept):
        raise StoreError(
            f"store {source.name} came back without {gone} of {len(kept)} records that"
            f" {target.name} has.",
            hint="Nothing is deleted. If it is meant, copy once more with --replace.",
        )


def _next_changes(
    event: Event | None, more: Callable[[], Event | None]
) -> tuple[dict[str, Op], bool]:
    """Return the last change of each key among the waiting events; True if some were missed."""
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


def _apply(target: Store, ops: list[Op]) -> None:
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
