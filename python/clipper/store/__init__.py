"""Keyed bytes with revisions: one protocol, in memory, on disk or in a Redis server."""

from pathlib import Path

from clipper.errors import ConfigError
from clipper.store.election import Candidate
from clipper.store.kept import KeptStore
from clipper.store.lease import Lease
from clipper.store.memory import MemoryStore
from clipper.store.mirror import Change, Mirror
from clipper.store.redis import RedisStore, shown
from clipper.store.sqlite import SqliteStore
from clipper.store.store import ABSENT, Compare, Delete, Event, Get, Op, Put, Record, Store, TxnResult, Watch

STATE_FILE = "state.db"
COPY_FILE = "catalog.copy"
REMOTE = ("redis", "rediss", "unix")


def open_for(state: str, bytes_max: int, folder: Path | None, *, required: bool = False) -> Store:
    """The store of a server. One elsewhere may be away at the start, unless it is required; folder: where its copy is kept."""
    if state.partition(":")[0] not in REMOTE:
        return open_store(state, bytes_max)
    return KeptStore(lambda: RedisStore(state), shown(state), folder and folder / COPY_FILE, required=required)


def open_store(state: str, bytes_max: int = 0) -> Store:
    """The store that `state` names: "" or `memory://`, `sqlite:FILE`, `redis://HOST:PORT/DB`, or a folder, which then holds
    `state.db`."""
    if state in ("", "memory", "memory://"):
        return MemoryStore()
    kind, colon, rest = state.partition(":")
    if kind == "sqlite" and rest:
        return SqliteStore(rest.removeprefix("//"), bytes_max=bytes_max)
    if kind in REMOTE:
        return RedisStore(state)
    if colon and "://" in state:
        hint = "Use a folder, 'sqlite:FILE', 'redis://HOST:PORT/DB', or 'memory://'."
        raise ConfigError(f"no store for state={state!r}.", hint=hint)
    return SqliteStore(Path(state) / STATE_FILE, bytes_max=bytes_max)


__all__ = [
    "ABSENT",
    "STATE_FILE",
    "Candidate",
    "Change",
    "Compare",
    "Delete",
    "Event",
    "Get",
    "KeptStore",
    "Lease",
    "MemoryStore",
    "Mirror",
    "Op",
    "Put",
    "Record",
    "RedisStore",
    "SqliteStore",
    "Store",
    "TxnResult",
    "Watch",
    "open_for",
    "open_store",
]
