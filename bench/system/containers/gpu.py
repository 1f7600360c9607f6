"""Models on a GPU: throughput and latency beside a bare loop of torch with the same network.

The bare loop copies pinned rows to the device, replays the CUDA graph of the best static batch size
and copies outputs back; nothing is served. Without a GPU the same code runs on the CPU, eagerly:
then the rows show that it runs, and carry no goal.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import clipper
from bench.harness import Goal, Row, Sample, absent, interleave, open_loop, row
from clipper.load.open_loop import arrivals

# Width of the network by how long a batch of BATCH rows takes on a GPU of today, and the goal.
NETWORKS = {
    "batches of 2 ms and more": (768, 0.95),
    "batches of 0.3 to 2 ms": (192, 0.90),
    "batches below 0.3 ms": (32, 0.80),
}
SHAPE = (3, 32, 32)
BATCH = 64
SLO_MS = 60_000.0
MODEL = """
import torch
from bench.system.containers.gpu import network
from clipper_container.gpu import GpuModel

model = GpuModel(network({width}), input="f32[3,32,32]", device="{device}", dtype="{dtype}",
                 batch_max={batch})
"""


def main(quick: bool = False) -> list[Row]:
    """Measure each network bare and served, in turns."""
    try:
        import torch
    except ImportError:
        return [absent("GPU", "rows/s", "torch is not installed: pip install torch")]
    has_gpu = torch.cuda.is_available()
    place = torch.cuda.get_device_name(0) if has_gpu else "no GPU: the CPU in its place"
    result: list[Row] = []
    for name, (width, bound) in NETWORKS.items():
        if not has_gpu and width > 32:
            result.append(absent(f"{name}: throughput", "rows/s", place))
            continue
        result += measured(name, width, bound if has_gpu else None, place, quick)
    return result


def network(width: int) -> Any:
    """Build a convolutional network with random weights, f32[n, 3, 32, 32] to f32[n, 10]."""
    import torch
    from torch import nn

    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 10),
    )


def measured(name: str, width: int, bound: float | None, place: str, quick: bool) -> list[Row]:
    """Return throughput, latency of one row, goodput and padding of one network."""
    import tempfile

    device, dtype = ("cuda:0", "bf16") if bound is not None else ("cpu", "f32")
    bare = Bare(width, device, dtype)
    seconds, repetitions = (0.5, 1) if quick else (3.0, 5)
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder, clipper.start() as server:
        text = MODEL.format(width=width, device=device, dtype=dtype, batch=BATCH)
        Path(folder, "served_network.py").write_text(text)
        handle = server.deploy(
            "network",
            "served_network:model",
            code=[folder, str(Path(__file__).resolve().parents[3])],
            batching={"mode": "fit", "size_max": BATCH},
            cache=False,
        )
        server.wait_ready(timeout=300)
        found = interleave(
            {
                "bare": lambda: bare.rows_per_s(seconds),
                "served": lambda: rows_per_s(handle, seconds),
                "bare one": lambda: bare.one_us(50),
                "served one": lambda: one_us(handle, 50),
            },
            repetitions,
        )
        rate = 0.6 * found["served"].median
        goodput = goodput_share(handle, rate, seconds)
    goal = Goal("at_least", bound) if bound is not None else None
    return [
        row(f"{name}: throughput", found["served"], "rows/s", "bare", found["bare"], goal, place),
        row(f"{name}: one row", found["served one"], "us", "bare", found["bare one"], note=place),
        row(f"{name}: goodput at 0.6 of capacity", goodput, "share of offered", note=place),
    ]


class Bare:
    """The loop that nothing can beat: static batches of the best size, without a server."""

    def __init__(self, width: int, device: str, dtype: str) -> None:
        import torch

        from clipper_container.gpu import CannotCapture, open_device
        from clipper_container.gpu.model import CASTS

        self._torch, self._device = torch, open_device(device)
        place, cast = self._device.torch_device, CASTS[dtype]
        module = network(width).eval().to(place, cast)
        self._stream = self._device.stream()
        self._host_in = self._device.host_buffer((BATCH, *SHAPE), torch.float32)
        self._in = torch.zeros((BATCH, *SHAPE), device=place)
        self._out = torch.zeros((BATCH, 10), device=place)
        self._host_out = self._device.host_buffer((BATCH, 10), torch.float32)
        self._calls: dict[int, Callable[[], None]] = {}
        for size in (1, BATCH // 4, BATCH // 2, BATCH):

            def forward(size: int = size) -> None:
                with torch.inference_mode():
                    self._out[:size].copy_(module(self._in[:size].to(cast)).float())

            try:
                self._calls[size] = self._device.capture(forward, self._stream)
            except CannotCapture:
                self._calls[size] = forward

    def rows_per_s(self, seconds: float) -> float:
        """Return the throughput with the best batch size."""
        return max(self._rate(size, seconds / len(self._calls)) for size in self._calls)

    def _rate(self, size: int, seconds: float) -> float:
        rows, begun = 0, time.perf_counter()
        while time.perf_counter() < begun + seconds:
            for _ in range(4):
                self._step(size)
            self._stream.record().synchronize()
            rows += 4 * size
        return rows / (time.perf_counter() - begun)

    def one_us(self, count: int) -> float:
        """Return the median time of a batch of one row in microseconds."""
        times = []
        for _ in range(count):
            begun = time.perf_counter_ns()
            self._step(1)
            self._stream.record().synchronize()
            times.append((time.perf_counter_ns() - begun) / 1000)
        return float(np.median(times))

    def _step(self, size: int) -> None:
        with self._stream.use():
            self._in[:size].copy_(self._host_in[:size], non_blocking=True)
            self._calls[size]()
            self._host_out[:size].copy_(self._out[:size], non_blocking=True)


def rows_per_s(handle: Any, seconds: float) -> float:
    """Return the throughput of the served network, with 4 to 8 batches of rows outstanding."""
    images = np.random.default_rng(1).random((4 * BATCH, *SHAPE), np.float32)
    rows, begun = 0, time.perf_counter()
    waiting = handle.predict_many(images, slo_ms=SLO_MS)
    while time.perf_counter() < begun + seconds:
        following = handle.predict_many(images, slo_ms=SLO_MS)
        waiting.result()
        waiting, rows = following, rows + len(images)
    waiting.result()
    return (rows + len(images)) / (time.perf_counter() - begun)


def one_us(handle: Any, count: int) -> float:
    """Return the median time of a query that is alone, in microseconds."""
    images = np.random.default_rng(2).random((count, *SHAPE), np.float32)
    times = []
    for image in images:
        begun = time.perf_counter_ns()
        handle.predict(image, slo_ms=SLO_MS).result()
        times.append((time.perf_counter_ns() - begun) / 1000)
    return float(np.median(times))


def goodput_share(handle: Any, rate: float, seconds: float) -> Sample:
    """Return the share of a Poisson load that is answered within ten times the median latency."""
    images = list(np.random.default_rng(3).random((256, *SHAPE), np.float32))
    load = open_loop(
        lambda x: handle.predict(x, slo_ms=SLO_MS), images, arrivals(rate, seconds, seed=1)
    )
    limit_us = 10 * load.quantile_us(0.5)
    return Sample((load.within(limit_us) / load.offered,))
