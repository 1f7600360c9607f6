"""Draws the display of `clipper top`."""

import time
from collections.abc import Callable, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from clipper.cli.monitoring.top_state import ServerReadings
from clipper.cli.output import state_colour
from clipper.metrics.samples import Stats

BLOCKS = "▁▂▃▄▅▆▇█"
SORTS = ("name", "rate", "p99", "queue", "memory")
SPARK_MAX = 24
_WIDE = 98  # columns of the numbers
_KEYS = (("q", "quit"), ("p", "pause"), ("s", "sort"))


def screen(
    watched: ServerReadings,
    where: str,
    width: int,
    sort: str = "name",
    paused: bool = False,
    keys: bool = True,
) -> RenderableType:
    """Draw everything in the given number of columns; a narrow display omits the history bars."""
    bars = min(max((width - _WIDE) // 2, 0), SPARK_MAX)
    bars = bars if bars >= 4 else 0
    parts = [
        _head(watched, where, paused),
        Text(),
        _applications(watched, bars),
        _models(watched, sort, bars),
    ]
    if keys:
        words = [
            part for key, what in _KEYS for part in ((f" {key} ", "reverse"), (f" {what}  ", "dim"))
        ]
        parts.append(Text.assemble(" ", *words, (f"sorted by {sort}", "dim")))
    return Group(*parts)


def spark(values: Sequence[float], width: int, top: float = 0.0) -> str:
    """Format the last `width` values as block characters, scaled to the largest (or `top`)."""
    if not width:
        return ""
    shown = list(values)[-width:]
    highest = max([*shown, top, 1e-9])
    return "".join(
        " " if value <= 0 else BLOCKS[min(int(value / highest * 8), 7)] for value in shown
    ).rjust(width)


def _head(watched: ServerReadings, where: str, paused: bool) -> Text:
    about = watched.about
    title = f"{about.get('version', '')} · {where} · state {about.get('state', '?')}"
    line = Text.assemble((" clipper ", "bold"), (title, "dim"))
    if "started_us" in about and watched.rows:
        line.append(f" · up {_span(watched.rows[-1]['t'] - about['started_us'] / 1e6)}", "dim")
    if watched.restarts:
        line.append(f" · restarted {watched.restarts} x while watched", "yellow")
    if paused:
        line.append("  paused", "bold yellow")
    if watched.lost_s:
        away_s = time.monotonic() - watched.lost_s
        line.append(
            f"\n the server has not answered for {away_s:.0f} s: {watched.why} Waiting for it.",
            "bold red",
        )
    return line


def _applications(watched: ServerReadings, bars: int) -> RenderableType:
    rows = watched.applications()
    if not rows:
        return Text(" no applications. To create one: clipper app set NAME --model MODEL", "dim")
    table = _table(
        ("application", "q/s", "", "ok", "default", "refused", "error", "p50", "p99", "SLO", ""),
        bars,
    )
    for row in rows:
        late = row["p99_ms"] is not None and row["p99_ms"] > row["slo_ms"]
        counts = [_count(row[kind], kind) for kind in ("ok", "default", "refused", "error")]
        p99 = Text(
            _ms(row["p99_ms"]), "red" if late else "green" if row["p99_ms"] is not None else "dim"
        )
        rates = Text(spark(row["rates"], bars), "cyan")
        p99s = Text(spark(row["p99s"], bars, row["slo_ms"]), "red" if late else "magenta")
        table.add_row(
            *_shown(
                (
                    Text(row["name"], "bold"),
                    _number(row["per_s"]),
                    rates,
                    *counts,
                    _ms(row["p50_ms"]),
                    p99,
                    _ms(row["slo_ms"]),
                    p99s,
                ),
                bars,
                (2, 10),
            )
        )
    return table


def _models(watched: ServerReadings, sort: str, bars: int) -> RenderableType:
    rows = watched.model_rows()
    if not rows:
        return Text(" no models. To add one: clipper deploy NAME module:function", "dim")
    by: dict[str, Callable[[Stats], float]] = {
        "rate": lambda row: -row["rows_per_s"],
        "p99": lambda row: -(row["p99_ms"] or 0),
        "queue": lambda row: -row["queued"],
        "memory": lambda row: -row["rss_bytes"],
    }
    rows.sort(key=lambda row: (by[sort](row) if sort in by else 0, row["name"], row["version"]))
    table = _table(
        ("model", "state", "repl", "rows/s", "", "p50", "p99", "queue", "batch", "RSS"), bars
    )
    for row in rows:
        memory = f"{row['rss_bytes'] / 1e6:.0f} MB" if row["rss_bytes"] else "-"
        table.add_row(
            *_shown(
                (
                    Text(f"{row['name']}:{row['version']}", "bold"),
                    Text(row["state"], state_colour(row["state"])),
                    f"{row['ready']}/{row['wanted']}",
                    _number(row["rows_per_s"]),
                    Text(spark(row["rates"], bars), "cyan"),
                    _ms(row["p50_ms"]),
                    _ms(row["p99_ms"]),
                    str(row["queued"]),
                    str(row["batch"] or "-"),
                    memory,
                ),
                bars,
                (4,),
            )
        )
    return Group(table, *(_trouble(row) for row in rows if row["error"]))


def _trouble(row: Stats) -> Text:
    line = Text.assemble((f" {row['name']}:{row['version']} ", "bold"), (row["error"], "yellow"))
    return line.append(f"  -> {row['next']}" if row["next"] else "", "dim")


def _shown(cells: Sequence[Text | str], bars: int, places: tuple[int, ...]) -> list[Text | str]:
    """Drop the bar columns if there is no room."""
    return [cell for number, cell in enumerate(cells) if bars or number not in places]


def _table(titles: Sequence[str], bars: int) -> Table:
    padding = (0, 1) if bars else (0, 1, 0, 0)
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", border_style="dim", padding=padding)
    for title in titles:
        if title or bars:
            table.add_column(
                title,
                justify="left" if title in ("application", "model", "state", "") else "right",
                no_wrap=True,
            )
    return table


def _count(per_s: float, kind: str) -> Text:
    style = (
        {"ok": "", "default": "yellow", "refused": "yellow", "error": "red"}[kind]
        if per_s
        else "dim"
    )
    return Text(_number(per_s), style)


def _number(value: float) -> str:
    return "0" if not value else f"{value:.1f}" if value < 10 else f"{value:.0f}"


def _ms(value: float | None) -> str:
    return (
        "-"
        if value is None
        else (
            f"{value:.2f} ms"
            if value < 10
            else f"{value:.1f} ms"
            if value < 1000
            else f"{value:.0f} ms"
        )
    )


def _span(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    return (
        f"{seconds:.0f} s"
        if minutes < 2
        else f"{minutes:.0f} min"
        if hours < 2
        else f"{hours:.0f} h"
    )
