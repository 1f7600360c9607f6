"""The first queries after a deployment: of 5000 at once to a cheap model, how many get the default?

The second burst, a second later, is the anchor: it meets the same machine and the same model, and
nothing is new any more. `cached`: the model's predictions are cached, so the loop thread writes to
the cache and to the table of evaluations in flight. Its page faults are waits for memory that
nobody had written to before.
"""

import threading
import time

import numpy as np

import clipper
from bench.harness import Goal, Row, row
from clipper.types import Answer

QUERIES = 5000
SLOS_MS = (20.0, 100.0, 500.0)
PAUSE_S = 1.0
SHARE_MAX = 0.02


def main(quick: bool) -> list[Row]:
    rounds = 1 if quick else 5
    rows = []
    for cached in (True, False):
        for slo_ms in SLOS_MS:
            found = np.median([bursts(slo_ms, cached) for _ in range(rounds)], axis=0)
            (share, longest_ms, faults), (share_after, longest_after_ms, faults_after) = found
            name = f"SLO {slo_ms:g} ms, {'cached' if cached else 'not cached'}"
            note = f"{QUERIES} queries at once, median of {rounds}"
            goal = Goal("value_at_most", SHARE_MAX)
            rows += [
                row(
                    f"{name}: defaults",
                    share,
                    "share",
                    "second burst",
                    share_after,
                    goal,
                    note=note,
                ),
                row(f"{name}: longest latency", longest_ms, "ms", "second burst", longest_after_ms),
                row(
                    f"{name}: page faults of the loop",
                    faults,
                    "faults",
                    "second burst",
                    faults_after,
                ),
            ]
    return rows


def bursts(slo_ms: float, cached: bool) -> list[tuple[float, float, int]]:
    """Measure the first burst after a deployment and one a second later.

    Returns for each the share of defaults, the longest latency in ms, and the page faults of the
    loop thread.
    """
    with clipper.start() as server:
        inputs = np.random.default_rng(1).random((2, QUERIES, 4))
        server.deploy("cheap", lambda rows: rows[:, 0], input="f64[4]", cache=cached)
        app = server.app("first", ["cheap"], slo_ms=slo_ms, default=-1.0)
        found = []
        for burst in inputs:
            before = loop_faults()
            futures = [app.predict(x) for x in burst]
            answers: list[Answer] = [future.result(timeout=60) for future in futures]
            share = sum(answer.is_default for answer in answers) / QUERIES
            found.append(
                (share, max(answer.latency_us for answer in answers) / 1000, loop_faults() - before)
            )
            time.sleep(PAUSE_S)
        return found


def loop_faults() -> int:
    """Return the minor page faults of the threads that run the engines' loops."""
    faults = 0
    for thread in threading.enumerate():
        if thread.name == "clipper-loop":
            with open(f"/proc/self/task/{thread.native_id}/stat", encoding="ascii") as file:
                faults += int(file.read().rpartition(") ")[2].split()[7])
    return faults
