"""MLflow models (a folder with an MLmodel file), run by their pyfunc flavour."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping

import numpy as np

from clipper_container.adapters.columns import as_table, record_type
from clipper_container.loading.errors import LoadError
from clipper_container.loading.files import unpack
from clipper_container.model import Model, SeveralOutputs, UserValue

_NUMBERS = {
    "boolean": "bool", "integer": "i32", "long": "i64", "float": "f32", "double": "f64",
}  # fmt: skip
_TYPES = {**_NUMBERS, "string": "str", "binary": "bytes"}
# flavours that do not need their folder once loaded
_WHOLE = (
    "sklearn",
    "xgboost",
    "lightgbm",
    "onnx",
    "pytorch",
    "catboost",
)


class MlflowModel(Model):
    """Calls predict() of the pyfunc flavour. Rows follow the signature: numbers in the order of
    the columns, one column of strings, a tensor, or, with columns of several kinds or several
    tensors, one value for each name.
    """

    def __init__(self, model: UserValue) -> None:
        self._model = model
        signature = getattr(model.metadata, "signature", None)
        self._inputs = signature.inputs if signature is not None else None
        self.input, self._columns = _row_type(self._inputs)
        self._named = _output_types(signature.outputs if signature is not None else None)
        if self._named:
            self.output = record_type(self._named)

    def predict_batch(self, inputs: UserValue) -> UserValue:
        """Call predict() of the pyfunc flavour."""
        found = self._model.predict(self._table(inputs))
        if self._named and (isinstance(found, dict) or hasattr(found, "columns")):
            return {name: _outputs(found[name]) for name in self._named}
        if self._named and np.ndim(found) == 2:
            return dict(zip(self._named, np.asarray(found).T, strict=True))
        return _outputs(found)

    def _table(self, inputs: UserValue) -> UserValue:
        if isinstance(inputs, dict):
            if self._inputs is not None and self._inputs.is_tensor_spec():
                return inputs
            table = as_table(inputs)
            kinds = dict(self._columns or ())
            return table.astype({name: kinds[name] for name in inputs if kinds.get(name)})
        if self._columns is None:
            if self._inputs is None or self._inputs.is_tensor_spec():
                return np.asarray(inputs)
            import pandas

            return pandas.DataFrame({0: inputs})
        import pandas

        names = [name for name, _ in self._columns]
        if isinstance(inputs, list):  # strings
            return pandas.DataFrame({names[0]: inputs})
        table = pandas.DataFrame(np.asarray(inputs).reshape(len(inputs), -1), columns=names)
        return table.astype({name: kind for name, kind in self._columns if kind})


def load(content: bytes) -> MlflowModel:
    """Load a model. content: a tar of the folder. Raises: LoadError."""
    import mlflow.pyfunc

    folder = tempfile.mkdtemp(prefix="clipper-mlflow-")
    try:
        unpack(content, folder)
        try:
            model = mlflow.pyfunc.load_model(folder, suppress_warnings=True)
        except ModuleNotFoundError:
            raise
        except Exception as error:
            raise LoadError(
                f"mlflow cannot load this model: {type(error).__name__}: {str(error)[:500]}"
            ) from error
        loaded = MlflowModel(model)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    loader = (
        (getattr(model.metadata, "flavors", None) or {})
        .get("python_function", {})
        .get("loader_module", "")
    )
    if str(loader).rpartition(".")[2] in _WHOLE:
        shutil.rmtree(folder, ignore_errors=True)
    return loaded


def flavour(mlmodel: str) -> str:
    """Return the flavour named in an MLmodel file ("sklearn", "pytorch", ...); "" for the user's
    own code.
    """
    found = re.search(r"^\s*loader_module:\s*mlflow\.(\w+)\s*$", mlmodel, re.M)
    return found[1] if found and found[1] != "pyfunc" else ""


def _row_type(inputs: UserValue) -> tuple[str, list[tuple[str, str]] | None]:
    """Return the type of a row and the columns with their numpy types; None: pass rows as they
    come.
    """
    if inputs is None:
        return "any", None
    if inputs.is_tensor_spec():
        if len(inputs.inputs) != 1:
            return record_type({spec.name: _tensor_type(spec) for spec in inputs.inputs}), None
        (spec,) = inputs.inputs
        fixed = all(isinstance(dim, int) and dim > 0 for dim in list(spec.shape)[1:])
        return _tensor_type(spec) if fixed else "any", None
    kinds = [str(getattr(column.type, "name", column.type)) for column in inputs.inputs]
    names = (
        inputs.input_names() if inputs.has_input_names() else [str(i) for i in range(len(kinds))]
    )
    if kinds == ["string"]:
        return "str", [(names[0], "")] if inputs.has_input_names() else None
    if odd := [
        f"{name} ({kind})" for name, kind in zip(names, kinds, strict=True) if kind not in _TYPES
    ]:
        raise LoadError(
            "a column is numbers, strings or bytes; the signature has other columns:"
            f" {', '.join(odd[:5])}"
        )
    numpy_types = {
        "boolean": "bool",
        "integer": "int32",
        "long": "int64",
        "float": "float32",
        "double": "float64",
    }
    columns = [(name, numpy_types.get(kind, "")) for name, kind in zip(names, kinds, strict=True)]
    if not set(kinds) <= _NUMBERS.keys():
        return record_type(
            {name: _TYPES[kind] for name, kind in zip(names, kinds, strict=True)}
        ), columns
    ours = next(iter(kinds)) if len(set(kinds)) == 1 else "double"
    return f"{_NUMBERS[ours]}[{len(kinds)}]", columns


def _output_types(outputs: UserValue) -> dict[str, str]:
    """Return the types of several named outputs of the signature; empty for one, and for columns of
    other types.
    """
    if outputs is None or len(outputs.inputs) < 2 or not outputs.has_input_names():
        return {}
    if outputs.is_tensor_spec():
        return {spec.name: _tensor_type(spec) for spec in outputs.inputs}
    kinds = [str(getattr(column.type, "name", column.type)) for column in outputs.inputs]
    types = [_TYPES.get(kind, "") for kind in kinds]
    return dict(zip(outputs.input_names(), types, strict=True)) if all(types) else {}


def _tensor_type(spec: UserValue) -> str:
    """Return the type of one row of a tensor of the signature."""
    dtype = np.dtype(spec.type)
    ours = {"b": "bool", "U": "str", "O": "str", "S": "bytes"}.get(dtype.kind)
    ours = ours or f"{dtype.kind}{dtype.itemsize * 8}"
    dims = ["*" if dim < 0 else str(dim) for dim in list(spec.shape)[1:]]
    return f"{ours}[{','.join(dims)}]" if dims else ours


def _outputs(found: UserValue) -> UserValue:
    """Convert a DataFrame, a Series, or a dict of one to an array. Raises: SeveralOutputs if the
    signature does not have their names.
    """
    if isinstance(found, dict) and found:
        if len(found) > 1:
            raise SeveralOutputs(_unnamed(found))
        found = next(iter(found.values()))
    if hasattr(found, "columns") and len({str(dtype) for dtype in found.dtypes}) > 1:
        raise SeveralOutputs(_unnamed(found.columns))
    array = found.to_numpy() if hasattr(found, "to_numpy") else found
    if isinstance(array, np.ndarray) and array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    return array.tolist() if isinstance(array, np.ndarray) and array.dtype == object else array


def _unnamed(names: Iterable[object]) -> str:
    return (
        f"predict() returned several outputs ({', '.join(map(str, names))}); log the model with a"
        " signature that has them"
    )


def load_file(kind: str, content: bytes, about: Mapping[str, UserValue]) -> MlflowModel:
    """Load the tar of a folder. Raises: LoadError."""
    return load(content)
