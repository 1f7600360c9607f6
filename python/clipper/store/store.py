"""Keyed bytes with revisions: the one way in which nodes, and a node before and after a restart,
know the same things.

Laws, held by tests/store for every backend:
  1. Every change gets one revision of the whole store; revisions strictly grow and survive a
     restart.
  2. A transaction happens wholly or not at all, and its changes share one revision. One that
     changes nothing gets none.
  3. A read after a write sees it, from any thread and, on disk, from any process.
  4. A watch from revision r delivers exactly the changes after r, in order, once, or says RESET:
     read everything again.
  5. Keys sort as their UTF-8 bytes; a range is one snapshot.
  6. Keys put with a lease vanish with it, all of them as one revision; a put without one takes its
     key off the lease.
"""

from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Final, Literal, Protocol, Self

import msgspec

from clipper.errors import InvalidInput, LeaseLost, StoreConflict, StoreError
from clipper.store.lease import Lease

if TYPE_CHECKING:
    from clipper.store.election import Candidate

ABSENT: Final = 0  # the revision of a key that does not exist
KEY_BYTES_MAX: Final = 1024
VALUE_BYTES_MAX: Final = 1 << 20
TXN_OPS_MAX: Final = 128
TTL_S_MIN, TTL_S_MAX = 0.05, 86_400.0  # of leases; a server's own least is longer: etcd's is 2 s
EVENTS_MAX: Final = 10_000  # changes kept for watches; whoever falls further behind is told RESET


class Record(
    msgspec.Struct, frozen=True, gc=False
):  # it holds no containers: 20 000 are nothing to the collector
    """revision: of the last change.  created_revision: of the first since the key was last absent.
    version: number of writes since then.  lease: the id of that with which it goes; "" for none."""

    key: str
    value: bytes
    revision: int
    created_revision: int
    version: int
    lease: str = ""


class Compare(msgspec.Struct, frozen=True):
    """True if the record's `field` equals `equals`. An absent key has revision, created_revision
    and version 0."""

    key: str
    equals: int | bytes
    field: Literal["revision", "created_revision", "version", "value"] = "revision"

    def holds(self, record: Record | None) -> bool:
        if record is None:
            return self.field != "value" and self.equals == ABSENT
        return bool(getattr(record, self.field) == self.equals)


class Put(msgspec.Struct, frozen=True):
    """lease: the id of that with which the key goes. LeaseLost, and nothing is written, when it has
    run out."""

    key: str
    value: bytes
    lease: str = ""


class Delete(msgspec.Struct, frozen=True):
    key: str


class Get(msgspec.Struct, frozen=True):
    key: str


Op = Put | Delete | Get


class TxnResult(msgspec.Struct, frozen=True):
    """ok: the compares held, so `then` ran.  results: one an operation: the record written,
    deleted, or found, or None. revision: the store's after the transaction."""

    ok: bool
    results: tuple[Record | None, ...]
    revision: int


class Event(msgspec.Struct, frozen=True, gc=False):
    """PUT and DELETE are changes; `record` is the new one, None after DELETE.
    SYNC: everything up to `revision` has been delivered; it comes once, after what was there when
    the watch began. RESET: changes were missed; read the range again and skip events up to its
    revision."""

    kind: Literal["PUT", "DELETE", "SYNC", "RESET"]
    revision: int
    key: str = ""
    record: Record | None = None


class Watch(Protocol):
    """Events in order. Threads: any may close it; one reads it."""

    @property
    def heard_s(self) -> float:
        """When the store last answered this watch (time.monotonic()), be it without an event. A
        call of `next` that ends because its time is over says nothing of the store."""
        ...

    def next(self, timeout_s: float | None = None) -> Event | None:
        """The next event; None when the time is over, or when the watch or its store is closed."""
        ...

    @property
    def closed(self) -> bool: ...

    def close(self) -> None: ...

    def __iter__(self) -> Iterator[Event]: ...


