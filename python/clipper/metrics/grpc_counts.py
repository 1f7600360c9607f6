"""Counts of gRPC calls by method and code, and their durations.

The event loop's thread counts, in Python and in the core; any thread reads.
"""

from typing import Protocol

from clipper.metrics.http_counts import now_ns
from clipper.metrics.samples import Samples
from clipper_core.runtime.histogram import Counter, LatencyHistogram, Snapshot


class MethodCounts:
    """The counts of one method. Threads: one counts; any reads.

    ok, cancelled: calls that ended so; `by_code` has the others.
    """

    __slots__ = (
        "_is_stream",
        "by_code",
        "cancelled",
        "durations",
        "messages",
        "method",
        "ok",
        "service",
    )

    def __init__(self, service: str, method: str, is_stream: bool) -> None:
        self.service, self.method, self._is_stream = service, method, is_stream
        self.by_code: dict[str, int] = {}
        self.ok = Counter()
        self.cancelled = Counter()
        self.messages = 0
        self.durations = LatencyHistogram()

    def count(self, code: str, began_ns: int) -> None:
        """Count a finished call. The duration of a stream is not recorded."""
        if code == "OK":
            self.ok.add()
        elif code == "CANCELLED":
            self.cancelled.add()
        else:
            self.by_code[code] = self.by_code.get(code, 0) + 1
        if not self._is_stream:
            self.durations.record((now_ns() - began_ns) // 1000)

    def collect(self, into: Samples) -> None:
        """Add the current values to `into`."""
        counts = self.by_code.copy()
        for code, counter in (("OK", self.ok), ("CANCELLED", self.cancelled)):
            if counter.value:
                counts[code] = counter.value
        into.add_by("clipper_grpc_requests_total", counts, self.service, self.method)
        if counts and not self._is_stream:
            took: Snapshot = self.durations.snapshot()
            into.add("clipper_grpc_request_duration_seconds", took, self.service, self.method)
        if self._is_stream and (counts or self.messages):
            into.add("clipper_grpc_stream_messages_total", self.messages, self.service, self.method)


class OpenCalls(Protocol):
    """Calls that the core answers. outside: the number of those that Python answers."""

    outside: int

    @property
    def open(self) -> int:
        """The number of those that wait for their queries."""


class GrpcCounts:
    """The counts of all methods of a gRPC server. Threads: one counts; any reads."""

    def __init__(self) -> None:
        self._under_way = 0
        self._in_core: OpenCalls | None = None
        self._methods: list[MethodCounts] = []

    def add_core(self, calls: OpenCalls) -> None:
        """Count calls of the core too."""
        self._in_core = calls

    @property
    def under_way(self) -> int:
        """The number of calls that Python answers."""
        return self._under_way

    @under_way.setter
    def under_way(self, count: int) -> None:
        self._under_way = count
        if self._in_core is not None:
            self._in_core.outside = count

    @property
    def open(self) -> int:
        """The number of all calls that are not answered."""
        return self.under_way + (0 if self._in_core is None else self._in_core.open)

    def method(self, service: str, method: str, is_stream: bool) -> MethodCounts:
        """Return the counts of a method."""
        for found in self._methods:
            if (found.service, found.method) == (service, method):
                return found
        made = MethodCounts(service, method, is_stream)
        self._methods.append(made)
        return made

    def count_refused(self, path: str, code: str) -> None:
        """Count a call that was refused before its handler was known.

        path: `/SERVICE/METHOD`. A method that does not exist is not counted, because clients choose
        its name.
        """
        for found in self._methods:
            if path == f"/{found.service}/{found.method}":
                found.count(code, now_ns())
                return

    def collect(self, into: Samples) -> None:
        """Add the current values to `into`."""
        if self._methods:
            into.add("clipper_grpc_calls", self.open)
        for method in tuple(self._methods):
            method.collect(into)
