"""Nodes of a mesh on a Ray cluster: one actor per node, which keeps a `clipper node` process
running. Needs the extra `ray`.

Ray chooses the machine by CPUs, GPUs and other resources, and restarts an actor elsewhere when its
machine is lost. The actor restarts the process when it ends. Queries do not pass through Ray. A
node whose actor is killed gets SIGTERM, so it leaves the mesh gracefully.
"""

import collections
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Final, Literal, TypedDict, cast

from clipper.child_environment import OF_ARTIFACTS, child_environment
from clipper.errors import ConfigError, NoServer
from clipper.host_port import join_host_port
from clipper.processes import (
    NEVER_HELD,
    ChildState,
    Notice,
    NoticeKind,
    RestartPolicy,
    Spawned,
    StartCommand,
    Supervisor,
)
from clipper.processes.supervisor import TAIL_LINES
from clipper_container.start_folder import StartFolder

if TYPE_CHECKING:
    from ray.actor import ActorHandle

NAMESPACE: Final = "clipper"
NODE: Final = (sys.executable, "-m", "clipper", "node")
_OF_SERVERS: Final = ("CLIPPER_*", "RAY_ADDRESS", *OF_ARTIFACTS)
_POLICY: Final = RestartPolicy(backoff_s_min=0.2, exits_max=NEVER_HELD)
_STATES: Final = {
    ChildState.READY: "ready",
    ChildState.STOPPING: "leaving",
    ChildState.KILLING: "leaving",
    ChildState.STOPPED: "ended",
    ChildState.FAILED: "ended",
}
_CHECK_S: Final = 0.1
_KILL_S: Final = 5.0
_CALLS: Final = 4  # of one actor at once: its state is read while it stops
_EVENT_KINDS: Final[dict[str, Literal["http", "grpc", "admin"]]] = {
    "queries come in at": "http",
    "queries come in over gRPC at": "grpc",
    "management at": "admin",
}


class NodeStatus(TypedDict, total=False):
    """The status of a process that an actor keeps running.

    state: `starting`, `ready`, `leaving`, `ended`, `waits for a place` or `lost`. lines: the last
    output. http, grpc, admin: addresses. host: its machine. node: Ray's id of that. folder: of a
    set of shards.
    """

    name: str
    state: str
    pid: int
    starts: int
    lines: list[str]
    http: str
    grpc: str
    admin: str
    host: str
    node: str
    folder: str


class NodeProcess:
    """Runs a command and restarts it whenever it ends, until `stop`, in a session of its own.

    environment: variables besides those of this process that a server needs; the models that it
    starts get fewer. Threads: any.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self._name = name
        self._lock = threading.Lock()  # of the next two
        self._lines: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        self._addresses: NodeStatus = {}
        words = (*command, "--end-with-parent", str(os.getpid()))
        variables = {**child_environment(_OF_SERVERS), **(environment or {})}
        process = Spawned(StartCommand(words, variables, session=True), StartFolder())
        self._processes = Supervisor(f"clipper-node-{name}")
        self._processes.start()
        self._processes.add(name, process, _POLICY, self, on_lines=self.on_lines)

    def status(self) -> NodeStatus:
        """Return a map: name; state: `starting`, `ready`, `leaving` or `ended`; pid; starts;
        addresses; lines: the last output.
        """
        child = self._processes.get(self._name)
        assert child is not None
        with self._lock:
            about: NodeStatus = {
                "name": self._name,
                "state": _STATES.get(child.state, "starting"),
                "pid": child.pid,
                "starts": child.starts,
            }
            return {**about, **self._addresses, "lines": [*self._lines]}

    def stop(self, grace_s: float) -> NodeStatus:
        """Terminate the process gracefully, with SIGKILL after `grace_s`; return its last
        status. Idempotent.
        """
        self._processes.stop([self._name], grace_s, grace_s + _KILL_S)
        self._processes.end(_KILL_S)
        return self.status()

    def on_notice(self, name: str, notice: Notice) -> None:
        """See ChildListener."""
        with self._lock:
            if notice.kind is NoticeKind.STARTED:
                self._addresses = {}
            elif notice.detail:
                self._lines.append(f"{notice.kind}: {notice.detail}")

    def on_lines(self, name: str, lines: Sequence[str]) -> None:
        """Read the state of the process from its output. Threads: the supervisor's."""
        with self._lock:
            self._lines.extend(lines)
            for line in lines:
                for state, what in _EVENT_KINDS.items():
                    if line.startswith(state):
                        address = line.removeprefix(state).strip().partition(",")[0]
                        self._addresses[what] = address.removesuffix("/admin")
        child = self._processes.get(name)
        if "ready" in lines and child is not None:
            self._processes.serves(name, child.pid)


