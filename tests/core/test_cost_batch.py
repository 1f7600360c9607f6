"""Batches by cost: which rows are batched together, and what the batcher learns from them."""

import random
from typing import Any

import numpy as np
import pytest

from clipper_core.runtime.status import Status, StatusError
from clipper_core.scheduling.batcher import BatchSizer
from tests.core.conftest import STATIC, Container, World

SLO_MS = 100.0


def row(length: int) -> Any:
    return np.full(length, 1, np.int64)


def batches(world: World, container: Container) -> list[Any]:
    """Answer all batches and return their rows, in the order in which they came."""
    found = []
    world.step()
    while container.read():
        found.append(container.inbox[0][1])
        container.reply(lambda rows: np.zeros(len(rows)))
        world.step(100)
    return found


def sizes(rows: Any) -> list[int]:
    return [len(one) for one in rows]


def lengths(batch: tuple[int, Any]) -> list[int]:
    return [len(one) for one in batch[1]]


def test_a_batch_holds_rows_up_to_the_cost(world: World) -> None:
    model = world.model("i64", (-1,), cost="length", cached=False)
    container = world.container(model, mode=STATIC, size_max=64, cost_max=100)
    for n in (40, 40, 30, 20, 90):
        model.predict(row(n), SLO_MS)
    # in the order of their deadlines, but for the rows that do not fit
    assert [*map(sizes, batches(world, container))] == [[40, 40, 20], [30], [90]]


@pytest.mark.parametrize(("cost", "most"), [("bytes", 80), ("length", 10)])
def test_bytes_and_length(world: World, cost: str, most: int) -> None:
    model = world.model("i64", (-1,), cost=cost, cached=False)
    container = world.container(model, mode=STATIC, cost_max=most)
    for _ in range(4):
        model.predict(row(5), SLO_MS)
    assert [*map(sizes, batches(world, container))] == [[5, 5], [5, 5]]


def test_a_row_above_the_limit_goes_alone(world: World) -> None:
    model = world.model("str", cost="length", cached=False)
    container = world.container(model, mode=STATIC, cost_max=10)
    for text in ("a" * 50, "b" * 4, "", "c" * 5):
        model.predict(text, SLO_MS)
    assert batches(world, container) == [["a" * 50], ["b" * 4, "", "c" * 5]]


def test_padded_rows_of_like_length_go_together(world: World) -> None:
    model = world.model("i64", (-1,), cost="length", padded=True, cached=False)
    container = world.container(model, mode=STATIC, cost_max=1000)
    for n in (10, 200, 11, 190, 12, 195):
        model.predict(row(n), SLO_MS)
    found = [sorted(sizes(rows)) for rows in batches(world, container)]
    assert found == [[10, 11, 12], [190, 195, 200]]
    (one,) = world.engine.snapshot()["models"]
    assert (one["cost"], one["cost_padded"]) == (618, 36 + 600)


def test_a_row_that_cannot_wait_goes_now_whatever_its_length(world: World) -> None:
    model = world.model("i64", (-1,), cost="length", padded=True, cached=False)
    timings = [(n, 10_000 + 100 * n, 100.0 * n) for n in (1, 1, 1, 2, 4, 8)]
    container = world.container(model, mode=STATIC, cost_max=2000, timings=timings)
    first, second = model.predict(row(10), 40.0), model.predict(row(300), 40.0)
    model.predict(row(12), 500.0)
    world.step()
    # 12 is like the first; 300 would be late in a batch of its own behind one of 10 ms
    (batch,) = container.read()[:1]
    assert set(lengths(batch)) >= {10, 300}
    container.reply_all()
    world.step()
    assert first.status() == second.status() == Status.OK


def test_a_function_gives_the_cost_once_a_query(world: World) -> None:
    costed: list[int] = []

    def cost(x: Any) -> float:
        costed.append(int(x[0]))
        return 0.5 * float(x[0])

    model = world.model("f64", (2,), cost=cost, cached=False)
    container = world.container(model, mode=STATIC, cost_max=3000)
    model.predict(np.array([4.0, 0]), SLO_MS)
    model.predict_many(np.array([[2.0, 0], [2.0, 1], [6.0, 0]]), SLO_MS)
    assert costed == [4, 2, 2, 6]
    found = [[float(x[0]) for x in rows] for rows in batches(world, container)]
    assert found == [[4.0, 2.0], [2.0], [6.0]]


@pytest.mark.parametrize(
    ("cost_value", "why"),
    [(-1, "returned -1"), (float("nan"), "returned nan"), (1e9, "returned 1"), ("x", "raised")],
)
def test_a_function_that_fails_is_that_querys_error(
    world: World, cost_value: Any, why: str
) -> None:
    model = world.model("str", cost=lambda x: cost_value if x == "bad" else 1.0, cached=False)
    container = world.container(model, mode=STATIC, cost_max=10_000)
    good = model.predict("good", SLO_MS)
    with pytest.raises(StatusError, match=why) as error:
        model.predict("bad", SLO_MS)
    assert error.value.status == Status.BAD_INPUT
    with pytest.raises(StatusError, match=why):
        model.predict_many(["good", "bad"], SLO_MS)
    world.step()
    container.read()
    container.reply_all(lambda rows: np.zeros(len(rows)))
    assert good.result() == 0.0
    assert world.engine.completion.issued == 1, "of the others nothing was submitted"


def test_a_cost_that_is_none_of_these(world: World) -> None:
    with pytest.raises(StatusError, match="length:TENSOR or a function, not 'width'"):
        world.model("str", cost="width")


