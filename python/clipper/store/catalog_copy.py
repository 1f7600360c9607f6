"""The copy of the catalog in a server's folder: the last one that the server has accepted.

It serves while a remote store is unreachable at the start, and a store that came back empty or
older is recognized by comparison with it. It is written after each change. When an operator accepts
a store with another content, the copy before is kept.
"""

import contextlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from clipper.clock import wall_time_us
from clipper.state_dir import write_private
from clipper.store.store import Record

PREFIX = "catalog/"
BEFORE = ".before"
_log = logging.getLogger(__name__)


class CopiedCatalog(msgspec.Struct):
    """A catalog as it is copied. name: the store, without passwords; empty in older copies."""

    revision: int
    records: list[Record]
    schema: str = "clipper.copy/1"
    name: str = ""


class CatalogCopy:
    """The file of the copy. Threads: any; one at a time writes.

    path: of the file; None: there is no folder, so nothing is kept.  name: of the store.
    """

    def __init__(self, path: Path | None, name: str) -> None:
        self.path, self._name = path, name
        self._written: tuple[int, int] | None = None  # revision and number of records

    def read(self) -> CopiedCatalog | None:
        """Return the copy; None if there is none, or none that can be read, which is logged."""
        if self.path is None or not self.path.exists():
            return None
        try:
            return msgspec.msgpack.decode(self.path.read_bytes(), type=CopiedCatalog)
        except (OSError, msgspec.MsgspecError) as error:
            _log.error("the copy of the catalog %s cannot be read: %s", self.path, error)
            return None

    def read_of_store(self) -> CopiedCatalog | None:
        """Return the copy if it is of the store that is in use; None if it is of an earlier one."""
        found = self.read()
        return found if found is not None and found.name in ("", self._name) else None

    def write(self, records: Sequence[Record], revision: int) -> None:
        """Write the catalog; an error is logged."""
        if self.path is None or self._written == (revision, len(records)):
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            copied = CopiedCatalog(revision, list(records), name=self._name)
            write_private(self.path, msgspec.msgpack.encode(copied))
            self._written = revision, len(records)
        except OSError as error:
            _log.warning("the copy of the catalog %s cannot be written: %s", self.path, error)

    def keep_before(self) -> None:
        """Keep the copy as it is now beside the next one."""
        if self.path is not None:
            with contextlib.suppress(OSError):
                self.path.replace(self.path.with_name(self.path.name + BEFORE))
            self._written = None

    def mark(self) -> None:
        """Set the time stamp to now: the store has just answered."""
        if self.path is not None:
            with contextlib.suppress(OSError):
                os.utime(self.path)

    @property
    def age_s(self) -> float:
        """Return the seconds since the store last answered the writer of the copy; infinity without
        a copy.
        """
        if self.path is None:
            return float("inf")
        try:
            return max(0.0, wall_time_us() / 1e6 - self.path.stat().st_mtime)
        except OSError:
            return float("inf")
