"""A server's membership in a mesh: its node, and what that node needs of the server."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from clipper.catalog.catalog import Catalog
from clipper.child_environment import child_environment
from clipper.component import Health
from clipper.config import Config
from clipper.credentials.container_tokens import ContainerTokens
from clipper.errors import DoesNotFit, UnknownModel
from clipper.mesh.loading.model_host import HostProcesses
from clipper.mesh.node.node import MeshNode
from clipper.mesh.node.platform import NodePlatform
from clipper.mesh.routing.router import MeshModelHandle
from clipper.metrics.stats import MeshStats
from clipper.processes import Supervisor
from clipper.serving.models.containers import Containers, Replica, Seat
from clipper.serving.models.engines import Engines
from clipper.serving.models.model_source import ModelQueue, ResolvedModel
from clipper.serving.models.running_models import RunningModels
from clipper.serving.query.processor import ResolvedApplication
from clipper.serving.query.resolver import ApplicationResolver
from clipper.store import Store
from clipper.types import Batching, Model, VersionedModel

UNREGISTERED_S: Final = 1e9  # no replica of an unregistered model will ever connect
LANE_ROWS_MAX: Final = 2048  # per model of the mesh: there are thousands, and each takes memory


class MeshMembership:
    """The mesh node of a server. Before start(), and without `[mesh] enabled`, it has none.

    Queries, links and containers of models that the catalog does not have are looked up here.
    state: folder of the server's state, with the cache of pulled models. processes: starts the
    model hosts. Threads: any.
    """

    def __init__(
        self,
        config: Config,
        store: Store,
        folder: Path,
        state: Path | None,
        processes: Supervisor,
    ) -> None:
        self._settings, self._store, self._folder = config.mesh, store, folder
        chosen = child_environment(config.server.env_pass)
        environment = {**chosen, **config.artifacts.environment(state)}
        self._platform = NodePlatform(HostProcesses(processes, environment).new_host)
        self._node: MeshNode | None = None

    def start(self, host: "ServerHost", *, store_is_away: bool) -> None:
        """Start the node, if the configuration enables one.

        While the store is away the node enters later, by itself, when `mesh.enter_s` permits it.
        Raises StoreError.
        """
        if not self._settings.enabled:
            return
        self._node = MeshNode(self._settings, self._store, host, self._folder, self._platform)
        if store_is_away and self._settings.enter_s:
            self._node.start_late()
        else:
            self._node.start()

    @property
    def node(self) -> MeshNode | None:
        """The node; None when the server is not a member of a mesh."""
        return self._node

    @property
    def required_node(self) -> MeshNode:
        """The node. Raises DoesNotFit when the server is not a member of a mesh."""
        if self._node is None:
            raise DoesNotFit(
                "this server is not a node of a mesh.", hint="Start it by clipper.start(mesh=True)."
            )
        return self._node

    def application(self, name: str) -> ResolvedApplication | None:
        """Return a model resolved for a query that names it; None when it is not registered."""
        return None if self._node is None else self._node.application(name)

    def resolve(self, name: str) -> ResolvedModel | None:
        """Return a model for an application that links it; None when it is not registered."""
        return None if self._node is None else self._node.resolve(name)

    def record(self, name: str) -> Model | None:
        """Return the record of a model that an application links; None when unregistered."""
        found = self.resolve(name)
        return None if found is None else found.record

    def is_routed(self, name: str) -> bool:
        """Return whether the mesh has a model of this name."""
        return self._node is not None and self._node.router.route(name) is not None

    def model(self, name: str) -> MeshModelHandle:
        """Return the handle of one model. Raises UnknownModel."""
        route = self._node.router.route(name) if self._node is not None else None
        if route is None:
            raise UnknownModel(f"no model {name!r} is registered.")
        return MeshModelHandle(route)

    def seat(self, name: str, version: int, input: str, output: str = "any") -> Seat | None:
        """Return the queue that a connecting container serves; None for a model of the catalog."""
        return None if self._node is None else self._node.seat(name, version, input, output)

    def on_replicas_changed(self, id: VersionedModel) -> bool:
        """Report a replica that connected or disconnected; return whether it is one of the mesh."""
        return self._node is not None and self._node.on_replicas_changed(id)

    def enter(self) -> None:
        """Enter the mesh, once a store that was away at the start has come back."""
        if self._node is not None:
            self._node.enter()

    def stats(self) -> MeshStats | None:
        """Return the node's statistics; None without a node."""
        return None if self._node is None else self._node.stats()

    @property
    def other_history(self) -> str:
        """Return why the content of the store is not used for the mesh; empty if it is, or without
        a node.
        """
        return "" if self._node is None else self._node.other_history

    def take_store(self, *, restore: bool) -> int:
        """Accept a store that has lost the mesh's history; see MeshNode.take_store."""
        return 0 if self._node is None else self._node.take_store(restore=restore)

    def health(self) -> list[Health]:
        """Return the state of the node's threads; nothing without a node."""
        return [] if self._node is None else self._node.health()

    def drain(self) -> None:
        """Leave the mesh in good order: recently used models are loaded elsewhere first."""
        if self._node is not None:
            self._node.drain_for_good()

    def close(self) -> None:
        """Stop the node. Idempotent."""
        if self._node is not None:
            self._node.close()


