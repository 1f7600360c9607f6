"""Learned states: an observation is never lost, never applied twice, and never applied to another
user."""

import contextlib
import hashlib
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipper.errors import InvalidInput, StoreError
from clipper.selection import Observation, Plan, Prediction, Truth, create_policy
from clipper.selection.learning.batch_learning import ObservationRows, count_user
from clipper.serving.feedback import journal_records as records
from clipper.serving.feedback import state_sync
from clipper.serving.feedback.learning import Learning
from clipper.serving.feedback.states import Learner, States, _short, check_user
from clipper.serving.feedback.stored_state import PREFIX, SHARED, unsealed
from clipper.settings.server import FeedbackSettings
from clipper.store.journal import Journal
from clipper.store.memory import MemoryStore
from clipper.store.sqlite import SqliteStore
from clipper.store.store import Put
from clipper.types import VersionedModel
from tests.memory_container import wait_until

A, B, C = (VersionedModel(name, 1) for name in "abc")
A2 = VersionedModel("a", 2)
KL = "kl_ucb(discount=1.0)"  # adds up exactly
POLICIES = ["exp3", "exp4", "stacking", "squarecb", "thompson", "logodds", "linucb"]
every_policy = pytest.mark.parametrize("text", POLICIES)


def observation(draw: random.Random, models=(A, B)) -> Observation:
    arrived = {model: Prediction(draw.randrange(3)) for model in models}
    chosen = draw.choice(models)
    return Observation(
        Plan((chosen,), (0.5,), (), (draw.random(), 1.0)),
        arrived,
        Truth(draw.randrange(3)),
        arrived[chosen].output,
    )


class Server:
    """The learned states of a server, over a store and a journal that outlive it."""

    def __init__(
        self,
        store,
        folder: Path | None,
        node: str = "n",
        contexts_max: int = 1000,
        write_s: float = 3600,
    ) -> None:
        self.journal = Journal(folder)
        self.states = States(store, self.journal, node, contexts_max, write_s)
        self.states.replay(self.read)

    def learner(self, text: str, models=(A, B), application: str = "app") -> Learner:
        return self.states.learner(application, text, create_policy(text), models)

    def read(self, record: bytes):
        application, text, models, user, seen = records.read(record)
        return self.learner(text, models, application), user, seen

    def observe(self, learner: Learner, user: str, seen: Observation) -> None:
        self.states.observe_many([(learner, user, seen, records.written(learner, user, seen))])

    def kill(self) -> None:
        """Stop all writes of the server; close its threads and descriptors."""
        self.states.dirty.clear()
        self.states.close()


def encoded(learner: Learner, user: str = "") -> bytes:
    return learner.policy.encode(learner.state(user))


def columns(draw: random.Random, n: int) -> ObservationRows:
    outputs = tuple(np.array([draw.randrange(3) for _ in range(n)]) for _ in range(2))
    queried = np.array([draw.randrange(2) for _ in range(n)], np.int32)
    labels = np.array([draw.randrange(3) for _ in range(n)])
    return ObservationRows(
        (A, B), outputs, (None, None), (None, None), labels, queried, np.full(n, 0.5)
    )


@every_policy
@pytest.mark.parametrize("seed", range(3))
def test_columns_survive_any_kill_as_what_their_rows_are(
    tmp_path: Path, text: str, seed: int
) -> None:
    """Columns are mixed with single observations of several contexts; a state is sometimes read
    before its observation is written."""
    draw, store, observed = random.Random(seed), MemoryStore(), list[tuple[str, ObservationRows]]()
    server = Server(store, tmp_path)
    learner = server.learner(text)
    for _ in range(40):
        match draw.randrange(8):
            case 0:
                server.kill()
                server = Server(store, tmp_path)
                learner = server.learner(text)
            case 1:
                server.states.flush()
            case 2:
                learner.state(draw.choice("uvw"))
            case _:
                observed.append(
                    (draw.choice(["", "u", "v", "w"]), columns(draw, draw.choice([1, 2, 30])))
                )
                for part, record in records.written_rows(learner, *observed[-1]):
                    server.states.observe_one(learner, observed[-1][0], part, record)
    server.kill()
    server = Server(store, tmp_path)
    learner, alone = server.learner(text), Server(MemoryStore(), None)
    expected = alone.learner(text)
    for user, rows in observed:
        for i in range(len(rows)):
            alone.observe(expected, user, rows.observation(i))
    found, wanted = (
        [learner.policy.decode(encoded(one, user)) for user in ("", "u", "v", "w")]
        for one in (learner, expected)
    )
    assert [state.seen for state in found] == [state.seen for state in wanted]
    assert encoded(learner) == encoded(expected), "bit for bit"
    server.states.close()
    alone.states.close()


