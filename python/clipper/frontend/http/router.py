"""The routing table: method and path to handler. Pure; no sockets."""

import urllib.parse
from collections.abc import Iterator

from clipper.errors import did_you_mean
from clipper.frontend.http.messages import Handler, HttpError, HttpRequest
from clipper.frontend.openapi.document import RouteInfo, RouteTable

_REMEMBERED_MAX = 4096
_REMEMBERED_BYTES_MAX = 512  # longest cached path


class HttpRouter:
    """Maps methods and path patterns to handlers. `{}` in a pattern matches one segment of a path.

    `add("GET", "/api/{}", handler)` also answers HEAD, and OPTIONS for every path. A fixed segment
    has precedence over `{}`, if it leads to a handler for the method. Threads: any, once all routes
    are added.
    """

    def __init__(self) -> None:
        self._root = _Node()
        self._known: dict[tuple[str, bytes], tuple[Handler, tuple[str, ...], str]] = {}
        self._patterns: list[tuple[str, str]] = []
        self.about: dict[tuple[str, str], RouteInfo] = {}
        self._elsewhere: dict[str, str] = {}

    def describe(self, table: RouteTable) -> None:
        """Add descriptions of routes, for GET /openapi.json."""
        self.about |= table

    def refer(self, segment: str, where: str) -> None:
        """Say where paths that begin with `segment` are, if there is nothing here."""
        self._elsewhere[segment] = where

    def add(self, method: str, pattern: str, handler: Handler) -> None:
        """Add a route."""
        node = self._root
        for segment in pattern.strip("/").split("/"):
            node = node.below.setdefault(segment, _Node())
        node.handlers[method] = handler
        node.pattern = pattern
        self._patterns.append((method, pattern))

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Iterate over (method, pattern) of the routes, in the order in which they were added."""
        return iter(self._patterns)

    def find(self, request: HttpRequest) -> Handler:
        """Return the handler, and set the request's `params` and `route`.

        Raises HttpError: 404 for an unknown path, 405 with Allow for an unknown method.
        """
        key = request.method, request.path
        known = self._known.get(key)
        if known is None:
            known = self._search(request.method, request.path)
            if len(self._known) >= _REMEMBERED_MAX:
                # clients choose the paths, so the cache is bounded
                self._known.clear()
            if len(request.path) <= _REMEMBERED_BYTES_MAX:
                self._known[key] = known
        request.params, request.route = known[1], known[2]
        return known[0]

    def _search(self, method: str, path: bytes) -> tuple[Handler, tuple[str, ...], str]:
        segments = _segments(path)
        wanted = "GET" if method == "HEAD" else method
        matching = list(self._root.match(segments, ()))
        if not matching:
            raise HttpError(
                404,
                f"there is nothing at {_shown(path)}{self._guess(segments)}",
                self._hint(segments),
            )
        node, params = next((one for one in matching if wanted in one[0].handlers), matching[0])
        handler = node.handlers.get(wanted)
        if handler is None:
            allow = ", ".join(node.allowed())
            if method == "OPTIONS":
                raise HttpError(204, "", headers=((b"allow", allow.encode()),))
            raise HttpError(
                405,
                f"{_shown(path)} does not take {method}.",
                f"It takes {allow}.",
                ((b"allow", allow.encode()),),
            )
        return handler, params, node.pattern

    def _hint(self, segments: list[str]) -> str:
        where = self._elsewhere.get(segments[0]) if segments else None
        return f"It is on {where}." if where else "GET / lists what there is."

    def _guess(self, segments: list[str]) -> str:
        fixed = {
            part
            for _, pattern in self._patterns
            for part in pattern.split("/")
            if part and part != "{}"
        }
        wrong = next(
            (segment for segment in segments[:1] + segments[-1:] if segment not in fixed), ""
        )
        return (did_you_mean(wrong, fixed) if wrong else "") or "."


class _Node:
    __slots__ = ("below", "handlers", "pattern")

    def __init__(self) -> None:
        self.below: dict[str, _Node] = {}
        self.handlers: dict[str, Handler] = {}
        self.pattern = ""

    def match(
        self, segments: list[str], params: tuple[str, ...]
    ) -> "Iterator[tuple[_Node, tuple[str, ...]]]":
        """Yield each node that the path leads to and the values of its `{}`, the best first."""
        if not segments:
            if self.handlers:
                yield self, params
            return
        first, rest = segments[0], segments[1:]
        if first in self.below and first != "{}":
            yield from self.below[first].match(rest, params)
        if "{}" in self.below and first:
            yield from self.below["{}"].match(rest, (*params, first))

    def allowed(self) -> list[str]:
        methods = {*self.handlers, "OPTIONS", *(("HEAD",) if "GET" in self.handlers else ())}
        return sorted(methods)


def _segments(path: bytes) -> list[str]:
    """Return the decoded segments; a single slash at the end counts for nothing."""
    text = path.decode("ascii", "replace")
    parts = text.removeprefix("/").removesuffix("/").split("/")
    return [urllib.parse.unquote(part, errors="replace") if "%" in part else part for part in parts]


def _shown(path: bytes) -> str:
    return repr(path[:100].decode("ascii", "replace"))
