"""Benchmark of DeepFM on MovieLens-100k: trained through shards, beside the same module in torch.

torch keeps its embeddings in its own process, as `nn.Embedding`, with Adagrad for this and for the
rest, so that both do the same arithmetic. Dense gradients are its faster way with so few rows; a
table of millions needs sparse ones. Two processes train all cases in turns, or one of them does;
the shard is a third. Without recbole (params_deepfm_training) no quality is reported.
"""

import functools
import importlib.util
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.harness import Goal, Row, Sample, absent, interleave, row
from bench.processes import ObjectProcess, call_all
from bench.system.params.deepfm_training import (
    BATCH,
    COMPUTING,
    LIMIT_S,
    SENDING,
    WAITING,
    Case,
    Run,
    Trainer,
    data_folder,
)
from clipper.params.local.local_set import LocalSet
from clipper.settings.params import ParamsSettings

NAME = "DeepFM on MovieLens-100k"
TWO = f"{NAME}, two workers"
ONE = "one worker with prefetch"
THE_REST = "the rest (of torch: the optimizer)"
CASES = {
    "torch": Case(),
    "torch, sparse gradients": Case(sparse=True),
    "one worker": Case(by_shards=True),
    ONE: Case(by_shards=True, prefetch=True),
    "two workers as threads": Case(by_shards=True, prefetch=True, threads=2),
    "two workers": Case(by_shards=True, prefetch=True, processes=2),
    "two of torch, exchanging": Case(processes=2, exchange=True),
    "two of torch, alone": Case(processes=2),
}
CPU_BOUND = (
    "CPU: see how many times torch two cores allow, and what a worker's sample takes beside torch's"
)


def rows(quick: bool = False) -> list[Row]:
    """Measure all cases in turns."""
    if importlib.util.find_spec("torch") is None:
        return [absent(NAME, "samples/s", "not measured: no torch")]
    epochs, turns = (1, 1) if quick else (3, 3)
    with ExitStack() as stack:
        trainers = [
            stack.enter_context(ObjectProcess(Trainer, number, epochs, limit_s=LIMIT_S))
            for number in range(2)
        ]
        measured = MeasuredCases(trainers)
        found = interleave({name: functools.partial(measured.rate, name) for name in CASES}, turns)
    note = f"batches of {BATCH}, {epochs} epochs"
    if data_folder() is None:
        note += ", ids drawn at random"
    rates = _rates(found, note, measured.bound_of_one())
    return [*rates, *measured.bounds(), *measured.quality_rows(note)]


def _rates(found: dict[str, Sample], note: str, bound_of_one: str) -> list[Row]:
    """Return the rates beside torch's. bound_of_one: what bounds one worker."""

    def beside(
        what: str, case: str, goal: Goal | None = None, against: str = "torch", why: str = ""
    ) -> Row:
        anchor = found[against]
        return row(f"{NAME}, {what}", found[case], "samples/s", against, anchor, goal, note, why)

    threads = "the lock of one interpreter: see the same workers as processes"
    return [
        beside("one worker", "one worker"),
        beside("one worker", "one worker", against="torch, sparse gradients"),
        beside(ONE, ONE, Goal("at_least", 0.8), why=bound_of_one),
        beside(
            "two workers as threads", "two workers as threads", Goal("at_least", 1.3), why=threads
        ),
        beside("two workers", "two workers", Goal("at_least", 1.3), why=CPU_BOUND),
        beside("two processes of torch by DistributedDataParallel", "two of torch, exchanging"),
        beside(
            "two processes of torch that exchange nothing: the most that two can do here",
            "two of torch, alone",
        ),
    ]


