"""What a node does again and again: tell the others how it is and what was used, and look whether
all is as it should be."""

import asyncio
import logging
import os
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from clipper.errors import ClipperError, StoreError
from clipper.mesh.decisions import maintenance
from clipper.mesh.decisions.placement import Constraint
from clipper.mesh.node.leader_tasks import Leading
from clipper.mesh.records import Instance
from clipper.mesh.registry import now_ms
from clipper.mesh.routing.router import Route
from clipper.mesh.transport.channel import Message

DIGEST_S: Final = 1.0
DIGEST_MODELS: Final = 5000  # in one message
_log = logging.getLogger(__name__)


class Tending(Leading):
    _tending: list["asyncio.Task[None]"]
    _published: tuple[Instance, int]
    _constraints_at = (0, 0)
    _constraints_told = ""

    def _start_tending(self) -> None:
        settings = self.settings
        self._published = self.here(), now_ms()
        self._read_constraints()
        every: list[tuple[float, Callable[[], Awaitable[None]]]] = [
            (min(DIGEST_S, settings.rate_s), self._count_uses),
            (min(0.25, settings.publish_s, settings.lease_s / 8), self._keep_record),
            (settings.rate_s, self._look_at_rates),
            (settings.janitor_s, self._clean),
            (settings.reaper_s, self._reap),
        ]
        loop = asyncio.get_running_loop()
        self._tending = [loop.create_task(self._again(each_s, what)) for each_s, what in every]

    def _stop_tending(self) -> None:
        for task in self._tending:
            task.cancel()

    async def _again(self, each_s: float, what: Callable[[], Awaitable[None]]) -> None:
        while not self._stopping:
            await asyncio.sleep(each_s)
            try:
                await what()
            except ClipperError as error:
                _log.info("the mesh: %s", error)
            except Exception:
                _log.exception("the mesh's %s failed", what.__name__)

    # -- use

    async def _count_uses(self) -> None:
        """Queries that came in here since: to those whose copies answered them."""
        digests: dict[int, list[list[Any]]] = defaultdict(list)
        for route, asked in self.routes.touched.take():
            if not route.type_known:
                self.renew_untyped(route)
            lenders = route.lenders
            waited, route.waited = min(route.waited, asked), 0
            self.local.counts.asked(asked - waited, waited)
            share, queue_ms = max(1, asked // max(1, len(lenders))), route.queue_ms()
            for number in lenders:
                digests[number].append([route.id, route.used_ms, share, queue_ms])
        by_number = {instance.number: instance.id for instance in self.instances()}
        for number, used in digests.items():
            id = by_number.get(number)
            if id == self._id:
                self._used(used)
            elif id is not None:
                for at in range(0, len(used), DIGEST_MODELS):
                    await self.peers.tell(id, event="digest", used=used[at : at + DIGEST_MODELS])

    def hear(self, message: Message) -> None:
        """An event of another node."""
        if message.get("event") == "digest":
            self._used(message.get("used", ()))

    def _used(self, used: Any) -> None:
        for id, used_ms, count, *queue_ms in used:
            at_ms = min(int(used_ms), now_ms())
            self.local.residents.touch(str(id), at_ms, int(count))
            waited_ms = (
                count * float(queue_ms[0]) if queue_ms else 0.0
            )  # a node of an older version says nothing of it
            self.uses.note(str(id), at_ms, int(count), waited_ms)

    @abstractmethod
    def renew_untyped(self, route: Route) -> None: ...

    # -- this node's record and lease

    async def _keep_record(self) -> None:
        if self._stopping:
            return
        self._read_constraints()
        if self.registry.is_fenced:
            await self._enter_again()
            return
        here = self.here()
        told, told_ms = self._published
        if maintenance.worth_publishing(told, here, told_ms, now_ms(), self.settings):
            await self.run_away(self.registry.publish, here)
            self._published = here, now_ms()

    def _read_constraints(self) -> None:
        """The file of them, when it has changed. One that cannot be read leaves those before."""
        path = self.settings.constraints
        if not path:
            return
        try:
            stat = os.stat(path)
            if (stat.st_mtime_ns, stat.st_size) == self._constraints_at:
                return
            self._constraints_at = stat.st_mtime_ns, stat.st_size
            self.supply.constraints = msgspec.json.decode(
                Path(path).read_bytes(), type=dict[str, Constraint]
            )
        except (OSError, msgspec.MsgspecError) as error:
            if self._constraints_told != str(error):
                self._constraints_told = str(error)
                _log.error(
                    "mesh.constraints: %s cannot be read, so those before stay: %s", path, error
                )

    async def _enter_again(self) -> None:
        """The lease was lost: the others think this node dead. With a new one, what is held here is
        claimed again."""
        try:
            await self._resign()
            await self.run_away(self.registry.enter, self.here())
            await self._stand()
        except StoreError:
            return
        self._published = self.here(), now_ms()
        _log.warning("instance %s had lost its lease, and is in the mesh again", self._id)
        for id in tuple(self.local.held):
            await self._reclaim(id)

    # -- looking in

    def stats(self) -> dict[str, Any]:
        """Counters and gauges of this node: never a row a model. awaits: why it is not in the mesh
        yet; then there is no more."""
        if not self._begun.is_set():
            return {"instance": self._id, "awaits": self.awaits}
        local, here = self.local, self.here()
        return {
            "instance": self._id,
            "instances": len(self.registry.instances),
            "models_registered": len(self.registry.models),
            "vmodels": len(self.registry.vmodels),
            "models_loaded": here.models,
            "models_asked": len(self.routes),
            "capacity_bytes": here.capacity_bytes,
            "used_bytes": here.used_bytes,
            "lru_ms": here.lru_ms,
            "loading": here.loading,
            "queued": here.queued,
            "misses": self.supply.misses,
            **local.counts.stats(),
            "leader": self.is_leader,
            **(self.seen if self.is_leader else {}),
            "stale_s": self.registry.models.stale_s,
            "fenced": self.registry.is_fenced,
            "stopping": here.stopping,
            "awaits": "",
            "other_history": self.registry.other_history,
        }
