"""Checks that what was learned goes on through new versions, other models, other policies,
restarts, other servers and full memories: beside a server that lives for ever and holds all."""

import hashlib
import itertools
import os
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from clipper.errors import InvalidInput, StoreError
from clipper.selection import POLICIES, Observation, Plan, Prediction, Truth, create_policy
from clipper.selection.learning.batch_learning import ObservationRows
from clipper.selection.policies.stateless_policy import learns
from clipper.serving.feedback import journal_records as records
from clipper.serving.feedback.states import Learner, States
from clipper.serving.feedback.stored_state import PREFIX, SHARED
from clipper.store.journal import Journal
from clipper.store.memory import MemoryStore
from clipper.store.sqlite import SqliteStore
from clipper.types import VersionedModel
from tests.unit.serving.test_states import Away, Broken, Server, encoded

FULL = os.environ.get("CLIPPER_TESTS") == "full"
OWN = "user_classes:Counts"
A, B, C, D = (VersionedModel(name, 1) for name in "abcd")
A2 = VersionedModel("a", 2)
A3 = VersionedModel("a", 3)
B2 = VersionedModel("b", 2)
USERS = ("", "u", "v", "w", "x", "y")
OTHER_SETTINGS = {
    "exp3": "exp3(eta=0.3)",
    "exp4": "exp4(eta=0.3)",
    "stacking": "stacking(coverage=0.9)",
    "thompson": "thompson(discount=0.9)",
    "bandit": "bandit(shadow=0.5)",
}


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "selection"))


LEARNING = [name for name in POLICIES if learns(create_policy(name))] + [OWN]


def seen(draw: random.Random, models: Sequence[VersionedModel]) -> Observation:
    """Return feedback about an answer of these models: a label, or a score of the answer."""
    arrived = {
        model: Prediction(draw.randrange(3), draw.choice([None, 0.25, 0.75]))
        for model in models
        if draw.random() < 0.9
    }
    chosen, features = draw.choice(models), (draw.random(), 1.0)
    one = draw.random() < 0.5
    plan = Plan((chosen,), (0.5,), (), features) if one else Plan(tuple(models), (), (), features)
    answer = arrived[chosen].output if chosen in arrived else 7
    truth = draw.choice([Truth(draw.randrange(3)), Truth(score=draw.choice([0.0, 0.5, 1.0]))])
    return Observation(plan, arrived, truth, answer)


def rows(draw: random.Random, models: Sequence[VersionedModel], n: int) -> ObservationRows:
    """Return a list of labels of answers of these models."""
    columns = tuple(np.array([draw.randrange(3) for _ in range(n)]) for _ in models)
    nothing = (None,) * len(models)
    labels = np.array([draw.randrange(3) for _ in range(n)])
    queried = np.array([draw.randrange(len(models)) for _ in range(n)], np.int32)
    return ObservationRows(
        tuple(models), columns, nothing, nothing, labels, queried, np.full(n, 0.5)
    )


def observe(
    server: Server, learner: Learner, user: str, what: Observation | ObservationRows
) -> None:
    if isinstance(what, Observation):
        server.observe(learner, user, what)
        return
    for part, record in records.written_rows(learner, user, what):
        server.states.observe_one(learner, user, part, record)


