"""The batch that a model evaluates now, as the code of the model can see it.

This module does not import numpy (see `__main__`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Protocol

from clipper_container.errors import Interruption


class BatchCancelled(Interruption):
    """Ends a batch for which nobody waits."""


class EvaluatedBatch(Protocol):
    """A batch that is being evaluated."""

    def is_cancelled(self) -> bool:
        """Return whether nobody waits for a row of it any more."""


_current: ContextVar[EvaluatedBatch | None] = ContextVar("clipper_evaluation", default=None)


@contextlib.contextmanager
def evaluating(evaluation: EvaluatedBatch) -> Iterator[None]:
    """Make this the batch that is being evaluated, in this thread or task, inside the block."""
    token = _current.set(evaluation)
    try:
        yield
    finally:
        _current.reset(token)


def current_evaluation() -> EvaluatedBatch | None:
    """Return the batch that is being evaluated in this thread or task; None outside of one."""
    return _current.get()


def is_cancelled() -> bool:
    """Return whether nobody waits any more for the batch that the model evaluates.

    A model whose batches take long may look now and then, and return or raise: what it returns
    then is dropped, and an exception is no failure. True once all rows of the batch were cancelled,
    are past their deadlines, or belong to queries that were answered without them. The server tells
    it within 25 ms. Looking takes a microsecond or two. False outside of a batch, in other threads
    of the model, and of a server or a protocol that does not tell it.
    """
    evaluation = _current.get()
    return evaluation is not None and evaluation.is_cancelled()
