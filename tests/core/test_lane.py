"""Lanes through the engine: joining, taking over, expiring, retrying; a reference model determines
what may be answered and when it must be."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from clipper_core.results.future import Future
from clipper_core.runtime.status import Status, StatusError
from clipper_core.wire.codec import Kind

World = Any  # tests/core/conftest.py
Statuses = Callable[[list[Future]], list[str]]
SLO_MS = [0.3, 1.0, 1.5, 4.0, 5.0, 40.0]


def test_equal_rows_cost_one_evaluation_each_with_its_own_deadline(
    world: World, statuses: Statuses
) -> None:
    model = world.model()
    container = world.container(model)
    futures = [model.predict(1.0, slo_ms=slo_ms) for slo_ms in (10, 1, 20, 5, 5)]
    world.step()
    assert [rows.tolist() for _, rows in container.read()] == [[1.0]]
    world.step(2000)
    assert statuses(futures) == ["PENDING", "DEADLINE", "PENDING", "PENDING", "PENDING"]
    world.step(4000)
    assert statuses(futures) == ["PENDING", "DEADLINE", "PENDING", "DEADLINE", "DEADLINE"]
    container.reply()
    world.step()
    assert statuses(futures) == ["OK", "DEADLINE", "OK", "DEADLINE", "DEADLINE"]
    assert model.predict(1.0).done()


def test_rows_of_other_salts_or_models_do_not_join(world: World) -> None:
    left, right = world.model(), world.model()
    containers = world.container(left), world.container(right)
    left.predict(1.0), left.predict(1.0, salt=1), right.predict(1.0)
    world.step()
    assert [[rows.tolist() for _, rows in c.read()] for c in containers] == [[[1.0, 1.0]], [[1.0]]]


def test_the_earlier_deadline_takes_over_and_the_later_is_still_answered(world: World) -> None:
    model = world.model(cached=True)
    late = [model.predict(float(i), slo_ms=100) for i in range(3)]
    world.step(1)
    early = model.predict(2.0, slo_ms=1)
    world.step(1)
    container = world.container(model, size_max=1)
    assert container.read()[0][1].tolist() == [2.0], "the row of the tighter lane goes first"
    container.reply()
    world.step()
    assert (early.result(0), late[2].result(0), late[0].done()) == (2.0, 2.0, False)


@pytest.mark.parametrize("end", ["cancel", "expire"])
@pytest.mark.parametrize("when", ["waiting", "sent"])
def test_an_owner_that_is_gone_is_evaluated_for_those_joined_to_it(
    world: World, end: str, when: str
) -> None:
    model = world.model()
    container = world.container(model) if when == "sent" else None
    owner = model.predict(1.0, slo_ms=1)
    world.step()
    joined = [model.predict(1.0, slo_ms=slo_ms) for slo_ms in (50, 60)]
    world.step()
    if end == "cancel":
        owner.cancel()
    world.step(1500)
    assert owner.done()
    container = container or world.container(model)
    assert [rows.tolist() for _, rows in container.read()] == [[1.0]]
    joined[0].cancel()
    container.reply()
    world.step()
    assert joined[1].result(0) == 1.0


@pytest.mark.parametrize("outcome", ["reply", "fail", "shed"])
def test_one_cancelled_of_many_takes_nothing_from_the_others(world: World, outcome: str) -> None:
    """Rows of one batch and rows joined to one row share a value; the reference of each is its
    own."""
    model = world.model()
    container = world.container(model)
    futures = [model.predict(float(i // 4), slo_ms=50) for i in range(12)]
    world.step()
    container.read()
    for i in (0, 5, 11):
        futures[i].cancel()
    if outcome == "reply":
        container.reply(lambda rows: [np.full(3, row) for row in rows])
    elif outcome == "fail":
        container.fail("why")
    world.pass_deadline(0 if outcome != "shed" else 50_000)
    for i, future in enumerate(futures):
        if i in (0, 5, 11):
            assert future.cancelled()
        elif outcome == "reply":
            assert future.result(0).tolist() == [i // 4] * 3
        elif outcome == "fail":
            assert (future.status(), future.detail()) == (Status.MODEL_ERROR, "why")
        else:
            assert future.status() == Status.DEADLINE


def test_a_lost_containers_rows_go_to_another_first(world: World, statuses: Statuses) -> None:
    model = world.model(cached=False)
    first, second = world.container(model, size_max=2), None
    futures = [model.predict(float(i)) for i in range(5)]
    gone = model.predict(9.0, slo_ms=1)
    world.step()
    batches = [rows.tolist() for _, rows in first.read()]
    assert batches == [[9.0, 0.0], [1.0, 2.0]]
    world.step(2000)
    first.lose()
    second = world.container(model, size_max=2)
    assert [rows.tolist() for _, rows in second.read()] == [[0.0]], "9.0 is over; alone"
    second.lose()
    third = world.container(model, size_max=8)
    assert [rows.tolist() for _, rows in third.read()] == [[1.0, 2.0, 3.0, 4.0]], "in their order"
    third.reply()
    world.step()
    assert statuses([*futures, gone]) == ["REPLICA_LOST"] + ["OK"] * 4 + ["DEADLINE"]


def test_a_lane_is_full_at_its_bound_and_empty_again_after(world: World) -> None:
    model = world.model(lane_rows=8, cached=False)
    for lap in range(5):
        futures = [model.predict(float(i)) for i in range(10)]
        assert [f.status() for f in futures] == [Status.PENDING] * 8 + [Status.FULL] * 2
        other = model.predict(0.0, slo_ms=1)
        assert other.status() == Status.PENDING, "another class of SLO has a lane of its own"
        if lap % 2:
            for future in futures:
                future.cancel()
        world.pass_deadline(2_000_000)


def test_joined_rows_hold_cells_only_while_they_are_open(world: World) -> None:
    model = world.model(lane_rows=16)
    container = world.container(model)
    owner = model.predict(1.0)
    world.step()
    for _ in range(20):
        futures = [model.predict(1.0, slo_ms=900) for _ in range(15)]
        world.step(1000)
        for future in futures[::2]:
            future.cancel()
        world.step(0)
        if any(future.status() == Status.FULL for future in futures):
            break
    container.reply_all()
    assert owner.result(0) == 1.0
    assert model.predict(2.0).status() == Status.PENDING


def test_rows_on_the_heap_are_bounded_and_come_back(new_world: Callable[..., World]) -> None:
    world = new_world(queue_bytes_max=1000)
    model = world.model("str", cached=False)
    container = world.container(model)
    for _ in range(3):
        futures = [model.predict("x" * 400) for _ in range(3)]
        assert [f.status() for f in futures] == [Status.PENDING] * 2 + [Status.FULL]
        assert world.engine.snapshot()["queue_bytes"] == 800
        futures[0].cancel()
        world.step()
        container.read()
        container.reply(
            lambda rows: [len(row) for row in rows] and np.array([len(row) for row in rows], float)
        )
        world.step()
        assert futures[1].result(0) == 400.0
        assert world.engine.snapshot()["queue_bytes"] == 0
    assert model.predict("x" * 1001).status() == Status.FULL
    assert model.predict("").status() == Status.PENDING


def test_a_batch_never_exceeds_a_frame(new_world: Callable[..., World]) -> None:
    world = new_world(frame_bytes_max=4096)
    fixed, texts = world.model("u8", (1000,), cached=False), world.model("str", cached=False)
    for model, row, n in ((fixed, np.ones(1000, "u1"), 10), (texts, "x" * 900, 10)):
        container = world.container(model)
        futures = [model.predict(row) for _ in range(n)]
        while not all(future.done() for future in futures):
            world.serve_by = container.read()
            assert all(len(rows) <= 4 for _, rows in container.inbox)
            while container.inbox:
                container.reply(lambda rows: np.zeros(len(rows)))
            world.step(1)
        assert {future.status() for future in futures} == {Status.OK}
    with pytest.raises(StatusError, match="the limit is 4096") as refused:
        texts.predict("x" * 5000)
    assert refused.value.status == Status.TOO_LARGE


def test_a_row_that_no_frame_can_hold_is_too_large_and_not_an_overload(
    new_world: Callable[..., World],
) -> None:
    world = new_world(frame_bytes_max=1 << 16, queue_bytes_max=1 << 16)
    model = world.model("str", cached=False)
    world.container(model)
    with pytest.raises(StatusError, match="the limit is 65536") as refused:
        model.predict("x" * (1 << 17))
    assert refused.value.status == Status.TOO_LARGE


def test_lanes_at_time_zero_are_known_once(new_world: Callable[..., World]) -> None:
    world = new_world()
    world.now_us = 0
    model = world.model(cached=False)
    for i in range(3):
        model.predict(float(i))
        world.step()
    assert world.engine.snapshot()["models"][0]["queued"] <= 3
    world.container(model)
    world.serve()
    assert world.engine.snapshot()["models"][0]["queued"] == 0


def test_first_come_first_served_within_a_lane_and_first_due_across(world: World) -> None:
    """Each batch of one row is the head with the earliest deadline of the heads of all lanes."""
    rng = random.Random(5)
    model = world.model(cached=False)
    waiting: dict[int, list[tuple[int, float]]] = {}
    for i in range(300):
        slo_us = rng.choice([300_000, 400_000, 700_000, 1_500_000, 3_000_000])
        model.predict(float(i), slo_ms=slo_us / 1000)
        waiting.setdefault(slo_us.bit_length(), []).append((world.now_us + slo_us, float(i)))
        world.step(rng.randrange(300))
    container = world.container(model, size_max=1)
    for _ in range(300):
        lane = min(waiting, key=lambda lane: waiting[lane][0])
        wanted = waiting[lane].pop(0)[1]
        waiting = {lane: rows for lane, rows in waiting.items() if rows}
        container.read()
        assert container.inbox[0][1].tolist() == [wanted]
        container.reply()
        world.step()
        if container.kinds_received.count(Kind.PREDICT) > 298:
            break


class Twin:
    """A reference model of a lane: what must hold of each query, whatever the scheduler does in
    between."""

    def __init__(self, world: World, seed: int, cached: bool) -> None:
        self.world, self.rng, self.cached = world, random.Random(seed), cached
        self.model = world.model(cached=cached, lane_rows=self.rng.choice([4, 64, 1024]))
        self.open: list[tuple[Future, float, int, int]] = []
        self.failed: set[float] = set()
        self.known: set[float] = set()
        self.lost = False
        self.era = 0
        self.let_go: set[tuple[int, int]] = set()
        self.due_us: dict[tuple[int, int], int] = {}  # of each batch, as of when it was sent

    def submit(self) -> None:
        self.era += self.rng.randrange(3)
        for _ in range(self.rng.randrange(1, 12)):
            x, slo_ms = float(self.era + self.rng.randrange(6)), self.rng.choice(SLO_MS)
            future = self.model.predict(x, slo_ms=slo_ms)
            if self.cached and x in self.known:
                assert future.result(0) == x, "a prediction that was made is never made twice"
            self.open.append((future, x, self.world.now_us, self.world.now_us + int(slo_ms * 1000)))

    def connect(self) -> None:
        if len(self.world.containers) < 3:
            self.world.container(
                self.model, size_max=self.rng.choice([1, 3, 16]), checked=self.rng.random() < 0.5
            )

    def disconnect(self) -> None:
        if self.world.containers:
            self.rng.choice(self.world.containers).lose()
            self.lost = True

    def answer(self) -> None:
        for container in self.world.containers:
            if container.read() and self.rng.random() < 0.7:
                rows = container.inbox[0][1].tolist()
                if self.rng.random() < 0.15:
                    container.fail("no luck")
                    self.failed.update(rows)
                else:
                    container.reply()
                    self.known.update(rows)

    def cancel(self) -> None:
        if self.open:
            self.rng.choice(self.open)[0].cancel()

    def pass_time(self) -> None:
        self.world.step(self.rng.choice([0, 10, 200, 1000, 6000]))

    def check(self) -> None:
        if self.cached and not self.lost:
            self.check_air()
        still = []
        for future, x, born, due in self.open:
            status = future.status()
            if status == Status.PENDING:
                assert self.world.now_us < due + 64, "every task is ended by its deadline"
                still.append((future, x, born, due))
            elif status == Status.OK:
                assert future.result(0) == x
            elif status in (Status.DEADLINE, Status.NO_REPLICA):
                assert self.world.now_us >= due, "and not before"
            elif status == Status.MODEL_ERROR:
                assert x in self.failed
                assert future.detail() == "no luck"
            else:
                assert status in (
                    Status.CANCELLED,
                    Status.FULL,
                    Status.DROPPED,
                    Status.REPLICA_LOST,
                )
                assert status != Status.REPLICA_LOST or self.lost
        self.open = still

    def check_air(self) -> None:
        """Check that equal rows are in flight only once. Batches do not count if, at some moment,
        no query waited for them any more, or if their deadline has passed: a later query with more
        time is then sent to another batch."""
        wanted = {x for future, x, _, _ in self.open if not future.done()}
        in_air: list[float] = []
        for container in self.world.containers:
            for number, rows in container.read():
                batch = container.conn, number
                due = self.due_us.setdefault(
                    batch, max((due for _, x, _, due in self.open if x in rows), default=0)
                )
                if not wanted & set(rows.tolist()) or self.world.now_us > due:
                    self.let_go.add(batch)
                elif batch not in self.let_go:
                    in_air += rows.tolist()
        assert len(in_air) == len(set(in_air))

    def round(self) -> None:
        moves = [
            self.submit,
            self.submit,
            self.answer,
            self.answer,
            self.pass_time,
            self.pass_time,
            self.cancel,
            self.connect,
        ]
        self.rng.choice([*moves, *moves, self.disconnect])()
        self.world.step()
        self.check()


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_every_task_ends_once_and_in_time(
    world: World, seed: int, cached: bool
) -> None:
    twin = Twin(world, seed, cached)
    for _ in range(500):
        twin.round()
    world.pass_deadline(50_000)
    twin.check()
    assert twin.open == []
    completion = world.engine.completion
    assert completion.issued == completion.answered
    counts = world.counts()
    assert counts["OK"] > 50
    assert counts["CANCELLED"] > 5


@pytest.mark.parametrize("seed", range(4))
def test_cells_come_back_whatever_happened(world: World, seed: int) -> None:
    """Each lane accepts exactly its bound of rows again when all queries have ended and the
    containers have disconnected."""
    twin = Twin(world, 100 + seed, True)
    for _ in range(300):
        twin.round()
    while world.containers:
        world.containers[0].lose()
    world.pass_deadline(50_000)
    world.step(30_000)
    for slo_ms in SLO_MS:
        n = 0
        while twin.model.predict(1000.0 + n, slo_ms=slo_ms).status() == Status.PENDING:
            n += 1
        assert n in (4, 64, 1024)
        world.pass_deadline(50_000)
        world.step(30_000)
