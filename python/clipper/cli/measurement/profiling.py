"""`clipper profile`: time per batch size, and the batch size and replicas that an SLO and a rate
need.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clipper.cli.catalog.models import home_of
from clipper.cli.measurement.bench import command_line, seconds_of
from clipper.cli.output import table
from clipper.cli.server_command import ServerCommand, with_server, write_text
from clipper.errors import ClipperError, InvalidInput

if TYPE_CHECKING:
    from clipper.load.chart import Chart
    from clipper.load.profile import LatencyFit, OnProgress, Point
    from clipper.manage.rows import ModelRow

_FILES = (".onnx", ".skops")


@click.command(short_help="Measure a model by batch size, and advise for an SLO.")
@click.argument("model", metavar="MODEL|TARGET")
@click.option(
    "--slo-ms",
    type=click.FloatRange(0.01, 1e6),
    help="Recommend batch size and replicas for this SLO.",
)
@click.option(
    "--rate",
    type=click.FloatRange(0.1, 1e9),
    help="Recommend the number of replicas for this many rows per second.",
)
@click.option(
    "--batch-max",
    type=click.IntRange(1, 4096),
    default=512,
    show_default=True,
    help="Largest batch.",
)
@click.option(
    "--for",
    "seconds",
    callback=seconds_of,
    default="1s",
    show_default=True,
    help="Duration of each size.",
)
@click.option(
    "--input",
    "text",
    default="random",
    show_default=True,
    metavar="random|FILE|JSON",
    help="Rows to evaluate.",
)
@click.option(
    "--type",
    "type_",
    metavar="TYPE",
    default="",
    help="Type of one row, such as f64[64].  [from the model]",
)
@click.option("--code", metavar="DIR", multiple=True, help="Folder that TARGET imports from.")
@click.option(
    "--seen", is_flag=True, help="Use the running server's own batches instead of measuring."
)
@click.option(
    "--html", "html_", metavar="FILE.html", help="Write a page with a chart; it needs no network."
)
@click.option("--png", metavar="FILE.png", help="Draw the chart as a PNG.")
@with_server
def profile(
    command: ServerCommand,
    model: str,
    slo_ms: float | None,
    rate: float | None,
    batch_max: int,
    seconds: float,
    text: str,
    type_: str,
    code: tuple[str, ...],
    seen: bool,
    html_: str | None,
    png: str | None,
) -> None:
    """Measure how long MODEL takes for batches of 1, 2, 4, ... rows, fit a line, and recommend a
    batch size and replicas for an SLO and a rate.

    MODEL is a model of a running server, or a TARGET as for `clipper deploy`: module:attribute,
    .onnx or .skops file. It runs in its own container; other load on the machine makes it slower.
    With --seen, or if the model cannot be started here, the figures are those of the server's own
    batches.

    \b
    clipper profile digits:predict --type "f64[64]"
    clipper profile svm --slo-ms 20 --rate 5000
    clipper profile svm.onnx --html svm.html --png svm.png
    clipper profile svm:2 --seen -o json
    """
    from clipper.load import profile as measuring

    for path in (html_, png):
        if path and not Path(path).absolute().parent.is_dir():
            raise InvalidInput(
                f"there is no folder for {path}.", hint="Create the folder, or name another file."
            )
    if png:
        from clipper.load.chart_png import check_matplotlib

        check_matplotlib()
    points, how = _points(
        command, model, type_, text, batch_max, code, seconds, seen, slo_ms or 0.0
    )
    if not points:
        raise ClipperError(
            f"the server has not evaluated a batch of {model!r} yet.",
            hint="Send queries first: clipper bench APP",
        )
    line = measuring.fit_latency(points)
    found = measuring.advice(model, points, slo_ms, rate or 0.0) if slo_ms else None
    result = {
        "model": model,
        "how": how,
        "points": [
            {**dataclasses.asdict(one), "rows_per_s": round(one.rows_per_s, 1)} for one in points
        ],
        "line": dataclasses.asdict(line),
        "advice": dataclasses.asdict(found) if found else None,
    }
    command.output.show(result, lambda: _report(points, line, how, found.message if found else ""))
    sentences = [how, f"p50 = {line}", *([found.message] if found else [])]
    chart = _latency_chart(model, points, line, slo_ms)
    if html_:
        write_text(html_, _page(model, points, chart, sentences))
        click.echo(f"wrote {html_}", err=True)
    if png:
        from clipper.load.chart_png import save_png

        save_png(chart, png)
        click.echo(f"wrote {png}", err=True)


def _points(
    command: ServerCommand,
    model: str,
    type_: str,
    text: str,
    most: int,
    code: Sequence[str],
    seconds: float,
    seen: bool,
    slo_ms: float,
) -> "tuple[list[Point], str]":
    from clipper.load import profile as measuring

    target, places, version = model, tuple(code), ""
    if not (model.endswith(_FILES) or (":" in model and not model.rpartition(":")[2].isdecimal())):
        record = _record(command, model)
        version = f"{record['name']}:{record['version']}"
        target, places, type_ = (
            record["target"],
            (*places, *record["code"]),
            type_ or record["input"],
        )
        if seen or not _can_start(target):
            why = "" if seen else f"{version} is not started a second time here: "
            return (
                measuring.seen_by(command.server.model_stats(version)),
                f"{why}what the server has seen of its own batches",
            )
    elif seen:
        raise InvalidInput(
            f"--seen needs a model of the running server, and {model!r} is none.",
            hint="To list the models: clipper models",
        )
    else:
        places = places or tuple(home_of(target))
    with _progress() as on_progress:
        found = measuring.profile(
            target,
            "" if type_ == "any" else type_,
            text,
            most,
            places,
            seconds,
            on_progress,
            slo_ms,
        )
    return (
        found,
        f"measured in its own container{f', as {version} is deployed' if version else ''}",
    )


def _record(command: ServerCommand, model: str) -> "ModelRow":
    name, _, version = model.partition(":")
    rows = command.server.models(name)
    return next(
        row for row in rows if (str(row["version"]) == version if version else row["latest"])
    )


def _can_start(target: str) -> bool:
    """Return True for a module, or an existing file that is not a pickle."""
    return (":" in target and "/" not in target) or (
        target.endswith(_FILES) and Path(target).is_file()
    )


@contextlib.contextmanager
def _progress() -> "Iterator[OnProgress]":
    if not sys.stderr.isatty():
        yield lambda batch, turn, of: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    with Progress(
        TextColumn("{task.description}"), BarColumn(), console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task("starting the container", total=None)

        def show(batch: int, turn: int, of: int) -> None:
            bar.update(task, description=f"batches of {batch}", completed=turn, total=of)

        yield show


def _rows(points: "list[Point]") -> list[list[str]]:
    head = ["batch", "p50 ms", "p99 ms", "rows/s", "turns"]
    cells = (
        (one.batch, f"{one.p50_ms:.3g}", f"{one.p99_ms:.3g}", f"{one.rows_per_s:.0f}", one.turns)
        for one in points
    )
    return [head, *([str(cell) for cell in row] for row in cells)]


def _report(points: "list[Point]", line: "LatencyFit", how: str, advice: str) -> str:
    from clipper.load.profile import bars

    lines = [
        how,
        table(_rows(points), ""),
        "",
        "p50 (bar) and p99 (line), logarithmic",
        *bars(points),
        "",
        f"p50 = {line}",
    ]
    return "\n".join([*lines, advice] if advice else lines)


def _latency_chart(
    model: str, points: "list[Point]", line: "LatencyFit", slo_ms: float | None
) -> "Chart":
    from clipper.load.chart import Axis, Chart, Series

    fitted = [(one.batch, line.base_ms + line.row_ms * one.batch) for one in points]
    series = [
        Series("p50", [(one.batch, one.p50_ms) for one in points], "a"),
        Series("p99", [(one.batch, one.p99_ms) for one in points], "b"),
        Series(f"p50 = {line}", fitted, "c"),
    ]
    rules = [(f"SLO {slo_ms:g} ms", slo_ms)] if slo_ms else []
    ticks = [(float(one.batch), str(one.batch)) for one in points]
    x = Axis("rows in a batch", log=True, ticks=ticks)
    return Chart(f"Latency by batch: {model}", x, Axis("ms", log=True), series, rules)


def _page(model: str, points: "list[Point]", latency: "Chart", advice: list[str]) -> str:
    from clipper.load.chart import Axis, Chart, Series
    from clipper.load.machine import machine
    from clipper.load.page import page

    rates = Series("rows a second", [(one.batch, one.rows_per_s) for one in points], "d")
    y = Axis("rows a second", log=True)
    charts = [latency, Chart("Throughput by batch", latency.x, y, [rates])]
    return page(
        f"clipper profile {model}", command_line(), advice, _rows(points), charts, machine()
    )
