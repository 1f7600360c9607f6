"""Inputs as tensors of the Open Inference Protocol with binary data, and tensors as outputs.

A tensor is packed and little-endian. numpy is used where it is installed; without it, lists are
packed by the standard library, and outputs are lists. Tables (pandas, polars, Arrow) are columns by
name, each a tensor.
"""

import functools
import importlib
import math
import struct
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from clipper_client.answers import UserValue
from clipper_client.errors import InvalidInput

if TYPE_CHECKING:
    from types import ModuleType

INPUT: Final = "input"  # the tensor of a model whose input has no name

_DATATYPES: Final = {  # of numpy's kind and size
    "b1": "BOOL",
    "u1": "UINT8",
    "u2": "UINT16",
    "u4": "UINT32",
    "u8": "UINT64",
    "i1": "INT8",
    "i2": "INT16",
    "i4": "INT32",
    "i8": "INT64",
    "f2": "FP16",
    "f4": "FP32",
    "f8": "FP64",
}
_CODES: Final = {name: code for code, name in _DATATYPES.items()}
_ARRAY_CODES: Final = {  # of the standard library
    "BOOL": "B",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "FP32": "f",
    "FP64": "d",
}
_HALF: Final = "FP16"  # which array.array has not


class Ragged(Exception):
    """The inputs are no tensors: they differ in shape, or are of several kinds."""


