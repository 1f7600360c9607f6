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
        """Add entries of (model, last use in ms, queries of the copy here, forecast queue time in
        ms, queries of all copies).

        Nodes of an older version leave out the last, or the last two.
        """
        for id, used_ms, here, *more in entries:
            at_ms = min(int(used_ms), now_ms())
            count = int(more[1] if more[1:] else here)
            waited_ms = count * float(more[0]) if more else 0.0
            self._loader.cache.touch(str(id), at_ms, int(here))
            self._usage.note(str(id), at_ms, count, waited_ms, here=int(here))


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
            if not lenders:  # it may be worth a load the more it is used
                self._loader.cache.touch(route.id, route.used_ms, queries)
            for number in lenders:
                reports[number].append([route.id, route.used_ms, share, queue_ms, queries])
        ids = {instance.number: instance.id for instance in self._registration.instances()}
        for number, entries in reports.items():
            id = ids.get(number)
            if id == self._registration.id:
                self._recorder.add(entries)
            elif id is not None:
                for at in range(0, len(entries), REPORT_MODELS_MAX):
                    used = entries[at : at + REPORT_MODELS_MAX]
                    await self._peers.notify(id, event="digest", used=used)
