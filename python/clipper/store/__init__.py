"""Keyed bytes with revisions: one protocol, in memory or on disk."""

from pathlib import Path

from clipper.errors import ConfigError
from clipper.store.memory import MemoryStore
from clipper.store.sqlite import SqliteStore
from clipper.store.store import ABSENT, Compare, Delete, Event, Get, Op, Put, Record, Store, TxnResult, Watch

STATE_FILE = "state.db"


def open_store(state: str, bytes_max: int = 0) -> Store:
    """The store that `state` names: "" or `memory://`, `sqlite:FILE`, or a folder, which then holds `state.db`."""
    if state in ("", "memory", "memory://"):
        return MemoryStore()
    kind, colon, rest = state.partition(":")
    if kind == "sqlite" and rest:
        return SqliteStore(rest.removeprefix("//"), bytes_max=bytes_max)
    if colon and "://" in state:
        raise ConfigError(f"no store for state={state!r}.", hint="Use a folder, 'sqlite:FILE', or 'memory://'.")
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
    "SqliteStore",
    "Store",
    "TxnResult",
    "Watch",
    "open_store",
]
