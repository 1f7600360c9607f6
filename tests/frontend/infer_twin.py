"""ModelInferRequest by the core and by the package protobuf, in the same plain form."""

import struct
from typing import Any

from clipper.frontend.protocols import message
from clipper_core.http.infer_message import InferMessage, MalformedMessage

MOST = 1 << 20  # of each list: no limit
REQUEST = message("inference.ModelInferRequest")
_FORMATS = {
    "bool_contents": "?",
    "int_contents": "i",
    "int64_contents": "q",
    "uint_contents": "I",
    "uint64_contents": "Q",
    "fp32_contents": "f",
    "fp64_contents": "d",
}


def plain(parameters: Any) -> dict[str, Any]:
    """Return a map of InferParameter as values; None for one without a value."""
    return {
        key: getattr(value, choice) if (choice := value.WhichOneof("parameter_choice")) else None
        for key, value in parameters.items()
    }


def _same(parameters: dict[str, Any]) -> dict[str, str]:
    """Return parameters so that NaN is equal to NaN, and True is not 1."""
    return {key: repr(value) for key, value in parameters.items()}


def _contents(tensor: Any) -> Any:
    if not tensor.HasField("contents"):
        return None
    return {
        field.name: list(values)
        if field.name == "bytes_contents"
        else struct.pack(f"={len(values)}{_FORMATS[field.name]}", *values)
        for field, values in tensor.contents.ListFields()
    }


def by_protobuf(data: bytes) -> Any:
    """Return a request as the package protobuf reads it. Raises DecodeError."""
    read = REQUEST.FromString(data)
    return (
        (read.model_name, read.model_version, read.id),
        _same(plain(read.parameters)),
        [
            (one.name, one.datatype, list(one.shape), _same(plain(one.parameters)), _contents(one))
            for one in read.inputs
        ],
        [(one.name, _same(plain(one.parameters))) for one in read.outputs],
        list(read.raw_input_contents),
    )


def by_core(data: bytes) -> Any:
    """Return the same as the core reads it. Raises MalformedMessage."""
    read = InferMessage(data, MOST, MOST, MOST)
    return (
        (read.model_name, read.model_version, read.id),
        _same(read.parameters),
        [
            (one.name, one.datatype, list(one.shape), _same(one.parameters), one.contents)
            for one in read.inputs
        ],
        [(one.name, _same(one.parameters)) for one in read.outputs],
        [bytes(one) for one in read.raw_input_contents],
    )


def differ(data: bytes) -> str:
    """Return in what the two differ; empty if they agree."""
    from google.protobuf.message import DecodeError

    try:
        ours = by_core(data)
    except MalformedMessage:
        ours = None
    try:
        theirs = by_protobuf(data)
    except DecodeError:
        theirs = None
    return "" if ours == theirs else f"the core reads {ours}, protobuf reads {theirs}"