class MeasuredCases:
    """Trains each case, and records its time by part, over all turns."""

    def __init__(self, trainers: Sequence[ObjectProcess]) -> None:
        self._trainers = trainers
        self._runs: dict[str, list[Run]] = {name: [] for name in CASES}
        self._shard_s: defaultdict[str, float] = defaultdict(float)
        self._quality: dict[str, float] = {}

    def rate(self, name: str) -> float:
        """Train one case; return samples in a second."""
        case = CASES[name]
        trainers = self._trainers[: case.processes]
        with _files(case) as (folder, shard):
            call_all(trainers, "prepare", case, folder)
            before_s = cpu_s_of(shard)
            runs: list[Run] = call_all(trainers, "run")
            self._shard_s[name] += cpu_s_of(shard) - before_s
            areas = call_all(trainers, "finish")
        if areas[0] is not None:
            self._quality[name] = areas[0]
        self._runs[name] += runs
        seconds = max(run.ended_s for run in runs) - min(run.begun_s for run in runs)
        return sum(run.samples for run in runs) / seconds

    def bound_of_one(self) -> str:
        """Say what bounds one worker with prefetch: its own CPU time for a sample."""
        worker, torch, parts = self._cpu_us(ONE), self._cpu_us("torch"), self._by_part_us(ONE)
        return (
            f"the worker's own CPU: {worker:.2f} us a sample, torch's {torch:.2f}, which alone"
            f" allows {torch / worker:.2g} x; {parts[SENDING]:.2f} of it sends requests, and"
            f" {parts[WAITING]:.2f} waits for answers"
        )

    def bounds(self) -> list[Row]:
        """Return what bounds two workers: CPU time by part of a step, and waits."""
        workers, torch = self._cpu_us("two workers"), self._cpu_us("torch")
        shard = 1e6 * self._shard_s["two workers"] / self._samples("two workers")
        parts, alone = self._by_part_us("two workers"), self._by_part_us("torch")
        runs = self._runs["two workers"]
        idle = 1 - sum(run.cpu_s for run in runs) / sum(run.ended_s - run.begun_s for run in runs)
        most = f"{TWO}: times torch that the CPU time of a sample allows on two cores"
        cpu = f"{TWO}: CPU for a sample"
        return [
            row(f"{cpu}, workers", workers, "us", "torch", torch),
            *(
                row(f"{cpu}, workers, {part}", parts[part], "us", "torch", alone[part])
                for part in (COMPUTING, SENDING, WAITING, THE_REST)
            ),
            row(f"{cpu}, shard", shard, "us", "torch", torch),
            row(most, 2 * torch / (workers + shard), "x"),
            row(
                f"{TWO}: share of a worker's time without a core, or in which it waits",
                idle,
                "share",
            ),
        ]

    def quality_rows(self, note: str) -> list[Row]:
        """Return the quality of each case."""
        return [
            row(f"{NAME}, area under the curve, {case}", area, "", note=note)
            for case, area in self._quality.items()
        ]

    def _samples(self, name: str) -> int:
        return sum(run.samples for run in self._runs[name])

    def _cpu_us(self, name: str) -> float:
        return 1e6 * sum(run.cpu_s for run in self._runs[name]) / self._samples(name)

    def _by_part_us(self, name: str) -> defaultdict[str, float]:
        """Return the CPU time of a sample by part, in us."""
        parts: defaultdict[str, float] = defaultdict(float)
        for run in self._runs[name]:
            named = run.by_part_s | {THE_REST: run.cpu_s - sum(run.by_part_s.values())}
            for part, seconds in named.items():
                parts[part] += 1e6 * seconds / self._samples(name)
        return parts


def cpu_s_of(pid: int) -> float:
    """Return the CPU time of a process so far; 0 for none."""
    if not pid:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def _files(case: Case) -> Iterator[tuple[str, int]]:
    """Return a folder for a case, and the process of the shard that runs there, or 0."""
    with tempfile.TemporaryDirectory(prefix="clipper-") as folder:
        if not case.by_shards:
            yield folder, 0
            return
        local = LocalSet(ParamsSettings(shards=1, folder=folder, snapshot_s=0.0)).start()
        try:
            local.wait_ready(60.0)
            yield folder, local.pids()[0]
        finally:
            local.stop(snapshot=False)
