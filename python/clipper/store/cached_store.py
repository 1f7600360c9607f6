"""A remote store that may be unreachable when its server starts.

Until it answers, the catalog is read from the copy in the server's folder (catalog_copy.py), whose
time stamp says when the store last answered. Nothing can be written in the meantime, because other
servers may have written, and the rest of the store (learned states, history) is not available. The
store is tried again after 0.1 s, then up to every 5 s. When it answers, the waiting work is
started, again after each failure. From then on calls go to the store directly.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final, TypedDict

from clipper.clock import age_of
from clipper.component import Health, Stop, Worker
from clipper.errors import StoreError
from clipper.store.catalog_copy import PREFIX, CatalogCopy, CopiedCatalog
from clipper.store.expiring import ExpiringLists
from clipper.store.store import Compare, Event, Op, Record, Store, TxnResult, Watch, closed_error
from clipper_container.backoff import Backoff

PAUSE_S_MIN, PAUSE_S_MAX = 0.1, 5.0
CONTACT_S: Final = 5.0  # period of updating the copy's time stamp
_log = logging.getLogger(__name__)


class Connection(TypedDict):
    """The state of the connection to a store, as `CachedStore.stats` returns it."""

    name: str
    connected: bool
    tries: int
    copy_age_s: float | None
    away_s: float


class CachedStore(Store):
    """A store with a local copy of its catalog, read until the store first answers. Threads: any.

    open: opens the store; raises StoreError while it is unreachable.  copy: of its catalog.
    required: the constructor raises that StoreError. Other errors of `open` are always raised.
    """

    remote = True

    def __init__(
        self, open: Callable[[], Store], name: str, copy: CatalogCopy, *, required: bool = False
    ) -> None:
        self.name, self.copy = name, copy
        self._open = open
        self._store: Store | None = None
        self._copy_read: CopiedCatalog | None = None
        self._trouble: StoreError | None = None
        self._since_s, self._tries = time.monotonic(), 0
        self._on_connected: Callable[[], None] = lambda: None
        self._is_connected = False
        try:
            self._store = open()
            self._is_connected = True
        except StoreError as error:
            if required:
                raise
            self._trouble, self._copy_read = error, self.copy.read_of_store()
            _log.warning("%s", self._away().message)
        self._worker = Worker("clipper-store", self._run, once=True, again=Backoff())

    # -- until it answers

    @property
    def is_away(self) -> bool:
        """True until the store has answered once; a store that fails later only raises errors."""
        return self._store is None

    def start(self, on_connected: Callable[[], None]) -> None:
        """Keep trying an unreachable store from a thread, then call `on_connected`; again while it
        raises StoreError.
        """
        self._on_connected = on_connected
        self._worker.start()

    def health(self) -> Health:
        """Return the state of the thread."""
        return self._worker.health()

    def _away(self) -> StoreError:
        cause = self._trouble.message if self._trouble else ""
        why = cause.rstrip(".").rpartition(". ")[2].rpartition(": ")[2]
        meanwhile = "Nothing is served from it until it is there"
        if self._copy_read is not None:
            meanwhile = (
                f"Serving continues from a copy of {age_of(self.copy.age_s)} ago, and nothing can"
                " be changed"
            )
        hint = (
            "Start it: it is tried again all the time. Feedback waits in the journal. Or use"
            ' state="sqlite:FILE".'
        )
        return StoreError(
            f"cannot reach {self.name} ({why or 'no answer'}). {meanwhile}.", hint=hint
        )

    def stats(self) -> Connection:
        """Return figures for monitoring.

        connected: the store answers and the waiting work has started.  away_s, tries: since the
        start.
        copy_age_s: age of the copy that is served until then; None if there is none.
        """
        age = self.copy.age_s if self._copy_read is not None and not self._is_connected else None
        return {
            "name": self.name,
            "connected": self._is_connected,
            "tries": self._tries,
            "copy_age_s": age,
            "away_s": 0.0 if self._is_connected else time.monotonic() - self._since_s,
        }  # fmt: skip

    def _run(self, stop: Stop) -> None:
        backoff, was_away = Backoff(PAUSE_S_MIN, PAUSE_S_MAX), self._store is None
        while self._store is None and not stop.wait(backoff.next_s()):
            self._try()
        while was_away and not stop.requested and not self._run_waiting():
            stop.wait(backoff.next_s())
        while not stop.wait(CONTACT_S):
            with contextlib.suppress(StoreError):
                self._mark()

    def _try(self) -> None:
        self._tries += 1
        try:
            self._store = self._open()
        except StoreError as error:
            self._trouble = error
            away_s = time.monotonic() - self._since_s
            _log.info(
                "store %s has been unreachable for %.1f s, %d tries: %s",
                self.name,
                away_s,
                self._tries,
                error.message,
            )
        else:
            _log.warning(
                "store %s answers after %.1f s", self.name, time.monotonic() - self._since_s
            )

    def _run_waiting(self) -> bool:
        try:
            self._on_connected()
        except StoreError as error:
            _log.warning(
                "starting the work that waits for store %s failed, trying again: %s",
                self.name,
                error,
            )
            return False
        except Exception:
            _log.exception("starting the work that waits for store %s failed", self.name)
        self._is_connected = True
        return True

    def _mark(self) -> None:
        """Set the time stamp of the copy to the store's last answer."""
        store = self._store
        if store is not None and store.revision >= 0:
            self.copy.mark()

    # -- the store

    def _there(self) -> Store:
        store = self._store
        if self._worker.stop.requested:
            raise closed_error(self.name)
        if store is None:
            raise self._away()
        return store

    def get(self, key: str) -> Record | None:
        """Return a record, from the copy while the store is unreachable."""
        if self._store is None and self._copy_read is not None and key.startswith(PREFIX):
            return next((record for record in self._copy_read.records if record.key == key), None)
        return self._there().get(key)

    def range(self, prefix: str) -> tuple[list[Record], int]:
        """Return the records under a prefix, from the copy while the store is unreachable."""
        if self._store is None and prefix.startswith(PREFIX) and not self._worker.stop.requested:
            known = self._copy_read or CopiedCatalog(0, [])
            return [
                record for record in known.records if record.key.startswith(prefix)
            ], known.revision
        return self._there().range(prefix)

    def txn(
        self, compares: Sequence[Compare], then: Sequence[Op], orelse: Sequence[Op] = ()
    ) -> TxnResult:
        """Run a transaction; see `Store.txn`."""
        return self._there().txn(compares, then, orelse)

    def grant(self, ttl_s: float) -> tuple[str, float]:
        """Grant a lease; return its id and its time to live in seconds."""
        return self._there().grant(ttl_s)

    def renew(self, lease: str) -> float:
        """Renew a lease; return its time to live in seconds."""
        return self._there().renew(lease)

    def revoke(self, lease: str) -> None:
        """End a lease and delete its keys."""
        self._there().revoke(lease)

    def watch(self, prefix: str, from_revision: int | None = None) -> Watch:
        """Watch the keys under a prefix."""
        return (
            self._there().watch(prefix, from_revision)
            if self._store is not None
            else _LateWatch(self, prefix)
        )

    @property
    def revision(self) -> int:
        """Return the revision of the newest change."""
        return self._there().revision

    def lists(self, ttl_s: float) -> ExpiringLists | None:
        """Return lists of the store's own, if it has any."""
        return self._there().lists(ttl_s)

    def close(self) -> None:
        """End the thread and close the store."""
        self._worker.end()
        if self._store is not None:
            self._store.close()


class _LateWatch:
    """A watch on a store that is not reachable yet; its first event is RESET, since changes are
    unknown.
    """

    def __init__(self, store: CachedStore, prefix: str) -> None:
        self._store, self._prefix = store, prefix
        self._watch: Watch | None = None
        self._closed = False

    def next(self, timeout_s: float | None = None) -> Event | None:
        if self._watch is None:
            if self.closed:
                return None
            self._watch = self._store._there().watch(self._prefix)
            return Event("RESET", self._store.revision)
        return self._watch.next(timeout_s)

    @property
    def contact_s(self) -> float:
        return self._watch.contact_s if self._watch is not None else float("-inf")

    @property
    def closed(self) -> bool:
        return (
            self._closed
            or self._store._worker.stop.requested
            or (self._watch is not None and self._watch.closed)
        )

    def close(self) -> None:
        self._closed = True
        if self._watch is not None:
            self._watch.close()
