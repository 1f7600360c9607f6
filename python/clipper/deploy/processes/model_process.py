"""Model containers as processes on this machine: forked from a process that has imported their
frameworks where that is possible, and started plainly otherwise.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Final

from clipper.child_environment import child_environment
from clipper.deploy.deployer import ContainerSpec, options
from clipper.deploy.processes.command import command_line, variables
from clipper.deploy.processes.warmup_deaths import WarmUpDeaths
from clipper.deploy.replicas import Replicas
from clipper.processes import Handle, ProcessLimits, StartCommand, Supervisor, Told
from clipper.processes.fork_servers import ForkServers, Program
from clipper.processes.forked import ForkedChild
from clipper_container.forking import Message
from clipper_container.forking.hints import imports_of
from clipper_container.start_folder import StartFolder

TOKEN_ENV: Final = "CLIPPER_TOKEN"
ENTRY: Final = "clipper_container.forking.replica:become"
OFF: Final = "server.fork_server is off"

log = logging.getLogger("clipper.deploy")


class ModelProcesses:
    """Makes the handles of model containers that are processes.

    fork: whether they may be forked from a fork server.
    """

    def __init__(self, supervisor: Supervisor, *, fork: bool = True) -> None:
        self._servers, self._fork = ForkServers(supervisor), fork

    def handle(self, spec: ContainerSpec, replica: int, around: Replicas) -> Handle:
        """See HandleMaker."""
        folder = around.folder(spec.folder)
        work = _ModelWork(spec, replica, folder, around, self._servers, self._fork)
        return ForkedChild(self._servers, work, folder)

    def close(self) -> None:
        """See HandleMaker. Fork servers end with their supervisor."""

    @property
    def fork_servers(self) -> ForkServers:
        """Return the fork servers."""
        return self._servers


def command(spec: ContainerSpec, replica: int) -> Sequence[str]:
    """Return the command line of a container. It contains no secret."""
    if spec.command:
        return command_line(spec.command, spec.folder)
    return [*_program(spec), *arguments(spec, replica, str(os.getpid()))]


def _program(spec: ContainerSpec) -> Sequence[str]:
    return [spec.python, "-X", "faulthandler", "-m", "clipper_container"]


def arguments(spec: ContainerSpec, replica: int, parent: str) -> Sequence[str]:
    """Return the arguments of clipper_container. parent: process id of the container's parent."""
    words = ["serve", spec.target, *options(spec), "--connect", spec.connect]
    words += ["--replica", str(replica), "--threads", str(spec.threads)]
    words += ["--token-env", TOKEN_ENV, "--die-with-parent", parent]
    for directory in spec.code:
        words += ["--code", directory]
    return words


def environment(spec: ContainerSpec, replica: int = 0) -> dict[str, str]:
    """Return the environment of a container: what a process needs of ours, the spec's, the token,
    and for a command what it is.
    """
    ours = child_environment(spec.env_pass)
    own = {**ours, "PYTHONUNBUFFERED": "1", **spec.env, TOKEN_ENV: spec.token}
    return {**own, **variables(spec, replica)} if spec.command else own


class _ModelWork:
    """The task of one replica's process; see `Work`."""

    def __init__(
        self,
        spec: ContainerSpec,
        replica: int,
        folder: StartFolder,
        around: Replicas,
        servers: ForkServers,
        fork: bool,
    ) -> None:
        self._spec = spec
        self._replica = replica
        self._folder = folder
        self._around = around
        self._servers = servers
        self._fork = fork
        self._warmup = WarmUpDeaths()
        self._limits = ProcessLimits(spec.memory_mib, spec.cpus)
        self._last: Program | None = None  # that was requested

    def program(self, number: int) -> Program | str:
        """See Work."""
        spec = self._spec
        if spec.command:
            return "it is a command"
        if not self._fork:
            return OFF
        self._last = Program(
            (spec.name, spec.version),
            ENTRY,
            environment(spec),
            imports_of(spec.target, spec.code, self._folder.path),
            python=spec.python,
            urgent=self._is_awaited(number),
            limits=self._limits,
        )
        return self._last

    def request(self, number: int) -> Mapping[str, object]:
        """See Work."""
        spec = self._spec
        return {
            "arguments": self._arguments(number, "PARENT"),
            "folder": self._folder.path,
            "title": f"clipper-container {spec.name}:{spec.version}/{self._replica}",
        }

    def descriptors(self) -> Sequence[int]:
        """See Work."""
        return [self._folder.fd] if self._folder.fd >= 0 else []

    def command(self, number: int, control: int) -> StartCommand:
        """See Work."""
        spec = self._spec
        around = environment(spec, self._replica)
        if spec.command:
            words = command(spec, self._replica)
            return StartCommand(words, around, (control,), joins=True, limits=self._limits)
        words = [*_program(spec), *self._arguments(number, str(os.getpid()))]
        words += ["--report-fd", str(control)]
        return StartCommand(words, around, (control,), joins=True, limits=self._limits)

    def reported(self, report: Message, told: Told) -> bool:
        """See Work; `clipper_container.forking.report` has the reports."""
        if isinstance(rows := report.get("warming"), int):
            self._warmup.began(rows)
        elif "warm" in report:
            self._warmup.over()
            if "modules" in report and self._last is not None:
                self._servers.learn(self._last, report["modules"], report["packages"])
        elif "plain" in report:
            why = str(report["plain"])
            if self._last is not None:
                self._servers.start_plainly(self._last, why)
            told.started_as(f"plain: {why}")
        return True

    def ended(self) -> str:
        """See Work."""
        remedy = self._warmup.ended()
        if remedy:
            log.warning("container %s/%d: %s", self._spec.name, self._replica, remedy)
        return remedy

    def _is_awaited(self, number: int) -> bool:
        """Return whether nothing else serves that would be slowed down, or that could stand in for
        this replica, which is restarted."""
        key = self._spec.name, self._spec.version, self._replica
        if number > 1 and not self._around.others_run(key):
            return True
        return not self._around.any_is_ready()

    def _arguments(self, number: int, parent: str) -> Sequence[str]:
        spec, rows_max = self._spec, self._warmup.rows_max
        words = [*arguments(spec, self._replica, parent)]
        if self._is_awaited(number):
            words.append("--only-replica")
        return words if rows_max is None else [*words, "--warmup-max", str(rows_max)]
