"""A check that a store still has the catalog that this server knows, and did not come back empty,
older or as another one.

Each write of the catalog writes the record `catalog/guard` too. Its value names the history (a
random number of its first write) and counts the writes, so a store continues what a server knows if
it has the same history with at least as many writes. Revisions would not do: they begin anew in a
store that was emptied, and reach the same numbers.

The content of a store that does not continue is refused. The server serves on from what it knows
and writes nothing, until an operator accepts the store (`clipper store accept`), as it is or
with what the server knows. That gives the store a new history, which names those that it continues,
so every other server follows by itself. Deletions by management commands are writes like others,
however many.
"""

import logging
import secrets
from collections.abc import Iterable
from typing import Final

import msgspec

from clipper.errors import StoreError
from clipper.store.store import Record

GUARD: Final = "catalog/guard"
HISTORIES_MAX: Final = 16  # earlier ones that a history names
HINT: Final = (
    "What is known is served, and nothing can be changed. Restore the store, or: clipper store"
    " accept --restore (write back what is known here), clipper store accept --as-is (take what the"
    " store has)."
)
_log = logging.getLogger(__name__)


class StoreHistory(msgspec.Struct, frozen=True):
    """The value of the guard. id: of the history; empty if an older version has written it.
    writes: how many the catalog had in it. continues: ids of the histories that it replaced.
    """

    id: str = ""
    writes: int = 0
    continues: tuple[str, ...] = ()

    def next(self) -> "StoreHistory":
        """Return the history after one more write."""
        id = self.id or secrets.token_hex(8)
        continues = self.continues if self.id else ("",)
        return StoreHistory(id, self.writes + 1, continues)

    def accepted(self, known: "Iterable[StoreHistory]") -> "StoreHistory":
        """Return a new history that continues this one and those known."""
        before = [self, *known]
        ids = dict.fromkeys(id for one in before for id in (one.id, *one.continues))
        writes = max(one.writes for one in before) + 1
        return StoreHistory(secrets.token_hex(8), writes, tuple(ids)[:HISTORIES_MAX])


def history_in(guard: Record | None) -> StoreHistory | None:
    """Return the history of a guard; None without one."""
    if guard is None:
        return None
    try:
        return msgspec.json.decode(guard.value, type=StoreHistory)
    except msgspec.MsgspecError:  # empty, as older versions write it
        return StoreHistory("", guard.version)


def encoded(history: StoreHistory) -> bytes:
    """Return the value of the guard."""
    return msgspec.json.encode(history)


class Continuity:
    """Knows the history of the catalog here, and why the store is not trusted, if it is not.

    Threads: one at a time judges; any may read `trouble`.
    """

    def __init__(self, store: str) -> None:
        self._store = store
        self.known: StoreHistory | None = None
        self.trouble = ""  # why the content of the store is refused; empty: it is not

    def judge(self, guard: Record | None) -> None:
        """Take note of the guard of a listing. Raises StoreError if it does not continue what is
        known."""
        found = history_in(guard)
        what = self._broken(found)
        if what:
            self._refuse(what)
        if self.trouble:
            _log.warning("store %s continues the catalog known here", self._store)
        self.known, self.trouble = found if found is not None else self.known, ""

    def continues(self, guard: Record | None) -> bool:
        """Return whether a guard continues what is known. One that was read before what is known
        was written does not, so read it again before it is judged."""
        return not self._broken(history_in(guard))

    def _broken(self, found: StoreHistory | None) -> str:
        """Return why a history does not continue the known one; empty if it does."""
        known = self.known
        if known is None:
            return ""
        if found is None:
            return "has lost the catalog"
        if found.id == known.id or not found.id:
            return "has an older catalog" if found.writes < known.writes else ""
        return "" if known.id in found.continues else "has another catalog"

    def _refuse(self, what: str) -> None:
        trouble = f"store {self._store} {what}"
        if trouble != self.trouble:
            _log.error(
                "%s: what this server knows is served on, until an operator accepts", trouble
            )
        self.trouble = trouble
        raise StoreError(f"{trouble}.", hint=HINT)

    def check(self) -> None:
        """Raise StoreError while the store is not trusted: nothing may be written to it."""
        if self.trouble:
            raise StoreError(f"{self.trouble}.", hint=HINT)
