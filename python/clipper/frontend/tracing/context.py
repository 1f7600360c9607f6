"""W3C Trace Context: `traceparent` and `tracestate` of requests and responses, and sampling.

A response names the same trace, a span of this server, and the caller's flags. A request that its
caller samples is logged with its duration (access_log.py). When spans are exported (exporter.py), a
sampled request also notes its queries; the spans are made from these notes later, on another
thread. Source: w3.org/TR/trace-context.
"""

import random
import re
from collections.abc import Callable, Sequence

from clipper.frontend.http.messages import HttpRequest
from clipper.metrics.http_counts import now_ns
from clipper.serving.query.future_watcher import Future

_FORM = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.S)
_KEY = rb"(?:[a-z][_0-9a-z\-*/]{0,255}|[a-z0-9][_0-9a-z\-*/]{0,240}@[a-z][_0-9a-z\-*/]{0,13})"
_MEMBER = re.compile(_KEY + rb"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{1,256}")
_MEMBERS_MAX, _STATE_BYTES_MAX = 32, 512
_NAMES = {"/api": "application", "/v2": "model", "/{}": "application"}
_next_bits = random.Random().getrandbits  # seeded by the system; trace ids need not be secret


class TracedQuery(tuple[str, int, int, Sequence[Future]]):
    """A query of a traced request: application, start and end of submission, and the futures.

    The application is "" for models by name; times are of the monotonic clock, in nanoseconds.
    """

    __slots__ = ()


class Trace:
    """The trace of a request. Threads: one at a time.

    trace_id, parent_id: the caller's, or a new one and "". span_id: this server's. All are
    hexadecimal. sampled: the trace is recorded. state: the caller's tracestate. queries: those of a
    sampled request, in order.
    """

    __slots__ = ("_began_ns", "parent_id", "queries", "sampled", "span_id", "state", "trace_id")

    def __init__(self, trace_id: str, parent_id: str, sampled: bool, state: bytes = b"") -> None:
        self.trace_id, self.parent_id, self.sampled, self.state = (
            trace_id,
            parent_id,
            sampled,
            state,
        )
        self.span_id = new_id(64)
        self.queries: list[TracedQuery] = []
        self._began_ns = 0

    @property
    def header(self) -> bytes:
        """The value of traceparent in the response."""
        return f"00-{self.trace_id}-{self.span_id}-{self.sampled:02x}".encode()

    @property
    def headers(self) -> bytes:
        """The value of traceparent, followed by the header tracestate if there is one."""
        return self.header + (b"\r\ntracestate: " + self.state if self.state else b"")

    def about(self) -> dict[str, str]:
        """Return the ids for a log record."""
        return {"trace_id": self.trace_id, "span_id": self.span_id, "parent_id": self.parent_id}

    def start_query(self) -> None:
        """Note the start of a query's submission."""
        if self.sampled:
            self._began_ns = now_ns()

    def end_query(self, application: str, futures: Sequence[Future]) -> None:
        """Note the end of a query's submission, with its futures."""
        if self.sampled:
            self.queries.append(TracedQuery((application, self._began_ns, now_ns(), futures)))


def new_id(bits: int) -> str:
    """Return a random hexadecimal id, never 0."""
    return f"{_next_bits(bits) or 1:0{bits // 4}x}"


def trace_of(header: bytes, state: bytes = b"") -> Trace | None:
    """Parse traceparent and tracestate; return None if traceparent is missing or invalid.

    Only later versions of the format may have more fields at the end. An invalid tracestate counts
    as empty.
    """
    found = _FORM.fullmatch(header)
    if found is None:
        return None
    version, trace_id, parent_id, flags, more = found.groups()
    if (
        version == b"ff"
        or (version == b"00" and more)
        or not trace_id.strip(b"0")
        or not parent_id.strip(b"0")
    ):
        return None
    return Trace(
        trace_id.decode(),
        parent_id.decode(),
        bool(int(flags, 16) & 1),
        state_of(state) if state else b"",
    )


def state_of(header: bytes) -> bytes:
    """Return the valid members of a tracestate, as many as fit; b"" if one is invalid or
    duplicate."""
    members = [member.strip(b" \t") for member in header.split(b",")]
    members = [member for member in members if member]
    keys = {member.partition(b"=")[0] for member in members}
    if (
        len(members) > _MEMBERS_MAX
        or len(keys) < len(members)
        or not all(map(_MEMBER.fullmatch, members))
    ):
        return b""
    while members and len(b",".join(members)) > _STATE_BYTES_MAX:
        members.pop()
    return b",".join(members)


Sample = Callable[[Trace, bool], bool]  # (trace, it is the caller's) -> it is recorded


def sampler_named(name: str, share: float) -> Sample:
    """Return a sampler by its name in OTEL_TRACES_SAMPLER."""
    bound = round(share * (1 << 64))
    by_itself: dict[str, Callable[[Trace], bool]] = {
        "always_on": lambda trace: True,
        "always_off": lambda trace: False,
        "traceidratio": lambda trace: int(trace.trace_id[16:], 16) < bound,
    }
    rule = by_itself[name.removeprefix("parentbased_")]
    if name.startswith("parentbased_"):
        return lambda trace, of_caller: trace.sampled if of_caller else rule(trace)
    return lambda trace, of_caller: rule(trace)


def start_trace(sample: Sample | None, parent: bytes, state: bytes) -> Trace | None:
    """Return the trace of a request, or None.

    sample: None if nothing is exported; then only the caller's trace counts.
    """
    trace = trace_of(parent, state) if parent else None
    if sample is None:
        return trace
    of_caller = trace is not None
    if trace is None:
        trace = Trace(new_id(128), "", False)
    trace.sampled = sample(trace, of_caller)
    return trace if of_caller or trace.sampled else None


def subject_of(request: HttpRequest) -> dict[str, str]:
    """Return the application or model of a request, by its route."""
    if not request.params:
        return {}
    return {_NAMES.get(request.route[: request.route.find("/", 1)], "subject"): request.params[0]}
