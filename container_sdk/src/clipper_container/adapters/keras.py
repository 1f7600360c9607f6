"""Keras models, of any of its backends, from the file that save() writes."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from clipper_container.adapters.ragged import run_by_shape
from clipper_container.loading.errors import LoadError, first_line
from clipper_container.model import Model, UserValue
from clipper_container.schema import Array, Column
from clipper_container.tensor_spec import NUMPY_TYPES

if TYPE_CHECKING:
    import keras

_BACKENDS = ("tensorflow", "jax", "torch")
_INSTEAD = "deploy a function that calls it, with input= and output="
_NAMES = {str(dtype): name for name, dtype in NUMPY_TYPES.items()}


class KerasModel(Model):
    """Predicts like predict() of a model. Outputs of shape (n, 1) become n numbers; of several
    inputs or outputs, all have names.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        if not getattr(model, "inputs", None):
            raise LoadError(
                "this model of Keras does not know its inputs: call it once, or build() it, and"
                " save it again"
            )
        inputs = {tensor.name: tensor for tensor in model.inputs}
        outputs = _outputs_of(model)
        self._dtypes = {name: np.dtype(tensor.dtype) for name, tensor in inputs.items()}
        types = {name: _type_of(name, tensor) for name, tensor in inputs.items()}
        self._outputs = [*outputs]
        if len(inputs) == 1 and len(outputs) == 1:
            (self.input,) = types.values()
        else:
            self.input = types
            self.output = {name: _type_of(name, tensor) for name, tensor in outputs.items()}

    def predict_batch(self, inputs: object) -> UserValue:
        """Predict rows of one input."""
        (dtype,) = self._dtypes.values()
        found = np.asarray(self._model.predict_on_batch(np.asarray(inputs, dtype)))
        return found.reshape(len(found)) if found.ndim > 1 and found.size == len(found) else found

    def predict_tensors(self, inputs: UserValue, *sessions: object) -> UserValue:
        """Predict named tensors; return all outputs by name."""
        given = inputs if isinstance(inputs, Mapping) else {next(iter(self._dtypes)): inputs}
        return run_by_shape(given, self._run)

    def _run(self, arrays: dict[str, Array]) -> dict[str, Column]:
        rows = [np.asarray(arrays[name], dtype) for name, dtype in self._dtypes.items()]
        found = self._model.predict_on_batch(rows[0] if len(rows) == 1 else rows)
        if isinstance(found, Mapping):
            return {name: np.asarray(found[name]) for name in self._outputs}
        each = found if isinstance(found, tuple | list) else (found,)
        return {name: np.asarray(one) for name, one in zip(self._outputs, each, strict=True)}


def _outputs_of(model: keras.Model) -> dict[str, keras.KerasTensor]:
    """Return the outputs by name: those of a dict by its keys, others by their layers."""
    given = model.inputs
    found = model.compute_output_spec(given[0] if len(given) == 1 else given)
    if isinstance(found, Mapping):
        return dict(found)
    each = found if isinstance(found, tuple | list) else (found,)
    names = getattr(model, "output_names", None) or [f"output{i}" for i in range(len(each))]
    return dict(zip(names, each, strict=True))


def _type_of(name: str, tensor: keras.KerasTensor) -> str:
    """Return the type of a row of a tensor, such as `f32[28,28]`. Raises: LoadError."""
    dtype = _NAMES.get(str(tensor.dtype))
    if dtype is None:
        raise LoadError(f"tensor {name!r} of this model of Keras is of {tensor.dtype}: {_INSTEAD}")
    sizes = ["*" if size is None else str(size) for size in tensor.shape[1:]]
    return f"{dtype}[{','.join(sizes)}]" if sizes else dtype


def bytes_of(model: UserValue) -> bytes:
    """Return a model in Keras's format."""
    with tempfile.TemporaryDirectory(prefix="clipper-keras-") as folder:
        path = Path(folder, "model.keras")
        model.save(path)
        return path.read_bytes()


def load_file(kind: str, content: bytes, about: Mapping[str, UserValue]) -> KerasModel:
    """Load a file, with the backend KERAS_BACKEND, or else the first one that is installed. Code in
    the file, such as of a Lambda layer, is refused. Raises: LoadError."""
    if "KERAS_BACKEND" not in os.environ:
        found = next(filter(importlib.util.find_spec, _BACKENDS), "")
        if not found:
            raise LoadError(f"Keras has no backend here: install one of {', '.join(_BACKENDS)}")
        os.environ["KERAS_BACKEND"] = found
    import keras

    with tempfile.TemporaryDirectory(prefix="clipper-keras-") as folder:
        path = Path(folder, "model.keras")
        path.write_bytes(content)
        try:
            model = keras.saving.load_model(path, compile=False, safe_mode=True)
        except ModuleNotFoundError:
            raise
        except Exception as error:
            raise LoadError(f"Keras cannot load this model: {first_line(error)}") from error
    return KerasModel(model)
