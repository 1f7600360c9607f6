"""Rows that end the process of their container: the exit is counted for the row, not the model.

Two parts know half of it each. The engine knows which rows were in flight when a connection ended,
and which one was alone there for the second time; the deployer knows how the process ended. A
process that was stopped from outside (by an operator, or by the kernel for lack of memory) blames
no row.
"""

from __future__ import annotations

import logging
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from clipper.serving.models.containers import Replica
from clipper.types import VersionedModel

_BLAME: Final = struct.Struct("<III16s")  # as the engine's DISCONNECTED event
_PENDING_MAX: Final = 1024  # ends of which only one half is known; the oldest is forgotten
_log = logging.getLogger(__name__)
_Value = TypeVar("_Value")
_Life = tuple[VersionedModel, int, int]  # model, number of the replica, process id


@dataclass(frozen=True, slots=True)
class Loss:
    """A connection that ended with rows in flight. model: its number in the engine. key: of the row
    that is blamed; empty: none."""

    replica: Replica
    rows: int
    model: int = 0
    key: bytes = b""


def loss_of(replica: Replica, data: bytes) -> Loss | None:
    """Return what was in flight, from the data of a DISCONNECTED event; None if nothing was."""
    if len(data) != _BLAME.size:
        return None
    rows, model, is_blamed, key = _BLAME.unpack(data)
    return Loss(replica, rows, model, key if is_blamed else b"")


class RowBlames:
    """Brings the two halves of an end together. Threads: any.

    failure_s: for how long a row that ended two processes is refused. excuse: called with a
    replica's model, number and process id, so that its exit is not counted.
    """

    def __init__(
        self, failure_s: float, excuse: Callable[[VersionedModel, int, int], None]
    ) -> None:
        self._failure_s, self._excuse = failure_s, excuse
        self._guard = threading.Lock()
        self._lost: dict[_Life, Loss] = {}
        self._exited: dict[_Life, bool] = {}
        self.refused = 0  # rows that were refused since the start

    def lost(self, loss: Loss) -> None:
        """Note what was in flight when a connection ended."""
        hello = loss.replica.hello
        life = hello.id, hello.replica, hello.pid
        with self._guard:
            by_itself = self._exited.pop(life, None)
            if by_itself is None:
                _remember(self._lost, life, loss)
        if by_itself:
            self._blame(life, loss)

    def exited(self, model: VersionedModel, number: int, pid: int, by_itself: bool) -> None:
        """Note how a process ended."""
        life = model, number, pid
        with self._guard:
            loss = self._lost.pop(life, None)
            if loss is None:
                _remember(self._exited, life, by_itself)
        if loss is not None and by_itself:
            self._blame(life, loss)

    def _blame(self, life: _Life, loss: Loss) -> None:
        self._excuse(*life)
        if not loss.key or not self._failure_s:
            return
        self.refused += 1
        engine = loss.replica.engine
        engine.refuse_row(loss.model, loss.key, engine.now_us() + int(self._failure_s * 1e6))
        _log.warning(
            "a row has ended the process of container %s/%d twice; it is refused for %g s",
            life[0],
            life[1],
            self._failure_s,
            extra={"model": str(life[0]), "replica": life[1]},
        )


def _remember(known: dict[_Life, _Value], life: _Life, value: _Value) -> None:
    known[life] = value
    while len(known) > _PENDING_MAX:
        del known[next(iter(known))]
