"""The query client: queries a second and CPU a query of one thread, beside the HTTP libraries of
others, on the same server.

Our server runs in a process of its own, with threads that answer without Python; each client makes
the same cache hit, one after another, in turns, and reads the answer: ours an `Answer`, the others
the object of the JSON. CPU is that of the client's thread, so a busy machine changes it little.
"""

import asyncio
import functools
import http.client
import importlib
import json
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.harness import Goal, Row, Sample, absent, row
from bench.system.frontends import http_servers
from clipper_client import AsyncClient, Client

HEADERS = {"Content-Type": "application/json"}
OTHERS = ("http.client", "urllib3", "requests", "httpx", "urllib")
ONE, MANY = [0.25], np.random.default_rng(7).random(784)
Ask = Callable[[], Any]


def asks(address: str, ours: Client) -> dict[str, dict[str, Ask]]:
    """Return a query of each client by the input's size; a library that is not installed is left
    out."""
    found: dict[str, dict[str, Ask]] = {
        "ours": {
            "f64[1]": functools.partial(ours.predict, "noop1", ONE),
            "f64[784]": functools.partial(ours.predict, "noop784", MANY),
        }
    }
    for name in OTHERS:
        try:
            post = poster(name, address)
        except ImportError:
            continue
        found[name] = {
            "f64[1]": functools.partial(read, post, "/api/noop1/predict", ONE),
            "f64[784]": functools.partial(read, post, "/api/noop784/predict", MANY),
        }
    return found


def read(post: Callable[[str, bytes], bytes], path: str, row: Any) -> Any:
    """Make one query as a user of an HTTP library does."""
    values = row.tolist() if isinstance(row, np.ndarray) else row
    return json.loads(post(path, json.dumps({"input": values}).encode()))["output"]


def poster(name: str, address: str) -> Callable[[str, bytes], bytes]:
    """Return a function that posts a body by a library, with kept connections where it has them.
    Raises ImportError."""
    url = f"http://{address}"
    if name == "http.client":
        connection = http.client.HTTPConnection(address)
        return functools.partial(_by_http_client, connection)
    if name == "urllib":
        return functools.partial(_by_urllib, url)
    library: Any = importlib.import_module(name)
    if name == "urllib3":
        return functools.partial(_by_urllib3, library.PoolManager(), url)
    session = library.Session() if name == "requests" else library.Client()
    return functools.partial(_by_session, session, url)


def _by_http_client(connection: http.client.HTTPConnection, path: str, body: bytes) -> bytes:
    connection.request("POST", path, body, HEADERS)
    return connection.getresponse().read()


def _by_urllib(url: str, path: str, body: bytes) -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url + path, body, HEADERS)) as response:
        return bytes(response.read())


def _by_urllib3(pool: Any, url: str, path: str, body: bytes) -> bytes:
    return bytes(pool.request("POST", url + path, body=body, headers=HEADERS).data)


def _by_session(session: Any, url: str, path: str, body: bytes) -> bytes:
    return bytes(session.post(url + path, data=body, headers=HEADERS).content)


def take_turns(cases: dict[str, Ask], seconds: float, turns: int) -> dict[str, list[Sample]]:
    """Return queries a second and CPU microseconds a query of each case, in turns."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for turn in range(-1, turns):
        for name, ask in cases.items():
            count = 0
            began_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
            while time.perf_counter_ns() - began_ns < seconds * 1e9:
                for _ in range(20):
                    ask()
                count += 20
            spent_ns = time.perf_counter_ns() - began_ns
            used_us = (time.thread_time_ns() - cpu_ns) / 1e3 / count
            if turn >= 0:
                found[name].append((count / spent_ns * 1e9, used_us))
    return {
        name: [Sample(values) for values in zip(*figures, strict=True)]
        for name, figures in found.items()
    }


def awaited(address: str, seconds: float, turns: int) -> tuple[Sample, Sample]:
    """Return queries a second and CPU of AsyncClient, with 16 queries under way."""

    async def run() -> list[tuple[float, float]]:
        figures = []
        async with AsyncClient(f"http://{address}") as client:
            for turn in range(-1, turns):
                count = 0
                began_s, cpu_s = time.perf_counter(), time.thread_time()
                while time.perf_counter() - began_s < seconds:
                    await asyncio.gather(*(client.predict("noop1", ONE) for _ in range(16)))
                    count += 16
                spent_s, used_s = time.perf_counter() - began_s, time.thread_time() - cpu_s
                if turn >= 0:
                    figures.append((count / spent_s, used_s / count * 1e6))
        return figures

    per_s, cpu_us = zip(*asyncio.run(run()), strict=True)
    return Sample(per_s), Sample(cpu_us)


def main(quick: bool) -> list[Row]:
    seconds, turns = (0.1, 1) if quick else (1.0, 5)
    rows = []
    with (
        http_servers.running("noops") as (server,),
        Client(f"http://{server.address}") as ours,
    ):
        clients = asks(server.address, ours)
        for size in ("f64[1]", "f64[784]"):
            cases = {name: by_size[size] for name, by_size in clients.items()}
            found = take_turns(cases, seconds, turns)
            rows += rows_of(size, found)
        per_s, cpu_us = awaited(server.address, seconds, turns)
        rows.append(row("AsyncClient f64[1], 16 under way", per_s, "1/s"))
        rows.append(row("AsyncClient f64[1]: CPU", cpu_us, "us"))
    return rows


def rows_of(size: str, found: dict[str, list[Sample]]) -> list[Row]:
    """Return the rows of one size: ours, and each library beside it."""
    per_s, cpu_us = found["ours"]
    rows = [row(f"Client {size}", per_s, "1/s"), row(f"Client {size}: CPU", cpu_us, "us")]
    for name in OTHERS:
        if name not in found:
            rows.append(absent(f"{name} {size}: CPU", "us", f"{name} is not installed"))
            continue
        its_per_s, its_us = found[name]
        goal = Goal("times_better", 1.0) if name in ("requests", "httpx") else None
        rows.append(row(f"Client {size}, of {name}", per_s, "1/s", name, its_per_s, goal))
        rows.append(row(f"Client {size}, of {name}: CPU", cpu_us, "us", name, its_us, goal))
    return rows
