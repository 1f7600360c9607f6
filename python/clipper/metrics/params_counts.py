"""The metrics of a set of parameter shards."""

from collections.abc import Callable, Sequence
from typing import Final

from clipper.clock import wall_time_us
from clipper.metrics.samples import Labels, Samples, SeriesLimit
from clipper.metrics.stats import ShardReading, ShardStats, SnapshotStats
from clipper_core.runtime.histogram import snapshot_of

_OF_SHARD: Final = (
    ("nbytes", "clipper_params_bytes"),
    ("resident_bytes", "clipper_params_resident_bytes"),
    ("variables", "clipper_params_variables"),
)
_OF_CONNECTIONS: Final = (
    ("epoch", "clipper_params_epoch"),
    ("version", "clipper_params_version"),
    ("connections", "clipper_params_connections"),
    ("shared_bytes", "clipper_params_shared_bytes"),
    ("pulls", "clipper_params_pulls_total"),
    ("pushes", "clipper_params_pushes_total"),
    ("repeated", "clipper_params_pushes_repeated_total"),
)
_OF_LOG: Final = (
    ("nbytes", "clipper_params_log_bytes"),
    ("records", "clipper_params_log_syncs_total"),
    ("pushes", "clipper_params_log_pushes_total"),
)
_OF_TABLE: Final = (
    ("rows", "clipper_params_rows"),
    ("nbytes", "clipper_params_table_bytes"),
    ("applied", "clipper_params_pushed_rows_total"),
    ("made", "clipper_params_admitted_rows_total"),
    ("unadmitted", "clipper_params_unadmitted_rows_total"),
    ("refused", "clipper_params_refused_rows_total"),
    ("evicted", "clipper_params_evicted_rows_total"),
    ("expired", "clipper_params_expired_rows_total"),
)


class ParamsMetrics:
    """The metrics of a set of shards. Threads: one at a time.

    stats: returns the statistics of each shard, or {"shard": number, "away": reason}.
    names_max: tables that have series of their own.
    """

    def __init__(self, stats: Callable[[], Sequence[ShardReading]], names_max: int = 200) -> None:
        self._stats, self._tables = stats, SeriesLimit(names_max)

    def collect(self, into: Samples) -> None:
        """Add the current values to `into`."""
        tables: dict[Labels, Samples] = {}
        for shard in self._stats():
            name = str(shard["shard"])
            into.add("clipper_params_shard_up", int("away" not in shard), name)
            if "away" in shard:
                continue
            _of_shard(shard, name, into)
            for table, row in shard["tables"].items():
                _of_table(row, (table, name), tables.setdefault((table,), Samples()))
        into.add_all(self._tables.keep(tables))


def _of_shard(stats: ShardStats, name: str, into: Samples) -> None:
    into.add("clipper_params_shard_ready", int(stats["ready"]), name)
    into.add("clipper_params_shard_exposed", int(stats["exposed"]), name)
    into.add_each(_OF_SHARD, stats, name)
    into.add_each(_OF_CONNECTIONS, stats["server"], name)
    into.add("clipper_params_pushes_total", stats["model_pushes"], name)
    into.add("clipper_params_recovery_seconds", stats["recovery"]["seconds"], name)
    into.add_by("clipper_params_refused_total", stats["refused"], name)
    into.add(
        "clipper_params_push_lag_versions",
        snapshot_of(stats["lags"]["buckets"], stats["lags"]["sum"]),
        name,
    )
    for one in stats["followers"]:
        copy = name, str(one["shard"])
        into.add("clipper_params_replica_whole", int(one["whole"]), *copy)
        into.add("clipper_params_replica_lag_pushes", one["behind"], *copy)
        into.add("clipper_params_replica_lag_seconds", one["behind_s"], *copy)
    if stats["snapshots"]:
        _of_snapshots(stats["snapshots"], name, into)
    if stats["log"]:
        into.add_each(_OF_LOG, stats["log"], name)


def _of_snapshots(stats: SnapshotStats, name: str, into: Samples) -> None:
    into.add("clipper_params_snapshots_total", stats["taken"], name, "ok")
    into.add("clipper_params_snapshots_total", stats["failed"], name, "failed")
    if stats["at_us"]:
        into.add(
            "clipper_params_snapshot_age_seconds",
            max(0.0, (wall_time_us() - stats["at_us"]) / 1e6),
            name,
        )
        into.add("clipper_params_snapshot_bytes", stats["nbytes"], name)
    if stats["taken"]:
        into.add("clipper_params_snapshot_seconds", stats["seconds"], name)


def _of_table(row: dict[str, int], labels: Labels, into: Samples) -> None:
    into.add_each(_OF_TABLE, row, *labels)
    into.add("clipper_params_pulled_rows_total", row["pulled"] - row["missed"], *labels, "hit")
    into.add("clipper_params_pulled_rows_total", row["missed"], *labels, "miss")
