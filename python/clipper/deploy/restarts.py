"""When a replica that ended is started again, and when no more: the same rule whatever runs it."""

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When a replica that ended is started again.

    The pause doubles from `backoff_s_min` to `backoff_s_max`, and is the shortest again after
    `healthy_s` of life. After `exits_max` exits in `window_s` it is not started again. `grace_s`:
    from SIGTERM to SIGKILL when stopping. `apart_s`: between two restarts, whichever replicas they
    are of: those that serve need the cores too.
    """

    backoff_s_min: float = 0.1
    backoff_s_max: float = 10.0
    healthy_s: float = 30.0
    exits_max: int = 5
    window_s: float = 30.0
    grace_s: float = 5.0
    apart_s: float = 0.1


class Restarts:
    """The exits of one replica. Threads: one at a time. looped: what is said once it is not started
    again."""

    def __init__(self) -> None:
        self._exits: deque[float] = deque()
        self._pause_s = 0.0
        self.looped = ""

    def pause(self, policy: RestartPolicy, started_s: float, now_s: float) -> float | None:
        """It has ended: how long to wait before the next start; None: it loops, and is not started
        again."""
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
    """When replicas are started again, one after another. Threads: one at a time."""

    def __init__(self) -> None:
        self._free_s = float("-inf")

    def next_s(self, wanted_s: float, apart_s: float) -> float:
        """The time of the next restart, at `wanted_s` or as soon after it as the one before
        allows."""
        at_s = max(wanted_s, self._free_s)
        self._free_s = at_s + apart_s
        return at_s
