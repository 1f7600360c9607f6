"""The reference: what a competent user would write without clipper: Future + queue + thread +
np.stack + unix socket + LRU dict.

It is no straw man: the fastest queue of the standard library (SimpleQueue, far cheaper than
queue.Queue), batches as large as what waits, one system call each way, an LRU of one dict and one
lock. It has no deadlines, no metrics, no joining of equal queries and no recovery: it does less
than the thing it is compared with.
"""

import asyncio
import os
import queue
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from bench.harness import Row, Sample, awaited_ns, interleave, per_call_ns, row, window_ns

HEAD = struct.Struct("<II")  # rows, elements of a row
BATCH_MAX = 1024

# key (None: x is an array of rows), x, future (None: the end)
Item = tuple[bytes | None, Any, Future[Any] | None]
Batch = list[Any]


class Reference:
    """One model in a process of its own, behind `predict(x) -> Future`. x: `dtype`[n], all of the
    same length."""

    def __init__(self, cache_entries: int = 100_000, dtype: str = "f8") -> None:
        self._cache: OrderedDict[bytes, float] = OrderedDict()
        self._cache_entries = cache_entries
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._held: Item | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="reference-")
        path = os.path.join(self._folder.name, "container.sock")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            listener.settimeout(30)
            command = [sys.executable, "-m", "bench.system.anchors.reference", path, dtype]
            self._container = subprocess.Popen(command, cwd=Path(__file__).resolve().parents[3])
            self._socket = listener.accept()[0]
        self._socket.settimeout(None)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def predict(self, x: NDArray[np.float64]) -> "Future[Any]":
        future: Future[Any] = Future()
        key = x.tobytes()
        if self._cache_entries:
            with self._lock:
                known = self._cache.get(key)
                if known is not None:
                    self._cache.move_to_end(key)
            if known is not None:
                future.set_result(known)
                return future
        self._queue.put((key, x, future))
        return future

    def predict_many(self, rows: NDArray[np.float64]) -> "Future[Any]":
        """Return one future for a whole array; it is not cached."""
        future: Future[Any] = Future()
        self._queue.put((None, rows, future))
        return future

    def close(self) -> None:
        self._queue.put((None, None, None))
        self._thread.join()
        self._socket.close()
        self._container.wait()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        """Run the IO thread. It handles both directions, because a second thread would add 40 us to
        a round trip."""
        buffer = bytearray(1 << 20)
        while batch := self._next_batch():
            many = batch[0][0] is None
            rows = batch[0][1] if many else np.stack([x for _, x, _ in batch])
            self._socket.sendall(HEAD.pack(*rows.shape) + rows.tobytes())
            n = len(rows)
            if len(buffer) < 8 * n:
                buffer = bytearray(8 * n)
            receive_exactly(self._socket, memoryview(buffer)[: 8 * n])
            outputs = np.frombuffer(buffer, np.float64, n)
            if many:
                batch[0][2].set_result(outputs.copy())
                continue
            values = outputs.tolist()
            if self._cache_entries:
                self._remember(batch, values)
            for (_, _, future), value in zip(batch, values, strict=True):
                future.set_result(value)
        self._socket.shutdown(socket.SHUT_WR)

    def _next_batch(self) -> "Batch":
        """Return the waiting queries, up to BATCH_MAX; an array alone; empty at the end."""
        item = self._held if self._held is not None else self._queue.get()
        self._held = None
        batch = [item] if item[2] else []
        while batch and item[0] is not None and len(batch) < BATCH_MAX:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                break
            if item[0] is None:
                self._held = item
                break
            batch.append(item)
        return batch

    def _remember(self, batch: Batch, values: list[float]) -> None:
        with self._lock:
            self._cache.update(
                (key, value) for (key, _, _), value in zip(batch, values, strict=True)
            )
            while len(self._cache) > self._cache_entries:
                self._cache.popitem(last=False)


def receive_exactly(sock: socket.socket, into: memoryview) -> bool:
    got = 0
    while got < len(into):
        n = sock.recv_into(into[got:])
        if not n:
            return False
        got += n
    return True


def container(path: str, dtype: str) -> None:
    """Run the other process: a model that returns the first element of each row, as f64."""
    item = np.dtype(dtype).itemsize
    head, buffer = bytearray(HEAD.size), bytearray(1 << 20)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        while receive_exactly(sock, memoryview(head)):
            n, width = HEAD.unpack(head)
            size = item * n * width
            if len(buffer) < size:
                buffer = bytearray(size)
            receive_exactly(sock, memoryview(buffer)[:size])
            first = np.frombuffer(buffer, dtype, n * width).reshape(n, width)[:, 0]
            sock.sendall(first.astype(np.float64).tobytes())


def distinct(n: int, width: int = 1) -> Callable[[], list[NDArray[np.float64]]]:
    """Return a function that returns new inputs at every call."""
    start = 0

    def fresh() -> list[NDArray[np.float64]]:
        nonlocal start
        rows = np.zeros((n, width))
        rows[:, 0] = np.arange(start, start + n)
        start += n
        return list(rows)

    return fresh


def measures(
    cached: Reference, uncached: Reference, quick: bool = False
) -> dict[str, Callable[[], float]]:
    """Return runs by name, each of which returns ns per prediction; for `interleave`, beside the
    runs of the compared cases."""
    n = 500 if quick else 5000
    known = [np.array([float(i)]) for i in range(100)]
    for x in known:
        cached.predict(x).result()
    hits, misses, trips = known * (n // 100), distinct(2 * n)(), distinct(n // 10)()
    bulk = np.zeros((4096, 1))

    async def wrapped(x: Any) -> Any:
        return await asyncio.wrap_future(uncached.predict(x))

    def bulk_ns() -> float:
        return per_call_ns(uncached.predict_many, [bulk] * max(n // 250, 4)) / len(bulk)

    return {
        "hit": lambda: per_call_ns(cached.predict, hits),
        "miss": lambda: window_ns(uncached.predict, misses),
        "rtt": lambda: per_call_ns(uncached.predict, trips),
        "rtt awaited": lambda: awaited_ns(wrapped, trips),
        "bulk": bulk_ns,
    }


def main(quick: bool) -> list[Row]:
    with Reference() as cached, Reference(cache_entries=0) as uncached:
        samples = interleave(measures(cached, uncached, quick), repetitions=3 if quick else 15)
    micro = {
        name: Sample(tuple(v / 1000 for v in sample.values)) for name, sample in samples.items()
    }
    return [
        row("reference: cache hit", samples["hit"], "ns"),
        row("reference: miss, 1000 outstanding", samples["miss"], "ns"),
        row("reference: RTT, one outstanding", micro["rtt"], "us"),
        row("reference: RTT awaited on uvloop", micro["rtt awaited"], "us"),
        row(
            "reference: bulk, a prediction",
            samples["bulk"],
            "ns",
            note="4096 rows of f64[1] in one frame",
        ),
    ]


if __name__ == "__main__":
    container(*sys.argv[1:])
