"""The histogram, compared with the list of all values."""

import math
import threading

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from clipper_core.runtime.histogram import Counter, LatencyHistogram, Snapshot

TOP = 2**42
values = st.one_of(
    st.integers(0, 40),
    st.integers(0, TOP - 1),
    st.builds(
        lambda power, off: max((1 << power) + off, 0), st.integers(0, 41), st.integers(-2, 2)
    ),
)


def filled(recorded: list[int]) -> LatencyHistogram:
    histogram = LatencyHistogram()
    for value in recorded:
        histogram.record(value)
    return histogram


def close_above(estimate: float, value: int) -> bool:
    """Return whether a result lies in the bucket of `value`: exact below 16, else at most an eighth
    too high."""
    return estimate == value if value < 16 else abs(estimate - value) <= value / 8


@given(values)
def test_a_value_lies_in_its_bucket(value: int) -> None:
    ((low, high, count),) = filled([value]).snapshot().buckets()
    assert count == 1
    assert low <= value <= high
    assert (
        high == low
        if value < 16
        else high - low + 1 == low >> (low.bit_length() - 1) << (low.bit_length() - 4)
    )


def test_the_buckets_cover_every_value_once() -> None:
    edges = [0]
    while edges[-1] < TOP:
        ((low, high, _),) = filled([edges[-1]]).snapshot().buckets()
        assert low == edges[-1]
        edges.append(high + 1)
    assert edges[-1] == TOP
    assert len(edges) == 320 + 1


@pytest.mark.parametrize("value", [TOP, TOP + 1, 2**63, 2**64 - 1])
def test_values_beyond_the_top_share_the_last_bucket(value: int) -> None:
    snapshot = filled([value]).snapshot()
    assert snapshot.buckets() == [(15 << 38, TOP - 1, 1)]
    assert snapshot.sum == value


@given(st.lists(values, min_size=1, max_size=60), st.floats(0, 1))
def test_as_the_twin(recorded: list[int], q: float) -> None:
    snapshot = filled(recorded).snapshot()
    recorded.sort()
    assert snapshot.count == len(recorded)
    assert snapshot.sum == sum(recorded)
    assert snapshot.mean == pytest.approx(sum(recorded) / len(recorded))
    assert recorded[-1] <= snapshot.max
    assert close_above(snapshot.max, recorded[-1])
    rank = min(max(math.ceil(q * len(recorded)), 1), len(recorded))
    assert close_above(snapshot.quantile(q), recorded[rank - 1])
    assert snapshot.quantile(1) == snapshot.max
    for _, high, _ in snapshot.buckets():
        assert snapshot.count_at_most(high) == sum(value <= high for value in recorded)


@given(st.lists(values, max_size=30), values)
@example([1030], 1025)
def test_count_at_most_never_returns_too_many(recorded: list[int], bound: int) -> None:
    assert filled(recorded).snapshot().count_at_most(bound) <= sum(
        value <= bound for value in recorded
    )


@given(st.lists(values, min_size=1), st.floats(0, 1), st.floats(0, 1))
def test_quantiles_rise(recorded: list[int], a: float, b: float) -> None:
    snapshot = filled(recorded).snapshot()
    assert snapshot.quantile(min(a, b)) <= snapshot.quantile(max(a, b))


def test_a_quantile_is_interpolated_within_its_bucket() -> None:
    histogram = LatencyHistogram()
    histogram.record_many(1024, 4)
    snapshot = histogram.snapshot()
    assert [snapshot.quantile(q) for q in (0, 0.25, 0.5, 1)] == [
        1024 + 127 / 4,
        1024 + 127 / 4,
        1024 + 127 / 2,
        1024 + 127,
    ]


@given(st.lists(values), st.lists(values))
def test_snapshots_add_and_subtract(first: list[int], second: list[int]) -> None:
    histogram = filled(first)
    earlier = histogram.snapshot()
    for value in second:
        histogram.record(value)
    later = histogram.snapshot()
    assert later - earlier == filled(second).snapshot()
    assert earlier + filled(second).snapshot() == later == filled(second).snapshot() + earlier
    assert later - later == Snapshot()
    assert (later - earlier).count == len(second)
    assert earlier == filled(first).snapshot()


def test_the_wrong_way_round_is_refused() -> None:
    with pytest.raises(ValueError, match="earlier"):
        Snapshot() - filled([3]).snapshot()


@given(values, st.integers(0, 2**20))
def test_record_many_is_record_many_times(value: int, times: int) -> None:
    many = LatencyHistogram()
    many.record_many(value, times)
    snapshot = many.snapshot()
    assert snapshot.count == times
    assert snapshot.sum == value * times
    if times <= 100:
        assert snapshot == filled([value] * times).snapshot()


def test_an_empty_snapshot() -> None:
    empty = Snapshot()
    assert empty == LatencyHistogram().snapshot()
    assert (empty.count, empty.sum, empty.max, empty.buckets()) == (0, 0, 0, [])
    assert math.isnan(empty.mean)
    assert math.isnan(empty.quantile(0.5))
    assert empty != object()
    assert "count=0" in repr(empty)


@pytest.mark.parametrize("q", [-0.001, 1.001, math.nan])
def test_a_quantile_outside_0_to_1_is_refused(q: float) -> None:
    with pytest.raises(ValueError, match="q must be"):
        Snapshot().quantile(q)


def test_bad_values_are_refused() -> None:
    for value in (-1, 2**64):
        with pytest.raises(OverflowError):
            LatencyHistogram().record(value)


def test_the_sum_wraps() -> None:
    snapshot = filled([2**64 - 1, 3]).snapshot()
    assert (snapshot.count, snapshot.sum) == (2, 2)


def test_threads_lose_nothing() -> None:
    histogram, counter = LatencyHistogram(), Counter()
    barrier = threading.Barrier(4)

    def work(value: int) -> None:
        barrier.wait()
        for _ in range(5000):
            histogram.record(value)
            counter.add()
            counter.add(2)

    threads = [threading.Thread(target=work, args=(value,)) for value in (7, 7, 9, 11)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert histogram.snapshot().buckets() == [(7, 7, 10000), (9, 9, 5000), (11, 11, 5000)]
    assert histogram.snapshot().sum == 5000 * (7 + 7 + 9 + 11)
    assert counter.value == 4 * 5000 * 3
