"""Servers on Ray as one system: no query fails through an upgrade, killed actors and nodes, and
changes of their number.

The cluster is a real one of several Ray nodes on this machine (`ray.cluster_utils`), on which
`clipper up --on ray` runs its servers. Clients know only its address, and send a query whose
connection broke once more.
"""

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.harness import Goal, Row, row
from bench.system.fixtures.store_servers import SYNCED, Redis
from bench.system.several_servers.on_redis import Client
from tests.memory_container import wait_until
from tests.processes import Program, free_ports

QUERIES = 10_000
RATE_S = 150.0
CLIENTS = 6
BUSY = 40  # further clients, so that servers are added
PATIENCE_S = 180.0
LEAST, MOST = 2, 4
TOKEN = "of-the-benchmark"
_MODEL = """
import time


def total(rows):
    time.sleep(0.005 * len(rows))
    return rows.sum(axis=1)
"""
_SETTINGS = """
[server]
state = "{store}"
folder = "{folder}/state"
warmup = false
restart_ms_min = 50
drain_s = 5.0
scale_interval_ms = 500
scale_up_after_ms = 1000
scale_down_after_ms = 3000
scale_delay_share = 0.01
[http]
address = "127.0.0.1:{http}"
admin = "127.0.0.1:{admin}"
token = "{token}"
insecure = true
[grpc]
address = "127.0.0.1:{grpc}"
[models.m]
target = "model:total"
code = ["{folder}"]
input = "f64[2]"
cache = false
[apps.a]
models = ["m"]
slo_ms = 5000
default = -1
"""


class RayMachines:
    """Ray nodes on this machine: a head on which no actor fits, and others. Threads: one."""

    def __init__(self, others: int) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
        )
        self.address = self._cluster.address
        self._nodes = [self._cluster.add_node(num_cpus=2) for _ in range(others)]

    def kill_node_of(self, actor: int) -> None:
        """Kill the node of an actor's process, with all that runs on it, and add another one."""
        (node,) = (
            node
            for node in self._nodes
            if node.all_processes["raylet"][0].process.pid == parent_of(actor)
        )
        self._nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)
        self._nodes.append(self._cluster.add_node(num_cpus=2))

    def add_node(self, resource: str) -> None:
        """Add a node with a custom resource."""
        self._nodes.append(self._cluster.add_node(num_cpus=2, resources={resource: 1}))

    def kill_first_node(self) -> None:
        """Kill the node that was added first, with all that runs on it."""
        self._cluster.remove_node(self._nodes.pop(0), allow_graceful=False)

    def close(self) -> None:
        """End all nodes."""
        self._cluster.shutdown()


class RayServing:
    """`clipper up --on ray` on such a cluster. store: URL. Threads: one."""

    def __init__(self, folder: Path, store: str, machines: RayMachines) -> None:
        self.machines = machines
        self.http, self.admin, self.grpc = free_ports(3)
        (folder / "model.py").write_text(_MODEL)
        text = _SETTINGS.format(
            folder=folder,
            store=store,
            http=self.http,
            admin=self.admin,
            grpc=self.grpc,
            token=TOKEN,
        )
        (folder / "clipper.toml").write_text(text)
        words = ["up", str(folder / "clipper.toml"), "--on", "ray", "--cpus", "0.5"]
        words += ["--ray-address", machines.address]
        words += ["--servers", str(LEAST), "--servers-max", str(MOST), "--wait", str(PATIENCE_S)]
        self.program = Program(sys.executable, "-u", "-m", "clipper", *words)

    @property
    def output(self) -> str:
        """Return the text that the command has printed."""
        return self.program.output

    def await_line(self, text: str, count: int = 1) -> None:
        """Wait until the command has printed a text so many times."""
        self.program.until(lambda: self.output.count(text) >= count, limit_s=PATIENCE_S)

    def await_ready(self, count: int) -> None:
        """Wait until so many servers are ready, as the command has printed."""

        def ready() -> set[str]:
            found: set[str] = set()
            for line in self.output.splitlines():
                name, _, state = line.partition(" is ")
                if state == "ready":
                    found.add(name)
                else:
                    found.discard(name)
            return found

        wait_until(lambda: len(ready()) >= count, f"{count} servers are ready", PATIENCE_S)

    def places(self) -> list[tuple[str, int]]:
        """Return the address that all servers share."""
        return [("127.0.0.1", self.http)]

    def server_pids(self) -> list[int]:
        """Return the processes of the servers, which actors have started."""
        found: list[int] = []
        for actor in _processes(b"ray::RayServer"):
            for started in Path(f"/proc/{actor}/task").glob("*/children"):
                # the thread may end between the two
                with contextlib.suppress(OSError):
                    found.extend(map(int, started.read_text().split()))
        return found

    def close(self) -> None:
        """End the servers, and the command."""
        self.program.stop(limit_s=PATIENCE_S)


