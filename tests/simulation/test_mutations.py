"""The simulator finds decisions that are wrong: each mutation, by some seed of those that it gives
to worlds.

A world is longer than the longest of its periods. With CLIPPER_TESTS=full each mutation may take
200 seeds, and 200 worlds without a mutation must show nothing; else the seeds are those by which
each was found.
"""

import importlib
import os
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from bench.mesh_simulator.simulation import Fault, FaultKind, Plan, Simulation
from clipper.settings.mesh import MeshSettings
from tests.simulation.mutations import DECISIONS, MISSED_BY_NODES, MUTATIONS, Mutation

FULL = os.environ.get("CLIPPER_TESTS") == "full"
SEEDS_MAX = 200
SETTINGS = MeshSettings(
    janitor_s=10,
    reaper_s=12,
    rate_s=3,
    failure_s=20,
    rate_per_copy=60,
    load_s=5,
    drain_s=8,
)
PLAN = Plan(
    seconds=100,
    models=40,
    instances=4,
    rate_per_s=20,
    vmodels=3,
    switch_s=5,
    pinned=2,
    typical_bytes=5_000_000,
    settings=SETTINGS,
)
LONGEST_MS: dict[FaultKind, int] = {"kill": 60_000, "stop": 30_000, "corrupt": 60_000, "slow": 8000}
SHORT_MS = 5000  # of faults that stop a node, or all, from doing what is due


def planned(seed: int) -> Plan:
    """A world with much memory or little, and faults by seed."""
    rng = Random(seed)
    kinds: tuple[FaultKind, ...] = ("kill", "stop", "corrupt", "slow", "outage", "cut", "split")
    faults = []
    for _ in range(rng.randrange(1, 5)):
        kind = rng.choice(kinds)
        faults.append(
            Fault(
                kind,
                rng.randrange(80_000),
                rng.randrange(500, LONGEST_MS.get(kind, SHORT_MS)),
                rng.randrange(1000),
            )
        )
    share, doubled = ((0.5, 2), (2.0, 0))[seed % 2]
    return replace(PLAN, seed=seed, share=share, doubled=doubled, faults=tuple(faults))


def violations(seed: int) -> list[str]:
    world = Simulation(planned(seed))
    world.run()
    return world.settle(world.name(n) for n in range(PLAN.models)).violations


def make_wrong(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the decision."""
    module, _, name = (DECISIONS + mutation.target).rpartition(".")
    try:
        owner: Any = importlib.import_module(module)
    except ModuleNotFoundError:  # of a class
        module, _, kind = module.rpartition(".")
        owner = getattr(importlib.import_module(module), kind)
    monkeypatch.setattr(owner, name, mutation.make(getattr(owner, name)))


def found_by(run: Callable[[int], list[str]], seeds: "range | tuple[int, ...]") -> int:
    """The first seed whose world shows it; -1: none."""
    return next((seed for seed in seeds if run(seed)), -1)


@pytest.mark.parametrize("seed", range(SEEDS_MAX if FULL else 2))
def test_world_without_a_mutation_shows_nothing(seed: int) -> None:
    plan = planned(seed)
    assert plan.seconds > 2 * max(
        SETTINGS.janitor_s, SETTINGS.reaper_s, SETTINGS.rate_s, SETTINGS.failure_s
    )
    assert not violations(seed), plan.faults


# the others are found by worlds of the mesh's own nodes: test_nodes.py
CHOSEN = [one for one in MUTATIONS if FULL or one.name in MISSED_BY_NODES]


@pytest.mark.parametrize("mutation", CHOSEN, ids=lambda one: one.name.replace(" ", "-"))
def test_wrong_decision_is_found(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wrong(mutation, monkeypatch)
    seeds = range(SEEDS_MAX) if FULL else (mutation.seed,)
    assert found_by(violations, seeds) >= 0
