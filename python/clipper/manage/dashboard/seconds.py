"""Counts of one second (or ten): the difference of two readings of `ClipperServer.stats`.

A row is small, since an hour of them is kept: zeros and unknown values are left out, and of many
names only the busiest have numbers.
"""

from collections.abc import Mapping
from typing import Final

from clipper.manage.dashboard.shards import Row, of_shards, shards_now
from clipper.metrics.families import BY_PART
from clipper.metrics.samples import Stats
from clipper_container.machine import resident_bytes
from clipper_core.runtime.histogram import Snapshot

NAMES_MAX: Final = 50  # applications, and models, with numbers of their own in a row
REFUSED: Final = frozenset(("full", "too_large", "closed", "forked"))
FAILED: Final = frozenset(
    (
        "model_error",
        "bad_output",
        "no_replica",
        "replica_lost",
        "bad_input",
        "bad_frame",
        "no_memory",
        "unknown",
        "not_finite",
        "policy_failed",
    )
)
_OF_MESH = (
    "models_registered",
    "models_loaded",
    "load_failures",
    "queries_hit",
    "queries_missed",
)
_OF_REPLICA: Final = (
    "number",
    "pid",
    "state",
    "restart_count",
    "detail",
    "limit",
    "batches",
    "misses",
    "in_flight",
    "suspect",
    "fit_us",
    "profile",
    "ejected",
    "failures",
)


def outcome_of(reason: str) -> str:
    """Classify the reason of a default: `refused` for lack of room, `error`, or `default`."""
    return "refused" if reason in REFUSED else "error" if reason in FAILED else "default"


def between(
    before: Stats,
    after: Stats,
    shares: Mapping[str, Mapping[str, float]],
    at_s: float,
    seconds: float,
) -> Row:
    """Return the row of the time from one reading to the next, which ended at `at_s` (seconds since
    1970)."""
    apps, models = after["applications"], after["models"]
    row: Row = {"t": round(at_s, 1), "dt": round(seconds, 3), "apps": {}, "models": {}}
    for name in busiest(before["applications"], apps, "queries"):
        row["apps"][name] = of_application(
            before["applications"].get(name), apps[name], shares.get(name, {})
        )
    for name in busiest(before["models"], models, "evaluated"):
        row["models"][name] = of_model(before["models"].get(name), models[name])
    cache = after["cache"]
    row["cache"] = _lean(
        {key: cache[key] for key in ("bytes", "entries")}
        | {"gone": _more(before["cache"], cache, "evictions")}
    )
    row["late"] = after["loop"]["late_us_max"]
    if "shards" in after:
        row["params"] = of_shards(before.get("shards", ()), after["shards"])
    return row


def busiest(before: Stats, after: Stats, count: str) -> list[str]:
    """Return the names with most of it, if they are too many."""
    if len(after) <= NAMES_MAX:
        return list(after)
    return sorted(after, key=lambda name: -_more(before.get(name), after[name], count))[:NAMES_MAX]


def of_application(before: Stats | None, after: Stats, shares: Mapping[str, float]) -> Row:
    """Return what happened to an application since `before`. q: queries.  ok, default, error,
    refused: answers.  why: defaults by reason.  us: p50, p95, p99 and the most.  fb: weight of
    feedback and how much of it was right.  models: [share, used, feedback, right] of each."""
    answers = after["answers"]
    previous = (before or {}).get("answers", {"default": {}, "feedback": {}})
    why = {
        reason: _more(previous["default"], answers["default"], reason)
        for reason in answers["default"]
    }
    row: Row = {
        **_of_families("application", before, after),
        "ok": _more(previous, answers, "ok"),
        "why": _lean(why),
    }
    for reason, n in why.items():
        row[outcome_of(reason)] = row.get(outcome_of(reason), 0) + n
    took = _since((before or {}).get("latency_us"), after["latency_us"])
    if took.count:
        row["us"] = [round(took.quantile(q)) for q in (0.5, 0.95, 0.99)] + [took.max]
    row["fb"] = _mean_more(previous["feedback"], answers["feedback"])
    known = (before or {}).get("models", {})
    row["models"] = {
        name: [
            round(shares[name], 4) if name in shares else None,
            _more(known.get(name), counts, "used"),
            *_mean_more(known.get(name, {}).get("feedback", {}), counts["feedback"]),
        ]
        for name, counts in after["models"].items()
    }
    return _lean(row)


