"""The dashboard's rows of shards, computed from readings that a test makes up, and when the shards
are read."""

import threading
from typing import Any

from clipper.errors import InvalidInput
from clipper.manage.dashboard.shards import SHARDS_MAX, TABLES_MAX, of_shards, shards_now
from clipper.params.client.stats_cache import StatsCache
from clipper_core.runtime.histogram import LatencyHistogram
from tests.memory_container import wait_until

ABSENT = {"shard": 1, "away": "connection refused"}
KEYS = (
    "rows",
    "nbytes",
    "pulled",
    "missed",
    "applied",
    "made",
    "unadmitted",
    "refused",
    "evicted",
    "expired",
)


def shard(
    number: int,
    n: int,
    lags: tuple[int, ...] = (),
    pid: int = 1,
    behind_s: float = 0.0,
    **more: Any,
) -> dict[str, Any]:
    """Return the statistics of a shard whose counts are all n, of ten rows pulled n times each, one
    missed."""
    histogram = LatencyHistogram()
    for lag in lags:
        histogram.record(lag)
    snapshot = histogram.snapshot()
    table = {**dict.fromkeys(KEYS, n), "pulled": 10 * n, "dim": 4}
    copy = {"shard": 0, "whole": True, "behind": n, "behind_s": behind_s}
    return {
        "shard": number,
        "pid": pid,
        "ready": True,
        "exposed": False,
        "nbytes": n,
        "resident_bytes": n,
        "state_lost": False,
        "variables": 0,
        "tables": {"t": table},
        "server": {"epoch": 1, "version": n, "pulls": n, "pushes": n},
        "model_pushes": n,
        "refused": {"full": n, "bad_input": 0},
        "recovery": {"seconds": 0.1, "source": "nothing"},
        "followers": [copy],
        "lags": {
            "buckets": [[low, count] for low, _, count in snapshot.buckets()],
            "sum": snapshot.sum,
        },
        "snapshots": {},
        **more,
    }


def test_a_row_is_what_came_between_two_readings() -> None:
    before, after = (
        [shard(0, 2, (1,)), shard(1, 5)],
        [shard(0, 5, (1, 3, 9)), shard(1, 5, behind_s=1.5)],
    )
    assert of_shards(before, after) == {
        "pulls": 3,
        "pushes": 6,
        "hit": 27,
        "miss": 3,
        "pushed": 3,
        "refused": 3,
        "rows": 10,
        "behind": 1.5,
        "by": {"0": [30, 3]},
        "lag": [3, 9],
    }


def test_one_that_began_anew_is_counted_whole_and_one_that_was_away_not_at_all() -> None:
    row = of_shards([shard(0, 50, pid=1), ABSENT], [shard(0, 3, pid=2), shard(1, 9)])
    assert (row["pulls"], row["by"], row["rows"]) == (3, {"0": [30, 3]}, 12)
    assert of_shards([], [shard(0, 3)]) == {"rows": 3}
    assert of_shards([shard(0, 3)], [{**ABSENT, "shard": 0}]) == {}


def test_now_is_of_each_shard_and_of_each_table_over_all() -> None:
    now = shards_now(
        [shard(0, 3, (7,)), ABSENT, shard(2, 4, exposed=True), shard(3, 1, ready=False)]
    )
    assert [one["state"] for one in now["shards"]] == ["serves", "away", "exposed", "recovers"]
    assert now["shards"][1]["why"] == "connection refused"
    assert (now["shards"][0]["lag"], now["shards"][2]["lag"]) == (7, None)
    assert now["shards"][0]["refused"] == {"full": 3}
    assert (
        now["tables"]["t"]["pulled"],
        now["tables"]["t"]["missed"],
        now["tables"]["t"]["dim"],
    ) == (80, 8, 4)


def test_of_many_there_are_bounds() -> None:
    many = [shard(i, 1) for i in range(2 * SHARDS_MAX)]
    table = many[0]["tables"]["t"]
    many[0]["tables"] = {f"t{i}": {**table, "pulled": i} for i in range(2 * TABLES_MAX)}
    now = shards_now(many)
    assert len(now["shards"]) == SHARDS_MAX
    assert len(now["tables"]) == TABLES_MAX
    assert f"t{2 * TABLES_MAX - 1}" in now["tables"]


def test_readers_of_statistics_do_not_wait() -> None:
    go, read, readings = threading.Event(), threading.Semaphore(0), []

    def reading() -> list[dict[str, Any]]:
        assert go.wait(20)
        readings.append(len(readings))
        read.release()
        if len(readings) == 2:
            raise InvalidInput("no such set")
        return [shard(0, len(readings))]

    observer = StatsCache(reading)
    assert list(observer.latest()) == []
    assert list(observer.latest()) == [], "it hangs, and nobody waits for it"
    go.set()
    assert read.acquire(timeout=20)
    wait_until(observer.latest)
    assert read.acquire(timeout=20), "the question before was one more"
    observer.stop()
    observer.stop()
    assert list(observer.latest()) == list(observer.latest())
