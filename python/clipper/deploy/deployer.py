"""The seam between a server and whatever runs its containers: local processes now, Docker and Kubernetes later."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSpec:
    """Everything that a container of one model needs; its replicas differ in nothing but their number.

    target: `module:attribute`, or the path of a packed file (`Package.target`). sha256: of that file, in hex.
    connect: where the server listens: `unix:/path` or `tcp:host:port`.
    token: goes to the container by its environment, never by its command line.
    threads: for BLAS and OpenMP, in each process. batch_max: 0 for no limit of the model's own.
    python: the interpreter of the model's environment; clipper-container must be installed there.
    code: directories for the container's sys.path. env: added to the environment.
    """

    name: str
    target: str
    connect: str
    version: int = 1
    sha256: str = ""
    input: str | None = None
    output: str | None = None
    token: str = field(default="", repr=False)
    batch_max: int = 0
    threads: int = 1
    retry_singly: bool = False
    row_by_row: bool = False
    pad: int = 0
    confidence: bool = True
    protocol: int = 2
    python: str = sys.executable
    code: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


class ReplicaState(StrEnum):
    STARTING = "starting"
    RUNNING = "running"  # its process lives; it serves once it said HELLO to the server
    BACKOFF = "backoff"  # it ended, and is started again after a pause
    FAILED = "failed"  # it ended too often, and is started again only when asked
    STOPPED = "stopped"


class EventKind(StrEnum):
    STARTED = "started"
    EXITED = "exited"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class ReplicaEvent:
    """Something that happened to a replica.

    pid: of the process that it happened to, 0 when there is none.
    detail: for a person: "killed (SIGKILL)", "exit 3", "again in 0.4 s".  again_s: the pause, for RESTARTING.
    log_tail: the last lines that the process wrote, oldest first; for EXITED and FAILED.
    """

    name: str
    version: int
    replica: int
    kind: EventKind
    pid: int = 0
    detail: str = ""
    log_tail: tuple[str, ...] = ()
    again_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """What a replica is doing. `restart_count` counts the starts after the first; `detail` tells of the last exit."""

    name: str
    version: int
    replica: int
    state: ReplicaState
    pid: int = 0
    restart_count: int = 0
    detail: str = ""


OnEvent = Callable[[ReplicaEvent], None]


class Deployer(Protocol):
    """Starts and stops replicas.

    Threads: any.
    """

    def start(self, spec: ContainerSpec, replica: int = 0) -> None:
        """Start a replica and keep it alive; returns before it serves. Raises: ValueError when it runs already."""

    def stop(self, name: str, version: int | None = None, replica: int | None = None) -> None:
        """Stop one replica, or all of a version, or all of a model, and wait until they are gone."""

    def restart(self, name: str, version: int, replica: int, pid: int) -> bool:
        """Kill the process `pid` of a replica; it is started again as after any death. False when that does not run here."""

    def list(self) -> Sequence[ReplicaStatus]:
        """Every replica that was started, stopped ones included, by name, version and number."""

    def logs(self, name: str, version: int, replica: int) -> Sequence[str]:
        """The last lines that a replica wrote, oldest first. Raises: KeyError for a replica that was never started."""

    def close(self) -> None:
        """Stop everything."""
