"""The Redis streams that a server scores records of, or takes models from."""

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from typing import Protocol, TypeVar

from clipper.component import Health
from clipper.config import Config
from clipper.errors import InvalidInput, ShuttingDown, did_you_mean
from clipper.frontend.streams.model_updates import ModelDeployer, ModelUpdates, model_updates
from clipper.frontend.streams.scoring import ScoringStream
from clipper.processes import Supervisor
from clipper.serving.query.application import ApplicationHandle
from clipper.settings.streams import ModelStreamSettings, StreamSettings
from clipper.spec.field import specified

_T = TypeVar("_T", StreamSettings, ModelStreamSettings)


class StreamHost(ModelDeployer, Protocol):
    """The server's methods that streams need."""

    config: Config

    def app(self, name: str) -> ApplicationHandle:
        """Return an application: ClipperServer.app."""


class StreamSet:
    """The running streams of a server. processes: run the checks of models. Threads: any."""

    def __init__(self, server: StreamHost, processes: Supervisor) -> None:
        self._server, self._processes = server, processes
        self._lock = threading.Lock()  # of the next two
        self._running: tuple[ScoringStream | ModelUpdates, ...] = ()
        self._closing = False

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
        self._keep(stream)
        return stream

    def add_models(self, settings: ModelStreamSettings) -> ModelUpdates:
        """Start deploying the models of a stream: see ClipperServer.models_from."""
        config = self._server.config
        updates = model_updates(
            self._server, settings, _consumer(), config.server.load_s, self._processes
        ).start()
        self._keep(updates)
        return updates

    def _keep(self, stream: ScoringStream | ModelUpdates) -> None:
        """Have a stream stopped with the server. Raises ShuttingDown when that is closing."""
        with self._lock:
            if not self._closing:
                self._running = (*self._running, stream)
                return
        stream.stop(0.0)
        raise ShuttingDown("this server is closing.")

    def health(self) -> list[Health]:
        """Return the states of the threads of all streams."""
        return [one for stream in self._running for one in stream.health()]

    def stop(self, drain_s: float) -> None:
        """Stop all streams; records in progress have `drain_s` seconds, together.

        An error of one does not keep the others; it is raised at the end.
        """
        until = time.monotonic() + drain_s
        with self._lock:
            self._closing = True
        with contextlib.ExitStack() as stack:
            for stream in reversed(self._running):
                stack.callback(_stop, stream, until)


def settings_of(kind: type[_T], given: Mapping[str, object]) -> _T:
    """Convert keywords to the settings of a stream. Raises InvalidInput, which names the key."""
    keys = kind.__struct_fields__
    if unknown := sorted(set(given) - set(keys)):
        guess = did_you_mean(unknown[0], keys) or "."
        raise InvalidInput(
            f"unknown setting {unknown[0]!r} of a stream{guess}",
            hint=f"Settings: {', '.join(keys)}.",
        )
    return specified(kind, given, "python")


def _stop(stream: ScoringStream | ModelUpdates, until_s: float) -> None:
    stream.stop(max(0.0, until_s - time.monotonic()))


def _consumer() -> str:
    """Return a consumer name that no other process of the group has, nor this one had before."""
    return f"{socket.gethostname()}-{secrets.token_hex(4)}"
