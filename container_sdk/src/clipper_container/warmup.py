"""Batches that a model runs before it is ready.

The first call of a model imports, compiles and fills caches, and nobody knows how long its batches
take. So a container runs batches of 1, 2, 4, ... rows before it says HELLO, and tells the server
there how long they took and what came out.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from clipper_container.evaluate import Evaluator, ModelFailed
from clipper_container.wire import DType, Rows

OFF = "off"
ROWS_MAX = 256  # of the largest batch
TIMINGS_MAX = 24
TIME_S = 2.0  # for all batches but the first, which may import and compile
LIMIT_S = 30.0  # for all; the call that is under way then is interrupted
BATCH_S = 0.1  # a batch that took longer is the last
ITEMS_MAX = 1 << 24  # of one made-up batch; a larger one is not made
VARIABLE_LENGTH = 8  # of made-up rows that differ in length
_FIRST_TIMES = 3  # batches of one row that are timed
_TYPE = re.compile(r"([a-z]+[0-9]*)(?:\[([0-9,*]+)\])?")


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What the warm-up told.

    timings: (rows, microseconds) of each batch but the first, smallest first. output: type of one
    output, empty if none came.
    """

    timings: tuple[tuple[int, int], ...] = ()
    output: str = ""


def warm_up(evaluator: Evaluator, input: str, said: str, batch_max: int) -> WarmUp:
    """Run the batches.

    input: type of one row. said: "" for made-up rows of that type, "off", or rows as JSON.
    batch_max: most rows of a batch, 0 for no limit. A model that fails is ready all the same; why
    it failed goes to stderr.
    """
    if said == OFF:
        return WarmUp()
    try:
        rows = _given(json.loads(said), input) if said else _made_up(input)
    except (ValueError, TypeError) as error:
        _warn(evaluator.name, f"its warm-up rows cannot be read as {input}: {error}")
        return WarmUp()
    if rows is None or not (said or _is_harmless(evaluator)):
        return WarmUp()
    try:
        with _interrupted_after(LIMIT_S):
            return _run(evaluator, rows, min(batch_max or ROWS_MAX, ROWS_MAX))
    except _TooLong:
        _warn(evaluator.name, f"its warm-up took longer than {LIMIT_S:g} s, and was interrupted")
        return WarmUp()
    except ModelFailed as failure:
        whose = "" if said else "made-up "
        _warn(
            evaluator.name,
            f"it failed on {whose}rows of type {input}, and serves without a warm-up. Give rows "
            "it takes "
            f"(warmup=[...]) or turn it off (warmup=False). {_last_line(failure)}",
        )
        return WarmUp()


class _TooLong(BaseException):
    """Raised in the model's call; no `except Exception` of the model's keeps it."""


@contextlib.contextmanager
def _interrupted_after(seconds: float) -> Iterator[None]:
    """Raise _TooLong in the main thread once the time is over; in another thread nothing
    happens."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: Any) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _is_harmless(evaluator: Evaluator) -> bool:
    """Whether made-up rows change nothing: a model with tables would pull, and perhaps make, rows
    of theirs."""
    return not evaluator.model.tables


def _run(evaluator: Evaluator, rows: list[Any] | np.ndarray[Any, Any], rows_max: int) -> WarmUp:
    """Raises: ModelFailed."""
    outputs = _one(evaluator, rows, 1)[0]
    timings: list[tuple[int, int]] = []
    ends, n, times = time.monotonic() + TIME_S, 1, _FIRST_TIMES
    while (
        n <= rows_max and n * _items_of(rows) <= ITEMS_MAX and len(timings) + times <= TIMINGS_MAX
    ):
        took_us = 0
        for _ in range(times):
            outputs, took_us = _one(evaluator, rows, n)
            timings.append((n, took_us))
            if time.monotonic() > ends:
                return WarmUp(tuple(timings), _type_of(outputs))
        if took_us > BATCH_S * 1e6:
            break
        n, times = 2 * n, 2
    return WarmUp(tuple(timings), _type_of(outputs))


def _one(evaluator: Evaluator, rows: Any, n: int) -> tuple[Rows, int]:
    times = -(-n // len(rows))
    inputs = (rows * times)[:n] if isinstance(rows, list) else np.concatenate([rows] * times)[:n]
    if not isinstance(inputs, list):
        inputs.flags.writeable = False
    if not evaluator.model.sessions:
        return evaluator.run(inputs, n)
    sessions = np.zeros(n, "<u8")
    sessions.flags.writeable = False
    return evaluator.run(inputs, n, sessions)


def _items_of(rows: Any) -> int:
    return 1 if isinstance(rows, list) else max(1, rows[0].size)


def _made_up(input: str) -> Any:
    """One row: numbers between 0 and 1, zeros of whole types, a short text. None for `any`, or a
    row that is too large."""
    if input == "any":
        return None
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


def _given(rows: Any, input: str) -> Any:
    """Raises: ValueError, TypeError."""
    if not isinstance(rows, list) or not rows:
        raise ValueError("a list of rows is needed")
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


def _parsed(input: str) -> tuple[np.dtype[Any], tuple[int, ...] | None]:
    """The element type, and the shape of a row; None: rows differ in length."""
    found = _TYPE.fullmatch(input)
    if found is None:
        raise ValueError(f"{input!r} is no type")
    name, dims = found[1], found[2]
    dtype = np.dtype("bool" if name == "bool" else f"{name[0]}{int(name[1:]) // 8}")
    return dtype, None if dims == "*" else tuple(map(int, dims.split(","))) if dims else ()


def _type_of(rows: Rows) -> str:
    name = DType(rows.dtype).name.lower()
    if name in ("str", "bytes"):
        return name
    shape = ",".join(map(str, rows.data.shape[1:]))
    return f"{name}[*]" if rows.lengths is not None else f"{name}[{shape}]" if shape else name


def _last_line(failure: ModelFailed) -> str:
    return str(failure).strip().rpartition("\n")[2][:500]


def _warn(name: str, text: str) -> None:
    print(f"model '{name}': {text}", file=sys.stderr, flush=True)
