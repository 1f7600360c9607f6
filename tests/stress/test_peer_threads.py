"""Two engines, two loop threads, callers of every kind that query models of both: each query ends
once, with the right output."""

import asyncio
import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipper.serving.query.dispatch import Dispatch
from clipper_core.engine.engine import Engine
from clipper_core.engine.model import Model, predict_all
from clipper_core.results.future import Future, MailboxReader
from clipper_core.runtime.status import Status
from clipper_core.wire.codec import Kind, encode_frame
from tests.stress.node import SocketContainer, together

SUBMITTERS = 4
QUERIES = 2000


class Pair:
    """Two linked engines; all containers connect to the first, and half of them are handed over."""

    def __init__(self, path: Path) -> None:
        self.path = str(path / "socket")
        self.engines = [
            Engine(cache_bytes_max=1 << 22, tasks_max=1 << 16, heartbeat_ms=10_000, number=i)
            for i in range(2)
        ]
        self.engines[0].link_peer(self.engines[1])
        self.dispatch = Dispatch(*self.engines)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self.path)
        listener.listen(16)
        self.dispatch.loop.listen(listener.detach())
        self.models = {
            name: Model(
                self.engines[i % 2],
                name.decode(),
                i + 1,
                "f64",
                (2,),
                cached=i > 1,
                slo_us=20_000_000,
            )
            for i, name in enumerate([b"a0", b"b1", b"c0", b"d1"])
        }
        self.containers: list[SocketContainer] = []
        self.dispatch.start()
        for name in self.models:
            self.connect(name)

    def connect(self, name: bytes) -> SocketContainer:
        container = SocketContainer(self.path, name)
        self.containers.append(container)
        while not self.attach():
            threading.Event().wait(0.001)
        return container

    def attach(self) -> bool:
        attached = False
        for engine in self.engines:
            for kind, conn, _, _, data in engine.events():
                if kind.name != "HELLO_RECEIVED":
                    continue
                model = self.models[data]
                if model.engine is engine:
                    engine.attach(conn, model.index, b"", size_max=64)
                    attached = True
                else:
                    engine.move_connection(conn, model.engine, encode_frame(Kind.HELLO, data))
        return attached

    def close(self) -> None:
        self.dispatch.stop()
        for container in self.containers:
            container.drop()
        for engine in self.engines:
            assert engine.completion.issued == engine.completion.answered


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.close()


def row(serial: int) -> Any:
    return np.array([serial, 1.0])


def some_models(pair: Pair, rng: random.Random) -> tuple[Model, ...]:
    """Return one to four of the models, in any order."""
    return tuple(rng.sample(list(pair.models.values()), rng.randint(1, 4)))


def right(models: tuple[Model, ...], values: Any, serial: int) -> bool:
    return np.array(values).reshape(-1, 2).tolist() == [[2.0 * serial, 2.0]] * len(models)


