"""The states of a supervised child, and the table of their transitions.

docs/architecture.md shows the table, which `table_rows` prints.
"""

import enum
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple


class ChildState(enum.StrEnum):
    """The state of a supervised child."""

    QUEUED = "queued"  # waits until it may start: few start at once
    STARTING = "starting"  # a start was requested; there is no process yet
    RUNNING = "running"  # its process runs, and is not ready yet
    READY = "ready"  # its process serves
    SHORT = "short"  # the server lacks something for a start; it is tried until it succeeds
    BACKOFF = "backoff"  # its process ended; another starts after a pause
    HELD = "held"  # ended too often; tried again after a long pause, or at once on request
    STOPPING = "stopping"  # SIGTERM was sent
    KILLING = "killing"  # SIGKILL was sent
    STOPPED = "stopped"  # ended on request
    FAILED = "failed"  # ended, and is started again on request only


class Happened(enum.StrEnum):
    """The kind of an event of a child."""

    TURN = "turn"  # it may start
    STARTED = "started"  # its process runs
    LACKING = "lacking"  # the server lacks something for the start
    REFUSED = "refused"  # it cannot be started as it is
    SERVES = "serves"  # its process is ready
    ENDED = "ended"  # its process has ended
    DUE = "due"  # the time that its state has set is over
    STOP = "stop"  # it is to end
    KILL = "kill"  # its process is to be replaced


class Action(enum.StrEnum):
    """The kind of work that a transition gives the supervisor."""

    ENQUEUE = "wait for a turn"
    START = "start"
    HURRY = "start without the fork server"
    TERM = "SIGTERM"
    KILL = "SIGKILL"
    CLEAR = "close what was opened"


class Transition(NamedTuple):
    """A transition: where it may lead, and what is done. Several states: the policy decides."""

    to: tuple[ChildState, ...]
    actions: tuple[Action, ...] = ()


_AFTER_END: Final = Transition(
    (ChildState.BACKOFF, ChildState.HELD, ChildState.FAILED, ChildState.STOPPED), (Action.CLEAR,)
)
_LACKS: Final = Transition((ChildState.SHORT,), (Action.CLEAR,))
_TRY: Final = Transition((ChildState.STARTING,), (Action.START,))
_OVER: Final = Transition((ChildState.STOPPED,), (Action.CLEAR,))
_END: Final = Transition((ChildState.STOPPING,), (Action.TERM,))

TABLE: Final[Mapping[ChildState, Mapping[Happened, Transition]]] = {
    ChildState.QUEUED: {
        Happened.TURN: _TRY,
        Happened.STOP: _OVER,
    },
    ChildState.STARTING: {
        Happened.STARTED: Transition((ChildState.RUNNING,)),
        Happened.LACKING: _LACKS,
        Happened.REFUSED: _AFTER_END,
        Happened.DUE: Transition((ChildState.STARTING,), (Action.HURRY,)),
        Happened.STOP: _OVER,
    },
    ChildState.RUNNING: {
        Happened.SERVES: Transition((ChildState.READY,)),
        Happened.ENDED: _AFTER_END,
        Happened.DUE: Transition((ChildState.RUNNING,), (Action.KILL,)),
        Happened.KILL: Transition((ChildState.RUNNING,), (Action.KILL,)),
        Happened.STOP: _END,
    },
    ChildState.READY: {
        Happened.ENDED: _AFTER_END,
        Happened.KILL: Transition((ChildState.READY,), (Action.KILL,)),
        Happened.STOP: _END,
    },
    ChildState.SHORT: {
        Happened.DUE: _TRY,
        Happened.STOP: _OVER,
    },
    ChildState.BACKOFF: {
        Happened.DUE: _TRY,
        Happened.STOP: _OVER,
    },
    ChildState.HELD: {
        Happened.DUE: _TRY,
        Happened.STOP: _OVER,
    },
    ChildState.STOPPING: {
        Happened.ENDED: _OVER,
        Happened.DUE: Transition((ChildState.KILLING,), (Action.KILL,)),
        Happened.KILL: Transition((ChildState.KILLING,), (Action.KILL,)),
        Happened.STOP: Transition((ChildState.STOPPING,)),
    },
    ChildState.KILLING: {
        Happened.ENDED: _OVER,
        Happened.DUE: Transition((ChildState.KILLING,), (Action.KILL,)),
    },
    ChildState.STOPPED: {},
    ChildState.FAILED: {},
}
# States in which a process exists.
WITH_PROCESS: Final = frozenset(
    {ChildState.RUNNING, ChildState.READY, ChildState.STOPPING, ChildState.KILLING}
)
AT_REST: Final = frozenset({ChildState.STOPPED, ChildState.FAILED})
# States that end with another start.
AWAITS_START: Final = frozenset({ChildState.SHORT, ChildState.BACKOFF, ChildState.HELD})


def table_rows() -> Iterator[str]:
    """Return the table of transitions as rows of Markdown: one for each state and event."""
    yield "| state | event | next state | what is done |"
    yield "|---|---|---|---|"
    for state, rules in TABLE.items():
        for happened, rule in rules.items():
            to = " or ".join(rule.to)
            yield f"| {state} | {happened} | {to} | {', '.join(rule.actions) or '-'} |"
