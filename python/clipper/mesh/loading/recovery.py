"""Recovery of the models of a host that has ended. Threads: all on the event loop of the node."""

import asyncio
import logging

from clipper.component import Tasks
from clipper.mesh.loading.isolation import Isolation
from clipper.mesh.loading.loader import ModelLoader
from clipper.mesh.loading.model_host import SupervisedHost
from clipper.mesh.registry import now_ms
from clipper.mesh.transport.channel import RequestFailed

_log = logging.getLogger(__name__)


class Recovery:
    """Loads the models of dead hosts again. me: this instance's id."""

    def __init__(self, me: str, loader: ModelLoader, isolation: Isolation, tasks: Tasks) -> None:
        self._me, self._loader, self._isolation = me, loader, isolation
        self._tasks = tasks

    def host_lost(self, host: SupervisedHost) -> None:
        """Load the models of a dead host again; their claims stay, and waiting queries are served
        then.

        Models that were at work are loaded each into a host of its own. A model that was in such a
        host has failed.
        """
        alone = self._isolation.is_alone_in(host)
        if not alone:
            self._isolation.suspect(host.blamed)
        for id, held in self._loader.host_lost(host):
            if alone:
                why = f"it ended, or hung, its process in {self._me}, where it was alone"
                self._loader.crashed(id, why)
            else:
                self._tasks.spawn(
                    self._load_again(None if id in host.blamed else host.is_ready, id, held.lent)
                )

    def acquit(self, id: str, host: SupervisedHost) -> bool:
        """Move a model from its own host back to the shared one: it has ended no process for a
        while. Return False if it is not loaded there, or not yet.
        """
        copy = self._loader.held.get(id)
        if copy is None or copy.host is not host:
            return False
        for _, held in self._loader.host_lost(host):
            self._tasks.spawn(self._move_back(id, held.lent))
        return True

    async def _move_back(self, id: str, lent: dict[str, str]) -> None:
        await self._isolation.release(id)
        await self._load_again(None, id, lent)

    async def _load_again(self, ready: asyncio.Event | None, id: str, lent: dict[str, str]) -> None:
        """Load a model again. ready: set when its host is ready; None: it goes to another host."""
        resident = self._loader.cache.get(id)
        used_ms = resident.used_ms if resident else now_ms()
        if ready is not None:
            await ready.wait()
        self._loader.load_again(id, used_ms)
        try:
            await self._loader.load(id, used_ms, waiting=bool(lent))
            for address, token in lent.items():
                await self._loader.lend(id, address, token)
        except RequestFailed as failure:
            _log.warning("model %r is not loaded again: %s", id, failure.why)
