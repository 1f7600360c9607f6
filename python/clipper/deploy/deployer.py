"""The seam between a server and whatever runs its containers: processes of this host, Docker,
podman."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from clipper.deploy.needs import Needs
from clipper.types import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSpec:
    """Everything that a container of one model needs; its replicas differ in nothing but their
    number.

    target: `module:attribute`, or the path of a packed file (`Package.target`). sha256: of that
    file, in hex. connect: where the server listens: `unix:/path` or `tcp:host:port`. token: goes to
    the container by its environment, never by its command line. threads: for BLAS and OpenMP, in
    each process. batch_max: 0 for no limit of the model's own. python: the interpreter of the
    model's environment; clipper-container must be installed there. code: directories for the
    container's sys.path. env: added to the environment. deployer: "process", "docker" or "podman";
    the rest is for the last two: memory_mib, cpus (0: no limit), gpus ("all", a number, or ids as
    "0,2"), needs: what goes into its image, secrets: texts that are mounted, by their paths.
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
    warmup: str = ""
    row_by_row: bool = False
    pad: int = 0
    confidence: bool = True
    protocol: int = 2
    python: str = sys.executable
    code: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    deployer: str = "process"
    memory_mib: int = 0
    cpus: float = 0.0
    gpus: str = ""
    needs: Needs | None = None
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)


def options(spec: ContainerSpec) -> list[str]:
    """What a container is told of its model, wherever it runs: words of `clipper_container
    serve`."""
    words = ["--name", spec.name, "--version", str(spec.version)]
    texts = {
        "--input": spec.input,
        "--output": spec.output,
        "--sha256": spec.sha256,
        "--warmup": spec.warmup,
    }
    for option, value in texts.items():
        words += (
            [option, value] if value and value != "any" else []
        )  # what it declares itself, then
    for option, number in (("--batch-max", spec.batch_max), ("--pad", spec.pad)):
        words += [option, str(number)] if number else []
    words += ["--protocol", "1"] if spec.protocol == 1 else []
    flags = {
        "--retry-singly": spec.retry_singly,
        "--row-by-row": spec.row_by_row,
        "--no-confidence": not spec.confidence,
    }
    return [*words, *(flag for flag, wanted in flags.items() if wanted)]


def spec_of(model: Model, **where: Any) -> ContainerSpec:
    """The part of a spec that a model's record says; where: the rest, as `connect`, `token`,
    `threads`."""
    return ContainerSpec(
        name=model.name,
        version=model.version,
        target=model.target,
        sha256=model.sha256,
        input=str(model.input),
        output=model.output,
        retry_singly=model.retry_singly,
        warmup=model.warmup,
        row_by_row=model.row_by_row,
        pad=model.batching.size_max if model.batching.pad else 0,
        code=model.code,
        deployer=model.deployer or "process",
        memory_mib=model.memory_mib,
        cpus=model.cpus,
        gpus=model.gpus,
        **{"connect": "", **where},
    )


class ReplicaState(StrEnum):
    BUILDING = "building"  # its image is made
    STARTING = "starting"
    RUNNING = "running"  # its process lives; it serves once it said HELLO to the server
    BACKOFF = "backoff"  # it ended, and is started again after a pause
    FAILED = "failed"  # it ended too often, and is started again only when asked
    STOPPED = "stopped"


class EventKind(StrEnum):
    BUILDING = "building"  # its image; a line of the builder
    STARTED = "started"
    EXITED = "exited"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class ReplicaEvent:
    """Something that happened to a replica.

    pid: of the process that it happened to, 0 when there is none.
    detail: for a person: "killed (SIGKILL)", "exit 3", "again in 0.4 s".  again_s: the pause, for
    RESTARTING. log_tail: the last lines that the process wrote, oldest first; for EXITED and
    FAILED.
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
    """What a replica is doing. `restart_count` counts the starts after the first; `detail` tells of
    the last exit."""

    name: str
    version: int
    replica: int
    state: ReplicaState
    pid: int = 0
    restart_count: int = 0
    detail: str = ""


class LogLines(deque[str]):
    """The last lines that a replica wrote, and how many it `ever` did."""

    def __init__(self, most: int) -> None:
        super().__init__(maxlen=most)
        self.ever = 0

    def append(self, line: str) -> None:
        self.ever += 1
        super().append(line)

    def extend(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.append(line)


class LogTail(list[str]):
    """The last lines that a replica wrote, oldest first. total: how many it ever wrote, over
    restarts."""

    total: int

    def __init__(self, lines: LogLines) -> None:
        super().__init__(lines)
        self.total = lines.ever


OnEvent = Callable[[ReplicaEvent], None]


class Deployer(Protocol):
    """Starts and stops replicas.

    Threads: any.
    """

    def start(self, spec: ContainerSpec, replica: int = 0) -> None:
        """Start a replica and keep it alive; returns before it serves. Raises: ValueError when it
        runs already."""

    def stop(self, name: str, version: int | None = None, replica: int | None = None) -> None:
        """Stop one replica, or all of a version, or all of a model, and wait until they are
        gone."""

    def restart(self, name: str, version: int, replica: int, pid: int) -> bool:
        """Kill the process `pid` of a replica; it is started again as after any death. False when
        that does not run here."""

    def list(self) -> Sequence[ReplicaStatus]:
        """Every replica that was started, stopped ones included, by name, version and number."""

    def logs(self, name: str, version: int, replica: int) -> Sequence[str]:
        """The last lines that a replica wrote, oldest first. Raises: KeyError for a replica that
        was never started."""

    def close(self) -> None:
        """Stop everything."""
