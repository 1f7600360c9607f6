"""Rows in shared memory, by seed: a model may read its inputs until it answers; an output that it
computes from rows that have changed meanwhile must reach no query.
"""

from collections import Counter
from random import Random

import pytest

from clipper_core.runtime.status import Status
from tests.simulation.world import FAULTS, HEARTBEAT_MS, Container, Kin, World
from tests.sizes import sized

MEANWHILE = ["stuck", "slow", "hang", "die_before", "die_after", "raise", "twice", "old_id"]


def submit_queries(
    world: World, rng: Random, kin: Kin, until_us: int, *, gap_us: int, keys: int
) -> None:
    while world.now_us < until_us:
        for _ in range(rng.choice([1, 1, 8])):
            wanted = (
                rng.randrange(keys)
                if rng.random() < 0.8
                else [rng.randrange(keys) for _ in range(rng.randint(2, 30))]
            )
            world.submit(kin, wanted, rng.choice([1_500, 3_000, 20_000, 60_000]))
        world.pass_us(rng.randint(1, 2 * gap_us))


def ask_arrays(world: World, rng: Random, kin: Kin, until_us: int, *, keys: int) -> None:
    """Send arrays that are large enough to be split, and single queries among them."""
    while world.now_us < until_us:
        n = rng.choice([1, 32, 200, 700])
        wanted = [rng.randrange(keys) for _ in range(n)] if n > 1 else rng.randrange(keys)
        world.submit(kin, wanted, rng.choice([3_000, 20_000, 60_000]))
        world.pass_us(rng.randint(1, 8_000))


def run(seed: int, arrays: bool = False) -> tuple[World, Counter[Status]]:
    rng = Random(seed)
    world = World(seed)
    more = {"lane_bytes_max": 1 << rng.choice([18, 21])} if arrays else {}  # pieces come round soon
    kin = world.model(
        "wide",
        "f32",
        (128,),
        lane_rows=rng.choice([16, 64, 256]),
        output="f64",
        output_shape=(),
        **more,
    )
    for i in range(rng.randint(1, 3)):
        Container(
            world,
            kin,
            shares=i == 0 or rng.random() < 0.7,
            a_us=rng.choice([100, 2_000, 6_000]),
            b_us=rng.choice([1, 50]),
            faults=rng.sample(MEANWHILE if rng.random() < 0.7 else FAULTS, 3),
            fault_share=0.3,
            latency_us=rng.choice([10, 300]),
            size_max=rng.choice([1, 4, 64]),
            mode=rng.choice([0, 1, 3]),
            checked=rng.random() < 0.5,
        )
    world.pass_us(1_000)  # the first lane is made when a container that shares is there
    if arrays:
        ask_arrays(world, rng, kin, 400_000, keys=rng.choice([200, 50_000]))
    else:
        submit_queries(
            world, rng, kin, 400_000, gap_us=rng.choice([100, 500]), keys=rng.choice([200, 5_000])
        )
    world.pass_us(HEARTBEAT_MS * 4_000 + 500_000)
    return world, world.check()


@pytest.mark.parametrize("seed", range(sized(12, 60)))
def test_rows_changed_under_a_late_model_reach_no_answer(seed: int) -> None:
    """Answers are right although models compute them from the rows as they are at the reply."""
    world, ended = run(seed)
    assert ended[Status.OK]
    assert world.frames["SHARED"]
    world.check_rest()


@pytest.mark.parametrize("seed", range(sized(12, 60)))
def test_rows_changed_under_a_late_model_of_arrays_reach_no_answer(seed: int) -> None:
    """Answers are right for spans of array chunks too, whose cells hold many rows."""
    world, ended = run(seed, arrays=True)
    assert ended[Status.OK]
    assert world.frames["SHARED"]
    world.check_rest()


@pytest.mark.parametrize("arrays", [False, True])
def test_late_models_see_changed_rows(arrays: bool) -> None:
    """Late models read changed rows in the runs above: without the rule, some outputs would have
    been cached."""
    assert (
        sum(run(seed, arrays)[0].frames["rows changed"] for seed in range(20 if arrays else 6)) > 20
    )
