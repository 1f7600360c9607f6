"""A mesh of three nodes over etcd under load: killed, rolled, a v-model switched; no query fails
(--plot DIR: a timeline)."""

import http.client
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import clipper
from bench.harness import Goal, Row, absent, row
from bench.plots import timeline
from bench.system.fixtures.store_servers import NO_ETCD, etcd
from bench.system.load.scenario import Load, play, rows_of
from bench.system.mesh.nodes import CODE, wait_until
from tests.processes import Program, free_ports

RATE_S = 100.0  # queries of all clients, over HTTP
CLIENTS = 4
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
            f" 5.0\n{settings}loaded_max = {loaded_max}\n"
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
        words = [sys.executable, "-u", "-m", "clipper", *words]
        self.program = Program(*words, folder=self._folder, until="\nready\n")

    @property
    def lives(self) -> bool:
        return self.program.lives

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.program.stop(number)

    def mesh(self) -> Any:
        return clipper.connect(f"http://127.0.0.1:{self.admin}").mesh


class BalancedClient:
    """A client that sends a query to the next node when one is gone, as behind a load balancer;
    each query is answered once. Threads: one.
    """

    def __init__(self, nodes: list[Node], first: int) -> None:
        self._nodes, self._turn = nodes, first
        self._lines: dict[int, http.client.HTTPConnection] = {}
        self.retried = 0

    def __call__(self, number: int) -> str:
        """Send a query; return why it failed."""
        name = "best" if number % 3 == 0 else f"m{number % MODELS}"
        why = ""
        self._turn += 1
        for turn in range(len(self._nodes) * 2):
            node = self._nodes[(self._turn + turn) % len(self._nodes)]
            line = self._lines.setdefault(
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

    def close(self) -> None:
        """Close the connections."""
        for line in self._lines.values():
            line.close()

    def _answer(self, line: http.client.HTTPConnection, name: str, x: float) -> str:
        tensor = {"name": "x", "shape": [1, 3], "datatype": "FP64", "data": [x, 1.0, 2.0]}
        body = json.dumps({"inputs": [tensor], "parameters": {"timeout": int(DEADLINE_S * 1e6)}})
        line.request("POST", f"/v2/models/{name}/infer", body, {"Content-Type": "application/json"})
        response = line.getresponse()
        said = response.read()
        if response.status == 503 and line.port not in {
            node.http for node in self._nodes if node.lives
        }:
            raise ConnectionError("it is leaving")  # what a balancer takes out by its readiness
        if response.status != 200:
            return f"status {response.status}: {said[:200]!r}"
        data = json.loads(said)["outputs"][0]["data"]
        return "" if data[:3] in ([2 * x, 2.0, 4.0], [3 * x, 3.0, 6.0]) else f"wrong: {data}"


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
    if shutil.which("etcd") is None:
        return [absent("failed queries", "queries", NO_ETCD)]
    with tempfile.TemporaryDirectory(prefix="mesh-") as name, etcd() as store:
        folder = Path(name)
        (folder / "models.py").write_text(CODE + "def triple(rows):\n    return rows * 3\n")
        nodes: list[Node] = []
        try:
            for one in NAMES:
                nodes.append(Node(one, folder, store))
            mesh = nodes[0].mesh()
            for i in range(MODELS):
                mesh.register(
                    f"m{i}", "models.py:double", key=name, input="f64[3]", output="f64[3]"
                )
            mesh.register("other", "models.py:triple", key=name, input="f64[3]", output="f64[3]")
            mesh.set_vmodel("best", "m0", load_now=True, sync=True)
            wait_until(lambda: len(mesh.instances()) == len(nodes))
            clients = [BalancedClient(nodes, i) for i in range(CLIENTS)]
            load = Load(RATE_S, clients)
            marks = play(load, story(nodes, rest_s), rest_s)
            for client in clients:
                client.close()
        finally:
            for node in nodes:
                if node.lives:
                    node.stop(signal.SIGKILL)
    rows, failed = rows_of(load, marks), load.failures()
    retried = sum(client.retried for client in clients)
    note = f"of {len(load.seen)}, {retried} asked another node" + (
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
