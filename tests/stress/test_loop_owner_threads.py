"""Callers that run the loop themselves, and other threads at the same time: no query is lost or
late, and ownership is always released."""

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipper_core.engine.model import Model
from clipper_core.results.future import Future
from tests.memory_container import wait_until
from tests.stress.node import Node, together

THREADS = 4
ROUNDS = 1500
LONG_MS = 30_000


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    node.connect(b"plain")
    yield node
    node.close()


@pytest.fixture
def model(node: Node) -> Model:
    return node.models[b"plain"]


def row(serial: int) -> Any:
    return np.array([serial, 1.0])


def led(node: Node) -> int:
    """Return how often a caller has taken the loop's place: once to send, once more to wait."""
    return node.dispatch.loop.snapshot()["led"]


def be_led(node: Node) -> None:
    """Send queries one by one until the loop thread leaves the loop to this thread."""

    def sent_and_waited() -> bool:
        before = led(node)
        assert node.models[b"plain"].predict(row(7)).result(30).tolist() == [14.0, 2.0]
        return led(node) >= before + 2

    wait_until(sent_and_waited, "a caller that leads")


def test_a_lone_caller_leads_and_the_loop_thread_is_not_woken(node: Node) -> None:
    be_led(node)
    before = node.dispatch.loop.snapshot()
    for serial in range(ROUNDS):
        assert node.models[b"plain"].predict(row(serial)).result(30)[0] == 2.0 * serial
    after = node.dispatch.loop.snapshot()
    assert after["led"] - before["led"] > ROUNDS
    assert after["futex_wakes"] - before["futex_wakes"] < ROUNDS // 2


def every_kind(node: Node, rng: random.Random, serial: int) -> float:
    """Send one to many queries and wait for them in a random way; return the sum of the results."""
    model = node.models[b"plain"]
    kind = rng.randrange(7)
    if kind <= 2:
        return float(
            sum(model.predict(row(serial)).result(30)[0] for _ in range(rng.randrange(30)))
        )
    if kind == 3:
        futures = [model.predict(row(serial)) for _ in range(rng.choice([2, 5, 40]))]
        futures[0].cancel()
        return sum(value(future) for future in futures)
    if kind == 4:
        called: list[Future] = []
        future = model.predict(row(serial))
        future.add_done_callback(called.append)
        wait_until(lambda: called == [future])
        return value(future)
    if kind == 5:
        future = model.predict(row(serial))
        with contextlib.suppress(TimeoutError):
            future.result(rng.random() / 5000)
        wait_until(future.done)
        return value(future)
    return float(
        asyncio.run(all_of([model.predict(row(serial)) for _ in range(rng.choice([1, 3, 9]))]))
    )


def value(future: Future) -> float:
    """Return its value, or 0.0 if it was cancelled."""
    try:
        return float(future.result(30)[0])
    except CancelledError:
        return 0.0


async def all_of(futures: list[Future]) -> float:
    return float(sum([(await future)[0] for future in futures]))


@pytest.mark.parametrize("threads", [1, 2, THREADS])
def test_callers_of_every_kind(node: Node, stress: int, threads: int) -> None:
    """One, two and many threads send queries, and own the loop for some of them. All queries are
    counted and answered."""

    def run(which: int) -> None:
        rng = random.Random(which)
        for lap in range(40 * stress):
            serial = which * 1000 + lap + 1
            assert every_kind(node, rng, serial) % (2 * serial) == 0

    together(*(lambda i=i: run(i) for i in range(threads)))
    be_led(node)
    assert node.engine.completion.issued == node.engine.completion.answered


def test_leaders_that_come_and_go(node: Node, model: Model, stress: int) -> None:
    """One thread or all threads, at random, send queries; each counts its own answers."""
    rounds, sums = ROUNDS * stress, [0] * THREADS

    def run(which: int) -> None:
        rng = random.Random(which)
        for _ in range(rounds):
            if rng.random() < 0.01:
                threading.Event().wait(rng.random() / 100)
            sums[which] += int(model.predict(row(which + 1)).result(30)[0])

    together(*(lambda i=i: run(i) for i in range(THREADS)))
    assert sums == [2 * (which + 1) * rounds for which in range(THREADS)]


# -- a query nobody is blocked on, while the loop thread is parked


