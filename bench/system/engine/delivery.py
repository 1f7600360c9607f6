"""delivery: does an answer come without the GIL, with one wake a batch, and as fast while Python is
busy?"""

import asyncio
import sys
import time
from typing import Any

import numpy as np

import clipper
from bench.harness import Goal, Row, Sample, absent, interleave, loop_factory, row
from bench.system.anchors.reference import distinct
from bench.system.engine.effort import Effort, median
from bench.system.engine.servers import servers
from bench.system.engine.work import loop_thread, writes_of
from clipper.serving.query import dispatch

PATIENCE_S = 5.0


def rows(effort: Effort) -> list[Row]:
    with servers(("unix",), ("cold",)) as (running, _):
        server = running["unix"]
        held = without_gil(server, effort.of(2000, 50))
        wakes = wakes_a_batch(server, effort.of(20_000, 500))
        idle_busy = interleave(
            {
                "idle": lambda: latency_us(server, effort, busy=False),
                "busy": lambda: latency_us(server, effort, busy=True),
            },
            effort.repetitions,
        )
    return [held, *wakes, unaffected(idle_busy)]


def without_gil(server: clipper.ClipperServer, n: int) -> Row:
    """Count answers that needed the GIL: the main thread holds the GIL while n queries are
    answered."""
    predict, inputs = server.model("cold").predict, distinct(n)()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        futures = [predict(x) for x in inputs]
        until = time.perf_counter() + PATIENCE_S
        left = futures
        while left and time.perf_counter() < until:
            left = [future for future in left if not future.done()]  # done() keeps the GIL
    finally:
        sys.setswitchinterval(before)
    needed = len(left)
    for future in futures:
        future.result()
    note = (
        f"{n} queries while the main thread kept the GIL for itself: those that were not answered"
        " until it let go"
    )
    late = f"the GIL, or answers that took more than {PATIENCE_S:g} s"
    name, goal = "delivery, answers that needed the GIL", Goal("value_at_most", 0)
    return row(name, needed, "answers", goal=goal, note=note, bounded_by=late)


def wakes_a_batch(server: clipper.ClipperServer, n: int) -> list[Row]:
    """Return the turns of the event loop that the core caused, and the batches sent, while one
    coroutine submits all queries and awaits them in order."""
    predict, inputs, thread = server.model("cold").predict, distinct(n)(), loop_thread()
    turns, resolve = 0, dispatch._resolve

    def counted(mailbox: Any) -> None:
        nonlocal turns
        turns += 1
        resolve(mailbox)

    async def run() -> None:
        for start in range(0, n, 1000):
            for future in [predict(x) for x in inputs[start : start + 1000]]:
                await future

    before, wrote = batches(server), writes_of(thread)
    # the reader that an event loop is given, from the next await on a new loop
    dispatch._resolve = counted
    try:
        with asyncio.Runner(loop_factory=loop_factory(True)) as runner:
            runner.run(run())
    finally:
        dispatch._resolve = resolve
    sent, after = batches(server) - before, writes_of(thread)
    note = f"{n} awaited queries in {sent} batches, on uvloop: {turns} wakes"
    goal = Goal("value_at_most", 1)
    more = "batches whose answers come in parts"
    result = [
        row(
            "delivery, loop wakes a batch",
            turns / max(sent, 1),
            "wakes",
            goal=goal,
            note=note,
            bounded_by=more,
        )
    ]
    name = "delivery, eventfd writes a batch"
    if wrote is None or after is None:
        return [
            *result,
            absent(name, "writes", "not measured: no /proc/self/task/N/io here", goal=goal),
        ]
    note, more = (
        "by the core's loop thread, as the kernel counts",
        "more than one reader told of one batch",
    )
    return [
        *result,
        row(name, (after - wrote) / max(sent, 1), "writes", goal=goal, note=note, bounded_by=more),
    ]


def batches(server: clipper.ClipperServer) -> int:
    """Return the count of the model, not of its replicas: one that answers is listed
    among them only a moment later."""
    return int(server.stats()["models"]["cold:1"]["batches"])


def latency_us(server: clipper.ClipperServer, effort: Effort, busy: bool) -> float:
    """Return the median time from submit to answer, by the core's own clock, while the main thread
    waits in result(), or runs Python."""
    predict, found = server.model("cold").predict, []
    for x in distinct(effort.of(500, 20))():
        future = predict(x)
        while busy and not future.done():
            sum(range(50))
        future.result()
        found.append(float(future.latency_us))
    return median(found)


def unaffected(found: dict[str, Sample]) -> Row:
    note = (
        "one outstanding, by the core's clock; the bound of 1.5 is this table's. A thread that"
        " needs the GIL waits some 5 ms"
    )
    bounded = (
        "the second core: caller, loop and container are three, and a busy caller leaves one core"
        " to the other two"
    )
    assert np.isfinite(found["busy"].median)
    return row(
        "delivery, latency while Python is busy",
        found["busy"],
        "us",
        "main thread blocked",
        found["idle"],
        Goal("at_most", 1.5),
        note,
        bounded,
    )
