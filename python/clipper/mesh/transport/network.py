"""Connections of byte streams between nodes, and between a node and its model hosts.

`SocketNetwork` makes sockets; a simulation gives a node another network.
"""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, Protocol

from clipper.serving.models.address import Listener, listen

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
OnConnection = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Listening(Protocol):
    """A place that accepts connections. Threads: one event loop."""

    @property
    def address(self) -> str:
        """The address that callers connect to."""

    async def open(self, on_connection: OnConnection) -> None:
        """Start to accept connections."""

    def stop(self) -> None:
        """Accept no more connections."""

    def remove(self) -> None:
        """Free the address."""


class Network(Protocol):
    """Connects and listens. Threads: one event loop."""

    async def connect(self, address: str) -> Streams:
        """Connect to an address. OSError, ValueError."""

    def listen(self, address: str, folder: Path, name: str) -> Listening:
        """Return a listener at an address; empty: at the socket `name` in the folder."""


class SocketListening:
    """A listening socket."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._server: asyncio.Server | None = None

    @property
    def address(self) -> str:
        """The address that callers connect to."""
        return self._listener.connect

    async def open(self, on_connection: OnConnection) -> None:
        """Start to accept connections."""
        path = self._listener.path
        family = socket.AF_UNIX if path else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM, fileno=os.dup(self._listener.fd))
        start = asyncio.start_unix_server if path else asyncio.start_server
        self._server = await start(on_connection, sock=sock)

    def stop(self) -> None:
        """Accept no more connections."""
        if self._server is not None:
            self._server.close()

    def remove(self) -> None:
        """Close the socket and remove its file."""
        self._listener.remove()
        os.close(self._listener.fd)


class SocketNetwork:
    """Sockets: `unix:/path` and `tcp:host:port`."""

    async def connect(self, address: str) -> Streams:
        """Connect to an address. OSError, ValueError."""
        if address.startswith("unix:"):
            return await asyncio.open_unix_connection(address.removeprefix("unix:"))
        host, _, port = address.removeprefix("tcp:").removeprefix("//").rpartition(":")
        return await asyncio.open_connection(host.strip("[]"), int(port))

    def listen(self, address: str, folder: Path, name: str) -> Listening:
        """Listen at an address; empty: at the socket `name` in the folder."""
        address = f"unix:{folder / name}.sock" if not address else address.replace("tcp:", "", 1)
        return SocketListening(listen(address, folder))


SOCKETS: Final = SocketNetwork()
