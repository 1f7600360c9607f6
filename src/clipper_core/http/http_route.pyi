from collections.abc import Sequence
from typing import Any

from clipper_core.application.application import Application
from clipper_core.engine.model import Model
from clipper_core.http.key_table import KeyTable
from clipper_core.learning.answer_window import AnswerOwner, AnswerWindow
from clipper_core.runtime.histogram import Counter, LatencyHistogram

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
        window: AnswerWindow | None = None,
        owner: AnswerOwner | None = None,
        application: Application | None = None,
        read_only: bool = False,
        slo_ms_max: float = 0.0,
        takes_users: bool = False,
        rows_max: int = 1,
        forbidden: Counter | None = None,
        limited: Counter | None = None,
        priority: int = ...,
    ) -> None: ...
    def look_at_lanes(self) -> None: ...
    @property
    def users(self) -> int: ...

class HotTable:
    keys: KeyTable | None
    def __init__(
        self, routes: dict[bytes, HotRoute], keys: KeyTable | None = None, logs: bool = False
    ) -> None: ...
    def look_at_lanes(self) -> None: ...
    def __len__(self) -> int: ...
    def __contains__(self, path: bytes, /) -> bool: ...
    @property
    def users(self) -> int: ...
