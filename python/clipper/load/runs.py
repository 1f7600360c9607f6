"""Runs of a load test: one rate, several rates, or a search for the highest rate within an SLO."""

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from clipper.component import fast_event_loop
from clipper.errors import InvalidInput
from clipper.load.measurement import Measurement, QueryOutcome
from clipper.load.open_loop import arrivals, evenly, send_on_time

QUERIES_MAX = 10_000_000  # per rate; the times of all are stored
STEPS_MAX = 24  # rates tried by a search
_TICK_S = 0.1
_PAUSE_S = 0.3  # between rates
_FINE = 1.05  # precision of the search


class LoadTarget(Protocol):
    """Sends queries. Runs in the event loop."""

    url: str

    async def open(self) -> None:
        """Connect and send one query to check that the target accepts them."""

    def count_in(self, measured: Measurement, zero_s: float) -> None:
        """Record outcomes in `measured`, with times relative to zero_s."""

    def send(self, number: int) -> None:
        """Send query `number`."""

    async def close(self) -> None:
        """Drop all connections."""


@dataclass(frozen=True)
class RunPlan:
    """Parameters of a run. seconds: per rate. slo_ms: bound of goodput. steady: even instead of
    Poisson arrivals. patience_s: wait for answers after the last query.
    """

    seconds: float
    slo_ms: float
    steady: bool = False
    patience_s: float = 5.0
    seed: int = 1


OnProgress = Callable[[Measurement, float], None]  # what is so far, seconds since the start
MakeTarget = Callable[[], LoadTarget]


def offer(target: MakeTarget, plan: RunPlan, rate: float, on_progress: OnProgress) -> Measurement:
    """Run one rate. Ctrl-C ends it early with the results so far. Raises: NoServer,
    ClipperError, InvalidInput.
    """
    if rate * plan.seconds > QUERIES_MAX:
        raise InvalidInput(
            f"{rate:g} a second for {plan.seconds:g} s are more than {QUERIES_MAX} queries.",
            hint="Take less.",
        )
    with asyncio.Runner(loop_factory=fast_event_loop) as runner:
        return runner.run(_offer(target(), plan, rate, on_progress))


async def _offer(
    target: LoadTarget, plan: RunPlan, rate: float, on_progress: OnProgress
) -> Measurement:
    measured = Measurement(rate, plan.seconds, plan.slo_ms)
    stopping = asyncio.Event()
    with _interruptible(stopping):
        try:
            await target.open()
            await _run(target, plan, measured, stopping, on_progress)
        finally:
            await target.close()
    return measured


async def _run(
    target: LoadTarget,
    plan: RunPlan,
    measured: Measurement,
    stopping: asyncio.Event,
    on_progress: OnProgress,
) -> None:
    times = (
        evenly(measured.rate, plan.seconds)
        if plan.steady
        else arrivals(measured.rate, plan.seconds, plan.seed)
    )
    zero_s = time.perf_counter() + 0.01
    cpu_s = time.process_time()
    target.count_in(measured, zero_s)

    def send(due_s: float) -> None:
        target.send(measured.sent(due_s - zero_s, time.perf_counter() - zero_s))

    reporting = asyncio.ensure_future(_report_progress(measured, zero_s, on_progress))
    try:
        await send_on_time(iter((times + zero_s).tolist()), send, stopping)
        measured.cpu_s = time.process_time() - cpu_s
        measured.interrupted = stopping.is_set()
        until = time.perf_counter() + plan.patience_s
        while (
            QueryOutcome.UNANSWERED in measured.outcomes
            and time.perf_counter() < until
            and not stopping.is_set()
        ):
            await asyncio.sleep(0.005)
    finally:
        reporting.cancel()


async def _report_progress(measured: Measurement, zero_s: float, on_progress: OnProgress) -> None:
    while True:
        await asyncio.sleep(_TICK_S)
        on_progress(measured, time.perf_counter() - zero_s)


@contextlib.contextmanager
def _interruptible(stopping: asyncio.Event) -> Iterator[None]:
    """End the run early on the first Ctrl-C; a second one interrupts."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        stopping.set()
        loop.remove_signal_handler(signal.SIGINT)

    if threading.current_thread() is not threading.main_thread():  # signals need the main thread
        yield
        return
    loop.add_signal_handler(signal.SIGINT, stop)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


# -- several rates


def sweep(
    target: MakeTarget, plan: RunPlan, rates: list[float], on_progress: OnProgress
) -> list[Measurement]:
    """Run several rates in turn. Ctrl-C also ends the remaining ones."""
    found: list[Measurement] = []
    for number, rate in enumerate(rates):
        if number:
            time.sleep(_PAUSE_S)
        found.append(offer(target, plan, rate, on_progress))
        if found[-1].interrupted:
            break
    return found


@dataclass(frozen=True)
class RateSearch:
    """Result of a search. rate: the highest within the SLO, 0 for none. why: what ended the
    search.
    """

    rate: float
    steps: list[Measurement]
    why: str


def search_rate(
    target: MakeTarget, plan: RunPlan, first: float, most: float, on_progress: OnProgress
) -> RateSearch:
    """Find the highest rate, to 5 %, at which 99 % of queries get a model's answer within
    plan.slo_ms.

    The rate doubles until it fails, then bisects. If the generator itself falls behind, the result
    is a lower bound.
    """

    def measure(rate: float) -> Measurement:
        time.sleep(_PAUSE_S)
        return offer(target, plan, rate, on_progress)

    return bisected(measure, plan.slo_ms, first, most)


def bisected(
    measure: Callable[[float], Measurement], slo_ms: float, first: float, most: float
) -> RateSearch:
    """Search with a given measurement function."""
    steps: list[Measurement] = []
    low, high, rate = 0.0, 0.0, first
    why = f"no rate above {most:g} per second was tried"
    while len(steps) < STEPS_MAX:
        step = measure(rate)
        steps.append(step)
        if step.interrupted:
            why = "it was interrupted"
            break
        if step.holds(slo_ms):
            low = rate
        elif step.is_behind():
            high, why = (
                rate,
                (f"the generator could not send {rate:.0f} per second: the server may handle more"),
            )
        else:
            high, why = rate, f"p99 or the outcomes miss the SLO at {rate:.0f} per second"
        if low >= most or (high and high <= max(low, 1.0) * _FINE) or (high and high < 1.0):
            break
        rate = (
            min(low * 2, most) if not high else _rounded((low * high) ** 0.5 if low else high / 4)
        )
    return RateSearch(low, steps, why)


def _rounded(rate: float) -> float:
    return float(f"{rate:.3g}")
