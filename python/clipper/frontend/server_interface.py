"""The interface between a server and its frontends."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from clipper.catalog.catalog import Catalog
from clipper.config import Config
from clipper.metrics.stats import ServerStats
from clipper.serving.query.application import slo_in_us
from clipper.serving.query.processor import ResolvedApplication
from clipper.types import PredictionRequest

if TYPE_CHECKING:
    from clipper.mesh.node.node import MeshNode
    from clipper.params.local.served_set import ServedSet


@dataclass(frozen=True, slots=True)
class ServerInterface:
    """The functions and data of a server that its frontends use. Threads: any.

    resolve: an application by name; raises UnknownApplication. resolve_request: the application of
    a request that names its models. stats: `ClipperServer.stats`. closed: True while the server is
    closing. scale: as `ClipperServer.scale`. mesh: `ClipperServer.mesh`, or None outside a mesh.
    params: the parameter shards whose tables the models use, or None. was_ready: set once all
    applications have had a connected model.
    """

    version: str
    config: Config
    catalog: Catalog
    resolve: Callable[[str], ResolvedApplication]
    resolve_request: Callable[[PredictionRequest], ResolvedApplication]
    stats: Callable[[], ServerStats]
    closed: Callable[[], bool]
    scale: Callable[..., None]
    mesh: "MeshNode | None" = None
    params: "ServedSet | None" = None
    was_ready: threading.Event = field(default_factory=threading.Event)

    def slo_us(self, slo_ms: float | None, otherwise_us: int) -> int:
        """Return an SLO in microseconds. Raises InvalidInput if it is out of range."""
        return otherwise_us if slo_ms is None else slo_in_us(slo_ms, self.config.limits.slo_ms_max)

    def running(self) -> set[str]:
        """Return the models with a connected container, as `name:version`."""
        return {name for name, row in self.stats()["models"].items() if row["has"]}

    def is_ready(self, application: str, running: set[str]) -> bool:
        """Return whether a query of the application would find a model, or one that the mesh can
        load."""
        resolved = self.resolve(application)
        return bool(resolved.links) or any(str(id) in running for id in resolved.models)

    def store(self) -> str:
        """Return a warning if the store is unreachable, with the age of the copy in use; else
        ""."""
        store = self.stats().get("store")
        if store is None or store["connected"]:
            return ""
        age = store["copy_age_s"]
        copy = "there is no copy" if age is None else f"the catalog is a copy of {age:.0f} s ago"
        return f"{store['name']} is away for {store['away_s']:.0f} s; {copy}"

    def unready(self) -> list[str]:
        """Return the reasons why the server is not ready; an empty list if it is ready.

        The reasons are that the server is closing, that a mesh node has not joined, cannot load
        models yet, or is leaving, and the applications without any connected model. The latter
        count until all have had one, so that no query comes before the models are warm; afterwards
        they count only when no application has one, so that one broken model does not take the
        others out of service, here and on every other server. A store that was lost later is no
        reason: loaded models are served without it.
        """
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
        running, names = self.running(), self.catalog.view.applications
        absent = sorted(name for name in names if not self.is_ready(name, running))
        if not absent:
            self.was_ready.set()
        return absent if not self.was_ready.is_set() or len(absent) == len(names) else []


def _awaited(mesh: "MeshNode") -> str:
    """Return why a mesh node cannot take queries; "" if it can."""
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
