from collections.abc import Callable, Sequence
from typing import Any, final

from clipper_core.engine.model import Model
from clipper_core.results.decider import Decider
from clipper_core.results.future import Future

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
) -> Future: ...
