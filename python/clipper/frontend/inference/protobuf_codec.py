"""The Open Inference Protocol in protobuf: ModelInferRequest to InferRequest, outputs to a
response. The core reads and writes the bytes (clipper_core.http.infer_message).

Tensors are in `raw_input_contents`, packed and little-endian, for all inputs or for none, or in the
typed field of `contents` for their datatype. Outputs are returned raw. Source: the protocol's
`ModelInferRequest`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from clipper.errors import InvalidInput
from clipper.frontend.inference import codec
from clipper.schema import TENSORS_MAX
from clipper_core.http.infer_message import (
    InferMessage,
    InferTensor,
    MalformedMessage,
    infer_response,
)

PARAMETERS_MAX: Final = 1024  # of a request, and of a requested output
FIELDS: Final = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


# how the core packs the numbers of these fields
_PACKED: Final = {
    "bool_contents": "?",
    "int_contents": "i4",
    "int64_contents": "i8",
    "uint_contents": "u4",
    "uint64_contents": "u8",
    "fp32_contents": "f4",
    "fp64_contents": "f8",
}
Plain = bool | int | float | str  # a parameter's value


def read(data: bytes) -> InferMessage:
    """Read the bytes of a ModelInferRequest. Raises InvalidInput if they are none."""
    try:
        return InferMessage(data, TENSORS_MAX, PARAMETERS_MAX, codec.RANK_MAX)
    except MalformedMessage:
        raise InvalidInput("the bytes are no inference.ModelInferRequest.") from None


def decode(request: InferMessage) -> codec.InferRequest:
    """Return what a ModelInferRequest asks for. Raises InvalidInput."""
    for what, count in (("inputs", request.input_count), ("outputs", request.output_count)):
        if count > TENSORS_MAX:
            raise InvalidInput(f"a request has up to {TENSORS_MAX} {what}: {count} are given.")
    raw = request.raw_input_contents
    if raw and request.raw_count != len(request.inputs):
        raise InvalidInput(
            f"raw_input_contents has {request.raw_count} tensors: there are"
            f" {len(request.inputs)} inputs."
        )
    inputs = []
    for i, tensor in enumerate(request.inputs):
        shape = codec.checked_shape(tensor.name, tensor.datatype, tensor.shape, tensor.parameters)
        if raw and tensor.contents is not None:
            raise InvalidInput(
                f"tensor {tensor.name[:64]!r} has contents, and there are raw_input_contents: one"
                " of them."
            )
        values = (
            codec.from_binary(tensor.name, tensor.datatype, shape, raw[i])
            if raw
            else _typed(tensor, shape)
        )
        inputs.append(codec.Tensor(tensor.name, tensor.datatype, shape, values))
    outputs = [
        codec.RequestedOutput(wanted.name, _given(wanted.parameters)) for wanted in request.outputs
    ]
    codec.check_requested(outputs)
    return codec.InferRequest(request.id, _given(request.parameters), inputs, True, outputs)


def _typed(tensor: InferTensor, shape: tuple[int, ...]) -> object:
    name = tensor.name[:64]
    field = FIELDS.get(tensor.datatype)
    if field is None:
        raise InvalidInput(f"tensor {name!r} is {tensor.datatype}: it goes in raw_input_contents.")
    contents = tensor.contents or {}
    if [*contents] not in ([field], []):
        raise InvalidInput(
            f"tensor {name!r} is {tensor.datatype}, which stands in {field};"
            f" {', '.join(contents)} is filled."
        )
    found = contents.get(field, [])
    values = np.frombuffer(found, _PACKED[field]) if isinstance(found, bytes) else found
    if len(values) != math.prod(shape):
        raise InvalidInput(
            f"tensor {name!r} has {len(values)} elements: its shape {list(shape)} takes"
            f" {math.prod(shape)}."
        )
    if tensor.datatype == "BYTES":
        return values
    converted = np.asarray(values).astype(codec.DATATYPES[tensor.datatype])
    if found and (converted != values).any() and converted.dtype.kind in "iu":
        wrong = values[converted != values][0]
        raise InvalidInput(
            f"tensor {name!r} is no {tensor.datatype}: {wrong} is out of its bounds."
        )
    return converted.reshape(shape)


def _given(parameters: Mapping[str, Plain | None]) -> dict[str, Plain]:
    """Return parameters without the empty ones. Raises InvalidInput."""
    if len(parameters) > PARAMETERS_MAX:
        raise InvalidInput(f"{len(parameters)} parameters: up to {PARAMETERS_MAX} are taken.")
    return {key: value for key, value in parameters.items() if value is not None}


def encode(
    model: str,
    version: str,
    id: str,
    outputs: object,
    parameters: Mapping[str, codec.JsonValue],
    wanted: Sequence[codec.RequestedOutput] = (),
    of_each: Mapping[str, Plain] | None = None,
) -> bytes:
    """Return a ModelInferResponse.

    outputs, wanted: as of codec.output_tensors. of_each: parameters of each output. Raises
    BadOutput, InvalidInput.
    """
    tensors = [
        (
            tensor.name,
            tensor.datatype,
            tensor.shape,
            codec.to_binary(tensor.values),
            of_each or {},
        )
        for tensor in codec.output_tensors(outputs, True, wanted)
    ]
    return infer_response(model, version, id, tensors, parameters)
