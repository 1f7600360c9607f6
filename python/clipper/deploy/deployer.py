"""The interface of deployers, which run a server's containers: processes, Docker, podman."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from clipper.deploy.needs import Needs
from clipper.processes import ChildState
from clipper.types import CONCURRENCY_DEFAULT, Model
from clipper_container.machine import cores


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSpec:
    """Parameters of a model's containers; replicas differ only in their number.

    target: `module:attribute`, or the path of a packed file (`Package.target`). sha256: of that
    file, in hex. connect: address of the server: `unix:/path` or `tcp:host:port`. token: passed in
    the environment, never on the command line. threads: for BLAS and OpenMP, per process.
    batch_max: 0 for no limit. python: interpreter of the model's environment, with
    clipper-container installed. code: directories for sys.path. env: added to the environment.
    env_pass: variables of the server that a process gets besides the usual ones.

    deployer: "process", "docker" or "podman". memory_mib, cpus: limits of each; 0: none. For the
    last two only: gpus ("all", a number, or ids as "0,2"), needs: contents of the image, secrets:
    texts to mount, by path.

    command: words of a program that is the container, run in `folder`; empty for Python.
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
    max_concurrency: int = 0
    pad: int = 0
    confidence: bool = True
    protocol: int = 2
    python: str = sys.executable
    code: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    env_pass: tuple[str, ...] = ()
    deployer: str = "process"
    memory_mib: int = 0
    cpus: float = 0.0
    gpus: str = ""
    needs: Needs | None = None
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    command: tuple[str, ...] = ()
    folder: str = ""


def options(spec: ContainerSpec) -> list[str]:
    """Return the arguments of `clipper_container serve` that describe the model."""
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
        )  # "any": the model's own declaration holds
    numbers = {
        "--batch-max": spec.batch_max,
        "--pad": spec.pad,
        "--max-concurrency": spec.max_concurrency,
    }
    for option, number in numbers.items():
        words += [option, str(number)] if number else []
    words += ["--protocol", "1"] if spec.protocol == 1 else []
    flags = {
        "--retry-singly": spec.retry_singly,
        "--row-by-row": spec.row_by_row,
        "--no-confidence": not spec.confidence,
    }
    return [*words, *(flag for flag, wanted in flags.items() if wanted)]


def spec_of(
    model: Model,
    *,
    connect: str = "",
    token: str = "",
    threads: int = 1,
    needs: Needs | None = None,
) -> ContainerSpec:
    """Build a spec from a model's record and what the server adds to it."""
    concurrency = model.max_concurrency
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
        max_concurrency=concurrency if concurrency != CONCURRENCY_DEFAULT else 0,
        pad=model.batching.size_max if model.batching.pad else 0,
        code=model.code,
        deployer=model.deployer or "process",
        memory_mib=model.memory_mib,
        cpus=model.cpus,
        gpus=model.gpus,
        command=model.command,
        folder=model.folder,
        env=model.env,
        connect=connect,
        token=token,
        threads=threads,
        needs=needs,
    )


def threads_of(model: Model, threads: int) -> int:
    """Return the threads of each container of a model: `threads`, else by its `cpus`, else an
    equal share of the cores that this process may use."""
    return threads or int(model.cpus) or max(1, cores() // max(1, model.replicas))


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """Status of a replica. restart_count: starts after the first. detail: describes the last
    exit. start: how its process was started: "forked", "plain: " with the reason, or "" where there
    is no choice. again_s: seconds until its next start; 0 if none is due.
    """

    name: str
    version: int
    replica: int
    state: ChildState
    pid: int = 0
    restart_count: int = 0
    detail: str = ""
    start: str = ""
    again_s: float = 0.0


class LogTail(list[str]):
    """Snapshot of the last lines, oldest first. total: lines ever written, across restarts."""

    total: int

    def __init__(self, lines: Iterable[str], total: int) -> None:
        super().__init__(lines)
        self.total = total
