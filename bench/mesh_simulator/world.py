"""Parts of a simulated mesh without decisions: virtual time, the store, its mirrors, queries."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from clipper.mesh.decisions.claims import ClaimRefused
from clipper.mesh.decisions.placement import InstanceIndex
from clipper.mesh.records import Instance, MeshModel, VModel

Then = Callable[[MeshModel | ClaimRefused], None]
Change = Callable[[MeshModel], MeshModel | ClaimRefused]


class Clock:
    """A virtual clock with a queue of events. Times are wall clock milliseconds."""

    def __init__(self, start_ms: int) -> None:
        self.now_ms = start_ms
        self._events: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self.done = 0

    def at(self, time_ms: int, act: Callable[..., None], *told: Any) -> None:
        """Schedule a call at a time, or now if that has passed."""
        self._count += 1
        heapq.heappush(self._events, (max(time_ms, self.now_ms), self._count, act, told))

    def after(self, delay_ms: int, act: Callable[..., None], *told: Any) -> None:
        """Schedule a call after a delay."""
        self.at(self.now_ms + delay_ms, act, *told)

    def run(self, until_ms: int) -> None:
        """Execute the events up to a time, in order."""
        events = self._events
        while events and events[0][0] <= until_ms:
            self.now_ms, _, act, told = heapq.heappop(events)
            self.done += 1
            act(*told)
        self.now_ms = until_ms


@dataclass(slots=True, eq=False)
class Query:
    """A query of a model or v-model. ended_ms: -1 while it waits."""

    name: str
    born_ms: int
    deadline_ms: int
    model: str = ""
    entry: str = ""
    hops: int = 0
    missed: bool = False
    ended_ms: int = -1
    why: str = ""


class Mirror:
    """The registry as one node, or all nodes with a shared mirror, know it.

    field: the instances. waiters: functions to call when a model's record changes, by model and
    node.
    """

    def __init__(self, make: Callable[[str], MeshModel]) -> None:
        self._make = make
        self.models: dict[str, MeshModel] = {}
        self.vmodels: dict[str, VModel] = {}
        self.field = InstanceIndex()
        self.waiters: dict[str, dict[str, Callable[[str], None]]] = {}

    def read(self, id: str) -> MeshModel:
        """Return the record of a model, made at the first call."""
        held = self.models.get(id)
        if held is None:
            held = self.models[id] = self._make(id)
        return held

    def put_model(self, model: MeshModel) -> None:
        """Replace the record of a model."""
        self.models[model.id] = model
        if model.id in self.waiters:
            for wake in list(self.waiters[model.id].values()):
                wake(model.id)

    def put_instance(self, instance: Instance) -> None:
        """Replace the record of an instance."""
        self.field.put(instance)

    def drop_instance(self, id: str) -> None:
        """Remove an instance."""
        self.field.remove(id)
        for model in [model for model in self.waiters if id in self.read(model).copies]:
            for wake in list(self.waiters[model].values()):
                wake(model)

    def wait(self, model: str, node: str, wake: Callable[[str], None]) -> None:
        """Call `wake` for a node when the record of a model changes."""
        self.waiters.setdefault(model, {})[node] = wake

    def wait_no_more(self, model: str, node: str) -> None:
        """Undo `wait`."""
        held = self.waiters.get(model)
        if held is not None:
            held.pop(node, None)
            if not held:
                del self.waiters[model]

    def list_again(self, store: "Store") -> None:
        """Read all records, after changes were missed."""
        self.models, self.vmodels = dict(store.models), dict(store.vmodels)
        self.field = InstanceIndex(store.instances.values())
        for model in list(self.waiters):
            for wake in list(self.waiters[model].values()):
                wake(model)


@dataclass(eq=False)
class Store:
    """A store with transactions that take time, and mirrors that are updated later.

    A change is a function of the record at the time of the commit, which is what a compare-and-set
    loop amounts to. down_until_ms: nothing commits before. cut: nodes that cannot reach the store.
    """

    clock: Clock
    make: Callable[[str], MeshModel]
    commit_ms: int
    lag_ms: int
    models: dict[str, MeshModel] = field(default_factory=dict)
    vmodels: dict[str, VModel] = field(default_factory=dict)
    instances: dict[str, Instance] = field(default_factory=dict)
    mirrors: dict[int, tuple[Mirror, set[str]]] = field(default_factory=dict)
    cut: set[str] = field(default_factory=set)
    down_until_ms: int = 0
    commits: int = 0

    def read(self, id: str) -> MeshModel:
        """Return the record of a model, made at the first call."""
        held = self.models.get(id)
        if held is None:
            held = self.models[id] = self.make(id)
        return held

    def mirror(self, mirror: Mirror, node: str) -> None:
        """Update a mirror with later changes, on behalf of a node."""
        self.mirrors.setdefault(id(mirror), (mirror, set()))[1].add(node)

    @property
    def down(self) -> bool:
        """True while nothing can commit."""
        return self.clock.now_ms < self.down_until_ms

    def reachable(self, node: str) -> bool:
        """Return whether a node can reach the store."""
        return not self.down and node not in self.cut

    def commit(
        self, node: str, model: str, change: Change, then: Then, still: Callable[[], bool]
    ) -> None:
        """Change a model's record after the commit time; repeated while the store is away.

        then: called with the result. still: returns False to give up.
        """
        self.clock.after(self.commit_ms, self._commit, node, model, change, then, still)

    def _commit(
        self, node: str, model: str, change: Change, then: Then, still: Callable[[], bool]
    ) -> None:
        if not still():
            return
        if not self.reachable(node):
            self.clock.after(100, self._commit, node, model, change, then, still)
            return
        before = self.read(model)
        after = change(before)
        if isinstance(after, MeshModel) and after is not before:
            self.commits += 1
            self.models[model] = after
            self._tell(Mirror.put_model, after)
        then(after)

    def put_instance(self, instance: Instance) -> None:
        """Write the record of an instance."""
        self.commits += 1
        self.instances[instance.id] = instance
        self._tell(Mirror.put_instance, instance)

    def drop_instance(self, id: str) -> None:
        """Delete the record of an instance."""
        if self.instances.pop(id, None) is not None:
            self._tell(Mirror.drop_instance, id)

    def put_vmodel(self, vmodel: VModel | None, id: str) -> None:
        """Write the record of a v-model; None: delete it."""

        def put(mirror: Mirror, told: VModel | None) -> None:
            if told is None:
                mirror.vmodels.pop(id, None)
            else:
                mirror.vmodels[id] = told

        self.commits += 1
        put(self, vmodel)  # type: ignore[arg-type]
        self._tell(put, vmodel)

    def put_models(self, models: tuple[MeshModel, ...]) -> None:
        """Write records of models."""
        for model in models:
            self.models[model.id] = model
            self._tell(Mirror.put_model, model)

    def _tell(self, put: Callable[[Mirror, Any], None], told: Any) -> None:
        for mirror, nodes in self.mirrors.values():
            self.clock.after(self.lag_ms, self._deliver, put, mirror, nodes, told)

    def _deliver(
        self, put: Callable[[Mirror, Any], None], mirror: Mirror, nodes: set[str], told: Any
    ) -> None:
        if len(nodes) > 1 or not nodes <= self.cut:
            put(mirror, told)
