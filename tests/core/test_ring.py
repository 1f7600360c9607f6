"""The work ring, compared with a slow model that keeps the state of each cell by its position:
free, claimed, published, released."""

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipper_core.runtime.ring import SpscRing, WorkRing


class SlowRing:
    """A position may be claimed when the one a lap before it was released; only the oldest
    unclaimed one is handed out."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.tail = 0
        self.state: dict[int, str] = {}

    def claim(self) -> int | None:
        if self.state.get(self.tail - self.size, "released") != "released":
            return None
        self.state[self.tail] = "claimed"
        self.tail += 1
        return self.tail - 1

    def in_state(self, state: str) -> list[int]:
        return [pos for pos, now in self.state.items() if now == state]


@given(
    st.sampled_from([2, 4, 8, 64]),
    st.lists(st.tuples(st.sampled_from("cpr"), st.integers(0, 10**6)), max_size=300),
)
@settings(max_examples=300, deadline=None)
def test_claim_publish_release_in_any_order(size: int, operations: list[tuple[str, int]]) -> None:
    ring, slow = WorkRing(size, 8), SlowRing(size)
    for name, pick in operations:
        if name == "c":
            assert ring.claim() == slow.claim()
        elif name == "p" and (claimed := slow.in_state("claimed")):
            ring.publish(claimed[pick % len(claimed)])
            slow.state[claimed[pick % len(claimed)]] = "published"
        elif name == "r" and (published := slow.in_state("published")):
            ring.release(published[pick % len(published)])
            slow.state[published[pick % len(published)]] = "released"
        for pos, state in slow.state.items():
            assert ring.published(pos) == (state == "published")
        assert not ring.published(slow.tail), "a cell of an earlier lap is no cell of this one"


@pytest.mark.parametrize("size", [2, 8, 256])
def test_a_ring_holds_exactly_its_size(size: int) -> None:
    ring = WorkRing(size, 3)
    for lap in range(4):
        rows = [bytes([lap, i & 255, i >> 8]) for i in range(size)]
        assert all(ring.push(row) for row in rows)
        assert not ring.push(b"abc")
        assert ring.claim() is None
        assert [ring.pop() for _ in range(size)] == rows
        assert ring.pop() is None


@pytest.mark.parametrize("row_bytes", [1, 3, 8, 63, 64, 65, 4096])
def test_rows_come_out_as_they_went_in(row_bytes: int) -> None:
    rng = random.Random(row_bytes)
    ring, slow = WorkRing(16, row_bytes), deque[bytes]()
    for _ in range(500):
        row = rng.randbytes(row_bytes)
        if rng.random() < 0.55:
            assert ring.push(row) == (len(slow) < 16)
            if len(slow) < 16:
                slow.append(row)
        else:
            assert ring.pop() == (slow.popleft() if slow else None)


def test_an_unpublished_claim_holds_back_what_came_after_it() -> None:
    ring = WorkRing(4, 8)
    first = ring.claim()
    assert first == 0
    assert ring.push(b"released")
    assert ring.pop() is None
    ring.publish(first)
    assert ring.pop() == bytes(8)
    assert ring.pop() == b"released"


@given(
    st.sampled_from([2, 4, 32]),
    st.lists(st.one_of(st.none(), st.integers(0, 2**64 - 1)), max_size=200),
)
@settings(max_examples=200, deadline=None)
def test_words_of_one_producer(size: int, operations: list[int | None]) -> None:
    ring, slow = SpscRing(size), deque[int]()
    for word in operations:
        if word is None:
            assert ring.pop() == (slow.popleft() if slow else None)
        else:
            assert ring.push(word) == (len(slow) < size)
            if len(slow) < size:
                slow.append(word)


@pytest.mark.parametrize("size", [0, 1, 3, 6, 2**20 + 1])
@pytest.mark.parametrize("make", [lambda n: WorkRing(n, 8), SpscRing], ids=["WorkRing", "SpscRing"])
def test_sizes_are_powers_of_two(size: int, make: type) -> None:
    with pytest.raises(ValueError, match="power of two"):
        make(size)


def test_rows_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="8 bytes, not 7"):
        WorkRing(2, 8).push(bytes(7))


def test_memory_is_touched_lazily() -> None:
    """A terabyte of address space is refused with an error; a large lazy ring is created."""
    assert WorkRing(1 << 20, 1 << 12).push(bytes(1 << 12))
