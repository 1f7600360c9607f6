"""Figure 9: 1 to 16 containers of heavy-tailed latency: waiting for all, by a deadline, and as soon
as decided.

Beside the accuracy that is lost at the deadline stands its bound: what a majority of the same trees
loses over all rows, when as many votes are left out at random.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits
from sklearn.tree import DecisionTreeClassifier

import clipper
from bench import plots
from bench.harness import Goal, Row, row

Array = np.ndarray[Any, Any]
SIZES = (1, 2, 4, 8, 16)
SLO_MS = 20.0
PATIENCE_MS = 5_000.0
TRAINED = 300  # rows that the trees see; each sees a third of them
QUERIES_PER_S = 20.0
BOOTSTRAP = 100
LEFT_OUT = 50


@dataclass(frozen=True)
class Served:
    """The outcome of the queries of one ensemble. latencies: ms."""

    latencies: Array
    right: float
    missing: float

    def ms(self, q: float) -> float:
        return float(np.quantile(self.latencies, q))


def main(quick: bool, plot: Path | None = None) -> list[Row]:
    queries = 30 if quick else 200
    x, y, train, rest = digits()
    trees = [tree(x[train], y[train], i) for i in range(max(SIZES))]
    votes = np.stack([one.predict(x[rest]) for one in trees])
    outcomes: dict[int, dict[str, Served]] = {}
    with clipper.start(server={"model_threads": 1}) as server:
        for i, one in enumerate(trees):
            server.deploy(f"tree{i:02}", straggler(one, seed=i), input="f64[64]", cache=False)
        names = [f"tree{i:02}" for i in range(max(SIZES))]
        for size in SIZES:
            outcomes[size] = served(server, names[:size], list(in_turns(x[rest], y[rest], queries)))
    if plot is not None:
        draw(plot, outcomes)
    return [
        one
        for size, found in outcomes.items()
        for one in rows_of(size, found, lost_at_random(votes[:size], y[rest], found))
    ]


def lost_at_random(votes: Array, labels: Array, found: Mapping[str, "Served"]) -> float:
    """Return the points of accuracy that a majority of votes, int (models, rows), loses without as
    many votes as missed the deadline, drawn at random LEFT_OUT times."""
    share = found["by the deadline"].missing / len(votes)
    rng = np.random.default_rng(5)
    ones = np.ones(votes.shape, bool)
    lost = [
        majority(votes, ones, labels)
        - majority(votes, rng.random(np.shape(votes)) >= share, labels)
        for _ in range(LEFT_OUT)
    ]
    return 100 * float(np.mean(lost))


def majority(votes: Array, present: Array, labels: Array) -> float:
    """Return how often most of the votes that are present are right; ties count in part."""
    counts = np.stack([np.sum((votes == label) & present, axis=0) for label in np.unique(votes)])
    most = (counts == counts.max(axis=0)) & present.any(axis=0)
    right = most[np.searchsorted(np.unique(votes), labels), np.arange(len(labels))]
    return float(np.mean(right / np.maximum(most.sum(axis=0), 1)))


def served(
    server: clipper.ClipperServer, names: list[str], turns: list[tuple[Array, Array]]
) -> dict[str, Served]:
    """Measure the three ways of waiting, in turns."""
    size = len(names)
    common: dict[str, Any] = {"models": names, "default": -1}
    apps = {
        "waiting for all": server.app(f"all{size}", slo_ms=PATIENCE_MS, **common),
        "by the deadline": server.app(f"deadline{size}", slo_ms=SLO_MS, **common),
        "as soon as decided": server.app(
            f"early{size}", slo_ms=PATIENCE_MS, decider="majority", **common
        ),
    }
    found: dict[str, list[Served]] = {name: [] for name in apps}
    for inputs, labels in turns:
        for name, app in apps.items():
            found[name].append(serve(app, inputs, labels))
    return {name: together(parts) for name, parts in found.items()}


def draw(folder: Path, outcomes: Mapping[int, Mapping[str, Served]]) -> None:
    curves = {
        f"{name}, {part}": [found[name].ms(q) for found in outcomes.values()]
        for name in next(iter(outcomes.values()))
        for part, q in (("p50", 0.5), ("p99", 0.99))
    }
    title = f"Ensembles of models with heavy-tailed latency; deadline {SLO_MS:g} ms"
    plots.lines(folder / "figure9.png", title, ("models", list(outcomes)), ("latency, ms", curves))


def digits() -> tuple[Array, Array, Array, Array]:
    """Return the inputs, the labels, and which of them are for training and for queries."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    return x, y, order[:TRAINED], order[TRAINED:]


