"""Streams of a running server from elsewhere: `clipper.connect().streams`."""

from typing import TYPE_CHECKING, cast

from clipper.manage.verbs.calls import StreamCalls
from clipper.manage.verbs.sending import Requests, quoted
from clipper.types import UserValue

if TYPE_CHECKING:
    from clipper.manage.rows import StreamRow

_AT = "/admin/streams"


class StreamClient(StreamCalls):
    """The routes `/admin/streams` as methods. Threads: any, as Client.

    With dry_run a change is checked, and nothing is changed. A change is in the history.
    """

    def __init__(self, client: Requests) -> None:
        self._client = client

    def request(
        self, method: str, path: str, members: dict[str, object] | None = None
    ) -> dict[str, UserValue]:
        """Send a request by the client of the server."""
        return self._client.request(method, path, members)

    def list(self) -> "list[StreamRow]":
        """Return each running stream: name, kind, settings, stats."""
        return cast("list[StreamRow]", self.request("GET", _AT)["streams"])

    def get(self, name: str) -> "StreamRow":
        """Return one running stream. Raises UnknownStream."""
        found = cast("list[StreamRow]", self.request("GET", f"{_AT}/{quoted(name)}")["streams"])
        return found[0]
