"""A key-value store with revisions, watches and leases: in memory, in SQLite, Redis or etcd."""

from pathlib import Path
from typing import TYPE_CHECKING, Final

from clipper.errors import ConfigError, without_secrets
from clipper.store.cached_store import CachedStore
from clipper.store.catalog_copy import CatalogCopy
from clipper.store.election import Candidate
from clipper.store.follower import Follower
from clipper.store.lease import Lease
from clipper.store.memory import MemoryStore
from clipper.store.mirror import KeyChange, Mirror
from clipper.store.redis.store import RedisStore
from clipper.store.sqlite import SqliteStore
from clipper.store.store import (
    ABSENT,
    TXN_OPS_MAX,
    Compare,
    Delete,
    Event,
    Get,
    Op,
    Put,
    Record,
    Store,
    Transaction,
    TxnResult,
    Watch,
)

STATE_FILE = "state.db"
COPY_FILE = "catalog.copy"
REDIS: Final = ("redis", "rediss", "unix")
ETCD: Final = ("etcd", "etcds")

if TYPE_CHECKING:
    from clipper.store.etcd.store import EtcdStore


def open_server_store(
    state: str, bytes_max: int, folder: Path | None, *, required: bool = False
) -> tuple[Store, CatalogCopy]:
    """Open the store of a server; return it with the copy of its catalog.

    A remote store (Redis, etcd) may be unreachable at the start, unless it is required: see
    CachedStore.

    state: see `open_store`.  bytes_max: bound of a SQLite file; 0 for none.
    folder: keeps the copy; None for no copy.
    """
    kind = state.partition(":")[0]
    if kind not in REDIS + ETCD:
        store = open_store(state, bytes_max)
        is_kept = not isinstance(store, MemoryStore)
        return store, CatalogCopy(folder / COPY_FILE if folder and is_kept else None, store.name)
    name = without_secrets(state)
    copy = CatalogCopy(folder and folder / COPY_FILE, name)
    return CachedStore(lambda: open_store(state), name, copy, required=required), copy


def open_store(state: str, bytes_max: int = 0) -> Store:
    """Open the store that `state` names.

    state: "" or `memory://`, `sqlite:FILE`, `redis://HOST:PORT/DB`,
    `etcd://HOST:PORT,HOST:PORT/PREFIX`, or a folder, which then contains `state.db`.  Raises
    ConfigError for anything else, and StoreError when the store cannot be opened.
    """
    if state in ("", "memory", "memory://"):
        return MemoryStore()
    kind, _, rest = state.partition(":")
    if kind == "sqlite" and rest:
        return SqliteStore(rest.removeprefix("//"), bytes_max=bytes_max)
    if kind in REDIS:
        return RedisStore(state)
    if kind in ETCD:
        return _open_etcd(state)
    check_kind(state)
    return SqliteStore(Path(state) / STATE_FILE, bytes_max=bytes_max)


def check_kind(state: str) -> None:
    """Raise ConfigError if no store has the kind of URL that `state` is."""
    kind, colon, _ = state.partition(":")
    is_known = kind in (*REDIS, *ETCD, "sqlite", "memory")
    if colon and "://" in state and not is_known:
        hint = (
            "Use a folder, 'sqlite:FILE', 'redis://HOST:PORT/DB', 'etcd://HOST:PORT/PREFIX', or"
            " 'memory://'."
        )
        raise ConfigError(f"no store for state={state!r}.", hint=hint)


def _open_etcd(url: str) -> "EtcdStore":
    try:
        from clipper.store.etcd.store import EtcdStore
    except ImportError:
        hint = "pip install 'clipper-serving[etcd]'."
        raise ConfigError(
            f"state={without_secrets(url)!r} needs the package grpcio, which is not installed.",
            hint=hint,
        ) from None
    return EtcdStore(url)


__all__ = [
    "ABSENT",
    "STATE_FILE",
    "TXN_OPS_MAX",
    "CachedStore",
    "Candidate",
    "CatalogCopy",
    "Compare",
    "Delete",
    "Event",
    "Follower",
    "Get",
    "KeyChange",
    "Lease",
    "MemoryStore",
    "Mirror",
    "Op",
    "Put",
    "Record",
    "RedisStore",
    "SqliteStore",
    "Store",
    "Transaction",
    "TxnResult",
    "Watch",
    "check_kind",
    "open_server_store",
    "open_store",
]
