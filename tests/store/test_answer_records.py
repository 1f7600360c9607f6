"""Answers in the store: a server that gets feedback about an answer of an ended server counts it
exactly once."""

import random
import threading
from collections.abc import Callable, Iterator

import pytest

from clipper.errors import StoreError, UnknownPrediction
from clipper.selection import Plan, Prediction
from clipper.serving.feedback.answer_records import BATCH_MAX, SIZES, AnswerRecords, RecordLimits
from clipper.serving.feedback.learning import Learning
from clipper.serving.feedback.states import Learner
from clipper.serving.feedback.window import FeedbackWindow
from clipper.settings.server import FeedbackSettings
from clipper.store import MemoryStore, Store
from clipper.store.expiring import LeasedLists, expiring_lists
from clipper.types import VersionedModel
from clipper_core.learning.answer_window import Joined
from tests.memory_container import wait_until
from tests.store.test_shared_states import Connect, connect
from tests.threads import join

__all__ = ["connect"]
A = "aaaaaaaa"
M = VersionedModel("m", 1)


class Server:
    """The answer records and feedback window of one server."""

    def __init__(self, store: Store, every_s: float = 0.01, bytes_max: int = 1 << 20) -> None:
        self.learning = Learning(MemoryStore(), None, FeedbackSettings())
        limits = RecordLimits(600.0, every_s, 1 << 14, bytes_max, 1 << 30)
        self.records = AnswerRecords(store, A, limits, self.learning._read)
        self.window = FeedbackWindow(1 << 14, 600.0, keep=self.records.add, node=A)
        self.records.start()

    def learner(self, text: str = "kl_ucb") -> Learner:
        return self.learning.learner("app", text, [M])[1]

    def answer(self, number: int, text: str = "kl_ucb", output: object = 7) -> str:
        number += 1
        predictions = {M: Prediction(output, 0.5)}
        self.window.add(number, self.learner(text), "u", Plan((M,), (0.25,)), predictions, output)
        return f"{A}-{number:x}"

    def give_feedback(self, id: str) -> bool:
        """Take feedback about an answer of this server, as `observe` does."""
        joined = self.window.take(id, "app")
        return joined is not None and self.records.claim([(id, joined)]) == [True]


@pytest.fixture
def server(connect: Connect) -> Iterator[Callable[..., Server]]:
    """Return a function that starts a server on the same store."""
    started: list[Server] = []

    def build(every_s: float = 0.01, bytes_max: int = 1 << 20) -> Server:
        started.append(Server(connect(), every_s, bytes_max))
        return started[-1]

    yield build
    for each in started:
        each.records.leave(FeedbackWindow(1, 1.0))
        each.learning.close()


Build = Callable[..., Server]


