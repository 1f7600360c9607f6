"""Operations on the Redis streams of a running server, which its history then shows."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, Unpack

import msgspec

from clipper.catalog.catalog import Catalog
from clipper.config import Config
from clipper.frontend.streams.stream_set import settings_of
from clipper.manage.change import Change
from clipper.settings.redaction import shown
from clipper.settings.streams import ModelStreamSettings, StreamSettings
from clipper.spec.keywords import ModelStreamMembers, StreamMembers
from clipper.store.history import audit_context

if TYPE_CHECKING:
    from clipper.frontend.streams.stream_set import StreamSet


class StreamServer(Protocol):
    """Interface of a server with streams: see ClipperServer."""

    catalog: Catalog
    config: Config

    @property
    def streams(self) -> "StreamSet":
        """Return the running streams."""


class StreamOperations:
    """Operations on streams. Threads: any. actor: who acts, for the history. dry_run: check, and
    change nothing.
    """

    def __init__(self, server: StreamServer, actor: str, *, dry_run: bool = False) -> None:
        self._server = server
        self._actor = actor
        self._dry_run = dry_run

    @contextmanager
    def _doing(self, verb: str) -> Iterator[Change]:
        change = Change(verb, dry_run=self._dry_run)
        with audit_context(self._actor, verb, dry=self._dry_run) as now:
            yield change
        change.changed = tuple(one for entry in now.entries for one in entry.changed)

    def streams(self, name: str = "") -> list[dict[str, object]]:
        """Return each running stream: `name`, `kind` ("records" or "models"), `settings`,
        `stats`."""
        if name:
            self._server.streams.named(name)
        return [row for row in self._server.streams.rows() if name in ("", row["name"])]

    def create_stream(self, name: str, **members: Unpack[StreamMembers]) -> Change:
        """Score the records of a Redis stream by an application, until the stream is stopped or the
        server ends.

        members: those of `[streams.NAME]`. A stream of the file begins with each start of the
        server; this one does not.
        """
        return self._create_stream(name, settings_of(StreamSettings, members))

    def create_model_stream(self, name: str, **members: Unpack[ModelStreamMembers]) -> Change:
        """Deploy the models of a Redis stream, until the stream is stopped or the server ends.

        members: those of `[model_streams.NAME]`.
        """
        return self._create_stream(name, settings_of(ModelStreamSettings, members))

    def _create_stream(self, name: str, settings: StreamSettings | ModelStreamSettings) -> Change:
        running = self._server.streams
        with self._doing("stream create") as change:
            running.check(settings, name)
            if not self._dry_run:
                if isinstance(settings, StreamSettings):
                    running.add(settings, name)
                else:
                    running.add_models(settings, name)
            self._server.catalog.record(change.verb, f"stream/{name}", b"", _shown(settings))
        if isinstance(settings, StreamSettings):
            what = f"{settings.app} answers the records of {settings.source}"
        else:
            what = f"models of {settings.stream} are deployed"
        change.message = f"{what} until the stream {name} is stopped or the server ends"
        return change

    def stop_stream(self, name: str) -> Change:
        """Stop a stream: it reads no more records and answers those that it has read. What is left
        stays in Redis."""
        running = self._server.streams
        with self._doing("stream stop") as change:
            found = running.named(name)
            if not self._dry_run:
                running.end(name, self._server.config.server.drain_s)
            self._server.catalog.record(change.verb, f"stream/{name}", _shown(found.settings), b"")
        change.message = f"stopped stream {name}"
        section = "streams" if found.kind == "records" else "model_streams"
        if name in getattr(self._server.config, section):
            change.warning = (
                f"the file declares it: the next start of the server starts it again. To end it for"
                f" good, remove [{section}.{name}]"
            )
        return change


def _shown(settings: StreamSettings | ModelStreamSettings) -> bytes:
    """Return the settings of a stream for the history, as JSON without passwords."""
    found = msgspec.structs.asdict(settings)
    return msgspec.json.encode({key: shown(key, value) for key, value in found.items()})
