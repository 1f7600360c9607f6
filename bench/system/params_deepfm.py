"""Benchmark of DeepFM on MovieLens-100k: trained through shards, beside the same module in torch.

The model is DeepFM (Guo et al. 2017, section 2): a factorization machine and a multilayer
perceptron over the same embeddings, of seven fields (user, item, age, gender, occupation, hour,
weekday). Labels are ratings of 4 and 5. torch keeps its embeddings in its own process, as
`nn.Embedding`, with Adagrad for this and for the rest, so that both do the same arithmetic. Dense
gradients are its faster way with so few rows; a table of millions needs sparse ones. The data set
is the one that the package recbole ships (`pip install --no-deps recbole`); without it, ids are
drawn at random with the same counts, and no quality is reported.
"""

import importlib.util
import multiprocessing
import os
import resource
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import Goal, Row, absent, interleave, row
from clipper.params import Client, TableSpec
from clipper.params.local.local_set import LocalSet
from clipper.settings.params import ParamsSettings

DIM, BATCH, HIDDEN, RATE = 16, 512, (64, 32), 0.05
FIELDS = ("user", "item", "age", "gender", "occupation", "hour", "weekday")
FIELDS_TABLE = TableSpec(
    "fields",
    DIM + 1,
    optimizer="adagrad",
    optimizer_settings={"rate": RATE},
    initializer="normal",
    initializer_settings={"std": 0.05},
)
Array = np.ndarray[Any, Any]
Torch = Any  # the module, or something of it: it may be absent


@dataclass
class Ratings:
    """ids: i64[n, fields], each field's own from 0. labels: f32[n]. real: of MovieLens."""

    ids: Array
    labels: Array
    sizes: list[int]
    real: bool


def ratings() -> Ratings:
    """Return the ratings in the order of their time."""
    found = importlib.util.find_spec("recbole")
    if found is None or found.origin is None:
        return _drawn()
    folder = Path(found.origin).parent / "dataset_example" / "ml-100k"
    users = {one[0]: one[1:4] for one in _lines(folder / "ml-100k.user")}
    each = sorted(_lines(folder / "ml-100k.inter"), key=lambda one: float(one[3]))
    columns: list[list[str | int]] = [[] for _ in FIELDS]
    for user, item, _, at in each:
        age, gender, occupation = users[user]
        hours = int(float(at)) // 3600
        values: tuple[str | int, ...] = (
            user,
            item,
            age,
            gender,
            occupation,
            hours % 24,
            hours // 24 % 7,
        )
        for column, value in zip(columns, values, strict=True):
            column.append(value)
    coded = [np.unique(np.array(column), return_inverse=True) for column in columns]
    labels = np.array([float(one[2]) >= 4 for one in each], np.float32)
    ids = np.stack([codes for _, codes in coded], axis=1).astype(np.int64)
    return Ratings(ids, labels, [len(values) for values, _ in coded], real=True)


def _lines(path: Path) -> list[list[str]]:
    return [line.split("\t") for line in path.read_text().splitlines()[1:]]


def _drawn() -> Ratings:
    draw, sizes = np.random.default_rng(0), [943, 1682, 61, 2, 21, 24, 7]
    ids = np.stack([draw.integers(0, size, 100_000) for size in sizes], axis=1)
    return Ratings(ids, (draw.random(100_000) < 0.55).astype(np.float32), sizes, real=False)


def rows(quick: bool = False) -> list[Row]:
    try:
        import torch
    except ImportError:
        return [absent("DeepFM on MovieLens-100k", "samples/s", "not measured: no torch")]
    torch.set_num_threads(1)
    data, epochs, turns = ratings(), 1 if quick else 3, 1 if quick else 3
    world = World(torch, data, epochs)
    cases: dict[str, Callable[[], float]] = {
        "torch": lambda: world.torch_alone(sparse=False),
        "sparse": lambda: world.torch_alone(sparse=True),
        "one": lambda: world.shards(1, prefetch=False),
        "one, prefetch": lambda: world.shards(1, prefetch=True),
        "two": lambda: world.shards(2, prefetch=True),
        "two processes": lambda: world.processes(2),
        "DDP": lambda: world.torch_processes(2, exchange=True),
        "no exchange": lambda: world.torch_processes(2, exchange=False),
    }
    found = interleave(cases, turns)
    note = f"batches of {BATCH}, {epochs} epochs" + ("" if data.real else ", ids drawn at random")
    name = "DeepFM on MovieLens-100k"
    out = [
        row(f"{name}, one worker", found["one"], "samples/s", "torch", found["torch"], note=note),
        row(
            f"{name}, one worker",
            found["one"],
            "samples/s",
            "torch, sparse gradients",
            found["sparse"],
            note=note,
        ),
        row(
            f"{name}, one worker with prefetch",
            found["one, prefetch"],
            "samples/s",
            "torch",
            found["torch"],
            Goal("at_least", 0.8),
            note=note,
        ),
        row(
            f"{name}, two workers",
            found["two"],
            "samples/s",
            "torch",
            found["torch"],
            Goal("at_least", 1.3),
            note=note,
        ),
    ]
    two, alone = found["two processes"], found["torch"]
    out.append(
        row(
            f"{name}, two workers as processes",
            two,
            "samples/s",
            "torch",
            alone,
            Goal("at_least", 1.3),
            note=note,
        )
    )
    for case, how in (
        ("DDP", "by DistributedDataParallel"),
        ("no exchange", "that exchange nothing: the most that two processes can do here"),
    ):
        what = f"{name}, two processes of torch {how}"
        out.append(row(what, found[case], "samples/s", "torch", alone, note=note))
    cpu_us = world.cpu_us
    for part in ("workers", "shard"):
        what = f"{name}, two workers as processes: CPU of the {part} for a sample"
        out.append(row(what, cpu_us[part], "us", "torch", cpu_us["torch"]))
    for case, auc in world.quality.items():
        out.append(row(f"{name}, area under the curve, {case}", auc, "", note=note))
    return out


