"""The mirror follows its store, whatever happens to the watch."""

import random
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from clipper.component import Stop
from clipper.errors import StoreError
from clipper.store import (
    ABSENT,
    Compare,
    Delete,
    Event,
    Follower,
    MemoryStore,
    Mirror,
    Put,
    Record,
    Store,
    open_store,
)
from clipper.store import follower as follower_module
from clipper.store.etcd import watch as etcd_watch
from clipper.store.mirror import KeyChange
from tests.memory_container import wait_until
from tests.store.etcd_server import EtcdServer
from tests.threads import join

OpenStore = Callable[[int], Store]


def test_a_mirror_equals_the_store(store: Store) -> None:
    store.put("m/a", b"1")
    store.put("x", b"-")
    with Mirror(store, "m/", int) as mirror:
        assert dict(mirror.items()) == {"a": 1}
        assert "a" in mirror
        assert "x" not in mirror
        record = store.txn((), (Put("m/b", b"2"), Delete("m/a"))).results[0]
        assert mirror.wait_for(lambda m: "b" in m and "a" not in m, 20)
        assert mirror["b"] == 2
        assert mirror.record("b") == record
        assert mirror.get("a") is None
        assert mirror.get("a", 7) == 7
        assert list(mirror) == ["b"]
        assert len(mirror) == 1
        assert mirror.revision == store.revision
        assert mirror.stale_s < 20
        assert mirror.trouble is None
    assert mirror["b"] == 2, "what was known stays readable"


def test_changes_are_reported_when_they_are_readable(store: Store) -> None:
    changes_seen: list[tuple[str, int | None, int | None, bool]] = []
    store.put("m/a", b"1")
    with Mirror(store, "m/", int) as mirror:

        def note(changes: list[KeyChange[int]]) -> None:
            changes_seen.extend(
                (c.key, c.before, c.after, c.new is None or c.key in mirror) for c in changes
            )

        mirror.on_change(note)
        mirror.on_change(lambda changes: 1 / 0)
        store.put("m/a", b"2")
        store.put("m/b", b"3")
        store.delete("m/a")
        wait_until(lambda: len(changes_seen) == 3)
    assert changes_seen == [
        ("a", 1, 2, True),
        ("b", None, 3, True),
        ("a", 2, None, True),
    ] or changes_seen[0][:3] == ("a", 1, 2)


@pytest.mark.parametrize("count", [1, 3, 4, 7])
def test_changes_are_delivered_in_batches_of_a_limit(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower_module, "_BATCH", 3)
    changes_seen: list[list[str]] = []
    with MemoryStore() as store, Mirror(store, "m/", bytes) as mirror:
        mirror.on_change(lambda changes: changes_seen.append([change.key for change in changes]))
        store.txn((), [Put(f"m/{i}", b"") for i in range(count)])
        wait_until(lambda: sum(map(len, changes_seen)) == count)
        assert len(mirror) == count
    assert [key for keys in changes_seen for key in keys] == [str(i) for i in range(count)]
    assert max(map(len, changes_seen)) <= 3


