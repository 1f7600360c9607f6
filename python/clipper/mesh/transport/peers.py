"""Connections to the other nodes: one channel to each, opened when it is first needed.

Requests: `lend` {model, address, token, load, used_ms, copies}: serve the model to the server at
`address`, after loading it if `load`; `unlend` {model, address}; `load` {model, used_ms, copies};
`explain` {model}. Events: `digest` {used: [[model, used_ms, count, queue_ms], ...]}: uses of the
peer's copies here. Threads: all on the event loop of the node.
"""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clipper.mesh.transport.channel import (
    ChannelServer,
    ConnectionLost,
    Message,
    PeerChannel,
    Serve,
    dial,
)


class Peers:
    """Requests and events to other nodes, by instance id.

    serve: answers their requests. heard: called with their events. address_of: returns the address
    of an instance; empty if unknown.
    """

    def __init__(
        self, me: str, address: str, token: str, folder: Path, serve: Serve,
        heard: Callable[[Message], None], address_of: Callable[[str], str],
    ) -> None:  # fmt: skip
        self._me, self._token, self._serve, self._address_of, self._heard = (
            me,
            token,
            serve,
            address_of,
            heard,
        )
        self._door = ChannelServer(address, token, self._came, folder, "peers")
        self._channels: dict[str, PeerChannel] = {}
        self._dialling: dict[str, asyncio.Lock] = {}

    @property
    def address(self) -> str:
        """The address that other nodes connect to."""
        return self._door.address

    async def open(self) -> None:
        """Start to accept connections."""
        await self._door.open()

    def close(self) -> None:
        """Close all connections."""
        self._door.close()
        for channel in tuple(self._channels.values()):
            channel.close()
        self._channels.clear()

    def _came(self, channel: PeerChannel) -> None:
        channel.serve, channel.heard = self._serve, self._heard

    async def ask(self, instance: str, verb: str, timeout_s: float, **fields: Any) -> Message:
        """Send a request and return the answer. RequestFailed; ConnectionLost."""
        channel = await self._to(instance)
        return await channel.request(verb, timeout_s, **fields)

    async def tell(self, instance: str, **message: Any) -> None:
        """Send an event; ignored when the instance cannot be reached."""
        with contextlib.suppress(ConnectionLost):
            (await self._to(instance)).tell(**message)

    def forget(self, instance: str) -> None:
        """Close the connection to a dead instance; its pending requests end."""
        self._dialling.pop(instance, None)
        channel = self._channels.pop(instance, None)
        if channel is not None:
            channel.close()

    async def _to(self, instance: str) -> PeerChannel:
        channel = self._channels.get(instance)
        if channel is not None and not channel.closed.is_set():
            return channel
        async with self._dialling.setdefault(instance, asyncio.Lock()):
            channel = self._channels.get(instance)
            if channel is not None and not channel.closed.is_set():
                return channel
            address = self._address_of(instance)
            if not address:
                raise ConnectionLost(f"instance {instance!r} is not there")
            channel = self._channels[instance] = await dial(
                address, {"token": self._token, "instance": self._me}
            )
            return channel
