"""Non-blocking cache of the shards' latest statistics, for pages that refresh every second."""

import logging
import threading
from collections.abc import Callable, Sequence

from clipper.component import Backoff, Health, Stop, WakeFlag, Worker
from clipper.errors import ClipperError
from clipper.metrics.stats import ShardReading

log = logging.getLogger("clipper.params")


class StatsCache:
    """Cache of statistics. Its thread starts with the first request, and reads once for each
    request.

    Threads: any. read: a function as StatsReader.read.
    """

    def __init__(self, read: Callable[[], Sequence[ShardReading]]) -> None:
        self._read = read
        self._last: Sequence[ShardReading] = ()
        self._guard = threading.Lock()
        self._worker = Worker("clipper-params-observer", self._run, again=Backoff(0.1, 5.0))
        self._requested = WakeFlag(self._worker.stop)

    def latest(self) -> Sequence[ShardReading]:
        """Return the statistics that the previous request caused to be read; at first none."""
        with self._guard:
            if not (self._worker.is_started or self._worker.stop.requested):
                self._worker.start()
            self._requested.set()
            return self._last

    def stop(self) -> None:
        """End the thread, at the latest when the shards' time to answer is over. Idempotent."""
        with self._guard:
            self._worker.request_stop()
        self._worker.end()

    def health(self) -> list[Health]:
        """Return the state of the thread, if there is one."""
        return [self._worker.health()] if self._worker.is_started else []

    def _run(self, stop: Stop) -> None:
        while self._requested.take() and not stop.requested:
            try:
                self._last = self._read()
            except ClipperError as error:
                log.info("the stats of the shards cannot be read: %s", error)
                self._last = ()
            except Exception:
                log.exception("the stats of the shards cannot be read")
                self._last = ()
