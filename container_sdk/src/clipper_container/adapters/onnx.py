"""ONNX models in onnxruntime. The file holds no code; only its operators run."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from clipper_container.adapters.ragged import run_by_shape
from clipper_container.loading.errors import LoadError, first_line
from clipper_container.model import Model, Scored, UserValue
from clipper_container.schema import Array, Column

if TYPE_CHECKING:
    import onnx
    import onnxruntime


_DTYPES = {
    "bool": "bool",
    "uint8": "u8",
    "int8": "i8",
    "uint16": "u16",
    "int16": "i16",
    "uint32": "u32",
    "int32": "i32",
    "uint64": "u64",
    "int64": "i64",
    "float16": "f16",
    "float": "f32",
    "double": "f64",
    "string": "str",
}
_NUMPY = {"float": "float32", "double": "float64", "string": "object"}
_TENSOR = re.compile(r"tensor\((\w+)\)")


class OnnxModel(Model):
    """A model whose inputs have the batch as their first dimension.

    With one input and one output it takes and returns rows without names. A second output with
    probabilities beside a label for each row, as scikit-learn's converters write it, gives the
    confidence: of a list of dicts that of the label, of an array (n, classes) the largest of each
    row. Outputs of shape (n, 1) become n numbers.

    With several inputs, or other outputs, these are named tensors, with the names and types of the
    file. Rows of different shapes run in groups of equal ones. Rows of another number type are cast
    to the model's.
    """

    def __init__(self, content: bytes, confidence: bool = True) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        providers = [
            name
            for name in onnxruntime.get_available_providers()
            if name != "AzureExecutionProvider"
        ]
        try:
            self._session = onnxruntime.InferenceSession(content, options, providers=providers)
        except Exception as error:
            raise LoadError(f"onnxruntime cannot load this model: {first_line(error)}") from None
        inputs, outputs = self._session.get_inputs(), self._session.get_outputs()
        if not inputs:
            raise LoadError("this ONNX model has no input")
        self._dtypes = {one.name: _numpy_type(one.type) for one in inputs}
        self._feed = inputs[0].name
        self.outputs = [one.name for one in outputs]
        self._wanted = self.outputs[: 2 if confidence else 1]
        types = [_row_type(f"input {one.name!r}", one.type, one.shape) for one in inputs]
        self.batch_max = max(batch_max for *_, batch_max in types)
        if len(inputs) > 1 or not _is_short(outputs):
            self.input = {one.name: _tensor_type("input", one) for one in inputs}
            self.output = {one.name: _tensor_type("output", one) for one in outputs}
            return
        _check_rows(outputs[0], self.batch_max)
        self.input, self._dtype, self._shape, _ = types[0]

    def predict_batch(self, inputs: object) -> UserValue:
        """Run the session."""
        rows = np.asarray(inputs, self._dtype)
        if self._shape is not None:
            rows = rows.reshape(len(rows), *self._shape)
        found = self._session.run(self._wanted, {self._feed: rows})
        outputs = found[0]
        if isinstance(outputs, np.ndarray) and outputs.ndim > 1 and outputs.size == len(outputs):
            outputs = outputs.reshape(len(outputs))
        confidence = _probabilities(found[1], outputs) if len(found) > 1 else None
        return outputs if confidence is None else Scored(outputs, confidence)

    def predict_tensors(self, inputs: UserValue, *sessions: object) -> UserValue:
        """Run the session on named tensors; return all its outputs by name."""
        given = inputs if isinstance(inputs, Mapping) else {self._feed: inputs}
        return run_by_shape(given, self._run)

    def _run(self, arrays: dict[str, Array]) -> dict[str, Column]:
        feed = {
            name: np.ascontiguousarray(array, self._dtypes.get(name, array.dtype))
            for name, array in arrays.items()
        }
        found = self._session.run(None, feed)
        return {
            name: [np.array([*row.values()], np.float32) for row in output]
            if isinstance(output, list) and output and isinstance(output[0], dict)
            else output
            for name, output in zip(self.outputs, found, strict=True)
        }


def _is_short(outputs: list[onnxruntime.NodeArg]) -> bool:
    """Return whether the outputs are a prediction, and perhaps the probabilities beside a label:
    one label for each row, and one number for each class.
    """
    if len(outputs) == 1:
        return True
    label, scores = outputs[0], outputs[1]
    is_label = label.type in ("tensor(int64)", "tensor(string)") and (
        len(label.shape) == 1 or [*label.shape[1:]] == [1]
    )
    of_classes = scores.type.startswith("seq(map(") or (
        scores.type in ("tensor(float)", "tensor(double)")
        and len(scores.shape) == 2
        and "prob" in scores.name.lower()
    )
    return len(outputs) == 2 and is_label and of_classes


def _check_rows(output: onnxruntime.NodeArg, batch_max: int) -> None:
    """Refuse an output without names that does not have one value for each row. Raises:
    LoadError.
    """
    found = _TENSOR.fullmatch(output.type)
    if not found or found[1] not in _DTYPES:
        raise LoadError(
            f"output {output.name!r} is a {output.type}; a tensor of numbers or strings is needed"
        )
    rows = output.shape[0] if output.shape else None
    if isinstance(rows, int) and rows > 1 and batch_max != rows:
        raise LoadError(
            f"output {output.name!r} has {rows} values whatever the batch; export the model with a"
            " first dimension that is free"
        )


def _numpy_type(type_: str) -> str:
    found = _TENSOR.fullmatch(type_)
    return _NUMPY.get(found[1], found[1]) if found else "object"


def _tensor_type(side: str, one: onnxruntime.NodeArg) -> str:
    """Return the type of a named tensor. Raises: LoadError."""
    if one.type.startswith("seq(map("):
        return "f32[*]"  # probabilities by class
    found = _TENSOR.fullmatch(one.type)
    if not found or found[1] not in _DTYPES:
        raise LoadError(
            f"{side} {one.name!r} is a {one.type}; a tensor of numbers or strings is needed"
        )
    if not one.shape:
        raise LoadError(
            f"{side} {one.name!r} has no dimension for the batch; export the model with shapes, and"
            " a first dimension that is free"
        )
    sizes = [str(size) if isinstance(size, int) and size > 0 else "*" for size in one.shape[1:]]
    return f"{_DTYPES[found[1]]}[{','.join(sizes)}]" if sizes else _DTYPES[found[1]]


def check(content: bytes) -> None:
    """Refuse an invalid ONNX model, and one that refers to other files. Raises: LoadError."""
    import onnx

    try:
        model = onnx.load_model_from_string(content)
    except Exception as error:
        raise LoadError(f"these bytes are no ONNX model: {first_line(error)}") from None
    for tensor in _tensors(model):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            raise LoadError(
                f"tensor {tensor.name!r} lies in a file of its own; save the model as one file"
            )
    try:
        onnx.checker.check_model(model, full_check=True)
    except Exception as error:
        raise LoadError(f"the checker of ONNX refuses this model: {first_line(error)}") from None


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield every tensor of the model's graphs and functions, including those in attributes."""
    nodes = [node for function in model.functions for node in function.node]
    graphs = [model.graph]
    while graphs or nodes:
        if graphs:
            graph = graphs.pop()
            yield from graph.initializer
            for sparse in graph.sparse_initializer:
                yield from (sparse.values, sparse.indices)
            nodes += graph.node
            continue
        for attribute in nodes.pop().attribute:
            yield from (attribute.t, *attribute.tensors)
            for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
                yield from (sparse.values, sparse.indices)
            graphs += [attribute.g] if attribute.HasField("g") else []
            graphs += attribute.graphs


