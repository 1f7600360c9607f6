"""What a frontend needs of its server, as the server hands it over."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clipper.catalog import Catalog
from clipper.config import Config
from clipper.mesh.facade import MeshFacade
from clipper.serving.query.application import slo_in_us
from clipper.serving.query.processor import ResolvedApplication
from clipper.types import PredictionRequest

if TYPE_CHECKING:
    from clipper.params.local.served_set import ServedSet


@dataclass(frozen=True, slots=True)
class ServerInterface:
    """Threads: any.

    resolve: an application by name (UnknownApplication).  resolve_request: of a request that names
    its models itself. set_application: makes or changes one, as `ClipperServer.app`.  stats:
    `ClipperServer.stats`.  closed: whether it is closing. scale: as `ClipperServer.scale`.  mesh:
    `ClipperServer.mesh`; None where it is none of a mesh.  params: the set of shards whose tables
    its models use, if there is one.
    """

    version: str
    config: Config
    catalog: Catalog
    resolve: Callable[[str], ResolvedApplication]
    resolve_request: Callable[[PredictionRequest], ResolvedApplication]
    set_application: Callable[..., Any]
    stats: Callable[[], dict[str, Any]]
    closed: Callable[[], bool]
    scale: Callable[..., None]
    mesh: MeshFacade | None = None
    params: "ServedSet | None" = None

    def slo_us(self, slo_ms: float | None, otherwise_us: int) -> int:
        """InvalidInput for an SLO out of its range."""
        return otherwise_us if slo_ms is None else slo_in_us(slo_ms, self.config.limits.slo_ms_max)

    def running(self) -> set[str]:
        """The models that a container runs now, as `name:version`."""
        return {name for name, row in self.stats()["models"].items() if row["has"]}

    def is_ready(self, application: str, running: set[str]) -> bool:
        """Whether a query of it would find a model; of the mesh, one that it loads."""
        resolved = self.resolve(application)
        return bool(resolved.links) or any(str(id) in running for id in resolved.models)

    def store(self) -> str:
        """What is to be known of the store: that it is away, and how old the copy is; empty when
        there is nothing."""
        store = self.stats().get("store")
        if store is None or store["connected"]:
            return ""
        age = store["copy_age_s"]
        copy = "there is no copy" if age is None else f"the catalog is a copy of {age:.0f} s ago"
        return f"{store['name']} is away for {store['away_s']:.0f} s; {copy}"

    def unready(self) -> list[str]:
        """The applications none of whose models has a container now; "the server is closing" when
        it is. Of a node of a mesh, that it has not entered it, cannot load models yet, or leaves;
        not that its store has gone since: what is loaded is asked without it."""
        if self.closed():
            return ["the server is closing"]
        stats = self.stats()
        if awaits := stats.get("mesh", {}).get("awaits"):
            return [awaits]
        store = stats.get("store")
        if store is not None and not store["connected"] and store["copy_age_s"] is None:
            return [f"the store {store['name']}"]
        if self.mesh is not None and (waiting := _awaited(self.mesh)):
            return [waiting]
        running = self.running()
        return sorted(
            name for name in self.catalog.view.applications if not self.is_ready(name, running)
        )


def _awaited(mesh: MeshFacade) -> str:
    """What keeps a node of a mesh from taking queries; empty when nothing does."""
    here = next((one for one in mesh.instances() if one.id == mesh.instance), None)
    if here is None:
        return ""
    return (
        "the node leaves its mesh"
        if here.stopping
        else ""
        if here.types
        else "the processes that hold models"
    )
