"""One node of the mesh: its thread, its parts, and how they hear of each other.

Everything slow happens on one event loop in the thread `clipper-mesh`; what waits for the store is
run by a few threads more. Queries never come here: they wait in a lane, and routing.py tells of the
first. Facts come in from mirrors of the registry, from the engine (which replicas came and went),
from hosts and from the other nodes.
"""

import asyncio
import contextlib
import functools
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Collection, Container, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, ParamSpec, Protocol, TypeVar

import msgspec

from clipper.errors import ClipperError, ShuttingDown
from clipper.mesh.decisions import claims
from clipper.mesh.decisions.usage import Uses
from clipper.mesh.loading.isolation import Isolation
from clipper.mesh.loading.loader import LocalModels
from clipper.mesh.loading.model_host import START_S, Host, host_command, started
from clipper.mesh.loading.recovery import Recovery
from clipper.mesh.management.models import Managing
from clipper.mesh.node.deferred_join import Entering
from clipper.mesh.node.drain import Draining
from clipper.mesh.node.periodic_tasks import Tending
from clipper.mesh.records import Instance, MeshModel, VModel
from clipper.mesh.registry import Registry, is_taken, now_ms
from clipper.mesh.routing.copy_locator import Notes, Supply
from clipper.mesh.routing.lookups import Lookups
from clipper.mesh.routing.router import MESH_VERSION, Alias, Route, Routes, core_record
from clipper.mesh.transport.channel import Failed, Message, is_gone
from clipper.mesh.transport.peers import Peers
from clipper.serving.containers import Replica, Seat
from clipper.serving.processor import Question
from clipper.settings.mesh import MeshSettings
from clipper.store import KeyChange, Store
from clipper.types import VERSION, Batching, Model, VersionedModel

STORE_THREADS: Final = 4
RETRY_S: Final = 0.2
NAME_LEASES: Final = (
    2.0  # times the lease, until a node of the same name that does not answer is taken to live
)
SILENT_S: Final = 3.0  # of the store: names are not looked up in it
LOOK_S: Final = 0.05  # until a row that was on its way is in its lane
FOREVER_S: Final = 1e9
WIDEN_MS: Final = 60_000  # a route that was used so lately is served by new copies at once
_log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


class Ground(Protocol):
    """What a node stands on: its server. Threads: any."""

    @property
    def address(self) -> str:
        """Where replicas dial in."""
        ...

    @property
    def token(self) -> str: ...

    @property
    def batching(self) -> Batching: ...

    def question(self, record: Model, why: Callable[[], str]) -> tuple[Question, Question]:
        """A question to this model alone, with a core model of its own that no list shows, and the
        same for queries that come while it is not loaded, which have more time. why: it has no
        replica."""
        ...

    def replicas(self, id: VersionedModel) -> Sequence[Replica]: ...

    def disconnect(self, id: VersionedModel, number: int) -> None:
        """The replicas of a model that have this number: their rows go back to the lane."""
        ...

    def close(self, question: Question, seconds: float) -> None:
        """No replica of its model comes for so long: queries that are due earlier, those that wait
        too, end at once."""
        ...

    def forget(self, question: Question) -> None:
        """Its model is registered no more: queries that wait for a replica of it end at once."""
        ...

    def linking(self, id: str) -> Sequence[str]:
        """Applications that ask this model."""
        ...

    def link_again(self) -> None:
        """Have applications look which models there are."""
        ...

    def is_taken(self, name: str) -> bool:
        """By a model or an application of the catalog."""
        ...


