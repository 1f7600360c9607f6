"""A thread whose end is known."""

import logging
import threading
from collections.abc import Callable
from typing import Final

from clipper.component.component import Health, Lifecycle, State, cause_of
from clipper.component.stop import Stop
from clipper.component.threads import SYSTEM_THREADS, RunningThread, Threads
from clipper.errors import NotStarted, ShuttingDown
from clipper_container.backoff import STEADY_S, Backoff

START_S: Final = 10.0  # limit of the start of a component
_log = logging.getLogger(__name__)


class Worker:
    """A thread that runs one function until it is stopped.

    run: gets the `Stop` of this worker, and returns soon after it is requested.
    once: `run` ends by itself when its work is done; otherwise a return without a request is an
        error too.
    again: the pauses after an error of `run`, which is then called again; the worker is degraded
        until a call has lasted STEADY_S. None: an error is the end, and the worker has failed.
    on_end: called in the thread when it ends, however it ends; wakes what waits for its work.

    Every error is logged. Threads: any.
    """

    def __init__(
        self,
        name: str,
        run: Callable[[Stop], None],
        *,
        once: bool = False,
        again: Backoff | None = None,
        vital: bool = False,
        on_end: Callable[[], None] | None = None,
        threads: Threads = SYSTEM_THREADS,
    ) -> None:
        self.name, self.vital = name, vital
        self.stop = Stop(threads)
        self._function, self._on_end = run, on_end
        self._once, self._again = once, again
        self._threads = threads
        self._thread: RunningThread | None = None
        self._starting = threading.Lock()
        self._lifecycle = Lifecycle(name, vital=vital)
        self._began_s: float | None = None  # when the last call began; None: in a pause

    def start(self, limit_s: float = START_S) -> None:
        """Start the thread, and return when it runs.

        Raises NotStarted when the system has no thread for it, and may be called again then;
        ShuttingDown after request_stop().
        """
        if self.stop.requested:
            self._lifecycle.move(State.ENDED)
            raise ShuttingDown(f"{self.name} was stopped before it started.")
        if self._thread is not None or not self._lifecycle.move(State.RUNNING):
            raise RuntimeError(f"{self.name} has been started before")
        try:
            with self._starting:
                self._thread = self._threads.start(self._run, self.name)
        except (RuntimeError, MemoryError, OSError) as error:
            self._lifecycle.move(State.FAILED, cause_of(error))
            raise NotStarted(
                f"the thread {self.name} cannot start: {error}.",
                hint="Raise the limits of threads and memory: ulimit -u, pids.max, memory.max.",
            ) from error

    def request_stop(self) -> None:
        """Ask the thread to end."""
        self.stop.request()

    def join(self, until_s: float) -> bool:
        """Wait for the end of the thread until a time of the clock; return whether it ended.

        The thread itself gets False at once.
        """
        thread = self._thread
        if thread is None:
            return True
        if self._threads.is_current(thread):
            return False
        thread.join(max(0.0, until_s - self._threads.now_s()))
        return not thread.is_alive()

    def end(self, limit_s: float = START_S) -> bool:
        """Ask the thread to end and wait for it; return whether it ended. Idempotent.

        In the thread itself it only asks.
        """
        self.request_stop()
        ended = self.join(self._threads.now_s() + limit_s)
        thread = self._thread
        if not ended and thread is not None and not self._threads.is_current(thread):
            _log.warning("%s has not ended within %.1f s", self.name, limit_s)
        return ended

    @property
    def is_started(self) -> bool:
        """Return whether start() succeeded."""
        return self._thread is not None

    @property
    def is_running(self) -> bool:
        """Return whether it runs, or will be tried again after an error."""
        return self._lifecycle.state in (State.RUNNING, State.DEGRADED)

    def health(self) -> Health:
        """Return the state; one that has run for STEADY_S since its last error is healthy again."""
        began_s = self._began_s
        if (
            self._lifecycle.state is State.DEGRADED
            and began_s is not None
            and self._threads.now_s() - began_s >= STEADY_S
        ):
            self._lifecycle.move(State.RUNNING)
        return self._lifecycle.health()

    def _run(self) -> None:
        with self._starting:  # `_thread` is known before the function runs
            pass
        try:
            while not self._has_ended():
                pass
        finally:
            if self._on_end is not None:
                self._on_end()

    def _has_ended(self) -> bool:
        """Call the function once, and wait out a pause after an error; return whether that was
        the end."""
        self._began_s = began_s = self._threads.now_s()
        try:
            self._function(self.stop)
            if not (self._once or self.stop.requested):
                raise RuntimeError("it ended without having been told to")
        except Exception as error:
            return self._has_failed(error, began_s)
        except BaseException as error:
            self._lifecycle.move(State.FAILED, cause_of(error))
            raise
        self._lifecycle.move(State.ENDED)
        return True

    def _has_failed(self, error: Exception, began_s: float) -> bool:
        again = None if self.stop.requested else self._again
        if again is None:
            self._lifecycle.move(State.FAILED, cause_of(error))
            _log.error("%s has failed", self.name, exc_info=error)
            return True
        lived_s, self._began_s = self._threads.now_s() - began_s, None
        pause_s = again.ended(lived_s)
        self._lifecycle.move(State.DEGRADED, cause_of(error))
        _log.error("%s begins again in %.1f s", self.name, pause_s, exc_info=error)
        if self.stop.wait(pause_s):
            self._lifecycle.move(State.ENDED)
            return True
        return False