def tree(x: Array, y: Array, seed: int) -> Any:
    """Return a small tree on a bootstrap sample of its own, which is right on little more than half
    of the queries."""
    chosen = np.random.default_rng(seed).integers(0, len(x), BOOTSTRAP)
    return DecisionTreeClassifier(max_depth=6, max_features=8, random_state=seed).fit(
        x[chosen], y[chosen]
    )


def straggler(model: Any, seed: int) -> Callable[[Any], Any]:
    """Draw a lognormal latency with a median of 6 ms; 4 % take three times as long, and 1 % wait
    for Pareto(1.6) from 15 ms on."""
    rng = np.random.default_rng(1000 + seed)

    def predict(xs: Any) -> Any:
        begun = time.perf_counter()
        outputs = model.predict(xs)
        takes_ms = 6.0 * np.exp(0.25 * rng.standard_normal())
        chance = rng.random()
        if chance < 0.01:
            takes_ms = 15.0 * (1.0 + rng.pareto(1.6))
        elif chance < 0.05:
            takes_ms *= 3
        time.sleep(max(0.0, min(takes_ms, 500.0) / 1000 - (time.perf_counter() - begun)))
        return outputs

    return predict


def in_turns(x: Array, y: Array, queries: int) -> list[tuple[Array, Array]]:
    """Return parts of the stream, so that a busy moment of the machine affects all ways of waiting
    alike."""
    chosen = np.random.default_rng(1).integers(0, len(x), queries)
    return [(x[part], y[part]) for part in np.array_split(chosen, max(1, queries // 100))]


def serve(app: Any, inputs: Array, labels: Array) -> Served:
    """Send queries of one client in a Poisson stream; a query does not wait for the answer of the
    one before."""
    gaps = np.random.default_rng(len(inputs)).exponential(1 / QUERIES_PER_S, len(inputs))
    futures = []
    for x, gap in zip(inputs, gaps, strict=True):
        futures.append(app.predict(x))
        time.sleep(gap)
    answers = [future.result() for future in futures]
    right = float(
        np.mean([answer.output == label for answer, label in zip(answers, labels, strict=True)])
    )
    missing = float(np.mean([len(answer.missing) for answer in answers]))
    return Served(np.array([answer.latency_us / 1000 for answer in answers]), right, missing)


def together(parts: Sequence[Served]) -> Served:
    return Served(
        np.concatenate([part.latencies for part in parts]),
        float(np.mean([part.right for part in parts])),
        float(np.mean([part.missing for part in parts])),
    )


def rows_of(size: int, found: dict[str, Served], at_random: float) -> list[Row]:
    everybody, deadline, early = found.values()
    models = f"{size} model{'s' if size > 1 else ''}"
    lost = 100 * (everybody.right - deadline.right)
    return [
        row(
            f"{models}, waiting for all: p99",
            everybody.ms(0.99),
            "ms",
            "its p50",
            everybody.ms(0.5),
        ),
        row(
            f"{models}, by the deadline of {SLO_MS:g} ms: p99",
            deadline.ms(0.99),
            "ms",
            goal=Goal("value_at_most", SLO_MS + 1),
        ),
        row(f"{models}, by the deadline: models missing a query", deadline.missing, ""),
        row(
            f"{models}, by the deadline: points of accuracy lost",
            lost,
            "",
            "right of all, %",
            100 * everybody.right,
            Goal("value_at_most", 1.0) if size > 1 else None,
            bounded_by=f"{deadline.missing:.2g} votes of {size} left out at random cost"
            f" {at_random:.1f} points over all rows; one query of"
            f" {len(deadline.latencies)} is {100 / len(deadline.latencies):g} points",
        ),
        row(
            f"{models}, as soon as decided: p50",
            early.ms(0.5),
            "ms",
            "waiting for all",
            everybody.ms(0.5),
            Goal("at_most", 0.6) if size == 16 else None,
            bounded_by=f"votes: {size - early.missing:.1f} of {size} had come when it was decided",
        ),
        row(
            f"{models}, as soon as decided: right",
            100 * early.right,
            "%",
            "waiting for all",
            100 * everybody.right,
        ),
    ]
