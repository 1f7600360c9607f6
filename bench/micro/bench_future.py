"""Measures what a future costs: made, ended, read, told to an event loop; beside concurrent.futures
and asyncio.

The engine's clock stands still and a container made of frames answers, so a row of the core holds
the whole way of a query through lane, batch, reply and block: nothing but sockets and wake-ups is
missing.

    pytest bench/micro/bench_future.py --benchmark-columns=min,median,iqr
"""

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import Any

import numpy as np

from clipper_core.engine.engine import Engine
from clipper_core.engine.model import Model
from clipper_core.results.future import Future
from clipper_core.results.mailbox import MailboxReader
from clipper_core.wire.codec import Kind, decode_header, encode_frame, encode_rows

OPERATIONS = 4096
STATIC = 3


def measure(
    benchmark: Any, run: Callable[..., object], setup: Callable[[], Any] | None = None
) -> None:
    benchmark.pedantic(run, setup=setup, rounds=50, warmup_rounds=2)
    if benchmark.stats is not None:
        benchmark.extra_info["ns_per_operation"] = round(
            benchmark.stats.stats.min / OPERATIONS * 1e9, 1
        )


class Bench:
    """A model with one container that takes OPERATIONS rows a batch."""

    def __init__(self) -> None:
        self.engine = Engine(manual_clock=True, cache_bytes_max=1 << 16)
        self.model = Model(self.engine, "m:1", 1, "f64", (1,), cached=False)
        self.conn = self.engine.open(1)
        self.engine.receive(self.conn, encode_frame(Kind.HELLO, b""), 1)
        self.engine.attach(self.conn, 0, b"", mode=STATIC, size_max=OPERATIONS)
        self.step()
        self.outputs = np.zeros(OPERATIONS)
        self.x = np.zeros(1)

    def step(self) -> bytes:
        self.engine.step(2)
        return self.engine.outgoing(self.conn, 2)

    def submit(self) -> list[Future]:
        predict, x = self.model.predict, self.x
        return [predict(x) for _ in range(OPERATIONS)]

    def answer(self) -> None:
        header = decode_header(self.step())
        assert header is not None
        self.engine.receive(self.conn, encode_rows(Kind.REPLY, self.outputs, id=header.id), 2)
        self.engine.step(2)

    def answered(self) -> list[Future]:
        futures = self.submit()
        self.answer()
        return futures


def test_whole_way_of_a_miss(benchmark: Any) -> None:
    """predict(), lane, batch, frame, reply, block; nobody reads the result."""
    measure(benchmark, Bench().answered)


def test_whole_way_and_result(benchmark: Any) -> None:
    bench = Bench()
    measure(benchmark, lambda: [future.result() for future in bench.answered()])


def test_whole_way_as_one_array(benchmark: Any) -> None:
    bench, rows = Bench(), np.zeros((OPERATIONS, 1))

    def run() -> None:
        future = bench.model.predict_many(rows)
        bench.answer()
        future.result()

    measure(benchmark, run)


def test_ending_only(benchmark: Any) -> None:
    """The reply decoded and OPERATIONS slots ended: the loop thread's share."""
    bench = Bench()

    def setup() -> tuple[tuple[bytes, list[Future]], dict[str, Any]]:
        futures = bench.submit()
        header = decode_header(bench.step())
        assert header is not None
        return (encode_rows(Kind.REPLY, bench.outputs, id=header.id), futures), {}

    def run(reply: bytes, _: list[Future]) -> None:
        bench.engine.receive(bench.conn, reply, 2)

    measure(benchmark, run, setup)


def test_done_and_result_only(benchmark: Any) -> None:
    bench = Bench()

    def run(futures: list[Future]) -> None:
        for future in futures:
            if future.done():
                future.result()

    measure(benchmark, run, lambda: ((bench.answered(),), {}))


def test_mailbox(benchmark: Any) -> None:
    """add() before, one drain() after: what an awaited future costs beside being made and ended."""
    bench = Bench()
    mailbox = MailboxReader(bench.engine.completion)

    def setup() -> tuple[tuple[list[Future]], dict[str, Any]]:
        return (bench.submit(),), {}

    def run(futures: list[Future]) -> None:
        for future in futures:
            mailbox.add(future, None)
        bench.answer()
        assert len(mailbox.drain()) == OPERATIONS

    measure(benchmark, run, setup)


def measure_awaits(benchmark: Any, futures: list[Any]) -> None:
    """Measure what `await` costs for each of `futures`, all of them done."""

    async def run() -> None:
        for future in futures:
            await future

    with asyncio.Runner() as runner:
        measure(benchmark, lambda: runner.run(run()))


def test_await_of_a_finished_one(benchmark: Any) -> None:
    measure_awaits(benchmark, Bench().answered())


def test_anchor_await_of_a_finished_asyncio_future(benchmark: Any) -> None:
    loop = asyncio.new_event_loop()
    futures = [loop.create_future() for _ in range(OPERATIONS)]
    for future in futures:
        future.set_result(0.0)
    measure_awaits(benchmark, futures)
    loop.close()


def test_anchor_call(benchmark: Any) -> None:
    """A method of a compiled object that does nothing."""
    calls = [[].clear for _ in range(OPERATIONS)]

    def run() -> None:
        for call in calls:
            call()

    measure(benchmark, run)


def test_anchor_concurrent_future(benchmark: Any) -> None:
    """Made, set, read: no queue, no batch."""

    def run() -> None:
        futures = [concurrent.futures.Future[float]() for _ in range(OPERATIONS)]
        for future in futures:
            future.set_result(0.0)
        for future in futures:
            future.result()

    measure(benchmark, run)


def test_anchor_asyncio_future(benchmark: Any) -> None:
    loop = asyncio.new_event_loop()

    def run() -> None:
        futures = [loop.create_future() for _ in range(OPERATIONS)]
        for future in futures:
            future.set_result(0.0)
        for future in futures:
            future.result()

    measure(benchmark, run)
    loop.close()
