"""The Open Inference Protocol as bytes: golden requests and responses, and what is refused."""

import json
import struct
from typing import Any

import numpy as np
import pytest

from clipper.errors import BadOutput, InvalidInput
from clipper.frontend.inference import codec
from clipper.schema import Tensors
from clipper.types import InputType

F64 = InputType.parse("f64[3]")


def request(*tensors: dict[str, Any], data: bytes = b"", **more: Any) -> tuple[bytes, bytes]:
    """Return a body, and the value of the header with the length of its JSON."""
    head = json.dumps({"inputs": list(tensors), **more}).encode()
    return head + data, b"%d" % len(head) if data else b""


def tensor(
    data: Any = None, shape: tuple[int, ...] = (2, 3), datatype: str = "FP64", **parameters: Any
) -> dict[str, Any]:
    made = {"name": "input", "shape": list(shape), "datatype": datatype}
    return {
        **made,
        **({"data": data} if data is not None else {}),
        **({"parameters": parameters} if parameters else {}),
    }


@pytest.mark.parametrize("data", [[1, 2, 3, 4, 5, 6.5], [[1, 2, 3], [4, 5, 6.5]]])
def test_numbers_come_flat_or_nested(data: Any) -> None:
    rows = codec.rows_of(codec.decode(*request(tensor(data))), F64)
    np.testing.assert_array_equal(rows, np.array([[1, 2, 3], [4, 5, 6.5]]))
    assert rows.dtype == np.float64


@pytest.mark.parametrize("datatype", codec.DATATYPES)
def test_binary_tensors_of_every_type_are_read_where_they_lie(datatype: str) -> None:
    values = np.array([[0, 1, 1], [1, 0, 1]], codec.DATATYPES[datatype])
    body, size = request(
        tensor(datatype=datatype, binary_data_size=values.nbytes), data=values.tobytes()
    )
    decoded = codec.decode(body, size)
    found = decoded.inputs[0].values
    np.testing.assert_array_equal(found, values)
    if datatype != "BOOL":  # any byte but 0 is true: that takes a look
        assert np.shares_memory(found, np.frombuffer(body, np.uint8))


@pytest.mark.parametrize("datatype", codec.DATATYPES)
def test_json_tensors_of_every_type(datatype: str) -> None:
    flat = [False, True, True, True, False, True] if datatype == "BOOL" else [0, 1, 1, 1, 0, 1]
    for data in (flat, [flat[:3], flat[3:]]):
        (found,) = codec.decode(*request(tensor(data, datatype=datatype))).inputs
        assert found.values.dtype == np.dtype(codec.DATATYPES[datatype])
        np.testing.assert_array_equal(found.values.ravel(), flat)


def test_strings_come_as_json_and_as_bytes() -> None:
    texts = ["", "a", "été"]
    packed = b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in texts)
    for decoded in (
        codec.decode(*request(tensor(texts, (3,), "BYTES"))),
        codec.decode(*request(tensor([[text] for text in texts], (3, 1), "BYTES"))),
        codec.decode(
            *request(tensor(None, (3, 1), "BYTES", binary_data_size=len(packed)), data=packed)
        ),
    ):
        assert codec.rows_of(decoded, InputType.parse("str")) == texts
        assert codec.rows_of(decoded, InputType.parse("bytes")) == [text.encode() for text in texts]


def test_rows_take_the_shape_of_the_model() -> None:
    def rows(shape: tuple[int, ...], type_: str) -> Any:
        count = int(np.prod(shape))
        return codec.rows_of(
            codec.decode(*request(tensor(list(range(count)), shape))), InputType.parse(type_)
        ).shape

    assert rows((2, 3), "f64[3]") == (2, 3)
    assert rows((3,), "f64[3]") == (1, 3)
    assert rows((4,), "f64") == (4,)
    assert rows((2, 2, 3), "f32[2,3]") == (2, 2, 3)
    assert rows((2, 3), "f32[2,3]") == (1, 2, 3)
    assert rows((2, 5), "f64[*]") == (2, 5)
    assert rows((5,), "f64[*]") == (1, 5)
    assert rows((2, 5), "any") == (2, 5)


