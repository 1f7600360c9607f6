"""Starts of replicas: the restart policy, shared by all deployers, and how many start at once."""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from clipper_container.machine import cores

START_S: Final = 0.25  # a container that starts counts as one for so long at most
_Name = TypeVar("_Name", bound=Hashable)


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Rules for restarting a replica that ended.

    The pause doubles from `backoff_s_min` to `backoff_s_max` and resets after `healthy_s` of
    running. After `exits_max` exits within `window_s` the replica stays down. grace_s: from SIGTERM
    to SIGKILL. apart_s: minimum time between any two restarts, since replicas that serve need the
    cores too.
    """

    backoff_s_min: float = 0.1
    backoff_s_max: float = 10.0
    healthy_s: float = 30.0
    exits_max: int = 5
    window_s: float = 30.0
    grace_s: float = 5.0
    apart_s: float = 0.1


class Restarts:
    """The exits of one replica. looped: the message once it is given up. Threads: one at a time."""

    def __init__(self) -> None:
        self._exits: deque[float] = deque()
        self._pause_s = 0.0
        self.looped = ""

    def pause(self, policy: RestartPolicy, started_s: float, now_s: float) -> float | None:
        """Record an exit; return the pause before the next start, or None to give up."""
        if now_s - started_s >= policy.healthy_s:
            self._pause_s = 0.0
        self._exits.append(now_s)
        while self._exits[0] < now_s - policy.window_s:
            self._exits.popleft()
        if len(self._exits) >= policy.exits_max:
            self.looped = (
                f"stopped after {len(self._exits)} exits in {now_s - self._exits[0]:.1f} s"
            )
            return None
        self._pause_s = min(policy.backoff_s_max, max(policy.backoff_s_min, 2 * self._pause_s))
        return self._pause_s


class Spacing:
    """Spaces out restarts of all replicas. Threads: one at a time."""

    def __init__(self) -> None:
        self._free_s = float("-inf")

    def next_s(self, wanted_s: float, apart_s: float) -> float:
        """Return the time of the next restart: `wanted_s`, or later to keep the distance from
        the one before.
        """
        at_s = max(wanted_s, self._free_s)
        self._free_s = at_s + apart_s
        return at_s


class StartLimit(Generic[_Name]):
    """Limits how many containers start at once: others serve, and need the cores too. Those beyond
    it wait in order. Threads: one at a time.

    at_once: 0 for one fewer than the cores that this process may use, at least one. A container
    that has not reported the end of its start after `START_S` counts no more, since many only wait.
    """

    def __init__(self, at_once: int = 0) -> None:
        self._at_once = at_once or max(1, cores() - 1)
        self._starting: dict[_Name, float] = {}  # name -> when it counts no more
        self._waiting: deque[_Name] = deque()

    def wait(self, name: _Name) -> int:
        """Let a container wait for its start; return how many start or wait before it."""
        self._waiting.append(name)
        return len(self._starting) + len(self._waiting) - 1

    def began(self, name: _Name, now_s: float) -> None:
        """Count a container that starts now."""
        self._starting[name] = now_s + START_S

    def ended(self, name: _Name) -> None:
        """Count a container no more: it has started, ended, or need not start."""
        self._starting.pop(name, None)
        if name in self._waiting:
            self._waiting.remove(name)

    def next(self, now_s: float) -> _Name | None:
        """Take the first container that waits, if it may start now."""
        for name in [name for name, until_s in self._starting.items() if until_s <= now_s]:
            del self._starting[name]
        if not self._waiting or len(self._starting) >= self._at_once:
            return None
        return self._waiting.popleft()

    def due_s(self) -> float | None:
        """Return when the next may start at the latest; None if none waits."""
        return min(self._starting.values(), default=0.0) if self._waiting else None