def test_long_columns_are_several_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "CHUNK", 100)
    monkeypatch.setattr(records, "RECORD_BYTES_MAX", 300)
    server, draw = Server(MemoryStore(), tmp_path), random.Random(10)
    learner, rows = server.learner("exp4"), columns(draw, 1000)
    parts = list(records.written_rows(learner, "u", rows))
    assert sum(len(part) for part, _ in parts) == 1000
    assert len(parts) > 10
    assert all(len(record) <= 300 for _, record in parts)
    for part, record in parts:
        server.states.observe_one(learner, "u", part, record)
    expected = encoded(learner, "u")
    server.kill()
    again = Server(MemoryStore(), tmp_path)
    assert encoded(again.learner("exp4"), "u") == expected
    again.states.close()


@every_policy
@pytest.mark.parametrize("seed", range(5))
def test_after_any_kill_states_are_those_of_serial_replay(
    tmp_path: Path, text: str, seed: int
) -> None:
    draw, store, observed = random.Random(seed), MemoryStore(), list[tuple[str, Observation]]()
    server = Server(store, tmp_path)
    learner = server.learner(text)
    for _ in range(60):
        match draw.randrange(10):
            case 0:
                server.kill()
                server = Server(store, tmp_path)
                learner = server.learner(text)
            case 1:
                server.states.flush()
            case _:
                observed.append((draw.choice(["", "u", "v"]), observation(draw)))
                server.observe(learner, *observed[-1])
    server.kill()
    server = Server(store, tmp_path)
    learner, alone = server.learner(text), Server(MemoryStore(), None)
    expected = alone.learner(text)
    for user, seen in observed:
        alone.observe(expected, user, seen)
    assert [encoded(learner, user) for user in ("", "u", "v")] == [
        encoded(expected, user) for user in ("", "u", "v")
    ]
    server.states.close()
    alone.states.close()


def test_the_journal_keeps_only_what_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clipper.store.journal.SEGMENT_BYTES", 500)
    server, draw = Server(MemoryStore(), tmp_path), random.Random(1)
    learner = server.learner("exp4")
    for _ in range(50):
        server.observe(learner, "", observation(draw))
    full = server.journal.nbytes
    server.states.flush()
    assert server.journal.nbytes < 700 < full
    server.states.close()


@every_policy
def test_a_context_has_a_state_of_its_own_and_begins_with_the_shared_one(text: str) -> None:
    server, draw = Server(MemoryStore(), None), random.Random(2)
    learner = server.learner(text)
    for _ in range(50):
        server.observe(learner, "u", observation(draw))
    ours = learner.state("u")
    newcomer = learner.state("w")
    assert encoded(learner, "w") != learner.policy.encode(learner.policy.init((A, B)))
    assert newcomer.seen == 0
    assert learner.state(None).seen == ours.seen == 50
    server.observe(learner, "u", observation(draw))
    assert encoded(learner, "w") == learner.policy.encode(
        learner.policy.init((A, B), learner.state(None))
    ), "it follows them"
    server.observe(learner, "w", observation(draw))
    before = encoded(learner, "w")
    server.observe(learner, "u", observation(draw))
    assert encoded(learner, "w") == before, "it goes its own way"
    server.states.close()


@every_policy
def test_all_without_an_observation_read_one_state_a_version_of_the_shared_one(text: str) -> None:
    server, draw = Server(MemoryStore(), None), random.Random(12)
    learner = server.learner(text)
    for _ in range(5):
        server.observe(learner, "u", observation(draw))
        first = learner.state("v")
        assert first is learner.state("w") is learner.state("v")
        assert encoded(learner, "v") == learner.policy.encode(
            learner.policy.init((A, B), learner.state(None))
        )
    server.observe(learner, "v", observation(draw))
    assert learner.state("v").seen == 1
    assert learner.state("w").seen == first.seen == 0
    server.states.close()


