"""MLflow: folders of its flavours answer as mlflow.pyfunc does."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipper_container.model import SeveralOutputs
from tests.frameworks.labels import labels
from tests.frameworks.served import ROWS, Case, check, loaded, seeds

for _flavour in ("pyfunc", "sklearn", "xgboost", "lightgbm"):
    pytest.importorskip(f"mlflow.{_flavour}")
pandas = pytest.importorskip("pandas")
pytest.importorskip("sklearn")

# frameworks warn of parameters that do not matter
pytestmark = pytest.mark.filterwarnings("ignore")
TRAINED_ON = 100
NAMES = ["d", "c", "b", "a"]


def trained(rng: np.random.Generator, flavour: str, rows: Any) -> Any:
    """Return a model of a flavour."""
    from sklearn import ensemble, linear_model

    _, truth = labels(rng, (rows["d"] * 2).astype(int).to_numpy(), 2)
    if flavour == "sklearn":
        made = (linear_model.LogisticRegression(), ensemble.RandomForestClassifier(3))
        try:
            return made[int(rng.integers(2))].fit(rows, truth)
        except ValueError:  # scikit-learn does not take such labels
            return linear_model.Ridge().fit(rows, rows["d"])
    number = (rows["d"] * 2).astype(int)
    if flavour == "xgboost":
        xgb = pytest.importorskip("xgboost")
        made = (xgb.XGBClassifier, xgb.XGBRegressor)[int(rng.integers(2))]
        return made(n_estimators=4, n_jobs=1).fit(rows, number)
    lgb = pytest.importorskip("lightgbm")
    made = (lgb.LGBMClassifier, lgb.LGBMRegressor)[int(rng.integers(2))]
    return made(n_estimators=4, n_jobs=1, verbose=-1).fit(rows, number)


@pytest.mark.slow
@seeds(3, 60)
def test_answers_are_those_of_pyfunc(seed: int, tmp_path: Path) -> None:
    import importlib

    import mlflow.pyfunc
    from mlflow.models import infer_signature

    rng = np.random.default_rng(seed)
    rows = pandas.DataFrame(rng.random((TRAINED_ON + ROWS, 4)), columns=NAMES)
    flavour = str(rng.choice(["sklearn", "xgboost", "lightgbm"]))
    if rng.random() < 0.5:
        rows["b"] = rng.integers(0, 9, len(rows))
    mine = trained(rng, flavour, rows[:TRAINED_ON])
    save = importlib.import_module(f"mlflow.{flavour}").save_model
    folder = str(tmp_path / "model")
    more = {"serialization_format": "cloudpickle"} if flavour == "sklearn" else {}
    signature = infer_signature(rows, mine.predict(rows))
    save(mine, folder, signature=signature, pip_requirements=["scikit-learn"], **more)
    pyfunc = mlflow.pyfunc.load_model(folder)
    case = Case(f"seed {seed}: {flavour} {mine}", folder, rows[TRAINED_ON:], pyfunc.predict)
    assert check(case, tmp_path, rng) == "served"


def test_missing_of_xgboost_is_not_in_a_folder_of_mlflow(tmp_path: Path) -> None:
    """The answer is that of pyfunc, which is not that of the estimator."""
    xgb = pytest.importorskip("xgboost")
    import mlflow.xgboost
    from mlflow.models import infer_signature

    rng = np.random.default_rng(0)
    rows = pandas.DataFrame(rng.random((TRAINED_ON + ROWS, 4)), columns=NAMES)
    rows[rng.random(rows.shape) < 0.3] = -999.0
    known, asked = rows[:TRAINED_ON], rows[TRAINED_ON:]
    mine = xgb.XGBRegressor(n_estimators=8, missing=-999.0, n_jobs=1).fit(known, known["d"])
    folder, signature = str(tmp_path / "model"), infer_signature(known, mine.predict(known))
    mlflow.xgboost.save_model(mine, folder, signature=signature, pip_requirements=["xgboost"])
    pyfunc = mlflow.pyfunc.load_model(folder)
    assert not np.array_equal(pyfunc.predict(asked), mine.predict(asked))
    assert check(Case("missing", folder, asked, pyfunc.predict), tmp_path, rng) == "served"


def test_several_outputs_that_the_signature_does_not_have_are_refused(tmp_path: Path) -> None:
    import mlflow.pyfunc

    class Both(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
        def predict(self, context: Any, model_input: Any, params: Any = None) -> Any:
            n = len(model_input)
            return pandas.DataFrame({"label": ["a"] * n, "score": np.ones(n)})

    mlflow.pyfunc.save_model(str(tmp_path / "model"), python_model=Both(), pip_requirements=[])
    model = loaded(str(tmp_path / "model"), tmp_path)
    with pytest.raises(
        SeveralOutputs, match=r"several outputs \(label, score\); log the model with a"
    ):
        model.predict_batch(np.ones((2, 3)))
