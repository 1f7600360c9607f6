"""The replicas of a deployer: records, and the queries that every deployer answers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from clipper.deploy.deployer import (
    ContainerSpec,
    EventKind,
    LogLines,
    LogTail,
    OnEvent,
    ReplicaEvent,
    ReplicaState,
    ReplicaStatus,
)
from clipper.deploy.restarts import Restarts

LOG_LINES_MAX = 200
LOG_LINE_BYTES_MAX = 4096
LOG_TAIL_LINES = 20

Key = tuple[str, int, int]
Handle = TypeVar("Handle")
log = logging.getLogger("clipper.deploy")


@dataclass(slots=True, eq=False)
class ReplicaRecord(Generic[Handle]):
    """One replica. handle: what the deployer needs to run it."""

    spec: ContainerSpec
    number: int
    handle: Handle
    state: ReplicaState = ReplicaState.STARTING
    started_s: float = 0.0
    starts: int = 0
    detail: str = ""
    start: str = ""  # "forked", or "plain: " with the reason
    at_rest: bool = False  # stopped or failed, and the event has been delivered
    restarts: Restarts = field(default_factory=Restarts)
    lines: LogLines = field(default_factory=lambda: LogLines(LOG_LINES_MAX))

    @property
    def key(self) -> Key:
        """Return (model, version, number)."""
        return self.spec.name, self.spec.version, self.number

    @property
    def settled(self) -> bool:
        """Return True for a replica that is stopped or failed."""
        return self.state in (ReplicaState.STOPPED, ReplicaState.FAILED)

    def tail(self) -> tuple[str, ...]:
        """Return the last LOG_TAIL_LINES lines."""
        return tuple(self.lines)[-LOG_TAIL_LINES:]


class ReplicaTable(Generic[Handle]):
    """Replicas by (model, version, number), including stopped ones.

    changed: guards all records. pid_of: the process id of a replica, 0 for none. on_event: called
    for each event, one at a time; an exception is logged. Threads: any.
    """

    def __init__(
        self, pid_of: Callable[[ReplicaRecord[Handle]], int], on_event: OnEvent | None
    ) -> None:
        self.changed = threading.Condition()
        self._pid_of, self._on_event = pid_of, on_event
        self._replicas: dict[Key, ReplicaRecord[Handle]] = {}
        self._delivering = threading.RLock()
        self._closed = False

    def add(
        self,
        replica: ReplicaRecord[Handle],
        has_ended: Callable[[ReplicaRecord[Handle]], bool],
    ) -> None:
        """Add a replica; it may replace one of its number that has ended. Hold `changed`.

        Raises: ValueError when it is running already; RuntimeError after close().
        """
        if self._closed:
            raise RuntimeError("this deployer is closed")
        old = self._replicas.get(replica.key)
        if old is not None and not has_ended(old):
            name, version, number = replica.key
            raise ValueError(
                f"container {name}/{number} (version {version}) is {old.state} already; stop it"
                " first"
            )
        self._replicas[replica.key] = replica

    def all(self) -> list[ReplicaRecord[Handle]]:
        """Return all replicas."""
        with self.changed:
            return [*self._replicas.values()]

    def get(self, name: str, version: int, number: int) -> ReplicaRecord[Handle] | None:
        """Return one replica, or None."""
        with self.changed:
            return self._replicas.get((name, version, number))

    def select(
        self, name: str, version: int | None, number: int | None
    ) -> list[ReplicaRecord[Handle]]:
        """Return the replicas of a model; None stands for any version or number."""
        return [
            replica
            for replica in self.all()
            if replica.spec.name == name
            and version in (None, replica.spec.version)
            and number in (None, replica.number)
        ]

    def statuses(self) -> Sequence[ReplicaStatus]:
        """Return the status of each replica, by name, version and number."""
        with self.changed:
            return [
                ReplicaStatus(
                    *key, r.state, self._pid_of(r), max(0, r.starts - 1), r.detail, r.start
                )
                for key, r in sorted(self._replicas.items())
            ]

    def logs(self, name: str, version: int, number: int) -> Sequence[str]:
        """Return the last lines of a replica. Raises: KeyError for an unknown one."""
        with self.changed:
            return LogTail(self._replicas[name, version, number].lines)

    def close(self) -> bool:
        """Refuse further replicas. Returns False when it was closed already."""
        with self.changed:
            was, self._closed = self._closed, True
        return not was

    def emit(
        self,
        replica: ReplicaRecord[Handle],
        kind: EventKind,
        pid: int,
        detail: str = "",
        log_tail: tuple[str, ...] = (),
        again_s: float = 0.0,
    ) -> None:
        """Deliver an event."""
        if self._on_event is None:
            return
        try:
            with self._delivering:
                self._on_event(ReplicaEvent(*replica.key, kind, pid, detail, log_tail, again_s))
        except Exception:
            log.exception("on_event failed for container %s/%d", replica.spec.name, replica.number)
