"""gRPC: ModelInfer of a no-op model, beside the least that grpcio.aio can do: CPU a call, calls a
second, latency.

Three processes, asked in turns by one client on the same machine: ours, an echo that takes any
bytes and always answers the same ones (the ceiling), and an echo that also reads the message and
writes one. CPU is that of the server's process. The client is Python too, and costs as much as the
servers: calls a second are those of both together.
"""

import asyncio
import importlib.util
import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.harness import Row, Sample, absent, row
from bench.system.frontends.http_servers import Process, running

SERVERS = "bench.system.frontends.grpc_servers"
UNDER_WAY = 32
_numbers = itertools.count(2)


def main(quick: bool) -> list[Row]:
    if importlib.util.find_spec("grpc") is None:
        return [
            absent(
                "no-op model f64[1]: CPU a call",
                "us",
                "grpcio is not installed",
                "echo of grpcio.aio",
            )
        ]
    seconds, turns = (0.3, 1) if quick else (2.0, 5)
    with running("ours", "trivial", "parsing", module=SERVERS) as (ours, trivial, parsing):
        kinds = {
            "hit": (ours, same),
            "miss": (ours, another),
            "three": (ours, same_of_three),
            "ceiling": (trivial, same),
            "parsing": (parsing, same),
        }
        busy = take_turns(kinds, UNDER_WAY, seconds, turns)
        alone = take_turns(kinds, 1, seconds, turns)
    return [*busy_rows(busy), *alone_rows(alone)]


def request(number: float, application: str = "noop") -> bytes:
    from bench.system.frontends.grpc_servers import request_of

    return request_of(application, np.array([number]))


def same() -> Callable[[], bytes]:
    always = request(1.0)
    return lambda: always


def same_of_three() -> Callable[[], bytes]:
    always = request(1.0, "three")
    return lambda: always


def another() -> Callable[[], bytes]:
    always = request(0.0)
    before, after = always[: always.index(bytes(8))], always[always.index(bytes(8)) + 8 :]
    return lambda: before + np.float64(next(_numbers)).tobytes() + after


def take_turns(
    kinds: dict[str, tuple[Process, Any]], under_way: int, seconds: float, turns: int
) -> dict[str, list[Sample]]:
    """Return for each: CPU us a call, calls a second, p50 in us."""
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in kinds}
    for turn in range(-1, turns):
        for name, (process, requests) in kinds.items():
            before = process.cpu_s()
            took_us, spent_s = asyncio.run(closed(process.address, requests(), under_way, seconds))
            cpu_us = (process.cpu_s() - before) / len(took_us) * 1e6
            if turn >= 0:
                found[name].append((cpu_us, len(took_us) / spent_s, float(np.median(took_us))))
    return {
        name: [Sample(values) for values in zip(*rows, strict=True)] for name, rows in found.items()
    }


async def closed(
    address: str, requests: Callable[[], bytes], under_way: int, seconds: float
) -> tuple[list[float], float]:
    """Let each of `under_way` callers call again once it is answered. Return the time of each call
    in us, and the total time."""
    import grpc.aio

    took_us: list[float] = []
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        until = time.perf_counter() + seconds

        async def caller() -> None:
            while (began := time.perf_counter()) < until:
                await call(requests(), timeout=10)
                took_us.append((time.perf_counter() - began) * 1e6)

        began = time.perf_counter()
        await asyncio.gather(*[caller() for _ in range(under_way)])
        return took_us, time.perf_counter() - began


NAMES = {
    "hit": "cache hit f64[1]",
    "miss": "no-op model f64[1]",
    "three": "cache hit of three models f64[1]",
    "parsing": "echo that reads and writes messages",
}
WHAT = "echo of grpcio.aio"


def busy_rows(busy: dict[str, list[Sample]]) -> list[Row]:
    rows = []
    for key, name in NAMES.items():
        rows.append(row(f"{name}: CPU a call", busy[key][0], "us", WHAT, busy["ceiling"][0]))
        rows.append(row(f"{name}: calls", busy[key][1], "1/s", WHAT, busy["ceiling"][1]))
    return rows


def alone_rows(alone: dict[str, list[Sample]]) -> list[Row]:
    return [
        row(f"one caller, {name}: p50", alone[key][2], "us", WHAT, alone["ceiling"][2])
        for key, name in NAMES.items()
    ]