class Cluster:
    """Servers on one store, which change as applications do, and a twin that nothing happens to.

    After each step the servers have heard of each other.
    """

    def __init__(self, folder: Path, text: str, seed: int, servers: int) -> None:
        self.draw = random.Random(seed)
        self._folder, self._store = folder, MemoryStore()
        self._contexts_max = self.draw.choice([2, 4, 1000])
        self._texts = [text, OTHER_SETTINGS.get(text, text), self.draw.choice(LEARNING)]
        self.text, self.models = text, (A, B)
        self._past = [(text, self.models)]
        self.names = "ab"[:servers]
        self.servers = {name: self._start(name) for name in self.names}
        self._watches = {name: self._store.watch(PREFIX) for name in self.names}
        self.twin = Server(MemoryStore(), None, contexts_max=10**6)

    def _start(self, name: str) -> Server:
        server = Server.__new__(Server)
        server.journal = Journal(self._folder / name)
        server.states = States(
            self._store, server.journal, name, self._contexts_max, 3600, follows=False
        )
        server.states.replay(server.read)
        return server

    def step(self) -> None:
        name, chance = self.draw.choice(self.names), self.draw.random()
        server = self.servers[name]
        if chance < 0.07:
            self._change_models()
        elif chance < 0.11:
            self.text = self.draw.choice(self._texts)
            self._past.append((self.text, self.models))
        elif chance < 0.17:
            server.kill() if self.draw.random() < 0.5 else server.states.close()
            self.servers[name] = self._start(name)
        elif chance < 0.25:
            server.states.flush()
        elif chance < 0.4:
            text, models = self.draw.choice(self._past)
            server.learner(text, models).state(self.draw.choice(USERS))
        else:
            late = self.draw.random() < 0.2
            text, models = self.draw.choice(self._past) if late else (self.text, self.models)
            user = self.draw.choice(USERS)
            what = seen(self.draw, models) if chance < 0.85 else rows(self.draw, models, 5)
            if server.states.is_full():
                server.states.flush()
            observe(server, server.learner(text, models), user, what)
            observe(self.twin, self.twin.learner(text, models), user, what)
        if len(self.names) > 1:
            self._settle()

    def _change_models(self) -> None:
        """Deploy a version, roll one back, add a model or remove one."""
        names = {model.name for model in self.models}
        changes = [
            (A2, *self.models[1:]) if A in self.models else (A, *self.models[1:]),
            (*self.models, C) if C not in self.models else (A2, B),
            (A3, B2),
            (A, B),
            (A3, D) if "d" not in names else (A, B, C),
        ]
        self.models = tuple(sorted(set(self.draw.choice(changes))))
        self._past.append((self.text, self.models))

    def _settle(self) -> None:
        for server in self.servers.values():
            server.states.flush()
        for name, server in self.servers.items():
            while (event := self._watches[name].next(1e-6)) is not None:
                if event.record is not None:
                    server.states._sync._came(event.record)

    def check(self) -> None:
        for server in self.servers.values():
            server.states.flush()  # so that there is room for all contexts
        for (text, models), user in itertools.product(dict.fromkeys(self._past), USERS):
            wanted = encoded(self.twin.learner(text, models), user)
            for name, server in self.servers.items():
                found = encoded(server.learner(text, models), user)
                assert found == wanted, (name, text, list(map(str, models)), user)

    def close(self) -> None:
        for server in (*self.servers.values(), self.twin):
            server.kill()


@pytest.mark.parametrize("text", LEARNING)
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("seed", range(40 if FULL else 2))
def test_states_are_those_of_a_server_that_lives_for_ever(
    tmp_path: Path, text: str, servers: int, seed: int
) -> None:
    cluster = Cluster(tmp_path, text, seed, servers)
    for _ in range(6 if FULL else 3):
        for _ in range(20):
            cluster.step()
        cluster.check()
    cluster.close()


# -- another policy


@pytest.mark.parametrize("before", sorted(POLICIES))
def test_a_policy_is_changed_while_feedback_comes(tmp_path: Path, before: str) -> None:
    """Checks every other policy, and other settings: feedback of both falls into one write."""
    texts = [text for text in (*POLICIES, OWN) if text != before]
    if before in OTHER_SETTINGS:
        texts.append(OTHER_SETTINGS[before])
    draw = random.Random(before)
    with SqliteStore(tmp_path / "state.db", durable=False) as store:
        server = Server(store, tmp_path)
        taught = []
        for i, text in enumerate(texts):
            pair = (
                server.learner(before, application=f"app{i}"),
                server.learner(text, application=f"app{i}"),
            )
            for learner in (*pair, pair[0]):
                what = seen(draw, (A, B))
                server.observe(learner, "u", what)
            taught += pair
        server.states.flush()
        assert not server.states.dirty
        wanted = {(each.application, each.text): encoded(each, "u") for each in taught}
        server.states.close()
        again = Server(store, tmp_path)
        for application, text in wanted:
            learner = again.learner(text, application=application)
            assert encoded(learner, "u") == wanted[application, text]
        again.states.close()


def test_other_settings_have_the_same_states_and_another_policy_has_its_own() -> None:
    server, draw = Server(MemoryStore(), None), random.Random(1)
    old = server.learner("exp4")
    for _ in range(20):
        server.observe(old, "u", seen(draw, (A, B)))
    settings, other = server.learner("exp4(eta=0.3)"), server.learner("stacking")
    assert settings.state("u") is old.state("u")
    assert other.state("u").seen == 0
    server.observe(settings, "u", seen(draw, (A, B)))
    server.observe(other, "u", seen(draw, (A, B)))
    server.observe(old, "w", seen(draw, (A, B)))
    assert settings.state("w") is old.state("w")
    server.states.flush()
    keys = [record.key for record in server.states._store.range(PREFIX)[0]]
    assert len(keys) == len(set(keys)) == 2 * 3 - 1 + 2, "states and two lists"
    server.states.close()


class Unwritable(Broken):
    """A store that refuses one key."""

    def txn(self, compares, then, orelse=()):
        if any("bad" in op.key for op in then):
            raise InvalidInput("a bad key")
        return super().txn(compares, then, orelse)


