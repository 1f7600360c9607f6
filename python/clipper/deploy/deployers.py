"""A deployer that delegates to processes, Docker or podman, by each model's spec. Engines
connect on first use.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Final

from clipper.deploy.deployer import ContainerSpec, Deployer, OnEvent, ReplicaStatus
from clipper.deploy.docker.containers import DockerDeployer
from clipper.deploy.docker.daemon import Daemon, Owner
from clipper.deploy.processes.process import ProcessDeployer
from clipper.deploy.replica_table import LOG_LINES_MAX
from clipper.deploy.restarts import RestartPolicy
from clipper.errors import InvalidInput, did_you_mean
from clipper.settings.docker import DockerSettings

ENGINES: Final = ("docker", "podman")
KINDS: Final = ("process", *ENGINES)
MEMORY_MIB_MIN: Final = 16


def placing(deployer: str, memory_mib: int, cpus: float, gpus: str) -> dict[str, object]:
    """Check where a model's containers run, and their limits; return these fields of its record.
    Raises: InvalidInput.
    """
    if deployer not in KINDS:
        raise InvalidInput(
            f"deployer={deployer!r}{did_you_mean(deployer, KINDS) or '.'}",
            hint=f"Deployers: {', '.join(KINDS)}.",
        )
    limits = {"memory_mib": memory_mib, "cpus": cpus, "gpus": gpus}
    if deployer == "process" and (given := [key for key, value in limits.items() if value]):
        hint = 'Remove it, or set deployer="docker".'
        raise InvalidInput(
            f"{given[0]} is for containers of docker and podman; this model runs in a process.",
            hint=hint,
        )
    for key, value in (("memory_mib", memory_mib), ("cpus", cpus)):
        if (
            isinstance(value, bool)
            or not isinstance(value, int if key == "memory_mib" else int | float)
            or value < 0
        ):
            raise InvalidInput(f"{key}={value!r}: 0 for no limit, or more.")
    if 0 < memory_mib < MEMORY_MIB_MIN:
        raise InvalidInput(
            f"memory_mib={memory_mib}: {MEMORY_MIB_MIN} or more; Python alone takes that."
        )
    return {"deployer": deployer, **limits}


class Deployers:
    """The deployer of a server. on_event: passed to each deployer. fork: whether processes may be
    forked from fork servers; containers of engines never are. log_lines_max: lines kept of each
    replica's output. Threads: any.
    """

    def __init__(
        self,
        on_event: OnEvent,
        policy: RestartPolicy,
        settings: DockerSettings,
        owner: Owner,
        fork: bool = True,
        log_lines_max: int = LOG_LINES_MAX,
    ) -> None:
        self._make: dict[str, Callable[[], Deployer]] = {
            kind: lambda kind=kind: DockerDeployer(  # type: ignore[misc]
                Daemon(kind, settings, owner), on_event, policy, log_lines_max
            )
            for kind in ENGINES
        }
        self._guard = threading.Lock()
        self._closed = False
        self._all: dict[str, Deployer] = {
            "process": ProcessDeployer(on_event, policy, fork, log_lines_max)
        }

    def _of(self, kind: str) -> Deployer:
        with self._guard:
            if kind not in self._all:
                if self._closed:
                    raise RuntimeError("this deployer is closed")
                self._all[kind] = self._make[kind]()
            return self._all[kind]

    def _each(self) -> list[Deployer]:
        with self._guard:
            return [*self._all.values()]

    def start(self, spec: ContainerSpec, replica: int = 0) -> None:
        """See Deployer."""
        self._of(spec.deployer).start(spec, replica)

    def stop(self, name: str, version: int | None = None, replica: int | None = None) -> None:
        """See Deployer."""
        for deployer in self._each():
            deployer.stop(name, version, replica)

    def restart(self, name: str, version: int, replica: int, pid: int) -> bool:
        """See Deployer."""
        return any(deployer.restart(name, version, replica, pid) for deployer in self._each())

    def list(self) -> Sequence[ReplicaStatus]:
        """See Deployer."""
        found = [status for deployer in self._each() for status in deployer.list()]
        return sorted(found, key=lambda status: (status.name, status.version, status.replica))

    def logs(self, name: str, version: int, replica: int) -> Sequence[str]:
        """See Deployer."""
        for deployer in self._each():
            try:
                return deployer.logs(name, version, replica)
            except KeyError:
                continue
        raise KeyError(name, version, replica)

    def close(self) -> None:
        """See Deployer."""
        with self._guard:
            self._closed = True
        for deployer in self._each():
            deployer.close()
