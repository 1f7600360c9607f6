"""Changes of model records, several in one transaction of the store.

While one transaction is being written, further changes wait for the next one; so a change that
finds none under way is not delayed, and the number of transactions for each load falls as the rate
of loads rises. Changes of one record keep their order. Source: group commit, DeWitt et al., 1984.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final

from clipper.component import Tasks
from clipper.mesh.decisions.claims import ClaimRefused
from clipper.mesh.records import MeshModel
from clipper.mesh.registry import CopiesStep, RecordChange, Registry, Step

BATCH_MAX: Final = 24  # changes in one transaction; the store's limit is TXN_OPS_MAX
_Waiting = tuple[RecordChange, asyncio.Future[MeshModel | ClaimRefused]]
RunBlocking = Callable[..., Awaitable[Any]]


class RecordWriter:
    """Writes changes of records to the registry in the order in which they are given.

    run_blocking: runs a function that blocks in another thread. Threads: all on the event loop of
    the node.
    """

    def __init__(self, registry: Registry, run_blocking: RunBlocking, tasks: Tasks) -> None:
        self._registry, self._run_blocking, self._tasks = registry, run_blocking, tasks
        self._waiting: deque[_Waiting] = deque()
        self._writing = self._closed = False

    def close(self) -> None:
        """Cancel the changes that wait, and all that come."""
        self._closed = True
        for _, outcome in self._waiting:
            outcome.cancel()
        self._waiting.clear()

    def change(
        self, id: str, step: Step, lasting: bool = False
    ) -> "asyncio.Future[MeshModel | ClaimRefused]":
        """Change a record; see Registry.change. The future fails with its errors."""
        return self._add(self._registry.step(id, step, lasting))

    def change_copies(
        self, id: str, step: CopiesStep
    ) -> "asyncio.Future[MeshModel | ClaimRefused]":
        """Change a record by a step that gets the live holders; see Registry.change_copies."""
        return self._add(self._registry.copies_step(id, step, lasting=False))

    def _add(self, change: RecordChange) -> "asyncio.Future[MeshModel | ClaimRefused]":
        outcome: asyncio.Future[MeshModel | ClaimRefused]
        outcome = asyncio.get_running_loop().create_future()
        outcome.add_done_callback(lambda one: one.cancelled() or one.exception())  # if no one waits
        if self._closed:
            outcome.cancel()
            return outcome
        self._waiting.append((change, outcome))
        self._start()
        return outcome

    def _start(self) -> None:
        if self._waiting and not self._writing:
            self._writing = True
            self._tasks.spawn(self._write()).add_done_callback(self._on_written)

    def _on_written(self, _: "asyncio.Task[None]") -> None:
        """Go on with the next changes, also after a task that was cancelled before it ran."""
        self._writing = False
        self._start()

    async def _write(self) -> None:
        batch = self._take()
        found: list[MeshModel | ClaimRefused | Exception] = []
        try:
            changes = [change for change, _ in batch]
            found += await self._run_blocking(self._registry.change_all, changes)
        except Exception as error:
            found += [error] * len(batch)
        finally:
            for _, outcome in batch[len(found) :]:  # the node stops
                outcome.cancel()
        for (_, outcome), one in zip(batch, found, strict=True):
            if outcome.done():  # nobody waits any more
                continue
            if isinstance(one, Exception):
                outcome.set_exception(one)
            else:
                outcome.set_result(one)

    def _take(self) -> list[_Waiting]:
        """Return the next changes, at most one of each record."""
        taken: dict[str, _Waiting] = {}
        left: deque[_Waiting] = deque()
        while self._waiting and len(taken) < BATCH_MAX:
            one = self._waiting.popleft()
            if one[0].id in taken:
                left.append(one)
            else:
                taken[one[0].id] = one
        self._waiting.extendleft(reversed(left))
        return list(taken.values())