@pytest.mark.parametrize("why", ["encode", "key"])
def test_a_state_that_cannot_be_written_does_not_keep_the_others_from_it(
    tmp_path: Path, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    store, draw = Unwritable(), random.Random(2)
    server = Server(store, tmp_path)
    good, other = server.learner("exp3"), server.learner("stacking", application="other")
    bad = server.learner(
        "user_classes:Learns(fails='encode')" if why == "encode" else "exp3",
        application="app" if why == "encode" else "bad",
    )
    if why == "key":
        server.observe(good, "bad", seen(draw, (A, B)))
    else:
        server.observe(bad, "u", seen(draw, (A, B)))
    for learner in (good, other):
        server.observe(learner, "u", seen(draw, (A, B)))
    server.states.flush()
    assert "is not written" in caplog.text
    wanted = [encoded(learner, "u") for learner in (good, other)]
    server.kill()
    again = Server(store, None, "m")
    found = [again.learner("exp3"), again.learner("stacking", application="other")]
    assert [encoded(learner, "u") for learner in found] == wanted
    again.states.close()


# -- users and new versions


def right(server: Server, learner: Learner, user: str, model: VersionedModel, n: int = 30) -> None:
    """Teach that this model is right, and the others are wrong."""
    for i in range(n):
        arrived = {each: Prediction(int(each == model)) for each in learner.models}
        queried = learner.models[i % len(learner.models)]
        what = Observation(Plan((queried,), (0.5,)), arrived, Truth(1), int(queried == model))
        server.observe(learner, user, what)


def first(learner: Learner, user: str) -> str:
    """Return the name of the model that is best for a user."""
    state = learner.state(user)
    if learner.text == OWN:
        return str(max(state, key=lambda row: row[1] / row[2])[0]).partition(":")[0]
    return learner.policy.rank_models_desc(state, user)[0].name


every_learning = pytest.mark.parametrize("text", [text for text in LEARNING if text != "ridge"])


@every_learning
@pytest.mark.parametrize("change", ["memory", "restart", "other server", "eviction"])
@pytest.mark.parametrize("taught", [SHARED, "ann"])
def test_a_new_version_begins_with_what_each_user_has_taught(
    tmp_path: Path, text: str, change: str, taught: str
) -> None:
    store = MemoryStore()
    server = Server(store, tmp_path, contexts_max=10)
    right(server, server.learner(text), taught, B, 120)
    if taught:
        right(server, server.learner(text), "bob", A, 300)
    server.states.flush()
    if change == "restart":
        server.kill()
        server = Server(store, tmp_path / "its journal has nothing of it")
    elif change == "other server":
        server.kill()
        server = Server(store, None, "other")
    elif change == "eviction":
        for i in range(30):
            server.learner(text).state(f"u{i}")
        assert server.learner(text).known("ann") is None
    later = server.learner(text, (A2, B2))
    assert first(later, taught) == "b"
    right(server, later, taught, B2, 1)
    assert first(later, taught) == "b"
    last = server.learner(text, (A3, B2))
    assert first(last, taught) == "b", "by way of the version between"
    server.kill()


def test_a_chain_of_versions_that_nobody_taught_ends_at_the_last_that_was(tmp_path: Path) -> None:
    store = MemoryStore()
    server = Server(store, tmp_path)
    right(server, server.learner("thompson"), "ann", B)
    server.states.close()
    server = Server(store, tmp_path)
    straight = server.learner("thompson", (A3, B2)).state("ann")
    server.kill()
    server = Server(store, tmp_path)
    between = server.learner("thompson", (A2, B2))
    assert between.state("ann").seen == 30
    assert np.array_equal(server.learner("thompson", (A3, B2)).state("ann").rows, straight.rows), (
        "less evidence once, not twice"
    )
    right(server, between, "ann", A2, 200)
    assert first(server.learner("thompson", (A3, B2)), "ann") == "a", "it follows what came late"
    server.kill()


def test_two_servers_answer_a_user_alike_after_a_deployment_though_one_writes_later() -> None:
    store = MemoryStore()
    here, there = Server(store, None, "a"), Server(store, None, "b")
    watch = store.watch(PREFIX)
    right(here, here.learner("exp4"), "bob", A, 60)
    here.states.flush()
    later = there.learner("exp4", (A2, B2))
    assert first(later, "ann") == "a", "she follows the others"
    right(here, here.learner("exp4"), "ann", B, 60)
    assert first(here.learner("exp4", (A2, B2)), "ann") == "b"
    here.states.flush()
    while (event := watch.next(1e-6)) is not None:
        if event.record is not None:
            there.states._sync._came(event.record)
    assert first(later, "ann") == "b"
    assert encoded(later, "ann") == encoded(here.learner("exp4", (A2, B2)), "ann")
    for server in (here, there):
        server.states.close()


def test_without_the_record_of_the_old_version_a_user_follows_the_others(tmp_path: Path) -> None:
    store = MemoryStore()
    server = Server(store, tmp_path)
    right(server, server.learner("exp4"), "bob", A)
    right(server, server.learner("exp4"), "ann", B)
    key = server.learner("exp4").key("ann")
    server.states.close()
    store.delete(key)
    again = Server(store, None, "m")
    later = again.learner("exp4", (A2, B2))
    shared = later.state(None)
    assert shared.seen == 60
    assert encoded(later, "ann") == later.policy.encode(later.policy.init((A2, B2), shared))
    again.states.close()


def test_a_list_of_sets_that_the_store_lost_is_written_again() -> None:
    store = MemoryStore()
    server = Server(store, None)
    right(server, server.learner("exp4"), "ann", B)
    server.states.flush()
    for record in store.range(PREFIX)[0]:
        store.delete(record.key)
    server.states._sync.reset([], store.revision)
    for _ in range(2):  # a merge needs another round
        server.states.flush()
    server.kill()
    again = Server(store, None, "m")
    assert first(again.learner("exp4", (A2, B2)), "ann") == "b"
    again.states.close()


@pytest.mark.parametrize("text", ["exp4", "thompson"])
def test_states_that_an_earlier_server_wrote_go_on(tmp_path: Path, text: str) -> None:
    """It wrote them for all policies at one key."""
    store, draw = MemoryStore(), random.Random(6)
    server = Server(store, tmp_path)
    for user in ("ann", "bob"):
        server.observe(server.learner("exp4"), user, seen(draw, (A, B)))
    wanted = [encoded(server.learner("exp4"), user) for user in ("", "ann", "bob")]
    server.states.close()
    for record in store.range(PREFIX)[0]:
        store.delete(record.key)
        if "/sets/" not in record.key:
            earlier = hashlib.blake2b(b"a:1\nb:1", digest_size=12).hexdigest()
            store.put(f"{PREFIX}app/{earlier}/{record.key.rpartition('/')[2]}", record.value)
    again = Server(store, tmp_path)
    learner = again.learner(text)
    if text == "thompson":
        assert learner.state("ann").seen == learner.state(None).seen == 0
    else:
        assert [encoded(learner, user) for user in ("", "ann", "bob")] == wanted
        again.observe(learner, "ann", seen(draw, (A, B)))
        again.states.flush()
        assert not again.states.dirty
        assert store.get(learner.key("ann")) is not None
        later = Server(store, None, "m").learner(text)
        assert later.state("ann").seen == 2
        assert later.state("bob").seen == 1
        later.states.close()
    again.states.close()


class Unreachable(Away):
    def txn(self, *args, **keywords):
        if self.refuses:
            raise StoreError("connection refused")
        return super().txn(*args, **keywords)


def test_a_user_who_comes_while_the_store_is_away_is_given_what_it_has_afterwards(
    tmp_path: Path,
) -> None:
    store = Unreachable()
    before = Server(store, tmp_path / "a", "a")
    right(before, before.learner("thompson"), "ann", B)
    before.states.close()
    server = Server(store, tmp_path / "b", "b")
    later = server.learner("thompson", (A2, B2))
    store.refuses = True
    assert later.state("ann").seen == later.state("bob").seen == 0
    right(server, later, "ann", B2, 1)
    store.refuses = False
    for _ in range(3):
        server.states.flush()
    assert later.state("ann").seen == 31
    assert first(later, "ann") == "b"
    server.states.close()


def test_the_models_of_a_state_are_changed_by_the_three_methods_of_a_users_own_policy(
    tmp_path: Path,
) -> None:
    store = MemoryStore()
    server = Server(store, tmp_path)
    learner = server.learner(OWN)
    calls: list[str] = learner.policy.policy.calls  # type: ignore[attr-defined]
    right(server, learner, "ann", B, 5)
    calls.clear()
    later = server.learner(OWN, (A3, C, A2))
    state = {name: share / count for name, share, count in later.state("ann")}
    assert state == {"a:2": pytest.approx(0.5 / 6), "a:3": 0.5, "c:1": 0.5}
    assert calls == [
        call
        for _ in ("the shared state", "that of ann")
        for call in ("update a:1 a:2", "add a:3", "add c:1", "remove b:1")
    ]
    calls.clear()
    assert server.learner(OWN, (C, A2, A3)).state("ann") == later.state("ann")
    assert calls == [], "the order of models changes nothing"
    server.kill()
