"""The evaluations in flight beside a dict."""

import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipper_core.pending import Pending
from clipper_core.status import StatusError


@settings(max_examples=60, deadline=None)
@given(entries_max=st.integers(0, 40), seed=st.integers(0, 2**32), spread=st.sampled_from([1, 4, 64, 2**64]))
def test_pending_answers_as_a_dict(entries_max: int, seed: int, spread: int) -> None:
    rng = random.Random(seed)
    table, twin = Pending(entries_max), dict[tuple[int, int], int]()
    keys = [(rng.choice([rng.randrange(spread), 2**64 - 1]), rng.randrange(2**56)) for _ in range(60)]
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
    """One thread inserts and removes, as the loop does; another asks for a key that is there all the time."""
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
