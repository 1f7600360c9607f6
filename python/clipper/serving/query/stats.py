"""Statistics of an application's queries, counted while they are answered:
`server.stats()["applications"][name]`.

Every answer costs an addition for the query, the answer, the step that decided it and each model
used, and a record of its duration. The rest is counted only when something was missing, or within a
budget: at most `_PAIRS_RATE` outputs are compared per second, so agreement is exact at a low rate
and sampled at a high one. Counts survive changes of the catalog; they end with the server or the
application.
"""

import heapq
import itertools
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np

from clipper.clock import wall_time_us
from clipper.metrics.samples import Stats
from clipper.selection import Combined, Observation, Prediction
from clipper.selection.learning.batch_learning import Column, ObservationRows, losses_by_model
from clipper.selection.policy import Predictions, agrees, is_number, is_usable, loss, losses
from clipper.serving.rollout.observers import Late, Watch, Watched
from clipper.serving.rollout.roles import PRIMARY, Role, RoleAssignment
from clipper.types import UserValue, VersionedModel
from clipper_core.application.output_means import OutputMeans
from clipper_core.engine.model import Model as CoreModel
from clipper_core.learning.answer_counts import (
    AnswerCounts,
    Bucket,
    DefaultCounts,
    StatusCounts,
)
from clipper_core.learning.label_feedback import LabelCounts, Mean
from clipper_core.results.future import Future
from clipper_core.runtime.histogram import Counter, Gauge, LatencyHistogram, Snapshot
from clipper_core.runtime.status import Status

_PAIRS_RATE, _PAIRS_BURST = (
    5_000.0,
    5_000.0,
)  # of outputs compared: 1 us each, so half a per cent of a core
_FEEDBACK_RATE, _FEEDBACK_BURST = 20_000.0, 20_000.0  # of feedbacks looked at, other than labels
_MODELS_MAX = 16  # in the matrix
SLOWEST_QUERIES_MAX: Final = 5  # between two readings
_TASKS_MAX = 16  # that are listed of one of these
_OVERLOAD = (Status.FULL, Status.DROPPED)


class Slowest:
    """The slowest queries of an application: what to look at when the p99 is too high.

    An answer costs a comparison with the bar; the few above it are written down. `take` returns
    them and lowers the bar, so that a reader that calls it once a second has the slowest of each
    second. Without a reader the bar only rises, and soon no query is above it.

    bar: a query that took longer, in microseconds, is among the slowest. Threads: any.
    """

    __slots__ = ("_heap", "_lock", "_numbers", "bar")

    def __init__(self) -> None:
        self.bar = Gauge(-1)
        self._heap: list[tuple[int, int, dict[str, object]]] = []
        self._lock = threading.Lock()
        self._numbers = itertools.count()

    def add(
        self,
        future: Future,
        models: Sequence[VersionedModel],
        used: Sequence[VersionedModel],
        reason: str,
    ) -> None:
        """Add a query that took longer than the bar, on the thread that answers it. models:
        queried, task by task."""
        took_us = future.latency_us
        n = min(len(models), len(future), _TASKS_MAX)
        waited, took, ended = future.latencies_us()[:n].tolist(), took_us, wall_time_us()
        tasks = [
            {
                "model": str(models[i]),
                "status": future.status(i).name.lower(),
                "us": _shown(future.status(i), waited[i], took),
            }
            for i in range(n)
        ]
        row = {
            "number": f"{future.id:x}",
            "time_us": ended,
            "us": took_us,
            "tasks": tasks,
            "used": [str(one) for one in used],
            "reason": reason[:200],
        }
        with self._lock:
            entry = (took_us, next(self._numbers), row)
            if len(self._heap) < SLOWEST_QUERIES_MAX:
                heapq.heappush(self._heap, entry)
            elif took_us > self._heap[0][0]:
                heapq.heapreplace(self._heap, entry)
            if len(self._heap) == SLOWEST_QUERIES_MAX:
                self.bar.value = self._heap[0][0]

    def take(self) -> list[dict[str, object]]:
        """Return the slowest queries since the last call, the slowest first."""
        with self._lock:
            found, self._heap = self._heap, []
            self.bar.value = -1
        return [row for _, _, row in sorted(found, key=lambda entry: -entry[0])]


class _OfModel:
    """One model's counts within an application."""

    __slots__ = ("agreement", "feedback", "missing", "unused", "used", "watch", "wins")

    def __init__(self) -> None:
        self.used, self.unused, self.wins = Counter(), Counter(), Counter()
        self.missing = StatusCounts()
        self.agreement = Mean()
        self.feedback = Mean()
        self.watch = Watch()


