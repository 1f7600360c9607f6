from collections.abc import Callable, Sequence
from typing import Any, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from clipper_core.learning.answer_window import AnswerWindow, Joined
from clipper_core.learning.bandit import Rule
from clipper_core.learning.feedback_update import FeedbackUpdate
from clipper_core.learning.state_lock import StateLock

_Model = TypeVar("_Model")

@final
class LabelVotes:
    """Combines labels by the weights of one rule. Threads: any."""

    def __init__(self, rule: Rule, doubt: float) -> None: ...
    def answer(
        self,
        models: tuple[_Model, ...],
        rows: NDArray[np.float64],
        sure: NDArray[np.float64],
        labels: int,
        predictions: object,
        missing: int,
    ) -> tuple[object, float, tuple[_Model, ...], float] | None: ...

@final
class JournalEnd:
    """The pages at the end of a journal's last segment. Threads: any."""

    at: int
    room: int
    next: int
    @property
    def mapped(self) -> int: ...
    def __init__(self, keeps: bool) -> None: ...
    def append(self, record: bytes) -> int: ...
    def append_framed(self, framed: bytes, count: int) -> int: ...
    def map(self, fd: int, nbytes: int) -> None: ...
    def unmap(self) -> None: ...

def framed(records: Sequence[bytes]) -> bytes: ...
def record_of(
    head: bytes,
    user: str,
    place: dict[Any, int],
    queried: tuple[int, ...],
    odds: tuple[float, ...],
    seen: object,
    time_us: int,
) -> bytes | None: ...
def is_plain(label: object) -> bool: ...
def alike(label: object, predictions: object) -> bool: ...

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
    """Counts of right labels, of the answer and of each model. Threads: any."""

    @property
    def models(self) -> dict[Any, Any]: ...
    @property
    def right(self) -> Mean: ...
    def __init__(self, models: dict[Any, Any], right: Mean) -> None: ...
    def forget(self) -> None: ...
    def count(self, predictions: object, label: object, answer: object, weight: float) -> bool: ...

@final
class LabelSteps:
    """Writes down labels and learns them, for one learner. Threads: any."""

    @property
    def application(self) -> str: ...
    def __init__(
        self,
        learner: object,
        lock: StateLock,
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
class TakenLabels:
    """Copies of the entries that a list of labels is about."""

    def __init__(self, table: AnswerWindow, n: int) -> None: ...

@final
class OpenContext:
    """A context's state, open, and the last row of a list that it has learned."""

def learn_label(
    table: AnswerWindow, prediction: object, application: str, label: object
) -> bool | None: ...
def learn_labels(
    table: AnswerWindow, predictions: list[Any], application: str, labels: list[Any]
) -> int | None: ...
def take_listed(
    ids: list[str],
    table: AnswerWindow,
    application: str,
) -> tuple[list[int], list[Joined], list[int]]: ...
