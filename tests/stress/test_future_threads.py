"""A real loop thread, a real socket, callers of every kind at once: each query ends once, and rightly."""

import asyncio
import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipper.serving.dispatch import Dispatch
from clipper_core.codec import Kind, decode_header, encode_frame, encode_rows, open_rows
from clipper_core.engine import Engine
from clipper_core.future import Future
from clipper_core.model import Model, predict_all
from clipper_core.status import Status

SUBMITTERS = 4
QUERIES = 6000


class SocketContainer:
    """Doubles each row, on a thread of its own, and drops the line when told to."""

    def __init__(self, path: str, name: bytes) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(path)
        self.socket.sendall(encode_frame(Kind.HELLO, name))
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        held = b""
        with contextlib.suppress(OSError):
            while piece := self.socket.recv(1 << 16):
                held = self.answer(held + piece)

    def answer(self, held: bytes) -> bytes:
        while (header := decode_header(held)) is not None and len(held) >= 64 + header.payload_bytes:
            if header.kind == Kind.PREDICT:
                rows = open_rows(header, held[64 : 64 + header.payload_bytes]).data
                self.socket.sendall(encode_rows(Kind.REPLY, 2 * rows, id=header.id))
            held = held[64 + header.payload_bytes :]
        return held

    def drop(self) -> None:
        with contextlib.suppress(OSError):  # the engine may have closed it first
            self.socket.shutdown(socket.SHUT_RDWR)
        self.thread.join()
        self.socket.close()


class Node:
    """An engine with its threads, and whoever dials in attached to the model it names."""

    def __init__(self, path: Path) -> None:
        self.path = str(path / "socket")
        self.engine = Engine(cache_bytes_max=1 << 22, tasks_max=1 << 16)
        self.dispatch = Dispatch(self.engine)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self.path)
        listener.listen(16)
        self.dispatch.loop.listen(listener.detach())
        self.models = {
            name: Model(self.engine, name.decode(), i + 1, "f64", (2,), cached=name == b"cached", slo_us=20_000_000)
            for i, name in enumerate([b"plain", b"cached", b"vector"])
        }
        self.containers: list[SocketContainer] = []
        self.dispatch.start()

    def connect(self, name: bytes) -> None:
        self.containers.append(SocketContainer(self.path, name))
        while not self.attach():
            threading.Event().wait(0.001)

    def attach(self) -> bool:
        attached = False
        for kind, conn, _, _, data in self.engine.news():
            if kind.name == "SAID_HELLO":
                self.engine.attach(conn, self.models[data].index, b"", size_max=256)
                attached = True
        return attached

    def close(self) -> None:
        self.dispatch.stop()
        for container in self.containers:
            container.drop()
        delivery = self.engine.delivery
        assert delivery.issued == delivery.answered


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    for name in node.models:
        node.connect(name)
    yield node
    node.close()


def together(*runs: Callable[[], object]) -> None:
    start = threading.Barrier(len(runs))
    failed: list[BaseException] = []

    def one(run: Callable[[], object]) -> None:
        start.wait()
        try:
            run()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=one, args=(run,)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def row(serial: int) -> Any:
    return np.array([serial, 1.0])


def check(future: Future, serial: int) -> bool:
    """Right, or cancelled; whether it was right."""
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
            answered[which] += sum(check(future, serial) for future, serial in zip(futures, serials, strict=True))

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


def test_event_loops_of_several_threads_await_the_same_and_their_own(node: Node, stress: int) -> None:
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
                await asyncio.wait_for(wait_for(models[0].predict(row(serial))), rng.random() / 1000)
        else:
            assert (await models[rng.randrange(3)].predict(row(serial))).tolist() == [2.0 * serial, 2.0]
        done[which] += 1

    async def everything(which: int) -> None:
        rng = random.Random(which)
        for lap in range(8 * stress):
            await asyncio.gather(*(one(which, which * 10**6 + lap * 60 + i, rng) for i in range(60)))
        for serial, future in enumerate(shared):
            assert (await future).tolist() == [2.0 * serial, 2.0]

    together(*(lambda i=i: asyncio.run(everything(i)) for i in range(SUBMITTERS)))
    assert done == [480 * stress] * SUBMITTERS


async def wait_for(future: Future) -> Any:
    return await future


def test_callbacks_waiters_and_cancels_meet_on_one_future(node: Node, stress: int) -> None:
    """Each future has a callback, two blocked threads, and perhaps a canceller; nobody is left behind."""
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
            assert future.wait(10)
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
    assert set(total) <= {Status.OK, Status.REPLICA_LOST, Status.DROPPED, Status.DEADLINE, Status.NO_REPLICA}
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
