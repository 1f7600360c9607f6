"""The table of evaluations in flight, compared with a dict."""

import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipper_core.runtime.status import StatusError
from clipper_core.scheduling.lane import Pending
from tests.memory import resident_bytes


@settings(max_examples=60, deadline=None)
@given(
    entries_max=st.integers(0, 40),
    seed=st.integers(0, 2**32),
    spread=st.sampled_from([1, 4, 64, 2**64]),
)
def test_pending_answers_as_a_dict(entries_max: int, seed: int, spread: int) -> None:
    rng = random.Random(seed)
    table, twin = Pending(entries_max), dict[tuple[int, int], int]()
    keys = [
        (rng.choice([rng.randrange(spread), 2**64 - 1]), rng.randrange(2**56)) for _ in range(60)
    ]
    for _ in range(400):
        key, ticket = rng.choice(keys), rng.randrange(1, 2**64)
        if rng.random() < 0.55:
            if key in twin or len(twin) < entries_max:
                table.put(*key, ticket)
                twin[key] = ticket
            else:
                with pytest.raises(StatusError):
                    table.put(*key, ticket)
        else:
            ticket = twin.get(key, 5) if rng.random() < 0.8 else ticket
            table.remove(*key, ticket)
            if twin.get(key) == ticket:
                del twin[key]
        assert len(table) == len(twin)
        assert [table.find(*k) for k in keys] == [twin.get(k, 0) for k in keys]


def test_pending_refuses_ticket_zero_and_the_absurd() -> None:
    with pytest.raises(ValueError, match="ticket 0"):
        Pending(4).put(1, 2, 0)
    with pytest.raises(MemoryError):
        Pending(2**50)


def test_other_threads_see_what_is_in_flight_while_entries_move() -> None:
    """One thread inserts and removes, as the loop does; another looks up a key that is always
    there."""
    table, kept = Pending(64), (5, 5)
    table.put(*kept, 1)
    missed: list[int] = []
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            if not table.has(*kept):
                missed.append(1)

    asking = threading.Thread(target=ask)
    asking.start()
    for i in range(20_000):
        table.put(4 + 128 * (i % 7), i, i + 2)
        table.remove(4 + 128 * (i % 7), i, i + 2)
    done.set()
    asking.join()
    assert not missed
    assert not table.has(6, 6)


@pytest.mark.parametrize("entries_max", [0, 1, 1000, 1 << 17])
def test_touching_changes_nothing(entries_max: int) -> None:
    table = Pending(entries_max)
    rng = random.Random(3)
    keys = {(rng.getrandbits(64), k): k + 1 for k in range(min(entries_max, 500))}
    for key, ticket in keys.items():
        table.put(*key, ticket)
    start = table.touch()
    while start:
        start = table.touch(start)
    assert {key: table.find(*key) for key in keys} == keys
    assert len(table) == len(keys)
    assert table.touch((1 << 64) - 1) == 0


def test_a_touched_table_needs_no_memory() -> None:
    """The loop thread does not wait for new pages in a first burst."""
    table, rng = Pending(1 << 19), random.Random(1)
    start, calls = table.touch(), 1
    while start:
        start, calls = table.touch(start), calls + 1
    touched = resident_bytes()
    assert calls == 16, "2 MiB at a time"
    for ticket in range(1, 5000):
        table.put(rng.getrandbits(64), 1, ticket)
    assert resident_bytes() - touched < 1 << 20


def test_touching_disturbs_no_one() -> None:
    """One thread touches the table while the loop's thread adds and removes entries."""
    table, twin, rng, done = (
        Pending(1000),
        dict[tuple[int, int], int](),
        random.Random(5),
        threading.Event(),
    )

    def touch() -> None:
        while not done.is_set():
            table.touch()

    thread = threading.Thread(target=touch)
    thread.start()
    try:
        for ticket in range(1, 5001):
            key = (rng.randrange(16), 0)
            if key in twin and rng.random() < 0.5:
                table.remove(*key, twin.pop(key))
            else:
                table.put(*key, ticket)
                twin[key] = ticket
            assert table.find(*key) == twin.get(key, 0)
    finally:
        done.set()
        thread.join()
    assert len(table) == len(twin)
