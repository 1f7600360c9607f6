"""Pieces of arrays in the engine: they are taken by spans, end together or row by row, and are
freed with their last row; each row ends once."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from clipper_core.runtime.status import Status
from clipper_core.wire.codec import Kind, encode_rows

World = Any  # tests/core/conftest.py


def tally(future: Any) -> dict[str, int]:
    return {Status(kind).name: n for kind, n in sorted(Counter(future.statuses().tolist()).items())}


def test_a_batch_takes_a_span_and_the_next_goes_on_from_there(world: World) -> None:
    model = world.model(cached=False)
    container = world.container(model, size_max=300)
    future = model.predict_many(np.arange(2500.0))
    world.step()
    sizes = []
    while container.read():
        sizes.append(len(container.inbox[0][1]))
        container.reply()
        world.step()
    assert sizes == [300] * 8 + [100]
    assert np.array_equal(future.result(0), np.arange(2500.0))


def test_single_rows_and_pieces_share_a_batch_by_their_deadlines(world: World) -> None:
    model = world.model(cached=False)
    array = model.predict_many(np.arange(100.0), slo_ms=50)
    single = model.predict(-1.0, slo_ms=5)
    container = world.container(model, size_max=64)
    assert container.read()[0][1].tolist() == [-1.0, *range(63)], "due first, sent first"
    world.serve()
    assert single.result(0) == -1.0
    assert array.result(0).tolist() == list(range(100))


def test_the_deadline_in_the_middle_leaves_what_was_answered(world: World) -> None:
    model = world.model(cached=False)
    container = world.container(model, size_max=1024)
    future = model.predict_many(np.arange(3000.0), slo_ms=5)
    world.step()
    container.read()
    container.reply()
    world.step()
    container.read()
    assert future.progress() == (1024, 3000)
    world.pass_deadline(5000)
    assert tally(future) == {"OK": 1024, "DEADLINE": 3000 - 1024}
    assert future.outputs(-1.0)[[0, 1023, 1024, 2999]].tolist() == [0, 1023, -1, -1]
    assert len(set(future.latencies_us().tolist())) == 2
    while container.inbox:
        container.reply()
    world.step()
    assert tally(future) == {"OK": 1024, "DEADLINE": 3000 - 1024}, (
        "what comes late is not delivered"
    )


def test_cancel_in_the_middle(world: World) -> None:
    model = world.model(cached=False)
    container = world.container(model, size_max=64)
    future = model.predict_many(np.arange(2000.0))
    world.step()
    container.read()
    container.reply()
    world.step()
    assert future.cancel()
    assert future.cancel(), "a cancelled future stays cancelled"
    container.reply_all()
    world.step()
    assert tally(future) == {"OK": 64, "CANCELLED": 2000 - 64}
    assert world.engine.snapshot()["models"][0]["evaluated"] <= 64 * 4, "the rest is not evaluated"
    assert world.counts()["CANCELLED"] == 2000 - 64


def test_a_future_without_a_reference_is_still_counted(world: World) -> None:
    model = world.model(cached=False)
    container = world.container(model, size_max=512)
    future = model.predict_many(np.arange(2000.0))
    world.step()
    del future
    container.reply_all(lambda rows: np.zeros((len(rows), 3)))
    assert world.counts()["OK"] == 2000


def test_a_lost_containers_rows_are_sent_again_alone(world: World) -> None:
    model = world.model(cached=False)
    first = world.container(model, size_max=100)
    future = model.predict_many(np.arange(450.0))
    world.step()
    first.read()
    first.lose()
    assert future.progress() == (0, 450)
    second = world.container(model, size_max=64)
    for i in range(64):
        second.read()
        assert [rows.tolist() for _, rows in second.inbox] == [[i]]
        second.reply()
        world.step()
    second.read()
    second.lose()
    third = world.container(model, size_max=1000)
    third.reply_all()
    ended = future.statuses()
    assert tally(future) == {"OK": 449, "REPLICA_LOST": 1}
    assert ended[64] == Status.REPLICA_LOST


def test_one_row_that_fails_is_one_row(world: World) -> None:
    model = world.model(cached=False)
    container = world.container(model, size_max=1000)
    future = model.predict_many(np.arange(100.0))
    world.step()
    number, rows = container.read().pop(0)
    status = (rows == 7).astype(np.uint8)
    assert container.send(encode_rows(Kind.REPLY, rows * 2, id=number, status=status, text="seven"))
    world.step()
    assert tally(future) == {"OK": 99, "MODEL_ERROR": 1}
    assert future.detail(7) == "seven"
    assert future.outputs(0.0).tolist() == [0.0 if i == 7 else 2.0 * i for i in range(100)]
    with pytest.raises(Exception, match="seven"):
        future.result(0)


def test_a_batch_that_fails_fails_its_rows(world: World) -> None:
    model = world.model(cached=False)
    container = world.container(model, size_max=40)
    future = model.predict_many(np.arange(100.0))
    world.step()
    container.read()
    container.fail("all of it")
    world.step()
    container.reply_all()
    assert tally(future) == {"OK": 60, "MODEL_ERROR": 40}
    assert future.detail(0) == "all of it"


@pytest.mark.parametrize(
    "dtype", ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?"]
)
def test_scalars_of_every_type_come_back(world: World, dtype: str) -> None:
    model = world.model(cached=True)
    container = world.container(model, size_max=77)
    values = (np.arange(200) % 2 if dtype == "?" else np.arange(200) % 100).astype(dtype)
    future = model.predict_many(np.arange(200.0))
    world.step()
    container.reply_all(lambda rows: values[rows.astype(int)])
    result = future.result(0)
    assert np.array_equal(result, values)
    assert result.dtype == np.array([values[0].item()]).dtype, (
        "as numpy makes an array of Python's numbers"
    )
    again = model.predict_many(np.arange(200.0))
    assert again.done(), "the replies filled the cache"
    assert np.array_equal(again.result(0), values)


@pytest.mark.parametrize("shape", [(3,), (2, 2), (1, 1, 2)])
def test_rows_of_arrays_come_back_as_one(world: World, shape: tuple[int, ...]) -> None:
    model = world.model(cached=False)
    container = world.container(model, size_max=50)
    future = model.predict_many(np.arange(120.0))
    world.step()
    container.reply_all(
        lambda rows: np.broadcast_to(
            rows.reshape(-1, *[1] * len(shape)), (len(rows), *shape)
        ).astype("f4")
    )
    assert future.result(0).shape == (120, *shape)
    assert np.array_equal(future.result(0)[:, 0].reshape(120, -1)[:, 0], np.arange(120))


def test_a_closed_engine_ends_pieces_wherever_they_are(new_world: Callable[..., World]) -> None:
    """Pieces that wait, are in flight, wait for a retry, or were not yet taken in by the loop all
    end."""
    world = new_world()
    model = world.model(cached=False)
    container = world.container(model, size_max=100)
    futures = [model.predict_many(np.arange(1500.0), slo_ms=slo_ms) for slo_ms in (10, 500)]
    world.step()
    container.read()
    lost = world.container(model, size_max=100)
    world.step()
    lost.read()
    lost.lose()
    futures.append(model.predict_many(np.arange(200.0)))
    world.engine.finish()
    assert {status for future in futures for status in future.statuses().tolist()} <= {
        Status.CLOSED,
        Status.REPLICA_LOST,
    }
    assert world.engine.completion.issued == world.engine.completion.answered == 3200


@pytest.mark.parametrize("seed", range(40))
def test_arrays_and_rows_any_way(seed: int, new_world: Callable[..., World]) -> None:
    """Checked for random arrays and rows: a row that ended OK holds the sum of its input, each row
    ends once, by its deadline, and all cells are free at the end."""
    rng = random.Random(seed)
    world = new_world()
    model = world.model(
        "f64", (2,), cached=rng.random() < 0.5, lane_bytes_max=1 << rng.choice([14, 18, 24])
    )
    containers = [
        world.container(model, size_max=rng.choice([1, 50, 700])) for _ in range(rng.choice([1, 2]))
    ]
    requests: list[tuple[Any, Any, int]] = []
    for _ in range(rng.choice([20, 60])):
        if rng.random() < 0.4:
            rows = np.random.default_rng(rng.randrange(1 << 30)).integers(
                0, 400, (rng.choice([1, 31, 32, 33, 300, 2000]), 2)
            )
            slo_ms = rng.choice([0.4, 3, 20, 500])
            requests.append(
                (
                    model.predict_many(rows.astype("f8"), slo_ms),
                    rows,
                    world.now_us + int(slo_ms * 1000),
                )
            )
        for container in containers:
            if rng.random() < 0.5 and container.read():
                container.reply(lambda rows: rows.sum(axis=1))
        if rng.random() < 0.08 and requests:
            rng.choice(requests)[0].cancel()
        if rng.random() < 0.08:
            lost = containers.pop(rng.randrange(len(containers)))
            lost.lose()
            containers.append(world.container(model, size_max=rng.choice([1, 50, 700])))
        if rng.random() < 0.05 and requests:
            requests.pop(rng.randrange(len(requests)))
        world.step(rng.choice([0, 10, 300, 2000]))
        for future, _, due_us in requests:
            assert future.done() or world.now_us <= due_us + 64, f"seed {seed}"
    for future, rows, _ in requests:
        wanted = rows.sum(axis=1)
        states, outputs = future.statuses(), future.outputs(-1.0)
        answered = states == Status.OK
        assert [outputs[i] for i in np.flatnonzero(answered)] == wanted[answered].tolist(), (
            f"seed {seed}"
        )
    world.step(600_000)
    for container in list(containers):
        container.lose()
    world.step(100_000)
    assert world.engine.completion.issued == world.engine.completion.answered
    full = model.predict_many(np.full((1 << 18, 2), -5.0), slo_ms=500)
    world.step()
    room = int((full.statuses() == Status.PENDING).sum())
    full.cancel()
    world.step(100_000)
    again = model.predict_many(np.full((1 << 18, 2), -6.0), slo_ms=500)
    assert int((again.statuses() == Status.PENDING).sum()) == room, f"seed {seed}: a piece is lost"
