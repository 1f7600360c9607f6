"""Formats the shards of a parameter server for a terminal: contents and rates."""

from collections.abc import Mapping, Sequence

from clipper.cli.server_command import age_of
from clipper.clock import wall_time_us
from clipper.metrics.stats import ShardReading, ShardStats
from clipper.params.client.stats_reader import increase, lags_between, rows_of

_HELD = (
    "shard",
    "state",
    "epoch",
    "version",
    "rows",
    "MiB",
    "pulls",
    "found",
    "pushes",
    "refused",
    "behind",
    "snapshot",
    "back in",
)
_RATES = (
    "shard",
    "state",
    "rows",
    "MiB",
    "pulls/s",
    "rows/s",
    "found",
    "pushes/s",
    "rows/s",
    "lag p99",
    "refused",
    "behind",
    "share",
)


def state_of(one: ShardReading) -> str:
    """Return the state of a shard in words."""
    if "away" in one:
        return "away"
    if not one["ready"]:
        return "lost" if one["state_lost"] else "recovers"
    return "exposed" if one["exposed"] else "serves"


def held(shards: Sequence[ShardReading], sets: Sequence[Mapping[str, int]]) -> str:
    """Return totals since each shard started."""
    lines: list[Sequence[str]] = [_HELD]
    for one in shards:
        if "away" not in one:
            took, snapshot_us = one["recovery"]["seconds"], one["snapshots"].get("at_us", 0)
            lines.append(
                (
                    str(one["shard"]),
                    state_of(one),
                    str(one["server"]["epoch"]),
                    str(one["server"]["version"]),
                    str(rows_of(one, "rows")),
                    f"{one['nbytes'] / (1 << 20):.1f}",
                    str(one["server"]["pulls"]),
                    _found(one, None),
                    str(_pushes(one)),
                    str(sum(one["refused"].values())),
                    _behind(one),
                    age_of((wall_time_us() - snapshot_us) / 1e6) if snapshot_us else "none",
                    f"{took:.2f} s",
                )
            )
    cells = [
        _aligned(lines),
        *(f"shard {one['shard']} is away: {one['away']}" for one in shards if "away" in one),
        *(
            f"shard {one['shard']} does not write its log: {one['log']['error']}"
            for one in shards
            if "away" not in one and one["log"].get("error")
        ),
    ]
    for taken in sets[-5:]:
        state = "complete" if taken["complete"] else "not of all shards"
        size = f"{taken['rows']} rows, {taken['nbytes'] / (1 << 20):.1f} MiB"
        cells.append(f"snapshot {taken['number']}: {size}, {taken['shards']} shards, {state}")
    return "\n".join(cells)


def rates(before: Sequence[ShardReading], after: Sequence[ShardReading], seconds: float) -> str:
    """Return rates between two readings. share: of the rows pulled and pushed of all shards."""
    is_alive = {
        one["shard"]: one["pid"] for one in after if "away" not in one
    }  # a shard that restarted empty counts from zero
    known = {
        one["shard"]: one
        for one in before
        if "away" not in one and is_alive.get(one["shard"]) == one["pid"]
    }
    work = {
        one["shard"]: increase(known.get(one["shard"]), one, "pulled", "applied")
        for one in after
        if "away" not in one
    }
    total = sum(work.values())
    lines: list[Sequence[str]] = [_RATES]
    for one in after:
        if "away" in one:
            continue
        was = known.get(one["shard"])
        pulls, pushes = one["server"]["pulls"], _pushes(one)
        if was:
            pulls, pushes = pulls - was["server"]["pulls"], pushes - _pushes(was)
        lines.append(
            (
                str(one["shard"]),
                state_of(one),
                str(rows_of(one, "rows")),
                f"{one['nbytes'] / (1 << 20):.1f}",
                _a_second(pulls, seconds),
                _a_second(increase(was, one, "pulled"), seconds),
                _found(one, was),
                _a_second(pushes, seconds),
                _a_second(increase(was, one, "applied"), seconds),
                _lag(one, was),
                str(sum(one["refused"].values()) - (sum(was["refused"].values()) if was else 0)),
                _behind(one),
                f"{work[one['shard']] / total:.0%}" if total else "–",
            )
        )
    return "\n".join(
        [
            _aligned(lines),
            *(f"shard {one['shard']} is away: {one['away']}" for one in after if "away" in one),
        ]
    )


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def _pushes(one: ShardStats) -> int:
    return one["server"]["pushes"] + one["model_pushes"]


def _found(one: ShardStats, was: ShardStats | None) -> str:
    """Return the share of pulled rows that had been trained."""
    pulled = increase(was, one, "pulled")
    return f"{1 - increase(was, one, 'missed') / pulled:.1%}" if pulled else "–"


def _behind(one: ShardStats) -> str:
    copies = [f for f in one["followers"] if f["on"]]
    if not one["followers"]:
        return "–"
    return (
        f"{max(f['behind'] for f in copies)}, {max(f['behind_s'] for f in copies):.1f} s"
        if copies
        else "no replica"
    )


def _lag(one: ShardStats, was: ShardStats | None) -> str:
    between = lags_between(was, one)
    return f"{between.quantile(0.99):.0f}" if between.count else "–"


def _a_second(count: int, seconds: float) -> str:
    rate = max(0, count) / seconds
    return f"{rate:.0f}" if rate >= 10 or not rate else f"{rate:.1f}"