def test_no_user_without_an_observation_waits_for_a_thread_that_learns() -> None:
    """The lock of all states is held meanwhile."""
    server, draw = Server(MemoryStore(), None), random.Random(13)
    learner = server.learner("mixture")
    learner.state("v")
    server.observe(learner, "u", observation(draw))
    found = list[Any]()
    reader = threading.Thread(target=lambda: found.append(learner.state("v")), daemon=True)
    with server.states.lock:
        reader.start()
        reader.join(60)
        assert len(found) == 1
    assert found[0].seen == 0
    server.states.close()


@pytest.mark.parametrize("seed", range(8))
def test_states_are_those_of_a_plain_dictionary(tmp_path: Path, seed: int) -> None:
    """Users are read, learn, are forgotten and found again in the store, are merged with those of
    another server; the plain one has all in a dictionary."""
    draw, store = random.Random(seed), MemoryStore()
    text = draw.choice(["exp3", "mixture", "stacking", "kl_ucb", "bandit", "linucb"])
    server = Server(store, tmp_path, contexts_max=3)
    learner, policy = server.learner(text), create_policy(text)
    shared: Any = policy.init((A, B))
    own: dict[str, Any] = {}
    for _ in range(150):
        user = draw.choice("uvwxyz")
        match draw.randrange(12):
            case 0:
                server.states.flush()
            case 1:
                server.kill()
                server = Server(store, tmp_path, contexts_max=3)
                learner = server.learner(text)
            case 2:
                # another server takes all that is there, and adds to it
                server.states.flush()
                other = Server(store, None, "other")
                theirs, seen = other.learner(text), observation(draw)
                other.observe(theirs, user, seen)
                other.states.flush()
                other.kill()
                for each in (user, SHARED):
                    if (record := store.get(learner.key(each))) is not None:
                        server.states._sync._came(record)
                own[user] = policy.observe(own.get(user, policy.init((A, B), shared)), seen)
                shared = count_user(policy, policy.observe(shared, seen), user, seen)
            case 3 | 4 | 5:
                seen = observation(draw)
                server.observe(learner, user, seen)
                own[user] = policy.observe(own.get(user, policy.init((A, B), shared)), seen)
                shared = count_user(policy, policy.observe(shared, seen), user, seen)
            case _:
                expected = own[user] if user in own else policy.init((A, B), shared)
                assert encoded(learner, user) == policy.encode(expected)
        assert encoded(learner) == policy.encode(shared)
    server.states.close()


def test_only_learners_that_have_a_context_in_memory_hold_its_state() -> None:
    server, draw = Server(MemoryStore(), None), random.Random(5)
    learner = server.learner("exp3")
    server.observe(learner, "u", observation(draw))
    assert [*server.states.holders(learner.key("u"))] == [(learner, "u")]
    assert [*server.states.holders(learner.key(SHARED))] == [(learner, SHARED)]
    assert [*server.states.holders(learner.key("w"))] == [], "not in memory"
    assert [*server.states.holders(learner.key("x" * 1000))] == []
    assert [*server.states.holders("elsewhere/u:u")] == []
    server.states.close()


@every_policy
def test_another_set_of_models_inherits(text: str) -> None:
    server, draw = Server(MemoryStore(), None), random.Random(3)
    learner = server.learner(text)
    for _ in range(200):
        server.observe(learner, "u", observation(draw))
    later = server.learner(text, (A2, B, C))
    assert later.state(None).models == (A2, B, C)
    assert later.state(None).seen == 200
    assert server.learner(text, (B, A)) is learner, "a set has no order"
    unrelated = server.learner(text, (VersionedModel("lda", 1), VersionedModel("tree", 1)))
    assert unrelated.state(None).seen == 0, "nothing is inherited from other models"
    server.states.close()


