"""Push of metrics in InfluxDB's line protocol, at regular intervals, by a thread."""

import logging
from collections import Counter
from collections.abc import Callable

from clipper.clock import wall_time_us
from clipper.component import Backoff, Health, Stop, Worker
from clipper.frontend.http_post import Poster
from clipper.metrics import Samples, influx
from clipper.settings.influx import InfluxSettings

_log = logging.getLogger(__name__)


class InfluxPush:
    """Pushes all metrics to an InfluxDB server. Threads: start and stop from one.

    collect: returns the samples. old_names: as `http.metrics_old_names`. A failed push is dropped,
    because the next one contains all metrics.
    """

    def __init__(
        self,
        settings: InfluxSettings,
        collect: Callable[[], Samples],
        version: str,
        old_names: bool = False,
    ) -> None:
        """Parse the settings. Raises ConfigError for an invalid URL."""
        self._collect, self._settings = collect, settings
        self._old_names = old_names
        self._counts: Counter[str] = Counter({"exported": 0, "dropped": 0})
        self._worker = Worker(
            "clipper-influx", self._run, again=Backoff(settings.each_s, settings.each_s)
        )
        headers = {"content-type": "text/plain; charset=utf-8", "user-agent": f"clipper/{version}"}
        if settings.token:
            headers["authorization"] = f"Token {settings.token}"
        self._poster = Poster(
            "influx.url",
            settings.url,
            headers,
            settings.ca,
            settings.timeout_s,
            settings.tries_max,
            self._worker.stop,
            "metrics",
            8086,
        )

    def collect(self, into: Samples) -> None:
        """Add the counts of pushes to the metrics."""
        for outcome, count in self._counts.copy().items():
            into.add("clipper_influx_pushes_total", count, outcome)

    def start(self) -> None:
        """Start the thread. Raises NotStarted."""
        self._worker.start()

    def stop(self) -> None:
        """Stop the thread. Idempotent."""
        self._worker.end()

    def health(self) -> list[Health]:
        """Return the state of the thread."""
        return [self._worker.health()]

    def _run(self, stop: Stop) -> None:
        while not stop.wait(self._settings.each_s):
            try:
                lines = influx(self._collect(), wall_time_us() * 1000, self._old_names)
                self._counts[self._poster.send(lines)] += 1
            except Exception:
                _log.exception("pushing metrics failed")
