"""A rolling upgrade under load: latencies while versions come and go; and that no query fails
(--plot DIR: a timeline)."""

import contextlib
import http.client
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import clipper
from bench.harness import Row
from bench.plots import timeline
from bench.system.load.scenario import Load, play, rows_of

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


class HttpClient:
    """Queries over one connection. Threads: one."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._line = http.client.HTTPConnection(host, int(port), timeout=PATIENCE_S)

    def __call__(self, number: int) -> str:
        """Send a query; return why it failed."""
        body = json.dumps({"input": [float(number), 1.0]})
        headers = {"Content-Type": "application/json"}
        self._line.request("POST", "/api/a/predict", body, headers)
        response = self._line.getresponse()
        reply = response.read()
        return (
            str(json.loads(reply)["reason"])
            if response.status == 200
            else f"status {response.status}"
        )

    def close(self) -> None:
        """Close the connection."""
        self._line.close()


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
    with contextlib.ExitStack() as held:
        server = held.enter_context(clipper.start(**SETTINGS))
        server.deploy("m", one, input="f64[2]", replicas=2, cache=False)
        app = server.app("a", models=["m"], slo_ms=10_000, default=-1)

        def in_process(number: int) -> str:
            return str(app.predict(np.array([number, 1.0])).result(PATIENCE_S).reason)

        over_http = [HttpClient(server.http_address) for _ in range(2)]
        for client in over_http:
            held.callback(client.close)
        load = Load(RATE_S, [in_process, in_process, *over_http])
        marks = play(load, story(server), each_s)
    rows, failed = rows_of(load, marks), load.failures()
    more = f": {failed[0]}" if failed else ""
    rows.append(
        Row(
            "failed, or answered by the default",
            len(failed),
            "queries",
            note=f"of {len(load.seen)}{more}",
        )
    )
    if plot is not None:
        timeline(load.seen, marks, plot / "upgrade.png", "A rolling upgrade under load")
    return rows