def test_a_poller_is_answered(node: Node, model: Model) -> None:
    for serial in range(20):
        be_led(node)
        future = model.predict(row(serial))
        wait_until(future.done)


def test_a_callback_is_called(node: Node, model: Model) -> None:
    for serial in range(20):
        be_led(node)
        called = threading.Event()
        model.predict(row(serial)).add_done_callback(lambda _, called=called: called.set())
        assert called.wait(30)


def test_an_array_is_answered(node: Node, model: Model) -> None:
    for n in (2, 4, 5, 300):
        be_led(node)
        assert model.predict_many(np.ones((n, 2))).result(30).tolist() == [[2.0, 2.0]] * n


def test_a_deadline_passes_that_nobody_waits_for(node: Node, model: Model) -> None:
    be_led(node)
    node.containers[0].awake.clear()
    future = model.predict(row(1), slo_ms=5)
    wait_until(future.done)
    # A loop that is kept from running finds the batch overdue and the deadline past in the same
    # turn.
    assert future.status().name in ("DEADLINE", "REPLICA_LOST")


# -- what ends a lead


def leader(
    node: Node, act: Callable[[Future], object]
) -> tuple[Future, threading.Thread, list[object]]:
    """Start a thread that owns the loop while it waits for a query without an answer. Return the
    query's future, the thread, and a list that will hold what `act` returns.

    It may not become the owner: on a busy machine the loop thread can take the loop back between
    the query and the wait. It is tried again then.
    """
    futures: list[Future] = []
    ended: list[object] = []

    def ask_and_wait() -> None:
        futures.append(node.models[b"plain"].predict(row(1), slo_ms=LONG_MS))
        with contextlib.suppress(CancelledError):  # it is tried again
            ended.append(act(futures[-1]))

    def try_it() -> threading.Thread | None:
        be_led(node)
        node.containers[0].awake.clear()
        before, thread = led(node), threading.Thread(target=ask_and_wait)
        thread.start()
        with contextlib.suppress(AssertionError):
            wait_until(lambda: led(node) >= before + 2, patience_s=0.2)
            return thread
        futures[-1].cancel()
        thread.join()
        node.containers[0].awake.set()
        ended.clear()
        return None

    thread = wait_until(try_it, "a thread that leads")
    return futures[-1], thread, ended


def test_a_cancel_wakes_the_leader(node: Node) -> None:
    future, thread, ended = leader(node, Future.wait)
    assert future.cancel()
    thread.join(20)
    assert ended == [True]
    node.containers[0].awake.set()
    be_led(node)


def test_a_timeout_ends_the_lead_and_the_query_goes_on(node: Node) -> None:
    for timeout in (0.0, 0.0001, 0.01, 0.12):
        be_led(node)
        node.containers[0].awake.clear()
        future = node.models[b"plain"].predict(row(1), slo_ms=400)
        assert not future.wait(timeout)
        wait_until(future.done)
        assert future.status().name == "DEADLINE"
        node.containers[0].awake.set()


def test_others_join_a_leader(node: Node) -> None:
    """One thread owns the loop for a query without an answer; others send queries meanwhile,
    blocked, by callback and on an event loop."""
    node.connect(b"vector")
    future, thread, ended = leader(node, Future.wait)
    other = node.models[b"vector"]
    for serial in range(50):
        assert other.predict(row(serial)).result(30)[0] == 2.0 * serial
    called = threading.Event()
    other.predict(row(1)).add_done_callback(lambda _: called.set())
    assert called.wait(30)
    assert asyncio.run(all_of([other.predict(row(serial)) for serial in range(50)])) == 49 * 50
    assert not ended
    future.cancel()
    thread.join(20)
    assert ended == [True]


def test_the_engine_stops_while_somebody_leads(node: Node) -> None:
    _, thread, ended = leader(node, Future.exception)
    others: list[object] = []
    model = node.models[b"plain"]
    more = [
        threading.Thread(
            target=lambda: others.append(model.predict(row(1), slo_ms=LONG_MS).exception())
        )
        for _ in "ab"
    ]
    for other in more:
        other.start()
    wait_until(lambda: node.engine.completion.issued - node.engine.completion.answered == 3)
    node.dispatch.stop()
    for waiting in (thread, *more):
        waiting.join(20)
    assert [type(error).__name__ for error in ended + others] == ["ShuttingDown"] * 3
    assert isinstance(model.predict(row(1)).exception(0), Exception)
