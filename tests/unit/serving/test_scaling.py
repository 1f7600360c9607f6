"""The number of replicas: properties of the rule, and its effects. No process, no clock."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clipper.errors import InvalidInput
from clipper.serving.models.scaling import (
    Expected,
    Load,
    Reading,
    Rule,
    Scaling,
    StuckWatch,
    Trend,
    follow,
    load_of,
    needed,
    replica_bounds,
)
from clipper.settings.server import ServerSettings
from clipper.types import VersionedModel

M = VersionedModel("m", 1)
RULE = Rule(up_after_s=1.0, down_after_s=10.0, delay_share=0.3, busy_share=0.7)
rates, times = st.floats(0, 1e6), st.floats(0, 1e5)
loads = st.builds(
    Load,
    offered_per_s=rates,
    lost_share=st.floats(0, 1),
    row_us=times,
    delay_us=times,
    slo_us=st.floats(1, 1e6),
    has=st.integers(0, 20),
)
trends = st.builds(
    Trend,
    wanted=st.integers(0, 30),
    delay_us=times,
    pressed_s=st.none() | st.floats(0, 100),
    calm_s=st.none() | st.floats(0, 100),
)


@given(rates, times, st.floats(0.05, 1))
def test_needed_keeps_each_below_its_share_and_is_no_more_than_that(
    rate: float, row_us: float, share: float
) -> None:
    n = needed(Load(offered_per_s=rate, row_us=row_us), share)
    work = rate * row_us / 1e6
    assert n >= 1
    assert work / n <= share * (1 + 1e-6)
    assert n == 1 or work / (n - 1) > share * (1 - 1e-6)


@given(trends, loads, st.integers(1, 10), st.integers(0, 10), st.floats(100, 1000))
def test_what_is_wanted_lies_within_the_bounds_and_goes_down_by_one(
    trend: Trend, load: Load, least: int, more: int, now_s: float
) -> None:
    after = follow(trend, load, least, least + more, RULE, now_s)
    assert least <= after.wanted <= least + more
    within = min(max(trend.wanted, least), least + more)
    assert after.wanted >= within - 1
    if load.has < within:
        assert after.wanted == within, "one is on its way"


@given(trends, loads, st.floats(100, 1000))
def test_more_pressure_never_wants_fewer(trend: Trend, load: Load, now_s: float) -> None:
    worse = Load(
        load.offered_per_s * 2,
        min(1.0, load.lost_share * 2),
        load.row_us,
        load.delay_us * 2,
        load.slo_us,
        load.has,
    )
    assert (
        follow(trend, worse, 1, 20, RULE, now_s).wanted
        >= follow(trend, load, 1, 20, RULE, now_s).wanted
    )


def pressed(has: int, **more: Any) -> Load:
    return Load(
        **{
            "offered_per_s": 100.0,
            "row_us": 1000.0,
            "delay_us": 19_000.0,
            "slo_us": 20_000.0,
            "has": has,
        }
        | more
    )


def low_load(has: int) -> Load:
    return Load(offered_per_s=10.0, row_us=1000.0, delay_us=0.0, slo_us=20_000.0, has=has)


def run(trend: Trend, load: Load, seconds: float, begin_s: float, step_s: float = 0.1) -> Trend:
    for i in range(round(seconds / step_s)):
        trend = follow(trend, load, 1, 4, RULE, begin_s + i * step_s)
    return trend


def test_up_after_a_while_of_pressure_and_not_before() -> None:
    trend = run(Trend(1), pressed(1), 1.0, 0.0)
    assert trend.wanted == 1
    trend = run(trend, pressed(1), 0.6, 1.0)
    assert trend.wanted == 2
    assert run(trend, pressed(1), 60, 2.0).wanted == 2, "the second has not come yet"
    assert run(trend, pressed(2), 2, 2.0).wanted == 3
    assert run(trend, pressed(4), 60, 2.0).wanted == 4


def test_as_many_at_once_as_the_rate_needs() -> None:
    assert run(Trend(1), pressed(1, offered_per_s=2_000.0), 2.0, 0.0).wanted == 3


def test_refusals_are_pressure_whatever_the_wait() -> None:
    assert run(Trend(1), pressed(1, delay_us=0.0, lost_share=0.05), 2.0, 0.0).wanted == 2


def test_a_breath_between_does_not_count_as_pressure() -> None:
    trend = Trend(1)
    for i in range(50):
        trend = run(trend, pressed(1), 0.7, i * 2.0)
        trend = run(trend, low_load(1), 1.3, i * 2.0 + 0.7)
    assert trend.wanted == 1


def test_down_one_by_one_after_calm() -> None:
    trend = run(Trend(4), low_load(4), 9.9, 0.0)
    assert trend.wanted == 4
    trend = run(trend, low_load(4), 0.3, 9.9)
    assert trend.wanted == 3
    assert run(trend, low_load(3), 60, 11.0).wanted == 1


def test_in_between_nothing_changes() -> None:
    """There is no pressure to add a replica, but one less would be too few."""
    steady = Load(offered_per_s=1_500.0, row_us=1000.0, delay_us=1_000.0, slo_us=20_000.0, has=3)
    assert run(Trend(3), steady, 100, 0.0).wanted == 3


@pytest.mark.parametrize("seed", range(20))
def test_it_settles_for_any_steady_load(seed: int) -> None:
    """In a simulation the wait is long if the work exceeds the capacity. The number of replicas
    reaches a value and stays there."""
    rng = random.Random(seed)
    rate, row_us = rng.uniform(10, 3_000), 1000.0
    trend, changes = Trend(rng.randrange(1, 9)), 0
    for i in range(3_000):
        busy = rate * row_us / 1e6 / trend.wanted
        load = Load(
            rate,
            max(0.0, 1 - 1 / busy) if busy else 0.0,
            row_us,
            20_000 * min(busy, 1) ** 8,
            20_000.0,
            trend.wanted,
        )
        after = follow(trend, load, 1, 8, RULE, i * 0.1)
        changes += i > 1_500 and after.wanted != trend.wanted
        trend = after
    assert changes == 0
    assert trend.wanted <= needed(Load(offered_per_s=rate, row_us=row_us), RULE.busy_share) + 1


@pytest.mark.parametrize("given_", [1, 0, 8, (1, 1), (1, 4), (8, 8)])
def test_bounds(given_: Any) -> None:
    assert replica_bounds("m", given_, 8) == (given_ if isinstance(given_, tuple) else (given_, 0))


@pytest.mark.parametrize(
    "given_",
    [-1, 9, True, 1.5, "2", None, (0, 4), (4, 1), (1, 9), (1,), (1, 2, 3), (1, True), [1, 4]],
)
def test_bounds_that_are_none(given_: Any) -> None:
    with pytest.raises(InvalidInput, match="replicas="):
        replica_bounds("m", given_, 8)


def stats(evaluated: int = 0, full: int = 0, *replicas: dict[str, Any]) -> dict[str, Any]:
    ended = {"FULL": full, "DROPPED": 0, "DEADLINE": 0, "NO_REPLICA": 0}
    return {
        "evaluated": evaluated,
        "ended": ended,
        "delay_us": 5_000,
        "slo_us": 20_000,
        "replicas": list(replicas),
    }


def ready(number: int = 0, **more: Any) -> dict[str, Any]:
    row = {
        "number": number,
        "pid": 100 + number,
        "state": "ready",
        "fit_us": (1000.0, 10.0),
        "limit": 100,
        "batches": 7,
    }
    return row | more


def test_rates_from_two_snapshots() -> None:
    load = load_of(
        stats(100, 0), stats(400, 100, ready(), {"number": 1, "pid": 0, "state": "backoff"}), 2.0
    )
    assert load == Load(
        offered_per_s=200.0, lost_share=0.25, row_us=20.0, delay_us=5_000, slo_us=20_000, has=1
    )


def test_a_replica_is_stuck_when_one_batch_is_long_overdue() -> None:
    watch = StuckWatch(5.0)
    stuck, slow, fine = (
        ready(0, suspect=True, in_flight=1),
        ready(1, suspect=True, in_flight=1),
        ready(2),
    )
    for second in range(5):
        slow["batches"] += 1  # late each time, but it answers
        assert watch.check([(M, stuck), (M, slow), (M, fine)], second) == []
    assert watch.check([(M, stuck), (M, slow), (M, fine)], 5.0) == [(M, 0, 100)]
    assert watch.check([(M, stuck)], 60.0) == [], "once"
    assert watch.check([(M, ready(0, suspect=True, in_flight=1, pid=555))], 60.0) == []
    assert watch.check([(M, ready(0, suspect=True, in_flight=1, pid=555))], 65.0) == [(M, 0, 555)]
    assert watch.check([(M, ready(1, suspect=True, in_flight=0))], 99.0) == [], (
        "silent, but it owes nothing"
    )


def test_readings_scale_and_restart() -> None:
    done: list[Any] = []
    shown = {M: Reading(1, 3, stats(0, 0, ready()))}
    settings = ServerSettings(stuck_s=1.0, scale_up_after_ms=500)
    scaling = Scaling(
        settings,
        lambda: shown,
        lambda id_, n, why: done.append((id_, n, why)),
        lambda *which: done.append(which),
    )
    assert scaling.wanted(M, 7) == 7
    for i in range(10):
        shown[M] = Reading(1, 3, stats(100 * i, 100 * i, ready(suspect=i > 2, in_flight=1)))
        scaling.check(10.0 + 0.2 * i)
    assert [entry[:2] for entry in done] == [(M, 2), (M, 0)]
    assert "50% lost" in done[0][2]
    assert scaling.wanted(M, 7) == 2
    shown[M] = Reading(0, 0, stats())
    scaling.check(20.0)
    assert scaling.wanted(M, 7) == 7, "a fixed number is followed no more"


def test_none_is_expected_before_the_first_that_may_come() -> None:
    now, reported = 1_000_000, []
    expected = Expected(lambda id_, when: reported.append(when), lambda: now)
    expected.starting(M, 0)
    assert reported[-1] <= now, "how long it takes is not known"
    now += 400_000
    expected.connected(M, [0])
    expected.starting(M, 0, pause_s=1.0)
    assert reported[-1] == now + 1_000_000 + 200_000
    expected.starting(M, 1, pause_s=0.1)
    assert reported[-1] == now + 100_000 + 200_000
    expected.failed(M, 1)
    assert reported[-1] == now + 1_000_000 + 200_000
    expected.failed(M, 0)
    assert reported[-1] == Expected.NEVER_US
    expected.stopped(M, 0)
    assert reported[-1] == Expected.NEVER_US
    expected.stopped(M, 1)
    assert reported[-1] == 0, "who knows"
