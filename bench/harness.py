"""Measuring on a machine that is also used by others.

Three rules. Compared cases run interleaved (A, B, A, B, ...), so that a busy minute hits all of
them. A figure is the median of its repetitions, shown with its spread (fastest to 90th percentile).
A latency under load counts from the planned time of the query, not from when a late sender sent it.
"""

import asyncio
import collections
import json
import statistics
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from clipper.load.machine import machine

# -- rows


@dataclass(frozen=True)
class Goal:
    """A bound of a figure relative to its anchor, or of the figure itself.

    kind: "times_better": at least `bound` times as good as the anchor; "at_most" and "at_least":
    bound value / anchor; "value_at_most" and "value_at_least": bound the value alone.
    """

    kind: str
    bound: float

    def __str__(self) -> str:
        words = {"times_better": "≥ {} x better", "at_most": "≤ {} x", "at_least": "≥ {} x"}
        return words.get(self.kind, "≤ {}" if self.kind == "value_at_most" else "≥ {}").format(
            f"{self.bound:g}"
        )


@dataclass(frozen=True)
class Row:
    """One figure. `ratio` is what `goal` bounds: times better, or value / against_value. Without a
    goal `met` is None.

    question: the group in which it is shown. bounded_by: what keeps it from its goal, shown when it
    falls short. missing: why there is no figure (then `value` is NaN), such as a peer that is not
    installed.
    """

    name: str
    value: float
    unit: str
    against: str = ""
    against_value: float | None = None
    ratio: float | None = None
    goal: str = ""
    met: bool | None = None
    note: str = ""
    spread: str = ""
    question: str = ""
    bounded_by: str = ""
    missing: str = ""


SPIN_S = 200e-6  # before a query is due, a blocking sender spins instead of sleeping
RATES = ("/s", "x", "%", "share")  # units of which more is better; of all others less is


def row(
    name: str,
    value: "float | Sample",
    unit: str,
    against: str = "",
    against_value: "float | Sample | None" = None,
    goal: Goal | None = None,
    note: str = "",
    bounded_by: str = "",
) -> Row:
    """Build a row. Samples are replaced by their medians and give the spread. bounded_by: kept
    if the goal is missed.
    """
    spread = value.spread() if isinstance(value, Sample) else ""
    figure = value.median if isinstance(value, Sample) else float(value)
    anchor = against_value.median if isinstance(against_value, Sample) else against_value
    ratio = None
    if anchor:
        better = (
            figure / anchor if unit.endswith(RATES) else anchor / figure if figure else float("inf")
        )
        ratio = better if goal and goal.kind == "times_better" else figure / anchor
    met = is_met(goal, figure, ratio)
    why = bounded_by if met is False else ""
    return Row(
        name,
        figure,
        unit,
        against,
        anchor,
        ratio,
        str(goal or ""),
        met,
        note,
        spread,
        bounded_by=why,
    )


FAILED = "failed"  # how `missing` begins when a measurement raised


class UnknownRows(Exception):
    """--rows names an unknown group."""


def absent(name: str, unit: str, missing: str, against: str = "", goal: Goal | None = None) -> Row:
    """Build a row without a figure, and with the reason."""
    return Row(name, float("nan"), unit, against, goal=str(goal or ""), missing=missing)


def is_met(goal: Goal | None, value: float, ratio: float | None) -> bool | None:
    """Return True if the goal is met; None without a goal or an anchor."""
    if goal is None:
        return None
    bounded = value if goal.kind.startswith("value") else ratio
    if bounded is None:
        return None
    return bounded <= goal.bound if goal.kind.endswith("at_most") else bounded >= goal.bound


# -- samples


