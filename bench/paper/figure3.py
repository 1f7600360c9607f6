"""Figure 3: batch latency of six models by batch size, and the largest batch within 20 ms.

The paper measures models of Spark and scikit-learn on MNIST. Here the inputs are scikit-learn's
digits, enlarged to 28 x 28; a linear SVM that evaluates row by row in Python stands for the one of
Spark, since both pay for each row instead of for each batch.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.svm import SVC, LinearSVC

from bench import plots
from bench.harness import Row, row
from clipper.load.profile import Point, fit_latency, profile

Array = np.ndarray[Any, Any]
SLO_MS = 20.0
WIDTH = 28 * 28
SIZE_MAX = 4096  # rows; larger batches of this width are split


def main(quick: bool, plot: Path | None = None) -> list[Row]:
    """Profile each model with static batches in a container of its own."""
    seconds = 0.05 if quick else 1.0
    found: dict[str, list[Point]] = {}
    for name, predict in models().items():
        most = 64 if quick else SIZE_MAX
        found[name] = profile(
            predict, f"f32[{WIDTH}]", "random", most, [], seconds, lambda *_: None, SLO_MS
        )
    if plot is not None:
        draw(plot, found)
    return rows(found)


def models() -> dict[str, Callable[[Array], Any]]:
    """Return the predict functions by name; each takes f32[n, 784] and returns n labels."""
    x, y = enlarged_digits()
    linear, forest = LinearSVC(dual=False).fit(x, y), RandomForestClassifier(50, n_jobs=1).fit(x, y)
    kernel, logistic = SVC().fit(x, y), LogisticRegression(max_iter=300).fit(x, y)
    weights, offsets = linear.coef_.astype("f4"), linear.intercept_.astype("f4")

    def no_op(inputs: Array) -> Array:
        return np.zeros(len(inputs))

    def one_by_one(inputs: Array) -> list[int]:
        return [int(np.argmax(weights @ one + offsets)) for one in inputs]

    return {
        "no-op": no_op,
        "linear SVM": linear.predict,
        "logistic regression": logistic.predict,
        "linear SVM, row by row": one_by_one,
        "random forest": forest.predict,
        "kernel SVM": kernel.predict,
    }


def enlarged_digits() -> tuple[Array, Array]:
    """Return 900 digits of 8 x 8 pixels enlarged to 24 x 24 within 28 x 28, f32[900, 784], and
    their labels."""
    x, y = load_digits(return_X_y=True)
    large = np.kron(x[:900].reshape(-1, 8, 8) / 16, np.ones((1, 3, 3)))
    return np.pad(large, ((0, 0), (2, 2), (2, 2))).reshape(-1, WIDTH).astype("f4"), y[:900]


def largest_in_time(points: Sequence[Point]) -> Point:
    """Return the largest batch with p99 within the SLO; the smallest one if none is."""
    return max((one for one in points if one.p99_ms <= SLO_MS), key=size, default=points[0])


def size(point: Point) -> int:
    return point.batch


def rows(found: Mapping[str, Sequence[Point]]) -> list[Row]:
    """Return the figures of each model, and the ratio between the linear and the kernel SVM."""
    result: list[Row] = []
    for name, points in found.items():
        best, fit = largest_in_time(points), fit_latency(points)
        capped = " (the largest that was tried)" if best is points[-1] else ""
        note = f"p99 {best.p99_ms:.3g} ms; median {fit}"
        batch = f"{name}: largest batch with p99 <= {SLO_MS:g} ms{capped}"
        result += [
            row(batch, best.batch, "rows", note=note),
            row(f"{name}: throughput at that batch", best.rows_per_s, "rows/s"),
        ]
    linear, kernel = (largest_in_time(found[name]).batch for name in ("linear SVM", "kernel SVM"))
    title = "linear SVM's largest batch over the kernel SVM's"
    note = "the kernel SVM of the paper holds vectors of 60 000 training rows, this one of 900"
    return [*result, row(title, linear / kernel, "x", "the paper", 241, note=note)]


def draw(folder: Path, found: Mapping[str, Sequence[Point]]) -> None:
    """Plot p99 over the batch size, both logarithmic, with the SLO."""
    plt = plots.pyplot()
    if plt is None:
        return
    figure, axes = plt.subplots(figsize=(9, 5))
    for name, points in found.items():
        axes.plot([size(one) for one in points], [one.p99_ms for one in points], "o-", label=name)
    axes.axhline(SLO_MS, color="0.5", linestyle="--")
    axes.set(xscale="log", yscale="log", xlabel="rows in a batch", ylabel="p99 of a batch, ms")
    axes.set(title="Batch latency by batch size")
    axes.legend(fontsize=8)
    plots.save(figure, folder / "figure3.png")
