"""scikit-learn: estimators of every kind, over arrays and DataFrames, answer as their own
predict()."""

import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.frameworks.labels import labels
from tests.frameworks.served import ROWS, Case, check, loaded, seeds

pytest.importorskip("sklearn")
pandas = pytest.importorskip("pandas")

from sklearn import (  # noqa: E402
    calibration,
    cluster,
    compose,
    covariance,
    cross_decomposition,
    discriminant_analysis,
    dummy,
    ensemble,
    feature_extraction,
    gaussian_process,
    isotonic,
    linear_model,
    mixture,
    model_selection,
    multiclass,
    multioutput,
    naive_bayes,
    neighbors,
    neural_network,
    pipeline,
    preprocessing,
    svm,
    tree,
)
from sklearn.impute import SimpleImputer  # noqa: E402

# frameworks warn of parameters that do not matter
pytestmark = pytest.mark.filterwarnings("ignore")
TRAINED_ON = 120
Make = Callable[[np.random.Generator], Any]


def logistic() -> Any:
    """Return a classifier that knows probabilities."""
    return linear_model.LogisticRegression()


def forest(seed: int = 0) -> Any:
    """Return a small random forest."""
    return ensemble.RandomForestClassifier(4, max_depth=3, random_state=seed)


CLASSIFIERS: tuple[Callable[[], Any], ...] = (
    logistic,
    forest,
    lambda: ensemble.ExtraTreesClassifier(4, random_state=0),
    lambda: tree.DecisionTreeClassifier(max_depth=3),
    lambda: tree.ExtraTreeClassifier(max_depth=3, random_state=0),
    lambda: naive_bayes.GaussianNB(),
    lambda: neighbors.KNeighborsClassifier(3),
    lambda: neighbors.NearestCentroid(),
    lambda: svm.SVC(),
    lambda: svm.LinearSVC(),
    lambda: linear_model.SGDClassifier(loss="log_loss", random_state=0),
    lambda: linear_model.SGDClassifier(loss="hinge", random_state=0),
    lambda: linear_model.RidgeClassifier(),
    lambda: linear_model.Perceptron(random_state=0),
    lambda: neural_network.MLPClassifier((4,), max_iter=20, random_state=0),
    lambda: discriminant_analysis.LinearDiscriminantAnalysis(),
    lambda: discriminant_analysis.QuadraticDiscriminantAnalysis(reg_param=0.1),
    lambda: ensemble.AdaBoostClassifier(n_estimators=3, random_state=0),
    lambda: ensemble.GradientBoostingClassifier(n_estimators=3, random_state=0),
    lambda: ensemble.HistGradientBoostingClassifier(max_iter=4, early_stopping=True),
    lambda: ensemble.BaggingClassifier(n_estimators=3, random_state=0),
    lambda: ensemble.VotingClassifier([("a", logistic()), ("b", forest())]),
    lambda: ensemble.VotingClassifier([("a", logistic()), ("b", forest())], voting="soft"),
    lambda: ensemble.StackingClassifier([("a", logistic()), ("b", forest())], cv=2),
    lambda: calibration.CalibratedClassifierCV(forest(), cv=2),
    lambda: calibration.CalibratedClassifierCV(svm.LinearSVC(), method="isotonic", cv=2),
    lambda: multiclass.OneVsRestClassifier(logistic()),
    lambda: multiclass.OneVsOneClassifier(svm.LinearSVC()),
    lambda: multiclass.OutputCodeClassifier(logistic(), random_state=0),
    lambda: dummy.DummyClassifier(strategy="stratified", random_state=0),
    lambda: dummy.DummyClassifier(),
    lambda: gaussian_process.GaussianProcessClassifier(),
    lambda: model_selection.GridSearchCV(logistic(), {"C": [0.1, 1.0]}, cv=2),
    lambda: pipeline.make_pipeline(preprocessing.StandardScaler(), forest()),
)
OF_TWO: tuple[Callable[[], Any], ...] = (
    lambda: model_selection.FixedThresholdClassifier(logistic(), threshold=0.1),
    lambda: model_selection.FixedThresholdClassifier(
        forest(), threshold=0.9, response_method="predict_proba"
    ),
    lambda: model_selection.TunedThresholdClassifierCV(logistic(), cv=2),
)
OF_SEVERAL: tuple[Callable[[], Any], ...] = (  # outputs at once
    forest,
    lambda: neighbors.KNeighborsClassifier(3),
    lambda: multioutput.MultiOutputClassifier(logistic()),
    lambda: multioutput.ClassifierChain(logistic()),
    lambda: multiclass.OneVsRestClassifier(logistic()),
    lambda: neural_network.MLPClassifier((4,), max_iter=20, random_state=0),
)
REGRESSORS: tuple[Callable[[], Any], ...] = (
    lambda: linear_model.LinearRegression(),
    lambda: linear_model.PoissonRegressor(),
    lambda: linear_model.HuberRegressor(),
    lambda: linear_model.BayesianRidge(),
    lambda: ensemble.RandomForestRegressor(4, random_state=0),
    lambda: ensemble.HistGradientBoostingRegressor(max_iter=4, loss="quantile", quantile=0.8),
    lambda: ensemble.GradientBoostingRegressor(n_estimators=3, loss="huber"),
    lambda: neighbors.KNeighborsRegressor(3),
    lambda: svm.SVR(),
    lambda: gaussian_process.GaussianProcessRegressor(alpha=0.1),
    lambda: compose.TransformedTargetRegressor(
        linear_model.LinearRegression(), func=np.log1p, inverse_func=np.expm1
    ),
    lambda: compose.TransformedTargetRegressor(
        linear_model.Ridge(), transformer=preprocessing.QuantileTransformer(n_quantiles=20)
    ),
    lambda: ensemble.StackingRegressor([("a", linear_model.Ridge())], cv=2),
    lambda: dummy.DummyRegressor(strategy="median"),
)
REGRESSORS_OF_SEVERAL: tuple[Callable[[], Any], ...] = (
    lambda: linear_model.Ridge(),
    lambda: cross_decomposition.PLSRegression(1),
    lambda: multioutput.MultiOutputRegressor(linear_model.HuberRegressor()),
    lambda: multioutput.RegressorChain(linear_model.Ridge()),
    lambda: ensemble.ExtraTreesRegressor(3, random_state=0),
)
WITHOUT_TRUTH: tuple[Callable[[], Any], ...] = (
    lambda: cluster.KMeans(3, n_init=1, random_state=0),
    lambda: cluster.MiniBatchKMeans(3, n_init=1, random_state=0),
    lambda: cluster.MeanShift(bandwidth=0.5),
    lambda: cluster.AffinityPropagation(random_state=0),
    lambda: cluster.Birch(n_clusters=3),
    lambda: mixture.GaussianMixture(2, random_state=0),
    lambda: mixture.BayesianGaussianMixture(n_components=2, random_state=0),
    lambda: ensemble.IsolationForest(n_estimators=5, random_state=0),
    lambda: svm.OneClassSVM(),
    lambda: covariance.EllipticEnvelope(random_state=0),
    lambda: neighbors.LocalOutlierFactor(novelty=True),
)


