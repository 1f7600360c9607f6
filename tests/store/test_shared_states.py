"""The learned state of one server is used by all that share its store, for each kind of store."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from clipper.errors import StoreError
from clipper.serving.feedback.states import Learner, States
from clipper.serving.feedback.stored_state import PREFIX, SHARED
from clipper.store import MemoryStore, RedisStore, SqliteStore, Store, open_store
from clipper.store.journal import Journal
from tests.memory_container import wait_until
from tests.store.conftest import RedisServer
from tests.unit.serving.test_states import Server, observation

PATIENCE_S = 20.0
Connect = Callable[[], Store]
TEXT = "kl_ucb(discount=1.0)"


@pytest.fixture(params=["memory", "sqlite", "redis", "etcd"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Connect]:
    """Return a function that opens another connection to the same store."""
    opened: list[Store] = []

    def build() -> Store:
        if request.param == "memory":
            opened.append(opened[0] if opened else MemoryStore())
        elif request.param == "sqlite":
            opened.append(SqliteStore(tmp_path / "state.db", durable=False))
        elif request.param == "redis":
            opened.append(
                RedisStore(f"{request.getfixturevalue('redis_server').url}?prefix={tmp_path.name}:")
            )
        else:
            opened.append(
                open_store(f"{request.getfixturevalue('etcd_server').url}/{tmp_path.name}")
            )
        return opened[-1]

    yield build
    for store in opened:
        store.close()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a context wait for a slow store, instead of starting as a new one."""
    monkeypatch.setattr("clipper.serving.feedback.states.READ_S", PATIENCE_S)


class Following(Server):
    """A server that follows the store, and writes on request."""

    def __init__(self, store: Store, folder: Path | None, node: str) -> None:
        self.journal = Journal(folder)
        self.states = States(store, self.journal, node, 1000, write_s=3600, follows=True)
        self.states.replay(self.read)


def seen(learner: Learner, user: str = SHARED) -> float:
    return float(learner.state(user).seen)


def test_all_servers_use_what_one_has_learned(connect: Connect, tmp_path: Path) -> None:
    draw = random.Random(1)
    ours, theirs = (Following(connect(), tmp_path / node, node) for node in "ab")
    here, there = ours.learner(TEXT), theirs.learner(TEXT)
    assert seen(here, "u") == seen(there, "u") == 0
    for _ in range(20):
        theirs.observe(there, "u", observation(draw))
    theirs.states.flush()
    wait_until(lambda: seen(here, "u") == seen(here) == 20)
    assert not ours.states.dirty, "there is nothing to write"
    ours.observe(here, "u", observation(draw))
    for _ in range(4):  # both learn before either hears of the other
        theirs.observe(there, "u", observation(draw))
    theirs.states.flush()
    wait_until(lambda: seen(here, "u") == seen(here) == 25)
    ours.states.flush()
    wait_until(lambda: seen(there, "u") == seen(there) == 25)
    assert np.array_equal(here.state("u").rows, there.state("u").rows)
    for server in (ours, theirs):
        server.states.close()


@pytest.mark.parametrize("seed", range(3))
def test_two_servers_that_follow_each_other_count_each_observation_once(
    connect: Connect, tmp_path: Path, seed: int
) -> None:
    """Writes and reads of changes alternate by chance."""
    draw = random.Random(seed)
    servers = [Following(connect(), tmp_path / node, node) for node in "ab"]
    for _ in range(150):
        server = draw.choice(servers)
        server.observe(server.learner(TEXT), draw.choice("uvw"), observation(draw))
        if draw.random() < 0.3:
            draw.choice(servers).states.flush()

    def settled() -> bool:
        """Return whether each server has heard of all states, which come one after the other."""
        for server in servers:
            server.states.flush()
        learners = [server.learner(TEXT) for server in servers]
        return all(seen(one) == sum(seen(one, user) for user in "uvw") == 150 for one in learners)

    wait_until(settled)
    for server in servers:
        server.states.close()


def test_states_not_in_memory_are_not_read(connect: Connect, tmp_path: Path) -> None:
    draw = random.Random(2)
    ours, theirs = (Following(connect(), tmp_path / node, node) for node in "ab")
    here, there = ours.learner(TEXT), theirs.learner(TEXT)
    theirs.observe(there, "somebody", observation(draw))
    theirs.states.flush()
    wait_until(lambda: seen(here) == 1)
    assert here.users() == [SHARED]
    broken = connect()
    broken.put(f"{PREFIX}app/nothing/u:x", b"no state")
    broken.put(here.key("u"), b"no state")
    theirs.observe(there, "somebody", observation(draw))
    theirs.states.flush()
    wait_until(lambda: seen(here) == 2)
    for server in (ours, theirs):
        server.states.close()


class Known:
    """A catalog that says whether the store is the known one."""

    def __init__(self) -> None:
        self.trouble = ""

    def require_same_store(self) -> None:
        if self.trouble:
            raise StoreError(self.trouble)


def test_states_that_the_store_lost_are_written_again_once_it_is_accepted(
    own_redis: RedisServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The journal has forgotten what was written, so only the memory of the server has it."""
    draw, known = random.Random(2), Known()
    with RedisStore(own_redis.url) as store, caplog.at_level("WARNING"):
        journal = Journal(tmp_path / "a")
        states = States(store, journal, "a", 1000, write_s=0.005, follows=True, trust=known)
        server = Server.__new__(Server)
        server.journal, server.states = journal, states
        states.replay(server.read)
        states.start_writing()
        learner = server.learner(TEXT)
        for _ in range(20):
            server.observe(learner, "u", observation(draw))
        wait_until(lambda: len(store.range(PREFIX)[0]) >= 3 and not states.dirty)
        known.trouble = "it has lost the catalog"
        assert own_redis.ask("FLUSHALL") == b"+OK"
        wait_until(lambda: states._sync._waited >= 20)
        assert store.range(PREFIX)[0] == [], "nothing is written meanwhile"
        waits = [one for one in caplog.records if "wait to be written" in one.message]
        assert len(waits) == 1, "one warning, however often it was tried"
        known.trouble = ""
        wait_until(
            lambda: (
                {"shared", "u:u"}
                <= {record.key.rpartition("/")[2] for record in store.range(PREFIX)[0]}
            )
        )
        states.close()
    with RedisStore(own_redis.url) as store:
        again = Server(store, tmp_path / "a", node="a")
        assert seen(again.learner(TEXT), "u") == 20
        again.states.close()
