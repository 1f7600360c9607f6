"""Memory for the tables of engines before queries need it.

Where nobody has written yet, the system finds memory at the first write, which waits for it. The
loop thread writes all over the cache and the table of evaluations in flight, so in a first burst of
some thousand queries it spent 80 ms on that, and most of them were late. A thread writes to all
pages while the first container starts.
"""

import threading

from clipper_core.engine.engine import Engine


class EngineMemory:
    """Threads: any."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._threads: dict[Engine, threading.Thread] = {}
        self._stopping = threading.Event()

    def prepare(self, engine: Engine) -> None:
        """Begin to find memory for the tables of an engine with a cached model; once for each.

        Returns at once. The memory is bounded by limits.cache_bytes_max and limits.tasks_max.
        """
        with self._guard:
            if engine in self._threads or self._stopping.is_set():
                return
            thread = threading.Thread(
                target=self._run, args=(engine,), name="clipper-memory", daemon=True
            )
            self._threads[engine] = thread
            thread.start()

    def stop(self) -> None:
        """End what is under way, and begin nothing more."""
        self._stopping.set()
        with self._guard:
            threads = list(self._threads.values())
        for thread in threads:
            thread.join()

    def _run(self, engine: Engine) -> None:
        for touch in (engine.touch_pending, engine.touch_cache):
            start = touch()
            while start and not self._stopping.is_set():
                start = touch(start)
