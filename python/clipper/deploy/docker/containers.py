"""Replicas as containers of Docker or podman. One thread per replica builds its image, starts it,
reads its output, and restarts it.

Restarts follow the same policy as for processes (`restarts`); the engine's own policy is off. Each
start creates a new container, so that its output can be read from the beginning.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from clipper.deploy.deployer import (
    ContainerSpec,
    EventKind,
    LogLines,
    OnEvent,
    ReplicaState,
    ReplicaStatus,
)
from clipper.deploy.docker.daemon import Daemon
from clipper.deploy.processes.process import describe_exit
from clipper.deploy.replica_table import (
    LOG_LINE_BYTES_MAX,
    LOG_LINES_MAX,
    ReplicaRecord,
    ReplicaTable,
)
from clipper.deploy.restarts import RestartPolicy
from clipper.errors import ClipperError, DeployFailed

PID = 1  # the model's process id inside its container
_AGAIN_S = 0.5
log = logging.getLogger("clipper.deploy")


@dataclass(slots=True)
class _Container:
    """The container of a replica, and the thread that runs it."""

    id: str = ""
    stopping: threading.Event = field(default_factory=threading.Event)
    guard: threading.Lock = field(default_factory=threading.Lock)  # between start and stop signal
    thread: threading.Thread | None = None


_Replica = ReplicaRecord[_Container]


def _pid(replica: _Replica) -> int:
    return PID if replica.state is ReplicaState.RUNNING else 0


class DockerDeployer:
    """Runs each replica as a container of `daemon`.

    on_event: called for each `ReplicaEvent`, one at a time; must not block. log_lines_max: lines
    kept of each replica's output.

    Threads: any. A fork of this process must not use it.
    """

    def __init__(
        self,
        daemon: Daemon,
        on_event: OnEvent | None = None,
        policy: RestartPolicy | None = None,
        log_lines_max: int = LOG_LINES_MAX,
    ) -> None:
        self._daemon, self._log_lines_max = daemon, log_lines_max
        self._policy = policy or RestartPolicy()
        self._table = ReplicaTable[_Container](_pid, on_event)

    # -- called by anyone

    def start(self, spec: ContainerSpec, replica: int = 0) -> None:
        """Build the image if needed, start a replica and keep it running; returns immediately.

        Raises: ValueError if it runs already; RuntimeError after close().
        """
        lines = LogLines(self._log_lines_max)
        new = _Replica(spec, replica, _Container(), ReplicaState.BUILDING, lines=lines)
        with self._table.changed:
            self._table.add(new, lambda old: old.at_rest)
            new.handle.thread = threading.Thread(
                target=self._run, args=(new,), name=f"clipper-container-{spec.name}", daemon=True
            )
            new.handle.thread.start()

    def stop(
        self,
        name: str,
        version: int | None = None,
        replica: int | None = None,
        grace_s: float | None = None,
    ) -> None:
        """Stop one replica, all of a version, or of a model: SIGTERM, SIGKILL after `grace_s`; wait
        for their end.

        Called from `on_event` it does not wait. Replicas that do not run are ignored.
        """
        self._stop(self._table.select(name, version, replica), grace_s)

    def restart(self, name: str, version: int, replica: int, pid: int) -> bool:
        """Kill a replica, which then restarts. Returns False if it does not run here."""
        found = self._table.get(name, version, replica)
        if found is None or pid != PID or found.state is not ReplicaState.RUNNING:
            return False
        self._daemon.kill(found.handle.id, signal.SIGKILL)
        return True

    def list(self) -> Sequence[ReplicaStatus]:
        """Return every replica ever started, including stopped ones, by name, version and
        number.
        """
        return self._table.statuses()

    def logs(self, name: str, version: int, replica: int) -> Sequence[str]:
        """Return the last lines of a replica, including its image build, oldest first. Raises:
        KeyError.
        """
        return self._table.logs(name, version, replica)

    def close(self, grace_s: float | None = None) -> None:
        """Stop all replicas at once."""
        if not self._table.close():
            return
        replicas = self._table.all()
        self._stop(replicas, grace_s)
        for replica in replicas:
            if replica.handle.thread is not None:
                replica.handle.thread.join()
        self._daemon.close()

    def _stop(self, replicas: Sequence[_Replica], grace_s: float | None) -> None:
        grace = self._policy.grace_s if grace_s is None else grace_s
        for replica in replicas:
            with replica.handle.guard:
                replica.handle.stopping.set()
                running = replica.state is ReplicaState.RUNNING
            if running:
                self._daemon.kill(replica.handle.id, signal.SIGTERM)
        if threading.current_thread() in [replica.handle.thread for replica in replicas]:
            threading.Timer(grace, self._end, (replicas, 0.0)).start()
        else:
            self._end(replicas, grace)

    def _end(self, replicas: Sequence[_Replica], grace_s: float) -> None:
        """Wait for the replicas to end; kill those that exceed the time."""

        def gone() -> bool:
            return all(replica.at_rest for replica in replicas)

        with self._table.changed:
            in_time = self._table.changed.wait_for(gone, grace_s)
        if in_time:
            return
        for replica in replicas:
            if not replica.at_rest and replica.handle.id:
                self._daemon.kill(replica.handle.id, signal.SIGKILL)
        with self._table.changed:
            self._table.changed.wait_for(gone)

    # -- the thread of a replica

    def _run(self, replica: _Replica) -> None:
        try:
            self._live(replica)
        except ClipperError as error:
            self._give_up(replica, str(error))
        except Exception as error:
            log.exception(
                "the deployer failed at container %s/%d", replica.spec.name, replica.number
            )
            self._give_up(replica, f"{type(error).__name__}: {error}")
        finally:
            if replica.handle.id:
                self._daemon.remove(replica.handle.id)
            with self._table.changed:
                replica.at_rest = True
                self._table.changed.notify_all()

    def _give_up(self, replica: _Replica, why: str) -> None:
        """Mark a replica as failed (or stopped): it could not start, or the engine refused it."""
        if replica.handle.stopping.is_set():
            self._become(replica, ReplicaState.STOPPED, EventKind.STOPPED, detail=replica.detail)
            return
        with self._table.changed:
            replica.lines.extend(why.splitlines())
            replica.detail = why
        self._become(replica, ReplicaState.FAILED, EventKind.FAILED, detail=why)

    def _live(self, replica: _Replica) -> None:
        write = self._writer(replica)

        def log_line(line: str) -> None:
            write(line)
            self._table.emit(replica, EventKind.BUILDING, 0, line)

        image = self._daemon.image(replica.spec, log_line, replica.handle.stopping.is_set)
        while self._one_life(replica, image):
            pass
        if replica.state is not ReplicaState.FAILED:
            self._become(
                replica,
                ReplicaState.STOPPED,
                EventKind.STOPPED,
                PID if replica.starts else 0,
                replica.detail,
            )

    def _one_life(self, replica: _Replica, image: str) -> bool:
        """Run one container from start to end; return True if another must follow."""
        with replica.handle.guard:
            replica.state = ReplicaState.STARTING
        replica.handle.id = self._daemon.create(image, replica.spec, replica.number)
        with replica.handle.guard:
            if replica.handle.stopping.is_set():
                return False
            replica.started_s = time.monotonic()
            self._daemon.start(replica.handle.id)
            replica.starts += 1
            replica.state = ReplicaState.RUNNING
        self._table.emit(replica, EventKind.STARTED, PID)
        replica.detail = self._follow(replica)
        if replica.handle.stopping.is_set():
            return False
        self._table.emit(replica, EventKind.EXITED, PID, replica.detail, replica.tail())
        pause_s = replica.restarts.pause(self._policy, replica.started_s, time.monotonic())
        if pause_s is None:
            replica.detail = f"{replica.detail}; {replica.restarts.looped}"
            self._become(
                replica, ReplicaState.FAILED, EventKind.FAILED, PID, replica.detail, replica.tail()
            )
            return False
        self._become(
            replica,
            ReplicaState.BACKOFF,
            EventKind.RESTARTING,
            PID,
            f"again in {pause_s:.1f} s",
            again_s=pause_s,
        )
        return not replica.handle.stopping.wait(pause_s)

    def _follow(self, replica: _Replica) -> str:
        """Read the output until the container ends; return how it ended. Waits for an engine
        that is temporarily away.
        """
        write, all_of_it = self._writer(replica), True
        while True:
            try:
                _take(self._daemon.output(replica.handle.id, all_of_it), write)
            except Exception as error:  # any error of a broken connection
                write(f"({self._daemon.kind} was cut off: {error})")
            try:
                state = self._daemon.state(replica.handle.id)
                if not state["Running"]:
                    return describe_end(state, replica.spec.memory_mib)
            except DeployFailed as error:
                if replica.handle.stopping.is_set():
                    return f"left behind: {error.message}"
            all_of_it = False
            replica.handle.stopping.wait(_AGAIN_S)

    def _writer(self, replica: _Replica) -> Callable[[str], None]:
        def write(line: str) -> None:
            with self._table.changed:
                replica.lines.append(line[:LOG_LINE_BYTES_MAX])

        return write

    def _become(
        self,
        replica: _Replica,
        state: ReplicaState,
        kind: EventKind,
        pid: int = 0,
        detail: str = "",
        log_tail: tuple[str, ...] = (),
        again_s: float = 0.0,
    ) -> None:
        with replica.handle.guard:
            replica.state = state
        self._table.emit(replica, kind, pid, detail, log_tail, again_s)


def _take(output: Iterable[bytes], write: Callable[[str], None]) -> None:
    """Split a stream into lines; a line that is too long is cut."""
    rest = b""
    for piece in output:
        *lines, rest = (rest + piece).split(b"\n")
        while len(rest) > LOG_LINE_BYTES_MAX:
            lines.append(rest[:LOG_LINE_BYTES_MAX])
            rest = rest[LOG_LINE_BYTES_MAX:]
        for line in lines:
            write(line.decode("utf-8", "replace"))
    if rest:
        write(rest.decode("utf-8", "replace"))


def describe_end(state: dict[str, object], memory_mib: int) -> str:
    """Describe an exit: "exit 3", "killed (SIGKILL)", "killed for memory (its limit is 512
    MiB)".
    """
    code = state.get("ExitCode")
    code = code if isinstance(code, int) else 0
    if state.get("OOMKilled"):
        return (
            f"killed for memory (its limit, memory_mib, is {memory_mib})"
            if memory_mib
            else "killed for memory"
        )
    return describe_exit(128 - code if code > 128 else code)
