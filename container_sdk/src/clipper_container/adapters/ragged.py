"""Batches whose rows differ in shape, for frameworks that take arrays: rows of equal shapes run
together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from clipper_container.schema import Array, Column


def run_by_shape(
    inputs: Mapping[str, Column], run: Callable[[dict[str, Array]], Mapping[str, Column]]
) -> dict[str, Column]:
    """Run a batch; rows that differ in shape in several runs. Padding is the caller's business.

    inputs: by name an array (n, ...), or a list of n arrays, strings or bytes. run: takes arrays
    (n, ...), and returns outputs with as many rows.
    """
    lists = {name: rows for name, rows in inputs.items() if isinstance(rows, list)}
    n = len(next(iter(inputs.values())))
    groups: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for i in range(n):
        groups.setdefault(tuple(np.shape(rows[i]) for rows in lists.values()), []).append(i)
    if len(groups) == 1:
        return {**run({name: _stacked(rows) for name, rows in inputs.items()})}
    merged: dict[str, list[object]] = {}
    for places in groups.values():
        some = {
            name: _stacked([rows[i] for i in places] if isinstance(rows, list) else rows[places])
            for name, rows in inputs.items()
        }
        for name, found in run(some).items():
            column = merged.setdefault(name, [None] * n)
            for place, row in zip(places, found, strict=True):
                column[place] = row
    return {**merged}


def _stacked(rows: Column) -> Array:
    if not isinstance(rows, list):
        return rows
    if isinstance(rows[0], (str, bytes)):
        return np.array(rows, object)
    return np.stack(rows)
