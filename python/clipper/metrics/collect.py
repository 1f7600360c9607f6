"""From `server.stats()` to samples. The numbers are the core's own, read without stopping anything;
here they only get names.

A scrape runs on a worker thread, and lets go of the interpreter's lock between models: the thread
that serves HTTP is not kept waiting by a hundred of them.
"""

import platform
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from clipper.metrics import process
from clipper.metrics.samples import Cap, Labels, Samples

_ALWAYS = frozenset(
    ("ok", "full", "deadline", "dropped", "no_replica", "replica_lost", "model_error", "bad_output")
)
_PAIRS_A_NAME = 4
_REST_EACH_S, _REST_S = 0.001, 0.000_05

Stats = Mapping[str, Any]
Shares = Mapping[str, Mapping[str, float]]


class Counts(Protocol):
    """What a frontend counts by itself."""

    def collect(self, into: Samples) -> None: ...


class Metrics:
    """Threads: any; collections wait for each other.

    stats: `ClipperServer.stats`.  slos_s: each application's SLO.  shares: what each application's
    policy has learned, by model. names_max: how many models, and how many applications, have series
    of their own; four times as many pairs of both. beside: what else counts.
    """

    def __init__(
        self,
        version: str,
        stats: Callable[[], Stats],
        slos_s: Callable[[], Mapping[str, float]],
        shares: Callable[[], Shares],
        names_max: int,
        beside: Sequence[Counts] = (),
    ) -> None:
        self._version = version
        self._stats, self._slos_s, self._shares, self._beside = stats, slos_s, shares, list(beside)
        self._apps, self._models, self._pairs = (
            Cap(names_max),
            Cap(names_max),
            Cap(_PAIRS_A_NAME * names_max),
        )
        self._lock = threading.Lock()
        self._took_s = 0.0

    def add(self, counts: Counts) -> None:
        self._beside.append(counts)

    def collect(self) -> Samples:
        with self._lock:
            began_s = time.monotonic()
            found = self._collect()
            self._took_s = time.monotonic() - began_s
            return found

    def _collect(self) -> Samples:
        stats = self._stats()
        rest = _Rest()
        found = Samples()
        models: dict[Labels, Samples] = {}
        for id, row in stats["models"].items():
            models[_name_of(id)] = of_model(row, _name_of(id))
            rest.now_and_then()
        found.add_all(self._models.keep(models))
        found.add_all(self._of_applications(stats["applications"], rest))
        of_server(stats, found)
        for counts in self._beside:
            counts.collect(found)
        found.add("clipper_build_info", 1, self._version, platform.python_version())
        found.add("clipper_scrape_duration_seconds", self._took_s)
        process.collect(found)
        return found

    def _of_applications(self, rows: Mapping[str, Any], rest: "_Rest") -> Samples:
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
            rest.now_and_then()
        found = self._apps.keep(apps)
        found.add_all(self._pairs.keep(pairs))
        return found


class _Rest:
    def __init__(self) -> None:
        self._since_s = time.monotonic()

    def now_and_then(self) -> None:
        if time.monotonic() - self._since_s > _REST_EACH_S:
            time.sleep(_REST_S)
            self._since_s = time.monotonic()


def of_application(row: Mapping[str, Any], app: str, slo_s: float | None) -> Samples:
    found = Samples()
    answers = row["answers"]
    found.add("clipper_queries_total", row["queries"], app)
    for outcome, count in {"ok": answers["ok"], **answers["default"]}.items():
        found.add("clipper_answers_total", count, app, outcome)
    found.add("clipper_answer_duration_seconds", row["latency_us"], app)
    if slo_s is not None:
        found.add("clipper_slo_seconds", slo_s, app)
    _add_mean(
        found, answers["feedback"], "clipper_feedback_total", "clipper_accuracy_ratio", (app,)
    )
    return found


def of_pair(
    row: Mapping[str, Any], name: Labels, share: float | None, canary: Mapping[str, Any]
) -> Samples:
    """A model within an application."""
    found = Samples()
    found.add("clipper_predictions_used_total", row["used"], *name)
    for reason, count in row["missing"].items():
        found.add("clipper_predictions_missing_total", count, *name, reason)
    _add_mean(
        found, row["feedback"], "clipper_model_feedback_total", "clipper_model_accuracy_ratio", name
    )
    if "mean" in row["agreement"]:
        found.add("clipper_model_agreement_ratio", row["agreement"]["mean"], *name)
    if share is not None:
        found.add("clipper_selection_share", share, *name)
    for outcome in (
        ("heard", "late", "refused", "failed", "shed", "over_budget") if "observer" in row else ()
    ):
        found.add("clipper_observer_tasks_total", row["observer"][outcome], *name, outcome)
    psi = (canary.get("drift") or {}).get("psi")
    if psi is not None:
        found.add("clipper_canary_drift_psi", psi, *name)
    return found