class ApplicationCounters:
    """Counters of one application, whatever its models are now. Threads: any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.queries, self.answered = Counter(), Counter()
        self.watched, self.means = Watched(clock), OutputMeans()
        self.since_us = wall_time_us()
        self.duration = LatencyHistogram()
        self.slowest = Slowest()
        self.decided: dict[str, Counter] = {}
        self._lock = threading.Lock()
        self._models: dict[VersionedModel, _OfModel] = {}
        self.defaults = DefaultCounts()
        self._pairs: dict[tuple[VersionedModel, VersionedModel], Mean] = {}
        self._right = Mean()
        self.labels = LabelCounts(self._models, self._right)
        self.comparing = Bucket(_PAIRS_RATE, _PAIRS_BURST, clock())
        self._feedback_tokens = Bucket(_FEEDBACK_RATE, _FEEDBACK_BURST, clock())

    def of(self, model: VersionedModel) -> _OfModel:
        """Return the counters of a model, made at first use."""
        found = self._models.get(model)
        if found is None:
            with self._lock:
                found = self._models.setdefault(model, _OfModel())
        return found

    def for_models(
        self,
        models: Sequence[VersionedModel],
        assignment: RoleAssignment | None,
        rolling: Collection[VersionedModel] = (),
    ) -> "ApplicationStats":
        """Return the statistics for queries from now on.

        Models that are no longer linked are forgotten, except those of a rollout's other side.
        """
        if assignment is not None:
            self.watched.canaries = frozenset(
                model for model, role in assignment.roles.items() if role.kind == "canary"
            )
        stats = ApplicationStats(self, models, assignment)
        models = [*models, *rolling]
        with self._lock:
            for gone in self._models.keys() - models:
                del self._models[gone]
            self.labels.forget()
            self._pairs = {
                pair: mean
                for pair, mean in self._pairs.items()
                if pair[0] in models and pair[1] in models
            }
        self.watched.keep(models)
        self.means.keep(models)
        return stats

    def other_side(
        self, models: Sequence[VersionedModel], assignment: RoleAssignment | None
    ) -> "ApplicationStats":
        """Return the statistics for queries to a rollout's new side. Call for_models() first."""
        if assignment is not None:
            canaries = {model for model, role in assignment.roles.items() if role.kind == "canary"}
            self.watched.canaries = self.watched.canaries | canaries
        return ApplicationStats(self, models, assignment)

    # -- what is counted

    def step(self, name: str) -> Counter:
        """Return the counter of the answers that a step of a decider decided. Names are as many as
        steps.
        """
        found = self.decided.get(name)
        if found is None:
            with self._lock:
                found = self.decided.setdefault(name, Counter())
        return found

    def pairs_of(
        self, models: Sequence[VersionedModel]
    ) -> dict[tuple[VersionedModel, VersionedModel], Mean]:
        """Return how far each two of these models agree; nothing for more than are compared."""
        if len(models) > _MODELS_MAX:
            return {}
        with self._lock:
            return {
                pair: self._pairs.setdefault(pair, Mean())
                for pair in itertools.combinations(models, 2)
            }

    def of_locked(self, model: VersionedModel) -> _OfModel:
        """Return a model's counters. Under the lock."""
        return self._models.setdefault(model, _OfModel())

    def compare(self, arrived: Mapping[VersionedModel, Prediction], answer: object) -> None:
        """Compare each model with the answer, and with the others."""
        models = sorted(arrived)[:_MODELS_MAX]
        close = {model: closeness(arrived[model].output, answer) for model in models}
        pairs = {
            (one, other): closeness(arrived[one].output, arrived[other].output)
            for one, other in itertools.combinations(models, 2)
        }
        with self._lock:
            for model, value in close.items():
                self.of_locked(model).agreement.add(value)
            for pair, value in pairs.items():
                self._pairs.setdefault(pair, Mean()).add(value)

    def on_feedback(self, seen: Observation) -> bool:
        """Count how right each model and the answer was. Returns False when the budget is used
        up.
        """
        truth, predictions = seen.truth, seen.predictions
        if truth.score is None and self.on_label(
            predictions, truth.label, seen.answer, seen.weight
        ):
            return True
        if not self._feedback_tokens.take(self.clock()):
            return False
        lost = losses(seen)
        right = 1.0 - loss(seen.answer, truth.label) if truth.known else float(truth.score or 0.0)
        with self._lock:
            self._right.add(right, seen.weight)
            for model, value in lost.items():
                if model in self._models:
                    self._models[model].feedback.add(1.0 - value, seen.weight)
        return True

    def on_label(
        self, arrived: Predictions, label: object, answer: object, weight: float = 1.0
    ) -> bool:
        """Count a label. Returns False, and counts nothing, if it is not of the type of all outputs
        and of the answer.
        """
        # it runs no Python, so it needs no lock
        return self.labels.count(arrived, label, answer, weight)

    def on_feedback_rows(self, rows: ObservationRows, answers: Column) -> None:
        """Count feedback of many rows: all of it for numeric columns, else as much as the budget
        allows.
        """
        lost = losses_by_model(
            msgspec.structs.replace(
                rows, outputs=(*rows.outputs, answers), arrived=(*rows.arrived, None)
            )
        )
        if lost is None:
            for i in range(len(rows)):
                if not self.on_feedback(
                    msgspec.structs.replace(rows.observation(i), answer=answers[i])
                ):
                    return
            return
        counts, sums = (
            np.count_nonzero(~np.isnan(lost), axis=1).tolist(),
            np.nansum(lost, axis=1).tolist(),
        )
        with self._lock:
            for model, n, total in zip(rows.models, counts, sums, strict=False):
                if n and model in self._models:
                    self._models[model].feedback.add(1.0 - total / n, n)
            self._right.add(
                (counts[-1] - sums[-1]) / len(rows), len(rows)
            )  # an answer of NaN is wrong

    # -- looking in

    def stats(self, stats: "ApplicationStats") -> Stats:
        """Return the statistics: see docs/monitoring.md, "Statistics of an application"."""
        watching = self.watched.stats()
        roles = stats.assignment.roles if stats.assignment is not None else {}
        with self._lock:
            models = {
                str(m): self._stats_of(m, counts, roles)
                for m, counts in sorted(self._models.items())
            }
            pairs = {
                f"{one} {other}": mean.stats()
                for (one, other), mean in sorted(self._pairs.items())
                if mean.n
            }
            right = self._right.stats()
        extra = sum(row["observer"]["sent"] for row in models.values() if "observer" in row)
        tasks = sum(row["used"] + sum(row["missing"].values()) for row in models.values())
        return {
            "since_us": self.since_us,
            "queries": self.queries.value,
            "duration_us": duration(self.duration.snapshot()),
            "latency_us": self.duration.snapshot(),
            "decided_by": {
                name or "nobody": counter.value
                for name, counter in sorted(self.decided.items())
                if counter.value
            },
            "answers": {
                "ok": self.answered.value,
                "default": self.defaults.by_reason(),
                "feedback": right,
            },
            "models": models,
            "agreement": pairs,
            "extra_load_share": extra / tasks if tasks else 0.0,
            **watching,
        }

    def _stats_of(
        self, model: VersionedModel, counts: _OfModel, roles: Mapping[VersionedModel, Role]
    ) -> Stats:
        role = roles.get(model, PRIMARY)
        row: dict[str, object] = {
            "role": role.kind,
            "used": counts.used.value,
            "wins": counts.wins.value,
            **_ends(counts),
            "missing": counts.missing.by_name(),
            "agreement": counts.agreement.stats(),
            "feedback": counts.feedback.stats(),
        }
        if role.observes or counts.watch.sent:
            row["observer"] = counts.watch.stats()
        return row


