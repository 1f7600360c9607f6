"""Fixtures of the core's tests: one engine on a clock that only the test moves, and fake containers
that read and write frames."""

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from clipper_core.engine.engine import Engine
from clipper_core.engine.model import Model
from clipper_core.results.future import Future
from clipper_core.wire.codec import Kind, decode_header, encode_frame, encode_rows, open_rows

STATIC = 3  # batching that is always size_max rows: nothing learned, nothing guessed
TICK_US = 64  # a deadline is kept this late at most
WORLDS_MANY = 8  # of one test; then their memory is freed at its end


class Container:
    """A fake container: reads PREDICT frames and answers them when a test says so, the oldest
    first."""

    def __init__(self, world: "World", model: Model, **attach: Any) -> None:
        self.world, self.model = world, model
        self.conn = world.engine.open(world.now_us, remote=attach.pop("remote", False))
        assert self.conn
        self.send(encode_frame(Kind.HELLO, b"hello"))
        options: dict[str, Any] = {"mode": STATIC, "size_max": 64} | attach
        world.engine.attach(self.conn, model.index, b"welcome", **options)
        self.checked = options.get("checked", False)
        self.inbox: list[tuple[int, Any]] = []
        self.unread = b""
        self.kinds_received: list[int] = []
        world.containers.append(self)

    def send(self, data: bytes) -> bool:
        return self.world.engine.receive(self.conn, data, self.world.now_us)

    def read(self) -> list[tuple[int, Any]]:
        """Read what the engine has sent; return unanswered batches as (id, rows)."""
        self.unread += self.world.engine.outgoing(self.conn, self.world.now_us)
        while (header := decode_header(self.unread)) is not None:
            end = 64 + header.payload_bytes
            assert len(self.unread) >= end
            payload, self.unread = self.unread[64:end], self.unread[end:]
            self.kinds_received.append(header.kind)
            if header.kind == Kind.PREDICT:
                self.inbox.append((header.id, rows_of(header, payload)))
        return self.inbox

    def reply(self, answer: Callable[[Any], Any] | None = None, **fields: Any) -> None:
        """Answer the oldest batch with answer(rows), or with the sum of each row."""
        number, rows = self.inbox.pop(0)
        outputs = np.array([float(np.sum(row)) for row in rows]) if answer is None else answer(rows)
        assert self.send(
            encode_rows(Kind.REPLY, outputs, id=number, checked=self.checked, **fields)
        )

    def reply_all(self, answer: Callable[[Any], Any] | None = None) -> None:
        while self.read():
            self.reply(answer)
            self.world.step()

    def fail(self, text: str) -> None:
        number, _ = self.inbox.pop(0)
        assert self.send(encode_frame(Kind.FAILURE, text.encode(), id=number))

    def lose(self) -> None:
        self.world.engine.lost(self.conn, self.world.now_us)
        self.world.containers.remove(self)
        self.inbox = []


def rows_of(header: Any, payload: bytes) -> Any:
    rows = open_rows(header, payload)
    if rows.lengths is None:
        return rows.data
    ends = np.cumsum(rows.lengths)
    pieces = [rows.data[end - n : end] for end, n in zip(ends, rows.lengths, strict=True)]
    if rows.dtype in (13, 14):
        return [
            piece.tobytes().decode() if rows.dtype == 13 else piece.tobytes() for piece in pieces
        ]
    return pieces


class World:
    """An engine on a clock that the test sets. At the end every task must have been answered
    exactly once."""

    def __init__(self, **limits: Any) -> None:
        options: dict[str, Any] = {"cache_bytes_max": 1 << 20, "tasks_max": 1 << 16} | limits
        self.engine = Engine(manual_clock=True, seed=1, **options)
        self.now_us = 1000
        self.models: list[Model] = []
        self.containers: list[Container] = []
        # what refers to the engine and is not collected; called at the end
        self.closing: list[Callable[[], object]] = []
        self.step()

    def model(self, dtype: str = "f64", shape: tuple[int, ...] = (), **options: Any) -> Model:
        uid = len(self.models) + 1
        self.models.append(Model(self.engine, f"m:{uid}", uid, dtype, shape, **options))
        return self.models[-1]

    def container(self, model: Model, **attach: Any) -> Container:
        container = Container(self, model, **attach)
        self.step()
        container.read()
        return container

    def step(self, us: int = 0) -> int:
        self.now_us += us
        return self.engine.step(self.now_us)

    def pass_deadline(self, us: int) -> None:
        self.step(us + TICK_US)

    def serve(self, us: int = 10) -> None:
        """Step the engine; every container answers all its batches with the sums of their rows."""
        self.step(us)
        for container in list(self.containers):
            container.reply_all()

    def counts(self) -> dict[str, int]:
        """Return how the tasks of all models ended, by Status name, and cache hits as HIT."""
        total: dict[str, int] = {}
        for model in self.engine.snapshot()["models"]:
            total["HIT"] = total.get("HIT", 0) + model["hits"]
            for name, n in model["ended"].items():
                total[name] = total.get(name, 0) + n
        return total

    def close(self) -> None:
        self.engine.finish()
        completion = self.engine.completion
        assert completion.issued == completion.answered
        ended = self.counts()
        # of a query of one task; a hit among several has a slot, and is issued
        hits = ended.pop("HIT", 0)
        # a verdict is issued and answered too
        tasks = completion.issued - completion.ensemble_calls
        assert sum(ended.values()) <= tasks <= sum(ended.values()) + hits, "a task is counted once"
        assert self.engine.snapshot()["queue_bytes"] == 0
        for close in self.closing:
            close()


@pytest.fixture
def new_world() -> Iterator[Callable[..., World]]:
    """Makes worlds; closes and accounts for each at the end."""
    worlds: list[World] = []

    def make(**limits: Any) -> World:
        worlds.append(World(**limits))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()
    # a test of many worlds keeps them in circles; those of many tests at once would fill the memory
    if len(worlds) >= WORLDS_MANY:
        worlds.clear()
        gc.collect()


@pytest.fixture
def world(new_world: Callable[..., World]) -> World:
    return new_world()


@pytest.fixture
def statuses() -> Callable[[Sequence[Future]], list[str]]:
    return lambda futures: [future.status().name for future in futures]
