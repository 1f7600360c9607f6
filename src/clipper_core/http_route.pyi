from collections.abc import Sequence
from typing import Any

from clipper_core.histogram import Counter, LatencyHistogram
from clipper_core.model import Model
from clipper_core.recent_answers import RecentAnswers

class HotRoute:
    subject: Any
    def __init__(
        self,
        model: Model,
        form: str,
        node: str,
        models: bytes,
        slo_us: int,
        confidence_min: float,
        counts: Sequence[Counter],
        took: LatencyHistogram,
        ok: Counter,
        requests: LatencyHistogram,
        subject: Any,
        recent: RecentAnswers | None = None,
        owner: int = 0,
    ) -> None: ...
    @property
    def users(self) -> int: ...

class HotTable:
    def __init__(self, routes: dict[bytes, HotRoute]) -> None: ...
    def __len__(self) -> int: ...
    def __contains__(self, path: bytes, /) -> bool: ...
    @property
    def users(self) -> int: ...
