"""Warm-up: batches that a model runs before its container connects.

The first call of a model imports, compiles and fills caches, and its speed is unknown. So a
container runs batches of 1, 2, 4, ... rows before HELLO and reports their times and the output type
to the server.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from clipper_container.errors import Interruption
from clipper_container.model import UserValue
from clipper_container.schema import FREE, Array, Tensors, TensorSpec, is_named, type_text
from clipper_container.wire.frames import DType, Rows
from clipper_container.worker.evaluation import AlwaysFails, Evaluator, PredictionFailed

OFF = "off"
ROWS_MAX = 256  # rows of the largest batch
TIMINGS_MAX = 24
TIME_S = 2.0  # for all batches after the first, which may import and compile
LIMIT_S = 30.0  # for all; a call that runs longer is interrupted
BATCH_S = 0.1  # a slower batch is the last
ITEMS_MAX = 1 << 24  # elements of the largest generated batch
VARIABLE_LENGTH = 8  # length of generated rows whose length is free
ERROR_CHARS_MAX = 1000
_FIRST_TIMES = 3  # batches of one row that are timed


@dataclass(frozen=True, slots=True)
class WarmUp:
    """The result of a warm-up.

    timings: (rows, microseconds) of each batch after the first, smallest first. output: type of one
    output; empty if unknown. lengths: of the rows that the batches repeat, in elements (of str and
    bytes in bytes); empty if there are too many. error: why it failed; empty if it did not. broken:
    no batch will ever have outputs.
    """

    timings: tuple[tuple[int, int], ...] = ()
    output: str = ""
    lengths: tuple[int, ...] = ()
    error: str = ""
    broken: bool = False


def warm_up(
    evaluator: Evaluator,
    input: str,
    setting: str,
    batch_max: int,
    announce: Callable[[int], None] = lambda rows: None,
) -> WarmUp:
    """Run the batches.

    input: type of one row. setting: "" to generate rows of that type, "off", or rows as JSON.
    batch_max: most rows of a batch, 0 for no limit. announce: called with the rows of a batch
    before the first of each size.

    A model that fails here is ready all the same; the reason is printed to stderr, and reported to
    the server.
    """
    if setting == OFF:
        return WarmUp()
    try:
        rows = given_rows(json.loads(setting), input) if setting else _made_up(input)
    except (ValueError, TypeError) as error:
        return _failed(evaluator.name, f"the warm-up rows cannot be read as {input}: {error}")
    # made-up rows would pull rows of a model's tables, and may create them
    if rows is None or (evaluator.model.tables and not setting):
        return WarmUp()
    try:
        with _interrupted_after(LIMIT_S):
            return _run(evaluator, rows, min(batch_max or ROWS_MAX, ROWS_MAX), announce)
    except _TooLong:
        took = f"the warm-up took longer than {LIMIT_S:g} s and was interrupted"
        return _failed(evaluator.name, took)
    except AlwaysFails as failure:
        return _failed(evaluator.name, f"it fails on every batch: {_last_line(failure)}", True)
    except PredictionFailed as failure:
        whose = "" if setting else "made-up "
        return _failed(
            evaluator.name,
            f"it failed on {whose}rows of type {input}, and serves without a warm-up. Give rows "
            "it takes "
            f"(warmup=[...]) or turn it off (warmup=False). {_last_line(failure)}",
        )


class _TooLong(Interruption):
    """Interrupts a warm-up that takes too long."""


@contextlib.contextmanager
def _interrupted_after(seconds: float) -> Iterator[None]:
    """Raise _TooLong in the main thread after `seconds`; does nothing in other threads."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _run(
    evaluator: Evaluator,
    rows: UserValue,
    rows_max: int,
    announce: Callable[[int], None],
) -> WarmUp:
    """Run growing batches and time them. Raises: PredictionFailed."""
    announce(1)
    outputs = _one(evaluator, rows, 1)[0][0]
    named = type_text(evaluator.model.output) if is_named(evaluator.model.output) else ""
    timings: list[tuple[int, int]] = []
    ends, n, times = time.monotonic() + TIME_S, 1, _FIRST_TIMES
    items = _items_of(rows)
    while n <= rows_max and n * items <= ITEMS_MAX and len(timings) + times <= TIMINGS_MAX:
        took_us = 0
        announce(n)
        for _ in range(times):
            parts, took_us = _one(evaluator, rows, n)
            outputs = parts[0]
            timings.append((n, took_us))
            if time.monotonic() > ends:
                return WarmUp(tuple(timings), named or _type_of(outputs), _lengths(rows))
        if took_us > BATCH_S * 1e6:
            break
        n, times = 2 * n, 2
    return WarmUp(tuple(timings), named or _type_of(outputs), _lengths(rows))


