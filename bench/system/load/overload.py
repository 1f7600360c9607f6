"""Overload: what a model of known capacity answers when it is offered twice and ten times as much,
and how fast it recovers.

The model sleeps a + b n for a batch of n, so its capacity is known and no core is busy with it.
Queries come one by one at Poisson times, whatever becomes of the answers; every latency counts from
when a query was meant to be sent: a late sender counts against us. A query is admitted unless it is
refused at submission; goodput is the predictions that arrived within the SLO.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import clipper
from bench.harness import Goal, Row, row, send_blocking
from bench.system.load.deadlines import bare_sleeper, lateness_us
from clipper.load.open_loop import arrivals

SLO_MS = 20.0
FIXED_S, ROW_S = 0.002, 0.0001  # one batch
SIZE = 80  # rows of the largest batch that takes half the SLO
CAPACITY = SIZE / (FIXED_S + ROW_S * SIZE)  # a second: 8,000
WINDOW_S = 0.1  # in which recovery is looked for
RUN = 5  # windows
# of the queries of a window in time; or, on a busy machine, what nine of ten windows had before the
# overload
NORMAL = 0.99
CALM = 0.8  # of the peak


@dataclass(frozen=True)
class Phase:
    """One rate for some seconds. Times in microseconds, from when each query was meant to be
    sent."""

    seconds: float
    due_s: NDArray[np.float64]
    latency_us: NDArray[np.float64]
    ok: NDArray[np.bool_]
    refused: NDArray[np.bool_]
    late_us: NDArray[np.float64]  # the sender itself

    @property
    def good(self) -> NDArray[np.bool_]:
        return self.ok & (self.latency_us <= SLO_MS * 1000)

    @property
    def goodput(self) -> float:
        return float(np.sum(self.good)) / self.seconds

    def p99_us(self, which: NDArray[np.bool_]) -> float:
        return float(np.quantile(self.latency_us[which], 0.99)) if np.any(which) else 0.0

    def windows(self) -> list[float]:
        """Return the share in time of each window."""
        at = (self.due_s / WINDOW_S).astype(int)
        return [float(np.mean(self.good[at == w])) for w in range(int(self.seconds / WINDOW_S))]

    def recovery_s(self, normal: float) -> float:
        """Return the time from the start of the phase to the first of half a second of
        windows that are normal; NaN: there are none."""
        fine = [share >= normal for share in self.windows()]
        starts = (w for w in range(len(fine) - RUN + 1) if all(fine[w : w + RUN]))
        return next(starts, float("nan")) * WINDOW_S


def sleeper(xs: NDArray[np.float64]) -> NDArray[np.float64]:
    time.sleep(FIXED_S + ROW_S * len(xs))
    sums: NDArray[np.float64] = np.asarray(xs).sum(axis=1)
    return sums


def offer(handle: Any, load: float, seconds: float, seed: int) -> Phase:
    """Send at `load` times the capacity. Refused queries are done when predict returns; the others
    report their latency."""
    due = arrivals(load * CAPACITY, seconds, seed)
    rows = np.random.default_rng(seed).random((512, 4))
    futures: list[Any] = []
    sent, back = np.zeros(len(due)), np.zeros(len(due))
    clock, predict = time.perf_counter, handle.predict

    def send(i: int, due_s: float) -> None:
        sent[i] = clock()
        futures.append(predict(rows[i & 511]))
        back[i] = clock()

    begun = send_blocking(due.tolist(), send)
    return phase(seconds, due, sent - begun, back - begun, futures)


def phase(
    seconds: float,
    due: NDArray[np.float64],
    sent: NDArray[np.float64],
    back: NDArray[np.float64],
    futures: Sequence[Any],
) -> Phase:
    for future in futures:
        future.wait(10)
    status = np.array([future.status().value for future in futures])
    refused = status == 2  # clipper_core.runtime.status.Status.FULL
    own = np.array([future.latency_us for future in futures])
    latency = np.where(refused, (back - due) * 1e6, (sent - due) * 1e6 + own)
    return Phase(seconds, due, latency, status == 1, refused, (sent - due) * 1e6)


def main(quick: bool) -> list[Row]:
    seconds = 0.5 if quick else 3.0
    with clipper.start() as server:
        handle = server.deploy("sleeper", sleeper, input="f64[4]", cache=False, batching="fit")
        model = Bound(handle)
        offer(model, 0.5, min(1.0, seconds), 1)  # learns its line
        peaks = {load: offer(model, load, seconds, 2) for load in (0.9, 1.0, 1.1)}
        calm = CALM * best(peaks) / CAPACITY
        before = offer(model, calm, max(seconds, 1.0), 4)
        sleeper_process = bare_sleeper(2 * seconds)
        found = {load: offer(model, load, seconds, 3) for load in (2.0, 10.0)}
        control = np.array(lateness_us(sleeper_process))
        after = offer(model, calm, max(seconds, 1.0), 4)
    over = [r for load, one in found.items() for r in load_rows(load, one, peaks, control)]
    return [*peak_rows(peaks), *over, *after_rows(before, after)]


class Bound:
    """predict(x) with the SLO."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def predict(self, x: Any) -> Any:
        return self._handle.predict(x, SLO_MS)


