"""Producers against a consumer on both rings: every row arrives once, whole, in its producer's
order."""

import time
from collections.abc import Callable

import pytest

from clipper_core.runtime.ring import SpscRing, WorkRing
from tests.stress.node import together

PRODUCERS = 4
# by size of the ring: a small one changes hands at every word
WORDS = {2: 500, 8: 5_000, 1024: 50_000}


@pytest.mark.parametrize("size", WORDS)
def test_the_sum_of_all_words_arrives(size: int, stress: int) -> None:
    """Both sides use the ring without the GIL, and it is often full."""
    words = WORDS[size] * stress
    ring, total = WorkRing(size, 8), []

    def producer(which: int) -> Callable[[], None]:
        return lambda: ring.churn(1 + which * words, words)

    together(
        *(producer(i) for i in range(PRODUCERS)),
        lambda: total.append(ring.drain(PRODUCERS * words)),
    )
    n = PRODUCERS * words
    assert total == [n * (n + 1) // 2]
    assert ring.pop() is None


@pytest.mark.parametrize("row_bytes", [16, 200])
def test_rows_are_whole_and_in_their_producers_order(row_bytes: int, stress: int) -> None:
    ring, rows = WorkRing(64, row_bytes), 2000 * stress
    seen: list[list[int]] = [[] for _ in range(PRODUCERS)]

    def produce(which: int) -> None:
        for i in range(rows):
            row = (which.to_bytes(1, "little") + i.to_bytes(7, "little")) * (row_bytes // 8)
            while not ring.push(row):
                time.sleep(0)

    def consume() -> None:
        left = PRODUCERS * rows
        while left:
            row = ring.pop()
            if row is not None:
                assert row == row[:8] * (row_bytes // 8), "a row is never torn"
                seen[row[0]].append(int.from_bytes(row[1:8], "little"))
                left -= 1
            else:
                time.sleep(0)

    together(*(lambda i=i: produce(i) for i in range(PRODUCERS)), consume)
    assert seen == [list(range(rows))] * PRODUCERS


def test_words_of_one_producer_arrive_in_order(stress: int) -> None:
    ring, words = SpscRing(16), 10_000 * stress
    seen: list[int] = []

    def produce() -> None:
        for word in range(words):
            while not ring.push(word):
                time.sleep(0)

    def consume() -> None:
        while len(seen) < words:
            if (word := ring.pop()) is not None:
                seen.append(word)
            else:
                time.sleep(0)

    together(produce, consume)
    assert seen == list(range(words))
