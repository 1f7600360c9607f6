"""A rolling upgrade under load: latencies while versions come and go; and that no query fails
(--plot DIR: a timeline)."""

import http.client
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import clipper
from bench.harness import Row
from bench.paper.plots import timeline

RATE_S = 200.0  # queries, by two threads in this process and two over HTTP
PATIENCE_S = 30.0
SETTINGS: dict[str, Any] = {
    "http": "127.0.0.1:0",
    "heartbeat_ms": 100,
    "restart_ms_min": 50,
    "drain_s": 2.0,
}


def one(rows: Any) -> Any:
    return rows.sum(axis=1)


def two(rows: Any) -> Any:
    return rows.sum(axis=1) + 0.5


class Load:
    """An open loop: each query is due at its time, and late if it was asked late. Threads: its
    own."""

    def __init__(self, server: clipper.ClipperServer, rate_s: float) -> None:
        self._server, self._gap_s = server, 4 / rate_s
        self._numbers = itertools.count()
        self._stop = threading.Event()
        self.began_s = time.monotonic()
        self.seen: list[
            tuple[float, float, str]
        ] = []  # when it was due, ms until its answer, why it failed
        ways = (self._here, self._here, self._over_http, self._over_http)
        self._threads = [
            threading.Thread(target=self._run, args=(way, i / 4)) for i, way in enumerate(ways)
        ]
        for thread in self._threads:
            thread.start()

    def _here(self, _: Any, x: float) -> str:
        return str(self._server.app("a").predict(np.array([x, 1.0])).result(PATIENCE_S).reason)

    def _over_http(self, line: http.client.HTTPConnection, x: float) -> str:
        line.request(
            "POST",
            "/api/a/predict",
            json.dumps({"input": [x, 1.0]}),
            {"Content-Type": "application/json"},
        )
        response = line.getresponse()
        body = response.read()
        return (
            str(json.loads(body)["reason"])
            if response.status == 200
            else f"status {response.status}"
        )

    def _run(self, way: Callable[[Any, float], str], phase: float) -> None:
        host, _, port = self._server.http_address.rpartition(":")
        line = http.client.HTTPConnection(host, int(port), timeout=PATIENCE_S)
        for i in itertools.count():
            due_s = self.began_s + (i + phase) * self._gap_s
            if self._stop.wait(max(0.0, due_s - time.monotonic())):
                break
            try:
                why = way(line, float(next(self._numbers)))
            except Exception as error:
                why = repr(error)
            self.seen.append((due_s - self.began_s, (time.monotonic() - due_s) * 1e3, why))
        line.close()

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def story(server: clipper.ClipperServer) -> list[tuple[str, Callable[[], Any]]]:
    def kill() -> None:
        rows = server.stats()["models"]["m:2"]["replicas"]
        os.kill(next(row["pid"] for row in rows if row["state"] == "ready"), signal.SIGKILL)

    return [
        ("nothing", lambda: None),
        (
            "deploy m:2, two replicas",
            lambda: server.deploy("m", two, input="f64[2]", replicas=2, promote=False),
        ),
        ("promote m:2", lambda: server.manage.promote("m:2")),
        ("kill -9 a replica", kill),
        ("roll back", lambda: server.manage.rollback("m")),
        ("promote m:2", lambda: server.manage.promote("m:2")),
        ("retire m:1", lambda: server.manage.retire("m:1")),
        ("scale 2 -> 3", lambda: server.manage.scale("m", 3)),
        ("scale 3 -> 1", lambda: server.manage.scale("m", 1)),
    ]


def main(quick: bool = False, plot: Path | None = None) -> list[Row]:
    each_s = 0.5 if quick else 3.0
    marks: list[tuple[float, str]] = []
    with clipper.start(**SETTINGS) as server:
        server.deploy("m", one, input="f64[2]", replicas=2, cache=False)
        server.app("a", models=["m"], slo_ms=10_000, default=-1)
        load = Load(server, RATE_S)
        for name, act in story(server):
            marks.append((time.monotonic() - load.began_s, name))
            act()
            time.sleep(each_s)
        load.end()
    ends = [*[at for at, _ in marks[1:]], float("inf")]
    rows = [
        _row(name, [one for one in load.seen if at <= one[0] < end])
        for (at, name), end in zip(marks, ends, strict=True)
    ]
    failed = [why for _, _, why in load.seen if why]
    rows.append(
        Row(
            "failed, or answered by the default",
            len(failed),
            "queries",
            note=f"of {len(load.seen)}{_said(failed)}",
        )
    )
    if plot is not None:
        timeline(load.seen, marks, plot / "upgrade.png", "A rolling upgrade under load")
    return rows


def _said(failed: list[str]) -> str:
    return f": {failed[0]}" if failed else ""


def _row(name: str, seen: list[tuple[float, float, str]]) -> Row:
    took = np.array([ms for _, ms, _ in seen] or [np.nan])
    note = f"p50 {np.median(took):.2f}, max {took.max():.1f} ms of {len(seen)} queries"
    return Row(f"p99 after: {name}", float(np.percentile(took, 99)), "ms", note=note)
