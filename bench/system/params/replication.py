"""Benchmark of a push that a replica is waited for, beside the same push to shards without one, and
of pulls from the replica.

What a waited push takes beyond a plain one is compared with as many bytes that a process sends to
another one over a unix socket, which sends 64 bytes back: it lies between the two shards.
"""

import functools
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np

from bench.harness import Goal, Row, interleave, row
from bench.processes import ObjectProcess
from bench.system.params.wire import fill
from clipper.params import Client, TableSpec
from clipper.params.local.local_set import LocalSet
from clipper.settings.params import ParamsSettings
from clipper_container.params.rows import Array

DIM, SIZES = 64, (64, 512)
HEAD_BYTES, LIMIT_S = 64, 60.0
BOUND = "the follower, which has to run, check the push and answer; its bytes alone take less"


def rows(quick: bool = False) -> list[Row]:
    n, turns = (30, 3) if quick else (200, 7)
    draw = np.random.default_rng(1)
    out = []
    with ExitStack() as stack:
        plain, waited = (stack.enter_context(_set(replicas)) for replicas in (0, 1))
        for size in SIZES:
            ids = 2 * draw.integers(0, 1 << 40, size)  # of shard 0
            gradients = draw.standard_normal((size, DIM)).astype(np.float32)

            cases: dict[str, Callable[[], float]] = {
                name: functools.partial(
                    _median_us, functools.partial(client.push, "bench", ids, gradients), n
                )
                for name, client in (("plain", plain), ("waited", waited))
            }
            with _exchange(HEAD_BYTES + size * (8 + 4 * DIM)) as exchange:
                cases["bare"] = functools.partial(_median_us, exchange, n)
                found = interleave(cases, turns)
            what = f"push of {size} rows of {DIM} floats, a replica waited for"
            goal, anchor = Goal("at_most", 2), "as many bytes to another process, and 64 back"
            more = found["waited"].plus(found["plain"].map(lambda us: -us))
            out += [
                row(what, found["waited"], "us", "no replica", found["plain"], goal, "", BOUND),
                row(f"{what}: more than without", more, "us", anchor, found["bare"]),
                _read(waited, ids, n, turns),
            ]
    return out


class BareFollower:
    """Receives messages of a size over a unix socket, and acknowledges each."""

    def __init__(self, path: str, size: int) -> None:
        self._door, self._size = socket.socket(socket.AF_UNIX), size
        self._door.bind(path)
        self._door.listen()

    def ready(self) -> None:
        """Return when it can be connected to."""

    def serve(self) -> None:
        """Serve one connection until it is closed."""
        line, _ = self._door.accept()
        message, acknowledged = memoryview(bytearray(self._size)), bytes(HEAD_BYTES)
        with line, suppress(ConnectionError):
            while True:
                fill(line, message)
                line.sendall(acknowledged)


@contextmanager
def _exchange(size: int) -> Iterator[Callable[[], None]]:
    """Measure a message of this size to another process, and its acknowledgement."""
    with tempfile.TemporaryDirectory(prefix="rows-") as folder:
        path, message = str(Path(folder, "door")), bytes(size)
        acknowledged = memoryview(bytearray(HEAD_BYTES))
        process = ObjectProcess(BareFollower, path, size, limit_s=LIMIT_S)
        with process, socket.socket(socket.AF_UNIX) as line:
            process.call("ready")
            process.start("serve")
            line.settimeout(LIMIT_S)
            line.connect(path)

            def exchange() -> None:
                line.sendall(message)
                fill(line, acknowledged)

            yield exchange


def _read(client: Client, ids: Array, n: int, turns: int) -> Row:
    def took_us(max_staleness_s: float | None) -> float:
        return _median_us(lambda: client.pull("bench", ids, max_staleness_s=max_staleness_s), n)

    ages = {"shard": None, "replica": 1.0}
    cases = {name: functools.partial(took_us, age) for name, age in ages.items()}
    found = interleave(cases, turns)
    what = f"pull of {ids.size} rows of {DIM} floats from a replica, at most 1 s old"
    return row(what, found["replica"], "us", "from the shard", found["shard"])


def _median_us(request: Callable[[], object], n: int) -> float:
    took = []
    for _ in range(n):
        begun = time.perf_counter_ns()
        request()
        took.append(time.perf_counter_ns() - begun)
    return float(np.median(took)) / 1e3


@contextmanager
def _set(replicas: int) -> Iterator[Client]:
    """Start a set. Yields a client of two shards."""
    with tempfile.TemporaryDirectory(prefix="clipper-") as folder:
        settings = ParamsSettings(shards=2, replicas=replicas, folder=folder, snapshot_s=0.0)
        local = LocalSet(settings).start()
        try:
            local.wait_ready(60.0)
            with Client(folder) as client:
                client.create(TableSpec("bench", DIM))
                while any(said["exposed"] for _, said in client.call_all("stats")):
                    time.sleep(0.05)
                yield client
        finally:
            local.stop(snapshot=False)
