"""Asyncio tasks that run to their end independently of the code that started them."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import TypeVar

from clipper.component.component import Health, Lifecycle, State, cause_of
from clipper_container.backoff import STEADY_S, Backoff

_log = logging.getLogger(__name__)
T = TypeVar("T")


class Tasks:
    """The tasks of one event loop: kept from garbage collection, with their errors logged.

    Threads: the loop; health() any.
    """

    def __init__(self, name: str = "tasks") -> None:
        self.name = name
        self._tasks: dict[asyncio.Task[object], None] = {}  # in the order of their starts
        self._kept: dict[asyncio.Task[object], _Kept] = {}

    def __len__(self) -> int:
        """Return the number of tasks that have not ended."""
        return len(self._tasks)

    def spawn(self, work: Coroutine[object, object, T]) -> "asyncio.Task[T]":
        """Start a task that ends by itself, and return it; its error is logged."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._on_done)
        return task

    def keep(
        self, name: str, run: Callable[[], Coroutine[object, object, None]], again: Backoff
    ) -> "asyncio.Task[None]":
        """Run a coroutine function until it is cancelled; after an error, again with a pause.
        Return its task."""
        kept = _Kept(name, run, again)
        task = self.spawn(kept.run())
        self._kept[task] = kept
        return task

    async def cancel(self) -> None:
        """Cancel all tasks and wait until they have ended."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def health(self) -> list[Health]:
        """Return the state of each task that is kept running."""
        return [kept.health() for kept in tuple(self._kept.values())]

    def _on_done(self, task: "asyncio.Task[object]") -> None:
        self._tasks.pop(task, None)
        error = None if task.cancelled() else task.exception()
        if error is None:
            self._kept.pop(task, None)
            return
        _log.error("a task of %s failed", self.name, exc_info=error)
        if (kept := self._kept.get(task)) is not None:
            kept.lifecycle.move(State.FAILED, cause_of(error))


class _Kept:
    """A coroutine function that runs again after an error. Threads: the loop; health() any."""

    def __init__(
        self, name: str, run: Callable[[], Coroutine[object, object, None]], again: Backoff
    ) -> None:
        self._function, self._again = run, again
        self._loop = asyncio.get_running_loop()
        self._began_s: float | None = None  # when the last call began; None: in a pause
        self.lifecycle = Lifecycle(name)
        self.lifecycle.move(State.RUNNING)

    async def run(self) -> None:
        """Run the function until it returns or is cancelled."""
        lifecycle = self.lifecycle
        while True:
            self._began_s = began_s = self._loop.time()
            try:
                await self._function()
                lifecycle.move(State.ENDED)
                return
            except Exception as error:
                self._began_s = None
                pause_s = self._again.ended(self._loop.time() - began_s)
                lifecycle.move(State.DEGRADED, cause_of(error))
                _log.exception("%s begins again in %.1f s", lifecycle.name, pause_s)
            await asyncio.sleep(pause_s)

    def health(self) -> Health:
        """Return the state; a task that has run for STEADY_S since its last error is healthy."""
        began_s, lifecycle = self._began_s, self.lifecycle
        if (
            lifecycle.state is State.DEGRADED
            and began_s is not None
            and self._loop.time() - began_s >= STEADY_S
        ):
            lifecycle.move(State.RUNNING)
        return lifecycle.health()