def _lengths(rows: UserValue) -> tuple[int, ...]:
    if len(rows) > TIMINGS_MAX:
        return ()
    return tuple(
        len(row.encode()) if isinstance(row, str) else getattr(row, "size", None) or len(row)
        for row in (rows if isinstance(rows, list) else [row.reshape(-1) for row in rows])
    )


def _one(evaluator: Evaluator, rows: UserValue, n: int) -> tuple[list[Rows], int]:
    times = -(-n // len(rows))
    inputs = (rows * times)[:n] if isinstance(rows, list) else np.concatenate([rows] * times)[:n]
    if not isinstance(inputs, list):
        inputs.flags.writeable = False
    if not evaluator.model.sessions:
        return evaluator.run(inputs, n)
    sessions = np.zeros(n, "<u8")
    sessions.flags.writeable = False
    return evaluator.run(inputs, n, sessions)


def _items_of(rows: UserValue) -> int:
    return 1 if isinstance(rows, list) else max(1, rows[0].size)


def _made_up(input: str) -> UserValue:
    """Generate one row: floats from 0 to 1, zeros for integers, a short text. None for `any` and
    for very large rows.
    """
    if input == "any":
        return None
    if is_named(input):
        return _made_up_records(Tensors.parse(input))
    if input == "str":
        return ["warm up"]
    if input == "bytes":
        return [memoryview(b"warm up")]
    dtype, shape = _parsed(input)
    if shape is not None and np.prod((1, *shape), dtype=np.float64) > ITEMS_MAX:
        return None
    row = np.zeros((1, *(shape if shape is not None else (VARIABLE_LENGTH,))), dtype)
    if dtype.kind == "f":
        row.reshape(-1)[:] = np.linspace(0.0, 1.0, row.size)
    return row if shape is not None else [row[0]]


def _made_up_records(tensors: Tensors) -> Array | list[bytes] | None:
    values: dict[str, Array] = {}
    for spec in tensors.specs:
        shape = tuple(VARIABLE_LENGTH if size == FREE else size for size in spec.shape)
        if np.prod((1, *shape), dtype=np.float64) > ITEMS_MAX:
            return None
        values[spec.name] = array = np.zeros((1, *shape), spec.numpy)
        if spec.is_text:
            array[...] = "warm up" if spec.dtype == "str" else b"warm up"
        elif array.dtype.kind == "f":
            array.reshape(-1)[:] = np.linspace(0.0, 1.0, array.size)
    records = tensors.pack_many(values)
    return records if isinstance(records, np.ndarray) else [*map(bytes, records)]


def given_rows(rows: object, input: str) -> UserValue:
    """Convert the user's rows, read from JSON, to the input type. Raises: ValueError, TypeError."""
    if not isinstance(rows, list) or not rows:
        raise ValueError("a list of rows is needed")
    if is_named(input):
        tensors = Tensors.parse(input)
        records = [tensors.pack(row) for row in rows]
        return np.stack(records) if tensors.is_fixed else records
    if input in ("str", "bytes"):
        if not all(isinstance(row, str) for row in rows):
            raise TypeError("each row must be a text")
        return rows if input == "str" else [memoryview(row.encode("latin-1")) for row in rows]
    if input == "any":
        made = np.asarray(rows)
        return rows if made.dtype.kind in "OU" else made
    dtype, shape = _parsed(input)
    if shape is None:
        return [np.asarray(row, dtype).reshape(-1) for row in rows]
    return np.asarray(rows, dtype).reshape(len(rows), *shape)


def _parsed(input: str) -> tuple[np.dtype, tuple[int, ...] | None]:
    """Return the element type and the shape of a row; None for rows of free length. Raises:
    InvalidTensor.
    """
    spec = TensorSpec.parse("", input)
    return spec.numpy, None if spec.is_ragged else spec.shape


def _type_of(rows: Rows) -> str:
    name = DType(rows.dtype).name.lower()
    if name in ("str", "bytes"):
        return name
    shape = ",".join(map(str, rows.data.shape[1:]))
    return f"{name}[*]" if rows.lengths is not None else f"{name}[{shape}]" if shape else name


def _last_line(failure: PredictionFailed) -> str:
    return str(failure).strip().rpartition("\n")[2][:500]


def _failed(name: str, text: str, broken: bool = False) -> WarmUp:
    print(f"model '{name}': {text}", file=sys.stderr, flush=True)
    sendable = text[:ERROR_CHARS_MAX].encode(errors="replace").decode()
    return WarmUp(error=sendable, broken=broken)
