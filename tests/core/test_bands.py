"""Shares and priorities: beside an obvious model of the order, and in an engine on a simulated
clock whose containers take a known time."""

import random
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from clipper_core.engine.model import predict_ensemble
from clipper_core.results.decider import Decider, Rule, Step
from clipper_core.runtime.status import Status, StatusError
from clipper_core.scheduling.bands import BandOrder, band_number

World = Any  # tests/core/conftest.py
NewWorld = Callable[..., World]
PRIORITIES, SHARES_MAX = 3, 15
LOWER_SHARE = Fraction(1, 20)
BATCH, BATCH_US = 8, 20_000
CAPACITY = 400  # rows a second
SLO_US = 150_000
ALL = Decider([Step(Rule.ALL)])


def rank_of(band: int) -> int:
    return {0: 1, 1: 0, 2: 2}[band % PRIORITIES]


class SlowOrder:
    """The order as its description has it, in exact numbers: for each share the work that it has
    had for its weight, for each lower priority the rows that it is owed."""

    def __init__(self, weights: list[int]) -> None:
        self.weights = weights
        self.start: dict[int, Fraction] = {}
        self.now = [Fraction(0)] * PRIORITIES  # where who had no rows begins
        self.owed = [Fraction(0)] * PRIORITIES

    def virtual(self, band: int) -> Fraction:
        return max(self.start.get(band, Fraction(0)), self.now[rank_of(band)])

    def next(self, bands: list[int]) -> set[int]:
        """Return the bands that may go next; several where they are equal."""
        ranks = {rank_of(band) for band in bands}
        self.top = min(ranks)
        for rank in set(range(PRIORITIES)) - ranks:
            self.owed[rank] = Fraction(0)
        owed = [rank for rank in ranks if rank > self.top and self.owed[rank] >= 1]
        chosen = max(owed, default=self.top)
        these = [band for band in bands if rank_of(band) == chosen]
        least = min(map(self.virtual, these))
        self.now[chosen] = least
        return {band for band in these if self.virtual(band) == least}

    def charge(self, band: int, bands: list[int]) -> None:
        rank = rank_of(band)
        self.start[band] = self.virtual(band) + Fraction(1, self.weights[band // PRIORITIES])
        for lower in {rank_of(one) for one in bands}:
            if lower > self.top:
                self.owed[lower] += LOWER_SHARE
        if rank > self.top:
            self.owed[rank] -= 1


@pytest.mark.parametrize("seed", range(8))
def test_the_order_is_that_of_an_obvious_model(seed: int) -> None:
    rng = random.Random(seed)
    # powers of two, so that sums of their inverses are exact in both
    weights = [2 ** rng.randrange(6) for _ in range(SHARES_MAX + 1)]
    fast, slow = BandOrder(weights), SlowOrder(weights)
    bands = rng.sample(range(PRIORITIES * (SHARES_MAX + 1)), rng.randrange(2, 12))
    waiting = list(bands)
    for _ in range(2000):
        if rng.random() < 0.1:
            waiting = rng.sample(bands, rng.randrange(1, len(bands) + 1))
        may = slow.next(waiting)
        if any(abs(owed - 1) < Fraction(1, 1000) for owed in slow.owed):
            # 20 times 0.05 is not quite 1
            band = min(may)
            fast.choose(waiting)
        else:
            band = fast.choose(waiting)
            assert band in may
        fast.charge(band)
        slow.charge(band, waiting)


def test_numbers_of_bands() -> None:
    every = {
        band_number(share, priority)
        for share in range(SHARES_MAX + 1)
        for priority in range(1, PRIORITIES + 1)
    }
    assert every == set(range(PRIORITIES * (SHARES_MAX + 1)))
    assert band_number(0, 2) == 0
    for share, priority in ((SHARES_MAX + 1, 2), (0, 0), (0, 4)):
        with pytest.raises(StatusError):
            band_number(share, priority)


@pytest.mark.parametrize("band", [48, 255])
def test_a_band_that_there_is_not_is_refused(world: World, band: int) -> None:
    model = world.model()
    for call in (
        lambda: model.predict(1.0, band=band),
        lambda: model.predict_many(np.ones(3), band=band),
    ):
        with pytest.raises(StatusError, match="bands have the numbers"):
            call()


def test_a_share_that_comes_late_is_not_given_what_it_did_not_ask_for() -> None:
    order = BandOrder([50, 50])
    for _ in range(1000):
        assert order.choose([0]) == 0
        order.charge(0)
    got = Counter()
    for _ in range(100):
        band = order.choose([0, 3])
        got[band] += 1
        order.charge(band)
    assert got == {0: 50, 3: 50}


def test_what_is_ahead_of_a_row() -> None:
    order = BandOrder([50, 50])
    assert order.ahead(3, 0, {0: 100}) == 1, "its turn is after one row of the flood"
    assert order.ahead(0, 100, {0: 100}) == 100
    assert order.ahead(0, 100, {0: 100, 3: 10}) == 200, "half of what is sent is another's"
    high, low = band_number(0, 1), band_number(0, 3)
    assert order.ahead(high, 5, {0: 100, low: 100}) <= 6
    assert order.ahead(low, 0, {0: 100}) in (18, 19), "a lower priority keeps a row in twenty"
    assert order.ahead(low, 0, {0: 4}) == 4


# -- an engine, whose container takes BATCH_US for a batch of BATCH rows


class Load:
    """Bands that send at given rates, in a simulated world. got: rows answered, by band, for each
    second. ended: how all rows of each band ended. took_us: of the rows that were answered."""

    def __init__(self, world: World, seed: int, **model: Any) -> None:
        self.world, self.rng = world, np.random.default_rng(seed)
        self.model = world.model("f64", (2,), slo_us=SLO_US, **{"cached": False, **model})
        self.container = world.container(self.model, size_max=BATCH)
        self.open: list[tuple[int, int, Any]] = []
        self.ended: dict[int, Counter[str]] = {}
        self.took_us: dict[int, list[int]] = {}
        self.done_us = 0
        self.number = 0

    def submit(self, band: int, rows: int = 1) -> None:
        self.number += 1
        if rows > 1:
            x = np.full((rows, 2), [float(band), float(self.number)])
            x[:, 1] += np.arange(rows) / rows
            future = self.model.predict_many(x, 60_000, band=band)
        else:
            future = self.model.predict([float(band), float(self.number)], band=band)
        self.open.append((band, self.world.now_us, future))

    def run(
        self, seconds: float, rates: dict[int, float], arrays: dict[int, int] | None = None
    ) -> "list[Counter[int]]":
        """Run with random arrivals, of arrays of so many rows in some bands; return the rows that
        the container answered, by band, for each second."""
        windows: list[Counter[int]] = []
        for ms in range(round(seconds * 1000)):
            if ms % 1000 == 0:
                windows.append(Counter())
            for band, rate in rates.items():
                size = (arrays or {}).get(band, 1)
                for _ in range(self.rng.poisson(rate / 1000 / size)):
                    self.submit(band, size)
            self.world.step(1000)
            self._serve(windows[-1])
            self._collect()
        return windows

    def _serve(self, window: "Counter[int]") -> None:
        inbox = self.container.read()
        if not inbox:
            self.done_us = 0
            return
        if self.done_us == 0:
            self.done_us = self.world.now_us + BATCH_US
        if self.world.now_us >= self.done_us:
            _, rows = inbox[0]
            for row in rows:
                window[int(row[0])] += 1
            self.container.reply()
            self.done_us = self.world.now_us + BATCH_US
            self.world.step()
            if not self.container.read():
                self.done_us = 0

    def _collect(self) -> None:
        still = []
        for band, begun, future in self.open:
            if not future.done():
                still.append((band, begun, future))
                continue
            ended = self.ended.setdefault(band, Counter())
            for status in future.statuses():
                ended[Status(int(status)).name] += 1
            self.took_us.setdefault(band, []).append(self.world.now_us - begun)
        self.open = still

    def lost(self, band: int) -> int:
        return sum(n for status, n in self.ended[band].items() if status != "OK")


@pytest.fixture
def load(new_world: NewWorld) -> Callable[..., Load]:
    def make(weights: list[int], seed: int = 1, **options: Any) -> Load:
        world = new_world()
        world.engine.set_weights(weights)
        return Load(world, seed, **options)

    return make


SHARE_1, SHARE_2 = (band_number(share, 2) for share in (1, 2))
HIGH, LOW = band_number(0, 1), band_number(0, 3)


def check_shares(windows: list["Counter[int]"], weights: dict[int, float]) -> None:
    # the batcher learns in the first second
    for window in windows[1:]:
        total = sum(window.values())
        assert total > 0.9 * CAPACITY, window
        for band, weight in weights.items():
            part = weight / sum(weights.values())
            assert abs(window[band] - part * total) <= 0.05 * part * total + 1, window


@pytest.mark.parametrize("seed", range(3))
def test_shares_are_kept_while_all_ask_for_more(load: Callable[..., Load], seed: int) -> None:
    one = load([20, 50, 30], seed)
    windows = one.run(4, {0: 800, SHARE_1: 800, SHARE_2: 800})
    check_shares(windows, {0: 20, SHARE_1: 50, SHARE_2: 30})


def test_shares_are_kept_against_floods_of_many_times_the_capacity(
    load: Callable[..., Load],
) -> None:
    one = load([20, 50, 30], 3)
    windows = one.run(3, {0: 8000, SHARE_1: 500, SHARE_2: 500})
    check_shares(windows, {0: 20, SHARE_1: 50, SHARE_2: 30})


@pytest.mark.parametrize("times", [2, 10, 100])
def test_who_sends_less_than_its_share_loses_nothing_to_a_flood(
    load: Callable[..., Load], times: int
) -> None:
    alone, beside = load([50, 50], 5), load([50, 50], 5)
    alone.run(3, {SHARE_1: CAPACITY / 4})
    windows = beside.run(3, {SHARE_1: CAPACITY / 4, 0: times * CAPACITY / 2})
    assert beside.lost(SHARE_1) <= 0.001 * sum(beside.ended[SHARE_1].values())
    slow = float(np.quantile(beside.took_us[SHARE_1], 0.99))
    # no batch is sent behind one in flight, so it waits for little more than the rest of one
    assert slow <= np.quantile(alone.took_us[SHARE_1], 0.99) + BATCH_US
    assert sum(windows[-1].values()) > 0.95 * CAPACITY, "the flood gets what is left"
    refused = beside.ended[0]["FULL"]
    assert refused > 0.75 * beside.lost(0), "at submission, not after it has waited"


def test_a_higher_priority_loses_nothing_to_a_lower_one(load: Callable[..., Load]) -> None:
    one = load([100], 6)
    windows = one.run(3, {HIGH: CAPACITY / 2, 0: 4 * CAPACITY, LOW: 4 * CAPACITY})
    assert one.lost(HIGH) <= 0.001 * sum(one.ended[HIGH].values())
    for window in windows[1:]:
        assert window[0] > 3 * window[LOW]
        assert window[LOW] >= 0.05 * CAPACITY - 2


def test_lower_priorities_keep_their_share(load: Callable[..., Load]) -> None:
    one = load([100], 7)
    windows = one.run(4, {HIGH: 4 * CAPACITY, 0: CAPACITY, LOW: CAPACITY})
    check_shares(windows, {HIGH: 90, 0: 5, LOW: 5})


def test_shares_hold_within_a_priority(load: Callable[..., Load]) -> None:
    low_1, low_2 = band_number(1, 3), band_number(2, 3)
    one = load([10, 60, 30], 8)
    windows = one.run(4, {HIGH: CAPACITY / 2, low_1: 2 * CAPACITY, low_2: 2 * CAPACITY})
    for window in windows[1:]:
        both = window[low_1] + window[low_2]
        assert abs(window[low_1] - 2 / 3 * both) <= 0.05 * both


def test_arrays_have_shares_too(load: Callable[..., Load]) -> None:
    one = load([50, 50], 9)
    windows = one.run(4, {0: 2 * CAPACITY, SHARE_1: 2 * CAPACITY}, arrays={0: 200})
    check_shares(windows, {0: 50, SHARE_1: 50})


def test_rows_that_differ_in_cost_have_shares_of_the_cost(new_world: NewWorld) -> None:
    """Rows of one band cost ten times those of the other: equal shares are of the cost."""
    world = new_world()
    world.engine.set_weights([50, 50])
    model = world.model("i64", (-1,), slo_us=60_000_000, cost="length", cached=False)
    container = world.container(model, size_max=64, cost_max=100)
    for _ in range(1000):
        model.predict([0] * 20, band=SHARE_1)
        for _ in range(4):
            model.predict([0] * 2)
    cost: Counter[int] = Counter()
    for _ in range(60):
        world.step(1000)
        for row in container.read()[0][1]:
            cost[len(row)] += len(row)
        container.reply(lambda rows: np.ones(len(rows)))
    world.step()
    assert abs(cost[20] - cost[2]) <= 0.1 * sum(cost.values()), cost


def test_a_higher_priority_goes_first_whatever_it_costs(new_world: NewWorld) -> None:
    world = new_world()
    model = world.model("i64", (-1,), slo_us=60_000_000, cost="length", cached=False)
    container = world.container(model, size_max=64, cost_max=100)
    for _ in range(100):
        model.predict([0] * 2)
    model.predict([7] * 90, band=HIGH)
    world.step()
    sent = [len(row) for _, rows in container.read() for row in rows]
    assert 90 in sent[:2] or sent[0] == 90, sent


@pytest.mark.parametrize(
    ("first", "then", "evaluated"),
    [
        (LOW, HIGH, 1),  # the lower one joins the higher one
        (HIGH, LOW, 1),
        (0, SHARE_1, 2),  # either might hold the other back
        (SHARE_1, SHARE_1, 1),
    ],
)
def test_equal_rows_of_two_bands(world: World, first: int, then: int, evaluated: int) -> None:
    model = world.model(slo_us=1_000_000)
    container = world.container(model, mode=3, size_max=1)
    before = model.predict(1.0)
    world.step()
    assert len(container.read()) == 1, "it is busy"
    other = [model.predict(float(k)) for k in range(2, 6)]
    world.step()
    futures = [model.predict(9.0, band=band) for band in (first, then)]
    world.step()
    sent = {}
    while container.read():
        sent.update({number: rows.tolist() for number, rows in container.inbox})
        container.reply()
        world.step()
    assert sum(rows.count(9.0) for rows in sent.values()) == evaluated
    assert [future.result() for future in (before, *other, *futures)] == [1, 2, 3, 4, 5, 9, 9]


def test_a_row_that_is_sent_answers_an_equal_one_of_any_band(world: World) -> None:
    model = world.model(slo_us=1_000_000)
    container = world.container(model)
    futures = [model.predict(1.0)]
    world.step()
    futures += [model.predict(1.0, band=band) for band in (SHARE_1, HIGH, LOW)]
    world.step()
    assert len(container.read()) == 1
    container.reply()
    world.step()
    assert [future.result() for future in futures] == [1.0] * 4


def test_all_rows_of_an_ensemble_have_the_band(world: World) -> None:
    """Also those of a call that starts later."""
    models = tuple(world.model(cached=False, slo_us=1_000_000) for _ in range(2))
    crowd = [world.container(model, size_max=1) for model in models]
    for model in models:
        for k in range(20):
            model.predict(float(k))
    world.step()
    future = predict_ensemble(models, ALL, 77.0, 1_000_000, starts_us=(0, 1_000), band=HIGH)
    world.step(2_000)
    for container in crowd:
        # those that were sent before it came
        for _ in range(2):
            container.read()
            container.reply()
            world.step(10)
        assert container.read()[0][1].tolist() == [77.0]
    for container in crowd:
        container.reply_all()
    world.serve()
    assert future.done()


def test_each_engine_has_its_own_order(new_world: NewWorld) -> None:
    """Two engines: what one has sent is nothing to the other, and both have the weights."""
    worlds = [new_world(number=number) for number in range(2)]
    worlds[0].engine.link_peer(worlds[1].engine)
    loads = []
    for world in worlds:
        world.engine.set_weights([25, 75])
        loads.append(Load(world, 11))
    for one in loads:
        check_shares(one.run(3, {0: 800, SHARE_1: 800}), {0: 25, SHARE_1: 75})


def test_weights_may_change_while_rows_wait(load: Callable[..., Load]) -> None:
    one = load([50, 50], 12)
    check_shares(one.run(2, {0: 800, SHARE_1: 800}), {0: 50, SHARE_1: 50})
    one.world.engine.set_weights([80, 20])
    check_shares(one.run(3, {0: 800, SHARE_1: 800}), {0: 80, SHARE_1: 20})
    with pytest.raises(ValueError, match="at most 16"):
        one.world.engine.set_weights([1] * 17)


@pytest.mark.parametrize("seed", range(4))
def test_every_row_is_answered_once_whatever_its_band(new_world: NewWorld, seed: int) -> None:
    """Random bands, SLOs, costs of equal rows, failures and lost containers: the world checks the
    accounts at its end."""
    world, rng = new_world(), random.Random(seed)
    world.engine.set_weights([rng.randrange(1, 40) for _ in range(SHARES_MAX + 1)])
    model = world.model(slo_us=100_000)
    containers = [world.container(model, size_max=4) for _ in range(2)]
    futures = []
    for _ in range(1500):
        for _ in range(rng.randrange(4)):
            band, x = rng.randrange(48), float(rng.randrange(40))
            if rng.random() < 0.05:
                futures.append(model.predict_many(np.full(20, x), 50, band=band))
            else:
                futures.append(model.predict(x, rng.choice((5, 20, 80, 300)), band=band))
        if rng.random() < 0.1 and futures:
            rng.choice(futures).cancel()
        world.step(rng.choice((50, 500, 3000)))
        for i, container in enumerate(containers):
            if container.read() and rng.random() < 0.7:
                if rng.random() < 0.1:
                    container.fail("no")
                else:
                    container.reply()
            elif rng.random() < 0.005:
                container.lose()
                containers[i] = world.container(model, size_max=4)
    world.pass_deadline(400_000)
    assert all(future.done() for future in futures)
