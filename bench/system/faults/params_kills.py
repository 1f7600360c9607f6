"""Benchmark of recovery: real shard processes are killed while workers push; no acknowledged push
may be lost or applied twice.

Workers push rows of minus ones, and steps of a model, with sgd at rate 1 from zeros. So a row's
value is the number of pushes that reached it. Shards are killed by SIGKILL at seeded times, one at
a time, the next one when all replicas are whole again. A reader reads rows meanwhile, from shards
and from replicas; the history of pushes and reads is checked (params_history). A probe pulls from
the killed shard and pushes to it, and measures how long that takes.
"""

import contextlib
import functools
import os
import random
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import Goal, Row, Sample, row
from bench.system.faults.params_history import PushHistory
from clipper.params import Client, TableSpec
from clipper.params.local.local_set import PAUSE_S_MAX, LocalSet
from clipper.settings.params import ParamsSettings
from clipper_container.params.rows import Array

SHARDS, WORKERS, ROWS = 3, 2, 24
LIFE = 25  # kills of one set; then another begins
TABLE = TableSpec(
    "counts", 2, optimizer="sgd", optimizer_settings={"rate": 1.0}, initializer="zeros"
)
PATIENCE_S = 60.0
PROBE = 1 << 40  # ids that only the probe uses
AGE_S = 0.2  # of rows that are read from a replica


@dataclass
class Found:
    """wrong: what was lost or applied twice, in words.  starts_s: from the kill to the start of the
    process that answers.  pulls_s, pushes_s: to the first answer.  whole_s: to when every shard has
    a whole replica again."""

    acknowledged: int = 0
    starts_s: list[float] = field(default_factory=list)
    pulls_s: list[float] = field(default_factory=list)
    pushes_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    reads: int = 0

    def add(self, other: "Found", name: str) -> None:
        self.acknowledged += other.acknowledged
        self.starts_s += other.starts_s
        self.pulls_s += other.pulls_s
        self.pushes_s += other.pushes_s
        self.whole_s += other.whole_s
        self.wrong += [f"{name}: {text}" for text in other.wrong]
        self.reads += other.reads


class Worker(threading.Thread):
    """Pushes its own rows, on all shards, and every third time a step of the model."""

    def __init__(self, folder: str, number: int, history: PushHistory) -> None:
        super().__init__(name=f"worker-{number}")
        self.history, self.token = history, dict[int, tuple[int, int]]()
        self.known = 0  # pushes that the token names
        self.client, self.number = Client(folder, worker=number + 1, patience_s=PATIENCE_S), number
        self.ids = np.arange(ROWS) + 1000 * number
        self.pushes = self.models = 0
        self.enough = threading.Event()
        self.failed: Exception | None = None

    def run(self) -> None:
        minus: Any = -np.ones((ROWS, 2), np.float32)
        try:
            while not self.enough.is_set():
                if self.pushes % 3 == 2:
                    gradients: Any = {
                        f"w{self.number}-{i}": -np.ones(1, np.float32) for i in range(SHARDS)
                    }
                    self.history.push(self.number, functools.partial(self._step, gradients, minus))
                    self.models += 1
                else:
                    self.history.push(self.number, functools.partial(self._push, minus))
                self.pushes += 1
                self.known = self.pushes  # after the token
        except Exception as error:
            self.failed = error

    def _push(self, minus: Array) -> None:
        self.token = self.client.push(TABLE.name, self.ids, minus).token

    def _step(self, gradients: dict[str, Array], minus: Array) -> None:
        rows = {TABLE.name: (self.ids, minus)}
        self.token = self.client.push_gradients(gradients, rows)["token"]


class Reader(threading.Thread):
    """Reads a row of a worker, from its shard or a replica, again and again."""

    def __init__(self, folder: str, workers: list[Worker], seed: int, history: PushHistory) -> None:
        super().__init__(name="reader")
        self.client, self._workers = Client(folder, patience_s=PATIENCE_S), workers
        self._draw, self._history = random.Random(seed), history
        self.enough = threading.Event()
        self.failed: Exception | None = None

    def run(self) -> None:
        try:
            while not self.enough.is_set():
                self._read(self._draw.choice(self._workers))
        except Exception as error:
            self.failed = error

    def _read(self, worker: Worker) -> None:
        known, token, ids = worker.known, worker.token, [self._draw.choice(worker.ids.tolist())]
        read, number = functools.partial(self._value, ids), worker.number
        way = self._draw.randrange(3)
        if way == 0:
            self._history.read(number, read, "the shard")
        elif way == 1:
            aged = functools.partial(read, max_staleness_s=AGE_S)
            self._history.read(number, aged, "a replica", age_s=AGE_S)
        else:
            own = functools.partial(read, after=token)
            self._history.read(number, own, "a replica after a push", age_s=1e9, least=known)

    def _value(self, ids: list[int], **options: Any) -> float:
        return float(self.client.pull(TABLE.name, ids, **options)[0, 0])


def kill(local: LocalSet, shard: int, found: Found, again_s: float) -> None:
    """Kill one shard, and wait until it answers a pull and a push again."""
    pid = local.pids().get(shard)
    if pid is None:
        return
    began_s = time.monotonic()
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    if again_s:  # and its next life, while that recovers or has just done so
        time.sleep(again_s)
        began_s = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.kill(local.pids().get(shard, pid), signal.SIGKILL)
    ids = np.array([PROBE * SHARDS + shard])
    with Client(str(local.folder), patience_s=PATIENCE_S) as probe:
        probe.call(shard, "tables")
        probe.pull(TABLE.name, ids)
        found.pulls_s.append(time.monotonic() - began_s)
        found.starts_s.append(max(0.0, started_s(local.pids()[shard]) - began_s))
        zeros: Any = np.zeros((1, 2), np.float32)
        probe.push(TABLE.name, ids, zeros)
        found.pushes_s.append(time.monotonic() - began_s)
        while not all(
            one["whole"] for _, said in probe.call_all("stats") for one in said["followers"]
        ):
            time.sleep(0.005)  # one failure at a time is what one replica is for
        found.whole_s.append(time.monotonic() - began_s)


