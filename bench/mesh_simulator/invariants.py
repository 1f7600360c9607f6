"""Invariants of a simulated mesh, checked from outside: by the store, memory and queries.

No check calls a decision of the mesh, so a wrong decision is noticed. Each invariant waits long
enough for the mesh to act, and counts only time in which a leader could act and the store was
there.
"""

from collections import Counter, deque
from typing import TYPE_CHECKING, Final

from bench.mesh_simulator.world import Mirror
from clipper.mesh.decisions.claims import ClaimRefused
from clipper.mesh.records import Failure, MeshModel

if TYPE_CHECKING:
    from bench.mesh_simulator.node import Node
    from bench.mesh_simulator.simulation import Simulation

LOOK_MS: Final = 1000
ROUNDS: Final = 2  # of the reaper or janitor, in which what is due must have been done
HOT: Final = 3.0  # times the rate of one copy, at which another must come
ROOM: Final = 0.25  # of its memory that is free: another node could have taken it
SWITCH_LOADS: Final = 12  # times the limit of a load, in which a name has switched or failed to
SEEN_WRONG: Final = (
    0.5  # of its memory, by which a node's record may differ from what it holds for a while
)
ARTIFACT_FAILURES: Final = (
    4  # of one model at once: two are enough to believe it, and a third may be on its way
)


