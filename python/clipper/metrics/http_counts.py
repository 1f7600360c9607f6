"""Counts of HTTP requests by route and status, and their durations.

The event loop's thread and the native HTTP server count; any thread reads.
"""

import time
from collections.abc import Callable

from clipper.metrics.samples import OTHER, Samples
from clipper_core.runtime.histogram import Counter, LatencyHistogram, Snapshot
from clipper_core.tls.tls_context import HANDSHAKES

now_ns = time.monotonic_ns


class RouteCounts:
    """The counts of one method and route.

    ok, forbidden, limited: responses of the native HTTP server with status 200, 403 and 429;
    `by_code` has the others.
    """

    __slots__ = ("by_code", "durations", "forbidden", "limited", "ok")

    def __init__(self) -> None:
        self.by_code: dict[int, int] = {}
        self.ok = Counter()
        self.forbidden = Counter()
        self.limited = Counter()
        self.durations = LatencyHistogram()

    def codes(self) -> dict[int, int]:
        """Return the number of responses by status."""
        codes = self.by_code.copy()
        of_core = ((200, self.ok), (403, self.forbidden), (429, self.limited))
        for code, counter in of_core:
            if counter.value:
                codes[code] = codes.get(code, 0) + counter.value
        return codes


class TlsCounts:
    """The TLS handshakes of one listener. Threads: any.

    ends_s: expiry of the certificate, seconds since 1970; 0 without one. counters: by outcome.
    """

    def __init__(self, listener: str) -> None:
        self.listener = listener
        self.ends_s = 0
        self.counters = {outcome: Counter() for outcome in HANDSHAKES}

    def count(self, outcome: str) -> None:
        """Count a handshake."""
        self.counters[outcome].add()

    def collect(self, into: Samples) -> None:
        """Add the current values to `into`."""
        counts = {outcome: counter.value for outcome, counter in self.counters.items()}
        found = {outcome: n for outcome, n in counts.items() if n or outcome == "ok"}
        into.add_by("clipper_tls_handshakes_total", found, self.listener)
        if self.ends_s:
            into.add("clipper_tls_certificate_expiry_timestamp_seconds", self.ends_s, self.listener)


class HttpCounts:
    """The counts of one listener. Threads: one counts; any reads.

    Requests to unknown routes are counted as `_other`, with their method, because clients can
    invent any number of paths.
    """

    def __init__(self, listener: str) -> None:
        self.listener = listener
        self.connections = 0
        self.held: Callable[[], int] = lambda: 0  # connections of the native HTTP server
        self._rows: dict[tuple[str, str], RouteCounts] = {}

    def row(self, method: str, route: str) -> RouteCounts:
        """Return the counts of a method and route pattern."""
        return self._rows.setdefault((method, route), RouteCounts())

    def count(self, method: str, route: str, code: int, began_ns: int) -> None:
        """Count a response.

        route: the pattern; empty for an unknown route.  began_ns: start of the request by `now_ns`.
        """
        key = (method, route) if route else (OTHER, OTHER)
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = RouteCounts()
        row.by_code[code] = row.by_code.get(code, 0) + 1
        row.durations.record((now_ns() - began_ns) // 1000)

    def collect(self, into: Samples) -> None:
        """Add the current values to `into`."""
        into.add("clipper_http_connections", self.connections + self.held(), self.listener)
        for (method, route), row in self._rows.copy().items():
            names = self.listener, method, route
            codes = row.codes()
            if not codes:
                continue
            into.add_by("clipper_http_requests_total", codes, *names)
            took: Snapshot = row.durations.snapshot()
            into.add("clipper_http_request_duration_seconds", took, *names)
