"""Congestion window of a record stream: how many records are in flight, and which to retry.

No client waits for a stream, so it offers as much load as the models can take: additive increase
while answers are in time, halved when one is late, after a start that doubles. Source: Chiu and
Jain, 1989; the slow start is TCP's.
"""

from typing import Final

from clipper.types import Answer
from clipper_core.results.future import Future
from clipper_core.runtime.status import Status

_UNTRIED: Final = frozenset(
    {Status.FULL, Status.DROPPED, Status.NO_REPLICA, Status.REPLICA_LOST, Status.CLOSED}
)
_LATE: Final = frozenset({Status.FULL, Status.DROPPED, Status.DEADLINE})
_START: Final = 16


def untried(future: Future, answer: Answer) -> bool:
    """Return whether no model answered, and none failed or ran out of time, so that a retry may
    help.
    """
    return (
        not answer.models
        and bool(answer.missing)
        and all(future.status(i) in _UNTRIED for i in range(len(answer.missing)))
    )


def late(future: Future, answer: Answer) -> bool:
    """Return whether a model was overloaded."""
    return bool(answer.missing) and any(
        future.status(i) in _LATE for i in range(len(answer.missing) + len(answer.models))
    )


class Intake:
    """A window of at most `size_max` records. Threads: one writes, any reads `size`."""

    def __init__(self, size_max: int) -> None:
        self._size_max = size_max
        self._window = float(min(_START, size_max))
        self._doubling = True
        self._deaf = (
            0  # answers to queries before the last cut: they show nothing of the present window
        )

    @property
    def size(self) -> int:
        """The window in records."""
        return int(self._window)

    def record(self, late: bool) -> None:
        """Record one answer, and whether it came too late."""
        self._deaf = max(0, self._deaf - 1)
        if not late:
            self._window = min(
                self._size_max, self._window + (1.0 if self._doubling else 1.0 / self._window)
            )
        elif not self._deaf:
            self._doubling = False
            self._deaf = self.size
            self._window = max(1.0, self._window / 2)