def test_two_servers_on_one_store_add_up(tmp_path: Path) -> None:
    store, draw = MemoryStore(), random.Random(4)
    ours, theirs = Server(store, tmp_path / "a", "a"), Server(store, tmp_path / "b", "b")
    observed = [observation(draw) for _ in range(40)]
    for i, seen in enumerate(observed):
        server = (ours, theirs)[i % 2]
        server.observe(server.learner(KL), "", seen)
        if i % 7 == 0:
            ours.states.flush()
        if i % 5 == 0:
            theirs.states.flush()
    for _ in range(3):
        ours.states.flush()
        theirs.states.flush()
    ours.kill()
    theirs.kill()
    again, alone = Server(store, tmp_path / "a", "a"), Server(MemoryStore(), None)
    expected = alone.learner(KL)
    for seen in observed:
        alone.observe(expected, "", seen)
    found = again.learner(KL).state(None)
    assert np.allclose(found.rows, expected.state(None).rows)
    assert found.seen == 40
    counted = [state.sure[:, 1].sum() for state in (found, expected.state(None))]
    assert counted[0] == pytest.approx(counted[1], rel=0.05), "each in one bin of confidence"
    again.states.close()
    alone.states.close()


def test_states_are_written_in_transactions_of_bounded_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def parts() -> list[list[int]]:
        """Return the sizes of the states that each transaction writes; the observations are the
        same in each call."""
        written: list[list[int]] = []

        class Listening(MemoryStore):
            def txn(self, compares, ops, otherwise=()):
                sizes = [len(op.value) for op in ops if isinstance(op, Put) and "/u:" in op.key]
                written.extend([sizes] if sizes else [])
                return super().txn(compares, ops, otherwise)

        server, draw = Server(Listening(), None), random.Random(6)
        learner = server.learner("exp3")
        for user in "abcde":
            server.observe(learner, user, observation(draw))
            server.states.dirty.pop((learner, SHARED), None)
        server.states.flush()
        server.states.close()
        return written

    (sizes,) = parts()
    assert len(sizes) == 5
    for most, first in ((sum(sizes[:3]), 3), (sum(sizes[:3]) - 1, 2), (1, 1)):
        monkeypatch.setattr(state_sync, "BATCH_BYTES_MAX", most)
        found = parts()
        assert [size for part in found for size in part] == sizes
        assert len(found[0]) == first
    monkeypatch.setattr(state_sync, "BATCH_BYTES_MAX", 2 * max(sizes))
    assert len({*sizes}) == 1
    assert [len(part) for part in parts()] == [2, 2, 1], "each begins to count anew"
    monkeypatch.undo()
    monkeypatch.setattr(state_sync, "BATCH_MAX", 2)
    assert [len(part) for part in parts()] == [2, 2, 1]


def test_contexts_in_memory_are_bounded_and_none_is_lost() -> None:
    store, draw = MemoryStore(), random.Random(5)
    server = Server(store, None, contexts_max=50)
    learner = server.learner("exp4")
    expected = dict[str, float]()
    for i in range(400):
        user = f"u{draw.randrange(200)}"
        server.observe(learner, user, observation(draw))
        expected[user] = expected.get(user, 0) + 1
        if i % 20 == 0:
            server.states.flush()
            assert len(learner) <= 50 + 20 + 1
    server.states.flush()
    assert {user: learner.state(user).seen for user in expected} == expected
    server.states.close()


class Broken(MemoryStore):
    broken = False

    def txn(self, *args, **keywords):
        if self.broken:
            raise StoreError("the disk is full")
        return super().txn(*args, **keywords)


def test_a_store_that_fails_loses_nothing(tmp_path: Path) -> None:
    store, draw = Broken(), random.Random(6)
    server = Server(store, tmp_path)
    learner = server.learner("exp4")
    store.broken = True
    for _ in range(10):
        server.observe(learner, "u", observation(draw))
    with pytest.raises(StoreError):
        server.states.flush()
    expected = encoded(learner, "u")
    store.broken = False
    server.states.flush()
    server.kill()
    again = Server(store, tmp_path)
    assert encoded(again.learner("exp4"), "u") == expected
    again.states.close()


