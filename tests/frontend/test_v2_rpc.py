"""The Open Inference Protocol in protobuf, without a client or a server."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("google.protobuf", reason="pip install 'clipper-serving[grpc]'")

from clipper.errors import BadOutput, InvalidInput
from clipper.frontend.inference import codec, protobuf_codec
from clipper.frontend.protocols import message
from tests.frontend.infer_twin import plain

REQUEST = message("inference.ModelInferRequest")
RESPONSE = message("inference.ModelInferResponse")


def request(
    datatype: str, shape: list[int], raw: Any = None, contents: Any = None, **more: Any
) -> Any:
    made = REQUEST(model_name="m", id="7", **more)
    made.inputs.add(
        name="input",
        datatype=datatype,
        shape=shape,
        **({"contents": contents} if contents is not None else {}),
    )
    if raw is not None:
        made.raw_input_contents.append(raw)
    return made


def decode(made: Any) -> codec.InferRequest:
    """Decode a message of the package protobuf."""
    return protobuf_codec.decode(protobuf_codec.read(made.SerializeToString()))


@pytest.mark.parametrize("datatype", sorted(codec.DATATYPES))
def test_raw_tensors_of_every_datatype(datatype: str) -> None:
    values = np.array([[0, 1, 1], [1, 0, 1]], codec.DATATYPES[datatype])
    (tensor,) = decode(request(datatype, [2, 3], values.tobytes())).inputs
    np.testing.assert_array_equal(tensor.values, values)
    assert (tensor.values.dtype, tensor.shape) == (values.dtype, (2, 3))


@pytest.mark.parametrize("datatype", sorted(set(codec.DATATYPES) - {"FP16"}))
def test_typed_tensors_of_every_datatype(datatype: str) -> None:
    values = np.array([[0, 1, 1], [1, 0, 1]], codec.DATATYPES[datatype])
    contents = {protobuf_codec.FIELDS[datatype]: values.ravel().tolist()}
    (tensor,) = decode(request(datatype, [2, 3], contents=contents)).inputs
    np.testing.assert_array_equal(tensor.values, values)
    assert tensor.values.dtype == values.dtype


def test_bytes_raw_and_typed() -> None:
    raw = b"\x02\0\0\0hi\0\0\0\0"
    assert decode(request("BYTES", [2], raw)).inputs[0].values == [b"hi", b""]
    typed = request("BYTES", [2], contents={"bytes_contents": [b"hi", b""]})
    assert decode(typed).inputs[0].values == [b"hi", b""]


@pytest.mark.parametrize(
    ("wrong", "part"),
    [
        (request("FP64", [3], b"\0" * 8), r"8 bytes of binary data: FP64\[3\] takes 24"),
        (request("FP99", [3], b""), "datatype 'FP99'"),
        (request("FP64", [-1], b""), "cannot have the shape"),
        (request("FP64", [1 << 40, 1 << 40], b""), "cannot have the shape"),
        (request("FP16", [1], contents={}), "goes in raw_input_contents"),
        (
            request("FP64", [2], contents={"fp64_contents": [1]}),
            r"1 elements: its shape \[2\] takes 2",
        ),
        (
            request("FP64", [1], contents={"fp32_contents": [1]}),
            "stands in fp64_contents; fp32_contents is filled",
        ),
        (request("INT8", [1], contents={"int_contents": [300]}), "is no INT8"),
        (request("FP64", [1], b"\0" * 8, {"fp64_contents": [1]}), "one of them"),
        (
            request("FP64", [1], b"\0" * 8, outputs=[{"name": "y"}, {"name": "y"}]),
            "output 'y' is requested twice",
        ),
    ],
)
def test_what_is_wrong_is_reported(wrong: Any, part: str) -> None:
    with pytest.raises(InvalidInput, match=part):
        decode(wrong)


def test_raw_tensors_are_for_all_inputs_or_none() -> None:
    made = request("FP64", [1], b"\0" * 8)
    made.raw_input_contents.append(b"")
    with pytest.raises(InvalidInput, match="2 tensors: there are 1 inputs"):
        decode(made)


def test_parameters_become_plain_values() -> None:
    made = request("FP64", [1], b"\0" * 8)
    made.parameters["timeout"].int64_param = 5
    made.parameters["user"].string_param = "ann"
    made.parameters["share"].double_param = 0.5
    made.parameters["yes"].bool_param = True
    made.parameters["none"].SetInParent()
    assert decode(made).parameters == {
        "timeout": 5,
        "user": "ann",
        "share": 0.5,
        "yes": True,
    }


def test_a_response() -> None:
    outputs = np.arange(4, dtype=">f4").reshape(2, 2)
    parameters = {"default": True, "reason": "late", "confidence": 0.5, "n": 2}
    made = RESPONSE.FromString(protobuf_codec.encode("m", "3", "7", outputs, parameters))
    assert (made.model_name, made.model_version, made.id) == ("m", "3", "7")
    assert (made.outputs[0].name, made.outputs[0].datatype, list(made.outputs[0].shape)) == (
        "output",
        "FP32",
        [2, 2],
    )
    np.testing.assert_array_equal(np.frombuffer(made.raw_output_contents[0], "<f4"), [0, 1, 2, 3])
    assert plain(made.parameters) == parameters
    texts = RESPONSE.FromString(protobuf_codec.encode("m", "", "", ["hi", b""], {}))
    assert texts.raw_output_contents[0] == b"\x02\0\0\0hi\0\0\0\0"
    with pytest.raises(BadOutput):
        protobuf_codec.encode("m", "", "", [{"a": 1}, 2], {})
