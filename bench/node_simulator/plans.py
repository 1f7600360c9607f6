"""Worlds by seed: small meshes of short periods, longer than the longest of these."""

from dataclasses import replace
from typing import Final

import msgspec

from bench.node_simulator.faults import some_faults
from bench.node_simulator.kinds import KINDS, RARE_KINDS, Fault
from bench.node_simulator.world import Plan, World
from clipper.settings.mesh import MeshSettings

SETTINGS: Final = MeshSettings(
    janitor_s=10,
    reaper_s=12,
    rate_s=3,
    failure_s=20,
    rate_per_copy=60,
    load_s=5,
    drain_s=8,
    lease_s=1.5,
    host_silence_s=3,
)
PLAN: Final = Plan(
    seconds=60, models=24, nodes=4, rate_per_s=12, vmodels=2, pinned=2, doubled=2, settings=SETTINGS
)


def planned(seed: int) -> Plan:
    """Return a world with much memory or little, and faults by seed."""
    plan = some_faults(replace(PLAN, share=(0.5, 2.0)[seed % 2]), seed)
    if seed % 3:
        return plan
    # loads during which a node counts as dead for a while
    at_s = 5.0 + seed % 40
    cuts = tuple(Fault("cut", at_s + 1.5 + 3.5 * n, 2.3, seed + n) for n in range(3))
    return replace(plan, faults=(*plan.faults[:1], Fault("slow", at_s, 12), *cuts), slow=45.0)


def rare(seed: int) -> Plan:
    """Return a world with faults of all kinds, whose models are pulled before they are loaded."""
    plan = replace(PLAN, share=(0.5, 2.0)[seed % 2], pulled=True)
    return some_faults(plan, seed, 6, (*KINDS, *RARE_KINDS, *RARE_KINDS))


def churning(seed: int, rate_s: float = SETTINGS.rate_s, rate_per_copy: int = 30) -> Plan:
    """Return a world whose nodes are killed one after the other while the store is slow, and whose
    copies come and go.
    """
    settings = msgspec.structs.replace(
        SETTINGS, rate_s=rate_s, rate_per_copy=rate_per_copy, janitor_s=2
    )
    kills = tuple(Fault("kill", 8.0 + 4 * n, 3.0, seed + n) for n in range(12))
    faults = (Fault("laggard", 5, 50), *kills)
    return replace(PLAN, seed=seed, share=2.0, settings=settings, faults=faults)


def shown(plan: Plan) -> list[str]:
    """Run a world; return what did not hold, at the latest when its faults have ended."""
    with World(plan) as world:
        world.run()
        return world.violations or world.settle(world.name(n) for n in range(PLAN.models))
