"""A supervised child: its state, and what follows from each event. It does no input or output, and
takes the time as an argument.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from clipper.processes.handle import End, Notice, NoticeKind
from clipper.processes.restarts import RestartPolicy, Restarts, Spacing, Verdict
from clipper.processes.state import (
    AT_REST,
    AWAITS_START,
    TABLE,
    WITH_PROCESS,
    Action,
    ChildState,
    Happened,
)

SHORT: Final = "not started, the server is short of something: "
TRIED: Final = "; it is tried until it succeeds"
KILL_AGAIN_S: Final = 5.0  # the kernel may hold a process that was killed for longer
_NO_END: Final = End(None, "it ended")


@dataclass(frozen=True, slots=True)
class ChildEvent:
    """An event of a child. pid, how: of STARTED. why: of LACKING and REFUSED. end: of ENDED.
    grace_s: of STOP, from SIGTERM to SIGKILL. hold: of LACKING and REFUSED, another start soon
    would fail, too.
    """

    kind: Happened
    pid: int = 0
    why: str = ""
    end: End = _NO_END
    grace_s: float = 0.0
    hold: bool = False


class Child:
    """The state of one child.

    spacing: shared by all children, so that two do not start again at one time. Threads: one at a
    time; `state`, `pid`, `starts`, `detail`, `how` and `due_s` may be read by any.
    """

    def __init__(self, policy: RestartPolicy, spacing: Spacing) -> None:
        self._policy, self._spacing = policy, spacing
        self._restarts = Restarts(policy)
        self._ready_s: float | None = None
        self._ended_pid = 0  # of the process that ended last
        self._excused_pid = 0  # of a process whose end was not its own fault
        self._short = ""  # what the server lacks for a start
        self.state = ChildState.QUEUED
        self.pid = 0
        self.starts = 0
        self.detail = ""  # of the last end, or what it waits for
        self.how = ""  # how its process was started
        self.due_s: float | None = None  # when `DUE` happens

    @property
    def is_at_rest(self) -> bool:
        """Return whether nothing of it runs, and nothing will without a request."""
        return self.state in AT_REST

    @property
    def may_be_replaced(self) -> bool:
        """Return whether it has no process, and is not about to get one."""
        return self.is_at_rest or self.state is ChildState.HELD

    def again_s(self, now_s: float) -> float:
        """Return the seconds until its next start; 0 if none is due."""
        waits = self.due_s is not None and self.state in AWAITS_START
        return max(0.0, self.due_s - now_s) if waits and self.due_s is not None else 0.0

    def step(
        self, event: ChildEvent, now_s: float, tail: tuple[str, ...] = ()
    ) -> Sequence[Action | Notice]:
        """Take an event; return what is to be done and told, in this order.

        An event that its state does not know changes nothing: it came late. tail: the last lines
        of its output.
        """
        rule = TABLE[self.state].get(event.kind)
        if rule is None:
            return ()
        before = self.state
        if event.kind in (Happened.ENDED, Happened.REFUSED):
            self.due_s = None
            notices = self._end(event, now_s, tail)
        else:
            self.state = rule.to[0]
            if event.kind is Happened.DUE or self.state is not before:
                self.due_s = None
            notices = []
        notices += self._entered(before, event, now_s)
        return [*rule.actions, *notices]

    def excuse(self, pid: int, now_s: float) -> Sequence[Notice]:
        """Do not count the end of a process, whether it has come already or not; return what is
        told: one that was held is not any more.
        """
        if not pid or pid == self._excused_pid:
            return ()
        if pid == self.pid:
            self._excused_pid = pid
            return ()
        if pid != self._ended_pid:
            return ()
        self._excused_pid, was = pid, self.state
        again_s = self._restarts.excuse()
        if self.due_s is None or was not in (ChildState.BACKOFF, ChildState.HELD):
            return ()
        self.due_s = min(self.due_s, now_s + again_s)
        self.state = ChildState.BACKOFF
        again_s = self.again_s(now_s)
        again = Notice(NoticeKind.RESTARTING, pid, f"again in {again_s:.1f} s", again_s=again_s)
        return [again] if was is ChildState.HELD else ()

    def broke(self, why: str, now_s: float) -> Sequence[Action | Notice]:
        """Take note that the supervisor failed at an event of this child: its process is ended with
        all that was opened for it, or its start is made again later.
        """
        if self.state in WITH_PROCESS:
            end = End(None, f"ended, since the supervisor failed at it: {why}", own=True)
            return self.step(ChildEvent(Happened.ENDED, end=end), now_s)
        return self.step(ChildEvent(Happened.LACKING, why=why), now_s)

    def fail(self, why: str) -> None:
        """Take note that nothing supervises it any more, so that it has ended."""
        self.state, self.detail = ChildState.FAILED, why
        self.pid, self.due_s = 0, None

    def _entered(self, before: ChildState, event: ChildEvent, now_s: float) -> list[Notice]:
        """Set what belongs to the new state, and return what is told about it."""
        state = self.state
        if event.kind in (Happened.TURN, Happened.DUE) and state is ChildState.STARTING:
            if before is not ChildState.STARTING:
                self._ready_s = None
                self.starts += 1
                self.due_s = now_s + self._policy.answer_s
            return []
        if event.kind is Happened.STARTED:
            self.pid, self.how = event.pid, event.why
            self._excused_pid = 0
            self._restarts.started()
            self._short = ""
            if self._policy.ready_s:
                self.due_s = now_s + self._policy.ready_s
            return [Notice(NoticeKind.STARTED, self.pid, self.how)]
        if state is ChildState.READY and before is ChildState.RUNNING:
            self._ready_s = now_s
            return [Notice(NoticeKind.READY, self.pid)]
        if state is ChildState.SHORT:
            return self._lacks(event, now_s)
        if state is ChildState.STOPPING:  # a second stop may be in more haste
            due_s = now_s + event.grace_s
            self.due_s = due_s if self.due_s is None else min(self.due_s, due_s)
        elif state is ChildState.KILLING:
            self.due_s = now_s + KILL_AGAIN_S
        elif state is ChildState.STOPPED:
            pid, self.pid = self._ended_pid if before in WITH_PROCESS else 0, 0
            return [Notice(NoticeKind.STOPPED, pid, self.detail)]
        return []

    def _lacks(self, event: ChildEvent, now_s: float) -> list[Notice]:
        """Wait for what the server lacks: that is no exit of the child, so it is not counted."""
        first = not self._short
        self._short = f"{SHORT}{event.why}"
        self.detail = self._short
        self.starts = max(0, self.starts - 1)
        pause_s = self._restarts.short()
        self.due_s = self._due_s(now_s, pause_s)
        if not first:
            return []
        detail = f"{self._short}{TRIED}"
        kind = NoticeKind.FAILED if event.hold else NoticeKind.RESTARTING
        return [Notice(kind, 0, detail, again_s=pause_s)]

    def _end(self, event: ChildEvent, now_s: float, tail: tuple[str, ...]) -> list[Notice]:
        """Decide what follows the end of a process, or the refusal of a start."""
        ended = event.kind is Happened.ENDED
        end = event.end if ended else End(0, event.why)
        pid, self.pid = self.pid, 0
        self._ended_pid = pid
        self._short = ""
        self.detail = end.detail
        if self.state in (ChildState.STOPPING, ChildState.KILLING):
            self.state = ChildState.STOPPED
            return []
        by_itself, code = not (end.is_stop or end.own), end.code if ended else None
        notices = [Notice(NoticeKind.EXITED, pid, end.detail, tail, by_itself=by_itself, code=code)]
        if not self._policy.again:
            self.state = ChildState.STOPPED
            return notices
        verdict = self._restarts.hold() if event.hold else self._judge(end, pid, now_s)
        if verdict.is_final:
            self.state = ChildState.FAILED
            self.detail = f"{end.detail}; {verdict.held}"
            return [*notices, Notice(NoticeKind.FAILED, pid, self.detail, tail)]
        self.due_s = self._due_s(now_s, verdict.pause_s)
        again_s = self.due_s - now_s
        again = f"again in {again_s:.1f} s"
        if not verdict.held:
            self.state = ChildState.BACKOFF
            return [*notices, Notice(NoticeKind.RESTARTING, pid, again, again_s=again_s)]
        self.state = ChildState.HELD
        self.detail = f"{end.detail}; {verdict.held}; held"
        detail = f"{self.detail}, and tried {again}"
        return [*notices, Notice(NoticeKind.FAILED, pid, detail, tail, again_s)]

    def _judge(self, end: End, pid: int, now_s: float) -> Verdict:
        if end.own:
            return Verdict(self._restarts.short())
        if end.changed:
            self._restarts.forget()
        verdict = self._restarts.ended(now_s, self._ready_s, end.is_stop)
        if verdict.is_final or not pid or pid != self._excused_pid:
            return verdict
        return Verdict(self._restarts.excuse())

    def _due_s(self, now_s: float, pause_s: float) -> float:
        """Return the time of the next start."""
        if math.isinf(pause_s):
            raise ValueError("a start that never comes has no time")
        return self._spacing.next_s(now_s, pause_s, self._policy.apart_s)
