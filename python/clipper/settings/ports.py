"""The addresses that commands listen on where neither a file nor an option names another: those of
other inference servers."""

from collections.abc import Iterator
from typing import Final

from clipper.host_port import join_host_port

HTTP_PORT: Final = 8000  # queries over HTTP
GRPC_PORT: Final = 8001  # queries over gRPC
ADMIN_PORT: Final = 8002  # management, metrics and the dashboard
_LOOPBACK: Final = "127.0.0.1"
_WILDCARDS: Final = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
_STEP: Final = 10  # so that the three ports of a server stay beside each other
_TRIES: Final = 100


def local_address(port: int) -> str:
    """Return `HOST:PORT` of this host alone."""
    return join_host_port(_LOOPBACK, port)


def nearby(address: str) -> Iterator[str]:
    """Yield an address, then those that a server takes instead while it is taken: of the same host,
    each ten ports further. address: `HOST:PORT`.
    """
    host, _, port = address.rpartition(":")
    last = min(65_535, int(port) + _STEP * (_TRIES - 1))
    for each in range(int(port), last + 1, _STEP):
        yield f"{host}:{each}"


def reachable(address: str) -> str:
    """Return where a client on this host reaches a listener: `0.0.0.0:80` is no address to query.

    address: `HOST:PORT`.
    """
    host, _, port = address.rpartition(":")
    return f"{_WILDCARDS.get(host, host)}:{port}"
