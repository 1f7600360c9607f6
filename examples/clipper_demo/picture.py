"""The demo's PNG: share of each model, errors, and events over time."""

import os
from typing import TYPE_CHECKING

from clipper_demo.online_learning import Story

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#0072b2", "#009e73", "#e69f00", "#cc79a7", "#56b4e9", "#d55e00")
_EVENT = "#b3400a"
_TITLES = {
    "exp3": "exp3: share of the queries sent to a model",
    "stacking": "stacking: share of a model in the answer",
}


def draw(story: Story, path: str | os.PathLike[str]) -> None:
    """Write the PNG of `figure_of`."""
    figure_of(story).savefig(path)


def figure_of(story: Story) -> "Figure":
    """Return a figure of matplotlib: a panel of shares per application, one of errors, and events
    across all."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 7.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(story.applications) + 1, 1, sharex=True)
    times = [sample.at_s for sample in story.samples]
    for panel, application in zip(panels, story.applications, strict=False):
        _shares(panel, story, application, times, first=panel is panels[0])
    _errors(panels[-1], story, times)
    for number, panel in enumerate(panels):
        _events(panel, story, has_names=number == 0)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.25)
        panel.margins(x=0)
    panels[-1].set_xlabel("seconds since the first query")
    figure.suptitle(
        "Five models of handwritten digits, learned from while they serve",
        x=0.01,
        ha="left",
        weight="bold",
    )
    return figure


def _shares(panel: "Axes", story: Story, application: str, times: list[float], first: bool) -> None:
    for number, model in enumerate(story.models):
        values = [100 * sample.shares[application].get(model, 0.0) for sample in story.samples]
        panel.plot(times, values, color=_COLOURS[number % len(_COLOURS)], linewidth=2, label=model)
    panel.set_title(
        _TITLES.get(application, application), loc="left", fontsize=10, pad=26 if first else 6
    )
    panel.set_ylabel("share, %")
    panel.set_ylim(0, None)
    panel.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def _errors(panel: "Axes", story: Story, times: list[float]) -> None:
    styles = ("-", "--", ":", "-.")
    for number, application in enumerate(story.applications):
        errors = [sample.errors[application] for sample in story.samples]
        total = story.samples[-1].answers[application] if story.samples else 0
        label = f"{application}\n({story.whole_error(application):.1%} of {total})"
        panel.plot(
            times,
            errors,
            color="#333333",
            linestyle=styles[number % len(styles)],
            linewidth=2,
            label=label,
        )
    panel.set_title("wrong answers so far", loc="left", fontsize=10)
    panel.set_ylabel("answers")
    panel.set_ylim(0, None)
    panel.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def _events(panel: "Axes", story: Story, has_names: bool) -> None:
    """Draw a line per event through all panels, with labels on two levels so that neighbours do
    not overlap.
    """
    for number, event in enumerate(story.events):
        panel.axvline(event.at_s, color=_EVENT, linewidth=1, linestyle=(0, (3, 2)))
        if has_names:
            panel.text(
                event.at_s,
                1.01 + 0.08 * (number % 2),
                event.text,
                fontsize=8,
                color=_EVENT,
                transform=panel.get_xaxis_transform(),
                ha="center",
                va="bottom",
            )
