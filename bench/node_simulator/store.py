"""The store as the nodes of a simulated mesh reach it: calls take time, and can fail."""

import contextvars
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from random import Random
from types import MappingProxyType
from typing import NamedTuple

from bench.node_simulator.virtual_time import LIFE, Life, ThreadEnded, VirtualThreads
from clipper.errors import StoreError
from clipper.store import Compare, Event, MemoryStore, Op, Record, Store, TxnResult, Watch
from clipper.store.history import _COUNTER
from clipper.store.memory import _NEVER

TIMEOUT_S = 1.0  # of a call that gets no answer
CALL_MS = (0.3, 3.0)  # each way of a call
LAG_MS = (0.5, 8.0)  # of a change to a watch
# a quiet watch is silent for so long, if its reader waits at all: fewer switches of threads
QUIET_S = 1.5


class StoreServer(MemoryStore):
    """The store itself, which can be away. written: hears of each transaction that has written."""

    def __init__(self, threads: VirtualThreads) -> None:
        super().__init__(threads=threads)
        self.away: str = ""  # "hangs" or "refuses"
        self.errors = 0.0  # share of the calls that fail, half of them after they were executed
        self.slow_s = 0.0  # added to each call
        self.cut: set[str] = set()
        self.frozen_s = 0.0
        self._frozen_from = 0.0
        clock = threads
        self._now_s = lambda: (self._frozen_from if self.away else clock.now_s()) - self.frozen_s
        self.written: Callable[[Life | None, Sequence[Op], int], None] = lambda *_: None

        self.watches: dict[_ClientWatch, None] = {}
        self.changes = 0  # of the content so far

    def _commit(self, revision: int) -> None:
        super()._commit(revision)
        self.changes += 1
        keys = []
        for event in reversed(self._events):
            if event.revision != revision:
                break
            keys.append(event.key)
        for watch in list(self.watches):
            if any(key.startswith(watch.prefix) for key in keys):
                watch.changed()

    def go_away(self, how: str) -> None:
        """Answer nobody; no lease ends meanwhile, as etcd's does not without its leader."""
        if not self.away:
            self._frozen_from = self.threads.now_s()
        self.away = how

    def come_back(self) -> None:
        if self.away:
            self.away = ""
            self.frozen_s += self.threads.now_s() - self._frozen_from

    def copy(self) -> "StoreCopy":
        """Return a copy of the records and leases as they are now."""
        return StoreCopy(dict(self._records), self._revision, set(self._leases))

    def replace(self, copy: "StoreCopy") -> None:
        """Continue from a copy, as a server that was restored does. Its leases begin again."""
        self._leases = {id: one for id, one in self._leases.items() if id in copy.leases}
        self._records = {
            key: record
            for key, record in copy.records.items()
            if not record.lease or record.lease in self._leases
        }
        self._keys, self._revision = sorted(self._records), copy.revision
        self.changes += 1
        self._events.clear()
        self._forgotten = self._revision
        for id, one in self._leases.items():
            one.keys = {key for key, record in self._records.items() if record.lease == id}
            one.until_s = self._now_s() + one.ttl_s
        self._until_s = min((one.until_s for one in self._leases.values()), default=_NEVER)
        for watch in list(self.watches):
            if copy.records:
                watch.changed()
            else:
                watch.restart()

    def is_reached_by(self, life: Life) -> bool:
        return not self.away and life.name not in self.cut


class StoreCopy(NamedTuple):
    """The content of a store at one time."""

    records: Mapping[str, Record] = MappingProxyType({})
    revision: int = 0
    leases: Collection[str] = ()


