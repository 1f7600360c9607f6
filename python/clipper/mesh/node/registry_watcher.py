"""Reactions of a node to changes of the registry."""

import logging
import threading
from collections.abc import Sequence
from typing import Final

from clipper.mesh.loading.loader import ModelLoader
from clipper.mesh.node_host import NodeHost
from clipper.mesh.node_loop import NodeLoop
from clipper.mesh.records import Instance, MeshModel, VModel
from clipper.mesh.registry import Registry, now_ms
from clipper.mesh.routing.copy_locator import CopyLocator
from clipper.mesh.routing.router import MESH_VERSION, Alias, ModelRouter, Route
from clipper.mesh.tasks.registration import Registration
from clipper.mesh.tasks.vmodel_switcher import VModelSwitcher
from clipper.mesh.transport.peers import Peers
from clipper.store import KeyChange
from clipper.types import VersionedModel

RECENT_MS: Final = 60_000  # new copies serve routes that were used so recently
_log = logging.getLogger(__name__)


class RegistryWatcher:
    """Applies changes of the registry to routes, loaded copies and connections to peers.

    Threads: the event loop, unless stated.
    """

    def __init__(
        self,
        registry: Registry,
        router: ModelRouter,
        loader: ModelLoader,
        copies: CopyLocator,
        peers: Peers,
        registration: Registration,
        switcher: VModelSwitcher,
        host: NodeHost,
        loop: NodeLoop,
    ) -> None:
        self._registry, self._router, self._loader = registry, router, loader
        self._copies, self._peers, self._registration = copies, peers, registration
        self._switcher, self._host, self._loop = switcher, host, loop
        self._alias_lock = threading.Lock()

    def start(self) -> None:
        """Subscribe to changes, and set the aliases of the v-models that exist."""
        registry, call = self._registry, self._loop.call
        registry.models.on_change(lambda changes: call(self._on_models, changes))
        registry.vmodels.on_change(lambda changes: call(self._on_vmodels, changes))
        registry.instances.on_change(lambda changes: call(self._on_instances, changes))
        for vmodel in registry.vmodels.values():
            self.refresh_alias(vmodel.id)

    # -- models

    def _on_models(self, changes: Sequence[KeyChange[MeshModel]]) -> None:
        for change in changes:
            id, record = change.key, change.after
            route = self._router.get(id)
            is_held = id in self._loader.held
            if route is None and not is_held:
                self._router.forget_absence(id)
                if change.old is None:
                    self.resolve_applications(id)
                elif change.new is None and self._loader.is_loading(id):  # for another node
                    self._forget(id)
            elif record is not None:
                if is_held:
                    self._check_held(record)
                if route is not None and route.served and now_ms() - route.used_ms < RECENT_MS:
                    self._use_new_copies(route, record)
            elif change.new is None:
                self._forget(id)

    def _forget(self, id: str) -> None:
        """Fail queries of a model that is no longer registered, and free its memory."""
        route = self._router.forget(id)
        self._copies.forget(id)
        if route is not None:
            self._host.forget(route.resolved)
            self.resolve_applications(id)
        self._loop.tasks.spawn(self._loader.drop(id, "it was unregistered"))

    def resolve_applications(self, id: str) -> None:
        """Make applications resolve their models again if one of them uses this model."""
        if self._host.linking(id):
            self._loop.tasks.spawn(self._loop.run_blocking(self._host.link_again))

    def _check_held(self, record: MeshModel) -> None:
        held = self._loader.held[record.id]
        if self._registration.id not in record.loaded and not self._registry.is_fenced:
            self._loop.tasks.spawn(self._loader.reclaim(record.id))
        if held.record.policy != record.policy:
            self._loader.cache.pin(record.id, record.policy.pinned)
        held.record = record

    def _use_new_copies(self, route: Route, record: MeshModel) -> None:
        instances = self._registration.instances()
        lenders = {instance.id for instance in instances if instance.number in route.lenders}
        if set(record.loaded) - lenders:
            self._loop.tasks.spawn(self._copies.use_all(route, record, lenders))

    # -- v-models

    def _on_vmodels(self, changes: Sequence[KeyChange[VModel]]) -> None:
        for change in changes:
            self.refresh_alias(change.key)
        self._switcher.remove_unnamed_later(changes)
        self._switcher.wake()

    def refresh_alias(self, id: str) -> None:
        """Send queries of a v-model where the mirror says now. Threads: any."""
        with self._alias_lock:  # so that an older state never replaces a newer one
            vmodel = self._registry.vmodels.get(id)
            self._router.set_alias(id, None if vmodel is None else alias_of(vmodel))

    # -- instances

    def _on_instances(self, changes: Sequence[KeyChange[Instance]]) -> None:
        for change in changes:
            if change.new is None and change.key != self._registration.id:
                self._peers.forget(change.key)
                if (gone := change.before) is not None:
                    self._disconnect(gone)

    def _disconnect(self, gone: Instance) -> None:
        """Disconnect the replicas of a dead instance, so that their rows go to other copies."""
        lost = [route.id for route in self._router if gone.number in route.lenders]
        _log.warning("instance %s is gone, which served %d models here", gone.id, len(lost))
        for id in lost:
            self._host.disconnect(VersionedModel(id, MESH_VERSION), gone.number)


def alias_of(vmodel: VModel) -> Alias:
    """Return where queries of a v-model go."""
    return Alias(vmodel.active, vmodel.target if vmodel.share else "", vmodel.share)
