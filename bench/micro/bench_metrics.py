"""Measures what a scrape costs: 100 models and 100 applications, each with a few thousand values in
its histograms.

pytest bench/micro/bench_metrics.py --benchmark-columns=min,median,iqr
"""

import importlib
import random
from typing import Any, cast

import pytest

from clipper.metrics import HttpCounts, Metrics, openmetrics, prometheus
from clipper.metrics.stats import ServerStats
from clipper_core.runtime.histogram import LatencyHistogram
from clipper_core.runtime.status import Status

NAMES = 100


def histogram(rng: random.Random) -> Any:
    one = LatencyHistogram()
    for _ in range(3000):
        one.record(int(rng.lognormvariate(7, 1.5)))
    return one.snapshot()


def statistics(names: int, seed: int = 1) -> dict[str, Any]:
    """Return statistics as `ClipperServer.stats` has them."""
    rng = random.Random(seed)
    ended = {status.name: rng.randrange(9) for status in Status if status.name != "PENDING"}
    replica = {"number": 0, "limit": 64, "pid": 0, "restart_count": 1, "state": "ready"}
    model = {
        "ended": ended,
        "latency_us": histogram(rng),
        "hits": 5,
        "joined": 1,
        "evaluated": 9,
        "batches": 3,
        "batch_rows": histogram(rng),
        "queued": 0,
        "delay_us": 90,
        "wanted": 1,
        "has": 1,
        "accuracy": None,
        "replicas": [replica],
    }
    in_app = {
        "used": 7,
        "missing": {"deadline": 1},
        "agreement": {"n": 1.0, "mean": 1.0},
        "feedback": {"n": 2.0, "mean": 0.5},
    }
    answers = {"ok": 7, "default": {"deadline": 1}, "feedback": {"n": 2.0, "mean": 0.5}}
    app = {"queries": 8, "answers": answers, "latency_us": histogram(rng)}
    return {
        "models": {f"m{i}:1": model for i in range(names)},
        "applications": {f"a{i}": {**app, "models": {f"m{i}:1": in_app}} for i in range(names)},
        "cache": {"bytes": 1, "entries": 1, "evictions": 1},
        "loop": {"steps": 1, "late_us_max": 1},
        "queue_bytes": 0,
        "issued": 8,
        "answered": 8,
        "feedback": {"waiting": 0, "journal_bytes": 0, "journal_records": 0},
    }


def metrics(names: int) -> Metrics:
    stats = cast(ServerStats, statistics(names))
    return Metrics("0", lambda: stats, dict, dict, 200, [HttpCounts("query")])


def test_collect(benchmark: Any) -> None:
    benchmark.group = f"a scrape of {NAMES} models and applications"
    benchmark(metrics(NAMES).collect)


@pytest.mark.parametrize("write", [prometheus, openmetrics], ids=["prometheus", "openmetrics"])
def test_text(benchmark: Any, write: Any) -> None:
    benchmark.group = f"a scrape of {NAMES} models and applications"
    benchmark(write, metrics(NAMES).collect())


def test_prometheus_client(benchmark: Any) -> None:
    """Measure the anchor: as many series of the same kinds, written by prometheus_client."""
    client = pytest.importorskip("prometheus_client")
    core = importlib.import_module("prometheus_client.core")
    collected = metrics(NAMES).collect()
    lines = prometheus(collected).decode()
    parsed = list(
        importlib.import_module("prometheus_client.parser").text_string_to_metric_families(lines)
    )

    class Given:
        def collect(self) -> Any:
            return parsed

    registry = core.CollectorRegistry(auto_describe=False)
    registry.register(Given())
    benchmark.group = f"a scrape of {NAMES} models and applications"
    benchmark(client.generate_latest, registry)