def node_command(name: str, words: Sequence[str], program: Sequence[str] = NODE) -> list[str]:
    """Return the command line of a node's process."""
    return [*program, *words, "--name", name]


def node_addresses(host: str, http_port: int) -> list[str]:
    """Return the arguments that say where a node of this host listens."""
    return ["--peers", f"tcp:{join_host_port(host, 0)}", "--http", join_host_port(host, http_port)]


def here() -> str:
    """Return the address of the machine where Ray runs this actor."""
    import ray

    return str(ray.util.get_node_ip_address())


class RayNode:
    """A Ray actor that keeps one node's process running.

    words: further arguments of `clipper node`. http_port: 0 for any free port.
    """

    def __init__(self, name: str, words: Sequence[str], http_port: int) -> None:
        self._host = host = here()
        listens = node_addresses(host, http_port)
        self._process = NodeProcess(name, node_command(name, [*words, *listens]))

    def status(self) -> NodeStatus:
        """Return the status of the process, and `host`."""
        return {**self._process.status(), "host": self._host}

    def stop(self, grace_s: float) -> NodeStatus:
        """Stop the process; see NodeProcess.stop."""
        return self._process.stop(grace_s)


@dataclass(frozen=True, slots=True)
class RayCluster:
    """Parameters of a mesh on Ray. words: further arguments of `clipper node`. cpus, gpus,
    resources: of each node, as Ray counts them. runtime_env: Ray's, of each node.
    """

    mesh: str = "mesh"
    nodes: int = 3
    words: tuple[str, ...] = ()
    cpus: float = 1.0
    gpus: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict)
    http_port: int = 0
    runtime_env: Mapping[str, object] = field(default_factory=dict)

    def names(self) -> list[str]:
        """Return the names of the nodes."""
        return [f"{self.mesh}-{number}" for number in range(1, self.nodes + 1)]


def join_ray(address: str) -> ModuleType:
    """Connect to Ray and return it.

    address: `auto`, HOST:PORT, or `local` for a cluster inside this process.

    Raises: ConfigError when Ray is not installed; NoServer.
    """
    try:
        import ray
    except ImportError:
        raise ConfigError(
            "Ray is not installed.", hint='pip install "clipper-serving[ray]"'
        ) from None
    if not ray.is_initialized():
        try:
            ray.init(
                address=None if address == "local" else address,
                namespace=NAMESPACE,
                log_to_driver=False,
                logging_level="error",
                **({"include_dashboard": False} if address == "local" else {}),
            )
        except (ConnectionError, RuntimeError) as error:
            why = str(error).partition("\n")[0]
            hint = "Start one: ray start --head. Or try --address local: it ends with this command."
            raise NoServer(f"no Ray cluster at {address!r}: {why}", hint=hint) from None
    return cast("ModuleType", ray)


