"""The queue of loads of one instance, its pace, and statistics of how long loads take."""

import heapq
import math
from dataclasses import dataclass, replace
from typing import Final

# assumed duration of a load while none of its type is known; at least a third of the limit
SEED_MS: Final = 3000.0
PACE_LOADS: Final = 8.0  # loads that the pace is an average of
SLOW: Final = 4.0  # times the pace: more than that is one stall, not what loads take
FEW: Final = 20  # samples up to which the spread is trusted less


@dataclass(frozen=True, slots=True)
class QueuedLoad:
    """A load that waits for its turn.

    used_ms: last use of the model; orders the loads that no request waits for. waiting: a request
    waits for the load; such loads go first, in the order in which the requests began to wait.
    """

    model: str
    used_ms: int
    since_ms: int
    waiting: bool = False
    size_bytes: int = 0


class LoadQueue:
    """A bounded priority queue of loads.

    Loads that a request waits for go first, longest waiting first; then the most recently used.
    When the queue is full, a load with a waiting request replaces the least recently used one
    without. waiting: how many loads a request waits for. Threads: one at a time.
    """

    def __init__(self, loads_max: int = 10_000) -> None:
        self.loads_max = loads_max
        self._loads: dict[str, QueuedLoad] = {}
        self._heap: list[tuple[bool, int, int, str, QueuedLoad]] = []
        self.waiting = 0
        self._count = 0

    def __len__(self) -> int:
        return len(self._loads)

    def __contains__(self, model: object) -> bool:
        return model in self._loads

    def push(self, load: QueuedLoad) -> QueuedLoad | None:
        """Add a load, or raise the priority of the one that is queued for the model.

        Returns the load that has no place in the queue: `load` itself, one that it replaced, or
        None.
        """
        held = self._loads.get(load.model)
        if held is not None:
            self._put(
                replace(
                    held,
                    waiting=held.waiting or load.waiting,
                    since_ms=load.since_ms if load.waiting and not held.waiting else held.since_ms,
                    used_ms=max(held.used_ms, load.used_ms),
                    size_bytes=load.size_bytes or held.size_bytes,
                )
            )
            return None
        gone: QueuedLoad | None = None
        if len(self._loads) >= self.loads_max:
            if not load.waiting or self.waiting == len(self._loads):
                return load
            gone = min(
                (held for held in self._loads.values() if not held.waiting),
                key=lambda held: held.used_ms,
            )
            self.drop(gone.model)
        self._put(load)
        return gone

    def promote(self, model: str, now_ms: int) -> bool:
        """Mark that a request waits for the model. Returns False if it is not queued."""
        held = self._loads.get(model)
        if held is None:
            return False
        self.push(replace(held, waiting=True, since_ms=now_ms, used_ms=max(held.used_ms, now_ms)))
        return True

    def pop(self) -> QueuedLoad | None:
        """Remove and return the load with the highest priority; None if the queue is empty."""
        while self._heap:
            *_, load = heapq.heappop(self._heap)
            if self._loads.get(load.model) is load:
                self._forget(load)
                return load
        return None

    def drop(self, model: str) -> QueuedLoad | None:
        """Remove and return the load of a model, if there is one."""
        held = self._loads.get(model)
        if held is not None:
            self._forget(held)
        return held

    def _forget(self, load: QueuedLoad) -> None:
        del self._loads[load.model]
        self.waiting -= load.waiting

    def _put(self, load: QueuedLoad) -> None:
        held = self._loads.get(load.model)
        self.waiting += load.waiting - (held.waiting if held else False)
        self._loads[load.model] = load
        self._count += 1
        heapq.heappush(
            self._heap,
            (
                not load.waiting,
                load.since_ms if load.waiting else -load.used_ms,
                self._count,
                "",
                load,
            ),
        )
        if len(self._heap) > 64 + 2 * len(self._loads):
            self._heap = [
                entry for entry in self._heap if self._loads.get(entry[-1].model) is entry[-1]
            ]
            heapq.heapify(self._heap)


class LoadPace:
    """The pace of an instance: how many loads it makes, from how long each takes a place.

    slot_ms: moving average of the time from the start of a load until the next may start; 0 while
    none is known. With n places in use, one is free every slot_ms / n. rest_ms: what a load takes
    besides, on average: its claim before, and the connection to the server after. Source: Little
    (1961).
    """

    def __init__(self) -> None:
        self.slot_ms = self.rest_ms = 0.0

    def add(self, took_ms: float) -> None:
        """Add a load; one that was far slower than the others counts as `SLOW` times their mean."""
        if self.slot_ms:
            took_ms = min(took_ms, SLOW * self.slot_ms)
        self.slot_ms += (took_ms - self.slot_ms) / PACE_LOADS if self.slot_ms else took_ms

    def wait_ms(self, ahead: int, places: int) -> float:
        """Return the wait until a load can start. ahead: loads that run, or start before it."""
        return max(0, ahead + 1 - places) * self.slot_ms / places

    def ready_ms(self, ahead: int, places: int) -> float:
        """Return the time until a load serves its queries."""
        return self.wait_ms(ahead, places) + self.slot_ms + self.rest_ms

    def correct(self, late_ms: float) -> None:
        """Add the error of a forecast: by how much a load served later than it said."""
        late_ms = min(late_ms, SLOW * (self.slot_ms + self.rest_ms))
        self.rest_ms = max(0.0, self.rest_ms + late_ms / PACE_LOADS)

    def per_second(self, places: int) -> float:
        """Return the rate of loads while all places are in use; infinite while it is not known."""
        return 1000 * places / self.slot_ms if self.slot_ms else math.inf


@dataclass(slots=True)
class _Moments:
    count: int = 0
    mean: float = 0.0
    squares: float = 0.0


class LoadTimes:
    """Durations of loads by model type, as running means and variances.

    limit_s: longest time that one load may take. Source: Welford (1962). Threads: one at a time.
    """

    def __init__(self, limit_s: float = 30.0) -> None:
        self.limit_ms = limit_s * 1000
        self._types: dict[str, _Moments] = {}

    def add(self, type: str, took_ms: float) -> None:
        """Add a successful load. took_ms: from its start, without the time in the queue."""
        seen = self._types.setdefault(type, _Moments())
        seen.count += 1
        delta = took_ms - seen.mean
        seen.mean += delta / seen.count
        seen.squares += delta * (took_ms - seen.mean)

    def count(self, type: str) -> int:
        """Return the number of loads of a type that were added."""
        seen = self._types.get(type)
        return seen.count if seen else 0

    def mean_ms(self, type: str) -> float:
        """Return the mean duration; a default while none is known."""
        seen = self._types.get(type)
        return seen.mean if seen else self._seed_ms

    def assumed_ms(self, type: str) -> float:
        """Return the time after which a load can be assumed to have succeeded.

        The mean plus five standard deviations; plus three when many loads are known.
        """
        seen = self._types.get(type)
        if seen is None:
            return self._seed_ms
        if seen.count == 1:
            return min(2 * seen.mean, self.limit_ms)
        deviation = math.sqrt(seen.squares / (seen.count - 1))
        return min(seen.mean + (5 if seen.count <= FEW else 3) * deviation, self.limit_ms)

    @property
    def _seed_ms(self) -> float:
        return min(max(SEED_MS, self.limit_ms / 3), self.limit_ms)
