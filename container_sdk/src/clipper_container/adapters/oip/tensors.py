"""Tensors of the Open Inference Protocol: types, requests, responses. No sockets.

Numbers travel as JSON, or as raw bytes after the JSON if the server supports `binary_tensor_data`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from clipper_container.model import UserValue

BINARY = "binary_tensor_data"
HEAD_SIZE = "Inference-Header-Content-Length"
_DTYPES = {
    "BOOL": ("bool", "?"),
    "UINT8": ("u8", "u1"),
    "UINT16": ("u16", "<u2"),
    "UINT32": ("u32", "<u4"),
    "UINT64": ("u64", "<u8"),
    "INT8": ("i8", "i1"),
    "INT16": ("i16", "<i2"),
    "INT32": ("i32", "<i4"),
    "INT64": ("i64", "<i8"),
    "FP16": ("f16", "<f2"),
    "FP32": ("f32", "<f4"),
    "FP64": ("f64", "<f8"),
}
_DATATYPES = {np.dtype(code): name for name, (_, code) in _DTYPES.items()}


class BadTensor(Exception):
    """The server's metadata or response cannot be used."""


@dataclass(frozen=True, slots=True)
class Signature:
    """Input and output of a model, from the server's metadata.

    shape: of a row; None: as it comes. datatype: empty: as it comes. batch_max: most rows at once;
    0: no limit. output: name of the wanted output; empty: the first.
    """

    name: str = "input"
    datatype: str = ""
    shape: tuple[int, ...] | None = None
    batch_max: int = 0
    output: str = ""
    input_type: str = "any"
    output_type: str = "any"


def signature_of(metadata: Mapping[str, UserValue]) -> Signature:
    """Convert the metadata of `GET /v2/models/NAME`. Raises: BadTensor for a model with several
    inputs.
    """
    inputs, outputs = (
        [one for one in metadata.get(key) or [] if isinstance(one, dict)]
        for key in ("inputs", "outputs")
    )
    if len(inputs) > 1:
        names = ", ".join(str(one.get("name")) for one in inputs[:10])
        raise BadTensor(
            f"a model of the mesh has one input, this one has {len(inputs)} ({names}); concatenate"
            " them"
        )
    output = str(outputs[0].get("name", "")) if outputs else ""
    output_type = _type_of(outputs[0])[0] if outputs else "any"
    if not inputs:
        return Signature(output=output, output_type=output_type)
    (taken,) = inputs
    type_, shape, batch_max = _type_of(taken)
    return Signature(
        str(taken.get("name", "input")),
        str(taken.get("datatype", "")),
        shape,
        batch_max,
        output,
        type_,
        output_type,
    )


def _type_of(tensor: Mapping[str, UserValue]) -> tuple[str, tuple[int, ...] | None, int]:
    """Return the type of a row, its shape, and the most rows of a batch."""
    dims = tensor.get("shape") or []
    if not dims or not all(isinstance(dim, int) and not isinstance(dim, bool) for dim in dims):
        return "any", None, 0
    batch_max = max(0, dims[0])
    datatype = tensor.get("datatype")
    if datatype == "BYTES":
        return "str", tuple(1 for _ in dims[1:]), batch_max
    if datatype not in _DTYPES:
        return "any", None, batch_max
    ours = _DTYPES[datatype][0]
    row = tuple(dims[1:])
    if all(dim > 0 for dim in row):
        return (f"{ours}[{','.join(map(str, row))}]" if row else ours), row, batch_max
    return (f"{ours}[*]" if len(row) == 1 else "any"), None, batch_max


