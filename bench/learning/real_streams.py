"""Streams of real queries: data sets that scikit-learn brings, and models trained on parts of them.

Five models of different kinds are trained on a fifth of half the rows each, three rows in four of
which are of the labels that the model has seen most. The queries are rows of the other half, drawn
with replacement; models report the probability of their answer. Rates are 0 and 1, so that the best
model of each query is wrong only where all are.
"""

from typing import Any

import numpy as np

from bench.learning.streams import Array, Stream

DATA_SETS = ("digits", "breast_cancer", "wine")  # sklearn.datasets.load_...
VECTORS = " with probabilities"  # for each label
NAMES = tuple(f"real {name.replace('_', ' ')}{end}" for end in ("", VECTORS) for name in DATA_SETS)
QUERIES = 5_000
MODELS = 5
OWN = 0.75  # share of a model's rows that have labels of its own


def real_stream(name: str, seed: int, repetition: int) -> Stream:
    """Return one repetition of a name of NAMES, with other parts, models and queries. With
    probabilities the answers are the same as without."""
    from sklearn import datasets
    from sklearn.preprocessing import scale

    number = NAMES.index(name) % len(DATA_SETS)
    load = getattr(datasets, "load_" + DATA_SETS[number])
    rng = np.random.default_rng([seed, repetition, number])
    x, labels = load(return_X_y=True)
    x, order = scale(x), rng.permutation(len(x))
    train, rest = order[: len(x) // 2], order[len(x) // 2 :]
    models = [trained(i, x, labels, train, rng) for i in range(MODELS)]
    asked = rng.choice(rest, QUERIES)
    p = [model.predict_proba(x[asked]) for model in models]
    answers = np.stack(
        [model.classes_[one.argmax(axis=1)] for model, one in zip(models, p, strict=True)], axis=1
    )
    return Stream(
        labels[asked],
        answers.astype(np.int64),
        (answers != labels[asked, None]).astype(float),
        confidence=np.stack([one.max(axis=1) for one in p], axis=1),
        heard=np.ones(QUERIES, bool),
        users=np.zeros(QUERIES, np.int64),
        probabilities=by_label(models, p, len(np.unique(labels))) if VECTORS in name else None,
    )


def by_label(models: list[Any], p: list[Array], classes: int) -> Array:
    """Return f64[queries, models, classes], 0 for labels that a model has not seen."""
    found = np.zeros((len(p[0]), len(models), classes))
    for i, (model, one) in enumerate(zip(models, p, strict=True)):
        found[:, i, model.classes_] = one
    return found


def trained(i: int, x: Array, labels: Array, rows: Array, rng: np.random.Generator) -> Any:
    """Return model i of five, trained on a fifth of the rows, with its own shares of the labels."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.naive_bayes import GaussianNB
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.tree import DecisionTreeClassifier

    seed = int(rng.integers(1 << 30))
    kinds = (
        LogisticRegression(max_iter=500),
        GaussianNB(var_smoothing=1e-3),
        KNeighborsClassifier(3),
        DecisionTreeClassifier(max_depth=6, random_state=seed),
        LogisticRegression(C=0.01, max_iter=500),
    )
    classes = len(np.unique(labels))
    own = (
        labels[rows] * MODELS // classes == i if classes >= MODELS else labels[rows] == i % classes
    )
    chance = np.where(own, OWN / max(own.sum(), 1), (1 - OWN) / max((~own).sum(), 1))
    part = rng.choice(rows, len(rows) // MODELS, replace=False, p=chance / chance.sum())
    return kinds[i].fit(x[part], labels[part])