@dataclass(frozen=True)
class Sample:
    """Repetitions of one measurement."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """Return the median."""
        return statistics.median(self.values)

    @property
    def min(self) -> float:
        """Return the smallest value."""
        return min(self.values)

    @property
    def p90(self) -> float:
        """Return the 90th percentile."""
        return sorted(self.values)[min(round(0.9 * len(self.values)), len(self.values) - 1)]

    def spread(self) -> str:
        """Format the range from the minimum to the 90th percentile."""
        return f"{short(self.min)}-{short(self.p90)}"

    def map(self, fn: Callable[[float], float]) -> "Sample":
        """Convert each repetition, for example to another unit."""
        return Sample(tuple(fn(value) for value in self.values))

    def plus(self, other: "Sample") -> "Sample":
        """Add two samples, repetition by repetition."""
        return Sample(tuple(a + b for a, b in zip(self.values, other.values, strict=True)))


def interleave(
    cases: Mapping[str, Callable[[], float]], repetitions: int = 7, warmups: int = 1
) -> dict[str, Sample]:
    """Run every case in turn, `repetitions` times. A case returns its figure, in any unit."""
    found: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(-warmups, repetitions):
        for name, run in cases.items():
            figure = run()
            if turn >= 0:
                found[name].append(figure)
    return {name: Sample(tuple(values)) for name, values in found.items()}


# -- closed loop: what one query costs when the caller waits for answers. Each returns nanoseconds a
# query.


class FutureLike(Protocol):
    def result(self, timeout: float | None = None) -> Any: ...


Predict = Callable[[Any], FutureLike]


Clock = Callable[[], int]
# for what one thread does alone: being put off the core is no price of it
CPU: Clock = time.thread_time_ns


def per_call_ns(
    predict: Predict, inputs: Sequence[Any], clock: Clock = time.perf_counter_ns
) -> float:
    """Predict and wait, one after another; return ns per query: a cache hit for known inputs,
    else a round trip.
    """
    begun = clock()
    for x in inputs:
        predict(x).result()
    return (clock() - begun) / len(inputs)


def window_ns(predict: Predict, inputs: Sequence[Any], outstanding: int = 1000) -> float:
    """Keep `outstanding` queries in flight and wait for the oldest; return ns per query."""
    waiting: collections.deque[FutureLike] = collections.deque()
    begun = time.perf_counter_ns()
    for x in inputs:
        if len(waiting) == outstanding:
            waiting.popleft().result()
        waiting.append(predict(x))
    while waiting:
        waiting.popleft().result()
    return (time.perf_counter_ns() - begun) / len(inputs)


def awaited_ns(
    predict: Callable[[Any], Awaitable[Any]], inputs: Sequence[Any], uvloop: bool = True
) -> float:
    """Predict and await, one after another, on uvloop or asyncio; return ns per query."""

    async def run() -> float:
        for x in inputs[: len(inputs) // 10 + 1]:  # the loop's own first steps are not the question
            await predict(x)
        begun = time.perf_counter_ns()
        for x in inputs:
            await predict(x)
        return (time.perf_counter_ns() - begun) / len(inputs)

    with asyncio.Runner(loop_factory=loop_factory(uvloop)) as runner:
        return runner.run(run())


def loop_factory(uvloop: bool) -> Callable[[], asyncio.AbstractEventLoop]:
    """Return the factory of uvloop's or asyncio's event loops."""
    if not uvloop:
        return asyncio.new_event_loop
    import uvloop as fast_loop

    return fast_loop.new_event_loop


# -- open loop: queries come when they come


@dataclass
class Load:
    """Result of an open-loop run. Latencies in microseconds from the planned arrival; NaN for a
    failed query.
    """

    seconds: float
    latencies_us: NDArray[np.float64]
    is_default: NDArray[np.bool_]  # of each answer: it was the application's default
    errors: collections.Counter[str] | None = None
    # p99 of how late the sender itself was: above some 10 % of the SLO the run says little
    sender_late_us: float = 0.0

    @property
    def offered(self) -> int:
        """Return the number of queries."""
        return len(self.latencies_us)

    @property
    def defaults(self) -> int:
        """Return the number of answers that were the application's default."""
        return int(self.is_default.sum())

    def quantile_us(self, share: float) -> float:
        """Return a quantile of the latencies of answered queries."""
        answered = self.latencies_us[~np.isnan(self.latencies_us)]
        return float(np.quantile(answered, share)) if len(answered) else float("nan")

    def within(self, slo_us: float) -> int:
        """Return the number of queries answered within the SLO."""
        return int(np.sum(self.latencies_us <= slo_us))

    def goodput_per_s(self, slo_us: float) -> float:
        """Return predictions within the SLO per second, without defaults."""
        return float(np.sum((self.latencies_us <= slo_us) & ~self.is_default)) / self.seconds


