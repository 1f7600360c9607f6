"""The live table of the demo: models, application, last event, and keys."""

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from clipper_demo.faults import FREEZE_S, InjectedFault
from clipper_demo.report import ApplicationFigures, DemoReport, ModelFigures

EVENTS_MAX = 5
BOTH_LINES = 42  # that the lessons and the table need together
_DOTS = {"ready": ("●", "green"), "suspect": ("◐", "yellow"), "failed": ("×", "bold red")}
_OTHER = ("○", "red")
_WORDS = {
    "running": "loading",
    "backoff": "down",
    "held": "down",
    "short": "down",
    "queued": "starting",
    "starting": "starting",
    "stopping": "stopping",
    "killing": "stopping",
    "suspect": "not responding",
}

_KEYS = Text.assemble(
    *(
        part
        for key, what in (
            ("k", "kill -9"),
            ("s", f"freeze {FREEZE_S:g} s"),
            ("d", "wrong labels"),
            ("v", "view"),
            ("+ -", "rate"),
            ("q", "quit"),
        )
        for part in ((f" {key} ", "reverse"), (f" {what}  ", "dim"))
    )
)


def screen(
    report: DemoReport,
    rate: float,
    elapsed_s: float,
    events: Sequence[Text],
    learning_plot: Text,
    shows_learning: bool,
    height: int,
) -> RenderableType:
    """Draw the display; with fewer than `height` lines either the learning plot or the table of
    models is omitted.
    """
    head = Text.assemble(
        (" digits", "bold"), (f"  {rate:g} queries a second  {clock(elapsed_s)}", "dim")
    )
    parts: list[RenderableType] = [Text(), head]
    both = height >= BOTH_LINES
    if shows_learning or both:
        parts += [Text(), learning_plot, Text()] if both else [learning_plot]
    if both or not shows_learning:
        parts += [models(report.models), application(report.application), Text()]
    shown = EVENTS_MAX if both or shows_learning else EVENTS_MAX - 3
    recent = events[-shown:]
    parts += [Padding(event, (0, 1)) for event in recent] + [Text()] * (shown - len(recent))
    return Group(*parts, Text.assemble(" ", _KEYS))


def models(figures: Sequence[ModelFigures]) -> Table:
    """Draw the table of models."""
    table = Table(
        box=box.SIMPLE_HEAD, header_style="dim", border_style="dim", pad_edge=True, padding=(0, 1)
    )
    table.add_column("model", min_width=9)
    table.add_column("", min_width=2)
    for title, width in (
        ("queries", 7),
        ("p50", 7),
        ("p99", 8),
        ("batch", 5),
        ("limit", 5),
        ("cached", 6),
    ):
        table.add_column(title, justify="right", min_width=width)
    table.add_column("state", min_width=14)
    for one in figures:
        table.add_row(
            Text(one.name, "bold"),
            Text.assemble(*(_DOTS.get(state, _OTHER) for state in one.replicas)),
            f"{one.requested_per_s:.0f}/s",
            milliseconds(one.p50_ms),
            milliseconds(one.p99_ms),
            f"{one.batch_rows:.1f}" if one.batch_rows else "-",
            str(one.limit) if one.limit else "-",
            f"{one.cached:.0%}",
            _state(one),
        )
    return table


def application(figures: ApplicationFigures) -> Table:
    """Draw SLO, latency, accuracy and default answers in two columns."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, min_width=10)
    table.add_column(no_wrap=True, overflow="ellipsis")
    in_time = Text(
        f"{share(figures.slo_met)} met", "green" if figures.slo_met >= 0.99 else "yellow"
    )
    server = f"p50 {milliseconds(figures.p50_ms)}, p99 {milliseconds(figures.p99_ms)}"
    wall = f"p50 {milliseconds(figures.wall_p50_ms)}, p99 {milliseconds(figures.wall_p99_ms)}"
    rows: list[tuple[str, str | Text]] = [
        ("answers", f"{figures.answers_per_s:.0f}/s, {figures.accuracy:.1%} of them right"),
        (f"SLO {figures.slo_ms:g} ms", in_time),
        ("latency", Text.assemble(server, ("  in the server", "dim"))),
        ("", Text.assemble(wall, ("  for the caller, since it was due", "dim"))),
        ("default", _defaults(figures)),
    ]
    for name, value in rows:
        table.add_row(Text(f" {name}", "dim"), value)
    return table


def _defaults(figures: ApplicationFigures) -> Text:
    text = Text(
        "none" if not figures.defaults else f"{figures.defaults} answers",
        "" if figures.defaults else "dim",
    )
    if figures.partial:
        text.append(f"; {figures.partial} answers without some model", "dim")
    for reason, count in list(figures.default_reasons.items())[:2]:
        text.append(f"\n{count} x {reason}", "yellow")
    for error, count in figures.errors.items():
        text.append(f"\n{count} x {error}", "red")
    return text


def _state(figures: ModelFigures) -> Text:
    others = [state for state in figures.replicas if state not in ("ready", "stopped")]
    if not others and figures.ready < figures.wanted:
        return Text(f"{figures.ready} of {figures.wanted}", "yellow")
    if not others:
        return Text("ready", "green")
    word = _WORDS.get(others[0], others[0])
    return Text(word if len(figures.replicas) == 1 else f"{len(others)} {word}", "yellow")


def event_line(at_s: float, what: str, text: str, style: str) -> Text:
    """Return the line about an event."""
    return Text.assemble(
        (f"{clock(at_s)}  ", "dim"),
        (what, "bold"),
        (text, style),
        no_wrap=True,
        overflow="ellipsis",
    )


def happened(fault: InjectedFault, at_s: float) -> Text:
    """Describe a fault in one line: injected, noticed, or over."""
    line = Text.assemble((f"{clock(at_s)}  ", "dim"), (fault.container, "bold"))
    line.no_wrap, line.overflow = True, "ellipsis"
    if fault.over:
        line.append(f" is back after {fault.back_s:.2f} s", "green")
        return line.append(f"; answers: {meanwhile(fault)}", "dim")
    if fault.gone_s >= 0:
        return line.append(
            f" is missed after {fault.gone_s * 1000:.0f} ms; queries go on without it", "yellow"
        )
    how = (
        f"kill -9 {fault.pid}"
        if fault.kind == "killed"
        else f"kill -STOP {fault.pid}, for {FREEZE_S:g} s"
    )
    return line.append(f" {fault.kind} ({how})", "red")


def meanwhile(fault: InjectedFault) -> str:
    """Describe what queries got during a fault."""
    whole = fault.queries - fault.partial - fault.defaults
    return f"{whole} whole, {fault.partial} partial, {fault.defaults} default"


def milliseconds(value: float) -> str:
    """Format milliseconds."""
    return "-" if value == 0 else f"{value:.2f} ms" if value < 10 else f"{value:.1f} ms"


def share(value: float) -> str:
    """Format a percentage that is not rounded up to 100."""
    return "100 %" if value == 1 else f"{min(value * 100, 99.99):.2f} %"


def clock(seconds: float) -> str:
    """Format a time."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
