"""The Open Inference Protocol, version 2, in JSON: requests to tensors, tensors to responses. Pure.

A tensor is in the JSON (`data`, flat or nested, row-major) or, with the binary extension, behind
the JSON: little-endian, packed, in the order of the tensors. The length of the JSON
(`Inference-Header-Content-Length`) decides, not the Content-Type, which clients often set
wrongly. Binary tensors are views of the body, and are written from the arrays' memory. Source:
kserve.github.io, "Open Inference Protocol", and Triton's extensions `binary_tensor_data` and
`schedule_policy`.
"""

import itertools
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from clipper.errors import BadOutput, InvalidInput
from clipper.frontend.http.json_body import json_texts
from clipper.frontend.http.messages import read_json
from clipper.frontend.inference.json_inputs import straight_reader
from clipper.schema import Tensors, TensorSpec
from clipper.types import InputType, UserValue

JsonValue = Any
Values = UserValue  # of a tensor: an array, or a list of str and bytes
Described = list[dict[str, JsonValue]]  # metadata of tensors
DATATYPES: Final[dict[str, str]] = {
    "BOOL": "?",
    "UINT8": "u1",
    "UINT16": "<u2",
    "UINT32": "<u4",
    "UINT64": "<u8",
    "INT8": "i1",
    "INT16": "<i2",
    "INT32": "<i4",
    "INT64": "<i8",
    "FP16": "<f2",
    "FP32": "<f4",
    "FP64": "<f8",
}
_OF_DTYPE: Final = {np.dtype(code): name for name, code in DATATYPES.items()}
_OF_OURS: Final = {"bool": "BOOL", "str": "BYTES", "bytes": "BYTES"}
RANK_MAX: Final = 8
_ELEMENTS_MAX: Final = 1 << 31
EMPTY_ROWS_MAX: Final = 4096  # limit for the product of the other dimensions of an empty tensor
INPUT, OUTPUT = "input", "output"


# The structs of the JSON. An optional member that is null counts as absent: clients send all
# members of their own structs.
_Parameters = dict[str, JsonValue] | None


