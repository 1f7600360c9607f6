"""Counts of a mesh node, and its metrics, under our names and under those of model-mesh."""

from collections.abc import Callable
from typing import Final

from clipper.clock import wall_time_us
from clipper.metrics.samples import Samples, Stats
from clipper.metrics.stats import MeshStats
from clipper_core.runtime.histogram import Counter, LatencyHistogram, Snapshot

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


# key of the stats -> our name, model-mesh's
_GAUGES: Final[tuple[tuple[str, str, str], ...]] = (
    ("capacity_bytes", "clipper_mesh_capacity_bytes", "modelmesh_instance_capacity_bytes"),
    ("used_bytes", "clipper_mesh_used_bytes", "modelmesh_instance_used_bytes"),
    ("models_loaded", "clipper_mesh_models_held", "modelmesh_instance_models_total"),
    ("loading", "clipper_mesh_loads_running", ""),
    ("queued", "clipper_mesh_loads_waiting", ""),
    ("models_registered", "clipper_mesh_models_registered", ""),
    ("vmodels", "clipper_mesh_vmodels", ""),
    ("instances", "clipper_mesh_nodes", ""),
    ("leader", "clipper_mesh_is_leader", ""),
    ("stale_s", "clipper_mesh_stale_for_seconds", ""),
    ("hit_ratio", "clipper_mesh_hit_ratio", ""),
    ("loaded_somewhere", "", "modelmesh_models_loaded_total"),
    ("failing", "", "modelmesh_models_with_failure_total"),
)
_HISTOGRAMS: Final[tuple[tuple[str, str, str], ...]] = (
    ("load_wait_us", "clipper_mesh_load_wait_seconds", "modelmesh_cache_miss_milliseconds"),
    (
        "load_queue_us",
        "clipper_mesh_load_queue_seconds",
        "modelmesh_loading_queue_delay_milliseconds",
    ),
    ("load_us", "clipper_mesh_load_seconds", "modelmesh_loadmodel_milliseconds"),
    (
        "eviction_age_us",
        "clipper_mesh_eviction_age_seconds",
        "modelmesh_age_at_eviction_milliseconds",
    ),
    ("model_bytes", "clipper_mesh_model_bytes", "modelmesh_loaded_model_size_bytes"),
)


class MeshMetrics:
    """The metrics of one node. Threads: any.

    stats: returns the node's statistics; missing keys are omitted.
    """

    def __init__(self, stats: Callable[[], MeshStats]) -> None:
        self._stats = stats

    def collect(self, into: Samples) -> None:
        """Add the current values to `into`."""
        stats = self._stats()
        by_key: Stats = stats
        for key, *names in (*_GAUGES, *_HISTOGRAMS):
            value = by_key.get(key)
            for name in names:
                if name and value is not None:
                    into.add(name, value if isinstance(value, Snapshot) else float(value))
        for key, outcome in (("queries_hit", "hit"), ("queries_missed", "miss")):
            if key in by_key:
                into.add("clipper_mesh_queries_total", by_key[key], outcome)
        into.add_by("clipper_mesh_loads_total", stats.get("load_outcomes", {}))
        for key, name in (
            ("load_failures", "modelmesh_loadmodel_failure"),
            ("evictions", "clipper_mesh_unloads_total"),
        ):
            if key in by_key:
                into.add(name, by_key[key])
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
