"""Runs a server some of whose core's allocations fail, by the allocator of failing.cpp, which is
preloaded.

Prints, as JSON: how requests ended, how many allocations failed, how many file descriptors were
left over, and whether the server answers once there is memory again.
"""

import collections
import ctypes
import http.client
import json
import os
import sys
import threading
import time

import numpy as np

import clipper

ROUNDS, CLIENTS = 40, 4


def ask(
    address: str, line: http.client.HTTPConnection | None, x: float
) -> tuple[str, http.client.HTTPConnection | None]:
    """Send a request; return how it ended, and its connection if it is still open."""
    line = line or http.client.HTTPConnection(address, timeout=20)
    try:
        line.request("POST", "/api/total/predict", json.dumps({"input": [x, 1, 1]}))
        reply = line.getresponse()
        body = reply.read()
    except (OSError, http.client.HTTPException):
        line.close()
        return "closed", None
    if (
        reply.status == 200
        and not json.loads(body)["default"]
        and json.loads(body)["output"] != x + 2
    ):
        return "wrong", line
    return str(reply.status), line


def client(address: str, number: int, ended: collections.Counter[str]) -> None:
    line = None
    for i in range(ROUNDS):
        how, line = ask(address, line, float(number * ROUNDS + i))
        ended[how] += 1
        if line is not None and i % 3 == 0:
            line.close()
            line = None
    if line is not None:
        line.close()


def settle(server: clipper.ClipperServer) -> int:
    """Return how many descriptors are open, once it has stopped to change."""
    seen = -1
    for _ in range(100):
        now = len(os.listdir("/proc/self/fd"))
        if now == seen:
            return now
        seen = now
        time.sleep(0.05)
    return seen


def main(seed: int, one_in: int) -> None:
    allocator = ctypes.CDLL(None)
    allocator.failing_on.argtypes = (ctypes.c_uint64, ctypes.c_uint64)
    allocator.failing_off.restype = ctypes.c_uint64
    with clipper.start(
        http="127.0.0.1:0", restart_ms_min=20, restart_ms_max=100, drain_s=0.5
    ) as server:
        server.deploy("sum", lambda rows: np.asarray(rows).sum(axis=1), input="f64[3]")
        server.app("total", models=["sum"], slo_ms=1000)
        while ask(server.http_address, None, 0.0)[0] != "200":
            time.sleep(0.05)
        before = settle(server)
        ended: collections.Counter[str] = collections.Counter()
        threads = [
            threading.Thread(target=client, args=(server.http_address, i, ended))
            for i in range(CLIENTS)
        ]
        allocator.failing_on(seed, one_in)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        failed = allocator.failing_off()
        until = time.monotonic() + 20
        while (
            how := ask(server.http_address, None, -1.0)[0]
        ) != "200" and time.monotonic() < until:
            time.sleep(0.05)
        left = settle(server) - before
    print(json.dumps({"ended": ended, "failed": failed, "left": left, "at_last": how}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
