"""The page's files and routes. The files are for everybody who reaches the listener, for they hold
nothing; what they show needs the token, which the page requests from its user and sends as a
header, never in a URL."""

from importlib import resources
from typing import Final

import msgspec

from clipper.config import Config
from clipper.config_schema import settings_of
from clipper.frontend.http.messages import (
    HandlerResult,
    HttpError,
    HttpRequest,
    HttpResponse,
    StreamedResponse,
    answer_json,
    read_json,
)
from clipper.frontend.http.router import HttpRouter
from clipper.frontend.http.server_sent_events import CONTENT_TYPE, HEADERS, last_event_id
from clipper.frontend.http.streamed_body import StreamedBody
from clipper.manage.dashboard.entry import FILES, PATH, SESSION_PATH, EntryCodes
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


class _Entry(msgspec.Struct):
    """The body of a request for a session."""

    code: str = ""


_ENTRY: Final = msgspec.json.Decoder(_Entry)


class Page:
    """Threads: the event loop's; of `link` any."""

    def __init__(self, feed: Feed, config: Config) -> None:
        self._feed, self._config = feed, config
        self._files = {**_read(), **FILES}
        self._codes = EntryCodes()

    def add_to(self, routes: HttpRouter) -> None:
        """Add the routes of the dashboard."""
        routes.add("GET", "/dashboard", lambda request: self._file("index.html"))
        routes.add("GET", "/dashboard/{}", lambda request: self._file(request.params[0]))
        routes.add("GET", "/admin/stream", self.stream)
        routes.add("GET", "/admin/configuration", self.configuration)
        routes.add("POST", SESSION_PATH, self.session)
        routes.add("POST", "/admin/dashboard/link", self.new_link)

    def link(self) -> str:
        """Return the path, with a fragment, that opens the page once within an hour; without a
        token that it could get so, that of the page itself."""
        http = self._config.http
        return f"{PATH}#{self._codes.issue()}" if http.token and not http.tokens_file else "/"

    def new_link(self, request: HttpRequest) -> HandlerResult:
        """Answer with the path of a link that opens the page once."""
        return answer_json({"path": self.link()})

    def session(self, request: HttpRequest) -> HandlerResult:
        """Answer with the token of management, for the code of a link that was not used before."""
        if not self._codes.redeem(read_json(_ENTRY, request.body or b"{}").code):
            raise HttpError(
                403,
                "this link was used before, or is older than an hour, or of an earlier start.",
                "A new one: clipper dashboard.",
            )
        return answer_json({"token": self._config.http.token})

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