def test_threads_that_block_and_cancel(pair: Pair, stress: int) -> None:
    answered, cancelled = [0] * SUBMITTERS, [0] * SUBMITTERS

    def run(which: int) -> None:
        rng = random.Random(which)
        for lap in range(QUERIES * stress // 50):
            serials = [(which * 10**6 + lap * 50 + i) % 20_000 for i in range(rng.randint(1, 50))]
            models = [some_models(pair, rng) for _ in serials]
            futures = [
                predict_all(some, row(serial)) for some, serial in zip(models, serials, strict=True)
            ]
            given_up = {
                id(future)
                for future in rng.sample(futures, rng.randrange(len(futures)))
                if future.cancel()
            }
            cancelled[which] += len(given_up)
            for some, future, serial in zip(models, futures, serials, strict=True):
                with contextlib.suppress(CancelledError):
                    assert right(some, future.result(30), serial)
                    assert id(future) not in given_up
                    answered[which] += 1

    together(*(lambda i=i: run(i) for i in range(SUBMITTERS)))
    assert sum(answered)
    assert sum(cancelled)


def test_a_lone_caller_of_both_and_of_each(pair: Pair, stress: int) -> None:
    """A loop thread that has parked must not leave the loop to a caller that does not run it."""
    rng = random.Random(1)
    for serial in range(400 * stress):
        for _ in range(rng.randrange(10)):
            model = some_models(pair, rng)[0]
            assert right((model,), model.predict(row(serial)).result(30), serial)
        models = some_models(pair, rng)
        assert right(models, predict_all(models, row(serial)).result(30), serial)
    # each is led by a lone caller again
    for loop, name in zip(pair.dispatch.loops, (b"a0", b"b1"), strict=True):
        before, give_up = loop.snapshot()["led"], time.monotonic() + 20
        while loop.snapshot()["led"] == before and time.monotonic() < give_up:
            pair.models[name].predict(row(1)).result(30)
        assert loop.snapshot()["led"] > before


def test_event_loops_callbacks_and_blocked_threads(pair: Pair, stress: int) -> None:
    called: list[Future] = []

    async def one(serial: int, rng: random.Random) -> None:
        models = some_models(pair, rng)
        future = predict_all(models, row(serial))
        if rng.random() < 0.3:
            future.add_done_callback(called.append)
        if rng.random() < 0.1:
            future.cancel()
        with contextlib.suppress(CancelledError):
            assert right(models, await future, serial)

    async def everything(which: int) -> None:
        rng = random.Random(which)
        for lap in range(8 * stress):
            await asyncio.gather(
                *(one((which * 10**6 + lap * 100 + i) % 20_000, rng) for i in range(100))
            )

    def block(which: int) -> None:
        rng = random.Random(which)
        for serial in range(300 * stress):
            models = some_models(pair, rng)
            assert right(models, predict_all(models, row(serial)).result(30), serial)

    together(
        *(lambda i=i: asyncio.run(everything(i)) for i in range(3)),
        *(lambda i=i: block(i) for i in range(2)),
    )
    assert all(future.done() for future in called)


def test_containers_that_die_on_either_side(pair: Pair, stress: int) -> None:
    over = threading.Event()

    def kill() -> None:
        rng = random.Random(0)
        for _ in range(5 * stress):
            name = rng.choice(list(pair.models))
            pair.connect(name)
            pair.containers.pop(list(pair.models).index(name)).drop()
            pair.containers.insert(list(pair.models).index(name), pair.containers.pop())
        over.set()

    def ask(which: int) -> None:
        rng = random.Random(which)
        while not over.is_set():
            models = some_models(pair, rng)
            futures = [
                (serial, predict_all(models, row(serial)))
                for serial in rng.sample(range(20_000), 50)
            ]
            for serial, future in futures:
                assert future.wait(30)
                for i in range(len(future)):
                    assert future.status(i) in (Status.OK, Status.REPLICA_LOST)
                    assert future.status(i) is not Status.OK or right(
                        models[:1], future.output(i), serial
                    )

    together(kill, *(lambda i=i: ask(i) for i in range(2)))


def test_a_mailbox_that_two_loops_write_at_once(pair: Pair, stress: int) -> None:
    """There is no callback thread and no event loop; two loops write to one mailbox, whose ring may
    be in use or full."""
    mailbox = MailboxReader(pair.engines[0].completion)
    models = tuple(pair.models.values())[:2]
    done = 0
    for lap in range(20 * stress):
        waiting = sum(mailbox.add(predict_all(models, row(lap * 500 + i)), i) for i in range(500))
        while waiting:
            got = len(mailbox.drain())
            waiting -= got
            done += got
    assert done > 0
    assert len(mailbox) == 0


@pytest.mark.parametrize(
    ("name", "more"), [(b"b1", b"\x01" * 10), (b"d1", encode_frame(Kind.HELLO, b"d1")[:40])]
)
def test_a_connection_that_sent_more_than_hello_is_not_handed_over(
    pair: Pair, name: bytes, more: bytes
) -> None:
    with socket.socket(socket.AF_UNIX) as container:
        container.settimeout(10)
        container.connect(pair.path)
        container.sendall(encode_frame(Kind.HELLO, name) + more)
        control = threading.Thread(
            target=lambda: [pair.attach() or threading.Event().wait(0.01) for _ in range(20)]
        )
        control.start()
        assert container.recv(1) == b""
        control.join()


def test_who_is_gone_before_it_is_handed_over(pair: Pair) -> None:
    for _ in range(20):
        with socket.socket(socket.AF_UNIX) as container:
            container.connect(pair.path)
            container.sendall(encode_frame(Kind.HELLO, b"b1"))
    pair.connect(b"d1")
    assert right((pair.models[b"b1"],), pair.models[b"b1"].predict(row(1)).result(30), 1)


def test_what_is_handed_over_no_longer_wakes_the_first_loop(pair: Pair) -> None:
    steps = [loop.snapshot()["steps"] for loop in pair.dispatch.loops]
    for serial in range(300):
        assert right(
            (pair.models[b"b1"],), pair.models[b"b1"].predict(row(serial)).result(30), serial
        )
    first, second = (
        loop.snapshot()["steps"] - n for loop, n in zip(pair.dispatch.loops, steps, strict=True)
    )
    assert second >= 300
    assert first < 100
