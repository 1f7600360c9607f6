"""Coroutine functions that are called again and again while a node runs."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from clipper.errors import ClipperError
from clipper.mesh.node_loop import NodeLoop

_log = logging.getLogger(__name__)


class PeriodicTasks:
    """Calls functions at fixed intervals until it is stopped. Threads: the event loop.

    entries: pairs of an interval in seconds and a function; an error is logged and the function
    is called again.
    """

    def __init__(
        self, loop: NodeLoop, entries: Sequence[tuple[float, Callable[[], Awaitable[None]]]]
    ) -> None:
        self._loop, self._entries = loop, entries
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start one task for each function."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._repeat(*entry)) for entry in self._entries]

    def stop(self) -> None:
        """Cancel the tasks."""
        for task in self._tasks:
            task.cancel()

    async def _repeat(self, interval_s: float, function: Callable[[], Awaitable[None]]) -> None:
        while not self._loop.stopping:
            await asyncio.sleep(interval_s)
            try:
                await function()
            except ClipperError as error:
                _log.info("the mesh: %s", error)
            except Exception:
                _log.exception("the periodic task %r of the mesh failed", function)
