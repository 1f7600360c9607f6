"""Whole runs of the engine on a virtual clock, by seed: everything goes wrong, and the promises hold.

A failing seed is in the test's name; `python -m pytest "tests/simulation/test_engine.py::test_name[seed]"` plays it again.
"""

from collections import Counter
from random import Random
from typing import Any

import pytest

from clipper_core.status import Status
from tests.simulation.world import FAULTS, FAULTS_V1, HEARTBEAT_MS, TICK_US, Container, Kin, World

SLOS_US = [700, 3_000, 20_000, 33_000, 100_000, 250_000]


def a_zoo(world: World, rng: Random, *, lane_rows: int = 256) -> list[Kin]:
    """A few models of different input types, some cached."""
    shapes: list[tuple[str, tuple[int, ...]]] = [("f64", (4,)), ("i32", (-1,)), ("str", ()), ("bytes", ()), ("f32", (2, 3)), ("f64", (-1,))]
    return [
        world.model(f"m{i}", *rng.choice(shapes), cached=rng.random() < 0.6, lane_rows=lane_rows, output="f64", output_shape=())
        for i in range(rng.randint(2, 4))
    ]


def staff(world: World, rng: Random, kin: Kin, *, fault_share: float) -> None:
    protocol = 1 if rng.random() < 0.25 and kin.dtype != "f32" else 2
    Container(
        world,
        kin,
        protocol=protocol,
        a_us=rng.choice([50, 300, 3_000]),
        b_us=rng.choice([1, 10, 200]),
        faults=FAULTS_V1 if protocol == 1 else rng.sample(FAULTS, rng.randint(1, len(FAULTS))),
        fault_share=fault_share,
        checked=True,
        comes_back=rng.random() < 0.9,
        hello_after_us=rng.choice([0, 0, 5_000, 300_000, 600_000]),
        latency_us=rng.choice([10, 100, 1_000]),
        chunk_max=rng.choice([1, 17, 300, 1 << 20]),
        mode=rng.randint(0, 3),
        size_max=rng.choice([1, 3, 16, 4096]),
        delay_us=rng.choice([0, 0, 500, 2_000]),
    )


def ask(world: World, rng: Random, zoo: list[Kin], until_us: int, *, gap_us: int, keys: int) -> None:
    """Clients: bursts and lone queries, many keys or few, some given up."""
    while world.now_us < until_us:
        for _ in range(rng.choice([1, 1, 1, 12])):
            kin = rng.choice(zoo)
            wanted: Any = rng.randrange(keys) if rng.random() < 0.9 else [rng.randrange(keys) for _ in range(rng.randint(1, 40))]
            query = world.submit(kin, wanted, rng.choice(SLOS_US), salt=rng.choice([0, 0, 0, 1]))
            if rng.random() < 0.1:
                world.after(rng.randrange(query.deadline_us - world.now_us), query.future.cancel)
        world.pass_us(rng.randint(1, 2 * gap_us))


@pytest.mark.parametrize("seed", range(150))
def test_everything_goes_wrong(seed: int) -> None:
    rng = Random(seed)
    world = World(seed, frame_bytes_max=rng.choice([4096, 1 << 20]), links_max=rng.choice([3, 64]))
    zoo = a_zoo(world, rng)
    for kin in zoo[: rng.randint(1, len(zoo))]:
        for _ in range(rng.randint(1, 3)):
            staff(world, rng, kin, fault_share=rng.choice([0.02, 0.2, 0.6]))
    ask(world, rng, zoo, rng.choice([100_000, 400_000]), gap_us=rng.choice([50, 500, 5_000]), keys=rng.choice([10, 200, 5_000]))
    world.pass_us(300_000)
    world.check()
    world.check_rest()