class StoreClient(Store):
    """One node's connection to the store."""

    remote = True

    def __init__(
        self, server: StoreServer, threads: VirtualThreads, rng: Random, life: Life
    ) -> None:
        self.name = "virtual://"
        self.threads, self._threads = threads, threads
        self._server, self._sleep, self._rng, self._life = server, threads.sleep, rng, life

    def _call(self, quick: bool = False) -> None:
        """Let a call reach the store. StoreError when it does not."""
        if self._life.over:
            raise ThreadEnded
        self._fail_at_times()
        if self._server.is_reached_by(self._life):
            if not quick:
                self._sleep(self._rng.uniform(*CALL_MS) / 1000 + self._server.slow_s)
                if self._life.over:
                    raise ThreadEnded
            if self._server.is_reached_by(self._life):
                return
        if not quick:
            refuses = self._server.away == "refuses"
            self._sleep(0.001 if refuses else TIMEOUT_S * self._rng.uniform(0.3, 1.0))
        raise StoreError("store virtual:// does not answer.")

    def _answered(self, quick: bool = False) -> None:
        """Let the answer reach the node. StoreError when it does not: the call was executed."""
        if not quick:
            self._sleep(self._rng.uniform(*CALL_MS) / 1000)
            if not self._server.is_reached_by(self._life):
                raise StoreError("store virtual:// has not answered.")
        self._fail_at_times()

    def _fail_at_times(self) -> None:
        if self._server.errors and self._rng.random() < self._server.errors / 2:
            raise StoreError("store virtual:// has answered with an error.")

    def get(self, key: str) -> Record | None:
        self._call(key == _COUNTER)
        found = self._server.get(key)
        self._answered(key == _COUNTER)
        return found

    def range(self, prefix: str) -> tuple[list[Record], int]:
        self._call()
        found = self._server.range(prefix)
        self._answered()
        return found

    def txn(
        self, compares: Sequence[Compare], then: Sequence[Op], orelse: Sequence[Op] = ()
    ) -> TxnResult:
        quick = any(op.key == _COUNTER for op in then)
        self._call(quick)
        found = self._server.txn(compares, then, orelse)
        if found.ok:
            self._server.written(self._life, then, found.revision)
        self._answered(quick)
        return found

    def watch(self, prefix: str, from_revision: int | None = None) -> Watch:
        self._call()
        inner = self._server.watch(prefix, from_revision)
        return _ClientWatch(self._server, prefix, inner, self._threads, self._rng)

    @property
    def revision(self) -> int:
        self._call()
        return self._server.revision

    def close(self) -> None:
        pass

    def grant(self, ttl_s: float) -> tuple[str, float]:
        self._call()
        found = self._server.grant(ttl_s)
        self._answered()
        return found

    def renew(self, lease: str) -> float:
        self._call()
        found = self._server.renew(lease)
        self._answered()
        return found

    def revoke(self, lease: str) -> None:
        self._call()
        self._server.revoke(lease)
        self._answered()


class _ClientWatch:
    """A watch whose events come late, and not at all while the store cannot be reached."""

    def __init__(
        self, server: StoreServer, prefix: str, watch: Watch, threads: VirtualThreads, rng: Random
    ) -> None:
        self.prefix, self._is_new = prefix, True
        self._condition = threads.condition()
        server.watches[self] = None
        self._server, self._watch, self._threads, self._rng = server, watch, threads, rng
        self._life = LIFE.get()
        self._ready: deque[Event] = deque()
        self.contact_s = threads.now_s()

    def restart(self) -> None:
        """Deliver RESET: the store has been emptied, whatever its revision is by now."""
        self._watch.close()
        self._watch = self._server.watch(self.prefix, -1)
        self.changed()

    def changed(self) -> None:
        """Notice a change, a little later."""
        lag_s = self._rng.uniform(*LAG_MS) / 1000
        self._threads.loop.call_later(lag_s, self._arrive, context=contextvars.Context())

    def _arrive(self) -> None:
        self._is_new = True
        self._condition.notify_all()

    def next(self, timeout_s: float | None = None) -> Event | None:
        until_s = float("inf") if timeout_s is None else self._threads.now_s() + timeout_s
        while not self.closed:
            if self._ready:
                return self._ready.popleft()
            reached = self._life is None or self._server.is_reached_by(self._life)
            if reached:
                self.contact_s = self._threads.now_s()
                if self._is_new:
                    self._is_new = False
                    while (event := self._watch.next(0)) is not None:
                        self._ready.append(event)
                    continue
            else:
                self._is_new = True  # there may be, once it is reached again
            left_s = until_s - self._threads.now_s()
            if left_s <= 0:
                return None
            if reached:
                quiet_s = max(left_s, QUIET_S)
                if not self._condition.wait(quiet_s):
                    self.contact_s = self._threads.now_s()
                    return None
            else:
                self._threads.sleep(min(left_s, 0.1))
        return None

    @property
    def closed(self) -> bool:
        return self._watch.closed

    def close(self) -> None:
        self._watch.close()
        self._server.watches.pop(self, None)
        self._condition.notify_all()
