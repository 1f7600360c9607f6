"""Collects the server's metrics from `ClipperServer.stats()`.

The values are the core's own counters, read without stopping anything. A collection runs on a
worker thread and releases the GIL between models, so that it does not delay the thread that serves
HTTP.
"""

import platform
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from clipper.metrics import process
from clipper.metrics.samples import Labels, Samples, SeriesLimit, Stats
from clipper.metrics.stats import (
    LinkStats,
    MeanStats,
    ModelStats,
    QueryStats,
    ReplicaStats,
    ServerStats,
)
from clipper_container.machine import resident_bytes

_ALWAYS = frozenset(
    ("ok", "full", "deadline", "dropped", "no_replica", "replica_lost", "model_error", "bad_output")
)
_PAIRS_A_NAME = 4
_PAUSE_EACH_S, _PAUSE_S = 0.001, 0.000_05

Shares = Mapping[str, Mapping[str, float]]


class MetricsSource(Protocol):
    """A part of the server that counts by itself."""

    def collect(self, into: Samples) -> None:
        """Add the current values to `into`."""


class Metrics:
    """The metrics of one server. Threads: any; collections run one after another.

    stats: `ClipperServer.stats`.  slos_s: SLO of each application, in seconds.
    shares: learned share of each model, by application.
    names_max: models, and applications, that have series of their own; pairs of both have four
    times as many.
    sources: other parts that count.
    """

    def __init__(
        self,
        version: str,
        stats: Callable[[], ServerStats],
        slos_s: Callable[[], Mapping[str, float]],
        shares: Callable[[], Shares],
        names_max: int,
        sources: Sequence[MetricsSource] = (),
    ) -> None:
        self._version = version
        self._stats, self._slos_s, self._shares, self._sources = (
            stats,
            slos_s,
            shares,
            list(sources),
        )
        self._apps, self._models, self._pairs = (
            SeriesLimit(names_max),
            SeriesLimit(names_max),
            SeriesLimit(_PAIRS_A_NAME * names_max),
        )
        self._lock = threading.Lock()
        self._duration_s = 0.0

    def add(self, counts: MetricsSource) -> None:
        """Add a source of metrics."""
        self._sources.append(counts)

    def collect(self) -> Samples:
        """Return the current values of all metrics."""
        with self._lock:
            start_s = time.monotonic()
            found = self._collect()
            self._duration_s = time.monotonic() - start_s
            return found

    def _collect(self) -> Samples:
        stats = self._stats()
        pauses = _GilPauses()
        found = Samples()
        models: dict[Labels, Samples] = {}
        for id, row in stats["models"].items():
            models[_name_of(id)] = of_model(row, _name_of(id))
            pauses.release_gil()
        found.add_all(self._models.keep(models))
        found.add_all(self._collect_applications(stats["applications"], pauses))
        found.add_part("server", stats)
        for counts in self._sources:
            counts.collect(found)
        found.add("clipper_build_info", 1, self._version, platform.python_version())
        found.add("clipper_scrape_duration_seconds", self._duration_s)
        process.collect(found)
        return found

    def _collect_applications(
        self, rows: Mapping[str, QueryStats], pauses: "_GilPauses"
    ) -> Samples:
        slos_s, shares = self._slos_s(), self._shares()
        apps: dict[Labels, Samples] = {}
        pairs: dict[Labels, Samples] = {}
        for app, row in rows.items():
            apps[(app,)] = of_application(row, app, slos_s.get(app))
            for id, counts in row["models"].items():
                name = (app, *_name_of(id))
                pairs[name] = of_pair(
                    counts, name, shares.get(app, {}).get(id), row.get("canaries", {}).get(id, {})
                )
            pauses.release_gil()
        found = self._apps.keep(apps)
        found.add_all(self._pairs.keep(pairs))
        return found


