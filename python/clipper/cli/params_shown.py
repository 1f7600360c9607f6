"""Formats the shards of a parameter server for a terminal: contents and rates."""

from collections.abc import Sequence

from clipper.cli.server_command import age_of
from clipper.clock import wall_time_us
from clipper.params.client.stats_reader import Stats, lags_between

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


def state_of(one: Stats) -> str:
    """Return the state of a shard in words."""
    if "away" in one:
        return "away"
    if not one["ready"]:
        return "lost" if one.get("state_lost") else "recovers"
    return "exposed" if one["exposed"] else "serves"


def held(shards: Sequence[Stats], sets: Sequence[Stats]) -> str:
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
                    str(_sum(one, "rows")),
                    f"{one['nbytes'] / (1 << 20):.1f}",
                    str(one["server"]["pulls"]),
                    _found(one, {}),
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
            if one.get("log", {}).get("error")
        ),
    ]
    for one in sets[-5:]:
        state = "complete" if one["complete"] else "not of all shards"
        size = f"{one['rows']} rows, {one['nbytes'] / (1 << 20):.1f} MiB"
        cells.append(f"snapshot {one['number']}: {size}, {one['shards']} shards, {state}")
    return "\n".join(cells)


def rates(before: Sequence[Stats], after: Sequence[Stats], seconds: float) -> str:
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
        one["shard"]: _more(one, known.get(one["shard"], {}), "pulled", "applied")
        for one in after
        if "away" not in one
    }
    total = sum(work.values())
    lines: list[Sequence[str]] = [_RATES]
    for one in after:
        if "away" in one:
            continue
        was = known.get(one["shard"], {})
        pulls, pushes = one["server"]["pulls"], _pushes(one)
        if was:
            pulls, pushes = pulls - was["server"]["pulls"], pushes - _pushes(was)
        lines.append(
            (
                str(one["shard"]),
                state_of(one),
                str(_sum(one, "rows")),
                f"{one['nbytes'] / (1 << 20):.1f}",
                _a_second(pulls, seconds),
                _a_second(_more(one, was, "pulled"), seconds),
                _found(one, was),
                _a_second(pushes, seconds),
                _a_second(_more(one, was, "applied"), seconds),
                _lag(one, was),
                str(sum(one["refused"].values()) - sum(was.get("refused", {}).values())),
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


def _sum(one: Stats, key: str) -> int:
    return sum(table[key] for table in one.get("tables", {}).values())


def _more(one: Stats, was: Stats, *keys: str) -> int:
    return max(0, sum(_sum(one, key) - _sum(was, key) for key in keys))


def _pushes(one: Stats) -> int:
    return int(one["server"]["pushes"] + one["model_pushes"])


def _found(one: Stats, was: Stats) -> str:
    """Return the share of pulled rows that had been trained."""
    pulled = _more(one, was, "pulled")
    return f"{1 - _more(one, was, 'missed') / pulled:.1%}" if pulled else "–"


def _behind(one: Stats) -> str:
    copies = [f for f in one["followers"] if f["on"]]
    if not one["followers"]:
        return "–"
    return (
        f"{max(f['behind'] for f in copies)}, {max(f['behind_s'] for f in copies):.1f} s"
        if copies
        else "no replica"
    )


def _lag(one: Stats, was: Stats) -> str:
    between = lags_between(was, one)
    return f"{between.quantile(0.99):.0f}" if between.count else "–"


def _a_second(count: int, seconds: float) -> str:
    rate = max(0, count) / seconds
    return f"{rate:.0f}" if rate >= 10 or not rate else f"{rate:.1f}"
