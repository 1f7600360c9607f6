"""Columns of tabular models: their types come from the fitted steps, and a batch of records is the
table that the model was fitted on."""

import json
from typing import Any

import numpy as np
import pytest

from clipper_container.adapters.columns import as_array, as_table, columns_of
from clipper_container.model import Scored, as_model

pandas = pytest.importorskip("pandas", reason="pip install pandas")
pytest.importorskip("sklearn", reason="pip install scikit-learn")

from sklearn.compose import ColumnTransformer, make_column_selector  # noqa: E402
from sklearn.feature_extraction.text import CountVectorizer  # noqa: E402
from sklearn.impute import SimpleImputer  # noqa: E402
from sklearn.linear_model import LogisticRegression  # noqa: E402
from sklearn.pipeline import Pipeline, make_pipeline  # noqa: E402
from sklearn.preprocessing import OneHotEncoder, StandardScaler  # noqa: E402

N = 60
PEOPLE = pandas.DataFrame(
    {
        "age": np.arange(N) % 17 * 1.0,
        "city": ["Bern", "Ulm", "Rom"] * (N // 3),
        "rooms": [1, 2] * (N // 2),
        "text": ["a b", "c d"] * (N // 2),
        "new": [True, False] * (N // 2),
        "id": np.arange(N),
    }
)
LABELS = (PEOPLE.age > 8).to_numpy() ^ (PEOPLE.city == "Ulm").to_numpy()


def fitted(*parts: Any, **more: Any) -> Pipeline:
    return make_pipeline(ColumnTransformer([*parts], **more), LogisticRegression()).fit(
        PEOPLE, LABELS
    )


ENCODER = OneHotEncoder(handle_unknown="ignore")


def test_types_come_from_the_steps() -> None:
    pipeline = fitted(
        ("numbers", StandardScaler(), ["age"]),
        (
            "classes",
            make_pipeline(SimpleImputer(strategy="most_frequent"), ENCODER),
            make_column_selector(pattern="city|rooms|new"),
        ),
        ("words", CountVectorizer(token_pattern=r"\w"), "text"),
        ("nothing", "drop", ["id"]),
    )
    assert columns_of(pipeline) == {
        "age": "f64",
        "city": "str",
        "rooms": "i64",
        "text": "str",
        "new": "bool",
    }


@pytest.mark.parametrize(
    "chosen",
    [["city"], [1], slice(1, 2), slice("city", "city"), np.arange(6) == 1, lambda table: ["city"]],
    ids=["names", "positions", "slice", "slice of names", "mask", "function"],
)
def test_columns_are_chosen_in_every_way(chosen: Any) -> None:
    pipeline = fitted(("classes", ENCODER, chosen), ("numbers", StandardScaler(), ["age"]))
    assert columns_of(pipeline) == {"age": "f64", "city": "str"}


def test_what_is_passed_through_is_a_number() -> None:
    table = PEOPLE[["age", "city"]]
    step = ColumnTransformer([("classes", ENCODER, ["city"])], remainder="passthrough")
    pipeline = make_pipeline(step, LogisticRegression()).fit(table, LABELS)
    assert columns_of(pipeline) == {"age": "f64", "city": "str"}


def test_numbers_alone_are_no_records() -> None:
    model = LogisticRegression().fit(PEOPLE[["age", "rooms"]], LABELS)
    assert columns_of(model) is None
    assert as_model(model).input == "f64[2]"
    assert columns_of(LogisticRegression().fit(PEOPLE[["age"]].to_numpy(), LABELS)) is None


def test_a_pipeline_gets_its_table() -> None:
    pipeline = fitted(("classes", ENCODER, ["city"]), ("numbers", StandardScaler(), ["age"]))
    model = as_model(pipeline)
    assert json.loads(model.input) == {"age": "f64", "city": "str"}
    rows = {"city": PEOPLE.city.tolist(), "age": PEOPLE.age.to_numpy()}
    found = model.predict_batch(rows)
    assert isinstance(found, Scored)
    np.testing.assert_array_equal(found.outputs, pipeline.predict(PEOPLE))
    np.testing.assert_allclose(found.confidence, pipeline.predict_proba(PEOPLE).max(axis=1))


def test_an_estimator_without_names_gets_an_array() -> None:
    model = LogisticRegression().fit(PEOPLE[["age", "rooms"]].to_numpy(), LABELS)
    rows = {"age": PEOPLE.age.to_numpy(), "rooms": PEOPLE.rooms.to_numpy()}
    found = as_model(model).predict_batch(rows)
    np.testing.assert_array_equal(found.outputs, model.predict(PEOPLE[["age", "rooms"]].to_numpy()))


def test_tables_and_arrays() -> None:
    rows = {"age": np.array([1.0, 2.0]), "city": ["a", "b"]}
    table = as_table(rows, ["city"])
    assert [str(dtype) for dtype in table.dtypes] == ["float64", "category"]
    assert as_array(rows).tolist() == [[1.0, "a"], [2.0, "b"]]
    assert as_array({"a": np.ones(2), "b": np.zeros(2)}).dtype == np.float64


def categories() -> Any:
    table = PEOPLE[["age", "city", "rooms"]]
    return table.astype({"city": "category", "rooms": "category"})


ROWS = {"age": PEOPLE.age.to_numpy(), "city": [*PEOPLE.city], "rooms": PEOPLE.rooms.to_numpy()}


def test_categories_of_xgboost() -> None:
    xgboost = pytest.importorskip("xgboost", reason="pip install xgboost")
    from clipper_container.adapters.xgboost import load

    if tuple(int(part) for part in xgboost.__version__.split(".")[:2]) < (3, 1):
        pytest.skip("a booster has its categories from XGBoost 3.1 on")
    estimator = xgboost.XGBClassifier(n_estimators=5, enable_categorical=True)
    estimator.fit(categories(), LABELS)
    model = load(bytes(estimator.get_booster().save_raw("ubj")))
    assert json.loads(model.input) == {"age": "f64", "city": "str", "rooms": "i64"}
    wanted = estimator.predict_proba(categories())[:, 1]
    np.testing.assert_allclose(model.predict_batch(ROWS), wanted, rtol=1e-6)
    part = {name: column[7:9] for name, column in ROWS.items()}  # other categories come first
    np.testing.assert_allclose(model.predict_batch(part), wanted[7:9], rtol=1e-6)


def test_categories_of_lightgbm() -> None:
    lightgbm = pytest.importorskip("lightgbm", reason="pip install lightgbm")
    from clipper_container.adapters.lightgbm import load

    estimator = lightgbm.LGBMClassifier(n_estimators=3, min_child_samples=2, verbosity=-1)
    estimator.fit(categories(), LABELS)
    model = load(estimator.booster_.model_to_string().encode())
    assert json.loads(model.input) == {"age": "f64", "city": "str", "rooms": "i64"}
    wanted = estimator.predict_proba(categories())[:, 1]
    np.testing.assert_allclose(model.predict_batch(ROWS), wanted)
    part = {name: column[7:9] for name, column in ROWS.items()}
    np.testing.assert_allclose(model.predict_batch(part), wanted[7:9])
