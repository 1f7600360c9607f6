"""The cache of loaded models, against a reference model that examines every entry, and each part of
a model's value."""

import math
from random import Random

import pytest

from clipper.mesh.decisions.model_cache import FEW, HALF_LIFE_MS, USES, Eviction, ModelCache, NoRoom

T0 = 1_700_000_000_000


def filled(capacity: int, sizes: dict[str, int], **settings: float) -> ModelCache:
    """Return a cache of models that were each used once, a second apart."""
    cache = ModelCache(capacity, **settings)  # type: ignore[arg-type]
    for n, (id, size) in enumerate(sizes.items()):
        cache.add(id, size, T0 + 1000 * n, T0 + 1000 * n)
    return cache


def evicted(
    cache: ModelCache, size: int, now_ms: int = T0 + 10**6, **options: bool
) -> tuple[str, ...]:
    room = cache.room_for(size, now_ms, now_ms, **options)
    assert isinstance(room, Eviction), room
    return room.evict


def test_nothing_goes_while_there_is_room() -> None:
    cache = filled(100, {"a": 40, "b": 40})
    assert evicted(cache, 20) == ()
    assert evicted(cache, 21) == ("a",)
    assert cache.free_bytes == 20


def test_equal_models_used_once_go_as_in_an_lru() -> None:
    cache = filled(1000, {f"m{n}": 10 for n in range(100)})
    assert evicted(cache, 50) == tuple(f"m{n}" for n in range(5))
    cache.touch("m0", T0 + 10**6)
    assert evicted(cache, 50) == tuple(f"m{n}" for n in range(1, 6))


def test_often_used_beats_used_last() -> None:
    cache = filled(30, {"often": 10, "once": 10, "last": 10})
    for n in range(20):
        cache.touch("often", T0 + 5000 + n)
    cache.touch("once", T0 + 10_000)
    cache.touch("last", T0 + 11_000)
    assert evicted(cache, 20) == ("once", "last")


def test_demand_is_forgotten_with_use_of_others() -> None:
    cache = filled(100, {f"m{n}": 10 for n in range(10)})
    cache.touch("m0", T0 + 20_000, 8)
    for n in range(int(20 * USES * 10)):
        cache.touch(f"m{1 + n % 9}", T0 + 20_001)
    assert evicted(cache, 10) == ("m0",)


def test_and_with_the_clock() -> None:
    cache = filled(20, {"old": 10, "new": 10})
    cache.touch("old", T0 + 2000, 1000)
    cache.touch("new", T0 + 2000 + int(11 * HALF_LIFE_MS))
    assert evicted(cache, 10, T0 + 10**10) == ("old",)


def test_large_models_are_evicted_before_small_ones_and_cheap_before_expensive() -> None:
    assert evicted(filled(110, {"small": 10, "large": 100}), 5) == ("large",)
    cache = ModelCache(20, churn_ms=0)
    cache.add("dear", 10, T0, T0, cost_ms=5000)
    cache.add("cheap", 10, T0 + 1, T0 + 1, cost_ms=50)
    assert evicted(cache, 5) == ("cheap",)


def test_what_a_larger_one_made_needless_stays() -> None:
    cache = filled(120, {"a": 10, "b": 10, "large": 100})
    for id in ("a", "b"):
        cache.touch(id, T0 + 5000)
    cache.touch("large", T0 + 5000, 100)
    assert set(evicted(cache, 90)) == {"large"}


def test_pinned_and_loading_never_go() -> None:
    cache = filled(30, {"a": 10, "b": 10})
    cache.add("c", 10, T0, T0, loading=True)
    cache.pin("a", True)
    assert evicted(cache, 10) == ("b",)
    refused = cache.room_for(15, T0, T0)
    assert isinstance(refused, NoRoom)
    assert not refused.never
    assert "10 are pinned, 10 loading" in refused.why
    cache.loaded("c", 12, cost_ms=3)
    cache.pin("a", False)
    assert len(evicted(cache, 30)) == 3
    assert not cache.loaded("gone", 1)


def test_too_large_for_all_memory_is_for_ever() -> None:
    refused = filled(10, {}).room_for(11, T0, T0)
    assert isinstance(refused, NoRoom)
    assert refused.never


def test_loads_do_not_chase_each_other() -> None:
    """A model that was just loaded is not evicted for a moment, so that a memory that is far too
    small refuses loads instead of loading all the time."""
    cache = filled(20, {"a": 10, "b": 10}, churn_ms=5000)
    assert evicted(cache, 10, T0 + 5500) == ("a",)
    assert isinstance(cache.room_for(20, T0 + 5500, T0 + 5500), NoRoom)
    assert len(evicted(cache, 20, T0 + 6000)) == 2
    cache.add("c", 10, T0 + 6000, T0 + 6000, loading=True)
    cache.loaded("c", 10, now_ms=T0 + 20_000)
    assert "c" not in evicted(cache, 10, T0 + 24_999)
    assert isinstance(cache.room_for(20, T0 + 24_999, T0 + 24_999), NoRoom)
    assert "c" in evicted(cache, 20, T0 + 25_000)


