"""The slowest queries of an application: what to look at when the p99 is too high.

An answer pays a comparison with the bar. The few above it are written down; `take` hands them over,
and the bar falls again, so that whoever takes once a second has the slowest of each second. Where
nobody takes, the bar only rises, and soon nothing passes.
"""

import heapq
import itertools
import threading
from collections.abc import Sequence
from typing import Final

from clipper.clock import wall_time_us
from clipper.types import VersionedModel
from clipper_core.results.future import Future
from clipper_core.runtime.status import Status

SLOWEST_QUERIES_MAX: Final = 5  # of each taking
MODELS_MAX: Final = 16  # of one query


class Slowest:
    """Threads: any. bar_us: a query that took longer is among the slowest."""

    __slots__ = ("_heap", "_lock", "_numbers", "bar_us")

    def __init__(self) -> None:
        self.bar_us = -1
        self._heap: list[tuple[int, int, dict[str, object]]] = []
        self._lock = threading.Lock()
        self._numbers = itertools.count()

    def add(
        self,
        future: Future,
        models: Sequence[VersionedModel],
        used: Sequence[VersionedModel],
        reason: str,
    ) -> None:
        """Add a query that took longer than the bar, on the thread that answers it. models:
        queried, task by task."""
        took_us = future.latency_us
        n = min(len(models), len(future), MODELS_MAX)
        waited, took, ended = future.latencies_us()[:n].tolist(), took_us, wall_time_us()
        tasks = [
            {
                "model": str(models[i]),
                "status": future.status(i).name.lower(),
                "us": _shown(future.status(i), waited[i], took),
            }
            for i in range(n)
        ]
        row = {
            "number": f"{future.id:x}",
            "time_us": ended,
            "us": took_us,
            "tasks": tasks,
            "used": [str(one) for one in used],
            "reason": reason[:200],
        }
        with self._lock:
            entry = (took_us, next(self._numbers), row)
            if len(self._heap) < SLOWEST_QUERIES_MAX:
                heapq.heappush(self._heap, entry)
            elif took_us > self._heap[0][0]:
                heapq.heapreplace(self._heap, entry)
            if len(self._heap) == SLOWEST_QUERIES_MAX:
                self.bar_us = self._heap[0][0]

    def take(self) -> list[dict[str, object]]:
        """Return the slowest queries since the last call, the slowest first."""
        with self._lock:
            found, self._heap, self.bar_us = self._heap, [], -1
        return [row for _, _, row in sorted(found, key=lambda entry: -entry[0])]


def _shown(status: Status, waited_us: int, took_us: int) -> int:
    """Return when a task ended, or when the query was answered if that was earlier."""
    return took_us if status in (Status.PENDING, Status.CANCELLED) else waited_us
