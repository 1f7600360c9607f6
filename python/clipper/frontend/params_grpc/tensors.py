"""Tensors of the PServer messages to arrays, and back. Received tensors are fully checked."""

import math
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from clipper.errors import InvalidInput
from clipper.frontend.protocols import message

F32 = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
RANK_MAX: Final = 32
_TENSOR: Final = message("Tensor")
_NAMES: Final = {
    value.number: value.name for value in _TENSOR.DESCRIPTOR.enum_types_by_name["DataType"].values
}
_FLOATS: Final = {"FP16": "<f2", "FP32": "<f4", "FP64": "<f8"}
_NUMBERS: Final = {
    np.dtype(kind): number for number, name in _NAMES.items() if (kind := _FLOATS.get(name))
}


def values_in(tensor: Message) -> F32:
    """Return the values as f32 in the tensor's shape; a view if they are f32. Raises
    InvalidInput."""
    kind, shape = _NAMES.get(tensor.data_type, str(tensor.data_type)), tuple(tensor.dim)
    if kind not in _FLOATS:
        hint = "BOOL is the default of data_type: set it." if kind == "BOOL" else ""
        raise InvalidInput(
            f"tensor {tensor.name!r} is of {kind}, where {', '.join(_FLOATS)} are possible.",
            hint=hint,
        )
    if len(shape) > RANK_MAX or any(n < 0 for n in shape):
        raise InvalidInput(
            f"tensor {tensor.name!r}: dim is {list(shape)[:RANK_MAX]}, up to {RANK_MAX} numbers"
            " from 0."
        )
    dtype = np.dtype(_FLOATS[kind])
    if math.prod(shape) * dtype.itemsize != len(tensor.content):
        size = f"{len(tensor.content)} bytes of content are not {list(shape)} of {kind}"
        raise InvalidInput(
            f"tensor {tensor.name!r}: {size}.", hint="Content is row-major, little-endian."
        )
    with np.errstate(over="ignore"):  # infinity is rejected later, with a better message
        found: F32 = (
            np.frombuffer(tensor.content, dtype).reshape(shape).astype(np.float32, copy=False)
        )
    return found


def ids_in(numbers: Sequence[int]) -> Ids:
    """Return a repeated field as i64[n]."""
    return np.array(numbers[:], np.int64)  # a slice is a list: three times as fast as the field


def tensor_of(name: str, values: npt.NDArray[np.floating], ids: Iterable[int] = ()) -> Message:
    """Return a Tensor of f16, f32 or f64."""
    return _TENSOR(
        name=name,
        data_type=_NUMBERS[values.dtype],
        dim=values.shape,
        content=values.tobytes(),
        indices=ids,
    )


def tensor_of_bytes(name: str, kind: str, shape: tuple[int, ...], content: bytes) -> Message:
    """Return a Tensor of FP16 or FP32. content: of the exact size, or with padding."""
    dtype = np.dtype(_FLOATS[kind])
    return _TENSOR(
        name=name,
        data_type=_NUMBERS[dtype],
        dim=shape,
        content=content[: math.prod(shape) * dtype.itemsize],
    )