def served_as(rng: np.random.Generator, mine: Any, folder: Path) -> Any:
    """Return the estimator, or a file of it."""
    way = str(rng.choice(["object", "object", "pickle", "joblib", "skops"]))
    if way == "pickle":
        (folder / "m.pkl").write_bytes(pickle.dumps(mine))
        return str(folder / "m.pkl")
    if way == "joblib":
        joblib = pytest.importorskip("joblib")
        joblib.dump(mine, folder / "m.joblib")
        return str(folder / "m.joblib")
    if way == "skops":
        return _skops(mine) or mine
    return mine


def _skops(mine: Any) -> Any:
    """Return a file of skops that trusts all that the estimator needs; None if skops cannot."""
    from clipper.deploy.packages.artifact import Artifact

    skops = pytest.importorskip("skops.io")
    try:
        content = skops.dumps(mine)
        trusted = skops.get_untrusted_types(data=content)
        skops.loads(content, trusted=trusted).predict  # noqa: B018
    except Exception:  # a type that skops does not know
        return None
    return Artifact("skops", content, trusted=tuple(trusted))


def case_of(seed: int, mine: Any, rows: Any, thing: Any, about: str, refused: str = "") -> Case:
    """Return a case with the probabilities of a classifier."""
    classes = getattr(mine, "classes_", None)
    has = hasattr(mine, "predict_proba") and isinstance(classes, np.ndarray) and classes.ndim == 1
    about = f"seed {seed}, {thing if isinstance(thing, str) else type(thing).__name__}: {about}"
    chances = mine.predict_proba if has else None
    return Case(about, thing, rows, mine.predict, chances, classes if has else None, refused)


