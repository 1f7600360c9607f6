"""Figures from counters: the difference of two samples of the server and the load."""

import bisect
from dataclasses import asdict, dataclass

from clipper.metrics.samples import Stats
from clipper_demo.load import OutcomeCounts, Outcomes


@dataclass(frozen=True, slots=True)
class Sample:
    """Counters at one time."""

    at_s: float
    stats: Stats
    counts: OutcomeCounts


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """Figures of a model.

    requested_per_s: queries per second. p50_ms, p99_ms: of evaluated predictions. batch_rows: mean
    batch size. limit: sum of the replicas' batch limits. cached: share answered from the cache or
    by joining. replicas: state of each: ready, suspect, starting, running, backoff, failed or
    stopped. wanted: target number of replicas.
    """

    name: str
    replicas: tuple[str, ...]
    requested_per_s: float
    p50_ms: float
    p99_ms: float
    batch_rows: float
    limit: int
    cached: float
    wanted: int = 0

    @property
    def ready(self) -> int:
        """Return the number of ready replicas."""
        return self.replicas.count("ready")


@dataclass(frozen=True, slots=True)
class ApplicationFigures:
    """Figures of the application.

    p50_ms, p99_ms: as the server counts; wall_: since the due time. slo_met: share of answers by
    a model within the SLO. partial: answers without some model. accuracy: of answers that are not
    the default.
    """

    name: str
    slo_ms: float
    seconds: float
    sent: int
    answered: int
    answers_per_s: float
    p50_ms: float
    p99_ms: float
    wall_p50_ms: float
    wall_p99_ms: float
    slo_met: float
    partial: int
    defaults: int
    default_reasons: dict[str, int]
    errors: dict[str, int]
    accuracy: float


@dataclass(frozen=True, slots=True)
class DemoReport:
    """Figures of the application and its models."""

    application: ApplicationFigures
    models: tuple[ModelFigures, ...]

    def as_dict(self) -> dict[str, object]:
        """Return the figures for JSON: `application`, and `models` by name."""
        models = {m.name: {**asdict(m), "ready": m.ready} for m in self.models}
        return {"application": asdict(self.application), "models": models}


def between(
    before: Sample, after: Sample, outcomes: Outcomes, name: str, slo_ms: float
) -> DemoReport:
    """Return the figures of the time between two samples."""
    seconds = max(after.at_s - before.at_s, 1e-9)
    models = [
        _model(id_, before.stats["models"].get(id_), now, seconds)
        for id_, now in after.stats["models"].items()
        if now["replicas"]
    ]
    return DemoReport(_application(before, after, outcomes, name, slo_ms, seconds), tuple(models))


def _model(id_: str, before: Stats | None, now: Stats, seconds: float) -> ModelFigures:
    def grown(key: str) -> int:
        return int(now[key]) - int(before[key] if before else 0)

    latency = now["latency_us"] - before["latency_us"] if before else now["latency_us"]
    rows = now["batch_rows"] - before["batch_rows"] if before else now["batch_rows"]
    ended = sum(now["ended"].values()) - (sum(before["ended"].values()) if before else 0)
    requested = ended + grown("hits")
    return ModelFigures(
        name=id_,
        replicas=tuple("suspect" if r.get("suspect") else str(r["state"]) for r in now["replicas"]),
        requested_per_s=requested / seconds,
        p50_ms=latency.quantile(0.5) / 1000 if latency.count else 0.0,
        p99_ms=latency.quantile(0.99) / 1000 if latency.count else 0.0,
        batch_rows=rows.mean if rows.count else 0.0,
        limit=sum(r.get("limit", 0) for r in now["replicas"]),
        cached=(grown("hits") + grown("joined")) / requested if requested else 0.0,
        wanted=now["wanted"],
    )


def _application(
    before: Sample, after: Sample, outcomes: Outcomes, name: str, slo_ms: float, seconds: float
) -> ApplicationFigures:
    was, now = before.counts, after.counts
    answered = now.answered - was.answered
    defaults = now.defaults - was.defaults
    by_models = answered - defaults
    server_us = sorted(outcomes.answer_us[was.answered : now.answered])
    wall_us = sorted(outcomes.wall_us[was.answered : now.answered])
    return ApplicationFigures(
        name=name,
        slo_ms=slo_ms,
        seconds=seconds,
        sent=now.sent - was.sent,
        answered=answered,
        answers_per_s=answered / seconds,
        p50_ms=quantile(server_us, 0.5) / 1000,
        p99_ms=quantile(server_us, 0.99) / 1000,
        wall_p50_ms=quantile(wall_us, 0.5) / 1000,
        wall_p99_ms=quantile(wall_us, 0.99) / 1000,
        slo_met=(now.in_time - was.in_time) / answered if answered else 0.0,
        partial=now.partial - was.partial,
        defaults=defaults,
        default_reasons=dict((now.reasons - was.reasons).most_common()),
        errors=dict(now.errors - was.errors),
        accuracy=(now.correct - was.correct) / by_models if by_models else 0.0,
    )


def quantile(ordered: list[int], q: float) -> float:
    """Return the smallest value that at least a share `q` does not exceed; 0 of an empty list."""
    if not ordered:
        return 0.0
    rank = bisect.bisect_left(range(1, len(ordered) + 1), q * len(ordered))
    return float(ordered[min(rank, len(ordered) - 1)])