def _row_type(
    what: str, type_: str, shape: UserValue
) -> tuple[str, str, tuple[int, ...] | None, int]:
    """Return the type of a row, its numpy dtype, its shape (None: as it comes), and the most
    rows of a batch.
    """
    found = _TENSOR.fullmatch(type_)
    if not found or found[1] not in _DTYPES:
        raise LoadError(f"{what} is a {type_}; a tensor of numbers or strings is needed")
    ours, dtype = _DTYPES[found[1]], _NUMPY.get(found[1], found[1])
    if not shape:
        raise LoadError(
            f"{what} has no dimension for the batch; export it with a first dimension that is free"
        )
    if isinstance(shape[0], int) and shape[0] != 1:
        raise LoadError(
            f"the batch of {what} is fixed at {shape[0]} rows; export it with a first dimension"
            " that is free"
        )
    batch_max = 1 if shape[0] == 1 else 0
    dims = shape[1:]
    if ours == "str":
        return "str", dtype, tuple(1 for _ in dims), batch_max
    if all(isinstance(dim, int) and dim > 0 for dim in dims):
        fixed = tuple(dims)
        return f"{ours}[{','.join(map(str, fixed))}]" if fixed else ours, dtype, fixed, batch_max
    return (f"{ours}[*]" if len(dims) == 1 else "any"), dtype, None, batch_max


def _probabilities(scores: object, labels: Array) -> np.ndarray | None:
    """Return the probability of each row's label, or the largest where the classes have no names;
    None if `scores` are not probabilities.
    """
    n = len(labels)
    if (
        isinstance(scores, list)
        and len(scores) == n
        and all(isinstance(row, dict) and row for row in scores)
    ):
        each = zip(scores, labels.tolist(), strict=True)
        sure = np.array([row.get(label, np.nan) for row, label in each], np.float32)
        return sure if ((sure >= -1e-3) & (sure <= 1 + 1e-3)).all() else None
    if (
        isinstance(scores, np.ndarray)
        and scores.dtype.kind == "f"
        and scores.ndim == 2
        and len(scores) == n
    ):
        low, high = float(scores.min(initial=0)), float(scores.max(initial=0))
        return scores.max(axis=1) if low >= -1e-3 and high <= 1 + 1e-3 else None
    return None


def load_file(kind: str, content: bytes, about: Mapping[str, UserValue]) -> OnnxModel:
    """Load a file. Raises: LoadError."""
    return OnnxModel(content)
