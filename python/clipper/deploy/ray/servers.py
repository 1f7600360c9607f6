"""Servers of one store on a Ray cluster: one actor per server, which keeps a `clipper up` process
running, behind one address. Needs the extra `ray`.

A server is placed on the machine that has the fewest of them, if it has the CPUs and GPUs. Ray
restarts an actor elsewhere when its machine is lost; when a machine joins, servers that share
another one are moved to it. (A placement group was rejected: its size is fixed, so it would reserve
what only the largest number of servers needs.) Queries do not pass through Ray, but through the
ingress of the process that started the servers; they may also be sent to a server's own address.
The number of servers follows the rule by which a server scales its models
(`serving.models.scaling`): one more while a query's expected wait is a large share of its SLO, one
less when the others would not be too busy.
"""

import contextlib
import os
import re
import ssl
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final, NamedTuple

from clipper.deploy.ray.ingress import Backend, Ingress
from clipper.deploy.ray.nodes import (
    NodeProcess,
    NodeStatus,
    actor_options,
    actors_of,
    here,
    statuses,
    take_down,
)
from clipper.errors import NoServer
from clipper.host_port import join_host_port
from clipper.serving.models.scaling import Load, Rule, Trend, follow

if TYPE_CHECKING:
    pass

SERVER: Final = (sys.executable, "-m", "clipper", "up")
TOKEN: Final = "CLIPPER_HTTP__TOKEN"
_CHECK_S: Final = 0.1
_STATUS_S: Final = 1.0  # an actor that has not answered then keeps its last status
_METRICS_S: Final = 2.0
_WAIT: Final = re.compile(rb"^clipper_queue_wait_seconds\{.*\} (\S+)$", re.M)
_SLO: Final = re.compile(rb"^clipper_slo_seconds\{.*\} (\S+)$", re.M)
_FIELDS_OF_STAT: Final = slice(11, 13)  # user and system time, after the name


class Pressure(NamedTuple):
    """The load of one server. wait_s: longest expected wait for a container. slo_s: shortest SLO of
    an application. cpu_s: CPU time so far of the server and its containers.
    """

    wait_s: float = 0.0
    slo_s: float = 0.0
    cpu_s: float = 0.0


def server_addresses(host: str, ports: Sequence[str]) -> list[str]:
    """Return the arguments that say where a server of this host listens."""
    return [word for port in ports for word in (f"--{port}", join_host_port(host, 0))]


