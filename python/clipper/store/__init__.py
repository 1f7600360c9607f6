"""Keyed bytes with revisions: one protocol, in memory, on disk or in a Redis server."""

from pathlib import Path

from clipper.errors import ConfigError
from clipper.store.memory import MemoryStore
from clipper.store.redis import RedisStore
from clipper.store.sqlite import SqliteStore
from clipper.store.store import ABSENT, Compare, Delete, Event, Get, Op, Put, Record, Store, TxnResult, Watch

STATE_FILE = "state.db"


def open_store(state: str, bytes_max: int = 0) -> Store:
    """The store that `state` names: "" or `memory://`, `sqlite:FILE`, `redis://HOST:PORT/DB`, or a folder, which then holds
    `state.db`."""
    if state in ("", "memory", "memory://"):
        return MemoryStore()
    kind, colon, rest = state.partition(":")
    if kind == "sqlite" and rest:
        return SqliteStore(rest.removeprefix("//"), bytes_max=bytes_max)
    if kind in ("redis", "rediss", "unix"):
        return RedisStore(state)
    if colon and "://" in state:
        hint = "Use a folder, 'sqlite:FILE', 'redis://HOST:PORT/DB', or 'memory://'."
        raise ConfigError(f"no store for state={state!r}.", hint=hint)
    return SqliteStore(Path(state) / STATE_FILE, bytes_max=bytes_max)


__all__ = [
    "ABSENT",
    "STATE_FILE",
    "Compare",
    "Delete",
    "Event",
    "Get",
    "MemoryStore",
    "Op",
    "Put",
    "Record",
    "RedisStore",
    "SqliteStore",
    "Store",
    "TxnResult",
    "Watch",
    "open_store",
]
