"""Servers and model hosts of simulated nodes: queues of queries, and copies that answer them.

What is here stands for the engine and for processes; it decides nothing.
"""

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from bench.node_simulator.virtual_time import Life
from clipper.errors import Overloaded
from clipper.mesh.loading.model_host import HostDied, HostStatus, LoadResult, OnHost, OnLeft, Pulled
from clipper.mesh.records import MeshModel
from clipper.mesh.routing.router import MESH_VERSION
from clipper.mesh.transport.channel import ConnectionLost, RequestFailed
from clipper.serving.models.containers import Hello, Replica
from clipper.serving.models.model_source import ResolvedModel
from clipper.serving.query.processor import ResolvedApplication
from clipper.types import Batching, Model, VersionedModel

if TYPE_CHECKING:
    from bench.node_simulator.world import World
    from clipper.mesh.node.node import MeshNode

START_S = 0.3  # of a host process
PULL_S = 0.03  # of a model's files
HEARTBEAT_S = 3.0  # without which a copy counts as gone
ASK_S = 10.0  # beyond a host's own limit


@dataclass(eq=False)
class Query:
    """A query of a model. ended_s: -1 while it waits. hit: a copy served the model."""

    name: str
    born_s: float
    deadline_s: float
    entry: str = ""
    hit: bool = False
    ended_s: float = -1.0
    why: str = ""
    again: int = 0


class VirtualCore:
    """The queue of one model in one server, as a `Route` uses the engine's."""

    index = 0

    def __init__(self, server: "VirtualServer", id: str) -> None:
        self.server, self.id = server, id
        self.model: ResolvedModel | None = None
        self.queue: deque[Query] = deque()
        self.copies: list[ConnectedCopy] = []
        self.earliest_s = 0.0
        self.submitted = self.evaluated = 0
        self.engine = self

    def why(self) -> str:
        """Return why no copy serves the model; empty if one does."""
        return "" if self.model is None else self.model.reason()

    @property
    def waiting(self) -> int:
        return len(self.queue)

    def describe_input(self) -> str:
        return "any"

    def model_counts(self, index: int) -> dict[str, int]:
        busy_s = min((copy.busy_s for copy in self.copies), default=0.0)
        delay_us = max(0, int((busy_s - self.server.world.loop.time()) * 1e6))
        flying = sum(len(copy.flying) for copy in self.copies)
        return {
            "delay_us": delay_us,
            "evaluated": self.evaluated,
            "submitted": self.submitted,
            "in_flight": flying,
        }

    def submit(self, query: Query) -> None:
        """Queue a query, or end it if no copy can come before its deadline."""
        world = self.server.world
        self.submitted += 1
        if not self.copies and query.deadline_s < self.earliest_s:
            world.end(query, self.why() or "no copy comes in time")
            return
        query.hit = bool(self.copies)
        self.queue.append(query)
        world.loop.call_at(query.deadline_s, self._expire, query)
        self.dispatch()

    def _expire(self, query: Query) -> None:
        if query.ended_s < 0 and query.entry == self.server.life.name:
            if query in self.queue:
                self.queue.remove(query)
            self.server.world.end(query, self.why() or "queued too long")

    def dispatch(self) -> None:
        """Give queued queries to copies."""
        world = self.server.world
        while self.queue and self.copies:
            query = self.queue.popleft()
            if query.ended_s >= 0:
                continue
            copy = min(self.copies, key=lambda one: (len(one.flying), one.number))
            copy.flying[query] = None
            copy.busy_s = max(copy.busy_s, world.loop.time()) + world.plan.service_ms / 1000
            world.loop.call_at(copy.busy_s + world.delay_s(), self._answer, copy, query)

    def _answer(self, copy: "ConnectedCopy", query: Query) -> None:
        if query not in copy.flying or copy.host.hangs:
            return
        if not self.server.world.reaches(copy.host.life.name, self.server.life.name):
            return  # it is lost, until the connection counts as gone
        del copy.flying[query]
        self.evaluated += 1
        self.server.world.end(query, "")

    def close(self, seconds: float) -> None:
        """End the queries that are due before `seconds` are over."""
        self.earliest_s = self.server.world.loop.time() + seconds
        if self.copies:
            return
        for query in [one for one in self.queue if one.deadline_s < self.earliest_s]:
            self.queue.remove(query)
            self.server.world.end(query, self.why() or "no copy comes in time")


