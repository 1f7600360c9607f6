"""The metrics of a set of parameter shards."""

from collections.abc import Callable, Sequence

from clipper.clock import wall_time_us
from clipper.metrics.samples import Labels, Samples, SeriesLimit
from clipper.metrics.stats import ShardReading, ShardStats, SnapshotStats
from clipper_core.runtime.histogram import snapshot_of


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
    into.add_part("shard", stats, name)
    into.add("clipper_params_pushes_total", stats["model_pushes"], name)
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
        into.add("clipper_params_snapshot_last_duration_seconds", stats["seconds"], name)


def _of_table(row: dict[str, int], labels: Labels, into: Samples) -> None:
    into.add_part("table", row, *labels)
    into.add("clipper_params_pulled_rows_total", row["pulled"] - row["missed"], *labels, "hit")
    into.add("clipper_params_pulled_rows_total", row["missed"], *labels, "miss")
