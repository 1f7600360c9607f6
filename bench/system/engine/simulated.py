"""A replica with a known cost on the engine's manual clock: the batcher's real code in exact
virtual time.

The replica takes L(n) = fixed + row * n microseconds for a batch of n, with 5 % noise and, in 2
batches of 1000, a pause of 10-20 ms. Arrivals that fall into one tick of 100 us are submitted
together. A row carries its own time of arrival, so that the replica can tell which of its answers
came too late.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from clipper_core.engine.engine import Engine
from clipper_core.engine.model import Model
from clipper_core.runtime.status import Status
from clipper_core.scheduling.batcher import BatchingMode
from clipper_core.scheduling.scheduler import EngineEvent
from clipper_core.wire.codec import (
    HEADER_BYTES,
    Kind,
    decode_header,
    encode_frame,
    encode_rows,
    open_rows,
)

SLO_US = 20_000
SIZE_MAX = 4096
TICK_US = 100
PAUSES = 0.002


@dataclass(frozen=True)
class Cost:
    """Durations of one batch, and how long a run of it is worth watching."""

    name: str
    fixed_us: float
    row_us: float
    seconds: float

    def best(self) -> int:
        """Return the rows of the batch that takes half the SLO."""
        return max(1, min(SIZE_MAX, int((SLO_US / 2 - self.fixed_us) / self.row_us + 1e-9)))

    def capacity(self) -> float:
        """Return the rows per second in such batches."""
        return self.best() / (self.fixed_us + self.row_us * self.best()) * 1e6

    def took_us(self, n: int, rng: np.random.Generator) -> float:
        took = (self.fixed_us + self.row_us * n) * max(0.5, 1 + 0.05 * rng.standard_normal())
        return float(took + (rng.uniform(10_000, 20_000) if rng.random() < PAUSES else 0))


COSTS = (
    Cost("SVM-like", 200, 5, 6),
    Cost("GPU-like", 3000, 30, 8),
    Cost("kernel-like", 100, 1000, 60),
)


@dataclass
class Tally:
    """Counts of the rows that arrived, by outcome."""

    arrived: int = 0
    in_time: int = 0
    late: int = 0
    sizes: list[int] = field(default_factory=list)


class Replica:
    """One container of one model on an engine of its own."""

    def __init__(
        self, cost: Cost, mode: BatchingMode, size_max: int = SIZE_MAX, seed: int = 1
    ) -> None:
        self.cost, self.rng, self.tally = cost, np.random.default_rng(seed), Tally()
        self.engine = Engine(
            manual_clock=True,
            cache_bytes_max=1 << 16,
            tasks_max=1 << 18,
            heartbeat_ms=60_000,
            seed=seed,
        )
        self.model = Model(self.engine, "m:1", 1, "f64", (1,), cached=False, lane_rows=1 << 17)
        self.now_us, self.free_us, self.asked_us = 1, 0, 1
        self.replies: deque[tuple[int, bytes]] = deque()  # when, what
        self.conn = self.engine.open(self.now_us)
        self.engine.receive(self.conn, encode_frame(Kind.HELLO, b"{}"), self.now_us)
        self.engine.attach(self.conn, 0, b"", mode=mode, size_max=size_max)
        self._inbox = b""
        self._step()

    def run(self, times: NDArray[np.float64]) -> Tally:
        """Run until the last of `times` (seconds) was answered or has reached its deadline."""
        ticks = np.ceil(times * 1e6 / TICK_US).astype(np.int64) + 1
        starts = np.flatnonzero(np.diff(ticks, prepend=-1))
        futures = []
        for start, end in zip(starts, [*starts[1:], len(ticks)], strict=True):
            at = int(ticks[start]) * TICK_US
            self._pass(at)
            futures.append(
                self.model.predict_many(np.full((end - start, 1), float(at)), SLO_US / 1000)
            )
            self._step()
        self._pass(self.now_us + 3 * SLO_US)
        self.tally.arrived = len(times)
        self.tally.in_time = sum(
            int(np.count_nonzero(future.statuses() == Status.OK)) for future in futures
        )
        return self.tally

    def _pass(self, until_us: int) -> None:
        while True:
            next_us = min(self.asked_us, self.replies[0][0] if self.replies else until_us + 1)
            if next_us > until_us:
                break
            self.now_us = max(self.now_us, next_us)
            while self.replies and self.replies[0][0] <= self.now_us:
                self.engine.receive(self.conn, self.replies.popleft()[1], self.now_us)
            self._step()
        self.now_us = until_us
        self._step()

    def _step(self) -> None:
        self.asked_us = max(self.engine.step(self.now_us), self.now_us + 1)
        for notice, *_ in self.engine.events():
            assert notice != EngineEvent.DISCONNECTED, "the engine gave the simulated container up"
        self._inbox += self.engine.outgoing(self.conn, self.now_us)
        while len(self._inbox) >= HEADER_BYTES:
            header = decode_header(self._inbox)
            assert header is not None
            end = HEADER_BYTES + header.payload_bytes
            if len(self._inbox) < end:
                break
            payload, self._inbox = self._inbox[HEADER_BYTES:end], self._inbox[end:]
            if header.kind == Kind.PREDICT:
                self._evaluate(open_rows(header, payload).data, header.id)

    def _evaluate(self, rows: NDArray[np.float64], batch: int) -> None:
        """Evaluate one batch after another, in the order sent."""
        took = int(self.cost.took_us(len(rows), self.rng))
        self.free_us = max(self.now_us, self.free_us) + took
        self.tally.sizes.append(len(rows))
        self.tally.late += int(np.count_nonzero(rows[:, 0] + SLO_US < self.free_us))
        self.replies.append(
            (self.free_us, encode_rows(Kind.REPLY, np.zeros(len(rows)), id=batch, time_us=took))
        )


def plain_aimd(cost: Cost, times: NDArray[np.float64], seed: int = 1) -> Tally:
    """Simulate the paper's rule as it is written: +1 a full batch from 1, x 0.9 after one that took
    more than half the SLO; a row is dropped only when it could not be in time even alone."""
    rng, tally = np.random.default_rng(seed), Tally(arrived=len(times))
    arrived = times * 1e6
    due = arrived + SLO_US
    now, head, limit, alone = 0.0, 0, 1.0, cost.fixed_us + cost.row_us
    while head < len(arrived):
        now = max(now, float(arrived[head]))
        waiting = int(np.searchsorted(arrived, now, "right"))
        head += int(np.searchsorted(due[head:waiting], now + alone, "left"))
        n = min(waiting - head, int(limit))
        if n <= 0:
            continue
        took = cost.took_us(n, rng)
        now += took
        in_time = int(np.count_nonzero(due[head : head + n] >= now))
        tally.in_time, tally.late = tally.in_time + in_time, tally.late + n - in_time
        tally.sizes.append(n)
        limit = max(1.0, limit * 0.9) if took > SLO_US / 2 else limit + (n >= int(limit))
        head += n
    return tally
