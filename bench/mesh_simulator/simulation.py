"""A mesh on virtual time: nodes that use the mesh's decisions, a store, queries by zipf, faults.

Invariants are checked as things happen; `settle` checks what must hold once faults have ended. The
report lists violations; the plan's seed reproduces them. In large runs all nodes share one mirror
of the registry; in small ones each has its own, so that delays between them matter.
"""

import bisect
import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from random import Random
from typing import Any

from bench.mesh_simulator.invariants import Laws
from bench.mesh_simulator.node import Node
from bench.mesh_simulator.plan import (
    START_MS,
    WAITS_MS,
    Fault,
    FaultKind,
    Plan,
    Report,
    some_faults,
)
from bench.mesh_simulator.world import Change, Clock, Mirror, Query, Store, Then
from clipper.errors import ClipperError
from clipper.mesh.decisions import claims, maintenance, vmodels
from clipper.mesh.decisions.usage import Usage, together
from clipper.mesh.records import Fault as LoadFault
from clipper.mesh.records import MeshModel, Policy, VModel

__all__ = ["START_MS", "Fault", "FaultKind", "Plan", "Report", "Simulation", "some_faults"]


class Simulation:
    """A simulated mesh. Call `run` and then `settle`; `step` may follow either.

    Threads: one.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rng = Random(plan.seed)
        self.clock = Clock(START_MS)
        self.store = Store(self.clock, self.make, plan.commit_ms, plan.lag_ms)
        self.report = Report()
        self.corrupt: set[int] = set()
        self._sizes: dict[str, int] = {}
        self.slow = 1.0
        self.split: set[str] = set()
        self.waiting: set[Query] = set()
        self.laws = Laws(self)
        self.usage: dict[str, dict[str, tuple[int, Usage]]] = {}
        self.by_instance: dict[str, set[str]] = {}
        shared = Mirror(self.make) if plan.shared_mirror else None
        self.nodes: dict[str, Node] = {}
        for number in range(plan.instances):
            node = Node(self, number, shared or Mirror(self.make))
            self.nodes[node.id] = node
            self.store.mirror(node.mirror, node.id)
        self.entries = list(self.nodes.values())
        weights = itertools.accumulate((rank + 1) ** -plan.alpha for rank in range(plan.models))
        self._demand = list(weights)
        for node in self.nodes.values():
            self.start(node)
        for n in range(plan.vmodels):
            self.set_vmodel(f"v{n:02}", self.name(n))
        self.step(2 * plan.lag_ms)
        self._start_world()

    def _start_world(self) -> None:
        plan = self.plan
        if plan.rate_per_s:
            self.clock.after(0, self._arrive, START_MS + 1000 * plan.seconds)
        if plan.vmodels and plan.switch_s:
            self.clock.after(int(1000 * plan.switch_s), self._switch_some)
        self.clock.after(1000, self._lead)
        for fault in plan.faults:
            self.clock.at(START_MS + fault.at_ms, self._fault, fault, True)
            self.clock.at(START_MS + fault.at_ms + fault.for_ms, self._fault, fault, False)

    def step(self, ms: float) -> None:
        """Advance the virtual time."""
        self.clock.run(self.clock.now_ms + int(ms))

    def run(self) -> Report:
        """Run to the end of the plan, and until the last query has ended."""
        self.clock.run(START_MS + int(1000 * self.plan.seconds) + self.plan.deadline_ms + 1)
        self.check(
            not self.waiting, f"{len(self.waiting)} queries have not ended by their deadlines"
        )
        self.report.events = self.clock.done
        return self.report

    # -- what there is

    def name(self, number: int) -> str:
        """Return the id of a model."""
        return f"m{number:07}"

    def make(self, id: str) -> MeshModel:
        """Return a model's record as it was registered."""
        number = int(id[1:])
        if number < self.plan.pinned:
            policy = Policy(pinned=True)
        elif number >= self.plan.models - self.plan.doubled:
            policy = Policy(copies_min=2)
        else:
            policy = Policy()
        return MeshModel(
            id,
            "onnx",
            path=f"models/{id}.onnx",
            policy=policy,
            registered_ms=START_MS,
            size_bytes=self.size_of(id),
        )

    def size_of(self, id: str) -> int:
        """Return a model's size: log-normal by its id, at most ten times the typical size."""
        if (held := self._sizes.get(id)) is not None:
            return held
        drawn = zlib.crc32(id.encode()) / 2**32
        second = zlib.crc32(id[::-1].encode()) / 2**32
        normal = math.sqrt(-2 * math.log(max(drawn, 1e-9))) * math.cos(2 * math.pi * second)
        size = min(
            max(int(self.plan.typical_bytes * math.exp(normal)), 100_000),
            10 * self.plan.typical_bytes,
        )
        self._sizes[id] = size
        return size

    def load_ms(self, id: str) -> int:
        """Return the duration of a load."""
        least, each = self.plan.load_ms
        return int(self.slow * (least + each * self.size_of(id) / 1e6))

    def fault_of(self, node: Node, id: str) -> tuple[str, LoadFault] | None:
        """Return the reason and fault if a load fails; None if it succeeds."""
        return ("the artifact is corrupt", "artifact") if int(id[1:]) % 17 in self.corrupt else None

    def reach(self, one: Node, other: Node) -> bool:
        """Return whether a message from one node reaches another."""
        return other.alive and (
            one is other or not (one.id in self.split or other.id in self.split)
        )

    def of_instance(
        self, node: Node, resident: dict[str, tuple[int, int]], usage: dict[str, Usage] | None
    ) -> Iterator[tuple[str, MeshModel]]:
        """Return the records that a round of rates, or the janitor, considers."""
        ids = usage if usage is not None else {*resident, *self.by_instance.get(node.id, ())}
        for id in sorted(ids):
            model = self.store.read(id) if usage is None else node.mirror.read(id)
            if usage is not None or node.id in model.copies or node.id in model.failures:
                yield id, model
            else:
                self.by_instance.get(node.id, set()).discard(id)

    def together(self, node: Node, mine: dict[str, Usage]) -> dict[str, Usage]:
        """Return the usage with the digests of other holders."""
        now, fresh = self.clock.now_ms, 2000 * self.plan.settings.rate_s
        found = {}
        for id, usage in mine.items():
            held = self.usage.setdefault(id, {})
            held[node.id] = (now, usage)
            found[id] = (
                usage
                if len(held) == 1
                else together(u for at, u in held.values() if now - at < fresh)
            )
        return found

    # -- queries

    def _arrive(self, until_ms: float) -> None:
        """Start a query and schedule the next one."""
        self.query(self.name(bisect.bisect(self._demand, self.rng.random() * self._demand[-1])))
        if self.plan.vmodels and self.rng.random() < 0.2:
            self.query(f"v{self.rng.randrange(self.plan.vmodels):02}")
        gap = self.rng.expovariate(self.plan.rate_per_s / 1000)
        if self.clock.now_ms + gap < until_ms:
            self.clock.after(int(gap + self.rng.random()), self._arrive, until_ms)

    def query(self, name: str, entry: Node | None = None) -> Query:
        """Start a query now."""
        now = self.clock.now_ms
        query = Query(name, now, now + self.plan.deadline_ms)
        self.report.queries += 1
        self.waiting.add(query)
        self.laws.asked(name)
        entry = entry or self._entry()
        if entry is None:
            self.refuse(query, "no instance lives")
        else:
            query.entry = entry.id
            entry.ask(query)
        return query

    def _entry(self) -> Node | None:
        for _ in range(8):
            node = self.entries[int(self.rng.random() * len(self.entries))]
            if node.alive and not node.stopping:
                return node
        return next((node for node in self.entries if node.alive and not node.stopping), None)

    def answered(self, query: Query, holder: Node, epoch: int) -> None:
        """End a query with an answer."""
        if query.ended_ms >= 0:
            return
        entry = self.nodes[query.entry]
        if holder.epoch != epoch or not self.reach(entry, holder):
            entry.unreachable[holder.id] = self.clock.now_ms + self.plan.lease_ms
            self.clock.after(self.plan.hop_ms, entry.ask, query)
            return
        self._end(query)
        self.report.answered += 1
        waited = self.clock.now_ms - query.born_ms
        if query.missed:
            self.report.waits[bisect.bisect_left(WAITS_MS, waited)] += 1
        else:
            self.report.hits += 1

    def refuse(self, query: Query, why: str) -> None:
        """End a query without an answer."""
        if query.ended_ms >= 0:
            return
        self._end(query)
        query.why = why
        self.report.refused[why] += 1
        if self.store.down and query.born_ms > self.store.down_until_ms - self._outage_ms:
            holders = [
                i
                for i, c in self.store.read(query.model).copies.items()
                if c.loaded_ms and self._could(query, i)
            ]
            self.check(
                not holders,
                f"{query.model} is in {holders}, and a query was refused while the store was away:"
                f" {why}",
            )

    _outage_ms = 0
    _settles = False

    def _could(self, query: Query, holder: str) -> bool:
        node, entry = self.nodes[holder], self.nodes[query.entry]
        held = node.residents.get(query.model)
        steady = held is not None and not held.loading and held.added_ms < query.born_ms
        return steady and entry.alive and entry.id not in self.store.cut and self.reach(entry, node)

    def _end(self, query: Query) -> None:
        query.ended_ms = self.clock.now_ms
        self.waiting.discard(query)
        self.check(
            query.ended_ms <= query.deadline_ms,
            f"{query.name} ended {query.ended_ms - query.deadline_ms} ms late",
        )

    # -- the life of nodes

    def start(self, node: Node) -> None:
        """Start a node as a process: copies that the registry lists for it are not there."""
        node.epoch += 1
        node.reset()
        node.alive = True
        if not self.plan.shared_mirror:
            node.mirror.waiters.clear()
            node.mirror.list_again(self.store)
        node.clean()
        node.publish(always=True)
        self.clock.after(self.plan.lease_ms // 3, self._keep, node, node.epoch)
        if self.plan.upkeep:
            settings = self.plan.settings
            jitter = self.rng.random()
            self.clock.after(
                int(1000 * settings.publish_s * jitter) + 1,
                self._every,
                settings.publish_s,
                node,
                "publish",
                node.epoch,
            )
            self.clock.after(
                int(1000 * settings.rate_s * jitter) + 1,
                self._every,
                settings.rate_s,
                node,
                "look_at_rates",
                node.epoch,
            )
            self.clock.after(
                int(1000 * settings.janitor_s * jitter) + 1,
                self._every,
                settings.janitor_s,
                node,
                "clean",
                node.epoch,
            )

    def _every(self, seconds: float, node: Node, what: str, epoch: int) -> None:
        if node.epoch == epoch and node.alive:
            getattr(node, what)()
            self.clock.after(int(1000 * seconds), self._every, seconds, node, what, epoch)

    def _keep(self, node: Node, epoch: int) -> None:
        """Renew the lease of a node; one that has lost it enters again when it can."""
        if node.epoch != epoch or not node.alive:
            return
        if self.store.reachable(node.id):
            node.told_ms = node.told_ms if node.id in self.store.instances else 0
            if node.id not in self.store.instances:
                node.clean()
                node.publish(always=True)
        elif not self.store.down:
            self._expire_later(node)
        self.clock.after(self.plan.lease_ms // 3, self._keep, node, epoch)

    def _expire_later(self, node: Node) -> None:
        self.clock.after(self.plan.lease_ms * 2 // 3, self._expire, node, node.epoch)

    def _expire(self, node: Node, epoch: int) -> None:
        if node.alive and node.epoch == epoch and self.store.reachable(node.id):
            return
        if node.alive and node.epoch != epoch:
            return
        if self.store.down:  # no lease ends while the store does not live
            self.clock.at(self.store.down_until_ms + self.plan.lease_ms, self._expire, node, epoch)
            return
        self.store.drop_instance(node.id)

    def kill(self, node: Node) -> None:
        """Kill a node; its clients ask other nodes."""
        if not node.alive:
            return
        node.alive = False
        node.epoch += 1
        self.clock.after(self.plan.lease_ms, self._expire, node, node.epoch)
        for id in list(node.waiting):
            node.mirror.wait_no_more(id, node.id)
        for query in sorted(
            (q for q in self.waiting if q.entry == node.id), key=lambda q: (q.born_ms, q.name)
        ):
            self._ask_elsewhere(query)

    def _ask_elsewhere(self, query: Query) -> None:
        entry = self._entry()
        if entry is None:
            self.refuse(query, "no instance lives")
            return
        query.entry = entry.id
        self.clock.after(self.plan.hop_ms, entry.ask, query)

    def leave(self, node: Node) -> None:
        """End a graceful stop."""
        if not self.store.reachable(node.id):
            self.clock.after(100, self.leave, node)
            return
        self.store.drop_instance(node.id)
        self.clock.after(4 * self.plan.lag_ms + 10 + int(self.plan.service_ms), self.kill, node)

    # -- faults

    def _fault(self, fault: Fault, begins: bool) -> None:
        node = list(self.nodes.values())[fault.number % len(self.nodes)]
        match fault.kind, begins:
            case "kill", True:
                self.kill(node)
            case "stop", True if node.alive and not node.stopping:
                node.drain()
            case (("kill" | "stop"), False):
                if node.alive and node.stopping:
                    self.clock.after(1000, self._fault, fault, False)
                elif not node.alive:
                    self.start(node)
            case "outage", True:
                self._outage_ms = fault.for_ms
                self.store.down_until_ms = max(
                    self.store.down_until_ms, self.clock.now_ms + fault.for_ms
                )
            case (("cut" | "split"), True):
                self.store.cut.add(node.id)
                if fault.kind == "split":
                    self.split.add(node.id)
            case (("cut" | "split"), False):
                self._heal(node)
            case "slow", _:
                self.slow = 10.0 if begins else 1.0
            case "corrupt", True:
                self.corrupt.add(fault.number % 17)
            case "corrupt", False:
                self.corrupt.discard(fault.number % 17)

    def _heal(self, node: Node) -> None:
        self.split.discard(node.id)
        self.store.cut.discard(node.id)
        if node.alive:
            node.mirror.list_again(self.store)
            node.unreachable.clear()
            node.clean()

    def on_load_failed(self, instance: str, model: str, fault: LoadFault) -> None:
        """Note a failed load, which all nodes see in the registry."""
        self.count(f"failed loads: {fault}")
        for node in self.nodes.values():
            if node.quarantine.failed(instance, model, fault, self.clock.now_ms):
                self.count("quarantines")

    # -- the leader

    def leader(self) -> Node | None:
        """Return the leader, if there is one."""
        return next(
            (
                n
                for n in self.nodes.values()
                if n.alive and self.store.reachable(n.id) and n.id in self.store.instances
            ),
            None,
        )

    def _lead(self) -> None:
        """Run the leader's second: v-models, and at its period the reaper."""
        leader, settings = self.leader(), self.plan.settings
        if leader is not None:
            for name in sorted(self.store.vmodels):
                vmodel = self.store.vmodels[name]
                if vmodel.active != vmodel.target:
                    view = maintenance.MeshView(
                        leader.id, leader.mirror.field, read=leader.mirror.read
                    )
                    self._do_step(
                        leader,
                        vmodel,
                        maintenance.step_of(vmodel, view, self.clock.now_ms, settings),
                    )
            if (
                self.plan.upkeep
                and (self.clock.now_ms - START_MS) % int(1000 * settings.reaper_s) < 1000
            ):
                self.reap(leader)
        self.clock.after(1000, self._lead)

    def reap(self, leader: Node) -> None:
        """Run the reaper's round."""
        now, settings = self.clock.now_ms, self.plan.settings
        kept = [
            (id, m)
            for id, m in self.store.models.items()
            if m.copies or m.failures or m.policy.pinned or m.policy.copies_min
        ]
        waking = (m for m in self.store.models.values() if not m.copies and m.used_ms)
        newest = sorted(waking, key=lambda m: -m.used_ms)[:1000] if self.plan.upkeep else []
        view = maintenance.MeshView(
            leader.id, leader.mirror.field, kept, read=self.store.read, waking=newest
        )
        for action in maintenance.reaper(view, now, settings):
            self.count(f"reaper: {type(action).__name__}")
            match action:
                case maintenance.RemoveClaim(instance, model):
                    self._change(leader, model, partial(claims.without, instance=instance))
                case maintenance.ExpireFailure(model):
                    self._change(
                        leader, model, lambda record: claims.without_failures(record, now, settings)
                    )
                case maintenance.LoadCopy(model, copies):
                    leader.add_copy(model, copies)
                case _:
                    self.check(False, f"reaper: {action}")

    def _change(self, node: Node, id: str, change: Change) -> None:
        self.store.commit(node.id, id, change, lambda _: None, node.still())

    def _do_step(self, leader: Node, vmodel: VModel, step: vmodels.VStep) -> None:
        match step:
            case vmodels.SwitchVModel() | vmodels.FailVModel():
                view = maintenance.MeshView(leader.id, leader.mirror.field, read=self.store.read)
                self._end_step(
                    vmodel, maintenance.step_of(vmodel, view, self.clock.now_ms, self.plan.settings)
                )
            case vmodels.LoadVModelTarget(model, copies):
                held = claims.alive_copies(self.store.read(model), self.store.instances)
                for _ in range(copies - len(held)):
                    leader.add_copy(model, copies)

    def _end_step(self, vmodel: VModel, step: vmodels.VStep) -> None:
        """Write a v-model's step if the transaction decides the same step."""
        if isinstance(step, vmodels.SwitchVModel):
            self._check_switch(vmodel)
            self._write(vmodel.id, vmodels.switched(vmodel, self.store.read, self.clock.now_ms))
            self.count("switches")
        elif isinstance(step, vmodels.FailVModel):
            self._write(vmodel.id, vmodels.failed(vmodel, step.why))
            self.count("failed switches")

    def _check_switch(self, vmodel: VModel) -> None:
        """Check that a switch loses no query: the target is loaded if the active model is.

        A holder that has just died is not known to have died.
        """
        active, target = self.store.read(vmodel.active), self.store.read(vmodel.target)
        had, has = (
            claims.loaded_copies(active, self.store.instances),
            claims.loaded_copies(target, self.store.instances),
        )
        self.check(
            vmodel.force or not had or bool(has),
            f"{vmodel.id} switches to {target.id}, which is not loaded",
        )

    def _write(self, id: str, change: vmodels.VChange) -> None:
        self.store.put_vmodel(change.vmodel, id)
        self.store.put_models(change.models)

    def set_vmodel(self, id: str, target: str, **told: Any) -> None:
        """Set the target of a v-model."""
        change = vmodels.set_target(
            id, self.store.vmodels.get(id), target, self.store.read, self.clock.now_ms, **told
        )
        self._write(id, change)

    def _switch_some(self) -> None:
        """Switch some v-models, from time to time."""
        if self._settles:
            return
        if self.leader() is not None:
            id = f"v{self.rng.randrange(self.plan.vmodels):02}"
            try:
                if self.rng.random() < 0.2:
                    self._write(
                        id,
                        vmodels.rollback(
                            self.store.vmodels[id], self.store.read, self.clock.now_ms
                        ),
                    )
                else:
                    self.set_vmodel(id, self.name(self.rng.randrange(min(self.plan.models, 40))))
            except ClipperError:
                self.count("refused switches")
        self.clock.after(int(1000 * self.plan.switch_s), self._switch_some)

    # -- claims, counts, checks

    def claim(
        self, node: Node, id: str, copies: int, then: Then, still: Callable[[], bool]
    ) -> None:
        """Commit a claim and check the number of copies."""

        def change(model: MeshModel) -> MeshModel | claims.ClaimRefused:
            alive = self.store.instances
            before = model
            after = claims.claimed(
                model,
                node.id,
                self.clock.now_ms,
                alive=alive,
                copies=copies,
                settings=self.plan.settings,
                size_bytes=self.size_of(id),
            )
            if isinstance(after, MeshModel):
                held = len(claims.alive_copies(after, alive))
                self.check(held <= copies, f"{id} has {held} copies, and {copies} were asked for")
                self.laws.claimed(node, before)
                self.by_instance.setdefault(node.id, set()).add(id)
            return after

        self.store.commit(node.id, id, change, then, still)

    def count(self, what: str) -> None:
        """Count an event."""
        self.report.counts[what] += 1

    def check(self, holds: bool, what: str) -> None:
        """Report a violation unless a condition holds."""
        if not holds and len(self.report.violations) < 20:
            self.report.violations.append(
                f"seed {self.plan.seed}, {self.clock.now_ms - START_MS} ms: {what}"
            )

    def settle(self, ids: Iterable[str] = ()) -> Report:
        """End all faults, restart dead nodes, and run janitor and reaper.

        Then check that memory and registry agree, and that each of the given models answers.
        """
        self._settles = True
        self.corrupt.clear()
        self.slow = 1.0
        self.store.down_until_ms = 0
        for node in self.nodes.values():
            self._heal(node)
            if not node.alive:
                self.start(node)
        self.step(4 * self.plan.lease_ms + 5000 + self.plan.deadline_ms)
        for _ in range(2):
            for node in self.nodes.values():
                node.clean()
            if leader := self.leader():
                self.reap(leader)
            self.step(20_000)
        self._agree()
        settings = self.plan.settings
        self.step(1000 * settings.failure_s)
        asked = [self.query(id) for id in ids]
        self.step(self.plan.deadline_ms + 1)
        for vmodel in self.store.vmodels.values():
            settled = vmodel.active == vmodel.target or vmodel.failed or vmodel.share
            self.check(
                bool(settled),
                f"{vmodel.id} is still on its way from {vmodel.active} to {vmodel.target}",
            )
        for query in asked:
            self.check(not query.why, f"{query.name} is lost: {query.why}")
        self.check(
            not self.waiting, f"{len(self.waiting)} queries have not ended by their deadlines"
        )
        return self.report

    def _agree(self) -> None:
        for node in self.nodes.values():
            self.check(
                node.residents.used_bytes <= self.plan.capacity_bytes,
                f"{node.id} holds more than its memory",
            )
            here = {id for id, held in node.residents.items() if not held.loading}
            told = {
                id
                for id, model in self.store.models.items()
                if node.id in model.copies and model.copies[node.id].loaded_ms
            }
            self.check(
                here == told,
                f"{node.id} holds {sorted(here - told)[:5]} untold, and has not"
                f" {sorted(told - here)[:5]}",
            )
        for model in self.store.models.values():
            gone = [instance for instance in model.copies if instance not in self.store.instances]
            self.check(not gone, f"{model.id} is said to be in {gone}, which are gone")
