"""Models from a Redis Stream, deployed while the server runs. See docs/streams.md.

An entry is a descriptor and bytes. The bytes are checked first: their size, their SHA-256 and then,
in a process of its own, their format, what they import, and whether they load. Only then are they
deployed as the next version, beside the one in use; the link to the latest version moves when the
new version's containers are connected. An invalid model goes to the dead letters.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol, TypeVar

import msgspec

from clipper.catalog.catalog import Catalog
from clipper.deploy.packages.artifact import KINDS, Artifact, check
from clipper.errors import (
    AlreadyExists,
    ClipperError,
    InvalidInput,
    OutOfMemory,
    Overloaded,
    PackagingError,
    ShuttingDown,
    StillLinked,
    StoreError,
    TooLarge,
    Unknown,
    did_you_mean,
)
from clipper.frontend.streams.consumer import StreamConsumer
from clipper.frontend.streams.consumer_group import (
    ConsumerGroup,
    EntryOutcome,
    StreamEntry,
    StreamNames,
    check_names,
)
from clipper.frontend.streams.records import Flat
from clipper.processes import Supervisor
from clipper.settings.streams import ModelStreamSettings
from clipper.store.redis.store import RedisClient
from clipper.types import VERSION_MAX, InputType, Model, VersionedModel, check_name
from clipper_core.engine.model import Model as CoreModel

_log = logging.getLogger(__name__)
_AGAIN_S: Final = 0.5
_T = TypeVar("_T")
_FIELDS: Final = (
    "id",
    "name",
    "version",
    "kind",
    "input",
    "output",
    "sha256",
    "data",
    "key",
    "chunks",
    "replicas",
)
_CHUNKS_MAX: Final = 65_536
# errors that a retry may overcome
_LATER = (
    StoreError,
    ShuttingDown,
    OutOfMemory,
    Overloaded,
    ConnectionError,
)


class ModelDeployer(Protocol):
    """The server's methods that model updates need."""

    catalog: Catalog

    @property
    def deploy(self) -> Callable[..., CoreModel]:
        """Deploy a model: ClipperServer.deploy."""

    def retire(self, name: str | VersionedModel, *, force: bool = False) -> None:
        """Retire a version: ClipperServer.retire."""


class ModelDescriptor(msgspec.Struct, frozen=True):
    """The description of a model in an entry.

    version: None for the next one. key, chunks: the Redis keys of the bytes, if they are not in
    `data`.
    """

    name: str
    kind: str
    sha256: str
    version: int | None = None
    input: str = ""
    output: str = "any"
    replicas: int | None = None
    data: bytes | None = None
    key: str = ""
    chunks: int = 0

    @property
    def keys(self) -> list[str]:
        """The Redis keys of the bytes."""
        return [f"{self.key}:{i}" for i in range(self.chunks)] if self.chunks else [self.key]


# A stream of models, as returned by `server.models_from()`.
ModelUpdates = StreamConsumer[ModelDescriptor]


