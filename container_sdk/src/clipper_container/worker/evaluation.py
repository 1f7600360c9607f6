"""Runs a batch on a model: whole, row by row, or padded. A model's exception becomes text."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import GeneratorType

import numpy as np

from clipper_container.errors import fails_call_only
from clipper_container.host.work_record import WorkRecord
from clipper_container.model import Model, OneRowFailed, Scored, SeveralOutputs, UserValue
from clipper_container.records import Records, offsets_of
from clipper_container.wire.frames import Rows, row_values, unpack_map
from clipper_container.worker.named_tensors import RecordModel
from clipper_container.worker.outputs import (
    InvalidOutput,
    PairReturned,
    WrongCount,
    first_parts,
    spread,
    to_parts,
    widened,
)
from clipper_container.worker.parts import whole_of, wholes_of
from clipper_container.worker.turns import Turns

TEXT_BYTES_MAX = 16 << 10
LINE_CHARS_MAX = 2000  # of the line that is repeated
# the beginnings of the names of files whose frames are of no use to the author of a model
_OURS = (os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep, "<frozen ")


class PredictionFailed(Exception):
    """A batch has no outputs. The text is the model's traceback, without frames of this package."""


class AlwaysFails(PredictionFailed):
    """A batch has no outputs, and no batch will: the model returns no output for each row, or uses
    a name or a module that is not there."""


@dataclass(slots=True)
class Evaluator:
    """Runs the batches of one model.

    retry_singly: retry a failed batch row by row and mark only the failing rows. row_by_row: the
    model takes one row and returns one output (`deploy(..., row_by_row=True)`). pad: pad a batch
    with copies of its last row to a multiple of this; 0 for never. work: in a host, records the
    model that is being evaluated. turn: held while the model runs, if several servers use it.
    output: the declared type of numbers that are outputs; None: as the model returns them.
    declared: the declared type of outputs, by which an answer without parts is empty.
    """

    model: Model
    name: str
    retry_singly: bool = False
    row_by_row: bool = False
    pad: int = 0
    work: WorkRecord | None = None
    turn: Turns | None = None
    output: np.dtype | None = None
    declared: str = "any"

    def given(self, rows: Rows) -> object:
        """Return the rows of a batch as the model receives them. Raises: UnicodeDecodeError."""
        model = self.model
        if isinstance(model, RecordModel) and model.opens_batches and rows.lengths is not None:
            rows.data.flags.writeable = False
            return Records(rows.data, offsets_of(rows.lengths))
        return row_values(rows)

    def run(self, inputs: object, n: int, *sessions: object) -> tuple[list[Rows], int]:
        """Predict `n` rows; return the rows of the reply and the microseconds taken.

        The rows are one batch, or several, one after another, if they are of several kinds.
        sessions: u64 (n,), for a model that takes them.

        Raises: PredictionFailed.
        """
        started = time.perf_counter_ns()
        try:
            given = (inputs, *sessions)
            with self.work.on(self.name) if self.work is not None else nullcontext():
                rows = self._row_by_row(given, n) if self.row_by_row else self._batch(given, n)
        except (WrongCount, PairReturned, SeveralOutputs) as error:
            raise AlwaysFails(str(error)) from None
        except InvalidOutput as error:
            raise PredictionFailed(str(error)) from None
        if self.output is not None:
            rows = [widened(each, self.output) for each in rows]
        return rows, (time.perf_counter_ns() - started) // 1000

    def _batch(self, given: tuple[UserValue, ...], n: int) -> list[Rows]:
        try:
            return self._whole(given, n)
        except (WrongCount, SeveralOutputs):
            raise
        except InvalidOutput:
            if n == 1 or not self.retry_singly:
                raise
        except BaseException as error:
            if not fails_call_only(error):
                raise
            if n == 1 or not (self.retry_singly or isinstance(error, OneRowFailed)):
                raise _failure(error, given[0]) from None
        return self._each(
            n, lambda i: _only(self._whole(tuple(part[i : i + 1] for part in given), 1))
        )

    def _whole(self, given: tuple[object, ...], n: int) -> list[Rows]:
        missing = -n % self.pad if self.pad else 0
        if missing:
            given = tuple(self._padded(part, n, missing) for part in given)
            return first_parts(self._called(given, n + missing), n)
        return self._called(given, n)

    def _called(self, given: tuple[object, ...], n: int) -> list[Rows]:
        returned = self.model.predict_batch(*given)
        if isinstance(returned, GeneratorType):
            returned = wholes_of(returned, n, self.declared, self.name)
        return to_parts(returned, n, self.name)

    def _padded(self, inputs: UserValue, n: int, missing: int) -> object:
        if isinstance(inputs, list):
            return inputs + inputs[-1:] * missing
        if isinstance(inputs, Records):
            return inputs.padded(missing)
        padded = np.empty((n + missing, *inputs.shape[1:]), inputs.dtype)
        padded[:n] = inputs
        padded[n:] = inputs[n - 1]
        return padded

    def _row_by_row(self, given: tuple[UserValue, ...], n: int) -> list[Rows]:
        predict = self._predicted
        if self.retry_singly and n > 1:
            return self._each(n, lambda i: predict(*(part[i] for part in given)))
        try:
            return _merged([predict(*(part[i] for part in given)) for i in range(n)], self.name)
        except (InvalidOutput, SeveralOutputs):
            raise
        except BaseException as error:
            if not fails_call_only(error):
                raise
            raise _failure(error, None) from None

    def _predicted(self, *given: object) -> object:
        """Return the output of one row; of a generator the whole of its parts."""
        returned = self.model.predict_batch(*given)
        if isinstance(returned, GeneratorType):
            return whole_of(returned, self.declared, self.name)
        return returned

    def _each(self, n: int, predict: Callable[[int], object]) -> list[Rows]:
        """Predict each row alone and mark those that fail. Raises: PredictionFailed when all
        fail.
        """
        values, texts, failed = [], [], np.zeros(n, np.bool_)
        for i in range(n):
            try:
                values.append(predict(i))
            except BaseException as error:
                if not fails_call_only(error):
                    raise
                failed[i] = True
                texts.append(
                    f"row {i}:"
                    f" {error if isinstance(error, InvalidOutput) else user_traceback(error)}"
                )
        if not values:
            raise PredictionFailed(_bounded(texts[0]))
        parts = _merged(values, self.name)
        return spread(parts, failed, _bounded("\n".join(texts))) if texts else parts


