"""The kinds of deployers: containers run as processes, in Docker or in podman."""

import threading
from typing import Final

from clipper.deploy.deployer import ContainerSpec
from clipper.deploy.docker.daemon import Daemon, Owner
from clipper.deploy.docker.engine_container import EngineContainers
from clipper.deploy.processes.model_process import ModelProcesses
from clipper.deploy.replicas import HandleMaker, Replicas
from clipper.errors import InvalidInput, did_you_mean
from clipper.processes import Handle, Supervisor
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
    if deployer == "process" and gpus:
        hint = 'Set CUDA_VISIBLE_DEVICES in its env, or deployer="docker".'
        raise InvalidInput(
            "gpus is for containers of docker and podman; this model runs in a process.", hint=hint
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


class ContainerKinds:
    """Makes the handles of the containers of a server, by each model's spec. Engines connect on
    first use.

    supervisor: runs them. fork: whether processes may be forked from fork servers; containers of
    engines never are. Threads: any.
    """

    def __init__(
        self, supervisor: Supervisor, settings: DockerSettings, owner: Owner, fork: bool = True
    ) -> None:
        self._settings = settings
        self._owner = owner
        self._guard = threading.Lock()
        self._makers: dict[str, HandleMaker] = {"process": ModelProcesses(supervisor, fork=fork)}

    def handle(self, spec: ContainerSpec, replica: int, around: Replicas) -> Handle:
        """See HandleMaker."""
        kind = spec.deployer
        with self._guard:
            if kind not in self._makers:
                daemon = Daemon(kind, self._settings, self._owner)
                self._makers[kind] = EngineContainers(daemon)
            maker = self._makers[kind]
        return maker.handle(spec, replica, around)

    def close(self) -> None:
        """See HandleMaker."""
        with self._guard:
            makers = [*self._makers.values()]
        for maker in makers:
            maker.close()
