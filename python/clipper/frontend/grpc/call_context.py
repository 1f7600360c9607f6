"""A call of gRPC, as the methods of the services see it, and how it may end."""

import asyncio
from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple, NoReturn, Protocol

from clipper.host_port import join_host_port

Metadata = tuple[tuple[str, str | bytes], ...]


class Code(IntEnum):
    """A status of gRPC, as the field grpc-status has it. Source: gRPC's statuscodes."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class CallAborted(Exception):
    """A call is ended by its method with an error, which its context has."""


class CallDetails(NamedTuple):
    """A call's method and metadata, by which its method is found."""

    method: str
    invocation_metadata: Metadata


class CallConnection(Protocol):
    """The connection that carries calls. Threads: the event loop's."""

    def get_extra_info(self, name: str, default: object = None) -> object:
        """Return what is known of it, as a transport of asyncio does."""


class CallContext:
    """A call, as its method sees it. Threads: the event loop's;
    `time_remaining` any."""

    __slots__ = ("_connection", "_details", "_now_s", "_until_s", "code", "text", "trailing")

    def __init__(
        self, details: CallDetails, connection: CallConnection, until_s: float | None
    ) -> None:
        self._details = details
        self._connection = connection
        self._until_s = until_s
        self._now_s = asyncio.get_running_loop().time
        self.code = Code.OK
        self.text = ""
        self.trailing: Metadata = ()

    def invocation_metadata(self) -> Metadata:
        """Return the metadata of the call."""
        return self._details.invocation_metadata

    def time_remaining(self) -> float | None:
        """Return the seconds until the call's deadline; None without one."""
        if self._until_s is None:
            return None
        return max(self._until_s - self._now_s(), 0.0)

    def peer(self) -> str:
        """Return the client's address, as grpcio writes it."""
        name = self._connection.get_extra_info("peername")
        if not isinstance(name, tuple):
            return "unix:"
        host, port = name[:2]
        return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"

    def address(self) -> str:
        """Return the server's end of the connection, HOST:PORT; empty for a unix socket."""
        name = self._connection.get_extra_info("sockname")
        return join_host_port(*name[:2]) if isinstance(name, tuple) else ""

    def set_trailing_metadata(self, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """Set the metadata that ends the call."""
        self.trailing = tuple(metadata)

    def abandon(self, code: Code, text: str, trailing: Iterable[tuple[str, str | bytes]]) -> None:
        """Say how the call ends if its task is cancelled, which the caller does."""
        self.code = code
        self.text = text
        self.trailing = tuple(trailing)

    async def abort(
        self,
        code: Code,
        details: str = "",
        trailing_metadata: Iterable[tuple[str, str | bytes]] = (),
    ) -> NoReturn:
        """End the call by an error."""
        self.abandon(code, details, trailing_metadata)
        raise CallAborted(details)
