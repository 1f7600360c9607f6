"""timers: what does a deadline cost with a million outstanding, and how long does a loop stop when
all are cancelled?

A query is priced in CPU time; a stop counts by the clock, as those who wait for the loop see it.
"""

import asyncio
import random
import time
from collections.abc import Callable

from bench.harness import CPU, Goal, Row, Sample, interleave, loop_factory, row
from bench.system.engine.effort import FULL, MS, TINY, Effort
from clipper_core.runtime.timer_wheel import TimerWheel, churn

DUE_MAX = 1024  # of one call, as the engine makes it
LEAST = {"asyncio": 150, "uvloop": 60}


def rows(effort: Effort) -> list[Row]:
    outstanding = 1_000_000 if effort is FULL else 20_000 if effort is TINY else 100_000
    stalls: dict[str, list[float]] = {"asyncio": [], "uvloop": []}
    cases: dict[str, Callable[[], float]] = {
        "wheel": lambda: churn_ns(outstanding),
        "stall": lambda: wheel_stall_ns(outstanding),
    }
    for name in stalls:
        cases[name] = loop_timers(name == "uvloop", outstanding, stalls[name])
    found = interleave(cases, effort.at_most(3), warmups=0)
    cleaned = {name: Sample(tuple(values)) for name, values in stalls.items()}
    return rows_of(found, cleaned, outstanding)


def churn_ns(outstanding: int) -> float:
    """Measure a query per simulated microsecond, answered shortly before its deadline: insert,
    complete, and remove the dead entry."""
    count = 3 * outstanding
    begun = CPU()
    churn(count, 1_000_000, outstanding, outstanding - outstanding // 1000)
    return (CPU() - begun) / count


def wheel_stall_ns(outstanding: int) -> float:
    """Return the longest of the calls that remove `outstanding` cancelled deadlines."""
    rng, wheel, longest = random.Random(2), TimerWheel(0), 0
    for ticket in range(outstanding):
        wheel.insert(20_000 + rng.randrange(1_000_000), ticket)
    for ticket in range(outstanding):
        wheel.cancel(ticket)
    now_us = 0
    while wheel.entries and now_us < 10_000_000:
        now_us += 10_000
        begun = time.perf_counter_ns()
        wheel.step(now_us, DUE_MAX)
        longest = max(longest, time.perf_counter_ns() - begun)
    return float(longest)


def loop_timers(fast: bool, outstanding: int, stalls: list[float]) -> Callable[[], float]:
    """Measure call_later() and cancel(), in ns; and append the turn of the loop after all were
    cancelled to `stalls`."""

    def nothing() -> None: ...

    def measure() -> float:
        loop: asyncio.AbstractEventLoop = loop_factory(fast)()
        rng = random.Random(3)
        delays = [20.0 + rng.random() for _ in range(outstanding)]
        begun = CPU()
        handles = [loop.call_later(delay, nothing) for delay in delays]
        for handle in handles:
            handle.cancel()
        each = (CPU() - begun) / outstanding
        del handles
        begun = time.perf_counter_ns()
        loop.run_until_complete(asyncio.sleep(0))
        stalls.append(float(time.perf_counter_ns() - begun))
        loop.close()
        return each

    return measure


def rows_of(found: dict[str, Sample], cleaned: dict[str, Sample], outstanding: int) -> list[Row]:
    note = f"{outstanding} outstanding; insert + complete + expire, without Python"
    memory = (
        "memory: the slot of a query that came a million queries ago is in no cache of the CPU any"
        " more"
    )
    stall, cancels = (
        found["stall"].map(lambda ns: ns * MS),
        f"{outstanding} deadlines cancelled at once; the longest call after",
    )
    result = [
        row(
            "timer, a query",
            found["wheel"],
            "ns",
            goal=Goal("value_at_most", 15),
            note=note,
            bounded_by=memory,
        )
    ]
    for name, least in LEAST.items():
        anchor, goal = f"{name} call_later + cancel", Goal("times_better", least)
        result.append(
            row(
                f"timer, a query, of {name}",
                found["wheel"],
                "ns",
                anchor,
                found[name],
                goal,
                bounded_by=memory,
            )
        )
    result.append(
        row(
            "timer, longest stall",
            stall,
            "ms",
            goal=Goal("value_at_most", 1),
            note=cancels,
            bounded_by="the machine: a call that is put off its core in the middle counts in full",
        )
    )
    for name in LEAST:
        turn = cleaned[name].map(lambda ns: ns * MS)
        result.append(
            row(
                f"timer, longest stall, of {name}",
                stall,
                "ms",
                f"{name}: the turn after the cancels",
                turn,
            )
        )
    return result