class Laws:
    """Checks invariants and reports violations to the world. Threads: one."""

    def __init__(self, world: "Simulation") -> None:
        self._world = world
        self._due: Counter[tuple[str, str]] = (
            Counter()
        )  # (law, whom) -> ms for which it has not held
        self._asked: dict[str, deque[int]] = {}
        world.clock.after(LOOK_MS, self._look)

    def asked(self, model: str) -> None:
        """Note a query of a model."""
        self._asked.setdefault(model, deque(maxlen=4096)).append(self._world.clock.now_ms)

    def claimed(self, node: "Node", before: MeshModel) -> None:
        """Check a claim: not soon after the node failed to load the model."""
        failure, world = before.failures.get(node.id), self._world
        if failure is not None:
            left = failure.time_ms + self._block_ms(failure) - world.clock.now_ms
            world.check(left <= 0, f"{node.id} tries {before.id} again {left} ms too early")

    def completed(self, node: "Node", before: MeshModel, after: MeshModel | ClaimRefused) -> None:
        """Check a completed load: its copy counts only if it was claimed."""
        self._world.check(
            node.id in before.copies or isinstance(after, ClaimRefused),
            f"{node.id} holds {before.id} without a claim",
        )

    def failed(self, node: "Node", id: str, after: MeshModel | ClaimRefused) -> None:
        """Check a failed load: the record names the node."""
        recorded = isinstance(after, ClaimRefused) or node.id in after.failures
        self._world.check(recorded, f"nothing says that {node.id} failed to load {id}")

    def _block_ms(self, failure: Failure) -> int:
        longest = self._world.plan.settings.failure_s * 1000
        return int(
            longest
            if failure.fault == "artifact"
            else min(longest, longest / 60 * 2 ** (failure.count - 1))
        )

    def given_up(self, after: MeshModel) -> None:
        """Check that another copy exists after a spare one was released."""
        nodes = self._world.store.instances
        rest = [i for i, copy in after.copies.items() if copy.loaded_ms and i in nodes]
        self._world.check(bool(rest), f"the last copy of {after.id} was given up as a spare one")
        rate, most = self._rate(after), HOT * self._world.plan.settings.rate_per_copy
        self._world.check(
            rate <= most * max(len(rest), 1),
            f"a copy of {after.id} was given up at {rate:.0f} queries a minute",
        )

    def _rate(self, model: MeshModel) -> float:
        """Return the queries a minute, over three rounds of rates."""
        window_ms = int(3000 * self._world.plan.settings.rate_s)
        asked, now = self._asked.get(model.id, ()), self._world.clock.now_ms
        return sum(now - at < window_ms for at in asked) * 60_000 / window_ms

    def placed(
        self, node: "Node", mirror: Mirror, size_bytes: int, exclude: set[str], model: MeshModel
    ) -> None:
        """Check the choice of an instance for a copy.

        A first copy does not go to a full instance while another one is known to be nearly empty.
        Further copies go to other zones.
        """
        if model.copies:
            return
        field = {i.id: i for i in mirror.field}
        chosen = field.get(node.id)
        if chosen is None or chosen.free_bytes >= size_bytes:
            return
        empty = [
            i.id
            for i in field.values()
            if i.id not in exclude
            and not i.stopping
            and i.free_bytes > max(2 * size_bytes, ROOM * i.capacity_bytes)
        ]
        self._world.check(
            not empty, f"{model.id} goes to {node.id}, which is full, and {empty} are not"
        )

    def left(self, node: "Node", in_time: bool) -> None:
        """Check a graceful stop: recently used models that only it held are loaded elsewhere."""
        world = self._world
        others = [i for i in world.store.instances.values() if i.id != node.id and not i.stopping]
        if (
            not in_time
            or not others
            or not all(world.reach(node, world.nodes[i.id]) for i in others)
        ):
            return
        if (
            world.store.down
            or world.store.cut
            or min(i.free_bytes / i.capacity_bytes for i in others) < ROOM
        ):
            return
        now = world.clock.now_ms
        used = [
            id
            for id, held in node.residents.items()
            if not held.loading and now - held.used_ms < 60_000
        ]
        alive = {i.id for i in others}
        alone = [id for id in used if not alive & world.store.read(id).copies.keys()]
        world.check(
            not alone, f"{node.id} has left, and nobody has {sorted(alone)[:5]}, which it held"
        )

    # -- looked at each second

    def _look(self) -> None:
        world = self._world
        if (
            world.leader() is not None
            and not world.store.down
            and not world.store.cut
            and not world.split
        ):
            self._look_at_store()
            self._look_at_nodes()
        world.clock.after(LOOK_MS, self._look)

    def _hold(self, law: str, whom: str, holds: bool, within_ms: float, what: str) -> None:
        if holds:
            self._due.pop((law, whom), None)
            return
        self._due[law, whom] += LOOK_MS
        self._world.check(
            self._due[law, whom] <= within_ms, f"{what} for {self._due[law, whom]} ms"
        )

    def _look_at_store(self) -> None:
        world, settings, now = self._world, self._world.plan.settings, self._world.clock.now_ms
        round_ms = ROUNDS * 1000 * settings.reaper_s + world.plan.lease_ms
        for model in world.store.models.values():
            gone = [i for i in model.copies if i not in world.store.instances]
            self._hold(
                "dead",
                model.id,
                not gone,
                round_ms,
                f"{model.id} is said to be in {gone}, which are gone,",
            )
            stale = [
                i for i, f in model.failures.items() if now - f.time_ms > 1000 * settings.failure_s
            ]
            self._hold(
                "failures",
                model.id,
                not stale,
                round_ms,
                f"failures of {model.id} in {stale} are kept",
            )
            blamed = sum(
                now - f.time_ms < 1000 * settings.failure_s for f in model.failures.values()
            )
            world.check(
                blamed < ARTIFACT_FAILURES,
                f"{blamed} instances have tried {model.id}, which has failed",
            )
            self._look_at_rate(model)
            self._look_at_policy(model)
        for vmodel in world.store.vmodels.values():
            ready = vmodel.active != vmodel.target and not vmodel.failed and not vmodel.share
            whom = f"{vmodel.id} {vmodel.target}"
            within_ms = SWITCH_LOADS * 1000 * settings.load_s
            self._hold(
                "switch",
                whom,
                not ready,
                within_ms,
                f"{vmodel.id} is on its way to {vmodel.target}",
            )

    def _look_at_rate(self, model: MeshModel) -> None:
        world, settings = self._world, self._world.plan.settings
        rate = self._rate(model)
        loaded = [
            i for i, copy in model.copies.items() if copy.loaded_ms and i in world.store.instances
        ]
        others = [
            i for i in world.store.instances.values() if i.id not in loaded and not i.stopping
        ]
        enough = rate < HOT * settings.rate_per_copy or len(loaded) != 1 or not others
        what = f"{model.id} has one copy at {rate:.0f} queries a minute"
        self._hold("rate", model.id, enough, 10_000 * settings.rate_s, what)

    def _look_at_policy(self, model: MeshModel) -> None:
        """Check the copies that a policy asks for, where there is memory and loads succeed."""
        world = self._world
        alive = [i for i in model.copies if i in world.store.instances]
        room = [
            i.id
            for i in world.store.instances.values()
            if i.id not in alive
            and not i.stopping
            and i.free_bytes > max(2 * model.size_bytes, ROOM * i.capacity_bytes)
        ]
        enough = len(alive) >= model.policy.copies_min or not room or bool(model.failures)
        what = f"{model.id} has {len(alive)} of {model.policy.copies_min} copies"
        within_ms = (1 + ROUNDS) * 1000 * world.plan.settings.reaper_s + world.plan.lease_ms
        self._hold("policy", model.id, enough, within_ms, what)

    def _look_at_nodes(self) -> None:
        world, settings = self._world, self._world.plan.settings
        for id, told in world.store.instances.items():
            node = world.nodes[id]
            differs = abs(told.used_bytes - node.residents.used_bytes) if node.alive else 0
            known = differs < SEEN_WRONG * max(told.capacity_bytes, 1)
            self._hold(
                "record",
                id,
                known,
                20_000 * settings.publish_s,
                f"the record of {id} is wrong by {differs} bytes",
            )
