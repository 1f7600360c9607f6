"""The other nodes, as this one talks to them: one channel to each, dialled when it is first needed,
and a door for theirs.

Verbs: `lend` {model, address, token, load, used_ms, copies}: serve that model to the server at
`address`, and load it first if need be; `unlend` {model, address}; `load` {model, used_ms, copies};
`explain` {model}.  Events: `digest` {used: [[model, used_ms, count], ...]}, what of theirs was
asked here.  Threads: all on the mesh's event loop.
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
    """address_of: where an instance listens, by its id; empty when it is not known.  serve: answers
    their requests. heard: is told their events."""

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
        return self._door.address

    async def open(self) -> None:
        await self._door.open()

    def close(self) -> None:
        self._door.close()
        for channel in tuple(self._channels.values()):
            channel.close()
        self._channels.clear()

    def _came(self, channel: PeerChannel) -> None:
        channel.serve, channel.heard = self._serve, self._heard

    async def ask(self, instance: str, verb: str, timeout_s: float, **fields: Any) -> Message:
        """Raises Failed; Lost when it cannot be reached."""
        channel = await self._to(instance)
        return await channel.request(verb, timeout_s, **fields)

    async def tell(self, instance: str, **message: Any) -> None:
        """Without an answer; nothing when it cannot be reached."""
        with contextlib.suppress(ConnectionLost):
            (await self._to(instance)).tell(**message)

    def forget(self, instance: str) -> None:
        """It is dead: whoever waits for its answer need not."""
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
