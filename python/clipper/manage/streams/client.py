"""Streams of a running server from elsewhere: `clipper.connect().streams`."""

import urllib.parse
from typing import TYPE_CHECKING, Protocol, Unpack, cast

from clipper.spec.keywords import ModelStreamMembers, StreamMembers

if TYPE_CHECKING:
    from clipper.manage.rows import ChangeResult, StreamRow

_AT = "/admin/streams"


class StreamRequests(Protocol):
    """Interface of manage.client.Client that this module needs."""

    def request(
        self, method: str, path: str, members: dict[str, object] | None = None
    ) -> dict[str, object]:
        """Send a request, and return the object that answers it."""


class StreamClient:
    """The routes `/admin/streams` as methods. Threads: any, as Client.

    With dry_run a change is checked, and nothing is changed. A change is in the history.
    """

    def __init__(self, client: StreamRequests) -> None:
        self._client = client

    def list(self) -> "list[StreamRow]":
        """Return each running stream: name, kind, settings, stats."""
        return cast("list[StreamRow]", self._client.request("GET", _AT)["streams"])

    def get(self, name: str) -> "StreamRow":
        """Return one running stream. Raises UnknownStream."""
        found = cast("list[StreamRow]", self._client.request("GET", _path(name))["streams"])
        return found[0]

    def create(
        self, name: str, *, dry_run: bool = False, **settings: Unpack[StreamMembers]
    ) -> "ChangeResult":
        """Score the records of a Redis stream by an application, until the stream is stopped or the
        server ends. settings: those of `[streams.NAME]`. Raises AlreadyExists, UnknownApplication,
        InvalidInput, ConfigError."""
        return self._change(name, "create", {**settings}, dry_run)

    def create_models(
        self, name: str, *, dry_run: bool = False, **settings: Unpack[ModelStreamMembers]
    ) -> "ChangeResult":
        """Deploy the models of a Redis stream, until the stream is stopped or the server ends.
        settings: those of `[model_streams.NAME]`. Raises AlreadyExists, InvalidInput,
        ConfigError."""
        return self._change(name, "create-models", {**settings}, dry_run)

    def stop(self, name: str, *, dry_run: bool = False) -> "ChangeResult":
        """Stop a stream; what it has not read stays in Redis. Raises UnknownStream."""
        return self._change(name, "stop", {}, dry_run)

    def _change(
        self, name: str, verb: str, members: dict[str, object], dry_run: bool
    ) -> "ChangeResult":
        path = f"{_path(name)}/{verb}{'?dry_run=true' if dry_run else ''}"
        return cast("ChangeResult", self._client.request("POST", path, members))


def _path(name: str) -> str:
    return f"{_AT}/{urllib.parse.quote(name, safe='')}"
