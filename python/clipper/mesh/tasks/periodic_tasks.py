"""Coroutine functions that are called again and again while a node runs."""

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Mapping
from random import Random
from typing import Final

from clipper.component import Backoff
from clipper.errors import ClipperError
from clipper.mesh.node_loop import NodeLoop

AGAIN_S_MIN: Final = 0.01  # after an error, before the interval begins again
AGAIN_S_MAX: Final = 1.0
_log = logging.getLogger(__name__)


class PeriodicTasks:
    """Calls functions at fixed intervals until it is stopped. Threads: the event loop.

    entries: an interval in seconds and a function, by the name that health shows. A ClipperError
    is logged; after another error the task is degraded. In both cases it goes on. random: draws
    the pauses after errors; None: a generator of its own.
    """

    def __init__(
        self,
        loop: NodeLoop,
        entries: Mapping[str, tuple[float, Callable[[], Awaitable[None]]]],
        random: Random | None = None,
    ) -> None:
        self._loop = loop
        self._entries = entries
        self._random = random
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start one task for each function."""
        for name, (interval_s, function) in self._entries.items():
            run = functools.partial(self._repeat, interval_s, function)
            again = Backoff(AGAIN_S_MIN, AGAIN_S_MAX, rng=self._random)
            self._tasks.append(self._loop.tasks.keep(name, run, again))

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
