"""A mesh of three nodes over etcd under load: killed, rolled, a v-model switched; no query fails
(--plot DIR: a timeline)."""

import http.client
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import clipper
from bench.harness import Goal, Row, absent, row
from bench.paper.plots import timeline
from bench.system.mesh import CODE, wait_until
from bench.system.store_servers import NO_ETCD, etcd, free_ports

RATE_S = 100.0  # queries, by four threads over HTTP
MODELS = 20
DEADLINE_S = 20.0
SETTINGS = (
    "[mesh]\nlease_s = 2.0\ndrain_s = 20.0\nreaper_s = 1.0\njanitor_s = 1.0\nrate_s ="
    " 1.0\npublish_s = 0.2\n"
)
NAMES = ("a", "b", "c")


class Node:
    """`clipper node` in a process of its own, on ports that it keeps."""

    def __init__(
        self,
        name: str,
        folder: Path,
        store: str,
        settings: str = SETTINGS,
        loaded_max: int = 10_000,
    ) -> None:
        self.name, self._folder, self._store = name, folder, store
        self.peers, self.containers, self.http, self.admin = free_ports(4)
        (folder / f"{name}.toml").write_text(
            f'[server]\naddress = "tcp://127.0.0.1:{self.containers}"\ntoken = "mesh"\ndrain_s ='
            f" 5.0\n{SETTINGS}loaded_max = {loaded_max}\n"
        )
        self.start()

    def start(self) -> None:
        words = [
            "node",
            str(self._folder / f"{self.name}.toml"),
            "--store",
            self._store,
            "--name",
            self.name,
            "--peers",
            f"tcp:127.0.0.1:{self.peers}",
            "--http",
            f"127.0.0.1:{self.http}",
            "--admin",
            f"127.0.0.1:{self.admin}",
            "--capacity-mib",
            "512",
        ]
        self.log = (self._folder / f"{self.name}.log").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "clipper", *words],
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            cwd=self._folder,
        )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip() == "ready":
                return
        raise RuntimeError(
            f"node {self.name} did not come up:"
            f" {(self._folder / f'{self.name}.log').read_text()[-2000:]}"
        )

    @property
    def lives(self) -> bool:
        return self.process.poll() is None

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        os.kill(self.process.pid, number)
        assert self.process.stdout is not None
        self.process.stdout.read()
        self.process.wait()
        self.log.close()

    def mesh(self) -> Any:
        return clipper.connect(f"http://127.0.0.1:{self.admin}").mesh


class Load:
    """An open loop of four clients. One whose node is gone asks the next, as behind a balancer;
    each query is answered once."""

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes
        self.began_s = time.monotonic()
        self.seen: list[
            tuple[float, float, str]
        ] = []  # when it was due, ms until its answer, why it failed
        self.retried = 0
        self._numbers = itertools.count()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(4)]
        for thread in self._threads:
            thread.start()

    def _run(self, phase: int) -> None:
        lines: dict[int, http.client.HTTPConnection] = {}
        for i in itertools.count():
            due_s = self.began_s + (4 * i + phase) / RATE_S
            if self._stop.wait(max(0.0, due_s - time.monotonic())):
                break
            why = self._ask(lines, i + phase)
            self.seen.append((due_s - self.began_s, (time.monotonic() - due_s) * 1e3, why))
        for line in lines.values():
            line.close()

    def _ask(self, lines: dict[int, http.client.HTTPConnection], i: int) -> str:
        number = next(self._numbers)
        name = "best" if number % 3 == 0 else f"m{number % MODELS}"
        why = ""
        for turn in range(len(self.nodes) * 2):
            node = self.nodes[(i + turn) % len(self.nodes)]
            line = lines.setdefault(
                node.http,
                http.client.HTTPConnection("127.0.0.1", node.http, timeout=DEADLINE_S + 5),
            )
            try:
                return self._answer(line, name, float(number))
            except (OSError, http.client.HTTPException) as error:
                line.close()
                why = repr(error)
                self.retried += 1
        return why

    def _answer(self, line: http.client.HTTPConnection, name: str, x: float) -> str:
        tensor = {"name": "x", "shape": [1, 3], "datatype": "FP64", "data": [x, 1.0, 2.0]}
        body = json.dumps({"inputs": [tensor], "parameters": {"timeout": int(DEADLINE_S * 1e6)}})
        line.request("POST", f"/v2/models/{name}/infer", body, {"Content-Type": "application/json"})
        response = line.getresponse()
        said = response.read()
        if response.status == 503 and line.port not in {
            node.http for node in self.nodes if node.lives
        }:
            raise ConnectionError("it is leaving")  # what a balancer takes out by its readiness
        if response.status != 200:
            return f"status {response.status}: {said[:200]!r}"
        data = json.loads(said)["outputs"][0]["data"]
        return "" if data[:3] in ([2 * x, 2.0, 4.0], [3 * x, 3.0, 6.0]) else f"wrong: {data}"

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def story(nodes: list[Node], rest_s: float) -> list[tuple[str, Callable[[], Any]]]:
    a, b, c = nodes

    def kill() -> None:
        b.stop(signal.SIGKILL)

    def roll(node: Node) -> Callable[[], None]:
        def do() -> None:
            node.stop()
            time.sleep(rest_s / 2)
            node.start()

        return do

    def switch() -> None:
        status = a.mesh().set_vmodel("best", "other", sync=True)
        assert status.active == "other", status

    return [
        ("nothing", lambda: None),
        ("kill -9 b", kill),
        ("b is back", b.start),
        ("roll a", roll(a)),
        ("roll b", roll(b)),
        ("roll c", roll(c)),
        ("best: m0 -> other", switch),
        ("best: back again", lambda: a.mesh().rollback_vmodel("best")),
    ]