def test_an_undecodable_value_is_missing_and_affects_no_other_key(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    store.put("m/a", b"not a number")
    store.put("m/b", b"1")
    with Mirror(store, "m/", int) as mirror:
        assert dict(mirror.items()) == {"b": 1}
        assert mirror.get("a") is mirror.get("a") is None
        with pytest.raises(KeyError):
            mirror["a"]
        assert mirror.record("a") is not None
        assert [r.message.split(":")[0] for r in caplog.records] == [
            "the record 'm/a' at revision 1 cannot be read"
        ]
        store.put("m/a", b"2")
        assert mirror.wait_for(lambda m: m.get("a") == 2, 20)


def test_values_are_decoded_once_and_on_first_use(store: Store) -> None:
    decoded: list[bytes] = []
    for i in range(3):
        store.put(f"m/{i}", b"%d" % i)
    with Mirror(store, "m/", lambda value: (decoded.append(value), value)[1]) as mirror:
        assert decoded == []
        assert mirror["1"] == mirror["1"] == b"1"
        assert decoded == [b"1"]


def test_a_watch_that_missed_changes_costs_no_change(open_with: OpenStore) -> None:
    """More changes come at once than the store keeps: a RESET, and the differences are reported."""
    store = open_with(10)
    store.put("m/gone", b"0")
    changes_seen: dict[str, tuple[Any, Any]] = {}
    go_on = threading.Event()
    with Mirror(store, "m/", int) as mirror:
        mirror.on_change(
            lambda changes: (
                changes_seen.update({c.key: (c.before, c.after) for c in changes}),
                go_on.wait(20),
            )
        )
        store.put("m/first", b"1")
        wait_until(lambda: changes_seen, "its thread stands in the callback")
        store.delete("m/gone")
        for i in range(30):
            store.put(f"m/{i % 15}", b"%d" % i)
        go_on.set()
        assert mirror.wait_for(lambda m: m.get("14") == 29, 20)
        wait_until(lambda: len(changes_seen) == 17)
        assert dict(mirror.items()) == {"first": 1, **{str(i): i + 15 for i in range(15)}}
    assert changes_seen["gone"] == (0, None)
    assert changes_seen["3"] == (None, 18)


@pytest.mark.parametrize("seed", range(3))
def test_a_mirror_follows_random_writers(open_with: OpenStore, seed: int) -> None:
    """The reported changes, applied one after the other, give the content of the mirror, which is
    that of the store."""
    store, rng = open_with(20), random.Random(seed)
    twin: dict[str, int] = {}

    def follow(changes: list[KeyChange[int]]) -> None:
        for change in changes:
            assert twin.get(change.key) == change.before
            if change.after is None:
                twin.pop(change.key, None)
            else:
                twin[change.key] = change.after
        assert twin == dict(mirror.items()) or len(changes) < 1000

    def write(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(60):
            key = f"m/{rng.randrange(8)}"
            ops = (Delete(key),) if rng.random() < 0.4 else (Put(key, b"%d" % rng.randrange(1000)),)
            store.txn((Compare("never", ABSENT),), ops)

    with Mirror(store, "m/", int) as mirror:
        mirror.on_change(follow)
        writers = [threading.Thread(target=write, args=(rng.random(),)) for _ in range(3)]
        for writer in writers:
            writer.start()
        for writer in writers:
            join(writer)
        end = store.put("m/end", b"1")
        assert mirror.wait_for(lambda m: m.revision >= end.revision, 20)
        wait_until(lambda: "end" in twin)
        expected = {record.key[2:]: int(record.value) for record in store.range("m/")[0]}
        assert dict(mirror.items()) == twin == expected


class Flaky(MemoryStore):
    """A store that fails while `unreachable` is true."""

    unreachable = False

    def range(self, prefix: str) -> Any:
        if self.unreachable:
            raise StoreError("away")
        return super().range(prefix)

    def watch(self, prefix: str, from_revision: int | None = None) -> Any:
        watch, store = super().watch(prefix, from_revision), self
        plain = watch.next

        def next(timeout_s: float | None = None) -> Event | None:
            if store.unreachable:
                raise StoreError("away")
            return plain(min(timeout_s or 0, 0.02))

        watch.next = next  # type: ignore[method-assign]
        return watch


def test_a_mirror_answers_while_its_store_is_unavailable() -> None:
    store = Flaky()
    store.put("a", b"1")
    with Mirror(store, "", int) as mirror:
        store.unreachable = True
        wait_until(lambda: mirror.trouble)
        store.put("b", b"2")
        assert mirror["a"] == 1
        known_s = mirror.stale_s
        wait_until(lambda: mirror.stale_s > known_s)
        assert "b" not in mirror
        store.unreachable = False
        assert mirror.wait_for(lambda m: m.get("b") == 2, 20)
        wait_until(lambda: mirror.trouble is None)


def test_a_store_that_is_restored_while_it_is_listed_takes_nothing_away() -> None:
    store, refusals, gone = MemoryStore(), [1], list[str]()
    content = (Put("m/a", b"1"), Put("m/b", b"2"))
    store.txn((), content)

    def accepts() -> None:
        if refusals:
            refusals.pop()
            raise StoreError("emptied")
        store.txn((), content)  # as late as it can be

    with Mirror(store, "m/", int, accepts=accepts) as mirror:
        mirror.on_change(lambda changes: gone.extend(c.key for c in changes if c.new is None))
        store.txn((), (Delete("m/a"), Delete("m/b")))
        wait_until(lambda: not refusals, "the deletions are refused")
        assert mirror.wait_for(lambda m: m.revision > 2, 20)
        assert dict(mirror.items()) == {"a": 1, "b": 2}
        assert not gone


def test_a_mirror_may_start_before_its_store() -> None:
    store = Flaky()
    store.put("a", b"1")
    store.unreachable = True
    with pytest.raises(StoreError):
        Mirror(store, "", int)
    with Mirror(store, "", int, wait=False) as mirror:
        changes_seen: list[str] = []
        mirror.on_change(lambda changes: changes_seen.extend(change.key for change in changes))
        assert mirror.stale_s == float("inf")
        assert not mirror.wait_for(lambda m: "a" in m, 0)
        store.unreachable = False
        assert mirror.wait_for(lambda m: "a" in m, 20)
        wait_until(lambda: changes_seen == ["a"])


def test_closing_wakes_waiting_threads(store: Store) -> None:
    mirror = Mirror(store, "m/", int)
    found: list[bool] = []
    waiter = threading.Thread(target=lambda: found.append(mirror.wait_for(lambda m: "a" in m)))
    waiter.start()
    mirror.close()
    mirror.close()
    waiter.join(20)
    assert found == [False]


class Recording:
    """A sink that fails as often as it is told."""

    def __init__(self, failures: int, error: Exception) -> None:
        self.left = failures
        self._error = error
        self.keys = set[str]()

    @property
    def known(self) -> int:
        return len(self.keys)

    def begin(self, stop: Stop) -> bool:
        return True

    def reset(self, records: Sequence[Record], revision: int) -> None:
        self.keys = {record.key for record in records}

    def changed(self, events: Sequence[Event]) -> None:
        if self.left:
            self.left -= 1
            raise self._error
        self.keys |= {event.key for event in events}

    def poll(self) -> None:
        pass


@pytest.mark.parametrize("error", [KeyError("value"), MemoryError(), StoreError("no")])
def test_an_error_of_a_sink_makes_it_begin_anew(store: Store, error: Exception) -> None:
    sink = Recording(2, error)
    follower = Follower(store, "m/", sink, name="clipper-test")
    follower.start()
    wait_until(lambda: follower.contact_s > 0, "it has listed")
    for key in ("m/a", "m/b", "m/c"):
        store.put(key, b"")
        wait_until(lambda key=key: key in sink.keys, "nothing is lost")
    assert follower.trouble is None or sink.left == 0
    assert follower.health().state == "running"
    assert follower.end()
    assert follower.health().state == "ended"


class Interrupted(MemoryStore):
    """A store whose watch says after each event that it was interrupted."""

    def watch(self, prefix: str, from_revision: int | None = None) -> Any:
        watch, told = super().watch(prefix, from_revision), list[Event]()
        plain = watch.next

        def next(timeout_s: float | None = None) -> Event | None:
            if told:
                told.clear()
                raise StoreError("interrupted")
            event = plain(timeout_s)
            if event is not None:
                told.append(event)
            return event

        watch.next = next  # type: ignore[method-assign]
        return watch


def test_what_came_before_an_interruption_is_taken_in() -> None:
    store = Interrupted()
    with Mirror(store, "", int) as mirror:
        for number in range(5):
            store.put("a", b"%d" % number)
            assert mirror.wait_for(lambda m, number=number: m.get("a") == number, 20)


def test_a_sink_that_follows_no_more_ends_its_follower(store: Store) -> None:
    class Done(Recording):
        def begin(self, stop: Stop) -> bool:
            return False

    follower = Follower(store, "m/", Done(0, KeyError()), name="clipper-test")
    follower.start()
    assert follower.join(store.threads.now_s() + 20)


def test_a_mirror_ends_with_its_store(store: Store) -> None:
    mirror = Mirror(store, "m/", int)
    store.close()
    assert mirror._follower.join(store.threads.now_s() + 20)
    mirror.close()


@pytest.mark.slow
def test_a_hung_store_is_not_mistaken_for_a_quiet_one(own_etcd: EtcdServer) -> None:
    """The test waits twice for the time after which the watch considers etcd hung."""
    with open_store(own_etcd.url) as store, Mirror(store, "m/", int) as mirror:
        own_etcd.send(signal.SIGSTOP)
        wait_until(lambda: mirror.stale_s > 2 * (etcd_watch.SILENCE_S + etcd_watch.WATCHDOG_S))
        assert mirror.trouble is not None
        own_etcd.send(signal.SIGCONT)
        wait_until(lambda: mirror.stale_s < etcd_watch.SILENCE_S and mirror.trouble is None)
