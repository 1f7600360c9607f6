"""ONNX: files answer as onnxruntime does, and no output of a file is lost or taken for another."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipper.deploy.packages.artifact import Artifact
from clipper_container.loading.targets import LoadError
from tests.frameworks.labels import labels
from tests.frameworks.served import ROWS, Case, check, loaded, seeds
from tests.onnx_models import graph, two_by_two

pytest.importorskip("sklearn")
runtime = pytest.importorskip("onnxruntime")
helper = pytest.importorskip("onnx.helper")
skl2onnx = pytest.importorskip("skl2onnx")

from sklearn import ensemble, linear_model, naive_bayes, neighbors, svm, tree  # noqa: E402

# frameworks warn of parameters that do not matter
pytestmark = pytest.mark.filterwarnings("ignore")
TRAINED_ON = 100


def estimator(rng: np.random.Generator, rows: Any) -> tuple[str, Any]:
    """Return a fitted estimator that skl2onnx can convert."""
    truth = (rows[:, 0] * 3).astype(int)
    if rng.random() < 0.3:
        made = (
            linear_model.LinearRegression(),
            ensemble.RandomForestRegressor(3),
            neighbors.KNeighborsRegressor(2),
        )
        several = rng.random() < 0.4
        found = made[int(rng.integers(len(made)))]
        return "regressor", found.fit(rows, np.stack([truth, -truth], 1) if several else truth)
    kind, truth = labels(rng, truth, 3)
    made = (
        linear_model.LogisticRegression(),
        ensemble.RandomForestClassifier(3),
        tree.DecisionTreeClassifier(),
        naive_bayes.GaussianNB(),
        svm.LinearSVC(),
        neighbors.KNeighborsClassifier(2),
    )
    return f"labels {kind}", made[int(rng.integers(len(made)))].fit(rows, truth)


@seeds(10, 120)
def test_answers_are_those_of_onnxruntime(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.random((TRAINED_ON + ROWS, 4)).astype(np.float32)
    try:
        about, mine = estimator(rng, rows[:TRAINED_ON])
        has_map = hasattr(mine, "predict_proba") and rng.random() < 0.5
        options = {"zipmap": has_map} if hasattr(mine, "classes_") else {}
        made = skl2onnx.to_onnx(mine, rows[:1], options={id(mine): options} if options else None)
        content = made.SerializeToString()
        session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
    except Exception:  # what scikit-learn, the converter or onnxruntime does not take
        return
    (name,) = [one.name for one in session.get_inputs()]

    def own(part: Any) -> Any:
        found = session.run(None, {name: np.asarray(part)})[0]
        return found.reshape(len(part)) if found.size == len(part) else found

    (tmp_path / "m.onnx").write_bytes(content)
    case = Case(f"seed {seed}: {mine}, {about}", str(tmp_path / "m.onnx"), rows[TRAINED_ON:], own)
    assert check(case, tmp_path, rng) == "served"


def made_of(outputs: Any) -> Artifact:
    """Return a file whose outputs are its input of shape (n, 3), as numbers or whole numbers."""
    nodes = [
        helper.make_node("Cast", ["x"], [name], to=1 if type_ == 1 else 7)
        for name, (type_, _) in outputs.items()
    ]
    return Artifact("onnx", graph(nodes, {"x": (1, ["n", 3])}, outputs, {}))


def test_two_outputs_that_are_no_label_with_its_probabilities_are_both_served(
    tmp_path: Path,
) -> None:
    model = loaded(made_of({"first": (7, ["n", 3]), "probabilities": (1, ["n", 3])}), tmp_path)
    assert model.input == {"x": "f32[3]"}, "it is a model of named tensors"
    assert model.output == {"first": "i64[3]", "probabilities": "f32[3]"}
    rows = np.array([[0.25, 0.5, 0.75]], np.float32)
    found = model.predict_tensors({"x": rows})
    assert found["first"].tolist() == [[0, 0, 0]]
    assert found["probabilities"].tolist() == rows.tolist()


def test_the_confidence_is_the_probability_of_the_label_that_is_answered() -> None:
    from clipper_container.adapters.onnx import _probabilities

    chances = [{"no": 0.9, "yes": 0.1}, {"no": 0.2, "yes": 0.8}]
    found = _probabilities(chances, np.array(["yes", "yes"]))
    assert found is not None
    assert np.allclose(found, [0.1, 0.8])


def test_a_label_that_the_probabilities_do_not_name_has_no_confidence() -> None:
    from clipper_container.adapters.onnx import _probabilities

    assert _probabilities([{0: 0.9, 1: 0.1}], np.array([7])) is None


@pytest.mark.parametrize("is_probability", [True, False])
def test_an_array_of_probabilities_gives_the_largest_of_each_row(
    is_probability: bool, tmp_path: Path
) -> None:
    node, outputs = helper.make_node, {"label": (7, ["n"]), "probabilities": (1, ["n", 3])}
    nodes = [node("ArgMax", ["x"], ["label"], axis=1, keepdims=0)]
    nodes += [node("Identity", ["x"], ["probabilities"])]
    model = loaded(Artifact("onnx", graph(nodes, {"x": (1, ["n", 3])}, outputs, {})), tmp_path)
    rows = np.array([[0.25, 0.5, 0.25], [0.75, 0.25, 0.0]], np.float32)
    rows = rows if is_probability else rows * 4
    found = model.predict_batch(rows)
    labels = found.outputs if is_probability else found
    assert labels.tolist() == [1, 0]
    if is_probability:
        assert found.confidence.tolist() == [0.5, 0.75]


@seeds(2, 20)
@pytest.mark.parametrize("shape", [["n"], ["n", 1]])
def test_strings_are_answered_as_by_onnxruntime(
    seed: int, shape: list[Any], tmp_path: Path
) -> None:
    node = helper.make_node("LabelEncoder", ["x"], ["y"], domain="ai.onnx.ml", **{
        "keys_strings": ["Bern", "Genève", ""], "values_int64s": [3, 4, 5], "default_int64": -1,
    })  # fmt: skip
    content = graph([node], {"x": (8, shape)}, {"y": (7, shape)}, {}, ml=True)
    model = loaded(Artifact("onnx", content), tmp_path)
    assert model.input == "str"
    rng = np.random.default_rng(seed)
    rows = rng.choice(["Bern", "Genève", "", "Chur", "B"], ROWS).tolist()
    session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
    asked = np.array(rows, object).reshape(-1, *shape[1:])
    wanted = session.run(None, {"x": asked})[0].reshape(-1)
    found = [int(y) for i in range(0, ROWS, 7) for y in model.predict_batch(rows[i : i + 7])]
    assert found == wanted.tolist()


@seeds(2, 20)
def test_several_inputs_are_answered_as_by_onnxruntime(seed: int, tmp_path: Path) -> None:
    content = two_by_two()
    model = loaded(Artifact("onnx", content), tmp_path)
    assert model.input == {"x": "f32[3]", "factor": "f32"}
    rng = np.random.default_rng(seed)
    given = {"factor": rng.random(ROWS), "x": rng.random((ROWS, 3))}  # f64, in another order
    session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
    wanted = session.run(None, {name: rows.astype(np.float32) for name, rows in given.items()})
    found = model.predict_tensors(given)
    assert [*found] == ["scaled", "total"]
    for name, rows in zip(found, wanted, strict=True):
        assert np.array_equal(found[name], rows)


def test_an_input_that_has_a_default_in_the_file_is_not_asked_for(tmp_path: Path) -> None:
    node, default = helper.make_node("Mul", ["x", "factor"], ["y"]), np.array([2.0], np.float32)
    inputs = {"x": (1, ["n", 3]), "factor": (1, [1])}
    content = graph([node], inputs, {"y": (1, ["n", 3])}, {"factor": default})
    model = loaded(Artifact("onnx", content), tmp_path)
    assert model.input == "f32[3]"
    assert model.predict_batch(np.ones((2, 3), np.float32)).tolist() == [[2.0] * 3] * 2


def test_an_input_of_an_optional_type_is_refused_by_name(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    inner = helper.make_tensor_type_proto(1, ["n", 3])
    info = helper.make_value_info("x", helper.make_optional_type_proto(inner))
    out = helper.make_tensor_value_info("y", 1, ["n", 3])
    node = helper.make_node("OptionalGetElement", ["x"], ["y"])
    made = helper.make_model(
        helper.make_graph([node], "g", [info], [out]),
        opset_imports=[helper.make_opsetid("", 18)],
        ir_version=8,
    )
    content = onnx.ModelProto.SerializeToString(made)
    with pytest.raises(LoadError, match=r"input 'x' is a optional\(.*; a tensor of numbers or"):
        loaded(Artifact("onnx", content), tmp_path)


def test_an_output_without_a_row_for_each_input_is_refused_by_name(tmp_path: Path) -> None:
    constant = helper.make_tensor("three", 1, [3], [1.0, 2.0, 3.0])
    nodes = [helper.make_node("Constant", [], ["weights"], value=constant)]
    content = graph(nodes, {"x": (1, ["n", 3])}, {"weights": (1, [3])}, {})
    with pytest.raises(LoadError, match="output 'weights' has 3 values whatever the batch"):
        loaded(Artifact("onnx", content), tmp_path)
