"""Fault injection of the demo: kills and freezes containers and measures their recovery."""

import contextlib
import os
import signal
import time
from dataclasses import dataclass

from clipper.metrics.stats import ReplicaStats
from clipper.server import ClipperServer
from clipper_demo.load import Outcomes

FREEZE_S = 3.0


@dataclass(slots=True)
class InjectedFault:
    """A container that was killed or frozen.

    gone_s: until the server noticed. back_s: until it (or its successor) was ready again; negative
    until then. queries, partial, defaults: between fault and recovery.
    """

    kind: str
    container: str
    pid: int
    at_s: float
    gone_s: float = -1.0
    back_s: float = -1.0
    queries: int = 0
    partial: int = 0
    defaults: int = 0

    @property
    def over(self) -> bool:
        """Return True after the recovery."""
        return self.back_s >= 0


class FaultInjector:
    """Kills and freezes containers, one model after another. Threads: one."""

    def __init__(self, server: ClipperServer, outcomes: Outcomes) -> None:
        self.all: list[InjectedFault] = []
        self._server = server
        self._outcomes = outcomes
        self._next = 0
        self._before: dict[int, tuple[int, int, int]] = {}  # by position in `all`
        # pidfd and time to resume, by position in `all`
        self._frozen: dict[int, tuple[int, float]] = {}

    def kill(self) -> InjectedFault | None:
        """Send SIGKILL to a ready container of the next model; None if no model has one."""
        return self._do("killed", signal.SIGKILL)

    def freeze(self) -> InjectedFault | None:
        """Send SIGSTOP to a ready container of the next model; `update` resumes it after
        FREEZE_S."""
        return self._do("frozen", signal.SIGSTOP)

    def update(self) -> list[InjectedFault]:
        """Check all faults; return those newly noticed by the server or newly over."""
        self._thaw(time.monotonic())
        open_ = [(at, fault) for at, fault in enumerate(self.all) if not fault.over]
        if not open_:
            return []
        replicas = self._replicas()
        return [fault for at, fault in open_ if self._follow(at, fault, replicas)]

    def end(self) -> None:
        """Resume frozen containers, which could not be stopped otherwise."""
        self._thaw(float("inf"))

    def _do(self, kind: str, number: signal.Signals) -> InjectedFault | None:
        busy = {fault.container for fault in self.all if not fault.over}
        ready = {
            c: r["pid"]
            for c, r in self._replicas().items()
            if r["state"] == "ready" and c not in busy
        }
        models = list(dict.fromkeys(container.partition(":")[0] for container in self._replicas()))
        for turn in range(len(models)):
            model = models[(self._next + turn) % len(models)]
            chosen = next((c for c in ready if c.startswith(f"{model}:")), None)
            if chosen is not None:
                self._next += turn + 1
                return self._signal(kind, number, chosen, ready[chosen])
        return None

    def _signal(
        self, kind: str, number: signal.Signals, container: str, pid: int
    ) -> InjectedFault | None:
        try:
            pid_fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return None
        signal.pidfd_send_signal(pid_fd, number)
        at = len(self.all)
        fault = InjectedFault(kind, container, pid, time.monotonic())
        self.all.append(fault)
        counts = self._outcomes.counts
        self._before[at] = (counts.answered, counts.partial, counts.defaults)
        if number == signal.SIGSTOP:
            self._frozen[at] = (pid_fd, fault.at_s + FREEZE_S)
        else:
            os.close(pid_fd)
        return fault

    def _thaw(self, now: float) -> None:
        for at, (pid_fd, until) in list(self._frozen.items()):
            if now >= until:
                del self._frozen[at]
                with contextlib.suppress(ProcessLookupError):  # it ended while it was frozen
                    signal.pidfd_send_signal(pid_fd, signal.SIGCONT)
                os.close(pid_fd)

    def _follow(self, at: int, fault: InjectedFault, replicas: dict[str, ReplicaStats]) -> bool:
        replica = replicas.get(fault.container)
        serves = replica is not None and replica["state"] == "ready" and not replica.get("suspect")
        unnoticed = serves and replica is not None and replica["pid"] == fault.pid
        if unnoticed and (fault.kind == "killed" or at in self._frozen):
            return False
        is_new = fault.gone_s < 0 and not unnoticed
        if is_new:
            fault.gone_s = time.monotonic() - fault.at_s
        if not serves or at in self._frozen:
            return is_new
        counts, (answered, partial, defaults) = self._outcomes.counts, self._before.pop(at)
        fault.back_s = time.monotonic() - fault.at_s
        fault.queries = counts.answered - answered
        fault.partial = counts.partial - partial
        fault.defaults = counts.defaults - defaults
        return True

    def _replicas(self) -> dict[str, ReplicaStats]:
        """Return the replicas by `name:version/number`, in the order of the models."""
        models = self._server.stats()["models"]
        return {
            f"{name}/{r['number']}": r for name, model in models.items() for r in model["replicas"]
        }
