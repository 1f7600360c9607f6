"""A large mesh on virtual time: nodes that use the mesh's decisions, a store, queries by zipf.

Nothing fails here: `bench.node_simulator` has the faults. In large runs all nodes share one mirror
of the registry; in small ones each has its own, so that delays between them matter.
"""

import bisect
import itertools
import math
import zlib
from collections.abc import Callable, Iterator
from random import Random

from bench.mesh_simulator.node import Node
from bench.mesh_simulator.plan import START_MS, WAITS_MS, Plan, Report
from bench.mesh_simulator.world import Clock, Mirror, Query, Store, Then
from clipper.mesh.decisions import claims, maintenance
from clipper.mesh.decisions.usage import Usage, together
from clipper.mesh.records import MeshModel, Policy

__all__ = ["START_MS", "Plan", "Report", "Simulation"]


class Simulation:
    """A simulated mesh. Threads: one."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rng = Random(plan.seed)
        self.clock = Clock(START_MS)
        self.store = Store(self.clock, self.make, plan.commit_ms, plan.lag_ms)
        self.report = Report()
        self._sizes: dict[str, int] = {}
        self.waiting: set[Query] = set()
        self.usage: dict[str, dict[str, tuple[int, Usage]]] = {}
        self.by_instance: dict[str, set[str]] = {}
        shared = Mirror(self.make) if plan.shared_mirror else None
        self.nodes: dict[str, Node] = {}
        for number in range(plan.instances):
            node = Node(self, number, shared or Mirror(self.make))
            self.nodes[node.id] = node
            if not shared or not number:
                self.store.mirrors.append(node.mirror)
        self.entries = list(self.nodes.values())
        weights = itertools.accumulate((rank + 1) ** -plan.alpha for rank in range(plan.models))
        self._demand = list(weights)
        for node in self.nodes.values():
            self.start(node)
        self.step(2 * plan.lag_ms)
        self._start_world()

    def _start_world(self) -> None:
        plan = self.plan
        if plan.rate_per_s:
            self.clock.after(0, self._arrive, START_MS + 1000 * plan.seconds)
        if plan.upkeep:
            self.clock.after(1000, self._lead)

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
        policy = Policy(pinned=int(id[1:]) < self.plan.pinned)
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
        return int(least + each * self.size_of(id) / 1e6)

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
        gap = self.rng.expovariate(self.plan.rate_per_s / 1000)
        if self.clock.now_ms + gap < until_ms:
            self.clock.after(int(gap + self.rng.random()), self._arrive, until_ms)

    def query(self, model: str) -> Query:
        """Start a query now."""
        now = self.clock.now_ms
        query = Query(model, now, now + self.plan.deadline_ms)
        self.report.queries += 1
        self.waiting.add(query)
        self.entries[int(self.rng.random() * len(self.entries))].ask(query)
        return query

    def answered(self, query: Query) -> None:
        """End a query with an answer."""
        if query.ended_ms >= 0:
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
        if query.ended_ms < 0:
            self._end(query)
            query.why = why
            self.report.refused[why] += 1

    def _end(self, query: Query) -> None:
        query.ended_ms = self.clock.now_ms
        self.waiting.discard(query)
        late_ms = query.ended_ms - query.deadline_ms
        self.check(late_ms <= 0, f"{query.model} ended {late_ms} ms late")

    # -- upkeep

    def start(self, node: Node) -> None:
        """Start a node."""
        node.clean()
        node.publish(always=True)
        if self.plan.upkeep:
            settings, jitter = self.plan.settings, self.rng.random()
            for seconds, act in (
                (settings.publish_s, node.publish),
                (settings.rate_s, node.look_at_rates),
                (settings.janitor_s, node.clean),
            ):
                self.clock.after(int(1000 * seconds * jitter) + 1, self._every, seconds, act)

    def _every(self, seconds: float, act: Callable[[], None]) -> None:
        act()
        self.clock.after(int(1000 * seconds), self._every, seconds, act)

    def _lead(self) -> None:
        """Run the reaper at its period."""
        if (self.clock.now_ms - START_MS) % int(1000 * self.plan.settings.reaper_s) < 1000:
            self.reap(self.entries[0])
        self.clock.after(1000, self._lead)

    def reap(self, leader: Node) -> None:
        """Run the reaper's round."""
        models = self.store.models.values()
        kept = [(m.id, m) for m in models if m.copies or m.policy.pinned]
        waking = (m for m in models if not m.copies and m.used_ms)
        newest = sorted(waking, key=lambda m: -m.used_ms)[:1000]
        view = maintenance.MeshView(
            leader.id, leader.mirror.field, kept, read=self.store.read, waking=newest
        )
        for action in maintenance.reaper(view, self.clock.now_ms, self.plan.settings):
            self.count(f"reaper: {type(action).__name__}")
            match action:
                case maintenance.LoadCopy(model, copies):
                    leader.add_copy(model, copies)
                case _:
                    self.check(False, f"reaper: {action}")

    # -- claims, counts, checks

    def claim(self, node: Node, id: str, copies: int, then: Then) -> None:
        """Commit a claim and check the number of copies."""

        def change(model: MeshModel) -> MeshModel | claims.ClaimRefused:
            alive = self.store.instances
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
                self.by_instance.setdefault(node.id, set()).add(id)
            return after

        self.store.commit(id, change, then)

    def count(self, what: str) -> None:
        """Count an event."""
        self.report.counts[what] += 1

    def check(self, holds: bool, what: str) -> None:
        """Report a violation unless a condition holds."""
        if not holds and len(self.report.violations) < 20:
            self.report.violations.append(
                f"seed {self.plan.seed}, {self.clock.now_ms - START_MS} ms: {what}"
            )
