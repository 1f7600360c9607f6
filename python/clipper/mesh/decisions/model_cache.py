"""Eviction policy of one instance's memory: LRU weighted by what a model is worth.

The worth of a model is its demand times the cost of a reload, divided by its size. Demand is a
count of uses that decays with a half-life: with a short one this is LRU, with a very long one LFU.
Half-lives are counted in uses, `USES` for each resident model, so that a small memory forgets as
fast as it turns over; where little is used they are counted by the clock. All counts decay alike,
so the order of two models changes only when one of them is used. With time t in half-lives and
`weight` = log2(sum of 2 ** t over the uses of a model), the model with the least

    worth = weight + log2(cost) - log2(size)

is evicted first, and this number is constant between uses of the model. A heap keeps it; uses only
raise it, so a stale entry is too low and is detected when it reaches the top. Weights of evicted
models are kept for a while, so that a model that returns has its old demand.

Not chosen: exact LRU, which evicts a model used every minute for one used once. `python -m bench
mesh-sim` compares this policy with others, also with ones that know the future. Source: LRFU (Lee
et al., 2001) for the weight, GreedyDual-Size-Frequency (Cherkasova, 1998) for cost and size,
TinyLFU (Einziger et al., 2017) for counting time in uses.
"""

import bisect
import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

# half-life of demand in uses for each resident model; longer is better while demand is constant
USES: Final = 20.0
HALF_LIFE_MS: Final = 6 * 3_600_000.0  # half-life of demand by the clock
CHURN_MS: Final = 200.0  # after a load: time to answer the requests that waited for it
FEW: Final = 8  # fewer models than this count as this many
GHOSTS: Final = 4  # weights of evicted models that are kept, for each resident model
GHOSTS_MIN: Final = 1024
MARKS: Final = 128  # pairs of wall time and half-lives, to convert uses that were long ago


@dataclass(frozen=True, slots=True)
class Eviction:
    """The models to evict before another fits, in this order; may be empty."""

    evict: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NoRoom:
    """There is no room. never: nor will there be; the model is larger than the whole memory."""

    why: str
    never: bool = False


@dataclass(slots=True)
class CachedModel:
    """A model that takes memory.

    added_ms: when its load ended, or when it was added if that is not known. worth: see the module.
    """

    size_bytes: int
    used_ms: int
    added_ms: int
    pinned: bool
    loading: bool
    cost_ms: float
    weight: float
    worth: float = 0.0
    queued: float = 0.0  # of its entry in the heap: at most `worth`


