"""Benchmark of pushes that are acknowledged when they are on disk, beside the same pushes without
that, and beside what the disk syncs of the same size in the same run."""

import functools
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

import numpy as np

from bench.harness import Goal, Row, interleave, row
from clipper.params import Client, TableSpec
from clipper.params.local.local_set import LocalSet
from clipper.settings.params import ParamsSettings

ROWS, DIM = 64, 64
RECORD_BYTES = ROWS * (8 + 4 + 4 * 2 * DIM)  # a row of the log has its optimizer's state
WORKERS = 16
SYNCED = "write and fdatasync of as many bytes, one after another"


def rows(quick: bool = False) -> list[Row]:
    """Measure the rate of one worker and of many, and the latency of one."""
    seconds, turns = (0.1, 3) if quick else (0.5, 7)
    with ExitStack() as stack:
        memory, disk = stack.enter_context(_set("memory")), stack.enter_context(_set("disk"))
        synced = functools.partial(_sync_times, disk, seconds)
        times: dict[str, list[float]] = {"memory": [], "disk": [], "synced": []}
        cases = {
            "memory": lambda: _push_times(memory, 1, seconds, times["memory"]),
            "disk": lambda: _push_times(disk, 1, seconds, times["disk"]),
            "synced": lambda: synced(times["synced"]),
            "memory, many": lambda: _push_times(memory, WORKERS, seconds, []),
            "disk, many": lambda: _push_times(disk, WORKERS, seconds, []),
        }
        found = interleave(cases, turns)
        with Client(str(disk)) as client:
            said = client.call(0, "stats")["log"]
        per_sync = said["pushes"] / max(1, said["records"])
    what = f"acknowledged pushes of {ROWS} rows of {DIM} floats"
    many = f"{what}, {WORKERS} workers"
    limit = found["memory, many"].median / found["synced"].median
    clients = (
        f"the {WORKERS} clients, threads of one interpreter: without a log they push"
        f" {limit:.2g} x as often as the disk syncs"
    )
    p50, p99 = ({name: _at(each, share) for name, each in times.items()} for share in (50, 99))
    return [
        row(f"{what}, log on disk, 1 worker", found["disk"], "/s", SYNCED, found["synced"]),
        row(f"{what}, log on disk, 1 worker", found["disk"], "/s", "no log", found["memory"]),
        row(
            f"{many}, log on disk",
            found["disk, many"],
            "/s",
            SYNCED,
            found["synced"],
            Goal("at_least", 2),
            note=f"{per_sync:.1f} pushes in a record, of all runs with a log",
            bounded_by=clients,
        ),
        row(f"{many}, log on disk", found["disk, many"], "/s", "no log", found["memory, many"]),
        row("one push, log on disk, p50", p50["disk"], "us", SYNCED, p50["synced"]),
        row("one push, log on disk, p99", p99["disk"], "us", SYNCED, p99["synced"]),
        row("one push, no log, p50", p50["memory"], "us"),
        row("one push, no log, p99", p99["memory"], "us"),
    ]


def _at(times_s: list[float], share: int) -> float:
    return float(np.percentile(times_s, share)) * 1e6


def _push_times(folder: Path, workers: int, seconds: float, times: list[float]) -> float:
    """Push from so many threads, each with a client. Return pushes in a second."""
    draw = np.random.default_rng(1)
    start, end = threading.Barrier(workers + 1, timeout=60.0), threading.Event()

    def work(number: int) -> int:
        count = 0
        ids = draw.integers(0, 1 << 40, ROWS)
        gradients = draw.standard_normal((ROWS, DIM)).astype(np.float32)
        with Client(str(folder), worker=1 + number) as client:
            client.push("bench", ids, gradients)
            start.wait()
            while not end.is_set():
                begun_s = time.perf_counter()
                client.push("bench", ids, gradients)
                times.append(time.perf_counter() - begun_s)
                count += 1
        return count

    with ThreadPoolExecutor(workers) as pool:
        pushed = [pool.submit(work, number) for number in range(workers)]
        try:
            start.wait()
            began_s = time.perf_counter()
            time.sleep(seconds)
        finally:
            end.set()
        return sum(one.result() for one in pushed) / (time.perf_counter() - began_s)


def _sync_times(folder: Path, seconds: float, times: list[float]) -> float:
    """Append to a file beside the log, and sync it each time. Return syncs in a second."""
    path, data = folder / "floor", os.urandom(RECORD_BYTES)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    began_s = time.perf_counter()
    count = 0
    while time.perf_counter() - began_s < seconds:
        begun_s = time.perf_counter()
        os.write(file, data)
        os.fdatasync(file)
        times.append(time.perf_counter() - begun_s)
        count += 1
    rate = count / (time.perf_counter() - began_s)
    os.close(file)
    path.unlink()
    return rate


@contextmanager
def _set(durability: Literal["memory", "disk"]) -> Iterator[Path]:
    """Start one shard. Yield its folder."""
    with tempfile.TemporaryDirectory(prefix="clipper-", dir=".") as folder:
        settings = ParamsSettings(folder=folder, snapshot_s=0.0, durability=durability)
        local = LocalSet(settings).start()
        try:
            local.wait_ready(60.0)
            with Client(folder) as client:
                client.create(TableSpec("bench", DIM))
            yield Path(folder)
        finally:
            local.stop(snapshot=False)
