"""DeepFM on MovieLens-100k, and one process that trains it: with torch alone, or through shards.

The model is DeepFM (Guo et al. 2017, section 2): a factorization machine and a multilayer
perceptron over the same embeddings, of seven fields (user, item, age, gender, occupation, hour,
weekday). Labels are ratings of 4 and 5. The data set is the one that the package recbole ships
(`pip install --no-deps recbole`); without it, ids are drawn at random with the same counts.
"""

import datetime
import importlib.util
import os
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from clipper.params import Client, TableSpec
from clipper.params.client.client import Pending

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
LIMIT_S = 120.0  # of each answer of a training process
COMPUTING, SENDING, WAITING = "forward and backward", "sending requests", "waiting"
Array = np.ndarray[Any, Any]
Torch = Any  # the module, or something of it: it may be absent


# -- the data


@dataclass
class Ratings:
    """ids: i64[n, fields], each field's own from 0. labels: f32[n]. real: of MovieLens."""

    ids: Array
    labels: Array
    sizes: list[int]
    real: bool


def data_folder() -> Path | None:
    """Return the folder of the data set; None without recbole."""
    found = importlib.util.find_spec("recbole")
    if found is None or found.origin is None:
        return None
    return Path(found.origin).parent / "dataset_example" / "ml-100k"


def ratings() -> Ratings:
    """Return the ratings in the order of their time."""
    folder = data_folder()
    if folder is None:
        return _drawn()
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


# -- what a step spends its time on


