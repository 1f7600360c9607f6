"""The cost of a prediction, part by part: every row of the goals of the engine, beside its floor
and its peers.

A group of rows is a module with `rows(effort) -> list[Row]`; its first line is the question. What a
group compares runs interleaved in one run. A row that falls short says what bounds it; one without
a figure says why.
"""

import gc
import importlib
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace

from bench.harness import FAILED, Row, UnknownRows, absent
from bench.system.engine.effort import FULL, QUICK, Effort

GROUPS = (
    "hit",
    "miss",
    "bulk",
    "trip",
    "lookup",
    "ratio",
    "timers",
    "codec",
    "work",
    "delivery",
    "batching",
    "overload",
    "containers",
)


def main(quick: bool, rows: Sequence[str] = ()) -> list[Row]:
    if unknown := [name for name in rows if name not in GROUPS]:
        raise UnknownRows(f"no rows {', '.join(unknown)}; there are {', '.join(GROUPS)}")
    return [one for name in rows or GROUPS for one in measure(name, QUICK if quick else FULL)]


def measure(name: str, effort: Effort) -> list[Row]:
    """Measure one group. Return its rows; a single row with the reason if the group failed.
    Progress is printed to stderr."""
    module = importlib.import_module(f"{__name__}.{name}")
    question = (module.__doc__ or name).partition("\n")[0]
    gc.collect()
    begun = time.perf_counter()
    try:
        found: list[Row] = module.rows(effort)
    except Exception as failure:
        traceback.print_exc()
        found = [absent(f"{name}, all rows", "", f"{FAILED}: {type(failure).__name__}: {failure}")]
    print(
        f"{name}: {len(found)} rows in {time.perf_counter() - begun:.1f} s",
        file=sys.stderr,
        flush=True,
    )
    return [replace(one, question=question) for one in found]