class RayServer:
    """A Ray actor that keeps one server's process running.

    words: further arguments of `clipper up`. ports: names of its addresses: `http`, `grpc`,
    `admin`. environment: variables of the process; TOKEN is the one of management.
    """

    def __init__(
        self, name: str, words: Sequence[str], ports: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self._host = host = here()
        listens = server_addresses(host, ports)
        self._token = environment.get(TOKEN, "")
        self._process = NodeProcess(name, [*SERVER, *words, *listens], environment)

    def status(self) -> NodeStatus:
        """Return the status of the process, `host` and `node`."""
        import ray

        node = str(ray.get_runtime_context().get_node_id())
        return {**self._process.status(), "host": self._host, "node": node}

    def pressure(self) -> Pressure | None:
        """Return the load now; None if the server does not answer. Its certificate is not checked:
        it is this machine's own."""
        status, head = self._process.status(), {"Authorization": f"Bearer {self._token}"}
        with contextlib.suppress(OSError, ValueError):  # also while it has no address
            request = urllib.request.Request(f"{status.get('admin', '')}/metrics", headers=head)
            with urllib.request.urlopen(
                request, timeout=_METRICS_S, context=ssl._create_unverified_context()
            ) as response:
                text = response.read()
            waits, slos = ([*map(float, one.findall(text))] for one in (_WAIT, _SLO))
            cpu_s = session_cpu_s(status["pid"])
            return Pressure(max(waits, default=0.0), min(slos, default=0.0), cpu_s)
        return None

    def stop(self, grace_s: float) -> NodeStatus:
        """Stop the process; see NodeProcess.stop."""
        return self._process.stop(grace_s)


def session_cpu_s(session: int) -> float:
    """Return the CPU seconds so far of the processes of a session."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                ticks += sum(map(int, fields[_FIELDS_OF_STAT]))
    return ticks / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class RayServers:
    """Parameters of servers on Ray.

    namespace: of the actors, a different one for each store. least, most: bounds of their number.
    words: arguments of `clipper up`. ports: names of the addresses of each. environment: variables
    of each. folder: of the servers, each of which has one of its own in it. cpus, gpus, resources:
    of each server, as Ray counts them. runtime_env: Ray's, of each. drain_s: that a server may take
    to end. rule: when their number changes.
    """

    namespace: str
    least: int
    most: int
    words: tuple[str, ...] = ()
    ports: tuple[str, ...] = ("http", "admin")
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""
    name: str = "server"
    cpus: float = 1.0
    gpus: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict)
    runtime_env: Mapping[str, object] = field(default_factory=dict)
    drain_s: float = 30.0
    rule: Rule = field(default_factory=Rule)


class RayServerGroup:
    """The servers of one plan behind one ingress. Servers that run already are taken over.

    log: called with a line about each change. Threads: one.
    """

    def __init__(
        self, ray: ModuleType, plan: RayServers, ingress: Ingress, log: Callable[[str], None]
    ) -> None:
        self._ray, self._plan, self._ingress, self._log = ray, plan, ingress, log
        self._actors = actors_of(ray, plan.name, plan.namespace)
        self._statuses: dict[str, NodeStatus] = {}
        self._was_ready: frozenset[str] = frozenset()
        self._placed: dict[str, str] = {}  # where a server was meant to be
        self._trend = Trend(max(plan.least, len(self._actors)))
        self._cpu_s: dict[str, float] = {}
        self._read_s = time.monotonic()
        self._spread_over: frozenset[str] = frozenset()  # the nodes that were looked at last
        for _ in range(plan.least - len(self._actors)):
            self._add()

    def check(self) -> Mapping[str, NodeStatus]:
        """Read where the servers are, and tell the ingress; return their last statuses. Log which
        became ready, or are so no more.
        """
        for name, found in statuses(self._ray, self._actors, _STATUS_S).items():
            if found["pid"] or name not in self._statuses:
                self._statuses[name] = found
        self._route(self._actors)
        ready = self._ingress.ready & self._actors.keys()
        for name in sorted(ready ^ self._was_ready):
            self._log(f"{name} is {'ready' if name in ready else 'not ready'}")
        self._was_ready = ready
        return {
            name: {**one, "state": "ready"} if name in self._ingress.ready else one
            for name, one in self._statuses.items()
        }

    def wait_ready(
        self, names: Iterable[str], within_s: float, stop: threading.Event
    ) -> Mapping[str, NodeStatus]:
        """Wait until the ingress finds servers ready, or `stop` is set. Raises: NoServer."""
        until_s, wanted = time.monotonic() + within_s, {*names}
        while not wanted <= self._ingress.ready and not stop.wait(_CHECK_S):
            self.check()
            if time.monotonic() > until_s:
                late = sorted(wanted - self._ingress.ready)
                lines = [line for name in late for line in self._statuses[name]["lines"][-3:]]
                raise NoServer(
                    f"{', '.join(late)} not ready after {within_s:g} s: {'; '.join(lines)}"
                )
        return self.check()

    @property
    def names(self) -> list[str]:
        """The names of the servers, the oldest first."""
        return sorted(self._actors, key=lambda name: int(name.rpartition("-")[2]))

    def upgrade(self, within_s: float, stop: threading.Event) -> None:
        """Replace each server: start a successor, wait until it is ready, and end the old one.

        Raises: NoServer if a successor does not become ready; it is removed, the others stay.
        """
        for old in self.names:
            if not stop.is_set():
                self._replace(old, within_s, stop)

    def spread(self, within_s: float, stop: threading.Event) -> None:
        """Replace, after a node has joined or left, a server of the node that has most, if another
        node has at least two less.

        Raises: NoServer, as `upgrade`.
        """
        nodes = self._nodes()
        is_ready = self._actors.keys() <= self._ingress.ready
        if not nodes or nodes == self._spread_over or not is_ready:
            return
        counts = self._counts(nodes)
        most, least = max(counts, key=counts.__getitem__), min(counts.values())
        if counts[most] - least < 2:
            self._spread_over = nodes
            return
        try:
            self._replace(next(n for n in self.names if self._node(n) == most), within_s, stop)
        except NoServer:
            self._spread_over = nodes  # servers do not start there
            raise
        if self._counts(nodes)[most] - least >= counts[most] - least:
            self._spread_over = nodes  # no other node has room

    def _replace(self, old: str, within_s: float, stop: threading.Event) -> None:
        new = self._add(instead_of=old)
        try:
            self.wait_ready([new], within_s, stop)
        except NoServer:
            self._end([new])
            raise
        self._end([old])
        self._log(f"{old} is replaced by {new}")

    def scale(self, count: int, why: str) -> None:
        """Start servers, or end the youngest."""
        before = self.names
        if count > len(before):
            for _ in range(count - len(before)):
                self._add()
        elif count < len(before):
            self._end(before[count:])
        self._log(f"{len(before)} -> {count} servers: {why}")

    def follow_load(self) -> None:
        """Read the load of all servers, and start or end one if the rule says so."""
        pending = {name: actor.pressure.remote() for name, actor in self._actors.items()}
        done, _ = self._ray.wait(
            list(pending.values()), num_returns=len(pending), timeout=2 * _METRICS_S
        )
        found: dict[str, Pressure] = {}
        for name, one in pending.items():
            with contextlib.suppress(self._ray.exceptions.RayError):
                if one in done and (load_of_one := self._ray.get(one)) is not None:
                    found[name] = load_of_one
        now_s = time.monotonic()
        span_s, self._read_s = now_s - self._read_s, now_s
        cores = sum(
            max(0.0, one.cpu_s - self._cpu_s.get(name, one.cpu_s)) / span_s
            for name, one in found.items()
        )
        self._cpu_s = {name: one.cpu_s for name, one in found.items()}
        load = Load(
            offered_per_s=cores,
            row_us=1e6 / max(self._plan.cpus, 1e-3),
            delay_us=1e6 * max((one.wait_s for one in found.values()), default=0.0),
            slo_us=1e6 * min((one.slo_s for one in found.values() if one.slo_s), default=1e9),
            has=len(self._ingress.ready & found.keys()),
        )
        plan, before = self._plan, len(self._actors)
        self._trend = follow(self._trend, load, plan.least, plan.most, plan.rule, now_s)
        if self._trend.wanted != before:
            why = f"{cores:.1f} cores used, queries wait {load.delay_us / 1e3:.1f} ms"
            self.scale(self._trend.wanted, why)

    def close(self) -> dict[str, NodeStatus]:
        """End all servers; return their last statuses."""
        return self._end(self.names)

    def _add(self, instead_of: str = "") -> str:
        plan = self._plan
        last = max((int(one.rpartition("-")[2]) for one in self._actors), default=0)
        name = f"{plan.name}-{last + 1}"
        environment = dict(plan.environment)
        if plan.folder:
            environment["CLIPPER_SERVER__FOLDER"] = f"{plan.folder}/{name}"
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as Affinity

        options = actor_options(
            name, plan.namespace, plan.cpus, plan.gpus, plan.resources, plan.runtime_env
        )
        if nodes := self._nodes():  # else it waits until there is one
            counts = self._counts(nodes, instead_of)
            self._placed[name] = emptiest = min(counts, key=counts.__getitem__)
            options["scheduling_strategy"] = Affinity(
                emptiest, soft=True, _spill_on_unavailable=True
            )
        kind = self._ray.remote(RayServer)
        self._actors[name] = kind.options(**options).remote(
            name, plan.words, plan.ports, environment
        )
        return name

    def _node(self, name: str) -> str:
        return self._statuses.get(name, {}).get("node") or self._placed.get(name, "")

    def _nodes(self) -> frozenset[str]:
        """Return the nodes that a server fits on, if nothing else runs there."""
        needs = {"CPU": self._plan.cpus, "GPU": self._plan.gpus, **self._plan.resources}
        return frozenset(
            one["NodeID"]
            for one in self._ray.nodes()
            if one["Alive"] and all(one["Resources"].get(k, 0) >= n for k, n in needs.items())
        )

    def _counts(self, nodes: Iterable[str], without: str = "") -> Counter[str]:
        """Return how many servers each node has, one of them left out."""
        counts = Counter(dict.fromkeys(nodes, 0))
        found = (self._node(name) for name in self._actors if name != without)
        counts.update(node for node in found if node in counts)
        return counts

    def _end(self, names: Sequence[str]) -> dict[str, NodeStatus]:
        """Take servers out of the ingress, then end them; follow where the others are meanwhile."""
        ending = {name: self._actors.pop(name) for name in names}
        self._route(self._actors)
        for name in names:
            self._statuses.pop(name, None)
            self._placed.pop(name, None)
        return take_down(self._ray, ending, self._plan.drain_s, self.check)

    def _route(self, names: Iterable[str]) -> None:
        self._ingress.route(
            Backend(name, {port: one[port] for port in ("http", "grpc", "admin") if port in one})
            for name in names
            if (one := self._statuses.get(name)) is not None
        )