class World:
    """The data, and what trains on it. quality: the last area under the curve of each case."""

    def __init__(self, torch: Torch, data: Ratings, epochs: int) -> None:
        self._torch, self._epochs = torch, epochs
        starts = np.cumsum([0, *data.sizes[:-1]])
        split = len(data.labels) * 9 // 10
        ids = torch.from_numpy(data.ids + starts)
        labels = torch.from_numpy(data.labels)
        self._test = ids[split:], data.labels[split:]
        order = torch.from_numpy(np.random.default_rng(3).permutation(split))
        self._train = [(ids[part], labels[part]) for part in order.split(BATCH)]
        self._size, self._real = sum(data.sizes), data.real
        self.quality: dict[str, float] = {}
        self.cpu_us: dict[str, float] = {}  # for a sample, of the last run

    def torch_alone(self, *, sparse: bool) -> float:
        torch = self._torch
        table = torch.nn.Embedding(self._size, DIM + 1, sparse=sparse)
        torch.nn.init.normal_(table.weight, std=0.05)
        model = deep_fm(torch, table)
        steps = torch.optim.Adagrad(model.parameters(), lr=RATE)

        def step(batch: Torch) -> None:
            steps.zero_grad()
            loss_of(model, batch).backward()
            steps.step()

        begun, cpu_s = time.perf_counter(), time.process_time()
        for batch in self._train * self._epochs:
            step(batch)
        if not sparse:
            self.cpu_us["torch"] = self._by_sample_us(time.process_time() - cpu_s)
        return self._done("torch, sparse gradients" if sparse else "torch", model, begun)

    def shards(self, workers: int, *, prefetch: bool) -> float:
        from clipper.params.torch import Embedding, Worker

        torch = self._torch
        with running_set() as folder:
            clients = [Client(folder) for _ in range(workers)]
            models = [deep_fm(torch, Embedding(client, FIELDS_TABLE)) for client in clients]
            each = [
                Worker(client, model, optimizer="adagrad", settings={"rate": RATE})
                for client, model in zip(clients, models, strict=True)
            ]

            def work(k: int) -> None:
                mine = (self._train * self._epochs)[k::workers]
                for _ in each[k].fit(mine, loss_of, prefetch=ahead if prefetch else None):
                    pass

            begun = time.perf_counter()
            threads = [threading.Thread(target=work, args=(k,)) for k in range(workers)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            case = f"{workers} worker{'s' * (workers > 1)}{', prefetch' * prefetch}"
            each[0].pull()
            return self._done(case, models[0], begun)

    def processes(self, workers: int) -> float:
        """Train by several processes, each of which prefetches."""
        from clipper.params.torch import Embedding, Worker

        context = multiprocessing.get_context("fork")
        ready = context.Barrier(workers + 1)
        before_s = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
        with running_set() as folder, Client(folder) as client:
            shard = int(client.call(0, "stats")["pid"])
            each = [
                context.Process(target=self._work, args=(folder, k, workers, ready))
                for k in range(workers)
            ]
            for process in each:
                process.start()
            ready.wait()
            begun, shard_s = time.perf_counter(), cpu_s_of(shard)
            for process in each:
                process.join()
            shard_s = cpu_s_of(shard) - shard_s
            spent_s = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - before_s
            self.cpu_us |= {
                "workers": self._by_sample_us(spent_s),
                "shard": self._by_sample_us(shard_s),
            }
            rate = self._epochs * self._samples / (time.perf_counter() - begun)
            model = deep_fm(self._torch, Embedding(client, FIELDS_TABLE))
            Worker(client, model, optimizer="adagrad", settings={"rate": RATE}).pull()
            self._done(f"{workers} processes, prefetch", model, begun)
        return rate

    def torch_processes(self, workers: int, *, exchange: bool) -> float:
        """Train a copy of the module in each of several processes, each with its share of the
        batches. exchange: average the gradients of each step by gloo."""
        context = multiprocessing.get_context("fork")
        ready = context.Barrier(workers + 1)
        with tempfile.TemporaryDirectory(prefix="clipper-") as folder:
            place = f"file://{folder}/store" if exchange else ""
            each = [
                context.Process(target=self._torch_work, args=(place, k, workers, ready))
                for k in range(workers)
            ]
            for process in each:
                process.start()
            ready.wait()
            begun = time.perf_counter()
            for process in each:
                process.join()
            return self._epochs * self._samples / (time.perf_counter() - begun)

    def _torch_work(self, place: str, k: int, workers: int, ready: Barrier) -> None:
        torch = self._torch
        module = deep_fm(torch, torch.nn.Embedding(self._size, DIM + 1))
        torch.nn.init.normal_(module.table.weight, std=0.05)
        model = module
        if place:
            torch.distributed.init_process_group(
                "gloo", init_method=place, rank=k, world_size=workers
            )
            model = torch.nn.parallel.DistributedDataParallel(module)
        steps = torch.optim.Adagrad(module.parameters(), lr=RATE)
        mine = (self._train * self._epochs)[k::workers]
        ready.wait()
        for batch in mine[
            : len(self._train) * self._epochs // workers
        ]:  # DDP needs as many of each
            steps.zero_grad()
            loss_of(model, batch).backward()
            steps.step()
        if place:
            torch.distributed.destroy_process_group()

    def _work(self, folder: str, k: int, workers: int, ready: Barrier) -> None:
        from clipper.params.torch import Embedding, Worker

        client = Client(folder)
        model = deep_fm(self._torch, Embedding(client, FIELDS_TABLE))
        worker = Worker(client, model, optimizer="adagrad", settings={"rate": RATE})
        ready.wait()
        for _ in worker.fit((self._train * self._epochs)[k::workers], loss_of, prefetch=ahead):
            pass

    @property
    def _samples(self) -> int:
        return sum(len(labels) for _, labels in self._train)

    def _by_sample_us(self, seconds: float) -> float:
        return 1e6 * seconds / (self._epochs * self._samples)

    def _done(self, case: str, model: Torch, begun: float) -> float:
        took = time.perf_counter() - begun
        if self._real:
            ids, labels = self._test
            with self._torch.no_grad():
                scores = model.eval()(ids).numpy()
            self.quality[case] = _area(scores, labels)
        return self._epochs * self._samples / took


def ahead(model: Torch, batch: Torch) -> None:
    """Request the rows of a batch."""
    model.table.prefetch(batch[0])


def cpu_s_of(pid: int) -> float:
    """Return the CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def deep_fm(torch: Torch, table: Torch) -> Torch:
    nn = torch.nn

    class DeepFM(nn.Module):  # type: ignore[misc,name-defined]
        """forward(ids i64[n, fields]) -> f32[n]. A row is a weight and a vector."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table, self.bias = table, nn.Parameter(torch.zeros(1))
            layers: list[Torch] = []
            width = len(FIELDS) * DIM
            for out in HIDDEN:
                layers += nn.Linear(width, out), nn.ReLU()
                width = out
            self.deep = nn.Sequential(*layers, nn.Linear(width, 1))

        def forward(self, ids: Torch) -> Torch:
            rows = self.table(ids)
            vectors = rows[..., 1:]
            pairs = (vectors.sum(1) ** 2 - (vectors**2).sum(1)).sum(1) / 2
            deep = self.deep(vectors.flatten(1)).squeeze(1)
            return self.bias + rows[..., 0].sum(1) + pairs + deep

    return DeepFM()


def loss_of(model: Torch, batch: Torch) -> Torch:
    import torch

    ids, labels = batch
    return torch.nn.functional.binary_cross_entropy_with_logits(model(ids), labels)


def _area(scores: Array, labels: Array) -> float:
    """Area under the curve of true over false positives."""
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores)] = np.arange(1, len(scores) + 1)
    ones = labels > 0
    count = int(ones.sum())
    return float((ranks[ones].sum() - count * (count + 1) / 2) / (count * (len(labels) - count)))


@contextmanager
def running_set() -> Iterator[str]:
    """The folder of one shard."""
    with tempfile.TemporaryDirectory(prefix="clipper-") as folder:
        local = LocalSet(ParamsSettings(shards=1, folder=folder, snapshot_s=0.0)).start()
        try:
            local.wait_ready(60.0)
            yield folder
        finally:
            local.stop(snapshot=False)