def send_blocking(times: Iterable[float], send: Callable[[int, float], None]) -> float:
    """Call `send(number, due)` at each of `times` from this thread; return the start.

    times: seconds after the start. due, start: seconds of time.perf_counter. The thread sleeps
    until shortly before a query is due, then spins: exact to some microseconds, at the cost of a
    core. `clipper.load.open_loop.send_on_time` does not take one.
    """
    start = time.perf_counter() + 0.01
    for number, offset in enumerate(times):
        due = start + offset
        if (ahead := due - time.perf_counter()) > SPIN_S:
            time.sleep(ahead - SPIN_S / 2)
        while time.perf_counter() < due:
            pass
        send(number, due)
    return start


def open_loop(
    predict: Callable[[Any], Any],
    inputs: Sequence[Any],
    times: Iterable[float],
    is_default: Callable[[Any], bool] = lambda answer: bool(getattr(answer, "is_default", False)),
    patience_s: float = 10.0,
) -> Load:
    """Send `inputs` repeatedly at `times`, without waiting for answers; `predict` returns
    futures.
    """
    when = np.asarray(list(times))
    latencies = np.full(len(when), np.nan)
    lateness = np.zeros(len(when))
    seconds, is_defaults = float(when[-1]) if len(when) else 1e-9, np.zeros(len(when), np.bool_)
    load = Load(seconds, latencies, is_defaults, collections.Counter())
    left, lock, finished = len(when), threading.Lock(), threading.Event()

    def note(future: Any, index: int, due: float) -> None:
        nonlocal left
        ended = time.perf_counter()
        try:
            answer = future.result()
            default, error = is_default(answer), ""
        except Exception as failure:
            default, error = False, type(failure).__name__
        with lock:
            if error:
                load.errors[error] += 1  # type: ignore[index]
            else:
                latencies[index] = (ended - due) * 1e6
                is_defaults[index] = default
            left -= 1
            if not left:
                finished.set()

    def send(index: int, due: float) -> None:
        nonlocal left
        lateness[index] = time.perf_counter() - due
        try:
            predict(inputs[index % len(inputs)]).add_done_callback(
                lambda future, index=index, due=due: note(future, index, due)
            )
        except Exception as refusal:  # refused at once: full
            with lock:
                load.errors[type(refusal).__name__] += 1  # type: ignore[index]
                left -= 1

    send_blocking(when, send)
    with lock:
        done = not left
    if not done and not finished.wait(patience_s):
        load.errors["never answered"] += left  # type: ignore[index]
    load.sender_late_us = float(np.quantile(lateness, 0.99) * 1e6) if len(when) else 0.0
    return load


# -- telling


def short(value: float | None) -> str:
    """Format three significant digits: 0.0123, 1.23, 12.3, 123, 12 300, 1.23 M."""
    if value is None:
        return ""
    if abs(value) >= 1e6:
        return f"{value / 1e6:.3g} M"
    if abs(value) >= 1000:
        return f"{float(f'{value:.3g}'):,.0f}".replace(",", " ")
    return f"{value:.3g}"


