"""Counts of gRPC calls by method and code, and their durations.

The event loop's thread counts; any thread reads.
"""

from clipper.metrics.http_counts import now_ns
from clipper.metrics.samples import Samples
from clipper_core.runtime.histogram import LatencyHistogram, Snapshot


class MethodCounts:
    """The counts of one method. Threads: one counts; any reads."""

    __slots__ = ("_durations", "_is_stream", "by_code", "messages", "method", "service")

    def __init__(self, service: str, method: str, is_stream: bool) -> None:
        self.service, self.method, self._is_stream = service, method, is_stream
        self.by_code: dict[str, int] = {}
        self.messages = 0
        self._durations = LatencyHistogram()

    def count(self, code: str, began_ns: int) -> None:
        """Count a finished call. The duration of a stream is not recorded."""
        self.by_code[code] = self.by_code.get(code, 0) + 1
        if not self._is_stream:
            self._durations.record((now_ns() - began_ns) // 1000)

    def collect(self, into: Samples) -> None:
        """Add the current values to `into`."""
        into.add_by("clipper_grpc_requests_total", self.by_code.copy(), self.service, self.method)
        if self.by_code and not self._is_stream:
            took: Snapshot = self._durations.snapshot()
            into.add("clipper_grpc_request_duration_seconds", took, self.service, self.method)
        if self._is_stream and (self.by_code or self.messages):
            into.add("clipper_grpc_stream_messages_total", self.messages, self.service, self.method)


class GrpcCounts:
    """The counts of all methods of a gRPC server. Threads: one counts; any reads."""

    def __init__(self) -> None:
        self.under_way = 0
        self._methods: list[MethodCounts] = []

    def method(self, service: str, method: str, is_stream: bool) -> MethodCounts:
        """Create the counts of a method."""
        found = MethodCounts(service, method, is_stream)
        self._methods.append(found)
        return found

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
            into.add("clipper_grpc_calls", self.under_way)
        for method in tuple(self._methods):
            method.collect(into)