class ApplicationStats:
    """Statistics of an application for the models that its queries call now. Threads: any."""

    __slots__ = (
        "_decided",
        "_watches",
        "answer_counts",
        "assignment",
        "counters",
    )

    def __init__(
        self,
        counters: ApplicationCounters,
        models: Sequence[VersionedModel],
        assignment: RoleAssignment | None,
    ) -> None:
        self.counters, self.assignment = counters, assignment
        ordered = tuple(sorted(set(models)))
        counts = [counters.of(model) for model in ordered]
        self.answer_counts = AnswerCounts(
            ordered,
            counts,
            counters.pairs_of(ordered),
            counters.answered,
            counters.defaults,
            counters.duration,
            counters.comparing,
            counters.clock,
        )
        self._decided: dict[str, Callable[[], None]] = {}
        self._watches = {model: one.watch for model, one in zip(ordered, counts, strict=True)}

    def watch(
        self,
        cores: Mapping[VersionedModel, CoreModel],
        observers: Sequence[VersionedModel],
        x: object,
        slo_us: int,
        salt: int,
        late: list[tuple[VersionedModel, Future]],
        reader: object = None,
    ) -> None:
        """Send the query to observers whose rate limits allow it. Nothing waits for them. reader:
        an object whose `output_name` is the named output that their futures read."""
        now_s, rests = self.counters.clock(), self.counters.watched.rests_until_s
        for model in observers:
            role = PRIMARY if self.assignment is None else self.assignment.roles[model]
            future = self._watches[model].submit(
                cores[model], x, slo_us, salt, now_s, role, rests, reader
            )
            if future is not None:
                late.append((model, future))

    def count(
        self,
        future: Future,
        models: Sequence[VersionedModel],
        arrived: Mapping[VersionedModel, Prediction],
        combined: Combined,
        reason: str,
        late: Late,
        missing: Collection[VersionedModel],
        decided_by: str,
    ) -> None:
        """Count one answer, on the thread that gets it. models: queried, task by task.  decided_by:
        its step, "" for none."""
        counters, used = self.counters, combined.used
        took_us = future.latency_us
        if self.answer_counts.add(took_us, arrived, used, combined.output, bool(reason)):
            counters.compare(arrived, combined.output)
        if took_us > counters.slowest.bar.value:
            counters.slowest.add(future, models, used, reason)
        try:
            self._decided[decided_by]()
        except KeyError:
            self._decided[decided_by] = counters.step(decided_by).add
            self._decided[decided_by]()
        if reason:
            self._count_default(future, arrived, used)
        if missing:
            self._count_missing(future, models, missing)
        if late:
            counters.watched.add(arrived, combined.output, late)

    def _count_default(
        self,
        future: Future,
        arrived: Mapping[VersionedModel, Prediction],
        used: Sequence[VersionedModel],
    ) -> None:
        """Count a default by its reason: unsure, not finite, or how the first task ended."""
        defaults = self.counters.defaults
        if used:
            defaults.unsure.add()
        elif arrived:
            defaults.not_finite.add()
        else:
            defaults.ended.add(future.status(0))

    def _count_missing(
        self, future: Future, models: Sequence[VersionedModel], missing: Collection[VersionedModel]
    ) -> None:
        for i, model in enumerate(models):
            if model in missing:
                status = future.status(i)
                self.counters.of(model).missing.add(status)
                if status in _OVERLOAD:
                    self.counters.watched.overloaded()


