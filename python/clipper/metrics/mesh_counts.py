"""Counts of a mesh node, and its metrics, under our names and under those of model-mesh."""

from collections.abc import Callable
from typing import Final

from clipper.clock import wall_time_us
from clipper.metrics.samples import Samples
from clipper.metrics.stats import MeshStats
from clipper_core.runtime.histogram import Counter, LatencyHistogram

OUTCOMES: Final = ("ok", "artifact", "load", "host", "refused")  # of a load


class MeshCounts:
    """The counters of one node. Threads: any.

    hits, misses: queries that found a loaded copy, or waited for one.
    waits, queued, took: of loads, microseconds from the request to the end, in the queue, and
    loading.
    ages: microseconds since the last use of unloaded models.  sizes: bytes of loaded models.
    """

    def __init__(self) -> None:
        self.hits, self.misses, self.unloads = Counter(), Counter(), Counter()
        self.loads = {outcome: Counter() for outcome in OUTCOMES}
        self.waits, self.queued, self.took, self.ages = (LatencyHistogram() for _ in range(4))
        self.sizes = LatencyHistogram()

    def count_queries(self, hits: int, misses: int) -> None:
        """Count queries that found a loaded copy, and queries that waited for one."""
        self.hits.add(hits)
        self.misses.add(misses)

    def loaded(self, wait_ms: float, queued_ms: float, took_ms: float, size_bytes: int) -> None:
        """Count a successful load. Times in milliseconds."""
        self.loads["ok"].add()
        for histogram, ms in (
            (self.waits, wait_ms),
            (self.queued, queued_ms),
            (self.took, took_ms),
        ):
            histogram.record(max(0, round(1000 * ms)))
        self.sizes.record(size_bytes)

    def failed(self, fault: str) -> None:
        """Count a failed load. fault: artifact, host or refused."""
        self.loads[fault].add()

    def unloaded(self, age_ms: float) -> None:
        """Count an unloaded model; age_ms: since its last use."""
        self.unloads.add()
        self.ages.record(max(0, round(1000 * age_ms)))

    def stats(self) -> MeshStats:
        """Return all counts; hit_ratio is None before the first query."""
        hits, misses = self.hits.value, self.misses.value
        return {
            "queries_hit": hits,
            "queries_missed": misses,
            "hit_ratio": hits / (hits + misses) if hits + misses else None,
            "loads": self.loads["ok"].value,
            "load_failures": sum(self.loads[fault].value for fault in ("artifact", "load", "host")),
            "refusals": self.loads["refused"].value,
            "evictions": self.unloads.value,
            "load_outcomes": {outcome: counter.value for outcome, counter in self.loads.items()},
            "load_wait_us": self.waits.snapshot(),
            "load_queue_us": self.queued.snapshot(),
            "load_us": self.took.snapshot(),
            "eviction_age_us": self.ages.snapshot(),
            "model_bytes": self.sizes.snapshot(),
        }


class MeshMetrics:
    """The metrics of one node. Threads: any.

    stats: returns the node's statistics; missing keys are omitted.
    """

    def __init__(self, stats: Callable[[], MeshStats]) -> None:
        self._stats = stats

    def collect(self, into: Samples) -> None:
        """Add the current values to `into`."""
        stats = self._stats()
        into.add_part("mesh", stats)
        if "queries_hit" in stats:
            into.add("clipper_mesh_queries_total", stats["queries_hit"], "hit")
            into.add("clipper_mesh_queries_total", stats["queries_missed"], "miss")
        self._collect_node(stats, into)

    def _collect_node(self, stats: MeshStats, into: Samples) -> None:
        if stats.get("leader") and "models_registered" in stats:
            into.add("modelmesh_models_managed_total", stats["models_registered"])
        if stats.get("capacity_bytes"):
            into.add(
                "modelmesh_instance_used_bps",
                round(10_000 * stats["used_bytes"] / stats["capacity_bytes"]),
            )
        lru_ms = stats.get("lru_ms")
        if lru_ms is not None:
            age_s = max(0.0, wall_time_us() / 1e6 - lru_ms / 1000) if lru_ms else 0.0
            into.add("clipper_mesh_lru_age_seconds", age_s)
            into.add("modelmesh_instance_lru_age_seconds", age_s)
            into.add("modelmesh_instance_lru_seconds", lru_ms / 1000)
