"""Admission and replicas of unequal speed, on a virtual clock: a model of known capacity, Poisson
queries at a multiple of it."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from clipper_core.runtime.status import Status
from tests.simulation.world import Container, Kin, World

SLO_US = 20_000
FIXED_US, ROW_US = 2_000, 100  # of one batch: 80 rows take half the SLO
CAPACITY = 80 / (FIXED_US + 80 * ROW_US)  # rows a microsecond


ROW = np.zeros(4)


@dataclass
class Outcome:
    """The outcomes of the queries of one phase; times in microseconds."""

    span_us: int
    ended: Counter[Status] = field(default_factory=Counter)
    latencies: list[int] = field(default_factory=list)  # of those not refused
    waits: list[int] = field(default_factory=list)  # of those refused

    @property
    def offered(self) -> int:
        return sum(self.ended.values())

    @property
    def good_per_us(self) -> float:
        return self.ended[Status.OK] / self.span_us


def a_model(seed: int, **limits: Any) -> tuple[World, Kin]:
    world = World(seed, tasks_max=1 << 16, **limits)
    kin = world.model("m", cached=False, slo_us=SLO_US)
    return world, kin


def offer(world: World, kin: Kin, load: float, seconds: float, slo_us: int = SLO_US) -> Outcome:
    """Send queries at `load` times CAPACITY, whatever comes back."""
    span = int(seconds * 1e6)
    begun, model = world.now_us, world.models[kin.number][1]
    rate = load * CAPACITY
    gaps = np.random.default_rng(world.rng.randrange(1 << 30)).exponential(
        1 / rate, int(rate * span * 1.2) + 50
    )
    sent = []
    for at in np.cumsum(gaps).astype(int).tolist():
        if at >= span:
            break
        world.run(begun + at)
        world.step()
        sent.append((world.now_us, model.predict(ROW, slo_us / 1000)))
        world.wake_us = world.now_us
        if sent[-1][1].done():
            assert sent[-1][1].status() in (Status.FULL, Status.NO_REPLICA)
    world.run(begun + span + slo_us + 100)
    return tally(span, sent)


def tally(span: int, sent: list[tuple[int, Any]]) -> Outcome:
    found = Outcome(span)
    for _, future in sent:
        status = future.status()
        found.ended[status] += 1
        if status != Status.FULL:
            found.latencies.append(future.latency_us)
    return found


def p99(values: list[int]) -> float:
    return float(np.quantile(values, 0.99)) if values else 0.0


@pytest.mark.parametrize("load", [2.0, 10.0])
@pytest.mark.parametrize("mode", [0, 1, 2], ids=["aimd", "fit", "quantile"])
@pytest.mark.parametrize("seed", [1, 2])
def test_overload_costs_no_goodput_and_leaves_nothing_behind(
    seed: int, mode: int, load: float
) -> None:
    world, kin = a_model(seed)
    Container(world, kin, a_us=FIXED_US, b_us=ROW_US, checked=False, mode=mode, size_max=4096)
    world.pass_us(1_000)
    offer(world, kin, 0.5, 0.5)
    peak = max(offer(world, kin, near, 0.5).good_per_us for near in (0.9, 1.0, 1.1))
    over = offer(world, kin, load, 1.0)
    after = offer(world, kin, 0.8, 1.0)
    assert peak >= 0.9 * CAPACITY
    assert over.good_per_us >= 0.95 * peak
    assert p99(over.latencies) <= SLO_US
    assert over.ended[Status.OK] + over.ended[Status.FULL] >= 0.99 * over.offered, (
        "refused at once, not dropped later"
    )
    assert after.ended[Status.OK] >= 0.99 * after.offered


def test_a_step_from_half_to_double_load_settles_within_ten_slos() -> None:
    world, kin = a_model(3)
    Container(world, kin, a_us=FIXED_US, b_us=ROW_US, checked=False, mode=1, size_max=4096)
    world.pass_us(1_000)
    offer(world, kin, 0.5, 1.0)
    offer(world, kin, 2.0, 10 * SLO_US / 1e6)
    over = offer(world, kin, 2.0, 0.5)
    assert over.good_per_us >= 0.93 * CAPACITY
    assert over.ended[Status.OK] + over.ended[Status.FULL] >= 0.99 * over.offered


@pytest.mark.parametrize(("factor", "least"), [(0.3, 0.9), (2.0, 0.6)])
def test_the_forecast_follows_a_replica_that_changes_its_speed(factor: float, least: float) -> None:
    """Less than half of the throughput can be reached at half the speed, since two batches of the
    best size exceed the SLO then."""
    world, kin = a_model(4)
    container = Container(
        world, kin, a_us=FIXED_US, b_us=ROW_US, checked=False, mode=1, size_max=4096
    )
    world.pass_us(1_000)
    offer(world, kin, 1.5, 1.0)
    container.a_us, container.b_us = factor * FIXED_US, factor * ROW_US
    offer(world, kin, 1.5, 1.0)
    settled = offer(world, kin, 1.5 / factor, 1.0)
    assert settled.good_per_us * factor >= least * CAPACITY
    assert p99(settled.latencies) <= 1.05 * SLO_US


@pytest.mark.parametrize("load", [0.6, 2.0])
@pytest.mark.parametrize("mode", [0, 1, 2], ids=["aimd", "fit", "quantile"])
def test_admission_recovers_after_a_second_of_slow_batches(mode: int, load: float) -> None:
    """Another process takes the core: for a second batches take longer than the SLO, then times
    vary widely. Afterwards the goodput is as before."""
    world, kin = a_model(9)
    container = Container(
        world, kin, a_us=FIXED_US, b_us=ROW_US, checked=False, mode=mode, size_max=4096
    )
    world.pass_us(1_000)
    offer(world, kin, load, 1.0)
    usual = offer(world, kin, load, 0.5)
    for i in range(20):
        container.a_us = 30_000 if i % 3 else FIXED_US
        offer(world, kin, load, 0.05)
    container.a_us = FIXED_US
    offer(world, kin, load, 0.5)
    after = offer(world, kin, load, 0.5)
    assert after.good_per_us >= 0.95 * usual.good_per_us


# -- batches and the door together

LINES = {"gpu": (3_000, 30), "kernel": (100, 1_000)}


def best_of(name: str) -> tuple[int, float]:
    """Return the rows of a batch of half the SLO, and its rows per microsecond as a multiple of
    CAPACITY."""
    a_us, b_us = LINES[name]
    size = (SLO_US // 2 - a_us) // b_us
    return size, size / (a_us + b_us * size) / CAPACITY


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize("mode", [0, 1, 2], ids=["aimd", "fit", "quantile"])
def test_a_cold_replica_gets_batches_of_the_best_size_within_20(mode: int, name: str) -> None:
    """A second batch in flight while the size doubles would be of the old size: each size would
    come twice."""
    size, near = best_of(name)
    for seed in (1, 2, 3):
        world, kin = a_model(seed)
        container = Container(
            world,
            kin,
            a_us=LINES[name][0],
            b_us=LINES[name][1],
            checked=False,
            mode=mode,
            size_max=4096,
        )
        world.pass_us(1_000)
        offer(world, kin, 3 * near, 0.25)
        assert max(container.batches[:20]) >= 0.9 * size


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize("mode", [0, 1, 2, 3], ids=["aimd", "fit", "quantile", "static"])
def test_admission_keeps_no_replica_from_its_best_batches(mode: int, name: str) -> None:
    """A short queue could cause small second batches, and rows that finish early an unneeded
    margin."""
    size, near = best_of(name)
    world, kin = a_model(1)
    most = size if mode == 3 else 4096
    Container(
        world,
        kin,
        a_us=LINES[name][0],
        b_us=LINES[name][1],
        checked=False,
        mode=mode,
        size_max=most,
    )
    world.pass_us(1_000)
    offer(world, kin, 0.9 * near, 0.5)
    below = offer(world, kin, 0.9 * near, 1.0)
    beyond = offer(world, kin, 1.2 * near, 1.0)
    assert below.ended[Status.OK] >= 0.95 * below.offered
    assert beyond.good_per_us >= 0.88 * near * CAPACITY


# -- replicas of unequal speed


def test_rows_are_split_by_the_speed_of_replicas_and_none_starves() -> None:
    """A replica that is four times slower gets a quarter of the rows. The fixed cost of a batch is
    nearly 0."""
    world, kin = a_model(5)
    fast = Container(world, kin, a_us=20, b_us=ROW_US, checked=False, mode=1, size_max=4096)
    slow = Container(world, kin, a_us=80, b_us=4 * ROW_US, checked=False, mode=1, size_max=4096)
    world.pass_us(1_000)
    offer(world, kin, 0.8, 0.5)
    before = sum(fast.batches), sum(slow.batches)
    offer(world, kin, 3.0, 1.0)
    split = (sum(fast.batches) - before[0]) / (sum(slow.batches) - before[1])
    assert 3.2 <= split <= 4.8


def test_a_slow_replica_gets_probe_rows() -> None:
    world, kin = a_model(6)
    fast = Container(world, kin, a_us=500, b_us=ROW_US, checked=False, mode=1, size_max=4096)
    slow = Container(world, kin, a_us=8_000, b_us=ROW_US, checked=False, mode=1, size_max=4096)
    world.pass_us(1_000)
    offer(world, kin, 0.05, 1.0)
    before = len(slow.batches)
    offer(world, kin, 0.05, 5.0)
    assert 3 <= len(slow.batches) - before <= 10
    slow.a_us = 500
    offer(world, kin, 0.05, 2.0)
    before = len(fast.batches), len(slow.batches)
    offer(world, kin, 0.05, 2.0)
    share = (len(slow.batches) - before[1]) / (len(fast.batches) - before[0])
    assert 0.5 <= share <= 2


def test_rows_wait_for_a_fast_replica_if_the_slow_one_takes_longer() -> None:
    world, kin = a_model(7)
    Container(world, kin, a_us=1_000, b_us=10, checked=False, mode=1, size_max=4096)
    Container(world, kin, a_us=15_000, b_us=10, checked=False, mode=1, size_max=4096)
    world.pass_us(1_000)
    offer(world, kin, 0.1, 2.0)
    found = offer(world, kin, 0.1, 4.0)
    assert float(np.quantile(found.latencies, 0.95)) <= 4_000
    assert found.ended[Status.OK] == found.offered


def test_no_fast_replica_is_idle_while_rows_wait() -> None:
    """Whenever rows wait, the fast replica has a batch, except while its reply is on the way."""
    world, kin = a_model(8)
    fast = Container(world, kin, a_us=FIXED_US, b_us=ROW_US, checked=False, mode=1, size_max=4096)
    Container(world, kin, a_us=4 * FIXED_US, b_us=4 * ROW_US, checked=False, mode=1, size_max=4096)
    world.pass_us(1_000)
    offer(world, kin, 0.5, 0.5)
    idle = []

    def measure() -> None:
        idle.append(
            world.snapshot(kin)["queued"] > 0 and not world.engine.replica(fast.conn)["in_flight"]
        )  # type: ignore[index]
        world.after(100, measure)

    world.after(100, measure)
    offer(world, kin, 1.2, 1.0)
    assert sum(idle) == 0
    assert len(idle) > 5_000


def test_rows_of_arrays_count_in_the_forecast_of_a_query() -> None:
    """Rows that are due later fill the batch of the query: it is refused at submission, not dropped
    in the queue later."""
    ended: Counter[Status] = Counter()
    for seed in range(3):
        world, kin = a_model(seed)
        Container(world, kin, a_us=FIXED_US, b_us=ROW_US, checked=False, size_max=4096)
        world.pass_us(1_000)
        offer(world, kin, 0.5, 0.5)
        future = world.models[kin.number][1].predict_many(np.zeros((20_000, 4)), 60_000)
        world.wake_us = world.now_us
        ended += offer(world, kin, 0.3, 1.0).ended
        assert (future.statuses() == Status.OK).sum() > 4_000
        future.cancel()
    assert ended[Status.DROPPED] + ended[Status.DEADLINE] <= 0.005 * ended.total(), ended


@pytest.mark.parametrize("load", [0.1, 0.5])
@pytest.mark.parametrize("mode", [0, 1, 2], ids=["aimd", "fit", "quantile"])
def test_queries_with_short_slos_are_answered_beside_an_array_of_a_minute(
    mode: int, load: float
) -> None:
    world, kin = a_model(5)
    Container(world, kin, a_us=FIXED_US, b_us=ROW_US, checked=False, mode=mode, size_max=4096)
    world.pass_us(1_000)
    offer(world, kin, 0.5, 0.5)
    future = world.models[kin.number][1].predict_many(np.zeros((15_000, 4)), 60_000)
    offer(world, kin, load, 0.2)
    done, _ = future.progress()
    beside = offer(world, kin, load, 1.0)
    assert beside.ended[Status.OK] >= 0.99 * beside.offered
    assert (future.progress()[0] - done) / beside.span_us >= 0.6 * (1 - load) * CAPACITY, (
        "and the array gets the rest"
    )
    future.cancel()


def test_queries_of_a_second_leave_capacity_for_queries_of_20_ms() -> None:
    """Queries with an SLO of a second at twice the capacity make a long queue; queries with a short
    SLO are answered beside them."""
    world, kin = a_model(6)
    Container(world, kin, a_us=FIXED_US, b_us=ROW_US, checked=False, mode=1, size_max=4096)
    world.pass_us(1_000)
    model, patient, quick = world.models[kin.number][1], [], []
    for i in range(40_000):
        world.pass_us(round(0.5 / CAPACITY))
        (patient if i % 10 else quick).append(
            (i, model.predict(ROW, 1_000 if i % 10 else SLO_US / 1000))
        )
        world.wake_us = world.now_us
    world.pass_us(1_100_000)
    assert tally(1, quick[1_000:]).ended[Status.OK] >= 0.75 * len(quick[1_000:])
    assert tally(1, patient[9_000:]).ended[Status.OK] >= 0.3 * len(patient[9_000:])