@pytest.mark.parametrize("mode", [0, 1, 2], ids=["aimd", "fit", "quantile"])
def test_the_fit_is_over_cost(mode: int) -> None:
    """Batches have one to eight rows that cost 10 to 500 each; they take 2 ms and 20 us for each
    unit of cost."""
    rng = random.Random(mode)
    sizer = BatchSizer(("aimd", "fit", "quantile")[mode], by_cost=True)
    for now in range(400):
        n = rng.randint(1, 8)
        cost = sum(rng.randint(10, 500) for _ in range(n))
        cost = min(cost, max(int(sizer.limit), 10))
        sizer.learn_cost(n, cost, cost > 0.8 * sizer.limit, 2_000 + 20 * cost, 100_000, now * 1000)
    a, b, _ = sizer.fit
    assert a == pytest.approx(2_000, rel=0.1)
    assert b == pytest.approx(20, rel=0.05)
    assert sizer.predict_cost(1000) == pytest.approx(22_000, rel=0.05)
    assert sizer.limit <= 2_600, "half of 100 ms holds 2400 units"


def test_a_warm_up_seeds_the_fit_where_the_cost_is_known() -> None:
    known, unknown = (BatchSizer("fit", by_cost=True) for _ in range(2))
    for n in (1, 1, 1, 2, 4, 8, 16):
        known.seed(n, 950 + 10 * 30 * n, 0, cost=30 * n)
        unknown.seed(n, 950 + 10 * 30 * n, 0)
    assert known.batches == 7
    assert known.predict_cost(480) == pytest.approx(5_800, rel=0.1)
    assert unknown.batches == 0


class Replier:
    """A container that takes a time in proportion to the cost of a batch, and checks the batches
    that it gets."""

    def __init__(self, container: Container, padded: bool, limit: int) -> None:
        self.container, self.padded, self.limit = container, padded, limit
        self.done_us = 0
        self.seen: list[int] = []

    def turn(self, now_us: int) -> None:
        inbox = self.container.read()
        while inbox and now_us >= self.done_us:
            rows = inbox[0][1]
            sizes = [len(one) for one in rows]
            cost = len(sizes) * max(sizes) if self.padded else sum(sizes)
            assert len(sizes) == 1 or cost <= self.limit
            self.seen += [int(one[0]) for one in rows]
            self.container.reply(lambda rows: np.array([float(one[0]) for one in rows]))
            self.done_us = now_us + 500 + 5 * cost


@pytest.mark.parametrize("seed", range(12))
def test_each_row_is_in_exactly_one_batch_and_in_time_where_it_can_be(
    world: World, seed: int
) -> None:
    """Rows of several SLOs arrive at half the capacity of the replicas, one of which dies."""
    rng = random.Random(seed)
    padded, limit = rng.random() < 0.5, rng.choice([50, 400, 3000])
    model = world.model("i64", (-1,), cost="length", padded=padded, cached=False)
    made: list[Replier] = []

    def join() -> None:
        options = {"mode": rng.choice([0, 1, STATIC]), "cost_max": limit, "size_max": 16}
        made.append(Replier(world.container(model, **options), padded, limit))

    join()
    join()
    costed: list[tuple[int, Any]] = []
    lost = 0
    for turn in range(600):
        if turn < 400 and rng.random() < 0.5:
            x = row(min(1000, max(1, int(rng.lognormvariate(3, 1)))))
            x[0] = len(costed)
            costed.append((len(costed), model.predict(x, rng.choice([60.0, 200.0, 2000.0]))))
        if turn == 200:
            gone = made.pop(0)
            lost = len(gone.container.inbox)
            gone.container.lose()
            join()
        world.step(1000)
        for one in made:
            one.turn(world.now_us)
    for _ in range(4000):
        world.step(1000)
        for one in made:
            one.turn(world.now_us)
    ended = [future.status() for _, future in costed]
    assert all(
        future.result() == number
        for (number, future), status in zip(costed, ended, strict=True)
        if status == Status.OK
    )
    assert sum(status == Status.OK for status in ended) >= 0.95 * len(costed)
    if lost == 0:
        seen = sorted(number for one in made for number in one.seen)
        assert len(seen) == len(set(seen)), "no row is evaluated twice"


def test_nothing_starves_behind_cheaper_rows(world: World) -> None:
    """One long row waits while short ones keep arriving, which together have more value."""
    model = world.model("i64", (-1,), cost="length", padded=True, cached=False)
    container = world.container(model, mode=STATIC, cost_max=640)
    model.predict(row(5), 2000.0)
    world.step()
    long = model.predict(row(300), 400.0)
    for _ in range(100):
        for _ in range(40):
            model.predict(row(10), 500.0)
        world.step(2_000)
        if container.read():
            container.reply()
        if long.done():
            break
    assert long.status() == Status.OK
    container.reply_all()


def test_rows_that_a_replica_failed_go_to_another(world: World) -> None:
    model = world.model("i64", (-1,), cost="length", padded=True, cached=False)
    first, second = (world.container(model, mode=STATIC, cost_max=1000) for _ in range(2))
    futures = [model.predict(row(n), SLO_MS) for n in (10, 100, 11, 101)]
    world.step()
    batches = [len(first.read()), len(second.read())]
    failing, other = (first, second) if batches[0] else (second, first)
    failed = lengths(failing.inbox[0])
    failing.fail("no")
    world.step()
    seen = [n for batch in other.read() for n in lengths(batch)]
    assert set(failed) <= set(seen) or len(failing.read()) < sum(batches)
    for _ in range(4):
        world.step(100)
        other.reply_all()
        failing.reply_all()
    assert [future.status() for future in futures] == [Status.OK] * 4
