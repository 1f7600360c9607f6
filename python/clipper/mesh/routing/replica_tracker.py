"""Replicas of meshed models as they connect to this node's server and disconnect."""

from typing import Final

from clipper.mesh.node_host import NodeHost
from clipper.mesh.node_loop import NodeLoop
from clipper.mesh.routing.copy_locator import CopyLocator
from clipper.mesh.routing.router import MESH_VERSION, ModelRouter, Route
from clipper.types import VersionedModel

ENQUEUE_S: Final = 0.05  # until a row that was in flight to a lost replica is in the queue again

RECOUNTS: Final = 6  # after a queue was replaced, in the three seconds after it


class ReplicaTracker:
    """Tells routes which replicas serve them. Threads: the event loop, unless stated."""

    def __init__(
        self, host: NodeHost, router: ModelRouter, copies: CopyLocator, loop: NodeLoop
    ) -> None:
        self._host, self._router, self._copies, self._loop = host, router, copies, loop

    def on_replicas_changed(self, id: VersionedModel) -> bool:
        """Count the replicas of a model again. Returns False for models that are not of the mesh.

        Threads: any.
        """
        if id.version != MESH_VERSION or self._router.get(id.name) is None:
            return False
        self._loop.call(self._count, id)
        return True

    def _count(self, id: VersionedModel) -> None:
        numbers = {replica.hello.replica for replica in self._host.replicas(id)}
        route = self._router.set_lenders(id.name, numbers)
        if route is None or self._loop.stopping:
            return
        if route.served:
            self._copies.connected(route)
        else:
            self._check_waiting(route)
            self._loop.call_later(ENQUEUE_S, self._check_waiting, route)

    def _check_waiting(self, route: Route) -> None:
        """Search another copy if rows wait for the last replica, which has gone."""
        is_idle = route.served or route.miss_reported
        if not is_idle and route.core.waiting and not self._loop.stopping:
            route.miss_reported = True
            self._copies.miss(route)

    def check_row_type(self, route: Route) -> None:
        """Keep a row type that was guessed from a first query if it led to outputs, else drop it.

        So a first query of a wrong shape does not decide which later queries are refused. Called
        before each query while the type is a guess, and now and then. Threads: any.
        """
        counts = route.core.engine.model_counts(route.core.index)
        if counts["evaluated"]:
            route.type_known = True
        elif counts["failed"] or (route.served and counts["submitted"] and not counts["in_flight"]):
            why = f"no output has come of rows of {route.core.describe_input()}"
            if self._router.replace(route, route.record.input, why):
                self._loop.call(self._end_replicas, VersionedModel(route.id, MESH_VERSION))

    def _end_replicas(self, id: VersionedModel, again: int = RECOUNTS) -> None:
        """Disconnect the replicas of a replaced queue; they connect again at the next query.

        One that has just connected may not be listed yet, so this is done some times more.
        """
        route = self._router.get(id.name)
        if route is None or self._loop.stopping:
            return
        if not route.core.engine.model_counts(route.core.index)["replicas"]:
            for replica in self._host.replicas(id):
                self._host.disconnect(id, replica.hello.replica)
        self._count(id)
        if again:
            self._loop.call_later(
                ENQUEUE_S * 2 ** (RECOUNTS - again), self._end_replicas, id, again - 1
            )
