"""Leaving in good order: what was used lately is loaded elsewhere before this node gives it up."""

import asyncio
from collections.abc import Callable
from typing import Final

from clipper.errors import ClipperError
from clipper.mesh.decisions import maintenance
from clipper.mesh.decisions.claims import loaded_copies
from clipper.mesh.facade import MigrationProgress
from clipper.mesh.node.parts import Parts
from clipper.mesh.registry import now_ms
from clipper.mesh.transport.channel import Failed

MIGRATING_MAX: Final = 16  # models moved at once


class Draining(Parts):
    def drain(
        self, progress: Callable[[MigrationProgress], None] | None = None
    ) -> MigrationProgress:
        """Take no more models, and have those used lately loaded elsewhere, within `mesh.drain_s`;
        then give them up here. What is left stays until close()."""
        self._check_open()
        found: MigrationProgress = self._do(self._drain(progress or (lambda _: None)))
        return found

    def drain_for_good(self) -> None:
        """As this node stops."""
        if self._begun.is_set() and not self._stopping:
            self._do(self._drain(lambda _: None))

    async def _drain(self, progress: Callable[[MigrationProgress], None]) -> MigrationProgress:
        self.local.stopping = True
        try:
            await self.run_away(self.registry.publish, self.here())
        except ClipperError:  # nobody else can be told, and nobody could claim
            return MigrationProgress(0, 0, 0, 0)
        resident = {
            id: (r.size_bytes, r.used_ms)
            for id in self.local.held
            if (r := self.local.residents.get(id))
        }
        mine = [(id, self.registry.models.get(id)) for id in resident]
        view = maintenance.View(self._id, self.instances(), mine, resident)
        moves = [move for move in maintenance.migration(view, now_ms()) if move.wait]
        if all(instance.id == self._id or instance.stopping for instance in view.instances):
            moves = []
        self._done, self._failed_moves, total = 0, 0, len(moves)

        def now() -> MigrationProgress:
            return MigrationProgress(
                total, self._done, self._failed_moves, total - self._done - self._failed_moves
            )

        gate = asyncio.Semaphore(MIGRATING_MAX)

        async def move_one(move: maintenance.Move) -> None:
            async with gate:
                moved = await self._move(move)
            self._done += moved
            self._failed_moves += not moved
            progress(now())

        progress(now())
        try:
            async with asyncio.timeout(self.settings.drain_s):
                await asyncio.gather(*(move_one(move) for move in moves))
        except TimeoutError:
            pass
        return now()

    _done = 0
    _failed_moves = 0

    async def _move(self, move: maintenance.Move) -> bool:
        """Whether another has it now; then it is given up here."""
        record = self.registry.models.get(move.model)
        if record is None:
            return True
        copies = 1 + len(loaded_copies(record, self.registry.alive()))
        try:
            await self.supply.load(
                move.model,
                move.used_ms,
                copies=copies,
                until_s=self.settings.drain_s + 1.0,
                exclude=(self._id,),
            )
        except (Failed, ClipperError, TimeoutError):
            return False
        await self.local.evict(move.model, "it was moved: this node stops")
        return True
