"""A mesh of nodes, the code that servers run, on virtual time: with queries, and faults by seed."""

import bisect
import contextlib
import contextvars
import logging
import math
import warnings
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal

import msgspec

from bench.node_simulator.kinds import Fault
from bench.node_simulator.network import VirtualNetwork, Wires
from bench.node_simulator.servers import Query, VirtualHost, VirtualServer
from bench.node_simulator.store import StoreClient, StoreServer
from bench.node_simulator.virtual_time import (
    LIFE,
    WALL_START_MS,
    Life,
    VirtualLoop,
    VirtualNodeLoop,
    VirtualThreads,
)
from clipper.clock import wall_clock
from clipper.errors import ClipperError
from clipper.mesh.node.node import MeshNode
from clipper.mesh.node.platform import NodePlatform
from clipper.mesh.records import INSTANCES, MODELS, VMODELS, Instance, MeshModel, Policy, VModel
from clipper.settings.mesh import MeshSettings
from clipper.store import Record

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """A simulated world.

    share: memory of the nodes, as a share of the size of all models. pulled: paths of models are
    URLs, whose files a node pulls before it loads them.
    """

    nodes: int = 3
    models: int = 20
    share: float = 1.0
    rate_per_s: float = 10.0
    alpha: float = 1.0
    seconds: float = 60.0
    seed: int = 0
    service_ms: float = 1.0
    typical_bytes: int = 5_000_000
    loading_max: int = 4
    slow: float = 10.0
    pinned: int = 0
    doubled: int = 0
    pulled: bool = False
    vmodels: int = 0
    switch_s: float = 5.0
    faults: tuple[Fault, ...] = ()
    settings: MeshSettings = field(default_factory=MeshSettings)

    @property
    def capacity_bytes(self) -> int:
        """The memory of one node."""
        mean = self.typical_bytes * math.exp(0.5)
        return int(max(self.share * self.models * mean / self.nodes, 8 * self.typical_bytes))


@dataclass(eq=False)
class SimulatedNode:
    """One node, and its present life."""

    name: str
    number: int
    life: Life
    server: VirtualServer
    hosts: list[VirtualHost] = field(default_factory=list)
    node: MeshNode | None = None
    ready: bool = False
    leaving: bool = False

    @property
    def alive(self) -> bool:
        return not self.life.over


class _Inline(Executor):
    """Runs look-ups at once: here they are of names that no node knows."""

    def submit(self, function: Any, /, *args: Any, **keywords: Any) -> Any:
        done: Future[Any] = Future()
        try:
            done.set_result(function(*args, **keywords))
        except Exception as error:
            done.set_exception(error)
        return done


