"""A load generator for HTTP in C (http_load.c): keep-alive connections in a process of its own,
over TLS if the address begins with `tls:`.

closed: each connection asks again once it is answered. paced: requests at Poisson times, each on
the connection that has been free the longest, or after another one when none is; every latency
counts from the time the request was meant to leave. How late the generator itself was is part of
what it returns.
"""

import atexit
import functools
import itertools
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.system.anchors.bare import compiled

SOURCE = Path(__file__).with_name("http_load.c")
NUMBER = "#" * 8  # eight characters of a request that are replaced by another number in each one
RECORD = np.dtype(
    [("due_s", "f8"), ("latency_us", "f8"), ("late_us", "f8"), ("status", "i4"), ("other", "i4")]
)
_runs = itertools.count()
_NUMBERS_OF_A_RUN = 1 << 20


@dataclass(frozen=True)
class Found:
    """The responses of a run.

    seconds: from the first request to the last response. records: of type RECORD, one for each
    request in the order of their ends; status 0 is a request without a response.
    """

    seconds: float
    records: "np.ndarray[Any, Any]"

    @property
    def latency_us(self) -> "np.ndarray[Any, Any]":
        """Return the latencies of all requests, in microseconds."""
        return self.records["latency_us"]

    @property
    def bad(self) -> int:
        """Count the responses that were not 200."""
        return int(np.count_nonzero(self.records["status"] != 200))

    @property
    def per_s(self) -> float:
        """Return the responses per second."""
        return len(self.records) / self.seconds

    def quantile_us(self, share: float) -> float:
        """Return a quantile of the latencies in microseconds."""
        return float(np.quantile(self.latency_us, share)) if len(self.records) else float("nan")

    def late_us(self, share: float) -> float:
        """Return a quantile of how late requests left though a connection was free."""
        late = self.records["late_us"]
        late = late[late >= 0]
        return float(np.quantile(late, share)) if len(late) else float("nan")


@functools.cache
def program() -> Path:
    """Compile the generator once in this process. Raises: RuntimeError without a compiler."""
    folder = tempfile.mkdtemp(prefix="http-load-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    target = Path(folder, "http_load")
    if not compiled(SOURCE, target):
        raise RuntimeError(f"no C compiler to build {SOURCE.name}: install gcc or clang")
    return target


def closed(address: str, request: bytes, connections: int, seconds: float) -> Found:
    """Send a request again and again on each connection, as soon as it is answered."""
    return _run(address, request, connections, seconds, 0.0, 1, b"", 0)


def paced(
    address: str,
    request: bytes,
    rate: float,
    seconds: float,
    connections: int = 64,
    seed: int = 1,
    other: bytes = b"",
    every: int = 0,
) -> Found:
    """Send requests at the times of a Poisson process.

    rate: requests a second. other, every: if given, each `every`-th request is the other one.
    """
    return _run(address, request, connections, seconds, rate, seed, other, every)


def _run(
    address: str,
    request: bytes,
    connections: int,
    seconds: float,
    rate: float,
    seed: int,
    other: bytes,
    every: int,
) -> Found:
    host, _, port = address.rpartition(":")
    first = next(_runs) * _NUMBERS_OF_A_RUN + 1
    numbers = (connections, seconds, rate, seed, first, every, len(request), len(other))
    done = subprocess.run(
        [program(), host, port, *map(str, numbers)], input=request + other, stdout=subprocess.PIPE
    )
    if done.returncode:
        raise RuntimeError(f"http_load ended with exit status {done.returncode} at {address}")
    line, _, rest = done.stdout.partition(b"\n")
    return Found(float(line.split()[1]), np.frombuffer(rest, RECORD))
