"""The thread of a node: its event loop, and a pool for calls that block on the store."""

import asyncio
import functools
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, wait
from typing import Final, ParamSpec, Protocol, TypeVar

from clipper.component import Health, Loop, Pool, Tasks
from clipper.errors import ShuttingDown

STORE_THREADS: Final = 4
STOP_S: Final = 30.0  # to leave the mesh, then to end the thread
_LOOK_S: Final = 1.0  # between two looks whether the loop still runs
_log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
Work = Coroutine[object, object, T]


class NodeLoop(Protocol):
    """The event loop of a node, and its threads for blocking calls.

    Threads: `run` and `call` from any other thread; the rest on the loop, unless stated.
    """

    tasks: Tasks

    @property
    def stopping(self) -> bool:
        """True once `stop` has been called."""

    def start(self) -> None:
        """Start the loop and its threads. Threads: any."""

    def stop(self, last: Callable[[], Work[None]]) -> None:
        """Run `last` on the loop, cancel all remaining tasks, and end. Threads: any."""

    def close(self) -> None:
        """Free the loop, which has been stopped. Threads: any."""

    def health(self) -> list[Health]:
        """Return the state of its threads. Threads: any."""

    def run(self, work: Work[T]) -> T:
        """Run a coroutine on the loop and wait for its result. ShuttingDown when the node ends."""

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Call a function on the loop, soon; ignored when the node has ended. Threads: any."""

    def call_later(self, seconds: float, function: Callable[..., object], *args: object) -> None:
        """Call a function on the loop after a delay."""

    async def run_blocking(
        self, function: Callable[P, T], *args: P.args, **keywords: P.kwargs
    ) -> T:
        """Call a function that blocks in another thread."""


class ThreadedNodeLoop:
    """An event loop in the thread `clipper-mesh`, with threads for blocking calls.

    stopping: whether `stop` has been called. Threads: `run` and `call` from any other thread; the
    rest on the loop, unless stated.
    """

    def __init__(self) -> None:
        self._loop = Loop("clipper-mesh", self._open, vital=True)
        self._pool = Pool("clipper-mesh-store", STORE_THREADS)
        self._event_loop: asyncio.AbstractEventLoop
        self._ident = 0
        self.stopping = False
        self.tasks = Tasks("the mesh")

    def start(self) -> None:
        """Start the threads, or none of them. Raises NotStarted. Threads: any."""
        self._pool.start()
        try:
            self._event_loop = self._loop.start()
        except BaseException:
            self._pool.shutdown()
            raise

    def stop(self, last: Callable[[], Work[None]]) -> None:
        """Run `last` on the loop, cancel all remaining tasks, and end the thread. Threads: any.

        The thread ends within STOP_S, also when `last` or a task does not. Raises what `last`
        raised.
        """
        self.stopping = True
        if not self._loop.is_running:
            return
        ending = asyncio.run_coroutine_threadsafe(last(), self._event_loop)
        try:
            if not wait((ending,), STOP_S).done:
                ending.cancel()
                _log.warning("the node has not left the mesh in good order within %g s", STOP_S)
            else:
                ending.result(0)
        finally:
            self._loop.end(STOP_S)  # cancels the tasks that are left: `run` raises ShuttingDown

    def close(self) -> None:
        """Wait for blocking calls, of a loop that has been stopped. Threads: any."""
        self._pool.shutdown()

    def health(self) -> list[Health]:
        """Return the state of the loop and of the threads."""
        return [self._loop.health(), self._pool.health(), *self.tasks.health()]

    async def _open(self, loop: asyncio.AbstractEventLoop) -> asyncio.AbstractEventLoop:
        self._ident = threading.get_ident()
        return loop

    def run(self, work: Work[T]) -> T:
        """Run a coroutine on the loop and wait for its result. ShuttingDown when the node ends."""
        if threading.get_ident() == self._ident:
            work.close()
            raise RuntimeError("the mesh's own thread cannot wait for itself")
        left = ShuttingDown("this node has left the mesh.", hint="Use another node.")
        if self.stopping or not self._loop.is_running:
            work.close()
            raise left
        try:
            waiting = asyncio.run_coroutine_threadsafe(work, self._event_loop)
        except RuntimeError:  # the loop is closed
            work.close()
            raise left from None
        if self.stopping:  # `stop` was called meanwhile, and may not see this task
            waiting.cancel()
        while not wait((waiting,), _LOOK_S).done:
            if not self._loop.is_running:  # its thread has ended, and with it the task
                raise left
        try:
            return waiting.result(0)
        except CancelledError:
            raise left from None

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Call a function on the loop, soon; ignored when the node has ended. Threads: any."""
        if not self._loop.call(function, *args) and not self.stopping:
            raise RuntimeError("the loop of the mesh does not run")

    def call_later(self, seconds: float, function: Callable[..., object], *args: object) -> None:
        """Call a function on the loop after a delay."""
        self._event_loop.call_later(seconds, function, *args)

    async def run_blocking(
        self, function: Callable[P, T], *args: P.args, **keywords: P.kwargs
    ) -> T:
        """Call a function that blocks, such as a call of the store, in a thread of the pool."""
        call = functools.partial(function, *args, **keywords)
        return await self._event_loop.run_in_executor(self._pool, call)
