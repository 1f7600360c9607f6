"""Reports of model use, from the nodes that get queries to those that hold copies."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Final

from clipper.mesh.decisions.usage import UsageCounter
from clipper.mesh.loading.loader import ModelLoader
from clipper.mesh.registry import now_ms
from clipper.mesh.routing.router import ModelRouter, Route
from clipper.mesh.tasks.registration import Registration
from clipper.mesh.transport.peers import Peers

REPORT_S: Final = 1.0
REPORT_MODELS_MAX: Final = 5000  # in one message


class UsageRecorder:
    """Adds reported uses to this node's counts. Threads: the event loop."""

    def __init__(self, loader: ModelLoader, usage: UsageCounter) -> None:
        self._loader, self._usage = loader, usage

    def add(self, entries: Iterable[Any]) -> None:
        """Add entries of (model, last use in ms, queries, forecast queue time in ms).

        Nodes of an older version leave out the queue time.
        """
        for id, used_ms, count, *queue_ms in entries:
            at_ms = min(int(used_ms), now_ms())
            self._loader.cache.touch(str(id), at_ms, int(count))
            waited_ms = count * float(queue_ms[0]) if queue_ms else 0.0
            self._usage.note(str(id), at_ms, int(count), waited_ms)


class UsageReporter:
    """Tells the nodes whose copies answered queries of this node how many there were.

    on_untyped: called with each used route whose row type nobody has stated. Threads: the event
    loop.
    """

    def __init__(
        self,
        router: ModelRouter,
        loader: ModelLoader,
        peers: Peers,
        registration: Registration,
        recorder: UsageRecorder,
        on_untyped: Callable[[Route], None],
    ) -> None:
        self._router, self._loader, self._peers = router, loader, peers
        self._registration, self._recorder, self._on_untyped = registration, recorder, on_untyped

    async def report(self) -> None:
        """Report the queries since the last call."""
        reports: dict[int, list[list[object]]] = defaultdict(list)
        for route, queries in self._router.touched.take():
            if not route.type_known:
                self._on_untyped(route)
            lenders = route.lenders
            waited, route.waited = min(route.waited, queries), 0
            self._loader.counts.count_queries(queries - waited, waited)
            share, queue_ms = max(1, queries // max(1, len(lenders))), route.queue_ms()
            for number in lenders:
                reports[number].append([route.id, route.used_ms, share, queue_ms])
        ids = {instance.number: instance.id for instance in self._registration.instances()}
        for number, entries in reports.items():
            id = ids.get(number)
            if id == self._registration.id:
                self._recorder.add(entries)
            elif id is not None:
                for at in range(0, len(entries), REPORT_MODELS_MAX):
                    used = entries[at : at + REPORT_MODELS_MAX]
                    await self._peers.notify(id, event="digest", used=used)
