"""Sources of the models of queries: the catalog, whose models run here, or a mesh, which loads a
model when it is queried. Queries see one interface."""

from typing import Protocol, TypeAlias

from clipper.types import Model
from clipper_core.engine.model import Model as CoreModel

# For packages that do not import the core.
ModelQueue: TypeAlias = CoreModel


class ResolvedModel(Protocol):
    """A model as queries use it, whatever its source. Threads: any."""

    @property
    def record(self) -> Model:
        """Return its name, version and types."""

    @property
    def core(self) -> ModelQueue:
        """Return its queue in the engine."""

    @property
    def is_on_demand(self) -> bool:
        """Return whether queries have it loaded; otherwise the rest says that it is ready."""

    @property
    def is_ready(self) -> bool:
        """Return whether no load has to come before an evaluation."""

    def touch(self) -> None:
        """Count a query, and have the model loaded if it is not."""

    def admit(self, slo_us: int) -> None:
        """Have the model loaded for a query with that much time, in microseconds. Raises Overloaded
        if it cannot be loaded in time."""

    def reason(self) -> str:
        """Return why it is not loaded; empty if it is."""


class ModelSource(Protocol):
    """A source of models. Threads: any."""

    def resolve(self, name: str) -> ResolvedModel | None:
        """Return the model of that name, which counts no query; None when it has none."""
