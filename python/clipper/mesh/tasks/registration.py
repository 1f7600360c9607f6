"""The entry of this node in the registry: its record, kept alive by a lease."""

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Final

from clipper.errors import StoreError
from clipper.host_port import join_host_port
from clipper.mesh.decisions import claims, maintenance
from clipper.mesh.decisions.usage import UsageCounter
from clipper.mesh.loading.loader import ModelLoader
from clipper.mesh.node_loop import NodeLoop
from clipper.mesh.records import Instance
from clipper.mesh.registry import Registry, is_taken, now_ms
from clipper.mesh.tasks.election import Election
from clipper.mesh.transport.channel import is_gone
from clipper.mesh.transport.network import SOCKETS, Network
from clipper.settings.mesh import MeshSettings
from clipper.types import VERSION

RETRY_S: Final = 0.2
# leases until a node of the same name that does not answer counts as alive
NAME_LEASES: Final = 2.0
_log = logging.getLogger(__name__)


class Registration:
    """Publishes this node's record and lists the nodes that are alive.

    addresses: returns the address of the server for replicas, and the node's address for peers.
    Threads: `record` and `instances` any; the rest on the event loop.
    """

    def __init__(
        self,
        settings: MeshSettings,
        registry: Registry,
        loader: ModelLoader,
        usage: UsageCounter,
        election: Election,
        loop: NodeLoop,
        addresses: Callable[[], tuple[str, str]],
        started_ms: int,
        network: Network = SOCKETS,
    ) -> None:
        self._settings, self._registry, self._loader = settings, registry, loader
        self._usage, self._election, self._loop = usage, election, loop
        self._addresses, self._started_ms, self._network = addresses, started_ms, network
        self._host = socket.gethostname()
        self._published: tuple[Instance, int] | None = None  # the record, and when it was written

    @property
    def id(self) -> str:
        """The id of this node."""
        return self._loader.me

    def record(self) -> Instance:
        """Return this node's record as it is now."""
        settings, loader = self._settings, self._loader
        address, peers = self._addresses()
        return Instance(
            self.id,
            loader.number,
            advertised(peers, settings.advertise),
            advertised(address, settings.advertise),
            host=self._host,
            labels=settings.labels,
            types=loader.types,
            zone=settings.zone,
            version=VERSION,
            started_ms=self._started_ms,
            capacity_bytes=loader.cache.capacity_bytes,
            used_bytes=loader.cache.used_bytes,
            models=len(loader.cache),
            models_max=loader.cache.models_max,
            lru_ms=loader.cache.lru_ms(now_ms()),
            loading=loader.loading,
            queued=len(loader.queue),
            loading_max=loader.loading_max,
            rate=self._usage.rate,
            stopping=loader.stopping,
        )

    def instances(self) -> list[Instance]:
        """Return the records of the nodes that are alive, by id."""
        found = {instance.id: instance for instance in self._registry.instances.values()}
        if not self._registry.is_fenced:
            found[self.id] = self.record()
        return [found[id] for id in sorted(found)]

    async def enter(self) -> None:
        """Write this node's record, and remove what an earlier node of its name had claimed.

        AlreadyExists while another node of this name is alive.
        """
        if self._settings.name:
            await self._wait_for_name()
            mine = [m.id for m in self._registry.models.values() if self.id in m.copies]
            for id in mine:
                await self._loop.run_blocking(
                    self._registry.change, id, lambda model: claims.without(model, self.id)
                )
        await self._enter_registry()

    async def _enter_registry(self) -> None:
        """Write this node's record with a new lease, and stand for election; or do neither.

        A candidate whose writing was not answered may be in the store, and would lead: it goes with
        its lease.
        """
        record = self.record()
        await self._loop.run_blocking(self._registry.enter, record)
        self._published = record, now_ms()
        try:
            await self._election.stand()
        except StoreError:
            await self._loop.run_blocking(self._registry.leave)
            raise

    async def _wait_for_name(self) -> None:
        """Wait until the record of a killed node of this name has expired or can be removed."""
        loop = asyncio.get_running_loop()
        until = loop.time() + NAME_LEASES * self._settings.lease_s
        while True:
            other = await self._loop.run_blocking(self._registry.living, self.record())
            if other is None:
                return
            if await is_gone(other.peers, self._network):
                await self._loop.run_blocking(self._registry.bury, other)
                return
            if loop.time() > until:
                raise is_taken(other)
            await asyncio.sleep(RETRY_S)

    async def publish(self) -> None:
        """Write this node's record."""
        await self._loop.run_blocking(self._registry.publish, self.record())

    async def refresh(self) -> None:
        """Write this node's record if it has changed enough; enter again if the lease is lost."""
        if self._loop.stopping:
            return
        if self._registry.is_fenced:
            await self._enter_again()
            return
        now, record = now_ms(), self.record()
        if self._published is not None:
            published, published_ms = self._published
            if not maintenance.worth_publishing(
                published, record, published_ms, now, self._settings
            ):
                return
        await self._loop.run_blocking(self._registry.publish, record)
        self._published = record, now

    async def _enter_again(self) -> None:
        """Get a new lease after other nodes took this one for dead, and claim its copies again."""
        try:
            await self._election.resign()
            await self._enter_registry()
        except StoreError:
            return
        _log.warning("instance %s had lost its lease, and is in the mesh again", self.id)
        for id in tuple(self._loader.held):
            await self._loader.reclaim(id)

    async def leave(self) -> None:
        """Withdraw from the election and remove this node's record."""
        await self._election.resign()
        await self._loop.run_blocking(self._registry.leave)


def advertised(address: str, host: str) -> str:
    """Return a TCP address with its host replaced by `host`; other addresses unchanged."""
    if not host or not address.startswith("tcp:"):
        return address
    return f"tcp:{join_host_port(host, address.rpartition(':')[2])}"
