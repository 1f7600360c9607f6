"""`GET /openapi.json`, the description of a listener's routes, and `GET /docs`, a page that shows
it.

The document is rebuilt after a change of the catalog, on a worker thread. Both have an ETag.
"""

import hashlib
import importlib.resources
import threading
import urllib.parse
from collections.abc import Iterable, Iterator

from clipper.errors import ClipperError, InvalidInput, did_you_mean
from clipper.frontend.http.messages import (
    JSON,
    HandlerResult,
    HttpRequest,
    HttpResponse,
    WorkerTask,
    to_json,
)
from clipper.frontend.http.router import HttpRouter
from clipper.frontend.inference.json_inputs import input_of
from clipper.frontend.openapi.document import OpenApiDocument, document
from clipper.frontend.openapi.routes import (
    ABOUT,
    OF,
    SHARED,
    DescribedApplication,
    SchemaLimits,
    body_schemas,
    describe_application,
    table,
)
from clipper.frontend.server_interface import ServerInterface
from clipper.types import ANY

# path -> (file, content type)
_PAGE = {
    "/docs": ("page.html", b"text/html; charset=utf-8"),
    "/docs/page.css": ("page.css", b"text/css; charset=utf-8"),
    "/docs/page.js": ("page.js", b"text/javascript; charset=utf-8"),
}
# public: a browser cannot send a token for a page
PUBLIC = frozenset(path.encode() for path in _PAGE)
_PAGE_HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'none'; connect-src 'self'; script-src 'self'; style-src 'self'; img-src "
        b"'self'; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
)


class CachedPage:
    """A response body that seldom changes, with its ETag."""

    def __init__(
        self, body: bytes, content_type: bytes, headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> None:
        self._body, self._content_type = body, content_type
        self._tag = b'"%s"' % hashlib.sha256(body).hexdigest()[:32].encode()
        self._headers = (*headers, (b"etag", self._tag), (b"cache-control", b"no-cache"))

    def answer(self, request: HttpRequest) -> HttpResponse:
        """Return the page, or 304 if the client has it."""
        known = [
            tag.strip().removeprefix(b"W/")
            for tag in request.headers.get(b"if-none-match", b"").split(b",")
        ]
        if self._tag in known or b"*" in known:
            return HttpResponse(304, b"", self._content_type, self._headers)
        return HttpResponse(200, self._body, self._content_type, self._headers)


class OpenApiEndpoint:
    """The description of one listener. Threads: any.

    queries: for management, the description of the query address. routes: read when the document is
    built, after all routes have been added.
    """

    def __init__(
        self,
        node: ServerInterface,
        routes: HttpRouter,
        limits: SchemaLimits,
        queries: "OpenApiEndpoint | None" = None,
    ) -> None:
        self._node, self._routes, self._limits, self._queries = node, routes, limits, queries
        self._management = queries is not None
        self._lock = threading.Lock()
        self._made: tuple[int, CachedPage] | None = None

    def add_to(self, routes: HttpRouter) -> None:
        """Add the routes."""
        routes.add("GET", "/openapi.json", self.document)
        for path, (file, kind) in _PAGE.items():
            text = (importlib.resources.files("clipper.frontend") / "docs_page" / file).read_bytes()
            routes.add("GET", path, CachedPage(text, kind, _PAGE_HEADERS).answer)
        routes.describe(table(management=self._management))

    def document(self, request: HttpRequest) -> HandlerResult:
        """Return the document."""
        if self._queries is not None and _of(request) == "queries":
            return self._queries.document(
                HttpRequest("GET", request.path, b"", request.headers, b"")
            )
        made, revision = self._made, self._node.catalog.view.revision
        if made is not None and made[0] == revision:
            return made[1].answer(request)
        return WorkerTask(lambda: self._make(revision).answer(request))

    def _make(self, revision: int) -> "CachedPage":
        with self._lock:
            made = self._made
            if made is None or made[0] != revision:
                made = self._made = revision, CachedPage(to_json(self.json()), JSON)
            return made[1]

    def json(self) -> dict[str, object]:
        """Build the document."""
        config = self._node.config
        title = "clipper management" if self._management else "clipper"
        bearer = bool(
            config.http.token or config.http.tokens_file
            if self._management
            else config.http.api_keys_file
        )
        found = document(title, self._node.version, ABOUT, self._routes.about, self._routes, bearer)
        describe(found, () if self._management else self.applications(), self._limits)
        return found.json()

    def applications(self) -> Iterator[DescribedApplication]:
        """Yield the first `http.described_max` applications by name; the others have only the
        general paths."""
        for name in sorted(self._node.catalog.view.applications)[
            : self._node.config.http.described_max
        ]:
            try:
                resolved = self._node.resolve(name)
            except ClipperError:  # deleted in the meantime
                continue
            yield DescribedApplication(
                name, input_of(resolved), resolved.feedback.window is not None
            )


def _of(request: HttpRequest) -> str:
    """Return the listener whose document is requested from management. Raises InvalidInput."""
    given = urllib.parse.parse_qs(
        request.query.decode("ascii", "replace"), keep_blank_values=True
    ).get("of", ["management"])[-1]
    if given not in OF:
        raise InvalidInput(
            f"of={given[:40]!r}{did_you_mean(given, OF) or '.'}", hint=f"One of: {', '.join(OF)}."
        )
    return given


def describe(
    into: OpenApiDocument, applications: Iterable[DescribedApplication], limits: SchemaLimits
) -> None:
    """Add the schemas that routes of applications refer to, and each application's own paths."""
    into.keep(*SHARED)
    body_schemas(into, ANY, limits)
    for app in applications:
        for method, path, about in describe_application(into, app, limits):
            into.add(method, path, about)
