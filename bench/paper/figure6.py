"""Figure 6: throughput of one to four replicas over networks of 10 and 1 Gb/s.

The paper's replicas are GPUs on machines of their own. Here a replica sleeps for as long as a GPU
would compute, so that two cores carry four of them, and the network is the loopback interface of a
network namespace of its own, limited by the kernel's token bucket filter. A row and its time are
chosen so that one replica takes 0.5 Gb/s, as in the paper. Every replica is behind the network; in
the paper the first is not.
"""

import argparse
import collections
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import clipper
from bench import plots
from bench.harness import Goal, Row, absent, row

LINKS_GBIT = (10, 1)
REPLICAS = (1, 2, 3, 4)
WIDTH = 4096  # f32: 16 KiB a row
ROW_US = 250  # 4000 rows/s a replica: 0.52 Gb/s
BATCH = 64
ARRAY_ROWS = 64
ARRAYS_PER_REPLICA = 6  # outstanding
SLO_MS = 5_000.0
ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120


def sleeping(inputs: Any) -> Any:
    """Take as long as a GPU that evaluates 4000 rows a second; return zeros, f64[n]."""
    time.sleep(len(inputs) * ROW_US / 1e6)
    return np.zeros(len(inputs))


def rows_per_s(replicas: int, seconds: float) -> float:
    """Return the throughput of the replicas over TCP, with arrays outstanding all the time."""
    inputs = np.random.default_rng(1).random((ARRAY_ROWS, WIDTH), np.float32)
    batching = {"mode": "static", "size_max": BATCH, "delay_us": 1000}
    with clipper.start(server={"address": "tcp://127.0.0.1:0"}) as server:
        model = server.deploy(
            "gpu",
            sleeping,
            input=f"f32[{WIDTH}]",
            replicas=replicas,
            batching=batching,
            cache=False,
        )
        waiting: collections.deque[Any] = collections.deque()
        answered, begun, warm_s = 0, time.monotonic(), min(1.0, seconds / 2)
        since = begun + warm_s
        while (now := time.monotonic()) < since + seconds:
            if len(waiting) == replicas * ARRAYS_PER_REPLICA:
                waiting.popleft().result()
                answered += ARRAY_ROWS * (now >= since)
            waiting.append(model.predict_many(inputs, slo_ms=SLO_MS))
        for future in waiting:
            future.result()
    return answered / seconds


def in_namespace(gbit: int, replicas: int, seconds: float) -> float:
    """Run rows_per_s() in a network namespace whose loopback interface has the given speed.

    Raises: RuntimeError if the kernel does not allow it or the measurement fails.
    """
    link = (
        "ip link set lo up && tc qdisc add dev lo root tbf"
        f" rate {gbit}gbit burst 1mb latency 50ms && exec "
    )
    measure = f'"{sys.executable}" -m bench.paper.figure6 --replicas {replicas} --seconds {seconds}'
    done = subprocess.run(
        ["unshare", "--map-root-user", "--net", "sh", "-c", link + measure],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    if done.returncode:
        raise RuntimeError((done.stderr.strip() or f"exit status {done.returncode}")[-300:])
    return float(json.loads(done.stdout.splitlines()[-1]))


def main(quick: bool, plot: Path | None = None) -> list[Row]:
    """Measure each number of replicas on each network, the networks in turns."""
    seconds, counts = (1.0, (1, 2)) if quick else (4.0, REPLICAS)
    title = "replicas over a network: throughput"
    if any(shutil.which(tool) is None for tool in ("unshare", "ip", "tc")):
        return [absent(title, "rows/s", "unshare, ip and tc are needed: apt install iproute2")]
    found: dict[int, list[float]] = {gbit: [] for gbit in LINKS_GBIT}
    for replicas in counts:
        for gbit in LINKS_GBIT:
            try:
                found[gbit].append(in_namespace(gbit, replicas, seconds))
            except RuntimeError as error:
                return [absent(title, "rows/s", f"no network namespace with a limit: {error}")]
    if plot is not None:
        title = "Throughput of replicas behind a network"
        curves = {f"{gbit} Gb/s": values for gbit, values in found.items()}
        plots.lines(plot / "figure6.png", title, ("replicas", counts), ("rows/s", curves))
    return [one for gbit in LINKS_GBIT for one in rows_of(gbit, counts, found[gbit])]


def rows_of(gbit: int, counts: tuple[int, ...], values: list[float]) -> list[Row]:
    """Return the throughput of each number of replicas over one network, beside one replica's."""
    result = []
    for count, value in zip(counts, values, strict=True):
        share = value * WIDTH * 32 / 1e9 / gbit
        goal = Goal("at_least", 3.5) if gbit == 10 and count == 4 else None
        result.append(
            row(
                f"{gbit} Gb/s, {count} replicas: throughput",
                value,
                "rows/s",
                "one replica",
                values[0],
                goal,
                f"{share:.0%} of the network; the paper: 3.95 x at 10 Gb/s and four replicas",
                "two cores carry server, callers and replicas",
            )
        )
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    given = parser.parse_args()
    print(json.dumps(rows_per_s(given.replicas, given.seconds)))
