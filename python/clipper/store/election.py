"""One leader among those who stand: who has stood longest, by the revision that created its key,
and whose lease lives.

That revision is the fencing token (`epoch`): it grows from leader to leader. A leader that writes
with `guard` among its compares cannot write once another has come, however long it was stopped in
between. Source: etcd's concurrency package.
"""

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any, Final

from clipper.errors import LeaseLost, StoreError
from clipper.store.lease import Lease
from clipper.store.mirror import Mirror
from clipper.store.store import ABSENT, Compare, Store, check_key

PREFIX: Final = "election/"
_log = logging.getLogger(__name__)


class Candidate:
    """Threads: any. epoch: this candidate's; that of the leader while it is the leader. 0 once it
    has resigned."""

    def __init__(self, store: Store, name: str, value: bytes, lease: Lease) -> None:
        self._store, self._lease = store, lease
        prefix = f"{PREFIX}{name}/"
        self._key = f"{prefix}{lease.id}"
        check_key(self._key)
        self.epoch = store.put_if(self._key, value, ABSENT, lease.id).created_revision
        self._callbacks: list[Callable[[bool], Any]] = []
        self._told = False
        self._lock = threading.Lock()
        try:
            self._those = Mirror(store, prefix, bytes)
        except StoreError:
            with contextlib.suppress(StoreError):
                store.delete(self._key)
            raise
        self._those.on_change(lambda _: self._tell())

    @property
    def is_leader(self) -> bool:
        """By what is known here, and by the lease's clock: never true once the lease is lost."""
        return bool(self.epoch) and self._lease.alive and self._first() == self.epoch

    def _first(self) -> int:
        found = (self._those.record(key) for key in self._those)
        return min(
            (record.created_revision for record in found if record is not None), default=ABSENT
        )

    @property
    def leader(self) -> bytes | None:
        """What the leader stood with, be it this one or another; None when nobody is known to
        lead."""
        first = self._first()
        found = (self._those.record(key) for key in self._those)
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
        """Holds while this candidate stands: for the transactions of a leader. LeaseLost once it
        has resigned."""
        if not self.epoch:
            raise LeaseLost(
                f"{self._key!r} does not stand for election any more.", hint="Stand again."
            )
        return Compare(self._key, self.epoch, "created_revision")

    def on_change(self, callback: Callable[[bool], Any]) -> None:
        """Call it with `is_leader` when the store says that this has changed; at once if it is the
        leader. A lease lost by the clock alone is told once the store is heard of again: ask
        `is_leader` before each deed."""
        with self._lock:
            self._callbacks.append(callback)
            told = self._told
        if told:
            self._call(callback, True)
        else:
            self._tell()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until it is the leader; whether it came to be in time."""
        return self._those.wait_for(lambda _: self.is_leader, timeout_s)

    def _tell(self) -> None:
        with self._lock:
            leads = self.is_leader
            if leads == self._told:
                return
            self._told = leads
            callbacks = list(self._callbacks)
        for callback in callbacks:
            self._call(callback, leads)

    def _call(self, callback: Callable[[bool], Any], leads: bool) -> None:
        try:
            callback(leads)
        except Exception:
            _log.exception("a callback of the election %s", self._key)

    def resign(self) -> None:
        """Let the next one lead. Twice is fine; when the store does not answer, the lease's end
        does it."""
        if not self.epoch:
            return
        with contextlib.suppress(StoreError):
            self._store.delete(self._key)
        self.epoch = 0
        self._those.close()
        self._tell()
