"""Connections to the other nodes: one channel to each, opened when it is first needed.

Requests: `lend` {model, address, token, load, used_ms, copies}: serve the model to the server at
`address`, after loading it if `load`; `unlend` {model, address}; `load` {model, used_ms, copies};
`explain` {model}. Events: `digest` {used: [[model, used_ms, count, queue_ms, count of all copies],
...]}: uses of the peer's copies here. Threads: all on the event loop of the node.
"""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

from clipper.mesh.transport.channel import (
    ChannelServer,
    ConnectionLost,
    Message,
    OnEvent,
    PeerChannel,
    Serve,
    dial,
)
from clipper.mesh.transport.network import SOCKETS, Network


class Peers:
    """Requests and events to other nodes, by instance id.

    serve: answers their requests. on_event: called with their events. address_of: returns the
    address of an instance; empty if unknown. network: that connects the nodes.
    """

    def __init__(
        self,
        me: str,
        address: str,
        token: str,
        folder: Path,
        serve: Serve,
        on_event: OnEvent,
        address_of: Callable[[str], str],
        network: Network = SOCKETS,
    ) -> None:
        self._me, self._token, self._address_of = me, token, address_of
        self._network = network
        self._server = ChannelServer(
            address, token, folder, "peers", serve=serve, on_event=on_event, network=network
        )
        self._channels: dict[str, PeerChannel] = {}
        self._connecting: dict[str, asyncio.Lock] = {}

    @property
    def address(self) -> str:
        """The address that other nodes connect to."""
        return self._server.address

    async def open(self) -> None:
        """Start to accept connections."""
        await self._server.open()

    def close(self) -> None:
        """Close all connections."""
        self._server.close()
        for channel in tuple(self._channels.values()):
            channel.close()
        self._channels.clear()

    async def request(
        self, instance: str, verb: str, timeout_s: float, **fields: object
    ) -> Message:
        """Send a request and return the answer. RequestFailed; ConnectionLost."""
        channel = await self._to(instance)
        return await channel.request(verb, timeout_s, **fields)

    async def notify(self, instance: str, **message: object) -> None:
        """Send an event; ignored when the instance cannot be reached."""
        with contextlib.suppress(ConnectionLost):
            (await self._to(instance)).notify(**message)

    def forget(self, instance: str) -> None:
        """Close the connection to a dead instance; its pending requests end."""
        self._connecting.pop(instance, None)
        channel = self._channels.pop(instance, None)
        if channel is not None:
            channel.close()

    async def _to(self, instance: str) -> PeerChannel:
        channel = self._channels.get(instance)
        if channel is not None and not channel.closed.is_set():
            return channel
        async with self._connecting.setdefault(instance, asyncio.Lock()):
            channel = self._channels.get(instance)
            if channel is not None and not channel.closed.is_set():
                return channel
            address = self._address_of(instance)
            if not address:
                raise ConnectionLost(f"instance {instance!r} is not there")
            channel = self._channels[instance] = await dial(
                address,
                {"token": self._token, "instance": self._me},
                network=self._network,
            )
            return channel
