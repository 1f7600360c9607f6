"""Delayed calls on one thread."""

from __future__ import annotations

import heapq
import itertools
import sys
import threading
import time
import traceback
from collections.abc import Callable


class Timers:
    """Runs jobs after a delay. Jobs must be short; they cannot be cancelled. Threads: any."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="clipper-host-timers", daemon=True)
        self._thread.start()

    def after(self, seconds: float, job: Callable[[], None]) -> None:
        """Run `job` on the timer thread after `seconds`."""
        with self._change:
            heapq.heappush(self._due, (time.monotonic() + seconds, next(self._numbers), job))
            if self._due[0][2] is job:
                self._change.notify()

    def close(self) -> None:
        """Stop the thread; pending jobs are dropped."""
        with self._change:
            self._stopping = True
            self._change.notify()
        self._thread.join(1.0)

    def _run(self) -> None:
        while True:
            with self._change:
                while not self._stopping and not (
                    self._due and self._due[0][0] <= time.monotonic()
                ):
                    self._change.wait(self._due[0][0] - time.monotonic() if self._due else None)
                if self._stopping:
                    return
                job = heapq.heappop(self._due)[2]
            try:
                job()
            except Exception:
                traceback.print_exc(file=sys.stderr)
