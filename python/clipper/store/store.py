"""The interface of the key-value store, through which nodes share state and a node survives a
restart.

tests/store checks for every backend:
  1. Each change has one revision of the whole store; revisions strictly grow and survive a restart.
  2. A transaction is atomic, and its changes share one revision. Without changes it has none.
  3. A read after a write sees it, from any thread and, on disk, from any process.
  4. A watch from revision r delivers exactly the changes after r, in order and once, or RESET,
  after which the reader reads everything again.
  5. Keys sort by their UTF-8 bytes; a range is one snapshot.
  6. Keys put with a lease disappear with it, all in one revision; a put without a lease detaches
  its key from the lease.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Generic, Literal, NamedTuple, Protocol, Self, TypeVar

import msgspec

from clipper.component.threads import SYSTEM_THREADS, Threads
from clipper.errors import InvalidInput, LeaseLost, StoreConflict, StoreError
from clipper.store.lease import Lease
from clipper_container.backoff import Backoff

if TYPE_CHECKING:
    from clipper.store.expiring import ExpiringLists

ABSENT: Final = 0  # the revision of a key that does not exist
KEY_BYTES_MAX: Final = 1024
VALUE_BYTES_MAX: Final = 1 << 20
TXN_OPS_MAX: Final = 128
TTL_S_MIN, TTL_S_MAX = 0.05, 86_400.0  # of leases; a server's minimum may be longer: etcd's is 2 s
EVENTS_MAX: Final = 10_000  # changes kept for watches; a watch further behind gets RESET
TRIES_MAX: Final = 1000  # of one transaction, while other writers are faster
TRIES_AT_ONCE: Final = 3  # of these, the first ones, without a pause between
TRIES_S: Final = 30.0
AGAIN_S_MIN, AGAIN_S_MAX = 0.001, 0.05  # between two of these tries
T = TypeVar("T")


# it contains no containers, so the garbage collector can skip it
class Record(msgspec.Struct, frozen=True, gc=False):
    """A key and its value.

    revision: of the last change.  created_revision: of the first change since the key was absent.
    version: number of writes since then.  lease: id of the lease that the key belongs to; "" for
    none.
    """

    key: str
    value: bytes
    revision: int
    created_revision: int
    version: int
    lease: str = ""


class Compare(msgspec.Struct, frozen=True):
    """A condition of a transaction: the record's `field` equals `equals`.

    An absent key has revision, created_revision and version 0.
    """

    key: str
    equals: int | bytes
    field: Literal["revision", "created_revision", "version", "value"] = "revision"

    def holds(self, record: Record | None) -> bool:
        """Return True if the condition holds for a record; None for an absent key."""
        if record is None:
            return self.field != "value" and self.equals == ABSENT
        return bool(getattr(record, self.field) == self.equals)


class Put(msgspec.Struct, frozen=True):
    """Write a key.

    lease: id of the lease with which the key disappears. If it has expired the transaction raises
    LeaseLost and writes nothing. lasting: False if a power cut may undo the write, although no kill
    may; a store that writes to this host's disk then need not wait for it.
    """

    key: str
    value: bytes
    lease: str = ""
    lasting: bool = True


class Delete(msgspec.Struct, frozen=True):
    """Delete a key; no effect if it does not exist."""

    key: str


class Get(msgspec.Struct, frozen=True):
    """Read a key as it was before the transaction."""

    key: str


Op = Put | Delete | Get


class TxnResult(msgspec.Struct, frozen=True):
    """The result of a transaction.

    ok: all compares held, so `then` was executed.
    results: per operation the record that was written, deleted or read, or None.
    revision: of the store after the transaction.
    """

    ok: bool
    results: tuple[Record | None, ...]
    revision: int


class Event(msgspec.Struct, frozen=True, gc=False):
    """An event of a watch.

    PUT, DELETE: a change; `record` is the new one, None after DELETE.
    SYNC: everything up to `revision` was delivered; once, after the content at the start of the
    watch.
    RESET: changes were missed; read the range again and ignore events up to its revision.
    """

    kind: Literal["PUT", "DELETE", "SYNC", "RESET"]
    revision: int
    key: str = ""
    record: Record | None = None


class Watch(Protocol):
    """A stream of events in order. Threads: any may close it; one reads it."""

    @property
    def contact_s(self) -> float:
        """Time (time.monotonic()) at which the store last answered this watch, even without an
        event.

        A timeout of `next` is no answer of the store.
        """

    def next(self, timeout_s: float | None = None) -> Event | None:
        """Return the next event; None on timeout, or when the watch or its store is closed."""

    @property
    def closed(self) -> bool:
        """True once the watch or its store is closed."""

    def close(self) -> None:
        """End the watch and wake its reader."""


class Store(Protocol):
    """The interface of a store. Threads: any.

    Errors: StoreError (unreachable, full, damaged), StoreConflict, LeaseLost, InvalidInput (a key,
    value or transaction beyond the limits).
    """

    name: str
    remote: bool = False  # True if calls go over a network
    threads: Threads = SYSTEM_THREADS  # in which mirrors and leases of the store wait

    def get(self, key: str) -> Record | None:
        """Return the record; None if the key does not exist."""

    def range(self, prefix: str) -> tuple[list[Record], int]:
        """Return the records under a prefix, sorted by key, and the revision of their snapshot."""

    def txn(
        self, compares: Sequence[Compare], then: Sequence[Op], orelse: Sequence[Op] = ()
    ) -> TxnResult:
        """Execute `then` if all compares hold, else `orelse`, atomically.

        Reads see the store before the transaction.
        """

    def watch(self, prefix: str, from_revision: int | None = None) -> Watch:
        """Watch keys under a prefix for changes after `from_revision`; None: after now."""

    @property
    def revision(self) -> int:
        """Return the revision of the newest change."""

    def close(self) -> None:
        """End the watches and close files and connections. Calling it twice is fine."""

    def lists(self, ttl_s: float) -> "ExpiringLists | None":
        """Return lists of the store's own; None: it has none, see store/expiring.py."""
        return None

    # -- leases: implemented by backends; callers use `lease`

    def grant(self, ttl_s: float) -> tuple[str, float]:
        """Grant a lease; return its id and its time to live, which may exceed `ttl_s`."""

    def renew(self, lease: str) -> float:
        """Renew a lease and return its time to live in seconds.

        Raises LeaseLost if it has expired.
        """

    def revoke(self, lease: str) -> None:
        """End a lease and delete its keys. No effect if it has ended."""

    # -- implemented with the above

    def lease(self, ttl_s: float) -> Lease:
        """Grant a lease: keys put with its id disappear `ttl_s` after its last renewal.

        `Lease.renew_in_background()` renews it in time.
        """
        check_ttl(ttl_s)
        start_s = self.threads.now_s()
        id, ttl_s = self.grant(ttl_s)
        return Lease(self, id, ttl_s, start_s)

    def put(self, key: str, value: bytes, lease: str = "") -> Record:
        """Write a key and return its record."""
        record = self.txn((), (Put(key, value, lease),)).results[0]
        assert record is not None
        return record

    def put_if(self, key: str, value: bytes, revision: int, lease: str = "") -> Record:
        """Write a key if it is still at `revision`; ABSENT: if it does not exist.

        Raises StoreConflict otherwise.
        """
        result = self.txn((Compare(key, revision),), (Put(key, value, lease),))
        record = result.results[0] if result.ok else None
        if record is None:
            raise StoreConflict(
                f"{key!r} is not at revision {revision}.", hint="Read it again and retry."
            )
        return record

    def delete(self, key: str) -> bool:
        """Delete a key; return False if it did not exist."""
        return self.txn((), (Delete(key),)).results[0] is not None

    def transact(
        self,
        decide: "Callable[[Transaction], T]",
        *,
        hint: Mapping[str, Record] | None = None,
        dry: bool = False,
        tries: int | None = None,
        limit_s: float = TRIES_S,
    ) -> "Committed[T]":
        """Execute the transaction that `decide` fills, if nothing that it read has changed.

        decide: is called again, with the newer records, when another writer was faster, so it
        must have no other effect; what it raises is raised here. When the lease of
        one of its writes is lost it is called once more, to use a new one (`lease_lost`).
        hint: records as known here, perhaps old, which save a read.  dry: write nothing.
        tries, limit_s: of a transaction between those of other writers; then StoreConflict.
        tries: None: TRIES_MAX.
        """
        until_s = self.threads.now_s() + limit_s
        backoff = Backoff(AGAIN_S_MIN, AGAIN_S_MAX, rng=self.threads.random)
        known, lease_lost = dict(hint or {}), False
        for tried in range(TRIES_MAX if tries is None else tries):
            if tried >= TRIES_AT_ONCE:
                self.threads.event().wait(backoff.next_s())
            if tried and self.threads.now_s() > until_s:
                break
            transaction = Transaction(self, known, lease_lost=lease_lost)
            value = decide(transaction)
            if dry:
                return Committed(value, {})
            try:
                written = transaction.commit()
            except LeaseLost:
                if lease_lost:
                    raise
                lease_lost = True
                continue
            if written is not None:
                return Committed(value, written)
            known = {}
        raise StoreConflict(
            f"{transaction.subject!r} was changed by other writers {tried + 1} times in a row.",
            hint="Try again later.",
        )

    def update(self, key: str, change: Callable[[bytes | None], bytes]) -> Record:
        """Write `change(value)`, where value is None for an absent key; see `transact`."""

        def decide(transaction: Transaction) -> None:
            old = transaction.get(key)
            transaction.put(key, change(old.value if old else None))

        return self.transact(decide).written[key]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Committed(NamedTuple, Generic[T]):
    """The outcome of `Store.transact`.

    value: what `decide` returned.  written: the records as they were written, by key.
    """

    value: T
    written: Mapping[str, Record]


