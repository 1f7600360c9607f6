"""Cross-origin requests: which web pages may read our responses (`http.cors_origins`; none by
default).

A browser first sends a preflight request by OPTIONS, without credentials. This wrapper therefore
runs before the check of API keys. Source: the Fetch standard.
"""

from collections.abc import Callable, Sequence
from typing import cast

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
_PREFLIGHT_S = b"600"  # cache time of a preflight response
_REQUEST_HEADERS = (
    b"accept, authorization, clipper-deadline-ms, content-type, inference-header-content-length,"
    b" traceparent, x-request-id"
)
_RESPONSE_HEADERS = b"etag, inference-header-content-length, retry-after, traceparent, x-request-id"
Handle = Callable[[HttpRequest], HandlerResult]
Headers = tuple[tuple[bytes, bytes], ...]
Response = HttpResponse | StreamedResponse


def with_cors(origins: Sequence[str], handle: Handle) -> Handle:
    """Wrap a handler so that pages of these origins may read its responses."""
    if not origins:
        return handle
    known = frozenset(origin.encode() for origin in origins)

    def wrapped(request: HttpRequest) -> HandlerResult:
        origin = request.headers.get(b"origin", b"")
        if not origin or not (origin in known or ANY.encode() in known):
            return handle(request)
        added = (
            (b"access-control-allow-origin", origin),
            (b"vary", b"origin"),
            (b"access-control-expose-headers", _RESPONSE_HEADERS),
        )
        return _with_headers(lambda: handle(request), request, added)

    return wrapped


def _with_headers(
    step: Callable[[], HandlerResult], request: HttpRequest, added: Headers
) -> HandlerResult:
    """Call `step`, and add headers to its response. Errors become responses here, like in the
    connection."""
    try:
        outcome = step()
    except ClipperError as error:
        if request.method == "OPTIONS" and isinstance(error, HttpError) and error.status == 204:
            allow = next((value for name, value in error.headers if name == b"allow"), b"")
            preflight = (
                (b"access-control-allow-methods", allow),
                (b"access-control-allow-headers", _REQUEST_HEADERS),
            )
            return HttpResponse(
                204,
                b"",
                headers=(
                    *error.headers,
                    *added,
                    *preflight,
                    (b"access-control-max-age", _PREFLIGHT_S),
                ),
            )
        outcome = problem(error, request.id, JSON if request.path.startswith(b"/v2") else PROBLEM)
    if isinstance(outcome, DeferredResponse):
        return DeferredResponse(
            outcome.futures, lambda: cast(Response, _with_headers(outcome.make, request, added))
        )
    if isinstance(outcome, WorkerTask):
        return WorkerTask(lambda: _with_headers(outcome.run, request, added), outcome.pool)
    if isinstance(outcome, HttpResponse | StreamedResponse):
        outcome.headers = (*outcome.headers, *added)
    return outcome
