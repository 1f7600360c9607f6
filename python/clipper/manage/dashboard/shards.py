"""Dashboard data of a set of shards: counts of a second, and the state of each shard and table."""

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Any, Final

from clipper.params.client.stats_reader import Stats, lags_between

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


def of_shards(before: Sequence[Stats], after: Sequence[Stats]) -> Row:
    """Return the counts of all shards in this second.

    pulls, pushes; hit, miss: rows pulled; pushed: rows; refused: requests; rows: present now;
    lag: p50 and p99 of gradients, in versions; behind: seconds, of the slowest replica; by:
    shard -> [rows pulled, rows pushed].

    A shard that was away before is not counted, since its counts are not of this second. A
    restarted one is counted whole.
    """
    there = [one for one in after if "away" not in one]
    known = {one["shard"]: one for one in before if "away" not in one}
    each = [(known[one["shard"]], one) for one in there if one["shard"] in known]
    pairs = [(was if was["pid"] == one["pid"] else {}, one) for was, one in each]
    by = {
        one["shard"]: [_more(was, one, "pulled"), _more(was, one, "applied")] for was, one in pairs
    }
    missed = sum(_more(was, one, "missed") for was, one in pairs)
    row: Row = {
        "pulls": sum(_of_server(was, one, "pulls") for was, one in pairs),
        "pushes": sum(
            _of_server(was, one, "pushes") + one["model_pushes"] - was.get("model_pushes", 0)
            for was, one in pairs
        ),
        "hit": sum(pulled for pulled, _ in by.values()) - missed,
        "miss": missed,
        "pushed": sum(n for _, n in by.values()),
        "refused": sum(
            sum(one["refused"].values()) - sum(was.get("refused", {}).values())
            for was, one in pairs
        ),
        "rows": sum(_sum(one, "rows") for one in there),
        "behind": round(max(map(_behind_s, there), default=0.0), 2),
        "by": {str(shard): work for shard, work in list(by.items())[:SHARDS_MAX] if any(work)},
    }
    if pairs and (lags := reduce(add, (lags_between(was, one) for was, one in pairs))).count:
        row["lag"] = [round(lags.quantile(0.5), 1), round(lags.quantile(0.99), 1)]
    return {key: value for key, value in row.items() if value not in (0, {})}


def shards_now(stats: Sequence[Stats]) -> Row:
    """Return one reading of a set of shards: sums by table, and a row for each shard."""

    tables: dict[str, Row] = {}
    for one in stats:
        for name, table in one.get("tables", {}).items():
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


def _state(one: Stats) -> str:
    if not one["ready"]:
        return "recovers"
    return "exposed" if one["exposed"] else "serves"


def _shard_now(one: Stats) -> Row:
    if "away" in one:
        return {"shard": one["shard"], "state": "away", "why": one["away"]}
    if one.get("state_lost"):
        return {
            "shard": one["shard"],
            "state": "away",
            "why": "it came back without what it had: clipper params begin-anew",
        }
    lags, snapshots = lags_between({}, one), one["snapshots"]
    return {
        "shard": one["shard"],
        "state": _state(one),
        "pid": one["pid"],
        "epoch": one["server"]["epoch"],
        "version": one["server"]["version"],
        "rows": _sum(one, "rows"),
        "variables": one["variables"],
        "nbytes": one["nbytes"],
        "rss": one["resident_bytes"],
        "pulled": _sum(one, "pulled"),
        "missed": _sum(one, "missed"),
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


def _behind_s(one: Stats) -> float:
    return float(max((f["behind_s"] for f in one["followers"]), default=0.0))


def _sum(one: Stats, key: str) -> int:
    return sum(table[key] for table in one.get("tables", {}).values())


def _more(was: Stats, one: Stats, key: str) -> int:
    return max(0, _sum(one, key) - _sum(was, key))


def _of_server(was: Stats, one: Stats, key: str) -> int:
    return int(one["server"][key] - was.get("server", {}).get(key, 0))
