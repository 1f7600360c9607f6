"""Requests by route and status, and how long they took: counted on the event loop's thread, and by
the door; read by any."""

import time
from collections import Counter as Counts
from collections.abc import Callable

from clipper.metrics.samples import OTHER, Samples
from clipper_core.runtime.histogram import Counter, LatencyHistogram, Snapshot

now_ns = time.monotonic_ns


class Row:
    """Of one method and route. ok: those with 200 that the door answered; the others are in
    `by_code`."""

    __slots__ = ("by_code", "durations", "ok")

    def __init__(self) -> None:
        self.by_code: dict[int, int] = {}
        self.ok = Counter()
        self.durations = LatencyHistogram()

    def codes(self) -> dict[int, int]:
        codes, ok = self.by_code.copy(), self.ok.value
        return {**codes, 200: codes.get(200, 0) + ok} if ok else codes


class TlsCounts:
    """Of the TLS of one listener. ends_s: when its certificate does. Threads: count from one; the
    rest any."""

    def __init__(self, listener: str) -> None:
        self.listener = listener
        self.ends_s = 0
        self._outcomes: Counts[str] = Counts({"ok": 0})

    def count(self, outcome: str) -> None:
        self._outcomes[outcome] += 1

    def collect(self, into: Samples) -> None:
        for outcome, count in self._outcomes.copy().items():
            into.add("clipper_tls_handshakes_total", count, self.listener, outcome)
        if self.ends_s:
            into.add("clipper_tls_certificate_ends_seconds", self.ends_s, self.listener)


class HttpCounts:
    """Of one listener. route: a pattern of the routing table; what is none of ours is `_other`,
    whatever it was, and its method too: clients make up paths without end. Threads: count from one;
    the rest any."""

    def __init__(self, listener: str) -> None:
        self.listener = listener
        self.connections = 0
        self.held: Callable[[], int] = lambda: 0  # connections of the door
        self._rows: dict[tuple[str, str], Row] = {}

    def row(self, method: str, route: str) -> Row:
        return self._rows.setdefault((method, route), Row())

    def count(self, method: str, route: str, code: int, began_ns: int) -> None:
        key = (method, route) if route else (OTHER, OTHER)
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = Row()
        row.by_code[code] = row.by_code.get(code, 0) + 1
        row.durations.record((now_ns() - began_ns) // 1000)

    def collect(self, into: Samples) -> None:
        into.add("clipper_http_connections", self.connections + self.held(), self.listener)
        for (method, route), row in self._rows.copy().items():
            names = self.listener, method, route
            codes = row.codes()
            if not codes:
                continue
            for code, count in codes.items():
                into.add("clipper_http_requests_total", count, *names, str(code))
            took: Snapshot = row.durations.snapshot()
            into.add("clipper_http_request_duration_seconds", took, *names)
