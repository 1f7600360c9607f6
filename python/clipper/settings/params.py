"""Settings of the parameter server: `[params]`, or `clipper params up`."""

import os
import urllib.parse
from typing import Annotated, Literal

import msgspec

from clipper.errors import ConfigError
from clipper.settings.http import TlsFiles
from clipper.settings.redaction import redacted
from clipper.settings.setting import about

LOG_FULL = 2  # times log_bytes_max: then pushes wait for a snapshot


class ParamsSettings(msgspec.Struct, frozen=True):
    """Settings of a set of shards, whose tables are trained and served at once: docs/params.md."""

    folder: Annotated[
        str, about("folder of a set of shards: addresses, epochs, logs and snapshots")
    ] = ".clipper-params"
    shards: Annotated[
        int, about("processes that share the parameters", "processes", ge=1, le=1024)
    ] = 1
    replicas: Annotated[
        int,
        about(
            "replicas of each shard, in the processes after it; fewer than shards",
            "replicas",
            ge=0,
            le=7,
        ),
    ] = 0
    replication: Annotated[
        Literal["waited", "periodic"],
        about(
            "`waited`: a push is acknowledged when its replicas have it; `periodic`: "
            "replicas are up to period_s behind"
        ),
    ] = "waited"
    period_s: Annotated[float, about("interval of periodic replication", "s", ge=0.01, le=3600)] = (
        2.0
    )
    durability: Annotated[
        Literal["memory", "disk"],
        about(
            "`disk`: a push is acknowledged when it is in a log on disk too, synced for many "
            "pushes at once; `memory`: there are replicas and snapshots only"
        ),
    ] = "memory"
    log_bytes_max: Annotated[
        int,
        about(
            "size of a shard's log on disk at which a snapshot is taken to cut it; at twice "
            "that size pushes wait",
            "bytes",
            ge=1 << 20,
            le=1 << 40,
        ),
    ] = 1 << 30
    without_replica_s: Annotated[
        float,
        about(
            "time that pushes wait for a missing replica before they continue without it; "
            "0: for ever",
            "s",
            ge=0,
            le=86_400,
        ),
    ] = 10.0
    hung_s: Annotated[
        float,
        about(
            "time without an answer after which a running shard is killed and restarted; 0: never",
            "s",
            ge=0,
            le=86_400,
        ),
    ] = 20.0
    recover_s: Annotated[
        float,
        about(
            "time that a restarted shard searches for its replicas before it uses a snapshot",
            "s",
            ge=0,
            le=3600,
        ),
    ] = 3.0
    resync_ids_max: Annotated[
        int,
        about(
            "changed rows that a shard, and each replica, remembers (8 bytes each); a replica that"
            " lacks more copies the whole table",
            "rows",
            ge=0,
            le=1 << 32,
        ),
    ] = 1 << 23
    reshard_pause_s: Annotated[
        float,
        about(
            "longest pause of pushes when the number of shards is changed while they serve; a "
            "switch that takes longer is tried again",
            "s",
            ge=0.01,
            le=60,
        ),
    ] = 1.0
    reshard_keep_s: Annotated[
        float,
        about(
            "time for which the old shards send clients the new addresses; clients that "
            "have the folder need none",
            "s",
            ge=0,
            le=86_400,
        ),
    ] = 30.0
    address: Annotated[
        str,
        about(
            "`unix`: sockets in the folder; `HOST:PORT`: shard i listens at PORT + i (other "
            "hosts need a token)"
        ),
    ] = "unix"
    metrics: Annotated[
        str,
        about(
            "`HOST:PORT` at which `clipper params up` serves `GET /metrics`, without "
            "credentials; empty: none"
        ),
    ] = ""
    token: Annotated[str, about("token of workers; empty: generated and kept in the folder")] = ""
    tokens_file: Annotated[
        str,
        about(
            "file of tokens for groups of workers, with the roles read, train and manage, made by "
            "`clipper key --role`, valid beside `token`; empty: none"
        ),
    ] = ""
    tls_cert: Annotated[
        str,
        about(
            "PEM file of the shards' certificate, on each shard's host: connections to shards use "
            "TLS; needs `address`; empty: no TLS"
        ),
    ] = ""
    tls_key: Annotated[str, about("PEM file of the key of `tls_cert`")] = ""
    tls_ca: Annotated[
        str,
        about(
            "PEM file of the CA of `tls_cert`, by which shards and clients of the folder know "
            "shards; empty: the CAs that the host trusts"
        ),
    ] = ""
    tls_client_ca: Annotated[
        str, about("PEM file of the CA of clients' certificates; empty: clients need none")
    ] = ""
    grpc: Annotated[
        str,
        about(
            "address of the gRPC service, `HOST:PORT`, shard i at PORT + i; empty: none "
            "(needs the extra grpc)"
        ),
    ] = ""
    grpc_tls_cert: Annotated[
        str,
        about("PEM file of that service's certificate, on each shard's host; empty: no TLS"),
    ] = ""
    grpc_tls_key: Annotated[str, about("PEM file of the key of `grpc_tls_cert`")] = ""
    grpc_tls_client_ca: Annotated[
        str, about("PEM file of the CA of workers' certificates; empty: workers need none")
    ] = ""
    grpc_keys_file: Annotated[
        str,
        about("file of workers' keys, made by `clipper key`, valid beside `token`; empty: none"),
    ] = ""
    grpc_optimizer: Annotated[
        str,
        about(
            "optimizer of variables and tables created by gRPC, with its settings, as `adam "
            "rate=0.001`"
        ),
    ] = "sgd"
    grpc_message_bytes_max: Annotated[
        int,
        about(
            "largest gRPC message; larger ones are refused", "bytes", ge=65_536, le=(1 << 31) - 1
        ),
    ] = 64 << 20
    snapshot_s: Annotated[
        float,
        about(
            "interval between snapshots; 0: only on request and at the end", "s", ge=0, le=86_400
        ),
    ] = 300.0
    snapshots_max: Annotated[
        int, about("full snapshots kept, with their deltas", "snapshots", ge=1, le=1000)
    ] = 3
    deltas_max: Annotated[
        int,
        about("deltas between two full snapshots", "snapshots", ge=0, le=1000),
    ] = 10
    quota_rows: Annotated[
        int,
        about(
            "rows of all tables of one shard; a push or a table that would exceed them is refused; "
            "0: no limit",
            "rows",
            ge=0,
            le=1 << 40,
        ),
    ] = 0
    quota_bytes: Annotated[
        int,
        about(
            "bytes of the rows of one shard with their state and index, alike; 0: no limit",
            "bytes",
            ge=0,
            le=1 << 50,
        ),
    ] = 0
    mode: Annotated[
        Literal["async", "sync"],
        about(
            "`async`: a push is applied at once; `sync`: gradients of several workers make one step"
        ),
    ] = "async"
    grads_to_wait: Annotated[
        int, about("gradients of one step in mode sync", "gradients", ge=1, le=65_536)
    ] = 1
    lag_max: Annotated[
        int,
        about(
            "versions by which the parameters of a gradient may be old; older ones are "
            "refused; 0: no limit (async), no age allowed (sync)",
            ge=0,
            le=1 << 31,
        ),
    ] = 0
    lag_slows: Annotated[
        bool, about("divide the learning rate of a gradient by its age in versions")
    ] = False
    frame_bytes_max: Annotated[
        int, about("largest message; larger ones are refused", "bytes", ge=65_536, le=(1 << 32) - 8)
    ] = 1 << 28
    shared_bytes_max: Annotated[
        int,
        about(
            "shared memory for rows of workers on a shard's host; 0: rows go over the socket",
            "bytes",
            ge=0,
            le=1 << 40,
        ),
    ] = 1 << 30
    spin_us: Annotated[
        int,
        about(
            "time that a shard polls for the next message before it sleeps; 0: it sleeps at once",
            "us",
            ge=0,
            le=1000,
        ),
    ] = 50
    connections_max: Annotated[
        int, about("connections of one shard; more are refused", "connections", ge=8, le=65_536)
    ] = 1024

    __repr__ = redacted


