"""Requests, responses and errors of HTTP, without sockets.

A handler takes an HttpRequest and returns a HandlerResult: a response, or how it is made.
"""

import http
import itertools
import math
import os
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
import numpy as np

from clipper.errors import (
    ClipperError,
    InvalidInput,
    OutOfMemory,
    Overloaded,
    RateExceeded,
    ShuttingDown,
    TooLarge,
)
from clipper.foreign_text import why_no_json
from clipper.frontend.http.streamed_body import StreamedBody
from clipper.metrics.http_counts import now_ns
from clipper.serving.query.future_watcher import Future
from clipper.types import UserValue

if TYPE_CHECKING:
    from clipper.frontend.auth.api_keys import KeyOwner
    from clipper.frontend.inference.json_inputs import JsonText
    from clipper.frontend.tracing.context import Trace

JSON: Final = b"application/json"
PROBLEM: Final = b"application/problem+json"
TEXT: Final = b"text/plain; charset=utf-8"
BINARY: Final = b"application/octet-stream"
Headers = Mapping[bytes, bytes]

_REQUEST_ID = re.compile(rb"[!-~]{1,128}")
_PREFIX = os.urandom(6).hex()
_numbers = itertools.count(1)
_T = TypeVar("_T")


class HttpRequest:
    """One request. Threads: one at a time.

    began_ns: when it was read in full, by the monotonic clock. headers: those of `KNOWN_HEADERS`,
    by lower-case name. route: the pattern that matched. params: the values of the pattern's `{}`.
    actor: the owner of the management token. key: the owner of the key; None: it has none. trace: a
    Trace, or None.
    """

    __slots__ = (
        "_id",
        "actor",
        "began_ns",
        "body",
        "headers",
        "key",
        "method",
        "params",
        "path",
        "query",
        "route",
        "trace",
    )

    def __init__(
        self, method: str, path: bytes, query: bytes, headers: Headers, body: bytes | bytearray
    ) -> None:
        self.method, self.path, self.query, self.headers, self.body = (
            method,
            path,
            query,
            headers,
            body,
        )
        self.params: tuple[str, ...] = ()
        self.route = self.actor = ""
        self.trace: Trace | None = None
        self.key: KeyOwner | None = None
        self.began_ns = now_ns()
        self._id = b""

    @property
    def given_id(self) -> bytes:
        """X-Request-Id, if it is 1 to 128 visible ASCII characters; else empty."""
        given = self.headers.get(b"x-request-id", b"")
        return given if given and _REQUEST_ID.fullmatch(given) else b""

    @property
    def id(self) -> bytes:
        """The request's id: the client's, or a generated one."""
        if not self._id:
            self._id = self.given_id or b"%s-%x" % (_PREFIX.encode(), next(_numbers))
        return self._id


KNOWN_HEADERS: Final = frozenset(
    (
        b"accept",
        b"authorization",
        b"clipper-actor",
        b"clipper-deadline-ms",
        b"content-encoding",
        b"content-length",
        b"content-type",
        b"expect",
        b"host",
        b"if-none-match",
        b"inference-header-content-length",
        b"last-event-id",
        b"mm-model-id",
        b"mm-required",
        b"mm-vmodel-id",
        b"origin",
        b"traceparent",
        b"tracestate",
        b"transfer-encoding",
        b"x-request-id",
    )
)
# Headers that are lists and may be repeated: their values are joined by commas (RFC 9110,
# section 5.3). A request that repeats another known header is rejected.
REPEATED: Final = frozenset(
    (
        b"accept",
        b"content-encoding",
        b"if-none-match",
        b"mm-model-id",
        b"mm-vmodel-id",
        b"tracestate",
        b"transfer-encoding",
    )
)


class HttpResponse:
    """A complete response.

    headers: further headers; names and values have no CR, LF or NUL. id: value of X-Request-Id,
    when it is not the request's own.
    """

    __slots__ = ("body", "content_type", "headers", "id", "status")

    def __init__(
        self,
        status: int,
        body: bytes,
        content_type: bytes = JSON,
        headers: Sequence[tuple[bytes, bytes]] = (),
        id: bytes = b"",
    ) -> None:
        self.status, self.body, self.content_type, self.headers, self.id = (
            status,
            body,
            content_type,
            headers,
            id,
        )


