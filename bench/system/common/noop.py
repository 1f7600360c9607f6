"""A model that costs nothing: the first element of each row."""

import os
from pathlib import Path
from typing import Any

import numpy as np


def first(rows: Any) -> Any:
    return rows[:, 0]


def alignment(rows: Any) -> Any:
    """Return how far each batch lies from an address that is a multiple of 64, in bytes."""
    return np.full(len(rows), float(rows.ctypes.data % 64))


def fragile(linear: Any, pid_file: str) -> Any:
    """Return a linear model that fails on a batch with a row that begins with a negative number.

    linear: a fitted scikit-learn model. pid_file: gets the number of the process that evaluates it.
    """
    written: list[bool] = []

    def predict(rows: Any) -> Any:
        if not written:
            written.append(True)
            Path(pid_file).write_text(str(os.getpid()))
        if (rows[:, 0] < 0).any():
            raise ValueError("a row begins with a negative number")
        return linear.predict(rows)

    return predict
