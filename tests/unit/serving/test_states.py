"""What was learned is never lost, never learned twice, and never somebody else's."""

import random
from pathlib import Path

import numpy as np
import pytest

from clipper.errors import StoreError
from clipper.selection import Observation, Plan, Prediction, Truth, policy_named
from clipper.serving import feedback
from clipper.serving.states import PREFIX, SHARED, Learner, States, set_id
from clipper.store.journal import Journal
from clipper.store.memory import MemoryStore
from clipper.types import VersionedModel

A, B, C = (VersionedModel(name, 1) for name in "abc")
A2 = VersionedModel("a", 2)
POLICIES = ["exp3", "exp4", "stacking", "squarecb", "thompson", "logodds", "linucb"]
every_policy = pytest.mark.parametrize("text", POLICIES)


def observation(draw: random.Random, models=(A, B)) -> Observation:
    heard = {model: Prediction(draw.randrange(3)) for model in models}
    chosen = draw.choice(models)
    return Observation(Plan((chosen,), (0.5,), (), (draw.random(), 1.0)), heard, Truth(draw.randrange(3)), heard[chosen].output)


class Server:
    """States over a store and a journal that outlive it, as a server's do."""

    def __init__(self, store, folder: Path | None, node: str = "n", contexts_max: int = 1000) -> None:
        self.journal = Journal(folder)
        self.states = States(store, self.journal, node, contexts_max, write_s=3600)
        self.states.replay(self.read)

    def learner(self, text: str, models=(A, B), application: str = "app") -> Learner:
        return self.states.learner(application, text, policy_named(text), models)

    def read(self, record: bytes):
        application, text, models, user, seen = feedback.read(record)
        return self.learner(text, models, application), user, seen

    def observe(self, learner: Learner, user: str, seen: Observation) -> None:
        self.states.observe_many([(learner, user, seen, feedback.written(learner, user, seen))])

    def kill(self) -> None:
        """Nothing is written any more; threads and descriptors of the dead go."""
        self.states.dirty.clear()
        self.states.close()


def encoded(learner: Learner, user: str = "") -> bytes:
    return learner.policy.encode(learner.state(user))


@every_policy
@pytest.mark.parametrize("seed", range(5))
def test_after_any_kill_states_are_those_of_serial_replay(tmp_path: Path, text: str, seed: int) -> None:
    draw, store, said = random.Random(seed), MemoryStore(), list[tuple[str, Observation]]()
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
                said.append((draw.choice(["", "u", "v"]), observation(draw)))
                server.observe(learner, *said[-1])
    server.kill()
    server = Server(store, tmp_path)
    learner, alone = server.learner(text), Server(MemoryStore(), None)
    expected = alone.learner(text)
    for user, seen in said:
        alone.observe(expected, user, seen)
    assert [encoded(learner, user) for user in ("", "u", "v")] == [encoded(expected, user) for user in ("", "u", "v")]
    server.states.close()
    alone.states.close()


def test_the_journal_keeps_only_what_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    before = encoded(learner, "w")
    server.observe(learner, "u", observation(draw))
    assert encoded(learner, "w") == before
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
    server.states.close()


def test_two_servers_on_one_store_add_up(tmp_path: Path) -> None:
    store, draw = MemoryStore(), random.Random(4)
    ours, theirs = Server(store, tmp_path / "a", "a"), Server(store, tmp_path / "b", "b")
    said = [observation(draw) for _ in range(40)]
    for i, seen in enumerate(said):
        server = (ours, theirs)[i % 2]
        server.observe(server.learner("kl_ucb"), "", seen)
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
    expected = alone.learner("kl_ucb")
    for seen in said:
        alone.observe(expected, "", seen)
    found = again.learner("kl_ucb").state(None)
    assert np.allclose(found.rows, expected.state(None).rows)
    assert found.seen == 40
    again.states.close()
    alone.states.close()


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


class Busy(MemoryStore):
    """Something is observed while a state is being written."""

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
    store.meanwhile = lambda: server.observe(learner, "u", observation(draw))
    server.states.flush()
    assert all(user != "u" for user, _ in learner.clean())
    server.states.flush()
    assert any(user == "u" for user, _ in learner.clean())
    learner.drop("u")
    assert learner.state("u").seen == 2
    server.states.close()


def test_a_state_that_cannot_be_read_begins_anew_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    store.put(f"{PREFIX}app/{set_id((A, B))}/shared", b"\x01\x02")
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
