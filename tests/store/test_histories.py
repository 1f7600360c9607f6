"""Histories of concurrent clients of a store are linearizable, also when the store is killed; a
store that returns wrong values is detected."""

import random
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from clipper.errors import StoreConflict, StoreError
from clipper.store import MemoryStore, Record, SqliteStore, Store, open_store
from clipper.store.store import ABSENT
from tests.store.conftest import RedisServer
from tests.store.etcd_server import EtcdServer
from tests.store.linearizability import History, Operation, is_linearizable, violations
from tests.threads import join

CLIENTS, OPERATIONS, KEYS = 4, 60, 8


def operation(client: int, kind: str, start: float, end: float, **more: object) -> Operation:
    return Operation(client, "k", kind, start_s=start, end_s=end, **more)  # type: ignore[arg-type]


# -- the checker


def test_overlapping_calls_may_take_place_in_any_order() -> None:
    put = operation(1, "put", 0, 10, value=b"1")
    for seen in (None, b"1"):
        assert is_linearizable([put, operation(2, "get", 5, 6, result=seen)])


def test_a_read_after_a_write_returns_it() -> None:
    put = operation(1, "put", 0, 1, value=b"1")
    assert is_linearizable([put, operation(2, "get", 2, 3, result=b"1")])
    assert not is_linearizable([put, operation(2, "get", 2, 3, result=None)])


def test_a_value_that_was_seen_does_not_go_back() -> None:
    put = operation(1, "put", 0, 10, value=b"1")
    new, old = operation(2, "get", 1, 2, result=b"1"), operation(3, "get", 3, 4, result=None)
    assert not is_linearizable([put, new, old])


def test_one_of_two_swaps_of_the_same_value_takes_place() -> None:
    def swaps(first: bool, second: bool) -> list[Operation]:
        return [
            operation(1, "swap", 0, 5, value=b"1", result=first),
            operation(2, "swap", 1, 6, value=b"2", result=second),
        ]

    assert is_linearizable(swaps(True, False))
    assert is_linearizable(swaps(False, True))
    assert not is_linearizable(swaps(True, True))
    assert not is_linearizable(swaps(False, False))


def test_a_write_of_unknown_outcome_may_take_place_later_or_never() -> None:
    lost = operation(1, "put", 0, float("inf"), value=b"1", is_known=False)
    none, seen = operation(2, "get", 5, 6, result=None), operation(2, "get", 7, 8, result=b"1")
    assert is_linearizable([lost, none])
    assert is_linearizable([lost, none, seen])
    assert not is_linearizable([lost, seen, operation(2, "get", 9, 10, result=None)])


# -- clients


def run_clients(
    open_client: Callable[[int], Store], seed: int, faults: Callable[[], None] = lambda: None
) -> History:
    """Let clients with a connection each read, write and swap the same keys; values are unique."""
    history, started = History(), threading.Barrier(CLIENTS + 1)
    failed: list[BaseException] = []

    def client(number: int) -> None:
        draw = random.Random(f"{seed}/{number}")
        try:
            with open_client(number) as store:
                started.wait()
                for count in range(OPERATIONS):
                    one_call(history, store, number, b"%d.%d" % (number, count), draw)
        except BaseException as error:
            failed.append(error)
            started.abort()

    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    started.wait()
    faults()
    for thread in threads:
        join(thread)
    assert not failed, failed
    return history


def one_call(
    history: History, store: Store, number: int, value: bytes, draw: random.Random
) -> None:
    """Make one call; a store that cannot be reached is called again after a moment, by the next
    call."""
    key, kind = f"h{draw.randrange(KEYS)}", draw.choice(["get", "put", "swap", "swap"])
    unknown = (StoreError,)
    try:
        if kind == "put":
            history.call(number, key, kind, lambda: bool(store.put(key, value)), unknown, value)
            return
        record: Record | None = None

        def read() -> bytes | None:
            nonlocal record
            record = store.get(key)
            return record.value if record else None

        seen = history.call(number, key, "get", read, unknown)
        if kind == "swap":
            assert not isinstance(seen, bool)
            at = record.revision if record else ABSENT
            history.call(
                number, key, kind, lambda: swap(store, key, value, at), unknown, value, seen
            )
    except StoreError:
        time.sleep(0.02)


def swap(store: Store, key: str, value: bytes, revision: int) -> bool:
    try:
        store.put_if(key, value, revision)
    except StoreConflict:
        return False
    return True


# -- the stores


@pytest.mark.parametrize("seed", range(3))
def test_the_memory_store_is_linearizable(seed: int) -> None:
    store = MemoryStore(1000)
    assert violations(run_clients(lambda number: Shared(store), seed).operations) == []


class Shared(MemoryStore):
    """A client of a store in memory that other clients use too."""

    def __init__(self, inner: MemoryStore) -> None:
        self._inner = inner
        self.get, self.txn = inner.get, inner.txn  # type: ignore[method-assign]

    def close(self) -> None:
        """Leave the store open for the other clients."""


@pytest.mark.parametrize("seed", range(3))
def test_the_sqlite_store_is_linearizable(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "state.db"
    history = run_clients(lambda number: SqliteStore(path, durable=False), seed)
    assert violations(history.operations) == []


def test_a_redis_store_is_linearizable_through_kills(own_redis: RedisServer) -> None:
    def faults() -> None:
        for _ in range(2):
            time.sleep(0.1)
            own_redis.kill()
            own_redis.start()

    history = run_clients(lambda number: open_store(own_redis.url), 1, faults)
    assert violations(history.operations) == []
    assert len(history.operations) > CLIENTS * OPERATIONS / 2


def test_an_etcd_store_is_linearizable_through_kills(own_etcd: EtcdServer) -> None:
    def faults() -> None:
        time.sleep(0.1)
        own_etcd.kill()
        own_etcd.start()

    history = run_clients(lambda number: open_store(own_etcd.url), 1, faults)
    assert violations(history.operations) == []
    assert len(history.operations) > CLIENTS * OPERATIONS / 2


# -- planted faults


class Stale(Shared):
    """A client that answers a read from what it read up to 50 ms ago."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        self._kept: dict[str, tuple[float, Record | None]] = {}

        def get(key: str) -> Record | None:
            when, record = self._kept.get(key, (0.0, None))
            if time.monotonic() - when > 0.05:
                record = inner.get(key)
                self._kept[key] = time.monotonic(), record
            return record

        self.get = get  # type: ignore[method-assign]


class Careless(Shared):
    """A client whose comparison and write are two steps."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)

        def put_if(key: str, value: bytes, revision: int, lease: str = "") -> Record:
            record = inner.get(key)
            if (record.revision if record else ABSENT) != revision:
                raise StoreConflict("changed")
            time.sleep(0.001)
            return inner.put(key, value)

        self.put_if = put_if  # type: ignore[method-assign]


def opened(client: Callable[[MemoryStore], Store], store: MemoryStore, number: int) -> Store:
    return client(store)


@pytest.mark.parametrize("client", [Stale, Careless])
def test_a_faulty_store_is_detected(client: Callable[[MemoryStore], Store]) -> None:
    for seed in range(20):
        store = MemoryStore(1000)
        if violations(run_clients(partial(opened, client, store), seed).operations):
            return
    pytest.fail("20 histories, and none shows the fault")
