"""Pictures of the figures, by matplotlib where it is installed."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

HOW = "no plot: matplotlib is not installed. pip install 'clipper-serving[plot]'"
SMOOTH = 250


def pyplot() -> Any:
    """Return matplotlib.pyplot without a display; None, after printing a line, if it is not
    installed."""
    try:
        import matplotlib
    except ImportError:
        print(HOW, file=sys.stderr)
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def curves(
    path: Path, title: str, errors: Mapping[str, Any], spans: tuple[tuple[int, int], ...] = ()
) -> None:
    """Draw the error over queries, as the mean of 250: f64[queries] by name. spans: shaded."""
    plt = pyplot()
    if plt is None:
        return
    figure, axes = plt.subplots(figsize=(9, 5))
    for begin, end in spans:
        axes.axvspan(begin, end, color="0.92")
    for name, error in errors.items():
        smooth = np.convolve(error, np.ones(SMOOTH) / SMOOTH, "valid")
        style = "k--" if name.startswith("oracle") else "-"
        axes.plot(np.arange(len(smooth)) + SMOOTH, smooth, style, linewidth=1, label=name)
    axes.set(xlabel="queries", ylabel=f"error, mean of {SMOOTH}", title=title)
    axes.legend(fontsize=7, ncols=2)
    save(figure, path)


def bars(path: Path, title: str, groups: Mapping[str, Mapping[str, float]]) -> None:
    """Draw a group of bars by name, each bar by name."""
    plt = pyplot()
    if plt is None:
        return
    figure, axes = plt.subplots(figsize=(9, 5))
    names = list(next(iter(groups.values())))
    for i, (group, values) in enumerate(groups.items()):
        axes.bar(
            np.arange(len(names)) + i * 0.8 / len(groups),
            [values[name] for name in names],
            0.8 / len(groups),
            label=group,
        )
    axes.set_xticks(np.arange(len(names)) + 0.3, names, fontsize=8)
    axes.set(title=title)
    axes.legend(fontsize=7)
    save(figure, path)


def lines(
    path: Path,
    title: str,
    x: tuple[str, Sequence[float]],
    y: tuple[str, Mapping[str, Sequence[float]]],
) -> None:
    """Draw curves by name over x, on a logarithmic scale, two of a kind together. x and y: labels
    and values."""
    plt = pyplot()
    if plt is None:
        return
    figure, axes = plt.subplots(figsize=(9, 5))
    for i, (name, values) in enumerate(y[1].items()):  # in pairs of one colour
        axes.plot(x[1], values, "s--" if i % 2 else "o-", color=f"C{i // 2}", label=name)
    axes.set(xlabel=x[0], ylabel=y[0], title=title, yscale="log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_xticks(x[1], [str(value) for value in x[1]])
    axes.legend(fontsize=8)
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    print(f"wrote {path}", file=sys.stderr)


def timeline(
    seen: Sequence[tuple[float, float, str]],
    marks: Sequence[tuple[float, str]],
    path: Path,
    title: str,
) -> None:
    """Draw latencies over time, with marks of events. seen: (seconds, ms, reason of a failure or
    empty)."""
    plt = pyplot()
    if plt is None:
        return
    figure, axes = plt.subplots(figsize=(10, 4.5))
    good = [(at, ms) for at, ms, why in seen if not why]
    bad = [(at, ms) for at, ms, why in seen if why]
    axes.scatter(*zip(*good, strict=True), s=3, color="tab:blue", label="answered")
    if bad:
        axes.scatter(*zip(*bad, strict=True), s=24, marker="x", color="tab:red", label="failed")
    for at, name in marks:
        axes.axvline(at, color="0.7", linewidth=0.8)
        axes.annotate(
            name,
            (at, 1.0),
            xycoords=("data", "axes fraction"),
            rotation=90,
            va="top",
            ha="right",
            fontsize=8,
        )
    axes.set(yscale="log", xlabel="seconds", ylabel="ms from when a query was due", title=title)
    axes.legend(loc="lower right")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
