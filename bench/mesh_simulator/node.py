"""A simulated node: the mesh's own decisions, with effects that are events on a virtual clock.

Sockets and processes of a real node are delays and function calls here.
"""

from collections.abc import Collection
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Final

from bench.mesh_simulator.world import Mirror, Query
from clipper.mesh.decisions import claims, failures, maintenance, placement
from clipper.mesh.decisions.claims import ClaimRefused
from clipper.mesh.decisions.load_queue import LoadQueue, LoadTimes, QueuedLoad
from clipper.mesh.decisions.model_cache import Eviction, ModelCache
from clipper.mesh.decisions.usage import Usage, UsageCounter
from clipper.mesh.decisions.vmodels import resolve
from clipper.mesh.records import Fault, Instance, MeshModel

if TYPE_CHECKING:
    from bench.mesh_simulator.simulation import Simulation

HOPS_MAX: Final = 8
AGAIN_MS: Final = 500  # a query that waits looks again, whatever it hears


class Node:
    """One node. An effect of an earlier epoch, before a restart, is ignored. Threads: one."""

    def __init__(self, world: "Simulation", number: int, mirror: Mirror) -> None:
        self.world, self.number, self.mirror = world, number, mirror
        self.id = f"i{number:04}"
        self.zone = f"z{number % 3}"
        self.rng = Random(world.plan.seed * 7919 + number)
        self.alive = False
        self.epoch = 0
        self.reset()

    def reset(self) -> None:
        """Set the state of a process that has just started."""
        plan = self.world.plan
        self.residents = ModelCache(plan.capacity_bytes, churn_ms=plan.churn_ms)
        self.queue = LoadQueue()
        self.loading: dict[str, int] = {}
        self.askers: dict[str, dict[str, None]] = {}  # in the order in which they asked
        self.claiming: set[str] = set()
        self.times = LoadTimes()
        self.uses = UsageCounter()
        self.quarantine = failures.Quarantine()
        self.waiting: dict[str, list[Query]] = {}
        self.tried: dict[str, set[str]] = {}
        self.unreachable: dict[str, int] = {}
        self.busy: dict[str, float] = {}
        self.told = Instance(self.id, self.number, "", "")
        self.told_ms = 0
        self.stopping = False
        self.served = 0
        self.rate = 0.0

    # -- queries

    def ask(self, query: Query) -> None:
        """Answer a query from a copy, or wait for one."""
        if query.ended_ms >= 0:
            return
        if not query.model:
            vmodel = self.mirror.vmodels.get(query.name)
            query.model = (
                query.name
                if vmodel is None
                else resolve(vmodel, self.rng.random(), self._is_loaded)
            )
        model = self.mirror.read(query.model)
        holders = model.copies and claims.loaded_copies(model, self.mirror.field)
        if holders and self.unreachable:
            holders = tuple(
                i for i in holders if self.unreachable.get(i, 0) <= self.world.clock.now_ms
            )
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
        if not self.world.reach(self, holder):
            self.unreachable[holder.id] = self.world.clock.now_ms + self.world.plan.lease_ms
            self.world.clock.after(self.world.plan.hop_ms, self.ask, query)
        elif not holder.serve(
            query
        ):  # it is not there any longer: ask again when the registry says so
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
            self.world.clock.at(int(end), self.world.answered, query, self, self.epoch)
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
        """Retry waiting queries: the model's record has changed, or an instance has gone."""
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
        now, plan = self.world.clock.now_ms, self.world.plan
        if not self.alive or not any(query.ended_ms < 0 for query in self.waiting.get(id, ())):
            return
        model = self.mirror.read(id)
        gone = {i for i, until in self.unreachable.items() if until > now}
        if claims.alive_copies(model, self.mirror.field).keys() - gone:
            self.world.clock.after(AGAIN_MS, self._look_again, id, self.epoch)
            return
        over = failures.verdict(model, now, plan.settings)
        if over is not None:
            for query in self.waiting[id]:
                self.world.refuse(query, f"loading failed: {over.why}")
            self._stop_waiting(id)
            return
        found = self._choose(model, self.tried[id] | gone)
        if isinstance(found, placement.NoPlacement):
            if not found.retry_ms:
                for query in self.waiting[id]:
                    self.world.refuse(query, "no instance can hold it")
                self._stop_waiting(id)
                return
            self.tried[id].clear()
            self.world.clock.after(min(found.retry_ms, AGAIN_MS), self._look_again, id, self.epoch)
            return
        self.tried[id].add(found.instance)
        self.world.clock.after(plan.hop_ms, self._send, id, found.instance, 1, True, self.epoch)

    def _look_again(self, id: str, epoch: int) -> None:
        if epoch == self.epoch and id in self.waiting:
            self.wake(id)

    def _choose(
        self, model: MeshModel, exclude: Collection[str]
    ) -> placement.Placement | placement.NoPlacement:
        now, plan = self.world.clock.now_ms, self.world.plan
        size = model.size_bytes or self.world.size_of(model.id)
        found = placement.choose(
            model,
            self.mirror.field,
            now,
            self.rng,
            constraints={},
            seen=self.times,
            prefer_local=self.id,
            exclude={*exclude, *failures.blocked(model, now, plan.settings)},
            avoid=self.quarantine.left_alone(now),
            size_bytes=size,
        )
        if isinstance(found, placement.Placement):
            self.world.laws.placed(
                self.world.nodes[found.instance],
                self.mirror,
                size,
                {*exclude, *model.failures},
                model,
            )
            self.mirror.field.place(found.instance, size)
        return found

    # -- loads

    def add_copy(self, id: str, copies: int) -> None:
        """Load one more copy somewhere, until there are `copies`."""
        model, gone = (
            self.mirror.read(id),
            {i for i, until in self.unreachable.items() if until > self.world.clock.now_ms},
        )
        found = self._choose(model, gone)
        if isinstance(found, placement.Placement):
            self.world.clock.after(
                self.world.plan.hop_ms, self._send, id, found.instance, copies, False, self.epoch
            )

    def _send(self, id: str, to: str, copies: int, waiting: bool, epoch: int) -> None:
        if epoch != self.epoch:
            return
        target = self.world.nodes[to]
        if not self.world.reach(self, target):
            self.unreachable[to] = self.world.clock.now_ms + self.world.plan.lease_ms
            self.refused(id)
        else:
            target.load(id, copies, waiting, self.id)

    def refused(self, id: str) -> None:
        """Choose another instance: the one that was asked cannot load the model."""
        if self.alive and id in self.waiting:
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
        elif self.stopping or self.residents.capacity_bytes < self.world.size_of(id):
            self.world.nodes[asker].refused(id)
        else:
            self.claiming.add(id)
            self.askers[id] = {asker: None}
            self.world.claim(
                self, id, copies, partial(self._claimed, id, waiting, self.epoch), self.still()
            )

    def still(self) -> "partial[bool]":
        """Return a function that returns whether this life of the node goes on."""
        return partial(self._lives, self.epoch)

    def _lives(self, epoch: int) -> bool:
        return self.alive and self.epoch == epoch

    def _claimed(
        self, id: str, waiting: bool, epoch: int, result: MeshModel | ClaimRefused
    ) -> None:
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
            self.id,
            id,
            lambda model: claims.released(model, self.id),
            lambda _: self._answer(id),
            self.still(),
        )

    def pump(self) -> None:
        """Start loads while there are free loaders."""
        now, plan = self.world.clock.now_ms, self.world.plan
        while len(self.loading) < plan.loading_max and (load := self.queue.pop()) is not None:
            room = self.residents.room_for(load.size_bytes, load.used_ms, now, waiting=load.waiting)
            if not isinstance(room, Eviction):
                if load.waiting and not room.never and now - load.since_ms < plan.space_ms:
                    self.queue.push(load)
                    self.world.clock.after(AGAIN_MS // 5, self._pump_again, self.epoch)
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
            self.world.clock.after(
                self.world.load_ms(load.model), self._loaded, load.model, self.epoch
            )

    def _pump_again(self, epoch: int) -> None:
        if epoch == self.epoch and self.alive:
            self.pump()

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
        self.world.store.commit(
            self.id,
            id,
            lambda model: claims.released(model, self.id, used_ms),
            lambda _: None,
            self.still(),
        )

    def _loaded(self, id: str, epoch: int) -> None:
        """End a load, successful or not."""
        if epoch != self.epoch or not self.alive:
            return
        now = self.world.clock.now_ms
        took = now - self.loading.pop(id)
        fault = self.world.fault_of(self, id)
        if fault is None:
            size = self.world.size_of(id)
            self.residents.loaded(id, size, now_ms=now, cost_ms=took)
            self.times.add(self.mirror.read(id).type, took)
            change = partial(_completed, self, now, size)
            self.askers.pop(id, None)
        else:
            self.residents.remove(id)
            change = partial(_failed, self.id, now, *fault)
        self.world.store.commit(
            self.id, id, change, partial(self._recorded, id, fault), self.still()
        )
        self.pump()

    def _recorded(
        self, id: str, fault: tuple[str, Fault] | None, result: MeshModel | ClaimRefused
    ) -> None:
        if isinstance(result, ClaimRefused):
            self.residents.remove(id)
        if fault is not None or isinstance(result, ClaimRefused):
            self._answer(id)
            if fault is not None:
                self.world.laws.failed(self, id, result)
                self.world.on_load_failed(self.id, id, fault[1])

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
            stopping=self.stopping,
        )

    def publish(self, always: bool = False) -> None:
        """Write the record of this instance if it has changed enough."""
        now, record = self.world.clock.now_ms, self.record()
        if not self.world.store.reachable(self.id):
            return
        if always or maintenance.worth_publishing(
            self.told, record, self.told_ms, now, self.world.plan.settings
        ):
            self.told, self.told_ms = record, now
            self.world.store.put_instance(record)

    def view(self, usage: dict[str, Usage] | None = None) -> maintenance.MeshView:
        """Return the view for maintenance decisions."""
        resident = {
            id: (held.size_bytes, held.used_ms)
            for id, held in self.residents.items()
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
        usage = self.world.together(self, self.uses.look(now))
        for action in maintenance.rates(self.view(usage), now, plan.settings):
            if isinstance(action, maintenance.LoadCopy):
                self.world.count("scaled up")
                self.add_copy(action.model, action.copies)

    def clean(self) -> None:
        """Run the janitor's round."""
        if not self.world.store.reachable(self.id):
            return
        now = self.world.clock.now_ms
        for action in maintenance.janitor(self.view(), now, self.world.plan.settings):
            self.world.count(f"janitor: {type(action).__name__}")
            match action:
                case maintenance.RemoveClaim(instance, model):
                    self._change(
                        model, lambda record, instance=instance: claims.released(record, instance)
                    )
                case maintenance.UnloadCopy(model, _, spare):
                    self._unload(model, spare)
                case maintenance.ExpireFailure(model):
                    self._change(
                        model,
                        lambda record: claims.without_failures(
                            record, now, self.world.plan.settings
                        ),
                    )
                case maintenance.PublishUse(model, used_ms):
                    self._change(
                        model,
                        lambda record, used_ms=used_ms: claims.changed(record, used_ms=used_ms),
                    )
                case _:
                    self.world.check(False, f"{self.id}: {action}")

    def _change(self, id: str, change: "partial[MeshModel] | object") -> None:
        self.world.store.commit(self.id, id, change, lambda _: None, self.still())  # type: ignore[arg-type]

    def _unload(self, id: str, spare: bool) -> None:
        if not spare:
            self._drop(id)
            return
        keep = partial(
            claims.released_if_spare, me=self.id, alive=self.world.store.instances, keep=1
        )

        def gone(result: MeshModel | ClaimRefused) -> None:
            if isinstance(result, MeshModel):
                self.world.laws.given_up(result)
                self.residents.remove(id)
                self.world.count("scaled down")

        self.world.store.commit(self.id, id, keep, gone, self.still())

    def drain(self) -> None:
        """Stop gracefully: other nodes load recently used models first."""
        self.stopping = True
        self.publish(always=True)
        for load in [self.queue.drop(id) for id in list(self.askers) if id in self.queue]:
            if load is not None:
                self._give_up(load.model)
        self._drain_on(
            self.epoch, self.world.clock.now_ms + int(1000 * self.world.plan.settings.drain_s)
        )

    def _drain_on(self, epoch: int, until_ms: int) -> None:
        if epoch != self.epoch:
            return
        moves = [
            move
            for move in maintenance.migration(self.view(), self.world.clock.now_ms)
            if move.wait
        ]
        if (
            not moves and not self.loading and not self.waiting
        ) or self.world.clock.now_ms >= until_ms:
            self.world.laws.left(self, self.world.clock.now_ms < until_ms)
            self.world.leave(self)
            return
        for move in moves:
            model = self.mirror.read(move.model)
            if not claims.alive_copies(model, self.mirror.field).keys() - {self.id}:
                self.add_copy(move.model, 2)
        self.world.clock.after(AGAIN_MS, self._drain_on, epoch, until_ms)


def _completed(
    node: Node, now_ms: int, size_bytes: int, model: MeshModel
) -> MeshModel | ClaimRefused:
    after = claims.completed(model, node.id, now_ms, size_bytes=size_bytes)
    node.world.laws.completed(node, model, after)
    return after


def _failed(
    me: str, now_ms: int, why: str, fault: Fault, model: MeshModel
) -> MeshModel | ClaimRefused:
    return claims.failed(model, me, now_ms, why=why, fault=fault)
