"""The prediction cache, compared with a slow, simple model: lists of ways, whose clock hands move
one step at a time."""

import random
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from clipper_core.cache.clock_cache import POLICIES, VARIANTS, ClockCache, SharedBlob
from tests.memory import resident_bytes
from tests.sizes import sized

WAYS = 5
HASHES = sorted({VARIANTS[0], "plain"})  # variants whose keys of long rows differ
BLOB_OVERHEAD = 64
Prediction = float | int | bytes | str


def blob_cost(value: Prediction) -> int:
    """Return the bytes counted beside the buckets; 0 for what fits a word."""
    if isinstance(value, str):
        value = value.encode()
    return BLOB_OVERHEAD + len(value) if isinstance(value, bytes) else 0


class Way:
    def __init__(self) -> None:
        self.key: tuple[int, int] | None = None
        self.value: Prediction = 0
        self.referenced = False

    def clear(self) -> int:
        cost = blob_cost(self.value)
        self.__init__()  # type: ignore[misc]
        return cost


class SlowCache:
    def __init__(self, buckets: int, room: int, policy: str = "clock") -> None:
        self.buckets = [[Way() for _ in range(WAYS)] for _ in range(buckets)]
        self.hands = [0] * buckets
        self.policy = policy
        self.blob_hand = 0
        self.room = room
        self.used = 0
        self.evictions = 0

    def bucket(self, key: tuple[int, int]) -> int:
        return key[1] % len(self.buckets)

    def find(self, key: tuple[int, int]) -> Way | None:
        return next((way for way in self.buckets[self.bucket(key)] if way.key == key), None)

    def lookup(self, key: tuple[int, int]) -> Prediction | None:
        way = self.find(key)
        if way is None:
            return None
        way.referenced = True
        return way.value

    def fill(self, key: tuple[int, int], value: Prediction) -> None:
        cost = blob_cost(value)
        if cost and not self.make_room(cost):
            if way := self.find(key):
                self.evict(way)
            return
        self.used += cost
        way = self.find(key) or next(
            (w for w in self.buckets[self.bucket(key)] if w.key is None), None
        )
        if way is None:
            way = self.victim(self.bucket(key))
            self.evictions += 1
        self.used -= blob_cost(way.value)
        way.key, way.value = key, value

    def forget(self, key: tuple[int, int]) -> bool:
        way = self.find(key)
        if way is not None:
            self.used -= way.clear()
        return way is not None

    def victim(self, bucket: int) -> Way:
        while True:
            way = self.buckets[bucket][self.hands[bucket]]
            if self.policy == "clock" or way.referenced:
                self.hands[bucket] = (self.hands[bucket] + 1) % WAYS
            if not way.referenced:
                return way
            way.referenced = False

    def evict(self, way: Way) -> None:
        self.used -= way.clear()
        self.evictions += 1

    def make_room(self, cost: int) -> bool:
        visits = words = 0
        if cost > self.room // 8:
            return False
        while self.used + cost > self.room:
            if visits == 64 or words == 256:
                return False
            word_end = (self.blob_hand | 63) + 1
            here = range(self.blob_hand, min(word_end, len(self.buckets)))
            found = next(
                (b for b in here if any(blob_cost(w.value) for w in self.buckets[b])), None
            )
            if found is None:
                words += 1
                self.blob_hand = word_end % len(self.buckets)
                continue
            visits += 1
            self.blob_hand = (found + 1) % len(self.buckets)
            for way in self.buckets[found]:
                if blob_cost(way.value):
                    if not way.referenced:
                        self.evict(way)
                    way.referenced = False
        return True

    def entries(self) -> int:
        return sum(way.key is not None for bucket in self.buckets for way in bucket)


def row_of(name: int) -> bytes:
    return struct.pack("<Q", name)