class Mesh(Entering, Tending, Managing, Draining):
    """A node of the mesh, as `server.mesh`: see clipper.mesh.facade. Threads: any; but one of its
    own may not wait for it."""

    def __init__(
        self,
        settings: MeshSettings,
        store: Store,
        ground: Ground,
        folder: Path,
        *,
        hosts: "MakeHosts | None" = None,
    ) -> None:
        self.settings, self.ground, self._folder = settings, ground, folder
        self.store = store
        self._id = settings.name or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self._make_hosts = hosts or _hosts
        self._lookups = Lookups(self._find_in_store)
        self.routes = Routes(
            ground.question,
            self._core_record,
            self._missed,
            ground.batching,
            replaced=self._replaced,
            look_up=self._look_up,
            is_failing=self._is_failing,
        )
        self.notes = Notes()
        self.uses = Uses()
        self._pool = ThreadPoolExecutor(STORE_THREADS, "clipper-mesh-store")
        self._thread = threading.Thread(target=self._run, name="clipper-mesh", daemon=True)
        self._loop = asyncio.new_event_loop()
        self._begun = threading.Event()
        self._life = asyncio.Lock()  # it enters, or leaves
        self._leaves = asyncio.Event()
        self._following = threading.Lock()
        self._watchers = set()
        self._stopping = False
        self._closed = False
        self.started_ms = now_ms()

    # -- life

    def start(self) -> "Mesh":
        """Enter the mesh. Returns when models can be loaded here; hosts that are not ready by then
        are tried on. StoreError while the store is away."""
        self._start_threads()
        self._do(self._begin())
        return self

    def _start_threads(self) -> None:
        self._thread.start()
        self._lookups.start()
        together = threading.Barrier(STORE_THREADS)
        for _ in range(STORE_THREADS):
            self._pool.submit(together.wait)  # so that they are all there

    def close(self) -> None:
        """Leave it. Idempotent."""
        if self._closed:
            return
        self._closed = self._stopping = True
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        if self._begun.is_set():
            self.registry.close()
        self._lookups.close()
        self._pool.shutdown()
        self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    @property
    def instance(self) -> str:
        return self._id

    async def _begin(self) -> None:
        """Be in the mesh. What fails on the way, or is closed meanwhile, leaves nothing."""
        async with self._life, contextlib.AsyncExitStack() as undo:
            self._check_stays()
            self.registry = await self.run_away(Registry, self.store, self.settings)
            undo.push_async_callback(self.run_away, self.registry.close)
            self.number = self.number or await self.run_away(self.registry.number)
            self._make_parts(await self.run_away(self.registry.token))
            undo.callback(self.peers.close)
            for host in self.hosts:
                undo.push_async_callback(host.stop)
            await self.peers.open()
            for host in self.hosts:
                await host.start()
            await self._until_ready()
            self._check_stays()
            undo.push_async_callback(self.run_away, self.registry.leave)
            undo.push_async_callback(self._resign)
            await self._enter()
            undo.pop_all()
            self._tell_of_changes()
            for vmodel in self.registry.vmodels.values():
                self.routes.alias(vmodel.id, alias_of(vmodel))
            self._begun.set()
            self._start_tending()

    def _check_stays(self) -> None:
        if self._stopping:
            raise ShuttingDown(
                "this node is closed.", hint="Start another with clipper.start(mesh=True)."
            )

    def _make_parts(self, token: str) -> None:
        self.hosts = self._make_hosts(self, [f"host-{n}" for n in range(self.settings.hosts)])
        self.peers = Peers(
            self._id,
            self.settings.peers,
            token,
            self._folder,
            self._answer,
            self.hear,
            self._peer_address,
        )
        self.isolation = Isolation(self._start_alone, self._acquitted)
        self.local = LocalModels(
            self._id,
            self.number,
            self.registry,
            self.settings,
            self.hosts,
            0,
            self.run_away,
            self.notes.note,
            self.isolation,
        )
        self.local.paged_out = self._paged_out
        self.recovery = Recovery(self._id, self.local, self.isolation)
        self.supply = Supply(
            self.local,
            self.peers,
            self.registry,
            self.settings,
            self.here,
            lambda: (self.ground.address, self.ground.token),
            self._close_route,
            self.notes,
        )

    def _tell_of_changes(self) -> None:
        registry = self.registry
        registry.models.on_change(lambda changes: self._tell(self._models_changed, changes))
        registry.vmodels.on_change(lambda changes: self._tell(self._vmodels_changed, changes))
        registry.instances.on_change(lambda changes: self._tell(self._instances_changed, changes))
        registry.models.on_change(lambda changes: self._tell_watchers("model", changes))
        registry.vmodels.on_change(lambda changes: self._tell_watchers("vmodel", changes))
        registry.instances.on_change(lambda changes: self._tell_watchers("instance", changes))

    async def _until_ready(self) -> None:
        leaves = asyncio.ensure_future(self._leaves.wait())
        ready = asyncio.gather(*(host.is_ready.wait() for host in self.hosts))
        await asyncio.wait((leaves, ready), timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done() and not self._stopping:
            _log.error("no model host of %s is ready after %g s; it is tried on", self._id, START_S)
        leaves.cancel()
        ready.cancel()
        self._set_capacity()

    def _set_capacity(self) -> None:
        said = sum(host.status.capacity_bytes for host in self.hosts)
        self.local.residents.capacity_bytes = self.settings.capacity_mib << 20 or said

    async def _enter(self) -> None:
        """Be an instance. What an earlier life of the same name had claimed is not there any
        more."""
        if self.settings.name:
            await self._until_name_is_free()
            mine = [model.id for model in self.registry.models.values() if self._id in model.copies]
            for id in mine:
                await self.run_away(
                    self.registry.change, id, lambda model: claims.without(model, self._id)
                )
        await self.run_away(self.registry.enter, self.here())
        await self._stand()

    async def _until_name_is_free(self) -> None:
        """Of a node of this name that was killed, the record lives as long as its lease.
        AlreadyExists where it goes on."""
        until = self._loop.time() + NAME_LEASES * self.settings.lease_s
        while (other := await self.run_away(self.registry.living, self.here())) is not None:
            if await is_gone(other.peers):
                await self.run_away(self.registry.bury, other)
                return
            if self._loop.time() > until:
                raise is_taken(other)
            await asyncio.sleep(RETRY_S)

    async def _end(self) -> None:
        self._leaves.set()
        async with self._life:
            if self._begun.is_set():
                await self._leave()
        rest = asyncio.all_tasks() - {
            asyncio.current_task()
        }  # whoever waits for one in another thread is told
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    async def _leave(self) -> None:
        self._stop_tending()
        await self.local.stop()
        await asyncio.gather(self.isolation.close(), *(host.stop() for host in self.hosts))
        self.peers.close()
        await self._resign()
        await self.run_away(self.registry.leave)

    # -- from thread to thread

    def _do(self, work: Any) -> Any:
        """Run a coroutine on the mesh's loop, and wait for it."""
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("the mesh's own thread cannot wait for it")
        try:
            waiting = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # the loop is closed
            work.close()
            raise ShuttingDown("this node has left the mesh.", hint="Ask another.") from None
        if self._closed:
            waiting.cancel()
        try:
            return waiting.result()
        except CancelledError:
            raise ShuttingDown("this node has left the mesh.", hint="Ask another.") from None

    def _tell(self, what: Callable[..., object], *args: Any) -> None:
        """Have it done on the mesh's loop, by and by."""
        try:
            self._loop.call_soon_threadsafe(what, *args)
        except RuntimeError:  # the loop is closed: so is the mesh
            if not self._stopping:
                raise

    async def run_away(self, function: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
        """Call what waits for the store, on another thread."""
        return await self._loop.run_in_executor(
            self._pool, functools.partial(function, *args, **keywords)
        )

    # -- queries

    def question(self, name: str) -> Question | None:
        """For a query that is about to be asked; None: the mesh knows no such name. At most 10 us
        when it was asked before."""
        return self.routes.question(name)

    def link(self, name: str) -> Route | None:
        """A model, for an application that asks it."""
        found = self.routes.link(name) if self._begun.is_set() else None
        return found if found is not None and found.id == name else None

    def _core_record(self, id: str) -> Model | None:
        record: MeshModel | None = self.registry.models.get(id) if self._begun.is_set() else None
        return None if record is None else core_record(id, record.input, record.output)

    def _is_failing(self, id: str) -> bool:
        record: MeshModel | None = self.registry.models.get(id) if self._begun.is_set() else None
        return record is not None and bool(record.failures)

    def _look_up(self, id: str) -> None:
        """A name that the mirrors do not know is asked of the store, by another thread; not while
        the store does not answer."""
        if not self._begun.is_set():
            if self.awaits:
                self._check_open()
        elif self.registry.models.stale_s < SILENT_S:
            self._lookups.look_up(id)

    def _find_in_store(self, id: str) -> None:
        record = self.registry.read(id)
        if record is not None:
            self.routes.add(core_record(id, record.input, record.output))
        elif (vmodel := self.registry.read_vmodel(id)) is not None:
            self.routes.alias(id, alias_of(vmodel))

    def _missed(self, route: Route) -> None:
        self._tell(self.supply.miss, route)

    def _close_route(self, route: Route, seconds: float) -> None:
        self.ground.close(route.question, seconds)
        self._loop.call_later(
            seconds, self._reopen, route.id
        )  # no reference: it may be unregistered by then

    def _reopen(self, id: str) -> None:
        route = self.routes.get(id)
        if route is not None:
            self.supply.reopen(route)

    # -- replicas

    def seat(self, name: str, version: int, input: str) -> Seat | None:
        """Where a copy that dials in is served, whose rows are of type `input`; None: it is not of
        the mesh."""
        return self.routes.seat(name, version, input)

    def renew_untyped(self, route: Route) -> None:
        """Of a model whose rows nobody has stated: keep the type of rows that had an output, and
        forget one that had none.

        So a first query of a wrong shape does not decide which queries are refused from then on.
        """
        counts = route.core.engine.model_counts(route.core.index)
        if counts["evaluated"]:
            route.type_known = True
        elif route.served and counts["submitted"] and not counts["in_flight"]:
            why = f"no output has come of rows of {route.core.describe_input()}"
            if self.routes.renew(route, route.record.input, why):
                self._replaced(route)
                self.local.spawn(self._unlend_all(route.id, frozenset(route.lenders)))

    async def _unlend_all(self, id: str, lenders: Collection[int]) -> None:
        """Those that served the old queue dial in anew, when the next query comes."""
        for number in lenders:
            self.ground.disconnect(VersionedModel(id, MESH_VERSION), number)

    def _replaced(self, route: Route) -> None:
        """Its model has another queue: who waits in this one is told, and applications take the new
        one. Threads: any."""
        self.ground.close(route.question, FOREVER_S)
        if self.ground.linking(route.id):
            self._tell(self._link_again)

    def came_or_went(self, id: VersionedModel) -> bool:
        """Replicas of it have. False: it is not of the mesh."""
        if id.version != MESH_VERSION or self.routes.get(id.name) is None:
            return False
        self._tell(self._count_replicas, id)
        return True

    def _count_replicas(self, id: VersionedModel) -> None:
        route = self.routes.came_or_went(
            id.name, {replica.hello.replica for replica in self.ground.replicas(id)}
        )
        if route is None or self._stopping:
            return
        if route.served:
            self.supply.came(route)
        else:
            self._look_after(route)
            self._loop.call_later(LOOK_S, self._look_after, route)

    def _look_after(self, route: Route) -> None:
        """Its last replica has gone: rows that were sent to it, or came just then, wait for
        another."""
        if not route.served and not route.told and route.core.waiting and not self._stopping:
            route.told = True
            self.supply.miss(route)

    def _host_ready(self, host: Host) -> None:
        _log.info(
            "the model host %s is ready (pid %d): %s", host.name, host.pid, ", ".join(host.types)
        )

    def _host_lost(self, host: Host) -> None:
        if not self._stopping:
            self.recovery.host_lost(host)

    async def _start_alone(self, name: str) -> Host:
        (host,) = self._make_hosts(self, (name,))
        return await started(host)

    def _acquitted(self, id: str, host: Host) -> None:
        if not self._stopping:
            self.recovery.acquit(id, host)

    def _host_left(self, model: str, address: str, why: str) -> None:
        self.local.left(model, address)

    # -- other nodes

    def _peer_address(self, instance: str) -> str:
        found: Instance | None = self.registry.instances.get(instance)
        return found.peers if found else ""

    async def _answer(self, verb: str, message: Message) -> Message:
        """What another node asks."""
        id = str(message.get("model", ""))
        used_ms, copies = int(message.get("used_ms", 0)), int(message.get("copies", 1))
        if verb == "lend":
            if message.get("load") or self.local.is_loading(id):
                await self.local.load(id, used_ms or now_ms(), waiting=True, copies=copies)
            await self.local.lend(id, str(message["address"]), str(message["token"]))
            return {}
        if verb == "load":
            await self.local.load(id, used_ms, waiting=bool(message.get("waiting")), copies=copies)
            return {}
        if verb == "unlend":
            await self.local.unlend(id, str(message["address"]))
            return {}
        if verb == "explain":
            return {"history": [msgspec.to_builtins(one) for one in self.notes.of(id)]}
        raise Failed(f"no verb {verb!r}", "none")

    # -- the registry has changed

    def _models_changed(self, changes: Sequence[KeyChange[MeshModel]]) -> None:
        for change in changes:
            id = change.key
            route = self.routes.get(id)
            if route is None and id not in self.local.held:
                self.routes.is_known(id)
                if change.old is None and self.ground.linking(id):
                    self._link_again()
                continue
            record = change.after
            if record is None:
                if change.new is None:
                    self._forget(id)
                continue
            if id in self.local.held:
                self._check_mine(record)
            if route is not None and route.served and now_ms() - route.used_ms < WIDEN_MS:
                self._widen(route, record)

    def _forget(self, id: str) -> None:
        """It is registered no more: who waits for it is told, and what it takes here is given
        back."""
        route = self.routes.forget(id)
        self.supply.forget(id)
        if route is not None:
            self.ground.forget(route.question)
            if self.ground.linking(id):
                self._link_again()
        self.local.spawn(self.local.drop(id, "it was unregistered"))

    def _link_again(self) -> None:
        """A model has come or gone that applications ask."""
        self.local.spawn(self.run_away(self.ground.link_again))

    def _check_mine(self, record: MeshModel) -> None:
        held = self.local.held[record.id]
        if self._id not in record.copies and not self.registry.is_fenced:
            self.local.spawn(self._reclaim(record.id))
        if held.record.policy != record.policy:
            self.local.residents.pin(record.id, record.policy.pinned)
        held.record = record

    def _widen(self, route: Route, record: MeshModel) -> None:
        lenders = {i.id for i in self.instances() if i.number in route.lenders}
        if set(record.loaded) - lenders:
            self.local.spawn(self.supply.widen(route, record, lenders))

    def _vmodels_changed(self, changes: Sequence[KeyChange[VModel]]) -> None:
        for change in changes:
            self.follow_vmodel(change.key)
        self.let_go_later(changes)
        self.vmodels_moved()

    def follow_vmodel(self, id: str) -> None:
        """Queries go by what the mirror says of it now, and never again by what it said before.
        Threads: any."""
        with self._following:
            vmodel = self.registry.vmodels.get(id)
            self.routes.alias(id, None if vmodel is None else alias_of(vmodel))

    def _instances_changed(self, changes: Sequence[KeyChange[Instance]]) -> None:
        for change in changes:
            if change.new is None and change.key != self._id:
                self.peers.forget(change.key)
                if (gone := change.before) is not None:
                    self._bury(gone)

    def _bury(self, gone: Instance) -> None:
        """It is dead, or cut off, or hung: what was sent to its copies is sent to others."""
        lost = [route.id for route in self.routes if gone.number in route.lenders]
        _log.warning("instance %s is gone, which served %d models here", gone.id, len(lost))
        for id in lost:
            self.ground.disconnect(VersionedModel(id, MESH_VERSION), gone.number)

    async def _reclaim(self, id: str) -> None:
        """Others took this node for dead, and its copy with it: it counts again, unless there are
        copies enough by now."""
        resident = self.local.residents.get(id)
        if id not in self.local.held or resident is None:
            return
        size, me = resident.size_bytes, self._id

        def step(model: MeshModel, alive: Container[object]) -> MeshModel | claims.Refused:
            copies = max(1, model.policy.copies_min)
            found = claims.claimed(
                model,
                me,
                now_ms(),
                alive=alive,
                copies=copies,
                settings=self.settings,
                size_bytes=size,
            )
            return (
                found
                if isinstance(found, claims.Refused)
                else claims.completed(found, me, now_ms(), size_bytes=size)
            )

        try:
            found = await self.run_away(self.registry.change_copies, id, step)
        except ClipperError:
            return
        if isinstance(found, claims.Refused) and id in self.local.held and not found.final:
            await self.local.drop(id, f"its claim was gone: {found.why}")

    # -- this node's record

    def here(self) -> Instance:
        settings, local = self.settings, self.local
        return Instance(
            self._id,
            self.number,
            advertised(self.peers.address, settings.advertise),
            advertised(self.ground.address, settings.advertise),
            host=socket.gethostname(),
            labels=settings.labels,
            types=local.types,
            zone=settings.zone,
            version=VERSION,
            started_ms=self.started_ms,
            capacity_bytes=local.residents.capacity_bytes,
            used_bytes=local.residents.used_bytes,
            models=len(local.residents),
            lru_ms=local.residents.lru_ms(now_ms()),
            loading=local.loading,
            queued=len(local.queue),
            loading_max=local.loading_max,
            rate=self.rate,
            stopping=local.stopping,
        )


MakeHosts = Callable[[Mesh, Sequence[str]], Sequence[Any]]  # with these names


def _hosts(mesh: Mesh, names: Sequence[str]) -> list[Host]:
    settings = mesh.settings
    each_mib = settings.capacity_mib // settings.hosts

    def command(name: str) -> Callable[[str], Sequence[str]]:
        return lambda control: host_command(
            control, name, each_mib, settings.loading_max, settings.load_s, settings.runtimes
        )

    return [
        Host(
            name,
            mesh._folder,
            command(name),
            mesh._host_ready,
            mesh._host_lost,
            mesh._host_left,
            silence_s=settings.host_silence_s,
        )
        for name in names
    ]


def alias_of(vmodel: VModel) -> Alias:
    return Alias(vmodel.active, vmodel.target if vmodel.share else "", vmodel.share)


def advertised(address: str, host: str) -> str:
    """A TCP address as others reach it."""
    if not host or not address.startswith("tcp:"):
        return address
    return f"tcp:{host}:{address.rpartition(':')[2]}"