def _processes(title: bytes) -> Iterator[int]:
    """Yield the processes whose title begins so."""
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if line.read_bytes().startswith(title):
                yield int(line.parent.name)


def parent_of(pid: int) -> int:
    """Return the process that started it."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@contextlib.contextmanager
def serving(others: int = 2) -> Iterator[RayServing]:
    """Return servers on Ray that are ready; end all with the block."""
    folder = Path(tempfile.mkdtemp(prefix="several-"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        redis = Redis(folder, *SYNCED)
        stack.callback(redis.stop)
        machines = RayMachines(others)
        stack.callback(machines.close)
        started = RayServing(folder, redis.url, machines)
        stack.callback(started.close)
        started.await_line("\nready")
        yield started


def upgrade(servers: RayServing) -> None:
    """Replace each server, one after the other, by SIGHUP."""
    before = servers.output.count("upgraded")
    servers.program.send(signal.SIGHUP)
    servers.await_line("upgraded", before + 1)


def kill_server(servers: RayServing) -> None:
    """Kill -9 a server; its actor starts it again."""
    _kill(servers, lambda pid: pid)


def kill_actor(servers: RayServing) -> None:
    """Kill -9 the actor of a server; Ray starts it again, and it the server."""
    _kill(servers, parent_of)


def _kill(servers: RayServing, victim: Callable[[int], int]) -> None:
    before = servers.output.count(" is not ready")
    os.kill(victim(servers.server_pids()[0]), signal.SIGKILL)
    servers.await_line(" is not ready", before + 1)
    servers.await_ready(LEAST)


def kill_node(servers: RayServing) -> None:
    """Kill a Ray node with its actors; Ray starts them on another one."""
    before = servers.output.count(" is not ready")
    servers.machines.kill_node_of(parent_of(servers.server_pids()[0]))
    servers.await_line(" is not ready", before + 1)
    servers.await_ready(LEAST)


def scale_by_load(servers: RayServing) -> None:
    """Load the servers until there are more of them, and wait until there are fewer again."""
    stop = threading.Event()
    busy = [Client(servers.places, 1e3, stop) for _ in range(BUSY)]
    for client in busy:
        client.start()
    try:
        servers.await_line(f"-> {MOST} servers")
        servers.await_ready(MOST)
    finally:
        stop.set()
        for client in busy:
            client.join()
    failed = [why for client in busy for why in client.failed]
    if failed:
        raise RuntimeError(f"{len(failed)} queries failed: {failed[0]}")
    servers.await_line(f"-> {LEAST} servers")


Story = tuple[tuple[str, Callable[[RayServing], None]], ...]
STORY: Story = (
    ("a rolling upgrade", upgrade),
    ("kill -9 of a server", kill_server),
    ("kill -9 of an actor", kill_actor),
    ("a killed node", kill_node),
    (f"{LEAST} -> {MOST} -> {LEAST} servers by load", scale_by_load),
)


def through(
    servers: RayServing, queries: int, story: Story = STORY
) -> list[tuple[str, int, list[str], int, float]]:
    """Query all the time, at least so many queries, through each part of the story; return for each
    part its name, the queries, why some failed, how many were sent again, and its seconds."""
    found = []
    for name, act in story:
        stop = threading.Event()
        clients = [Client(servers.places, RATE_S / CLIENTS, stop) for _ in range(CLIENTS)]
        for client in clients:
            client.start()
        began_s = time.monotonic()
        try:
            act(servers)
            took_s = time.monotonic() - began_s
            while sum(client.sent for client in clients) < queries // len(story):
                time.sleep(0.05)
        finally:
            stop.set()
            for client in clients:
                client.join()
        failed = [why for client in clients for why in client.failed]
        sent, again = (sum(getattr(c, of) for c in clients) for of in ("sent", "again"))
        found.append((name, sent, failed, again, took_s))
    return found


def main(quick: bool = False) -> list[Row]:
    rows: list[Row] = []
    with serving() as servers:
        for name, sent, failed, again, took_s in through(servers, 1000 if quick else QUERIES):
            note = f"of {sent}; {again} sent again; {took_s:.0f} s"
            note += f"; {failed[0]}" if failed else ""
            goal = Goal("value_at_most", 0.0)
            rows.append(row(f"failed through {name}", len(failed), "queries", goal=goal, note=note))
    return rows
