"""Commands that run once, to their end."""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Final

from clipper.processes.handle import Notice, NoticeKind
from clipper.processes.restarts import RestartPolicy
from clipper.processes.spawned import Commands, Spawned
from clipper.processes.supervisor import Supervisor

POLICY: Final = RestartPolicy(again=False)
_CHECK_S: Final = 0.05
_OVER: Final = (NoticeKind.EXITED, NoticeKind.FAILED, NoticeKind.STOPPED)
_numbers: Final = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a command. code: its exit code, negative for a signal; None: it did not end by
    itself. detail: for people: "exit 3", "killed (SIGKILL)", or why it was not started. lines: its
    last ones. late: it was ended at its limit. started: whether it ran; it is tried again as long
    as the server lacks something for it.
    """

    code: int | None
    detail: str
    lines: Sequence[str]
    late: bool
    started: bool


class _Follower:
    """Follows one command, for a thread that waits."""

    def __init__(self) -> None:
        self._told: SimpleQueue[Sequence[str] | Notice] = SimpleQueue()

    def on_notice(self, name: str, notice: Notice) -> None:
        """See ChildListener."""
        if notice.kind in _OVER:
            self._told.put(notice)

    def on_lines(self, name: str, lines: Sequence[str]) -> None:
        """Take what the command has written. Threads: the supervisor's."""
        self._told.put(lines)

    def next(self, wait_s: float, on_line: Callable[[str], object] | None) -> Notice | None:
        """Hand on what was written; return the end, or None if it did not come in time."""
        try:
            told = self._told.get(timeout=wait_s)
        except Empty:
            return None
        if isinstance(told, Notice):
            return told
        if on_line is not None:
            for line in told:
                on_line(line)
        return None


def run_once(
    processes: Supervisor,
    what: str,
    command: Commands,
    limit_s: float = math.inf,
    is_over: Callable[[], bool] | None = None,
    on_line: Callable[[str], object] | None = None,
) -> Outcome:
    """Run a command under a supervisor; return when nothing of it runs any more.

    what: name of the child. limit_s: after it the command is killed, with what it has started.
    is_over: asked while the command runs; True ends it as well. on_line: gets each line of its
    output, in this thread.

    Raises: ShuttingDown; NotStarted; what `on_line` raises. Threads: any but the supervisor's.
    """
    follower, name = _Follower(), f"{what} #{next(_numbers)}"
    until_s = time.monotonic() + limit_s
    end = None
    late = False
    processes.add(name, Spawned(command), POLICY, follower, on_lines=follower.on_lines)
    try:
        while end is None and not late and not (is_over is not None and is_over()):
            left_s = until_s - time.monotonic()
            end = follower.next(max(0.0, min(left_s, _CHECK_S)), on_line)
            late = end is None and left_s <= 0
    finally:
        processes.stop([name], grace_s=0.0)
        status = processes.get(name)
        lines, _ = processes.lines(name)
        processes.forget(name)
    detail = status.detail if status is not None else ""
    return Outcome(
        end.code if end is not None else None,
        end.detail if end is not None else detail,
        lines,
        late,
        status is not None and status.starts > 0,
    )