class ModelCache:
    """The models in one instance's memory, with sizes and worths. Iteration yields ids.

    capacity_bytes: never exceeded by `add` after `room_for`. models_max: greatest number of models.
    churn_ms: a model that was loaded more recently is not evicted; otherwise two large models with
    waiting requests could evict each other for ever. Pinned and loading models are never evicted.
    Threads: one at a time.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        models_max: int = 10_000,
        churn_ms: float = CHURN_MS,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.models_max = models_max
        self.churn_ms = churn_ms
        self.used_bytes = 0
        self._models: dict[str, CachedModel] = {}
        self._heap: list[tuple[float, str]] = []
        self._ghosts: dict[str, float] = {}
        self._oldest = ""
        self._half_lives = 0.0  # half-lives until `_half_lives_ms`
        self._half_lives_ms = 0
        self._marks: list[tuple[int, float]] = []

    def __len__(self) -> int:
        return len(self._models)

    def __contains__(self, model: object) -> bool:
        return model in self._models

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def get(self, model: str) -> CachedModel | None:
        """Return the entry of a model, which must not be modified."""
        return self._models.get(model)

    def items(self) -> Iterable[tuple[str, CachedModel]]:
        """Return pairs of id and entry."""
        return self._models.items()

    @property
    def free_bytes(self) -> int:
        """The memory that is not in use."""
        return max(0, self.capacity_bytes - self.used_bytes)

    def lru_ms(self, now_ms: int) -> int:
        """Return the last use of the least recently used model; `now_ms` if there is none."""
        oldest = self._models.get(self._oldest)
        if oldest is None:
            if not self._models:
                return now_ms
            self._oldest = min(self._models, key=lambda model: self._models[model].used_ms)
            oldest = self._models[self._oldest]
        return oldest.used_ms

    # -- contents

    def add(
        self,
        model: str,
        size_bytes: int,
        used_ms: int,
        now_ms: int,
        *,
        pinned: bool = False,
        loading: bool = False,
        cost_ms: float = 0.0,
    ) -> None:
        """Add a model, which takes its memory from now on.

        loading: not to be evicted before `loaded` is called. cost_ms: duration of a reload.
        """
        self.remove(model)
        self._pass(now_ms, 1)
        weight = _sum(self._ghosts.pop(model, -math.inf), self._half_lives_at(used_ms))
        held = CachedModel(max(size_bytes, 1), used_ms, now_ms, pinned, loading, cost_ms, weight)
        self._models[model] = held
        self.used_bytes += held.size_bytes
        oldest = self._models.get(self._oldest)
        if oldest is not None and used_ms < oldest.used_ms:
            self._oldest = model
        self._queue(model, held)

    def loaded(self, model: str, size_bytes: int, *, now_ms: int = 0, cost_ms: float = 0.0) -> bool:
        """Mark a model as loaded, with its measured size. Returns False if it is unknown."""
        held = self._models.get(model)
        if held is None:
            return False
        held.loading = False
        held.added_ms = max(held.added_ms, now_ms)
        held.cost_ms = cost_ms or held.cost_ms
        self.resize(model, size_bytes)
        return True

    def remove(self, model: str) -> bool:
        """Remove a model; its weight is kept for a while. Returns False if it is unknown."""
        held = self._models.pop(model, None)
        if held is None:
            return False
        self.used_bytes -= held.size_bytes
        if model == self._oldest:
            self._oldest = ""
        self._remember(model, held.weight)
        return True

    def _remember(self, model: str, weight: float) -> None:
        """Keep the weight of a model that is not loaded; forget those kept longest."""
        self._ghosts[model] = weight
        while len(self._ghosts) > max(GHOSTS_MIN, GHOSTS * len(self._models)):
            del self._ghosts[next(iter(self._ghosts))]

    def touch(self, model: str, now_ms: int, count: int = 1) -> None:
        """Count `count` uses of a model until now. A model that is not loaded is remembered."""
        held = self._models.get(model)
        if held is None:
            self._pass(now_ms, count)
            weight = _sum(self._ghosts.pop(model, -math.inf), self._half_lives + math.log2(count))
            self._remember(model, weight)
            return
        self._pass(now_ms, count)
        weight = _sum(held.weight, self._half_lives + math.log2(count))
        held.worth += weight - held.weight
        held.weight = weight
        if now_ms > held.used_ms:
            held.used_ms = now_ms
            if model == self._oldest:
                self._oldest = ""

    def worth_if_loaded(self, model: str, size_bytes: int, cost_ms: float) -> float:
        """Return the worth that a model would have if it were loaded now. Threads: any."""
        weight = _sum(self._ghosts.get(model, -math.inf), self._half_lives)
        return weight + math.log2(max(cost_ms, 1.0)) - math.log2(max(size_bytes, 1))

    def resize(self, model: str, size_bytes: int) -> None:
        """Set the measured size of a model."""
        held = self._models.get(model)
        if held is None:
            return
        self.used_bytes += max(size_bytes, 1) - held.size_bytes
        held.size_bytes = max(size_bytes, 1)
        self._queue(model, held)

    def pin(self, model: str, pinned: bool) -> None:
        """Exempt a model from eviction, or end the exemption."""
        held = self._models.get(model)
        if held is not None:
            held.pinned = pinned

    # -- eviction

    def room_for(
        self, size_bytes: int, used_ms: int, now_ms: int, *, waiting: bool = True
    ) -> Eviction | NoRoom:
        """Return what must be evicted before a model of this size fits. Changes nothing.

        waiting: a request waits for the model; otherwise only models with an older last use are
        evicted.
        """
        need = self.used_bytes + size_bytes - self.capacity_bytes
        crowd = len(self._models) + 1 - self.models_max
        if need <= 0 and crowd <= 0:
            return Eviction()
        if size_bytes > self.capacity_bytes:
            return NoRoom(
                f"it needs {size_bytes} bytes, and all memory here is {self.capacity_bytes}",
                never=True,
            )
        chosen: list[str] = []
        passed: list[str] = []
        freed = 0
        while (freed < need or len(chosen) < crowd) and (model := self._pop()):
            held = self._models[model]
            passed.append(model)
            if held.pinned or held.loading:
                continue
            if now_ms - held.added_ms < self.churn_ms or (not waiting and held.used_ms >= used_ms):
                continue
            chosen.append(model)
            freed += held.size_bytes
        for model in passed:
            self._queue(model, self._models[model])
        if freed < need or len(chosen) < crowd:
            return NoRoom(self._why_no_room(need, freed))
        return Eviction(tuple(self._needed(chosen, freed - need, len(chosen) - crowd)))

    def _needed(self, chosen: list[str], spare_bytes: int, spare_count: int) -> list[str]:
        """Spare models whose eviction later, larger ones make unnecessary; worthiest first."""
        spared = []
        for model in reversed(chosen):
            size = self._models[model].size_bytes
            if size <= spare_bytes and spare_count > 0:
                spare_bytes -= size
                spare_count -= 1
            else:
                spared.append(model)
        return spared[::-1]

    def _why_no_room(self, need: int, freed: int) -> str:
        pinned = [held.size_bytes for held in self._models.values() if held.pinned]
        loading = [held.size_bytes for held in self._models.values() if held.loading]
        if need <= 0:
            return (
                f"{len(self._models)} models are loaded, and mesh.loaded_max is {self.models_max}:"
                f" {len(pinned)} are pinned, {len(loading)} loading, and the others came or were"
                " used too recently to go"
            )
        return (
            f"{need} bytes are missing and {freed} can be freed: {sum(pinned)} are pinned,"
            f" {sum(loading)} loading, and the others came or were used too recently to go"
        )

    def _pass(self, now_ms: int, uses: float) -> None:
        """Advance the time in half-lives, by uses and by the clock."""
        elapsed = max(0, now_ms - self._half_lives_ms) if self._half_lives_ms else 0
        self._half_lives += uses / (USES * max(len(self._models), FEW)) + elapsed / HALF_LIFE_MS
        self._half_lives_ms = max(self._half_lives_ms, now_ms)
        if not self._marks or self._half_lives - self._marks[-1][1] > 0.25:
            self._marks.append((self._half_lives_ms, self._half_lives))
            if len(self._marks) > MARKS:
                del self._marks[: MARKS // 2]

    def _half_lives_at(self, time_ms: int) -> float:
        """Return the time in half-lives at a wall time."""
        if time_ms >= self._half_lives_ms:
            return self._half_lives
        after = bisect.bisect_right(self._marks, (time_ms, math.inf))
        if not after:
            first_ms, first = self._marks[0]
            return first - (first_ms - time_ms) / HALF_LIFE_MS
        (low_ms, low), *rest = self._marks[after - 1 : after + 1]
        high_ms, high = rest[0] if rest else (self._half_lives_ms, self._half_lives)
        return low + (high - low) * (time_ms - low_ms) / max(high_ms - low_ms, 1)

    def _queue(self, model: str, held: CachedModel) -> None:
        held.worth = held.weight + math.log2(max(held.cost_ms, 1.0)) - math.log2(held.size_bytes)
        held.queued = held.worth
        heapq.heappush(self._heap, (held.worth, model))
        if len(self._heap) > 256 + 4 * len(self._models):
            self._heap = [(held.queued, model) for model, held in self._models.items()]
            heapq.heapify(self._heap)

    def _pop(self) -> str:
        """Remove and return the model of least worth from the heap; empty if there is none."""
        while self._heap:
            queued, model = heapq.heappop(self._heap)
            held = self._models.get(model)
            if held is None or held.queued != queued:
                continue
            if held.worth <= queued:
                held.queued = math.nan
                return model
            held.queued = held.worth
            heapq.heappush(self._heap, (held.worth, model))
        return ""


def _sum(weight: float, more: float) -> float:
    """Return log2(2 ** weight + 2 ** more)."""
    low, high = (weight, more) if weight < more else (more, weight)
    return high if low < high - 50 else high + math.log2(1.0 + 2.0 ** (low - high))
