"""Charts as PNGs, drawn by matplotlib."""

from typing import Final

from clipper.errors import ClipperError, InvalidInput
from clipper.load.chart import Chart

_COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
_STYLES: Final = ("o-", "s--", ":", "-.")


class NeedsMatplotlib(ClipperError):
    """matplotlib is not installed."""


def check_matplotlib() -> None:
    """Raise NeedsMatplotlib if matplotlib is missing, before anything is measured."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise NeedsMatplotlib(
            "a PNG is drawn with matplotlib, and matplotlib is not installed.",
            hint='Run: pip install "clipper-serving[plot]"',
        ) from None


def save_png(chart: Chart, path: str) -> None:
    """Write a chart as a PNG. Raises InvalidInput if the file cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for one, colour, style in zip(chart.series, _COLOURS, _STYLES, strict=False):
        axes.plot(*zip(*one.points, strict=True), style, color=colour, label=one.name)
    for text, at in chart.rules:
        axes.axhline(at, color="#b3400a", lw=1, ls="-.", label=text)
    scales = {False: "linear", True: "log"}
    axes.set(xscale=scales[chart.x.log], yscale=scales[chart.y.log])
    axes.set(xlabel=chart.x.title, ylabel=chart.y.title, title=chart.title)
    if chart.x.ticks:
        axes.set_xticks(*zip(*chart.x.ticks, strict=True))
    axes.grid(True, which="major", alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path)
    except OSError as error:
        raise InvalidInput(
            f"cannot write {path}: {error.strerror or error}.", hint="Name another file."
        ) from None
