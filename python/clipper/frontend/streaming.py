"""The doors of a server to its streams: what `ClipperServer` inherits."""

import secrets
import socket
import time
from typing import Any, Protocol, TypeVar

import msgspec

from clipper.catalog import Catalog
from clipper.config import Config
from clipper.errors import InvalidInput, did_you_mean
from clipper.frontend.live_models import ModelUpdates
from clipper.frontend.streams import Stream
from clipper.serving.application import ApplicationHandle
from clipper.settings.streams import ModelStreamSettings, StreamSettings
from clipper.types import VersionedModel

_T = TypeVar("_T", StreamSettings, ModelStreamSettings)
_Running = Stream | ModelUpdates


class Serves(Protocol):
    """What the streams need of a server."""

    config: Config
    catalog: Catalog
    _streams: tuple[_Running, ...]

    def app(self, name: str) -> ApplicationHandle: ...

    def deploy(self, name: str, model: Any, **settings: Any) -> Any: ...

    def retire(self, name: str | VersionedModel, *, force: bool = False) -> None: ...

    def _check_open(self) -> None: ...


class Streaming:
    """Threads: any."""

    _streams: tuple[_Running, ...] = ()

    def stream(self: Serves, app: str, url: str, **settings: Any) -> Stream:
        """Score the records of a Redis Stream by application `app`, and write the answers to
        another.

        settings: source, answers, refused, group, feedback, in_flight_max, patience_s, claim_s, ...
        (`[streams.NAME]` in docs/configuration.md; docs/streams.md has the fields of records and
        answers). Each record is answered exactly once by all servers of one group together,
        whatever dies. -> a handle with stats() and stop(); Redis need not be there yet. Raises
        UnknownApplication, InvalidInput, ConfigError (no Redis URL, no package redis).
        """
        self._check_open()
        chosen = settings_of(StreamSettings, {"app": app, "url": url, **settings})
        started = Stream(self.app(app), chosen, _consumer()).start()
        self._streams = (*self._streams, started)
        return started

    def models_from(self: Serves, url: str, **settings: Any) -> ModelUpdates:
        """Deploy the models of a Redis Stream, ONNX or skops bytes with a descriptor, as the next
        versions, while serving.

        settings: stream, group, keep, trusted, bytes_max, replicas, claim_s
        (`[model_streams.NAME]`). Queries go to the old version until the new one's containers are
        connected. What is no sound model is refused to `STREAM.refused`. -> a handle with stats()
        and stop(). Raises InvalidInput, ConfigError.
        """
        self._check_open()
        chosen = settings_of(ModelStreamSettings, {"url": url, **settings})
        started = ModelUpdates(self, chosen, _consumer(), self.config.server.load_s)
        started.start()
        self._streams = (*self._streams, started)
        return started

    def _start_streams(self) -> None:
        """Those that the configuration declares."""
        config: Config = self.config  # type: ignore[attr-defined]
        for models in config.model_streams.values():
            self.models_from(**msgspec.structs.asdict(models))  # type: ignore[misc]
        for stream in config.streams.values():
            self.stream(**msgspec.structs.asdict(stream))  # type: ignore[misc]

    def _stop_streams(self, drain_s: float) -> None:
        until = time.monotonic() + drain_s
        for stream in self._streams:
            stream.stop(max(0.0, until - time.monotonic()))


def settings_of(kind: type[_T], given: dict[str, Any]) -> _T:
    """`given` as settings. Raises: InvalidInput that names the key."""
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
    """A name in the group that no other process has, nor this one after a restart."""
    return f"{socket.gethostname()}-{secrets.token_hex(4)}"