def request(signature: Signature, rows: object, binary: bool) -> tuple[bytes, dict[str, str]]:
    """Return the body and the headers of an infer request. Raises: BadTensor for rows that are
    not a tensor.
    """
    datatype, shape, values = _tensor(signature, rows)
    tensor: dict[str, object] = {"name": signature.name, "shape": shape, "datatype": datatype}
    head: dict[str, object] = {"inputs": [tensor]}
    if not binary:
        tensor["data"] = (
            [_text(value) for value in values]
            if isinstance(values, list)
            else values.ravel().tolist()
        )
        return json.dumps(head).encode(), {}
    data = b"".join(map(_with_length, values)) if isinstance(values, list) else values.tobytes()
    tensor["parameters"] = {"binary_data_size": len(data)}
    head["parameters"] = {"binary_data_output": True}
    text = json.dumps(head).encode()
    return text + data, {HEAD_SIZE: str(len(text)), "Content-Type": "application/octet-stream"}


def _tensor(signature: Signature, rows: object) -> tuple[str, list[int], UserValue]:
    if isinstance(rows, list) and rows and isinstance(rows[0], str | bytes | memoryview):
        return "BYTES", [len(rows), *(signature.shape or ())], rows
    try:
        values = np.asarray(rows)
    except ValueError:
        raise BadTensor("the rows of this batch differ in shape: no tensor can hold them") from None
    if signature.datatype in _DTYPES:
        values = values.astype(_DTYPES[signature.datatype][1], copy=False)
    if signature.shape is not None:
        values = values.reshape(len(values), *signature.shape)
    datatype = _DATATYPES.get(values.dtype.newbyteorder("<"))
    if datatype is None:
        raise BadTensor(f"rows of {values.dtype} are no tensor")
    return (
        datatype,
        list(values.shape),
        np.ascontiguousarray(values, values.dtype.newbyteorder("<")),
    )


def _text(value: str | bytes | memoryview) -> str:
    return value if isinstance(value, str) else bytes(value).decode()


def _with_length(value: str | bytes | memoryview) -> bytes:
    data = value.encode() if isinstance(value, str) else bytes(value)
    return struct.pack("<I", len(data)) + data


def outputs_of(
    signature: Signature, body: bytes, head_size: str, rows: int
) -> list[str] | np.ndarray:
    """Return the wanted output of an infer response: one element per row. Raises: BadTensor."""
    size = int(head_size) if head_size.isdecimal() else len(body)
    try:
        head = json.loads(body[:size])
        outputs = head["outputs"]
        at, spans = size, []
        for one in outputs:
            length = int((one.get("parameters") or {}).get("binary_data_size", 0))
            spans.append(memoryview(body)[at : at + length])
            at += length
        wanted = next((i for i, one in enumerate(outputs) if one["name"] == signature.output), 0)
        return _values(outputs[wanted], spans[wanted], rows)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, struct.error) as error:
        raise BadTensor(
            f"the server's answer holds no outputs: {type(error).__name__}: {error}"
        ) from None


def _values(tensor: Mapping[str, UserValue], data: memoryview, rows: int) -> list[str] | np.ndarray:
    shape = [int(dim) for dim in tensor["shape"]]
    if tensor["datatype"] == "BYTES":
        values = _strings(data) if "data" not in tensor else _flat(tensor["data"])
        if len(values) != rows:
            raise BadTensor(f"the server answers {len(values)} strings to {rows} rows")
        return values
    dtype = np.dtype(_DTYPES[tensor["datatype"]][1])
    array = np.asarray(tensor["data"], dtype) if "data" in tensor else np.frombuffer(data, dtype)
    array = array.reshape(shape)
    if not shape or shape[0] != rows:
        raise BadTensor(f"the server answers a tensor of shape {shape} to {rows} rows")
    return array.reshape(rows) if array.size == rows else array


def _flat(values: Sequence[object]) -> list[str]:
    return [
        one
        for value in values
        for one in (_flat(value) if isinstance(value, list) else [str(value)])
    ]


def _strings(data: memoryview) -> list[str]:
    found, at = [], 0
    while at < len(data):
        (size,) = struct.unpack_from("<I", data, at)
        found.append(str(data[at + 4 : at + 4 + size], "utf-8"))
        at += 4 + size
    return found
