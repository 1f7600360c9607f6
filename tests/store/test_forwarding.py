"""Feedback finds the server that gave the answer, through whatever store the servers share."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from clipper.component import Stop
from clipper.errors import (
    AlreadyExists,
    InvalidInput,
    LeaseLost,
    Overloaded,
    StoreError,
    UnknownPrediction,
)
from clipper.serving.feedback import forwarding, presence
from clipper.serving.feedback.forwarding import (
    PREFIX,
    ForwardedFeedback,
    Forwarding,
    Reply,
    refusal,
)
from clipper.serving.feedback.presence import NAMES, NODES, Holder, Presence
from clipper.store import Put, Store
from tests.memory_container import wait_until
from tests.store.test_shared_states import Connect, Following, connect

__all__ = ["connect"]
A, B = "aaaaaaaa", "bbbbbbbb"
Start = Callable[..., Forwarding]


class Counting:
    """A fake of a server's feedback, which learns each id once."""

    def __init__(self) -> None:
        self.received: list[ForwardedFeedback] = []
        self.known: set[str] = set()

    def __call__(self, feedback: ForwardedFeedback) -> Reply:
        fresh = set(feedback.ids) - self.known
        self.known |= fresh
        self.received.append(feedback)
        return Reply(counted=len(fresh), duplicates=len(feedback.ids) - len(fresh))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a server wait for one that is slow to take its feedback."""
    monkeypatch.setattr(forwarding, "REPLY_S", 60.0)


@pytest.fixture
def start(connect: Connect, tmp_path: Path) -> Iterator[Start]:
    """Yield a function that starts the parts of a server that receive and forward feedback."""
    started: list[Forwarding] = []

    def build(
        node: str,
        learn: Callable[[ForwardedFeedback], Reply],
        folder: Path | None = None,
        name: str = "",
        store: Store | None = None,
    ) -> Forwarding:
        own = store or connect()
        found = Forwarding(own, Presence(own, name or node, node, folder), lambda why: None)
        started.append(found)
        found.start(learn)
        wait_until(lambda: found._is_listening, "it listens", 20)
        return found

    yield build
    for each in started:
        each.close()


def test_feedback_is_learned_by_the_server_that_answered(start: Start, connect: Connect) -> None:
    learned = Counting()
    start(A, learned)
    there = start(B, Counting())
    assert there.node_of(f"{A}-1") == A
    assert there.node_of(f"{B}-1") == there.node_of("x") == there.node_of(f"{A}-") == ""
    label = np.array([1.5, 2.5])
    assert there.send(
        A, ForwardedFeedback("app", [f"{A}-1"], [label], None, 2.0, alone=True)
    ) == Reply(counted=1)
    assert there.send(A, ForwardedFeedback("app", [f"{A}-1", f"{A}-2"], [b"\0", "x"])) == Reply(
        counted=1, duplicates=1
    )
    first, second = learned.received
    assert (first.application, first.weight, first.alone) == ("app", 2.0, True)
    assert np.array_equal(first.labels[0], label)
    assert second.labels == [b"\0", "x"]
    store = connect()
    wait_until(lambda: not store.range(PREFIX)[0], "requests and replies are removed", 20)


def test_many_feedbacks_are_forwarded_in_requests_of_bounded_size(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwarding, "BYTES_MAX", 20_000)
    learned = Counting()
    start(A, learned)
    there = start(B, Counting())
    ids = [f"{A}-{i:x}" for i in range(3000)]
    assert there.send(A, ForwardedFeedback("app", ids, list(range(3000)))) == Reply(counted=3000)
    assert [id for feedback in learned.received for id in feedback.ids] == ids
    assert max(len(feedback.ids) for feedback in learned.received) <= 1024
    before = len(learned.received)
    assert there.send(A, ForwardedFeedback("app", ids[:4], ["x" * 8000] * 4)) == Reply(duplicates=4)
    assert len(learned.received) == before + 2


def test_feedback_refused_by_the_answering_server_is_refused(start: Start) -> None:
    start(A, lambda feedback: refusal(InvalidInput("no such label", hint="Another.")))
    there = start(B, Counting())
    with pytest.raises(InvalidInput, match="no such label Another"):
        there.send(A, ForwardedFeedback("app", [f"{A}-1"], [1]))


def test_feedback_for_answers_of_an_ended_server_is_refused(start: Start, connect: Connect) -> None:
    here, there = start(A, Counting()), start(B, Counting())
    here.close()
    with pytest.raises(UnknownPrediction, match="has ended"):
        there.send(A, ForwardedFeedback("app", [f"{A}-1"], [1]))
    assert [record.key for record in connect().range(NODES)[0]] == [NODES + B]


def test_a_request_without_a_reply_is_withdrawn_and_may_be_repeated(
    start: Start, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwarding, "REPLY_S", 0.2)
    monkeypatch.setattr(forwarding, "LEASE_S", 0.0)
    hold, learned = threading.Event(), Counting()

    def slowly(feedback: ForwardedFeedback) -> Reply:
        hold.wait(20)
        return learned(feedback)

    start(A, slowly)
    there = start(B, Counting())
    feedback = ForwardedFeedback("app", [f"{A}-1"], [1])
    with pytest.raises(StoreError, match="counts once"):
        there.send(A, feedback)
    # it waits behind the first, and is withdrawn before it is looked at
    with pytest.raises(StoreError, match="counts once"):
        there.send(A, ForwardedFeedback("app", [f"{A}-2"], [1]))
    assert not connect().range(PREFIX)[0]
    hold.set()
    monkeypatch.setattr(forwarding, "REPLY_S", 20.0)
    assert there.send(A, feedback) == Reply(duplicates=1)
    assert learned.known == {f"{A}-1"}


def test_requests_that_wait_are_bounded(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    start(A, Counting())
    there = start(B, Counting())
    for _ in range(forwarding.WAITING_MAX):
        there._slots.acquire()
    with pytest.raises(Overloaded):
        there.send(A, ForwardedFeedback("app", [f"{A}-1"], [1]))
    for _ in range(forwarding.WAITING_MAX):
        there._slots.release()
    assert there.send(A, ForwardedFeedback("app", [f"{A}-1"], [1])).counted == 1


def test_a_reply_that_the_store_did_not_take_is_sent_again(start: Start, connect: Connect) -> None:
    """The feedback is not learned again, and the waiting caller is told that it counted."""
    store, learned = connect(), Counting()
    failing, real = [True], store.txn

    def txn(compares, then, orelse=()):  # type: ignore[no-untyped-def]
        if failing and any(isinstance(op, Put) and "/a/" in op.key for op in then):
            failing.clear()
            raise StoreError("it was away for a moment")
        return real(compares, then, orelse)

    store.txn = txn  # type: ignore[method-assign]
    start(A, learned, store=store)
    there = start(B, Counting(), store=connect())
    assert there.send(A, ForwardedFeedback("app", [f"{A}-1"], [1])) == Reply(counted=1)
    assert not failing
    assert len(learned.received) == 1


def test_feedback_for_answers_of_other_servers_is_refused(start: Start, connect: Connect) -> None:
    learned = Counting()
    start(A, learned)
    there = start(B, learned)
    with pytest.raises(InvalidInput, match="not about answers of this server"):
        there.send(A, ForwardedFeedback("app", ["cccccccc-1"], [1]))
    connect().put(f"{PREFIX}{A}/q/{B}-ff", b"garbage")
    assert there.send(A, ForwardedFeedback("app", [f"{A}-1"], [1])).counted == 1
    assert len(learned.received) == 1


@pytest.mark.slow
def test_a_copy_of_a_folder_is_refused_while_its_server_lives(
    start: Start, connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, copy = tmp_path / "folder", tmp_path / "copy"
    folder.mkdir()
    copy.mkdir()
    monkeypatch.setattr(presence, "LEASE_S", 600.0)
    here = start(A, Counting(), folder, "name")
    # the copy waits for twice the time of its own lease
    monkeypatch.setattr(presence, "LEASE_S", 0.4)

    def refused() -> str:
        """Return why the copy is refused; nothing if it was held up until its lease had ended."""
        store = connect()
        there = Forwarding(store, Presence(store, "name", B, copy), lambda why: None)
        try:
            there.start(Counting())
        except AlreadyExists as error:
            return str(error)
        finally:
            there.close()
        return ""

    assert "is a copy" in wait_until(refused)
    assert here._presence.is_held
    here.close()
    monkeypatch.setattr(presence, "LEASE_S", 600.0)
    start(B, Counting(), copy, "name")


@pytest.mark.slow
def test_the_server_of_the_same_folder_is_back_at_once_and_one_elsewhere_after_the_lease(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first server was killed, so that nobody released its names."""
    folder, moved = tmp_path / "folder", tmp_path / "moved"
    folder.mkdir()
    moved.mkdir()
    stop, store = Stop(), connect()
    monkeypatch.setattr(presence, "LEASE_S", 600.0)
    killed = Presence(store, "name", A, folder)
    killed.enter(stop)
    monkeypatch.setattr(presence, "LEASE_S", 0.3)
    again = Presence(store, "name", B, folder)

    def is_back() -> bool:
        """Return whether it holds its names; it may be held up until its lease has ended."""
        with contextlib.suppress(LeaseLost):
            again.enter(stop)
        return again.is_held

    wait_until(is_back)
    assert again._lease is not None
    again._lease._end()  # killed: it is not renewed
    monkeypatch.setattr(presence, "LEASE_S", 600.0)  # that of the other is not to end meanwhile
    other = Presence(store, "name", "cccccccc", moved)
    other.enter(stop)
    assert other.is_held
    for each in (other, again, killed):
        each.leave()


def lease_of(held: Presence) -> str:
    """Return the lease of a server; nothing while it has none."""
    with contextlib.suppress(StoreError):
        return held.lease
    return ""


@pytest.mark.slow
def test_a_server_that_lost_its_name_stops_writing(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "LEASE_S", 0.4)
    store, others = connect(), connect()
    states = Following(store, tmp_path / "journal", "name").states
    here = Forwarding(store, own := Presence(store, "name", A, tmp_path), states.stop_writing)
    here.start(Counting())
    lease = others.lease(600.0)
    others.put(NAMES + "name", msgspec.msgpack.encode(Holder(B, "elsewhere")), lease.id)
    others.revoke(wait_until(lambda: lease_of(own)))
    wait_until(lambda: "is running" in states.refusal, "it finds its name taken", 20)
    with pytest.raises(StoreError, match="another server that is running"):
        states.flush()
    here.close()
    states.close()
    lease.revoke()
