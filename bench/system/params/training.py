"""Benchmark of training through three shards, one of which is killed, beside the same run
undisturbed.

The model is a factorization machine in two fields (users, items), on clicks drawn from known
factors. A single worker must see exactly the same parameters with and without the kill, since each
push counts once. Several workers differ from run to run, since their order is chance; for these the
effect of the kill must lie within that variation.
"""

import os
import signal
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import Goal, Row, Sample, row
from clipper.params import Client, TableSpec
from clipper.params.local.local_set import LocalSet
from clipper.settings.params import ParamsSettings

SHARDS, DIM, BATCH = 3, 8, 256
USERS, ITEMS = 400, 200
ITEM = 1 << 40  # ids of items begin here
PATIENCE_S = 60.0
TABLE = TableSpec(
    "factors", DIM, optimizer="adagrad", optimizer_settings={"rate": 0.1}, initializer="normal"
)
Array = np.ndarray[Any, Any]


@dataclass
class Trained:
    """loss: on what nobody was trained on.  rows: of all ids.  kills: how many shards were."""

    loss: float
    rows: Array
    bias: float
    kills: int


class Clicks:
    """Pairs of a user and an item, and whether they clicked."""

    def __init__(self, seed: int) -> None:
        self._draw = np.random.default_rng(seed)
        truth = np.random.default_rng(1)  # the same for all
        self._users = truth.standard_normal((USERS, DIM)) * 0.7
        self._items = truth.standard_normal((ITEMS, DIM)) * 0.7

    def draw(self, n: int) -> tuple[Array, Array, Array]:
        users, items = self._draw.integers(0, USERS, n), self._draw.integers(0, ITEMS, n)
        chance = sigmoid((self._users[users] * self._items[items]).sum(axis=1) - 0.5)
        return users, items + ITEM, (self._draw.random(n) < chance).astype(np.float32)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def step(client: Client, batch: tuple[Array, Array, Array]) -> None:
    users, items, clicked = batch
    versions, variables = client.pull_variables()
    u, i = client.pull(TABLE.name, users), client.pull(TABLE.name, items)
    error = (sigmoid((u * i).sum(axis=1) + variables["bias"][0]) - clicked)[:, None]
    ids, gradients = np.concatenate([users, items]), np.concatenate([error * i, error * u])
    client.push_gradients(
        {"bias": error.mean(axis=0)}, {TABLE.name: (ids, gradients)}, versions=versions
    )


def loss_of(client: Client) -> float:
    users, items, clicked = Clicks(99).draw(20_000)
    u, i = client.pull(TABLE.name, users), client.pull(TABLE.name, items)
    chance = np.clip(
        sigmoid((u * i).sum(axis=1) + client.pull_variables()[1]["bias"][0]), 1e-6, 1 - 1e-6
    )
    return float(-np.mean(clicked * np.log(chance) + (1 - clicked) * np.log(1 - chance)))


class Worker(threading.Thread):
    def __init__(self, folder: str, number: int, steps: int, middle: threading.Barrier) -> None:
        super().__init__(name=f"worker-{number}")
        self._client, self._clicks = (
            Client(folder, worker=number + 1, patience_s=PATIENCE_S),
            Clicks(100 + number),
        )
        self._steps, self._middle = steps, middle
        self.failed: Exception | None = None

    def run(self) -> None:
        try:
            for at in range(self._steps):
                if at == self._steps // 2:
                    self._middle.wait(PATIENCE_S)
                step(self._client, self._clicks.draw(BATCH))
        except Exception as error:
            self.failed = error
            self._middle.abort()
        finally:
            self._client.close()


def train(folder: Path | str, *, workers: int, steps: int, kills: bool) -> Trained:
    """Train. kills: whether to kill shard 1 by SIGKILL in the middle of the steps. Raises the error
    of a worker that failed."""
    local = LocalSet(
        ParamsSettings(shards=SHARDS, replicas=1, folder=str(folder), snapshot_s=0.0)
    ).start()
    killed = 0
    try:
        local.wait_ready(PATIENCE_S)
        with Client(str(folder), patience_s=PATIENCE_S) as client:
            bias: Any = np.zeros(1, np.float32)
            client.push_model(
                {"bias": bias}, [TABLE], optimizer="sgd", optimizer_settings={"rate": 0.05}
            )
            middle = threading.Barrier(workers + 1)
            each = [Worker(str(folder), k, steps, middle) for k in range(workers)]
            for worker in each:
                worker.start()
            middle.wait(PATIENCE_S)
            if kills:
                os.kill(local.pids()[1], signal.SIGKILL)
                killed = 1
            for worker in each:
                worker.join()
            if failed := next(
                (worker.failed for worker in each if worker.failed is not None), None
            ):
                raise failed
            rows = client.pull(
                TABLE.name, np.concatenate([np.arange(USERS), np.arange(ITEMS) + ITEM])
            )
            return Trained(
                loss_of(client), rows, float(client.pull_variables()[1]["bias"][0]), killed
            )
    finally:
        local.stop(snapshot=False)


def rows(quick: bool = False) -> list[Row]:
    steps, turns = (60, 1) if quick else (400, 3)

    def one(workers: int, kills: bool) -> Trained:
        with tempfile.TemporaryDirectory(prefix="clipper-") as folder:
            return train(folder, workers=workers, steps=steps, kills=kills)

    alone = [one(1, kills) for kills in (False, True)]
    differs = float(np.abs(alone[0].rows - alone[1].rows).max()) + abs(
        alone[0].bias - alone[1].bias
    )
    many = [(one(3, False).loss, one(3, True).loss) for _ in range(turns)]
    calm, disturbed = (Sample(values) for values in zip(*many, strict=True))
    note = f"{steps} steps of {BATCH}, shard 1 of {SHARDS} killed in the middle"
    return [
        row(
            "one worker: largest difference of a parameter",
            differs,
            "",
            goal=Goal("value_at_most", 0),
            note=note,
        ),
        row(
            "three workers: loss",
            disturbed,
            "nats",
            "nothing killed",
            calm,
            Goal("at_most", 1.01),
            note=note,
        ),
    ]
