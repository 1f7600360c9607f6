"""The interface of a component, and its states."""

import enum
import logging
import threading
from collections.abc import Mapping
from typing import Final, Protocol

import msgspec

_log = logging.getLogger(__name__)
_CAUSE_MAX: Final = 300  # characters of an error that health shows


class State(enum.StrEnum):
    """The state of a component."""

    NEW = "new"
    RUNNING = "running"
    DEGRADED = "degraded"  # it failed, and is tried again
    FAILED = "failed"  # it ended, and nothing tries again
    ENDED = "ended"  # on request, or with its work done


TRANSITIONS: Final[Mapping[State, frozenset[State]]] = {
    State.NEW: frozenset({State.RUNNING, State.FAILED, State.ENDED}),
    State.RUNNING: frozenset({State.DEGRADED, State.FAILED, State.ENDED}),
    State.DEGRADED: frozenset({State.RUNNING, State.DEGRADED, State.FAILED, State.ENDED}),
    State.FAILED: frozenset({State.RUNNING, State.ENDED}),  # running: the next start succeeded
    State.ENDED: frozenset(),
}


class Health(msgspec.Struct, frozen=True):
    """The state of a component for health checks. why: the error of one that is degraded or failed.
    vital: whether the server cannot go on without it.
    """

    name: str
    state: State
    why: str = ""
    vital: bool = False


class Component(Protocol):
    """A part of a process that runs beside others: a thread, an event loop, a pool.

    Threads: any.
    """

    @property
    def name(self) -> str:
        """Return the name that logs and health show, as `clipper-rolling`."""

    @property
    def vital(self) -> bool:
        """Return whether `/v2/health/live` fails when this component has failed."""

    def start(self, limit_s: float) -> object:
        """Start it, and return when it runs. If it raises, nothing of it is left."""

    def request_stop(self) -> None:
        """Ask it to end. Never waits, never raises; may come before start()."""

    def join(self, until_s: float) -> bool:
        """Wait for its end until a time of its clock; return whether it has ended.

        A component that has not been started has ended.
        """

    def health(self) -> Health:
        """Return its state."""


class Lifecycle:
    """The state of one component, which changes as TRANSITIONS allows. Threads: any."""

    def __init__(self, name: str, *, vital: bool = False) -> None:
        self.name, self.vital = name, vital
        self._lock = threading.Lock()
        self.state, self._why = State.NEW, ""

    def health(self) -> Health:
        """Return the state with its reason."""
        with self._lock:
            return Health(self.name, self.state, self._why, self.vital)

    def move(self, to: State, why: str = "") -> bool:
        """Change the state, if the table allows it; return whether it did."""
        with self._lock:
            allowed = to in TRANSITIONS[self.state]
            known = self.state
            if allowed:
                self.state, self._why = to, why
        if not allowed and known is not State.ENDED:
            _log.error("%s: it is %s and cannot become %s", self.name, known, to)
        return allowed


def cause_of(error: BaseException) -> str:
    """Return an error as one line for health: its type and its text."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # a user's class raised it, or there is no memory
        text = ""
    kind = type(error).__name__
    return f"{kind}: {text[:_CAUSE_MAX]}" if text else kind
