"""Settings of the gRPC server: `[grpc]`."""

from typing import Annotated

import msgspec

from clipper.settings.http import HttpSettings, TlsFiles, effective_tls, query_tls
from clipper.settings.setting import about


class GrpcSettings(msgspec.Struct, frozen=True):
    """Settings of the gRPC server for queries."""

    address: Annotated[
        str, about("address of the gRPC server, `HOST:PORT`; port 0: any free port; empty: no gRPC")
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


def grpc_tls(grpc: GrpcSettings, http: HttpSettings) -> TlsFiles | None:
    """Return the TLS files of the gRPC server; None without TLS."""
    return effective_tls(TlsFiles(grpc.tls_cert, grpc.tls_key, grpc.tls_client_ca), query_tls(http))