def actor_options(
    name: str,
    namespace: str,
    cpus: float,
    gpus: float = 0.0,
    resources: Mapping[str, float] | None = None,
    runtime_env: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """Return the options of an actor that outlives this process, is restarted for ever, and is
    spread over the machines. cpus, gpus, resources: that Ray reserves. runtime_env: Ray's.
    """
    return {
        "name": name,
        "namespace": namespace,
        "lifetime": "detached",
        "get_if_exists": True,
        "max_restarts": -1,
        "max_task_retries": 0,  # what a lost actor does not answer is asked again later
        "max_concurrency": _CALLS,
        "num_cpus": cpus,
        "num_gpus": gpus,
        "resources": dict(resources or {}),
        "scheduling_strategy": "SPREAD",
        **({"runtime_env": dict(runtime_env)} if runtime_env else {}),
    }


def bring_up(ray: ModuleType, cluster: RayCluster) -> "dict[str, ActorHandle]":
    """Create an actor for each node that has none; return all by name."""
    kind = ray.remote(RayNode)
    tags = {"gpu": cluster.gpus} if cluster.gpus else {}
    words = [*cluster.words, *(word for tag in tags for word in ("--label", tag))]
    return {
        name: kind.options(
            **actor_options(
                name,
                NAMESPACE,
                cluster.cpus,
                cluster.gpus,
                cluster.resources,
                cluster.runtime_env,
            )
        ).remote(name, words, cluster.http_port)
        for name in cluster.names()
    }


def actors_of(ray: ModuleType, mesh: str, namespace: str = NAMESPACE) -> "dict[str, ActorHandle]":
    """Return the actors of a mesh, by name."""
    found = ray.util.list_named_actors(all_namespaces=True)
    names = sorted(one["name"] for one in found if one["namespace"] == namespace)
    mine = [
        name
        for name in names
        if name.rpartition("-")[0] == mesh and name.rpartition("-")[2].isdecimal()
    ]
    return {name: ray.get_actor(name, namespace=namespace) for name in mine}


def statuses(
    ray: ModuleType, actors: Mapping[str, "ActorHandle"], within_s: float = 5.0
) -> dict[str, NodeStatus]:
    """Return the status of each actor; `waits for a place` if Ray has not placed it."""
    pending = {name: actor.status.remote() for name, actor in actors.items()}
    done, _ = (
        ray.wait(list(pending.values()), num_returns=len(pending), timeout=within_s)
        if pending
        else ([], [])
    )
    found: dict[str, NodeStatus] = {}
    for name, one in pending.items():
        found[name] = {
            "name": name,
            "state": "waits for a place",
            "pid": 0,
            "starts": 0,
            "lines": [],
        }
        if one in done:
            with contextlib.suppress(ray.exceptions.RayError):
                found[name] = ray.get(one)
    return found


def take_down(
    ray: ModuleType,
    actors: Mapping[str, "ActorHandle"],
    grace_s: float,
    meanwhile: Callable[[], object] = lambda: None,
) -> dict[str, NodeStatus]:
    """Stop all actors at once; return their last statuses. meanwhile: called again and again while
    they end."""
    pending = {name: actor.stop.remote(grace_s) for name, actor in actors.items()}
    waiting, until_s = list(pending.values()), time.monotonic() + grace_s + 2 * _KILL_S
    while waiting and (left_s := until_s - time.monotonic()) > 0:
        _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=min(left_s, _CHECK_S))
        meanwhile()
    found: dict[str, NodeStatus] = {}
    for name, one in pending.items():
        try:
            found[name] = ray.get(one, timeout=0)
        except ray.exceptions.RayError as error:
            found[name] = {"name": name, "state": "lost", "lines": [str(error).partition("\n")[0]]}
        ray.kill(actors[name])
    return found


def wait_ready(
    ray: ModuleType, actors: Mapping[str, "ActorHandle"], within_s: float, stop: threading.Event
) -> dict[str, NodeStatus]:
    """Wait until all are ready or `stop` is set. Raises: NoServer on timeout."""
    until_s = time.monotonic() + within_s
    while True:
        found = statuses(ray, actors, min(5.0, within_s))
        waiting = [name for name, one in found.items() if one["state"] != "ready"]
        if not waiting or stop.is_set():
            return found
        if time.monotonic() > until_s:
            states = "; ".join(
                f"{name} {found[name]['state']}{_last(found[name]['lines'])}" for name in waiting
            )
            raise NoServer(
                f"{len(waiting)} of {len(found)} are not ready after {within_s:g} s: {states}"
            )
        stop.wait(_CHECK_S)


def _last(lines: Sequence[str]) -> str:
    return f": {lines[-1]}" if lines else ""
