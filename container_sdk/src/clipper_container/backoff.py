"""The pauses between tries of something that failed: a connection, a call, a process that ended.

Every loop of the product that tries again takes its pauses from here. It waits by itself, on
whatever wakes it early, so nothing here sleeps.
"""

import random

S_MIN = 0.1
S_MAX = 10.0
STEADY_S = 5.0


class Backoff:
    """Pauses between tries: `s_min`, doubling up to `s_max`, each shortened at random by up to
    half, so that clients of one server that was away do not all return at once.

    steady_s: something that lived so long begins again at `s_min` when it ends (`ended`).  rng:
    draws; a simulation gives its own. Threads: one at a time.
    """

    __slots__ = ("_next_s", "_rng", "_s_max", "_s_min", "_steady_s")

    def __init__(
        self,
        s_min: float = S_MIN,
        s_max: float = S_MAX,
        *,
        steady_s: float = STEADY_S,
        rng: random.Random | None = None,
    ) -> None:
        self._s_min = s_min
        self._s_max = s_max
        self._steady_s = steady_s
        self._rng = rng
        self._next_s = s_min

    def reset(self) -> None:
        """Begin again at `s_min`: the last try succeeded."""
        self._next_s = self._s_min

    @property
    def is_longest(self) -> bool:
        """Return whether the pauses have grown to `s_max`."""
        return self._next_s >= self._s_max

    def next_s(self) -> float:
        """Return the next pause in seconds."""
        if self._rng is None:
            # not seeded by the pid: every container of an image is process 1. A seed takes 20 us,
            # and most work needs no second try.
            self._rng = random.Random()
        pause_s = self._next_s * self._rng.uniform(0.5, 1.0)
        self._next_s = min(self._s_max, 2 * self._next_s)
        return pause_s

    def ended(self, lived_s: float) -> float:
        """Return the pause after something ended that had lived for so many seconds."""
        if lived_s >= self._steady_s:
            self.reset()
        return self.next_s()
