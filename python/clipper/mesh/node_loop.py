"""The thread of a node: its event loop, and a pool for calls that block on the store."""

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Final, ParamSpec, Protocol, TypeVar

from clipper.errors import ShuttingDown
from clipper.mesh.background_tasks import BackgroundTasks

STORE_THREADS: Final = 4
P = ParamSpec("P")
T = TypeVar("T")
Work = Coroutine[object, object, T]


class NodeLoop(Protocol):
    """The event loop of a node, and its threads for blocking calls.

    Threads: `run` and `call` from any other thread; the rest on the loop, unless stated.
    """

    tasks: BackgroundTasks

    @property
    def stopping(self) -> bool:
        """True once `stop` has been called."""

    def start(self) -> None:
        """Start the loop and its threads. Threads: any."""

    def stop(self, last: Callable[[], Work[None]]) -> None:
        """Run `last` on the loop, cancel all remaining tasks, and end. Threads: any."""

    def close(self) -> None:
        """Free the loop, which has been stopped. Threads: any."""

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

    Threads: `run` and `call` from any other thread; the rest on the loop, unless stated.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="clipper-mesh", daemon=True)
        self._pool = ThreadPoolExecutor(STORE_THREADS, "clipper-mesh-store")
        self._stopping = False
        self.tasks = BackgroundTasks()

    @property
    def stopping(self) -> bool:
        """True once `stop` has been called."""
        return self._stopping

    def start(self) -> None:
        """Start the threads. Threads: any."""
        self._thread.start()
        all_started = threading.Barrier(STORE_THREADS)
        for _ in range(STORE_THREADS):
            self._pool.submit(all_started.wait)

    def stop(self, last: Callable[[], Work[None]]) -> None:
        """Run `last` on the loop, cancel all remaining tasks, and end the thread. Threads: any."""
        self._stopping = True
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._end(last()), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def close(self) -> None:
        """Wait for blocking calls and free the loop, which has been stopped. Threads: any."""
        self._pool.shutdown()
        self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _end(self, last: Work[None]) -> None:
        await last
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:  # threads that wait for one of them in `run` get ShuttingDown
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    def run(self, work: Work[T]) -> T:
        """Run a coroutine on the loop and wait for its result. ShuttingDown when the node ends."""
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("the mesh's own thread cannot wait for itself")
        left = ShuttingDown("this node has left the mesh.", hint="Use another node.")
        if self._stopping:
            work.close()
            raise left
        try:
            waiting = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # the loop is closed
            work.close()
            raise left from None
        if self._stopping:  # `stop` was called meanwhile, and may not see this task
            waiting.cancel()
        try:
            return waiting.result()
        except CancelledError:
            raise left from None

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Call a function on the loop, soon; ignored when the node has ended. Threads: any."""
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is closed
            if not self._stopping:
                raise

    def call_later(self, seconds: float, function: Callable[..., object], *args: object) -> None:
        """Call a function on the loop after a delay."""
        self._loop.call_later(seconds, function, *args)

    async def run_blocking(
        self, function: Callable[P, T], *args: P.args, **keywords: P.kwargs
    ) -> T:
        """Call a function that blocks, such as a call of the store, in a thread of the pool."""
        call = functools.partial(function, *args, **keywords)
        return await self._loop.run_in_executor(self._pool, call)
