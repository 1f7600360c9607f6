"""A model that costs nothing: the first element of each row."""

from typing import Any


def first(rows: Any) -> Any:
    return rows[:, 0]
