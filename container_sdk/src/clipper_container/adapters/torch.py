"""PyTorch modules on the CPU: live ones, TorchScript, and exported programs."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from clipper_container.adapters.errors import LoadError
from clipper_container.model import Model

_OURS = {
    "bool": "bool",
    "uint8": "u8",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "float16": "f16",
    "float32": "f32",
    "float64": "f64",
}


class TorchModel(Model):
    """Calls forward() of a module with one input whose first dimension is the batch, in inference
    mode.

    Float rows are cast to the type of the module's weights. A tensor becomes an array; of a tuple
    or list the first item is used, of a dict "logits" or the first. Outputs of shape (n, 1) become
    n numbers. input: default: the module's attribute `input`.
    """

    def __init__(self, module: Any, name: str = "", input: str = "", batch_max: int = 0) -> None:
        import torch

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        with contextlib.suppress(RuntimeError):  # already set
            torch.set_num_interop_threads(1)
        with contextlib.suppress(NotImplementedError):  # exported programs do not support eval()
            module.eval()
        self._torch, self._module = torch, module
        self._called = f"{type(module).__name__}.forward()"
        self._name = name or _input_of(module)
        floats = (part.dtype for part in module.parameters() if part.is_floating_point())
        self._dtype = next(floats, None)
        said = getattr(module, "input", "")
        self.input = input or (said if isinstance(said, str) and said else "any")
        self.batch_max = batch_max

    def predict_batch(self, inputs: Any) -> Any:
        """Call forward()."""
        torch = self._torch
        try:
            rows = torch.from_numpy(np.array(inputs))
        except (TypeError, ValueError):
            kind = type(inputs[0]).__name__ if len(inputs) else "row"
            raise TypeError(
                f"input {self._name!r} of {self._called}: rows are {kind}s; arrays of one shape are"
                " needed"
            ) from None
        if self._dtype is not None and rows.is_floating_point():
            rows = rows.to(self._dtype)
        try:
            with torch.inference_mode():
                found = self._module(rows)
        except Exception as error:
            shape = f"{str(rows.dtype).removeprefix('torch.')}{list(rows.shape)}"
            raise ValueError(
                f"{self._called} does not take {shape} as input {self._name!r}:"
                f" {_first_line(error)}"
            ) from error
        return self._array(found)

    def _array(self, found: Any) -> Any:
        if isinstance(found, Mapping):
            found = found["logits"] if "logits" in found else next(iter(found.values()))
        while isinstance(found, tuple | list):
            found = found[0]
        if not isinstance(found, self._torch.Tensor):
            raise TypeError(
                f"{self._called} returned a {type(found).__name__}; a tensor is needed, or a tuple"
                " or dict of them"
            )
        if found.dtype == self._torch.bfloat16:
            found = found.float()
        array = found.detach().cpu().numpy()
        return array.reshape(len(array)) if array.ndim > 1 and array.size == len(array) else array


def load(kind: str, content: bytes) -> TorchModel:
    """Load a file. kind: "torchscript" or "torch-export". Raises: LoadError."""
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchScript is deprecated
            if kind == "torchscript":
                return TorchModel(torch.jit.load(io.BytesIO(content), map_location="cpu"))
            program: Any = torch.export.load(io.BytesIO(content))
    except LoadError:
        raise
    except Exception as error:
        raise LoadError(f"PyTorch cannot load this model: {_first_line(error)}") from None
    return _exported(program)


def _exported(program: Any) -> TorchModel:
    names = program.graph_signature.user_inputs
    if len(names) != 1:
        raise LoadError(
            f"an exported program has one input, this one has {len(names)}"
            f" ({', '.join(map(str, names))})"
        )
    value = next(
        node.meta["val"]
        for node in program.graph.nodes
        if node.op == "placeholder" and node.name == names[0]
    )
    dims = [dim if isinstance(dim, int) else 0 for dim in value.shape]  # 0: free
    if not dims or dims[0] > 1:
        free = f"dynamic_shapes={{{names[0]!r}: {{0: torch.export.Dim('batch')}}}}"
        raise LoadError(f"the batch of input {names[0]!r} is fixed; export with {free}")
    dtype = _OURS.get(str(value.dtype).removeprefix("torch."), "")
    row = ",".join(map(str, dims[1:]))
    known = dtype and all(dims[1:])
    type_ = (f"{dtype}[{row}]" if row else dtype) if known else "any"
    return TorchModel(program.module(), str(names[0]), type_, batch_max=dims[0])


def _input_of(module: Any) -> str:
    """Return the name of forward()'s only input. Raises: LoadError when it needs more."""
    schema = getattr(getattr(module, "forward", None), "schema", None)
    if schema is not None:
        needed = [one.name for one in schema.arguments[1:] if not one.has_default_value()]
        first = [one.name for one in schema.arguments[1:2]]
    else:
        try:
            taken = [*inspect.signature(module.forward).parameters.values()]
        except (TypeError, ValueError):
            return "input"
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        needed = [one.name for one in taken if one.default is one.empty and one.kind in positional]
        first = [one.name for one in taken[:1]]
    if len(needed) > 1:
        which = f"{len(needed)} inputs ({', '.join(needed)})"
        raise LoadError(f"forward() of {type(module).__name__} needs {which}; wrap it in a Model")
    return str((needed or first or ["input"])[0])


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:500] or type(error).__name__