def random_prediction(rng: random.Random, blob_bytes_max: int) -> Prediction:
    kind = rng.randrange(6)
    if kind == 0:
        return rng.randbytes(rng.randrange(blob_bytes_max))
    if kind == 1:
        return "é" * rng.randrange(blob_bytes_max // 2)
    return (rng.random(), rng.randrange(-(2**63), 2**63), True, -0.0)[kind - 2]


def drive(
    bytes_max: int, seed: int, operations: int, names: int, blob_bytes_max: int, **how: str
) -> SlowCache:
    rng = random.Random(seed)
    cache = ClockCache(bytes_max, seed=rng.getrandbits(128), **how)  # type: ignore[arg-type]
    table_bytes = cache.bytes
    twin = SlowCache(cache.buckets, max(bytes_max - table_bytes, 0), how["policy"])
    for _ in range(operations):
        row = row_of(min(rng.randrange(names), rng.randrange(names)))
        model, salt = rng.randrange(2), rng.randrange(2)
        key = cache.key(model, row, salt)
        if rng.random() < 0.1:
            assert cache.forget(model, row, salt) == twin.forget(key)
        elif rng.random() < 0.5:
            value, expected = cache.lookup(model, row, salt), twin.lookup(key)
            assert type(value) is type(expected)
            assert value == expected
        else:
            value = random_prediction(rng, blob_bytes_max)
            cache.fill(model, row, value, salt)
            twin.fill(key, value)
        assert cache.bytes == table_bytes + twin.used <= max(bytes_max, table_bytes)
        assert (cache.entries, cache.evictions) == (twin.entries(), twin.evictions)
    return twin


@settings(max_examples=40, deadline=None)
@given(
    bytes_max=st.integers(0, 30_000),
    seed=st.integers(0, 2**32),
    names=st.integers(1, 400),
    blob_bytes_max=st.integers(2, 600),
    variant=st.sampled_from(VARIANTS),
    policy=st.sampled_from(POLICIES),
)
def test_cache_answers_as_its_twin(
    bytes_max: int, seed: int, names: int, blob_bytes_max: int, variant: str, policy: str
) -> None:
    drive(bytes_max, seed, 500, names, blob_bytes_max, variant=variant, policy=policy)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("bytes_max", [1_100, 12_000, 40_000])
def test_cache_answers_as_its_twin_when_full(bytes_max: int, variant: str, policy: str) -> None:
    twin = drive(
        bytes_max,
        1,
        4_000,
        bytes_max // 20,
        max(bytes_max // 200, 4),
        variant=variant,
        policy=policy,
    )
    assert twin.evictions > 100


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_way_of_a_bucket_is_found(variant: str) -> None:
    """Six keys fall into one bucket of five ways: each stored key is found in its way, the evicted
    one is not."""
    cache = ClockCache(0, seed=3, variant=variant)
    assert cache.buckets == 1
    for newest in range(40):
        cache.fill(1, row_of(newest), newest)
        held = [cache.lookup(1, row_of(name)) for name in range(newest + 1)]
        assert [name for name in held if name is not None] == [
            n for n in range(newest + 1) if held[n] is not None
        ]
        assert len([name for name in held if name is not None]) == min(newest + 1, WAYS)


def test_an_unknown_variant_or_policy_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ValueError, match="no cache policy 'lru'; there are clock and sieve"):
        ClockCache(0, policy="lru")
    assert "plain" in VARIANTS
    with pytest.raises(ValueError, match=r"no variant 'sse9' on this machine; it has .*plain"):
        ClockCache(0, variant="sse9")


@settings(deadline=None)
@example(341)
@example(342)
@given(st.integers(0, 2**26))
def test_table_is_a_power_of_two_within_three_quarters(bytes_max: int) -> None:
    cache = ClockCache(bytes_max)
    assert cache.buckets & (cache.buckets - 1) == 0
    assert cache.buckets == 1 or 4 * 128 * cache.buckets <= 3 * bytes_max
    assert 3 * bytes_max < 8 * 128 * cache.buckets
    assert cache.bytes == 128 * cache.buckets + -(-cache.buckets // 64) * 8


def test_fill_replaces_whatever_the_kind() -> None:
    cache = ClockCache(1 << 16)
    values: list[Prediction] = [1.5, b"bytes", 7, "text", b"", False, "", -1]
    for value in values:
        cache.fill(1, b"row", value)
        assert cache.lookup(1, b"row") == value
    assert (cache.entries, cache.evictions) == (1, 0)
    assert cache.bytes == ClockCache(1 << 16).bytes


def test_blob_too_large_is_not_kept_and_leaves_no_predecessor() -> None:
    cache = ClockCache(1 << 16)
    room = (1 << 16) - cache.bytes
    cache.fill(1, b"row", b"x" * (room // 8 - BLOB_OVERHEAD))
    assert cache.lookup(1, b"row") is not None
    cache.fill(1, b"row", b"x" * (room // 8 - BLOB_OVERHEAD + 1))
    assert cache.lookup(1, b"row") is None
    assert cache.entries == 0


def test_a_removed_entry_is_missing_and_frees_its_bytes() -> None:
    cache = ClockCache(1 << 16)
    base = cache.bytes
    blob = SharedBlob(b"x" * 300)
    for name in range(40):
        cache.fill(1, row_of(name), blob)
    assert blob.refs == 41
    assert [cache.forget(1, row_of(name)) for name in range(39, -1, -1)] == [True] * 40
    assert (blob.refs, cache.bytes, cache.entries, cache.evictions) == (1, base, 0, 0)
    assert not cache.forget(1, row_of(0))
    assert cache.lookup(1, row_of(0)) is None


def test_a_hot_blob_outlives_cold_ones() -> None:
    cache = ClockCache(1 << 16, seed=3)
    cache.fill(1, b"hot", b"h" * 100)
    for name in range(20_000):
        assert cache.lookup(1, b"hot") == b"h" * 100
        cache.fill(1, row_of(name), b"c" * 400)
    assert cache.evictions > 19_000


def test_cache_holds_one_reference_to_a_blob_and_gives_it_back() -> None:
    rng = random.Random(5)
    cache = ClockCache(30_000)
    base = cache.bytes
    blobs = [SharedBlob(rng.randbytes(rng.randrange(500))) for _ in range(200)]
    for _ in range(3_000):
        blob = rng.choice(blobs)
        cache.fill(1, row_of(rng.randrange(300)), blob if rng.random() < 0.7 else 1.0)
        cache.lookup(1, row_of(rng.randrange(300)))
        assert blob.refs >= 1
    assert cache.evictions > 100
    assert cache.bytes > base
    assert sum(blob.refs for blob in blobs) > len(blobs)
    del cache
    assert [blob.refs for blob in blobs] == [1] * len(blobs)


def test_bulk_calls_answer_as_single_ones() -> None:
    cache = ClockCache(1 << 16, seed=9)
    rows = np.arange(1000, dtype="<u8")
    for name in range(0, 1000, 3):
        cache.fill(4, row_of(name), name / 7, salt=2)
    cache.fill(4, row_of(1), b"no float", salt=2)
    singly = [cache.lookup(4, row_of(name), 2) for name in range(1000)]
    found = np.frombuffer(cache.lookup_many(4, rows.tobytes(), 8, salt=2))
    assert all(
        np.isnan(f) if not isinstance(s, float) else f == s
        for f, s in zip(found, singly, strict=True)
    )
    keys = np.frombuffer(cache.keys(4, rows.tobytes(), 8, 2), "<u8").reshape(-1, 2)
    assert [tuple(key) for key in keys.tolist()] == [
        cache.key(4, row_of(name), 2) for name in range(1000)
    ]
    assert np.isnan(found).sum() == 1000 - 334
    assert cache.lookup_many(4, b"", 8) == cache.keys(4, b"", 8) == b""


def test_arguments_that_the_cache_rejects() -> None:
    cache = ClockCache(1 << 12)
    for row_bytes in (0, 3):
        with pytest.raises(ValueError, match="whole number of rows"):
            cache.keys(1, b"12345678", row_bytes)
    with pytest.raises(TypeError, match="not list"):
        cache.fill(1, b"", [])  # type: ignore[arg-type]
    with pytest.raises(OverflowError):
        cache.fill(1, b"", 2**63)
    with pytest.raises(ValueError, match="contiguous"):
        cache.lookup(1, np.zeros((4, 4))[:, 1])  # type: ignore[arg-type]
    with pytest.raises(MemoryError):
        ClockCache(2**63)


# -- hit ratio
# ---------------------------------------------------------------------------------------------------------  # noqa: E501


def zipf_trace(skew: float, keys: int, requests: int) -> list[int]:
    weights = 1 / np.arange(1, keys + 1) ** skew
    names: list[int] = (
        np.random.default_rng(7).choice(keys, requests, p=weights / weights.sum()).tolist()
    )
    return names


def drift_trace(keys: int, requests: int) -> list[int]:
    """Return a trace by Zipf 1.0 in which the order of popularity shifts ten times; every fifth key
    occurs once."""
    ranks = np.array(zipf_trace(1.0, keys, requests))
    names = (ranks + np.arange(requests) // (requests // 10) * 7919) % keys
    once = np.random.default_rng(8).random(requests) < 0.2
    shown: list[int] = np.where(once, keys + np.arange(requests), names).tolist()
    return shown


def global_clock(trace: list[int], capacity: int, warm: int) -> int:
    """Return the hits of one CLOCK over all entries. New entries get no second chance there either:
    that would cost some two points."""
    ring, bits, place = [-1] * capacity, bytearray(capacity), dict[int, int]()
    hand = hits = 0
    for i, name in enumerate(trace):
        at = place.get(name)
        if at is not None:
            bits[at] = 1
            hits += i >= warm
            continue
        while bits[hand]:
            bits[hand] = 0
            hand = (hand + 1) % capacity
        place.pop(ring[hand], None)
        ring[hand], place[name] = name, hand
        hand = (hand + 1) % capacity
    return hits


def global_sieve(trace: list[int], capacity: int, warm: int) -> int:
    """Return the hits of one SIEVE over all entries: a list by `newer`, the hand from the oldest
    on."""
    visited = dict[int, bool]()
    newer, older = dict[int, int](), dict[int, int]()  # -1 is both ends
    newer[-1] = older[-1] = hand = -1
    hits = 0
    for i, name in enumerate(trace):
        if name in visited:
            visited[name] = True
            hits += i >= warm
            continue
        if len(visited) == capacity:
            hand = newer[-1] if hand == -1 else hand
            while visited[hand]:
                visited[hand] = False
                hand = newer[hand] if newer[hand] != -1 else newer[-1]
            gone, hand = hand, newer[hand]
            newer[older[gone]], older[newer[gone]] = newer[gone], older[gone]
            del visited[gone], newer[gone], older[gone]
        newest = older[-1]
        newer[newest], older[name], newer[name], older[-1] = name, newest, -1, name
        visited[name] = False
    return hits


def hits_of(cache: ClockCache, trace: list[int], warm: int) -> int:
    hits = 0
    for i, name in enumerate(trace):
        row = row_of(name)
        if cache.lookup(1, row) is None:
            cache.fill(1, row, name)
        else:
            hits += i >= warm
    return hits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "simulated"), [("clock", global_clock), ("sieve", global_sieve)]
)
@pytest.mark.parametrize(
    "skew", [0.9, 1.0, 1.1, None], ids=["zipf0.9", "zipf1.0", "zipf1.1", "drift"]
)
def test_hit_ratio_within_a_point_and_a_half_of_one_global_hand(
    skew: float | None, policy: str, simulated: Callable[[list[int], int, int], int]
) -> None:
    keys, requests = 100_000, sized(500_000, 1_000_000)
    trace, warm = zipf_trace(skew, keys, requests) if skew else drift_trace(keys, requests), 200_000
    for buckets in sized((512,), (512, 2048)):  # 2.6 % and 10 % of the keys
        cache = ClockCache(buckets * 128 * 4 // 3 + 128, seed=11, policy=policy)
        assert cache.buckets == buckets
        hits = hits_of(cache, trace, warm)
        against = simulated(trace, buckets * WAYS, warm)
        print((against - hits) / (len(trace) - warm))
        assert (against - hits) / (len(trace) - warm) < 0.015


def test_sieve_keeps_what_is_popular_better_than_clock_does() -> None:
    trace = zipf_trace(1.0, 20_000, 60_000)
    clock, sieve = (
        hits_of(ClockCache(1 << 17, seed=1, policy=policy), trace, 20_000) for policy in POLICIES
    )
    assert sieve > clock * 1.02


# -- the hash
# ----------------------------------------------------------------------------------------------------------  # noqa: E501


def keys_of(cache: ClockCache, rows: np.ndarray, model: int = 1, salt: int = 0) -> np.ndarray:
    """Return the keys of rows u8[n, width] as u64[n, 2]."""
    return np.frombuffer(cache.keys(model, rows.tobytes(), rows.shape[1], salt), "<u8").reshape(
        -1, 2
    )


def key_bits(keys: np.ndarray) -> np.ndarray:
    """Return the 120 bits of each key of u64[n, 2] as u8[n, 120]."""
    return np.unpackbits(keys.view("u1"), axis=1, bitorder="little")[:, :120]


SHORT = [1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 32, 33, 48, 63, 64, 65, 100, 128, 129]
LONG = [256, 319, 320, 784, 1024, 1025, 1088, 1089, 3136]


@pytest.mark.parametrize(
    ("width", "variant"), [(w, "plain") for w in SHORT] + [(w, v) for w in LONG for v in HASHES]
)
def test_each_bit_of_a_row_flips_each_bit_of_the_key_half_the_time(
    width: int, variant: str
) -> None:
    rng = np.random.default_rng(width)
    cache = ClockCache(0, seed=width, variant=variant)
    n = 4096 if width <= 128 else 1024
    rows = rng.integers(0, 256, (n, width), "u1")
    if width < 3:
        rows = np.arange(256**width, dtype="<u2").view("u1").reshape(-1, 2)[:, :width].copy()
    before = key_bits(keys_of(cache, rows))
    bits = (
        range(width * 8)
        if width <= 8
        else sorted({0, width * 8 - 1, *rng.integers(0, width * 8, 24).tolist()})
    )
    for bit in bits:
        rows[:, bit >> 3] ^= 1 << (bit & 7)
        flipped = (before ^ key_bits(keys_of(cache, rows))).mean(axis=0)
        rows[:, bit >> 3] ^= 1 << (bit & 7)
        # there, both rows of a pair are in the sample
        pairs = len(rows) if width > 2 else len(rows) // 2
        assert abs(flipped - 0.5).max() < 6.5 * 0.5 / pairs**0.5


@pytest.mark.parametrize("variant", HASHES)
def test_every_line_of_a_row_beyond_one_digest_counts(variant: str) -> None:
    cache = ClockCache(0, seed=5, variant=variant)
    row = bytearray(280_000)  # condensed in three parts
    keys = {cache.key(1, row)}
    places = [
        *range(0, len(row), 997),
        *range(130_000, 130_200),
        *range(260_000, 260_200),
        len(row) - 1,
    ]
    for place in places:
        row[place] ^= 1 << (place & 7)
        keys.add(cache.key(1, row))
        row[place] ^= 1 << (place & 7)
    keys |= {
        cache.key(1, row[:length])
        for length in (129_999, 130_047, 130_048, 130_049, 260_000, 279_999)
    }
    assert len(keys) == 1 + len(set(places)) + 6


def test_short_rows_have_one_key_in_every_variant() -> None:
    caches = [ClockCache(0, seed=6, variant=variant) for variant in VARIANTS]
    for length in range(256):
        assert len({cache.key(1, bytes(length), 2) for cache in caches}) == 1


def zeros_of_many_lengths(cache: ClockCache) -> list[tuple[int, int]]:
    return [cache.key(1, bytes(length)) for length in range(3000)]


def one_bit_in_a_long_row(cache: ClockCache) -> list[tuple[int, int]]:
    keys = [cache.key(1, bytes(3136))]
    for bit in range(3136 * 8):
        row = bytearray(3136)
        row[bit >> 3] = 1 << (bit & 7)
        keys.append(cache.key(1, row))
    return keys


def two_words_in_a_long_row(cache: ClockCache) -> list[tuple[int, int]]:
    """Return the keys of long rows that differ in two words: small numbers in the two words that
    are multiplied, or equal words in two lines."""
    rows = np.zeros((3 * 4096 + 190, 128), "<u8")
    low, high = np.meshgrid(np.arange(64), np.arange(64))
    for i, place in enumerate([0, 64, 126]):
        rows[i * 4096 :][:4096, place], rows[i * 4096 :][:4096, place + 1] = (
            low.ravel(),
            high.ravel(),
        )
    for i in range(1, 3):
        rows[i * 4096] = i << 32  # 0, 0 is there once already
    pairs = np.array([(a, b) for a in range(20) for b in range(a)])
    rows[3 * 4096 + np.arange(190)[:, None], pairs * 6 % 128] = 1 << 40
    return [tuple(key) for key in keys_of(cache, rows.view("u1")).tolist()]


def counters(cache: ClockCache) -> list[tuple[int, int]]:
    many = np.arange(sized(1 << 14, 1 << 18), dtype="<u8")
    return [tuple(key) for key in keys_of(cache, many.view("u1").reshape(-1, 8)).tolist()]


def round_floats(cache: ClockCache) -> list[tuple[int, int]]:
    rows = np.stack(np.meshgrid(*[np.arange(*sized((-2.0, 3.0), (-4.0, 4.0)))] * 6), -1).reshape(
        -1, 6
    )
    return [tuple(key) for key in keys_of(cache, rows.view("u1")).tolist()]


def models_and_salts(cache: ClockCache) -> list[tuple[int, int]]:
    many = range(sized(128, 256))
    return [cache.key(model, b"12345678", salt) for model in many for salt in many]


def swapped_blocks(cache: ClockCache) -> list[tuple[int, int]]:
    rng = random.Random(3)
    blocks = [rng.randbytes(16) for _ in range(20)]
    orders = {tuple(rng.sample(range(20), 20)) for _ in range(sized(10_000, 50_000))}
    return [cache.key(1, b"".join(blocks[i] for i in order)) for order in orders]


ALIKE = [counters, round_floats, models_and_salts]
ALIKE_AND_LONG = [
    zeros_of_many_lengths,
    one_bit_in_a_long_row,
    two_words_in_a_long_row,
    swapped_blocks,
]


@pytest.mark.parametrize(
    ("family", "variant"),
    [(f, "plain") for f in ALIKE] + [(f, v) for f in ALIKE_AND_LONG for v in HASHES],
)
def test_keys_of_similar_rows_are_as_if_drawn(
    family: Callable[[ClockCache], list[tuple[int, int]]], variant: str
) -> None:
    """No two keys are equal, and in each window of w bits about n^2 / 2^(w+1) pairs are, as for
    random numbers."""
    keys = np.array(family(ClockCache(0, seed=17, variant=variant)), "<u8")
    n = len(keys)
    assert len(np.unique(keys, axis=0)) == n
    assert keys[:, 1].max() < 1 << 56
    width = 2 * (n.bit_length() - 1) - 5  # some 16 to 64 pairs expected
    expected = n * (n - 1) / 2 ** (width + 1)
    low, high = keys[:, 0], keys[:, 1]
    for word, top in (
        (low, 64),
        (high, 56),
        (low ^ high, 56),
        (low - high, 56),
        (low << np.uint64(16) ^ high, 64),
    ):
        for shift in range(0, top - width + 1, 4):
            window = (word >> np.uint64(shift)) & np.uint64((1 << width) - 1)
            pairs = n - len(np.unique(window))
            assert abs(pairs - expected) < 6.5 * expected**0.5 + 3


def test_buckets_fill_evenly() -> None:
    keys = keys_of(
        ClockCache(0, seed=23), np.arange(1 << 18, dtype="<u8").view("u1").reshape(-1, 8)
    )
    counts = np.bincount((keys[:, 1] & np.uint64(4095)).astype(np.int64), minlength=4096)
    chi2 = ((counts - 64.0) ** 2 / 64).sum()
    assert abs(chi2 - 4095) < 6 * (2 * 4095) ** 0.5


def test_every_bit_of_the_seed_matters_and_the_default_is_random() -> None:
    seeds = [0, *(1 << bit for bit in range(128))]
    for row in (b"", b"12345678", bytes(100)):
        assert len({ClockCache(0, seed=seed).key(1, row) for seed in seeds}) == 129
    assert ClockCache(0).key(1, b"row") != ClockCache(0).key(1, b"row")
    assert ClockCache(0, seed=4).key(1, b"row") == ClockCache(0, seed=4).key(1, b"row")


def test_key_depends_on_content_not_on_address() -> None:
    cache = ClockCache(0)
    rng = random.Random(2)
    for length in (*range(200), *range(250, 400), *range(1000, 1100)):
        row = rng.randbytes(length)
        shifted = memoryview(b"x" * (length % 13) + row + b"tail")[length % 13 :][:length]
        assert cache.key(3, row, 1) == cache.key(3, shifted, 1)


def touch_all(cache: ClockCache) -> int:
    """Touch the whole cache; return the number of calls that it took."""
    calls, start = 1, cache.touch()
    while start:
        calls, start = calls + 1, cache.touch(start)
    return calls


def test_fills_of_a_touched_cache_need_no_memory() -> None:
    """The loop thread does not wait for new pages in a first burst."""
    cache = ClockCache(64 << 20, seed=1)
    table_bytes = 128 * cache.buckets
    cache.fill(1, b"before", 1.0)
    before = resident_bytes()
    assert touch_all(cache) == table_bytes >> 21
    touched = resident_bytes()
    assert touched - before > 0.9 * table_bytes - (2 << 20), "the page of the first fill was there"
    for k in range(5000):
        cache.fill(1, struct.pack("q", k), k)
    assert resident_bytes() - touched < 1 << 20
    assert cache.lookup(1, b"before") == 1.0


@pytest.mark.parametrize("bytes_max", [1, 1 << 12, 64 << 10, 3 << 20])
def test_touching_changes_nothing(bytes_max: int) -> None:
    cache = ClockCache(bytes_max, seed=1)
    for k in range(1000):
        cache.fill(1, struct.pack("q", k), k)
    held = [cache.lookup(1, struct.pack("q", k)) for k in range(1000)]
    assert touch_all(cache) == max(1, 128 * cache.buckets >> 21)
    assert [cache.lookup(1, struct.pack("q", k)) for k in range(1000)] == held
    assert cache.touch(cache.buckets) == 0
    assert cache.touch(1 << 63) == 0
    assert cache.touch((1 << 64) - 1) == 0


def test_touching_disturbs_no_one() -> None:
    cache = ClockCache(256 << 10, seed=1)
    with ThreadPoolExecutor(4) as threads:
        races = [
            threads.submit(cache.race, seed, sized(20_000, full=100_000), 512) for seed in range(3)
        ]
        while not all(race.done() for race in races):
            touch_all(cache)
    assert [race.result()[1] for race in races] == [0, 0, 0]