@seeds(10, 200)
def test_classifiers(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.random((TRAINED_ON + ROWS, 4))
    of_two = rng.random() < 0.25
    made = (*OF_TWO, *CLASSIFIERS)[int(rng.integers(len(OF_TWO) + len(CLASSIFIERS)))]
    if of_two:
        made = OF_TWO[int(rng.integers(len(OF_TWO)))]
    count = 2 if made in OF_TWO or rng.random() < 0.5 else 3
    kind, truth = labels(rng, (rows[:TRAINED_ON, 0] * count).astype(int), count)
    known: Any = rows[:TRAINED_ON]
    names = ["d", "c", "b", "a"]
    is_table = rng.random() < 0.3
    try:
        mine = made().fit(pandas.DataFrame(known, columns=names) if is_table else known, truth)
    except (ValueError, TypeError):  # scikit-learn does not take such labels
        return
    asked = pandas.DataFrame(rows[TRAINED_ON:], columns=names) if is_table else rows[TRAINED_ON:]
    case = case_of(seed, mine, asked, served_as(rng, mine, tmp_path), f"{mine}, labels {kind}")
    if rng.random() < 0.3 and made is CLASSIFIERS[3] and not is_table:
        asked[rng.random(asked.shape) < 0.1] = np.nan
    assert check(case, tmp_path, rng) == "served"


@seeds(4, 60)
def test_classifiers_of_several_outputs(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.random((TRAINED_ON + ROWS, 3))
    truth = np.stack([rows[:TRAINED_ON, 0] > 0.5, rows[:TRAINED_ON, 1] > 0.5], axis=1).astype(int)
    is_text = rng.random() < 0.4
    mine = OF_SEVERAL[int(rng.integers(len(OF_SEVERAL)))]()
    try:
        mine.fit(rows[:TRAINED_ON], np.array(["no", "yes"])[truth] if is_text else truth)
    except (ValueError, TypeError):
        return
    case = case_of(seed, mine, rows[TRAINED_ON:], served_as(rng, mine, tmp_path), f"{mine}")
    assert check(case, tmp_path, rng) == "served"


@seeds(8, 120)
def test_regressors_clusters_and_outliers(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.random((TRAINED_ON + ROWS, 4))
    truth = rows[:TRAINED_ON].sum(axis=1)
    dtype = np.float32 if rng.random() < 0.3 else np.float64
    known = rows[:TRAINED_ON].astype(dtype)
    kind = str(rng.choice(["one", "column", "several", "none", "isotonic"]))
    if kind == "none":
        mine = WITHOUT_TRUTH[int(rng.integers(len(WITHOUT_TRUTH)))]().fit(known)
    elif kind == "isotonic":
        rows = rows[:, :1]
        mine = isotonic.IsotonicRegression(out_of_bounds="clip").fit(rows[:TRAINED_ON], truth)
    elif kind == "several":
        made = REGRESSORS_OF_SEVERAL[int(rng.integers(len(REGRESSORS_OF_SEVERAL)))]
        mine = made().fit(known, np.stack([truth, -truth], axis=1))
    else:
        made = REGRESSORS[int(rng.integers(len(REGRESSORS)))]
        truth = truth.astype(dtype)
        mine = made().fit(known, truth[:, None] if kind == "column" else truth)
    asked = rows[TRAINED_ON:]
    if getattr(mine, "cluster_centers_", asked).dtype == np.float32:
        asked = asked.astype(np.float32)  # KMeans takes rows of its own type only
    case = case_of(seed, mine, asked, served_as(rng, mine, tmp_path), f"{kind} {mine}")
    assert check(case, tmp_path, rng) == "served"


# -- DataFrames


def total(table: Any) -> Any:
    """Return a column that is computed from two by their names."""
    return (table["age"] + 2 * table["income"]).to_frame("total")


def numbers_of(rng: np.random.Generator) -> Any:
    """Return a pipeline over columns of numbers, which it chooses by name, type or place."""
    scaler = preprocessing.StandardScaler
    chosen: tuple[Any, ...] = (
        ["income", "age"],
        [2, 0],
        slice(1, 3),
        slice("age", "income"),
        np.array([True, False, True, False]),
        compose.make_column_selector(dtype_include="float"),
        compose.make_column_selector("^(age|income)$"),
    )
    at = int(rng.integers(len(chosen) + 2))
    if at == len(chosen):
        return preprocessing.FunctionTransformer(total)
    if at == len(chosen) + 1:
        return pipeline.make_union(scaler(), preprocessing.FunctionTransformer(total))
    part = pipeline.make_pipeline(SimpleImputer(), scaler())
    rest = str(rng.choice(["drop", "passthrough"]))
    return compose.ColumnTransformer([("a", part, chosen[at])], remainder=rest)


@seeds(6, 80)
def test_pipelines_over_a_table_of_numbers(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    n = TRAINED_ON + ROWS
    table = pandas.DataFrame(
        {
            "age": rng.integers(18, 80, n).astype(float),
            "rooms": rng.integers(1, 6, n),
            "income": rng.random(n) * 100,
            "vip": rng.random(n) > 0.5,
        }
    )
    truth = (table.age + table.income > 95).astype(int)
    mine = pipeline.make_pipeline(numbers_of(rng), logistic())
    if rng.random() < 0.5:
        mine.set_output(transform="pandas")
    mine.fit(table[:TRAINED_ON], truth[:TRAINED_ON])
    case = case_of(seed, mine, table[TRAINED_ON:].astype(float), mine, f"{mine}")
    case.own = mine.predict
    assert check(case, tmp_path, rng) == "served"


def parts_of(rng: np.random.Generator) -> Any:
    """Return the steps of a table with text."""
    encoders = (
        preprocessing.OneHotEncoder(handle_unknown="ignore"),
        preprocessing.OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1),
        preprocessing.TargetEncoder(cv=2),
        pipeline.make_pipeline(
            SimpleImputer(strategy="most_frequent"),
            preprocessing.OneHotEncoder(handle_unknown="ignore"),
        ),
    )
    parts: list[Any] = [("city", encoders[int(rng.integers(len(encoders)))], ["city"])]
    numbers = pipeline.make_pipeline(SimpleImputer(), preprocessing.StandardScaler())
    parts.append(("numbers", numbers, ["income", "age"]))
    if rng.random() < 0.5:
        parts.append(("note", feature_extraction.text.TfidfVectorizer(), "note"))
    if rng.random() < 0.5:
        parts.append(("vip", preprocessing.OneHotEncoder(), ["vip"]))
    if rng.random() < 0.5:
        parts.append(("rooms", preprocessing.OneHotEncoder(handle_unknown="ignore"), ["rooms"]))
    order = rng.permutation(len(parts))
    return compose.ColumnTransformer([parts[i] for i in order])


@seeds(5, 80)
def test_pipelines_over_a_table_with_text(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    n = TRAINED_ON + ROWS
    table = pandas.DataFrame(
        {
            "age": np.where(rng.random(n) < 0.1, np.nan, rng.integers(18, 80, n)),
            "city": rng.choice(["Bern", "Genève", "Chur"], n),
            "rooms": rng.integers(1, 6, n),
            "income": rng.random(n) * 100,
            "note": rng.choice(["good one", "bad", "so so good"], n),
            "vip": rng.random(n) > 0.5,
        }
    )
    table = table[[str(name) for name in rng.permutation(table.columns)]]
    kind, truth = labels(rng, (table.income > 50).astype(int).to_numpy(), 2)
    mine = pipeline.make_pipeline(parts_of(rng), logistic())
    try:
        mine.fit(table[:TRAINED_ON], truth[:TRAINED_ON])
    except ValueError:  # scikit-learn does not take such labels
        return
    case = case_of(seed, mine, table[TRAINED_ON:], served_as(rng, mine, tmp_path), f"{mine} {kind}")
    assert check(case, tmp_path, rng) == "served"


@seeds(4, 40)
def test_histogram_boosting_with_categories_of_the_table(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    n = TRAINED_ON + ROWS
    table = pandas.DataFrame(
        {
            "age": np.where(rng.random(n) < 0.2, np.nan, rng.integers(18, 80, n)),
            "city": pandas.Categorical(rng.choice(["Bern", "Genève", "Chur"], n)),
            "rooms": pandas.Categorical(rng.choice([5, 1, 2], n)),
            "new": rng.random(n) > 0.5,
        }
    )
    wanted = [str(name) for name in rng.permutation(table.columns)][: int(rng.integers(2, 5))]
    table = table[wanted]
    boosted = ensemble.HistGradientBoostingClassifier(max_iter=5, min_samples_leaf=2)
    mine = boosted if rng.random() < 0.5 else pipeline.make_pipeline(boosted)
    mine.fit(table[:TRAINED_ON], rng.permuted(np.arange(TRAINED_ON) % 2))
    case = case_of(seed, mine, table[TRAINED_ON:], served_as(rng, mine, tmp_path), f"{wanted}")
    assert check(case, tmp_path, rng) == "served"


# -- single cases


def test_a_matrix_of_scipy_is_served_as_an_array(tmp_path: Path) -> None:
    import scipy.sparse

    rng = np.random.default_rng(0)
    rows = rng.random((60, 3))
    truth = scipy.sparse.csr_matrix((rows[:, :2] > 0.5).astype(int))
    mine = multiclass.OneVsRestClassifier(logistic()).fit(rows, truth)
    assert scipy.sparse.issparse(mine.predict(rows))
    case = case_of(0, mine, rows, mine, "sparse")
    assert check(case, tmp_path, rng) == "served"


def test_labels_that_cannot_be_sent_are_refused_by_their_type(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = rng.random((40, 2))
    days = np.array(["2020-01-01", "2021-01-01"], "M8[D]")[(rows[:, 0] > 0.5).astype(int)]
    mine = neighbors.KNeighborsClassifier(1).fit(rows, days)
    case = case_of(0, mine, rows, mine, "days", refused="returned dtype datetime64")
    assert check(case, tmp_path, rng) != "served"


def test_an_estimator_of_another_kind_is_only_asked_for_what_it_says(tmp_path: Path) -> None:
    class Odd:
        n_features_in_ = 2
        classes_ = np.array(["a", "b"])

        def predict(self, rows: Any) -> Any:
            return ["c"] * len(rows)  # a label that has no column of its own

        def predict_proba(self, rows: Any) -> Any:
            return np.full((len(rows), 2), 0.5)

    model = loaded(Odd(), tmp_path)
    assert model.predict_batch(np.zeros((3, 2))) == ["c"] * 3, "without a confidence"


def test_a_pipeline_that_is_no_pipeline_of_sklearn_is_asked_for_its_own_predict(
    tmp_path: Path,
) -> None:
    class Thresholded(pipeline.Pipeline):  # type: ignore[misc]
        def predict(self, X: Any, **more: Any) -> Any:
            return (self.predict_proba(X)[:, 1] > 0.9).astype(int)

    rng = np.random.default_rng(0)
    rows = rng.random((80, 3))
    mine = Thresholded([("forest", forest())]).fit(rows, (rows[:, 0] > 0.5).astype(int))
    case = case_of(0, mine, rows, mine, "thresholded")
    assert check(case, tmp_path, rng) == "served"


def test_the_bytes_of_a_pickle_are_read_by_name(tmp_path: Path) -> None:
    out = io.BytesIO()
    pickle.dump(logistic().fit([[0.0], [1.0]], ["a", "b"]), out)
    (tmp_path / "m.pickle").write_bytes(out.getvalue())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = loaded(str(tmp_path / "m.pickle"), tmp_path).predict_batch(np.array([[1.0]]))
    assert found.outputs.tolist() == ["b"]
