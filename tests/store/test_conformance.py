"""The rules of store.py, which every backend must keep."""

import queue
import random
import threading
from collections.abc import Callable

import pytest

from clipper.errors import InvalidInput, StoreConflict, StoreError
from clipper.store import ABSENT, Compare, Delete, Event, Get, Op, Put, Record, Store, Watch
from clipper.store.store import KEY_BYTES_MAX, TXN_OPS_MAX, VALUE_BYTES_MAX
from tests.memory_container import wait_until
from tests.threads import join

OpenStore = Callable[[int], Store]


def drain(watch: Watch, count: int) -> list[Event]:
    """Read so many events; check that there are no more."""
    events = [event for _ in range(count) if (event := watch.next(20)) is not None]
    assert watch.next(0) is None
    return events


# -- records and revisions


def test_an_empty_store_is_at_revision_zero(store: Store) -> None:
    assert store.revision == 0
    assert store.get("a") is None
    assert store.range("") == ([], 0)


def test_put_get_and_the_three_counters(store: Store) -> None:
    assert store.put("a", b"1") == Record("a", b"1", 1, 1, 1)
    store.put("b", b"x")
    assert store.put("a", b"2") == Record("a", b"2", 3, 1, 2)
    assert store.get("a") == Record("a", b"2", 3, 1, 2)
    assert store.delete("a")
    assert store.get("a") is None
    assert store.put("a", b"3") == Record("a", b"3", 5, 5, 1), "a key that comes back starts anew"


def test_deleting_an_absent_key_changes_nothing(store: Store) -> None:
    store.put("a", b"1")
    assert not store.delete("b")
    assert store.revision == 1


def test_put_if_writes_only_at_the_expected_revision(store: Store) -> None:
    first = store.put_if("a", b"1", ABSENT)
    with pytest.raises(StoreConflict):
        store.put_if("a", b"2", ABSENT)
    second = store.put_if("a", b"2", first.revision)
    with pytest.raises(StoreConflict, match="'a' is not at revision 1"):
        store.put_if("a", b"3", first.revision)
    assert store.get("a") == second


def test_range_is_by_prefix_and_in_order_of_utf8(store: Store) -> None:
    keys = [
        "b",
        "a/2",
        "a/10",
        "a",
        "a0",
        "a/\U0001f600",
        "a/\U0010ffff",
        "a/\uffff",
        "a/é",
        "",
        "ab",
    ]
    for key in filter(None, keys):
        store.put(key, key.encode())
    records, revision = store.range("a/")
    assert [r.key for r in records] == [
        "a/10",
        "a/2",
        "a/é",
        "a/\uffff",
        "a/\U0001f600",
        "a/\U0010ffff",
    ]
    assert all(r.value == r.key.encode() for r in records)
    assert revision == store.revision == 10
    assert len(store.range("")[0]) == 10
    assert store.range("zz")[0] == []


def test_keys_with_like_wildcards_are_ordinary(store: Store) -> None:
    for key in ("a%", "a_", "ax", "a\x00b", "A"):
        store.put(key, b"")
    assert [r.key for r in store.range("a%")[0]] == ["a%"]
    assert [r.key for r in store.range("a")[0]] == ["a\x00b", "a%", "a_", "ax"]


@pytest.mark.parametrize(
    "value", [b"", b"\x00\xff" * 10, bytes(VALUE_BYTES_MAX)], ids=["empty", "binary", "largest"]
)
def test_values_are_returned_unchanged(store: Store, value: bytes) -> None:
    store.put("k" * KEY_BYTES_MAX, value)
    record = store.get("k" * KEY_BYTES_MAX)
    assert record is not None
    assert record.value == value