class Transaction:
    """A decision in progress: the records that it read and the writes that it wants. Threads: one.

    hint: records as known before, perhaps old.  lease_lost: the last try failed because the lease
    of one of its writes is lost.
    """

    def __init__(
        self, store: Store, hint: Mapping[str, Record] | None = None, *, lease_lost: bool = False
    ) -> None:
        self.lease_lost = lease_lost
        self._store, self._hint = store, hint or {}
        self._is_hinted = False  # whether something that was read may be old
        self._read: dict[str, Record | None] = {}
        self._compares: list[Compare] = []
        self._ops: dict[str, Put | Delete] = {}

    # -- reading

    def get(self, key: str) -> Record | None:
        """Return a record, which must be the same when the transaction is executed.

        A second `get` of a key returns the same, so a decision sees one state of it.
        """
        if key not in self._read:
            hinted = self._hint.get(key)
            self._is_hinted = self._is_hinted or hinted is not None
            self._read[key] = hinted if hinted is not None else self._store.get(key)
        return self._read[key]

    def range(self, prefix: str, guard: str) -> tuple[list[Record], int]:
        """Return the records under a prefix and the revision of the snapshot.

        guard: the key of a record under the prefix that every change there writes too; it must be
        the same when the transaction is executed.
        """
        records, revision = self._store.range(prefix)
        self._read[guard] = next((record for record in records if record.key == guard), None)
        return records, revision

    @property
    def read(self) -> dict[str, Record]:
        """Return the records that were read and exist, by key."""
        return {key: record for key, record in self._read.items() if record is not None}

    def require(self, *compares: Compare) -> None:
        """Require more conditions when the transaction is executed."""
        self._compares.extend(compares)

    # -- writing

    def put(self, key: str, value: bytes, lease: str = "", *, lasting: bool = True) -> None:
        """Write a key; see Put."""
        self._ops[key] = Put(key, value, lease, lasting)

    def delete(self, key: str) -> None:
        """Delete a key."""
        self._ops[key] = Delete(key)

    def apply(self, ops: "Iterable[Put | Delete]") -> None:
        """Add writes and deletions; the last one of a key holds."""
        for op in ops:
            self._ops[op.key] = op

    # -- the end

    @property
    def subject(self) -> str:
        """Return the key that errors name: the first that was read, or else written."""
        return next(iter([*self._read, *self._ops]), "")

    def commit(self) -> dict[str, Record] | None:
        """Execute the transaction; return the records that it wrote, None if something that was
        read has changed.

        A decision without writes needs the store only if a record that it read may be old.
        """
        if not self._ops and not self._is_hinted:
            return {}
        same = [
            Compare(key, record.revision if record is not None else ABSENT)
            for key, record in self._read.items()
        ]
        ops = tuple(self._ops.values())
        done = self._store.txn((*self._compares, *same), ops)
        if not done.ok:
            return None
        written = zip(ops, done.results, strict=True)
        return {
            op.key: record for op, record in written if isinstance(op, Put) and record is not None
        }


