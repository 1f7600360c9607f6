"""The pauses between tries."""

import random

import pytest

from clipper_container.backoff import Backoff


def bounds(pauses: list[float], expected: list[float]) -> bool:
    return all(s / 2 <= pause <= s for s, pause in zip(expected, pauses, strict=True))


def test_pauses_double_to_the_longest_and_begin_anew_after_a_success() -> None:
    backoff = Backoff(0.1, 1.0)
    grown = [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert not backoff.is_longest
    assert bounds([backoff.next_s() for _ in grown], grown)
    assert backoff.is_longest
    backoff.reset()
    assert bounds([backoff.next_s() for _ in grown], grown)


def test_what_lived_long_enough_begins_anew_when_it_ends() -> None:
    backoff = Backoff(1.0, 8.0, steady_s=30.0)
    assert bounds([backoff.ended(0.0) for _ in range(4)], [1.0, 2.0, 4.0, 8.0])
    assert bounds([backoff.ended(29.0), backoff.ended(30.0), backoff.ended(1.0)], [8.0, 1.0, 2.0])
    assert bounds([Backoff(1.0, 8.0).ended(1e9)], [1.0])


@pytest.mark.parametrize("seed", range(5))
def test_chance_is_given_by_a_seed(seed: int) -> None:
    one, other = (Backoff(rng=random.Random(seed)) for _ in range(2))
    assert [one.next_s() for _ in range(9)] == [other.next_s() for _ in range(9)]


def test_servers_of_a_fleet_do_not_return_at_the_same_time() -> None:
    firsts = {round(Backoff(1.0, 8.0).next_s(), 6) for _ in range(50)}
    assert len(firsts) > 40