@pytest.mark.parametrize(
    ("op", "why"),
    [
        (Put("k" * (KEY_BYTES_MAX + 1), b""), "bad key"),
        (Put("", b""), "bad key"),
        (Put("\ud800", b""), "UTF-8"),
        (Put("a", bytes(VALUE_BYTES_MAX + 1)), "at most"),
        (Put("a", "text"), "must be bytes"),  # type: ignore[arg-type]
    ],
)
def test_keys_and_values_beyond_the_limits_are_refused(store: Store, op: Op, why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        store.txn((), (Put("ok", b""), op))
    assert store.revision == 0


# -- transactions


def test_a_transaction_is_one_revision_and_all_or_nothing(store: Store) -> None:
    store.put("gone", b"x")
    result = store.txn(
        (Compare("gone", 1), Compare("new", ABSENT)),
        (Put("a", b"1"), Put("b", b"2"), Delete("gone"), Delete("never"), Get("gone"), Get("a")),
    )
    assert result.ok
    assert result.revision == 2
    old = Record("gone", b"x", 1, 1, 1)
    assert result.results == (
        Record("a", b"1", 2, 2, 1),
        Record("b", b"2", 2, 2, 1),
        old,
        None,
        old,
        None,
    )
    assert {r.revision for r in store.range("")[0]} == {2}


def test_orelse_runs_when_one_compare_fails(store: Store) -> None:
    store.put("a", b"1")
    result = store.txn(
        (Compare("a", 1), Compare("b", 7)), (Put("a", b"2"),), (Get("a"), Put("c", b"3"))
    )
    assert not result.ok
    assert result.results[0] == store.get("a") == Record("a", b"1", 1, 1, 1)
    assert store.get("c") is not None


@pytest.mark.parametrize(
    ("compare", "holds"),
    [
        (Compare("a", 2), True),
        (Compare("a", 1), False),
        (Compare("a", 1, "created_revision"), True),
        (Compare("a", 2, "version"), True),
        (Compare("a", b"2", "value"), True),
        (Compare("a", b"1", "value"), False),
        (Compare("none", ABSENT), True),
        (Compare("none", ABSENT, "version"), True),
        (Compare("none", ABSENT, "created_revision"), True),
        (Compare("none", b"", "value"), False),
    ],
)
def test_each_comparison_holds_or_fails(store: Store, compare: Compare, holds: bool) -> None:
    store.put("a", b"1")
    store.put("a", b"2")
    assert store.txn((compare,), ()).ok is holds
    assert store.revision == 2, "a transaction that changes nothing gets no revision"


def test_a_transaction_may_not_write_a_key_twice_nor_be_boundless(store: Store) -> None:
    with pytest.raises(InvalidInput, match="twice"):
        store.txn((), (Put("a", b""), Delete("a")))
    with pytest.raises(InvalidInput, match="at most"):
        store.txn((), [Put(f"k{i}", b"") for i in range(TXN_OPS_MAX + 1)])
    store.txn((), [Put(f"k{i}", b"") for i in range(TXN_OPS_MAX)])
    assert store.revision == 1


# -- watches


def test_a_watch_delivers_past_changes_then_sync_then_new_changes(store: Store) -> None:
    store.put("m/a", b"1")
    store.put("x", b"-")
    store.txn((), (Put("m/b", b"2"), Delete("m/a"), Put("m/c", b"3")))
    watch = store.watch("m/", 1)
    b, c = store.get("m/b"), store.get("m/c")
    assert drain(watch, 4) == [
        Event("PUT", 3, "m/b", b),
        Event("DELETE", 3, "m/a"),
        Event("PUT", 3, "m/c", c),
        Event("SYNC", 3),
    ]
    store.delete("m/c")
    store.put("y", b"-")
    assert drain(watch, 1) == [Event("DELETE", 4, "m/c")]


def test_a_watch_from_now_delivers_nothing_old(store: Store) -> None:
    store.put("a", b"1")
    watch = store.watch("")
    new = store.put("a", b"2")
    put, sync = sorted(drain(watch, 2), key=lambda event: event.kind)
    assert put == Event("PUT", 2, "a", new)
    assert sync.kind == "SYNC", "of etcd it may come before what was put meanwhile"


def test_a_watch_that_fell_too_far_behind_is_reset_and_continues(open_with: OpenStore) -> None:
    store = open_with(10)
    watch = store.watch("")
    assert drain(watch, 1) == [Event("SYNC", 0)]
    for i in range(11):
        store.put("a", bytes([i]))
    wait_until(lambda: getattr(watch, "cursor", 11) == 11, "it has heard of all", 20)
    assert drain(watch, 1) == [Event("RESET", 11)]
    new = store.put("a", b"new")
    assert drain(watch, 1) == [Event("PUT", 12, "a", new)]
    assert [e.kind for e in drain(store.watch("", 1), 2)] == ["RESET", "SYNC"]
    assert [e.revision for e in drain(store.watch("", 2), 11)] == [*range(3, 13), 12], (
        "the last ten are still there"
    )


def test_a_transaction_is_compacted_as_a_whole(open_with: OpenStore) -> None:
    store = open_with(4)
    store.txn((), [Put(f"k{i}", b"") for i in range(6)])
    assert len(drain(store.watch("", 0), 7)) == 6 + 1, "even when it alone is more than the bound"
    store.put("a", b"")
    assert [e.kind for e in drain(store.watch("", 0), 2)] == ["RESET", "SYNC"]
    assert [e.key for e in drain(store.watch("", 1), 2)] == ["a", ""]


def test_a_watch_from_a_future_revision_is_reset(store: Store) -> None:
    store.put("a", b"")
    assert [e.kind for e in drain(store.watch("", 99), 2)] == ["RESET", "SYNC"]


def test_watches_wake_when_something_changes_and_end_when_closed(store: Store) -> None:
    watch, other = store.watch(""), store.watch("")
    seen: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def read() -> None:
        for event in iter(watch.next, None):
            seen.put(event)

    reader = threading.Thread(target=read)
    reader.start()
    store.put("a", b"1")
    assert {seen.get(timeout=60).kind for _ in range(2)} == {"PUT", "SYNC"}
    watch.close()
    reader.join(60)
    assert not reader.is_alive()
    assert watch.closed
    assert not other.closed
    blocked = threading.Thread(target=lambda: list(iter(other.next, None)))
    blocked.start()
    store.close()
    blocked.join(60)
    assert not blocked.is_alive()


# -- the rest


def test_update_applies_the_change_to_the_current_value(store: Store) -> None:
    for _ in range(3):
        store.update("n", lambda old: b"%d" % (int(old or b"0") + 1))
    record = store.get("n")
    assert record is not None
    assert (record.value, record.version) == (b"3", 3)


def test_threads_lose_no_update(store: Store) -> None:
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        for _ in range(50):
            store.update("n", lambda old: b"%d" % (int(old or b"0") + 1))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        join(thread)
    record = store.get("n")
    assert record is not None
    assert record.value == b"200"
    assert record.revision == record.version == 200


def test_a_closed_store_raises_an_error(store: Store) -> None:
    watch = store.watch("")
    store.close()
    store.close()
    for call in (
        lambda: store.get("a"),
        lambda: store.put("a", b""),
        lambda: store.range(""),
        lambda: store.revision,
    ):
        with pytest.raises(StoreError, match="closed"):
            call()
    assert watch.next() is None


class Twin:
    """A simple, slow store with the same rules: it keeps the whole content of every revision."""

    def __init__(self) -> None:
        self.history: list[dict[str, Record]] = [{}]
        self.log: list[Event] = []

    def txn(
        self, compares: list[Compare], then: list[Op], orelse: list[Op]
    ) -> tuple[bool, tuple[Record | None, ...]]:
        now = self.history[-1]
        ok = all(c.holds(now.get(c.key)) for c in compares)
        after, revision, events, results = dict(now), len(self.history), [], []
        for op in then if ok else orelse:
            old = now.get(op.key)
            match op:
                case Get():
                    results.append(old)
                case Delete():
                    results.append(after.pop(op.key, None))
                    if old:
                        events.append(Event("DELETE", revision, op.key))
                case Put():
                    created = old.created_revision if old else revision
                    after[op.key] = Record(
                        op.key, op.value, revision, created, old.version + 1 if old else 1
                    )
                    results.append(after[op.key])
                    events.append(Event("PUT", revision, op.key, after[op.key]))
        if events:
            self.history.append(after)
            self.log += events
        return ok, tuple(results)


@pytest.mark.parametrize("seed", range(8))
def test_random_operations_equal_those_of_a_simple_store(store: Store, seed: int) -> None:
    rng, twin = random.Random(seed), Twin()
    keys = [f"{p}/{i}" for p in "ab" for i in range(4)]
    watched = [(store.watch(prefix), prefix) for prefix in ("", "a/", "b/1")]

    def random_op(key: str) -> Op:
        ops: list[Op] = [
            Put(key, rng.randbytes(3)),
            Put(key, rng.randbytes(2)),
            Delete(key),
            Get(key),
        ]
        return rng.choice(ops)

    for _ in range(150):
        compares = [
            Compare(rng.choice(keys), rng.randrange(len(twin.history)))
            for _ in range(rng.randrange(2))
        ]
        then = [random_op(key) for key in rng.sample(keys, rng.randrange(4))]
        orelse = [random_op(key) for key in rng.sample(keys, rng.randrange(3))]
        result = store.txn(compares, then, orelse)
        assert (result.ok, result.results) == twin.txn(compares, then, orelse)
        assert result.revision == len(twin.history) - 1
        prefix = rng.choice(["", "a", "a/", "b/2", "c"])
        now = twin.history[-1]
        assert store.range(prefix) == (
            [now[k] for k in sorted(now) if k.startswith(prefix)],
            result.revision,
        )
    for watch, prefix in watched:
        expected = [e for e in twin.log if e.key.startswith(prefix)]
        assert [e for e in drain(watch, len(expected) + 1) if e.kind != "SYNC"] == expected
    since = rng.randrange(len(twin.history))
    late = [e for e in twin.log if e.revision > since]
    assert drain(store.watch("", since), len(late) + 1)[:-1] == late
