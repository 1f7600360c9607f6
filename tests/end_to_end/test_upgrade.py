"""A model is upgraded, rolled back, scaled and retired, its containers are killed, under load: a
model answers each query."""

import contextlib
import http.client
import itertools
import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import clipper
from tests.memory_container import wait_until
from tests.threads import join

PATIENCE_S = 60.0
QUICK = {
    "heartbeat_ms": 100,
    "warmup": False,
    "restart_ms_min": 20,
    "restart_ms_max": 200,
    "drain_s": 5.0,
    "restarts_max": 100,
}
SLO_MS = 30_000


def one(rows: Any) -> Any:
    return rows.sum(axis=1)


def two(rows: Any) -> Any:
    return rows.sum(axis=1) + 0.5


class Load:
    """A thread that sends queries, in this process and over HTTP, until the block ends."""

    def __init__(self, server: clipper.ClipperServer) -> None:
        self._server = server
        self._numbers = itertools.count()
        self._stop = threading.Event()
        self._guard = threading.Lock()
        self.models: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.sent = self.answered = 0
        ways: list[Callable[[float], tuple[float, list[str], str]]] = [
            self._here,
            self._here,
            self._over_http,
            self._over_http,
        ]
        self._threads = [
            threading.Thread(target=self._run, args=(way,), name="load") for way in ways
        ]
        self._lines = threading.local()

    def _here(self, x: float) -> tuple[float, list[str], str]:
        answer = self._server.app("a").predict(np.array([x, 1.0])).result(PATIENCE_S)
        return answer.output, list(map(str, answer.models)), answer.reason

    def _over_http(self, x: float) -> tuple[float, list[str], str]:
        line = getattr(self._lines, "line", None)
        if line is None:
            host, _, port = self._server.http_address.rpartition(":")
            line = self._lines.line = http.client.HTTPConnection(
                host, int(port), timeout=PATIENCE_S
            )
        line.request(
            "POST",
            "/api/a/predict",
            json.dumps({"input": [x, 1.0]}),
            {"Content-Type": "application/json"},
        )
        response = line.getresponse()
        answer = json.loads(response.read())
        return (
            (answer["output"], answer["models"], answer["reason"])
            if response.status == 200
            else (-1, [], str(answer))
        )

    def _run(self, way: Callable[[float], tuple[float, list[str], str]]) -> None:
        while not self._stop.is_set():
            x = float(next(self._numbers))
            with self._guard:
                self.sent += 1
            try:
                output, models, reason = way(x)
            except Exception as error:
                output, models, reason = -1, [], repr(error)
            right = {"m:1": x + 1.0, "m:2": x + 1.5}
            sound = not reason and len(models) == 1 and output == right.get(models[0])
            with self._guard:
                self.answered += 1
                self.models.update(models)
                if not sound:
                    self.wrong.append(f"{output} by {models} for {x}: {reason}")
        line = getattr(self._lines, "line", None)
        if line is not None:
            line.close()

    def goes_on(self, model: str, count: int = 50) -> None:
        """Wait until so many more answers are of this model."""
        until = self.models[model] + count
        wait_until(
            lambda: self.models[model] >= until or self.wrong, f"{model} answers", PATIENCE_S
        )
        assert not self.wrong, self.wrong[:3]

    @contextlib.contextmanager
    def running(self) -> Iterator["Load"]:
        for thread in self._threads:
            thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            for thread in self._threads:
                join(thread)


def pids(server: clipper.ClipperServer, model: str) -> list[int]:
    return [
        row["pid"] for row in server.stats()["models"][model]["replicas"] if row["state"] == "ready"
    ]


def kill_one(server: clipper.ClipperServer, model: str) -> None:
    """Kill a container by SIGKILL, and wait until another has taken its place."""
    before = wait_until(
        lambda: len(found := pids(server, model)) == 2 and found,
        "both containers are connected",
        PATIENCE_S,
    )
    os.kill(before[0], signal.SIGKILL)
    wait_until(
        lambda: len(now := pids(server, model)) == 2 and before[0] not in now,
        "it comes back",
        PATIENCE_S,
    )


def test_a_rolling_upgrade_fails_no_query() -> None:
    with clipper.start(http="127.0.0.1:0", **QUICK) as server:
        server.deploy("m", one, input="f64[2]", replicas=2)
        server.app("a", models=["m"], slo_ms=SLO_MS, default=-1)
        with Load(server).running() as load:
            load.goes_on("m:1")
            server.deploy("m", two, input="f64[2]", replicas=2, promote=False)
            load.goes_on("m:1")
            server.manage.promote("m:2")
            load.goes_on("m:2")
            kill_one(server, "m:2")
            load.goes_on("m:2")
            server.manage.rollback("m")
            load.goes_on("m:1")
            kill_one(server, "m:1")
            server.manage.promote("m:2")
            load.goes_on("m:2")
            server.manage.retire("m:1")
            load.goes_on("m:2")
            for replicas in (3, 1, 2):
                server.manage.scale("m", replicas)
                load.goes_on("m:2")
            kill_one(server, "m:2")
            load.goes_on("m:2")
        assert load.wrong == []
        assert load.sent == load.answered
        wait_until(lambda: server.stats()["issued"] == server.stats()["answered"])
        stats = server.stats()
        assert stats["applications"]["a"]["answers"]["default"] == {}


def test_a_rollout_that_is_reverted_or_ends_fails_no_query() -> None:
    """Only queries that were sent to the broken version get the default; they are few."""
    with clipper.start(http="127.0.0.1:0", **QUICK) as server:
        server.deploy("m", one, input="f64[2]", replicas=2)
        server.deploy("m", two, input="f64[2]", replicas=2, promote=False)
        server.app("a", models=["m"], slo_ms=SLO_MS, default=-1)
        with Load(server).running() as load:
            server.manage.rollout("a", "m:2", stages="30,100", hold="0.2s", guard="error<10%")
            load.goes_on("m:2")
            kill_one(server, "m:2")
            wait_until(
                lambda: server.manage.rollouts()[0]["state"] == "promoted" or load.wrong,
                "it ends",
                PATIENCE_S,
            )
            load.goes_on("m:2")
            server.manage.retire("m:1")
            load.goes_on("m:2")
        assert load.wrong == []
        assert load.sent == load.answered


def test_the_latest_is_retired_and_the_one_before_takes_over() -> None:
    """The catalog is changed first, so no query is sent to containers that are about to stop."""
    with clipper.start(http="127.0.0.1:0", **QUICK) as server:
        server.deploy("m", one, input="f64[2]", replicas=2)
        server.deploy("m", two, input="f64[2]", replicas=2)
        server.app("a", models=["m"], slo_ms=SLO_MS, default=-1)
        with Load(server).running() as load:
            load.goes_on("m:2")
            server.manage.retire("m:2", force=True)
            load.goes_on("m:1")
        assert load.wrong == []
