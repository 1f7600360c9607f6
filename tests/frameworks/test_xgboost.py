"""XGBoost: every way to deploy a model of any objective answers as its own predict()."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.frameworks.served import ROWS, Case, check, seeds

xgb = pytest.importorskip("xgboost")
pandas = pytest.importorskip("pandas")

# frameworks warn of parameters that do not matter
pytestmark = pytest.mark.filterwarnings("ignore")
stores_categories = pytest.mark.skipif(
    tuple(int(part) for part in xgb.__version__.split(".")[:2]) < (3, 1),
    reason="a booster has its categories from XGBoost 3.1 on",
)
TRAINED_ON = 200
CLASSIFIES = (
    "binary:logistic",
    "binary:hinge",
    "binary:logitraw",
    "reg:logistic",
    "reg:squarederror",
    "count:poisson",
    "multi:softprob",
    "multi:softmax",
)
REGRESSES = (
    "reg:squarederror",
    "reg:squaredlogerror",
    "reg:pseudohubererror",
    "reg:absoluteerror",
    "reg:gamma",
    "reg:tweedie",
    "reg:logistic",
    "count:poisson",
    "reg:quantileerror",
    "survival:cox",
)
RANKS = ("rank:ndcg", "rank:pairwise", "rank:map")


def logistic(truth: Any, margin: Any) -> tuple[Any, Any]:
    """An objective of one's own."""
    p = 1 / (1 + np.exp(-margin))
    return p - truth, p * (1 - p)


def rows_of(rng: np.random.Generator, missing: float) -> Any:
    """Return numbers of which a part is `missing`."""
    rows = rng.random((TRAINED_ON + ROWS, 4))
    rows[:, 3] = rng.integers(0, 4, len(rows))
    rows[rng.random(rows.shape) < 0.25] = missing
    return rows


def parameters(rng: np.random.Generator) -> dict[str, Any]:
    """Return parameters that any estimator takes."""
    found: dict[str, Any] = {
        "n_estimators": int(rng.integers(1, 25)),
        "max_depth": int(rng.integers(1, 5)),
        "learning_rate": float(rng.choice([0.1, 0.3, 0.9])),
        "booster": str(rng.choice(["gbtree", "gbtree", "dart", "gblinear"])),
        "n_jobs": 1,
    }
    if found["booster"] == "dart":
        found["rate_drop"] = 0.3
    if rng.random() < 0.3:
        found["base_score"] = float(rng.choice([0.3, 0.7]))
    return found


