"""The view of a node that the maintenance decisions take as their argument."""

from collections.abc import Callable, Iterable, Mapping

from clipper.mesh.decisions import maintenance
from clipper.mesh.decisions.placement import Constraints
from clipper.mesh.decisions.usage import Usage
from clipper.mesh.loading.loader import ModelLoader
from clipper.mesh.records import MeshModel, VModel
from clipper.mesh.registry import Registry
from clipper.mesh.tasks.registration import Registration


class StateView:
    """Collects what a node knows into a `maintenance.View`. Threads: the event loop."""

    def __init__(
        self,
        registration: Registration,
        registry: Registry,
        loader: ModelLoader,
        constraints: Callable[[], Constraints],
    ) -> None:
        self._registration, self._registry, self._loader = registration, registry, loader
        self._constraints = constraints

    def take(
        self,
        mine: Iterable[tuple[str, MeshModel | None]] = (),
        usage: Mapping[str, Usage] | None = None,
        vmodels: Iterable[VModel] = (),
        waking: Iterable[MeshModel] = (),
    ) -> maintenance.MeshView:
        """Return the current view; the arguments are as in `maintenance.View`."""
        loader, cache = self._loader, self._loader.cache
        resident = {
            id: (model.size_bytes, model.used_ms)
            for id in cache
            if (model := cache.get(id)) is not None
        }
        return maintenance.MeshView(
            self._registration.id,
            self._registration.instances(),
            mine=mine,
            resident=resident,
            loading=[id for id in resident if loader.is_loading(id)],
            usage=usage or {},
            vmodels=vmodels,
            read=self._registry.models.get,
            waking=waking,
            constraints=self._constraints(),
            seen=loader.times,
        )
