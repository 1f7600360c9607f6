"""Threads that go on after any error, and a pool of them.

Nothing looks after the threads of a container but the container. A function that fails is called
again with a pause, and its error is in the log; a thread that the system does not have is an error
of the call that starts it.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from clipper_container.backoff import Backoff

AGAIN_S_MIN = 0.01  # after an error, doubling; a function that ran for long begins here again
AGAIN_S_MAX = 5.0
_T = TypeVar("_T")
PooledCall = tuple[Future[Any], Callable[[], object]]


class KeptThread:
    """A thread that runs a function until it returns. After any error, also one that is no
    Exception, the function is called again. Threads: any.

    Raises RuntimeError when the system has no thread.
    """

    def __init__(self, name: str, run: Callable[[], None]) -> None:
        self._function = run
        self._again = Backoff(AGAIN_S_MIN, AGAIN_S_MAX)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def join(self, seconds: float) -> bool:
        """Wait for the end of the function, at most so many seconds; return whether it came."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._is_done():
            pass

    def _is_done(self) -> bool:
        """Call the function once; wait out a pause after an error, which itself may be a lack of
        memory that befalls this function too."""
        began_s = time.monotonic()
        try:
            self._function()
            return True
        except BaseException:
            with contextlib.suppress(BaseException):
                traceback.print_exc(file=sys.stderr)
            with contextlib.suppress(BaseException):
                time.sleep(self._again.ended(time.monotonic() - began_s))
            return False


class CallPool:
    """A fixed number of threads for calls that block, all of which run from the start.

    `ThreadPoolExecutor` starts a thread when a call comes; if the system has none, the call stays
    in its queue without a thread to run it. Threads: any. Raises RuntimeError when the system has
    no threads.
    """

    def __init__(self, name: str, size: int) -> None:
        self._calls: queue.SimpleQueue[PooledCall | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # no call may come behind those that end the threads
        self._closed = False
        self._threads: list[KeptThread] = []
        try:
            for number in range(size):
                self._threads.append(KeptThread(f"{name}-{number}", self._run))
        except BaseException:
            self.close()
            raise

    def submit(self, function: Callable[[], _T]) -> Future[_T]:
        """Run a function in one of the threads. Raises RuntimeError after close()."""
        future: Future[_T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool is closed")
            self._calls.put((future, function))
        return future

    def close(self) -> None:
        """Take no more calls, and cancel those that no thread has begun. Does not wait."""
        with self._lock:
            self._closed = True
            with contextlib.suppress(queue.Empty):
                while True:
                    if (call := self._calls.get_nowait()) is not None:
                        call[0].cancel()
            for _ in self._threads:
                self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            run_call(*call)
            del call  # so that its objects can be freed while the thread waits


def run_call(future: Future[Any], function: Callable[[], object]) -> None:
    """Call a function, unless it was cancelled, and keep its result."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