class NoShared(SqliteStore):
    """A store that fails before each write of a shared state, as if the server were killed then."""

    def txn(self, compares, then, orelse=()):
        if any(op.key.endswith("/shared") for op in then):
            raise StoreError("the server was killed")
        return super().txn(compares, then, orelse)


@pytest.mark.parametrize("shared", [False, True])
def test_numbers_of_a_journal_in_memory_are_not_taken_for_those_of_an_earlier_start(
    tmp_path: Path, shared: bool
) -> None:
    store, draw = NoShared(tmp_path / "store.db"), random.Random(7)
    settings = FeedbackSettings(journal="memory", write_ms=60_000)
    for start in range(1, 4):
        learning = Learning(store, tmp_path, settings, shared)
        learning.replay()
        _, learner, _ = learning.learner("app", KL, (A, B))
        for _ in range(3):
            seen = observation(draw)
            record = records.written(learner, "u", seen)
            learning.states.observe_one(learner, "u", seen, record)
        assert learner.state("u").seen == 3 * start
        learning.close()
        stored = store.get(learner.key("u"))
        assert len(unsealed(stored.value).applied) == (start if shared else 1)
    store.close()


class Deaf(MemoryStore):
    """A store that executes a write or not, and loses the answer."""

    draw = random.Random(0)
    loses = 0.0

    def txn(self, *args, **keywords):
        if self.draw.random() < self.loses / 2:
            raise StoreError("it was not reached")
        found = super().txn(*args, **keywords)
        if self.draw.random() < self.loses:
            raise StoreError("the answer was lost")
        return found


@pytest.mark.parametrize("seed", range(10))
def test_a_write_whose_answer_was_lost_counts_once(tmp_path: Path, seed: int) -> None:
    """One of two servers writes; it is killed now and then."""
    store, draw = Deaf(), random.Random(seed)
    store.draw, store.loses = random.Random(seed + 100), 0.5
    ours, theirs, observed = (
        Server(store, tmp_path / "a", "a"),
        Server(store, tmp_path / "b", "b"),
        list[Observation](),
    )
    for _ in range(80):
        server = draw.choice([ours, ours, theirs])
        observed.append(observation(draw))
        server.observe(server.learner(KL), "u", observed[-1])
        for one in (ours, theirs):
            if draw.random() < 0.3:
                with contextlib.suppress(StoreError):
                    one.states.flush()
        if draw.random() < 0.05:
            ours.kill()
            ours = Server(store, tmp_path / "a", "a")
    store.loses = 0.0
    for _ in range(4):
        ours.states.flush()
        theirs.states.flush()
    later, alone = Server(store, None, "c"), Server(MemoryStore(), None)
    for seen in observed:
        alone.observe(alone.learner(KL), "", seen)
    assert later.learner(KL).state("u").seen == 80
    found, expected = later.learner(KL).state(None), alone.learner(KL).state(None)
    assert found.seen == 80
    assert np.allclose(found.rows, expected.rows)
    for server in (ours, theirs, later, alone):
        server.states.close()


@every_policy
@pytest.mark.parametrize("write_between", [False, True])
def test_a_store_that_went_back_in_time_takes_nothing_away(
    tmp_path: Path, text: str, write_between: bool
) -> None:
    """A Redis that is killed may lose the last second of what it acknowledged."""
    store, draw, observed = MemoryStore(), random.Random(15), list[Observation]()
    server = Server(store, tmp_path)
    learner, old = server.learner(text), dict[str, bytes]()
    for turn in range(6):
        for _ in range(5):
            observed.append(observation(draw))
            server.observe(learner, "u", observed[-1])
        if turn == 3:
            if write_between:
                server.states.flush()
            for key, value in old.items():
                store.put(key, value)
        server.states.flush()
        if turn == 1:
            old = {record.key: record.value for record in store.range(PREFIX)[0]}
    server.states.flush()
    server.kill()
    again, alone = Server(store, tmp_path), Server(MemoryStore(), None)
    for seen in observed:
        alone.observe(alone.learner(text), "u", seen)
    for user in ("", "u"):
        assert encoded(again.learner(text), user) == encoded(alone.learner(text), user), (
            "bit for bit"
        )
    again.states.close()
    alone.states.close()


