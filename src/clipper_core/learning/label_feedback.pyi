from collections.abc import Callable
from typing import Any, final

from clipper_core.learning.feedback_update import FeedbackUpdate
from clipper_core.learning.join_table import Joined, JoinTable

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

@final
class LabelCounts:
    """How often the answer and each model gave the right label. Threads: any."""

    @property
    def models(self) -> dict[Any, Any]: ...
    @property
    def right(self) -> Mean: ...
    def __init__(self, models: dict[Any, Any], right: Mean) -> None: ...
    def count(self, heard: object, label: object, answer: object, weight: float) -> bool: ...

@final
class LabelSteps:
    """Writes down labels and learns them, for one learner. Threads: any."""

    @property
    def application(self) -> str: ...
    def __init__(
        self,
        learner: object,
        lock: object,
        journal: object,
        update: FeedbackUpdate | None,
        node: str,
        dirty: dict[Any, None],
        observation: Callable[..., Any],
        commit: Callable[[int], bool],
    ) -> None: ...

@final
class Tally:
    """Counts of a list of labels, by the model's place."""

@final
class OpenContext:
    """A context's state, open, and the last row of a list that it has learned."""

def learn_label(
    table: JoinTable, prediction: object, application: str, label: object
) -> bool | None: ...
def learn_labels(
    table: JoinTable, predictions: list[Any], application: str, labels: list[Any]
) -> int | None: ...
def take_listed(
    ids: list[str],
    table: JoinTable,
    find: Callable[[str], Joined | None],
    application: str,
) -> tuple[list[int], list[Joined], list[int]]: ...
