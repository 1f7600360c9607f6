"""batching: how much is answered in time, as a share of what the best fixed batch size would
answer? (Exact virtual time.)

Nothing here depends on the machine: the engine runs on its manual clock against a replica of known
cost (simulated.py), so a run of a given seed gives the same figures everywhere.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from bench.harness import Goal, Row, row
from bench.system.engine.effort import FULL, TINY, Effort
from bench.system.engine.simulated import COSTS, SIZE_MAX, Cost, Replica, Tally, plain_aimd
from clipper.load.open_loop import arrivals
from clipper_core.scheduling.batcher import BatchingMode

MODES = {"fit": (BatchingMode.FIT, 0.95), "aimd": (BatchingMode.AIMD, 0.9)}
SHAPES = {"Poisson": 1.0, "bursty": 3.0}  # bursty: a third of each 200 ms has all of its arrivals
LATE_MAX, BATCHES_MAX, OPTIMUM = 0.005, 20, 0.9
PAUSES = (
    "pauses of the simulated replica (10-20 ms in 2 of 1000 batches), which make the batch in"
    " flight behind late too, and batches as large as the deadline allows"
)
DOUBLINGS = (
    "slow start with two batches in flight: a size doubles once in two batches, and the best size"
    " is up to 11 doublings"
)
DROPS = (
    "rows that were sent and came late, or were dropped though a fixed size would have had room for"
    " them"
)


@dataclass(frozen=True)
class Plan:
    costs: tuple[Cost, ...]
    loads: tuple[float, ...]
    share: float  # of the full time


def plan_of(effort: Effort) -> Plan:
    if effort is FULL:
        return Plan(COSTS, (0.3, 0.6, 0.9, 1.1, 1.3), 1.0)
    return Plan(COSTS[:1], (1.3,), 0.01) if effort is TINY else Plan(COSTS, (0.3, 1.3), 0.1)


@dataclass(frozen=True)
class Point:
    """One run: goodput over what was possible, and the share of the rows that came late."""

    where: str
    share: float
    late: float


def rows(effort: Effort) -> list[Row]:
    plan, result = plan_of(effort), []
    best_static.cache_clear()
    for mode, (number, least) in MODES.items():
        points = []
        for shape in SHAPES:
            here = [
                point(cost, number, shape, load, plan.share)
                for cost in plan.costs
                for load in plan.loads
            ]
            result.append(
                worst_of(f"batching {mode}, {shape}, goodput", here, least, len(plan.loads))
            )
            points += here
        late = max(points, key=lambda one: one.late)
        note, goal = (
            f"the most of {len(points)} runs: {late.where}",
            Goal("value_at_most", 100 * LATE_MAX),
        )
        result.append(
            row(
                f"batching {mode}, late",
                100 * late.late,
                "% late",
                goal=goal,
                note=note,
                bounded_by=PAUSES,
            )
        )
        result.append(to_the_optimum(mode, number, plan))
    return result + anchors(plan)


def times_of(cost: Cost, shape: str, load: float, share: float) -> NDArray[np.float64]:
    """Return Poisson arrivals, in seconds, in the busy part of each 200 ms."""
    burst, seconds = SHAPES[shape], max(cost.seconds * share, 0.05)
    spell_s = 0.2 / burst
    busy_s = arrivals(load * cost.capacity() * burst, seconds / burst, seed=1)
    return busy_s // spell_s * 0.2 + busy_s % spell_s


def run(
    cost: Cost, mode: BatchingMode, times: NDArray[np.float64], size_max: int = SIZE_MAX
) -> Tally:
    return Replica(cost, mode, size_max).run(times)


@cache
def best_static(cost: Cost, shape: str, load: float, share: float) -> tuple[int, int]:
    """Return (rows in time, size) of the best fixed size on the same arrivals, with early drop."""
    times, best = times_of(cost, shape, load, share), cost.best()
    sizes = sorted({max(1, best // 2), best, min(SIZE_MAX, best * 3 // 2)})
    return max((run(cost, BatchingMode.STATIC, times, size).in_time, size) for size in sizes)


def point(cost: Cost, mode: BatchingMode, shape: str, load: float, share: float) -> Point:
    """Measure one point. A fixed size is not run below 0.9 of the capacity: it answers all."""
    times = times_of(cost, shape, load, share)
    tally = run(cost, mode, times)
    calm = load < 0.9 and shape == "Poisson"
    possible = len(times) if calm else min(len(times), best_static(cost, shape, load, share)[0])
    return Point(
        f"{cost.name} at {load:g} x",
        tally.in_time / max(possible, 1),
        tally.late / max(len(times), 1),
    )


def worst_of(name: str, points: list[Point], least: float, loads: int) -> Row:
    worst = min(points, key=lambda one: one.share)
    note = f"the least of {len(points)} runs ({loads} loads): {worst.where}; simulated, exact"
    return row(
        name,
        worst.share,
        "share",
        "min(offered, best fixed size)",
        1.0,
        Goal("at_least", least),
        note,
        DROPS,
    )


def to_the_optimum(mode: str, number: BatchingMode, plan: Plan) -> Row:
    """Return the number of batches sent, from a cold start under three times the capacity, until
    one has 90 % of the rows of the best size."""
    most, where = 0, ""
    for cost in plan.costs:
        times = arrivals(3 * cost.capacity(), max(min(cost.seconds, 1.0), 0.2), seed=2)
        sizes = run(cost, number, times).sizes
        count = next(
            (i + 1 for i, n in enumerate(sizes) if n >= OPTIMUM * cost.best()), len(sizes) + 1
        )
        if count > most:
            most, where = count, cost.name
    name, note = (
        f"batching {mode}, batches to 90 % of the best size",
        f"the most: {where}, of a cold start at 3 x",
    )
    return row(
        name,
        most,
        "batches",
        goal=Goal("value_at_most", BATCHES_MAX),
        note=note,
        bounded_by=DOUBLINGS,
    )


def anchors(plan: Plan) -> list[Row]:
    """Simulate the same arrivals without batching, and with the rule of the paper."""
    cost, load = plan.costs[0], 1.3
    times = times_of(cost, "Poisson", load, plan.share)
    ours = run(cost, BatchingMode.AIMD, times).in_time / len(times)
    alone, paper = (
        run(cost, BatchingMode.STATIC, times, 1).in_time / len(times),
        plain_aimd(cost, times).in_time / len(times),
    )
    name = f"batching aimd, {cost.name} at {load:g} x"
    return [
        row(f"{name}, of no batching", ours, "share", "no batching", alone),
        row(f"{name}, of plain AIMD", ours, "share", "the paper's AIMD", paper,
            note="which drops only what could not be in time even alone"),
    ]  # fmt: skip
