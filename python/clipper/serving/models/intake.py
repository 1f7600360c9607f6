"""How many records of a stream the models take at once, and which records nobody was asked about.

Nobody waits at the other end of a stream, so what is offered should be what can be done: additive
increase while answers come in time, halved when one did not, after a start that doubles (Chiu and
Jain 1989; the start is TCP's).
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
    """Whether no model was heard, and none of them failed or ran out of time: asking again may do
    better."""
    return (
        not answer.models
        and bool(answer.missing)
        and all(future.status(i) in _UNTRIED for i in range(len(answer.missing)))
    )


def late(future: Future, answer: Answer) -> bool:
    """Whether a model had too much to do."""
    return bool(answer.missing) and any(
        future.status(i) in _LATE for i in range(len(answer.missing) + len(answer.models))
    )


class Intake:
    """A window of at most `size_max` records. Threads: one tells, any reads `size`."""

    def __init__(self, size_max: int) -> None:
        self._size_max = size_max
        self._window = float(min(_START, size_max))
        self._doubling = True
        self._deaf = (
            0  # answers that were asked before the last cut: they say nothing of the present window
        )

    @property
    def size(self) -> int:
        return int(self._window)

    def record(self, late: bool) -> None:
        """Of each answer: whether it came too late."""
        self._deaf = max(0, self._deaf - 1)
        if not late:
            self._window = min(
                self._size_max, self._window + (1.0 if self._doubling else 1.0 / self._window)
            )
        elif not self._deaf:
            self._doubling = False
            self._deaf = self.size
            self._window = max(1.0, self._window / 2)
