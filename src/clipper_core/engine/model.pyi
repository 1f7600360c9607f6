from collections.abc import Callable, Sequence
from typing import Any, Literal, final, overload

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypeVar

from clipper_core.cache.clock_cache import Similarity
from clipper_core.engine.engine import Engine
from clipper_core.results.decider import Decider
from clipper_core.results.future import Future
from clipper_core.results.part_stream import AnswerPart, PartsFuture
from clipper_core.runtime.dtype import NAMES as NAMES

_T = TypeVar("_T", default=Any)

@final
class Model:
    engine: Engine
    name: str
    dtype: np.dtype[Any] | None
    shape: tuple[int, ...]
    similar: Similarity | None
    on_untyped: Callable[[Any], tuple[Any, ...]] | None
    tensors: Any
    slo_us: int
    cost: Callable[..., float] | str | None
    watch: Any
    outputs: Any
    def __init__(
        self,
        engine: Engine,
        name: str,
        uid: int,
        dtype: str,
        shape: tuple[int, ...] = (),
        *,
        slo_us: int = ...,
        cached: bool = True,
        finite: bool = False,
        lane_rows: int = ...,
        lane_bytes_max: int = ...,
        output: str = "",
        output_shape: tuple[int, ...] | None = None,
        similar: Similarity | None = None,
        unlisted: bool = False,
        tensors: Any = None,
        output_record: int = 0,
        outputs: Any = None,
        cost: str | Callable[..., float] = "",
        padded: bool = False,
    ) -> None: ...
    def describe_input(self) -> str: ...
    def settle(self, dtype: str, shape: tuple[int, ...] = (), tensors: Any = None) -> None: ...
    def settle_output(
        self, dtype: str, shape: tuple[int, ...] | None, outputs: Any, output_record: int
    ) -> None: ...
    @property
    def waiting(self) -> int: ...
    @property
    def index(self) -> int: ...
    @overload
    def predict(
        self,
        x: Any,
        slo_ms: float | None = None,
        salt: int = 0,
        stream: Literal[False] = False,
        part_slo_ms: None = None,
        slo_total_ms: None = None,
        band: int = 0,
    ) -> Future: ...
    @overload
    def predict(
        self,
        x: Any,
        slo_ms: float | None = None,
        salt: int = 0,
        *,
        stream: Literal[True],
        part_slo_ms: float | None = None,
        slo_total_ms: float | None = None,
        band: int = 0,
    ) -> PartsFuture: ...
    @property
    def gives_parts(self) -> bool: ...
    def predict_parts(
        self,
        x: Any,
        slo_ms: float | None,
        salt: int,
        stream: bool,
        part_slo_ms: float | None,
        slo_total_ms: float | None,
        finish: Callable[[AnswerPart, int, int], AnswerPart] | None,
    ) -> PartsFuture: ...
    def predict_many(
        self,
        rows: NDArray[Any] | Sequence[Any],
        slo_ms: float | None = None,
        salt: int = 0,
        band: int = 0,
    ) -> Future: ...
    def put(self, x: Any, output: Any, salt: int = 0) -> None: ...
    def forget(self, lo: int, hi: int, generation: int) -> bool: ...
    def cached(self, x: Any, salt: int = 0) -> tuple[bool, Any]: ...
    def cached_rows(self, rows: NDArray[Any] | Sequence[Any], salt: int = 0) -> bool: ...

def slo_of_ms(slo_ms: Any, otherwise: int) -> int: ...
def predict_rows(
    models: tuple[Model, ...],
    rows: NDArray[Any] | Sequence[Any],
    slo_us: int | None = None,
    salt: int = 0,
    finish: Callable[[Future], _T] | None = None,
    extra: Any = None,
    band: int = 0,
) -> Future[_T]: ...
def predict_all(
    models: tuple[Model, ...],
    x: Any,
    slo_us: int | None = None,
    salt: int = 0,
    finish: Callable[[Future], _T] | None = None,
    extra: Any = None,
    band: int = 0,
) -> Future[_T]: ...

@final
class EnsembleRequest: ...

def predict_ensemble(
    models: tuple[Model, ...],
    decider: Decider,
    x: Any,
    slo_us: int | None = None,
    salt: int = 0,
    finish: Callable[[Future], Any] | None = None,
    extra: Any = None,
    weights: Sequence[float] | None = None,
    starts_us: Sequence[int] | None = None,
    learn: bool = False,
    field: str = "",
    band: int = 0,
) -> Future: ...
