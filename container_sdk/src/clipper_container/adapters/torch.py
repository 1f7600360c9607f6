"""PyTorch modules on the CPU: live ones, TorchScript, and exported programs."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from clipper_container.adapters.ragged import run_by_shape
from clipper_container.loading.errors import LoadError, first_line
from clipper_container.model import Model, SeveralOutputs, UserValue
from clipper_container.schema import Array, Column
from clipper_container.tensor_spec import given_type

if TYPE_CHECKING:
    import torch

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
    """Calls forward() of a module, after eval(), in inference mode. The first dimension of its
    inputs is the batch.

    Float rows are cast to the type of the module's weights, if they are all of one. A tensor
    becomes an array, of bfloat16 one of f32. Outputs of shape (n, 1) become n numbers. A module
    that returns several tensors needs the types of its outputs. Named tensors are passed by the
    names of forward()'s arguments; a tuple or dict that it returns is then all the outputs. Rows of
    different shapes run in groups of equal ones.

    names: of forward()'s inputs, if they are given by position. input: default: the module's
    attribute `input`. dtypes: of float inputs, by name, where the module says them.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        names: Sequence[str] = (),
        input: str | Mapping[str, str] = "",
        batch_max: int = 0,
        dtypes: Mapping[str, torch.dtype] = {},
    ) -> None:
        import torch

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        # it is an error to set it again
        with contextlib.suppress(RuntimeError):
            torch.set_num_interop_threads(1)
        # exported programs have no modes
        with contextlib.suppress(NotImplementedError):
            module.eval()
        self._torch, self._module = torch, module
        self._called = f"{type(module).__name__}.forward()"
        self._by_position = tuple(names)
        self.needs = self._by_position or _inputs_of(module)
        self._name = self.needs[0]
        floats = {part.dtype for part in module.parameters() if part.is_floating_point()}
        self._dtype = floats.pop() if len(floats) == 1 else None
        self._dtypes = dict(dtypes)
        input_type = getattr(module, "input", "")
        self.input = input or (
            input_type if isinstance(input_type, str | Mapping) and input_type else "any"
        )
        self.batch_max = batch_max

    def check_input(self, named: bool) -> None:
        """Refuse to serve a module of several inputs without their types. Raises: LoadError."""
        if len(self.needs) > 1 and not named:
            types = ", ".join(f"{name!r}: 'f32[8]'" for name in self.needs)
            raise LoadError(
                f"{self._called} needs {len(self.needs)} inputs ({', '.join(self.needs)}); deploy"
                f" it with their types, as inputs={{{types}}}, or wrap it in a Model"
            )

    def predict_tensors(self, inputs: UserValue, *sessions: object) -> UserValue:
        """Call forward() with named tensors; return all that it returns, a dict or a tuple."""
        given = inputs if isinstance(inputs, Mapping) else {self._name: inputs}
        found = run_by_shape(given, self._run)
        by_name = not found.keys() <= {str(i) for i in range(len(found))}
        return (
            found
            if by_name
            else next(iter(found.values()))
            if len(found) == 1
            else (*found.values(),)
        )

    def _run(self, arrays: dict[str, Array]) -> dict[str, Column]:
        """Return the outputs by name, or by position: "0", "1"."""
        tensors = {name: self._tensor(name, array) for name, array in arrays.items()}
        by_position = [tensors.pop(name) for name in self._by_position if name in tensors]
        try:
            with self._torch.inference_mode():
                found = self._module(*by_position, **tensors)
        except Exception as error:
            given = ", ".join(f"{name} {a.dtype}{list(a.shape)}" for name, a in arrays.items())
            raise ValueError(
                f"{self._called} does not take {given}: {first_line(error)}"
            ) from error
        if not isinstance(found, Mapping):
            each = found if isinstance(found, tuple | list) else (found,)
            found = {str(i): value for i, value in enumerate(each)}
        return {str(name): self._plain(value) for name, value in found.items()}

    def _tensor(self, name: str, array: Array) -> torch.Tensor:
        try:
            tensor = self._torch.from_numpy(array if array.flags.writeable else array.copy())
        except (TypeError, ValueError):
            raise TypeError(
                f"input {name!r} of {self._called}: {array.dtype} is not a type of PyTorch"
            ) from None
        return self._converted(name, tensor)

    def _converted(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        dtype = self._dtypes.get(name, self._dtype)
        return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)

    def _plain(self, value: UserValue) -> Array:
        if not isinstance(value, self._torch.Tensor):
            raise TypeError(
                f"{self._called} returned a {type(value).__name__} among its outputs; tensors are"
                " needed"
            )
        value = value.float() if value.dtype == self._torch.bfloat16 else value
        return np.asarray(value.detach().cpu().resolve_neg().numpy())

    def predict_batch(self, inputs: UserValue) -> UserValue:
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
        rows = self._converted(self._name, rows)
        try:
            with torch.inference_mode():
                found = self._module(rows)
        except Exception as error:
            given = given_type(self._plain(rows))
            raise ValueError(
                f"{self._called} does not take {given} as input {self._name!r}: {first_line(error)}"
            ) from error
        return self._array(found)

    def _array(self, found: UserValue) -> UserValue:
        found = only_output(self._called, found)
        if not isinstance(found, self._torch.Tensor):
            raise TypeError(
                f"{self._called} returned a {type(found).__name__}; a tensor is needed, or several"
                " with outputs={...}"
            )
        array = self._plain(found)
        return array.reshape(len(array)) if array.ndim > 1 and array.size == len(array) else array