class World:
    """A simulated mesh. Use as a context manager. Threads: one."""

    def __init__(self, plan: Plan) -> None:
        from bench.node_simulator.faults import Faults
        from bench.node_simulator.laws import Laws

        self.plan, self.rng = plan, Random(plan.seed)
        self.loop = VirtualLoop()
        self.threads = VirtualThreads(self.loop)
        self.store = StoreServer(self.threads)
        self.wires = Wires(self.loop, self.reaches, self.delay_s)
        self.servers: dict[str, VirtualServer] = {}
        self.nodes: dict[str, SimulatedNode] = {}
        self.split: set[str] = set()
        self.slow = 1.0
        self.corrupt: set[int] = set()
        self.poison: set[int] = set()
        self.disks: dict[str, str] = {}  # node -> why it can pull nothing
        self.gone: set[str] = set()
        self.is_emptied = False
        self.times_emptied = 0
        self.trace: list[tuple[Any, ...]] = []
        self.violations: list[str] = []
        self.counts: Counter[str] = Counter()
        self.waiting: dict[Query, None] = {}
        self.queries = self.hits = self.loads = 0
        self.refused: Counter[str] = Counter()
        self._sizes: dict[str, int] = {}
        self._lives: list[Life] = []
        self._records: dict[str, tuple[Record, Any]] = {}
        self._read: dict[str, tuple[int, dict[str, Any]]] = {}
        weights = [(n + 1) ** -plan.alpha for n in range(plan.models)]
        self._demand = [sum(weights[: n + 1]) for n in range(plan.models)]
        self._clock = wall_clock(self._wall_ns)
        self.laws = Laws(self)
        self.faults = Faults(self)
        self.store.written = self._written

    def __enter__(self) -> "World":
        self._clock.__enter__()
        for number in range(self.plan.nodes):
            self.start(f"n{number}", number)
        self.step(5)
        self._register()
        return self

    def __exit__(self, *exc: object) -> None:
        for life in self._lives:
            self.loop.end(life)
        self.threads.close()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # tasks that would start now never do
            for life in self._lives:
                for task in list(life.tasks):
                    task._log_destroy_pending = False  # type: ignore[attr-defined]
                    work: Any = task.get_coro()
                    for _ in range(20):  # what waits again while it ends is ended again
                        with contextlib.suppress(RuntimeError, ValueError):
                            work.close()
                            break
        self._clock.__exit__(None, None, None)
        self.loop.close()

    # -- time

    def _wall_ns(self) -> int:
        life, now_s = LIFE.get(), self.loop.time()
        ahead_ms = life.ahead_ms(now_s) if life is not None else 0
        return int(now_s * 1e9) + (WALL_START_MS + ahead_ms) * 1_000_000

    @property
    def now_ms(self) -> int:
        return WALL_START_MS + int(self.loop.time() * 1000)

    @property
    def clocks(self) -> bool:
        """Return whether the wall clock of some node is wrong."""
        return any(one.life.ahead_ms(self.loop.time()) for one in self.nodes.values())

    def step(self, seconds: float) -> None:
        """Let time pass."""
        self.loop.advance(seconds)

    def note(self, *what: Any) -> None:
        """Add to the history of the world."""
        self.trace.append((round(self.loop.time(), 6), *what))

    # -- what is simulated

    def delay_s(self) -> float:
        """The delay of a message."""
        return self.rng.uniform(0.0002, 0.002)

    def reaches(self, one: str, other: str) -> bool:
        """Return whether messages get from one node to another."""
        return one == other or not (one in self.split or other in self.split)

    def name(self, number: int) -> str:
        return f"m{number:03}"

    def size_of(self, id: str) -> int:
        """The size of a model in bytes."""
        if (known := self._sizes.get(id)) is not None:
            return known
        normal = Random(int(id[1:]) * 31 + 7).gauss(0.0, 0.7)
        typical = self.plan.typical_bytes
        size = min(max(int(typical * math.exp(normal)), typical // 10), 4 * typical)
        self._sizes[id] = size
        return size

    def load_s(self, id: str) -> float:
        """The duration of a load."""
        return self.slow * (0.04 + 5e-9 * self.size_of(id)) * self.rng.uniform(0.8, 1.3)

    def fault_of(self, id: str) -> Literal["artifact", ""]:
        return "artifact" if int(id[1:]) % 7 in self.corrupt else ""

    def _written(self, life: Life | None, ops: Any, revision: int) -> None:
        keys = ",".join(op.key for op in ops if op.key.startswith("mesh/"))
        self.note("txn", life.name if life else "", keys, revision)
        self.laws.written(life, ops)

    def models(self) -> dict[str, MeshModel]:
        """The records of all models in the store."""
        return self._decoded(MODELS, MeshModel)

    def vmodels(self) -> dict[str, VModel]:
        return self._decoded(VMODELS, VModel)

    def instances(self) -> dict[str, Instance]:
        return self._decoded(INSTANCES, Instance)

    def _decoded(self, prefix: str, kind: Any) -> dict[str, Any]:
        """Return the records under a prefix as they are now, which must not be changed."""
        _ = self.store.revision  # a call, which ends the leases that are over
        changes, found = self._read.get(prefix, (-1, {}))
        if changes == self.store.changes:
            return found
        found = {}
        for record in self.store.range(prefix)[0]:
            known = self._records.get(record.key)
            if known is None or known[0] is not record:
                value = msgspec.json.decode(record.value, type=kind)
                known = self._records[record.key] = record, value
            found[record.key[len(prefix) :]] = known[1]
        self._read[prefix] = self.store.changes, found
        return found

    # -- nodes

    def start(self, name: str, number: int) -> SimulatedNode:
        """Start a node as a new process."""
        life = Life(name)
        self._lives.append(life)
        context = contextvars.Context()
        context.run(LIFE.set, life)
        server = VirtualServer(self, life, context)
        self.servers[server.address] = server
        one = self.nodes[name] = SimulatedNode(name, number, life, server)
        plan, rng = self.plan, Random(f"{self.plan.seed} {name} {len(self._lives)}")
        settings = msgspec.structs.replace(
            plan.settings,
            name=name,
            zone=f"z{number % 3}",
            capacity_mib=max(plan.capacity_bytes >> 20, 1),
            loading_max=plan.loading_max,
        )

        def new_host(
            node: str,
            host: str,
            folder: Path,
            settings: MeshSettings,
            ready: Any,
            lost: Any,
            left: Any,
        ) -> VirtualHost:
            found = VirtualHost(self, life, context, host, ready, lost, left)
            one.hosts.append(found)
            return found

        def run() -> None:
            platform = NodePlatform(
                new_host,
                lambda: VirtualNodeLoop(self.loop, self.threads, life),
                VirtualNetwork(self.wires),
                _Inline(),
                Random(rng.random()),
            )
            client = StoreClient(self.store, self.threads, rng, life)
            while True:
                node = MeshNode(settings, client, server, Path("/virtual"), platform)
                try:
                    server.node = node
                    node.start()
                except ClipperError as error:
                    self.note("not started", name, type(error).__name__)
                    node.close()
                    one.hosts.clear()
                    self.threads.sleep(1.0)
                    continue
                one.node, one.ready = node, True
                self.note("started", name)
                return

        context.copy().run(self.threads.start, run)
        return one

    def kill(self, name: str) -> None:
        """Kill the process of a node, and with it its hosts."""
        one = self.nodes[name]
        if one.alive:
            self.note("killed", name)
            self._gone(one)

    def _gone(self, one: SimulatedNode) -> None:
        one.ready = False
        self.loop.end(one.life)
        self.wires.cut_off(one.life)
        for host in one.hosts:
            host.resident.clear()
            for lines in host.serving.values():
                for address, copy in list(lines.items()):
                    self.servers[address].detach(copy, "its process has ended")
            host.serving.clear()
        for copies in list(one.server.connected.values()):
            for copy in list(copies):
                one.server.detach(copy, "the server has ended")
        self.servers.pop(one.server.address, None) if self.servers.get(
            one.server.address
        ) is one.server else None
        for query in [q for q in self.waiting if q.entry == one.name]:
            query.again += 1
            self._ask(query)

    def stop(self, name: str) -> None:
        """Stop a node in good order."""
        one = self.nodes[name]
        if not one.ready or one.leaving or one.node is None:
            return
        one.leaving = True
        node = one.node

        def run() -> None:
            node.drain_for_good()
            self.laws.drained(one)
            one.ready = False  # it answers what it has, and gets no new queries
            self.threads.sleep(1.5)
            node.close()
            self.note("stopped", name)
            context = contextvars.Context()
            self.loop.call_soon(self._gone, one, context=context)

        one.server.run(self.threads.start, run)

    def begin(self, name: str) -> None:
        """Start a node again that has ended, unless it is gone for good."""
        if not self.nodes[name].alive and name not in self.gone:
            self.start(name, self.nodes[name].number)

    # -- models

    def _register(self) -> None:
        plan = self.plan

        def run() -> None:
            node = next(iter(self.nodes.values())).node
            assert node is not None
            for number in range(plan.models):
                policy = Policy(
                    pinned=number < plan.pinned,
                    copies_min=2 if number >= plan.models - plan.doubled else 0,
                )
                id = self.name(number)
                path = f"sim://files/{id}" if plan.pulled else f"/{id}"
                node.register(id, path, "sim", input="f64[4]", output="f64", policy=policy)
            for number in range(plan.vmodels):
                node.set_vmodel(f"v{number:02}", self.name(number))
            self.note("registered")

        first = next(iter(self.nodes.values()))
        first.server.run(self.threads.start, run)
        for _ in range(50):
            self.step(1)
            if any(what[1] == "registered" for what in self.trace[-50:]):
                break

    def set_vmodel(self, id: str, target: str) -> None:
        """Set the target of a v-model, at some node."""
        self.manage(lambda node: node.set_vmodel(id, target), f"set {id} {target}")

    def manage(self, act: Any, what: str) -> None:
        one = self._entry()
        if one is None or one.node is None:
            return
        node = one.node

        def run() -> None:
            try:
                act(node)
                self.note(what)
            except ClipperError as error:
                self.note(what, type(error).__name__)

        one.server.run(self.threads.start, run)

    # -- queries

    def _entry(self) -> SimulatedNode | None:
        ready = [one for one in self.nodes.values() if one.ready and not one.leaving]
        return self.rng.choice(ready) if ready else None

    def query(self, name: str, entry: str = "", slo_s: float = 0.0) -> Query:
        """Start a query now. slo_s: its deadline; 0: as the node says."""
        now = self.loop.time()
        query = Query(name, now, now + slo_s if slo_s else 0.0, entry)
        self.queries += 1
        self.waiting[query] = None
        one = self.nodes[entry] if entry else self._entry()
        self.laws.asked(name, one.life if one else None)
        self._ask(query, one)
        return query

    def _ask(self, query: Query, one: SimulatedNode | None = None) -> None:
        one = one or self._entry()
        if one is None:
            self.end(query, "no node is there")
            return
        query.entry = one.name
        one.server.run(one.server.ask, query)

    def end(self, query: Query, why: str) -> None:
        """End a query; an empty reason: it was answered."""
        if query.ended_s >= 0:
            return
        query.ended_s, query.why = self.loop.time(), why
        self.waiting.pop(query, None)
        self.hits += not why and query.hit
        self.note("end", query.name, query.entry, why)
        if why:
            self.refused[why] += 1
        self.laws.ended(query)

    def _arrive(self, until_s: float) -> None:
        draw = self.rng.random() * self._demand[-1]
        name = self.name(bisect.bisect(self._demand, draw))
        if self.plan.vmodels and self.rng.random() < 0.2:
            name = f"v{self.rng.randrange(self.plan.vmodels):02}"
        self.query(name)
        gap_s = self.rng.expovariate(self.plan.rate_per_s)
        if self.loop.time() + gap_s < until_s:
            self.loop.call_later(gap_s, self._arrive, until_s)

    def _switch(self, until_s: float) -> None:
        if self.loop.time() >= until_s:
            return
        id = f"v{self.rng.randrange(self.plan.vmodels):02}"
        self.set_vmodel(id, self.name(self.rng.randrange(min(self.plan.models, 20))))
        self.loop.call_later(self.plan.switch_s, self._switch, until_s)

    # -- faults

    def run(self) -> None:
        """Run the plan: its queries and faults."""
        began_s = self.loop.time()
        until_s = began_s + self.plan.seconds
        if self.plan.rate_per_s:
            self.loop.call_soon(self._arrive, until_s)
        if self.plan.vmodels:
            self.loop.call_later(self.plan.switch_s, self._switch, until_s)
        for fault in self.plan.faults:
            self.loop.call_at(began_s + fault.at_s, self.faults.begin, fault)
            self.loop.call_at(began_s + fault.at_s + fault.for_s, self.faults.end, fault)
        self.step(self.plan.seconds)

    def settle(self, ids: Iterable[str] = ()) -> list[str]:
        """End all faults, start dead nodes, and check that all agree and every model answers."""
        self.faults.end_all()
        settings = self.plan.settings
        self.step(20 + 2.5 * max(settings.janitor_s, settings.reaper_s) + 2 * settings.lease_s)
        for one in list(self.nodes.values()):
            self.begin(one.name)
        self.step(settings.failure_s + settings.reaper_s + 5)
        self.laws.agree()
        asked = []
        for id in ids:  # not all at once: memory for all need not be there
            asked.append(self.query(id))
            self.step(1.0)
        self.step(settings.deadline_ms / 1000 + settings.load_s + 1)
        for query in asked:
            self.check(not query.why, f"the query of {query.name} has failed: {query.why}")
        self.check(not self.waiting, f"{len(self.waiting)} queries have not ended")
        for error in self.loop.errors:
            self.check(False, error)
        return self.violations

    def check(self, holds: bool, what: str) -> None:
        """Report a violation unless a condition holds."""
        if not holds and len(self.violations) < 20:
            self.violations.append(f"seed {self.plan.seed}, {self.loop.time():.3f} s: {what}")
