"""Which web pages of others may read our answers: those of `http.cors_origins`, none as delivered.
Source: the Fetch standard.

A browser asks first, by OPTIONS, and without what it would authenticate with: so this stands in
front of who may ask.
"""

from collections.abc import Callable, Sequence
from typing import Any

from clipper.errors import ClipperError
from clipper.frontend.http.messages import (
    JSON,
    PROBLEM,
    DeferredResponse,
    HandlerResult,
    HttpError,
    HttpRequest,
    HttpResponse,
    StreamedResponse,
    WorkerTask,
    problem,
)

ANY = "*"
_ASKED_S = b"600"  # how long a browser remembers that it may
_TAKES = (
    b"accept, authorization, clipper-deadline-ms, content-type, inference-header-content-length,"
    b" traceparent, x-request-id"
)
_SHOWS = b"etag, inference-header-content-length, retry-after, traceparent, x-request-id"
Handle = Callable[[HttpRequest], HandlerResult]
Headers = tuple[tuple[bytes, bytes], ...]


def crossing(origins: Sequence[str], handle: Handle) -> Handle:
    """The same, for pages of these origins, too."""
    if not origins:
        return handle
    known = frozenset(origin.encode() for origin in origins)

    def crossed(request: HttpRequest) -> HandlerResult:
        origin = request.headers.get(b"origin", b"")
        if not origin or not (origin in known or ANY.encode() in known):
            return handle(request)
        said = (
            (b"access-control-allow-origin", origin),
            (b"vary", b"origin"),
            (b"access-control-expose-headers", _SHOWS),
        )
        found: HandlerResult = _told(lambda: handle(request), request, said)
        return found

    return crossed


def _told(step: Callable[[], Any], request: HttpRequest, said: Headers) -> Any:
    """What `step` comes to, and who may read it; errors as the connection would tell them."""
    try:
        outcome = step()
    except ClipperError as error:
        if request.method == "OPTIONS" and isinstance(error, HttpError) and error.status == 204:
            allow = next((value for name, value in error.headers if name == b"allow"), b"")
            asked = (
                (b"access-control-allow-methods", allow),
                (b"access-control-allow-headers", _TAKES),
            )
            return HttpResponse(
                204,
                b"",
                headers=(*error.headers, *said, *asked, (b"access-control-max-age", _ASKED_S)),
            )
        outcome = problem(error, request.id, JSON if request.path.startswith(b"/v2") else PROBLEM)
    if isinstance(outcome, DeferredResponse):
        return DeferredResponse(outcome.futures, lambda: _told(outcome.make, request, said))
    if isinstance(outcome, WorkerTask):
        return WorkerTask(lambda: _told(outcome.run, request, said), outcome.pool)
    if isinstance(outcome, HttpResponse | StreamedResponse):
        outcome.headers = (*outcome.headers, *said)
    return outcome
