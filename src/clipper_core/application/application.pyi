from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, final, overload

from clipper.types import Answer, PredictionRequest, UserValue, VersionedModel
from clipper_core.application.deciding import Deciding
from clipper_core.application.output_means import OutputMeans
from clipper_core.application.roles import Roles
from clipper_core.application.selection import Selection
from clipper_core.engine.model import Model
from clipper_core.learning.answer_counts import AnswerCounts, SideCounts
from clipper_core.learning.answer_window import AnswerWindow
from clipper_core.results.future import Future
from clipper_core.results.part_stream import PartsFuture
from clipper_core.runtime.histogram import Counter, Gauge
from clipper_core.runtime.status import Status

@final
class ApplicationQuery:
    application: Application
    models: tuple[VersionedModel, ...]
    user: str
    id: str
    @property
    def resolved(self) -> Any: ...
    @property
    def plan(self) -> Any: ...
    @property
    def state(self) -> Any: ...
    @property
    def late(self) -> tuple[tuple[VersionedModel, Future], ...]: ...
    @property
    def call(self) -> Any: ...
    @property
    def outputs(self) -> tuple[()]: ...
    @property
    def output_name(self) -> str: ...

class _Orders(Protocol):
    undecided: Counter
    def deciding(self, state: Any) -> Deciding | None: ...
    def starts_us(self, deciding: Any, slo_us: int) -> tuple[int, ...] | None: ...
    def call(self, deciding: Any, slo_us: int) -> Any: ...

class _Defaults(Protocol):
    default: Any
    def why(self, status: Status, model: VersionedModel, detail: str) -> str: ...
    def log(self, number: int, request_id: str, reason: str) -> None: ...
    def overloaded(self) -> None: ...

class _Link(Protocol):
    def touch(self) -> None: ...

class _Decoys(Protocol):
    def saw(self, number: int, x: object, user: str, id: str) -> None: ...
    def replied(self, number: int, output: Any, is_default: bool) -> None: ...

class _Observing(Protocol):
    def watch(
        self, models: tuple[VersionedModel, ...], x: object, slo_us: int, salt: int
    ) -> tuple[tuple[VersionedModel, Future], ...]: ...
    def compare(
        self,
        arrived: dict[VersionedModel, Any],
        output: Any,
        watched: tuple[tuple[VersionedModel, Future], ...],
    ) -> None: ...

@final
class Application:
    resolved: Any
    selection: Selection
    slo_us: int
    priority: int
    def __init__(
        self,
        resolved: object,
        selection: Selection,
        cores: Sequence[Model],
        learner: object,
        window: AnswerWindow,
        kept: Callable[[int], None] | None,
        counts: AnswerCounts,
        queries: Counter,
        decided: Counter,
        slowest: object,
        bar_us: Gauge,
        means: OutputMeans | None,
        is_teaching: Gauge,
        has_contexts: bool,
        by_python: Callable[[Future], object],
        opened: Callable[[bytes], object],
        plan_type: Callable[..., object],
        latest: object,
        node: str,
        slo_us: int,
        confidence_min: float,
        defaults: _Defaults,
        uniform_of: Callable[[str], float],
        orders: _Orders | None = None,
        side: SideCounts | None = None,
        links: Sequence[_Link | None] | None = None,
        decoys: _Decoys | None = None,
        roles: Roles | None = None,
        observing: _Observing | None = None,
        compare: Callable[[dict[VersionedModel, Any], Any], None] | None = None,
        priority: int = ...,
    ) -> None: ...
    def predict(
        self,
        x: object,
        user: str,
        slo_us: int,
        salt: int,
        id: str,
        features: tuple[float, ...] | None = None,
        band: int = 0,
    ) -> Future | None: ...
    def retire(self) -> None: ...
    def finish(self, future: Future) -> Any: ...

@final
class ApplicationTable:
    def __init__(self) -> None: ...
    def replace(self, by_name: dict[str, Application]) -> None: ...
    def schedule(self, request: PredictionRequest) -> Future | None: ...

class _OtherRequests(Protocol):
    def schedule(self, request: PredictionRequest) -> Future: ...

class RequestScheduler:
    def __init__(self, table: ApplicationTable, others: _OtherRequests) -> None: ...
    def schedule_prediction(self, request: PredictionRequest) -> Future: ...

class _OtherQueries(Protocol):
    def predict(
        self,
        x: UserValue,
        user: str | None,
        slo_ms: float | None,
        salt: int,
        context: UserValue,
        id: str,
        outputs: Sequence[str],
        priority: int | None,
    ) -> Future: ...
    def predict_parts(
        self,
        x: UserValue,
        user: str | None,
        slo_ms: float | None,
        salt: int,
        context: UserValue,
        id: str,
        outputs: Sequence[str],
        stream: bool,
        part_slo_ms: float | None,
        slo_total_ms: float | None,
        priority: int | None,
    ) -> PartsFuture: ...
    def feedback(
        self,
        prediction: str | Answer | None,
        label: object,
        correct: bool | None,
        score: float | None,
        input: object,
        user: str | None,
        weight: float,
        context: object,
    ) -> bool: ...

class QueryHandle:
    name: str
    def __init__(
        self, name: str, table: ApplicationTable, slo_ms_max: float, others: _OtherQueries | None
    ) -> None: ...
    @overload
    def predict(
        self,
        x: UserValue,
        user: str | None = None,
        slo_ms: float | None = None,
        salt: int = 0,
        context: UserValue = None,
        id: str = "",
        outputs: Sequence[str] = (),
        stream: Literal[False] = False,
        part_slo_ms: None = None,
        slo_total_ms: None = None,
        priority: int | None = None,
    ) -> Future: ...
    @overload
    def predict(
        self,
        x: UserValue,
        user: str | None = None,
        slo_ms: float | None = None,
        salt: int = 0,
        context: UserValue = None,
        id: str = "",
        outputs: Sequence[str] = (),
        *,
        stream: Literal[True],
        part_slo_ms: float | None = None,
        slo_total_ms: float | None = None,
        priority: int | None = None,
    ) -> PartsFuture: ...
    def feedback(
        self,
        prediction: str | Answer | None = None,
        *,
        label: object = None,
        correct: bool | None = None,
        score: float | None = None,
        input: object = None,
        user: str | None = None,
        weight: float = 1.0,
        context: object = None,
    ) -> bool: ...