class Away(MemoryStore):
    """A remote store that hangs or cannot be reached."""

    remote = True

    def __init__(self) -> None:
        super().__init__()
        self.there, self.refuses = threading.Event(), False
        self.there.set()

    def get(self, key):
        if self.refuses:
            raise StoreError("connection refused")
        assert self.there.wait(20)
        return super().get(key)


@pytest.mark.parametrize("known", [False, True])
def test_the_first_observation_of_a_context_that_came_late_may_come_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    store, draw = Away(), random.Random(12)
    if known:
        before = Server(store, tmp_path / "a", "a")
        before.observe(before.learner(KL), "u", observation(draw))
        before.states.close()
    server = Server(store, tmp_path / "b", "b")
    learner = server.learner(KL)
    store.refuses = True
    learner.state("u")
    store.refuses = False
    commit, between = server.journal.commit, [observation(draw)]

    def observed(number: int) -> None:
        commit(number)
        if between:
            server.observe(learner, "u", between.pop())

    monkeypatch.setattr(server.journal, "commit", observed)
    for _ in range(3):
        server.states.flush()
    assert not server.states.dirty
    server.kill()
    again = Server(store, tmp_path / "b", "b").learner(KL)
    assert again.state("u").seen == again.state(None).seen == 1 + known
    again.states.close()


def test_a_policy_that_does_not_learn_asks_nothing_of_the_store() -> None:
    store = Away()
    server = Server(store, None)
    store.refuses = True
    learner = server.learner("static")
    learner.state("u")
    assert not server.states.dirty, "there is nothing to write"
    store.refuses = False
    server.states.close()


def test_what_an_ended_server_has_learned_is_written_again_by_one_that_holds_it() -> None:
    store, draw = MemoryStore(), random.Random(13)
    ended = Server(store, None, "a")
    ended.observe(ended.learner(KL), "u", observation(draw))
    ended.states.close()
    server = Server(store, None, "b")
    learner = server.learner(KL)
    assert learner.state("u").seen == 1
    held = encoded(learner, "u")
    for record in store.range(PREFIX)[0]:
        store.delete(record.key)
    server.states._sync.reset((), store.revision)
    for _ in range(2):
        server.states.flush()
    assert not server.states.dirty
    again = Server(store, None, "c")
    assert encoded(again.learner(KL), "u") == held
    for each in (server, again):
        each.states.close()


