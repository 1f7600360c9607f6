"""Non-blocking cache of the shards' latest statistics, for pages that refresh every second."""

import logging
import threading
from collections.abc import Callable, Sequence

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
        self._requested = threading.Semaphore(0)
        self._guard = threading.Lock()
        self._ending = False
        self._thread: threading.Thread | None = None

    def latest(self) -> Sequence[ShardReading]:
        """Return the statistics that the previous request caused to be read; at first none."""
        with self._guard:
            if self._thread is None and not self._ending:
                self._thread = threading.Thread(
                    target=self._run, name="clipper-params-observer", daemon=True
                )
                self._thread.start()
            self._requested.release()
            return self._last

    def stop(self) -> None:
        """End the thread, at the latest when the shards' time to answer is over. Idempotent."""
        with self._guard:
            self._ending, thread = True, self._thread
            self._requested.release()
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            self._requested.acquire()
            while self._requested.acquire(blocking=False):
                pass  # requests during a read share the next one
            if self._ending:
                return
            try:
                self._last = self._read()
            except ClipperError as error:
                log.info("the stats of the shards cannot be read: %s", error)
                self._last = ()
            except Exception:
                log.exception("the stats of the shards cannot be read")
                self._last = ()