class DeferredResponse:
    """A response that is made on the event loop, by `make`, once all `futures` are done.

    on_gone: called if the client disconnects before; else the futures are cancelled.
    """

    __slots__ = ("_on_gone", "futures", "make")

    def __init__(
        self,
        futures: Sequence[Future],
        make: "Callable[[], HttpResponse | StreamedResponse]",
        on_gone: "Callable[[], object] | None" = None,
    ) -> None:
        self.futures, self.make = futures, make
        self._on_gone = on_gone

    def cancel(self) -> None:
        """Stop the work for a client that has disconnected."""
        if self._on_gone is not None:
            self._on_gone()
            return
        for future in self.futures:
            future.cancel()


class StreamedResponse:
    """A response whose body is written in parts.

    begin: called with the body on the event loop, after the headers have been sent. endless: the
    body has no end of its own and is ended when the server drains; other bodies are waited for. The
    other arguments are those of HttpResponse.
    """

    __slots__ = ("content_type", "endless", "headers", "id", "start", "status")

    def __init__(
        self,
        start: "Callable[[StreamedBody], None]",
        content_type: bytes,
        headers: Sequence[tuple[bytes, bytes]] = (),
        *,
        endless: bool = False,
        status: int = 200,
        id: bytes = b"",
    ) -> None:
        self.start, self.content_type, self.headers, self.endless = (
            start,
            content_type,
            headers,
            endless,
        )
        self.status, self.id = status, id


class WorkerPoolName(Enum):
    """The threads that run a piece of work. The pools do not wait for each other.

    QUERIES: queries, feedback and monitoring. LOOKS: reads by management. CHANGES: changes by
    management; such a call may take as long as a deployment.
    """

    QUERIES = "work"
    READS = "look"
    CHANGES = "manage"


class WorkerTask:
    """Work that would block the event loop. It runs on a thread of its pool and returns another
    result."""

    __slots__ = ("pool", "run")

    def __init__(
        self, run: "Callable[[], HandlerResult]", pool: WorkerPoolName = WorkerPoolName.QUERIES
    ) -> None:
        self.run, self.pool = run, pool


HandlerResult = HttpResponse | DeferredResponse | StreamedResponse | WorkerTask
Handler = Callable[[HttpRequest], HandlerResult]


