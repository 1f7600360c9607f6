"""Memory for the tables of engines before queries need it.

Where nobody has written yet, the system finds memory at the first write, which waits for it. The
loop thread writes all over the cache and the table of evaluations in flight, so in a first burst of
some thousand queries it spent 80 ms on that, and most of them were late. A thread writes to all
pages while the first container starts.
"""

import logging
import threading

from clipper.component import Stop, Worker
from clipper.errors import NotStarted
from clipper_core.engine.engine import Engine

_log = logging.getLogger(__name__)


class EngineMemory:
    """Threads: any."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._workers: dict[Engine, Worker] = {}
        self._stopping = False

    def prepare(self, engine: Engine) -> None:
        """Begin to find memory for the tables of an engine with a cached model; once for each.

        Returns at once. Without a thread for it, queries find the memory themselves. The memory is
        bounded by limits.cache_bytes_max and limits.tasks_max.
        """
        with self._guard:
            if engine in self._workers or self._stopping:
                return

            def touch(stop: Stop) -> None:
                _touch(engine, stop)

            worker = Worker("clipper-memory", touch, once=True)
            try:
                worker.start()
            except NotStarted as error:
                _log.warning("the first burst of queries may be late: %s", error)
                return
            self._workers[engine] = worker

    def stop(self) -> None:
        """End what is under way, and begin nothing more."""
        with self._guard:
            self._stopping = True
            workers = list(self._workers.values())
        for worker in workers:
            worker.end()


def _touch(engine: Engine, stop: Stop) -> None:
    for touch in (engine.touch_pending, engine.touch_cache):
        start = touch()
        while start and not stop.requested:
            start = touch(start)
