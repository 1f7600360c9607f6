"""Settings of the HTTP server: `[http]`."""

import ipaddress
import urllib.parse
from collections.abc import Iterator
from typing import Annotated, NamedTuple

import msgspec

from clipper.settings.redaction import redacted
from clipper.settings.setting import about


class HttpSettings(msgspec.Struct, frozen=True):
    """Settings of the HTTP servers for queries and for management."""

    address: Annotated[
        str, about("address for queries, `HOST:PORT`; port 0: any free port; empty: no HTTP")
    ] = ""
    admin: Annotated[str, about("address for management, `HOST:PORT`; empty: none")] = ""
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
        str,
        about(
            "token that `Authorization: Bearer` must contain for management; required off loopback"
        ),
    ] = ""
    tokens_file: Annotated[
        str,
        about(
            "file of management tokens, made by `clipper key`; the history then shows each "
            "token's name"
        ),
    ] = ""
    tls_cert: Annotated[
        str,
        about("PEM file of the server's certificate chain; with it HTTP and gRPC use TLS"),
    ] = ""
    tls_key: Annotated[str, about("PEM file of the private key, without a password")] = ""
    tls_client_ca: Annotated[
        str, about("PEM file of the CA of clients' certificates; with it every client needs one")
    ] = ""
    admin_tls_cert: Annotated[
        str, about("PEM file of the certificate for management; empty: `tls_cert`; `off`: no TLS")
    ] = ""
    admin_tls_key: Annotated[str, about("PEM file of the key of `admin_tls_cert`")] = ""
    admin_tls_client_ca: Annotated[
        str,
        about(
            "PEM file of the CA of management clients; empty: `tls_client_ca`; `off`: "
            "clients need none"
        ),
    ] = ""
    api_keys_file: Annotated[
        str,
        about(
            "file of API keys, made by `clipper key`; HTTP and gRPC then require "
            "`Authorization: Bearer KEY`"
        ),
    ] = ""
    jwt_keys: Annotated[
        str,
        about(
            "keys (JWKS) of an identity provider, a file or an https URL; its tokens (JWT) are "
            "then accepted beside those of `api_keys_file`"
        ),
    ] = ""
    jwt_issuer: Annotated[str, about("`iss` that a token must have")] = ""
    jwt_audience: Annotated[str, about("`aud` that a token must have")] = ""
    jwt_name: Annotated[str, about("member of a token that names its owner")] = "sub"
    insecure: Annotated[
        bool,
        about(
            "let `clipper up` accept queries of other hosts without API keys or client certificates"
        ),
    ] = False
    metrics: Annotated[
        bool,
        about(
            "serve `GET /metrics` on the query address too, without credentials; management "
            "always has it"
        ),
    ] = False
    metrics_names_max: Annotated[
        int,
        about(
            "models, and applications, with metric series of their own; further ones share "
            "`_other`",
            "names",
            ge=1,
            le=10_000,
        ),
    ] = 200
    metrics_old_names: Annotated[
        bool,
        about(
            "give metrics under their names of version 0.1 too, and those of the mesh under the "
            "names of model-mesh (`modelmesh_*`)"
        ),
    ] = False
    described_max: Annotated[
        int,
        about(
            "applications with schemas of their own in `GET /openapi.json`; further ones have none",
            "names",
            ge=0,
            le=10_000,
        ),
    ] = 100
    dashboard: Annotated[
        bool,
        about("serve the dashboard on the management address"),
    ] = True
    dashboard_viewers_max: Annotated[
        int, about("dashboard pages open at once; more are refused", "pages", ge=1, le=256)
    ] = 16
    backlog: Annotated[
        int,
        about(
            "connections that the kernel queues before they are accepted",
            "connections",
            ge=1,
            le=65_535,
        ),
    ] = 1024
    connections_max: Annotated[
        int,
        about(
            "connected clients; more are answered 503 and closed", "connections", ge=1, le=1 << 20
        ),
    ] = 8192
    pipeline_max: Annotated[
        int,
        about(
            "unanswered requests of one connection; above it the connection is not read",
            "requests",
            ge=1,
            le=65_536,
        ),
    ] = 64
    unsent_bytes_max: Annotated[
        int,
        about(
            "responses that a client has not read; above it its connection is not read",
            "bytes",
            ge=4096,
            le=1 << 30,
        ),
    ] = 256 << 10
    header_bytes_max: Annotated[
        int,
        about(
            "size of request line and headers; more is answered 431", "bytes", ge=512, le=1 << 20
        ),
    ] = 16 << 10
    body_bytes_max: Annotated[
        int,
        about(
            "size of a body, also after decompression; more is answered 413",
            "bytes",
            ge=1024,
            le=1 << 31,
        ),
    ] = 16 << 20
    bodies_bytes_max: Annotated[
        int,
        about(
            "memory of the bodies of all requests under way, and at least `body_bytes_max`; more "
            "are answered 503",
            "bytes",
            ge=1024,
            le=1 << 40,
        ),
    ] = 512 << 20
    queries_max: Annotated[
        int, about("queries in one request; more are answered 400", "queries", ge=1, le=65_536)
    ] = 1024
    heartbeat_s: Annotated[
        float,
        about(
            "idle time after which a stream of answers sends a heartbeat",
            "s",
            ge=0.01,
            le=3600,
        ),
    ] = 15.0
    header_s: Annotated[
        float, about("timeout for request line and headers; then 408", "s", ge=0.01, le=3600)
    ] = 5.0
    body_bytes_s_min: Annotated[
        int,
        about(
            "slowest rate of a body, measured after `header_s`; slower ones are answered 408",
            "bytes/s",
            ge=0,
            le=1 << 30,
        ),
    ] = 1024
    idle_s: Annotated[
        float,
        about(
            "time without a request, or with unread responses, after which a connection is closed",
            "s",
            ge=0.01,
            le=86_400,
        ),
    ] = 60.0

    __repr__ = redacted


