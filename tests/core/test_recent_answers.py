"""Answers that the HTTP threads of the core gave, kept for feedback by their number."""

import numpy as np
import pytest

from clipper_core.http.http_route import RecentAnswers
from clipper_core.runtime.status import StatusError


def test_an_answer_is_taken_once_with_its_owner_and_its_output() -> None:
    kept = RecentAnswers(8, 1 << 20)
    outputs = [7, 2.5, True, "seven", b"raw", np.arange(3.0)]
    for number, output in enumerate(outputs, 1):
        kept.add(number, 10 + number, output)
    assert len(kept) == len(outputs)
    for number, output in enumerate(outputs, 1):
        found = kept.take(number)
        assert found is not None
        owner, said, confidence, age_s = found
        assert owner == 10 + number
        assert type(said) is type(output)
        assert np.array_equal(said, output)
        assert confidence is None
        assert age_s >= 0
        assert kept.take(number) is None
    assert (len(kept), kept.nbytes) == (0, 0)


def test_the_last_answers_are_kept_whatever_came_before() -> None:
    kept = RecentAnswers(100, 1 << 20)  # rounded up to 128
    for number in range(1, 1001):
        kept.add(number, 0, number)
    assert len(kept) == 128
    assert [kept.take(number) is not None for number in (872, 873, 1000)] == [False, True, True]


def test_answers_of_two_engines_do_not_displace_each_other() -> None:
    kept = RecentAnswers(128, 1 << 20)
    for number in range(1, 41):
        kept.add(number, 0, number)
        kept.add((1 << 56) + number, 1, -number)
    assert all(kept.take(number) is not None for number in range(1, 41))
    assert all(kept.take((1 << 56) + number) is not None for number in range(1, 41))


def test_large_outputs_are_bounded_by_their_bytes_and_the_oldest_go_first() -> None:
    kept = RecentAnswers(64, 10_000)
    for number in range(1, 41):
        kept.add(number, 0, b"x" * 1000)
    assert kept.nbytes <= 10_000
    assert kept.take(40) is not None
    assert kept.take(36) is not None
    assert kept.take(20) is None
    kept.add(41, 0, b"x" * 20_000)
    assert kept.take(41) is None
    assert kept.nbytes <= 10_000


@pytest.mark.parametrize("size", [0, 1 << 40])
def test_a_size_that_is_out_of_range_is_refused(size: int) -> None:
    with pytest.raises(StatusError, match="size="):
        RecentAnswers(size, 0)


def test_number_zero_is_no_answer() -> None:
    kept = RecentAnswers(4, 100)
    kept.add(0, 0, 1)
    assert kept.take(0) is None
    assert len(kept) == 0
