"""Leases: what a node writes about itself goes when the node does.

The holder counts on its own clock, from before the renewal was sent, and leaves a margin: it knows
that the lease is lost before the store forgets it, also when the store cannot be reached, and also
when the holder itself was stopped for a while. So what asks `alive` first is fenced without asking
the store; what has to be sure writes with a Compare on a leased key.
"""

import contextlib
import logging
import threading
from time import monotonic
from types import TracebackType
from typing import Final, Protocol, Self

from clipper.errors import LeaseLost, StoreError

MARGIN: Final = 1 / 8  # of its time, by which a lease is lost here before it is in the store
_log = logging.getLogger(__name__)


class Leases(Protocol):
    """What grants them: a store."""

    name: str

    def renew(self, lease: str) -> float: ...

    def revoke(self, lease: str) -> None: ...


class LeaseLostEvent(threading.Event):
    """Set when the lease was lost, be it only by the clock: nobody has to be awake to set it."""

    def __init__(self, until_s: float) -> None:
        super().__init__()
        self.until_s = until_s

    def is_set(self) -> bool:
        return super().is_set() or monotonic() >= self.until_s

    def wait(self, timeout: float | None = None) -> bool:
        give_up = float("inf") if timeout is None else monotonic() + timeout
        while not self.is_set():
            left = min(self.until_s, give_up) - monotonic()
            if left > 0:
                super().wait(left)
            elif monotonic() >= give_up:
                return self.is_set()
        return True


class Lease:
    """Threads: any.

    id: for Put.  ttl_s: as the store grants it.  lost: set once it is; a lost lease never comes
    back.
    """

    def __init__(self, store: Leases, id: str, ttl_s: float, began_s: float) -> None:
        self.id, self.ttl_s = id, ttl_s
        self._store = store
        self.lost = LeaseLostEvent(began_s + ttl_s * (1 - MARGIN))
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._keeper: threading.Thread | None = None

    @property
    def alive(self) -> bool:
        """Whether its keys are surely still there, by this process's clock."""
        return not self.lost.is_set()

    @property
    def left_s(self) -> float:
        """Until it is lost if nobody renews it; 0 when it is."""
        return max(0.0, self.lost.until_s - monotonic()) if self.alive else 0.0

    def keep(self) -> None:
        """Renew it once. LeaseLost when it was lost, here or there; StoreError when the store did
        not answer."""
        began_s = monotonic()
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
            if self.alive:  # an answer that came too late renews nothing
                self.lost.until_s = max(self.lost.until_s, began_s + ttl_s * (1 - MARGIN))

    def renew_in_background(self) -> Self:
        """Renew it from a thread of its own, until it is revoked or lost."""
        with self._lock:
            if self._keeper is None:
                self._keeper = threading.Thread(
                    target=self._keep_on, name="clipper-lease", daemon=True
                )
                self._keeper.start()
        return self

    def _keep_on(self) -> None:
        pause_s = self.ttl_s / 3
        while not self._stop.wait(pause_s) and self.alive:
            try:
                self.keep()
                pause_s = self.ttl_s / 3
            except LeaseLost:
                break
            except StoreError as error:
                pause_s = min(self.ttl_s / 10, 0.5)
                _log.debug("lease %s is not renewed: %s", self.id, error)
        if not self._stop.is_set():
            self.lost.set()
            _log.warning("lease %s of store %s is lost", self.id, self._store.name)

    def revoke(self) -> None:
        """Its keys go now. One that was lost is fine; StoreError when the store does not answer:
        then they go in `ttl_s`."""
        self._end()
        try:
            self._store.revoke(self.id)
        finally:
            self.lost.set()

    def _end(self) -> None:
        self._stop.set()
        if self._keeper is not None and self._keeper is not threading.current_thread():
            self._keeper.join()

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