def params_tls(settings: ParamsSettings) -> TlsFiles | None:
    """Return the TLS files of the gRPC service; None without TLS."""
    if not (settings.grpc and settings.grpc_tls_cert):
        return None
    return TlsFiles(settings.grpc_tls_cert, settings.grpc_tls_key, settings.grpc_tls_client_ca)


def shard_tls(settings: ParamsSettings) -> TlsFiles | None:
    """Return the TLS files of connections to shards; None without TLS."""
    if not settings.tls_cert:
        return None
    return TlsFiles(settings.tls_cert, settings.tls_key, settings.tls_client_ca)


def tls_address(settings: ParamsSettings, where: str) -> str:
    """Return the address `HOST:PORT` of a shard as clients on this host use it with TLS."""
    files = {"ca": settings.tls_ca}
    if settings.tls_client_ca:
        files |= {"cert": settings.tls_cert, "key": settings.tls_key}
    text = urllib.parse.urlencode({key: path for key, path in files.items() if path}, safe="/")
    return f"tls:{where}?{text}" if text else f"tls:{where}"


def with_absolute_paths(settings: ParamsSettings) -> ParamsSettings:
    """Return the settings with absolute paths of files, for shards that start elsewhere."""
    files = (
        "tokens_file",
        *("tls_cert", "tls_key", "tls_ca", "tls_client_ca"),
        *("grpc_tls_cert", "grpc_tls_key", "grpc_tls_client_ca", "grpc_keys_file"),
    )
    given = {file: getattr(settings, file) for file in files}
    return msgspec.structs.replace(
        settings, **{file: os.path.abspath(path) for file, path in given.items() if path}
    )


def grpc_address(settings: ParamsSettings, shard: int) -> str:
    """Return the gRPC address of a shard. Raises ConfigError."""
    host, _, port = settings.grpc.rpartition(":")
    if not host or not port.isdecimal() or int(port) + settings.shards > 1 << 16:
        raise ConfigError(
            f"params.grpc = {settings.grpc!r}: HOST:PORT, and shard i is at PORT + i."
        )
    return f"{host}:{int(port) + shard if int(port) else 0}"
