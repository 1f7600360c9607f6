"""overload: what is answered when twice, and ten times, the capacity is offered?"""

import importlib
import importlib.util

from bench.harness import Goal, Row, absent
from bench.system.engine.effort import FULL, TINY, Effort

MODULE = "bench.system.load.overload"
GOALS = {
    "goodput of peak": ("share", Goal("value_at_least", 0.95)),
    "admitted p99": ("ms", None),
    "refusal p99": ("ms", Goal("value_at_most", 2)),
    "recovery": ("s", Goal("value_at_most", 2)),
}


def rows(effort: Effort) -> list[Row]:
    """Return the rows of `python -m bench overload`, which is a benchmark of its own."""
    if importlib.util.find_spec(MODULE) is None:
        missing = f"not in this build: no {MODULE}"
        return [
            absent(f"overload {times} x, {name}", unit, missing, goal=goal)
            for times in (2, 10)
            for name, (unit, goal) in GOALS.items()
        ]
    if effort is TINY:
        return []
    found: list[Row] = importlib.import_module(MODULE).main(effort is not FULL)
    return found
