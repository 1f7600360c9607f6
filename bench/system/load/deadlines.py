"""Lateness of answers: queries to a model without a container must be answered by default, at
their deadline.

Beside it, in the same seconds, another process does nothing but sleep 1 ms at a time: how late the
machine wakes that one says how much of the lateness is the machine's.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

import clipper
from bench.harness import Goal, Row, row
from tests.processes import Program

SLO_MS = 20.0
SLEEPER = """
import sys, time
late = []
print("begun", flush=True)
end = time.perf_counter() + float(sys.argv[1])
while (begun := time.perf_counter()) < end:
    time.sleep(0.001)
    late.append((time.perf_counter() - begun - 0.001) * 1e6)
print(*late)
"""
MACHINE = "the machine, which wakes the loop late at times: it is asleep between two deadlines"


def main(quick: bool) -> list[Row]:
    """Measure a quiet server, and one whose other container is killed again and again."""
    n = 300 if quick else 3000
    with clipper.start() as server:
        server.deploy("absent", "bench.system.fixtures.noop:first", input="f64[4]", replicas=0)
        app = server.app("late", ["absent"], slo_ms=SLO_MS, default=0)
        quiet = measured(app, n)
        server.deploy(
            "killed", "bench.system.fixtures.sklearn_noop:first", input="f64[4]", cache=False
        )
        server.wait_ready(timeout=60, models=["killed"])
        with killing(server, "killed") as kills:
            beside = measured(app, 2 * n)
    note = f"{n} queries, 0.2 ms apart, SLO {SLO_MS:g} ms"
    share, longest = Goal("value_at_least", 1.0), Goal("value_at_most", 1000.0)
    title = f"lateness while a container is killed and restarts ({len(kills)} times)"
    return [
        row("answered by default", quiet.by_default, "share", goal=share, note=note),
        *(row(f"lateness, p{q:g}", *quiet.quantiles(q / 100)) for q in (50, 99)),
        row("lateness, longest", *quiet.quantiles(1.0), longest, bounded_by=MACHINE),
        row("earliest", float(quiet.late_us.min()), "us", goal=Goal("value_at_least", 0.0)),
        row(f"{title}: p99.9", *beside.quantiles(0.999), Goal("at_most", 2.0)),
        row(f"{title}: answered by default", beside.by_default, "share", goal=share),
    ]


@dataclass(frozen=True)
class Lateness:
    """The lateness of answers after their deadlines, and, in the same seconds, that of the sleeps
    of another process: f64, microseconds. by_default: share of the answers that were the default.
    """

    late_us: np.ndarray[Any, Any]
    control_us: np.ndarray[Any, Any]
    by_default: float

    def quantiles(self, q: float) -> tuple[float, str, str, float]:
        """Return a quantile with its unit, and beside it the one of the other process."""
        late, control = (float(np.quantile(x, q)) for x in (self.late_us, self.control_us))
        return late, "us", "bare sleep", control


def measured(app: Any, n: int) -> Lateness:
    """Send n queries, 0.2 ms apart, to an application whose model is never there."""
    futures = []
    sleeper = bare_sleeper(0.0003 * n)
    for x in np.random.default_rng(1).random((n, 4)):
        futures.append(app.predict(x))
        time.sleep(0.0002)
    answers = [future.result(timeout=10) for future in futures]
    control = np.array(lateness_us(sleeper))
    late = np.array([answer.latency_us for answer in answers]) - SLO_MS * 1000
    return Lateness(late, control, sum(answer.is_default for answer in answers) / n)


@contextmanager
def killing(server: clipper.ClipperServer, name: str) -> Iterator[list[int]]:
    """Kill the container of a model whenever it is ready; yield the list of processes killed."""
    kills: list[int] = []
    stop = threading.Event()

    def kill() -> None:
        while not stop.wait(0.05):
            for replica in server.stats()["models"][f"{name}:1"]["replicas"]:
                if replica["pid"] > 0:  # 0: it has just gone
                    with suppress(ProcessLookupError):
                        os.kill(replica["pid"], signal.SIGKILL)
                        kills.append(replica["pid"])

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield kills
    finally:
        stop.set()
        thread.join()


def bare_sleeper(seconds: float) -> Program:
    """Start a process that prints how late, in us, each of its sleeps of 1 ms ended. Returns after
    its start."""
    sleeper = Program(sys.executable, "-c", SLEEPER, seconds, apart=True)
    sleeper.line()
    return sleeper


def lateness_us(sleeper: Program) -> list[float]:
    """Return what a process of `bare_sleeper` has printed at its end."""
    sleeper.wait()
    return [float(word) for word in sleeper.lines[1].split()]
