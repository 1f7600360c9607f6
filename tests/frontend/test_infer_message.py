"""The messages of ModelInfer as the core reads and writes them, beside the package protobuf."""

import struct
from typing import Any

import pytest

pytest.importorskip("google.protobuf", reason="pip install 'clipper-serving[grpc]'")

from hypothesis import given
from hypothesis import strategies as st

from clipper.frontend.protocols import message
from clipper_core.http.infer_message import (
    InferMessage,
    MalformedMessage,
    infer_response,
    stream_infer_response,
)
from tests.frontend.infer_twin import differ, plain

RESPONSE = message("inference.ModelInferResponse")
VARINT, FIXED64, TEXT, GROUP, GROUP_END, FIXED32 = range(6)
WHOLE = st.integers(0, (1 << 64) - 1)


def varint(n: int) -> bytes:
    found = b""
    while n > 127:
        found += bytes((n & 127 | 128,))
        n >>= 7
    return found + bytes((n,))


def field(number: int, kind: int, content: bytes) -> bytes:
    """Return a field as it is written; for text, with its length."""
    length = varint(len(content)) if kind == TEXT else b""
    return varint(number << 3 | kind) + length + content


# How messages nest: field numbers of the messages in a message.
PARAMETER: dict[int, Any] = {}
ENTRY = {2: PARAMETER}
CONTENTS: dict[int, Any] = {}
TENSOR = {4: ENTRY, 5: CONTENTS}
OUTPUT = {2: ENTRY}
REQUEST = {4: ENTRY, 5: TENSOR, 6: OUTPUT}


@st.composite
def fields(draw: Any, inner: dict[int, Any]) -> bytes:
    """Draw one field of a message: one that it has, of this kind or another, or an unknown one."""
    number = draw(st.integers(1, 10))
    kind = draw(st.sampled_from((VARINT, FIXED64, TEXT, TEXT, TEXT, GROUP, FIXED32)))
    if kind == VARINT:
        return field(number, kind, varint(draw(WHOLE)))
    if kind == FIXED64:
        return field(number, kind, struct.pack("<Q", draw(WHOLE)))
    if kind == FIXED32:
        return field(number, kind, struct.pack("<I", draw(st.integers(0, (1 << 32) - 1))))
    if kind == GROUP:
        content = draw(messages({}))
        return field(number, GROUP, content) + field(number, GROUP_END, b"")
    if number in inner:
        return field(number, TEXT, draw(messages(inner[number])))
    numbers = st.lists(WHOLE.map(varint), max_size=4).map(b"".join)
    fixed = st.integers(0, 5).map(lambda n: bytes(range(8 * n)))
    text = st.text(max_size=4).map(str.encode)
    return field(number, TEXT, draw(st.one_of(numbers, fixed, text, st.binary(max_size=9))))


def messages(inner: dict[int, Any]) -> Any:
    """Draw a message as bytes: its fields in any order, repeated, and split."""
    return st.lists(fields(inner), max_size=5).map(b"".join)


@given(messages(REQUEST))
def test_requests_are_read_as_protobuf_reads_them(data: bytes) -> None:
    assert not differ(data)


@given(messages(REQUEST), st.integers(0, 1 << 30), st.binary(max_size=3))
def test_damaged_requests_are_refused_as_protobuf_refuses_them(
    data: bytes, at: int, put: bytes
) -> None:
    at %= len(data) + 1
    assert not differ(data[:at] + put + data[at + len(put) :])
    assert not differ(data[:at])


@pytest.mark.parametrize(
    "data",
    [
        field(1, TEXT, b"\xff"),
        field(1, TEXT, b"\xed\xa0\x80"),
        varint(1 << 3 | TEXT) + varint(9) + b"x",
        varint(1 << 3 | 6),
        varint(0 << 3 | VARINT) + b"\0",
        field(9, GROUP, b""),
        field(9, GROUP, field(8, GROUP_END, b"")),
        field(9, GROUP_END, b""),
        field(9, VARINT, b"\xff" * 10),
        field(9, VARINT, b"\xff" * 11),
        b"\x80" * 5 + b"\x01\0",
        field(9, GROUP, b"") * 101 + field(9, GROUP_END, b"") * 101,
        field(5, TEXT, field(5, TEXT, field(6, TEXT, b"\0\0\0"))),
        field(5, TEXT, field(3, TEXT, b"\xff")),
    ],
)
def test_what_is_malformed(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        InferMessage(data, 64, 64, 8)
    assert not differ(data)


def test_lists_are_bounded_and_counted() -> None:
    many = field(5, TEXT, b"") * 5 + field(6, TEXT, b"") * 4 + field(7, TEXT, b"x") * 3
    many += b"".join(field(4, TEXT, field(1, TEXT, b"%d" % i)) for i in range(9))
    read = InferMessage(many, 2, 3, 1)
    assert (read.input_count, read.output_count, read.raw_count) == (5, 4, 3)
    assert [len(each) for each in (read.inputs, read.outputs, read.raw_input_contents)] == [2] * 3
    assert [*read.parameters] == ["0", "1", "2", "3"]
    (tensor,) = InferMessage(field(5, TEXT, field(3, TEXT, b"\1\2\3")), 9, 9, 1).inputs
    assert tensor.shape == (1, 2)


def test_raw_tensors_are_views_of_the_request() -> None:
    data = field(7, TEXT, b"\1\2")
    (view,) = InferMessage(data, 9, 9, 9).raw_input_contents
    assert view.obj is data


@given(
    st.lists(st.text(max_size=5), min_size=3, max_size=3),
    st.lists(
        st.tuples(
            st.text(max_size=4),
            st.sampled_from(("FP64", "BYTES")),
            st.lists(st.integers(-1, 1 << 62), max_size=3),
            st.binary(max_size=200),
        ),
        max_size=3,
    ),
    st.dictionaries(
        st.text(max_size=3),
        st.one_of(
            st.booleans(),
            st.integers(-(1 << 63), (1 << 64) - 1),
            st.floats(allow_nan=False),
            st.text(max_size=200),
        ),
        max_size=4,
    ),
)
def test_responses_are_read_by_protobuf(
    names: list[str], outputs: list[Any], parameters: dict[str, Any]
) -> None:
    model, version, id = names
    each = [(*one, parameters) for one in outputs]
    data = infer_response(model, version, id, each, parameters)
    found = RESPONSE.FromString(data)
    assert [found.model_name, found.model_version, found.id] == names
    assert plain(found.parameters) == parameters
    assert list(found.raw_output_contents) == [content for *_, content in outputs]
    for one, (name, datatype, shape, _) in zip(found.outputs, outputs, strict=True):
        assert (one.name, one.datatype, list(one.shape)) == (name, datatype, shape)
        assert plain(one.parameters) == parameters
    streamed = message("inference.ModelStreamInferResponse").FromString(
        stream_infer_response("late", data)
    )
    assert streamed.error_message == "late"
    assert streamed.infer_response == found


def test_a_whole_number_that_protobuf_has_no_field_for_is_refused() -> None:
    with pytest.raises(OverflowError):
        infer_response("", "", "", [], {"n": 1 << 64})
