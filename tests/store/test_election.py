"""One leader at a time; a deposed one cannot write."""

import contextlib
import threading
from collections.abc import Callable

import pytest

from clipper.errors import LeaseLost
from clipper.store import Candidate, MemoryStore, Put, Store
from tests.memory_container import wait_until

OpenStore = Callable[[int], Store]


def test_the_first_candidate_leads_and_the_next_one_follows(store: Store) -> None:
    with store.lease(60) as one, store.lease(60) as two:
        a, b = Candidate(store, "reaper", b"a", one), Candidate(store, "reaper", b"b", two)
        assert a.is_leader
        assert a.wait(0)
        assert not b.wait(0)
        assert a.leader == b.leader == b"a"
        other = Candidate(store, "other", b"b", two)
        assert other.is_leader, "an election has its name"
        notified: list[bool] = []
        b.on_change(notified.append)
        a.resign()
        a.resign()
        assert not a.is_leader
        assert b.wait(20)
        assert b.leader == b"b"
        wait_until(lambda: notified == [True])
        b.resign()
        assert notified == [True, False]
        other.resign()


def test_the_leader_is_notified_at_once(store: Store) -> None:
    with store.lease(60) as lease:
        notified: list[bool] = []
        candidate = Candidate(store, "x", b"", lease)
        candidate.on_change(lambda leads: 1 / 0)
        candidate.on_change(notified.append)
        assert notified == [True]
        candidate.resign()


def dying_candidate(store: Store, ttl_s: float) -> Candidate:
    """Return a candidate whose lease soon ends; one that ended before is followed by a longer
    one."""
    while True:
        with contextlib.suppress(LeaseLost):
            return Candidate(store, "x", b"1", store.lease(ttl_s))
        ttl_s *= 2


def test_a_leader_whose_lease_ends_is_followed_and_fenced(store: Store, short_s: float) -> None:
    """A leader knows the end of its lease before another one leads, and its guarded writes fail."""
    first, living = dying_candidate(store, short_s), store.lease(60)
    second = Candidate(store, "x", b"2", living)
    guard = first.guard
    assert second.wait(20)
    assert not first.is_leader
    assert second.epoch > first.epoch
    assert not store.txn((guard,), (Put("work", b"late"),)).ok
    assert store.txn((second.guard,), (Put("work", b"second"),)).ok
    first.resign()
    second.resign()
    with pytest.raises(LeaseLost, match="resigned"):
        second.guard  # noqa: B018
    living.revoke()


def test_no_candidate_leads_after_its_lease_expired_by_its_own_clock() -> None:
    """Its store, whose clock stands still, still has the key then."""
    store = MemoryStore(now_s=lambda: 0.0)
    lease = store.lease(0.5)
    candidate = Candidate(store, "x", b"", lease)
    assert lease.lost.wait(20)
    assert candidate.leader == b""
    assert not candidate.is_leader
    candidate.resign()


def test_there_are_never_two_leaders(store: Store) -> None:
    """Each of ten candidates resigns as soon as it leads: one leads at a time, with growing
    epochs."""
    leases = [store.lease(60) for _ in range(10)]
    epochs: list[int] = []
    busy = threading.Lock()

    def serve(index: int) -> None:
        candidate = Candidate(store, "x", b"%d" % index, leases[index])
        assert candidate.wait(20)
        assert busy.acquire(blocking=False), "two leaders"
        epochs.append(candidate.epoch)
        busy.release()
        candidate.resign()

    threads = [threading.Thread(target=serve, args=(index,)) for index in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(epochs) == 10
    assert epochs == sorted(epochs)
    for lease in leases:
        lease.revoke()
