"""Models of MLflow: folders, with signatures of columns, of tensors, of a string; names in its
registry; what is refused."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import clipper
from clipper.deploy import pack
from clipper.deploy.needs import needs_of
from clipper.deploy.packages.artifact import is_data
from clipper.errors import PackagingError
from clipper.types import ANY
from clipper.types import Model as Record
from clipper_container import Model
from clipper_container.loading.targets import LoadError, load_target
from clipper_container.model import as_model

mlflow = pytest.importorskip("mlflow")
pandas = pytest.importorskip("pandas")
datasets = pytest.importorskip("sklearn.datasets")
SLO = 10_000
pytestmark = pytest.mark.filterwarnings("ignore")  # mlflow warns of this and that

Save = Callable[..., Path]


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to an empty working directory: mlflow writes below it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


@pytest.fixture(scope="module")
def flowers() -> Any:
    return datasets.load_iris(as_frame=True)


@pytest.fixture
def fitted(flowers: Any) -> Any:
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(max_iter=500).fit(flowers.data, flowers.target)


@pytest.fixture
def columns(fitted: Any, flowers: Any, tmp_path: Path) -> Path:
    """Return a folder of the sklearn flavour whose signature names four columns."""
    import mlflow.sklearn

    signature = mlflow.models.infer_signature(flowers.data, fitted.predict(flowers.data))
    mlflow.sklearn.save_model(
        fitted, str(tmp_path / "flowers"), signature=signature, pip_requirements=["scikit-learn"]
    )
    return tmp_path / "flowers"


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """Return a folder of a user's own model with a signature."""
    import mlflow.pyfunc
    from mlflow.models import ModelSignature

    class Sizes(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
        def predict(
            self, context, model_input, params=None
        ):  # mlflow reads types here as a signature
            rows = model_input.to_numpy() if hasattr(model_input, "to_numpy") else model_input
            return [
                len(str(row[0])) if rows.dtype == object else float(np.sum(row)) for row in rows
            ]

    def do(inputs: Any) -> Path:
        folder = tmp_path / "sizes"
        signature = ModelSignature(inputs=inputs)
        mlflow.pyfunc.save_model(
            str(folder), python_model=Sizes(), signature=signature, pip_requirements=["numpy"]
        )
        return folder

    return do


@pytest.fixture
def loaded(tmp_path: Path) -> Callable[[Any], Model]:
    def do(thing: Any) -> Model:
        package = pack(thing, "m", 1, tmp_path / "models")
        return as_model(load_target(package.target, package.sha256))

    return do


def test_a_folder_answers_in_a_container_and_its_signature_is_the_type(
    server: clipper.ClipperServer, deploy: Any, columns: Path, fitted: Any, flowers: Any
) -> None:
    model = deploy(str(columns))
    shutil.rmtree(columns)  # what was deployed is kept
    rows = flowers.data.to_numpy()[::15]
    assert [model.predict(row, slo_ms=SLO).result(20) for row in rows] == fitted.predict(
        flowers.data[::15]
    ).tolist()
    assert model.describe_input() == "f64[4]"


def test_what_it_needs_is_its_flavour(columns: Path, tmp_path: Path) -> None:
    package = pack(columns, "m", 1, tmp_path)
    needs = needs_of(Record("m", 1, ANY, target=package.target, sha256=package.sha256))
    assert {"scikit-learn", "skops", "mlflow-skinny", "pandas"} <= set(needs.packages)


def test_the_same_folder_is_the_same_file(columns: Path, tmp_path: Path) -> None:
    assert pack(columns, "m", 1, tmp_path).sha256 == pack(str(columns), "m", 1, tmp_path).sha256


def test_columns_of_several_types_get_theirs(loaded: Any, saved: Save) -> None:
    from mlflow.types import ColSpec, Schema

    model = loaded(saved(Schema([ColSpec("long", "age"), ColSpec("double", "income")])))
    assert model.input == "f64[2]"
    assert list(model.predict_batch(np.array([[30.0, 1.5], [40.0, 2.5]]))) == [31.5, 42.5]


def test_a_tensor_is_a_tensor(loaded: Any, saved: Save) -> None:
    from mlflow.types import Schema, TensorSpec

    model = loaded(saved(Schema([TensorSpec(np.dtype("float32"), (-1, 2, 3))])))
    assert model.input == "f32[2,3]"
    assert list(model.predict_batch(np.ones((4, 2, 3), np.float32))) == [6.0] * 4


def test_one_column_of_strings_is_strings(loaded: Any, saved: Save) -> None:
    from mlflow.types import ColSpec, Schema

    model = loaded(saved(Schema([ColSpec("string", "text")])))
    assert model.input == "str"
    assert list(model.predict_batch(["ab", "abcd"])) == [2, 4]


def test_strings_beside_numbers_are_records(loaded: Any, saved: Save) -> None:
    from mlflow.types import ColSpec, Schema

    columns = [ColSpec("long", "age"), ColSpec("string", "town"), ColSpec("boolean", "new")]
    model = loaded(saved(Schema(columns)))
    assert model.input == '{"age": "i64", "town": "str", "new": "bool"}'
    rows = {"age": np.array([31, 4]), "town": ["Bern", "Ulm"], "new": np.array([True, False])}
    assert list(model.predict_batch(rows)) == [2, 1]


def test_several_tensors_have_their_names(loaded: Any, saved: Save) -> None:
    from mlflow.types import Schema, TensorSpec

    specs = [TensorSpec(np.dtype("int64"), (-1, -1), name) for name in ("ids", "mask")]
    assert loaded(saved(Schema(specs))).input == '{"ids": "i64[*]", "mask": "i64[*]"}'


def test_several_outputs_have_their_names(loaded: Any, tmp_path: Path) -> None:
    import mlflow.pyfunc
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema

    class Both(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
        def predict(self, context, model_input, params=None):
            return {"twice": model_input["x"] * 2, "town": ["Bern"] * len(model_input)}

    outputs = Schema([ColSpec("double", "twice"), ColSpec("string", "town")])
    signature = ModelSignature(Schema([ColSpec("double", "x")]), outputs)
    mlflow.pyfunc.save_model(
        str(tmp_path / "both"), python_model=Both(), signature=signature, pip_requirements=[]
    )
    model = loaded(tmp_path / "both")
    assert model.output == '{"twice": "f64", "town": "str"}'
    found = model.predict_batch(np.array([[1.0], [2.5]]))
    assert [*found["twice"]] == [2.0, 5.0]
    assert [*found["town"]] == ["Bern", "Bern"]
    model._model = SimpleNamespace(predict=lambda table: [[1.0, 2.0], [3.0, 4.0]])
    found = model.predict_batch(np.ones((2, 1)))
    assert {name: [*column] for name, column in found.items()} == {"twice": [1, 3], "town": [2, 4]}


def test_other_columns_are_refused_by_name(loaded: Any, saved: Save) -> None:
    from mlflow.types import ColSpec, Schema

    folder = saved(Schema([ColSpec("double", "age"), ColSpec("datetime", "born")]))
    with pytest.raises(LoadError, match=r"the signature has other columns: born \(datetime\)"):
        loaded(folder)


def test_a_damaged_folder_is_reported(loaded: Any, columns: Path, tmp_path: Path) -> None:
    (columns / "MLmodel").write_text(
        "flavors: {python_function: {loader_module: mlflow.sklearn}}\n"
    )
    for path in columns.glob("model.*"):
        path.unlink()
    with pytest.raises(LoadError, match="mlflow cannot load this model"):
        loaded(columns)


def test_a_name_of_the_registry(
    loaded: Any,
    fitted: Any,
    flowers: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    columns: Path,
) -> None:
    requested, places = [], []

    def fetch(artifact_uri: str, dst_path: str) -> str:
        requested.append(artifact_uri)
        places.append(dst_path)
        assert os.path.isdir(dst_path)
        if artifact_uri != "models:/flowers@champion":
            raise RuntimeError("Registered Model with name=flower not found")
        return str(columns)

    monkeypatch.setattr("mlflow.artifacts.download_artifacts", fetch)
    assert is_data("models:/flowers@champion")
    model = loaded("models:/flowers@champion")
    assert list(model.predict_batch(flowers.data.to_numpy()[:2])) == [0, 0]
    with pytest.raises(
        PackagingError,
        match=r"does not give 'models:/flower@x': Registered Model.*MLFLOW_TRACKING_URI",
    ):
        loaded("models:/flower@x")
    assert requested == ["models:/flowers@champion", "models:/flower@x"]
    assert not any(os.path.exists(place) for place in places), "what was downloaded is removed"


def test_without_mlflow_the_pip_command_is_printed(
    loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow.artifacts", None)
    with pytest.raises(
        PackagingError, match=r"mlflow is not installed here\. Run: pip install mlflow-skinny"
    ):
        loaded("models:/flowers/1")


def test_no_pickle_refuses_folders(columns: Path, tmp_path: Path) -> None:
    with pytest.raises(
        PackagingError, match=r"(?s)kind mlflow may hold pickles.*\.onnx, \.ubj or \.txt"
    ):
        pack(columns, "m", 1, tmp_path, no_pickle=True)
