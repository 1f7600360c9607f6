"""Keras: objects and files answer as predict() of the model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipper.deploy import pack
from clipper_container.loading.targets import LoadError, load_target
from tests.frameworks.served import Case, check, loaded

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def keras() -> Any:
    pytest.importorskip("torch")
    patch = pytest.MonkeyPatch()
    patch.setenv("KERAS_BACKEND", "torch")
    yield pytest.importorskip("keras")
    patch.undo()


@pytest.mark.parametrize("outputs", [1, 4])
def test_a_model_of_one_input(keras: Any, outputs: int, tmp_path: Path) -> None:
    keras.utils.set_random_seed(1)
    layers = [keras.Input((5, 3)), keras.layers.Flatten(), keras.layers.Dense(outputs)]
    mine = keras.Sequential(layers)
    mine.save(tmp_path / "m.keras")
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(200, 5, 3)).astype(np.float32)

    def own(part: Any) -> Any:
        found = mine.predict_on_batch(np.asarray(part, np.float32))
        return found[:, 0] if outputs == 1 else found

    for thing in (mine, str(tmp_path / "m.keras")):
        assert check(Case("one input", thing, rows, own), tmp_path, rng) == "served"
    assert loaded(mine, tmp_path).input == "f32[5,3]"
    whole = mine.predict(rows, verbose=0)
    assert np.allclose(whole.reshape(200, -1), own(rows).reshape(200, -1), atol=1e-5)


def test_a_model_of_several_inputs_and_outputs(keras: Any, tmp_path: Path) -> None:
    a, b = keras.Input((2,), name="a"), keras.Input((), name="b", dtype="int32")
    wide = keras.ops.expand_dims(keras.ops.cast(b, "float32"), 1)
    outputs = {"sum": keras.layers.Add()([a, wide]), "twice": keras.layers.Add()([a, a])}
    model = loaded(keras.Model([a, b], outputs), tmp_path)
    assert model.input == {"a": "f32[2]", "b": "i32"}
    assert model.output == {"sum": "f32[2]", "twice": "f32[2]"}
    given = {"a": np.ones((3, 2), np.float32), "b": np.arange(3, dtype=np.int32)}
    found = model.predict_tensors(given)
    assert found["sum"].tolist() == [[1, 1], [2, 2], [3, 3]]
    assert found["twice"].tolist() == [[2, 2]] * 3


def test_code_and_models_that_were_never_built_are_refused(keras: Any, tmp_path: Path) -> None:
    lambdas = keras.Sequential([keras.Input((2,)), keras.layers.Lambda(lambda x: x + 1)])
    with pytest.raises(LoadError, match="Keras cannot load this model"):
        load_target(pack(lambdas, "m", 1, tmp_path).target)
    (tmp_path / "m.keras").write_bytes(b"PK and nothing")
    with pytest.raises(LoadError, match="Keras cannot load this model"):
        load_target(str(tmp_path / "m.keras"))
