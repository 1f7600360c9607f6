"""Tables whose weights are stored as f16, bf16 and i8, beside one of f32: memory, and rows a second
of CPU time of one thread."""

import time
from functools import partial
from typing import Any

import numpy as np

from bench.harness import Goal, Row, Sample, interleave, row
from clipper_core.params.embedding import Table

DIM, BATCH = 64, 4096
DTYPES = ("f32", "f16", "bf16", "i8")


def rows(quick: bool) -> list[Row]:
    """Return memory of a row, and the rates of pulls and pushes. Every table has the same rows."""
    n, turns = (50_000, 3) if quick else (1_000_000, 7)
    draw = np.random.default_rng(0)
    ids = draw.integers(-(2**63), 2**63 - 1, n)
    tables = {dtype: Table(dtype, DIM, dtype=dtype) for dtype in DTYPES}
    for at in range(0, n, BATCH):
        part = ids[at : at + BATCH]
        values = draw.standard_normal((part.size, DIM))
        for table in tables.values():
            table.write(part, values)
    gradients = draw.standard_normal((BATCH, DIM)).astype(np.float32)
    found = [_memory(tables, dtype) for dtype in DTYPES[1:]]
    for name in ("pull", "push"):
        rates = interleave(
            {
                dtype: partial(_rate, table, ids, draw, gradients, name, 10 if quick else 40)
                for dtype, table in tables.items()
            },
            turns,
        )
        found += [_rate_row(name, dtype, rates) for dtype in DTYPES[1:]]
    return found


def _memory(tables: dict[str, Table], dtype: str) -> Row:
    each = {name: table.nbytes / len(table) for name, table in tables.items()}
    return row(
        f"memory of a row of {DIM}, {dtype}, Adagrad",
        Sample((each[dtype],)),
        "bytes",
        "f32",
        Sample((each["f32"],)),
        Goal("at_most", 0.8),
        note="with state and index; the state is f32",
    )


def _rate_row(name: str, dtype: str, rates: dict[str, Sample]) -> Row:
    kind = "pull as f32" if name == "pull" else "push, exact Adagrad"
    return row(f"{kind}, stored as {dtype}, dim {DIM}", rates[dtype], "Mrow/s", "f32", rates["f32"])


def _rate(
    table: Table, ids: Any, draw: np.random.Generator, gradients: Any, name: str, batches: int
) -> float:
    took = []
    out = np.empty((BATCH, DIM), np.float32)
    for _ in range(batches):
        each = ids[draw.integers(0, len(ids), BATCH)]
        begun = time.thread_time_ns()
        if name == "pull":
            table.pull(each, out=out)
        else:
            table.push(each, gradients)
        took.append(time.thread_time_ns() - begun)
    return BATCH / float(np.median(took)) * 1e3
