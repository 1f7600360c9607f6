"""Batch time of a model for 1, 2, 4, ... rows, a line fitted to it, and the batch size and replicas
that an SLO and a rate need.

The model runs in its own container on its own server with static batching: a batch waits until it
is complete and is sent alone. Times are the engine's, from sending a batch to its reply, in whole
microseconds; a single time is exact to about 30 us.
"""

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from clipper.errors import ClipperError, InvalidInput
from clipper.load.inputs import rows_of
from clipper.load.measurement import quantile
from clipper.metrics.samples import Stats
from clipper.types import InputType, UserValue

if TYPE_CHECKING:
    from clipper.server import ClipperServer
    from clipper_core.engine.model import Model as CoreModel

_WARM = 2
_TURNS_MIN, _TURNS_MAX = 5, 60
_TOO_LONG_S = 5.0  # after a batch this slow no larger one is tried
_EXACT = 16  # the engine's mean is exact up to this count, then exponential
_HOLD_US = 2000
_USED = 0.8  # planned utilization of a replica; more causes queues
_PATIENCE_S = 120.0


@dataclass(frozen=True)
class Point:
    """Times of a batch size in ms. turns: number of measurements."""

    batch: int
    p50_ms: float
    p99_ms: float
    turns: int

    @property
    def rows_per_s(self) -> float:
        """Return the throughput at the median time."""
        return self.batch / self.p50_ms * 1000 if self.p50_ms else math.inf


@dataclass(frozen=True)
class LatencyFit:
    """The line base_ms + row_ms * rows. error: mean relative error."""

    base_ms: float
    row_ms: float
    error: float

    def __str__(self) -> str:
        return (
            f"{self.base_ms:.3g} ms + {self.row_ms * 1000:.3g} us a row (off by {self.error:.0%} on"
            " average)"
        )


@dataclass(frozen=True)
class Advice:
    """A recommendation in words. batch 0: no batch size meets the SLO."""

    batch: int
    replicas: int
    message: str


OnProgress = Callable[[int, int, int], None]  # batch, turn, of so many


def profile(
    target: object,
    input: str,
    text: str,
    most: int,
    code: Sequence[str],
    seconds: float,
    on_progress: OnProgress,
    slo_ms: float = 0.0,
) -> list[Point]:
    """Deploy `target` on a temporary server and measure it.

    input: input type, if the target does not declare it. text: rows (see inputs.rows_of). most:
    largest batch. seconds: per size. Ctrl-C ends with the results so far.

    Raises: the errors of deploy.
    """
    from clipper.config import load
    from clipper.server import ClipperServer

    batching = {"mode": "static", "size_max": 2 * most, "delay_us": _HOLD_US}
    with ClipperServer(load(None, {}, batching=batching)).start() as server:
        model = server.deploy("profiled", target, input=input or None, code=code, cache=False)
        type_ = server.catalog.view.model("profiled").input
        if type_.dtype == "any" and model.describe_input() != "any":
            type_ = InputType.parse(model.describe_input())
        rows = rows_of(text, type_)
        return _measured(
            server, model, _repeated(rows, type_, most), most, seconds, on_progress, slo_ms
        )


def _repeated(rows: Sequence[object], type_: InputType, most: int) -> list[object] | np.ndarray:
    many = [rows[i % len(rows)] for i in range(most)]
    if type_.named is not None:
        return many
    if type_.dtype in ("any", "str", "bytes") or type_.variable:
        return many
    kind = {"f": "float", "i": "int", "u": "uint"}.get(type_.dtype[0], "")
    return np.array(many, f"{kind}{type_.dtype[1:]}" if kind else "bool")


def _measured(
    server: "ClipperServer",
    model: "CoreModel",
    rows: UserValue,
    most: int,
    seconds: float,
    on_progress: OnProgress,
    slo_ms: float,
) -> list[Point]:
    points: list[Point] = []
    size = 1
    try:
        while size <= most:
            times = _times(
                server, model, rows[:size], seconds, functools.partial(on_progress, size)
            )
            points.append(Point(size, quantile(times, 0.5), quantile(times, 0.99), len(times)))
            if points[-1].p50_ms > _TOO_LONG_S * 1000 or (
                slo_ms and points[-1].p50_ms > 2 * slo_ms
            ):
                break
            size *= 2
    except KeyboardInterrupt:
        if not points:
            raise
    return points


