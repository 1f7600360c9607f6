"""Settings of the gRPC server: `[grpc]`."""

import importlib.util
from collections.abc import Iterator
from typing import Annotated, Final

import msgspec

from clipper.settings.http import HttpSettings, TlsFiles, effective_tls, query_tls
from clipper.settings.setting import about

# grpc.address of a server whose calls come in at the address of HTTP
SHARED: Final = "http"


class GrpcSettings(msgspec.Struct, frozen=True):
    """Settings of the gRPC server for queries."""

    address: Annotated[
        str,
        about(
            "address of gRPC, `HOST:PORT`; port 0: any free port; `http`: that of HTTP, whose "
            "settings hold for its connections; empty: no gRPC"
        ),
    ] = ""
    tls_cert: Annotated[
        str, about("PEM file of the certificate; empty: that of [http]; `off`: no TLS")
    ] = ""
    tls_key: Annotated[str, about("PEM file of the key of `tls_cert`")] = ""
    tls_client_ca: Annotated[
        str,
        about(
            "PEM file of the CA of clients' certificates; empty: that of [http]; `off`: "
            "clients need none"
        ),
    ] = ""
    message_bytes_max: Annotated[
        int,
        about(
            "largest message, also after decompression; larger ones are refused",
            "bytes",
            ge=1024,
            le=(1 << 31) - 1,
        ),
    ] = 16 << 20
    metadata_bytes_max: Annotated[
        int, about("largest metadata of a call; more is refused", "bytes", ge=1024, le=1 << 20)
    ] = 16 << 10
    connections_max: Annotated[
        int,
        about("connected clients; further ones are disconnected", "connections", ge=1, le=1 << 20),
    ] = 8192
    calls_max: Annotated[
        int,
        about("concurrent calls, streams included; more are refused", "calls", ge=1, le=1 << 20),
    ] = 8192
    streams_max: Annotated[
        int, about("concurrent calls on one connection; more wait", "calls", ge=1, le=1 << 20)
    ] = 1024
    pipeline_max: Annotated[
        int,
        about(
            "unanswered queries of one stream; above it the stream is not read",
            "queries",
            ge=1,
            le=65_536,
        ),
    ] = 64
    queries_max: Annotated[
        int, about("queries in one PredictMany; more are refused", "queries", ge=1, le=65_536)
    ] = 1024
    way_back_ms: Annotated[
        float,
        about(
            "part of a call's deadline that is reserved for sending the response",
            "ms",
            ge=0,
            le=10_000,
        ),
    ] = 2.0
    ping_s_min: Annotated[
        float,
        about(
            "shortest interval of a client's keepalive pings; one that pings more often is "
            "disconnected",
            "s",
            ge=0,
            le=86_400,
        ),
    ] = 1.0
    idle_s: Annotated[
        float, about("idle time after which a connection is closed", "s", ge=1, le=86_400)
    ] = 300.0


def has_protobuf() -> bool:
    """Return whether the package of the extra `grpc` is installed."""
    try:
        return importlib.util.find_spec("google.protobuf") is not None
    except ModuleNotFoundError:
        return False


def shares_http(grpc: GrpcSettings, http: HttpSettings) -> bool:
    """Return whether calls come in at the address of HTTP: it is named, or given once more."""
    is_same = grpc.address == http.address and not grpc.address.endswith(":0")
    return grpc.address == SHARED or (is_same and bool(grpc.address))


def own_address(grpc: GrpcSettings, http: HttpSettings) -> str:
    """Return the address at which nothing but calls comes in; empty if there is none."""
    return "" if shares_http(grpc, http) else grpc.address


def sharing_problems(
    grpc: GrpcSettings, http: HttpSettings
) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield ((section, key), reason) for each setting that does not go with one address for HTTP
    and gRPC."""
    if not shares_http(grpc, http):
        return
    if not http.address:
        yield ("grpc", "address"), "there is no address of HTTP. Set http.address."
    for key in ("tls_cert", "tls_key", "tls_client_ca"):
        if getattr(grpc, key):
            yield (
                ("grpc", key),
                f"calls come in at http.address, which has http.{key}. Remove this one.",
            )


def grpc_tls(grpc: GrpcSettings, http: HttpSettings) -> TlsFiles | None:
    """Return the TLS files of the gRPC server; None without TLS."""
    return effective_tls(TlsFiles(grpc.tls_cert, grpc.tls_key, grpc.tls_client_ca), query_tls(http))


def connection_settings(http: HttpSettings, grpc: GrpcSettings) -> HttpSettings:
    """Return the settings of the connections of an address of gRPC alone: those of HTTP, and its
    own."""
    return msgspec.structs.replace(
        http,
        connections_max=grpc.connections_max,
        pipeline_max=grpc.streams_max,
        header_bytes_max=grpc.metadata_bytes_max,
        idle_s=grpc.idle_s,
    )