@dataclass(eq=False)
class ConnectedCopy:
    """A copy in a host that serves a server."""

    host: "VirtualHost"
    core: VirtualCore
    number: int

    def __post_init__(self) -> None:
        self.flying: dict[Query, None] = {}
        self.busy_s = 0.0


class VirtualServer:
    """The server of one node: a `clipper.mesh.node_host.NodeHost`."""

    batching = Batching()

    def __init__(self, world: "World", life: Life, context: contextvars.Context) -> None:
        self.world, self.life, self._context = world, life, context
        self.address = f"server:{life.name}"
        self.node: MeshNode | None = None
        self.connected: dict[str, list[ConnectedCopy]] = {}

    def token_of(self, model: str, instance: str) -> str:
        """See NodeHost."""
        return f"token of {model} at {instance}"

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function as this process would."""
        return self._context.copy().run(function, *args)

    def new_core(self, record: Model) -> Any:
        return VirtualCore(self, record.name)

    def applications(self, model: ResolvedModel) -> tuple[ResolvedApplication, ResolvedApplication]:
        core, id = cast(VirtualCore, model.core), model.record.id
        core.model = model
        settings = self.world.plan.settings
        slo_us = int(settings.deadline_ms * 1000)
        found = [
            cast(ResolvedApplication, _Resolved({id: core}, (id,), slo, model.admit))
            for slo in (slo_us, slo_us + int(settings.load_s * 1e6))
        ]
        return found[0], found[1]

    def replicas(self, id: VersionedModel) -> Sequence[Replica]:
        return [
            Replica(0, Hello(id.name, MESH_VERSION, copy.number), cast(Any, None))
            for copy in self.connected.get(id.name, ())
        ]

    def disconnect(self, id: VersionedModel, number: int) -> None:
        for copy in list(self.connected.get(id.name, ())):
            if copy.number == number:
                self.detach(copy, "the server has disconnected it")

    def close(self, resolved: Any, seconds: float) -> None:
        next(iter(resolved.cores.values())).close(seconds)

    def forget(self, resolved: Any) -> None:
        self.close(resolved, 1e9)

    def linking(self, id: str) -> Sequence[str]:
        return ()

    def link_again(self) -> None:
        pass

    def is_taken(self, name: str) -> bool:
        return False

    # -- queries

    def ask(self, query: Query) -> None:
        """Answer a query, or have its model loaded."""
        assert self.node is not None
        found: Any = self.node.application(query.name)
        if found is None:
            self.world.end(query, "no such model")
            return
        slo_us = found.slo_us
        if query.deadline_s:
            slo_us = max(1, int((query.deadline_s - self.world.loop.time()) * 1e6))
        else:
            query.deadline_s = self.world.loop.time() + slo_us / 1e6
        try:
            found.admit(slo_us)
        except Overloaded as refusal:
            self.world.end(query, refusal.message)
            return
        next(iter(found.cores.values())).submit(query)

    # -- copies

    def attach(self, host: "VirtualHost", id: str, number: int) -> bool:
        """Let a copy serve this server. False: it is refused."""
        if self.life.over or self.node is None:
            return False
        seat = self.node.seat(id, MESH_VERSION, "f64[4]", "f64")
        if seat is None:
            return False
        core = cast(VirtualCore, seat.model)
        for copy in list(self.connected.get(id, ())):
            if copy.number == number:
                self.detach(copy, "it has connected again")
        copy = ConnectedCopy(host, core, number)
        core.copies.append(copy)
        self.connected.setdefault(id, []).append(copy)
        host.serving.setdefault(id, {})[self.address] = copy
        self.node.on_replicas_changed(VersionedModel(id, MESH_VERSION))
        core.dispatch()
        return True

    def detach(self, copy: ConnectedCopy, why: str) -> None:
        """End the connection of a copy; its queries are queued again."""
        id = copy.core.id
        copies = self.connected.get(id, [])
        if copy not in copies:
            return
        copies.remove(copy)
        copy.core.copies.remove(copy)
        if copy.host.serving.get(id, {}).get(self.address) is copy:
            del copy.host.serving[id][self.address]
            if not copy.host.life.over:
                copy.host.run(copy.host.left, id, self.address, why)
        if self.life.over or self.node is None:
            return
        copy.core.queue.extendleft(reversed([q for q in copy.flying if q.ended_s < 0]))
        copy.flying.clear()
        self.run(self.node.on_replicas_changed, VersionedModel(id, MESH_VERSION))
        self.run(copy.core.dispatch)


@dataclass
class _Resolved:
    cores: dict[VersionedModel, VirtualCore]
    models: tuple[VersionedModel, ...]
    slo_us: int
    admit: Callable[[int], None]


class VirtualHost:
    """A process that holds models: a `clipper.mesh.loading.model_host.SupervisedHost`."""

    types: tuple[str, ...] = ("sim",)

    def __init__(
        self,
        world: "World",
        life: Life,
        context: contextvars.Context,
        name: str,
        ready: OnHost,
        lost: OnHost,
        left: OnLeft,
    ) -> None:
        self.world, self.life, self.name, self.left = world, life, name, left
        self._context = context
        self._ready, self._lost = ready, lost
        self.blamed: frozenset[str] = frozenset()
        self.is_ready = asyncio.Event()
        self.status = HostStatus(
            "READY", world.plan.capacity_bytes, world.plan.loading_max, 0.0, 1 << 20
        )
        self.resident: dict[str, int] = {}
        self.serving: dict[str, dict[str, ConnectedCopy]] = {}
        self.hangs = False
        self._asked: dict[asyncio.Future[None], str] = {}
        self._stopped = False
        self.epoch = self.starts = 0

    @property
    def pid(self) -> int:
        return 1 if self.is_ready.is_set() else 0

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function as the node's process would."""
        return self._context.copy().run(function, *args)

    async def start(self) -> None:
        self.world.loop.call_later(START_S, self._begin, self.epoch)

    def _begin(self, epoch: int) -> None:
        if epoch == self.epoch and not self._stopped:
            self.hangs = False
            self.starts += 1
            self.is_ready.set()
            self._ready(self)

    async def stop(self) -> None:
        self._stopped = True
        self._end("its node has stopped it")

    def _crash(self, epoch: int, id: str) -> None:
        if epoch == self.epoch and not self.life.over:
            self.world.laws.host_ended(self, id)
            self.run(self.die)

    def die(self) -> None:
        """End the process; it starts again after a pause."""
        if not self.is_ready.is_set() or self._stopped:
            return
        flying = {
            id for id, lines in self.serving.items() for copy in lines.values() if copy.flying
        }
        self.blamed = frozenset({*flying, *self._asked.values()})
        self._end("its host has died")
        self._lost(self)
        self.world.loop.call_later(START_S, self._begin, self.epoch)

    def _end(self, why: str) -> None:
        self.epoch += 1
        self.is_ready.clear()
        self.resident.clear()
        for asked in list(self._asked):
            if not asked.done():
                asked.set_exception(HostDied("the other side is gone", self.blamed))
        self._asked.clear()
        for lines in list(self.serving.values()):
            for address, copy in list(lines.items()):
                del lines[address]
                self.world.servers[address].detach(copy, why)

    async def _wait(self, id: str, seconds: float, timeout_s: float) -> None:
        """Let a request take its time. ConnectionLost, HostDied."""
        if not self.is_ready.is_set():
            raise ConnectionLost(f"the model host {self.name} is not there")
        loop = self.world.loop
        done: asyncio.Future[None] = loop.create_future()
        self._asked[done] = id
        ends = loop.call_later(seconds, self._answer, done)
        try:
            async with asyncio.timeout(timeout_s + ASK_S):
                await done
        except TimeoutError:
            raise ConnectionLost(f"no answer within {timeout_s + ASK_S:g} s") from None
        finally:
            ends.cancel()
            self._asked.pop(done, None)

    def _answer(self, done: "asyncio.Future[None]") -> None:
        if not (done.done() or self.hangs):
            done.set_result(None)

    async def pull(self, model: MeshModel) -> Pulled:
        await self._wait(model.id, PULL_S, PULL_S)
        if self.world.disks.get(self.life.name) == "full":
            raise RequestFailed(f"cannot pull {model.path}: the cache is full", "host")
        return Pulled(f"/cache/{model.id}", model.id)

    async def load(
        self, model: MeshModel, timeout_s: float, evict: Sequence[str] = ()
    ) -> LoadResult:
        world = self.world
        await asyncio.gather(*(self.unload(id, timeout_s) for id in evict))
        took_s = world.load_s(model.id)
        world.note("load", self.life.name, model.id)
        world.loads += 1
        if int(model.id[1:]) % 7 in world.poison:
            world.loop.call_later(took_s / 2, self._crash, self.epoch, model.id)
        await self._wait(model.id, min(took_s, timeout_s), timeout_s)
        if took_s > timeout_s:
            raise RequestFailed(f"it was not loaded within {timeout_s:g} s")
        if self.world.disks.get(self.life.name) == "unreadable":
            world.laws.load_failed(self.life.name, model.id)
            raise RequestFailed(f"cannot read {model.path}: input/output error", "host")
        if fault := world.fault_of(model.id):
            world.laws.load_failed(self.life.name, model.id)
            raise RequestFailed(f"{model.id} cannot be loaded: a {fault} fault", fault)
        self.resident[model.id] = world.size_of(model.id)
        return LoadResult(world.size_of(model.id), 1, "f64[4]", "f64", took_s * 1000)

    async def unload(self, model: str, timeout_s: float) -> None:
        if model in self.resident:
            self.world.note("unload", self.life.name, model)
            self.world.laws.unloaded(self.life.name, model)
            for address, copy in list(self.serving.pop(model, {}).items()):
                self.world.servers[address].detach(copy, "it is unloaded")
            await self._wait(model, 0.005, timeout_s)
            self.resident.pop(model, None)

    async def predict_size(self, model: MeshModel) -> int:
        await self._wait(model.id, 0.002, 1.0)
        return self.world.plan.typical_bytes

    async def serve(
        self, model: str, address: str, token: str, replica: int, timeout_s: float
    ) -> None:
        await self._wait(model, self.world.delay_s(), timeout_s)
        server = self.world.servers.get(address)
        if server is None or not self.world.reaches(self.life.name, server.life.name):
            await self._wait(model, timeout_s, timeout_s)
            raise RequestFailed(f"{address} was not reached within {timeout_s:g} s")
        if model not in self.resident:
            raise RequestFailed(f"{model} is not loaded here")
        if address not in self.serving.get(model, {}) and not server.run(
            server.attach, self, model, replica
        ):
            raise RequestFailed(f"{address} has refused {model}")

    async def leave(self, model: str, address: str, timeout_s: float) -> None:
        copy = self.serving.get(model, {}).get(address)
        if copy is not None:
            self.world.servers[address].detach(copy, "it was asked to leave")


if TYPE_CHECKING:
    from clipper.mesh.loading.model_host import SupervisedHost
    from clipper.mesh.node_host import NodeHost

    def _is_host(host: VirtualHost, server: VirtualServer) -> tuple[SupervisedHost, NodeHost]:
        return host, server
