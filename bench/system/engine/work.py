"""work: what does it cost to hand a row to the loop thread, beside an atomic add and Python's
queues? (CPU time.)"""

import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.harness import CPU, Goal, Row, Sample, absent, interleave, row, window_ns
from bench.system.anchors.bare import NO_COMPILER, bare
from bench.system.anchors.reference import distinct
from bench.system.engine.effort import Effort
from bench.system.engine.servers import servers
from clipper_core.runtime.ring import WorkRing

LOOP_THREAD = "clipper-loop"
LANE_ROWS = 8192  # as limits.queue_rows_max


def rows(effort: Effort) -> list[Row]:
    n, turns = effort.of(100_000, 1000), effort.of(20, 1)
    ring = WorkRing(LANE_ROWS, 8)
    published: list[float] = []

    def pair_ns() -> float:
        """Measure a lane that is filled and emptied repeatedly; the time of filling is appended to
        `published`."""
        filling = emptying = 0
        for _ in range(turns):
            begun = CPU()
            ring.churn(0, LANE_ROWS)
            between = CPU()
            ring.drain(LANE_ROWS)
            filling += between - begun
            emptying += CPU() - between
        published.append(filling / turns / LANE_ROWS)
        return (filling + emptying) / turns / LANE_ROWS

    simple: queue.SimpleQueue[int] = queue.SimpleQueue()
    plain: queue.Queue[int] = queue.Queue()
    cases: dict[str, Callable[[], float]] = {
        "pair": pair_ns,
        "publish": lambda: published[-1],
        "SimpleQueue": lambda: put_get_ns(simple, n),
        "queue.Queue": lambda: put_get_ns(plain, max(n // 10, 100)),
    }
    with bare() as program:
        if program:
            cases["add"] = lambda: program.measure("add", 20 * n)
        found = interleave(cases, effort.repetitions)
    return [*rows_of(found), *system_calls(effort)]


def put_get_ns(line: Any, n: int) -> float:
    begun = CPU()
    for _ in range(n):
        line.put(1)
        line.get()
    return (CPU() - begun) / n


def rows_of(found: dict[str, Sample]) -> list[Row]:
    goal, name, anchor = (
        Goal("at_most", 2),
        "work queue, publish, of an atomic add",
        "atomic add, C",
    )
    bounded = (
        "the row's own cache lines: claim and publish write the cell's sequence besides the add on"
        " the tail"
    )
    result = [
        (
            row(name, found["publish"], "ns", anchor, found["add"], goal, bounded_by=bounded)
            if "add" in found
            else absent(name, "ns", NO_COMPILER, anchor, goal)
        )
    ]
    note = "the core's loop is without Python, the peer's calls are from Python: as each is used"
    takes = "the two locked steps of a claim and a publish, and the row's own cache lines"
    for peer in ("SimpleQueue", "queue.Queue"):
        goals = Goal("times_better", 5) if peer == "SimpleQueue" else None
        pair = f"{peer} put + get"
        result.append(
            row(
                f"work queue, publish + take, of {peer}",
                found["pair"],
                "ns",
                pair,
                found[peer],
                goals,
                note,
                takes,
            )
        )
    return result


def system_calls(effort: Effort) -> list[Row]:
    """Return the writes of the submitting thread that the loop thread did not cause by going to
    sleep.

    The submitter's only system call is the write() to an eventfd that wakes the loop; the kernel
    counts a thread's writes in /proc, and how often the loop's thread went to sleep too: each sleep
    may cost one write, and beyond those there must be none.
    """
    name, goal = "work queue, system calls a query, loop awake", Goal("value_at_most", 0)
    if own_writes() is None:
        return [absent(name, "calls", "not measured: no /proc/thread-self/io here", goal=goal)]
    n = effort.of(50_000, 1000)
    with servers(("unix",), ("cold",)) as (running, _):
        predict, inputs = running["unix"].model("cold").predict, distinct(n)()
        loop = loop_thread()
        slept, wrote = sleeps(loop), own_writes() or 0
        window_ns(predict, inputs)
        writes, slept = (own_writes() or 0) - wrote, sleeps(loop) - slept
    note = (
        f"{n} queries, 1000 outstanding: the loop slept {slept} times, the submitter wrote {writes}"
        " times to wake it"
    )
    bounded = "wakes that were sent twice for one sleep"
    return [
        row(name, max(writes - slept, 0) / n, "calls", goal=goal, note=note, bounded_by=bounded),
        row(
            "work queue, system calls a query, in all",
            writes / n,
            "calls",
            note="with those that wake a sleeping loop",
        ),
    ]


def own_writes() -> int | None:
    """Return the number of write() calls and similar ones of the calling thread; sendmsg() on a
    socket does not count."""
    try:
        fields = dict(
            line.split(": ") for line in Path("/proc/thread-self/io").read_text().splitlines()
        )
    except OSError:
        return None
    return int(fields["syscw"])


def loop_thread() -> int:
    """Return the thread id of the newest loop thread of this process."""
    return max(
        thread.native_id or 0
        for thread in threading.enumerate()
        if thread.name.startswith(LOOP_THREAD)
    )


def writes_of(thread: int) -> int | None:
    """Measure what own_writes measures, of another thread."""
    try:
        fields = dict(
            line.split(": ")
            for line in Path(f"/proc/self/task/{thread}/io").read_text().splitlines()
        )
    except OSError:
        return None
    return int(fields["syscw"])


def sleeps(thread: int) -> int:
    """Return how often a thread gave its core away because it had nothing to do."""
    lines = Path(f"/proc/self/task/{thread}/status").read_text().splitlines()
    return int(
        next(line.split()[1] for line in lines if line.startswith("voluntary_ctxt_switches"))
    )
