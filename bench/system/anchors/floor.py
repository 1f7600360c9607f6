"""The floor of the machine: the least that a call, a copy and a round trip between two
processes can cost here."""

import functools
import os
import socket
import sys
import time
from collections.abc import Callable

import numpy as np

from bench.harness import CPU
from clipper_core.engine.engine import Engine
from clipper_core.engine.model import Model
from clipper_core.results.future import Future


def method_ns(n: int = 20000) -> float:
    """Measure a method of a compiled object that does nothing, looked up and called, with the loop
    around it: a measurement of calls has its own loop around them too. By the thread's CPU time."""
    future = _ended_future()
    begun = CPU()
    for _ in range(n):
        future.cancelled()
    return (CPU() - begun) / n


@functools.cache
def _ended_future() -> Future:
    model = Model(Engine(manual_clock=True, cache_bytes_max=1 << 16), "none:1", 1, "f64", (1,))
    model.put(np.zeros(1), 0.0)
    return model.predict(np.zeros(1))


def copy_ns(rows: int, width_bytes: int) -> Callable[[], float]:
    """Measure memcpy of the same rows, in ns per row."""
    source = np.zeros(rows * width_bytes, np.uint8)
    target = np.zeros_like(source)

    def measure() -> float:
        begun = time.perf_counter_ns()
        for _ in range(20):
            np.copyto(target, source)
        return (time.perf_counter_ns() - begun) / 20 / rows

    return measure


class PingPong:
    """Sends 64 bytes back and forth over a unix socket to a process that blocks on it."""

    def __init__(self) -> None:
        self._near, far = socket.socketpair()
        self._child = os.fork()
        if self._child == 0:
            self._near.close()
            _echo(far)
        far.close()

    def __call__(self, n: int = 500) -> float:
        """Return ns per round trip."""
        message = bytes(64)
        begun = time.perf_counter_ns()
        for _ in range(n):
            self._near.sendall(message)
            self._near.recv(64)
        return (time.perf_counter_ns() - begun) / n

    def close(self) -> None:
        self._near.close()
        os.waitpid(self._child, 0)


def _echo(sock: socket.socket) -> None:
    try:
        while message := sock.recv(64):
            sock.sendall(message)
    finally:
        sys.stdout.flush()
        os._exit(0)
