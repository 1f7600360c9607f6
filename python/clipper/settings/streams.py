"""What can be set of a stream of records and of a stream of models: `[streams.NAME]` and
`[model_streams.NAME]` of a file, or keywords of `server.stream()` and `server.models_from()`."""

from typing import Annotated

import msgspec

from clipper.setting import about

_URL = "the Redis server: `redis://HOST:PORT/DB`, `rediss://` for TLS, `unix:///PATH`"
_GROUP = "consumer group: servers that name the same one share the records"


class StreamSettings(msgspec.Struct, frozen=True):
    app: Annotated[str, about("the application that is asked")] = ""
    url: Annotated[str, about(_URL)] = ""
    source: Annotated[str, about("stream to read records from")] = "records"
    answers: Annotated[str, about("stream to write answers to")] = "answers"
    refused: Annotated[
        str, about("stream for what cannot be read, with the reason; empty for `SOURCE.refused`")
    ] = ""
    group: Annotated[str, about(_GROUP)] = "clipper"
    feedback: Annotated[str, about("stream to read feedback from; empty for none")] = ""
    in_flight_max: Annotated[
        int,
        about(
            "records read and not yet answered, at most; fewer while the models are slow",
            "records",
            ge=1,
            le=65_536,
        ),
    ] = 512
    patience_s: Annotated[
        float,
        about(
            "a record that no model could be asked about is asked again for so long",
            "s",
            ge=0,
            le=86_400,
        ),
    ] = 30.0
    claim_s: Annotated[
        float,
        about(
            "a record that its server has been silent about for so long goes to another",
            "s",
            ge=0.1,
            le=86_400,
        ),
    ] = 30.0
    deliveries_max: Annotated[
        int,
        about(
            "a record taken over so often, and never answered, is refused", "times", ge=1, le=1000
        ),
    ] = 5
    answers_max: Annotated[
        int, about("about so many answers are kept; 0 for all", "answers", ge=0, le=1 << 40)
    ] = 1_000_000
    refused_max: Annotated[
        int, about("about so many refusals are kept; 0 for all", "entries", ge=0, le=1 << 40)
    ] = 10_000
    ids_max: Annotated[
        int,
        about(
            "last records whose own `id` is remembered, so that none is answered twice",
            "ids",
            ge=0,
            le=1 << 30,
        ),
    ] = 100_000


class ModelStreamSettings(msgspec.Struct, frozen=True):
    url: Annotated[str, about(_URL)] = ""
    stream: Annotated[str, about("stream to read models from")] = "models"
    group: Annotated[
        str, about("consumer group: each server that names another gets every model")
    ] = "clipper"
    keep: Annotated[
        int,
        about(
            "versions before the latest that go on running; older ones are retired",
            "versions",
            ge=0,
            le=1000,
        ),
    ] = 1
    trusted: Annotated[
        tuple[str, ...], about("types a skops file may ask for, beyond those that skops trusts")
    ] = ()
    bytes_max: Annotated[int, about("one model", "bytes", ge=1, le=1 << 40)] = 256 << 20
    replicas: Annotated[int, about("containers of each version", "replicas", ge=1, le=1024)] = 1
    claim_s: Annotated[
        float,
        about(
            "a model that its server has been silent about for so long goes to another",
            "s",
            ge=0.1,
            le=86_400,
        ),
    ] = 30.0
