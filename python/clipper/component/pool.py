"""Threads that run calls which block."""

import contextlib
import functools
import logging
import queue
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Final, ParamSpec, TypeVar

from clipper.component.component import Health, State
from clipper.component.stop import Stop
from clipper.component.threads import SYSTEM_THREADS, Threads
from clipper.component.worker import START_S, Worker
from clipper_container.backoff import Backoff
from clipper_container.threads import PooledCall, run_call

P = ParamSpec("P")
T = TypeVar("T")
AGAIN_S_MIN: Final = 0.01  # until a thread that failed takes calls again, doubling
AGAIN_S_MAX: Final = 1.0
_JOIN_S: Final = 10.0
_log = logging.getLogger(__name__)


class Pool(Executor):
    """A fixed number of threads, which all run once start() has returned.

    `ThreadPoolExecutor` starts a thread when a call comes; if the system has none, the call stays
    in its queue without a thread to run it. Threads: any.
    """

    def __init__(self, name: str, size: int, threads: Threads = SYSTEM_THREADS) -> None:
        self.name, self.vital = name, False
        self._threads = threads
        self._calls: queue.SimpleQueue[PooledCall | None] = queue.SimpleQueue()
        self._workers = [
            Worker(
                f"{name}-{number}",
                self._run,
                again=Backoff(AGAIN_S_MIN, AGAIN_S_MAX),
                threads=threads,
            )
            for number in range(size)
        ]
        self._stop = Stop(threads)

    def start(self, limit_s: float = START_S) -> None:
        """Start all threads, or none. Raises NotStarted."""
        try:
            for worker in self._workers:
                worker.start(limit_s)
        except BaseException:
            self.request_stop()
            self.join(self._threads.now_s() + limit_s)
            raise

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """Run a call in one of the threads. Raises RuntimeError after request_stop()."""
        future: Future[T] = Future()
        call = future, functools.partial(fn, *args, **kwargs)
        # no call may come behind those that end the threads
        with self._stop.changed:
            if self._stop.requested:
                raise RuntimeError(f"{self.name} has been stopped: it takes no more calls")
            self._calls.put(call)
        return future

    def request_stop(self) -> None:
        """Take no more calls; the threads end after those that were submitted."""
        with self._stop.changed:
            if self._stop.requested:
                return
            self._stop.request()
            for worker in self._workers:
                worker.request_stop()
                self._calls.put(None)

    def join(self, until_s: float) -> bool:
        """Wait for all threads; return whether they have ended."""
        ended = [worker.join(until_s) for worker in self._workers]
        return all(ended)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Stop as an Executor does, but wait at most 10 seconds for the threads."""
        if cancel_futures:
            self._cancel()
        self.request_stop()
        if wait and not self.join(self._threads.now_s() + _JOIN_S):
            _log.warning("a call in %s has not ended within %.0f s", self.name, _JOIN_S)

    def health(self) -> Health:
        """Return the state of the worst thread."""
        each = [worker.health() for worker in self._workers]
        worse = [one for one in each if one.state in (State.FAILED, State.DEGRADED)]
        found = (worse or each)[0]
        return Health(self.name, found.state, found.why, self.vital)

    def _cancel(self) -> None:
        """Cancel the calls that no thread has begun."""
        with self._stop.changed, contextlib.suppress(queue.Empty):
            while not self._stop.requested:
                if (call := self._calls.get_nowait()) is not None:
                    call[0].cancel()

    def _run(self, stop: Stop) -> None:
        while (call := self._calls.get()) is not None:
            run_call(*call)
            del call  # so that its objects can be freed while the thread waits
