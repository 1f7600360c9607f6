"""LightGBM: every way to deploy a model of any objective answers as its own predict()."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.frameworks.labels import labels
from tests.frameworks.served import ROWS, Case, check, loaded, seeds

lgb = pytest.importorskip("lightgbm")
pandas = pytest.importorskip("pandas")

# frameworks warn of parameters that do not matter
pytestmark = pytest.mark.filterwarnings("ignore")
TRAINED_ON = 200
CLASSIFIES = (
    "binary",
    "cross_entropy",
    "cross_entropy_lambda",
    "multiclass",
    "multiclassova",
    "regression",
)
REGRESSES = (
    "regression",
    "regression_l1",
    "huber",
    "fair",
    "poisson",
    "quantile",
    "mape",
    "gamma",
    "tweedie",
)


def logistic(truth: Any, margin: Any) -> tuple[Any, Any]:
    """An objective of one's own."""
    p = 1 / (1 + np.exp(-margin))
    return p - truth, p * (1 - p)


def parameters(rng: np.random.Generator) -> dict[str, Any]:
    """Return parameters that any estimator takes."""
    found: dict[str, Any] = {
        "n_estimators": int(rng.integers(1, 20)),
        "num_leaves": int(rng.integers(2, 9)),
        "learning_rate": float(rng.choice([0.1, 0.5])),
        "boosting_type": str(rng.choice(["gbdt", "gbdt", "dart", "rf"])),
        "min_child_samples": 5,
        "verbose": -1,
        "n_jobs": 1,
    }
    if found["boosting_type"] == "rf":
        found |= {"bagging_freq": 1, "bagging_fraction": 0.6}
    for name, value in (("zero_as_missing", True), ("use_missing", False), ("linear_tree", True)):
        if rng.random() < 0.2:
            found[name] = value
    if rng.random() < 0.3:
        found |= {"pred_early_stop": True, "pred_early_stop_freq": 1, "pred_early_stop_margin": 0.2}
    return found


