"""Delayed calls on one thread."""

from __future__ import annotations

import heapq
import itertools
import sys
import threading
import time
import traceback
from collections.abc import Callable

from clipper_container.threads import KeptThread


class Timer:
    """A job that is due later. Threads: any."""

    __slots__ = ("_job",)

    def __init__(self, job: Callable[[], None]) -> None:
        self._job: Callable[[], None] | None = job

    def cancel(self, _: object = None) -> None:
        """Drop the job, and what it refers to. The argument allows it as a future's callback."""
        self._job = None

    def run(self) -> None:
        """Run the job, unless it was cancelled."""
        if (job := self._job) is not None:
            job()


class Timers:
    """Runs jobs after a delay. Jobs must be short. Threads: any."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._due: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()
        self._stopping = False
        self._thread = KeptThread("clipper-host-timers", self._run)

    def after(self, seconds: float, job: Callable[[], None]) -> Timer:
        """Run `job` on the timer thread after `seconds`, unless the timer is cancelled before."""
        timer = Timer(job)
        with self._change:
            heapq.heappush(self._due, (time.monotonic() + seconds, next(self._numbers), timer))
            if self._due[0][2] is timer:
                self._change.notify()
        return timer

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
                timer = heapq.heappop(self._due)[2]
            try:
                timer.run()
            except Exception:  # of one job, which delays no other
                traceback.print_exc(file=sys.stderr)
