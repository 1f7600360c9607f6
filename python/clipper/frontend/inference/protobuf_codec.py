"""The Open Inference Protocol in protobuf: ModelInferRequest to InferRequest, outputs to a
response.

Tensors are in `raw_input_contents`, packed and little-endian, for all inputs or for none, or in the
typed field of `contents` for their datatype. Outputs are returned raw. Source: the protocol's
`ModelInferRequest`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from google.protobuf.message import Message

from clipper.errors import InvalidInput
from clipper.frontend.inference import codec
from clipper.frontend.protocols import message
from clipper.schema import TENSORS_MAX

PARAMETERS_MAX: Final = 1024  # of a request, and of a requested output
_RESPONSE: Final = message("inference.ModelInferResponse")
_FIELDS: Final = {
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


def decode(request: Message) -> codec.InferRequest:
    """Decode a ModelInferRequest. Raises InvalidInput."""
    for what in ("inputs", "outputs"):
        if (count := len(getattr(request, what))) > TENSORS_MAX:
            raise InvalidInput(f"a request has up to {TENSORS_MAX} {what}: {count} are given.")
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise InvalidInput(
            f"raw_input_contents has {len(raw)} tensors: there are {len(request.inputs)} inputs."
        )
    inputs = []
    for i, tensor in enumerate(request.inputs):
        shape = codec.checked_shape(tensor.name, tensor.datatype, tensor.shape, tensor.parameters)
        if raw and tensor.HasField("contents"):
            raise InvalidInput(
                f"tensor {tensor.name[:64]!r} has contents, and there are raw_input_contents: one"
                " of them."
            )
        values = (
            codec.from_binary(tensor.name, tensor.datatype, shape, memoryview(raw[i]))
            if raw
            else _typed(tensor, shape)
        )
        inputs.append(codec.Tensor(tensor.name, tensor.datatype, shape, values))
    outputs = [
        codec.RequestedOutput(wanted.name, parameters_of(wanted.parameters))
        for wanted in request.outputs
    ]
    codec.check_requested(outputs)
    return codec.InferRequest(request.id, parameters_of(request.parameters), inputs, True, outputs)


def _typed(tensor: Message, shape: tuple[int, ...]) -> object:
    name = tensor.name[:64]
    field = _FIELDS.get(tensor.datatype)
    if field is None:
        raise InvalidInput(f"tensor {name!r} is {tensor.datatype}: it goes in raw_input_contents.")
    filled = [descriptor.name for descriptor, _ in tensor.contents.ListFields()]
    if filled not in ([field], []):
        raise InvalidInput(
            f"tensor {name!r} is {tensor.datatype}, which stands in {field}; {', '.join(filled)} is"
            " filled."
        )
    values = getattr(tensor.contents, field)
    if len(values) != math.prod(shape):
        raise InvalidInput(
            f"tensor {name!r} has {len(values)} elements: its shape {list(shape)} takes"
            f" {math.prod(shape)}."
        )
    if tensor.datatype == "BYTES":
        return list(values)
    try:
        return np.array(list(values), codec.DATATYPES[tensor.datatype]).reshape(shape)
    except OverflowError as error:
        raise InvalidInput(f"tensor {name!r} is no {tensor.datatype}: {error}.") from None


def parameters_of(parameters: Mapping[str, Message]) -> dict[str, bool | int | float | str]:
    """Return a map of InferParameter as plain values, without the empty ones. Raises
    InvalidInput.
    """
    if len(parameters) > PARAMETERS_MAX:
        raise InvalidInput(f"{len(parameters)} parameters: up to {PARAMETERS_MAX} are taken.")
    return {
        key: getattr(value, choice)
        for key, value in parameters.items()
        if (choice := value.WhichOneof("parameter_choice"))
    }


def encode(
    model: str,
    version: str,
    id: str,
    outputs: object,
    parameters: Mapping[str, object],
    wanted: Sequence[codec.RequestedOutput] = (),
) -> Message:
    """Return a ModelInferResponse.

    outputs, wanted: as of codec.output_tensors. Raises BadOutput, InvalidInput.
    """
    tensors = codec.output_tensors(outputs, True, wanted)
    response = _RESPONSE(
        model_name=model,
        model_version=version,
        id=id,
        raw_output_contents=[codec.to_binary(tensor.values) for tensor in tensors],
    )
    for tensor in tensors:
        response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
    for key, value in parameters.items():
        setattr(response.parameters[key], _choice_of(value), value)
    return response


def _choice_of(value: object) -> str:
    if isinstance(value, bool):
        return "bool_param"
    return {str: "string_param", int: "int64_param"}.get(type(value), "double_param")
