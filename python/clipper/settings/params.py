"""What can be set of the parameter server: `[params]` of a file, or `clipper params up`."""

import os
from typing import Annotated, Literal

import msgspec

from clipper.errors import ConfigError
from clipper.setting import about
from clipper.settings.http import TlsFiles


class ParamsSettings(msgspec.Struct, frozen=True):
    """Tables of parameters that are trained and served at once: docs/params.md. Durations may be
    shortened for a test."""

    folder: Annotated[
        str, about("of a set of shards: its addresses, epochs, logs and snapshots")
    ] = ".clipper-params"
    shards: Annotated[
        int, about("processes that share the parameters", "processes", ge=1, le=1024)
    ] = 1
    replicas: Annotated[
        int,
        about(
            "of each shard, in the processes after it; fewer than shards", "replicas", ge=0, le=7
        ),
    ] = 0
    replication: Annotated[
        Literal["waited", "periodic"],
        about(
            "`waited`: a push is acknowledged when its replicas have it; `periodic`: they are up to"
            " period_s behind"
        ),
    ] = "waited"
    period_s: Annotated[float, about("of periodic replication", "s", ge=0.01, le=3600)] = 2.0
    without_replica_s: Annotated[
        float,
        about(
            "pushes wait so long for a replica that is away, and then go on without; 0: for ever",
            "s",
            ge=0,
            le=86_400,
        ),
    ] = 10.0
    hung_s: Annotated[
        float,
        about(
            "a shard that runs and has not answered for so long is killed and started again; 0:"
            " never",
            "s",
            ge=0,
            le=86_400,
        ),
    ] = 20.0
    recover_s: Annotated[
        float,
        about(
            "a relaunched shard looks so long for its replicas before it takes a snapshot",
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
    address: Annotated[
        str,
        about(
            "`unix`: sockets in the folder; `HOST:PORT`: shard i listens at PORT + i (other hosts"
            " need a token)"
        ),
    ] = "unix"
    metrics: Annotated[
        str,
        about(
            "`HOST:PORT`: `clipper params up` has `GET /metrics` of the set there, for everybody;"
            " empty: nowhere"
        ),
    ] = ""
    token: Annotated[
        str, about("what workers must know; made up when empty, and kept in the folder")
    ] = ""
    grpc: Annotated[
        str,
        about(
            "the design document's gRPC service: `HOST:PORT`, shard i at PORT + i; empty: none"
            " (needs the extra grpc)"
        ),
    ] = ""
    grpc_tls_cert: Annotated[
        str,
        about("PEM file of that service's certificate, on each shard's host; empty: without TLS"),
    ] = ""
    grpc_tls_key: Annotated[str, about("PEM file of the key of `grpc_tls_cert`")] = ""
    grpc_tls_client_ca: Annotated[
        str, about("PEM file of who signs workers' certificates; empty: they need none")
    ] = ""
    grpc_keys_file: Annotated[
        str, about("keys of workers, beside `token`: `clipper key` makes them; empty: none")
    ] = ""
    grpc_optimizer: Annotated[
        str,
        about(
            "of variables and tables that workers make by gRPC: a name, and settings: `adam"
            " rate=0.001`"
        ),
    ] = "sgd"
    grpc_message_bytes_max: Annotated[
        int, about("of one message by gRPC", "bytes", ge=65_536, le=(1 << 31) - 1)
    ] = 64 << 20
    snapshot_s: Annotated[
        float, about("between snapshots; 0: only when asked, and at the end", "s", ge=0, le=86_400)
    ] = 300.0
    snapshots_max: Annotated[
        int, about("whole snapshots that are kept, with their deltas", "snapshots", ge=1, le=1000)
    ] = 3
    deltas_max: Annotated[
        int,
        about(
            "deltas after a whole snapshot, before the next whole one", "snapshots", ge=0, le=1000
        ),
    ] = 10
    mode: Annotated[
        Literal["async", "sync"],
        about(
            "`async`: a push is applied at once; `sync`: gradients of several workers make a step"
        ),
    ] = "async"
    grads_to_wait: Annotated[
        int, about("gradients that make one step, of mode sync", "gradients", ge=1, le=65_536)
    ] = 1
    lag_max: Annotated[
        int,
        about(
            "a gradient of parameters more versions old is refused; 0: none is (async), all are"
            " (sync)",
            ge=0,
            le=1 << 31,
        ),
    ] = 0
    lag_slows: Annotated[bool, about("divide the rate of a gradient by the versions it is old")] = (
        False
    )
    frame_bytes_max: Annotated[
        int, about("of one message", "bytes", ge=65_536, le=(1 << 32) - 8)
    ] = 1 << 28
    shared_bytes_max: Annotated[
        int,
        about(
            "memory where workers on a shard's host have their rows; 0: they come over the socket",
            "bytes",
            ge=0,
            le=1 << 40,
        ),
    ] = 1 << 30
    spin_us: Annotated[
        int,
        about(
            "a shard polls so long after a message for the next, while that pays; 0: it sleeps at"
            " once",
            "us",
            ge=0,
            le=1000,
        ),
    ] = 50
    connections_max: Annotated[int, about("of one shard", "connections", ge=8, le=65_536)] = 1024

    def __repr__(self) -> str:
        items = msgspec.structs.asdict(self).items()
        shown = (
            f"{key}={'***' if key == 'token' and value else repr(value)}" for key, value in items
        )
        return f"ParamsSettings({', '.join(shown)})"


def params_tls(settings: ParamsSettings) -> TlsFiles | None:
    """Of the gRPC service. None: without TLS."""
    if not (settings.grpc and settings.grpc_tls_cert):
        return None
    return TlsFiles(settings.grpc_tls_cert, settings.grpc_tls_key, settings.grpc_tls_client_ca)


def with_absolute_paths(settings: ParamsSettings) -> ParamsSettings:
    """Files by their whole paths, as shards read them, wherever these are started."""
    files = ("grpc_tls_cert", "grpc_tls_key", "grpc_tls_client_ca", "grpc_keys_file")
    said = {file: getattr(settings, file) for file in files}
    return msgspec.structs.replace(
        settings, **{file: os.path.abspath(path) for file, path in said.items() if path}
    )


def grpc_address(settings: ParamsSettings, shard: int) -> str:
    """Where a shard is asked by gRPC. Raises ConfigError."""
    host, _, port = settings.grpc.rpartition(":")
    if not host or not port.isdecimal() or int(port) + settings.shards > 1 << 16:
        raise ConfigError(
            f"params.grpc = {settings.grpc!r}: HOST:PORT, and shard i is at PORT + i."
        )
    return f"{host}:{int(port) + shard if int(port) else 0}"
