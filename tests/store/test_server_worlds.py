"""Random worlds of servers on one store: each observation counts once in the state of its user and
in the shared one, whoever is killed and returns.

A world is one thread and one seed. Writes are lost, or carried out without an answer, reads do not
answer in time, changes are heard late, contexts leave the memory, servers lose their names without
noticing and are left out of the states, and while a server waits for the store, something else
happens, to it or to another one.
"""

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from clipper.errors import Overloaded, StoreError
from clipper.serving.feedback.ended_servers import EndedServers
from clipper.serving.feedback.presence import NAMES as NAMES_HELD
from clipper.serving.feedback.states import States
from clipper.serving.feedback.stored_state import PREFIX, SHARED
from clipper.store import Compare, Delete, MemoryStore, Put, Record
from clipper.store.journal import Journal
from clipper.store.store import Op, TxnResult
from tests.unit.serving.test_states import KL, Server, observation

NAMES, USERS = "abcd", "uvwxyz"
STEPS = 200
ENDED_S = 100.0
NOTHING_S = 1e-6  # a wait for an event that is there, or is not


class FaultyStore(MemoryStore):
    """A store that fails by chance while `fails` is true. meanwhile: what may happen before and
    after a transaction."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self._draw, self.fails = draw, False
        self.meanwhile: Callable[[], None] | None = None

    def get(self, key: str) -> Record | None:
        if self.fails and self._draw.random() < 0.2:
            raise StoreError("it did not answer in time")
        return super().get(key)

    def txn(
        self, compares: Sequence[Compare], then: Sequence[Op], orelse: Sequence[Op] = ()
    ) -> TxnResult:
        if self.fails and self._draw.random() < 0.1:
            raise StoreError("it was not reached")
        self._something_happens()
        found = super().txn(compares, then, orelse)
        self._something_happens()
        if self.fails and self._draw.random() < 0.1:
            raise StoreError("the answer was lost")
        return found

    def _something_happens(self) -> None:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None and self._draw.random() < 0.4:
            meanwhile()
        self.meanwhile = meanwhile


class SimulatedServer(Server):
    """A server that writes, reads changes of others, and removes ended servers on request. now_s:
    the clock of all."""

    def __init__(
        self,
        store: FaultyStore,
        folder: Path,
        name: str,
        contexts_max: int,
        now_s: Callable[[], float],
    ) -> None:
        self.journal = Journal(folder / name)
        self._store, self._name = store, name
        self.hold_name()
        ended = EndedServers(store, name, ENDED_S, now_s)
        self.states = States(store, self.journal, name, contexts_max, write_s=3600, ended=ended)
        self._watch = store.watch(PREFIX)
        self.busy = False
        self.states.replay(self.read)
        self.states._sync.reset((), 0)

    def read_changes(self, count: int) -> None:
        """Read so many changes of the store; 0: read all."""
        if not count:
            with contextlib.suppress(StoreError):
                self.states._sync.reset((), 0)
        for _ in range(count):
            event = self._watch.next(NOTHING_S)
            if event is None:
                return
            if event.record is not None:
                self.states._sync._came(event.record)

    def hold_name(self) -> None:
        """Hold the name in the store, whichever server held it."""
        MemoryStore.txn(self._store, (), (Put(NAMES_HELD + self._name, b""),))

    def lose_name(self) -> None:
        """Delete the name from the store without the server's notice."""
        MemoryStore.txn(self._store, (), (Delete(NAMES_HELD + self._name),))

    def flush(self) -> None:
        self.busy = True
        with contextlib.suppress(StoreError):
            self.states.flush()
        self.busy = False

    def leave_out(self) -> None:
        with contextlib.suppress(StoreError):
            self.states._sync.leave_out_ended()

    def end(self, kill: bool) -> None:
        self._watch.close()
        if kill:
            self.states.stop_writing("it is killed")
            self.kill()
        else:
            self.states.close()


class World:
    """Servers on one store, and the feedback that they were sent."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.draw = random.Random(seed)
        self.store = FaultyStore(self.draw)
        self.observed: Counter[str] = Counter()
        self._now_s = 0.0
        self._folder, self._contexts_max = folder, self.draw.choice([2, 3, 1000])
        self.servers = {name: self.start(name) for name in NAMES}

    def start(self, name: str) -> SimulatedServer:
        """Start a server; the store answers meanwhile."""
        fails, meanwhile = self.store.fails, self.store.meanwhile
        self.store.fails, self.store.meanwhile = False, None
        server = SimulatedServer(
            self.store, self._folder, name, self._contexts_max, lambda: self._now_s
        )
        self.store.fails, self.store.meanwhile = fails, meanwhile
        return server

    def run(self) -> None:
        """Take all steps; afterwards the store works, all servers are there and agree."""
        self.store.fails = True
        for _ in range(STEPS):
            self.store.meanwhile = self._observe_or_read if self.draw.random() < 0.5 else None
            self.step()
        self.store.fails, self.store.meanwhile = False, None
        for name in set(NAMES) - self.servers.keys():
            self.servers[name] = self.start(name)
        for server in self.servers.values():
            server.hold_name()
        for _ in range(3 * len(NAMES)):
            for server in self.servers.values():
                server.read_changes(10**6)
                server.flush()

    def step(self) -> None:
        name, chance = self.draw.choice(NAMES), self.draw.random()
        server = self.servers.get(name)
        if server is None:
            if chance < 0.1:
                self.servers[name] = self.start(name)
        elif chance < 0.04 and len(self.servers) > 1:
            del self.servers[name]
            server.end(kill=chance < 0.03)
            server.lose_name()
        elif chance < 0.06:
            server.lose_name()
        elif chance < 0.09:
            server.hold_name()
        elif chance < 0.13:
            server.leave_out()
            self._now_s += ENDED_S * self.draw.choice([0.01, 1.1])
            server.leave_out()
        elif chance < 0.3:
            server.flush()
        else:
            self._observe_or_read(server)

    def _observe_or_read(self, server: SimulatedServer | None = None) -> None:
        if server is None:
            server = self.draw.choice([*self.servers.values()])  # one at least: see step
            if not server.busy and self.draw.random() < 0.3:
                return server.flush()
            if self.draw.random() < 0.2:
                return server.leave_out()
        if self.draw.random() < 0.2:
            return server.read_changes(self.draw.choice([0, 1, 2, 5, 50]))
        user = self.draw.choice(USERS)
        with contextlib.suppress(Overloaded):
            server.observe(server.learner(KL), user, observation(self.draw))
            self.observed[user] += 1
        return None

    def check(self) -> None:
        for name, server in self.servers.items():
            learner = server.learner(KL)
            found = {user: learner.state(user).seen for user in self.observed}
            assert found == self.observed, name
            assert learner.state(SHARED).seen == self.observed.total(), name
            server.end(kill=True)


@pytest.mark.parametrize("seed", range(8))
def test_each_observation_counts_once_through_kills_and_returns(tmp_path: Path, seed: int) -> None:
    world = World(tmp_path, seed)
    world.run()
    world.check()
