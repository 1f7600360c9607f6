from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar, final

from clipper_core.learning.label_feedback import Mean
from clipper_core.runtime.histogram import Counter, LatencyHistogram

_Model = TypeVar("_Model")

@final
class Bucket:
    """A token bucket: at most `rate` tokens a second, and `burst` at once. Threads: any."""

    @property
    def rate(self) -> float: ...
    @property
    def burst(self) -> float: ...
    def __init__(self, rate: float, burst: float, now_s: float) -> None: ...
    def take(self, now_s: float, tokens: float = 1.0) -> bool: ...

@final
class StatusCounts:
    """Counts of tasks by the status with which they ended. Threads: any."""

    def __init__(self) -> None: ...
    def add(self, status: int) -> None: ...
    def by_name(self) -> dict[str, int]: ...

@final
class DefaultCounts:
    """Counts of default answers by reason. Threads: any."""

    @property
    def unsure(self) -> Counter: ...
    @property
    def not_finite(self) -> Counter: ...
    @property
    def policy_failed(self) -> Counter: ...
    @property
    def ended(self) -> StatusCounts: ...
    def __init__(self) -> None: ...
    def by_reason(self) -> dict[str, int]: ...

@final
class AnswerCounts:
    """Counts the answers of an application to queries of these models. Threads: any."""

    @property
    def models(self) -> tuple[Any, ...]: ...
    def __init__(
        self,
        models: tuple[_Model, ...],
        counts: Sequence[Any],
        pairs: Mapping[tuple[_Model, _Model], Mean],
        answered: Counter,
        defaults: DefaultCounts,
        duration: LatencyHistogram,
        comparing: Bucket,
        clock: Callable[[], float],
    ) -> None: ...
    def add(
        self,
        took_us: int,
        arrived: Mapping[Any, Any],
        used: Collection[Any],
        answer: object,
        is_default: bool,
    ) -> bool: ...

@final
class SideCounts:
    answers: Counter
    defaults: Counter
    duration: LatencyHistogram
    slower: dict[int, Counter]
    def __init__(self, limits_us: Iterable[int]) -> None: ...
    def add(self, took_us: int, is_default: bool) -> None: ...
