"""The prediction cache, as an application's programmer sees it."""

from collections.abc import Callable

from clipper.metrics.stats import CacheStats
from clipper.types import VersionedModel
from clipper_core.engine.model import Model
from clipper_core.results.future import Future


class Cache:
    """The prediction cache as the design document has it. Threads: any."""

    def __init__(
        self, model: Callable[[str | VersionedModel], Model], stats: Callable[[], CacheStats]
    ) -> None:
        self._model = model
        self._stats = stats

    def fetch(self, model: str | VersionedModel, input: object, salt: int = 0) -> Future:
        """Return a future of the model's prediction for `input`: done when it is cached; else it
        joins the evaluation in flight, or starts the one there will be."""
        return self._model(model).predict(input, salt=salt)

    def put(
        self, model: str | VersionedModel, input: object, output: object, salt: int = 0
    ) -> None:
        """Insert a prediction: a number, str, bytes or ndarray."""
        self._model(model).put(input, output, salt)

    def stats(self) -> CacheStats:
        """Return the bytes, entries and evictions."""
        return self._stats()
