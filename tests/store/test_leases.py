"""Leases, on every backend; and what their holder knows by its own clock."""

import contextlib
import threading
from collections.abc import Callable
from time import monotonic

import pytest

from clipper.component.threads import SYSTEM_THREADS
from clipper.errors import InvalidInput, LeaseLost, StoreError
from clipper.store import ABSENT, Compare, Event, Lease, MemoryStore, Put, Store, Watch
from tests.memory_container import wait_until

OpenStore = Callable[[int], Store]


def next_change(watch: Watch) -> Event:
    while (event := watch.next(20)) is not None:
        if event.kind != "SYNC":
            return event
    raise AssertionError("no change within 20 s")


def short_lease(store: Store, ttl_s: float, *keys: str) -> Lease:
    """Return a lease that holds these keys, and that soon ends; one that has ended before it held
    them is followed by a longer one."""
    while True:
        lease = store.lease(ttl_s)
        with contextlib.suppress(LeaseLost):
            store.txn((), [Put(key, b"1", lease.id) for key in keys])
            return lease
        ttl_s *= 2


def test_keys_vanish_with_their_lease_as_one_revision(store: Store, short_s: float) -> None:
    store.put("kept", b"1")
    watch = store.watch("")
    lease = short_lease(store, short_s, "b", "a")
    written = {next_change(watch).key for _ in range(2)}
    gone = [next_change(watch) for _ in range(2)]
    assert written == {"a", "b"}
    assert [(event.kind, event.key) for event in gone] == [("DELETE", "a"), ("DELETE", "b")]
    assert len({event.revision for event in gone}) == 1
    assert [record.key for record in store.range("")[0]] == ["kept"]
    assert store.revision == gone[0].revision
    assert not lease.alive


def test_a_read_does_not_see_keys_of_an_expired_lease(store: Store, short_s: float) -> None:
    short_lease(store, short_s, "a")
    wait_until(lambda: store.get("a") is None, "the key is gone")
    assert store.put_if("a", b"2", ABSENT).lease == ""


def test_a_renewed_lease_does_not_expire(store: Store) -> None:
    ttl_s = 1.0
    while not is_kept_alive(store, ttl_s):
        ttl_s *= 2


def is_kept_alive(store: Store, ttl_s: float) -> bool:
    """Renew a lease for longer than it lives; return False if this thread was held up for so long
    that it ended."""
    asked_s = monotonic()
    longest_s = 0.0
    record = None
    with store.lease(ttl_s) as lease, contextlib.suppress(LeaseLost):
        until_s = asked_s + 1.3 * ttl_s
        store.put("a", b"1", lease.id)
        while record is None:
            before_s, is_over = asked_s, monotonic() >= until_s
            asked_s = monotonic()
            assert store.renew(lease.id) >= ttl_s
            record = store.get("a") if is_over else None
            longest_s = max(longest_s, monotonic() - before_s)
            assert not threading.Event().wait(0.02)
    assert store.get("a") is None, "revoked at the end"
    if max(longest_s, monotonic() - asked_s) >= ttl_s:
        return False
    assert record is not None
    return True


def test_revoking_takes_its_keys_at_once(store: Store) -> None:
    lease, other = store.lease(60), store.lease(60)
    store.put("a", b"1", lease.id)
    store.put("b", b"1", other.id)
    watch = store.watch("")
    lease.revoke()
    assert lease.lost.is_set()
    assert next_change(watch).key == "a"
    assert [record.key for record in store.range("")[0]] == ["b"]
    lease.revoke()
    other.revoke()


def test_a_put_without_the_lease_frees_its_key(store: Store) -> None:
    lease, other = store.lease(60), store.lease(60)
    for key in "abc":
        store.put(key, b"1", lease.id)
    store.put("a", b"2")
    store.put("b", b"2", other.id)
    store.delete("c")
    store.put("c", b"2")
    lease.revoke()
    assert {record.key: record.lease for record in store.range("")[0]} == {
        "a": "",
        "b": other.id,
        "c": "",
    }
    other.revoke()
    assert [record.key for record in store.range("")[0]] == ["a", "c"]


def test_nothing_is_written_with_a_lease_that_is_lost(store: Store) -> None:
    lease = store.lease(60)
    lease.revoke()
    revision = store.revision
    with pytest.raises(LeaseLost, match="run out or was revoked"):
        store.txn((), (Put("free", b""), Put("a", b"", lease.id)))
    assert store.revision == revision
    assert store.get("free") is None
    with pytest.raises(LeaseLost):
        store.renew(lease.id)
    assert store.txn((Compare("a", 5),), (Put("a", b"", lease.id),)).ok is False, (
        "what does not run needs no lease"
    )