class ServerHost:
    """A server as a mesh node uses it: a `clipper.mesh.node_host.NodeHost`. Threads: any."""

    def __init__(
        self,
        config: Config,
        catalog: Catalog,
        engines: Engines,
        running: RunningModels,
        resolver: ApplicationResolver,
        containers: Containers,
        tokens: ContainerTokens,
        address: Callable[[], str],
    ) -> None:
        self._config, self._catalog = config, catalog
        self._engines, self._running = engines, running
        self._resolver, self._containers = resolver, containers
        self._tokens, self._address = tokens, address

    @property
    def address(self) -> str:
        """The address that replicas connect to."""
        return self._address()

    def token_of(self, model: str, instance: str) -> str:
        """Return the token of an instance's copy of a model."""
        return self._tokens.of_copy(model, instance)

    @property
    def batching(self) -> Batching:
        """The server's default batching."""
        return self._config.batching

    def new_core(self, record: Model) -> ModelQueue:
        """Make a queue for a model, which is in no list of models."""
        rows = min(LANE_ROWS_MAX, self._config.limits.queue_rows_max)
        return self._running.unlisted(record, rows)

    def applications(self, model: ResolvedModel) -> tuple[ResolvedApplication, ResolvedApplication]:
        """Return a model resolved for its queries, and for those with time to load it."""
        settings = self._config.mesh
        # one more, so that a query that states this very deadline is not taken for one without
        slo_us = int(settings.deadline_ms * 1000) + 1
        resolved = self._resolver.unlisted(model, slo_us)
        return resolved, msgspec.structs.replace(
            resolved, slo_us=slo_us + int(settings.load_s * 1e6)
        )

    def replicas(self, id: VersionedModel) -> Sequence[Replica]:
        """Return the connected replicas of a model."""
        return self._containers.of(id)

    def disconnect(self, id: VersionedModel, number: int) -> None:
        """Disconnect the replicas of a model with this number; their rows return to the queue."""
        for replica in self._containers.of(id):
            if replica.hello.replica == number:
                replica.engine.disconnect(replica.conn)

    def close(self, resolved: ResolvedApplication, seconds: float) -> None:
        """Fail at once the queries that are due before a replica can come, `seconds` from now."""
        core = next(iter(resolved.cores.values()))
        core.engine.set_earliest_replica(
            core.index, time.monotonic_ns() // 1000 + int(seconds * 1e6)
        )

    def forget(self, resolved: ResolvedApplication) -> None:
        """Fail the waiting queries of an unregistered model, and release its engine."""
        self.close(resolved, UNREGISTERED_S)
        self._engines.forget(resolved.models[0].name)

    def linking(self, id: str) -> Sequence[str]:
        """Return the applications that link a model."""
        return [
            app.name
            for app in self._catalog.view.applications.values()
            if any(link.name == id for link in app.models)
        ]

    def link_again(self) -> None:
        """Resolve all applications again, since the models of the mesh have changed."""
        self._catalog.refresh_listeners()

    def is_taken(self, name: str) -> bool:
        """Return whether the catalog has a model or an application of this name."""
        view = self._catalog.view
        return name in view.versions or name in view.applications