def best(peaks: dict[float, Phase]) -> float:
    return max(one.goodput for one in peaks.values())


def peak_rows(peaks: dict[float, Phase]) -> list[Row]:
    loads = ", ".join(f"{load:g}" for load in peaks)
    note = (
        f"the greatest of {loads} x; a model that sleeps {FIXED_S * 1e3:g} ms + {ROW_S * 1e6:g} us"
        " a row"
    )
    return [
        row("peak goodput", best(peaks), "predictions/s", f"batches of {SIZE}", CAPACITY, note=note)
    ]


def load_rows(
    load: float, one: Phase, peaks: dict[float, Phase], control: NDArray[np.float64]
) -> list[Row]:
    title = f"{load:g} x offered"
    admitted = ~one.refused
    kept = float(np.mean(one.ok[admitted])) if np.any(admitted) else 0.0
    sender = (
        "the sender itself, whom the machine wakes, was late by"
        f" {np.quantile(one.late_us, 0.99):.0f} us at p99"
    )
    woken = float(np.quantile(control, 0.99)) / 1000
    own = (one.latency_us - one.late_us)[one.refused]
    call = float(np.quantile(own, 0.99)) if len(own) else 0.0
    return [
        row(
            f"{title}: goodput",
            one.goodput,
            "predictions/s",
            "peak",
            best(peaks),
            Goal("at_least", 0.95),
            bounded_by=f"{sender}; a process that only sleeps, by {woken:.1f} ms",
        ),
        row(
            f"{title}: admitted, p99",
            one.p99_us(admitted) / 1000,
            "ms",
            goal=Goal("value_at_most", SLO_MS),
            note=sender,
            bounded_by=f"the machine: a process that only sleeps was late by {woken:.1f} ms at p99",
        ),
        row(f"{title}: admitted and answered", kept, "share"),
        row(
            f"{title}: refused, p99",
            one.p99_us(one.refused) / 1000,
            "ms",
            "bare sleep",
            woken,
            Goal("value_at_most", 2.0),
        ),
        row(f"{title}: refused, p99 of the call alone", call, "us"),
        row(f"{title}: refused", float(np.mean(one.refused)), "share"),
    ]


def after_rows(before: Phase, after: Phase) -> list[Row]:
    normal = min(NORMAL, float(np.quantile(before.windows(), 0.1)))
    note = (
        f"at {CALM:g} of the peak; normal: {normal:.1%} of a window of {WINDOW_S * 1000:g} ms in"
        f" time, {RUN} windows long"
    )
    share, usual = float(np.mean(after.good)), float(np.mean(before.good))
    late_ms = [np.quantile(phase.late_us, 0.99) / 1000 for phase in (before, after)]
    machine = (
        f"the machine: the sender was late by {late_ms[1]:.1f} ms at its p99 afterwards, by"
        f" {late_ms[0]:.1f} ms before the overload"
    )
    return [
        row(
            "back to normal after",
            after.recovery_s(normal),
            "s",
            goal=Goal("value_at_most", 2.0),
            note=note,
            bounded_by=machine,
        ),
        row(
            "then in time",
            share,
            "share",
            "before the overload",
            usual,
            Goal("at_least", 0.99),
            bounded_by=machine,
        ),
    ]
