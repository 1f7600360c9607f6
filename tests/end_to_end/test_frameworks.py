"""Models of PyTorch, XGBoost and LightGBM, by object and by file, beside what they say themselves:
one of each in a real container, the rest packed and loaded as a container would."""

import io
import json
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clipper
from clipper.deploy import pack
from clipper.deploy.packages.artifact import Artifact, artifact_of, is_data
from clipper.errors import DeployFailed, InvalidInput, PackagingError
from clipper_container import Model, Scored
from clipper_container.loading.targets import MAGIC, LoadError, load_target
from clipper_container.model import as_model

datasets = pytest.importorskip("sklearn.datasets")
SLO = 10_000


@pytest.fixture(scope="module")
def iris() -> tuple[Any, Any]:
    return datasets.load_iris(return_X_y=True)  # type: ignore[no-any-return]


NAMES = np.array(["setosa", "versicolor", "virginica"])


def predicted(model: Any, rows: Any) -> tuple[list[Any], list[float]]:
    futures = [model.predict(row, slo_ms=SLO) for row in rows]
    return [future.result(20) for future in futures], [future.confidence() for future in futures]


@pytest.fixture
def loaded(tmp_path: Path) -> Callable[[Any], Model]:
    """Return the model that a container would load, in this process: quicker than a container that
    imports PyTorch."""

    def do(thing: Any) -> Model:
        package = pack(thing, "m", 1, tmp_path / "models")
        return as_model(load_target(package.target, package.sha256))

    return do


def predict_batch(model: Model, rows: Any) -> tuple[Any, Any]:
    found = model.predict_batch(rows)
    return (found.outputs, found.confidence) if isinstance(found, Scored) else (found, None)


# -- XGBoost


@pytest.fixture(scope="module")
def xgboost() -> Any:
    return pytest.importorskip("xgboost")


def test_a_classifier_of_xgboost_answers_labels_with_confidence(
    deploy: Any, iris: Any, xgboost: Any
) -> None:
    mine = xgboost.XGBClassifier(n_estimators=8, max_depth=3).fit(*iris)
    model = deploy(mine)
    rows = iris[0][::10]
    labels, sure = predicted(model, rows)
    assert labels == mine.predict(rows).tolist()
    assert np.allclose(sure, mine.predict_proba(rows).max(axis=1), atol=1e-6)
    assert model.describe_input() == "f64[4]"


@pytest.mark.parametrize("ending", ["ubj", "json"])
def test_a_file_of_xgboost_answers_as_what_saved_it(
    loaded: Any, iris: Any, xgboost: Any, tmp_path: Path, ending: str
) -> None:
    rows, two = iris[0][::10], iris[1] == 1
    mine = xgboost.XGBClassifier(n_estimators=8).fit(iris[0], two)
    mine.save_model(tmp_path / f"m.{ending}")
    labels, sure = predict_batch(loaded(str(tmp_path / f"m.{ending}")), rows)
    assert labels.tolist() == mine.predict(rows).tolist()
    assert np.allclose(sure, mine.predict_proba(rows).max(axis=1), atol=1e-6)


def test_boosters_and_regressors_of_xgboost_answer_numbers(
    loaded: Any, iris: Any, xgboost: Any
) -> None:
    rows = iris[0][::10]
    mine = xgboost.XGBRegressor(n_estimators=8).fit(*iris)
    assert np.allclose(predict_batch(loaded(mine), rows)[0], mine.predict(rows), atol=1e-6)
    linear = xgboost.train({"booster": "gblinear"}, xgboost.DMatrix(*iris), 4)
    assert np.allclose(
        predict_batch(loaded(linear), rows)[0], linear.predict(xgboost.DMatrix(rows)), atol=1e-5
    )
    booster = xgboost.train(
        {"objective": "multi:softprob", "num_class": 3}, xgboost.DMatrix(*iris), 4
    )
    assert np.allclose(
        predict_batch(loaded(booster), rows)[0], booster.predict(xgboost.DMatrix(rows)), atol=1e-6
    )


def test_early_stopping_of_xgboost_is_heeded(loaded: Any, iris: Any, xgboost: Any) -> None:
    mine = xgboost.XGBClassifier(n_estimators=60, learning_rate=0.9, early_stopping_rounds=2)
    mine.fit(iris[0][::2], iris[1][::2], eval_set=[(iris[0][1::2], iris[1][1::2])], verbose=False)
    rows = iris[0][::10]
    assert np.allclose(
        predict_batch(loaded(mine), rows)[1], mine.predict_proba(rows).max(axis=1), atol=1e-6
    )


# -- LightGBM


@pytest.fixture(scope="module")
def lightgbm() -> Any:
    return pytest.importorskip("lightgbm")


