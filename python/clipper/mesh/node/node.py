"""A node of the mesh, as `server.mesh`: the public face of the objects that do the work.

Slow work runs on one event loop in the thread `clipper-mesh`; calls that block on the store run
in a few more threads. Queries never come here: they wait in the queue of their model, and the
router reports the first one that finds no copy.
"""

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Final

from clipper.component import Health
from clipper.errors import ShuttingDown
from clipper.mesh.decision_log import DecisionLog
from clipper.mesh.node.deferred_join import DeferredJoin
from clipper.mesh.node.joined_node import JoinedNode
from clipper.mesh.node.platform import NodePlatform
from clipper.mesh.node.registry_watcher import alias_of
from clipper.mesh.node_host import NodeHost
from clipper.mesh.records import Instance, MeshModel, Policy
from clipper.mesh.registry import Registry, now_ms
from clipper.mesh.reports import (
    Explanation,
    Info,
    MeshEvent,
    MigrationProgress,
    ModelStatus,
    VModelRequest,
    VModelStatus,
)
from clipper.mesh.routing.lookups import Lookups
from clipper.mesh.routing.router import ModelRouter, Route, core_record
from clipper.metrics.stats import MeshStats
from clipper.options import refusing_unknown_keywords
from clipper.serving.models.containers import Seat
from clipper.serving.query.processor import ResolvedApplication
from clipper.settings.mesh import MeshSettings
from clipper.store import Store
from clipper.types import Model, VersionedModel

SILENT_S: Final = 3.0  # a store that has been silent for longer is not read for unknown names
FOREVER_S: Final = 1e9
NO_POLICY: Final = Policy()


def _never() -> bool:
    return False


