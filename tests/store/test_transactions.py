"""`Store.transact` over every store: what a decision writes holds only if what it read does."""

import threading

import pytest

from clipper.errors import InvalidInput, LeaseLost, StoreConflict
from clipper.store import ABSENT, Compare, Record, Store
from clipper.store.store import TXN_OPS_MAX, Transaction
from tests.threads import join


def incremented(store: Store, key: str = "n") -> int:
    def decide(transaction: Transaction) -> int:
        record = transaction.get(key)
        number = int(record.value if record is not None else 0) + 1
        transaction.put(key, b"%d" % number)
        return number

    return store.transact(decide).value


def test_it_returns_the_value_and_the_records_that_were_written(store: Store) -> None:
    store.put("old", b"x")

    def decide(transaction: Transaction) -> str:
        transaction.put("a", b"1")
        transaction.delete("old")
        return "done"

    done = store.transact(decide)
    assert done.value == "done"
    assert done.written == {"a": store.get("a")}
    assert store.get("old") is None


def test_writers_at_the_same_time_lose_no_decision(store: Store) -> None:
    begin = threading.Barrier(3)
    numbers: list[int] = []

    def work() -> None:
        begin.wait()
        for _ in range(20):
            numbers.append(incremented(store))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        join(thread)
    assert sorted(numbers) == list(range(1, 61)), "each number is given once"


def test_a_decision_is_made_again_on_what_another_has_written(store: Store) -> None:
    seen: list[bytes | None] = []

    def decide(transaction: Transaction) -> None:
        record = transaction.get("a")
        seen.append(record.value if record is not None else None)
        if len(seen) == 1:
            store.put("a", b"theirs")
        transaction.put("b", b"mine")

    store.transact(decide)
    assert seen == [None, b"theirs"]


def test_what_was_absent_must_be_absent(store: Store) -> None:
    tried: list[int] = []

    def decide(transaction: Transaction) -> bool:
        tried.append(1)
        free = transaction.get("name") is None
        if free and len(tried) == 1:
            store.put("name", b"taken")
        if free:
            transaction.put("name", b"mine")
        return free

    assert store.transact(decide).value is False
    record = store.get("name")
    assert record is not None
    assert record.value == b"taken"


def test_a_decision_sees_one_state_of_a_key(store: Store) -> None:
    store.put("a", b"1")

    def decide(transaction: Transaction) -> bool:
        before = transaction.get("a")
        if before == first[0]:
            store.put("a", b"2")
        return transaction.get("a") is before

    first = [store.get("a")]
    assert store.transact(decide).value is True


def test_an_old_hint_decides_nothing(store: Store) -> None:
    """Also of a decision that writes nothing, since what it said would be old."""
    old = store.put("a", b"1")
    store.put("a", b"2")
    seen: list[bytes] = []

    def look(transaction: Transaction) -> bytes:
        record = transaction.get("a")
        assert record is not None
        seen.append(record.value)
        return record.value

    assert store.transact(look, hint={"a": old}).value == b"2"
    assert seen == [b"1", b"2"]


def test_a_fresh_hint_is_not_read_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    record = store.put("a", b"1")

    def get(key: str) -> Record | None:
        raise AssertionError(f"{key} is read")

    monkeypatch.setattr(store, "get", get)

    def decide(transaction: Transaction) -> None:
        assert transaction.get("a") == record
        transaction.put("a", b"2")

    assert store.transact(decide, hint={"a": record}).written["a"].value == b"2"


def test_what_it_requires_holds_with_it(store: Store) -> None:
    tried: list[int] = []

    def decide(transaction: Transaction) -> None:
        tried.append(1)
        if len(tried) == 1:
            transaction.require(Compare("lock", 1_000_000))
        transaction.put("a", b"1")

    store.transact(decide)
    assert len(tried) == 2


def test_a_range_is_guarded_by_one_record(store: Store) -> None:
    store.put("c/guard", b"")
    store.put("c/a", b"1")
    seen: list[list[str]] = []

    def decide(transaction: Transaction) -> None:
        records, _ = transaction.range("c/", "c/guard")
        seen.append([record.key for record in records])
        if len(seen) == 1:
            store.put("c/b", b"2")
            store.put("c/guard", b"")
        transaction.put("c/guard", b"")

    store.transact(decide)
    assert seen == [["c/a", "c/guard"], ["c/a", "c/b", "c/guard"]]


def test_a_dry_run_decides_and_writes_nothing(store: Store) -> None:
    store.put("a", b"1")
    before = store.revision

    def decide(transaction: Transaction) -> str:
        transaction.put("a", b"2")
        transaction.delete("b")
        return "would"

    done = store.transact(decide, dry=True)
    assert (done.value, done.written) == ("would", {})
    assert store.revision == before


def test_an_error_of_the_decision_is_raised_and_nothing_is_written(store: Store) -> None:
    def decide(transaction: Transaction) -> None:
        transaction.put("a", b"1")
        raise KeyError("no")

    with pytest.raises(KeyError):
        store.transact(decide)
    assert store.get("a") is None


def test_a_lost_lease_is_replaced_once(store: Store) -> None:
    lost = store.lease(10)
    lost.revoke()
    kept = store.lease(10)
    told: list[bool] = []

    def decide(transaction: Transaction) -> None:
        told.append(transaction.lease_lost)
        transaction.put("a", b"1", kept.id if transaction.lease_lost else lost.id)

    store.transact(decide)
    assert told == [False, True]
    record = store.get("a")
    assert record is not None
    assert record.lease == kept.id
    kept.revoke()

    def stubborn(transaction: Transaction) -> None:
        transaction.put("a", b"1", lost.id)

    with pytest.raises(LeaseLost):
        store.transact(stubborn)


def test_it_gives_up_when_others_are_always_faster(store: Store) -> None:
    tried: list[int] = []

    def decide(transaction: Transaction) -> None:
        transaction.get("a")
        tried.append(1)
        store.put("a", b"theirs")
        transaction.put("b", b"mine")

    with pytest.raises(StoreConflict, match="'a' was changed by other writers 5 times"):
        store.transact(decide, tries=5)
    assert len(tried) == 5
    with pytest.raises(StoreConflict, match="'a' was changed by other writers"):
        store.transact(decide, limit_s=0.0)
    assert store.get("b") is None


def test_one_that_is_too_large_is_refused(store: Store) -> None:
    def decide(transaction: Transaction) -> None:
        for i in range(TXN_OPS_MAX + 1):
            transaction.put(f"{i}", b"")

    with pytest.raises(InvalidInput, match="at most"):
        store.transact(decide)
    assert store.get("0") is None


def test_update_starts_with_nothing_and_returns_the_record(store: Store) -> None:
    record = store.update("a", lambda value: b"first" if value is None else b"second")
    assert (record.value, record.revision) == (b"first", store.revision)
    assert record.created_revision != ABSENT
    assert store.update("a", lambda value: b"first" if value is None else b"second").value == (
        b"second"
    )
