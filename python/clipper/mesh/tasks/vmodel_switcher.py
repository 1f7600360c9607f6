"""The leader's task that switches v-models to their targets once those serve as well."""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from random import Random
from typing import Final

from clipper.component import Backoff
from clipper.errors import StoreError, UnknownModel
from clipper.mesh.decision_log import DecisionLog
from clipper.mesh.decisions import maintenance, vmodels
from clipper.mesh.node_loop import NodeLoop
from clipper.mesh.records import MeshModel, VModel
from clipper.mesh.registry import Registry, now_ms
from clipper.mesh.tasks.actions import ActionExecutor
from clipper.mesh.tasks.election import Election
from clipper.mesh.tasks.state_view import StateView
from clipper.settings.mesh import MeshSettings
from clipper.store import KeyChange

STEP_S: Final = 0.05  # between two looks at v-models that are changing
AGAIN_S_MAX: Final = 5.0  # after errors
_log = logging.getLogger(__name__)


class VModelSwitcher:
    """Loads the targets of v-models and switches them. Threads: the event loop.

    random: draws the pauses after errors.
    """

    def __init__(
        self,
        settings: MeshSettings,
        registry: Registry,
        election: Election,
        view: StateView,
        actions: ActionExecutor,
        loop: NodeLoop,
        log: DecisionLog,
        random: Random,
    ) -> None:
        self._random = random
        self._settings, self._registry, self._election = settings, registry, election
        self._view, self._actions, self._loop, self._log = view, actions, loop, log
        self._task: asyncio.Task[None] | None = None

    def wake(self) -> None:
        """Run until all v-models are settled, if this node is the leader."""
        is_running = self._task is not None and not self._task.done()
        if self._election.is_leader and not is_running and not self._loop.stopping:
            again = Backoff(STEP_S, AGAIN_S_MAX, rng=self._random)
            self._task = self._loop.tasks.keep("clipper-mesh-vmodels", self._run, again)

    def remove_unnamed_later(self, changes: Sequence[KeyChange[VModel]]) -> None:
        """Unregister models that were to be deleted with the v-models that named them."""
        ids = set[str]().union(
            *(vmodels.named(change.before) - vmodels.named(change.after) for change in changes)
        )
        if ids:
            self._loop.call_later(
                vmodels.LINGER_MS / 1000, lambda: self._loop.tasks.spawn(self._remove(ids))
            )

    async def _remove(self, ids: Collection[str]) -> None:
        for id in ids:
            if self._election.is_leader and not self._loop.stopping:
                await self._actions.execute(maintenance.UnregisterUnnamed(id))

    async def _run(self) -> None:
        loads: dict[str, asyncio.Task[None]] = {}
        while self._election.is_leader and not self._loop.stopping:
            view, is_settled = self._view.take(), True
            for vmodel in self._registry.vmodels.values():
                if vmodel.active != vmodel.target:
                    step = maintenance.step_of(vmodel, view, now_ms(), self._settings)
                    is_settled &= isinstance(step, vmodels.NoStep) and step.settled
                    await self._execute(vmodel, step, loads)
            if is_settled:
                return
            await asyncio.sleep(STEP_S)

    async def _execute(
        self, vmodel: VModel, step: vmodels.VStep, loads: dict[str, "asyncio.Task[None]"]
    ) -> None:
        if isinstance(step, vmodels.LoadVModelTarget):
            task = loads.get(step.model)
            if task is None or task.done():
                self._log.note(step.model, f"target of {vmodel.id}", step.why)
                loads[step.model] = self._actions.spawn_load(step.model, now_ms(), step.copies)
        elif isinstance(step, vmodels.SwitchVModel | vmodels.FailVModel):
            await self._write(vmodel)

    async def _write(self, seen: VModel) -> None:
        """Write the next step of a v-model, unless it has changed since it was read.

        The step is decided again from the records that the transaction reads: the mirror may
        know a v-model before it knows the model that it names.
        """
        view = self._view.take()
        step: vmodels.VStep

        def decide(
            before: VModel | None, read: Callable[[str], MeshModel | None]
        ) -> vmodels.VChange:
            nonlocal step
            step = vmodels.NoStep("it has changed")
            if before is None or before != seen:
                return vmodels.VChange(before)
            step = maintenance.step_of(before, replace(view, read=read), now_ms(), self._settings)
            if isinstance(step, vmodels.SwitchVModel):
                return vmodels.switched(before, read, now_ms())
            if isinstance(step, vmodels.FailVModel):
                return vmodels.failed(before, step.why)
            return vmodels.VChange(before)

        try:
            await self._loop.run_blocking(
                self._registry.change_vmodel, seen.id, decide, self._election.candidate
            )
        except (StoreError, UnknownModel) as error:
            _log.info("v-model %r is not changed: %s", seen.id, error)
            return
        if isinstance(step, vmodels.SwitchVModel | vmodels.FailVModel):
            self._log.note(seen.target, f"{seen.id}: {type(step).__name__.lower()}", step.why)