_LATE = frozenset(
    status.name.lower()
    for status in (Status.PENDING, Status.OK, Status.DEADLINE, Status.DROPPED, Status.UNNEEDED)
)


def _ends(counts: _OfModel) -> dict[str, int]:
    """Count how a model's tasks ended, by outcome."""
    missing = counts.missing.by_name()
    late = sum(n for status, n in missing.items() if status in _LATE)
    return {
        "in_time": counts.used.value + counts.unused.value,
        "late": late,
        "failed": sum(missing.values()) - late,
    }


def duration(took: Snapshot) -> dict[str, float | None]:
    """Return the statistics of durations, in microseconds; None while there are none. min and max
    are the ends of their buckets: at most 12.5 % beyond."""
    if not took.count:
        return {"count": 0, "min": None, "mean": None, "p50": None, "p99": None, "max": None}
    return {
        "count": took.count,
        "min": took.buckets()[0][0],
        "mean": took.mean,
        "p50": took.quantile(0.5),
        "p99": took.quantile(0.99),
        "max": took.max,
    }


def closeness(one: UserValue, other: UserValue) -> float:
    """Return 1 for the same answer, 0 for another; between numbers s / (s + d), s their mean size
    and d their distance: the same in any unit."""
    if not (is_usable(one) and is_usable(other)):
        return 0.0
    if type(one) is type(other) is float:
        return _near(abs(one) / 2 + abs(other) / 2, abs(one - other))
    if not (is_number(one) or is_number(other)):
        return 1.0 if agrees(one, other) else 0.0
    if isinstance(one, str | bytes | dict) or isinstance(other, str | bytes | dict):
        return 0.0
    if np.shape(one) != np.shape(other):
        return 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        a, b = np.asarray(one, np.float64), np.asarray(other, np.float64)
        return _near(
            float(np.linalg.norm(a)) / 2 + float(np.linalg.norm(b)) / 2,
            float(np.linalg.norm(a - b)),
        )


def _near(size: float, away: float) -> float:
    """Return the closeness of numbers of mean size `size` with distance `away`. Nothing is near to
    what is too large to be measured."""
    if away == 0.0:
        return 1.0
    return size / (size + away) if math.isfinite(size) else 0.0


def _shown(status: Status, waited_us: int, took_us: int) -> int:
    """Return when a task ended, or when the query was answered if that was earlier."""
    return took_us if status in (Status.PENDING, Status.CANCELLED) else waited_us