@pytest.mark.parametrize("how", ["hangs", "refuses"])
def test_nobody_waits_for_a_store_that_is_away_and_nothing_is_lost(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    store, draw = Away(), random.Random(11)
    before = Server(store, tmp_path / "a", "a")
    for _ in range(10):
        before.observe(before.learner(KL), "u", observation(draw))
    before.states.close()
    server = Server(store, tmp_path / "b", "b")
    learner = server.learner(KL)
    store.refuses = how == "refuses"
    if how == "hangs":
        store.there.clear()
    assert learner.state("u").seen == learner.state("v").seen == 0
    assert "begins as a new one" in caplog.text
    for _ in range(5):
        server.observe(learner, "u", observation(draw))
    store.refuses = False
    store.there.set()
    for _ in range(3):
        server.states.flush()
    assert (learner.state("u").seen, learner.state("v").seen, learner.state(None).seen) == (
        15,
        0,
        15,
    )
    server.states.close()
    again = Server(store, tmp_path / "b", "b")
    assert again.learner(KL).state("u").seen == 15
    again.states.close()


def test_a_context_that_came_late_gets_what_the_store_has_without_any_feedback(
    tmp_path: Path,
) -> None:
    store, draw = Away(), random.Random(14)
    before = Server(store, tmp_path / "a", "a")
    before.observe(before.learner(KL), "u", observation(draw))
    before.states.close()
    server = Server(store, tmp_path / "b", "b", write_s=0.01)
    learner = server.learner(KL)
    store.refuses = True
    assert learner.state("u").seen == 0
    store.refuses = False
    wait_until(lambda: learner.state("u").seen == 1, "it is merged")
    server.states.close()


def test_a_context_that_was_only_read_gets_what_the_store_has(tmp_path: Path) -> None:
    store, draw = Away(), random.Random(12)
    before = Server(store, tmp_path / "a", "a")
    before.observe(before.learner(KL), "u", observation(draw))
    before.states.close()
    server = Server(store, tmp_path / "b", "b")
    learner = server.learner(KL)
    store.refuses = True
    assert learner.state("u").seen == 0
    store.refuses = False
    server.states.flush()
    assert learner.state("u").seen == 1
    server.states.close()


def test_a_policy_that_raises_learns_nothing_and_stops_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(MemoryStore(), tmp_path)
    learner = server.learner("exp4")
    seen = Observation(Plan((A, B)), {A: Prediction(1), B: Prediction(1)}, Truth(1), None, "heavy")  # type: ignore[arg-type]
    server.observe(learner, "u", seen)
    assert "could not observe" in caplog.text
    server.observe(learner, "u", observation(random.Random(13)))
    assert learner.state("u").seen == 1
    server.kill()


class Busy(MemoryStore):
    """A store during whose writes something is observed."""

    meanwhile = None

    def txn(self, *args, **keywords):
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return super().txn(*args, **keywords)


def test_what_comes_while_a_state_is_written_is_not_forgotten() -> None:
    store, draw = Busy(), random.Random(9)
    server = Server(store, None)
    learner = server.learner("exp4")
    server.observe(learner, "u", observation(draw))
    server.states.flush()
    server.observe(learner, "u", observation(draw))
    store.meanwhile = lambda: server.observe(learner, "u", observation(draw))
    server.states.flush()
    assert all(user != "u" for user, _ in learner.clean())
    server.states.flush()
    assert any(user == "u" for user, _ in learner.clean())
    learner.drop("u")
    assert learner.state("u").seen == 3
    server.states.close()


def test_a_state_that_cannot_be_read_starts_anew_and_is_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = MemoryStore()
    key = Server(MemoryStore(), None).learner("exp4").key(SHARED)
    store.put(key, b"\x01\x02")
    server = Server(store, None)
    learner = server.learner("exp4")
    assert learner.state(None).seen == 0
    assert "cannot be read" in caplog.text
    server.observe(learner, "", observation(random.Random(7)))
    server.states.flush()
    server.states.close()
    again = Server(store, None)
    assert again.learner("exp4").state(None).seen == 1
    again.states.close()


def test_a_state_with_a_flipped_bit_is_not_used() -> None:
    store, draw = MemoryStore(), random.Random(14)
    server = Server(store, None)
    for _ in range(3):
        server.observe(server.learner("exp4"), "", observation(draw))
    server.states.close()
    key = server.learner("exp4").key(SHARED)
    record = store.get(key)
    assert record is not None
    for at in range(len(record.value)):
        spoilt = bytearray(record.value)
        spoilt[at] ^= 1 << draw.randrange(8)
        store.put(key, bytes(spoilt))
        again = Server(store, None)
        assert again.learner("exp4").state(None).seen == 0
        again.states.close()


@pytest.mark.parametrize("user", ["a/b", "../x", "é", "x" * 5000, "u v", "%2F"])
def test_any_text_may_name_a_context(user: str) -> None:
    store = MemoryStore()
    server = Server(store, None)
    server.observe(server.learner("exp4"), user, observation(random.Random(8)))
    server.states.close()
    again = Server(store, None)
    learner = again.learner("exp4")
    assert learner.state(user).seen == 1
    assert learner.state(user + "x").seen == 0
    assert learner.key(user) != learner.key(SHARED)
    again.states.close()


@pytest.mark.parametrize("user", ["x" * 513, "\ud800", 7, b"u"])
def test_a_name_that_no_user_can_have_is_refused(user: Any) -> None:
    with pytest.raises(InvalidInput, match="user"):
        check_user(user)
    check_user("x" * 512)


def test_the_keys_of_users_with_long_names_are_those_of_earlier_releases() -> None:
    assert _short("ann@example.org/7") == "ann@example.org%2F7"
    assert _short("u" * 256) == "u" * 256
    assert _short("u" * 257) == "#" + hashlib.blake2b(b"u" * 257, digest_size=16).hexdigest()
