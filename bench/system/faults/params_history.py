"""History of pushes and reads of counters, and a check of it.

Each push adds one to a counter: a row, trained with sgd at rate 1 by gradients of minus one. A push
takes effect at one moment between its beginning and its acknowledgement, or later if it was not
acknowledged; a read has the value of a moment within it, or at most `age_s` before. So a value is
right if it is between the pushes that were acknowledged in time and those that had begun. A push
that is not acknowledged yet may be read, and be gone with its shard until it is sent again: so a
later value may be less, and is not an error by itself.
"""

import threading
import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple


class Read(NamedTuple):
    """A read of a counter. least: pushes that it must have, by a token."""

    counter: int
    started_s: float
    ended_s: float
    value: float
    age_s: float
    least: int
    source: str


@dataclass
class PushHistory:
    """Pushes and reads by counter. Threads: any."""

    pushes: dict[int, list[list[float]]] = field(default_factory=dict)  # [started, acknowledged]
    reads: list[Read] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def push(self, counter: int, push: Callable[[], object]) -> None:
        """Push, and note when it began and when it was acknowledged, if it was."""
        times = [time.monotonic(), float("inf")]
        with self._lock:
            self.pushes.setdefault(counter, []).append(times)
        push()
        times[1] = time.monotonic()

    def read(
        self,
        counter: int,
        read: Callable[[], float],
        source: str,
        *,
        age_s: float = 0.0,
        least: int = 0,
    ) -> None:
        """Read, and note what was read."""
        started_s = time.monotonic()
        value = read()
        with self._lock:
            ended_s = time.monotonic()
            self.reads.append(Read(counter, started_s, ended_s, value, age_s, least, source))

    def errors(self) -> list[str]:
        """Return what cannot be, in words."""
        found = []
        starts = {k: sorted(start for start, _ in each) for k, each in self.pushes.items()}
        ends = {k: sorted(end for _, end in each) for k, each in self.pushes.items()}
        for one in self.reads:
            acknowledged = bisect_right(ends.get(one.counter, []), one.started_s - one.age_s)
            least = max(one.least, acknowledged)
            most = bisect_right(starts.get(one.counter, []), one.ended_s)
            if not least <= one.value <= most:
                found.append(
                    f"counter {one.counter}: {one.source} says {one.value:g}, where at least"
                    f" {least} pushes were acknowledged and {most} had begun"
                )
        return found