class StepTimes:
    """CPU time by part of a step; a part does not count what is measured within it. Threads:
    one."""

    def __init__(self) -> None:
        self.by_part_s: defaultdict[str, float] = defaultdict(float)
        self._inner_s = 0.0

    def timed(self, part: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, whose calls are measured."""

        def measured(*arguments: object, **named: object) -> Any:
            begun_s, before_s = time.thread_time(), self._inner_s
            try:
                return run(*arguments, **named)
            finally:
                took_s = time.thread_time() - begun_s
                self.by_part_s[part] += took_s - (self._inner_s - before_s)
                self._inner_s = before_s + took_s

        return measured


class TimedClient:
    """A client of shards, whose requests and waits are measured."""

    def __init__(self, client: Client, times: StepTimes) -> None:
        self._client, self._times = client, times

    def __len__(self) -> int:
        return len(self._client)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        if name.startswith("pull"):
            return self._times.timed(WAITING, found)
        if name.startswith(("prefetch", "start_")):
            send = self._times.timed(SENDING, found)
            return lambda *given, **named: self._pending(send(*given, **named))
        return found

    def _pending(self, pending: Pending[Any]) -> Pending[Any]:
        return Pending(self._times.timed(WAITING, pending.result))


class TimedLoss:
    """A loss, whose backward pass is measured."""

    def __init__(self, loss: Torch, times: StepTimes) -> None:
        self.detach = loss.detach
        self.backward = times.timed(COMPUTING, loss.backward)


# -- training


@dataclass(frozen=True)
class Case:
    """A way to train. by_shards: rows and variables are on a shard; else each process has its own.

    processes, threads: of workers, and of each process. prefetch: as of Worker.fit. sparse: torch's
    gradients of rows. exchange: processes of torch average gradients by gloo.
    """

    by_shards: bool = False
    processes: int = 1
    threads: int = 1
    prefetch: bool = False
    sparse: bool = False
    exchange: bool = False


@dataclass(frozen=True)
class Run:
    """A training of one process. begun_s, ended_s: of the host's monotonic clock. by_part_s: CPU
    time of the first worker, by part of a step."""

    samples: int
    begun_s: float
    ended_s: float
    cpu_s: float
    by_part_s: dict[str, float]


class Trainer:
    """Trains the model, in the order prepare, run, finish; then again. number: of its process."""

    def __init__(self, number: int, epochs: int) -> None:
        import torch

        torch.set_num_threads(1)
        self._torch, self._number = torch, number
        data = ratings()
        starts = np.cumsum([0, *data.sizes[:-1]])
        split = len(data.labels) * 9 // 10
        ids, labels = torch.from_numpy(data.ids + starts), torch.from_numpy(data.labels)
        order = torch.from_numpy(np.random.default_rng(3).permutation(split))
        self._batches = [(ids[part], labels[part]) for part in order.split(BATCH)] * epochs
        self._test = (ids[split:], data.labels[split:]) if data.real else None
        self._size = sum(data.sizes)
        self._open = ExitStack()
        self._times = StepTimes()
        self._model: Torch = None
        self._train: Callable[[], object] = lambda: None
        self._refresh: Callable[[], None] = lambda: None
        self._samples = 0

    def prepare(self, case: Case, folder: str) -> None:
        """Make the model and what trains it. folder: of the shards, or of files that processes of
        torch find each other by."""
        self._times, self._samples = StepTimes(), 0
        self._refresh = lambda: None
        (self._prepare_workers if case.by_shards else self._prepare_torch)(case, folder)

    def run(self) -> Run:
        """Train."""
        begun_s, cpu_s = time.perf_counter(), time.process_time()
        self._train()
        ended_s, cpu_s = time.perf_counter(), time.process_time() - cpu_s
        return Run(self._samples, begun_s, ended_s, cpu_s, dict(self._times.by_part_s))

    def finish(self) -> float | None:
        """Return the area under the curve, of ratings that are later than those of training; None
        for ids drawn at random."""
        self._refresh()
        area = None
        if self._test is not None:
            ids, labels = self._test
            with self._torch.no_grad():
                area = area_under_curve(self._model.eval()(ids).numpy(), labels)
        self._open.close()
        return area

    def _share(self, number: int, count: int) -> list[Torch]:
        """Return the batches of one worker of `count`; all have the same number."""
        mine = self._batches[number::count][: len(self._batches) // count]
        self._samples += sum(len(labels) for _, labels in mine)
        return mine

    def _prepare_torch(self, case: Case, folder: str) -> None:
        torch = self._torch
        table = torch.nn.Embedding(self._size, DIM + 1, sparse=case.sparse)
        torch.nn.init.normal_(table.weight, std=0.05)
        model = self._model = deep_fm(torch, table)
        if case.exchange:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            torch.distributed.init_process_group(
                "gloo",
                init_method=f"file://{folder}/store",
                rank=self._number,
                world_size=case.processes,
                timeout=datetime.timedelta(seconds=LIMIT_S),
            )
            self._open.callback(torch.distributed.destroy_process_group)
            model = torch.nn.parallel.DistributedDataParallel(model)
        steps = torch.optim.Adagrad(model.parameters(), lr=RATE)
        batches = self._share(self._number, case.processes)
        loss = self._timed_loss(self._times)

        def train() -> None:
            for batch in batches:
                steps.zero_grad()
                loss(model, batch).backward()
                steps.step()

        self._train = train

    def _prepare_workers(self, case: Case, folder: str) -> None:
        from clipper.params.torch import Embedding, Worker

        fits: list[Callable[[], object]] = []
        first = self._number * case.threads
        for number in range(first, first + case.threads):
            times = StepTimes() if fits else self._times
            client: Any = TimedClient(self._open.enter_context(Client(folder)), times)
            model = deep_fm(self._torch, Embedding(client, FIELDS_TABLE))
            worker = Worker(client, model, optimizer="adagrad", settings={"rate": RATE})
            if not fits:
                self._model, self._refresh = model, worker.pull
            fits.append(self._fit(worker, number, case, self._timed_loss(times)))

        def train() -> None:
            with ThreadPoolExecutor(case.threads) as pool:
                for fitted in [pool.submit(fit) for fit in fits]:
                    fitted.result()

        self._train = train

    def _fit(
        self, worker: Any, number: int, case: Case, loss: Callable[..., Torch]
    ) -> Callable[[], object]:
        batches = self._share(number, case.processes * case.threads)
        return lambda: list(worker.fit(batches, loss, prefetch=ahead if case.prefetch else None))

    def _timed_loss(self, times: StepTimes) -> Callable[..., Torch]:
        forward = times.timed(COMPUTING, self._loss_of)
        return lambda model, batch: TimedLoss(forward(model, batch), times)

    def _loss_of(self, model: Torch, batch: Torch) -> Torch:
        ids, labels = batch
        return self._torch.nn.functional.binary_cross_entropy_with_logits(model(ids), labels)


def ahead(model: Torch, batch: Torch) -> None:
    """Request the rows of a batch."""
    model.table.prefetch(batch[0])


def deep_fm(torch: Torch, table: Torch) -> Torch:
    """Return the module over a table of rows, each of which is a weight and a vector."""
    nn = torch.nn

    class DeepFM(nn.Module):  # type: ignore[misc,name-defined]
        """forward(ids i64[n, fields]) -> f32[n]."""

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


def area_under_curve(scores: Array, labels: Array) -> float:
    """Return the area under the curve of true over false positives."""
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores)] = np.arange(1, len(scores) + 1)
    ones = labels > 0
    count = int(ones.sum())
    return float((ranks[ones].sum() - count * (count + 1) / 2) / (count * (len(labels) - count)))