def estimator(rng: np.random.Generator) -> tuple[str, Any, Any]:
    """Return what a fitted estimator is, the estimator, and rows to predict."""
    missing = float(rng.choice([np.nan, np.nan, -999.0, 0.0]))
    rows = rows_of(rng, missing)
    known, truth = rows[:TRAINED_ON], rng.random(TRAINED_ON) + (rows[:TRAINED_ON, 0] > 0.5)
    given = {**parameters(rng), "missing": missing}
    kind = str(rng.choice(["classifier", "classifier", "regressor", "ranker", "forest"]))
    if rng.random() < 0.3:
        known = pandas.DataFrame(known, columns=["d", "c", "b", "a"])
    more: dict[str, Any] = {}
    if rng.random() < 0.4 and kind in ("classifier", "regressor"):
        given |= {"early_stopping_rounds": 2, "n_estimators": 60}
    if kind == "classifier":
        objective: Any = str(rng.choice([*CLASSIFIES, "own", "default"]))
        several = 3 if objective in ("multi:softprob", "multi:softmax") or rng.random() < 0.3 else 2
        truth = rng.permuted(np.arange(TRAINED_ON) % several)
        if several == 2 and objective == "default" and rng.random() < 0.4:
            truth = np.stack([truth, 1 - truth, truth], axis=1)  # several labels at once
        if objective == "count:poisson":
            given.pop("base_score", None)
        given |= {"own": {"objective": logistic}, "default": {}}.get(
            objective, {"objective": objective}
        )
        made: Any = xgb.XGBClassifier
    elif kind == "regressor":
        objective = str(rng.choice(REGRESSES))
        given |= {"objective": objective}
        if objective == "reg:quantileerror":
            given["quantile_alpha"] = np.array([0.1, 0.9]) if rng.random() < 0.5 else 0.3
        elif objective == "reg:squarederror" and rng.random() < 0.5:
            truth = np.stack([truth, truth * 2], axis=1)
        elif objective == "reg:logistic":
            truth = truth / 2
        made = xgb.XGBRegressor
    elif kind == "ranker":
        given |= {"objective": str(rng.choice(RANKS))}
        truth = (truth > 1).astype(int)
        more = {"qid": np.arange(TRAINED_ON) // 10}
        made = xgb.XGBRanker
    else:
        made = xgb.XGBRFClassifier if rng.random() < 0.5 else xgb.XGBRFRegressor
        given = {"n_estimators": 5, "missing": missing, "n_jobs": 1}
        truth = (truth > 1).astype(int)
    if "early_stopping_rounds" in given:
        more |= {"eval_set": [(known[::2], truth[::2])], "verbose": False}
    found = made(**given).fit(known, truth, **more)
    about = f"{made.__name__} {given}, labels {truth.shape}, {type(known).__name__}"
    return about, found, rows[TRAINED_ON:]


def draw(seed: int, folder: Path) -> Case | None:
    """Return a case; None if XGBoost itself cannot train it."""
    rng = np.random.default_rng(seed)
    try:
        about, mine, rows = estimator(rng)
        mine.predict(rows[:3])
    except Exception:  # a combination of parameters that XGBoost refuses
        return None
    way = str(rng.choice(["object", "object", "booster", "ubj", "json", "pickle", "saved booster"]))
    about = f"seed {seed}, {way}: {about}"
    has_chances = hasattr(mine, "predict_proba") and not callable(mine.objective)
    booster = mine.get_booster()
    frame = ["d", "c", "b", "a"] if booster.feature_names else None

    def of_booster(part: Any) -> Any:
        return booster.predict(xgb.DMatrix(part, feature_names=frame))

    if way == "booster":
        return Case(about, booster, rows, of_booster)
    if way == "saved booster":
        booster.save_model(folder / "m.ubj")
        return Case(about, str(folder / "m.ubj"), rows, of_booster)
    if way in ("ubj", "json"):  # a file has no `missing`: XGBoost's own load_model() forgets it too
        path = folder / f"m.{way}"
        mine.save_model(path)
        mine = type(mine)()
        mine.load_model(path)
        return Case(about, str(path), rows, mine.predict)
    if way == "pickle":
        (folder / "m.pkl").write_bytes(pickle.dumps(mine))
        thing: Any = str(folder / "m.pkl")
    else:
        thing = mine
    chances = mine.predict_proba if has_chances else None
    classes = mine.classes_ if has_chances else None
    return Case(about, thing, rows, mine.predict, chances, classes)


@seeds(16, 200)
def test_answers_are_those_of_its_own_predict(seed: int, tmp_path: Path) -> None:
    case = draw(seed, tmp_path)
    if case is not None:
        assert check(case, tmp_path, np.random.default_rng(seed)) == "served"


@stores_categories
@seeds(4, 40)
def test_categories(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    n = TRAINED_ON + ROWS
    table = pandas.DataFrame(
        {
            "number": rng.random(n),
            "city": pandas.Categorical(rng.choice(["Bern", "Genève", "Chur"], n)),
            "rooms": pandas.Categorical(rng.choice([3, 1, 2], n)),
            "whole": rng.integers(0, 9, n),
            "new": rng.random(n) > 0.5,
        }
    )
    table = table[[str(name) for name in rng.permutation(table.columns)]]
    truth = ((table.city == "Bern") ^ (table.number > 0.5)).astype(int)
    made = xgb.XGBClassifier if rng.random() < 0.5 else xgb.XGBRegressor
    mine = made(n_estimators=8, enable_categorical=True, n_jobs=1)
    mine.fit(table[:TRAINED_ON], truth[:TRAINED_ON])
    (tmp_path / "m.pkl").write_bytes(pickle.dumps(mine))
    thing = mine if rng.random() < 0.5 else str(tmp_path / "m.pkl")
    case = Case(f"seed {seed}: {made.__name__}", thing, table[TRAINED_ON:], mine.predict)
    assert check(case, tmp_path, rng) == "served"


@pytest.mark.parametrize("missing", [-999.0, 0.0])
def test_the_estimators_own_missing_is_kept(missing: float, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = rows_of(rng, missing)
    mine = xgb.XGBRegressor(n_estimators=20, missing=missing, n_jobs=1).fit(rows, rows[:, 1])
    asked = rows[:ROWS]
    assert not np.array_equal(mine.predict(asked), xgb_without(mine, asked)), (
        "it makes a difference"
    )
    assert check(Case("missing", mine, asked, mine.predict), tmp_path, rng) == "served"


def xgb_without(mine: Any, rows: Any) -> Any:
    """Return what the booster predicts when nothing counts as missing."""
    return mine.get_booster().inplace_predict(rows)


@pytest.mark.parametrize("objective", [*CLASSIFIES, logistic])
def test_a_classifier_of_any_objective_answers_its_labels(objective: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = rows_of(rng, np.nan)
    truth = (np.nan_to_num(rows[:, 0]) * 3).astype(int)
    truth = truth if str(objective).startswith("multi") else np.minimum(truth, 1)
    mine = xgb.XGBClassifier(n_estimators=10, objective=objective, n_jobs=1).fit(rows, truth)
    case = Case(str(objective), mine, rows[:ROWS], mine.predict)
    assert check(case, tmp_path, rng) == "served"


def test_a_plain_booster_uses_all_its_trees_after_early_stopping(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = rows_of(rng, np.nan)
    table = xgb.DMatrix(rows, rng.random(len(rows)))
    other = xgb.DMatrix(rows, rng.random(len(rows)))
    mine = xgb.train(
        {"eta": 0.9}, table, 60, [(other, "v")], early_stopping_rounds=5, verbose_eval=False
    )
    assert mine.best_iteration + 1 < mine.num_boosted_rounds()
    case = Case("booster", mine, rows[:ROWS], of_rows(mine))
    assert check(case, tmp_path, rng) == "served"


def of_rows(booster: Any) -> Any:
    """Return a function that asks Booster.predict."""
    return lambda part: booster.predict(xgb.DMatrix(part))


@stores_categories
def test_a_category_that_it_never_saw_is_named(tmp_path: Path) -> None:
    from tests.frameworks.served import loaded

    table = pandas.DataFrame({"n": [1.0, 2, 3, 4], "c": pandas.Categorical(["a", "b", "a", "b"])})
    mine = xgb.XGBClassifier(n_estimators=2, enable_categorical=True).fit(table, [0, 1, 0, 1])
    with pytest.raises(ValueError, match=r"^XGBoost: Found a category not in the training set"):
        loaded(mine, tmp_path).predict_batch({"n": np.ones(1), "c": ["zzz"]})


def test_an_estimator_of_a_users_class_keeps_its_own_predict(tmp_path: Path) -> None:
    class Shifted(xgb.XGBRegressor):  # type: ignore[name-defined]
        def predict(self, X: Any, **more: Any) -> Any:
            return super().predict(X, **more) + 100

    rows = np.random.default_rng(0).random((60, 3))
    mine = Shifted(n_estimators=3, n_jobs=1).fit(rows, rows[:, 0])
    case = Case("a subclass", mine, rows, mine.predict)
    assert check(case, tmp_path, np.random.default_rng(0)) == "served"