def descriptor_of(fields: Mapping[bytes, bytes]) -> ModelDescriptor:
    """Read a descriptor. Raises InvalidInput, which names the field."""
    texts: dict[str, str] = {}
    for raw, value in fields.items():
        name = raw.decode("utf-8", "replace")
        if name not in _FIELDS:
            guess = did_you_mean(name[:64], _FIELDS) or "."
            raise InvalidInput(
                f"unknown field {name[:64]!r}{guess}", hint=f"Fields: {', '.join(_FIELDS)}."
            )
        texts[name] = "" if name == "data" else value[:512].decode("utf-8", "replace")
    if missing := [name for name in ("name", "kind", "sha256") if not texts.get(name)]:
        raise InvalidInput(
            f"field {missing[0]!r} is missing.",
            hint="A model has a name, a kind and the sha256 of its bytes.",
        )
    check_name(texts["name"], "model")
    for name in ("input", "output"):
        InputType.parse(texts.get(name, "any"))
    if texts["kind"] not in KINDS:
        raise InvalidInput(f"kind is {texts['kind']!r}: one of {', '.join(KINDS)} is needed.")
    if ("data" in texts) == ("key" in texts):
        raise InvalidInput(
            "a model has its bytes in `data`, or `key` names where they are: one of the two."
        )
    version = (
        None if texts.get("version", "auto") == "auto" else _whole(texts, "version", VERSION_MAX)
    )
    replicas = _whole(texts, "replicas", 1024) if "replicas" in texts else None
    chunks = _whole(texts, "chunks", _CHUNKS_MAX) if "chunks" in texts else 0
    return ModelDescriptor(
        texts["name"],
        texts["kind"],
        texts["sha256"].lower(),
        version,
        texts.get("input", ""),
        texts.get("output", "any"),
        replicas,
        fields.get(b"data"),
        texts.get("key", ""),
        chunks,
    )


def _whole(texts: Mapping[str, str], name: str, most: int) -> int:
    text = texts[name]
    if not (text.isascii() and text.isdecimal() and len(text) < 12 and 1 <= int(text) <= most):
        raise InvalidInput(f"{name} is {text[:40]!r}: a whole number from 1 to {most} is needed.")
    return int(text)


def model_updates(
    server: ModelDeployer,
    settings: ModelStreamSettings,
    consumer: str,
    load_s: float,
    processes: Supervisor,
) -> ModelUpdates:
    """Return a stream of models that has not been started. Raises InvalidInput."""
    stream = settings.stream
    names = StreamNames(
        stream, settings.group, stream + ".deployed", stream + ".refused", 10_000, 10_000
    )
    check_names(names)
    name = f"models-{stream}"
    group = ConsumerGroup(settings.url, names, consumer, settings.claim_s)
    return StreamConsumer(
        name, group, ModelUpdater(server, settings, group, load_s, name, processes)
    )