def of_model(before: Stats | None, after: Stats) -> Row:
    """Return what happened to a model since `before`. ok, failed: tasks.  us: p50 and p99 of them.
    rows, batches: sent.  hits, joined: answered without an evaluation.  queue: rows that wait;
    wait: for how many microseconds they will.  limit: the largest batch now. misses: batches beyond
    their budget.  padding: share of it in the batches, where it is measured.
    """
    ended, had = after["ended"], (before or {}).get("ended", {})
    took = _since((before or {}).get("latency_us"), after["latency_us"])
    sizes = _since((before or {}).get("batch_rows"), after["batch_rows"])
    replicas = after["replicas"]
    row = {
        "ok": _more(had, ended, "OK"),
        "failed": sum(
            _more(had, ended, status) for status in ended if status not in ("OK", "UNNEEDED")
        ),
        **_of_families("model", before, after),
        "batches": sizes.count,
        "size": round(sizes.mean, 2) if sizes.count else 0,
        "wait": after["delay_us"],
        "limit": max((one["limit"] for one in replicas if "limit" in one), default=0),
        "padding": _padding(before, after),
        "misses": max(0, _misses(after) - (_misses(before) if before else 0)),
    }
    if took.count:
        row["us"] = [round(took.quantile(0.5)), round(took.quantile(0.99))]
    return _lean(row)


def _padding(before: Mapping[str, float] | None, after: Mapping[str, float]) -> float:
    padded = after.get("cost_padded", 0) - (before or {}).get("cost_padded", 0)
    cost = after.get("cost", 0) - (before or {}).get("cost", 0)
    return round(1 - cost / padded, 3) if padded > 0 else 0


def now_of(stats: Stats) -> dict[str, object]:
    """Return the values of which only the latest counts: replicas and memory of each model, roles
    and canaries of each application, parameter shards, and counts of a mesh.
    """
    models = {name: _model_now(row) for name, row in stats["models"].items()}
    apps = {name: _application_now(row) for name, row in stats["applications"].items()}
    now = {
        "models": models,
        "apps": apps,
        "feedback": stats["feedback"],
        "in_flight": stats["issued"] - stats["answered"],
    }
    params = {"params": shards_now(stats["shards"])} if "shards" in stats else {}
    return now | params | ({"mesh": _mesh_now(stats["mesh"])} if "mesh" in stats else {})


def _mesh_now(row: Stats) -> dict[str, object]:
    return {key: row.get(key, 0) for key in _OF_MESH}


def _model_now(row: Stats) -> dict[str, object]:
    replicas = [_replica_now(one) for one in row["replicas"]]
    similar = {"similar": row["similar"]} if "similar" in row else {}
    return {
        "wanted": row["wanted"],
        "has": row["has"],
        "replicas": replicas,
        "slo_us": row["slo_us"],
        "accuracy": row["accuracy"],
        "failed": {
            status.lower(): n
            for status, n in row["ended"].items()
            if n and status not in ("OK", "UNNEEDED")
        },
        **similar,
    }


def _replica_now(one: Stats) -> dict[str, object]:
    found = {key: one[key] for key in _OF_REPLICA if key in one}
    if one.get("pid") and "restart_count" in one:
        found["rss"] = resident_bytes(one["pid"])
    return found


def _application_now(row: Stats) -> dict[str, object]:
    models = {}
    for name, counts in row["models"].items():
        stored = ("role", "used", "feedback", "agreement", "missing", "observer")
        models[name] = {key: counts[key] for key in stored if key in counts}
    found = {
        "models": models,
        "feedback": row["answers"]["feedback"],
        "decided_by": row["decided_by"],
    }
    return found | {key: row[key] for key in ("canaries", "observers", "decoys") if key in row}


# -- differences


def _of_families(part: str, before: Stats | None, after: Stats) -> Row:
    """Return the values of the metrics of a part that have a place in a row: what a counter grew
    by, and what a gauge is."""
    return {
        family.row: (
            _more(before, after, path[0]) if family.kind == "counter" else after.get(path[0], 0)
        )
        for family, path in BY_PART[part]
        if family.row
    }


def _more(before: Stats | None, after: Stats, key: str) -> int:
    """Return how much a count grew; all of it when it began anew."""
    now, then = int(after.get(key, 0)), int(before.get(key, 0)) if before else 0
    return now - then if now >= then else now


def _mean_more(before: Mapping[str, float], after: Mapping[str, float]) -> list[float]:
    """Return [weight, sum] of what was added to a mean."""
    n, then = after.get("n", 0.0), before.get("n", 0.0)
    if n <= then:
        return [0, 0]
    added = n * after.get("mean", 0.0) - then * before.get("mean", 0.0)
    return [round(n - then, 3), round(max(0.0, added), 4)]


def _since(before: Snapshot | None, after: Snapshot) -> Snapshot:
    return after - before if before is not None and before.count <= after.count else after


def _misses(row: Stats) -> int:
    return sum(one.get("misses", 0) for one in row["replicas"])


def _lean(row: Row) -> Row:
    return {key: value for key, value in row.items() if value not in (0, None, [0, 0], {})}
