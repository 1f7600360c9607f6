"""The Redis streams that a server scores records of, or takes models from."""

import secrets
import socket
import time
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

import msgspec

from clipper.catalog.catalog import Catalog
from clipper.config import Config
from clipper.errors import InvalidInput, did_you_mean
from clipper.frontend.streams.model_updates import ModelUpdates
from clipper.frontend.streams.scoring import ScoringStream
from clipper.serving.query.application import ApplicationHandle
from clipper.settings.streams import ModelStreamSettings, StreamSettings
from clipper.types import VersionedModel
from clipper_core.engine.model import Model as CoreModel

_T = TypeVar("_T", StreamSettings, ModelStreamSettings)


class StreamHost(Protocol):
    """The server's methods that streams need."""

    config: Config
    catalog: Catalog

    def app(self, name: str) -> ApplicationHandle:
        """Return an application: ClipperServer.app."""

    @property
    def deploy(self) -> Callable[..., CoreModel]:
        """Deploy a model: ClipperServer.deploy."""

    def retire(self, name: str | VersionedModel, *, force: bool = False) -> None:
        """Retire a version: ClipperServer.retire."""


class StreamSet:
    """The running streams of a server. Threads: any."""

    def __init__(self, server: StreamHost) -> None:
        self._server = server
        self._running: tuple[ScoringStream | ModelUpdates, ...] = ()

    def start(self) -> None:
        """Start the streams that the configuration declares. Raises InvalidInput, ConfigError."""
        config = self._server.config
        for models in config.model_streams.values():
            self.add_models(models)
        for stream in config.streams.values():
            self.add(stream)

    def add(self, settings: StreamSettings) -> ScoringStream:
        """Start scoring the records of a stream: see ClipperServer.stream."""
        stream = ScoringStream(self._server.app(settings.app), settings, _consumer()).start()
        self._running = (*self._running, stream)
        return stream

    def add_models(self, settings: ModelStreamSettings) -> ModelUpdates:
        """Start deploying the models of a stream: see ClipperServer.models_from."""
        config = self._server.config
        updates = ModelUpdates(self._server, settings, _consumer(), config.server.load_s)
        updates.start()
        self._running = (*self._running, updates)
        return updates

    def stop(self, drain_s: float) -> None:
        """Stop all streams; records in progress have `drain_s` seconds, together."""
        until = time.monotonic() + drain_s
        for stream in self._running:
            stream.stop(max(0.0, until - time.monotonic()))


def settings_of(kind: type[_T], given: Mapping[str, object]) -> _T:
    """Convert keywords to the settings of a stream. Raises InvalidInput, which names the key."""
    keys = kind.__struct_fields__
    if unknown := sorted(set(given) - set(keys)):
        guess = did_you_mean(unknown[0], keys) or "."
        raise InvalidInput(
            f"unknown setting {unknown[0]!r} of a stream{guess}",
            hint=f"Settings: {', '.join(keys)}.",
        )
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"a setting of a stream: {error}.") from None


def _consumer() -> str:
    """Return a consumer name that no other process of the group has, nor this one had before."""
    return f"{socket.gethostname()}-{secrets.token_hex(4)}"
