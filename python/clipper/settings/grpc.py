"""What can be set of gRPC: `[grpc]` of a file."""

from typing import Annotated

import msgspec

from clipper.setting import about
from clipper.settings.http import HttpSettings, TlsFiles, effective_tls, query_tls


class GrpcSettings(msgspec.Struct, frozen=True):
    address: Annotated[
        str, about("where queries come in: `HOST:PORT`, port 0 for any free one; empty for no gRPC")
    ] = ""
    tls_cert: Annotated[
        str, about("PEM file of its certificate; empty: that of [http]; `off`: without TLS")
    ] = ""
    tls_key: Annotated[str, about("PEM file of the key of `tls_cert`")] = ""
    tls_client_ca: Annotated[
        str,
        about("PEM file of who signs clients' certificates; empty: that of [http]; `off`: none"),
    ] = ""
    message_bytes_max: Annotated[
        int, about("a message, also once decompressed", "bytes", ge=1024, le=(1 << 31) - 1)
    ] = 16 << 20
    metadata_bytes_max: Annotated[
        int, about("the metadata of one call", "bytes", ge=1024, le=1 << 20)
    ] = 16 << 10
    calls_max: Annotated[
        int, about("calls under way, streams included; more are refused", "calls", ge=1, le=1 << 20)
    ] = 8192
    streams_max: Annotated[
        int, about("calls under way on one connection; more wait", "calls", ge=1, le=1 << 20)
    ] = 1024
    pipeline_max: Annotated[
        int,
        about(
            "queries of one stream without a reply, above which it is not read",
            "queries",
            ge=1,
            le=65_536,
        ),
    ] = 64
    queries_max: Annotated[int, about("queries in one PredictMany", "queries", ge=1, le=65_536)] = (
        1024
    )
    way_back_ms: Annotated[
        float,
        about(
            "of a call's deadline, what is kept for the reply's way to the client",
            "ms",
            ge=0,
            le=10_000,
        ),
    ] = 2.0
    idle_s: Annotated[
        float, about("a connection without a call is closed", "s", ge=1, le=86_400)
    ] = 300.0


def grpc_tls(grpc: GrpcSettings, http: HttpSettings) -> TlsFiles | None:
    """None: without TLS."""
    return effective_tls(TlsFiles(grpc.tls_cert, grpc.tls_key, grpc.tls_client_ca), query_tls(http))
