"""What can be set of HTTP: `[http]` of a file."""

import ipaddress
from collections.abc import Iterator
from typing import Annotated, NamedTuple

import msgspec

from clipper.setting import about


class HttpSettings(msgspec.Struct, frozen=True):
    address: Annotated[
        str, about("where queries come in: `HOST:PORT`, port 0 for any free one; empty for no HTTP")
    ] = ""
    admin: Annotated[str, about("where management comes in, alike; empty for none")] = ""
    workers: Annotated[
        int,
        about(
            "threads that answer plain queries without Python; 0: Python answers all",
            "threads",
            ge=0,
            le=64,
        ),
    ] = 1
    token: Annotated[
        str, about("what `Authorization: Bearer` must say for management; needed off loopback")
    ] = ""
    tokens_file: Annotated[
        str,
        about(
            "file of who may manage, made by `clipper key`: the history then has the name of each"
            " token's holder"
        ),
    ] = ""
    tls_cert: Annotated[
        str,
        about(
            "PEM file of the server's certificate and its chain; with it, HTTP and gRPC speak TLS"
        ),
    ] = ""
    tls_key: Annotated[str, about("PEM file of its private key, without a password")] = ""
    tls_client_ca: Annotated[
        str, about("PEM file of who signs clients' certificates; with it, a client needs one")
    ] = ""
    admin_tls_cert: Annotated[
        str, about("alike, for management; empty: as above; `off`: without TLS")
    ] = ""
    admin_tls_key: Annotated[str, about("the key of `admin_tls_cert`")] = ""
    admin_tls_client_ca: Annotated[
        str, about("alike; empty: as `tls_client_ca`; `off`: clients need none")
    ] = ""
    api_keys_file: Annotated[
        str,
        about(
            "file of who may ask, made by `clipper key`; HTTP and gRPC then need `Authorization:"
            " Bearer KEY`"
        ),
    ] = ""
    insecure: Annotated[
        bool,
        about("`clipper up` takes queries of other hosts without keys or clients' certificates"),
    ] = False
    cors_origins: Annotated[
        tuple[str, ...],
        about(
            "web pages that may ask and read answers, as `https://shop.example`; `*`: all; empty:"
            " none"
        ),
    ] = ()
    metrics: Annotated[
        bool,
        about("`GET /metrics` where queries come in too, for everybody; management always has it"),
    ] = False
    metrics_names_max: Annotated[
        int,
        about(
            "models, and applications, with series of their own; the rest share `_other`",
            "names",
            ge=1,
            le=10_000,
        ),
    ] = 200
    described_max: Annotated[
        int,
        about(
            "applications with schemas of their own in `GET /openapi.json`",
            "names",
            ge=0,
            le=10_000,
        ),
    ] = 100
    dashboard: Annotated[
        bool,
        about("a page of what happens, where management comes in; off: neither page nor readings"),
    ] = True
    dashboard_viewers_max: Annotated[
        int, about("pages of it that are open at once", "pages", ge=1, le=256)
    ] = 16
    backlog: Annotated[
        int, about("connections waiting to be accepted", "connections", ge=1, le=65_535)
    ] = 1024
    connections_max: Annotated[
        int, about("clients connected at once", "connections", ge=1, le=1 << 20)
    ] = 8192
    pipeline_max: Annotated[
        int,
        about(
            "requests of one connection without a response, above which it is not read",
            "requests",
            ge=1,
            le=65_536,
        ),
    ] = 64
    unsent_bytes_max: Annotated[
        int,
        about(
            "responses that a client has not taken, above which its connection is not read",
            "bytes",
            ge=4096,
            le=1 << 30,
        ),
    ] = 256 << 10
    header_bytes_max: Annotated[
        int, about("request line and headers", "bytes", ge=512, le=1 << 20)
    ] = 16 << 10
    body_bytes_max: Annotated[
        int, about("a body, also once decompressed", "bytes", ge=1024, le=1 << 31)
    ] = 16 << 20
    queries_max: Annotated[int, about("queries in one request", "queries", ge=1, le=65_536)] = 1024
    heartbeat_s: Annotated[
        float,
        about(
            "a stream of answers on which nothing else came for so long sends a sign of life",
            "s",
            ge=0.01,
            le=3600,
        ),
    ] = 15.0
    header_s: Annotated[
        float, about("time for request line and headers to arrive", "s", ge=0.01, le=3600)
    ] = 5.0
    body_bytes_s_min: Annotated[
        int,
        about(
            "a body that comes more slowly ends its connection, after `header_s`",
            "bytes/s",
            ge=0,
            le=1 << 30,
        ),
    ] = 1024
    idle_s: Annotated[
        float,
        about(
            "a connection without a request, or whose client reads nothing, is closed",
            "s",
            ge=0.01,
            le=86_400,
        ),
    ] = 60.0

    def __repr__(self) -> str:
        items = msgspec.structs.asdict(self).items()
        shown = (
            f"{key}={'***' if key == 'token' and value else repr(value)}" for key, value in items
        )
        return f"HttpSettings({', '.join(shown)})"


