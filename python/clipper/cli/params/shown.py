"""Formats the shards of a parameter server for a terminal."""

from collections.abc import Mapping, Sequence

from clipper.clock import age_of, wall_time_us
from clipper.metrics.stats import ShardReading, ShardStats
from clipper.params.client.stats_reader import rows_of

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
                    _found(one),
                    str(one["server"]["pushes"] + one["model_pushes"]),
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
        *(
            f"shard {one['shard']}: {why}"
            for one in shards
            if "away" not in one
            for why in one.get("degraded", ())
        ),
    ]
    for taken in sets[-5:]:
        state = "complete" if taken["complete"] else "not of all shards"
        size = f"{taken['rows']} rows, {taken['nbytes'] / (1 << 20):.1f} MiB"
        cells.append(f"snapshot {taken['number']}: {size}, {taken['shards']} shards, {state}")
    return "\n".join(cells)


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def _found(one: ShardStats) -> str:
    """Return the share of pulled rows that had been trained."""
    pulled = rows_of(one, "pulled")
    return f"{1 - rows_of(one, 'missed') / pulled:.1%}" if pulled else "–"


def _behind(one: ShardStats) -> str:
    copies = [f for f in one["followers"] if f["on"]]
    if not one["followers"]:
        return "–"
    return (
        f"{max(f['behind'] for f in copies)}, {max(f['behind_s'] for f in copies):.1f} s"
        if copies
        else "no replica"
    )
