"""Turns the frame of a batch into the frame that answers it."""

from __future__ import annotations

import sys
import time

import numpy as np

from clipper_container.wire.frames import (
    BytesLike,
    Header,
    Kind,
    Rows,
    control_frame,
    encode_header,
    encode_rows,
)
from clipper_container.worker.evaluation import Evaluator, PredictionFailed

COMPLAIN_S = 5.0


def evaluate(evaluator: Evaluator, rows: Rows) -> tuple[Rows, int]:
    """Run a batch; return the outputs and the microseconds taken. Raises: PredictionFailed."""
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
    """Prints a model's failures to stderr; the same one at most once in COMPLAIN_S."""

    def __init__(self, name: str) -> None:
        self._name, self._last, self._until, self._more = name, "", 0.0, 0

    def report(self, text: str) -> None:
        """Print a failure, or count it as a repetition."""
        now = time.monotonic()
        if text == self._last and now < self._until:
            self._more += 1
            return
        again = f" ({self._more} more times since this line was last printed)" if self._more else ""
        print(f"model '{self._name}' failed{again}: {text.rstrip()}", file=sys.stderr, flush=True)
        self._last, self._until, self._more = text, now + COMPLAIN_S, 0


class BatchReplies:
    """Encodes the replies of one connection, with the limits and features of its WELCOME."""

    def __init__(
        self, evaluator: Evaluator, payload_bytes_max: int, checked: bool, qualifiers: bool
    ) -> None:
        self.evaluator = evaluator
        self._payload_bytes_max, self._checked, self._qualifiers = (
            payload_bytes_max,
            checked,
            qualifiers,
        )
        self._failures = FailureLog(evaluator.name)

    def to(self, header: Header, rows: Rows) -> list[BytesLike]:
        """Return the pieces of a REPLY, or of a FAILURE with the reason."""
        turn = self.evaluator.turn
        if turn is None:
            return self._to(header, rows)
        with turn:  # the outputs may be memory that the model uses for its next batch
            return [b"".join(self._to(header, rows))]

    def _to(self, header: Header, rows: Rows) -> list[BytesLike]:
        try:
            outputs, time_us = evaluate(self.evaluator, rows)
        except PredictionFailed as failure:
            return self._failure(header.id, str(failure))
        return self.encode(header, outputs, time_us)

    def encode(self, header: Header, outputs: Rows, time_us: int) -> list[BytesLike]:
        """Return the pieces of a REPLY, or of a FAILURE if the outputs are too large."""
        if not self._qualifiers:
            outputs.qualifiers = None  # the server does not support them
        reply, pieces = encode_rows(Kind.REPLY, outputs, header.id, time_us, self._checked)
        if reply.payload_bytes > self._payload_bytes_max:
            return self._failure(
                header.id,
                f"model '{self.evaluator.name}' returned {reply.payload_bytes} bytes for"
                f" {header.rows} rows; the server's limit is {self._payload_bytes_max}."
                " Return less, or lower batch_max.",
            )
        return [encode_header(reply), *pieces]

    def _failure(self, id: int, text: str) -> list[BytesLike]:
        self._failures.report(text)
        return control_frame(Kind.FAILURE, text.encode("utf-8", "replace"), id, self._checked)