def test_two_leases_are_independent(store: Store) -> None:
    one, two = store.lease(60), store.lease(60)
    assert one.id != two.id
    one.revoke()
    two.keep()
    two.revoke()


@pytest.mark.parametrize("ttl_s", [0, -1, 1e9, float("nan")])
def test_a_lease_time_outside_its_bounds_is_refused(store: Store, ttl_s: float) -> None:
    with pytest.raises(InvalidInput, match="a lease of"):
        store.lease(ttl_s)


def test_leases_expire_as_in_a_simple_model() -> None:
    """Each lease ends exactly when its time is over, in the order of their ends, each with a
    revision of its own."""
    now = [0.0]
    store = MemoryStore(now_s=lambda: now[0])
    ids = [store.grant(ttl)[0] for ttl in (5, 1, 3, 3)]
    for id in ids:
        store.txn((), (Put(f"{id}/a", b"", id), Put(f"{id}/b", b"", id)))
    now[0] = 0.5
    store.renew(ids[1])
    for at, left in ((1.0, 4), (1.49, 4), (1.5, 3), (2.99, 3), (3.0, 1), (4.99, 1), (5.0, 0)):
        now[0] = at
        assert len(store.range("")[0]) == 2 * left, at
    assert store.revision == 8


# -- the holder's clock


class Silent:
    """A store whose answers can be made to fail, or to take their time."""

    name = "silent"
    threads = SYSTEM_THREADS
    ttl_s = 0.2

    def __init__(self) -> None:
        self.renewals = 0
        self.error: Exception | None = None
        self.answer = threading.Event()
        self.answer.set()

    def renew(self, lease: str) -> float:
        self.renewals += 1
        self.answer.wait(20)
        if self.error:
            raise self.error
        return self.ttl_s

    def revoke(self, lease: str) -> None:
        pass


def test_a_lease_is_lost_here_before_it_is_in_the_store_that_cannot_be_reached() -> None:
    store, began_s = Silent(), monotonic()
    store.error = StoreError("away")
    lease = Lease(store, "x", 0.6, began_s).renew_in_background()
    assert lease.lost.wait(20)
    assert began_s + 0.6 * 7 / 8 <= monotonic()
    assert store.renewals > 1, "it was tried again"
    store.error = None
    with pytest.raises(LeaseLost, match="not renewed in time"):
        lease.keep()
    lease.revoke()


def test_a_lease_is_renewed_in_the_background() -> None:
    store = Silent()
    store.ttl_s = 1000
    lease = Lease(store, "x", 3, monotonic()).renew_in_background()
    wait_until(lambda: store.renewals == 1)
    wait_until(lambda: lease.left_s > 800)
    lease.revoke()
    assert not lease.alive


def test_a_renewed_lease_ends_here_an_eighth_of_its_time_before_it_does_in_the_store() -> None:
    store = Silent()
    store.ttl_s = 800
    before_s = monotonic()
    lease = Lease(store, "x", 80, before_s)
    assert lease.lost.until_s == before_s + 70
    lease.keep()
    assert before_s + 700 <= lease.lost.until_s <= monotonic() + 700
    store.ttl_s = 8
    until_s = lease.lost.until_s
    lease.keep()
    assert lease.lost.until_s == until_s, "a shorter time takes nothing away"
    lease.revoke()


def test_a_lease_is_lost_while_a_renewal_hangs() -> None:
    store = Silent()
    store.ttl_s = 1000
    store.answer.clear()
    lease = Lease(store, "x", 0.2, monotonic()).renew_in_background()
    assert lease.lost.wait(20), "though its keeper is still waiting for an answer"
    store.answer.set()
    keeper = lease._renewer
    assert keeper is not None
    keeper.join(20)
    assert not lease.alive, "an answer that came too late renews nothing"
    assert not keeper.is_alive()
    lease.revoke()
    assert lease.left_s == 0


def test_a_lease_that_the_store_has_forgotten_is_lost_at_once() -> None:
    store = Silent()
    store.error = LeaseLost("gone")
    lease = Lease(store, "x", 60, monotonic())
    assert not lease.lost.wait(0)
    assert 52 < lease.left_s <= 52.5
    with pytest.raises(LeaseLost):
        lease.keep()
    assert lease.lost.is_set()
    lease.revoke()
