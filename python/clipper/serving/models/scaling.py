"""Autoscaling: how many replicas a model needs, and which are stuck. Queries never wait for it.

The rule is two pure functions over an observation of the model. It scales up when the wait for a
free replica takes a given share of the SLO for some time, or when queries are refused or dropped:
then by as many replicas as the measured rate and latency profile require, at least one. It scales
down after a longer calm, by one, when the remaining replicas would not be too busy. Between the two
thresholds nothing changes.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from clipper.component import Backoff, Health, Stop, Worker
from clipper.errors import InvalidInput
from clipper.metrics.samples import Stats
from clipper.settings.server import ServerSettings
from clipper.types import VersionedModel

_log = logging.getLogger(__name__)
_SMOOTH = 0.3  # weight of the newest look in the wait that is judged
_LOST_SHARE = 0.01  # of what is offered: more refused or dropped than that is pressure
_LOST = ("FULL", "DROPPED", "DEADLINE", "NO_REPLICA")


@dataclass(frozen=True, slots=True)
class Rule:
    """Thresholds of the rule. delay_share: wait, as a share of the SLO. busy_share: share of its
    time that a replica may work.
    """

    up_after_s: float = 1.0
    down_after_s: float = 30.0
    delay_share: float = 0.3
    busy_share: float = 0.7

    @classmethod
    def of(cls, server: ServerSettings) -> "Rule":
        """Return the rule of a server's settings."""
        return cls(
            server.scale_up_after_ms / 1000,
            server.scale_down_after_ms / 1000,
            server.scale_delay_share,
            server.scale_busy_share,
        )


@dataclass(frozen=True, slots=True)
class Load:
    """Observed load of a model.

    offered_per_s: rows that needed an evaluation; lost_share: share of these that were refused,
    dropped or late. row_us: time of one replica per row in batches of the usual size; 0 while
    unknown. delay_us: wait for a free replica.
    """

    offered_per_s: float = 0.0
    lost_share: float = 0.0
    row_us: float = 0.0
    delay_us: float = 0.0
    slo_us: float = 0.0
    has: int = 0


@dataclass(frozen=True, slots=True)
class Trend:
    """State between observations: when pressure, or calm, began; None while there is none."""

    wanted: int
    delay_us: float = 0.0
    pressed_s: float | None = None
    calm_s: float | None = None


def needed(load: Load, busy_share: float) -> int:
    """Return the number of replicas with which each is busy for at most `busy_share` of its time; 1
    at least."""
    return max(1, math.ceil(load.offered_per_s * load.row_us / 1e6 / busy_share - 1e-9))


def follow(trend: Trend, load: Load, least: int, most: int, rule: Rule, now_s: float) -> Trend:
    """Return the next trend; its `wanted` lies within the bounds, and changes only after a while of
    pressure or calm."""
    wanted = min(max(trend.wanted, least), most)
    delay = trend.delay_us + _SMOOTH * (load.delay_us - trend.delay_us)
    trend = replace(trend, wanted=wanted, delay_us=delay)
    if (
        load.has < wanted
    ):  # one is on its way: nothing can be judged by what those that are there suffer
        return replace(trend, pressed_s=None, calm_s=None)
    if delay > rule.delay_share * load.slo_us or load.lost_share > _LOST_SHARE:
        began = now_s if trend.pressed_s is None else trend.pressed_s
        if now_s - began < rule.up_after_s:
            return replace(trend, pressed_s=began, calm_s=None)
        wanted = min(most, max(wanted + 1, needed(load, rule.busy_share)))
        return replace(trend, wanted=wanted, pressed_s=None, calm_s=None)
    if needed(load, rule.busy_share) >= wanted:
        return replace(trend, pressed_s=None, calm_s=None)
    began = now_s if trend.calm_s is None else trend.calm_s
    if now_s - began < rule.down_after_s:
        return replace(trend, pressed_s=None, calm_s=began)
    return replace(trend, wanted=max(least, wanted - 1), pressed_s=None, calm_s=None)


