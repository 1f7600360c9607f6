"""The mesh on virtual time: what must hold under faults by seed, and each promise by itself.

To see a run again: `python -m pytest -k "test_name and seed"`.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from bench.mesh_simulator.simulation import START_MS, Fault, Plan, Report, Simulation, some_faults
from clipper.mesh.decisions import claims, model_cache, vmodels
from clipper.mesh.decisions.vmodels import NoStep, SwitchVModel, VStep
from clipper.mesh.records import Copy, MeshModel, VModel

SMALL = Plan(
    seconds=20, models=60, instances=4, rate_per_s=30, vmodels=3, switch_s=2, pinned=2, share=0.5
)
QUIET = Plan(seconds=10, models=30, instances=3, rate_per_s=0, share=2.0)


def settled(plan: Plan) -> Report:
    world = Simulation(plan)
    world.run()
    return world.settle(world.name(n) for n in range(plan.models))


@pytest.mark.parametrize("seed", range(25))
def test_nothing_is_lost_under_faults(seed: int) -> None:
    """Claims stay exact, pinned models stay, names never switch to what is not loaded, queries end
    by their deadlines, an outage of the store stops none that can be routed; and when faults have
    ended, memory and registry agree and every model answers.
    """
    plan = some_faults(seed, SMALL)
    found = settled(plan)
    assert not found.violations, (found.violations, plan.faults)
    assert found.answered + found.refused.total() == found.queries


def test_a_seed_is_one_history() -> None:
    plan = some_faults(3, replace(SMALL, seconds=8))
    assert settled(plan) == settled(plan)


def test_faults_are_of_all_kinds() -> None:
    kinds = Counter(fault.kind for seed in range(25) for fault in some_faults(seed, SMALL).faults)
    assert set(kinds) == {"kill", "outage", "cut", "split", "slow", "corrupt", "stop"}


def test_loads_take_ten_times_as_long_while_a_slow_fault_lasts() -> None:
    world = Simulation(replace(QUIET, faults=(Fault("slow", 2000, 2000, 0),)))
    quick = world.load_ms(world.name(0))
    world.clock.run(START_MS + 3000)
    assert world.load_ms(world.name(0)) == pytest.approx(10 * quick, abs=10)
    world.clock.run(START_MS + 5000)
    assert world.load_ms(world.name(0)) == quick


@pytest.mark.parametrize("seed", range(5))
def test_a_thousand_first_queries_at_once_load_one_copy(seed: int) -> None:
    world = Simulation(replace(QUIET, seed=seed, upkeep=False))
    for n in range(1000):
        world.query(world.name(n % 2))
    world.step(3000)
    assert world.report.answered == 1000
    assert world.report.counts["loads"] == 2
    assert [len(world.store.read(world.name(n)).copies) for n in range(2)] == [1, 1]


def test_the_death_of_the_only_holder_fails_no_query() -> None:
    world = Simulation(QUIET)
    world.query(world.name(7))
    world.step(1000)
    (holder,) = world.store.read(world.name(7)).loaded
    world.kill(world.nodes[holder])
    asked = [world.query(world.name(7)) for _ in range(20)]
    world.step(9000)
    assert not any(query.why for query in asked)
    assert max(query.ended_ms - query.born_ms for query in asked) < 3000 + 500 + 1000
    (after,) = world.store.read(world.name(7)).loaded
    assert after != holder


def test_all_nodes_are_restarted_in_turn_and_no_query_fails() -> None:
    faults = tuple(Fault("stop", 5000 + 12_000 * n, 8000, n) for n in range(4))
    world = Simulation(replace(SMALL, share=3.0, seconds=60, faults=faults, rate_per_s=50))
    report = world.run()
    assert not report.refused
    assert not report.violations
    assert report.queries > 2000
    assert all(node.epoch > 1 for node in world.nodes.values())


def test_a_name_changes_its_model_and_every_query_finds_one_loaded() -> None:
    world = Simulation(replace(QUIET, vmodels=1))
    world.query("v00")
    world.step(3000)
    misses = world.report.queries - world.report.hits
    world.set_vmodel("v00", world.name(20))
    for _ in range(400):
        world.query("v00")
        world.step(10)
    assert world.store.vmodels["v00"].active == world.name(20)
    assert world.report.queries - world.report.hits == misses
    assert not world.report.refused


def test_while_the_store_is_away_what_is_loaded_answers_and_the_rest_waits() -> None:
    world = Simulation(QUIET)
    for n in range(10):
        world.query(world.name(n))
    world.step(3000)
    world.store.down_until_ms = world.clock.now_ms + 4000
    known = [world.query(world.name(n % 10)) for n in range(100)]
    fresh = world.query(world.name(20))
    world.step(3900)
    assert all(query.ended_ms >= 0 and not query.why for query in known)
    assert fresh.ended_ms < 0
    world.step(2000)
    assert not fresh.why
    assert len(world.store.instances) == 3


def test_a_corrupt_artifact_is_said_to_be_so_and_heals() -> None:
    world = Simulation(QUIET)
    world.corrupt.add(5)
    asked = world.query(world.name(5))
    world.step(3000)
    assert asked.why == "loading failed: the artifact is corrupt"
    assert world.report.counts["loads"] == 2
    again = world.query(world.name(5))
    assert again.ended_ms == again.born_ms
    world.corrupt.clear()
    world.step(600_000)
    healed = world.query(world.name(5))
    world.step(3000)
    assert not healed.why


def test_a_model_asked_often_gets_as_many_copies_as_it_needs() -> None:
    world = Simulation(replace(QUIET, instances=6, share=4.0))
    for _ in range(60):
        for _ in range(84):
            world.query(world.name(3))
        world.step(1000)
    assert len(world.store.read(world.name(3)).loaded) == 3
    assert not world.report.violations


def test_a_large_mesh_shares_one_mirror() -> None:
    report = Simulation(
        Plan(instances=200, models=50_000, seconds=4, rate_per_s=400, shared_mirror=True)
    ).run()
    assert report.queries > 1000
    assert not report.violations
    assert not report.refused


# -- what is checked can fail


def any_number(
    model: MeshModel, me: str, now_ms: int, **more: Any
) -> MeshModel | claims.ClaimRefused:
    return claims.changed(model, copies={**model.copies, me: Copy(now_ms)})


def test_claims_that_do_not_count_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "claimed", any_number)
    assert any("copies, and 1 were asked for" in text for text in settled(SMALL).violations)


def test_evicting_what_is_pinned_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    add = model_cache.ModelCache.add

    def unpinned(
        self: model_cache.ModelCache, *args: Any, pinned: bool = False, **more: Any
    ) -> None:
        add(self, *args, **more)

    monkeypatch.setattr(model_cache.ModelCache, "add", unpinned)
    found = settled(replace(SMALL, pinned=20, alpha=0.2, share=0.3))
    assert any("which is pinned" in text for text in found.violations)


def test_a_switch_too_early_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(vmodel: VModel, *args: Any, **more: Any) -> VStep:
        return NoStep("") if vmodel.active == vmodel.target else SwitchVModel("now")

    monkeypatch.setattr(vmodels, "step", hasty)
    assert any("which is not loaded" in text for text in settled(SMALL).violations)


def test_a_janitor_that_sleeps_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clipper.mesh.decisions.maintenance.janitor", lambda *args: [])
    plan = replace(SMALL, faults=(Fault("kill", 5000, 500, 0), Fault("split", 9000, 6000, 1)))
    assert any("untold" in text or "is lost" in text for text in settled(plan).violations)


def test_an_instance_that_refuses_while_the_store_is_away_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def afraid(self: Any, query: Any) -> bool:
        if self.world.store.down:
            self.world.refuse(query, "the store is away")
        return True

    world = Simulation(replace(SMALL, faults=(Fault("outage", 9000, 3000),)))
    world.step(8000)
    monkeypatch.setattr("bench.mesh_simulator.node.Node.serve", afraid)
    assert any("while the store was away" in text for text in world.run().violations)
