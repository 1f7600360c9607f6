"""The interface between a server and its frontends."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from clipper.catalog.catalog import Catalog
from clipper.catalog.view import View
from clipper.component import Health, State
from clipper.config import Config
from clipper.metrics.stats import ServerStats, StoreStats
from clipper.serving.models.served_versions import ServedVersions
from clipper.serving.query.application import slo_in_us
from clipper.serving.query.processor import ResolvedApplication
from clipper.types import Model, PredictionRequest, VersionedModel

if TYPE_CHECKING:
    from clipper.mesh.node.node import MeshNode
    from clipper.params.local.served_set import ServedSet


def no_health() -> Sequence[Health]:
    """Return nothing: a server without components, in tests."""
    return ()


@dataclass(frozen=True, slots=True)
class ServerInterface:
    """The functions and data of a server that its frontends use. Threads: any.

    resolve: an application by name; raises UnknownApplication. resolve_request: the application of
    a request that names its models. stats: `ClipperServer.stats`. closed: True while the server is
    closing. scale: as `ClipperServer.scale`. mesh: `ClipperServer.mesh`, or None outside a mesh.
    params: the parameter shards whose tables the models use, or None. health: the threads, event
    loops and pools of the server with their states. was_ready: set once all
    applications have had a connected model. served: what names of models mean here; None where the
    catalog alone says it.
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
    health: Callable[[], Sequence[Health]] = no_health
    was_ready: threading.Event = field(default_factory=threading.Event)
    served: ServedVersions | None = None

    def slo_us(self, slo_ms: float | None, otherwise_us: int) -> int:
        """Return an SLO in microseconds. Raises InvalidInput if it is out of range."""
        return otherwise_us if slo_ms is None else slo_in_us(slo_ms, self.config.limits.slo_ms_max)

    def serves(self, view: View, model: Model) -> bool:
        """Return whether queries that name a model without its version get this version."""
        name = VersionedModel(model.name)
        found = view.model(name) if self.served is None else self.served.model(view, name)
        return found.id == model.id

    def running(self) -> set[str]:
        """Return the models with a connected container, as `name:version`."""
        return {name for name, row in self.stats()["models"].items() if row["has"]}

    def is_ready(self, application: str, running: set[str]) -> bool:
        """Return whether a query of the application would find a model, or one that the mesh can
        load."""
        resolved = self.resolve(application)
        return bool(resolved.on_demand) or any(str(id) in running for id in resolved.models)

    def store(self) -> str:
        """Return a warning about the store; see `store_warning`."""
        return store_warning(self.stats().get("store"))

    def dead(self) -> list[str]:
        """Return why the server should be started anew: the parts that it cannot do without and
        that have failed; an empty list if it lives."""
        return [_failure(one) for one in self._failed() if one.vital]

    def degraded(self) -> list[str]:
        """Return the parts that failed and are tried again, and the containers for whose start the
        server itself lacks something."""
        parts = [_failure(one) for one in self.health() if one.state is State.DEGRADED]
        return [*parts, *self._containers("short")]

    def _failed(self) -> list[Health]:
        return [one for one in self.health() if one.state is State.FAILED]

    def held(self) -> list[str]:
        """Return the containers that end too often, each with how it ended and when it is tried
        again, if it is."""
        return [*self._containers("held"), *self._containers("failed")]

    def _containers(self, state: str) -> list[str]:
        return [
            f"{name}/{one['number']}: {one.get('detail', '')}"
            + (f", tried again in {one['again_s']:.0f} s" if "again_s" in one else "")
            for name, row in self.stats()["models"].items()
            for one in row["replicas"]
            if one["state"] == state
        ]

    def unready(self) -> list[str]:
        """Return the reasons why the server is not ready; an empty list if it is ready.

        The reasons are that the server is closing, that a part of it has failed, that a mesh node
        has not joined, cannot load models yet, or is leaving, and the applications without any
        connected model. The latter count until all have had one, so that no query comes before the
        models are warm; afterwards they count only when no application has one, so that one broken
        model does not take the others out of service, here and on every other server. A store that
        was lost later, or came back with another content, is no reason: loaded models are served
        without it, and `store` says so.
        """
        if self.closed():
            return ["the server is closing"]
        if failed := self._failed():
            return [_failure(one) for one in failed]
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


def _failure(one: Health) -> str:
    return f"{one.name} failed: {one.why}"


def store_warning(store: StoreStats | None) -> str:
    """Return a warning if the store is unreachable, with the age of the copy in use, or has another
    content than what is known; else "". store: of the stats; None for one that needs none."""
    if store is None:
        return ""
    if store["refused"]:
        return (
            f"{store['refused']}; what is known here is served, and nothing can be changed. Restore"
            " the store, or: clipper store accept --help"
        )
    if store["connected"]:
        return ""
    age = store["copy_age_s"]
    copy = "there is no copy" if age is None else f"the catalog is a copy of {age:.0f} s ago"
    return f"{store['name']} is away for {store['away_s']:.0f} s; {copy}"


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
