"""Replicas of models as children of the server's supervisor."""

import os
import threading
from collections.abc import Callable, Sequence
from typing import Protocol, Self
from weakref import WeakValueDictionary

from clipper.deploy.deployer import (
    ContainerSpec,
    LogTail,
    ReplicaStatus,
)
from clipper.errors import ShuttingDown
from clipper.processes import ChildState, Handle, Notice, RestartPolicy, Supervisor
from clipper.processes.supervisor import LINES_MAX
from clipper_container.start_folder import StartFolder

Key = tuple[str, int, int]
OnNotice = Callable[[str, int, int, Notice], object]


class HandleMaker(Protocol):
    """Makes the handles of one kind of container: processes, or those of an engine."""

    def handle(self, spec: ContainerSpec, replica: int, around: "Replicas") -> Handle:
        """Return the handle of a replica. around: what it may ask about the others."""

    def close(self) -> None:
        """Close what the handles share. All replicas have ended."""


class Replicas(Protocol):
    """Tells a handle about the other replicas of its deployer."""

    def others_run(self, key: Key) -> bool:
        """Return whether another replica of the version runs. Threads: any."""

    def any_is_ready(self) -> bool:
        """Return whether a replica of any model serves. Threads: any."""

    def folder(self, path: str) -> StartFolder:
        """Return a folder, opened once for all replicas that start there. Threads: any."""


class ReplicaDeployer:
    """Starts, restarts and stops replicas.

    supervisor: has been started. maker: makes their handles. on_notice: called with the name, the
    version and the number of a replica, and with what happened to it, in the supervising thread;
    must not block; may call any method. log_lines_max: lines kept of each replica's output.
    Threads: any.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        maker: HandleMaker,
        on_notice: OnNotice | None = None,
        policy: RestartPolicy | None = None,
        log_lines_max: int = LINES_MAX,
    ) -> None:
        self._supervisor = supervisor
        self._maker = maker
        self._on_notice = on_notice
        self._policy = policy or RestartPolicy()
        self._log_lines_max = log_lines_max
        self._guard = threading.Lock()
        self._keys: dict[str, Key] = {}  # of the supervisor's names
        self._folders: WeakValueDictionary[tuple[int, int], StartFolder] = WeakValueDictionary()
        self._closed = False

    def start(self, spec: ContainerSpec, replica: int = 0) -> None:
        """Start a replica and keep it running; returns before it serves. It runs in the spec's
        folder, or in the one that is this process's now.

        Raises: ValueError if it runs already; ShuttingDown after close(); NotStarted if processes
        are not supervised any more.
        """
        key = spec.name, spec.version, replica
        name = _name_of(key)
        with self._guard:
            if self._closed:
                raise ShuttingDown(
                    "this server is closed.", hint="Start another with clipper.start()."
                )
            self._keys[name] = key
        handle = self._maker.handle(spec, replica, self)
        self._supervisor.add(name, handle, self._policy, self, lines_max=self._log_lines_max)
        if self._closed:  # while it was added
            self._supervisor.stop([name])

    def stop(
        self,
        name: str,
        version: int | None = None,
        replica: int | None = None,
        grace_s: float | None = None,
    ) -> None:
        """Stop one replica, all of a version, or of a model: SIGTERM, SIGKILL after `grace_s`; wait
        for their end.

        Called from `on_notice` it does not wait. Replicas that do not run are ignored.
        """
        with self._guard:
            wanted = [
                child
                for child, key in self._keys.items()
                if key[0] == name and version in (None, key[1]) and replica in (None, key[2])
            ]
        self._supervisor.stop(wanted, grace_s)

    def restart(self, name: str, version: int, replica: int, pid: int) -> bool:
        """Kill process `pid` of a replica, which then restarts. Returns False if it does not run
        here.
        """
        return self._supervisor.restart(_name_of((name, version, replica)), pid)

    def served(self, name: str, version: int, replica: int, pid: int) -> None:
        """Note that process `pid` of a replica is connected: later exits are judged by it."""
        self._supervisor.serves(_name_of((name, version, replica)), pid)

    def excuse(self, name: str, version: int, replica: int, pid: int) -> None:
        """Do not count the exit of process `pid` of a replica: a row caused it."""
        self._supervisor.excuse(_name_of((name, version, replica)), pid)

    def runs(self, name: str, version: int, replica: int) -> bool:
        """Return whether a replica was started and not stopped since."""
        status = self._supervisor.get(_name_of((name, version, replica)))
        return status is not None and status.state is not ChildState.STOPPED

    @property
    def failure(self) -> str:
        """Return why replicas are not supervised any more; empty while they are."""
        return self._supervisor.failure

    def list(self) -> Sequence[ReplicaStatus]:
        """Return every replica ever started, including stopped ones, by name, version and
        number.
        """
        with self._guard:
            keys = sorted((key, child) for child, key in self._keys.items())
        found = [(key, self._supervisor.get(child)) for key, child in keys]
        return [
            ReplicaStatus(
                *key,
                status.state,
                status.pid,
                max(0, status.starts - 1),
                status.detail,
                status.how,
                status.again_s,
            )
            for key, status in found
            if status is not None
        ]

    def logs(self, name: str, version: int, replica: int) -> Sequence[str]:
        """Return the last lines of a replica's output, oldest first. Raises: KeyError for an
        unknown replica.
        """
        return LogTail(*self._supervisor.lines(_name_of((name, version, replica))))

    def close(self, grace_s: float | None = None) -> None:
        """Stop all replicas at once. Idempotent."""
        with self._guard:
            if self._closed:
                return
            self._closed = True
            children = [*self._keys]
        self._supervisor.stop(children, grace_s)
        self._maker.close()
        for folder in [*self._folders.values()]:
            folder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- Listener

    def on_notice(self, name: str, notice: Notice) -> None:
        """See ChildListener."""
        if self._on_notice is not None:
            with self._guard:
                key = self._keys[name]
            self._on_notice(*key, notice)

    # -- Replicas

    def others_run(self, key: Key) -> bool:
        """See Replicas."""
        with self._guard:
            others = [
                child for child, each in self._keys.items() if each[:2] == key[:2] and each != key
            ]
        found = map(self._supervisor.get, others)
        return any(
            status is not None and status.state in (ChildState.RUNNING, ChildState.READY)
            for status in found
        )

    def any_is_ready(self) -> bool:
        """See Replicas."""
        with self._guard:
            children = list(self._keys)
        found = map(self._supervisor.get, children)
        return any(status is not None and status.state is ChildState.READY for status in found)

    def folder(self, path: str) -> StartFolder:
        """See Replicas."""
        found = StartFolder(path)
        try:
            status = os.fstat(found.fd)
        except OSError:
            return found
        return self._folders.setdefault((status.st_dev, status.st_ino), found)


def _name_of(key: Key) -> str:
    name, version, replica = key
    return f"container {name}:{version}/{replica}"
