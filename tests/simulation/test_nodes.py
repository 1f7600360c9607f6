"""The mesh's own nodes on virtual time: what must hold under faults by seed, and wrong decisions,
each of which is found.

A world is longer than the longest of its periods. With CLIPPER_TESTS=full each mutation may take
200 seeds, and 200 worlds without a mutation must show nothing; else the seeds are those by which
each was found. To see a run again: `python -m pytest -k "test_name and seed"`.
"""

import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from bench.node_simulator.world import Fault, Plan, World, some_faults
from clipper.settings.mesh import MeshSettings
from tests.simulation.mutations import MISSED_BY_NODES, MUTATIONS, Mutation
from tests.simulation.test_mutations import found_by, make_wrong

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
    lease_s=1.5,
    host_silence_s=3,
)
PLAN = Plan(
    seconds=60,
    models=24,
    nodes=4,
    rate_per_s=12,
    vmodels=2,
    pinned=2,
    doubled=2,
    settings=SETTINGS,
)
QUIET = replace(PLAN, nodes=3, models=6, rate_per_s=0, vmodels=0, pinned=0, doubled=0, share=2.0)


def planned(seed: int) -> Plan:
    """A world with much memory or little, and faults by seed."""
    plan = some_faults(replace(PLAN, share=(0.5, 2.0)[seed % 2]), seed)
    if seed % 3:
        return plan
    # loads during which a node counts as dead for a while
    at_s = 5.0 + seed % 40
    cuts = tuple(Fault("cut", at_s + 1.5 + 3.5 * n, 2.3, seed + n) for n in range(3))
    return replace(plan, faults=(*plan.faults[:1], Fault("slow", at_s, 12), *cuts), slow=45.0)


def violations(seed: int) -> list[str]:
    with World(planned(seed)) as world:
        world.run()
        return world.violations or world.settle(world.name(n) for n in range(PLAN.models))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Without the nodes' own logs: there are thousands of lines."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


# -- one world


def history(seed: int) -> str:
    with World(planned(seed)) as world:
        world.run()
        return hashlib.sha256(repr(world.trace).encode()).hexdigest()


def test_a_seed_is_one_history() -> None:
    assert history(4) == history(4) != history(5)


def test_three_nodes_load_serve_evict_and_survive_a_kill() -> None:
    with World(replace(QUIET, models=40, share=0.4)) as world:
        for n in range(40):
            asked = world.query(world.name(n))
            world.step(2)
            assert not asked.why, asked
        assert not asked.hit
        assert any(what[1] == "unload" for what in world.trace)
        (holder,) = world.models()[world.name(39)].loaded
        others = [name for name in world.nodes if name != holder]
        world.kill(holder)
        again = [world.query(world.name(39), entry) for entry in others]
        world.step(SETTINGS.lease_s + 5)
        assert not any(query.why for query in again)
        assert {*world.models()[world.name(39)].loaded} - {holder}
        world.begin(holder)
        assert not world.settle(world.name(n) for n in range(8))


@pytest.mark.parametrize("seed", range(3))
def test_many_first_queries_at_once_make_one_copy(seed: int) -> None:
    settings = msgspec.structs.replace(SETTINGS, rate_per_copy=100_000)
    with World(replace(QUIET, seed=seed, settings=settings)) as world:
        asked = [
            world.query(world.name(n % 2), name) for n in range(20) for name in list(world.nodes)
        ]
        world.step(3)
        assert not any(query.why for query in asked)
        assert world.loads == 2
        assert [len(world.models()[world.name(n)].copies) for n in range(2)] == [1, 1]


def test_while_the_store_is_away_what_is_loaded_answers_and_the_rest_waits() -> None:
    with World(QUIET) as world:
        for n in range(3):
            for name in world.nodes:
                world.query(world.name(n), name)
        world.step(3)
        world.store.go_away("hangs")
        world.step(1)
        known = [world.query(world.name(n % 3)) for n in range(30)]
        fresh = world.query(world.name(5))
        world.step(3)
        assert all(query.ended_s >= 0 and not query.why for query in known)
        assert fresh.ended_s < 0
        world.store.come_back()
        world.step(4)
        assert not fresh.why


def test_a_stopped_node_fails_no_query() -> None:
    faults = tuple(Fault("stop", 5 + 20 * n, 10, n) for n in range(3))
    plan = replace(QUIET, models=10, share=4.0, seconds=70, rate_per_s=20, faults=faults)
    with World(plan) as world:
        world.run()
        assert not world.refused
        assert not world.violations
        assert sum(what[1] == "stopped" for what in world.trace) == 3


# -- many worlds


@pytest.mark.parametrize("seed", range(SEEDS_MAX if FULL else 4))
def test_world_without_a_mutation_shows_nothing(seed: int) -> None:
    plan = planned(seed)
    assert plan.seconds > 2 * max(
        SETTINGS.janitor_s, SETTINGS.reaper_s, SETTINGS.rate_s, SETTINGS.failure_s
    )
    assert not violations(seed), plan.faults


def _unpinned(was: Any) -> Callable[..., Any]:
    return lambda self, id, pinned: was(self, id, False)


# a node pins what it has loaded, so it is there that a wrong decision shows
PINNING = Mutation("nothing is pinned", "model_cache.ModelCache.pin", _unpinned, 0)
# of the worlds by which they were found; of the others the first
SEEDS = {
    "a failed load leaves no failure": 10,
    "placement ignores that a node is full": 10,
    "failures are never expired": 6,
    "a model never has failed": 10,
    "never scales up": 1,
    "a rate asks for nothing": 1,
    "a drain moves nothing": 11,
}


@pytest.mark.parametrize(
    "mutation",
    [
        PINNING if one.name == PINNING.name else one
        for one in MUTATIONS
        if one.name not in MISSED_BY_NODES
    ],
    ids=lambda one: one.name.replace(" ", "-"),
)
def test_wrong_decision_is_found(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wrong(mutation, monkeypatch)
    seeds = range(SEEDS_MAX) if FULL else (SEEDS.get(mutation.name, 0),)
    assert found_by(violations, seeds) >= 0
