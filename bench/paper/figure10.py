"""Figure 10: error of users as they give feedback, with a policy that learns for each user, beside
a model chosen by dialect and one model for all.

The paper serves speakers of eight dialects of TIMIT. Here a dialect is a way of writing:
scikit-learn's digits, turned by some angle. Each dialect has a model trained on it, and one model
is trained on all. A user writes in a dialect, and some images in a neighbouring one; of every five
users one has named a wrong dialect, as a form filled in by people has it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import ndimage
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

import clipper
from bench import plots
from bench.harness import Goal, Row, Sample, row

Array = np.ndarray[Any, Any]
ANGLES = (-45, -32, -19, -6, 6, 19, 32, 45)  # degrees
DIALECTS = len(ANGLES)
QUERIES = 9  # of a user; feedback follows each but the last
USERS = 240
OTHER_DIALECT, WRONG_FORM = 0.15, 0.2
TRAINED = 900
POLICIES = ("mixture", "stacking", "exp4")
STATIC, NONE = "the dialect that the user named", "one model for all"
SLO_MS = 2_000.0


def main(quick: bool, plot: Path | None = None) -> list[Row]:
    """Send queries and feedback of the users one after another, with policies that have a state for
    each user."""
    users = 16 if quick else USERS
    rng = np.random.default_rng(1)
    wrong: dict[str, Array] = {}
    with clipper.start(server={"model_threads": 1}) as server:
        for name, model in trained().items():
            server.deploy(name, model.predict, input="f64[64]", cache=False)
        names = [f"dialect{number}" for number in range(DIALECTS)]
        common: dict[str, Any] = {"slo_ms": SLO_MS, "default": -1}
        apps = {
            policy: server.app(policy, models=names, policy=policy, **common) for policy in POLICIES
        }
        alone = {name: server.app(f"{name}-alone", models=[name], **common) for name in names}
        everyone = server.app("everyone", models=["all"], **common)
        sessions = [session(rng) for _ in range(users)]
        for policy, app in apps.items():
            wrong[policy] = np.array(
                [learning(app, f"user{i}", one) for i, one in enumerate(sessions)]
            )
        wrong[STATIC] = np.array(
            [static(alone[f"dialect{one.named}"], one) for one in sessions], dtype=bool
        )
        wrong[NONE] = np.array([static(everyone, one) for one in sessions], dtype=bool)
    if plot is not None:
        draw(plot, wrong)
    return rows(wrong)


class Session:
    """The queries of one user.

    named: the dialect that the user named. inputs: f64[QUERIES, 64]. labels: int[QUERIES].
    """

    def __init__(self, named: int, inputs: Array, labels: Array) -> None:
        self.named, self.inputs, self.labels = named, inputs, labels


def digits() -> tuple[Array, Array]:
    """Return all images, f64[n, 8, 8] from 0 to 1, in a fixed order, and their labels."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    return x[order].reshape(-1, 8, 8) / 16, y[order]


def in_dialect(images: Array, dialect: int) -> Array:
    """Return f64[n, 64]: the images as a writer of this dialect would have drawn them."""
    turned = ndimage.rotate(images, ANGLES[dialect], axes=(1, 2), reshape=False, order=1)
    flat: Array = np.clip(turned, 0, 1).reshape(len(images), -1)
    return flat


def trained() -> dict[str, Any]:
    """Return a model for each dialect, trained on it alone, and one trained on all of them."""
    images, labels = digits()
    images, labels = images[:TRAINED], labels[:TRAINED]
    spoken = [in_dialect(images, dialect) for dialect in range(DIALECTS)]
    models = {
        f"dialect{dialect}": LogisticRegression(max_iter=500).fit(spoken[dialect], labels)
        for dialect in range(DIALECTS)
    }
    every = np.concatenate(spoken), np.tile(labels, DIALECTS)
    return {**models, "all": LogisticRegression(max_iter=500).fit(*every)}


def session(rng: np.random.Generator) -> Session:
    """Draw a user: a dialect, what the user named, and images that no model has seen."""
    images, labels = digits()
    dialect = int(rng.integers(DIALECTS))
    named = int(rng.integers(DIALECTS)) if rng.random() < WRONG_FORM else dialect
    chosen = rng.integers(TRAINED, len(images), QUERIES)
    spoken = np.where(rng.random(QUERIES) < OTHER_DIALECT, (dialect + 1) % DIALECTS, dialect)
    inputs = np.concatenate(
        [in_dialect(images[i : i + 1], int(d)) for i, d in zip(chosen, spoken, strict=True)]
    )
    return Session(named, inputs, labels[chosen])


def learning(app: Any, user: str, one: Session) -> list[bool]:
    """Return which answers were wrong, with feedback before the next query."""
    wrong = []
    for x, label in zip(one.inputs, one.labels.tolist(), strict=True):
        answer = app.predict(x, user=user).result()
        wrong.append(bool(answer.output != label))
        app.feedback(answer, label=label)
    return wrong


def static(app: Any, one: Session) -> list[bool]:
    """Return which answers of an application with one model were wrong."""
    futures = [app.predict(x) for x in one.inputs]
    return [
        bool(future.result().output != label)
        for future, label in zip(futures, one.labels.tolist(), strict=True)
    ]


def rows(wrong: Mapping[str, Array]) -> list[Row]:
    """Return the error of each way before any feedback and after eight labels of the same user."""
    result = []
    form = interval(wrong[STATIC])
    for name, found in wrong.items():
        after = interval(found[:, -3:])
        goal = Goal("at_most", 1.0) if name == POLICIES[0] else None
        note = "the paper: below the static choice after a few labels of the user"
        error = f"{name}: error"
        if name in POLICIES:
            result.append(row(f"{error} at a user's first query", interval(found[:, :1]), ""))
            title = f"{error} after 6 to 8 labels of the user"
            result.append(row(title, after, "", STATIC, form, goal, note))
        else:
            result.append(row(error, interval(found), "", STATIC, form))
    return result


def interval(wrong: Array) -> Sample:
    """Return the error over users as a sample: its median, and what resampled users say."""
    rng, users = np.random.default_rng(2), wrong.mean(axis=1)
    return Sample(tuple(float(rng.choice(users, len(users)).mean()) for _ in range(200)))


def draw(folder: Path, wrong: Mapping[str, Array]) -> None:
    """Plot the error over the number of labels in the user's feedback."""
    plt = plots.pyplot()
    if plt is None:
        return
    figure, axes = plt.subplots(figsize=(9, 5))
    for name, found in wrong.items():
        known: Sequence[float] = found.mean(axis=0).tolist()
        if name in POLICIES:
            axes.plot(range(QUERIES), known, "o-", label=name)
        else:
            axes.axhline(float(found.mean()), linestyle="--", color="0.5")
            axes.annotate(name, (QUERIES - 1, float(found.mean())), ha="right", va="bottom")
    axes.set(xlabel="labels in the user's feedback", ylabel="error", title="Error by user")
    axes.legend(fontsize=8)
    plots.save(figure, folder / "figure10.png")