def test_lists_keep_their_order_and_each_number_is_claimed_once(connect: Connect) -> None:
    ours, theirs = (expiring_lists(connect(), 600.0) for _ in range(2))
    for value in (b"1", b"", b"3" * 1000):
        ours.append({"a": value, "b": b"x"})
    assert theirs.read("a") == [b"1", b"", b"3" * 1000]
    ours.drop(["a"])
    assert theirs.read("a") == []
    assert theirs.read("b") == [b"x"] * 3
    counts: list[dict[str, set[int]]] = []
    draw = random.Random(1)

    def claim(lists: object) -> None:
        for _ in range(10):
            some = {key: draw.sample(range(256), 40) for key in "ab"}
            counts.append(lists.claim(some))  # type: ignore[attr-defined]

    threads = [threading.Thread(target=claim, args=(each,)) for each in (ours, theirs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        join(thread)
    for key in "ab":
        claimed = [number for each in counts for number in each[key]]
        assert len(claimed) == len(set(claimed)) > 200
        assert ours.claim({key: sorted(set(claimed))}) == {key: set()}


def test_lists_expire_and_a_lost_lease_is_replaced() -> None:
    now_s = [0.0]
    lists = LeasedLists(MemoryStore(now_s=lambda: now_s[0]), 60.0)
    lists.append({"a": b"1"})
    lists.claim({"a": [3]})
    assert lists.read("a") == [b"1"]
    now_s[0] += 80.0
    assert not lists.read("a")
    lists._renew_s = float("inf")  # it believes in the lease that has ended
    lists.append({"a": b"2"})
    assert lists.read("a") == [b"2"]
    assert lists.claim({"a": [3]}) == {"a": {3}}


def test_feedback_about_answers_of_a_killed_server_counts_exactly_once(
    server: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clipper.serving.feedback.answer_records.CLAIM_S", 20.0)
    killed, others = server(), [server(every_s=0), server(every_s=0)]
    draw = random.Random(2)
    ids = [killed.answer(number) for number in draw.sample(range(2000), 300)]
    wait_until(lambda: killed.records.written == 300, "they are written", 20)
    early = sum(killed.give_feedback(id) for id in ids[:50])
    assert early == 50
    found: list[tuple[str, Joined]] = []

    def send_feedback(other: Server) -> None:
        for id in draw.sample(ids, 300):
            if (joined := other.records.take(id, "app")) is not None:
                found.append((id, joined))

    threads = [threading.Thread(target=send_feedback, args=(other,)) for other in others]
    for thread in threads:
        thread.start()
    # it was alive all the time, but not heard of
    late = sum(killed.give_feedback(id) for id in ids)
    for thread in threads:
        join(thread)
    assert early + late + len(found) == 300
    assert len({id for id, _ in found}) == len(found)
    for _, joined in found:
        assert (joined.user, joined.answer) == ("u", 7)
        assert (joined.plan.models, joined.plan.probabilities) == ((M,), (0.25,))
        assert [
            (m, predictions.output, predictions.confidence)
            for m, predictions in joined.arrived.items()
        ] == [(M, 7, 0.5)]
    with pytest.raises(UnknownPrediction, match="killed before"):
        others[0].records.take(f"{A}-ffff", "app")
    (other,) = others[1].records.take_many([f"{A}-{0:x}"], "another")
    assert isinstance(other, UnknownPrediction)


def test_a_shutdown_writes_all_records_and_marks_those_with_feedback(server: Build) -> None:
    ended, other = server(every_s=60.0), server(every_s=0)
    ids = [ended.answer(number) for number in range(20)]
    ids += [ended.answer(number, "single") for number in range(20, 30)]
    assert ended.give_feedback(ids[0])
    assert ended.give_feedback(ids[29])
    assert ended.records.written == 0
    assert ended.records.leave(ended.window) == 30
    found = other.records.take_many([*ids, ids[5]], "app")
    assert [i for i, one in enumerate(found) if one is None] == [0, 29, 30]
    assert all(one is None or isinstance(one, Joined) for one in found)


def test_records_stay_below_their_limits_and_the_oldest_are_removed(server: Build) -> None:
    small, other = server(bytes_max=100_000), server(every_s=0)
    draw = random.Random(3)
    big = small.answer(0, output="x" * 50_000)
    last = ""
    for number in range(1, 1500):
        last = small.answer(number, output=draw.randbytes(100).hex())
    wait_until(lambda: small.records.written == 1499, "all but the large one are written", 20)
    assert small.records.nbytes <= 100_000
    found = other.records.take_many([big, f"{A}-2", last], "app")
    assert [isinstance(one, Joined) for one in found] == [False, False, True]
    store = small.records._store
    wait_until(lambda: store.get(SIZES + A) is not None, "it tells its size", 20)


def test_an_unavailable_store_delays_no_feedback_and_gets_all_later(
    server: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, other = server(), server(every_s=0)
    first = [here.answer(number) for number in range(10)]
    wait_until(lambda: here.records.written == 10, "they are written", 20)
    lists, real = here.records._lists, {}

    def unreachable(*values: object) -> None:
        raise StoreError("it is away")

    for name in ("append", "claim"):
        real[name] = getattr(lists, name)
        monkeypatch.setattr(lists, name, unreachable)
    assert here.give_feedback(first[0])
    wait_until(lambda: here.records._is_away, "it notices", 20)
    later = [here.answer(number) for number in range(10, BATCH_MAX + 20)]
    assert here.give_feedback(later[0])
    for name, method in real.items():
        monkeypatch.setattr(lists, name, method)
    wait_until(lambda: here.records.written == BATCH_MAX + 20, "all are written", 20)
    wait_until(lambda: not here.records._claims.numbers, "the claims are, too", 20)
    assert other.records.take_many([first[0], later[0]], "app") == [None, None]
    assert isinstance(other.records.take(later[-1], "app"), Joined)


def test_records_are_left_while_another_thread_starts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server is closed while its store returns."""
    begins, plain = threading.Event(), threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "clipper-answer-records":
            begins.set()
            threading.Event().wait(0.1)
        plain(thread)

    limits = RecordLimits(600.0, 0.01, 1 << 14, 1 << 20, 1 << 30)
    records = AnswerRecords(MemoryStore(), A, limits, lambda record: None)
    monkeypatch.setattr(threading.Thread, "start", start)
    starter = threading.Thread(target=records.start)
    starter.start()
    assert begins.wait(60)
    assert records.leave(FeedbackWindow(1, 1.0)) == 0
    join(starter)
    assert not [one for one in threading.enumerate() if one.name == "clipper-answer-records"]