@refusing_unknown_keywords
class MeshNode:
    """A node of the mesh: its operations; changes are visible on all nodes.

    Errors: UnknownModel, AlreadyExists, StillLinked, Forbidden, InvalidInput, Overloaded,
    DeadlineExceeded, StoreError.

    platform: what it runs on. Threads: any, except the node's own thread `clipper-mesh`, which may
    not wait for itself.
    """

    def __init__(
        self,
        settings: MeshSettings,
        store: Store,
        host: NodeHost,
        folder: Path,
        platform: NodePlatform,
    ) -> None:
        self._platform = platform
        self._settings, self._store, self._host, self._folder = settings, store, host, folder
        self.instance = (
            settings.name or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        )
        self._number = 0  # no other node has had it; 0: not known yet
        self._started_ms = now_ms()
        self._loop = platform.new_loop()
        self._log = DecisionLog()
        self._lookups = Lookups(self._find_in_store, platform.lookup_pool)
        self.router = ModelRouter(
            host,
            self._find_record,
            self._on_miss,
            host.batching,
            platform.rng,
            replaced=self._on_replaced,
            lookup=self._lookup,
            is_failing=self._is_failing,
            now_s=store.threads.now_s,
            check_load=self._check_load,
            stage=self._stage,
            check_type=self._check_type,
        )
        self._deferred = DeferredJoin(
            self.instance, store.name, settings.enter_s, self._loop, self._join, self._has_joined
        )
        self._life = asyncio.Lock()  # held while the node joins or leaves
        self._leaves = asyncio.Event()
        self._joined: JoinedNode | None = None

    # -- life

    def start(self) -> "MeshNode":
        """Join the mesh; return when models can be loaded here. StoreError, AlreadyExists.

        Model hosts that are not ready within their time are still waited for, in the background.
        """
        self._start_threads()
        self._loop.run(self._join())
        return self

    def start_late(self) -> None:
        """Start without the store, which is away; `enter` joins the mesh once it is there."""
        self._start_threads()
        self._deferred.start()

    def enter(self) -> None:
        """Join the mesh after `start_late`: the store is there. Does nothing once it has joined.

        Returns when models can be loaded here, or when the node has given up. StoreError when the
        store is away again, ShuttingDown when the node is closed meanwhile.
        """
        if self._deferred.store_is_back():
            self._host.link_again()

    def _start_threads(self) -> None:
        self._loop.start()
        self._lookups.start()

    def close(self) -> None:
        """Leave the mesh. Idempotent."""
        if self._loop.stopping:
            return
        with contextlib.ExitStack() as stack:  # each also when another fails
            stack.callback(self._loop.close)
            stack.callback(self._lookups.close)
            if self._joined is not None:
                stack.callback(self._joined.registry.close)
            stack.callback(self._loop.stop, self._leave)

    def health(self) -> list[Health]:
        """Return the state of the node's threads."""
        return [*self._loop.health(), *self._lookups.health()]

    async def _join(self) -> None:
        """Join the mesh. On an error, or when the node is closed meanwhile, undo all of it."""
        async with self._life, contextlib.AsyncExitStack() as undo:
            self._check_not_stopping()
            blocking = self._loop.run_blocking
            registry = await blocking(Registry, self._store, self._settings)
            undo.push_async_callback(blocking, registry.close)
            self._number = self._number or await blocking(registry.number)
            joined = JoinedNode(
                self.instance,
                self._number,
                self._started_ms,
                self._settings,
                registry,
                await blocking(registry.token),
                self.router,
                self._host,
                self._loop,
                self._log,
                self._folder,
                self._platform,
            )
            undo.push_async_callback(joined.stop_hosts)
            await joined.start_hosts(self._leaves)
            self._check_not_stopping()
            undo.push_async_callback(joined.registration.leave)
            await joined.registration.enter()
            undo.pop_all()
            joined.watch_registry()
            self._joined = joined
            joined.periodic.start()

    def _check_not_stopping(self) -> None:
        if self._loop.stopping:
            raise ShuttingDown(
                "this node is closed.", hint="Start another with clipper.start(mesh=True)."
            )

    async def _leave(self) -> None:
        self._leaves.set()
        async with self._life:
            if self._joined is not None:
                await self._joined.leave()

    def _has_joined(self) -> bool:
        return self._joined is not None

    @property
    def joined(self) -> JoinedNode:
        """The parts of a node that has joined the mesh. StoreError while it waits for its store.

        ShuttingDown when it is closed without having joined.
        """
        if self._joined is None:
            self._deferred.check()
            raise ShuttingDown(
                "this node is not in the mesh.", hint="Start another with clipper.start(mesh=True)."
            )
        return self._joined

    def _open(self) -> JoinedNode:
        """Return `joined`. ShuttingDown also when the node is closed after it has joined."""
        joined = self.joined
        if self._loop.stopping:
            raise ShuttingDown(
                "this node is not in the mesh.", hint="Start another with clipper.start(mesh=True)."
            )
        return joined

    @property
    def awaits(self) -> str:
        """Return what the node waits for before it joins; empty once it has joined."""
        return self._deferred.awaits

    @property
    def given_up(self) -> str:
        """Return why the node gave up to join after `start_late`; empty unless it did."""
        return self._deferred.given_up

    # -- queries

    def application(self, name: str) -> ResolvedApplication | None:
        """Return the resolved application for a query; None when the mesh has no such model.

        Counts as a use of the model. Takes at most 10 us for a model that was used before.
        """
        return self.router.application(name)

    def resolve(self, name: str) -> Route | None:
        """Return the route of a model, for an application that uses it; None for other names."""
        found = self.router.resolve(name) if self._has_joined() else None
        return found if found is not None and found.id == name else None

    def seat(self, name: str, version: int, input: str, output: str = "any") -> Seat | None:
        """Return where a replica with rows of type `input` is attached; None: not of the mesh."""
        return self.router.seat(name, version, input, output)

    def on_replicas_changed(self, id: VersionedModel) -> bool:
        """Notice that replicas have connected or disconnected. False: it is not of the
        mesh."""
        return self._joined is not None and self._joined.replicas.on_replicas_changed(id)

    def _record(self, id: str) -> MeshModel | None:
        joined = self._joined
        return None if joined is None else joined.registry.models.get(id)

    def _find_record(self, id: str) -> Model | None:
        record = self._record(id)
        return None if record is None else core_record(id, record.input, record.output)

    def _is_failing(self, id: str) -> bool:
        record = self._record(id)
        return record is not None and bool(record.failures)

    def _check_load(self, id: str, deadline_ms: float | None) -> None:
        if self._joined is not None:
            self._joined.admission.check(id, deadline_ms)

    def _stage(self, id: str) -> str:
        return "no load of it runs here" if self._joined is None else self._joined.loader.stage(id)

    def _lookup(self, id: str) -> None:
        """Look up a name that the mirrors do not know in the store, unless that is silent."""
        if self._joined is None:
            self._deferred.check()
        elif self._joined.registry.models.stale_s < SILENT_S:
            self._lookups.lookup(id)

    def _find_in_store(self, id: str) -> None:
        registry = self.joined.registry
        record = registry.read(id)
        if record is not None:
            self.router.add(core_record(id, record.input, record.output))
        elif (vmodel := registry.read_vmodel(id)) is not None:
            self.router.set_alias(id, alias_of(vmodel))

    def _on_miss(self, route: Route) -> None:
        if self._joined is not None:
            self._loop.call(self._joined.copies.miss, route)

    def _check_type(self, route: Route) -> None:
        if self._joined is not None:
            self._joined.replicas.check_row_type(route)

    def _on_replaced(self, route: Route) -> None:
        """Fail the queries in the replaced queue, and give applications the new one."""
        self._host.close(route.resolved, FOREVER_S)
        if self._joined is not None:
            self._loop.call(self._joined.watcher.resolve_applications, route.id)

    # -- operations

    def drain(
        self, progress: Callable[[MigrationProgress], None] | None = None
    ) -> MigrationProgress:
        """Refuse new models and have other nodes load those used lately, within `mesh.drain_s`.

        Models that were moved are evicted here; the others stay until `close`.
        """
        return self._loop.run(self._open().drain.run(progress or (lambda _: None)))

    def drain_for_good(self) -> None:
        """Drain a node that is about to close; does nothing unless it has joined."""
        if self._joined is not None and not self._loop.stopping:
            self._loop.run(self._joined.drain.run(lambda _: None))

    @property
    def other_history(self) -> str:
        """Return why the content of the store is not used; empty if it is, or before the node
        joined.
        """
        return "" if self._joined is None else self._joined.registry.other_history

    def take_store(self, *, restore: bool) -> int:
        """Accept a store that has lost its history; return how many records were written.

        restore: write the records that this node remembers and the store lacks; without it, those
        models and v-models are unregistered on all nodes. Does nothing to a store with its
        history.
        """
        if self._joined is None:  # it has taken in nothing yet
            return 0
        registry = self._open().registry
        return registry.take_store(restore) if registry.has_other_history() else 0

    def register(
        self,
        id: str,
        path: str,
        type: str = "",
        key: str = "",
        *,
        input: str = "",
        output: str = "",
        load_now: bool = False,
        sync: bool = False,
        used_ms: int = 0,
        policy: Policy = NO_POLICY,
        owner: str = "",
    ) -> ModelStatus:
        """Register a model; the same registration again has no effect.

        type: from the path when empty. sync: with load_now, wait until it is loaded or has failed.
        used_ms: last use, wall clock; 0: hours ago, so that a model without queries evicts none
        that is in use. AlreadyExists when it differs.
        """
        info = Info(path, type, key, input, output, policy)
        return self._open().models.register(
            id, info, load_now=load_now, sync=sync, used_ms=used_ms, owner=owner
        )

    def unregister(self, id: str) -> None:
        """Unregister a model; its copies are unloaded later. No error if it does not exist.

        StillLinked while a v-model or an application names it.
        """
        self._open().models.unregister(id)

    def status(self, id: str) -> ModelStatus:
        """Return the status of a model; NOT_FOUND is a status and no error."""
        return self._open().models.status(id)

    def ensure_loaded(self, id: str, *, sync: bool = False, used_ms: int = 0) -> ModelStatus:
        """Load a model unless it is loaded; counts as a use at `used_ms`, 0: now.

        UnknownModel.
        """
        return self._open().models.ensure_loaded(id, sync=sync, used_ms=used_ms)

    def models(self, prefix: str = "", after: str = "", limit: int = 1000) -> list[ModelStatus]:
        """Return the status of models by id, after the id `after`."""
        return self._open().models.list(prefix, after, limit)

    def set_vmodel(
        self,
        id: str,
        target: str,
        *,
        owner: str = "",
        update_only: bool = False,
        model: Info | None = None,
        auto_delete: bool = False,
        load_now: bool = False,
        force: bool = False,
        sync: bool = False,
        expected: str = "",
        share: float = 0.0,
        give_up_s: float = 0.0,
    ) -> VModelStatus:
        """Make a v-model, or change its target.

        It switches when the target serves as well as the active model. model: registers the target.
        expected: only if this is its target now. Forbidden (another owner), StoreConflict
        (expected), UnknownModel, AlreadyExists.
        """
        request = VModelRequest(
            target,
            owner,
            update_only,
            model,
            auto_delete,
            load_now,
            force,
            sync,
            expected,
            share,
            give_up_s,
        )
        return self._open().vmodels.set(id, request)

    def delete_vmodel(self, id: str, owner: str = "") -> None:
        """Delete a v-model; no error if there is none. Forbidden for another owner's."""
        self._open().vmodels.delete(id, owner)

    def vmodel_status(self, id: str, owner: str = "") -> VModelStatus:
        """Return the status of a v-model; NOT_FOUND when absent, or another owner's."""
        return self._open().vmodels.status(id, owner)

    def rollback_vmodel(self, id: str) -> VModelStatus:
        """Switch back to the previous model; at once if that is loaded."""
        return self._open().vmodels.rollback(id)

    def vmodels(self, prefix: str = "", after: str = "", limit: int = 1000) -> list[VModelStatus]:
        """Return the status of v-models by id, after the id `after`."""
        return self._open().vmodels.list(prefix, after, limit)

    def instances(self) -> list[Instance]:
        """Return the nodes that are alive, by id."""
        return self.joined.registration.instances()

    def explain(self, id: str) -> Explanation:
        """Explain where a model is and why."""
        return self._open().explainer.explain(id)

    def watch(
        self, prefix: str = "", *, stop: Callable[[], bool] = _never
    ) -> Generator[MeshEvent, None, None]:
        """Yield the records whose ids start with `prefix`, then SYNC, then changes.

        Ends when this node stops or `stop()` returns True.
        """
        yield from self._open().events.watch(prefix, stop)

    def stats(self) -> MeshStats:
        """Return counters and gauges of this node, never one for each model.

        Before the node has joined there are only `instance` and `awaits`.
        """
        if self._joined is None:
            return {"instance": self.instance, "awaits": self.awaits}
        return self._joined.stats()
