"""The page's files and routes. The files are for everybody who reaches the listener, for they hold
nothing; what they show needs the token, which the page requests from its user and sends as a
header, never in a URL."""

from importlib import resources
from typing import Final

from clipper.config import Config
from clipper.config_schema import settings_of
from clipper.frontend.http.messages import (
    HandlerResult,
    HttpError,
    HttpRequest,
    HttpResponse,
    StreamedResponse,
    answer_json,
)
from clipper.frontend.http.router import HttpRouter
from clipper.frontend.http.server_sent_events import CONTENT_TYPE, HEADERS, last_event_id
from clipper.frontend.http.streamed_body import StreamedBody
from clipper.manage.dashboard.feed import Feed

POLICY: Final = (
    b"default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src"
    b" 'none'"
)
_TYPES: Final = {
    "html": b"text/html; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "svg": b"image/svg+xml",
    "txt": b"text/plain; charset=utf-8",
}
_SAFE: Final = (
    (b"content-security-policy", POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cache-control", b"no-cache"),
)


class Page:
    """Threads: the event loop's."""

    def __init__(self, feed: Feed, config: Config) -> None:
        self._feed, self._config = feed, config
        self._files = _read()

    def add_to(self, routes: HttpRouter) -> None:
        """Add the routes of the dashboard."""
        routes.add("GET", "/dashboard", lambda request: self._file("index.html"))
        routes.add("GET", "/dashboard/{}", lambda request: self._file(request.params[0]))
        routes.add("GET", "/admin/stream", self.stream)
        routes.add("GET", "/admin/configuration", self.configuration)

    def _file(self, name: str) -> HttpResponse:
        if name not in self._files:
            raise HttpError(
                404,
                f"the dashboard has no file {name[:100]!r}.",
                f"Its files: {', '.join(sorted(self._files))}.",
            )
        return HttpResponse(200, self._files[name], _TYPES[name.rpartition(".")[2]], _SAFE)

    def stream(self, request: HttpRequest) -> HandlerResult:
        """Answer with the stream of readings, as server-sent events."""
        self._feed.check_room()
        since_s = last_event_id(request) / 10 + 0.05

        def begin(body: StreamedBody) -> None:
            self._feed.join(body, since_s)

        return StreamedResponse(begin, CONTENT_TYPE, HEADERS, endless=True)

    def configuration(self, request: HttpRequest) -> HandlerResult:
        """Answer with the settings of the server, as JSON."""

        rows: list[dict[str, object]] = settings_of(self._config)
        return answer_json({"settings": rows})


def _read() -> dict[str, bytes]:
    folder = resources.files(__package__) / "static"
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
