"""An event loop in a thread of its own."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Final, Generic, TypeVar

from clipper.component.component import Health, State, cause_of
from clipper.component.descriptors import require_descriptors
from clipper.component.stop import Stop
from clipper.component.threads import SYSTEM_THREADS, Threads
from clipper.component.worker import START_S, Worker
from clipper.errors import NotStarted

CLOSE_S: Final = 10.0  # limit of the coroutine `close`
DESCRIPTORS: Final = 12  # of an event loop, its wake-ups and its first sockets
_log = logging.getLogger(__name__)
T = TypeVar("T")


def fast_event_loop() -> asyncio.AbstractEventLoop:
    """Make an event loop of uvloop, or of asyncio where uvloop is not installed. It is imported
    here, since most programs that import this module run no server."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


class Loop(Generic[T]):
    """An event loop in a thread: opened, run, closed.

    open: a coroutine function, called with the loop, whose result start() returns. close: a
    coroutine function that is called at the end, also after a failed `open`. make: makes the loop,
    in the thread. on_end: called in the thread when it ends, however it ends. Threads: any.
    """

    def __init__(
        self,
        name: str,
        open: Callable[[asyncio.AbstractEventLoop], Coroutine[object, object, T]],
        close: Callable[[], Coroutine[object, object, None]] | None = None,
        *,
        make: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
        vital: bool = False,
        on_end: Callable[[], None] | None = None,
        threads: Threads = SYSTEM_THREADS,
    ) -> None:
        self.name, self.vital = name, vital
        self._open, self._close = open, close
        self._on_end = on_end
        self._make = make
        self._opened = threads.event()
        self._is_forever = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._worker = Worker(
            name,
            self._run,
            once=True,
            vital=vital,
            on_end=self._has_ended,
            threads=threads,
        )

    def start(self, limit_s: float = START_S) -> T:
        """Start the thread and return the result of `open`; raise its error.

        Raises NotStarted also when there are too few descriptors, or `open` takes too long.
        """
        require_descriptors(DESCRIPTORS, self.name)
        self._worker.start(limit_s)
        if not self._opened.wait(limit_s):
            self._worker.request_stop()
            raise NotStarted(f"{self.name} has not opened within {limit_s:.0f} s.")
        if self._result:
            return self._result[0]
        self._worker.end(limit_s)
        if self._error is not None:
            raise self._error
        raise NotStarted(f"{self.name} ended while it opened.")

    def request_stop(self) -> None:
        """End the loop after the callbacks that are due."""
        self._worker.request_stop()
        self.call(self._leave)

    def join(self, until_s: float) -> bool:
        """Wait for the end of the thread."""
        return self._worker.join(until_s)

    def end(self, limit_s: float = START_S) -> bool:
        """Stop the loop and wait for its thread; return whether it ended. Idempotent."""
        self.request_stop()
        return self._worker.end(limit_s)

    def call(self, function: Callable[..., object], *args: object) -> bool:
        """Call a function on the loop, soon; return False if there is no loop any more."""
        loop = self._loop
        if loop is None:
            return False
        try:
            loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # it is closed
            return False
        return True

    @property
    def is_running(self) -> bool:
        """Return whether the loop was opened and its thread has not ended."""
        return bool(self._result) and self._worker.is_running

    def health(self) -> Health:
        """Return the state; a loop that did not open has failed."""
        if self._error is not None:
            return Health(self.name, State.FAILED, cause_of(self._error), self.vital)
        return self._worker.health()

    def _run(self, stop: Stop) -> None:
        try:
            self._serve(stop)
        except Exception as error:
            if self._result:  # start() has returned: health() shows the error
                raise
            self._error = error

    def _serve(self, stop: Stop) -> None:
        loop = self._make()
        try:
            asyncio.set_event_loop(loop)
            self._loop = loop
            try:
                result = loop.run_until_complete(self._open(loop))
                self._result.append(result)
                self._opened.set()
                self._is_forever = True
                if not stop.requested:
                    loop.run_forever()
                if not stop.requested:
                    raise RuntimeError("the event loop ended by itself")
            finally:
                self._is_forever = False
                self._finish(loop)
        finally:
            self._loop = None
            asyncio.set_event_loop(None)
            loop.close()

    def _has_ended(self) -> None:
        try:
            if self._on_end is not None:
                self._on_end()
        finally:
            self._opened.set()

    def _leave(self) -> None:
        if self._is_forever and self._loop is not None:
            self._loop.stop()

    def _finish(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run `close`, and cancel what is left; an error of it is logged."""
        if self._close is not None:
            try:
                loop.run_until_complete(asyncio.wait_for(self._close(), CLOSE_S))
            except Exception:
                _log.exception("%s did not close in order", self.name)
        rest = asyncio.all_tasks(loop)
        for task in rest:
            task.cancel()
        with contextlib.suppress(Exception):
            if rest:
                loop.run_until_complete(asyncio.wait(rest, timeout=CLOSE_S))
            loop.run_until_complete(loop.shutdown_asyncgens())