WRONG: dict[str, tuple[tuple[bytes, bytes], str]] = {
    "no JSON": ((b'{"inputs":,}', b""), "(byte 10)"),
    "half of it": ((b'{"inputs":', b""), "truncated"),
    "no inputs": ((b"{}", b""), "inputs"),
    "a datatype there is not": (request(tensor([1], (1,), "FP8")), "FP8"),
    "too few elements": (request(tensor([1, 2, 3])), "3 elements"),
    "too many elements": (request(tensor([1] * 7)), "7 elements"),
    "a ragged tensor": (request(tensor([[1, 2, 3], [4, 5]])), "data"),
    "a string among numbers": (request(tensor([1, 2, 3, 4, 5, "6"])), "$.inputs[0].data[5]"),
    "null among integers": (
        request(tensor([1, 2, 3, 4, 5, None], datatype="INT32")),
        "$.inputs[0].data[5]",
    ),
    "strings in a nested tensor": (request(tensor([["1", "2", "3"], ["4", "5", "6"]])), "data"),
    "a fraction in an integer": (
        request(tensor([1.5, 2, 3, 4, 5, 6], datatype="INT32")),
        "$.inputs[0].data[0]",
    ),
    "an integer too large": (request(tensor([1, 2, 3, 4, 5, 300], datatype="UINT8")), "UINT8"),
    "a nested integer too large": (
        request(tensor([[1, 2, 3], [4, 5, 300]], datatype="UINT8")),
        "UINT8",
    ),
    "a negative dimension": (request(tensor([1], (-1,))), "shape"),
    "a shape beyond memory": (request(tensor([1], (1 << 20, 1 << 20))), "shape"),
    "nine dimensions": (request(tensor([1], (1,) * 9)), "shape"),
    "no data": (request(tensor()), "neither"),
    "binary data too long": (request(tensor(binary_data_size=49), data=bytes(48)), "48"),
    "binary data too short": (request(tensor(binary_data_size=40), data=bytes(40)), "takes 48"),
    "bytes left over": (request(tensor(binary_data_size=48), data=bytes(49)), "1 bytes follow"),
    "a size that is no number": (request(tensor(binary_data_size="48"), data=bytes(48)), "48"),
    "a head beyond the body": ((b"{}", b"3"), "Inference-Header-Content-Length"),
    "a head that is no number": ((b"{}", b"-1"), "Inference-Header-Content-Length"),
    "a string that goes on": (
        request(tensor(None, (1,), "BYTES", binary_data_size=6), data=b"\x09\0\0\0ab"),
        "beyond",
    ),
    "a string cut in its length": (
        request(tensor(None, (1,), "BYTES", binary_data_size=2), data=b"\x09\0"),
        "beyond",
    ),
    "more strings than told": (
        request(tensor(None, (1,), "BYTES", binary_data_size=8), data=bytes(8)),
        "2 elements",
    ),
    "shared memory": (request(tensor(shared_memory_region="r")), "shared memory"),
    "an output requested twice": (
        request(tensor([1] * 6), outputs=[{"name": "probs"}, {"name": "probs"}]),
        "probs",
    ),
    "classes": (
        request(tensor([1] * 6), outputs=[{"name": "output", "parameters": {"classification": 2}}]),
        "classification",
    ),
    "nesting without end": ((b'{"x":' + b"[" * 100_000, b""), "nested too deeply"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str) -> None:
    (body, size), part = WRONG[name]
    with pytest.raises(InvalidInput) as raised:
        codec.decode(body, size)
    assert part in str(raised.value)


@pytest.mark.parametrize(
    ("tensor_json", "type_", "part"),
    [
        (tensor([1] * 6), "f64[4]", "[-1, 4] is taken"),
        (tensor([1] * 6), "str", "BYTES is taken"),
        (tensor(["a"], (1,), "BYTES"), "f64[4]", "FP64 is taken"),
        (tensor(["a", "b"], (1, 2), "BYTES"), "str", "[n, 1] is taken"),
        (tensor([], (0, 3)), "f64[3]", "no rows"),
        (tensor([1] * 8, (2, 2, 2)), "f64[*]", "[n, length] is taken"),
    ],
)
def test_a_tensor_that_does_not_fit_is_rejected_with_the_expected_shape(
    tensor_json: dict[str, Any], type_: str, part: str
) -> None:
    with pytest.raises(InvalidInput) as raised:
        codec.rows_of(codec.decode(*request(tensor_json)), InputType.parse(type_))
    assert part in str(raised.value)


def test_two_inputs_are_one_too_many() -> None:
    with pytest.raises(InvalidInput, match="2 inputs"):
        codec.rows_of(codec.decode(*request(tensor([1] * 6), tensor([1] * 6))), F64)


def test_unknown_members_are_ignored() -> None:
    decoded = codec.decode(
        *request(tensor([1] * 6), model_name="m", extra={"a": 1}, id="7", parameters={"x": 1})
    )
    assert (decoded.id, decoded.parameters, decoded.binary) == ("7", {"x": 1}, False)


@pytest.mark.parametrize(
    "how",
    [
        {"parameters": {"binary_data_output": True}},
        {"outputs": [{"name": "output", "parameters": {"binary_data": True}}]},
    ],
)
def test_an_output_can_be_requested_in_binary(how: dict[str, Any]) -> None:
    decoded = codec.decode(*request(tensor([1] * 6), **how))
    outputs = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    texts, size = codec.encode("m", "2", "id", outputs, decoded.binary, {}, decoded.outputs)
    body = b"".join(texts)
    head = json.loads(body[:size])
    assert head["outputs"] == [
        {
            "name": "output",
            "datatype": "FP32",
            "shape": [2, 2],
            "parameters": {"binary_data_size": 16},
        }
    ]
    np.testing.assert_array_equal(np.frombuffer(body[size:], np.float32).reshape(2, 2), outputs)


def test_strings_go_out_both_ways() -> None:
    texts, size = codec.encode("m", "", "", ["a", b"bc"], True, {})
    body = b"".join(texts)
    assert body[size:] == b"\1\0\0\0a\2\0\0\0bc"
    texts, size = codec.encode("m", "", "", ["a", b"bc"], False, {"default": True})
    body = b"".join(texts)
    assert size == 0
    assert json.loads(body) == {
        "model_name": "m",
        "id": "",
        "parameters": {"default": True},
        "outputs": [{"name": "output", "datatype": "BYTES", "shape": [2], "data": ["a", "bc"]}],
    }


@pytest.mark.parametrize("outputs", [[1, "a"], [np.zeros(2), np.zeros(3)], [None, 1.0], [b"\xff"]])
def test_what_is_no_tensor_is_a_bad_output(outputs: list[Any]) -> None:
    with pytest.raises(BadOutput):
        codec.encode("m", "", "", outputs, False, {})


def test_metadata_of_types() -> None:
    specs = Tensors.parse({"x": "f64[3]", "s": "str", "i": "i32[*]", "b": "bool[2,2]"}).specs
    assert codec.described(specs) == [
        {"name": "x", "datatype": "FP64", "shape": [-1, 3]},
        {"name": "s", "datatype": "BYTES", "shape": [-1]},
        {"name": "i", "datatype": "INT32", "shape": [-1, -1]},
        {"name": "b", "datatype": "BOOL", "shape": [-1, 2, 2]},
    ]


@pytest.mark.parametrize("shape", [[30_000_000, 0], [2**31, 2**31, 0], [0, 2**40], [4097, 0]])
def test_a_tensor_of_many_empty_rows_is_refused(shape: list[int]) -> None:
    with pytest.raises(InvalidInput, match="cannot have the shape"):
        codec.checked_shape("input", "FP64", shape, {})
    assert codec.checked_shape("input", "FP64", [4096, 0], {}) == (4096, 0)
