"""A deployer of processes with a supervisor of its own."""

from clipper.deploy.processes.model_process import ModelProcesses
from clipper.deploy.replicas import OnNotice, ReplicaDeployer
from clipper.processes import RestartPolicy, Supervisor
from clipper.processes.supervisor import LINES_MAX


class ProcessDeployer(ReplicaDeployer):
    """Runs replicas as processes; its supervisor ends with it."""

    def __init__(
        self,
        on_notice: OnNotice | None = None,
        policy: RestartPolicy | None = None,
        fork: bool = True,
        log_lines_max: int = LINES_MAX,
    ) -> None:
        self.supervisor = Supervisor()
        self.supervisor.start()
        self.processes = ModelProcesses(self.supervisor, fork=fork)
        super().__init__(self.supervisor, self.processes, on_notice, policy, log_lines_max)

    def close(self, grace_s: float | None = None) -> None:
        super().close(grace_s)
        self.supervisor.end()
