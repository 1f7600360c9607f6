"""The harness of the benchmarks: what it says must be so."""

from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from bench.compare import change, tolerance
from bench.harness import Goal, Row, Sample, arrivals, interleave, is_met, open_loop, row, short, table, window_ns


def answered(value: Any) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_result(value)
    return future


@pytest.mark.parametrize(
    ("unit", "value", "anchor", "goal", "ratio", "met"),
    [
        ("ns", 100.0, 2000.0, Goal("times_better", 20), 20.0, True),
        ("ns", 101.0, 2000.0, Goal("times_better", 20), 2000 / 101, False),
        ("M/s", 4.0, 0.2, Goal("times_better", 20), 20.0, True),
        ("us", 25.0, 50.0, Goal("at_most", 0.7), 0.5, True),
        ("us", 40.0, 50.0, Goal("at_most", 0.7), 0.8, False),
        ("1/s", 90.0, 100.0, Goal("at_least", 0.95), 0.9, False),
        ("ms", 19.0, 5.0, Goal("value_at_most", 20), 3.8, True),
        ("ms", 19.0, 5.0, None, 3.8, None),
    ],
)
def test_a_goal_bounds_the_ratio(
    unit: str, value: float, anchor: float, goal: Goal | None, ratio: float, met: bool | None
) -> None:
    found = row("x", value, unit, "anchor", anchor, goal)
    assert found.ratio == pytest.approx(ratio)
    assert found.met is met


def test_a_goal_that_needs_an_anchor_is_open_without_one() -> None:
    assert is_met(Goal("at_most", 1), 5.0, None) is None
    assert is_met(Goal("value_at_least", 4), 5.0, None) is True


def test_cases_run_in_turns() -> None:
    seen: list[str] = []

    def case(name: str) -> float:
        seen.append(name)
        return float(len(seen))

    samples = interleave({"a": lambda: case("a"), "b": lambda: case("b")}, repetitions=3, warmups=1)
    assert seen == ["a", "b"] * 4
    assert samples["a"].values == (3.0, 5.0, 7.0)
    assert samples["b"].median == 6.0


def test_a_window_never_has_more_outstanding_than_it_says() -> None:
    open_now = most = 0

    class Late(Future):  # type: ignore[type-arg]
        def result(self, timeout: float | None = None) -> None:
            nonlocal open_now
            open_now -= 1

    def predict(_: object) -> Late:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        return Late()

    window_ns(predict, range(100), outstanding=7)
    assert (most, open_now) == (7, 0)


@pytest.mark.parametrize("burst", [1.0, 4.0])
def test_arrivals_have_their_rate_and_their_seed(burst: float) -> None:
    times = arrivals(10_000, 2.0, seed=3, burst=burst)
    assert len(times) == pytest.approx(20_000, rel=0.05)
    assert (np.diff(times) >= 0).all()
    assert times[-1] < 2.0
    assert (times == arrivals(10_000, 2.0, seed=3, burst=burst)).all()
    if burst > 1:
        assert (times % 0.2 <= 0.2 / burst).all()


def test_every_query_of_an_open_loop_is_accounted_for() -> None:
    def predict(x: int) -> "Future[Any]":
        if x == 0:
            raise OverflowError
        future = answered(x)
        if x == 1:
            future = Future()
            future.set_exception(LookupError())
        return future

    load = open_loop(predict, [0, 1, 2, 3], [0.0, 0.001, 0.002, 0.003], is_default=lambda answer: answer == 3)
    assert load.offered == 4
    assert load.errors == {"OverflowError": 1, "LookupError": 1}
    assert load.defaults == 1
    assert load.within(60e6) == 2
    assert load.goodput_per_s(60e6) == pytest.approx(1 / load.seconds)
    assert np.isnan(load.latencies_us[:2]).all()


def test_a_query_that_is_never_answered_is_an_error() -> None:
    load = open_loop(lambda _: Future(), [0], [0.0, 0.0], patience_s=0.01)
    assert load.errors == {"never answered": 2}


def test_a_comparison_looks_at_ratios_where_there_are_anchors() -> None:
    def fields(value: float, anchor: float | None, unit: str = "ns", spread: str = "") -> dict[str, Any]:
        return {"value": value, "against_value": anchor, "unit": unit, "spread": spread}

    assert change(fields(10, 100), fields(20, 200)) == pytest.approx(1)
    assert change(fields(10, None), fields(20, None)) == pytest.approx(0.5)
    assert change(fields(10, None, "1/s"), fields(20, None, "1/s")) == pytest.approx(2)
    assert tolerance(fields(1, None, spread="1 000-1 500"), fields(1, None)) == pytest.approx(1.5)


def test_a_table_shows_every_row() -> None:
    one = row("one", Sample((1.0, 2.0, 3.0)), "ns", "other", 4.0, Goal("at_most", 1))
    text = table([one, Row("two", 5e6, "1/s", note="why")])
    assert "1-3" in text
    assert "yes" in text
    assert "5 M 1/s" in text
    assert "two: why" in text
    assert [short(v) for v in (0.01234, 12345.0, None)] == ["0.0123", "12 300", ""]
