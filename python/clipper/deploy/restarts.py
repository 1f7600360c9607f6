"""The restart policy of replicas, shared by all deployers."""

from collections import deque
from dataclasses import dataclass


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
