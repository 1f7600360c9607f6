"""Which models a cache holds, by several rules over one trace of uses: anchors for the mesh's own.

Every rule must load what is asked, as a mesh must: there is no bypass. Rules that know the future
or the true demand say so.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clipper.mesh.decisions.model_cache import ModelCache, NoRoom

# between two uses: some cover the time for which a model that has just been loaded stays
STEP_MS = 100


@dataclass(frozen=True)
class Trace:
    """uses: i64[n], numbers of models in the order of use. sizes: i64[models], bytes. demand:
    f64[models], the true shares."""

    uses: NDArray[np.int64]
    sizes: NDArray[np.int64]
    demand: NDArray[np.float64]

    @property
    def warm(self) -> int:
        """Return the number of uses that are not counted: the first half."""
        return len(self.uses) // 2


def zipf(models: int, uses: int, alpha: float, seed: int = 0) -> Trace:
    """Return a trace of independent draws by rank ** -alpha. Sizes are log-normal about 20 MB (a
    factor of e either way), whatever the rank."""
    rng = np.random.default_rng(seed)
    demand = np.arange(1, models + 1, dtype=np.float64) ** -alpha
    demand /= demand.sum()
    sizes = np.maximum(rng.lognormal(np.log(20e6), 1.0, models), 1e5).astype(np.int64)
    return Trace(rng.choice(models, uses, p=demand), sizes, demand)


def drifting(models: int, uses: int, alpha: float, seed: int = 0, phases: int = 8) -> Trace:
    """Return the same trace, but in each of `phases` an eighth of the models change places in the
    ranking."""
    rng = np.random.default_rng(seed)
    trace = zipf(models, uses, alpha, seed)
    places, parts = np.arange(models), np.array_split(trace.uses, phases)
    for n, part in enumerate(parts):
        if n:
            moved = rng.choice(models, models // 8, replace=False)
            places[moved] = places[rng.permutation(moved)]
        part[:] = places[part]
    return Trace(np.concatenate(parts), trace.sizes, trace.demand)


Rule = Callable[[Trace, int], NDArray[np.bool_]]


def lru(trace: Trace, capacity: int) -> NDArray[np.bool_]:
    """Simulate LRU: evict the least recently used."""
    held: OrderedDict[int, int] = OrderedDict()
    sizes = trace.sizes.tolist()
    hits = np.zeros(len(trace.uses), np.bool_)
    used = 0
    for n, model in enumerate(trace.uses.tolist()):
        if model in held:
            hits[n] = True
            held.move_to_end(model)
            continue
        used += sizes[model]
        while used > capacity and held:
            used -= held.popitem(last=False)[1]
        held[model] = sizes[model]
    return hits


def gdsf(trace: Trace, capacity: int) -> NDArray[np.bool_]:
    """Simulate GreedyDual-Size-Frequency with a cost of one: clock + uses while here / size."""
    sizes = trace.sizes.tolist()
    hits = np.zeros(len(trace.uses), np.bool_)
    count: dict[int, int] = {}
    key: dict[int, float] = {}
    heap: list[tuple[float, int]] = []
    used, clock = 0, 0.0
    for n, model in enumerate(trace.uses.tolist()):
        if model in key:
            hits[n] = True
        else:
            used += sizes[model]
            count[model] = 0
            while used > capacity and key:
                at, victim = heapq.heappop(heap)
                if key.get(victim) == at:
                    clock = at
                    used -= sizes[victim]
                    del key[victim]
        count[model] += 1
        key[model] = clock + count[model] * 1e7 / sizes[model]
        heapq.heappush(heap, (key[model], model))
    return hits


def belady_size(trace: Trace, capacity: int) -> NDArray[np.bool_]:
    """Simulate a rule that knows the future: it evicts the model with the largest size * time to
    its next use."""
    uses, n_uses = trace.uses, len(trace.uses)
    following = np.full(n_uses, 4 * n_uses, np.int64)
    last: dict[int, int] = {}
    for n in range(n_uses - 1, -1, -1):
        model = int(uses[n])
        following[n] = last.get(model, 4 * n_uses)
        last[model] = n
    return _by_score(trace, capacity, following.tolist(), lambda n, at, sizes: (at - n) * sizes)


def known_demand(trace: Trace, capacity: int) -> NDArray[np.bool_]:
    """Simulate a rule that knows the true demand, but not the future: it evicts the model with the
    least demand / size. The best that a rule can learn from independent draws."""
    worth = (trace.sizes / trace.demand).tolist()
    return _by_score(
        trace, capacity, [worth[model] for model in trace.uses.tolist()], lambda n, at, sizes: at
    )


def _by_score(
    trace: Trace, capacity: int, facts: list[Any], score: Callable[[int, Any, Any], Any]
) -> NDArray[np.bool_]:
    """Evict the model with the largest score; `facts` has the data of each use."""
    sizes = trace.sizes.astype(np.float64)
    places: list[int] = []
    place_of: dict[int, int] = {}
    at, held = np.zeros(len(sizes)), np.zeros(len(sizes))
    hits = np.zeros(len(trace.uses), np.bool_)
    used = 0.0
    for n, model in enumerate(trace.uses.tolist()):
        place = place_of.get(model)
        if place is not None:
            hits[n] = True
            at[place] = facts[n]
            continue
        used += sizes[model]
        while used > capacity and places:
            gone = int(np.argmax(score(n, at[: len(places)], held[: len(places)])))
            victim, mover = places[gone], places.pop()
            used -= sizes[victim]
            del place_of[victim]
            if victim != mover:
                places[gone], place_of[mover] = mover, gone
                at[gone], held[gone] = at[len(places)], held[len(places)]
        place_of[model] = len(places)
        at[len(places)], held[len(places)] = facts[n], sizes[model]
        places.append(model)
    return hits


def ours(trace: Trace, capacity: int, **settings: Any) -> NDArray[np.bool_]:
    """Simulate `clipper.mesh.decisions.model_cache`, as a node uses it."""
    residents = ModelCache(capacity, models_max=1 << 30, **settings)
    sizes = trace.sizes.tolist()
    hits = np.zeros(len(trace.uses), np.bool_)
    names = [str(model) for model in range(len(sizes))]
    for n, model in enumerate(trace.uses.tolist()):
        name, now_ms = names[model], n * STEP_MS
        if name in residents:
            hits[n] = True
            residents.touch(name, now_ms)
            continue
        room = residents.room_for(sizes[model], now_ms, now_ms)
        if isinstance(room, NoRoom):
            continue
        for gone in room.evict:
            residents.remove(gone)
        residents.add(name, sizes[model], now_ms, now_ms)
    return hits


RULES: dict[str, Rule] = {
    "LRU": lru,
    "GDSF": gdsf,
    "known demand": known_demand,
    "Belady-size": belady_size,
    "clipper": ours,
}
