"""Figure 7: five classifiers on the digits: how far their agreement, and the calibrated confidence,
tell of errors."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.svm import SVC

from bench import plots
from bench.harness import Goal, Row, Sample, row
from bench.runs import in_parallel
from clipper.selection import Observation, Prediction, Query, Truth, create_policy
from clipper.types import VersionedModel

Array = np.ndarray[Any, Any]
TRAINED = 200  # rows each classifier sees; the rest is the stream
BINS = 20


def main(quick: bool, plot: Path | None = None) -> list[Row]:
    seeds = range(2 if quick else 20)
    found = in_parallel("figure 7", once, [(seed,) for seed in seeds])
    if plot is not None:
        draw(plot, found)
    rows = []
    for name in ("stacking", "exp4", "ensemble"):
        error = Sample(tuple(one[name]["error"] for one in found))
        best = Sample(tuple(one["best"]["error"] for one in found))
        rows.append(
            row(
                f"{name}: error",
                error,
                "",
                "best single classifier",
                best,
                Goal("at_most", 1.05) if name == "stacking" else None,
            )
        )
        alike = Sample(tuple(one[name]["all agree"] for one in found))
        goal = Goal("at_most", 0.25) if name == "stacking" else None
        rows.append(
            row(
                f"{name}: error when all five agree",
                alike,
                "",
                "its error",
                error,
                goal,
                bounded_by="errors that all five classifiers make alike: no policy hears of "
                "another label",
            )
        )
        share = Sample(tuple(one[name]["share"] for one in found))
        rows.append(row(f"{name}: share of queries on which all agree", share, ""))
        ece = Sample(tuple(one[name]["ece"] for one in found))
        raw = Sample(tuple(one[name]["ece of agreement"] for one in found))
        goal = Goal("value_at_most", 0.015) if name == "stacking" else None
        least = Sample(tuple(one[name]["ece if it were true"] for one in found))
        rows.append(
            row(
                f"{name}: calibration error of the confidence",
                ece,
                "",
                "of the agreement",
                raw,
                goal,
            )
        )
        rows.append(row(f"{name}: the same, if each confidence were exactly true", least, ""))
    return rows


def draw(folder: Path, found: list[dict[str, dict[str, float]]]) -> None:
    shown = {
        "error": "error",
        "error, all five agree": "all agree",
        "ECE": "ece",
        "ECE of agreement": "ece of agreement",
    }
    groups = {
        name: {
            label: float(np.median([one[name][key] for one in found]))
            for label, key in shown.items()
        }
        for name in ("stacking", "exp4", "ensemble")
    }
    plots.bars(
        folder / "figure7.png",
        f"Five classifiers on digits, {TRAINED} rows each; {len(found)} splits",
        groups,
    )


def classifiers(seed: int) -> list[Any]:
    return [
        LogisticRegression(max_iter=300),
        SVC(),
        KNeighborsClassifier(3),
        RandomForestClassifier(50, random_state=seed),
        MLPClassifier(max_iter=400, random_state=seed),
    ]


def once(seed: int) -> dict[str, dict[str, float]]:
    """Run one split of the digits: each policy combines the same predictions and gets the labels
    right after."""
    x, y = load_digits(return_X_y=True)
    x = x / 16.0
    order = np.random.default_rng(seed).permutation(len(x))
    train, rest = order[:TRAINED], order[TRAINED:]
    with warnings.catch_warnings():
        # a weak model among five is what the figure is about
        warnings.simplefilter("ignore", ConvergenceWarning)
        said = np.stack(
            [model.fit(x[train], y[train]).predict(x[rest]) for model in classifiers(seed)], axis=1
        )
    found = {name: stream(name, said, y[rest]) for name in ("stacking", "exp4", "ensemble")}
    found["best"] = {"error": float((said != y[rest, None]).mean(axis=0).min())}
    return found


def stream(name: str, said: Array, labels: Array) -> dict[str, float]:
    policy, models = create_policy(name), [VersionedModel(f"m{i}", 1) for i in range(said.shape[1])]
    state, answers = policy.init(models), []
    for votes, label in zip(said.tolist(), labels.tolist(), strict=True):
        plan = policy.select(state, Query(), models)
        heard = {model: Prediction(votes[models.index(model)]) for model in plan.models}
        answers.append(policy.combine(state, heard, ()))
        state = policy.observe(state, Observation(plan, heard, Truth(label), answers[-1].output))
    wrong = np.array([answer.output for answer in answers]) != labels
    alike = (said == said[:, :1]).all(axis=1)
    agreement = np.array([np.bincount(votes).max() / len(votes) for votes in said])
    return {
        "error": float(wrong.mean()),
        "all agree": float(wrong[alike].mean()),
        "share": float(alike.mean()),
        "ece": calibration_error(np.array([answer.confidence for answer in answers]), ~wrong),
        "ece if it were true": expected_if_true(
            np.array([answer.confidence for answer in answers])
        ),
        "ece of agreement": calibration_error(agreement, ~wrong),
    }


def expected_if_true(confidence: Array) -> float:
    """Return what `calibration_error` is by chance alone, when answers are right as often as their
    confidence says."""
    rng = np.random.default_rng(0)
    return float(
        np.mean(
            [
                calibration_error(confidence, rng.random(len(confidence)) < confidence)
                for _ in range(10)
            ]
        )
    )


def calibration_error(confidence: Array, right: Array) -> float:
    """Return the expected calibration error: the distance between confidence and accuracy over
    equal bins of confidence, weighted by their sizes."""
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    return float(
        sum(
            abs(confidence[bins == b].mean() - right[bins == b].mean()) * (bins == b).mean()
            for b in range(BINS)
            if (bins == b).any()
        )
    )
