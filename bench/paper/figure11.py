"""Figure 11: throughput and latency beside a server that is tightly integrated with its models.

The paper's peer is TensorFlow Serving: models run inside the server's process, with a batch size
that is tuned by hand. It is not in the Python package index; in its place stands what it does at
heart: a queue and a thread that calls the model in the same process, with the best of several
static batch sizes. No frame, no socket and no other process lies between caller and model, so it
bounds what any server can reach. Three networks stand for those of MNIST, CIFAR-10 and ImageNet:
cheap, in between, and dear.
"""

import collections
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np

import clipper
from bench.harness import Goal, Row, Sample, absent, interleave, row

SHAPES = {"MNIST": (1, 28, 28), "CIFAR-10": (3, 32, 32), "ImageNet": (3, 64, 64)}
BATCHES = (8, 32, 128, 512)  # the static sizes that the peer is tuned over
OUTSTANDING = {"MNIST": 1024, "CIFAR-10": 256, "ImageNet": 32}
SLO_MS = 5_000.0
GOALS = {"MNIST": 0.8, "CIFAR-10": 0.9, "ImageNet": 0.95}
Predict = Callable[[Any], Any]


def main(quick: bool) -> list[Row]:
    """Measure both servers in turns, for one network after another."""
    try:
        import torch
    except ImportError:
        return [absent("throughput", "queries/s", "torch is not installed: make test WITHOUT=''")]
    torch.set_num_threads(1)
    seconds, repetitions = (0.3, 1) if quick else (2.0, 5)
    return [
        one for name, shape in SHAPES.items() for one in compared(name, shape, seconds, repetitions)
    ]


def compared(name: str, shape: tuple[int, int, int], seconds: float, repetitions: int) -> list[Row]:
    """Serve one network with both servers; measure them in turns."""
    model, window = network(name, shape), OUTSTANDING[name]
    inputs = list(np.random.default_rng(1).random((64, *shape), np.float32))
    tuned = max(BATCHES, key=lambda size: tight_rate(model, inputs, size, window, seconds / 4))
    type_ = f"f32[{','.join(map(str, shape))}]"
    tight = TightServer(model, tuned)
    with clipper.start(server={"model_threads": 1}) as server:
        handle = server.deploy(name.lower(), model, input=type_, cache=False)
        predicts: dict[str, Predict] = {
            "clipper": lambda x: handle.predict(x, slo_ms=SLO_MS),
            "tight": tight.predict,
        }
        latencies: dict[str, list[float]] = {case: [] for case in predicts}

        def rate(case: str) -> float:
            per_s, mean_ms = closed_loop(predicts[case], inputs, window, seconds)
            latencies[case].append(mean_ms)
            return per_s

        found = interleave({case: partial(rate, case) for case in predicts}, repetitions)
    tight.close()
    means = {case: Sample(tuple(values[1:])) for case, values in latencies.items()}
    return rows_of(name, found, means, tuned)


def network(name: str, shape: tuple[int, int, int]) -> Predict:
    """Build a network with random weights; it takes f32[n, *shape] and returns n labels."""
    import torch
    from torch import nn

    torch.manual_seed(1)
    channels, depth = {"MNIST": (8, 1), "CIFAR-10": (24, 2), "ImageNet": (48, 4)}[name]
    layers: list[nn.Module] = []
    entering = shape[0]
    for level in range(depth):
        leaving = channels * 2**level
        layers += [nn.Conv2d(entering, leaving, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        entering = leaving
    side = shape[1] // 2**depth
    module = nn.Sequential(*layers, nn.Flatten(), nn.Linear(entering * side * side, 10)).eval()

    def predict(inputs: Any) -> Any:
        torch.set_num_threads(1)
        with torch.inference_mode():
            return module(torch.from_numpy(np.ascontiguousarray(inputs))).argmax(1).numpy()

    return predict


class TightServer:
    """A queue and a thread that calls the model in this process, in batches of at most `size`."""

    def __init__(self, model: Predict, size: int) -> None:
        self._model, self._size = model, size
        self._queue: queue.SimpleQueue[tuple[Any, Future[int]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def predict(self, x: Any) -> "Future[int]":
        """Queue one input; return the future of its label."""
        future: Future[int] = Future()
        self._queue.put((x, future))
        return future

    def close(self) -> None:
        """Stop the thread after what is queued."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            batch = [first]
            while len(batch) < self._size:
                try:
                    following = self._queue.get_nowait()
                except queue.Empty:
                    break
                if following is None:
                    self._queue.put(None)
                    break
                batch.append(following)
            labels = self._model(np.stack([x for x, _ in batch]))
            for (_, future), label in zip(batch, labels.tolist(), strict=True):
                future.set_result(label)


def tight_rate(model: Predict, inputs: list[Any], size: int, window: int, seconds: float) -> float:
    """Return the throughput of a tight server with one batch size."""
    server = TightServer(model, size)
    try:
        return closed_loop(server.predict, inputs, window, seconds)[0]
    finally:
        server.close()


def closed_loop(
    predict: Predict, inputs: list[Any], window: int, seconds: float
) -> tuple[float, float]:
    """Keep `window` queries outstanding; return the answers a second and their mean latency in
    ms."""
    waiting: collections.deque[tuple[float, Any]] = collections.deque()
    taken, answered, number = 0.0, 0, 0
    begun = time.perf_counter()
    while (now := time.perf_counter()) < begun + seconds or waiting:
        if len(waiting) == window or now >= begun + seconds:
            sent, future = waiting.popleft()
            future.result()
            taken += time.perf_counter() - sent
            answered += 1
        else:
            waiting.append((now, predict(inputs[number % len(inputs)])))
            number += 1
    return answered / (time.perf_counter() - begun), taken / answered * 1000


def rows_of(name: str, found: dict[str, Sample], means: dict[str, Sample], tuned: int) -> list[Row]:
    """Return throughput and mean latency of one network beside the tight server's."""
    peer = f"in one process, batches of {tuned}"
    paper = "the paper: within 0 to 18 % of TensorFlow Serving"
    share = Goal("at_least", GOALS[name])
    copies = "the copy of each row to another process"
    return [
        row(
            f"{name}: throughput",
            found["clipper"],
            "queries/s",
            peer,
            found["tight"],
            share,
            paper,
            copies,
        ),
        row(f"{name}: mean latency", means["clipper"], "ms", peer, means["tight"]),
    ]
