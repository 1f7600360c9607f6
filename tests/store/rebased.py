"""An etcd store whose revisions are counted from when it was opened, so that the conformance tests
can state expected revisions."""

from collections.abc import Callable, Sequence

import msgspec

from clipper.store import ABSENT, Compare, Event, Op, Record, Store, TxnResult, Watch


class Rebased(Store):
    """A store whose revisions begin at 0, over an etcd in which other tests have written. It is
    correct as long as nobody else writes to that etcd."""

    def __init__(self, store: Store) -> None:
        self.name, self._store, self._origin = store.name, store, store.revision

    def grant(self, ttl_s: float) -> tuple[str, float]:
        return self._store.grant(ttl_s)

    def renew(self, lease: str) -> float:
        return self._store.renew(lease)

    def revoke(self, lease: str) -> None:
        self._store.revoke(lease)

    def close(self) -> None:
        self._store.close()

    def _here(self, record: Record | None) -> Record | None:
        if record is None:
            return None
        origin = self._origin
        return msgspec.structs.replace(
            record,
            revision=record.revision - origin,
            created_revision=record.created_revision - origin,
        )

    def _there(self, compare: Compare) -> Compare:
        if (
            compare.field in ("revision", "created_revision")
            and isinstance(compare.equals, int)
            and compare.equals != ABSENT
        ):
            return msgspec.structs.replace(compare, equals=compare.equals + self._origin)
        return compare

    def get(self, key: str) -> Record | None:
        return self._here(self._store.get(key))

    def range(self, prefix: str) -> tuple[list[Record], int]:
        records, revision = self._store.range(prefix)
        return [r for r in map(self._here, records) if r], revision - self._origin

    def txn(
        self, compares: Sequence[Compare], then: Sequence[Op], orelse: Sequence[Op] = ()
    ) -> TxnResult:
        result = self._store.txn([self._there(compare) for compare in compares], then, orelse)
        return TxnResult(
            result.ok, tuple(map(self._here, result.results)), result.revision - self._origin
        )

    def watch(self, prefix: str, from_revision: int | None = None) -> Watch:
        watch = self._store.watch(
            prefix, None if from_revision is None else from_revision + self._origin
        )
        return _RebasedWatch(watch, self._origin, self._here)

    @property
    def revision(self) -> int:
        return self._store.revision - self._origin


class _RebasedWatch:
    def __init__(
        self, watch: Watch, origin: int, here: Callable[[Record | None], Record | None]
    ) -> None:
        self._watch, self._origin, self._here, self.close = watch, origin, here, watch.close

    def next(self, timeout_s: float | None = None) -> Event | None:
        event = self._watch.next(timeout_s)
        if event is None:
            return None
        return msgspec.structs.replace(
            event, revision=event.revision - self._origin, record=self._here(event.record)
        )

    @property
    def contact_s(self) -> float:
        return self._watch.contact_s

    @property
    def closed(self) -> bool:
        return self._watch.closed