def test_loads_without_a_query_evict_no_model_that_was_used_later() -> None:
    cache = filled(20, {"a": 10, "b": 10})
    assert isinstance(cache.room_for(10, T0 - 1, T0 + 2000, waiting=False), NoRoom)
    room = cache.room_for(10, T0 + 500, T0 + 2000, waiting=False)
    assert room == Eviction(("a",))


def test_a_model_that_returns_keeps_its_count() -> None:
    cache = filled(30, {"a": 10, "b": 10})
    cache.touch("a", T0 + 3000, 50)
    cache.remove("a")
    cache.add("c", 10, T0 + 4000, T0 + 4000)
    cache.add("a", 10, T0 + 4001, T0 + 4001)
    cache.touch("c", T0 + 4002, 5)
    assert evicted(cache, 5) == ("b",)
    cache.remove("b")
    assert evicted(cache, 15) == ("c",)


def test_a_use_long_ago_is_worth_less() -> None:
    cache = ModelCache(20, churn_ms=0)
    for n in range(20 * FEW * int(USES)):
        cache.touch("nobody", T0 + n)
        cache.add("x", 1, T0 + n, T0 + n)
        cache.remove("x")
    now = T0 + 20 * FEW * int(USES)
    cache.add("hint", 10, T0 + 1, now)
    cache.add("now", 10, now, now)
    assert evicted(cache, 5) == ("hint",)
    assert cache.lru_ms(now) == T0 + 1


def test_the_number_of_models_is_bounded_too() -> None:
    cache = filled(1000, {"a": 1, "b": 1, "c": 1}, models_max=3)
    assert evicted(cache, 1) == ("a",)


def test_the_least_recently_used() -> None:
    cache = filled(100, {"a": 10, "b": 10, "c": 10})
    assert cache.lru_ms(0) == T0
    cache.touch("a", T0 + 9000)
    assert cache.lru_ms(0) == T0 + 1000
    cache.remove("b")
    assert cache.lru_ms(0) == T0 + 2000
    cache.add("d", 10, T0 - 5, T0 + 9001)
    assert cache.lru_ms(0) == T0 - 5
    assert ModelCache(1).lru_ms(77) == 77


class ReferenceCache:
    """A reference model of the cache: every use of every model that is or was here, and all of them
    examined for each eviction."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.half_lives, self.last_ms = 0.0, 0
        self.held: dict[str, list[float]] = {}  # size, cost
        self.uses: dict[str, list[tuple[float, int]]] = {}
        self.kept: set[str] = set()

    def use(self, id: str, now_ms: int, count: int) -> None:
        elapsed = now_ms - self.last_ms if self.last_ms else 0
        self.half_lives += count / (USES * max(len(self.held), FEW)) + elapsed / HALF_LIFE_MS
        self.last_ms = now_ms
        self.uses.setdefault(id, []).append((self.half_lives, count))

    def worth(self, id: str) -> float:
        size, cost = self.held[id]
        demand = sum(count * 2.0 ** (at - self.half_lives) for at, count in self.uses[id])
        return math.log2(demand) + math.log2(max(cost, 1.0)) - math.log2(size)

    def victims(self, size: int) -> list[str] | None:
        need = size + sum(held[0] for held in self.held.values()) - self.capacity
        chosen: list[str] = []
        for id in sorted(self.held, key=self.worth):
            if sum(self.held[c][0] for c in chosen) >= need:
                break
            if id not in self.kept:
                chosen.append(id)
        spare = sum(self.held[c][0] for c in chosen) - need
        if spare < 0:
            return None
        for id in chosen[::-1]:
            if self.held[id][0] <= spare and need > 0:
                spare -= self.held[id][0]
                chosen.remove(id)
        return chosen if need > 0 else []


@pytest.mark.parametrize("seed", range(20))
def test_beside_the_twin(seed: int) -> None:
    rng = Random(seed)
    cache, reference, now = ModelCache(1000, churn_ms=0), ReferenceCache(1000), T0
    for _ in range(600):
        now += rng.choice([1, 100, 60_000, 3_600_000])
        id = f"m{rng.randrange(40)}"
        if id in reference.held:
            kind = rng.random()
            if kind < 0.7:
                count = rng.choice([1, 1, 30])
                cache.touch(id, now, count)
                reference.use(id, now, count)
            elif kind < 0.8:
                reference.held[id][0] = rng.randrange(1, 300)
                cache.resize(id, int(reference.held[id][0]))
            elif kind < 0.9:
                cache.pin(id, id not in reference.kept)
                reference.kept ^= {id}
            else:
                cache.remove(id)
                del reference.held[id]
                reference.kept.discard(id)
        else:
            size, cost = rng.randrange(1, 300), rng.choice([0, 40, 900])
            room, expected = cache.room_for(size, now, now), reference.victims(size)
            assert isinstance(room, Eviction) == (expected is not None)
            if not isinstance(room, Eviction) or expected is None:
                continue
            assert list(room.evict) == expected
            assert not reference.kept & set(room.evict)
            for gone in room.evict:
                cache.remove(gone)
                del reference.held[gone]
            reference.use(id, now, 1)
            reference.held[id] = [size, cost]
            cache.add(id, size, now, now, cost_ms=cost)
        assert set(cache) == set(reference.held)
        assert cache.used_bytes == sum(held[0] for held in reference.held.values())
