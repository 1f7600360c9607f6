"""A simulated node: the mesh's own decisions, with effects that are events on a virtual clock.

Sockets and processes of a real node are delays and function calls here.
"""

from collections.abc import Collection
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Final

from msgspec import structs

from bench.mesh_simulator.world import Change, Mirror, Query
from clipper.mesh.decisions import claims, maintenance, placement
from clipper.mesh.decisions.claims import ClaimRefused
from clipper.mesh.decisions.load_queue import LoadQueue, LoadTimes, QueuedLoad
from clipper.mesh.decisions.model_cache import Eviction, ModelCache
from clipper.mesh.decisions.usage import Usage, UsageCounter
from clipper.mesh.records import Instance, MeshModel

if TYPE_CHECKING:
    from bench.mesh_simulator.simulation import Simulation

HOPS_MAX: Final = 8
AGAIN_MS: Final = 500  # a query that waits looks again, whatever it hears


class Node:
    """One node. Threads: one."""

    def __init__(self, world: "Simulation", number: int, mirror: Mirror) -> None:
        self.world, self.number, self.mirror = world, number, mirror
        self.id = f"i{number:04}"
        self.zone = f"z{number % 3}"
        self.rng = Random(world.plan.seed * 7919 + number)
        plan = world.plan
        self.residents = ModelCache(plan.capacity_bytes, churn_ms=plan.churn_ms)
        self.queue = LoadQueue()
        self.loading: dict[str, int] = {}
        self.askers: dict[str, dict[str, None]] = {}  # in the order in which they asked
        self.claiming: set[str] = set()
        self.times = LoadTimes()
        self.uses = UsageCounter()
        self.waiting: dict[str, list[Query]] = {}
        self.tried: dict[str, set[str]] = {}
        self.busy: dict[str, float] = {}
        self.told = Instance(self.id, self.number, "", "")
        self.told_ms = 0
        self.served = 0
        self.rate = 0.0

    # -- queries

    def ask(self, query: Query) -> None:
        """Answer a query from a copy, or wait for one."""
        if query.ended_ms >= 0:
            return
        model = self.mirror.read(query.model)
        holders = model.copies and claims.loaded_copies(model, self.mirror.field)
        if not holders:
            self._wait(query)
            return
        if query.hops >= HOPS_MAX:
            self._look_later(query)
            return
        query.hops += 1
        nodes = self.world.nodes
        holder = nodes[holders[0]]
        if len(holders) > 1:
            first, second = self.rng.sample(holders, 2)
            calm = nodes[first].busy.get(query.model, 0.0) <= nodes[second].busy.get(
                query.model, 0.0
            )
            holder = nodes[first if calm else second]
        if not holder.serve(query):  # it is not there any longer: ask when the registry says so
            self.world.clock.after(2 * self.world.plan.lag_ms + 1, self.ask, query)

    def _look_later(self, query: Query) -> None:
        """Retry a query whose known holders do not have the model any more."""
        query.hops = 0
        self._bound(query, "not found where it was said to be")
        self.world.clock.after(AGAIN_MS, self.ask, query)

    def _bound(self, query: Query, why: str) -> None:
        """Start the query's wait, at most until its deadline."""
        if not query.missed:
            query.missed = True
            self.world.clock.at(query.deadline_ms, self.world.refuse, query, why)

    def _is_loaded(self, model: str) -> bool:
        return bool(claims.loaded_copies(self.mirror.read(model), self.mirror.field))

    def serve(self, query: Query) -> bool:
        """Answer a query as a holder. Returns False if the model is not here."""
        held = self.residents.get(query.model)
        if held is None or held.loading:
            return False
        now = self.world.clock.now_ms
        begin = max(float(now), self.busy.get(query.model, 0.0))
        end = begin + self.world.plan.service_ms
        self.busy[query.model] = end
        self.residents.touch(query.model, now)
        self.uses.note(
            query.model, now, waited_ms=begin - now, served_ms=self.world.plan.service_ms
        )
        self.served += 1
        if end > query.deadline_ms:
            self.world.clock.at(query.deadline_ms, self.world.refuse, query, "queued too long")
        else:
            self.world.clock.at(int(end), self.world.answered, query)
        return True

    def _wait(self, query: Query) -> None:
        id = query.model
        self._bound(query, "not loaded in time")
        held = self.waiting.setdefault(id, [])
        held.append(query)
        if len(held) == 1:
            self.mirror.wait(id, self.id, self.wake)
            self.tried[id] = set()
            self.place(id)

    def wake(self, id: str) -> None:
        """Retry waiting queries after the model's record has changed, or an instance has left."""
        queries = [query for query in self.waiting.get(id, ()) if query.ended_ms < 0]
        if not queries:
            self._stop_waiting(id)
        elif self._is_loaded(id):
            self._stop_waiting(id)
            for query in queries:
                self.ask(query)
        else:
            self.waiting[id] = queries
            self.place(id)

    def _stop_waiting(self, id: str) -> None:
        self.waiting.pop(id, None)
        self.tried.pop(id, None)
        self.mirror.wait_no_more(id, self.id)

    def place(self, id: str) -> None:
        """Choose an instance to load a model with waiting queries, unless one loads it."""
        if not any(query.ended_ms < 0 for query in self.waiting.get(id, ())):
            return
        model = self.mirror.read(id)
        if claims.alive_copies(model, self.mirror.field):
            self.world.clock.after(AGAIN_MS, self._look_again, id)
            return
        found = self._choose(model, self.tried[id])
        if isinstance(found, placement.NoPlacement):
            if not found.retry_ms:
                for query in self.waiting[id]:
                    self.world.refuse(query, "no instance can hold it")
                self._stop_waiting(id)
                return
            self.tried[id].clear()
            self.world.clock.after(min(found.retry_ms, AGAIN_MS), self._look_again, id)
            return
        self.tried[id].add(found.instance)
        self.world.clock.after(self.world.plan.hop_ms, self._send, id, found.instance, 1, True)

    def _look_again(self, id: str) -> None:
        if id in self.waiting:
            self.wake(id)

    def _choose(
        self, model: MeshModel, exclude: Collection[str]
    ) -> placement.Placement | placement.NoPlacement:
        size = model.size_bytes or self.world.size_of(model.id)
        found = placement.choose(
            model,
            self.mirror.field,
            self.world.clock.now_ms,
            self.rng,
            constraints={},
            seen=self.times,
            prefer_local=self.id,
            exclude=exclude,
            size_bytes=size,
        )
        if isinstance(found, placement.Placement):
            self.mirror.field.place(found.instance, size)
        return found

    # -- loads

    def add_copy(self, id: str, copies: int) -> None:
        """Load one more copy somewhere, until there are `copies`."""
        found = self._choose(self.mirror.read(id), ())
        if isinstance(found, placement.Placement):
            self.world.clock.after(
                self.world.plan.hop_ms, self._send, id, found.instance, copies, False
            )

    def _send(self, id: str, to: str, copies: int, waiting: bool) -> None:
        self.world.nodes[to].load(id, copies, waiting, self.id)

    def refused(self, id: str) -> None:
        """Choose another instance: the one that was asked cannot load the model."""
        if id in self.waiting:
            self.place(id)

    def load(self, id: str, copies: int, waiting: bool, asker: str) -> None:
        """Load a model that another node asked for."""
        now = self.world.clock.now_ms
        if id in self.queue:
            if waiting:
                self.queue.promote(id, now)
            self.askers[id][asker] = None
        elif id in self.residents or id in self.claiming:
            return  # its record says so, or soon will
        elif self.residents.capacity_bytes < self.world.size_of(id):
            self.world.nodes[asker].refused(id)
        else:
            self.claiming.add(id)
            self.askers[id] = {asker: None}
            self.world.claim(self, id, copies, partial(self._claimed, id, waiting))

    def _claimed(self, id: str, waiting: bool, result: MeshModel | ClaimRefused) -> None:
        self.claiming.discard(id)
        if isinstance(result, ClaimRefused):
            self._answer(id)
            return
        now = self.world.clock.now_ms
        load = QueuedLoad(id, result.used_ms, now, waiting, self.world.size_of(id))
        gone = self.queue.push(load)
        if gone is not None:
            self._give_up(gone.model)
        self.pump()

    def _answer(self, id: str) -> None:
        for asker in self.askers.pop(id, ()):
            self.world.clock.after(self.world.plan.hop_ms, self.world.nodes[asker].refused, id)

    def _give_up(self, id: str) -> None:
        """Drop a load whose claim was refused."""
        self.world.store.commit(
            id, lambda model: claims.released(model, self.id), lambda _: self._answer(id)
        )

    def pump(self) -> None:
        """Start loads while there are free loaders."""
        now, plan = self.world.clock.now_ms, self.world.plan
        while len(self.loading) < plan.loading_max and (load := self.queue.pop()) is not None:
            room = self.residents.room_for(load.size_bytes, load.used_ms, now, waiting=load.waiting)
            if not isinstance(room, Eviction):
                if load.waiting and not room.never and now - load.since_ms < plan.space_ms:
                    self.queue.push(load)
                    self.world.clock.after(AGAIN_MS // 5, self.pump)
                    return
                self._give_up(load.model)
                continue
            for gone in room.evict:
                self.evict(gone)
            self.loading[load.model] = now
            self.residents.add(
                load.model,
                load.size_bytes,
                max(load.used_ms, 1),
                now,
                loading=True,
                pinned=self._pinned(load.model),
            )
            self.world.count("loads")
            self.world.clock.after(self.world.load_ms(load.model), self._loaded, load.model)

    def _pinned(self, id: str) -> bool:
        return self.mirror.read(id).policy.pinned

    def evict(self, id: str) -> None:
        """Evict a copy to make room."""
        self.world.check(not self._pinned(id), f"{self.id} evicts {id}, which is pinned")
        self._drop(id)

    def _drop(self, id: str) -> None:
        held = self.residents.get(id)
        self.residents.remove(id)
        self.busy.pop(id, None)
        self.world.count("evictions")
        used_ms = held.used_ms if held else 0
        self._change(id, lambda model: claims.released(model, self.id, used_ms))

    def _loaded(self, id: str) -> None:
        """End a load."""
        now, size = self.world.clock.now_ms, self.world.size_of(id)
        took = now - self.loading.pop(id)
        self.residents.loaded(id, size, now_ms=now, cost_ms=took)
        self.times.add(self.mirror.read(id).type, took)
        self.askers.pop(id, None)
        self.world.store.commit(
            id,
            lambda model: claims.completed(model, self.id, now, size_bytes=size),
            partial(self._recorded, id),
        )
        self.pump()

    def _recorded(self, id: str, result: MeshModel | ClaimRefused) -> None:
        if isinstance(result, ClaimRefused):
            self.residents.remove(id)
            self._answer(id)

    # -- upkeep

    def record(self) -> Instance:
        """Return the record of this instance."""
        plan = self.world.plan
        return Instance(
            self.id,
            self.number,
            "",
            "",
            zone=self.zone,
            capacity_bytes=plan.capacity_bytes,
            used_bytes=self.residents.used_bytes,
            models=len(self.residents),
            lru_ms=self.residents.lru_ms(self.world.clock.now_ms),
            loading=len(self.loading),
            queued=len(self.queue),
            loading_max=plan.loading_max,
            rate=self.rate,
        )

    def publish(self, always: bool = False) -> None:
        """Write the record of this instance if it has changed enough."""
        now, record = self.world.clock.now_ms, self.record()
        if always or maintenance.worth_publishing(
            self.told, record, self.told_ms, now, self.world.plan.settings
        ):
            self.told, self.told_ms = record, now
            self.world.store.put_instance(record)

    def view(self, usage: dict[str, Usage] | None = None) -> maintenance.MeshView:
        """Return the view for maintenance decisions. usage: of a round of rates, which looks at
        nothing else.
        """
        resident = {
            id: (held.size_bytes, held.used_ms)
            for id, held in (self.residents.items() if usage is None else ())
            if not held.loading
        }
        pending = {*self.loading, *self.claiming, *(id for id in self.askers if id in self.queue)}
        mine = self.world.of_instance(self, resident, usage)
        return maintenance.MeshView(
            self.id, self.mirror.field, mine, resident, pending, usage or {}, seen=self.times
        )

    def look_at_rates(self) -> None:
        """Run the round of rates."""
        plan, now = self.world.plan, self.world.clock.now_ms
        self.rate = self.served * 60_000 / (1000 * plan.settings.rate_s)
        self.served = 0
        usage = self.world.together(self, self.uses.read(now))
        for action in maintenance.rates(self.view(usage), now, plan.settings):
            if isinstance(action, maintenance.LoadCopy):
                self.world.count("scaled up")
                self.add_copy(action.model, action.copies)

    def clean(self) -> None:
        """Run the janitor's round."""
        now = self.world.clock.now_ms
        for action in maintenance.janitor(self.view(), now, self.world.plan.settings):
            self.world.count(f"janitor: {type(action).__name__}")
            match action:
                case maintenance.RemoveClaim(instance, model):
                    self._change(model, partial(claims.released, me=instance))
                case maintenance.UnloadCopy(model, _, spare):
                    self._unload(model, spare)
                case maintenance.PublishUse(model, used_ms):
                    self._change(model, partial(structs.replace, used_ms=used_ms))
                case _:
                    self.world.check(False, f"{self.id}: {action}")

    def _change(self, id: str, change: Change) -> None:
        self.world.store.commit(id, change, lambda _: None)

    def _unload(self, id: str, spare: bool) -> None:
        if not spare:
            self._drop(id)
            return
        keep = partial(
            claims.released_if_spare, me=self.id, alive=self.world.store.instances, keep=1
        )

        def gone(result: MeshModel | ClaimRefused) -> None:
            if isinstance(result, MeshModel):
                self.residents.remove(id)
                self.world.count("scaled down")

        self.world.store.commit(id, keep, gone)
