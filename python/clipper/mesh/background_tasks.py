"""Asyncio tasks that run to their end independently of the code that started them."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import TypeVar

_log = logging.getLogger(__name__)
T = TypeVar("T")


class BackgroundTasks:
    """Keeps references to tasks and logs the errors of those that fail.

    Threads: all on one event loop.
    """

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[object], None] = {}  # in the order of their starts

    def spawn(self, work: Coroutine[object, object, T]) -> "asyncio.Task[T]":
        """Start a task and return it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._on_done)
        return task

    async def cancel(self) -> None:
        """Cancel all tasks and wait until they have ended."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _on_done(self, task: "asyncio.Task[object]") -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a background task of the mesh failed", exc_info=error)