def load_of(before: Stats, now: Stats, span_s: float) -> Load:
    """Return the load between two rows of `stats()["models"]`."""
    lost = sum(now["ended"][name] - before["ended"][name] for name in _LOST)
    offered = lost + now["evaluated"] - before["evaluated"]
    ready = [row for row in now["replicas"] if row["state"] == "ready"]
    rows_us = [
        (row["fit_us"][0] + row["fit_us"][1] * row["limit"]) / max(row["limit"], 1) for row in ready
    ]
    return Load(
        offered_per_s=offered / span_s,
        lost_share=lost / offered if offered else 0.0,
        row_us=sum(rows_us) / len(rows_us) if rows_us else 0.0,
        delay_us=now["delay_us"],
        slo_us=now["slo_us"],
        has=len(ready),
    )


def replica_bounds(name: str, replicas: int | tuple[int, int], most: int) -> tuple[int, int]:
    """Return (least, most) replicas from what a user gave; most is 0 for a fixed number.

    Raises InvalidInput.
    """
    least, bound = replicas if isinstance(replicas, tuple) and len(replicas) == 2 else (replicas, 0)
    if not all(
        isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= most for n in (least, bound)
    ):
        hint = "See limits.replicas_max."
        raise InvalidInput(
            f"replicas={replicas!r} of model {name!r}: 0 to {most} are possible.", hint=hint
        )
    if isinstance(replicas, tuple) and not 1 <= least <= bound:
        hint = "Give (least, most) with 1 <= least <= most, or a number."
        raise InvalidInput(f"replicas={replicas!r} of model {name!r} are no bounds.", hint=hint)
    return least, bound


class StuckWatch:
    """Replicas that are overdue with a batch for longer than `stuck_s`, though their heart beats.
    Threads: one."""

    def __init__(self, stuck_s: float) -> None:
        self._stuck_s = stuck_s
        self._since: dict[tuple[VersionedModel, int, int], tuple[int, float]] = {}

    def check(
        self, rows: Iterable[tuple[VersionedModel, Stats]], now_s: float
    ) -> list[tuple[VersionedModel, int, int]]:
        """Return (model, number, pid) of the replicas to restart; each is named once for each batch
        that it is stuck with."""
        since, found = {}, []
        for model, row in rows:
            if not (row.get("suspect") and row.get("in_flight")):
                continue
            key = model, row["number"], row["pid"]
            batches, began = self._since.get(key, (-1, now_s))
            if batches != row["batches"]:
                batches, began = row["batches"], now_s
            if now_s - began >= self._stuck_s:
                found.append(key)
                began = math.inf  # named
            since[key] = batches, began
        self._since = since
        return found


@dataclass(frozen=True, slots=True)
class Reading:
    """One model as `Scaling` is shown it: its bounds (0 and 0: fixed) and its row of
    `stats()["models"]`."""

    least: int
    most: int
    stats: Stats


