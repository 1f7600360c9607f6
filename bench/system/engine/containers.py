"""containers: what do 500 connected containers cost that have nothing to do, and what do they cost
the one that has?

They live in one process of their own (bench/system/containers/idle.py), connect over the unix
socket and say HELLO as containers on the server's host do: to the server they are containers like
any other, each of a model of its own.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import clipper
from bench.harness import Goal, Row, interleave, per_call_ns, row
from bench.system.anchors.reference import distinct
from bench.system.engine.effort import FULL, TINY, Effort, micro
from bench.system.engine.servers import deploy, settings
from bench.system.engine.work import LOOP_THREAD

COUNT = 500
ROOT = Path(__file__).resolve().parents[3]


def rows(effort: Effort) -> list[Row]:
    count = 20 if effort is TINY else COUNT
    unix = settings("unix")
    assert isinstance(unix, dict)
    with (
        fleet() as dial_in,
        clipper.start(**unix) as alone,
        clipper.start(**unix, limits={"connections_max": 2 * COUNT}) as crowded,
    ):
        for server in (alone, crowded):
            deploy(server, ("cold", "hot"))
        for number in range(count):
            crowded.deploy(
                f"idle-{number}", "bench.system.fixtures.noop:first", input="f64[1]", replicas=0
            )
        dial_in(crowded, count)
        loops = sum(thread.name.startswith(LOOP_THREAD) for thread in threading.enumerate()) // 2
        share = idle_share(effort)
        found = interleave(cases(alone, crowded, effort), effort.repetitions)
    connected = f"{count} containers, each of a model of its own, on the server's host"
    beats = "the look at each connection, 40 times a second; on another host, its heartbeats"
    noise = "the machine: the two servers take turns on the same cores"
    hit, trip = Goal("at_most", 1.1), Goal("at_most", 1.1)
    return [
        row(
            f"containers, loop threads for {COUNT}",
            loops,
            "threads",
            goal=Goal("value_at_most", 1),
            note=connected,
            bounded_by="the setting server.threads",
        ),
        row(
            f"containers, idle cost of {COUNT}",
            share,
            "% of a core",
            goal=Goal("value_at_most", 1),
            bounded_by=beats,
            note="CPU time of the server's whole process while nobody asks anything",
        ),
        row(
            "containers, hit beside them",
            found["hit crowded"],
            "ns",
            "the only model",
            found["hit alone"],
            hit,
            "the bound of 1.1 stands for nothing",
            noise,
        ),
        row(
            "containers, RTT beside them",
            micro(found["trip crowded"]),
            "us",
            "the only model",
            micro(found["trip alone"]),
            trip,
            bounded_by=noise,
        ),
    ]


@contextmanager
def fleet() -> Iterator[Callable[[clipper.ClipperServer, int], None]]:
    """The fake containers of one server. They outlive it, and end when it says goodbye to them."""
    fakes: list[subprocess.Popen[bytes]] = []

    def dial_in(server: clipper.ClipperServer, count: int) -> None:
        """Start them all and wait until each is connected."""
        command = [
            sys.executable,
            "-m",
            "bench.system.containers.idle",
            server.address,
            str(count),
            "idle-",
        ]
        path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
        fakes.append(
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | {"CLIPPER_TOKEN": server.token, "PYTHONPATH": path},
            )
        )
        until = time.monotonic() + 60
        while (connected := connected_of(server, count)) < count:
            if fakes[0].poll() is not None or time.monotonic() > until:
                raise RuntimeError(
                    f"{connected} of {count} containers connected; exit status {fakes[0].poll()}"
                )
            time.sleep(0.05)

    try:
        yield dial_in
    finally:
        for process in fakes:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def connected_of(server: clipper.ClipperServer, count: int) -> int:
    models = server.stats()["models"]
    return sum(bool(models.get(f"idle-{number}:1", {}).get("replicas")) for number in range(count))


def idle_share(effort: Effort) -> float:
    """Return the CPU time of this process, in % of one core, without queries. Both servers are in
    it."""
    seconds = 10.0 if effort is FULL else 0.1 if effort is TINY else 2.0
    time.sleep(0.2)
    before = time.process_time()
    time.sleep(seconds)
    return (time.process_time() - before) / seconds * 100


def cases(
    alone: clipper.ClipperServer, crowded: clipper.ClipperServer, effort: Effort
) -> dict[str, Callable[[], float]]:
    known, trips = [np.array([1.0])] * effort.of(5000, 100), distinct(effort.of(500, 20))()
    found: dict[str, Callable[[], float]] = {}
    for word, server in (("alone", alone), ("crowded", crowded)):
        hot, cold = server.model("hot").predict, server.model("cold").predict
        hot(known[0]).result()
        found[f"hit {word}"] = lambda hot=hot: per_call_ns(hot, known)  # type: ignore[misc]
        found[f"trip {word}"] = lambda cold=cold: per_call_ns(cold, trips)  # type: ignore[misc]
    return found
