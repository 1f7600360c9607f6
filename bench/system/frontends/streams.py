"""Streams: how many records a second go from one Redis Stream to another through a model, beside a
bare loop of redis-py."""

import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import clipper
from bench.harness import Goal, Row, absent, interleave, row
from bench.system.fixtures.store_servers import Redis

NAME, ANCHOR = (
    "records a second, in to out",
    "a bare loop: XREADGROUP, then XADD and XACK in one MULTI, 64 at a time",
)
GOAL = Goal("at_least", 0.5)


def main(quick: bool) -> list[Row]:
    try:
        import redis
    except ImportError:
        return [
            absent(NAME, "1/s", "not installed: pip install 'clipper-serving[redis]'", ANCHOR, GOAL)
        ]
    if shutil.which("redis-server") is None:
        return [absent(NAME, "1/s", "no redis-server: python tools/fetch.py redis", ANCHOR, GOAL)]
    n = 500 if quick else 20_000
    with redis_server() as url, redis.Redis.from_url(url) as client, clipper.start() as server:
        server.deploy("total", total, input="f64[3]")
        server.app("sums", models=["total"], slo_ms=5000)
        cases = {"clipper": through(server, client, url, n), "bare": bare(client, n)}
        found = interleave(cases, repetitions=1 if quick else 7, warmups=1)
        why = "a record is decoded, asked and encoded in Python, beside redis-py's own work"
        made = row(NAME, found["clipper"], "1/s", ANCHOR, found["bare"], GOAL, bounded_by=why)
        return [made, row("the bare loop by itself", found["bare"], "1/s")]


def total(xs: Any) -> Any:
    return xs.sum(axis=1)


@contextlib.contextmanager
def redis_server() -> Iterator[str]:
    """Start a Redis with an append-only file, which keeps what it acknowledges."""
    with tempfile.TemporaryDirectory() as folder:
        server = Redis(Path(folder))
        with server.program:
            yield server.url


def filled(client: Any, n: int) -> None:
    client.flushall()
    with client.pipeline(transaction=False) as pipe:
        for i in range(n):
            pipe.xadd("records", {"input": f"[{i},1,{i % 7}]"})
        pipe.execute()


def through(server: clipper.ClipperServer, client: Any, url: str, n: int) -> Callable[[], float]:
    def measure() -> float:
        filled(client, n)
        begun = time.perf_counter()
        with server.stream("sums", url) as stream:
            while stream.stats()["answered"] < n:
                time.sleep(0.001)
            took = time.perf_counter() - begun
        assert client.xlen("answers") == n
        return n / took

    return measure


def bare(client: Any, n: int) -> Callable[[], float]:
    """Do what one would write by hand, with the same fields in and out and the same arithmetic, one
    record after another."""

    def measure() -> float:
        filled(client, n)
        client.xgroup_create("records", "bare", id="0")
        begun = time.perf_counter()
        done = 0
        while done < n:
            ((_, entries),) = client.xreadgroup("bare", "me", {"records": ">"}, count=64)
            with client.pipeline() as pipe:
                for id, fields in entries:
                    name = id.decode()
                    output = json.dumps(sum(map(float, json.loads(fields[b"input"]))))
                    answer = {
                        "id": name,
                        "entry": name,
                        "output": output,
                        "confidence": "1",
                        "agreement": "1",
                        "default": 0,
                        "models": "total:1",
                        "missing": "",
                        "latency_us": 0,
                        "prediction": name,
                    }
                    pipe.xadd("answers", answer, maxlen=1_000_000)
                    pipe.xack("records", "bare", id)
                pipe.execute()
            done += len(entries)
        return n / (time.perf_counter() - begun)

    return measure
