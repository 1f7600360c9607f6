"""Answers in parts: models that are generators, and the queries that a container answers in parts.

A generator gives the parts of one row. For a query with PARTS each part is sent as it comes; for a
row of a batch they are joined to the whole.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np

from clipper_container.current import BatchCancelled, is_cancelled
from clipper_container.errors import fails_call_only
from clipper_container.model import (
    BorrowedModel,
    FunctionModel,
    Model,
    RowPart,
    Scored,
    UserValue,
)
from clipper_container.wire.frames import (
    BadFrame,
    Bytes,
    BytesLike,
    DType,
    Header,
    Kind,
    Rows,
    check_payload,
    control_frame,
    encode_header,
    encode_rows,
    row_values,
)
from clipper_container.worker.outputs import InvalidOutput, to_rows, widened

PARTS_MAX = 1 << 20  # of one answer that is sent whole
_ALLOWANCE_BYTES = 8


def gives_parts(model: Model) -> bool:
    """Return whether the model is a generator: `predict_batch`, or the function that it wraps."""
    inner = model.inner if isinstance(model, FunctionModel) else model.predict_batch
    if isinstance(model, BorrowedModel):
        inner = model.inner.predict_batch
    call = getattr(inner, "__call__", None)  # noqa: B004  # an object whose call is a generator
    return inspect.isgeneratorfunction(inner) or inspect.isgeneratorfunction(call)


def joined(parts: list[UserValue], output: str, name: str) -> UserValue:
    """Return the parts of an answer as a whole: str and bytes joined, numbers and arrays of one
    shape as an array with one more dimension.

    output: the declared type, by which an answer without parts is empty. Raises: InvalidOutput for
    parts of several kinds.
    """
    if not parts:
        empty: dict[str, UserValue] = {"str": "", "bytes": b""}
        return empty.get(output, np.empty(0))
    if all(isinstance(part, str) for part in parts):
        return "".join(parts)
    if all(isinstance(part, bytes | bytearray | memoryview) for part in parts):
        return b"".join(parts)
    shapes = {np.shape(part) for part in parts}
    if len(shapes) > 1 or any(isinstance(part, str | bytes) for part in parts):
        raise InvalidOutput(
            f"model '{name}' gave parts of several kinds or shapes, which make no whole; query it"
            " with stream=True, or give parts that are all str, all bytes, or of one shape."
        )
    return np.asarray(parts)


def wholes_of(given: Iterator[object], n: int, output: str, name: str) -> UserValue:
    """Run a generator of a batch to its end; return the whole of each of the n rows. One that
    yields no `RowPart`s has yielded an output for each row. Raises: InvalidOutput, and what the
    generator raises."""
    parts: list[UserValue] = []
    for part in given:
        _check_wanted()
        if len(parts) == PARTS_MAX:
            raise InvalidOutput(f"model '{name}' gave more than {PARTS_MAX} parts for a batch.")
        parts.append(part)
    if parts and not any(isinstance(part, RowPart) for part in parts):
        return parts
    rows: list[list[UserValue]] = [[] for _ in range(n)]
    sure = [0.0] * n
    for part in parts:
        i = row_of(part, n, name)
        rows[i].append(part.output)
        sure[i] = part.confidence or 0.0
    wholes = [joined(row, output, name) for row in rows]
    if any(isinstance(part, RowPart) and part.confidence is not None for part in parts):
        return Scored(wholes, sure)
    return wholes


def _check_wanted() -> None:
    """Raise BatchCancelled if nobody waits for the batch. Its generator is closed with it."""
    if is_cancelled():
        raise BatchCancelled


def row_of(part: UserValue, n: int, name: str) -> int:
    """Return the row of a part of a batch of n rows. Raises: InvalidOutput."""
    if not isinstance(part, RowPart):
        raise InvalidOutput(f"model '{name}' gave a RowPart, and then a {type(part).__name__}.")
    if not isinstance(part.row, int | np.integer) or not 0 <= part.row < n:
        raise InvalidOutput(f"model '{name}' gave a part of row {part.row!r} of a batch of {n}.")
    return int(part.row)


def whole_of(given: Iterator[object], output: str, name: str) -> UserValue:
    """Run a generator to its end, and return its parts as a whole, with the confidence of the last
    one if it gave one. Raises: InvalidOutput, and what the generator raises."""
    parts: list[UserValue] = []
    last: UserValue = None
    for last in given:
        _check_wanted()
        if len(parts) == PARTS_MAX:
            raise InvalidOutput(f"model '{name}' gave more than {PARTS_MAX} parts for one row.")
        parts.append(last.outputs if isinstance(last, Scored) else last)
    whole = joined(parts, output, name)
    if isinstance(last, Scored) and last.confidence is not None:
        return Scored(whole, last.confidence)
    return whole


class PartsModel:
    """A model that is a generator, with the types of its rows and outputs.

    row_by_row: it takes one row; else a batch, which has one row here. output: the type of numbers
    that are outputs; None: as they are.
    """

    def __init__(self, model: Model, row_by_row: bool, output: np.dtype | None) -> None:
        self._model = model
        self._row_by_row = row_by_row
        self._output = output

    def begin(self, rows: Rows) -> Iterator[object]:
        """Return the generator of the parts of a row. Raises: UnicodeDecodeError, and what the
        model raises."""
        return iter(self._model.predict_batch(*self.given(rows)))

    def given(self, rows: Rows) -> list[UserValue]:
        """Return what the model is called with for a row. Raises: UnicodeDecodeError."""
        given = [row_values(rows)]
        if self._model.sessions:
            sessions = np.zeros(1, "<u8") if rows.sessions is None else rows.sessions.copy()
            given.append(sessions)
        return [value[0] if self._row_by_row else value for value in map(_kept, given)]

    def rows_of(self, part: object, name: str) -> Rows:
        """Return a part as the row of a frame. Raises: InvalidOutput."""
        if isinstance(part, RowPart):
            row_of(part, 1, name)
            part = Scored(part.output, part.confidence)
        if isinstance(part, Scored):
            sure = None if part.confidence is None else np.atleast_1d(part.confidence)
            rows = to_rows(Scored([part.outputs], sure), 1, name)
        else:
            rows = to_rows([part], 1, name)
        if self._output is not None and rows.dtype not in (DType.STR, DType.BYTES):
            rows = widened(rows, self._output)
        return rows


@dataclass(slots=True)
class OpenAnswer:
    """An answer that is being given in parts.

    allowed: how many further parts may be sent now.
    """

    id: int
    parts: Iterator[object]
    allowed: int


class PartAnswers:
    """The answers that this connection gives in parts, each by a generator of its own. They take
    turns, a part each, between the batches.

    ahead: parts that may be sent before the server allows more. failure: returns the text of a
    model's exception. Threads: one.
    """

    def __init__(
        self,
        model: PartsModel,
        name: str,
        ahead: int,
        checked: bool,
        failure: Callable[[BaseException], str],
    ) -> None:
        self._model = model
        self._name = name
        self._ahead = ahead
        self._checked = checked
        self._failure = failure
        self._open: OrderedDict[int, OpenAnswer] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of answers that have not ended."""
        return len(self._open)

    def __contains__(self, id: int) -> bool:
        """Return whether an answer has not ended."""
        return id in self._open

    @property
    def can_go_on(self) -> bool:
        """True if a part of one of them may be sent now."""
        return any(answer.allowed for answer in self._open.values())

    def begin(self, header: Header, rows: Rows) -> list[BytesLike]:
        """Begin to answer a query; return the frame of its end if it fails at once."""
        if header.id in self._open:
            raise BadFrame(f"query {header.id} is being answered")
        try:
            parts = self._model.begin(rows)
        except BaseException as error:
            if not fails_call_only(error):
                raise
            return self._end(header.id, self._failure(error))
        self._open[header.id] = OpenAnswer(header.id, parts, self._ahead)
        return []

    def allow(self, header: Header, payload: Bytes) -> None:
        """Take in a PART of the server: so many further parts of an answer may be sent. Raises:
        BadFrame."""
        check_payload(header, payload)
        number = allowance_of(header, payload)
        answer = self._open.get(header.id)
        if answer is not None:  # else it has ended meanwhile
            answer.allowed += number

    def cancel(self, id: int) -> list[BytesLike]:
        """Close the generator of an answer that nobody wants; return the frame of its end."""
        answer = self._open.pop(id, None)
        if answer is None:
            return []
        return self._end(id, self._closed(answer))

    def close(self) -> None:
        """Close all generators: the connection is lost."""
        while self._open:
            self._closed(self._open.popitem()[1])

    def _closed(self, answer: OpenAnswer) -> str:
        """Close a generator; return the text of what it raised."""
        try:
            cast(UserValue, answer.parts).close()
        except BaseException as error:
            if not fails_call_only(error):
                raise
            return self._failure(error)
        return ""

    def next_part(self) -> list[BytesLike]:
        """Run the answer whose turn it is; return the frame of its next part, or of its end."""
        answer = next(each for each in self._open.values() if each.allowed)
        try:
            part = next(answer.parts)
            rows = self._model.rows_of(part, self._name)
        except StopIteration:
            del self._open[answer.id]
            return self._end(answer.id, "")
        except InvalidOutput as error:
            del self._open[answer.id]
            self._closed(answer)
            return self._end(answer.id, str(error))
        except BaseException as error:
            if not fails_call_only(error):
                raise
            del self._open[answer.id]
            return self._end(answer.id, self._failure(error))
        self._open.move_to_end(answer.id)
        answer.allowed -= 1
        header, pieces = encode_rows(Kind.PART, rows, answer.id, 0, self._checked)
        return [encode_header(header), *pieces]

    def _end(self, id: int, text: str) -> list[BytesLike]:
        return list(control_frame(Kind.PART, text.encode("utf-8", "replace"), id, self._checked))


def allowance_of(header: Header, payload: Bytes) -> int:
    """Return how many further parts a PART of the server allows. Raises: BadFrame."""
    if header.rows or payload.size != _ALLOWANCE_BYTES:
        raise BadFrame("a PART of the server has a number")
    return int(payload.view("<u8")[0])


def _kept(value: UserValue) -> UserValue:
    """Return rows that stay after the buffer of the connection is used again."""
    if isinstance(value, np.ndarray):
        return value.copy()
    return [each if isinstance(each, str) else _kept_row(each) for each in value]


def _kept_row(row: UserValue) -> UserValue:
    return row.copy() if isinstance(row, np.ndarray) else memoryview(bytes(row))
