"""A remote store that may be unreachable when its server starts.

Until it answers, the catalog is read from a copy in the server's folder. The copy is the last
catalog that was read; it is written after each change, and its time stamp says when the store last
answered. Nothing can be written in the meantime, because other servers may have written, and the
rest of the store (learned states, history) is not available. The store is tried again after 0.1 s,
then up to every 5 s. When it answers, the waiting work is started, again after each failure. From
then on calls go to the store directly.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from clipper.clock import age_of, wall_time_us
from clipper.errors import StoreError
from clipper.store.expiring import ExpiringLists
from clipper.store.store import Compare, Event, Op, Record, Store, TxnResult, Watch, closed_error

COPIED: Final = "catalog/"
PAUSE_S_MIN, PAUSE_S_MAX = 0.1, 5.0
CONTACT_S: Final = 5.0  # period of updating the copy's time stamp
_log = logging.getLogger(__name__)


class _Copy(msgspec.Struct):
    """The stored copy of a catalog."""

    revision: int
    records: list[Record]
    schema: str = "clipper.copy/1"


class CachedStore(Store):
    """A store with a local copy of the catalog for the time until it first answers. Threads: any.

    open: opens the store; raises StoreError while it is unreachable.  copy: a file, or None for
    none.
    required: raise that StoreError. Other errors of `open` are always raised.
    """

    remote = True

    def __init__(
        self, open: Callable[[], Store], name: str, copy: Path | None, *, required: bool = False
    ) -> None:
        self.name, self._open, self._path = name, open, copy
        self._store: Store | None = None
        self._copied: tuple[int, int] | None = None  # revision and number of records of the copy
        self._copy_read: _Copy | None = None
        self._trouble: StoreError | None = None
        self._since_s, self._tries = time.monotonic(), 0
        self._on_connected: Callable[[], None] = lambda: None
        self._stop = threading.Event()
        self._is_connected = False
        try:
            self._store = open()
            self._is_connected = True
        except StoreError as error:
            if required:
                raise
            self._trouble, self._copy_read = error, self._read_copy()
            _log.warning("%s", self._away().message)
        self._thread = threading.Thread(target=self._run, name="clipper-store", daemon=True)

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
        self._thread.start()

    def _away(self) -> StoreError:
        cause = self._trouble.message if self._trouble else ""
        why = cause.rstrip(".").rpartition(". ")[2].rpartition(": ")[2]
        meanwhile = "Nothing is served from it until it is there"
        if self._copy_read is not None:
            meanwhile = (
                f"Serving continues from a copy of {age_of(self.copy_age_s)} ago, and nothing can"
                " be changed"
            )
        hint = (
            "Start it: it is tried again all the time. Feedback waits in the journal. Or use"
            ' state="sqlite:FILE".'
        )
        return StoreError(
            f"cannot reach {self.name} ({why or 'no answer'}). {meanwhile}.", hint=hint
        )

    @property
    def copy_age_s(self) -> float:
        """Seconds since the store last answered the writer of the copy; infinite without a copy."""
        try:
            return (
                max(0.0, wall_time_us() / 1e6 - self._path.stat().st_mtime)
                if self._path is not None
                else float("inf")
            )
        except OSError:
            return float("inf")

    def stats(self) -> dict[str, object]:
        """Return figures for monitoring.

        connected: the store answers and the waiting work has started.  away_s, tries: since the
        start.
        copy_age_s: age of the copy that is served until then; None if there is none.
        """
        age = self.copy_age_s if self._copy_read is not None and not self._is_connected else None
        return {
            "name": self.name,
            "connected": self._is_connected,
            "tries": self._tries,
            "copy_age_s": age,
            "away_s": 0.0 if self._is_connected else time.monotonic() - self._since_s,
        }  # fmt: skip

    def _run(self) -> None:
        pause_s, was_away = PAUSE_S_MIN, self._store is None
        while self._store is None and not self._stop.wait(pause_s):
            pause_s = min(2 * pause_s, PAUSE_S_MAX)
            self._try()
        while was_away and not self._stop.is_set() and not self._run_waiting():
            self._stop.wait(pause_s)
        while not self._stop.wait(CONTACT_S):
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

    # -- the copy

    def _read_copy(self) -> _Copy | None:
        if self._path is None or not self._path.exists():
            return None
        try:
            return msgspec.msgpack.decode(self._path.read_bytes(), type=_Copy)
        except (OSError, msgspec.MsgspecError) as error:
            _log.error("the copy of the catalog %s cannot be read: %s", self._path, error)
            return None

    def _write_copy(self, records: list[Record], revision: int) -> None:
        if self._path is None or self._copied == (revision, len(records)):
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fresh = self._path.with_suffix(".new")
            with open(
                os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb"
            ) as file:
                file.write(msgspec.msgpack.encode(_Copy(revision, records)))
            fresh.replace(self._path)
            self._copied = revision, len(records)
        except OSError as error:
            _log.warning("the copy of the catalog %s cannot be written: %s", self._path, error)

    def _mark(self) -> None:
        """Set the time stamp of the copy to the store's last answer."""
        store = self._store
        if store is not None and self._path is not None and store.revision >= 0:
            with contextlib.suppress(OSError):
                os.utime(self._path)

    # -- the store

    def _there(self) -> Store:
        store = self._store
        if self._stop.is_set():
            raise closed_error(self.name)
        if store is None:
            raise self._away()
        return store

    def get(self, key: str) -> Record | None:
        """Return a record, from the copy while the store is unreachable."""
        if self._store is None and self._copy_read is not None and key.startswith(COPIED):
            return next((record for record in self._copy_read.records if record.key == key), None)
        return self._there().get(key)

    def range(self, prefix: str) -> tuple[list[Record], int]:
        """Return the records under a prefix, from the copy while the store is unreachable."""
        if self._store is None and prefix.startswith(COPIED) and not self._stop.is_set():
            known = self._copy_read or _Copy(0, [])
            return [
                record for record in known.records if record.key.startswith(prefix)
            ], known.revision
        records, revision = self._there().range(prefix)
        if prefix == COPIED:
            self._write_copy(records, revision)
        return records, revision

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
        self._stop.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()
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
            or self._store._stop.is_set()
            or (self._watch is not None and self._watch.closed)
        )

    def close(self) -> None:
        self._closed = True
        if self._watch is not None:
            self._watch.close()

    def __iter__(self) -> Iterator[Event]:
        while (event := self.next()) is not None:
            yield event
