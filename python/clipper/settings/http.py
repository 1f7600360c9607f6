"""What can be set of HTTP: `[http]` of a file."""

import ipaddress
from collections.abc import Iterator
from typing import Annotated

import msgspec

from clipper.setting import about


class HttpSettings(msgspec.Struct, frozen=True):
    address: Annotated[str, about("where queries come in: `HOST:PORT`, port 0 for any free one; empty for no HTTP")] = ""
    admin: Annotated[str, about("where management comes in, alike; empty for none")] = ""
    token: Annotated[str, about("what `Authorization: Bearer` must say for management; needed off loopback")] = ""
    metrics: Annotated[bool, about("`GET /metrics` where queries come in too, for everybody; management always has it")] = False
    metrics_names_max: Annotated[
        int, about("models, and applications, with series of their own; the rest share `_other`", "names", ge=1, le=10_000)
    ] = 200
    backlog: Annotated[int, about("connections waiting to be accepted", "connections", ge=1, le=65_535)] = 1024
    connections_max: Annotated[int, about("clients connected at once", "connections", ge=1, le=1 << 20)] = 8192
    pipeline_max: Annotated[
        int, about("requests of one connection without a response, above which it is not read", "requests", ge=1, le=65_536)
    ] = 64
    header_bytes_max: Annotated[int, about("request line and headers", "bytes", ge=512, le=1 << 20)] = 16 << 10
    body_bytes_max: Annotated[
        int, about("a body, also once decompressed", "bytes", ge=1024, le=1 << 31)
    ] = 16 << 20
    queries_max: Annotated[int, about("queries in one request", "queries", ge=1, le=65_536)] = 1024
    header_s: Annotated[float, about("time for request line and headers to arrive", "s", ge=0.01, le=3600)] = 5.0
    body_bytes_s_min: Annotated[
        int, about("a body that comes more slowly ends its connection, after `header_s`", "bytes/s", ge=0, le=1 << 30)
    ] = 1024
    idle_s: Annotated[
        float, about("a connection without a request, or whose client reads nothing, is closed", "s", ge=0.01, le=86_400)
    ] = 60.0

    def __repr__(self) -> str:
        items = msgspec.structs.asdict(self).items()
        shown = (f"{key}={'***' if key == 'token' and value else repr(value)}" for key, value in items)
        return f"HttpSettings({', '.join(shown)})"


def is_loopback(host: str) -> bool:
    """A name or address that only this host can mean; `127.0.0.1.example.org` is not one."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


def listener_troubles(http: HttpSettings, grpc_address: str) -> Iterator[tuple[tuple[str, str], str]]:
    """What is wrong with where queries and management come in: (section and key, why)."""
    each = (("http", "address", http.address), ("http", "admin", http.admin), ("grpc", "address", grpc_address))
    for section, key, address in each:
        host, _, port = address.rpartition(":")
        if address and not (host and port.isdecimal() and int(port) <= 65535):
            yield (section, key), "expected 'HOST:PORT', as '127.0.0.1:8080' or '127.0.0.1:0' (any free port)."
    if http.admin and not http.token and not is_loopback(http.admin.rpartition(":")[0]):
        yield ("http", "admin"), "other hosts could manage this server. Set http.token."