class Scaling:
    """Checks all models at an interval, from its own thread. Threads: any.

    read_stats: returns the replicas of all models. scale: sets the number of replicas of a model,
    with a reason. restart: kills a replica, which its supervisor starts again.
    """

    def __init__(
        self,
        server: ServerSettings,
        read_stats: Callable[[], Mapping[VersionedModel, Reading]],
        scale: Callable[[VersionedModel, int, str], None],
        restart: Callable[[VersionedModel, int, int], None],
    ) -> None:
        self._read_stats, self._scale, self._restart = read_stats, scale, restart
        self._pause_s = server.scale_interval_ms / 1000
        self._rule = Rule.of(server)
        self._stuck = StuckWatch(server.stuck_s)
        self._trends: dict[VersionedModel, Trend] = {}
        self._before: dict[VersionedModel, Stats] = {}
        self._checked_s = 0.0
        self._worker = Worker(
            "clipper-scaling", self._run, again=Backoff(self._pause_s, self._pause_s)
        )

    def start(self) -> None:
        """Start the thread. Raises NotStarted."""
        self._worker.start()

    def stop(self) -> None:
        """Stop the thread. Idempotent."""
        self._worker.end()

    def health(self) -> list[Health]:
        """Return the state of the thread."""
        return [self._worker.health()]

    def wanted(self, model: VersionedModel, otherwise: int) -> int:
        """Return how many replicas the model should have now."""
        trend = self._trends.get(model)
        return trend.wanted if trend is not None else otherwise

    def _run(self, stop: Stop) -> None:
        while not stop.wait(self._pause_s):
            try:
                self.check(time.monotonic())
            except Exception:  # one model's trouble must not end the watch over all
                _log.exception("reading the load of the models failed")

    def check(self, now_s: float) -> None:
        """Check once; the thread does nothing else."""
        readings, span_s = self._read_stats(), now_s - self._checked_s
        self._checked_s = now_s
        rows = [(model, row) for model, one in readings.items() for row in one.stats["replicas"]]
        for model, number, pid in self._stuck.check(rows, now_s):
            self._restart(model, number, pid)
        followed = {model: one for model, one in readings.items() if one.most}
        self._trends = {model: trend for model, trend in self._trends.items() if model in followed}
        for model, one in followed.items():
            before = self._before.get(model)
            trend = self._trends.get(model, Trend(one.least))
            if before is not None and span_s > 0:
                load = load_of(before, one.stats, span_s)
                trend = self._follow(model, trend, load, one, now_s)
            self._trends[model] = trend
        self._before = {model: one.stats for model, one in followed.items()}

    def _follow(
        self, model: VersionedModel, trend: Trend, load: Load, one: Reading, now_s: float
    ) -> Trend:
        after = follow(trend, load, one.least, one.most, self._rule, now_s)
        if after.wanted != trend.wanted:
            why = (
                f"{load.offered_per_s:.0f} rows/s, waits {after.delay_us / 1000:.1f} ms of"
                f" {load.slo_us / 1000:g} ms"
            )
            if load.lost_share > _LOST_SHARE:
                why += f", {load.lost_share:.0%} lost"
            self._scale(model, after.wanted, why)
        return after


class Expected:
    """Earliest times at which the next replica of each model can connect. Threads: any.

    expect: informs the engine that no replica comes before a time in microseconds of `now_us()`; 0:
    unknown.
    """

    NEVER_US = 1 << 62
    _SOONEST = 0.5  # of the fastest start that was seen

    def __init__(
        self, expect: Callable[[VersionedModel, int], None], now_us: Callable[[], int]
    ) -> None:
        self._expect, self._now_us = expect, now_us
        self._guard = threading.Lock()
        self._started_us: dict[tuple[VersionedModel, int], int] = {}
        self._load_us: dict[VersionedModel, int] = {}
        self._whens_us: dict[VersionedModel, dict[int, int]] = {}

    def starting(self, model: VersionedModel, number: int, pause_s: float = 0.0) -> None:
        """Note that a process starts, after a pause."""
        with self._guard:
            starts_us = self._now_us() + int(pause_s * 1e6)
            self._started_us[model, number] = starts_us
            self._whens_us.setdefault(model, {})[number] = starts_us + int(
                self._SOONEST * self._load_us.get(model, 0)
            )
            self._notify(model)

    def connected(self, model: VersionedModel, numbers: Iterable[int]) -> None:
        """Note that these replicas are connected."""
        with self._guard:
            for number in numbers:
                started_us = self._started_us.pop((model, number), None)
                if started_us is not None:
                    took = max(self._now_us() - started_us, 0)
                    self._load_us[model] = min(took, self._load_us.get(model, took))

    def failed(self, model: VersionedModel, number: int) -> None:
        """Record that a replica failed and is not started again."""
        with self._guard:
            self._started_us.pop((model, number), None)
            self._whens_us.setdefault(model, {})[number] = self.NEVER_US
            self._notify(model)

    def stopped(self, model: VersionedModel, number: int) -> None:
        """Note that a replica was stopped on request; another may be started."""
        with self._guard:
            self._started_us.pop((model, number), None)
            self._whens_us.get(model, {}).pop(number, None)
            self._notify(model)

    def _notify(self, model: VersionedModel) -> None:
        self._expect(model, min(self._whens_us.get(model, {}).values(), default=0))