class _GilPauses:
    """Releases the GIL during a long collection."""

    def __init__(self) -> None:
        self._since_s = time.monotonic()

    def release_gil(self) -> None:
        if time.monotonic() - self._since_s > _PAUSE_EACH_S:
            time.sleep(_PAUSE_S)
            self._since_s = time.monotonic()


def of_application(row: QueryStats, app: str, slo_s: float | None) -> Samples:
    """Return the metrics of an application from its row of the statistics."""
    found = Samples()
    answers = row["answers"]
    found.add_part("application", row, app)
    found.add_by("clipper_answers_total", {"ok": answers["ok"], **answers["default"]}, app)
    if slo_s is not None:
        found.add("clipper_slo_seconds", slo_s, app)
    found.add("clipper_feedback_right_total", _sum_of(answers["feedback"]), app)
    return found


def of_pair(row: LinkStats, name: Labels, share: float | None, canary: Stats) -> Samples:
    """Return the metrics of a model within an application."""
    found = Samples()
    found.add_part("pair", row, *name)
    found.add("clipper_model_feedback_right_total", _sum_of(row["feedback"]), *name)
    found.add("clipper_model_agreed_total", _sum_of(row["agreement"]), *name)
    if share is not None:
        found.add("clipper_selection_share", share, *name)
    for outcome in (
        ("answered", "late", "refused", "failed", "shed", "over_budget")
        if "observer" in row
        else ()
    ):
        found.add("clipper_observer_tasks_total", row["observer"][outcome], *name, outcome)
    psi = (canary.get("drift") or {}).get("psi")
    if psi is not None:
        found.add("clipper_canary_drift_psi", psi, *name)
    return found


def of_model(row: ModelStats, name: Labels) -> Samples:
    """Return the metrics of a model from its row of the statistics."""
    found = Samples()
    for status, count in row["ended"].items():
        outcome = status.lower()
        if count or outcome in _ALWAYS:
            found.add("clipper_tasks_total", count, *name, outcome)
    found.add_part("model", row, *name)
    if followed := row.get("followed"):
        for reason in ("moved", "unsure", "lost", "room"):
            count = followed["forgotten"].get(reason, 0)
            found.add("clipper_cache_forgotten_total", count, *name, reason)
    _add_replicas(found, row["replicas"], name)
    return found


def _add_replicas(found: Samples, rows: Sequence[ReplicaStats], name: Labels) -> None:
    """Add the metrics of replicas; process figures only of those started by this server."""
    own = [row for row in rows if "restart_count" in row]
    limits = [row["limit"] for row in rows if "limit" in row]
    if limits:
        found.add("clipper_batch_rows_limit", max(limits), *name)
    found.add("clipper_replicas_ejected", sum(bool(row.get("ejected")) for row in rows), *name)
    failures, ejections = Counter[int](), Counter[int]()
    for row in rows:
        failures[row["number"]] += row.get("failures", 0)
        ejections[row["number"]] += row.get("ejections", 0)
    found.add_by("clipper_replica_failures_total", failures, *name)
    found.add_by("clipper_replica_ejections_total", ejections, *name)
    restarts: dict[int, int] = {}
    for row in own:
        restarts[row["number"]] = max(restarts.get(row["number"], 0), row["restart_count"])
    found.add_by("clipper_container_restarts_total", restarts, *name)
    if own:
        memory = sum(resident_bytes(row["pid"]) for row in own if row["pid"])
        found.add("clipper_container_memory_bytes", memory, *name)
        shared = sum(process.proportional_bytes_lately(row["pid"]) for row in own if row["pid"])
        found.add("clipper_container_memory_proportional_bytes", shared, *name)
        forked = sum(row.get("start") == "forked" for row in own)
        found.add("clipper_containers_forked", forked, *name)


def _sum_of(mean: MeanStats) -> float:
    """Return the sum of the values of a mean.

    It is rounded, so that a value of 0 which is added does not make it smaller.
    """
    return round(mean["n"] * mean.get("mean", 0.0), 6)


def _name_of(id: str) -> Labels:
    name, _, version = id.rpartition(":")
    return name, version
