"""Lists of values and sets of numbers that expire, in a store that servers share.

They are for data that is written often, read rarely and never watched: a write here wakes no watch
and is not in the history of changes. Redis keeps them as lists and bitmaps of its own
(store/redis/lists.py); for other stores `LeasedLists` keeps them as records with a lease.
"""

import threading
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Protocol

from clipper.store.store import (
    TTL_S_MAX,
    TTL_S_MIN,
    TXN_OPS_MAX,
    VALUE_BYTES_MAX,
    Delete,
    Put,
    Store,
    Transaction,
)


class ExpiringLists(Protocol):
    """Lists of values and sets of numbers, each under a key. Threads: any.

    A list or set disappears some time after its last change. All methods raise StoreError.
    """

    def append(self, values: Mapping[str, bytes]) -> None:
        """Append to each of these lists one value, of at most VALUE_BYTES_MAX bytes."""

    def read(self, key: str) -> list[bytes]:
        """Return the values of a list in the order of their appends; empty if there is none."""

    def claim(self, numbers: Mapping[str, Sequence[int]]) -> dict[str, set[int]]:
        """Add numbers to sets; return those that were not there before, by the set's key.

        Of several callers that add the same number, exactly one gets it back. Numbers lie between 0
        and 65535.
        """

    def drop(self, keys: Sequence[str]) -> None:
        """Delete these lists. Sets stay until they expire."""


class LeasedLists:
    """Lists and sets as records of a store, with a lease. Threads: any.

    ttl_s: time for which they stay after their last change; up to a quarter longer. Two writers
    never append to the same list.
    """

    def __init__(self, store: Store, ttl_s: float) -> None:
        self._store = store
        self._ttl_s = min(TTL_S_MAX, max(TTL_S_MIN, 1.25 * ttl_s))
        self._lease, self._renew_s = "", float("-inf")
        self._count = 0
        self._lock = threading.Lock()

    def _current(self, fresh: bool = False) -> str:
        """Return a lease that lives for the time to live; a new one if the last one is lost."""
        with self._lock:
            if fresh or monotonic() >= self._renew_s:
                self._lease, granted_s = self._store.grant(self._ttl_s)
                self._renew_s = monotonic() + granted_s / 5
            return self._lease

    def append(self, values: Mapping[str, bytes]) -> None:
        """Append to each of these lists one value."""
        part: dict[str, bytes] = {}
        nbytes = 0
        for key, value in values.items():
            if part and (len(part) == TXN_OPS_MAX or nbytes + len(value) > VALUE_BYTES_MAX):
                self._put(part)
                part, nbytes = {}, 0
            with self._lock:
                self._count += 1
            part[f"{key}/{self._count:08x}"] = value
            nbytes += len(value)
        if part:
            self._put(part)

    def _put(self, values: Mapping[str, bytes]) -> None:
        def write(transaction: Transaction) -> None:
            lease = self._current(fresh=transaction.lease_lost)
            transaction.apply(Put(key, value, lease) for key, value in values.items())

        self._store.transact(write)

    def read(self, key: str) -> list[bytes]:
        """Return the values of a list in the order of their appends."""
        return [record.value for record in self._store.range(f"{key}/")[0]]

    def claim(self, numbers: Mapping[str, Sequence[int]]) -> dict[str, set[int]]:
        """Add numbers to sets; return those that were not there before."""
        return {key: self._claim(f"{key}:claimed", set(some)) for key, some in numbers.items()}

    def _claim(self, key: str, numbers: set[int]) -> set[int]:
        def decide(transaction: Transaction) -> set[int]:
            record = transaction.get(key)
            there = int.from_bytes(record.value, "little") if record else 0
            free = {number for number in numbers if not there >> number & 1}
            if free:
                bits = there | sum(1 << number for number in free)
                data = bits.to_bytes((bits.bit_length() + 7) // 8, "little")
                transaction.put(key, data, self._current(fresh=transaction.lease_lost))
            return free

        return self._store.transact(decide).value

    def drop(self, keys: Sequence[str]) -> None:
        """Delete these lists."""
        found = [record.key for key in keys for record in self._store.range(f"{key}/")[0]]
        for at in range(0, len(found), TXN_OPS_MAX):
            self._store.txn((), [Delete(key) for key in found[at : at + TXN_OPS_MAX]])


def expiring_lists(store: Store, ttl_s: float) -> ExpiringLists:
    """Return the lists of a store, which expire that many seconds after their last change."""
    return store.lists(ttl_s) or LeasedLists(store, ttl_s)