class ModelUpdater:
    """Deploys the models of a stream, one at a time. Threads: one at a time."""

    def __init__(
        self,
        server: ModelDeployer,
        settings: ModelStreamSettings,
        group: ConsumerGroup,
        load_s: float,
        stream: str,
        processes: Supervisor,
    ) -> None:
        self._server, self._settings, self._group = server, settings, group
        self._processes = processes
        self._load_s, self._stream = load_s, stream
        # versions that this stream deployed -> the file with the bytes
        self._deployed: dict[VersionedModel, str] = {}

    @property
    def room(self) -> int:
        """One model at a time."""
        return 1

    def is_ready(self, item: ModelDescriptor) -> bool:
        """Return False: a deployment takes its time."""
        return False

    def accept(self, entry: StreamEntry) -> ModelDescriptor:
        """Read the entry. Raises InvalidInput."""
        return descriptor_of(entry.fields)

    def outcome(
        self,
        entry: StreamEntry,
        item: ModelDescriptor,
        consumer: StreamConsumer[ModelDescriptor],
    ) -> EntryOutcome | None:
        """Deploy a model, with retries while the store or Redis fail."""
        began = time.monotonic()
        while True:
            try:
                model = self._update(item, consumer)
                break
            except _LATER as error:
                if consumer.is_stopping:
                    return None
                consumer.report(str(error))
                consumer.pause(_AGAIN_S)
        _log.info("stream %s: %s is the latest, from entry %s", self._stream, model.id, entry.id)
        took_ms = round(1000 * (time.monotonic() - began))
        flat: Flat = [
            "name",
            model.name,
            "version",
            model.version,
            "input",
            str(model.input),
            "sha256",
            item.sha256,
            "entry",
            entry.id,
            "took_ms",
            took_ms,
        ]
        self._retire_old(model)
        return EntryOutcome(entry.id, "answer", flat)

    def _update(self, item: ModelDescriptor, consumer: StreamConsumer[ModelDescriptor]) -> Model:
        """Return the version with these bytes; deploy it unless it exists: entries may be
        delivered twice."""
        artifact = Artifact(item.kind, self._bytes(item), self._settings.trusted)
        known = self._known(item, artifact.sha256(item.name))
        if known is not None:
            return known
        found = check(self._processes, artifact, item.name, self._load_s, lambda: consumer.is_over)
        id_ = self._server.deploy(
            item.name,
            artifact,
            version=item.version,
            input=item.input or found.input,
            output=item.output,
            replicas=item.replicas or self._settings.replicas,
        ).name
        model = self._server.catalog.view.model(id_)
        self._deployed[model.id] = model.target
        return model

    def _known(self, item: ModelDescriptor, sha256: str) -> Model | None:
        """Return the latest or the requested version if it has these bytes.

        Raises AlreadyExists if the requested version has other bytes.
        """
        try:
            model = self._server.catalog.view.model(VersionedModel(item.name, item.version))
        except Unknown:
            return None
        if model.sha256 == sha256:
            return model
        if item.version is not None:
            raise AlreadyExists(
                f"model '{model.id}' already exists with other bytes.",
                hint="Leave the version out.",
            )
        return None

    def _bytes(self, item: ModelDescriptor) -> bytes:
        """Return the bytes. Raises TooLarge, PackagingError, and ConnectionError if Redis is
        unreachable."""
        most = self._settings.bytes_max
        data = item.data
        if data is None:
            sizes = self._from_redis(lambda redis: [redis.strlen(key) for key in item.keys])
            if sum(sizes) <= most:
                pieces: Sequence[bytes | None] = self._from_redis(
                    lambda redis: [redis.get(key) for key in item.keys]
                )
                if lost := [
                    key for key, piece in zip(item.keys, pieces, strict=True) if piece is None
                ]:
                    raise PackagingError(
                        f"key {lost[0]!r}, which is to hold the bytes of model {item.name!r}, is"
                        " not there."
                    )
                data = b"".join(piece for piece in pieces if piece is not None)
        size = sum(sizes) if data is None else len(data)
        if data is None or size > most:
            raise TooLarge(
                f"model {item.name!r} has {size} bytes; at most {most} are taken.",
                hint="Raise bytes_max.",
            )
        if hashlib.sha256(data).hexdigest() != item.sha256:
            raise PackagingError(
                f"the bytes of model {item.name!r} have another SHA-256 than its descriptor states."
            )
        return data

    def _from_redis(self, fn: Callable[[RedisClient], _T]) -> _T:
        """Return `fn(redis)`.

        Raises PackagingError for a key that holds no bytes, ConnectionError if Redis is
        unreachable.
        """
        found = self._group.call(lambda redis: self._or_refused(fn, redis))
        if found is None:
            raise ConnectionError(self._group.trouble or "the stream is closed")
        if isinstance(found, Exception):
            raise found
        return found

    @staticmethod
    def _or_refused(fn: Callable[[RedisClient], _T], redis: RedisClient) -> _T | PackagingError:
        try:
            return fn(redis)
        except Exception as error:
            if str(error).startswith("WRONGTYPE"):
                return PackagingError(
                    "the key of the bytes is not a string.",
                    hint="Use SET, or redis-cli -x SET.",
                )
            raise

    def _retire_old(self, latest: Model) -> None:
        """Retire this stream's versions beyond the last `keep`, unless an application names
        them."""
        mine = sorted(id_ for id_ in self._deployed if id_.name == latest.name and id_ != latest.id)
        for id_ in mine[: max(0, len(mine) - self._settings.keep)]:
            try:
                self._server.retire(id_)
            except StillLinked:
                continue
            except ClipperError as error:
                _log.warning("stream %s: %s was not retired: %s", self._stream, id_, error)
            Path(self._deployed.pop(id_)).unlink(missing_ok=True)