def check_txn(compares: Sequence[Compare], then: Sequence[Op], orelse: Sequence[Op]) -> None:
    """Raise InvalidInput for a transaction that some backend could not execute."""
    for ops in (then, orelse):
        if (parts := len(ops) + len(compares)) > TXN_OPS_MAX:
            raise InvalidInput(
                f"a transaction of {parts} parts: at most {TXN_OPS_MAX} are possible."
            )
        written = [op.key for op in ops if not isinstance(op, Get)]
        if len(set(written)) != len(written):
            raise InvalidInput(f"a transaction writes one key twice: {sorted(written)}.")
        for op in ops:
            check_key(op.key)
            if isinstance(op, Put) and not isinstance(op.value, bytes):
                raise InvalidInput(
                    f"the value of {op.key!r} must be bytes, not {type(op.value).__name__}."
                )
            if isinstance(op, Put) and len(op.value) > VALUE_BYTES_MAX:
                raise InvalidInput(
                    f"the value of {op.key!r} has {len(op.value)} bytes: at most {VALUE_BYTES_MAX}."
                )
    for compare in compares:
        check_key(compare.key)


def check_ttl(ttl_s: float) -> None:
    """Raise InvalidInput unless the time to live is 0.05 s to one day."""
    if not TTL_S_MIN <= ttl_s <= TTL_S_MAX:
        raise InvalidInput(f"a lease of {ttl_s:g} s: {TTL_S_MIN:g} to {TTL_S_MAX:g} are possible.")


def check_key(key: str) -> bytes:
    """Return the key in UTF-8. Raises InvalidInput unless it has 1 to 1024 bytes."""
    try:
        raw = key.encode()
    except (UnicodeEncodeError, AttributeError):
        raise InvalidInput(f"bad key {key!r}: a key is a str that UTF-8 can carry.") from None
    if not 1 <= len(raw) <= KEY_BYTES_MAX:
        raise InvalidInput(
            f"bad key {key[:64]!r}: {len(raw)} bytes, where 1 to {KEY_BYTES_MAX} are possible."
        )
    return raw


def closed_error(name: str) -> StoreError:
    """Return the error for a call on a closed store."""
    return StoreError(f"store {name} is closed.", hint="Open it again.")


def lost_error(store: str, lease: str) -> LeaseLost:
    """Return the error for an expired or revoked lease."""
    return LeaseLost(
        f"lease {lease!r} of store {store} has run out or was revoked.",
        hint="Take a new one and write again.",
    )
