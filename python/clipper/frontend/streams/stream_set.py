"""The Redis streams that a server scores records of, or takes models from."""

import contextlib
import itertools
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from clipper.component import Health
from clipper.config import Config
from clipper.errors import (
    AlreadyExists,
    ClipperError,
    InvalidInput,
    ShuttingDown,
    UnknownStream,
    did_you_mean,
)
from clipper.frontend.streams.model_updates import ModelDeployer, ModelUpdates, model_updates
from clipper.frontend.streams.scoring import ScoringStream
from clipper.processes import Supervisor
from clipper.serving.query.application import ApplicationHandle
from clipper.settings.redaction import shown
from clipper.settings.streams import ModelStreamSettings, StreamSettings
from clipper.spec.field import specified
from clipper.types import check_name

_T = TypeVar("_T", StreamSettings, ModelStreamSettings)


class StreamHost(ModelDeployer, Protocol):
    """The server's methods that streams need."""

    config: Config

    def app(self, name: str) -> ApplicationHandle:
        """Return an application: ClipperServer.app."""


class NamedStream(NamedTuple):
    """A running stream under its name. kind: "records" or "models"."""

    kind: str
    settings: StreamSettings | ModelStreamSettings
    stream: ScoringStream | ModelUpdates

    def row(self, name: str) -> dict[str, object]:
        """Return the stream as plain data: name, kind, settings without passwords, stats."""
        shown_settings = {
            key: shown(key, value) for key, value in msgspec.structs.asdict(self.settings).items()
        }
        return {
            "name": name,
            "kind": self.kind,
            "settings": shown_settings,
            "stats": self.stream.stats(),
        }


class StreamSet:
    """The running streams of a server, by name. processes: run the checks of models. Threads:
    any.
    """

    def __init__(self, server: StreamHost, processes: Supervisor) -> None:
        self._server, self._processes = server, processes
        self._lock = threading.Lock()  # of the next two
        self._running: dict[str, NamedStream] = {}
        self._closing = False

    def start(self) -> None:
        """Start the streams that the configuration declares. Raises InvalidInput, ConfigError."""
        config = self._server.config
        for name, models in config.model_streams.items():
            self.add_models(models, name)
        for name, stream in config.streams.items():
            self.add(stream, name)

    def add(self, settings: StreamSettings, name: str = "") -> ScoringStream:
        """Start scoring the records of a stream: see ClipperServer.stream.

        name: that no running stream has; empty: that of the application, with a number if it is
        taken. Raises AlreadyExists, and what the start raises.
        """
        stream = self._scoring(settings)
        self._keep(name, settings.app, NamedStream("records", settings, stream))
        return stream

    def add_models(self, settings: ModelStreamSettings, name: str = "") -> ModelUpdates:
        """Start deploying the models of a stream: see ClipperServer.models_from, and `add`; the
        name is that of the stream, if none is given."""
        updates = self._updating(settings)
        self._keep(name, settings.stream, NamedStream("models", settings, updates))
        return updates

    def check(self, settings: StreamSettings | ModelStreamSettings, name: str) -> None:
        """Check what can be checked of a stream without starting it.

        Raises InvalidInput, ConfigError, UnknownApplication; AlreadyExists for a name that is
        taken.
        """
        check_name(name, "stream")
        if isinstance(settings, StreamSettings):
            self._scoring(settings)
        else:
            self._updating(settings)
        with self._lock:
            self._refuse_taken(name)

    def _scoring(self, settings: StreamSettings) -> ScoringStream:
        return ScoringStream(self._server.app(settings.app), settings, _consumer())

    def _updating(self, settings: ModelStreamSettings) -> ModelUpdates:
        load_s = self._server.config.server.load_s
        return model_updates(self._server, settings, _consumer(), load_s, self._processes)

    def rows(self) -> list[dict[str, object]]:
        """Return each running stream as plain data, by name."""
        with self._lock:
            found = sorted(self._running.items())
        return [one.row(name) for name, one in found if _runs(one)]

    def end(self, name: str, drain_s: float) -> NamedStream:
        """Stop a stream, and forget it: records in progress have `drain_s` seconds. Raises
        UnknownStream."""
        found = self.named(name)
        found.stream.stop(drain_s)
        with self._lock:
            if self._running.get(name) is found:
                del self._running[name]
        return found

    def named(self, name: str) -> NamedStream:
        """Return a running stream. Raises UnknownStream."""
        with self._lock:
            found = self._running.get(name)
            if found is None or not _runs(found):
                raise UnknownStream.named(name, [*self._running])
        return found

    def _refuse_taken(self, name: str) -> None:
        """Refuse the name of a running stream. The lock is held. Raises AlreadyExists."""
        if name in self._running and _runs(self._running[name]):
            raise AlreadyExists(
                f"a stream {name!r} runs already.", hint=f"To end it: clipper stream stop {name}"
            )

    def _keep(self, name: str, wished: str, new: NamedStream) -> None:
        """Start a stream, which is stopped with the server. wished: its name if `name` is empty;
        with a number behind it, where that is taken. Raises ShuttingDown when the server is
        closing, AlreadyExists."""
        new.stream.start()
        try:
            with self._lock:
                if self._closing:
                    raise ShuttingDown("this server is closing.")
                if name:
                    self._refuse_taken(name)
                self._running[name or self._free(wished)] = new
        except ClipperError:
            new.stream.stop(0.0)
            raise

    def _free(self, wished: str) -> str:
        """Return the name that is wished, or the first with a number behind it that no running
        stream has."""
        names = itertools.chain((wished,), (f"{wished}-{number}" for number in itertools.count(2)))
        return next(
            name for name in names if name not in self._running or not _runs(self._running[name])
        )

    def health(self) -> list[Health]:
        """Return the states of the threads of all streams."""
        with self._lock:
            found = [*self._running.values()]
        return [one for each in found for one in each.stream.health()]

    def stop(self, drain_s: float) -> None:
        """Stop all streams; records in progress have `drain_s` seconds, together.

        An error of one does not keep the others; it is raised at the end.
        """
        until = time.monotonic() + drain_s
        with self._lock:
            self._closing = True
            found = [*self._running.values()]
        with contextlib.ExitStack() as stack:
            for one in reversed(found):
                stack.callback(_stop, one.stream, until)


def _runs(one: NamedStream) -> bool:
    """Return whether nobody has stopped a stream by its own handle."""
    return not one.stream.is_stopping


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
