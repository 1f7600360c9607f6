"""A store elsewhere that may be away when its server starts: the catalog is read from a copy in the
server's folder meanwhile.

The copy is the last catalog that was read, written whenever it has changed, and marked each time
the store was heard of. While the store is away at the start nothing can be written, for nobody
knows what others have written; and what is not of the catalog (what was learned, the history) is
not known here. The store is asked again after 0.1 s, then up to 5 s, until it answers; what waits
for it is begun then, and begun again when that failed. From then on this is that store, which may
come and go.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from clipper.clock import wall_time_us
from clipper.errors import StoreError
from clipper.store.store import Compare, Event, Op, Record, Store, TxnResult, Watch, closed_error

COPIED: Final = "catalog/"
PAUSE_S_MIN, PAUSE_S_MAX = 0.1, 5.0
HEARD_S: Final = 5.0  # how often the copy is marked
_log = logging.getLogger(__name__)


class _Copy(msgspec.Struct):
    revision: int
    records: list[Record]
    schema: str = "clipper.copy/1"


class CachedStore(Store):
    """Threads: any. open: the store, or StoreError while it is away.  copy: a file, or None for
    none.

    Raises what `open` raises but for StoreError; that, too, if `required`.
    """

    remote = True

    def __init__(
        self, open: Callable[[], Store], name: str, copy: Path | None, *, required: bool = False
    ) -> None:
        self.name, self._open, self._path = name, open, copy
        self._store: Store | None = None
        self._copied: tuple[int, int] | None = None  # revision and number of records of the copy
        self._known: _Copy | None = None
        self._trouble: StoreError | None = None
        self._since_s, self._tries = time.monotonic(), 0
        self._begin_now: Callable[[], None] = lambda: None
        self._stop = threading.Event()
        self._begun = False
        try:
            self._store = open()
            self._begun = True
        except StoreError as error:
            if required:
                raise
            self._trouble, self._known = error, self._read_copy()
            _log.warning("%s", self._away().message)
        self._thread = threading.Thread(target=self._run, name="clipper-store", daemon=True)

    # -- while it is away

    @property
    def is_away(self) -> bool:
        """Since the start; a store that goes later only fails."""
        return self._store is None

    @property
    def has_copy(self) -> bool:
        return self._known is not None

    def start(self, begin: Callable[[], None]) -> None:
        """Ask an absent store again, until it answers; then call `begin`, on a thread of its own;
        again while it raises StoreError."""
        self._begin_now = begin
        self._thread.start()

    def _away(self) -> StoreError:
        said = self._trouble.message if self._trouble else ""
        why = said.rstrip(".").rpartition(". ")[2].rpartition(": ")[2]
        meanwhile = "Nothing is served from it until it is there"
        if self._known is not None:
            meanwhile = (
                f"Serving continues from a copy of {_ago(self.copy_age_s)} ago, and nothing can be"
                " changed"
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
        """Since the store was last heard of by whoever wrote the copy; infinite without one."""
        try:
            return (
                max(0.0, wall_time_us() / 1e6 - self._path.stat().st_mtime)
                if self._path is not None
                else float("inf")
            )
        except OSError:
            return float("inf")

    def stats(self) -> dict[str, Any]:
        """connected: it is there, and what waited for it has begun.  away_s, tries: since the
        start.  copy_age_s: of what the catalog is read from until then; None for none."""
        age = self.copy_age_s if self._known is not None and not self._begun else None
        return {
            "name": self.name, "connected": self._begun, "tries": self._tries, "copy_age_s": age,
            "away_s": 0.0 if self._begun else time.monotonic() - self._since_s,
        }  # fmt: skip

    def _run(self) -> None:
        pause_s, was_away = PAUSE_S_MIN, self._store is None
        while self._store is None and not self._stop.wait(pause_s):
            pause_s = min(2 * pause_s, PAUSE_S_MAX)
            self._try()
        while was_away and not self._stop.is_set() and not self._begin():
            self._stop.wait(pause_s)
        while not self._stop.wait(HEARD_S):
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
                "store %s is away for %.1f s, after %d tries: %s",
                self.name,
                away_s,
                self._tries,
                error.message,
            )
        else:
            _log.warning(
                "store %s is there, after %.1f s", self.name, time.monotonic() - self._since_s
            )

    def _begin(self) -> bool:
        try:
            self._begin_now()
        except StoreError as error:
            _log.warning("what waited for store %s waits on: %s", self.name, error)
            return False
        except Exception:
            _log.exception("what waited for store %s", self.name)
        self._begun = True
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
            _log.warning("the copy of the catalog %s is not written: %s", self._path, error)

    def _mark(self) -> None:
        """The store has been heard of now."""
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
        if self._store is None and self._known is not None and key.startswith(COPIED):
            return next((record for record in self._known.records if record.key == key), None)
        return self._there().get(key)

    def range(self, prefix: str) -> tuple[list[Record], int]:
        if self._store is None and prefix.startswith(COPIED) and not self._stop.is_set():
            known = self._known or _Copy(0, [])
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
        return self._there().txn(compares, then, orelse)

    def grant(self, ttl_s: float) -> tuple[str, float]:
        return self._there().grant(ttl_s)

    def renew(self, lease: str) -> float:
        return self._there().renew(lease)

    def revoke(self, lease: str) -> None:
        self._there().revoke(lease)

    def watch(self, prefix: str, from_revision: int | None = None) -> Watch:
        return (
            self._there().watch(prefix, from_revision)
            if self._store is not None
            else _LateWatch(self, prefix)
        )

    @property
    def revision(self) -> int:
        return self._there().revision

    def close(self) -> None:
        self._stop.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()
        if self._store is not None:
            self._store.close()


class _LateWatch:
    """Of a store that is not there yet: what changed meanwhile nobody knows, so its first event is
    RESET."""

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
    def heard_s(self) -> float:
        return self._watch.heard_s if self._watch is not None else float("-inf")

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

    def __iter__(self) -> Any:
        while (event := self.next()) is not None:
            yield event


def _ago(seconds: float) -> str:
    for unit, size in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
