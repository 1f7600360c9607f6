"""Execution of the maintenance decisions of the mesh (decisions/maintenance.py).

Rates and the janitor are every node's; the reaper and the v-models are the leader's, who was
elected in the store and writes only while it still stands there. Threads: all on the mesh's event
loop.
"""

import asyncio
import functools
import logging
from abc import abstractmethod
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from clipper.errors import ClipperError, StoreError, UnknownModel
from clipper.mesh.decisions import claims, maintenance, vmodels
from clipper.mesh.decisions.usage import Uses
from clipper.mesh.node.parts import Parts
from clipper.mesh.records import MeshModel, VModel
from clipper.mesh.registry import now_ms
from clipper.mesh.transport.channel import Failed
from clipper.store import Candidate, KeyChange

ELECTION: Final = "mesh"
WAKING_MAX: Final = 1000  # models that one round looks at for proactive loads
STEP_S: Final = 0.05  # between looks at v-models that are on their way
_log = logging.getLogger(__name__)


class Leading(Parts):
    _candidate: Candidate | None = None
    _stepping: "asyncio.Task[None] | None" = None
    uses: Uses
    seen: Mapping[str, int] = MappingProxyType({})  # of all models, when the leader last looked

    # -- elected

    async def _stand(self) -> None:
        """For election, with the lease of this life."""
        lease = self.registry.lease
        if lease is not None:
            self._candidate = await self.run_away(
                self.registry.store.elect, ELECTION, self._id.encode(), lease
            )
            self._candidate.on_change(
                lambda leads: self._tell(self.vmodels_moved) if leads else None
            )

    async def _resign(self) -> None:
        candidate, self._candidate = self._candidate, None
        if candidate is not None:
            await self.run_away(candidate.resign)

    @property
    def is_leader(self) -> bool:
        return self._candidate is not None and self._candidate.is_leader

    # -- looks

    def _view(self, mine: Any, usage: Any = None) -> maintenance.View:
        local = self.local
        resident = {
            id: (r.size_bytes, r.used_ms)
            for id in local.residents
            if (r := local.residents.get(id))
        }
        return maintenance.View(
            self._id,
            self.instances(),
            mine=mine,
            resident=resident,
            loading=[id for id in resident if local.is_loading(id)],
            usage=usage or {},
            read=self.registry.models.get,
            constraints=self.supply.constraints,
            seen=local.times,
        )

    async def _look_at_rates(self) -> None:
        """More copies of what is used much. Each model's holders look; the one that has held it
        longest acts."""
        usage = self.uses.look(now_ms())
        self.rate = sum(one.rate for one in usage.values())
        mine = [(id, record) for id in usage if (record := self._led_here(id)) is not None]
        for action in maintenance.rates(self._view(mine, usage), now_ms(), self.settings):
            await self._act(action)

    def _led_here(self, id: str) -> MeshModel | None:
        record: MeshModel | None = self.registry.models.get(id)
        alive = self.registry.alive()
        loaded = claims.loaded_copies(record, alive) if record is not None else ()
        return record if loaded and loaded[0] == self._id else None

    async def _clean(self) -> None:
        """The janitor's round."""
        if self.registry.is_fenced:
            return
        models = self.registry.models
        mine = [
            (m.id, m) for m in models.values() if self._id in m.copies or self._id in m.failures
        ]
        known = {id for id, _ in mine}
        mine += [
            (id, m)
            for id in self.local.held
            if id not in known and (m := models.get(id)) is not None
        ]
        usage = {id: self.uses.last(id, now_ms()) for id in self.local.held}
        for action in maintenance.janitor(self._view(mine, usage), now_ms(), self.settings):
            await self._act(action)

    async def _reap(self) -> None:
        """The leader's round."""
        if not self.is_leader or self.registry.is_fenced:
            return
        models = self.registry.models
        every = [
            (m.id, m)
            for m in models.values()
            if m.copies or m.failures or m.policy.copies_min or m.policy.pinned or m.auto_delete
        ]
        idle = sorted((m for m in models.values() if not m.copies), key=lambda m: -m.used_ms)[
            :WAKING_MAX
        ]
        loaded, failing = (
            sum(bool(m.loaded) for _, m in every),
            sum(bool(m.failures) for _, m in every),
        )
        self.seen = {"loaded_somewhere": loaded, "failing": failing}
        view = self._view(every)
        view = maintenance.View(
            view.me,
            view.instances,
            every,
            view.resident,
            view.loading,
            {},
            self.registry.vmodels.values(),
            models.get,
            idle,
            view.constraints,
            view.seen,
        )
        for action in maintenance.reaper(view, now_ms(), self.settings):
            if not self.is_leader:
                return
            await self._act(action)

    # -- what follows

    async def _act(self, action: maintenance.Action) -> None:
        try:
            await self._do_one(action)
        except (ClipperError, Failed) as error:
            _log.info("the mesh could not %s: %s", action, error)

    async def _do_one(self, action: maintenance.Action) -> None:
        change, local = self.registry.change, self.local
        match action:
            case maintenance.Load(model, copies, why, _, used_ms):
                self.notes.note(model, f"{copies} copies wanted", why)
                local.spawn(self._load_quietly(model, used_ms or now_ms(), copies))
            case maintenance.Unload(model, why, spare) if spare:
                await self._give_up_spare(model, why)
            case maintenance.Unload(model, why, _):
                if local.held.get(model) and not local.is_loading(model):
                    await self._reclaim(model)
            case maintenance.Forget(instance, model, why, gone) if gone:
                self.notes.note(model, f"{instance} forgotten", why)
                forget = functools.partial(claims.without_gone, instance=instance)
                await self.run_away(
                    self.registry.change_copies,
                    model,
                    lambda record, alive: forget(record, alive=alive),
                )
            case maintenance.Forget(instance, model, why):
                if instance != self._id or not (model in local.held or local.is_loading(model)):
                    self.notes.note(model, f"{instance} forgotten", why)
                    await self.run_away(
                        change, model, lambda record: claims.without(record, instance)
                    )
            case maintenance.ExpireFailure(model, _):
                await self.run_away(
                    change,
                    model,
                    lambda record: claims.without_failures(record, now_ms(), self.settings),
                )
            case maintenance.Publish(model, used_ms):
                await self.run_away(
                    change,
                    model,
                    lambda record: claims.changed(record, used_ms=max(record.used_ms, used_ms)),
                )
            case maintenance.LetGo(model):
                if await self.run_away(self.registry.let_go, model):
                    self.notes.note(model, "unregistered", "no v-model names it any more")
            case maintenance.StepVModel():
                self.vmodels_moved()
            case maintenance.Broken(key, why):
                _log.error("the mesh's record %r cannot be used: %s", key, why)

    def _paged_out(self, record: MeshModel, used_ms: int) -> None:
        """It made room for another; where others have room it is loaded there, before somebody
        asks."""
        load = maintenance.evicted(record, self._id, self.instances(), now_ms(), self.settings)
        if load is not None and not self._stopping:
            self.notes.note(load.model, "wanted elsewhere", load.why)
            self.local.spawn(self._load_quietly(load.model, used_ms, load.copies, {self._id}))

    async def _load_quietly(
        self, model: str, used_ms: int, copies: int, exclude: Collection[str] = ()
    ) -> None:
        try:
            await self.supply.load(
                model, used_ms, copies=copies, until_s=self.settings.load_s * 2, exclude=exclude
            )
        except (Failed, ClipperError, TimeoutError) as error:
            self.notes.note(model, "no further copy", str(error))

    async def _give_up_spare(self, model: str, why: str) -> None:
        me = self._id
        resident = self.local.residents.get(model)
        used_ms = resident.used_ms if resident else 0

        def step(record: MeshModel, alive: Container[object]) -> MeshModel | claims.Refused:
            return claims.released_if_spare(
                record, me, alive=alive, keep=max(1, record.policy.copies_min), used_ms=used_ms
            )

        found = await self.run_away(self.registry.change_copies, model, step)
        if not isinstance(found, claims.Refused):
            await self.local.drop(model, why)

    @abstractmethod
    async def _reclaim(self, id: str) -> None: ...

    # -- v-models

    def vmodels_moved(self) -> None:
        """One has been set, or may go on: the leader looks until all are settled."""
        if (
            self.is_leader
            and (self._stepping is None or self._stepping.done())
            and not self._stopping
        ):
            self._stepping = self.local.spawn(self._step_vmodels())

    def let_go_later(self, changes: Sequence[KeyChange[VModel]]) -> None:
        """Of models that were to go with these, where they have: before the reaper comes round."""
        ids = set[str]().union(
            *(vmodels.named(change.before) - vmodels.named(change.after) for change in changes)
        )
        if ids:
            self._loop.call_later(
                vmodels.LINGER_MS / 1000, lambda: self.local.spawn(self._let_go(ids))
            )

    async def _let_go(self, ids: Collection[str]) -> None:
        for id in ids:
            if self.is_leader and not self._stopping:
                await self._act(maintenance.LetGo(id))

    async def _step_vmodels(self) -> None:
        loads: dict[str, asyncio.Task[None]] = {}
        while self.is_leader and not self._stopping:
            view, unsettled = self._view(()), False
            for vmodel in self.registry.vmodels.values():
                if vmodel.active != vmodel.target:
                    step = maintenance.step_of(vmodel, view, now_ms(), self.settings)
                    unsettled |= not (isinstance(step, vmodels.Wait) and step.settled)
                    await self._step(vmodel, step, loads)
            if not unsettled:
                return
            await asyncio.sleep(STEP_S)

    async def _step(
        self, vmodel: VModel, step: vmodels.VStep, loads: dict[str, "asyncio.Task[None]"]
    ) -> None:
        if isinstance(step, vmodels.LoadTarget):
            task = loads.get(step.model)
            if task is None or task.done():
                self.notes.note(step.model, f"target of {vmodel.id}", step.why)
                work = self._load_quietly(step.model, now_ms(), step.copies)
                loads[step.model] = self.local.spawn(work)
        elif isinstance(step, vmodels.Switch | vmodels.Fail):
            await self._write_step(vmodel)

    async def _write_step(self, seen: VModel) -> None:
        """If it is still what the decision was made about; decided again on what the transaction
        reads, since the mirror may know of a v-model before it knows of its target."""
        view = self._view(())
        took: vmodels.VStep

        def decide(before: VModel | None, read: Any) -> vmodels.VChange:
            nonlocal took
            took = vmodels.Wait("it has moved")
            if before is None or before != seen:
                return vmodels.VChange(before)
            took = maintenance.step_of(before, replace(view, read=read), now_ms(), self.settings)
            if isinstance(took, vmodels.Switch):
                return vmodels.switched(before, read, now_ms())
            return (
                vmodels.failed(before, took.why)
                if isinstance(took, vmodels.Fail)
                else vmodels.VChange(before)
            )

        try:
            await self.run_away(self.registry.change_vmodel, seen.id, decide, self._candidate)
            if isinstance(took, vmodels.Switch | vmodels.Fail):
                self.notes.note(seen.target, f"{seen.id}: {type(took).__name__.lower()}", took.why)
        except (StoreError, UnknownModel) as error:
            _log.info("v-model %r is not moved: %s", seen.id, error)
