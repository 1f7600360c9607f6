"""Reading and writing strings in protobuf messages, compared with protobuf itself."""

import random
import tracemalloc
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from clipper.errors import InvalidInput
from clipper.frontend.protocols import message
from clipper.mesh.splice import extract, field_path, inject

_FIELD = descriptor_pb2.FieldDescriptorProto
_PATHS = ((1,), (5, 1), (5, 200_000, 3))
_PLAIN = {
    10: _FIELD.TYPE_DOUBLE,
    11: _FIELD.TYPE_FIXED32,
    12: _FIELD.TYPE_INT64,
    13: _FIELD.TYPE_BYTES,
}


def _kind() -> Any:
    """Return the class of a message Outer {1: string, 5: Middle {1: string, 200000: Inner {3:
    string}}}, with other fields between them."""
    file = descriptor_pb2.FileDescriptorProto(
        name="splice_test.proto", package="splice_test", syntax="proto3"
    )
    for name, leaf, inner in (
        ("Outer", 1, (5, "Middle")),
        ("Middle", 1, (200_000, "Inner")),
        ("Inner", 3, (0, "")),
    ):
        made = file.message_type.add(name=name)
        made.field.add(name="id", number=leaf, type=_FIELD.TYPE_STRING, label=_FIELD.LABEL_OPTIONAL)
        for number, type in _PLAIN.items():
            label = _FIELD.LABEL_REPEATED if number == 12 else _FIELD.LABEL_OPTIONAL
            made.field.add(name=f"f{number}", number=number, type=type, label=label)
        if inner[0]:
            to = f".splice_test.{inner[1]}"
            made.field.add(
                name="inner",
                number=inner[0],
                type=_FIELD.TYPE_MESSAGE,
                label=_FIELD.LABEL_OPTIONAL,
                type_name=to,
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("splice_test.Outer"))


OUTER = _kind()


def at(found: Any, path: tuple[int, ...]) -> str:
    """Return what protobuf reads at the path."""
    for _ in path[1:]:
        found = found.inner
    return str(found.id)


def put(into: Any, path: tuple[int, ...], value: str) -> Any:
    inner = into
    for _ in path[1:]:
        inner = inner.inner
    inner.id = value
    return into


ids = st.text(st.characters(exclude_categories=("Cs",)), max_size=200)


@st.composite
def outers(draw: Any) -> Any:
    made = OUTER()
    inner = made
    for depth in range(3):
        if draw(st.booleans()):
            inner.id = draw(ids)
        if draw(st.booleans()):
            inner.f10, inner.f11, inner.f13 = (
                draw(st.floats(allow_nan=False)),
                draw(st.integers(0, 1 << 31)),
                draw(st.binary()),
            )
            inner.f12.extend(draw(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=5)))
        if depth == 2 or not draw(st.booleans()):
            break
        inner = inner.inner
        inner.SetInParent()
    return made


@given(outers(), st.sampled_from(_PATHS))
def test_extracts_what_protobuf_reads(made: Any, path: tuple[int, ...]) -> None:
    found = extract(made.SerializeToString(), path)
    assert (found or "") == at(made, path)


@given(st.lists(outers(), min_size=1, max_size=3), st.sampled_from(_PATHS), ids)
def test_injects_what_protobuf_would_have_written(
    several: list[Any], path: tuple[int, ...], value: str
) -> None:
    # fields twice, messages to be merged
    data = b"".join(one.SerializeToString() for one in several)
    changed = inject(data, path, value)
    assert OUTER.FromString(changed) == put(OUTER.FromString(data), path, value)
    assert extract(changed, path) == value
    assert inject(changed, path, value) == changed


@given(outers(), st.data(), st.sampled_from(_PATHS))
def test_hostile_bytes_are_refused_by_name_or_read_as_protobuf_reads_them(
    made: Any, data: st.DataObject, path: tuple[int, ...]
) -> None:
    body = bytearray(made.SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        spot = data.draw(st.integers(0, len(body)))
        body[spot : spot + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    try:
        theirs = OUTER.FromString(bytes(body))
    except DecodeError:
        theirs = None
    try:
        ours, changed = extract(body, path), inject(body, path, "new")
    except InvalidInput:
        assert theirs is None
        return
    if theirs is not None:
        assert (ours or "") == at(theirs, path)
        assert OUTER.FromString(changed) == put(theirs, path, "new")


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"\x0a", "a number without an end"),
        (b"\x0a\x05ab", "5 bytes where 2 are left"),
        (b"\x80" * 11, "a number without an end"),
        (b"\x02\x00", "the number 0"),
        (b"\xff" * 9 + b"\x01", "a field with the number"),
        (b"\x0b\x08\x01", "without an end"),
        (b"\x0c", "kind 4"),
        (b"\x0b\x14", "kind 4"),
        (b"\x0e", "kind 6"),
        (b"\x09\x00", "cut off"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "bytes where 0 are left"),
        (b"\x0b" * 200, "kind 3"),
    ],
)
def test_invalid_messages_are_reported(body: bytes, why: str) -> None:
    for call in (lambda: extract(body, (1,)), lambda: inject(body, (1,), "x")):
        with pytest.raises(InvalidInput, match=why):
            call()


def test_bytes_in_a_string_are_reported() -> None:
    with pytest.raises(InvalidInput, match=r"field 5\.1 of the message is no UTF-8"):
        extract(b"\x2a\x03\x0a\x01\xff", (5, 1))


def test_a_field_within_a_group_is_another_one() -> None:
    body = b"\x1b\x0a\x01a\x1c"  # group 3 {1: "a"}
    assert extract(body, (1,)) is None
    assert inject(body, (1,), "b") == body + b"\x0a\x01b"


def test_lengths_of_messages_around_grow_past_a_byte_and_shrink_again() -> None:
    small = put(OUTER(), (5, 200_000, 3), "a").SerializeToString()
    for size in (
        100,
        118,
        119,
        120,
        121,
        122,
        123,
        124,
        125,
        126,
        127,
        128,
        16_370,
        16_380,
        16_383,
        16_384,
        70_000,
    ):
        grown = inject(small, (5, 200_000, 3), "x" * size)
        assert grown == put(OUTER(), (5, 200_000, 3), "x" * size).SerializeToString()
        assert inject(grown, (5, 200_000, 3), "a") == small


def test_a_model_infer_request_keeps_its_tensors() -> None:
    request = message("inference.ModelInferRequest")(
        model_name="m1", raw_input_contents=[random.Random(1).randbytes(999)]
    )
    request.inputs.add(name="input", datatype="FP32", shape=[3, 83])
    data = request.SerializeToString()
    assert extract(data, (1,)) == "m1"
    request.model_name = "another-model"
    assert inject(data, (1,), "another-model") == request.SerializeToString()


def test_a_large_message_is_copied_once() -> None:
    rest = bytes(8 << 20)
    data = OUTER(id="m1", f13=rest).SerializeToString()
    tracemalloc.start()
    try:
        extract(data, (1,))
        assert tracemalloc.get_traced_memory()[1] < 1 << 16
        tracemalloc.reset_peak()
        inject(data, (1,), "another-model")
        assert tracemalloc.get_traced_memory()[1] < len(data) + (1 << 16)
    finally:
        tracemalloc.stop()


def test_paths() -> None:
    assert field_path([5, 1]) == (5, 1)
    for wrong in ([], [0], [-1], [1 << 29], [True], ["1"], [1] * 17):
        with pytest.raises(InvalidInput, match="not a path of protobuf fields"):
            field_path(wrong)  # type: ignore[arg-type]
