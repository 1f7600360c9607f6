"""A real loop thread, a real socket, callers of every kind at once: each query ends once, with the
right output."""

import asyncio
import contextlib
import random
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipper_core.engine.model import predict_all
from clipper_core.results.future import Future
from clipper_core.runtime.status import Status
from tests.stress.node import Node, together

SUBMITTERS = 4
QUERIES = 6000


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    for name in node.models:
        node.connect(name)
    yield node
    node.close()


def row(serial: int) -> Any:
    return np.array([serial, 1.0])


def check(future: Future, serial: int) -> bool:
    """Check that a result is right or cancelled; return whether it was right."""
    try:
        assert future.result(30).tolist() == [2.0 * serial, 2.0]
    except CancelledError:
        return False
    return True


def test_threads_that_block_and_cancel(node: Node, stress: int) -> None:
    model, answered, cancelled = node.models[b"plain"], [0] * SUBMITTERS, [0] * SUBMITTERS

    def run(which: int) -> None:
        rng = random.Random(which)
        for lap in range(QUERIES * stress // 50):
            serials = [which * 10**6 + lap * 50 + i for i in range(50)]
            futures = [model.predict(row(serial)) for serial in serials]
            for future in rng.sample(futures, rng.randrange(5)):
                cancelled[which] += future.cancel()
            answered[which] += sum(
                check(future, serial) for future, serial in zip(futures, serials, strict=True)
            )

    together(*(lambda i=i: run(i) for i in range(SUBMITTERS)))
    assert sum(answered) + sum(cancelled) == SUBMITTERS * (QUERIES * stress // 50) * 50
    assert sum(cancelled) > 0


def test_equal_queries_from_everywhere_are_evaluated_once(node: Node, stress: int) -> None:
    model, kinds = node.models[b"cached"], 400 * stress

    def run(which: int) -> None:
        order = list(range(kinds))
        random.Random(which).shuffle(order)
        for serial in order:
            assert check(model.predict(row(serial)), serial)

    together(*(lambda i=i: run(i) for i in range(SUBMITTERS)))
    counts = node.engine.snapshot()["models"][model.index]
    assert counts["evaluated"] == kinds
    assert counts["hits"] + counts["joined"] == (SUBMITTERS - 1) * kinds


def test_event_loops_of_several_threads_await_the_same_and_their_own(
    node: Node, stress: int
) -> None:
    models = (node.models[b"plain"], node.models[b"vector"], node.models[b"cached"])
    shared = [models[0].predict(row(serial)) for serial in range(50)]
    done = [0] * SUBMITTERS

    async def one(which: int, serial: int, rng: random.Random) -> None:
        if rng.random() < 0.2:
            future = predict_all(models, row(serial))
            values = await future
            assert [value.tolist() for value in values] == [[2.0 * serial, 2.0]] * 3
        elif rng.random() < 0.2:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(
                    wait_for(models[0].predict(row(serial))), rng.random() / 1000
                )
        else:
            assert (await models[rng.randrange(3)].predict(row(serial))).tolist() == [
                2.0 * serial,
                2.0,
            ]
        done[which] += 1

    async def everything(which: int) -> None:
        rng = random.Random(which)
        for lap in range(8 * stress):
            await asyncio.gather(
                *(one(which, which * 10**6 + lap * 60 + i, rng) for i in range(60))
            )
        for serial, future in enumerate(shared):
            assert (await future).tolist() == [2.0 * serial, 2.0]

    together(*(lambda i=i: asyncio.run(everything(i)) for i in range(SUBMITTERS)))
    assert done == [480 * stress] * SUBMITTERS


async def wait_for(future: Future) -> Any:
    return await future


def test_callbacks_waiters_and_cancels_meet_on_one_future(node: Node, stress: int) -> None:
    """Each future has a callback, two blocked threads, and perhaps a thread that cancels it; all of
    them are notified."""
    model, rounds = node.models[b"vector"], 150 * stress
    called: list[Future] = []
    futures = [model.predict_many(np.tile(row(1), (5, 1)), slo_ms=20_000) for _ in range(rounds)]
    for future in futures:
        future.add_done_callback(called.append)

    def wait() -> None:
        for future in futures:
            assert future.wait(30)
            assert 0 not in future.statuses()

    def cancel() -> None:
        for future in futures[::3]:
            future.cancel()

    together(wait, wait, cancel)
    node.dispatch.stop()
    assert sorted(map(id, called)) == sorted(map(id, futures))


@pytest.mark.slow
def test_containers_that_come_and_go_lose_no_query(node: Node, stress: int) -> None:
    model, stop = node.models[b"plain"], threading.Event()
    ended: list[dict[Status, int]] = [{} for _ in range(SUBMITTERS)]

    def run(which: int) -> None:
        for serial in range(QUERIES * stress):
            future = model.predict(row(serial), slo_ms=2000)
            assert future.wait(60)
            ended[which][future.status()] = ended[which].get(future.status(), 0) + 1
        if which == 0:
            stop.set()

    def churn() -> None:
        while not stop.is_set():
            node.connect(b"plain")
            node.containers.pop(0 if len(node.containers) > 4 else -2).drop()
            stop.wait(0.01)

    together(*(lambda i=i: run(i) for i in range(SUBMITTERS)), churn)
    total: dict[Status, int] = {}
    for counts in ended:
        for status, n in counts.items():
            total[status] = total.get(status, 0) + n
    assert sum(total.values()) == SUBMITTERS * QUERIES * stress
    assert set(total) <= {
        Status.OK,
        Status.REPLICA_LOST,
        Status.DROPPED,
        Status.DEADLINE,
        Status.NO_REPLICA,
    }
    assert total[Status.OK] > SUBMITTERS * QUERIES * stress // 2


def test_the_end_comes_while_everybody_waits(node: Node) -> None:
    model = node.models[b"plain"]
    node.containers[0].drop()
    ended: list[str] = []

    def run() -> None:
        futures = [model.predict(row(serial), slo_ms=20_000) for serial in range(200)]
        for future in futures:
            try:
                future.result(30)
                ended.append("OK")
            except Exception as error:
                ended.append(type(error).__name__)

    def end() -> None:
        threading.Event().wait(0.02)
        node.dispatch.stop()

    together(run, run, run, end)
    assert len(ended) == 600
    assert set(ended) <= {"ShuttingDown", "OK"}
