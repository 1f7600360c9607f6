"""Leader election on a store.

The leader is the candidate whose key has the lowest creation revision and whose lease is alive.
That revision is the fencing token (`epoch`) and grows from leader to leader. A leader that adds
`guard` to the compares of its transactions cannot write once another leader exists, however long it
was stopped. Source: etcd's concurrency package.
"""

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Final

from clipper.errors import LeaseLost, StoreError
from clipper.store.lease import Lease
from clipper.store.mirror import Mirror
from clipper.store.store import ABSENT, Compare, Store, check_key

PREFIX: Final = "election/"
_log = logging.getLogger(__name__)


class Candidate:
    """One candidate of an election; the candidate that was first is the leader. Threads: any.

    name: of the election.  value: readable by the other nodes.  lease: a candidate that loses it
    has lost the election.
    epoch: the creation revision of its key, the leader's fencing token; 0 after `resign`.
    """

    def __init__(self, store: Store, name: str, value: bytes, lease: Lease) -> None:
        self._store, self._lease = store, lease
        prefix = f"{PREFIX}{name}/"
        self._key = f"{prefix}{lease.id}"
        check_key(self._key)
        self.epoch = store.put_if(self._key, value, ABSENT, lease.id).created_revision
        self._callbacks: list[Callable[[bool], object]] = []
        self._reported = False
        self._lock = threading.Lock()
        try:
            self._candidates = Mirror(store, prefix, bytes)
        except StoreError:
            with contextlib.suppress(StoreError):
                store.delete(self._key)
            raise
        self._candidates.on_change(lambda _: self._notify())

    @property
    def is_leader(self) -> bool:
        """True if this candidate leads as far as it knows and its lease is alive by the local
        clock.
        """
        return bool(self.epoch) and self._lease.alive and self._first() == self.epoch

    def _first(self) -> int:
        found = (self._candidates.record(key) for key in self._candidates)
        return min(
            (record.created_revision for record in found if record is not None), default=ABSENT
        )

    @property
    def leader(self) -> bytes | None:
        """The value of the current leader, which may be this candidate; None if none is known."""
        first = self._first()
        found = (self._candidates.record(key) for key in self._candidates)
        return next(
            (
                record.value
                for record in found
                if record is not None and record.created_revision == first
            ),
            None,
        )

    @property
    def guard(self) -> Compare:
        """A compare that holds while this candidate exists, for the leader's transactions.

        Raises LeaseLost after `resign`.
        """
        if not self.epoch:
            raise LeaseLost(
                f"{self._key!r} has resigned from the election.", hint="Create a new Candidate."
            )
        return Compare(self._key, self.epoch, "created_revision")

    def on_change(self, callback: Callable[[bool], object]) -> None:
        """Call `callback` with `is_leader` whenever it changes; at once if this candidate leads.

        The loss of a lease by the clock alone is reported when the store answers again, so check
        `is_leader` before each action.
        """
        with self._lock:
            self._callbacks.append(callback)
            is_reported = self._reported
        if is_reported:
            self._call(callback, True)
        else:
            self._notify()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until this candidate is the leader; return False on timeout."""
        return self._candidates.wait_for(lambda _: self.is_leader, timeout_s)

    def _notify(self) -> None:
        with self._lock:
            leads = self.is_leader
            if leads == self._reported:
                return
            self._reported = leads
            callbacks = list(self._callbacks)
        for callback in callbacks:
            self._call(callback, leads)

    def _call(self, callback: Callable[[bool], object], leads: bool) -> None:
        try:
            callback(leads)
        except Exception:
            _log.exception("callback of the election %s failed", self._key)

    def resign(self) -> None:
        """Withdraw the candidate. Calling it twice is fine.

        If the store does not answer, the key is deleted when the lease ends.
        """
        if not self.epoch:
            return
        with contextlib.suppress(StoreError):
            self._store.delete(self._key)
        self.epoch = 0
        self._candidates.close()
        self._notify()