def started_s(pid: int) -> float:
    """Return when a process started, of the monotonic clock, to 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    suspended_s = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK") - suspended_s


def check(workers: list[Worker], client: Client, found: Found) -> None:
    """Compare every row and variable with the number of acknowledged pushes."""
    variables = client.pull_variables()[1]
    for worker in workers:
        if worker.failed is not None:
            found.wrong.append(f"worker {worker.number}: {worker.failed!r}")
        rows = client.pull(TABLE.name, worker.ids)
        if not (rows == worker.pushes).all():
            said = sorted(set(rows.ravel().tolist()))
            found.wrong.append(
                f"worker {worker.number}: {worker.pushes} pushes, and rows say {said}"
            )
        for i in range(SHARDS):
            value = float(variables[f"w{worker.number}-{i}"][0])
            if value != worker.models:
                found.wrong.append(
                    f"worker {worker.number}: {worker.models} models, and w{worker.number}-{i} says"
                    f" {value}"
                )
        found.acknowledged += worker.pushes


def life(kills: int, seed: int, *, pause_s: float = 0.8, **settings: Any) -> Found:
    """Run one set with this number of kills. pause_s: longest pause between them."""
    draw, found, history = random.Random(seed), Found(), PushHistory()
    threads: list[Worker | Reader] = []
    with tempfile.TemporaryDirectory(prefix="clipper-") as folder:
        given = {"shards": SHARDS, "replicas": 1, "folder": folder, "snapshot_s": 0.0, **settings}
        local = LocalSet(ParamsSettings(**given)).start()
        workers: list[Worker] = []
        try:
            local.wait_ready(PATIENCE_S)
            with Client(folder, patience_s=PATIENCE_S) as client:
                client.create(TABLE)
                names = [f"w{k}-{i}" for k in range(WORKERS) for i in range(SHARDS)]
                zero: Any = np.zeros(1, np.float32)
                client.push_model(
                    dict.fromkeys(names, zero), optimizer="sgd", optimizer_settings={"rate": 1.0}
                )
                workers = [Worker(folder, k, history) for k in range(WORKERS)]
                threads = [*workers, Reader(folder, workers, seed, history)]
                for thread in threads:
                    thread.start()
                for _ in range(kills):
                    time.sleep(draw.uniform(0, pause_s))
                    kill(
                        local,
                        draw.randrange(SHARDS),
                        found,
                        draw.uniform(0, 0.1) if draw.random() < 0.25 else 0.0,
                    )
                for thread in threads:
                    thread.enough.set()
                for thread in threads:
                    thread.join()
                check(workers, client, found)
                found.wrong += history.errors()
                failed = threads[-1].failed
                found.wrong += [f"the reader: {failed!r}"] if failed else []
                found.reads = len(history.reads)
        finally:
            for thread in threads:
                thread.enough.set()
                thread.join()
                thread.client.close()
            local.stop(snapshot=False)
    return found


# how pushes are kept: settings of a set by name
MODES: dict[str, dict[str, Any]] = {
    "a waited replica": {},
    "a log on disk, no replica": {"replicas": 0, "durability": "disk", "snapshot_s": 0.7},
}


def main(quick: bool, kills: int | None = None, seed: int | None = None) -> list[Row]:
    total = kills if kills is not None else 3 if quick else 200
    seed = seed if seed is not None else random.SystemRandom().randrange(1 << 30)
    print(f"params_kills: {total} kills, --seed {seed}", file=sys.stderr)
    return [one for mode in MODES for one in _rows(mode, total, seed)]


def _rows(mode: str, total: int, seed: int) -> list[Row]:
    found = Found()
    for at in range(0, total, LIFE):
        of = seed + at // LIFE
        found.add(life(min(LIFE, total - at), of, **MODES[mode]), f"seed {of}")
        print(
            f"{mode}: {len(found.pulls_s)} kills, {found.acknowledged} pushes,"
            f" {len(found.wrong)} wrong",
            file=sys.stderr,
        )
    note = f"seed {seed}; {found.acknowledged} pushes acknowledged, {found.reads} reads" + "".join(
        f"; {text}" for text in found.wrong
    )
    slowest = max(range(len(found.pulls_s)), key=found.pulls_s.__getitem__)
    wait_s = found.starts_s[slowest]
    why = (
        f"the supervisor, which starts a shard that ends again and again after up to"
        f" {PAUSE_S_MAX:g} s: of the slowest, {wait_s:.2g} s passed before its process started,"
        f" and {found.pulls_s[slowest] - wait_s:.2g} s from there"
    )
    return [
        row(
            f"{total} kills of shards, {mode}: wrong afterwards",
            float(len(found.wrong)),
            "findings",
            goal=Goal("value_at_most", 0),
            note=note,
        ),
        row(
            f"{mode}: from a kill to the next pull, the slowest",
            max(found.pulls_s),
            "s",
            goal=Goal("value_at_most", 2.0),
            bounded_by=why,
        ),
        row(
            f"{mode}: from a kill to the start of the next process",
            Sample(tuple(found.starts_s)),
            "s",
        ),
        row(f"{mode}: from a kill to the next pull", Sample(tuple(found.pulls_s)), "s"),
        row(f"{mode}: from a kill to the next push", Sample(tuple(found.pushes_s)), "s"),
        row(f"{mode}: from a kill to whole replicas", Sample(tuple(found.whole_s)), "s"),
    ]