def _times(
    server: "ClipperServer",
    model: "CoreModel",
    rows: UserValue,
    seconds: float,
    on_progress: Callable[[int, int], None],
) -> NDArray[np.float64]:
    """Return the time of each turn in ms."""
    found: list[float] = []
    began_s = time.monotonic()
    mean_us, count = _seen(server, len(rows))
    for turn in range(-_WARM, _TURNS_MAX):
        if turn >= _TURNS_MIN and time.monotonic() - began_s > seconds:
            break
        _send(model, rows)
        then_us, then = mean_us, count
        until_s = time.monotonic() + 1.0
        # statistics are updated shortly after the answer
        while count == then and time.monotonic() < until_s:
            mean_us, count = _seen(server, len(rows))
        if count != then + 1:
            continue  # the rows were split or joined with others
        took_us = then_us + (mean_us - then_us) * min(count, _EXACT)
        if turn >= 0:
            found.append(max(took_us, 1.0) / 1000)
            on_progress(turn + 1, _TURNS_MAX)
    if not found:
        raise ClipperError(
            f"batches of {len(rows)} rows were never sent as one.",
            hint="Try a smaller --batch-max.",
        )
    return np.array(found)


def _send(model: "CoreModel", rows: UserValue) -> None:
    slo_ms = _PATIENCE_S * 1000
    future = (
        model.predict_many(rows, slo_ms=slo_ms)
        if len(rows) > 1
        else model.predict(rows[0], slo_ms=slo_ms)
    )
    future.result(_PATIENCE_S)


def _seen(server: "ClipperServer", size: int) -> tuple[float, int]:
    """Return the engine's mean time for a batch size, and its count."""
    replicas = server.stats()["models"]["profiled:1"]["replicas"]
    found = [
        (us, n) for one in replicas for least, us, n in one.get("profile", ()) if least == size
    ]
    return found[0] if found else (0.0, 0)


def seen_by(stats: Stats) -> list[Point]:
    """Return what a running server has measured of a model, by powers of two; p50 and p99 are
    recent means.
    """
    sums: dict[int, tuple[float, int]] = {}
    for replica in stats.get("replicas", ()):
        for least, us, n in replica.get("profile", ()):
            total, count = sums.get(least, (0.0, 0))
            sums[least] = total + us * n, count + n
    return [
        Point(size, total / n / 1000, total / n / 1000, n)
        for size, (total, n) in sorted(sums.items())
        if n
    ]


# -- what follows


def fit_latency(points: Sequence[Point]) -> LatencyFit:
    """Fit a line by least squares of the relative error, so that every batch size counts the
    same. Both coefficients are at least 0.
    """
    if not points:
        raise InvalidInput("nothing was measured.")
    x = np.array([point.batch for point in points], float)
    y = np.array([max(point.p50_ms, 1e-6) for point in points])
    if len(points) == 1:
        return LatencyFit(float(y[0]), 0.0, 0.0)
    base, row = np.linalg.lstsq(np.column_stack([1 / y, x / y]), np.ones(len(x)), rcond=None)[0]
    if row < 0:
        base, row = float(np.mean(y)), 0.0
    elif base < 0:
        base, row = 0.0, float(np.sum(x / y) / np.sum((x / y) ** 2))
    error = float(np.mean(np.abs((base + row * x) / y - 1)))
    return LatencyFit(float(base), float(row), error)


def advice(name: str, points: Sequence[Point], slo_ms: float, rate: float = 0.0) -> Advice:
    """Recommend a batch size and replicas.

    The best batch is the most efficient one of which two fit into the SLO, since a query may wait
    for one batch before its own. Replicas are planned at 80 % utilization.
    """
    one = points[0]
    if one.p50_ms > slo_ms:
        text = (
            f"{name} needs {one.p50_ms:.3g} ms for one row; the SLO is {slo_ms:g} ms, so every"
            " answer will be the default. Raise slo_ms, or lower the cost."
        )
        return Advice(0, 0, text)
    fitting = [point for point in points if 2 * point.p99_ms <= slo_ms]
    tight = "" if fitting else ", which fits into the SLO alone, but not behind another batch"
    best = max(fitting or [one], key=lambda point: point.rows_per_s)
    capacity = best.rows_per_s * _USED
    many = f"{capacity:.0f} rows a second a replica, at {_USED:.0%} of what it can"
    text = f"for an SLO of {slo_ms:g} ms: batches of {best.batch}{tight}: {many}"
    if not rate:
        return Advice(best.batch, 1, f"{text}.")
    replicas = max(1, math.ceil(rate / capacity))
    many = "replica" if replicas == 1 else "replicas"
    return Advice(best.batch, replicas, f"{text}; {rate:g} rows a second need {replicas} {many}.")


def bars(points: Sequence[Point], width: int = 40) -> list[str]:
    """Draw a terminal plot on a logarithmic axis: a bar for p50, a mark for p99."""
    low = min(point.p50_ms for point in points) / 2
    high = max(max(point.p99_ms for point in points), low * 4)

    def at(value: float) -> int:
        return round(width * math.log(max(value, low) / low) / math.log(high / low))

    lines = []
    for point in points:
        p50, p99 = at(point.p50_ms), at(point.p99_ms)
        bar = "█" * p50 + "─" * max(p99 - p50 - 1, 0) + ("│" if p99 > p50 else "")
        lines.append(f"{point.batch:>6} {bar:<{width + 1}} {point.p50_ms:.3g} ms")
    return lines
