"""Large meshes on virtual time, in which nothing fails."""

from dataclasses import replace

from bench.mesh_simulator.simulation import Plan, Simulation

QUIET = Plan(seconds=10, models=30, instances=3, rate_per_s=0, share=2.0)


def test_a_thousand_first_queries_at_once_load_one_copy() -> None:
    world = Simulation(replace(QUIET, upkeep=False))
    for n in range(1000):
        world.query(world.name(n % 2))
    world.step(3000)
    assert world.report.answered == 1000
    assert world.report.counts["loads"] == 2
    assert [len(world.store.read(world.name(n)).copies) for n in range(2)] == [1, 1]


def test_a_model_queried_often_gets_as_many_copies_as_it_needs() -> None:
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
