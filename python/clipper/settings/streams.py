"""Settings of streams of records and of models: `[streams.NAME]` and `[model_streams.NAME]`.

The same settings are keywords of `server.stream()` and `server.models_from()`, members of bodies
over HTTP, and options of `clipper stream`.
"""

from typing import Annotated

import msgspec

from clipper.settings.redaction import redacted
from clipper.spec.field import field

_URL = "the Redis server: `redis://HOST:PORT/DB`, `rediss://` for TLS, `unix:///PATH`"
_GROUP = "consumer group: servers that name the same one share the records"


class StreamSettings(msgspec.Struct, frozen=True):
    """Settings of a stream of records, which an application answers."""

    app: Annotated[str, field("the application that answers")] = ""
    url: Annotated[str, field(_URL, names={"command": "--redis"})] = ""
    source: Annotated[str, field("stream to read records from")] = "records"
    answers: Annotated[str, field("stream to write answers to")] = "answers"
    refused: Annotated[
        str, field("stream for unreadable records, with the reason; empty: `SOURCE.refused`")
    ] = ""
    group: Annotated[str, field(_GROUP)] = "clipper"
    feedback: Annotated[str, field("stream to read feedback from; empty: none")] = ""
    in_flight_max: Annotated[
        int,
        field(
            "records read and not yet answered; fewer while the models are slow",
            "records",
            ge=1,
            le=65_536,
        ),
    ] = 512
    patience_s: Annotated[
        float,
        field(
            "time for which a record is retried while its models are unavailable",
            "s",
            ge=0,
            le=86_400,
        ),
    ] = 30.0
    claim_s: Annotated[
        float,
        field(
            "idle time after which another server takes over a record",
            "s",
            ge=0.1,
            le=86_400,
        ),
    ] = 30.0
    deliveries_max: Annotated[
        int,
        field(
            "takeovers of an unanswered record, after which it is refused", "times", ge=1, le=1000
        ),
    ] = 5
    answers_max: Annotated[
        int, field("approximate number of answers kept; 0: all", "answers", ge=0, le=1 << 40)
    ] = 1_000_000
    refused_max: Annotated[
        int,
        field("approximate number of refused records kept; 0: all", "entries", ge=0, le=1 << 40),
    ] = 10_000
    ids_max: Annotated[
        int,
        field(
            "records whose own `id` is remembered, so that none is answered twice",
            "ids",
            ge=0,
            le=1 << 30,
        ),
    ] = 100_000

    __repr__ = redacted


class ModelStreamSettings(msgspec.Struct, frozen=True):
    """Settings of a stream from which new model versions are deployed."""

    url: Annotated[str, field(_URL, names={"command": "--redis"})] = ""
    stream: Annotated[str, field("stream to read models from")] = "models"
    group: Annotated[
        str, field("consumer group; servers with different groups each get every model")
    ] = "clipper"
    keep: Annotated[
        int,
        field(
            "versions that keep running beside the latest; older ones are retired",
            "versions",
            ge=0,
            le=1000,
        ),
    ] = 1
    trusted: Annotated[
        tuple[str, ...],
        field(
            "types that a skops file may contain beyond those that skops trusts",
            python="Sequence[str]",
        ),
    ] = ()
    bytes_max: Annotated[
        int, field("size of one model; larger ones are refused", "bytes", ge=1, le=1 << 40)
    ] = 256 << 20
    replicas: Annotated[int, field("containers of each version", "replicas", ge=1, le=1024)] = 1
    claim_s: Annotated[
        float,
        field(
            "idle time after which another server takes over a model",
            "s",
            ge=0.1,
            le=86_400,
        ),
    ] = 30.0

    __repr__ = redacted
