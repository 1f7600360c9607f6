"""The demo's load: digits sent to an application in an open loop, from its own thread."""

import asyncio
import random
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from clipper.component import Stop, Worker, fast_event_loop
from clipper.load.open_loop import send_on_time
from clipper.serving.query.application import ApplicationHandle
from clipper.types import Answer
from clipper_demo.digits import Digits

REPEATED = 0.3  # share of queries that repeat an earlier one
RATE_MAX = 5000.0
_RECENT = 64  # recent queries to repeat from
_GRACE_US = 1000  # the default is produced at the deadline, so it arrives slightly later
_LATE_MAX_S = 0.25  # a load further behind (after a suspend) skips queries


@dataclass(slots=True)
class OutcomeCounts:
    """Counts of the demo's queries. partial: answers without some model. errors: exceptions by
    type.
    """

    sent: int = 0
    answered: int = 0
    defaults: int = 0
    partial: int = 0
    correct: int = 0
    in_time: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)

    def copy(self) -> "OutcomeCounts":
        """Return the counts of now."""
        return replace(self, reasons=self.reasons.copy(), errors=self.errors.copy())


@dataclass(slots=True)
class Outcomes:
    """Outcomes of the demo's queries.

    answer_us, wall_us: latency of each answer, as the server counts it and since the due time.

    Threads: the load's thread writes; any reads, slightly inconsistent.
    """

    counts: OutcomeCounts = field(default_factory=OutcomeCounts)
    answer_us: "array[int]" = field(default_factory=lambda: array("I"))
    wall_us: "array[int]" = field(default_factory=lambda: array("I"))


class DemoLoad:
    """Sends images to an application from its own thread. rate: mean queries per second; Poisson
    arrivals by `seed`. 30 % repeat an earlier query; the others add fresh noise to a held-out
    image.

    Threads: any, for public methods.
    """

    def __init__(
        self, app: ApplicationHandle, digits: Digits, rate: float, slo_ms: float, seed: int = 0
    ) -> None:
        self.rate = rate
        self.outcomes = Outcomes()
        self._app = app
        self._digits = digits
        self._in_time_us = round(slo_ms * 1000) + _GRACE_US
        self._random = random.Random(seed)
        self._noise = np.random.default_rng(seed)
        self._recent: list[tuple[NDArray[np.float64], int]] = []
        self._worker = Worker("clipper-demo-load", self._run, once=True)

    def start(self) -> None:
        """Start sending."""
        self._worker.start()

    def stop(self) -> None:
        """Stop sending; return after the last answer."""
        self._worker.end()

    def _run(self, stop: Stop) -> None:
        with asyncio.Runner(loop_factory=fast_event_loop) as runner:
            runner.run(self._send())

    async def _send(self) -> None:
        waiting: set[asyncio.Task[None]] = set()
        loop = asyncio.get_running_loop()

        def send(due: float) -> None:
            task = loop.create_task(self._query(due))
            waiting.add(task)
            task.add_done_callback(waiting.discard)

        await send_on_time(self._dues(), send, asyncio.Event())
        if waiting:
            await asyncio.wait(waiting)

    def _dues(self) -> Iterator[float]:
        due = time.perf_counter()
        while not self._worker.stop.requested:
            due = max(due + self._random.expovariate(self.rate), time.perf_counter() - _LATE_MAX_S)
            yield due

    async def _query(self, due: float) -> None:
        scan, digit = self._next()
        self.outcomes.counts.sent += 1
        try:
            answer: Answer = await self._app.predict(scan)
        except Exception as error:  # counted and shown; the load must go on
            self.outcomes.counts.errors[type(error).__name__] += 1
            return
        self.outcomes.wall_us.append(round((time.perf_counter() - due) * 1e6))
        self._count(answer, digit)

    def _count(self, answer: Answer, digit: int) -> None:
        counts = self.outcomes.counts
        counts.answered += 1
        self.outcomes.answer_us.append(answer.latency_us)
        if answer.is_default:
            counts.defaults += 1
            counts.reasons[answer.reason] += 1
            return
        counts.partial += bool(answer.missing)
        counts.in_time += answer.latency_us <= self._in_time_us
        counts.correct += answer.output == digit

    def _next(self) -> tuple[NDArray[np.float64], int]:
        if self._recent and self._random.random() < REPEATED:
            return self._random.choice(self._recent)
        at = self._random.randrange(len(self._digits.held_x))
        scan = self._digits.held_x[at] + self._noise.normal(0, 0.5, 64)
        fresh = (scan, int(self._digits.held_y[at]))
        self._recent.append(fresh)
        del self._recent[:-_RECENT]
        return fresh
