"""Fields of entries: what goes in comes out, and whatever the bytes, the refusal is an InvalidInput
that names a field."""

import contextlib
import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clipper.errors import InvalidInput
from clipper.frontend.streams.records import answer_fields, feedback_of, output_fields, record_of
from clipper.schema import InvalidTensor, Tensors
from clipper.types import Answer, VersionedModel

DTYPES = {
    "bool": "?",
    "u8": "u1",
    "i16": "<i2",
    "f16": "<f2",
    "f32": "<f4",
    "f64": "<f8",
    "i64": "<i8",
    "u32": "<u4",
}


def flat(fields: list[Any]) -> dict[str, Any]:
    assert len(fields) % 2 == 0
    return dict(zip(fields[::2], fields[1::2], strict=True))


def raw(**fields: Any) -> dict[bytes, bytes]:
    return {
        name.encode(): value if isinstance(value, bytes) else str(value).encode()
        for name, value in fields.items()
    }


def test_only_an_application_of_finite_numbers_refuses_null() -> None:
    named = Tensors.parse({"age": "f64"})
    fields = raw(input='{"age": null}')
    with pytest.raises(InvalidTensor, match="finite=True"):
        record_of(fields, Tensors(named.specs, finite=True))
    assert np.isnan(record_of(fields, named).input["age"])


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize(
    ("given_shape", "shape"), [("2,3", (2, 3)), ("[2, 3]", (2, 3)), (None, (6,)), ("6", (6,))]
)
def test_an_array_comes_in_as_it_went_out(
    name: str, given_shape: str | None, shape: tuple[int, ...]
) -> None:
    array = (np.arange(6) % 2).astype(DTYPES[name]).reshape(shape)
    fields = raw(
        data=array.tobytes(), dtype=name, **({"shape": given_shape} if given_shape else {})
    )
    record = record_of(fields)
    assert record.binary
    assert record.input.dtype == array.dtype
    assert np.array_equal(record.input, array)
    back = flat(output_fields(array, binary=True))
    assert (back["dtype"], back["data"], back["shape"]) == (
        name,
        array.tobytes(),
        ",".join(map(str, shape)),
    )


def test_names_of_numpy_do_too_and_bytes_are_bytes() -> None:
    assert record_of(
        raw(data=np.ones(2, np.float32).tobytes(), dtype="float32")
    ).input.tolist() == [1, 1]
    for fields in (raw(data=b"\xff\0"), raw(data=b"\xff\0", dtype="bytes")):
        assert record_of(fields).input == b"\xff\0"


@pytest.mark.parametrize(
    ("output", "binary", "fields"),
    [
        (3, False, {"output": b"3"}),
        (np.float64(2.5), False, {"output": b"2.5"}),
        (float("nan"), False, {"output": b"null"}),
        ("é", False, {"output": '"é"'.encode()}),
        (None, False, {"output": b"null"}),
        ([1, "a"], False, {"output": b'[1,"a"]'}),
        (np.arange(4).reshape(2, 2), False, {"output": b"[[0,1],[2,3]]"}),
        (b"\xff", False, {"data": b"\xff", "dtype": "bytes"}),
        (np.array([1, 2], np.int16), True, {"data": b"\1\0\2\0", "dtype": "i16", "shape": "2"}),
        (7, True, {"output": b"7"}),
    ],
)
def test_outputs(output: Any, binary: bool, fields: dict[str, Any]) -> None:
    assert flat(output_fields(output, binary)) == fields


def test_an_answer_has_what_its_record_brought() -> None:
    record = record_of({**raw(input="1", id="r1", user="ann", slo_ms="5.5"), b"q.a": b"\xff"})
    assert (record.input, record.user, record.slo_ms, record.binary) == (1, "ann", 5.5, False)
    svm = VersionedModel("svm", 3)
    answer = Answer(4, 0.5, True, "why", (), (svm,), 17, "node-1", 0.25)
    assert flat(answer_fields(answer, record, "9-0")) == {
        "id": "r1",
        "entry": "9-0",
        "output": b"4",
        "confidence": "0.5",
        "agreement": "0.25",
        "default": 1,
        "reason": "why",
        "models": "",
        "missing": "svm:3",
        "latency_us": 17,
        "prediction": "node-1",
        "q.a": b"\xff",
    }
    assert (
        flat(answer_fields(Answer(4, models=(svm, svm)), record_of(raw(input="1")), "9-0"))[
            "models"
        ]
        == "svm:3,svm:3"
    )
    qualified = Answer(4, qualifiers={svm: {"quality": 3}})
    assert flat(answer_fields(qualified, record, "9-0"))["qualifiers"] == b'{"svm:3":{"quality":3}}'


def test_the_user_and_the_context_of_a_record() -> None:
    record = record_of(raw(input="1", user="eu", context="[0.5,-1]"))
    assert (record.user, record.context) == ("eu", [0.5, -1])
    assert feedback_of(raw(input="1", label="1", context="[0.5]")).context == [0.5]
    with pytest.raises(InvalidInput, match="field 'context' is 'eu', which is not JSON"):
        record_of(raw(input="1", context="eu"))


def test_feedback() -> None:
    feedback = feedback_of(raw(id="r1", correct="1", weight="2"))
    assert (feedback.id, feedback.correct, feedback.weight, feedback.input) == (
        "r1",
        True,
        2.0,
        None,
    )
    assert feedback_of(raw(input="[1,2]", label='"cat"')).label == "cat"
    assert feedback_of(raw(prediction="n-1", score="0.5")).score == 0.5


@given(
    st.dictionaries(
        st.sampled_from(
            [
                b"input",
                b"text",
                b"data",
                b"dtype",
                b"shape",
                b"id",
                b"user",
                b"context",
                b"slo_ms",
                b"label",
                b"score",
                b"weight",
                b"correct",
                b"q.x",
                b"\xff",
            ]
        ),
        st.one_of(
            st.binary(max_size=24),
            st.sampled_from([b"f32", b"2,3", b"[1,2]", b"9e999", b"u8", b"-1", b"{}"]),
        ),
        max_size=5,
    )
)
def test_whatever_the_bytes_it_is_a_value_or_a_refusal(fields: dict[bytes, bytes]) -> None:
    for read in (record_of, feedback_of):
        with contextlib.suppress(InvalidInput):
            read(fields)


@given(
    st.recursive(
        st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        st.lists,
    )
)
def test_all_values_of_json_are_accepted(value: Any) -> None:
    assert record_of(raw(input=json.dumps(value))).input == value
    assert msgspec.json.decode(flat(output_fields(value))["output"]) == value
