"""The interface of the kinds of supervised processes, and what they report."""

import enum
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

# Signals by which a process is stopped from outside: by an operator, or by the kernel for memory.
STOPS: Final = (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """The limits of the processes of a start. memory_mib: of memory; cpus: cores; 0: none."""

    memory_mib: int = 0
    cpus: float = 0.0


NO_LIMITS: Final = ProcessLimits()


@dataclass(frozen=True, slots=True)
class End:
    """The end of a process. code: its exit code, negative for a signal; None: not known. detail:
    says it for people, "killed (SIGKILL)". own: it ended with something of the server's, as its
    fork server. changed: what the next start does differently; neither of these two ends is
    counted.
    """

    code: int | None
    detail: str = ""
    own: bool = False
    changed: str = ""

    @property
    def is_stop(self) -> bool:
        """Return whether it may have been stopped from outside: by a signal for it, or unseen."""
        return self.code is None or -self.code in STOPS


def describe_exit(code: int) -> str:
    """Describe an exit code: "exit 3", "killed (SIGKILL)"."""
    if code >= 0:
        return f"exit {code}"
    try:
        return f"killed ({signal.Signals(-code).name})"
    except ValueError:
        return f"killed (signal {-code})"


class Told(Protocol):
    """Takes what a handle tells about its process, and by which descriptors and times it is called.

    Handlers that raise are events of this child only: its process is ended, or its start made
    again. Threads: the supervisor's, but for `post`.
    """

    def group(self, limits: ProcessLimits = NO_LIMITS) -> Mapping[str, str]:
        """Return the environment variables by which the process of this start joins a control group
        of its own, and keeps to its limits (`clipper_container.parent_death`); what is in the group
        ends with the start.
        """

    def started(self, pid: int, how: str = "") -> None:
        """Tell that the process runs. how: for people: "forked", or "plain: " with the reason."""

    def lacks(self, why: str, *, soon: bool = True) -> None:
        """Tell that the server lacks something, so that nothing was started. soon: whether it is
        expected to be there soon; otherwise the owner is told that the start has failed, and it is
        tried all the same.
        """

    def refused(self, why: str) -> None:
        """Tell that another start would fail, too: it is held."""

    def failed(self, error: Exception) -> None:
        """Tell that a start has failed: the server lacks something, or it cannot be started as it
        is. `clipper_container.shortage` knows which errors mean what."""

    def started_as(self, how: str) -> None:
        """Tell how the process was started, if it becomes known later."""

    def serves(self) -> None:
        """Tell that the process is ready."""

    def is_up(self) -> None:
        """Tell that the start takes no core any more, so that the next child may start."""

    def progress(self, line: str) -> None:
        """Tell what is done before a start: a line of an image's builder."""

    def wrote(self, lines: Sequence[str]) -> None:
        """Tell what the process has written."""

    def ended(self, end: End) -> None:
        """Tell that the process has ended. It is the last call for this start."""

    def do(self, handler: Callable[[], object]) -> None:
        """Call a handler now, which something tells that other children share, unless this start is
        over."""

    def watch(self, fd: int, handler: Callable[[], object]) -> None:
        """Call a handler while a descriptor is readable."""

    def unwatch(self, fd: int) -> None:
        """Call the handler of a descriptor no more. The descriptor stays open."""

    def later(self, pause_s: float, handler: Callable[[], object]) -> None:
        """Call a handler once, after so many seconds, unless this start is over then."""

    def post(self, handler: Callable[[], object]) -> None:
        """Call a handler in the supervisor's thread, unless this start is over then. Threads:
        any."""


class Handle(Protocol):
    """A process of one kind: spawned, forked, a container of an engine. It has no policy: it makes
    one start at a time and tells how that goes. Threads: the supervisor's.
    """

    def start(self, number: int, told: Told) -> None:
        """Request a process; returns at once. number: of this start, from 1.

        Raises: OSError, MemoryError; what lacks is judged by `clipper_container.shortage`.
        """

    def hurry(self) -> None:
        """Start the process another way: the answer to a request is late. Raises: as start."""

    def signal(self, number: signal.Signals) -> None:
        """Signal the process and what it has started. One that has ended is ignored."""

    def clear(self) -> None:
        """Close all that was opened for the last start, and forget a request; `told` takes nothing
        but lines any more. Called once after each start, and never before the first."""


class NoticeKind(enum.StrEnum):
    """The kind of a notice."""

    BUILDING = "building"  # detail: a line of the image's builder
    WAITING = "waiting"  # detail: for what it waits
    STARTED = "started"
    READY = "ready"
    EXITED = "exited"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that happened to a child, for its owner.

    pid: process concerned, 0 for none. detail: for people: "killed (SIGKILL)", "exit 3", "again in
    0.4 s". again_s: pause before a restart, for RESTARTING and FAILED; 0: there is none. log_tail:
    last lines of output, oldest first, for EXITED and FAILED. by_itself: for EXITED: the process
    ended by itself: not by a signal that stops it, and not with its fork server. code: for EXITED:
    see End; None also where nothing was started.
    """

    kind: NoticeKind
    pid: int = 0
    detail: str = ""
    log_tail: tuple[str, ...] = ()
    again_s: float = 0.0
    by_itself: bool = False
    code: int | None = None


class ChildListener(Protocol):
    """The owner of a child."""

    def on_notice(self, name: str, notice: Notice) -> None:
        """Take note of what happened. Threads: the supervisor's; it must not block, and what it
        raises is logged."""
