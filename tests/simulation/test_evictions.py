"""The mesh's eviction beside other rules, on traces small enough to know the best; and the picture
of who holds what."""

import itertools
from xml.etree import ElementTree

import numpy as np
import pytest

from bench.mesh_simulator.simulation import Plan, Simulation
from bench.system.mesh import evictions, picture
from bench.system.mesh.evictions import RULES, Trace, drifting, zipf


def ratio(rule: str, trace: Trace, share: float) -> float:
    return float(RULES[rule](trace, int(share * trace.sizes.sum()))[trace.warm :].mean())


@pytest.mark.parametrize("alpha", [0.8, 1.2])
@pytest.mark.parametrize("share", [0.05, 0.5])
def test_eviction_hits_more_than_lru_and_nearly_as_much_as_with_known_demand(
    alpha: float, share: float
) -> None:
    for trace in (zipf(300, 10_000, alpha), drifting(300, 10_000, alpha)):
        ours = ratio("clipper", trace, share)
        assert ours > ratio("LRU", trace, share)
        assert ours > ratio("GDSF", trace, share) - 0.01
    trace = zipf(300, 10_000, alpha)
    assert ratio("clipper", trace, share) > ratio("known demand", trace, share) - 0.03
    assert ratio("Belady-size", trace, share) > ratio("known demand", trace, share)


def test_models_used_once_never_hit_and_a_sufficient_memory_misses_each_once() -> None:
    once = Trace(np.arange(50), np.full(50, 10), np.full(50, 1 / 50))
    again = Trace(np.tile(np.arange(5), 20), np.full(5, 10), np.full(5, 1 / 5))
    for rule in RULES.values():
        assert not rule(once, 100).any()
        assert rule(again, 50).sum() == 95


def test_belady_is_the_best_of_all_where_sizes_are_equal() -> None:
    """Belady's rule is compared with all sequences of evictions: two of four models fit."""

    def best(uses: tuple[int, ...], held: frozenset[int]) -> int:
        if not uses:
            return 0
        first, *rest = uses
        if first in held:
            return 1 + best(tuple(rest), held)
        left = [held] if len(held) < 2 else [held - {gone} for gone in held]
        return max(best(tuple(rest), kept | {first}) for kept in left)

    rng = np.random.default_rng(1)
    for _ in range(30):
        uses = rng.integers(0, 4, 10)
        trace = Trace(uses, np.full(4, 10), np.full(4, 0.25))
        assert evictions.belady_size(trace, 20).sum() == best(tuple(uses.tolist()), frozenset())


def test_the_picture_has_a_mark_for_each_model_that_is_held() -> None:
    world = Simulation(Plan(instances=3, models=20, seconds=2, pinned=1))
    world.run()
    marks = [
        mark.get("fill")
        for mark in ElementTree.fromstring(picture.drawn(world)).iter()
        if mark.get("height") == "14"
    ]
    held = list(itertools.chain.from_iterable(node.residents for node in world.nodes.values()))
    assert len(marks) == len(held)
    assert set(marks) <= {picture.LOADED, picture.LOADING, picture.PINNED}
