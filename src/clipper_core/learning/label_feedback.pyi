from collections.abc import Callable
from typing import Any, final

import numpy as np

_Columns = tuple[Any, ...]

def record_of(
    head: bytes,
    user: str,
    place: dict[Any, int],
    asked: tuple[int, ...],
    odds: tuple[float, ...],
    seen: object,
    time_us: int,
) -> bytes | None: ...
def is_plain(label: object) -> bool: ...
def alike(label: object, heard: object) -> bool: ...

@final
class Mean:
    """A sum and how many it is of. Threads: one at a time."""

    n: float
    total: float
    def __init__(self) -> None: ...
    def add(self, value: float, weight: float = 1.0) -> None: ...
    def stats(self) -> dict[str, float]: ...

def count_right(
    heard: object,
    label: object,
    answer: object,
    weight: float,
    counts: dict[Any, Any],
    right: Mean,
) -> bool: ...

@final
class LabelSteps:
    """Writes down a label and learns it, for a learner whose policy the core learns. Threads:
    any."""

    def __init__(
        self,
        learner: object,
        lock: object,
        journal: object,
        one: Callable[..., Any],
        node: str,
        dirty: dict[Any, None],
        observation: Callable[..., Any],
    ) -> None: ...
    def learn(
        self,
        head: bytes,
        user: str,
        plan: object,
        heard: object,
        label: object,
        answer: object,
    ) -> int: ...

def in_one_state(found: list[Any]) -> bool: ...
def label_columns(
    found: list[Any], models: tuple[Any, ...], place: dict[Any, int]
) -> (
    tuple[
        _Columns,
        _Columns,
        _Columns,
        np.ndarray[Any, np.dtype[np.int32]],
        np.ndarray[Any, np.dtype[np.float64]],
    ]
    | None
): ...
def take_listed(
    ids: list[str],
    known: dict[str, Any],
    find: Callable[[str], Any],
    now_s: float,
    application: str,
) -> tuple[list[int], list[Any], list[int]]: ...
