"""Execution of the actions that the maintenance decisions return (decisions/maintenance.py)."""

import asyncio
import logging
from collections.abc import Callable, Collection, Container

from msgspec.structs import replace

from clipper.errors import ClipperError
from clipper.mesh.decision_log import DecisionLog
from clipper.mesh.decisions import claims, maintenance
from clipper.mesh.loading.loader import ModelLoader
from clipper.mesh.node_loop import NodeLoop
from clipper.mesh.records import MeshModel
from clipper.mesh.registry import Registry, now_ms
from clipper.mesh.routing.copy_locator import CopyLocator
from clipper.mesh.tasks.registration import Registration
from clipper.mesh.transport.channel import RequestFailed
from clipper.settings.mesh import MeshSettings

_log = logging.getLogger(__name__)


class ActionExecutor:
    """Executes maintenance actions, one at a time. Threads: the event loop.

    step_vmodels: starts the v-model switcher.
    """

    def __init__(
        self,
        settings: MeshSettings,
        registry: Registry,
        loader: ModelLoader,
        copies: CopyLocator,
        registration: Registration,
        loop: NodeLoop,
        log: DecisionLog,
        step_vmodels: Callable[[], None],
    ) -> None:
        self._settings, self._registry, self._loader = settings, registry, loader
        self._copies, self._registration, self._loop = copies, registration, loop
        self._log, self._step_vmodels = log, step_vmodels

    async def execute(self, action: maintenance.Action) -> None:
        """Execute an action; errors are logged."""
        try:
            await self._execute(action)
        except (ClipperError, RequestFailed) as error:
            _log.info("the mesh could not %s: %s", action, error)

    async def _execute(self, action: maintenance.Action) -> None:
        loader = self._loader
        match action:
            case maintenance.LoadCopy(model, copies, why, _, used_ms):
                self._log.note(model, f"{copies} copies wanted", why)
                self.spawn_load(model, used_ms or now_ms(), copies)
            case maintenance.UnloadCopy(model, why, spare) if spare:
                await self._release_spare(model, why)
            case maintenance.UnloadCopy(model, why, _):
                if loader.held.get(model) and not loader.is_loading(model):
                    await loader.reclaim(model)
            case maintenance.RemoveClaim(instance, model, why, gone) if gone:
                self._log.note(model, f"{instance} forgotten", why)
                await self._loop.run_blocking(
                    self._registry.change_copies,
                    model,
                    lambda record, alive: claims.without_gone(record, instance, alive=alive),
                )
            case maintenance.RemoveClaim(instance, model, why):
                await self._forget(instance, model, why)
            case maintenance.ExpireFailure(model, _):
                await self._change(
                    model,
                    lambda record: claims.without_failures(record, now_ms(), self._settings),
                )
            case maintenance.PublishUse(model, used_ms):
                await self._change(
                    model,
                    lambda record: replace(record, used_ms=max(record.used_ms, used_ms)),
                )
            case maintenance.UnregisterUnnamed(model):
                if await self._loop.run_blocking(self._registry.unregister_unnamed, model):
                    self._log.note(model, "unregistered", "no v-model names it any more")
            case maintenance.StepVModel():
                self._step_vmodels()
            case maintenance.BadRecord(key, why):
                _log.error("the mesh's record %r cannot be used: %s", key, why)

    async def _forget(self, instance: str, model: str, why: str) -> None:
        """Remove a claim as it is known here, unless there is another one by then."""
        known, loader = self._registry.models.get(model), self._loader
        claim = known.copies.get(instance) if known is not None else None

        def is_here() -> bool:
            return instance == loader.me and (model in loader.held or loader.is_loading(model))

        def step(record: MeshModel) -> MeshModel:
            is_same = record.copies.get(instance) == claim and not is_here()
            return claims.released(record, instance) if is_same else record

        if not is_here():
            self._log.note(model, f"{instance} forgotten", why)
            await self._change(model, step)

    async def _change(self, model: str, step: Callable[[MeshModel], MeshModel]) -> None:
        await self._loop.run_blocking(self._registry.change, model, step)

    def load_elsewhere(self, record: MeshModel, used_ms: int) -> None:
        """Load an evicted model on another node that has memory for it."""
        instances = self._registration.instances()
        me = self._registration.id
        load = maintenance.evicted(record, me, instances, now_ms(), self._settings)
        if load is not None and not self._loop.stopping:
            self._log.note(load.model, "wanted elsewhere", load.why)
            self.spawn_load(load.model, used_ms, load.copies, {me})

    def spawn_load(
        self, model: str, used_ms: int, copies: int, exclude: Collection[str] = ()
    ) -> "asyncio.Task[None]":
        """Start a task that loads copies until there are `copies`; failures are noted."""
        return self._loop.tasks.spawn(self._load(model, used_ms, copies, exclude))

    async def _load(self, model: str, used_ms: int, copies: int, exclude: Collection[str]) -> None:
        limit_s = self._settings.load_s * 2
        try:
            await self._copies.load(model, used_ms, copies=copies, until_s=limit_s, exclude=exclude)
        except (RequestFailed, ClipperError, TimeoutError) as error:
            self._log.note(model, "no further copy", str(error))

    async def _release_spare(self, model: str, why: str) -> None:
        """Give up this node's copy while enough others are loaded."""
        me = self._loader.me
        resident = self._loader.cache.get(model)
        used_ms = resident.used_ms if resident else 0

        def step(record: MeshModel, alive: Container[object]) -> MeshModel | claims.ClaimRefused:
            keep = max(1, record.policy.copies_min)
            return claims.released_if_spare(record, me, alive=alive, keep=keep, used_ms=used_ms)

        found = await self._loop.run_blocking(self._registry.change_copies, model, step)
        if not isinstance(found, claims.ClaimRefused):
            await self._loader.drop(model, why)