def only_output(called: str, found: UserValue) -> UserValue:
    """Return what forward() returned, or the one item of the tuple, list or dict that it returned.

    called: the name of the method. Raises: SeveralOutputs, of which all but one would be lost.
    """
    while isinstance(found, Mapping | tuple | list):
        parts = [*found.values()] if isinstance(found, Mapping) else found
        if len(parts) != 1:
            is_named = isinstance(found, Mapping)
            names = [*map(str, found)] if is_named else [f"output{i}" for i in range(len(parts))]
            types = ", ".join(f"{name!r}: 'f32[8]'" for name in names[:8])
            raise SeveralOutputs(
                f"{called} returned {len(names)} outputs; deploy it with the types of all,"
                f" as outputs={{{types}}}, or let it return one tensor"
            )
        (found,) = parts
    return found


def load(kind: str, content: bytes) -> TorchModel:
    """Load a file. kind: "torchscript" or "torch-export". Raises: LoadError."""
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchScript is deprecated
            if kind == "torchscript":
                return TorchModel(torch.jit.load(io.BytesIO(content), map_location="cpu"))
            program = torch.export.load(io.BytesIO(content))
    except LoadError:
        raise
    except Exception as error:
        raise LoadError(f"PyTorch cannot load this model: {first_line(error)}") from None
    return _exported(program)


def _exported(program: torch.export.ExportedProgram) -> TorchModel:
    names = [str(name) for name in program.graph_signature.user_inputs]
    values = {
        node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"
    }
    types, batch_max = {}, 0
    dtypes = {name: values[name].dtype for name in names if values[name].is_floating_point()}
    for name in names:
        dims = [dim if isinstance(dim, int) else 0 for dim in values[name].shape]  # 0: free
        if not dims or dims[0] > 1:
            free = f"dynamic_shapes={{{name!r}: {{0: torch.export.Dim('batch')}}}}"
            raise LoadError(f"the batch of input {name!r} is fixed; export with {free}")
        batch_max = max(batch_max, dims[0])
        dtype = _OURS.get(str(values[name].dtype).removeprefix("torch."), "")
        row = ",".join(str(dim) if dim else "*" for dim in dims[1:])
        types[name] = f"{dtype}[{row}]" if row else dtype
    if len(names) > 1:
        if untyped := [name for name, type_ in types.items() if not type_[:1].isalpha()]:
            raise LoadError(f"input {untyped[0]!r} is of a type that cannot be served")
        return TorchModel(program.module(), names, types, batch_max, dtypes)
    (type_,) = types.values()
    known = type_[:1].isalpha() and "*" not in type_
    return TorchModel(program.module(), names, type_ if known else "any", batch_max, dtypes)


def _inputs_of(module: torch.nn.Module) -> tuple[str, ...]:
    """Return the names of the inputs that forward() needs, at least one."""
    schema = getattr(getattr(module, "forward", None), "schema", None)
    if schema is not None:
        needed = [one.name for one in schema.arguments[1:] if not one.has_default_value()]
        first = [one.name for one in schema.arguments[1:2]]
    else:
        try:
            taken = [*inspect.signature(module.forward).parameters.values()]
        except (TypeError, ValueError):
            return ("input",)
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        needed = [one.name for one in taken if one.default is one.empty and one.kind in positional]
        first = [one.name for one in taken[:1]]
    return tuple(map(str, needed or first or ["input"]))


def load_file(kind: str, content: bytes, about: Mapping[str, UserValue]) -> TorchModel:
    """Load a file. kind: "torchscript" or "torch-export". Raises: LoadError."""
    return load(kind, content)