class _Tensor(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    parameters: _Parameters = None
    data: msgspec.Raw = msgspec.Raw(b"")


class _Output(msgspec.Struct):
    name: str
    parameters: _Parameters = None


class _Head(msgspec.Struct):
    inputs: list[_Tensor]
    id: str | None = None
    parameters: _Parameters = None
    outputs: list[_Output] | None = None


class RequestedOutput(msgspec.Struct):
    """An output that a request names."""

    name: str
    parameters: dict[str, JsonValue] = {}


def _given(parameters: _Parameters) -> dict[str, JsonValue]:
    """Return the parameters that are not null."""
    if not parameters:
        return {}
    return {name: value for name, value in parameters.items() if value is not None}


class Tensor(msgspec.Struct):
    """A decoded tensor. values: an array of `shape`, or a flat list for BYTES. null: where the JSON
    has a null, which is NaN here, and what is wrong with it for a tensor that takes none.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: Values
    null: str = ""


class InferRequest(msgspec.Struct):
    """A decoded infer request.

    binary: return outputs as binary data, but for those that say otherwise. outputs: those that the
    request names; all if it names none.
    """

    id: str
    parameters: dict[str, JsonValue]
    inputs: list[Tensor]
    binary: bool
    outputs: Sequence[RequestedOutput] = ()


_HEAD: "msgspec.json.Decoder[_Head]" = msgspec.json.Decoder(_Head)
_FLAT: dict[str, "msgspec.json.Decoder[Any]"] = {
    "b": msgspec.json.Decoder(list[bool]),
    "i": msgspec.json.Decoder(list[int]),
    "u": msgspec.json.Decoder(list[int]),
    "f": msgspec.json.Decoder(list[float]),
}
_ANYTHING: "msgspec.json.Decoder[Any]" = msgspec.json.Decoder()
_STRAIGHT = {
    name: straight_reader(InputType.parse(f"{np.dtype(code).kind}{8 * np.dtype(code).itemsize}[*]"))
    for name, code in DATATYPES.items()
    if name != "BOOL"
}


def decode(body: bytes | bytearray, head_bytes: bytes = b"") -> InferRequest:
    """Decode an infer request.

    head_bytes: the value of Inference-Header-Content-Length, or empty. Raises InvalidInput.
    """
    head_size = _head_size(body, head_bytes)
    head: _Head = read_json(_HEAD, memoryview(body)[:head_size] if head_size < len(body) else body)
    at = head_size
    inputs = []
    for i, tensor in enumerate(head.inputs):
        parameters = _given(tensor.parameters)
        shape = checked_shape(tensor.name, tensor.datatype, tensor.shape, parameters)
        size = parameters.get("binary_data_size")
        null = ""
        if size is None:
            values, null = _from_json(tensor, shape, f"$.inputs[{i}].data")
        else:
            if (
                not isinstance(size, int)
                or isinstance(size, bool)
                or not 0 <= size <= len(body) - at
            ):
                left = len(body) - at
                raise InvalidInput(
                    f"tensor {tensor.name!r} has binary_data_size {size!r}: {left} bytes are left"
                    " in the body."
                )
            values = from_binary(
                tensor.name, tensor.datatype, shape, memoryview(body)[at : at + size]
            )
            at += size
        inputs.append(Tensor(tensor.name, tensor.datatype, shape, values, null))
    if at != len(body):
        raise InvalidInput(
            f"{len(body) - at} bytes follow the last tensor: no binary_data_size counts them."
        )
    outputs = [RequestedOutput(one.name, _given(one.parameters)) for one in head.outputs or ()]
    check_requested(outputs)
    given = _given(head.parameters)
    binary = bool(given.get("binary_data_output", False))
    return InferRequest(head.id or "", given, inputs, binary, outputs)


def _head_size(body: bytes | bytearray, text: bytes) -> int:
    if not text:
        return len(body)
    if not text.isdigit() or len(text) > 12 or int(text) > len(body):
        shown = text[:20].decode("ascii", "replace")
        raise InvalidInput(
            f"Inference-Header-Content-Length {shown!r} is not a length within a body of"
            f" {len(body)} bytes."
        )
    return int(text)


def check_requested(outputs: Iterable[RequestedOutput]) -> None:
    """Raise InvalidInput for the classification extension, and for an output named twice."""
    seen = set()
    for wanted in outputs:
        if "classification" in wanted.parameters:
            raise InvalidInput("the classification extension is not known here.")
        if wanted.name in seen:
            raise InvalidInput(f"output {wanted.name[:64]!r} is requested twice.")
        seen.add(wanted.name)


def check_names(outputs: Iterable[RequestedOutput], names: Sequence[str]) -> None:
    """Raise InvalidInput for a requested output that is none of `names`."""
    for wanted in outputs:
        if wanted.name not in names:
            raise InvalidInput(f"there is no output {wanted.name[:64]!r}: {_names(names)}.")


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:20]))
    return f"it is named {shown}" if len(names) == 1 else f"they are named {shown}"


def checked_shape(
    name: str, datatype: str, dims: Iterable[int], parameters: Mapping[str, JsonValue]
) -> tuple[int, ...]:
    """Return the shape of a tensor.

    Raises InvalidInput for an impossible shape, an unknown datatype, and tensors in shared memory.
    """
    if "shared_memory_region" in parameters:
        raise InvalidInput(
            "tensors in shared memory are not taken here.", hint="Send them in the body."
        )
    if datatype not in DATATYPES and datatype != "BYTES":
        known = ", ".join((*DATATYPES, "BYTES"))
        raise InvalidInput(
            f"tensor {name[:64]!r} has datatype {datatype[:20]!r}.", hint=f"Known: {known}."
        )
    shape = tuple(itertools.islice(dims, RANK_MAX + 1))
    # rows without elements cost the sender no bytes
    elements_max = _ELEMENTS_MAX if all(shape) else EMPTY_ROWS_MAX
    if (
        len(shape) > RANK_MAX
        or any(n < 0 for n in shape)
        or math.prod(n for n in shape if n) > elements_max
    ):
        raise InvalidInput(f"tensor {name[:64]!r} cannot have the shape {shape[:20]}.")
    return shape


def _from_json(tensor: _Tensor, shape: tuple[int, ...], at: str) -> tuple[Values, str]:
    """Return the values of a tensor, and what is wrong with a null among them."""
    values: Values
    null = ""
    if bytes(tensor.data) in (b"", b"null"):
        raise InvalidInput(f"tensor {tensor.name!r} has neither data nor binary_data_size.")
    if tensor.datatype == "BYTES":
        values = _flattened(read_json(_ANYTHING, tensor.data, at))
        if not all(isinstance(value, str) for value in values):
            hint = "BYTES tensors are strings in JSON; others go as binary data."
            raise InvalidInput(f"`{at}` has an element that is not a string.", hint=hint)
    else:
        try:
            values = _numbers(tensor, at)
        except InvalidInput as error:
            values, null = _with_nan(tensor, at), str(error)
            if values is None:
                raise
    if len(values) != math.prod(shape):
        takes = f"its shape {list(shape)} takes {math.prod(shape)}"
        raise InvalidInput(f"tensor {tensor.name!r} has {len(values)} elements: {takes}.")
    return values.reshape(shape) if isinstance(values, np.ndarray) else values, null


def _with_nan(tensor: _Tensor, at: str) -> Values | None:
    """Return numbers of floating point with NaN for null; None if something else is wrong."""
    dtype = np.dtype(DATATYPES[tensor.datatype])
    found = read_json(_ANYTHING, tensor.data, at)
    if dtype.kind != "f" or not {*map(type, _flattened(found))} <= {int, float, type(None)}:
        return None
    try:
        with np.errstate(over="raise"):
            return np.array(found, np.float64).ravel().astype(dtype)
    except (ValueError, OverflowError, FloatingPointError):
        return None


def _numbers(tensor: _Tensor, at: str) -> Values:
    dtype = np.dtype(DATATYPES[tensor.datatype])
    text = memoryview(tensor.data)
    nested = bytes(text[1:32]).lstrip()[:1] == b"["
    try:
        if not nested:
            straight = _STRAIGHT.get(tensor.datatype)
            found = straight(text) if straight is not None else None
            if found is not None:
                return found
            with np.errstate(over="raise"):
                return np.array(read_json(_FLAT[dtype.kind], text, at), dtype)
        found = read_json(_ANYTHING, text, at)
        values = np.asarray(found)
        if values.size and dtype.kind == "u" and values.dtype.kind == "f":
            # numpy makes floats of whole numbers of which some fit i64 and others only u64
            values = _whole_numbers(_flattened(found), values)
        if values.size and not (
            values.dtype.kind == dtype.kind or (values.dtype.kind in "iu" and dtype.kind in "iuf")
        ):
            raise InvalidInput(f"`{at}` holds what is no {tensor.datatype}.")
        with np.errstate(over="raise"):
            converted = values.ravel().astype(dtype)
        if dtype.kind in "iu" and not (converted == values.ravel()).all():
            raise OverflowError("a value is too large")
        return converted
    except (ValueError, OverflowError, FloatingPointError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(f"`{at}` is no {tensor.datatype} tensor: {error}.") from None


def _whole_numbers(items: list[object], values: Values) -> Values:
    """Return items as u64 if all are whole numbers, else the values that numpy made of them."""
    whole = all(isinstance(item, int) and not isinstance(item, bool) for item in items)
    return np.array(items, np.uint64) if whole else values


def _flattened(values: Values) -> list[object]:
    flat = values if isinstance(values, list) else [values]
    while any(isinstance(value, list) for value in flat):
        flat = [
            inner for value in flat for inner in (value if isinstance(value, list) else [value])
        ]
    return flat


def from_binary(name: str, datatype: str, shape: tuple[int, ...], data: memoryview) -> Values:
    """Return packed, little-endian bytes as an array of `shape` without a copy; a list of bytes for
    BYTES.

    Raises InvalidInput if the size is wrong.
    """
    count = math.prod(shape)
    if datatype == "BYTES":
        return _strings(name, data, count)
    dtype = np.dtype(DATATYPES[datatype])
    if len(data) != count * dtype.itemsize:
        takes = f"{datatype}{list(shape)} takes {count * dtype.itemsize}"
        raise InvalidInput(f"tensor {name[:64]!r} has {len(data)} bytes of binary data: {takes}.")
    values: Values = np.frombuffer(data, dtype).reshape(shape)
    if dtype.kind == "b":
        return np.frombuffer(data, np.uint8).reshape(shape) != 0  # a byte of 2 is not a valid bool
    return values


def _strings(name: str, data: memoryview, count: int) -> list[bytes]:
    values: list[bytes] = []
    at = 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "little") if len(data) - at >= 4 else -1
        if size < 0 or size > len(data) - at - 4:
            raise InvalidInput(
                f"tensor {name!r}: its element {len(values)} goes beyond its binary data."
            )
        values.append(bytes(data[at + 4 : at + 4 + size]))
        at += 4 + size
    if len(values) != count:
        raise InvalidInput(
            f"tensor {name!r} has {len(values)} elements of binary data: its shape takes {count}."
        )
    return values


# -- tensors and rows


def rows_of(request: InferRequest, type_: InputType) -> Values:
    """Return the queries of a request for inputs of `type_`: an array (n, *shape) or a list.

    The first dimension is the number of rows; one row may omit it. Raises InvalidInput for other
    shapes.
    """
    if len(request.inputs) != 1:
        count = len(request.inputs)
        if type_.dtype == "any" and count:
            raise InvalidInput(
                f"the request has {count} inputs, and those of the model are not known yet.",
                hint="State them where it is deployed or registered, or load it first.",
            )
        raise InvalidInput(f"the request has {count} inputs: one tensor is taken, {INPUT!r}.")
    (tensor,) = request.inputs
    if tensor.null and type_.dtype[:1] != "f":
        raise InvalidInput(tensor.null)
    values = _strings_or_array(tensor, type_)
    if isinstance(values, list):
        if len(tensor.shape) > 1 and math.prod(tensor.shape[1:]) != 1:
            raise InvalidInput(
                f"tensor {tensor.name!r} has shape {list(tensor.shape)}: [n] or [n, 1] is taken."
            )
        rows: Values = values
    elif type_.dtype == "any":
        rows = values if values.ndim else values[None]
    elif type_.variable:
        if values.ndim not in (1, 2):
            raise InvalidInput(
                f"tensor {tensor.name!r} has shape {list(tensor.shape)}: [n, length] is taken."
            )
        rows = values if values.ndim == 2 else values[None]
    elif values.ndim and values.shape[1:] == type_.shape:
        rows = values
    elif values.shape == type_.shape:
        rows = values[None]
    else:
        taken = ", ".join(map(str, (-1, *type_.shape)))
        raise InvalidInput(
            f"tensor {tensor.name!r} has shape {list(tensor.shape)}: [{taken}] is taken."
        )
    if not len(rows):
        raise InvalidInput(f"tensor {tensor.name!r} holds no rows.")
    return rows


def rows_of_columns(request: InferRequest, columns: Sequence[str]) -> Values:
    """Return the queries of a request that has a tensor for each column of the DataFrame that a
    model was fitted on: an array (n, columns). Raises InvalidInput."""
    by_name = {tensor.name: tensor for tensor in request.inputs}
    arrays = []
    for name in columns:
        tensor = by_name[name]
        if tensor.datatype == "BYTES" or math.prod(tensor.shape) != math.prod(tensor.shape[:1]):
            got = f"{tensor.datatype}{list(tensor.shape)}"
            raise InvalidInput(f"tensor {name!r} is a column of numbers, [n]; got {got}.")
        arrays.append(tensor.values.reshape(-1).astype(np.float64))
    if len({*map(len, arrays)}) > 1:
        sizes = ", ".join(f"{name!r} has {len(a)}" for name, a in zip(columns, arrays, strict=True))
        raise InvalidInput(f"the columns have different numbers of rows: {sizes}.")
    return np.column_stack(arrays)


def _strings_or_array(tensor: Tensor, type_: InputType) -> Values:
    """Return a list for models of str or bytes, else an array. Raises InvalidInput for another
    datatype."""
    is_text = tensor.datatype == "BYTES"
    if is_text != (type_.dtype in ("str", "bytes")) and type_.dtype != "any":
        raise InvalidInput(
            f"tensor {tensor.name!r} is {tensor.datatype}: {datatype_of(type_)} is taken ({type_})."
        )
    if not is_text:
        return tensor.values
    return _texts(tensor, type_.dtype)


def _texts(tensor: Tensor, dtype: str) -> list[object]:
    """Return the elements of a BYTES tensor as bytes or, for `str`, as str. Raises InvalidInput."""
    if dtype == "bytes":
        return [value.encode() if isinstance(value, str) else value for value in tensor.values]
    try:
        return [value if isinstance(value, str) else value.decode() for value in tensor.values]
    except UnicodeDecodeError as error:
        raise InvalidInput(f"tensor {tensor.name!r} holds what is no UTF-8: {error}.") from None


def columns_of(request: InferRequest, tensors: Tensors) -> tuple[int, dict[str, Values]]:
    """Return the number of rows of a request for named tensors, and an array or a list for each.

    The first dimension of every tensor is the number of rows; one row may omit it in all of them.
    A scalar of a row may have the shape [n, 1], as in Triton. Raises InvalidInput.
    """
    named: dict[str, Values] = {}
    for tensor in request.inputs:
        if tensor.name in named:
            raise InvalidInput(f"tensor {tensor.name[:64]!r} is given twice.")
        named[tensor.name] = _column(tensor, tensors.by_name.get(tensor.name))
    if all(
        name in named and named[name].ndim == len(s.shape) for name, s in tensors.by_name.items()
    ):
        named = {name: column[None] for name, column in named.items()}
    n, columns = tensors.batch(named)
    if not n:
        raise InvalidInput(f"tensor {tensors.specs[0].name!r} holds no rows.")
    return n, columns


def _column(tensor: Tensor, spec: TensorSpec | None) -> Values:
    """Return the rows of a tensor of a request. Raises InvalidInput."""
    if spec is None:
        return np.empty(tensor.shape[:1])
    rows = array_of(tensor, spec)
    return rows[:, 0] if not spec.shape and rows.shape[1:] == (1,) else rows


def array_of(tensor: Tensor, spec: TensorSpec) -> Values:
    """Return a tensor as an array, of objects for strings. Raises InvalidInput if it is strings
    and `spec` numbers, or the reverse."""
    is_text = tensor.datatype == "BYTES"
    if is_text != spec.is_text:
        got = f"{tensor.datatype}{list(tensor.shape)}"
        raise InvalidInput(f"tensor {spec.name!r}: expected {spec.type}, got {got}.")
    if not is_text:
        return tensor.values
    array = np.empty(len(tensor.values), object)
    array[:] = _texts(tensor, spec.dtype)
    return array.reshape(tensor.shape)


def datatype_of(type_: InputType | TensorSpec) -> str:
    """Return the protocol's datatype of an input type or of a tensor."""
    if type_.dtype in _OF_OURS:
        return _OF_OURS[type_.dtype]
    return {"u": "UINT", "i": "INT", "f": "FP"}[type_.dtype[0]] + type_.dtype[1:]


def described(specs: Iterable[TensorSpec]) -> Described:
    """Return the metadata of tensors; -1 is a dimension that varies, the first one the rows."""
    return [
        {"name": spec.name, "datatype": datatype_of(spec), "shape": [-1, *spec.shape]}
        for spec in specs
    ]


# -- responses


class OutputTensor(NamedTuple):
    """An output of a response. binary: its values follow the JSON."""

    name: str
    datatype: str
    shape: list[int]
    values: Values
    binary: bool = True

    def described(self) -> tuple[dict[str, JsonValue], bytes]:
        """Return the tensor as the response's JSON has it, and its binary data. Raises
        BadOutput."""
        metadata: dict[str, JsonValue] = {
            "name": self.name,
            "datatype": self.datatype,
            "shape": self.shape,
        }
        if not self.binary:
            metadata["data"] = (
                self.values.ravel()
                if isinstance(self.values, np.ndarray)
                else [_as_text(value) for value in self.values]
            )
            return metadata, b""
        data = to_binary(self.values)
        return {**metadata, "parameters": {"binary_data_size": len(data)}}, data


def output_tensors(
    outputs: Values, binary: bool = True, wanted: Sequence[RequestedOutput] = ()
) -> list[OutputTensor]:
    """Return the tensors of a response.

    outputs: an array (n, ...) or a list of n, of one output without a name; or a dict of these by
    name, or a list of n dicts. wanted: the outputs that the request names, all if empty. Raises
    BadOutput if one is no tensor, InvalidInput for one that does not exist.
    """
    named = _by_name(outputs)
    check_names(wanted, [*named])
    binaries = {one.name: bool(one.parameters.get("binary_data", binary)) for one in wanted}
    return [
        OutputTensor(name, *tensor_of(named[name], name), binaries.get(name, binary))
        for name in (binaries or named)
    ]


def _by_name(outputs: Values) -> Mapping[str, JsonValue]:
    """Return outputs by name. Raises BadOutput for rows of different names."""
    if isinstance(outputs, dict):
        return outputs
    if not (isinstance(outputs, list) and outputs and isinstance(outputs[0], dict)):
        return {OUTPUT: outputs}
    names = outputs[0].keys()
    if not all(isinstance(row, dict) and row.keys() == names for row in outputs):
        raise BadOutput(
            "the rows have different outputs: no tensors can hold them.",
            hint="Request one row at a time.",
        )
    return {name: [row[name] for row in outputs] for name in names}


def encode(
    model: str,
    version: str,
    id: str,
    outputs: Values,
    binary: bool,
    parameters: Mapping[str, JsonValue],
    wanted: Sequence[RequestedOutput] = (),
) -> tuple[Iterator[bytes], int]:
    """Encode a response.

    outputs, binary, wanted: as of `output_tensors`. Returns the parts of the body, and the length
    of its JSON when binary data follows it, else 0. Raises BadOutput, InvalidInput.
    """
    tensors = output_tensors(outputs, binary, wanted)
    head: dict[str, JsonValue] = {
        "model_name": model,
        **({"model_version": version} if version else {}),
        "id": id,
    }
    if parameters:
        head["parameters"] = parameters
    return joined(head, [tensor.described() for tensor in tensors])


def joined(
    head: Mapping[str, JsonValue], tensors: Sequence[tuple[dict[str, JsonValue], bytes]]
) -> tuple[Iterator[bytes], int]:
    """Return the parts of a body and the length of its JSON, 0 if no binary data follows.

    tensors: as `OutputTensor.described` returns them.
    """
    texts = json_texts({**head, "outputs": [described for described, _ in tensors]})
    if not any("binary_data_size" in one.get("parameters", ()) for one, _ in tensors):
        return texts, 0
    text = b"".join(texts)
    return iter((text, *(data for _, data in tensors))), len(text)


def to_binary(values: Values) -> bytes:
    """Return the values of `tensor_of` packed and little-endian."""
    return (
        values.tobytes() if isinstance(values, np.ndarray) else b"".join(map(_with_length, values))
    )


def tensor_of(outputs: Values, name: str = OUTPUT) -> tuple[str, list[int], Values]:
    """Return datatype, shape and values: a contiguous little-endian array, or a list of str and
    bytes.

    Raises BadOutput if the outputs are no tensor.
    """
    if isinstance(outputs, list) and all(isinstance(value, str | bytes) for value in outputs):
        return "BYTES", [len(outputs)], outputs
    if (texts := _array_of_texts(outputs)) is not None:
        return "BYTES", list(texts.shape), texts.ravel().tolist()
    whose = "the outputs" if name == OUTPUT else f"the outputs {name!r}"
    try:
        array = np.asarray(outputs)
    except ValueError:
        raise BadOutput(
            f"{whose} differ in shape: no tensor can hold them.",
            hint="Request one row at a time.",
        ) from None
    datatype = _OF_DTYPE.get(array.dtype)
    if datatype is not None and array.flags.c_contiguous and array.dtype.isnative:  # the usual case
        return datatype, list(array.shape), array
    if array.dtype.newbyteorder("<") not in _OF_DTYPE:
        raise BadOutput(
            f"{whose} are of several kinds: no tensor can hold them.",
            hint="Request one row at a time.",
        )
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return _OF_DTYPE[array.dtype], list(array.shape), array


def _array_of_texts(outputs: Values) -> Values:
    """Return an array of strings, or a list of such, as one array; None for anything else."""
    first = outputs[0] if isinstance(outputs, list) and outputs else outputs
    if not isinstance(first, np.ndarray) or first.dtype.kind not in "OUS":
        return None
    if first is not outputs and any(np.shape(row) != first.shape for row in outputs):
        return None
    texts = np.asarray(outputs, object)
    return texts if all(isinstance(value, str | bytes) for value in texts.ravel()) else None


def _as_text(value: str | bytes) -> str:
    try:
        return value if isinstance(value, str) else value.decode()
    except UnicodeDecodeError:
        raise BadOutput(
            "an output is not text: JSON cannot represent it.", hint="Request binary data."
        ) from None


def _with_length(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<I", len(data)) + data
