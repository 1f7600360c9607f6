"""Dashboard data of a set of shards: counts of a second, and the state of each shard and table."""

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Any, Final

from clipper.metrics.stats import ShardReading, ShardStats
from clipper.params.client.stats_reader import increase, lags_between, rows_of

SHARDS_MAX: Final = 64  # with numbers of their own
TABLES_MAX: Final = 50
_OF_TABLES: Final = (
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
Row = dict[str, Any]


def of_shards(before: Sequence[ShardReading], after: Sequence[ShardReading]) -> Row:
    """Return the counts of all shards in this second.

    pulls, pushes; hit, miss: rows pulled; pushed: rows; refused: requests; rows: present now;
    lag: p50 and p99 of gradients, in versions; behind: seconds, of the slowest replica; by: of
    each shard, [rows pulled, rows pushed].

    A shard that was away before is not counted, since its counts are not of this second. A
    restarted one is counted whole.
    """
    there = [one for one in after if "away" not in one]
    known = {one["shard"]: one for one in before if "away" not in one}
    each = [(known[one["shard"]], one) for one in there if one["shard"] in known]
    pairs = [(was if was["pid"] == one["pid"] else None, one) for was, one in each]
    by = {
        one["shard"]: [increase(was, one, key) for key in ("pulled", "applied")]
        for was, one in pairs
    }
    missed = sum(increase(was, one, "missed") for was, one in pairs)
    row: Row = {
        "pulls": sum(_of_server(was, one, "pulls") for was, one in pairs),
        "pushes": sum(
            _of_server(was, one, "pushes")
            + one["model_pushes"]
            - (was["model_pushes"] if was else 0)
            for was, one in pairs
        ),
        "hit": sum(pulled for pulled, _ in by.values()) - missed,
        "miss": missed,
        "pushed": sum(n for _, n in by.values()),
        "refused": sum(
            sum(one["refused"].values()) - (sum(was["refused"].values()) if was else 0)
            for was, one in pairs
        ),
        "rows": sum(rows_of(one, "rows") for one in there),
        "behind": round(max(map(_behind_s, there), default=0.0), 2),
        "by": {str(shard): work for shard, work in list(by.items())[:SHARDS_MAX] if any(work)},
    }
    if pairs and (lags := reduce(add, (lags_between(was, one) for was, one in pairs))).count:
        row["lag"] = [round(lags.quantile(0.5), 1), round(lags.quantile(0.99), 1)]
    return {key: value for key, value in row.items() if value not in (0, {})}


def shards_now(stats: Sequence[ShardReading]) -> Row:
    """Return one reading of a set of shards: sums by table, and a row for each shard."""

    tables: dict[str, Row] = {}
    for one in stats:
        for name, table in ({} if "away" in one else one["tables"]).items():
            sums = tables.setdefault(name, {"dim": table["dim"], **dict.fromkeys(_OF_TABLES, 0)})
            for key in _OF_TABLES:
                sums[key] += table[key]
    busiest = sorted(tables, key=lambda name: -(tables[name]["pulled"] + tables[name]["applied"]))[
        :TABLES_MAX
    ]
    return {
        "shards": [_shard_now(one) for one in stats[:SHARDS_MAX]],
        "tables": {name: tables[name] for name in sorted(busiest)},
    }


def _state(one: ShardStats) -> str:
    if not one["ready"]:
        return "recovers"
    return "exposed" if one["exposed"] else "serves"


def _shard_now(one: ShardReading) -> Row:
    if "away" in one:
        return {"shard": one["shard"], "state": "away", "why": one["away"]}
    if one["state_lost"]:
        return {
            "shard": one["shard"],
            "state": "away",
            "why": "it restarted without its data: clipper params begin-anew",
        }
    lags, snapshots = lags_between(None, one), one["snapshots"]
    return {
        "shard": one["shard"],
        "state": _state(one),
        "pid": one["pid"],
        "epoch": one["server"]["epoch"],
        "version": one["server"]["version"],
        "rows": rows_of(one, "rows"),
        "variables": one["variables"],
        "nbytes": one["nbytes"],
        "rss": one["resident_bytes"],
        "pulled": rows_of(one, "pulled"),
        "missed": rows_of(one, "missed"),
        "lag": round(lags.quantile(0.99), 1) if lags.count else None,
        "copies": len(one["followers"]),
        "whole": sum(f["whole"] for f in one["followers"]),
        "behind": max((f["behind"] for f in one["followers"]), default=0),
        "behind_s": round(_behind_s(one), 2),
        "snapshot_us": snapshots.get("at_us", 0),
        "error": snapshots.get("error", ""),
        "recovery": one["recovery"],
        "refused": {why: n for why, n in one["refused"].items() if n},
    }


def _behind_s(one: ShardStats) -> float:
    return float(max((f["behind_s"] for f in one["followers"]), default=0.0))


def _of_server(was: ShardStats | None, one: ShardStats, key: str) -> int:
    return one["server"][key] - (was["server"][key] if was else 0)
