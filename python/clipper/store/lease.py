"""Leases: keys that disappear when their owner does.

The owner measures the lease on its own clock, from before the renewal was sent, minus a margin. It
knows that the lease is lost before the store drops it, also when the store is unreachable or the
owner was stopped. Code that checks `alive` first is therefore fenced without a request to the
store; code that must be certain writes with a Compare on a leased key.
"""

import contextlib
import logging
import threading
from types import TracebackType
from typing import Final, Protocol, Self

from clipper.component.threads import SYSTEM_THREADS, RunningThread, Threads
from clipper.errors import LeaseLost, StoreError

_END_S = 10.0  # for a renewal that is under way
MARGIN: Final = 1 / 8  # of the time to live, by which the local clock is ahead of the store
_log = logging.getLogger(__name__)


class Leases(Protocol):
    """The part of a store that a lease needs."""

    name: str
    threads: Threads

    def renew(self, lease: str) -> float:
        """Renew a lease; return its time to live in seconds."""

    def revoke(self, lease: str) -> None:
        """End a lease."""


class LeaseLostEvent:
    """An event that is set when the lease is lost, also by the passing of time alone.

    until_s: the end of the lease without a renewal, by `time.monotonic()`. Threads: any.
    """

    def __init__(self, until_s: float, threads: Threads = SYSTEM_THREADS) -> None:
        self.until_s, self._threads = until_s, threads
        self._event = threads.event()

    def set(self) -> None:
        """Mark the lease as lost and wake all waiters."""
        self._event.set()

    def is_set(self) -> bool:
        """Return True if the lease was lost or its time is over."""
        return self._event.is_set() or self._threads.now_s() >= self.until_s

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the lease is lost; return False on timeout."""
        give_up = float("inf") if timeout is None else self._threads.now_s() + timeout
        while not self.is_set():
            left = min(self.until_s, give_up) - self._threads.now_s()
            if left > 0:
                self._event.wait(left)
            elif self._threads.now_s() >= give_up:
                return self.is_set()
        return True


class Lease:
    """A lease of a store. Threads: any.

    id: for Put.  ttl_s: time to live, as granted.  lost: set when it is lost; a lost lease never
    returns.
    """

    def __init__(self, store: Leases, id: str, ttl_s: float, start_s: float) -> None:
        self.id, self.ttl_s = id, ttl_s
        self._store = store
        self._threads = threads = store.threads
        self.lost = LeaseLostEvent(start_s + ttl_s * (1 - MARGIN), threads)
        self._stop = threads.event()
        self._lock = threading.Lock()
        self._renewer: RunningThread | None = None

    @property
    def alive(self) -> bool:
        """True while the lease's keys exist for certain, by the local clock."""
        return not self.lost.is_set()

    @property
    def left_s(self) -> float:
        """Seconds until the lease is lost without a renewal; 0 if it is lost."""
        return max(0.0, self.lost.until_s - self._threads.now_s()) if self.alive else 0.0

    def keep(self) -> None:
        """Renew the lease once.

        Raises LeaseLost if it is lost, locally or in the store; StoreError if the store does not
        answer.
        """
        start_s = self._threads.now_s()
        try:
            if not self.alive:
                raise LeaseLost(
                    f"lease {self.id!r} of store {self._store.name} was not renewed in time.",
                    hint="Take a new one.",
                )
            ttl_s = self._store.renew(self.id)
        except LeaseLost:
            self.lost.set()
            raise
        with self._lock:
            if self.alive:  # a late answer renews nothing
                self.lost.until_s = max(self.lost.until_s, start_s + ttl_s * (1 - MARGIN))

    def renew_in_background(self) -> Self:
        """Renew the lease from a thread, until it is revoked or lost; return the lease."""
        with self._lock:
            if self._renewer is None:
                self._renewer = self._threads.start(self._renew_until_stopped, "clipper-lease")
        return self

    def _renew_until_stopped(self) -> None:
        pause_s = self.ttl_s / 3
        while not self._stop.wait(pause_s) and self.alive:
            try:
                self.keep()
                pause_s = self.ttl_s / 3
            except LeaseLost:
                break
            except StoreError as error:
                pause_s = min(self.ttl_s / 10, 0.5)
                _log.debug("renewing lease %s failed: %s", self.id, error)
        if not self._stop.is_set():
            self.lost.set()
            _log.warning("lease %s of store %s is lost", self.id, self._store.name)

    def revoke(self) -> None:
        """End the lease and delete its keys now.

        A lost lease is fine. Raises StoreError if the store does not answer; the keys then
        disappear after `ttl_s`.
        """
        self._end()
        try:
            self._store.revoke(self.id)
        finally:
            self.lost.set()

    def _end(self) -> None:
        self._stop.set()
        if self._renewer is not None and not self._threads.is_current(self._renewer):
            self._renewer.join(_END_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(StoreError):
            self.revoke()