def cells(r: Row) -> tuple[str, ...]:
    """Return the table cells of a row."""
    if r.missing:
        return (r.name, "-", "", r.against, "", "", r.goal, "-")
    met = {True: "yes", False: "NO", None: ""}[r.met]
    ratio = f"{short(r.ratio)} x" if r.ratio is not None else ""
    return (
        r.name,
        f"{short(r.value)} {r.unit}",
        r.spread,
        r.against,
        short(r.against_value),
        ratio,
        r.goal,
        met,
    )


HEAD = ("", "value", "spread", "against", "anchor", "ratio", "goal", "met")


def remarks(rows: Sequence[Row]) -> list[str]:
    """Return the lines below a table: missing figures, bounds and notes. Rows with the same text
    share a line.
    """
    said: dict[str, list[str]] = {}
    for r in rows:
        bounded = f"falls short, bounded by {r.bounded_by}" if r.bounded_by else ""
        for text in (r.missing, bounded, r.note):
            if text:
                said.setdefault(text, []).append(r.name)
    return [f"{'; '.join(dict.fromkeys(names))}: {text}" for text, names in said.items()]


def table(rows: Sequence[Row]) -> str:
    """Format a text table, grouped by question, with the remarks below."""
    lines = [HEAD, *(cells(r) for r in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
    text = []
    for number, line in enumerate(lines):
        if (
            number
            and rows[number - 1].question
            and (number == 1 or rows[number - 2].question != rows[number - 1].question)
        ):
            text.append(f"-- {rows[number - 1].question}")
        text.append("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip())
    return "\n".join(text + [f"  {remark}" for remark in remarks(rows)])


def markdown(rows: Sequence[Row]) -> str:
    """Format a Markdown table per question for docs/benchmarks.md."""
    text: list[str] = []
    for number, r in enumerate(rows):
        if number == 0 or rows[number - 1].question != r.question:
            text += [
                "",
                f"## {r.question or 'rows'}",
                "",
                "| row | value | spread | against | anchor | ratio | goal | met |",
            ]
            text += ["|---|---|---|---|---|---|---|---|"]
        text.append("| " + " | ".join(cells(r)) + " |")
        if number + 1 == len(rows) or rows[number + 1].question != r.question:
            group = [one for one in rows if one.question == r.question]
            said = [f"- {remark}" for remark in remarks(group)]
            text += ["", *said] if said else []
    return "\n".join(text).strip() + "\n"


def verdict(rows: Sequence[Row]) -> str:
    """Return a line that counts met goals, missed goals and rows without a figure."""
    with_goal = [r for r in rows if r.goal and not r.missing]
    met, gone = sum(r.met is True for r in with_goal), sum(bool(r.missing) for r in rows)
    return (
        f"{met} of {len(with_goal)} goals met, {len(with_goal) - met} short; {gone} of {len(rows)}"
        " rows without a figure"
    )


def tell(rows: Sequence[Row], form: str, title: str = "") -> None:
    """Print the rows. form: "table", "markdown" (a page), or "json" (with the machine on
    stderr).
    """
    below = ", ".join(f"{key} {value}" for key, value in machine().items() if value)
    if form == "json":
        print(json.dumps([finite(asdict(r)) for r in rows], ensure_ascii=False, indent=1))
        print(f"{verdict(rows)}\n{below}", file=sys.stderr)
    elif form == "markdown":
        note = (
            "Medians; the machine may have had other work: believe the ratios (see [how to read a"
            " table](benchmarks.md))."
        )
        print(
            f"# {title}\n\n{time.strftime('%Y-%m-%d')}, {below}."
            f" {note}\n\n{verdict(rows)}.\n\n{markdown(rows)}",
            end="",
        )
    else:
        print(f"{table(rows)}\n{verdict(rows)}\n{below}")


def finite(fields: dict[str, Any]) -> dict[str, Any]:
    """Replace NaN and infinity, which JSON lacks, by None."""
    return {
        key: None if isinstance(v, float) and not np.isfinite(v) else v for key, v in fields.items()
    }
