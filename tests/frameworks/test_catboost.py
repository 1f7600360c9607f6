"""CatBoost: every way to deploy a model of any objective answers as its own predict()."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipper.deploy import pack
from clipper.errors import PackagingError
from tests.frameworks.labels import labels
from tests.frameworks.served import ROWS, Case, check, seeds

catboost = pytest.importorskip("catboost")
pandas = pytest.importorskip("pandas")

# frameworks warn of parameters that do not matter
pytestmark = pytest.mark.filterwarnings("ignore")
TRAINED_ON = 200
REGRESSES = ("RMSE", "MAE", "Poisson", "Quantile:alpha=0.2", "Tweedie:variance_power=1.5")
PARAMETERS = {"verbose": 0, "thread_count": 1, "allow_writing_files": False}


def table_of(rng: np.random.Generator) -> Any:
    """Return a table of numbers, with holes, and of two columns of categories."""
    n = TRAINED_ON + ROWS
    table = pandas.DataFrame(rng.random((n, 3)), columns=["a", "b", "c"])
    table.loc[rng.random(n) < 0.1, "b"] = np.nan
    table["city"] = rng.choice(["Bern", "Genève", "Chur"], n)
    table["floor"] = rng.integers(0, 4, n)
    return table[[str(name) for name in rng.permutation(table.columns)]]


def draw(seed: int, folder: Path) -> Case:
    rng = np.random.default_rng(seed)
    table = table_of(rng)
    given: dict[str, Any] = {"iterations": int(rng.integers(1, 20)), **PARAMETERS}
    rows: Any = table
    if rng.random() < 0.5:
        given["cat_features"] = ["city", "floor"]
    else:
        rows = table[["a", "b", "c"]].to_numpy()
    known = rows[:TRAINED_ON]
    truth: Any = table.a[:TRAINED_ON].to_numpy() + rng.random(TRAINED_ON)
    kind = str(rng.choice(["classifier", "classifier", "regressor"]))
    if kind == "classifier":
        count = int(rng.integers(2, 4))
        which, truth = labels(rng, rng.permuted(np.arange(TRAINED_ON) % count), count)
        kind += f" of {which}"
        mine = catboost.CatBoostClassifier(**given)
    else:
        mine = catboost.CatBoostRegressor(loss_function=str(rng.choice(REGRESSES)), **given)
    mine.fit(known, truth)
    mine.save_model(folder / "m.cbm")
    (folder / "m.pkl").write_bytes(pickle.dumps(mine))
    thing = (mine, str(folder / "m.cbm"), str(folder / "m.pkl"))[int(rng.integers(3))]
    is_classifier = kind != "regressor"

    def own(part: Any) -> Any:
        found = mine.predict(part, thread_count=1)
        # CatBoost has labels of text as objects, and those of several classes as a column
        found = found[:, 0] if found.ndim == 2 else found
        return found.astype(str) if found.dtype.kind == "O" else found

    classes = [str(one) for one in mine.classes_] if is_classifier else None
    if is_classifier and mine.classes_.dtype.kind not in "OU":
        classes = mine.classes_.tolist()
    return Case(
        f"seed {seed}, {kind}, {given}",
        thing,
        rows[TRAINED_ON:],
        own,
        mine.predict_proba if is_classifier else None,
        classes,
    )


@seeds(8, 150)
def test_answers_are_those_of_its_own_predict(seed: int, tmp_path: Path) -> None:
    assert check(draw(seed, tmp_path), tmp_path, np.random.default_rng(seed)) == "served"


def test_a_threshold_is_kept(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = rng.random((300, 3))
    mine = catboost.CatBoostClassifier(iterations=5, **PARAMETERS)
    mine.fit(rows, (rows[:, 0] > 0.5).astype(int))
    mine.set_probability_threshold(0.9)
    case = Case("threshold", mine, rows, mine.predict, mine.predict_proba, [0, 1])
    assert check(case, tmp_path, rng) == "served"


def test_a_model_without_trees_and_a_damaged_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PackagingError, match="cannot deploy a CatBoostClassifier: CatBoost cannot"):
        pack(catboost.CatBoostClassifier(), "m", 1, tmp_path)
    (tmp_path / "m.cbm").write_bytes(b"CBM1 and then nothing")
    from clipper_container.loading.targets import LoadError, load_target

    with pytest.raises(LoadError, match="CatBoost cannot load this model"):
        load_target(str(tmp_path / "m.cbm"))
