"""Parts of a simulated mesh without decisions: virtual time, the store, its mirrors, queries."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from clipper.mesh.decisions.claims import ClaimRefused
from clipper.mesh.decisions.placement import InstanceIndex
from clipper.mesh.records import Instance, MeshModel

Then = Callable[[MeshModel | ClaimRefused], None]
Change = Callable[[MeshModel], MeshModel | ClaimRefused]


class Clock:
    """A virtual clock with a queue of events. Times are wall clock milliseconds."""

    def __init__(self, start_ms: int) -> None:
        self.now_ms = start_ms
        self._events: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self.done = 0

    def at(self, time_ms: int, act: Callable[..., None], *arguments: Any) -> None:
        """Schedule a call at a time, or now if that has passed."""
        self._count += 1
        heapq.heappush(self._events, (max(time_ms, self.now_ms), self._count, act, arguments))

    def after(self, delay_ms: int, act: Callable[..., None], *arguments: Any) -> None:
        """Schedule a call after a delay."""
        self.at(self.now_ms + delay_ms, act, *arguments)

    def run(self, until_ms: int) -> None:
        """Execute the events up to a time, in order."""
        events = self._events
        while events and events[0][0] <= until_ms:
            self.now_ms, _, act, arguments = heapq.heappop(events)
            self.done += 1
            act(*arguments)
        self.now_ms = until_ms


@dataclass(slots=True, eq=False)
class Query:
    """A query of a model. ended_ms: -1 while it waits."""

    model: str
    born_ms: int
    deadline_ms: int
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


@dataclass(eq=False)
class Store:
    """A store with transactions that take time, and mirrors that are updated later.

    A change is a function of the record at the time of the commit, which is what a compare-and-set
    loop amounts to.
    """

    clock: Clock
    make: Callable[[str], MeshModel]
    commit_ms: int
    lag_ms: int
    models: dict[str, MeshModel] = field(default_factory=dict)
    instances: dict[str, Instance] = field(default_factory=dict)
    mirrors: list[Mirror] = field(default_factory=list)

    def read(self, id: str) -> MeshModel:
        """Return the record of a model, made at the first call."""
        held = self.models.get(id)
        if held is None:
            held = self.models[id] = self.make(id)
        return held

    def commit(self, model: str, change: Change, then: Then) -> None:
        """Change a model's record after the commit time. then: called with the result."""
        self.clock.after(self.commit_ms, self._commit, model, change, then)

    def _commit(self, model: str, change: Change, then: Then) -> None:
        before = self.read(model)
        after = change(before)
        if isinstance(after, MeshModel) and after is not before:
            self.models[model] = after
            self._tell(Mirror.put_model, after)
        then(after)

    def put_instance(self, instance: Instance) -> None:
        """Write the record of an instance."""
        self.instances[instance.id] = instance
        self._tell(Mirror.put_instance, instance)

    def _tell(self, put: Callable[[Mirror, Any], None], arguments: Any) -> None:
        for mirror in self.mirrors:
            self.clock.after(self.lag_ms, put, mirror, arguments)
