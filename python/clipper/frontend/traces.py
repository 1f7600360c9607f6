"""W3C Trace Context: read from `traceparent`, answered in `traceparent`, told in the log.

The answer's names the same trace, a span of our own and the caller's flags. A request whose caller samples it leaves a line in
the log, with its duration; others cost the look for the header. Source: w3.org/TR/trace-context.
"""

import logging
import os
import re
from typing import Any

from clipper.frontend.messages import Request, Response, Streamed
from clipper.metrics.http_counts import now_ns

_log = logging.getLogger("clipper.requests")
_FORM = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.S)
_NAMES = {"/api": "application", "/v2": "model", "/{}": "application"}


class Trace:
    """trace_id, parent_id: the caller's, span_id: ours; hexadecimal. sampled: whether the caller records the trace."""

    __slots__ = ("parent_id", "sampled", "span_id", "trace_id")

    def __init__(self, trace_id: str, parent_id: str, sampled: bool) -> None:
        self.trace_id, self.parent_id, self.sampled = trace_id, parent_id, sampled
        self.span_id = os.urandom(8).hex()

    @property
    def header(self) -> bytes:
        return f"00-{self.trace_id}-{self.span_id}-{self.sampled:02x}".encode()

    def about(self) -> dict[str, Any]:
        return {"trace_id": self.trace_id, "span_id": self.span_id, "parent_id": self.parent_id}


def trace_of(header: bytes) -> Trace | None:
    """None for what is no traceparent: it counts as absent. A later version may have more at its end, and only there."""
    found = _FORM.fullmatch(header)
    if found is None:
        return None
    version, trace_id, parent_id, flags, more = found.groups()
    if version == b"ff" or (version == b"00" and more) or not trace_id.strip(b"0") or not parent_id.strip(b"0"):
        return None
    return Trace(trace_id.decode(), parent_id.decode(), bool(int(flags, 16) & 1))


def log_request(trace: Trace, request: Request, response: Response | Streamed, id: bytes) -> None:
    """The line of a sampled request; the fields are those of a JSON log (`server.log_format`)."""
    if not _log.isEnabledFor(logging.INFO):
        return
    took_ms = (now_ns() - request.began_ns) / 1e6
    about = {
        "request_id": id.decode(), "route": request.route, "method": request.method, "status": response.status,
        "duration_ms": round(took_ms, 3), **trace.about(),
    }  # fmt: skip
    if request.params:
        first = request.route[: request.route.find("/", 1)]
        about[_NAMES.get(first, "name")] = request.params[0]
    _log.info("%s %s: %d in %.1f ms", request.method, request.route, response.status, took_ms, extra=about)