def _only(parts: list[Rows]) -> object:
    """Return the single row of a reply as a value."""
    rows = parts[0]
    value: object = rows.data if rows.lengths is not None else rows.data[0]
    if rows.dtype >= 13:
        raw = rows.data.tobytes()
        value = raw.decode() if rows.dtype == 13 else raw
    if rows.confidence is None and rows.qualifiers is None:
        return value
    confidence = None if rows.confidence is None else rows.confidence[0]
    return Scored(
        value, confidence, None if rows.qualifiers is None else unpack_map(rows.qualifiers[0])
    )


def _merged(values: list[object], name: str) -> list[Rows]:
    if not any(isinstance(value, Scored) for value in values):
        return to_parts(values, len(values), name)
    scored = [value if isinstance(value, Scored) else Scored(value) for value in values]
    # rows without a confidence are sent as 0
    sure = any(each.confidence is not None for each in scored)
    confidence = (
        [0.0 if each.confidence is None else each.confidence for each in scored] if sure else None
    )
    outputs, qualifiers = [each.outputs for each in scored], [each.qualifiers for each in scored]
    return to_parts(Scored(outputs, confidence, qualifiers), len(values), name)


def _failure(error: BaseException, given: object) -> PredictionFailed:
    """Return what a batch fails with, after the model's own exception. given: the rows."""
    text = user_traceback(error)
    is_missing = isinstance(error, ModuleNotFoundError | NameError)
    if is_missing and not isinstance(error, UnboundLocalError):
        return AlwaysFails(text)
    if isinstance(given, list) and isinstance(error, AttributeError | TypeError):
        text += " (rows of text, or of a free length such as f64[*], come as a list of rows)"
    return PredictionFailed(text)


def user_traceback(error: BaseException) -> str:
    """Return the traceback of an error without frames of this package.

    The last line is the error itself: its type and the first line of its message, repeated if the
    message has several. At most TEXT_BYTES_MAX bytes.
    """
    shown = traceback.TracebackException.from_exception(error)
    _hide_ours(shown, set())
    text, line = "".join(shown.format()).rstrip(), _line_of(shown)
    is_last = text == line or text.endswith(f"\n{line}")
    return _bounded(text if is_last else f"{text}\n{line[:LINE_CHARS_MAX]}")


def _line_of(shown: traceback.TracebackException) -> str:
    """Return the type of an error and the first line of its message."""
    # of a SyntaxError the lines before it are indented
    parts = (part for part in shown.format_exception_only() if not part.startswith(" "))
    first, *more = filter(None, map(str.strip, next(parts).splitlines()))
    return f"{first} {more[0]}" if more and first.endswith(":") else first


def _hide_ours(shown: traceback.TracebackException, seen: set[int]) -> None:
    if id(shown) in seen:
        return
    seen.add(id(shown))
    shown.stack[:] = [frame for frame in shown.stack if not frame.filename.startswith(_OURS)]
    for inner in (shown.__cause__, shown.__context__):
        if inner is not None:
            _hide_ours(inner, seen)


def _bounded(text: str) -> str:
    raw = text.encode("utf-8", "replace")
    if len(raw) <= TEXT_BYTES_MAX:
        return text
    return "…\n" + raw[len(raw) - TEXT_BYTES_MAX + 4 :].decode("utf-8", "ignore")
