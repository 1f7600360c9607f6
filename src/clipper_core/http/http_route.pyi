from collections.abc import Sequence
from typing import Any

from clipper_core.engine.model import Model
from clipper_core.runtime.histogram import Counter, LatencyHistogram

class RecentAnswers:
    def __init__(self, size: int, bytes_max: int) -> None: ...
    def add(self, number: int, owner: int, output: Any) -> None: ...
    def take(self, number: int) -> tuple[int, Any, float | None, float] | None: ...
    def numbers(self) -> list[int]: ...
    def __len__(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

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
