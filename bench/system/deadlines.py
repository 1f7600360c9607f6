"""How late an answer is: queries to a model without a container must be answered by default, at
their deadline.

Beside it, in the same seconds, another process does nothing but sleep 1 ms at a time: how late the
machine wakes that one says how much of the lateness is the machine's.
"""

import subprocess
import sys
import time

import numpy as np

import clipper
from bench.harness import Goal, Row, row

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


def main(quick: bool) -> list[Row]:
    n = 300 if quick else 3000
    with clipper.start() as server:
        server.deploy("absent", "bench.system.noop:first", input="f64[4]", replicas=0)
        app = server.app("late", ["absent"], slo_ms=SLO_MS, default=0)
        futures = []
        sleeper = bare_sleeper(0.0003 * n)
        for x in np.random.default_rng(1).random((n, 4)):
            futures.append(app.predict(x))
            time.sleep(0.0002)
        answers = [future.result(timeout=10) for future in futures]
    control = np.array([float(word) for word in sleeper.communicate()[0].split()])
    late = np.array([answer.latency_us for answer in answers]) - SLO_MS * 1000
    answered = sum(answer.is_default for answer in answers) / n
    note = f"{n} queries, 0.2 ms apart, SLO {SLO_MS:g} ms"
    return [
        row("answered by default", answered, "share", goal=Goal("value_at_least", 1.0), note=note),
        row(
            "lateness, p50",
            float(np.quantile(late, 0.5)),
            "us",
            "bare sleep",
            float(np.quantile(control, 0.5)),
        ),
        row(
            "lateness, p99",
            float(np.quantile(late, 0.99)),
            "us",
            "bare sleep",
            float(np.quantile(control, 0.99)),
        ),
        row(
            "lateness, longest",
            float(late.max()),
            "us",
            "bare sleep",
            float(control.max()),
            Goal("value_at_most", 1000.0),
        ),
        row("earliest", float(late.min()), "us", goal=Goal("value_at_least", 0.0)),
    ]


def bare_sleeper(seconds: float) -> "subprocess.Popen[str]":
    """A process that prints how late, in us, each of its sleeps of 1 ms ended. It has begun when
    this returns."""
    sleeper = subprocess.Popen(
        [sys.executable, "-c", SLEEPER, str(seconds)], stdout=subprocess.PIPE, text=True
    )
    assert sleeper.stdout is not None
    sleeper.stdout.readline()
    return sleeper