def estimator(rng: np.random.Generator) -> tuple[str, Any, Any]:
    """Return what a fitted estimator is, the estimator, and rows to predict."""
    rows = rng.random((TRAINED_ON + ROWS, 4))
    rows[:, 3] = rng.integers(0, 4, len(rows))
    rows[rng.random(rows.shape) < 0.2] = rng.choice([np.nan, 0.0])
    known: Any = rows[:TRAINED_ON]
    truth = rng.random(TRAINED_ON) + (known[:, 0] > 0.5) + 0.1
    given, more = parameters(rng), {}
    kind = str(rng.choice(["classifier", "classifier", "regressor", "ranker"]))
    if rng.random() < 0.3:
        known = pandas.DataFrame(known, columns=["d", "c", "b", "a"])
    about = type(known).__name__
    if kind == "classifier":
        objective: Any = str(rng.choice([*CLASSIFIES, "own", "default", "default"]))
        count = 3 if objective.startswith("multi") or rng.random() < 0.3 else 2
        classes = rng.permuted(np.arange(TRAINED_ON) % count)
        which, truth = labels(rng, classes, count)
        about += f", labels {which}"
        given |= {"own": {"objective": logistic}, "default": {}}.get(
            objective, {"objective": objective}
        )
        made: Any = lgb.LGBMClassifier
    elif kind == "regressor":
        given["objective"] = str(rng.choice([*REGRESSES, "own"]))
        if given["objective"] == "own":
            given["objective"] = logistic
        made = lgb.LGBMRegressor
    else:
        truth = (truth > 1.1).astype(int)
        more = {"group": [10] * (TRAINED_ON // 10)}
        made = lgb.LGBMRanker
    if rng.random() < 0.4 and kind != "ranker" and given["boosting_type"] != "dart":
        given["n_estimators"] = 60
        stop = lgb.early_stopping(2, verbose=False)
        more |= {"eval_set": [(known[::2], truth[::2])], "callbacks": [stop]}
    if rng.random() < 0.2:
        more["categorical_feature"] = [3]
    found = made(**given).fit(known, truth, **more)
    return f"{made.__name__} {given}, {about}, {[*more]}", found, rows[TRAINED_ON:]


def draw(seed: int, folder: Path) -> Case | None:
    """Return a case; None if LightGBM itself cannot train it."""
    rng = np.random.default_rng(seed)
    try:
        about, mine, rows = estimator(rng)
        mine.predict(rows[:3])
    except Exception:  # a combination of parameters that LightGBM refuses
        return None
    way = str(rng.choice(["object", "object", "booster", "txt", "pickle"]))
    about = f"seed {seed}, {way}: {about}"
    booster = mine.booster_

    def of_booster(part: Any) -> Any:
        return booster.predict(part, num_threads=1)

    if way == "booster":
        return Case(about, booster, rows, of_booster)
    if way == "txt":
        booster.save_model(folder / "m.txt")
        return Case(about, str(folder / "m.txt"), rows, of_booster)
    thing: Any = mine
    if way == "pickle":
        if callable(mine.objective):
            return None  # its function is pickled by name, and this module is no container's
        (folder / "m.pkl").write_bytes(pickle.dumps(mine))
        thing = str(folder / "m.pkl")
    has_chances = hasattr(mine, "predict_proba") and not callable(mine.objective)
    chances = mine.predict_proba if has_chances else None
    return Case(about, thing, rows, mine.predict, chances, mine.classes_ if has_chances else None)


@seeds(16, 200)
def test_answers_are_those_of_its_own_predict(seed: int, tmp_path: Path) -> None:
    case = draw(seed, tmp_path)
    if case is not None:
        assert check(case, tmp_path, np.random.default_rng(seed)) == "served"


@seeds(4, 40)
def test_categories_also_of_one_value(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    n = TRAINED_ON + ROWS
    table = pandas.DataFrame(
        {
            "number": rng.random(n),
            "city": pandas.Categorical(rng.choice(["Bern", "Genève", "Chur"], n)),
            "rooms": pandas.Categorical(rng.choice([3, 1, 2], n)),
            "only": pandas.Categorical(["x"] * n),
            "same": np.zeros(n),
            "whole": rng.integers(0, 9, n),
            "new": rng.random(n) > 0.5,
        }
    )
    table = table[[str(name) for name in rng.permutation(table.columns)]]
    truth = ((table.city == "Bern") ^ (table.number > 0.5)).astype(int)
    made = lgb.LGBMClassifier if rng.random() < 0.5 else lgb.LGBMRegressor
    mine = made(n_estimators=8, min_child_samples=4, verbose=-1, n_jobs=1)
    mine.fit(table[:TRAINED_ON], truth[:TRAINED_ON])
    (tmp_path / "m.pkl").write_bytes(pickle.dumps(mine))
    mine.booster_.save_model(tmp_path / "m.txt")
    way = int(rng.integers(3))
    thing = (mine, str(tmp_path / "m.pkl"), str(tmp_path / "m.txt"))[way]
    own = mine.booster_.predict if way == 2 else mine.predict
    case = Case(f"seed {seed}: {made.__name__}", thing, table[TRAINED_ON:], own)
    assert check(case, tmp_path, rng) == "served"


def test_a_classifier_with_an_objective_of_its_own_returns_raw_scores(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = rng.random((300, 3))
    truth = (rows[:, 0] > 0.5).astype(int)
    mine = lgb.LGBMClassifier(n_estimators=5, objective=logistic, verbose=-1, n_jobs=1)
    case = Case("own objective", mine.fit(rows, truth), rows, mine.predict)
    assert check(case, tmp_path, rng) == "served"


def test_labels_keep_their_type(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = rng.random((300, 3))
    truth = np.array([5, 7], np.int32)[(rows[:, 0] > 0.5).astype(int)]
    mine = lgb.LGBMClassifier(n_estimators=5, verbose=-1, n_jobs=1).fit(rows, truth)
    case = Case("int32", mine, rows, mine.predict, mine.predict_proba, mine.classes_)
    assert check(case, tmp_path, rng) == "served"


def test_columns_given_in_another_order_are_put_in_its_own(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    table = pandas.DataFrame({"b": rng.random(100), "a": rng.random(100)})
    mine = lgb.LGBMRegressor(n_estimators=5, verbose=-1, n_jobs=1).fit(table, table.b - table.a)
    declared = {"a": "f64", "b": "f64"}
    case = Case("another order", mine, table, mine.predict, inputs=declared)
    assert check(case, tmp_path, rng) == "served"
    with pytest.raises(ValueError, match="was trained on the columns b, a, and is given b, c"):
        loaded(mine, tmp_path).predict_batch({"b": np.ones(2), "c": np.ones(2)})