class Store(Protocol):
    """Threads: any. Errors: StoreError (unreachable, full, damaged), StoreConflict, LeaseLost,
    InvalidInput (too big)."""

    name: str
    remote: bool = False  # whether an answer may take longer than a disk does

    def get(self, key: str) -> Record | None: ...

    def range(self, prefix: str) -> tuple[list[Record], int]:
        """The records whose keys start with `prefix`, by key, and the revision of the snapshot they
        belong to."""
        ...

    def txn(
        self, compares: Sequence[Compare], then: Sequence[Op], orelse: Sequence[Op] = ()
    ) -> TxnResult:
        """Run `then` if all compares hold, else `orelse`, as one step. Gets see the store before
        the step."""
        ...

    def watch(self, prefix: str, from_revision: int | None = None) -> Watch:
        """Changes after `from_revision` (None: after now) to keys that start with `prefix`."""
        ...

    @property
    def revision(self) -> int: ...

    def close(self) -> None:
        """End the watches and let go of files. Closing twice is fine."""
        ...

    # -- leases: what a backend does; users take `lease`

    def grant(self, ttl_s: float) -> tuple[str, float]:
        """-> the new lease's id, and how long it lives, which may be longer than was asked for."""
        ...

    def renew(self, lease: str) -> float:
        """It lives that long from now on; -> seconds. LeaseLost when it has run out."""
        ...

    def revoke(self, lease: str) -> None:
        """It ends now, and its keys with it. One that has ended is fine."""
        ...

    # -- in terms of these

    def lease(self, ttl_s: float) -> Lease:
        """Keys that were put with its id vanish `ttl_s` after it was last renewed;
        `renew_in_background()` renews it in time."""
        check_ttl(ttl_s)
        began_s = monotonic()
        id, ttl_s = self.grant(ttl_s)
        return Lease(self, id, ttl_s, began_s)

    def elect(self, name: str, value: bytes, lease: Lease) -> "Candidate":
        """Stand for election: one of those who stand under this name is the leader, who stood
        longest. value: for others to read.  lease: whoever loses it has lost the election."""
        from clipper.store.election import Candidate

        return Candidate(self, name, value, lease)

    def put(self, key: str, value: bytes, lease: str = "") -> Record:
        record = self.txn((), (Put(key, value, lease),)).results[0]
        assert record is not None
        return record

    def put_if(self, key: str, value: bytes, revision: int, lease: str = "") -> Record:
        """Write if the key is still at `revision` (ABSENT: if there is no such key); else
        StoreConflict."""
        result = self.txn((Compare(key, revision),), (Put(key, value, lease),))
        record = result.results[0] if result.ok else None
        if record is None:
            raise StoreConflict(
                f"{key!r} is not at revision {revision}.", hint="Read it again and decide again."
            )
        return record

    def delete(self, key: str) -> bool:
        """Whether there was something to delete."""
        return self.txn((), (Delete(key),)).results[0] is not None

    def update(
        self, key: str, change: Callable[[bytes | None], bytes], tries: int = 1000
    ) -> Record:
        """Write `change(value)`, where value is None when absent; `change` is called again if
        somebody was faster."""
        for _ in range(tries):
            old = self.get(key)
            try:
                return self.put_if(
                    key, change(old.value if old else None), old.revision if old else ABSENT
                )
            except StoreConflict:
                continue
        raise StoreConflict(
            f"{key!r} was changed by somebody else {tries} times in a row.", hint="Try again later."
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def check_txn(compares: Sequence[Compare], then: Sequence[Op], orelse: Sequence[Op]) -> None:
    """Refuse what no backend could carry out."""
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
    if not TTL_S_MIN <= ttl_s <= TTL_S_MAX:
        raise InvalidInput(f"a lease of {ttl_s:g} s: {TTL_S_MIN:g} to {TTL_S_MAX:g} are possible.")


def check_key(key: str) -> bytes:
    """The key as it is stored."""
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
    return StoreError(f"store {name} is closed.", hint="Open it again.")


def lost_error(store: str, lease: str) -> LeaseLost:
    return LeaseLost(
        f"lease {lease!r} of store {store} has run out or was revoked.",
        hint="Take a new one and write again.",
    )