class HttpError(ClipperError):
    """An error of HTTP itself, with its status. headers: further headers of the response."""

    def __init__(
        self, status: int, message: str, hint: str = "", headers: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        super().__init__(message, hint=hint)
        self.status, self.headers = status, headers


# -- JSON


def as_json(value: UserValue) -> object:
    """Return what JSON has for a value that it does not know: an array as a list."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if hasattr(value, "quantile"):  # a histogram
        shares = (
            {f"p{100 * q:g}": value.quantile(q) for q in (0.5, 0.9, 0.99, 0.999)}
            if value.count
            else {}
        )
        return {"count": value.count, "mean": value.mean, "max": value.max, **shares}
    return str(value)


_ENCODER = msgspec.json.Encoder(enc_hook=as_json)
to_json: Callable[[object], bytes] = _ENCODER.encode


def answer_json(value: object, status: int = 200) -> HttpResponse:
    """Return a response with `value` as JSON."""
    return HttpResponse(status, to_json(value))


def read_json(decoder: "msgspec.json.Decoder[_T]", text: "JsonText", at: str = "$") -> _T:
    """Decode JSON. Raises InvalidInput, which names the byte or the member at fault."""
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as error:
        message = str(error).replace("`$", f"`{at}")
        raise InvalidInput(f"{message}{'' if '`$' in message else f' - at `{at}`'}.") from None
    except msgspec.DecodeError as error:
        why = why_no_json(error, text)
        raise InvalidInput(f"the body is not JSON: {why}.", hint=_hint_on_nan(text)) from None
    except (RecursionError, UnicodeDecodeError, OverflowError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidInput(f"the body is not JSON: {why}.") from None


def _hint_on_nan(text: "JsonText") -> str:
    """Return what to write instead of NaN, if the text has one."""
    names = (b"NaN", b"Infinity")
    if not any(name in bytes(text) for name in names):
        return ""
    return "JSON has no NaN and no Infinity: write null for a missing value."


# -- errors


def problem(error: Exception, request_id: bytes, content_type: bytes = PROBLEM) -> HttpResponse:
    """Return the response to an error: RFC 9457, plus `error` for clients of the Open Inference
    Protocol.

    An error that is not a ClipperError is reported as internal, without its text, which may hold
    paths.
    """
    if isinstance(error, MemoryError) and not isinstance(error, ClipperError):
        error = OutOfMemory(
            "no memory for the request.", hint="Send it again, or less in one request."
        )
    if not isinstance(error, ClipperError):
        error = ClipperError("an internal error; the server's log has it under this request's id.")
    status = error.status if isinstance(error, HttpError) else error.rest_status
    body = {
        "error": str(error),
        "type": f"urn:clipper:error:{_slug(error, status)}",
        "title": phrase(status),
        "status": status,
        "detail": error.message,
        "hint": error.hint,
        "request_id": request_id.decode("ascii"),
    }
    headers = list(error.headers) if isinstance(error, HttpError) else []
    headers += _rate_headers(error) if isinstance(error, RateExceeded) else []
    if status in (429, 503) and not any(name == b"retry-after" for name, _ in headers):
        headers.append((b"retry-after", b"%d" % retry_after_s(error)))
    return HttpResponse(status, to_json(body), content_type, headers, request_id)


def _rate_headers(error: RateExceeded) -> list[tuple[bytes, bytes]]:
    """Return the headers of draft-ietf-httpapi-ratelimit-headers, and Retry-After."""
    wait_s = b"%d" % retry_after_s(error)
    policy = error.policy.encode()
    return [
        (b"ratelimit-policy", policy),
        (b"ratelimit", b'"key";r=0;t=' + wait_s),
        (b"retry-after", wait_s),
    ]


def _slug(error: ClipperError, status: int) -> str:
    return f"http-{status}" if isinstance(error, HttpError) else error.slug


def retry_after_s(error: ClipperError) -> int:
    """Return the value of Retry-After: whole seconds, at least one.

    It is the queue's estimate for Overloaded, else the usual time of a restart.
    """
    if isinstance(error, Overloaded):
        return max(1, math.ceil(error.retry_after_s))
    return 5 if isinstance(error, ShuttingDown) else 1


# What RFC 9110 calls these; the names in `http` depend on the version of Python.
_PHRASES = {413: "Content Too Large", 422: "Unprocessable Content", 499: "Client Closed Request"}


def phrase(status: int) -> str:
    """Return the reason phrase of a status, as RFC 9110 (section 15) has it; "Error" if unknown."""
    try:
        return _PHRASES.get(status) or http.HTTPStatus(status).phrase
    except ValueError:
        return "Error"


# -- the bytes of a response

_LINES = {
    status.value: f"HTTP/1.1 {status.value} {phrase(status)}\r\n".encode()
    for status in http.HTTPStatus
}
_BODILESS = frozenset((204, 304))
GZIP = 31  # window bits of zlib with the header of gzip


def head_of(
    response: HttpResponse | StreamedResponse,
    request_id: bytes,
    date: bytes,
    close: bool,
    trace: bytes = b"",
    *,
    chunked: bool = True,
) -> bytes:
    """Encode the status line and the headers.

    trace: value of traceparent; empty for none. chunked: a streamed body ends by chunks; otherwise
    closing the connection ends it. Raises ValueError for a header with CR, LF or NUL.
    """
    line = _LINES.get(response.status) or b"HTTP/1.1 %d %s\r\n" % (
        response.status,
        phrase(response.status).encode(),
    )
    extra = (
        b"".join([b"%s: %s\r\n" % (name, value) for name, value in response.headers])
        if response.headers
        else b""
    )
    if extra and (
        b"\0" in extra
        or extra.count(b"\r\n") != len(response.headers)
        or extra.count(b"\n") != len(response.headers)
    ):
        raise ValueError("a header of a response holds CR, LF or NUL")
    if isinstance(response, StreamedResponse):
        framing = b"transfer-encoding: chunked\r\n" if chunked else b""
        extra = b"content-type: %s\r\n%s%s" % (response.content_type, framing, extra)
    elif response.status not in _BODILESS:
        extra = b"content-type: %s\r\ncontent-length: %d\r\n%s" % (
            response.content_type,
            len(response.body),
            extra,
        )
    last = b"connection: close\r\n\r\n" if close else b"\r\n"
    if trace:
        last = b"traceparent: %s\r\n%s" % (trace, last)
    return b"%sdate: %s\r\n%sx-request-id: %s\r\n%s" % (line, date, extra, request_id, last)


def inflate(body: bytes | bytearray, encoding: bytes, size_max: int) -> bytes | bytearray:
    """Decode the Content-Encoding of a body: gzip, deflate or identity.

    Raises TooLarge above `size_max` bytes, HttpError (415) for another coding, InvalidInput.
    """
    encoding = encoding.strip().lower()
    if encoding in (b"", b"identity"):
        return body
    bits = {b"gzip": GZIP, b"x-gzip": GZIP, b"deflate": 15}.get(encoding)
    if bits is None:
        raise HttpError(
            415,
            "the Content-Encoding of this request is not known here.",
            "Use gzip, deflate, or none.",
        )
    try:
        plain, is_whole = decompressed(body, bits, size_max)
    except zlib.error:
        raise InvalidInput(
            f"the body does not match its Content-Encoding: {encoding.decode()}."
        ) from None
    if len(plain) > size_max:
        raise TooLarge(
            f"the body has more than {size_max} bytes when decompressed.",
            hint="See http.body_bytes_max.",
        )
    if not is_whole:
        raise InvalidInput(f"the body is not one complete stream of {encoding.decode()}.")
    return plain


def decompressed(body: bytes | bytearray, bits: int, size_max: int) -> tuple[bytes, bool]:
    """Return the decompressed bytes, at most one more than `size_max`, and whether the body is
    whole. A body of gzip may have several members (RFC 1952). Raises zlib.error."""
    plain, rest = [], memoryview(body)
    size = 0
    while size <= size_max:
        inflater = zlib.decompressobj(bits)
        plain.append(inflater.decompress(rest, size_max + 1 - size))
        size += len(plain[-1])
        left = len(inflater.unused_data)
        if not (left and inflater.eof and bits == GZIP):
            return b"".join(plain), inflater.eof and not left
        rest = rest[len(rest) - left :]
    return b"".join(plain), False


def settled(outcome: HandlerResult) -> HandlerResult:
    """Run work of the pool QUERIES on the calling thread, and return its result.

    Work of another pool is returned as it is.
    """
    while isinstance(outcome, WorkerTask) and outcome.pool is WorkerPoolName.QUERIES:
        outcome = outcome.run()
    return outcome


def inflating(handle: Handler, size_max: int) -> Handler:
    """Wrap a handler so that it gets decoded bodies. Decoding runs on a worker thread.

    Check authorization before: a small body can become one of `size_max` bytes.
    """

    def inflated(request: HttpRequest) -> HandlerResult:
        encoding = request.headers.get(b"content-encoding", b"")
        if encoding.strip().lower() in (b"", b"identity"):
            return handle(request)

        def run() -> HandlerResult:
            request.body = inflate(request.body, encoding, size_max)
            return settled(handle(request))

        return WorkerTask(run)

    return inflated


def on_worker(
    verb: Callable[[HttpRequest], HttpResponse],
) -> Callable[[HttpRequest], HandlerResult]:
    """Make a handler of management from a blocking function; it runs on management's worker
    threads."""
    return lambda request: WorkerTask(
        lambda: verb(request),
        WorkerPoolName.READS if request.method in ("GET", "HEAD") else WorkerPoolName.CHANGES,
    )
