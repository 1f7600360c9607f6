"""Drain of a node that stops: other nodes load the models that it alone holds."""

import asyncio
from collections.abc import Callable
from typing import Final

from clipper.errors import ClipperError
from clipper.mesh.decisions import maintenance
from clipper.mesh.decisions.claims import loaded_copies
from clipper.mesh.loading.loader import ModelLoader
from clipper.mesh.registry import Registry, now_ms
from clipper.mesh.reports import MigrationProgress
from clipper.mesh.routing.copy_locator import CopyLocator
from clipper.mesh.tasks.registration import Registration
from clipper.mesh.transport.channel import RequestFailed
from clipper.settings.mesh import MeshSettings

CONCURRENT_MOVES_MAX: Final = 16


class Drain:
    """Moves recently used models to other nodes. Threads: the event loop."""

    def __init__(
        self,
        settings: MeshSettings,
        registry: Registry,
        loader: ModelLoader,
        copies: CopyLocator,
        registration: Registration,
    ) -> None:
        self._settings, self._registry, self._loader = settings, registry, loader
        self._copies, self._registration = copies, registration

    async def run(self, progress: Callable[[MigrationProgress], None]) -> MigrationProgress:
        """Refuse new loads and move models for at most `mesh.drain_s`; return what was done."""
        self._loader.set_stopping(True)
        try:
            await self._registration.publish()
        except ClipperError:  # the store is away, so no other node could claim a model
            return MigrationProgress(0, 0, 0, 0)
        moves = self._moves()
        done = failed = 0
        gate = asyncio.Semaphore(CONCURRENT_MOVES_MAX)

        def now() -> MigrationProgress:
            return MigrationProgress(len(moves), done, failed, len(moves) - done - failed)

        async def move_one(move: maintenance.Move) -> None:
            nonlocal done, failed
            async with gate:
                moved = await self._move(move)
            done += moved
            failed += not moved
            progress(now())

        progress(now())
        try:
            async with asyncio.timeout(self._settings.drain_s):
                await asyncio.gather(*(move_one(move) for move in moves))
        except TimeoutError:
            pass
        return now()

    def _moves(self) -> list[maintenance.Move]:
        me, instances = self._registration.id, self._registration.instances()
        if all(instance.id == me or instance.stopping for instance in instances):
            return []
        resident = {
            id: (model.size_bytes, model.used_ms)
            for id in self._loader.held
            if (model := self._loader.cache.get(id)) is not None
        }
        mine = [(id, self._registry.models.get(id)) for id in resident]
        view = maintenance.MeshView(me, instances, mine, resident)
        return [move for move in maintenance.migration(view, now_ms()) if move.wait]

    async def _move(self, move: maintenance.Move) -> bool:
        """Load a model on another node, then evict it here. Returns whether that succeeded."""
        record = self._registry.models.get(move.model)
        if record is None:
            return True
        copies = 1 + len(loaded_copies(record, self._registry.alive()))
        try:
            await self._copies.load(
                move.model,
                move.used_ms,
                copies=copies,
                until_s=self._settings.drain_s + 1.0,
                exclude=(self._registration.id,),
            )
        except (RequestFailed, ClipperError, TimeoutError):
            return False
        await self._loader.evict(move.model, "it was moved: this node stops")
        return True