def test_a_classifier_of_lightgbm_keeps_its_labels(
    deploy: Any, loaded: Any, iris: Any, lightgbm: Any
) -> None:
    rows = iris[0][::10]
    mine = lightgbm.LGBMClassifier(n_estimators=8, verbose=-1).fit(iris[0], NAMES[iris[1]])
    model = deploy(mine)
    labels, sure = predicted(model, rows)
    assert labels == mine.predict(rows).tolist()
    assert np.allclose(sure, mine.predict_proba(rows).max(axis=1), atol=1e-6)
    assert model.describe_input() == "f64[4]"
    two = lightgbm.LGBMClassifier(n_estimators=8, verbose=-1).fit(iris[0], iris[1] == 2)
    labels, sure = predict_batch(loaded(two), rows)
    assert labels.tolist() == two.predict(rows).tolist()
    assert np.allclose(sure, two.predict_proba(rows).max(axis=1), atol=1e-6)


def test_a_file_of_lightgbm_answers_as_its_booster(
    loaded: Any, iris: Any, lightgbm: Any, tmp_path: Path
) -> None:
    rows = iris[0][::10]
    mine = lightgbm.LGBMRegressor(n_estimators=8, verbose=-1).fit(*iris)
    mine.booster_.save_model(tmp_path / "m.txt")
    assert np.allclose(
        predict_batch(loaded(str(tmp_path / "m.txt")), rows)[0], mine.predict(rows), atol=1e-6
    )
    labelled = Artifact(
        "lightgbm", artifact_of(classes(lightgbm, iris)).data, labels=("a", "b", "c")
    )
    assert set(predict_batch(loaded(labelled), rows)[0].tolist()) == {"a", "b", "c"}


def classes(lightgbm: Any, iris: Any) -> Any:
    return lightgbm.LGBMClassifier(n_estimators=4, verbose=-1).fit(*iris).booster_


def test_boosters_travel_in_their_own_formats_and_not_as_pickles(
    iris: Any, xgboost: Any, lightgbm: Any, tmp_path: Path
) -> None:
    for made in (
        xgboost.XGBClassifier(n_estimators=2),
        lightgbm.LGBMClassifier(n_estimators=2, verbose=-1),
    ):
        mine = made.fit(*iris)
        with open(pack(mine, "m", 1, tmp_path).target, "rb") as file:
            head = json.loads(file.readline().removeprefix(MAGIC))
        assert head["kind"] == type(mine).__module__.partition(".")[0]
        assert head["labels"] == [0, 1, 2]


# -- tables


def test_a_table_of_numbers_is_put_in_the_order_of_its_model(
    server: clipper.ClipperServer, deploy: Any
) -> None:
    pandas = pytest.importorskip("pandas")
    from sklearn.compose import ColumnTransformer
    from sklearn.linear_model import LinearRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    rng = np.random.default_rng(0)
    table = pandas.DataFrame({"age": rng.random(40), "income": rng.random(40)})
    scaled = ColumnTransformer([("a", StandardScaler(), ["income"])], remainder="passthrough")
    mine = make_pipeline(scaled, LinearRegression()).fit(table, table.age - 2 * table.income)
    model = deploy(mine)
    assert model.describe_input() == "f64[2]"
    row = table.iloc[3].to_numpy()
    assert model.predict(row, slo_ms=SLO).result(20) == mine.predict(table[3:4])[0]
    app = server.app("tables", models=[model.name.partition(":")[0]], slo_ms=SLO)
    for given in (table, table[["income", "age"]]):
        found = app.predict_many(given).result(60)
        assert not found.is_default.any()
        assert np.allclose(found.outputs, mine.predict(table), atol=1e-12)
    with pytest.raises(InvalidInput, match=r"columns 'age', 'x'; .* fitted on 'age', 'income'"):
        app.predict_many(table.rename(columns={"income": "x"}))
    with pytest.raises(InvalidInput, match="a column that is no number"):
        app.predict_many(table.assign(age="old"))


def test_a_table_for_a_model_that_knows_no_names_is_refused(
    server: clipper.ClipperServer, deploy: Any, iris: Any
) -> None:
    pandas = pytest.importorskip("pandas")
    from sklearn.linear_model import LinearRegression

    model = deploy(LinearRegression().fit(*iris))
    table = pandas.DataFrame(iris[0], columns=["a", "b", "c", "d"])
    app = server.app("no-names", models=[model.name.partition(":")[0]], slo_ms=SLO)
    with pytest.raises(InvalidInput, match=r"takes f64\[4\] and knows no names of columns"):
        app.predict_many(table)


# -- PyTorch


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