class TlsFiles(NamedTuple):
    """Of one listener. client_ca: who signs the certificates of clients; empty: they need none."""

    cert: str
    key: str
    client_ca: str = ""


def scheme_of(files: TlsFiles | None) -> str:
    return "http" if files is None else "https"


def query_tls(http: HttpSettings) -> TlsFiles | None:
    """None: without TLS."""
    return TlsFiles(http.tls_cert, http.tls_key, http.tls_client_ca) if http.tls_cert else None


def effective_tls(own: TlsFiles, shared: TlsFiles | None) -> TlsFiles | None:
    """What a listener has that may share the files of queries: each is its own, or theirs when
    empty, or none when `off`."""
    if own.cert == "off" or not (own.cert or shared):
        return None
    client_ca = own.client_ca or (shared.client_ca if shared else "")
    client_ca = "" if client_ca == "off" else client_ca
    if own.cert:
        return TlsFiles(own.cert, own.key, client_ca)
    assert shared is not None
    return shared._replace(client_ca=client_ca)


def admin_tls(http: HttpSettings) -> TlsFiles | None:
    own = TlsFiles(http.admin_tls_cert, http.admin_tls_key, http.admin_tls_client_ca)
    return effective_tls(own, query_tls(http))


def tls_problems(
    section: str, prefix: str, own: TlsFiles, shared: TlsFiles | None
) -> Iterator[tuple[tuple[str, str], str]]:
    """What is wrong with the settings of one listener: (section and key, why). Whether files are in
    order, the start shows."""
    if own.cert == "off":
        return
    if own.cert and not own.key:
        yield (section, f"{prefix}_cert"), f"it needs its key. Set {section}.{prefix}_key."
    if own.key and not own.cert:
        yield (section, f"{prefix}_key"), f"it needs its certificate. Set {section}.{prefix}_cert."
    if own.client_ca not in ("", "off") and not own.cert and shared is None:
        yield (
            (section, f"{prefix}_client_ca"),
            f"clients show certificates over TLS only. Set {section}.{prefix}_cert.",
        )


def unauthenticated_listeners(
    http: HttpSettings, grpc: tuple[str, TlsFiles | None]
) -> Iterator[tuple[str, str]]:
    """Where other hosts may ask without saying who they are: (key, address). grpc: its address and
    TLS."""
    each = (("http.address", http.address, query_tls(http)), ("grpc.address", *grpc))
    for key, address, tls in each:
        if (
            address
            and not is_loopback(address.rpartition(":")[0])
            and not (http.api_keys_file or (tls and tls.client_ca))
        ):
            yield key, address


def is_loopback(host: str) -> bool:
    """A name or address that only this host can mean; `127.0.0.1.example.org` is not one."""
    try:
        return (
            host == "localhost"
            or ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
        )
    except ValueError:
        return False


def listener_problems(
    http: HttpSettings, grpc_address: str
) -> Iterator[tuple[tuple[str, str], str]]:
    """What is wrong with where queries and management come in: (section and key, why)."""
    each = (
        ("http", "address", http.address),
        ("http", "admin", http.admin),
        ("grpc", "address", grpc_address),
    )
    for section, key, address in each:
        host, _, port = address.rpartition(":")
        if address and not (host and port.isdecimal() and int(port) <= 65535):
            yield (
                (section, key),
                "expected 'HOST:PORT', as '127.0.0.1:8080' or '127.0.0.1:0' (any free port).",
            )
    yield from tls_problems(
        "http", "tls", TlsFiles(http.tls_cert, http.tls_key, http.tls_client_ca), None
    )
    own = TlsFiles(http.admin_tls_cert, http.admin_tls_key, http.admin_tls_client_ca)
    yield from tls_problems("http", "admin_tls", own, query_tls(http))
    if (
        http.admin
        and not (http.token or http.tokens_file)
        and not is_loopback(http.admin.rpartition(":")[0])
    ):
        yield (
            ("http", "admin"),
            "other hosts could manage this server. Set http.token, or http.tokens_file.",
        )
