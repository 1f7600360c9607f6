"""Batches of a model that computes one while it takes in the next, such as one on a GPU."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from clipper_container.errors import fails_call_only
from clipper_container.wire.frames import BytesLike, Header, Rows, row_values
from clipper_container.worker.evaluation import Evaluator
from clipper_container.worker.outputs import to_parts
from clipper_container.worker.replies import BatchReplies

DEPTH = 2  # batches under way; the server sends no third one


@runtime_checkable
class PipelinedModel(Protocol):
    """A model whose batches have a beginning and an end, and may overlap.

    It may also have `is_done(batch)`, which returns whether collect() would not wait: then a batch
    that comes while another is computed begins at once, and not only after the other.
    """

    def submit(self, inputs: object) -> object:
        """Begin a batch; return what collect() takes."""

    def collect(self, batch: object) -> object:
        """Wait for a batch and return its outputs as predict_batch() does."""


@dataclass(slots=True)
class _UnderWay:
    header: Header
    rows: Rows
    batch: object  # None: submit() failed
    started_ns: int


class BatchPipeline:
    """Submits batches as they come, and makes their replies in the same order.

    A batch that fails is evaluated once more by `predict_batch`, whose errors name the rows.
    Threads: one.
    """

    def __init__(self, model: PipelinedModel, replies: BatchReplies) -> None:
        self._model, self._replies = model, replies
        self._is_done: Callable[[object], bool] = getattr(model, "is_done", _always)
        self._waiting: deque[_UnderWay] = deque()
        self._ended_ns = 0  # of the batch before

    def __len__(self) -> int:
        """Return the number of batches under way."""
        return len(self._waiting)

    @property
    def is_full(self) -> bool:
        """True if a reply must be made before the next batch."""
        return len(self._waiting) >= DEPTH

    @property
    def is_done(self) -> bool:
        """True if the next reply can be made without waiting, as far as the model tells."""
        batch = self._waiting[0].batch
        return batch is None or self._is_done(batch)

    def add(self, header: Header, rows: Rows) -> None:
        """Begin a batch. The rows are kept until its reply is made."""
        try:
            batch = self._model.submit(row_values(rows))
        except BaseException as error:
            if not fails_call_only(error):
                raise
            batch = None
        self._waiting.append(_UnderWay(header, rows, batch, time.perf_counter_ns()))

    def next_reply(self) -> list[BytesLike]:
        """Wait for the oldest batch; return the pieces of its REPLY or FAILURE."""
        first = self._waiting.popleft()
        name = self._replies.evaluator.name
        if first.batch is None:
            return self._replies.to(first.header, first.rows)
        try:
            outputs = to_parts(self._model.collect(first.batch), first.rows.n, name)
        except BaseException as error:
            if not fails_call_only(error):
                raise
            return self._replies.to(first.header, first.rows)
        now_ns = time.perf_counter_ns()
        took_us = (now_ns - max(first.started_ns, self._ended_ns)) // 1000
        self._ended_ns = now_ns
        return self._replies.encode(first.header, outputs, took_us)


def _always(batch: object) -> bool:
    return True


def is_pipelined(evaluator: Evaluator) -> bool:
    """Return whether batches of this model overlap: it has submit() and collect(), and gets whole
    batches, alone.

    Such a model gets its rows over the socket, since shared rows are lent for one batch at a time.
    """
    return (
        isinstance(evaluator.model, PipelinedModel)
        and not evaluator.row_by_row
        and not evaluator.pad
        and not evaluator.model.sessions
        and evaluator.turn is None
    )


def pipeline_of(evaluator: Evaluator, replies: BatchReplies) -> BatchPipeline | None:
    """Return a pipeline for a model whose batches overlap; None for others."""
    model = evaluator.model
    if isinstance(model, PipelinedModel) and is_pipelined(evaluator):
        return BatchPipeline(model, replies)
    return None
