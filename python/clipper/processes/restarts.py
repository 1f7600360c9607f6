"""The rules by which children are started again: the policy, its state for one child, and how many
start at once.
"""

import math
from bisect import insort
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from clipper_container.backoff import Backoff
from clipper_container.machine import cores

_SURE: Final = "another start would fail, too"
_FINAL: Final = "it is started again on request only"
NEVER_HELD: Final = 1 << 30  # exits_max of children that are never held
STOPPED_SHARE: Final = 0.1  # of the time that it served: the pause of one that was stopped so
_Name = TypeVar("_Name", bound=Hashable)


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Rules for starting a child that ended again.

    The pause doubles from `backoff_s_min` to `backoff_s_max` and resets after `healthy_s` of
    serving; a child that served before it ended pauses for no longer than `served_share` of the
    time that it served, and one that was stopped from outside for no longer than a tenth. The first
    `at_once` exits in a row have no pause. After `exits_max` exits within `window_s` the child is
    held: it is tried again after `held_s_min`, doubling to `held_s_max`, or never if `exits_max` is
    0.

    grace_s: from SIGTERM to SIGKILL. apart_s: minimum time between any two restarts, since
    children that serve need the cores too. own_s_max: longest pause after a start that the server
    itself could not make. answer_s: for the answer to a request of a process; then it is started
    another way. ready_s: for a process to become ready; then it is killed; 0: no limit. queued:
    whether the first start waits for its turn. again: whether it is started again at all. last:
    whether it ends after those that are not, because it serves them.
    """

    backoff_s_min: float = 0.1
    backoff_s_max: float = 10.0
    healthy_s: float = 30.0
    exits_max: int = 5
    window_s: float = 30.0
    grace_s: float = 5.0
    apart_s: float = 0.1
    held_s_min: float = 30.0
    held_s_max: float = 600.0
    own_s_max: float = 2.0
    at_once: int = 0
    served_share: float = 1.0
    answer_s: float = 30.0
    ready_s: float = 0.0
    queued: bool = False
    again: bool = True
    last: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision after an exit. pause_s: seconds until the next start; infinity: there is none.
    held: why the child is held; empty if it is only paused.
    """

    pause_s: float
    held: str = ""

    @property
    def is_final(self) -> bool:
        """Return whether the child is started on request only."""
        return self.pause_s == math.inf


class Restarts:
    """The exits of one child, and its failed starts. Threads: one at a time."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._exits: deque[float] = deque()
        self._pause_s = 0.0
        self._free = policy.at_once  # exits that have no pause
        self._has_served = False
        # pause and exits before the last one, which may be excused
        self._before: tuple[float, Sequence[float]] = (0.0, ())
        self._looped = ""  # after too many exits: how many
        self._held = Backoff(policy.held_s_min, policy.held_s_max)
        self._own = Backoff(policy.backoff_s_min, policy.own_s_max)

    def ended(self, now_s: float, ready_s: float | None = None, stopped: bool = False) -> Verdict:
        """Record an exit. ready_s: since when it served; None: it did not. stopped: by a signal
        that stops processes.
        """
        policy = self._policy
        if ready_s is not None and now_s - ready_s >= policy.healthy_s:
            self._pause_s = 0.0
            self._free = policy.at_once
        if ready_s is not None:
            self._has_served = True
            self._held.reset()
            self._looped = ""
        self._before = self._pause_s, tuple(self._exits)
        self._pause_s = min(policy.backoff_s_max, max(policy.backoff_s_min, 2 * self._pause_s))
        if ready_s is not None:
            share = min(policy.served_share, STOPPED_SHARE if stopped else 1.0)
            served_s = (now_s - ready_s) * share
            self._pause_s = max(policy.backoff_s_min, min(self._pause_s, served_s))
        if self._free:
            self._free -= 1
            self._pause_s = 0.0
        # one that never served may be killed for want of memory each time
        if self._has_served and stopped and policy.exits_max:
            return Verdict(self._pause_s)
        self._exits.append(now_s)
        while self._exits[0] < now_s - policy.window_s:
            self._exits.popleft()
        if len(self._exits) >= policy.exits_max:
            lived_s = now_s - self._exits[0]
            self._looped = f"stopped after {len(self._exits)} exits in {lived_s:.1f} s"
        if not self._looped:
            return Verdict(self._pause_s)
        if not policy.exits_max:
            return Verdict(math.inf, _FINAL)
        if ready_s is not None:
            return Verdict(min(policy.backoff_s_max, policy.held_s_min), self._looped)
        return Verdict(self._held.next_s(), self._looped)

    def hold(self) -> Verdict:
        """Return the verdict on a start that would fail again soon."""
        if not self._policy.exits_max:
            return Verdict(math.inf, _SURE)
        return Verdict(self._held.next_s(), _SURE)

    def excuse(self) -> float:
        """Do not count the last exit: a row caused it. Return the pause before the next start."""
        self._pause_s, exits = self._before
        self._exits = deque(exits)
        self._looped = ""
        return self._policy.backoff_s_min

    def short(self) -> float:
        """Return the pause after a start that the server could not make for lack of something of
        its own. It is not counted.
        """
        return self._own.next_s()

    def started(self) -> None:
        """Record that a process was started."""
        self._own.reset()

    def forget(self) -> None:
        """Forget all exits: they were not the child's fault."""
        self._exits.clear()
        self._pause_s = 0.0
        self._looped = ""


class Spacing:
    """Spaces out restarts of all children. Threads: one at a time."""

    def __init__(self) -> None:
        self._taken_s: list[float] = []  # of restarts to come, in order

    def next_s(self, now_s: float, pause_s: float, apart_s: float) -> float:
        """Return the time of the next restart: after the pause, or later to keep the distance from
        those before and after it.
        """
        self._taken_s = [taken_s for taken_s in self._taken_s if taken_s > now_s - apart_s]
        at_s = now_s + pause_s
        for taken_s in self._taken_s:
            if abs(at_s - taken_s) < apart_s:
                at_s = taken_s + apart_s
        insort(self._taken_s, at_s)
        return at_s


class StartLimit(Generic[_Name]):
    """Limits how many children start at once: others serve, and need the cores too. Those beyond
    it wait in order. Threads: one at a time.

    at_once: 0 for one fewer than the cores that this process may use, at least one.
    """

    def __init__(self, at_once: int = 0) -> None:
        self._at_once = at_once or max(1, cores() - 1)
        self._starting: set[_Name] = set()
        self._waiting: deque[_Name] = deque()

    def wait(self, name: _Name) -> int:
        """Let a child wait for its start; return how many start or wait before it."""
        self._waiting.append(name)
        return len(self._starting) + len(self._waiting) - 1

    def began(self, name: _Name) -> None:
        """Count a child that starts now."""
        self._starting.add(name)

    def ended(self, name: _Name) -> None:
        """Count a child no more: it has started, ended, or need not start."""
        self._starting.discard(name)
        if name in self._waiting:
            self._waiting.remove(name)

    def next(self) -> _Name | None:
        """Take the first child that waits, if it may start now."""
        if not self._waiting or len(self._starting) >= self._at_once:
            return None
        return self._waiting.popleft()