class PackedTensor(NamedTuple):
    """A tensor. data: packed, little-endian; of BYTES each element after its length in 4 bytes."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes | memoryview


@functools.cache
def numpy_or_none() -> "ModuleType | None":
    """Return numpy; None where it is not installed."""
    try:
        return importlib.import_module("numpy")
    except ImportError:
        return None


# -- inputs


def one_row(value: UserValue) -> list[PackedTensor]:
    """Return the tensors of one input, each with a first dimension of 1. Raises Ragged,
    InvalidInput.
    """
    if isinstance(value, Mapping):
        return [_with_row(_packed(str(name), part)) for name, part in value.items()]
    return [_with_row(_packed(INPUT, value))]


def many_rows(inputs: UserValue) -> list[PackedTensor]:
    """Return the tensors of n inputs: an array or a sequence of inputs; or, of named tensors, a
    table, an object of columns, or a sequence of objects. Raises Ragged, InvalidInput."""
    columns = columns_of(inputs)
    if columns is not None:
        return [_of_rows(name, column) for name, column in columns.items()]
    return [_of_rows(INPUT, inputs)]


def columns_of(inputs: UserValue) -> Mapping[str, UserValue] | None:
    """Return the columns of a table, of an object of columns, or of a sequence of objects; None for
    inputs without names. Raises Ragged."""
    if isinstance(inputs, Mapping):
        return inputs
    if isinstance(inputs, list | tuple):
        return _of_objects(inputs) if inputs and isinstance(inputs[0], Mapping) else None
    if hasattr(inputs, "to_pydict"):  # an Arrow table
        return {str(name): inputs.column(name) for name in inputs.schema.names}
    if hasattr(inputs, "get_columns"):  # polars
        return {str(column.name): column for column in inputs.get_columns()}
    if hasattr(inputs, "iloc") and hasattr(inputs, "columns"):  # pandas
        return {str(name): _of_pandas(column) for name, column in inputs.items()}
    return None


def _of_pandas(column: UserValue) -> UserValue:
    """Return a column of pandas as an array; what is missing in one of objects is None."""
    if column.dtype.kind in "biuf" and hasattr(column.dtype, "newbyteorder"):
        return column.to_numpy()
    return column.astype(object).where(column.notna(), None).to_numpy()


def rows_of(inputs: UserValue) -> UserValue:
    """Return inputs that are no tensors as JSON takes them: an object of columns, or a list."""
    if isinstance(inputs, list | tuple):
        return inputs
    columns = columns_of(inputs)
    return [*inputs] if columns is None else columns


def _of_objects(rows: Sequence[Mapping[str, UserValue]]) -> dict[str, UserValue]:
    names = rows[0].keys()
    if not all(isinstance(row, Mapping) and row.keys() == names for row in rows):
        raise Ragged("the inputs have different names")
    return {str(name): [row[name] for row in rows] for name in names}


def _of_rows(name: str, values: UserValue) -> PackedTensor:
    tensor = _packed(name, values)
    if not tensor.shape:
        raise InvalidInput(
            f"the inputs of {name!r} are one value: predict_many takes one for each row.",
            hint="Give a list or an array, or call predict.",
        )
    return tensor


def _with_row(tensor: PackedTensor) -> PackedTensor:
    return tensor._replace(shape=(1, *tensor.shape))


def _packed(name: str, value: UserValue) -> PackedTensor:
    """Return a value as a tensor of its own shape. Raises Ragged, InvalidInput."""
    if isinstance(value, str | bytes | bytearray | memoryview):
        return PackedTensor(name, "BYTES", (), _strings([value]))
    if not isinstance(value, list | tuple | bool | int | float):
        value = _as_array(name, value)
    if isinstance(value, list | tuple) and _first_of(value) in (str, bytes):
        shape, flat = _flattened(value)
        if not all(isinstance(item, str | bytes) for item in flat):
            raise Ragged("strings and other values")
        return PackedTensor(name, "BYTES", shape, _strings(flat))
    numpy = numpy_or_none()
    return _by_library(name, value) if numpy is None else _by_numpy(name, value, numpy)


def _as_array(name: str, value: UserValue) -> UserValue:
    """Return what is no list and no number as an array; objects and strings of one as lists."""
    if hasattr(value, "to_numpy"):  # a column of pandas, polars or Arrow
        value = _to_numpy(value)
    elif not hasattr(value, "dtype") and isinstance(value, Iterable):
        return list(value)
    numpy = numpy_or_none()
    if numpy is None:
        raise InvalidInput(
            f"{name!r} is a {type(value).__name__}, and numpy is not installed here.",
            hint="Run: pip install numpy   Or give a list.",
        )
    found = numpy.asarray(value)
    if found.dtype.kind in "OUST":
        return found.tolist()
    return found


def _to_numpy(column: UserValue) -> UserValue:
    """Return a column as an array. One of Arrow is copied where its values lie apart."""
    try:
        return column.to_numpy(zero_copy_only=False)
    except TypeError:  # pandas and polars have no such argument
        return column.to_numpy()


def _first_of(value: UserValue) -> type:
    """Return the type of the first element of nested lists."""
    while isinstance(value, list | tuple) and value:
        value = value[0]
    return str if isinstance(value, str) else bytes if isinstance(value, bytes) else type(value)


def _by_numpy(name: str, value: UserValue, numpy: UserValue) -> PackedTensor:
    try:
        found = numpy.asarray(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise Ragged(str(error)) from None
    if found.dtype.kind == "O" and _holds_only_numbers(found.ravel().tolist()):
        # None is a missing number
        found = found.astype(numpy.float64)
    datatype = _DATATYPES.get(f"{found.dtype.kind}{found.dtype.itemsize}")
    if datatype is None:
        if found.dtype.kind in "OUS":
            raise Ragged(f"values of {found.dtype}")
        raise InvalidInput(
            f"{name!r} is an array of {found.dtype}, which no model takes.",
            hint="Convert it to numbers, booleans or strings.",
        )
    packed = numpy.ascontiguousarray(found, found.dtype.newbyteorder("<"))
    data = memoryview(packed.reshape(-1).view(numpy.uint8))
    return PackedTensor(name, datatype, tuple(found.shape), data)


def _holds_only_numbers(flat: list[UserValue]) -> bool:
    return all(item is None or isinstance(item, int | float) for item in flat)


def _by_library(name: str, value: UserValue) -> PackedTensor:
    """Pack numbers without numpy: floats if one is a float or missing, else integers."""
    shape, flat = _flattened(value) if isinstance(value, list | tuple) else ((), [value])
    kinds = {*map(type, flat)}
    if kinds == {bool}:
        return PackedTensor(name, "BOOL", shape, bytes(flat))
    if not kinds <= {int, float, bool, type(None)}:
        others = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise Ragged(f"values of {others}")
    if kinds <= {int, bool}:
        for code, datatype in (("q", "INT64"), ("Q", "UINT64")):
            try:
                return PackedTensor(name, datatype, shape, _little(array(code, flat)))
            except OverflowError:
                continue
        raise InvalidInput(f"{name!r} holds an integer of more than 64 bits.", hint="Give floats.")
    numbers = array("d", (math.nan if item is None else item for item in flat))
    return PackedTensor(name, "FP64", shape, _little(numbers))


def _little(numbers: "array[UserValue]") -> bytes:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def _flattened(value: Sequence[UserValue]) -> tuple[tuple[int, ...], list[UserValue]]:
    """Return the shape and the elements of nested lists. Raises Ragged."""
    shape, flat = [len(value)], [*value]
    while flat and isinstance(flat[0], list | tuple):
        size = len(flat[0])
        if not all(isinstance(item, list | tuple) and len(item) == size for item in flat):
            raise Ragged("lists of different lengths")
        shape.append(size)
        flat = [inner for item in flat for inner in item]
    if any(isinstance(item, list | tuple) for item in flat):
        raise Ragged("lists beside other values")
    return tuple(shape), flat


def _strings(values: Iterable[str | bytes | bytearray | memoryview]) -> bytes:
    parts = []
    for value in values:
        try:
            data = value.encode() if isinstance(value, str) else bytes(value)
        except UnicodeEncodeError as error:
            raise InvalidInput(f"a string that is no UTF-8: {error}.") from None
        parts += [len(data).to_bytes(4, "little"), data]
    return b"".join(parts)


# -- outputs


def unpacked(datatype: str, shape: Sequence[int], data: memoryview) -> UserValue:
    """Return a tensor as an array, or as nested lists where numpy is not installed; strings always
    as lists. Raises ValueError, struct.error if the size is wrong."""
    count = math.prod(shape)
    if datatype == "BYTES":
        texts = [*_elements(data)]
        if len(texts) != count:
            raise ValueError(f"{len(texts)} strings for the shape {list(shape)}")
        return nested(texts, shape)
    numpy = numpy_or_none()
    if numpy is not None:
        code = _CODES[datatype]
        dtype = numpy.dtype("?") if code == "b1" else numpy.dtype(f"<{code}")
        return numpy.frombuffer(data, dtype).reshape(shape)
    if datatype == _HALF:
        return nested(list(struct.unpack(f"<{count}e", data)), shape)
    numbers = array(_ARRAY_CODES[datatype], bytes(data))
    if sys.byteorder == "big":
        numbers.byteswap()
    if len(numbers) != count:
        raise ValueError(f"{len(numbers)} numbers for the shape {list(shape)}")
    flat = numbers.tolist()
    return nested([*map(bool, flat)] if datatype == "BOOL" else flat, shape)


def _elements(data: memoryview) -> Iterator[str]:
    at = 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        if at + 4 + size > len(data):
            raise ValueError("a string beyond the end")
        yield str(data[at + 4 : at + 4 + size], "utf-8", "surrogateescape")
        at += 4 + size


def nested(flat: list[UserValue], shape: Sequence[int]) -> UserValue:
    """Return the elements of a tensor as nested lists of its shape."""
    for size in reversed(shape[1:]):
        flat = [flat[at : at + size] for at in range(0, len(flat), size)] if size else []
    return flat


def of_json(value: UserValue) -> UserValue:
    """Return an output of JSON: lists of numbers as an array where numpy is installed."""
    if isinstance(value, dict):
        return {name: of_json(part) for name, part in value.items()}
    if not isinstance(value, list):
        return value
    numpy = numpy_or_none()
    if numpy is None:
        return value
    try:
        found = numpy.asarray(value)
    except ValueError:  # rows of different lengths
        return value
    return found if found.dtype.kind in "biuf" else value
