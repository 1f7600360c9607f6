"""What the parts of a node share: names and types, for those that `Mesh` is put together from."""

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec, TypeVar

from clipper.mesh.facade import MeshEvent
from clipper.mesh.loading.loader import LocalModels
from clipper.mesh.records import Instance
from clipper.mesh.registry import Registry
from clipper.mesh.routing.copy_locator import Notes, Supply
from clipper.mesh.routing.router import Routes
from clipper.mesh.transport.peers import Peers
from clipper.settings.mesh import MeshSettings
from clipper.store import Store

P = ParamSpec("P")
T = TypeVar("T")


class Parts(ABC):
    settings: MeshSettings
    registry: Registry
    local: LocalModels
    peers: Peers
    supply: Supply
    routes: Routes
    notes: Notes
    rate: float = 0.0
    _id: str
    _stopping: bool
    _begun: threading.Event
    ground: Any
    store: Store
    number = 0  # no other node has had it; 0: not known yet
    _loop: asyncio.AbstractEventLoop
    _watchers: set[Callable[[MeshEvent], None]]

    @abstractmethod
    def _do(self, work: Any) -> Any: ...

    @abstractmethod
    def _tell(self, what: Callable[..., object], *args: Any) -> None: ...

    @property
    @abstractmethod
    def instance(self) -> str: ...

    @property
    @abstractmethod
    def awaits(self) -> str: ...

    @abstractmethod
    def _check_open(self) -> None: ...

    @abstractmethod
    def here(self) -> Instance: ...

    @abstractmethod
    def vmodels_moved(self) -> None: ...

    @abstractmethod
    def follow_vmodel(self, id: str) -> None: ...

    @abstractmethod
    def run_away(
        self, function: Callable[P, T], *args: P.args, **keywords: P.kwargs
    ) -> Awaitable[T]: ...

    def instances(self) -> list[Instance]:
        """Those that live, by id."""
        if not self._begun.is_set():
            self._check_open()
        found = {instance.id: instance for instance in self.registry.instances.values()}
        if not self.registry.is_fenced:
            found[self._id] = self.here()
        return [found[id] for id in sorted(found)]
