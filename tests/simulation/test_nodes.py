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
from functools import partial

import msgspec
import pytest

from bench.node_simulator.kinds import Fault
from bench.node_simulator.plans import PLAN, SETTINGS, churning, planned, rare, shown
from bench.node_simulator.world import World
from clipper.mesh.decisions import claims
from clipper.mesh.decisions.maintenance import UnloadCopy
from clipper.mesh.records import MODELS, encode
from tests.simulation.mutations import LAST_IS_SPARE, MUTATIONS, Mutation

FULL = os.environ.get("CLIPPER_TESTS") == "full"
SEEDS_MAX = 200
KEPT = (0, 1, 58, 134, 368, 416, 5195, 5481, 6914)  # seeds that have shown what was wrong
KEPT_RARE = (0, 34, 54, 84, 419, 437, 476, 802, 5226, 5274, 5517, 6022, 6033)
KEPT_CHURNING = (0, 24, 79, 156, 750, 5655, 6767)
QUIET = replace(PLAN, nodes=3, models=6, rate_per_s=0, vmodels=0, pinned=0, doubled=0, share=2.0)
# without periodic maintenance
IDLE = msgspec.structs.replace(SETTINGS, janitor_s=600, reaper_s=600, rate_s=600)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Silence the nodes' own logs: there are thousands of lines."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


# -- one world


def history(seed: int) -> str:
    with World(planned(seed)) as world:
        world.run()
        return hashlib.sha256(repr(world.trace).encode()).hexdigest()


def step_until(world: World, condition: Callable[[], bool]) -> None:
    """Let time pass until a condition holds, at most 20 s of it."""
    for _ in range(200):
        if condition():
            return
        world.step(0.1)
    pytest.fail("it has not come about")


def test_a_seed_determines_the_history() -> None:
    assert history(4) == history(4) != history(5)


def test_three_nodes_load_serve_evict_and_survive_a_kill() -> None:
    with World(replace(QUIET, models=40, share=0.4)) as world:
        for n in range(40):
            queries = world.query(world.name(n))
            world.step(2)
            assert not queries.why, queries
        assert not queries.hit
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
        queries = [
            world.query(world.name(n % 2), name) for n in range(20) for name in list(world.nodes)
        ]
        world.step(3)
        assert not any(query.why for query in queries)
        assert world.loads == 2
        assert [len(world.models()[world.name(n)].copies) for n in range(2)] == [1, 1]


def test_loaded_models_answer_and_others_wait_while_the_store_is_unavailable() -> None:
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


@pytest.mark.parametrize("what", ["full", "unreadable"])
def test_a_node_with_a_bad_disk_keeps_no_model_from_the_others(what: str) -> None:
    settings = msgspec.structs.replace(SETTINGS, failure_s=600)
    plan = replace(QUIET, models=20, share=0.7, pulled=True, settings=settings)
    with World(plan) as world:
        world.disks["n0"] = what
        queries = []
        for n in range(60):
            queries.append(world.query(world.name(n % 20), f"n{n % 3}"))
            world.step(0.5)
        world.step(6)
        assert not [query for query in queries if query.why]
        assert max(query.ended_s - query.born_s for query in queries) < 1.0


def test_a_copy_that_is_evicted_while_it_is_claimed_again_is_not_reported_as_loaded() -> None:
    with World(replace(QUIET, models=20, share=6.0)) as world:
        for n in range(20):
            world.query(world.name(n))
        world.step(3)
        for id, record in world.models().items():  # as if others had taken the nodes for dead
            world.store.put(MODELS + id, encode(msgspec.structs.replace(record, copies={})))
        for one in world.nodes.values():
            assert one.node is not None
            loader = one.node.joined.loader
            for id in tuple(loader.held):
                one.server.run(world.loop.create_task, loader.reclaim(id))
                one.server.run(world.loop.create_task, loader.evict(id, "of the test"))
        world.step(1)
        assert not [id for id, record in world.models().items() if record.copies]


def test_a_copy_that_is_dropped_while_a_slow_store_writes_its_claim_is_disclaimed() -> None:
    with World(replace(QUIET, settings=IDLE)) as world:
        id = world.name(0)
        world.query(id)
        world.step(3)
        (holder,) = world.models()[id].loaded
        one = world.nodes[holder]
        other = next(other for other in world.nodes.values() if other is not one)
        assert one.node is not None
        assert other.node is not None
        change = other.node.joined.registry.change
        remove = partial(change, id, lambda model: claims.released(model, holder))
        other.server.run(world.threads.start, remove)
        while world.models()[id].copies:
            world.step(0.0001)
        world.store.slow_s = 0.4
        world.step(0.1)  # the claim is on its way
        one.server.run(world.loop.create_task, one.node.joined.loader.drop(id, "of the test"))
        while not world.models()[id].copies:
            world.step(0.01)
        assert world.models()[id].loaded == (holder,)
        world.step(5)
        assert not world.models()[id].copies
        assert not world.violations


def test_a_loaded_copy_that_is_loading_in_the_store_is_written_as_loaded_again() -> None:
    with World(replace(QUIET, settings=IDLE)) as world:
        id = world.name(0)
        world.query(id)
        world.step(3)
        before = world.models()[id]
        (holder,) = before.loaded
        loading = {holder: msgspec.structs.replace(before.copies[holder], loaded_ms=0)}
        world.store.put(MODELS + id, encode(msgspec.structs.replace(before, copies=loading)))
        world.step(1)
        assert world.models()[id].loaded == (holder,)


