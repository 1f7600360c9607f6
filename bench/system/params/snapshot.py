"""Benchmark of a snapshot of a shard under pushes, beside the design's predecessor: a dict of
arrays, protobuf, a file.

Our shard is a process. Its snapshot has the optimizer's state and checksums, and is on disk when it
is acknowledged. The other one has the weights only, and leaves them in the page cache. What the
disk takes for as many bytes as ours is measured beside both. `python -m
bench.system.params.snapshot FOLDER` is the process.
"""

import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import Goal, Row, Sample, absent, interleave, row
from bench.system.params.wire import TOKEN, messages, process
from tests.processes import free_ports

DIM, BATCH, PUSHED = 64, 4096, 512
ROW_BYTES = 8 + 4 + 4 * 2 * DIM  # with its stamp and Adagrad's state
NAME = "bench"
SYNCED = "write and fdatasync of as many bytes"
WRITE_BYTES = 1 << 20


def rows(quick: bool = False) -> list[Row]:
    n, turns = (10_000, 2) if quick else (200_000, 5)
    with tempfile.TemporaryDirectory(prefix="rows-") as folder, ours(folder) as client:
        fill(client, n)
        pushing = Pushing(client.connections[0].name.rpartition(" ")[2], n)
        cases = {
            "ours": lambda: snapshot_s(client),
            "ours, beside pushes": lambda: pushing.beside(lambda: snapshot_s(client)),
            SYNCED: lambda: synced_s(Path(folder, "floor"), n * ROW_BYTES),
        }
        missing = ""
        try:
            messages()
            table = dict(enumerate(np.ones((n, DIM), np.float32)))
            cases["dict, protobuf, file"] = lambda: forerunner_s(table, Path(folder, "forerunner"))
        except ImportError as error:
            missing = f"not measured: {error}"
        found = interleave(cases, turns)
        quiet = pushing.alone(max(sum(found["ours, beside pushes"].values), 0.5))
        nbytes = client.call(0, "stats")["tables"][NAME]["nbytes"] / 1e6
    peer, goal = "dict, protobuf, file", Goal("at_most", 0.2)
    note = f"{n} rows of {DIM} floats, {nbytes:.0f} MB with their state, on disk"
    whole = f"snapshot of {n} rows"
    if peer in found:
        disk = found[SYNCED].median
        why = (
            f"to write and sync as many bytes takes {disk / found[peer].median:.2g} x, which is"
            f" {disk / found['ours'].median:.2g} of the snapshot; the rest is the shard's own"
        )
        first = row(whole, found["ours"], "s", peer, found[peer], goal, note, why)
    else:
        first = absent(whole, "s", missing, peer, goal)
    during = Sample(tuple(pushing.took_ms))
    pushed = f"push of {PUSHED} rows beside a snapshot, p99"
    longest = (
        f"{len(during.values)} pushes, the longest {max(during.values):.1f} ms; without"
        f" {max(quiet.values):.1f}"
    )
    return [
        first,
        row(whole, found["ours"], "s", SYNCED, found[SYNCED]),
        row(
            f"{whole}, beside pushes",
            found["ours, beside pushes"],
            "s",
            "nobody pushes",
            found["ours"],
        ),
        row(
            pushed,
            p99(during),
            "ms",
            "no snapshot",
            p99(quiet),
            Goal("value_at_most", 10),
            note=longest,
        ),
    ]


def p99(sample: Sample) -> float:
    return float(np.percentile(sample.values, 99))


# -- ours


@contextmanager
def ours(folder: str) -> Iterator[Any]:
    from clipper.params import Client

    with (
        process(folder, module="bench.system.params.snapshot") as address,
        Client([address], token=TOKEN, answer_s=120.0) as client,
    ):
        yield client


def fill(client: Any, n: int) -> None:
    from clipper.params import TableSpec

    client.create(TableSpec(NAME, DIM))
    ones: Any = np.ones((BATCH, DIM), np.float32)
    for at in range(0, n, BATCH):
        ids = np.arange(at, min(at + BATCH, n))
        client.push(NAME, ids, ones[: ids.size])


def snapshot_s(client: Any) -> float:
    begun = time.perf_counter()
    client.call(0, "snapshot", whole=True)
    return time.perf_counter() - begun


def synced_s(path: Path, nbytes: int) -> float:
    """Write a file of so many bytes, and sync it."""
    data, begun = os.urandom(WRITE_BYTES), time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(-(-nbytes // WRITE_BYTES)):
            file.write(data)
        os.fdatasync(file.fileno())
    took = time.perf_counter() - begun
    path.unlink()
    return took


class Pushing:
    """Another client, which pushes rows of all, one push after the other."""

    def __init__(self, address: str, n: int) -> None:
        from clipper.params import Client

        self._client = Client([address], token=TOKEN)
        self._n, self._draw = n, np.random.default_rng(3)
        self._gradients: Any = np.ones((PUSHED, DIM), np.float32)
        self.took_ms: list[float] = []

    def _push(self, took_ms: list[float]) -> None:
        ids = self._draw.integers(0, self._n, PUSHED)
        begun = time.perf_counter()
        self._client.push(NAME, ids, self._gradients)
        took_ms.append((time.perf_counter() - begun) * 1e3)

    def alone(self, seconds: float) -> Sample:
        took_ms: list[float] = []
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            self._push(took_ms)
        return Sample(tuple(took_ms))

    def beside(self, work: Any) -> float:
        ended = threading.Event()

        def run() -> None:
            while not ended.is_set():
                self._push(self.took_ms)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            return float(work())
        finally:
            ended.set()
            thread.join()


def serve(folder: str) -> None:
    from clipper.params.shard.server import ShardServer
    from clipper.params.shard.shard import ShardConfig
    from clipper.settings.params import ParamsSettings

    (port,) = free_ports(1)
    address = f"tcp:127.0.0.1:{port}"
    settings = ParamsSettings(shards=1, snapshot_s=0.0, snapshots_max=1)
    server = ShardServer(
        ShardConfig(0, (address,), settings, TOKEN, Path(folder, "shard-0"))
    ).start()
    server.ready.wait(20)
    print(address, flush=True)
    server.wait()


# -- the forerunner's way


def forerunner_s(table: dict[int, Any], path: Path) -> float:
    """Measure ElasticDL's way: values are collected from a dict, put into a message, and written to
    a file."""
    _, tensor = messages()
    begun = time.perf_counter()
    values = np.stack(list(table.values()))
    said = tensor(name=NAME, data_type=1, dim=values.shape, content=values.tobytes(), indices=table)
    path.write_bytes(said.SerializeToString())
    return time.perf_counter() - begun


if __name__ == "__main__":
    serve(sys.argv[1])