def make_net(torch: Any) -> Any:
    class Net(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first = torch.nn.Linear(64, 16)
            self.drop = torch.nn.Dropout(0.5)
            self.last = torch.nn.Linear(16, 10)

        def forward(self, pixels: Any) -> Any:
            return self.last(self.drop(torch.relu(self.first(pixels))))

    return Net()


@pytest.fixture(scope="module")
def digits() -> Any:
    return datasets.load_digits(return_X_y=True)[0][:20]


def torch_output(torch: Any, net: Any, rows: Any) -> Any:
    with torch.inference_mode():
        return net.eval()(torch.from_numpy(rows).float()).numpy()


def close(torch: Any, model: Any, net: Any, rows: Any) -> bool:
    return np.allclose(predicted(model, rows)[0], torch_output(torch, net, rows), atol=1e-4)


@pytest.mark.slow
def test_a_live_module_travels_with_its_class(deploy: Any, torch: Any, digits: Any) -> None:
    net = make_net(torch).train()  # dropout is off all the same
    model = deploy(net, input="f64[64]")
    assert close(torch, model, net, digits)


@pytest.mark.slow
def test_torchscript_answers_by_file_and_by_object(
    deploy: Any, loaded: Any, torch: Any, digits: Any, tmp_path: Path
) -> None:
    net = make_net(torch).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.trace(net, torch.zeros(2, 64))
        torch.jit.save(scripted, tmp_path / "net.pt")
        assert close(torch, deploy(str(tmp_path / "net.pt"), input="f64[64]"), net, digits)
        assert np.allclose(
            predict_batch(loaded(scripted), digits)[0], torch_output(torch, net, digits), atol=1e-4
        )


@pytest.mark.slow
def test_an_exported_program_knows_its_input(
    deploy: Any, torch: Any, digits: Any, tmp_path: Path
) -> None:
    net = make_net(torch).eval()
    dims = {"pixels": {0: torch.export.Dim("batch")}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(net, (torch.zeros(2, 64),), dynamic_shapes=dims)
        torch.export.save(program, tmp_path / "net.pt2")
    model = deploy(str(tmp_path / "net.pt2"))
    assert model.describe_input() == "f32[64]"
    assert close(torch, model, net, digits.astype(np.float32))


def test_an_exported_program_with_a_fixed_batch_is_refused(loaded: Any, torch: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(make_net(torch).eval(), (torch.zeros(8, 64),))
    with pytest.raises(
        LoadError, match=r"batch of input 'pixels' is fixed; export with dynamic_shapes"
    ):
        loaded(program)


def test_the_text_of_a_modules_error_is_bounded(loaded: Any, torch: Any) -> None:
    class Loud(torch.nn.Module):  # type: ignore[misc]
        def forward(self, pixels: Any) -> Any:
            raise RuntimeError("x" * 600 + "\nsecond line")

    with pytest.raises(ValueError, match=r"as input 'pixels': x{500}$"):
        loaded(Loud()).predict_batch(np.zeros((1, 64), np.float32))


def test_a_wrong_shape_names_the_input(loaded: Any, torch: Any) -> None:
    model = loaded(make_net(torch))
    with pytest.raises(
        ValueError,
        match=r"Net\.forward\(\) does not take f32\[1,63\] as input 'pixels': mat1 and mat2",
    ):
        model.predict_batch(np.zeros((1, 63), np.float32))
    with pytest.raises(TypeError, match=r"input 'pixels' of Net\.forward\(\): rows are strs"):
        model.predict_batch(["a"])
    names = torch.nn.Sequential(torch.nn.Linear(3, 1))
    assert predict_batch(loaded(names), np.zeros((5, 3)))[0].shape == (5,), "one number a row"


def test_a_module_of_two_inputs_needs_their_types(loaded: Any, torch: Any) -> None:
    with pytest.raises(
        LoadError,
        match=r"Bilinear.forward\(\) needs 2 inputs \(input1, input2\); deploy it with their types",
    ):
        loaded(torch.nn.Bilinear(2, 2, 1)).check_input(named=False)


@pytest.mark.slow
def test_a_module_of_several_outputs_is_deployed_with_their_names_only(
    deploy: Any, torch: Any
) -> None:
    class Both(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return {"total": x.sum(1), "twice": x * 2}

    with pytest.raises(DeployFailed, match=r"forward\(\) returned 2 outputs; deploy it"):
        deploy(Both(), input="f32[2]", warmup=True)
    model = deploy(Both(), input="f32[2]", outputs={"total": "f32", "twice": "f32[2]"}, warmup=True)
    found = model.predict(np.ones(2, np.float32), slo_ms=SLO).result(20)
    assert (found["total"], found["twice"].tolist()) == (2.0, [2.0, 2.0])


def test_weights_alone_are_no_model(loaded: Any, torch: Any, tmp_path: Path) -> None:
    torch.save(make_net(torch).state_dict(), tmp_path / "weights.pt")
    with pytest.raises(
        PackagingError, match=r"weights\.pt was made by torch\.save.*Deploy the module itself"
    ):
        loaded(str(tmp_path / "weights.pt"))


# -- pickles


def test_a_pickle_of_the_user_answers_and_names_its_type(
    deploy: Any, loaded: Any, iris: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from sklearn.linear_model import LogisticRegression

    joblib = pytest.importorskip("joblib")
    mine = LogisticRegression(max_iter=500).fit(*iris)
    (tmp_path / "m.pkl").write_bytes(pickle.dumps(mine))
    joblib.dump(mine, tmp_path / "m.joblib", compress=3)
    rows = iris[0][::10]
    assert (
        predict_batch(loaded(str(tmp_path / "m.pkl")), rows)[0].tolist()
        == mine.predict(rows).tolist()
    )
    caplog.clear()
    assert predicted(deploy(str(tmp_path / "m.joblib")), rows)[0] == mine.predict(rows).tolist()
    assert "deploy only files that you trust" in caplog.text


def test_no_pickle_refuses_and_names_the_safer_format(iris: Any, tmp_path: Path) -> None:
    from sklearn.linear_model import LogisticRegression

    mine = LogisticRegression(max_iter=500).fit(*iris)
    (tmp_path / "m.pkl").write_bytes(pickle.dumps(mine))
    with clipper.start(no_pickle=True) as server:
        refused = (
            (mine, "skops.io.dump"),
            (str(tmp_path / "m.pkl"), "skops.io.dump"),
            (lambda xs: xs, "module:attribute"),
        )
        for thing, safer in refused:
            with pytest.raises(PackagingError, match=f"(?s)server.no_pickle refuses that.*{safer}"):
                server.deploy("m", thing)
        assert server.catalog.models() == []


# -- files that are no models, or others


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("m.ubj", b"PK\x03\x04", "is not a model of XGBoost"),
        ("m.json", b'{"learner": {"x": ', "is cut short"),
        ("m.json", b'{"a": 1}', "is not a model of XGBoost"),
        ("requirements.txt", b"numpy\n", "is not a model of LightGBM"),
        ("m.txt", b"tree\nversion=v4\n", "is cut short"),
        ("m.pt", b"\x00" * 64, "is damaged, or no file of PyTorch"),
        ("m.pkl", MAGIC + b"{}\n", "was packed by clipper"),
    ],
)
def test_files_of_another_kind_are_refused_at_once(
    loaded: Any, tmp_path: Path, name: str, content: bytes, why: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(PackagingError, match=f"{name} {why}"):
        loaded(str(tmp_path / name))


def test_a_folder_that_is_no_model_and_a_file_that_is_not_there(
    loaded: Any, tmp_path: Path
) -> None:
    with pytest.raises(PackagingError, match="cannot read"):
        loaded(str(tmp_path / "gone.ubj"))
    assert not is_data(str(tmp_path))


def test_a_pickle_that_is_damaged_is_reported_by_its_container(deploy: Any, tmp_path: Path) -> None:
    (tmp_path / "m.pkl").write_bytes(b"\x80\x04nonsense")
    with pytest.raises(DeployFailed, match="this file is not a pickle, or damaged"):
        deploy(str(tmp_path / "m.pkl"))


def test_bytes_that_may_hold_pickles_are_not_taken_from_a_socket(
    server: clipper.ClipperServer,
) -> None:
    for kind in ("pickle", "torch-export", "mlflow"):
        with pytest.raises(PackagingError, match="not taken from a socket"):
            server.manage.deploy("m", data=b"x", kind=kind)


def test_another_version_is_reported_with_the_next_step(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    about = {"format": 1, "kind": "estimator", "python": "3.11", "packages": {"numpy": "0.9.1"}}
    out = io.BytesIO()
    out.write(MAGIC + json.dumps(about).encode() + b"\n")
    (tmp_path / "good.pkl").write_bytes(out.getvalue() + pickle.dumps([1]))
    assert load_target(str(tmp_path / "good.pkl")) == [1]
    message = (
        f"packed with numpy 0.9.1 (here: {np.__version__}). The same versions: deploy with"
        ' requirements=["numpy==0.9.1"]'
    )
    assert message in capfd.readouterr().err
    (tmp_path / "bad.pkl").write_bytes(out.getvalue() + b"cnumpy\ngone\n.")
    with pytest.raises(LoadError, match=r"(?s)AttributeError.*numpy==0\.9\.1"):
        load_target(str(tmp_path / "bad.pkl"))
