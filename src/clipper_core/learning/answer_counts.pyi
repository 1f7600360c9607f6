from collections.abc import Callable, Collection, Mapping, Sequence
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
