"""Faults of a simulated mesh: what begins and ends with each."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Final

from bench.node_simulator.kinds import KINDS, Fault, FaultKind
from bench.node_simulator.servers import HEARTBEAT_S
from bench.node_simulator.store import StoreCopy
from bench.node_simulator.world import Plan, SimulatedNode, World

if TYPE_CHECKING:
    from clipper.mesh.node.node import MeshNode

# after these, what nodes do may differ from what laws expect of a calm mesh
CALM_KINDS: Final = frozenset({"slow", "corrupt", "clock", "jump", "drift", "disk"})
LONGEST: Final = {"kill": 0.5, "stop": 0.3, "corrupt": 0.6, "poison": 0.5, "disk": 0.5}
JUMPS_MS: Final = (-3_600_000, -30_000, -5000, 5000, 30_000, 3_600_000)
DRIFT_MAX: Final = 0.2
ERRORS: Final = 0.3  # of the calls of a store that fail
LAG_S: Final = 0.4  # of each call of a slow store
DISK_ERRORS: Final = ("full", "unreadable")


class Faults:
    """Begins and ends faults. Threads: one."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._copies: dict[Fault, tuple[StoreCopy, bool]] = {}

    def begin(self, fault: Fault) -> None:
        """Begin a fault."""
        self._change(fault, True)

    def end(self, fault: Fault) -> None:
        """End a fault."""
        self._change(fault, False)

    def end_all(self) -> None:
        """End what is left of all faults, and start the nodes that have ended."""
        world = self._world
        for ended in (world.corrupt, world.poison, world.disks, world.store.cut, world.split):
            ended.clear()
        world.slow, world.store.errors, world.store.slow_s = 1.0, 0.0, 0.0
        world.store.come_back()
        for one in list(world.nodes.values()):
            one.life.clock_ms, one.life.drift = 0, 0.0
            world.begin(one.name)

    def _change(self, fault: Fault, begins: bool) -> None:
        world = self._world
        one = list(world.nodes.values())[fault.number % len(world.nodes)]
        world.note("fault", fault.kind, one.name, begins)
        if fault.kind not in CALM_KINDS and not (begins and fault.kind == "stop"):
            world.laws.disturbed()
        match fault.kind:
            case "kill" | "stop" | "gone":
                self._node(fault, one, begins)
            case "outage" | "emptied" | "older" | "errors" | "laggard":
                self._store(fault, begins)
            case "clock" | "jump" | "drift":
                self._clock(fault, one, begins)
            case "host" | "hang" if begins:
                self._host(one, fault.kind == "hang")
            case "cut" | "split":
                self._way(fault.kind == "split", one, begins)
            case "slow":
                world.slow = world.plan.slow if begins else 1.0
            case "corrupt" | "poison":
                models = world.corrupt if fault.kind == "corrupt" else world.poison
                (models.add if begins else models.discard)(fault.number % 7)
            case "disk" if begins:
                world.laws.suspected(one.name)
                world.disks[one.name] = DISK_ERRORS[fault.number % len(DISK_ERRORS)]
            case "disk":
                world.disks.pop(one.name, None)

    def _node(self, fault: Fault, one: SimulatedNode, begins: bool) -> None:
        world = self._world
        if not begins:
            if one.alive and one.leaving:
                world.loop.call_later(1.0, self.end, fault)
            else:
                world.begin(one.name)
        elif fault.kind == "stop":
            world.stop(one.name)
        elif fault.kind == "kill":
            world.kill(one.name)
        elif len(world.gone) < len(world.nodes) - 2:
            world.gone.add(one.name)
            world.kill(one.name)

    def _host(self, one: SimulatedNode, hangs: bool) -> None:
        for host in one.hosts[:1]:
            if hangs:
                host.hangs = True
                silence_s = self._world.plan.settings.host_silence_s
                self._world.loop.call_later(silence_s, host.run, host.die)
            else:
                host.run(host.die)

    def _way(self, is_split: bool, one: SimulatedNode, begins: bool) -> None:
        world = self._world
        for places in (world.store.cut, world.split) if is_split else (world.store.cut,):
            (places.add if begins else places.discard)(one.name)
        if is_split and begins:
            world.loop.call_later(HEARTBEAT_S, self._part)

    def _part(self) -> None:
        """Disconnect copies that have been out of reach for too long."""
        world = self._world
        for server in list(world.servers.values()):
            for copies in list(server.connected.values()):
                for copy in list(copies):
                    if not world.reaches(copy.host.life.name, server.life.name):
                        server.detach(copy, "it is silent")

    def _clock(self, fault: Fault, one: SimulatedNode, begins: bool) -> None:
        life, now_s = one.life, self._world.loop.time()
        jump_ms = JUMPS_MS[fault.number % len(JUMPS_MS)]
        ahead_ms = {"clock": fault.number, "jump": jump_ms}.get(fault.kind, life.ahead_ms(now_s))
        drift = DRIFT_MAX * (fault.number / 500 - 1) if fault.kind == "drift" else 0.0
        life.clock_ms, life.drift = (ahead_ms, drift) if begins else (0, 0.0)
        life.drifts_from_s = now_s

    def _store(self, fault: Fault, begins: bool) -> None:
        world, store = self._world, self._world.store
        match fault.kind, begins:
            case "outage", True:
                store.go_away("refuses" if fault.number % 2 else "hangs")
            case "outage", False:
                store.come_back()
            case "emptied", True:
                self._lose(StoreCopy())
            case "emptied", False:
                self._restore()
            case "older", True:
                self._copies[fault] = store.copy(), world.is_emptied
            case "older", False:
                copy, of_emptied = self._copies[fault]
                if of_emptied and not world.is_emptied:
                    self._lose(copy)
                    self._restore()
                elif not world.is_emptied:
                    store.replace(copy)
                    world.laws.restored()
            case "errors", _:
                store.errors = ERRORS if begins else 0.0
            case "laggard", _:
                store.slow_s = LAG_S if begins else 0.0

    def _lose(self, copy: StoreCopy) -> None:
        """Continue from a copy that lacks what the mesh knows, until it is restored."""
        world = self._world
        if not world.is_emptied:
            world.laws.lost()
        world.is_emptied = True
        world.times_emptied += 1
        world.store.replace(copy)

    def _restore(self) -> None:
        """Have a node write what it knows to a store that is empty, as somebody would ask it to."""
        world = self._world
        if not world.is_emptied:
            return

        def act(node: "MeshNode") -> None:
            if world.is_emptied and node.joined.registry.other_history:
                times = world.times_emptied
                node.take_store(restore=True)
                if world.times_emptied == times:
                    world.is_emptied = False
                    world.laws.restored()

        world.manage(act, "restored")
        world.loop.call_later(1.0, self._restore)  # until one of them has done so


def some_faults(plan: Plan, seed: int, most: int = 5, kinds: Sequence[FaultKind] = KINDS) -> Plan:
    """Return the plan with faults by seed."""
    rng = Random(seed)
    faults = []
    for _ in range(rng.randrange(1, most)):
        kind = rng.choice(kinds)
        for_s = rng.uniform(0.5, max(LONGEST.get(kind, 0.08) * plan.seconds, 1.0))
        faults.append(Fault(kind, rng.uniform(0, 0.8) * plan.seconds, for_s, rng.randrange(1000)))
    return replace(plan, seed=seed, faults=tuple(faults))
