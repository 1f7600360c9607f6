"""Feedback for a model that learns, and the model's accuracy: FEEDBACK and ACCURACY frames
(docs/wire.md).

Feedback waits until no batch waits. The queue is bounded: beyond FEEDBACK_FRAMES_MAX frames, or
the bytes that one payload may have, the oldest are dropped and counted.
"""

from __future__ import annotations

import sys
import time
from collections import deque

import numpy as np

from clipper_container.errors import fails_call_only
from clipper_container.model import Model
from clipper_container.wire.frames import (
    HEADER_BYTES,
    BadFrame,
    Bytes,
    Kind,
    Rows,
    control_frame,
    decode_header,
    open_rows,
    row_values,
)
from clipper_container.worker.evaluation import user_traceback

FEEDBACK_FRAMES_MAX = 256


class FeedbackQueue:
    """Queue of feedback frames for one model.

    Threads: the serving thread; `changed_accuracy` may be called from one other.
    """

    def __init__(self, model: Model, name: str, payload_bytes_max: int, every_s: float) -> None:
        self.learned = self.failed = 0  # rows
        self._model, self._name, self._limit, self._every_s = (
            model,
            name,
            payload_bytes_max,
            every_s,
        )
        self._waiting: deque[tuple[Rows, Rows, int]] = deque()
        self._waiting_bytes = 0
        self._troubles: dict[str, int] = {}
        self._accuracy_read_s = 0.0
        self._accuracy: float | None = None
        self._last_accuracy = pack_accuracy(0, 0, None)
        self._read_accuracy()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, payload: Bytes) -> None:
        """Queue the payload of a FEEDBACK frame. Raises: BadFrame."""
        self._waiting.append((*open_feedback(payload.copy(), self._limit), payload.nbytes))
        self._waiting_bytes += payload.nbytes
        while len(self._waiting) > FEEDBACK_FRAMES_MAX or (
            len(self._waiting) > 1 and self._waiting_bytes > self._limit
        ):
            dropped, _ = self._next()
            self.failed += dropped.n
            self._complain(
                "dropped",
                f"feedback arrives faster than correct() processes it; dropped {dropped.n} rows",
            )

    def _next(self) -> tuple[Rows, Rows]:
        inputs, labels, size = self._waiting.popleft()
        self._waiting_bytes -= size
        return inputs, labels

    def run_one(self) -> None:
        """Pass the oldest feedback to correct(). An exception is logged and counted."""
        inputs, labels = self._next()
        try:
            self._model.correct(row_values(inputs), row_values(labels), inputs.sessions)
            self.learned += inputs.n
        except BaseException as error:
            if not fails_call_only(error):
                raise
            self.failed += inputs.n
            self._complain(
                "correct", f"correct() failed on {inputs.n} rows:\n{user_traceback(error)}"
            )
        if not self._waiting or time.monotonic() >= self._accuracy_read_s + self._every_s:
            self._read_accuracy()

    def _read_accuracy(self) -> None:
        self._accuracy_read_s = time.monotonic()
        try:
            accuracy = self._model.accuracy()
        except BaseException as error:
            if not fails_call_only(error):
                raise
            self._complain("accuracy", f"accuracy() failed:\n{user_traceback(error)}")
            return
        if accuracy is None or (
            isinstance(accuracy, int | float | np.number) and 0 <= accuracy <= 1
        ):
            self._accuracy = None if accuracy is None else float(accuracy)
        else:
            self._complain(
                "range", f"accuracy() returned {accuracy!r}; return a number from 0 to 1, or None"
            )

    def _complain(self, what: str, text: str) -> None:
        """Print to stderr the first time, the second, the fourth and so on, so that a flood does
        not fill the log.
        """
        count = self._troubles[what] = self._troubles.get(what, 0) + 1
        if count & (count - 1) == 0:
            print(
                f"model '{self._name}': {text}\n({count} times so far)", file=sys.stderr, flush=True
            )

    def changed_accuracy(self) -> list[bytes]:
        """Return an ACCURACY frame in pieces if something changed since the last one, else
        nothing.
        """
        payload = pack_accuracy(self.learned, self.failed, self._accuracy)
        if payload == self._last_accuracy:
            return []
        self._last_accuracy = payload
        return control_frame(Kind.ACCURACY, payload)


def open_feedback(payload: Bytes, payload_bytes_max: int) -> tuple[Rows, Rows]:
    """Decode a FEEDBACK payload as (inputs with sessions, labels). The arrays are views of
    `payload`.

    Raises: BadFrame.
    """
    inputs, rest = _frame(payload, Kind.PREDICT, payload_bytes_max)
    labels, rest = _frame(rest, Kind.REPLY, payload_bytes_max)
    if rest.size or inputs.n != labels.n or inputs.sessions is None:
        raise BadFrame("feedback has as many labels and sessions as inputs, and nothing else")
    return inputs, labels


def _frame(payload: Bytes, kind: Kind, payload_bytes_max: int) -> tuple[Rows, Bytes]:
    header = decode_header(payload[:HEADER_BYTES], payload_bytes_max)
    end = HEADER_BYTES + header.payload_bytes
    if header.kind != kind or end > payload.size:
        raise BadFrame(f"feedback is a PREDICT and a REPLY frame, not {Kind(header.kind).name}")
    return open_rows(header, payload[HEADER_BYTES:end], payload_bytes_max), payload[end:]


def pack_accuracy(learned: int, failed: int, accuracy: float | None) -> bytes:
    """Encode the payload of ACCURACY: rows learned, rows failed, and the accuracy if known."""
    counts = np.array([learned, failed], "<u8").tobytes()
    return counts if accuracy is None else counts + np.array([accuracy], "<f8").tobytes()
