"""Export of spans: a thread makes them and posts them to a collector by OTLP/HTTP.

A request costs one append to a bounded queue. Requests that find the queue full are dropped and
counted, and so are those that the collector has not taken after `tracing.tries_max` posts. The
collector delays nothing except, for a moment, the closing of the server.
"""

import logging
from collections import Counter, deque
from collections.abc import Sequence

from clipper.component import Backoff, Health, Stop, WakeFlag, Worker
from clipper.frontend.http_post import Poster
from clipper.frontend.tracing.context import sampler_named
from clipper.frontend.tracing.otlp import encode
from clipper.frontend.tracing.spans import Find, FinishedRequest, Spans, epoch_ns
from clipper.metrics import Samples
from clipper.settings.tracing import ExportSettings, TracingSettings

_log = logging.getLogger(__name__)
AGAIN_S_MAX = 10.0  # between two tries of the thread after an error


class SpanExporter:
    """Exports the spans of requests. Threads: put from any; start and stop from one.

    sample: decides which traces are recorded.
    """

    def __init__(
        self, settings: TracingSettings, exporting: ExportSettings, version: str, find: Find
    ) -> None:
        """Parse the settings. Raises ConfigError for an invalid URL."""
        assert exporting.url is not None
        self.sample = sampler_named(exporting.sampler, exporting.share)
        self._settings, self._exporting, self._version = settings, exporting, version
        headers = {
            "content-type": "application/x-protobuf",
            "user-agent": f"clipper/{version}",
        } | exporting.headers
        self._worker = Worker(
            "clipper-otlp", self._run, again=Backoff(settings.delay_s, AGAIN_S_MAX)
        )
        self._more = WakeFlag(self._worker.stop)
        self._poster = Poster(
            "tracing.endpoint",
            exporting.url,
            headers,
            exporting.ca,
            exporting.timeout_s,
            settings.tries_max,
            self._worker.stop,
            "spans",
            4318,
        )
        self._spans = Spans(find)
        self._queue: deque[FinishedRequest] = deque()
        self._counts: Counter[str] = Counter({"exported": 0, "dropped": 0})

    def put(self, finished: FinishedRequest) -> None:
        """Queue a finished request."""
        if len(self._queue) >= self._settings.queue_max:
            self._counts["dropped"] += 1
            return
        self._queue.append(finished)
        if len(self._queue) == self._settings.batch_max:
            self._more.set()

    def collect(self, into: Samples) -> None:
        """Add the exporter's counts to the metrics."""
        for outcome, count in self._counts.copy().items():
            into.add("clipper_traced_requests_total", count, outcome)
        into.add("clipper_traced_requests_waiting", len(self._queue))

    def start(self) -> None:
        """Start the thread. Raises NotStarted."""
        self._worker.start()

    def health(self) -> list[Health]:
        """Return the state of the thread."""
        return [self._worker.health()]

    def stop(self) -> None:
        """Send the rest if the collector takes it within two seconds, and stop the thread.
        Idempotent."""
        self._worker.end()

    def _run(self, stop: Stop) -> None:
        while not stop.requested:
            self._more.take(self._settings.delay_s)
            try:
                while self._queue:
                    self._send(self._taken())
            except Exception:
                _log.exception("exporting spans failed")
        self._counts["dropped"] += len(self._queue)
        self._queue.clear()

    def _taken(self) -> list[FinishedRequest]:
        return [
            self._queue.popleft() for _ in range(min(len(self._queue), self._settings.batch_max))
        ]

    def _send(self, batch: Sequence[FinishedRequest]) -> None:
        shift_ns = epoch_ns()
        body = encode(self._spans.of(batch, shift_ns), self._exporting.attributes, self._version)
        self._counts[self._poster.send(body)] += len(batch)
