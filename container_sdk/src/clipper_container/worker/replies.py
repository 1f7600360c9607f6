"""Turns the frame of a batch into the frame that answers it."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from clipper_container.current import BatchCancelled, EvaluatedBatch, evaluating
from clipper_container.wire.frames import (
    PAYLOAD_BYTES_MAX,
    BytesLike,
    Flag,
    Header,
    Kind,
    Rows,
    control_frame,
    encode_header,
    encode_rows,
)
from clipper_container.worker.evaluation import Evaluator, PredictionFailed
from clipper_container.worker.outputs import InvalidOutput, one_part, slice_rows

COMPLAIN_S = 5.0
Frame = tuple[Header, list[bytes | memoryview]]

_PARTIAL = int(Flag.PARTIAL)
_BESIDE_BYTES = 13  # of a row: its length, its confidence, the size of its qualifiers, its status
_PADDING_MAX = 64  # of all parts of a payload


def evaluate(evaluator: Evaluator, rows: Rows) -> tuple[list[Rows], int]:
    """Run a batch; return the outputs, of each kind those that follow one another, and the
    microseconds taken. Raises: PredictionFailed.
    """
    try:
        inputs = evaluator.given(rows)
    except UnicodeDecodeError as error:
        raise PredictionFailed(f"a str row is not UTF-8: {error.reason}") from None
    if not evaluator.model.sessions:
        return evaluator.run(inputs, rows.n)
    sessions = np.zeros(rows.n, "<u8") if rows.sessions is None else rows.sessions
    sessions.flags.writeable = False
    return evaluator.run(inputs, rows.n, sessions)


class FailureLog:
    """Prints failures to stderr; the same one at most once in a time.

    what: what failed, the beginning of each line. again_s: the time, in seconds.
    """

    def __init__(self, what: str, again_s: float = COMPLAIN_S) -> None:
        self._what, self._again_s = what, again_s
        self.reset()

    def reset(self) -> None:
        """Forget what was printed: the next failure is printed."""
        self._last = ""
        self._until = 0.0
        self._more = 0

    def report(self, text: str) -> None:
        """Print a failure, or count it as a repetition."""
        now = time.monotonic()
        if text == self._last and now < self._until:
            self._more += 1
            return
        again = f" ({self._more} more times since this line was last printed)" if self._more else ""
        print(f"{self._what}{again}: {text.rstrip()}", file=sys.stderr, flush=True)
        self._last = text
        self._until = now + self._again_s
        self._more = 0


class BatchReplies:
    """Encodes the replies of one connection, with the limits and features of its WELCOME."""

    def __init__(
        self,
        evaluator: Evaluator,
        payload_bytes_max: int = PAYLOAD_BYTES_MAX,
        checked: bool = False,
        qualifiers: bool = False,
        partial: bool = False,
    ) -> None:
        self.evaluator = evaluator
        self._payload_bytes_max, self._checked = payload_bytes_max, checked
        self._qualifiers, self._partial = qualifiers, partial
        self._failures = FailureLog(f"model '{evaluator.name}' failed")

    def to(
        self, header: Header, rows: Rows, evaluation: EvaluatedBatch | None = None
    ) -> list[BytesLike]:
        """Return the pieces of a REPLY, of several that are PARTIAL but for the last, or of a
        FAILURE with the reason. evaluation: what the model can look at meanwhile.
        """
        turn = self.evaluator.turn
        if turn is None:
            return self._to(header, rows, evaluation)
        with turn:  # the outputs may be memory that the model uses for its next batch
            return [b"".join(self._to(header, rows, evaluation))]

    def _to(self, header: Header, rows: Rows, evaluation: EvaluatedBatch | None) -> list[BytesLike]:
        try:
            with nullcontext() if evaluation is None else evaluating(evaluation):
                outputs, time_us = evaluate(self.evaluator, rows)
        except BatchCancelled:
            return self.cancelled(header.id)
        except PredictionFailed as failure:
            if evaluation is not None and evaluation.is_cancelled():
                return self.cancelled(header.id)
            return self.failure(header.id, str(failure))
        return self.encode(header, outputs, time_us)

    def encode(self, header: Header, parts: list[Rows], time_us: int) -> list[BytesLike]:
        """Return the pieces of a REPLY, or of several if the outputs are of several kinds or too
        large for one frame; of a FAILURE if one output alone is.
        """
        if not self._qualifiers:  # the server does not support them
            for rows in parts:
                rows.qualifiers = None
        try:
            if not self._partial:
                parts = [one_part(parts, self.evaluator.name)]
            encoded = [frame for rows in parts for frame in self._frames(rows, header.id, time_us)]
        except InvalidOutput as error:
            return self.failure(header.id, str(error))
        pieces: list[BytesLike] = []
        for i, (reply, payload) in enumerate(encoded, 1):
            if i < len(encoded):
                reply.flags |= _PARTIAL
            pieces += [encode_header(reply), *payload]
        return pieces

    def _frames(self, rows: Rows, id: int, time_us: int) -> list[Frame]:
        """Return the outputs as frames within the server's limit. Raises: InvalidOutput."""
        frame = encode_rows(Kind.REPLY, rows, id, time_us, self._checked)
        if frame[0].payload_bytes <= self._payload_bytes_max:
            return [frame]
        if not self._partial:
            raise InvalidOutput(
                f"model '{self.evaluator.name}' returned {frame[0].payload_bytes} bytes for"
                f" {rows.n} rows; the server's limit is {self._payload_bytes_max}."
                " Return less, or lower batching.size_max."
            )
        ends = np.cumsum(_row_bytes(rows))
        start, frames = 0, []
        most = self._payload_bytes_max - len(rows.text.encode("utf-8", "replace")) - _PADDING_MAX
        while start < rows.n:
            before = int(ends[start - 1]) if start else 0
            end = int(np.searchsorted(ends, before + most, "right"))
            if end == start:
                part = self._too_large(slice_rows(rows, start, start + 1))
                end += 1
            else:
                part = slice_rows(rows, start, end)
            frames.append(encode_rows(Kind.REPLY, part, id, time_us, self._checked))
            start = end
        return frames

    def _too_large(self, row: Rows) -> Rows:
        """Return a row that fits no frame as one that failed. Raises: InvalidOutput for one of a
        fixed shape: so are all others of its batch.
        """
        text = (
            f"model '{self.evaluator.name}' returned an output of {row.data.nbytes} bytes; the"
            f" server's limit of a frame is {self._payload_bytes_max}. Return less, or raise"
            " limits.frame_bytes_max."
        )
        if row.lengths is None:
            raise InvalidOutput(text)
        self._failures.report(text)
        failed = replace(row, data=row.data[:0], lengths=np.zeros(1, np.uint32))
        failed.status, failed.text = np.ones(1, np.uint8), text
        return failed

    def failure(self, id: int, text: str) -> list[BytesLike]:
        """Return the FAILURE of a batch, whose reason is printed."""
        self._failures.report(text)
        return self._failed(id, text)

    def cancelled(self, id: int) -> list[BytesLike]:
        """Return the FAILURE of a batch that the server has cancelled."""
        return self._failed(id, "the batch was cancelled: nobody waits for it")

    def _failed(self, id: int, text: str) -> list[BytesLike]:
        return control_frame(Kind.FAILURE, text.encode("utf-8", "replace"), id, self._checked)


def _row_bytes(rows: Rows) -> NDArray[np.int64]:
    """Return the most bytes that each row takes of a payload, i64 (n,)."""
    if rows.lengths is None:
        sizes = np.full(rows.n, rows.data.nbytes // rows.n + _BESIDE_BYTES, np.int64)
    else:
        sizes = rows.lengths.astype(np.int64) * rows.data.itemsize + _BESIDE_BYTES
    if rows.qualifiers is not None:
        sizes += np.fromiter(map(len, rows.qualifiers), np.int64, rows.n)
    return sizes