def test_a_copy_that_was_cut_off_stays_until_the_load_of_another_node_has_ended() -> None:
    with World(replace(QUIET, settings=IDLE, slow=45.0)) as world:
        id = world.name(0)
        world.query(id)
        world.step(3)
        (holder,) = world.models()[id].loaded
        other = next(name for name in world.nodes if name != holder)
        cut = Fault("cut", 0.0, 0.0, world.nodes[holder].number)
        world.faults.begin(cut)
        step_until(world, lambda: holder not in world.instances())
        world.slow = 45.0
        world.query(id, other)
        step_until(world, lambda: other in world.models()[id].copies)
        world.faults.end(cut)
        step_until(world, lambda: holder in world.models()[id].copies)
        assert world.models()[id].loaded == (holder,)
        world.corrupt.add(0)
        step_until(world, lambda: other not in world.models()[id].copies)
        assert other in world.models()[id].failures
        query = world.query(id, other)
        world.step(1)
        assert (query.ended_s >= 0, query.why, query.hit) == (True, "", True)
        assert not world.violations


def test_a_store_that_is_emptied_again_while_it_is_restored_takes_no_model_away() -> None:
    with World(QUIET) as world:
        for n in range(4):
            world.query(world.name(n))
        world.step(3)
        empty = Fault("emptied", 0.0, 2.0)
        world.faults.begin(empty)
        world.step(2)
        world.faults.end(empty)
        while len(world.models()) < QUIET.models:
            world.step(0.001)
        world.faults.begin(empty)
        world.step(0.5)
        assert not world.models()
        world.faults.end(empty)
        assert not world.settle(world.name(n) for n in range(6))


def test_holder_that_decides_counts_the_queries_of_all_copies() -> None:
    settings = msgspec.structs.replace(SETTINGS, rate_per_copy=300)
    with World(replace(QUIET, nodes=4, models=1, share=4.0, settings=settings)) as world:
        for _ in range(600):  # 1200 a minute: 3 copies at once, then one more
            world.query(world.name(0), "n0")
            world.step(0.05)
        assert len(world.models()[world.name(0)].loaded) == 4


def test_a_busy_model_has_one_copy_while_no_other_node_has_memory_for_it() -> None:
    with World(replace(QUIET, nodes=2, models=8, pinned=8, share=0.5)) as world:
        world.step(3 * SETTINGS.reaper_s)
        id = world.name(5)  # the largest
        for _ in range(300):
            world.query(id, "n0")
            world.step(0.25)
        assert len(world.models()[id].loaded) == 1
        assert not world.violations


@pytest.mark.parametrize("is_mutated", [False, True])
def test_two_holders_that_give_up_a_spare_copy_at_once_leave_one(
    is_mutated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_mutated:
        LAST_IS_SPARE.apply(monkeypatch)
    with World(replace(QUIET, nodes=2, models=1, share=4.0)) as world:
        id = world.name(0)
        world.query(id)
        world.step(3)
        joined = [one.node.joined for one in world.nodes.values() if one.node is not None]
        servers = [one.server for one in world.nodes.values()]
        world.laws.disturbed()  # what is asked for here has no other reason
        second = joined[0].copies.load(id, world.now_ms, copies=2)
        servers[0].run(world.loop.create_task, second)
        world.step(3)
        assert len(world.models()[id].loaded) == 2
        for server, parts in zip(servers, joined, strict=True):
            spare = UnloadCopy(id, "of the test", spare=True)
            server.run(world.loop.create_task, parts.actions.execute(spare))
        world.step(1)
        assert is_mutated or len(world.models()[id].loaded) == 1
        last_copy_violations = [why for why in world.violations if "the last copy" in why]
        assert bool(world.violations) == bool(last_copy_violations) == is_mutated


# -- many worlds


@pytest.mark.parametrize("seed", {*range(SEEDS_MAX), *KEPT} if FULL else KEPT)
def test_a_simulated_mesh_without_a_mutation_shows_no_violation(seed: int) -> None:
    plan = planned(seed)
    assert plan.seconds > 2 * max(
        SETTINGS.janitor_s, SETTINGS.reaper_s, SETTINGS.rate_s, SETTINGS.failure_s
    )
    assert not shown(plan), plan.faults


@pytest.mark.parametrize("seed", {*range(SEEDS_MAX), *KEPT_RARE} if FULL else KEPT_RARE)
def test_a_simulated_mesh_with_faults_of_all_kinds_shows_no_violation(seed: int) -> None:
    assert not shown(rare(seed)), rare(seed).faults


@pytest.mark.parametrize("seed", {*range(SEEDS_MAX), *KEPT_CHURNING} if FULL else KEPT_CHURNING)
def test_a_simulated_mesh_whose_nodes_die_in_turn_shows_no_violation(seed: int) -> None:
    assert not shown(churning(seed))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: one.name.replace(" ", "-"))
def test_a_wrong_decision_is_detected(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation.apply(monkeypatch)
    for seed in range(SEEDS_MAX) if FULL else (mutation.seed,):
        plan = mutation.plan(seed)
        if shown(replace(plan, share=mutation.share or plan.share)):
            return
    pytest.fail("no world shows it")