class TlsFiles(NamedTuple):
    """The TLS files of one listener.

    client_ca: CA of the clients' certificates; empty: clients need none.
    """

    cert: str
    key: str
    client_ca: str = ""


def scheme_of(files: TlsFiles | None) -> str:
    """Return `http` or `https`."""
    return "http" if files is None else "https"


def query_tls(http: HttpSettings) -> TlsFiles | None:
    """Return the TLS files of the HTTP server for queries; None without TLS."""
    return TlsFiles(http.tls_cert, http.tls_key, http.tls_client_ca) if http.tls_cert else None


def effective_tls(own: TlsFiles, shared: TlsFiles | None) -> TlsFiles | None:
    """Return the TLS files of a listener that may share those of queries; None without TLS.

    Each file is the listener's own, the shared one if empty, or none if `off`.
    """
    if own.cert == "off" or not (own.cert or shared):
        return None
    client_ca = own.client_ca or (shared.client_ca if shared else "")
    client_ca = "" if client_ca == "off" else client_ca
    if own.cert:
        return TlsFiles(own.cert, own.key, client_ca)
    assert shared is not None
    return shared._replace(client_ca=client_ca)


def admin_tls(http: HttpSettings) -> TlsFiles | None:
    """Return the TLS files of management; None without TLS."""
    own = TlsFiles(http.admin_tls_cert, http.admin_tls_key, http.admin_tls_client_ca)
    return effective_tls(own, query_tls(http))


def tls_problems(
    section: str, prefix: str, settings: msgspec.Struct, shared: TlsFiles | None = None
) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield ((section, key), reason) for each wrong TLS setting of a listener.

    prefix: how the names of its settings begin. shared: of a listener that may share files. The
    files themselves are checked at the start.
    """
    own = TlsFiles(*(getattr(settings, f"{prefix}_{name}") for name in TlsFiles._fields))
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
    """Yield (key, address) of each listener that other hosts can query without credentials.

    grpc: the address and the TLS files of the gRPC server.
    """
    each = (("http.address", http.address, query_tls(http)), ("grpc.address", *grpc))
    for key, address, tls in each:
        if (
            address
            and not is_loopback(address.rpartition(":")[0])
            and not (http.api_keys_file or (tls and tls.client_ca))
        ):
            yield key, address


def bodies_bytes(http: HttpSettings) -> int:
    """Return the bound of the bytes of all bodies under way. One body always fits."""
    return max(http.bodies_bytes_max, http.body_bytes_max)


def is_loopback(host: str) -> bool:
    """Return True for a host that is certainly local; `127.0.0.1.example.org` is not."""
    try:
        return (
            host == "localhost"
            or ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
        )
    except ValueError:
        return False


def jwt_problem(http: HttpSettings) -> tuple[str, str]:
    """Return which setting of tokens is wrong, and why; empty texts if none is."""
    if not http.jwt_keys:
        return "", ""
    for key in ("api_keys_file", "jwt_issuer", "jwt_audience", "jwt_name"):
        if not getattr(http, key):
            return key, f"http.jwt_keys needs it. Set http.{key}."
    url = urllib.parse.urlsplit(http.jwt_keys)
    is_local = url.scheme == "http" and is_loopback(url.hostname or "")
    if "://" in http.jwt_keys and url.scheme != "https" and not is_local:
        return "jwt_keys", "anybody on the way could give keys of their own. Use https://."
    return "", ""


def listener_problems(
    http: HttpSettings, grpc_address: str
) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield ((section, key), reason) for each wrong address or unprotected management."""
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
                "expected 'HOST:PORT', as '127.0.0.1:8000' or '127.0.0.1:0' (any free port).",
            )
    yield from tls_problems("http", "tls", http)
    yield from tls_problems("http", "admin_tls", http, query_tls(http))
    key, why = jwt_problem(http)
    if key:
        yield ("http", key), why
    if http.token != http.token.strip() or not http.token.replace("\t", " ").isprintable():
        yield (
            ("http", "token"),
            "no header can carry it: it has a line break or a control character, or spaces at its"
            " ends.",
        )
    if (
        http.admin
        and not (http.token or http.tokens_file)
        and not is_loopback(http.admin.rpartition(":")[0])
    ):
        yield (
            ("http", "admin"),
            "other hosts could manage this server. Set http.token, or http.tokens_file.",
        )