def of_model(row: Mapping[str, Any], name: Labels) -> Samples:
    found = Samples()
    for status, count in row["ended"].items():
        outcome = status.lower()
        if count or outcome in _ALWAYS:
            found.add("clipper_tasks_total", count, *name, outcome)
    found.add("clipper_task_duration_seconds", row["latency_us"], *name)
    found.add("clipper_cache_hits_total", row["hits"], *name)
    found.add("clipper_cache_joined_total", row["joined"], *name)
    found.add("clipper_cache_misses_total", row["evaluated"], *name)
    found.add("clipper_batches_total", row["batches"], *name)
    found.add("clipper_batch_rows", row["batch_rows"], *name)
    found.add("clipper_queue_rows", row["queued"], *name)
    found.add("clipper_queue_wait_seconds", row["delay_us"] / 1e6, *name)
    found.add("clipper_replicas_wanted", row["wanted"], *name)
    found.add("clipper_replicas_ready", row["has"], *name)
    found.add("clipper_tasks_retried_total", row["retried"], *name)
    if row["accuracy"] is not None:
        found.add("clipper_model_own_accuracy_ratio", row["accuracy"], *name)
    if "followed" in row:
        _add_followed(found, row["followed"], name)
    _add_replicas(found, row["replicas"], name)
    return found


def _add_followed(found: Samples, row: Mapping[str, Any], name: Labels) -> None:
    found.add("clipper_cache_followed", row["predictions"], *name)
    found.add("clipper_cache_followed_rows", row["rows"], *name)
    found.add("clipper_cache_unfollowed_total", row["uncached"], *name)
    for reason in ("moved", "unsure", "lost", "room"):
        found.add("clipper_cache_forgotten_total", row["forgotten"].get(reason, 0), *name, reason)


def _add_replicas(found: Samples, rows: Sequence[Mapping[str, Any]], name: Labels) -> None:
    """restart_count: of those that were started here; the process ids of others mean nothing on
    this host."""
    ours = [row for row in rows if "restart_count" in row]
    limits = [row["limit"] for row in rows if "limit" in row]
    if limits:
        found.add("clipper_batch_rows_limit", max(limits), *name)
    found.add("clipper_replicas_ejected", sum(bool(row.get("ejected")) for row in rows), *name)
    failures, ejections = Counter[int](), Counter[int]()
    for row in rows:
        failures[row["number"]] += row.get("failures", 0)
        ejections[row["number"]] += row.get("ejections", 0)
    for number in failures:
        found.add("clipper_replica_failures_total", failures[number], *name, str(number))
        found.add("clipper_replica_ejections_total", ejections[number], *name, str(number))
    restarts: dict[int, int] = {}
    for row in ours:
        restarts[row["number"]] = max(restarts.get(row["number"], 0), row["restart_count"])
    for number, count in restarts.items():
        found.add("clipper_container_restarts_total", count, *name, str(number))
    if ours:
        memory = sum(process.resident_bytes(row["pid"]) for row in ours if row["pid"])
        found.add("clipper_container_memory_bytes", memory, *name)


def of_server(stats: Stats, found: Samples) -> None:
    cache, loop, feedback = stats["cache"], stats["loop"], stats["feedback"]
    found.add("clipper_cache_bytes", cache["bytes"])
    found.add("clipper_cache_entries", cache["entries"])
    found.add("clipper_cache_evictions_total", cache["evictions"])
    found.add("clipper_queue_bytes", stats["queue_bytes"])
    found.add("clipper_tasks_issued_total", stats["issued"])
    found.add("clipper_tasks_answered_total", stats["answered"])
    found.add("clipper_loop_steps_total", loop["steps"])
    found.add("clipper_loop_late_seconds_max", loop["late_us_max"] / 1e6)
    found.add("clipper_feedback_waiting", feedback["waiting"])
    found.add("clipper_journal_bytes", feedback["journal_bytes"])
    found.add("clipper_journal_records_total", feedback["journal_records"])


def _add_mean(
    found: Samples, mean: Mapping[str, float], weight: str, ratio: str, name: Labels
) -> None:
    found.add(weight, mean["n"], *name)
    if "mean" in mean:
        found.add(ratio, mean["mean"], *name)


def _name_of(id: str) -> Labels:
    name, _, version = id.rpartition(":")
    return name, version