def main(quick: bool = False, plot: Path | None = None) -> list[Row]:
    rest_s = 1.0 if quick else 4.0
    marks: list[tuple[float, str]] = []
    if shutil.which("etcd") is None:
        return [absent("failed queries", "queries", NO_ETCD)]
    with tempfile.TemporaryDirectory(prefix="mesh-") as name, etcd() as store:
        folder = Path(name)
        (folder / "models.py").write_text(CODE + "def triple(rows):\n    return rows * 3\n")
        nodes = [Node(one, folder, store) for one in NAMES]
        try:
            mesh = nodes[0].mesh()
            for i in range(MODELS):
                mesh.register(
                    f"m{i}", "models.py:double", key=name, input="f64[3]", output="f64[3]"
                )
            mesh.register("other", "models.py:triple", key=name, input="f64[3]", output="f64[3]")
            mesh.set_vmodel("best", "m0", load_now=True, sync=True)
            wait_until(lambda: len(mesh.instances()) == len(nodes))
            load = Load(nodes)
            for what, act in story(nodes, rest_s):
                marks.append((time.monotonic() - load.began_s, what))
                print(f"{marks[-1][0]:7.1f} s  {what}", file=sys.stderr, flush=True)
                act()
                time.sleep(rest_s)
            load.end()
        finally:
            for node in nodes:
                if node.lives:
                    node.stop(signal.SIGKILL)
    ends = [*[at for at, _ in marks[1:]], float("inf")]
    rows = [
        _row(what, [one for one in load.seen if at <= one[0] < end])
        for (at, what), end in zip(marks, ends, strict=True)
    ]
    failed = [why for _, _, why in load.seen if why]
    note = f"of {len(load.seen)}, {load.retried} asked another node" + (
        f": {failed[0]}" if failed else ""
    )
    rows.append(
        row("failed queries", len(failed), "queries", goal=Goal("value_at_most", 0), note=note)
    )
    if plot is not None:
        timeline(
            load.seen,
            marks,
            plot / "mesh.png",
            "Three nodes of a mesh, killed and rolled under load",
        )
    return rows


def _row(what: str, seen: list[tuple[float, float, str]]) -> Row:
    took = np.array([ms for _, ms, _ in seen] or [np.nan])
    note = (
        f"p50 {np.median(took):.2f}, max {took.max():.0f} ms of {len(seen)},"
        f" {sum(bool(why) for *_, why in seen)} failed"
    )
    return Row(f"p99 after: {what}", float(np.percentile(took, 99)), "ms", note=note)
