"""Notations of types: what is written is read back, and anything else is refused."""

import copy
import dataclasses
import gc
import pickle
import re
import weakref
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import clipper
from clipper.selection import Combined, Prediction
from clipper.types import (
    ANY,
    DTYPES,
    NAME_GRAMMAR,
    Answer,
    Application,
    Batching,
    InputType,
    Model,
    PredictionRequest,
    VersionedModel,
    check_name,
)
from clipper_core.results.answer import answer_of

# -- names


@given(st.from_regex(NAME_GRAMMAR, fullmatch=True))
def test_names_within_the_grammar_are_taken(name: str) -> None:
    assert check_name(name) == name


@given(st.text(max_size=200))
def test_all_other_names_are_refused(name: str) -> None:
    if re.fullmatch(NAME_GRAMMAR, name):
        return
    with pytest.raises(ValueError, match="bad model name") as caught:
        check_name(name, "model")
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "it is empty"),
        ("../etc/passwd", "'/' is not allowed"),
        ("..", "it starts with '.'"),
        ("-x", "it starts with '-'"),
        ("a\0b", "'\\x00' is not allowed"),
        ("a%2e", "'%' is not allowed"),
        ("Svm", "'S' is not allowed"),
        ("svм", "'м' is not allowed"),
        ("svm\n", "'\\n' is not allowed"),
        ("a" * 129, "129 characters, at most 128"),
        ("x" * 10_000, "10000 characters"),
    ],
)
def test_a_bad_name_is_rejected_with_the_reason(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        check_name(name)


def test_a_name_that_is_no_str() -> None:
    with pytest.raises(ValueError, match="must be a str, not int"):
        check_name(5)  # type: ignore[arg-type]


# -- models by name and version


@given(st.from_regex(NAME_GRAMMAR, fullmatch=True), st.none() | st.integers(1, 2**31 - 1))
def test_models_read_back_as_written(name: str, version: int | None) -> None:
    model = VersionedModel(name, version)
    assert VersionedModel.parse(str(model)) == model == VersionedModel.parse(model)
    assert hash(VersionedModel.parse(str(model))) == hash(model)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "svm:",
        "svm:0",
        "svm:-1",
        "svm:1.5",
        "svm:x",
        "svm:1:2",
        "a b",
        "svm:99999999999",
        "svm:\u0661",
    ],
)
def test_bad_models(text: str) -> None:
    with pytest.raises(ValueError, match="bad"):
        VersionedModel.parse(text)


def test_a_model_that_is_no_str() -> None:
    with pytest.raises(ValueError, match="not by a int"):
        VersionedModel.parse(3)  # type: ignore[arg-type]


# -- input types

numbers = [name for name in DTYPES if name not in ("any", "str", "bytes")]
shapes = st.lists(st.integers(1, 2**32 - 1), max_size=4).map(tuple)
input_types = st.one_of(
    st.sampled_from([InputType("str", (), True), InputType("bytes", (), True), ANY]),
    st.builds(InputType, st.sampled_from(numbers), shapes),
    st.builds(InputType, st.sampled_from(numbers), st.just(()), st.just(True)),
)


@given(input_types)
def test_input_types_read_back_as_written(type_: InputType) -> None:
    assert InputType.parse(str(type_)) == type_ == InputType.parse(type_)
    assert InputType.parse(f" {str(type_).upper()} ") == type_
    assert type_.agrees_with(type_)
    assert type_.agrees_with(ANY)
    assert ANY.agrees_with(type_)


@given(input_types, input_types)
def test_different_types_are_written_differently(a: InputType, b: InputType) -> None:
    assert (str(a) == str(b)) == (a == b)
    assert a.agrees_with(b) == (a == b or ANY in (a, b))


@pytest.mark.parametrize(
    ("text", "dtype", "shape", "variable"),
    [
        ("f64[64]", "f64", (64,), False),
        ("f32[28,28]", "f32", (28, 28), False),
        ("f32[ 28 , 28 ]", "f32", (28, 28), False),
        ("i32[*]", "i32", (), True),
        ("f64", "f64", (), False),
        ("str", "str", (), True),
        ("bytes", "bytes", (), True),
        ("any", "any", (), False),
        ("float64[64]", "f64", (64,), False),
        ("FP32[3]", "f32", (3,), False),
        ("uint8[*]", "u8", (), True),
        ("doubles", "f64", (), True),
        ("strings", "str", (), True),
    ],
)
def test_notation(text: str, dtype: str, shape: tuple[int, ...], variable: bool) -> None:
    assert InputType.parse(text) == InputType(dtype, shape, variable)  # type: ignore[arg-type]


def test_the_design_documents_seven_types() -> None:
    seven = ["i32[5]", "f64[5]", "u8[5]", "i32[*]", "f64[*]", "u8[*]", "str"]
    assert [str(InputType.parse(text)) for text in seven] == seven


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "bad input type"),
        ("f65", "Element types: any, bool, u8"),
        ("f64[", "bad input type"),
        ("f64[]", "dimensions"),
        ("f64[0]", "dimensions"),
        ("f64[-1]", "dimensions"),
        ("f64[*,3]", "dimensions"),
        ("f64[3,]", "dimensions"),
        ("f64[4294967296]", "dimensions"),
        ("f64[1,1,1,1,1]", "at most 4"),
        ("str[3]", "takes no shape"),
        ("bytes[*]", "takes no shape"),
        ("f64[3]x", "bad input type"),
        ("f64[1e3]", "dimensions"),
        ("doubles[3]", "bad input type"),
        ("f64[\u0663]", "dimensions"),
    ],
)
def test_bad_notation(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        InputType.parse(text)


@given(st.text(max_size=30))
def test_any_other_text_is_a_value_error(text: str) -> None:
    try:
        type_ = InputType.parse(text)
    except ValueError:
        return
    assert InputType.parse(str(type_)) == type_


def test_a_type_that_is_no_str() -> None:
    with pytest.raises(ValueError, match="not a int"):
        InputType.parse(64)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.zeros(64), "f64[64]"),
        (np.zeros((28, 28), np.float32), "f32[28,28]"),
        (np.float16(1), "f16"),
        (np.zeros(3, ">f8"), "f64[3]"),
        (np.array(True), "bool"),
        (np.zeros(2, np.uint8), "u8[2]"),
        ([1.0, 2], "f64[2]"),
        ([1, 2, 3], "i64[3]"),
        ([[1.5], [2.5]], "f64[2,1]"),
        ([True, False], "bool[2]"),
        ((1, 2), "i64[2]"),
        (1.5, "f64"),
        (7, "i64"),
        (2**63, "u64"),
        (True, "bool"),
        ("text", "str"),
        ("", "str"),
        (b"raw", "bytes"),
        (bytearray(b"x"), "bytes"),
        (memoryview(b"x"), "bytes"),
        (np.str_("x"), "str"),
        (np.bytes_(b"x"), "bytes"),
    ],
)
def test_types_are_inferred(value: object, text: str) -> None:
    assert str(InputType.infer(value)) == text


@pytest.mark.parametrize(
    "value",
    [
        None,
        object(),
        {},
        [[1, 2], [3]],
        ["a", "b"],
        [None],
        [],
        np.zeros((0, 3)),
        2**64,
        1j,
        np.zeros((1,) * 5),
        np.datetime64("2020-01-01"),
        np.array([object()]),
        np.longdouble(1),
    ],
)
def test_what_has_no_input_type(value: object) -> None:
    with pytest.raises(ValueError, match=r"input"):
        InputType.infer(value)


# -- values


def test_values_are_frozen() -> None:
    for value, field in (
        (VersionedModel("a"), "name"),
        (Answer(1), "output"),
        (PredictionRequest(1), "input"),
    ):
        with pytest.raises(AttributeError):
            setattr(value, field, 0)


def test_requests_and_answers_may_hold_arrays() -> None:
    array = np.zeros(3)
    assert PredictionRequest(array) != PredictionRequest(array), (
        "by identity: arrays have no one truth"
    )
    assert Answer(array) != Answer(array)
    request = PredictionRequest(array, "digits", user="u1", slo_ms=5)
    assert (request.candidate_models, request.salt) == ((), 0)


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        (
            Answer(3, 0.984, models=(VersionedModel("svm", 1),), latency_us=1900),
            "Answer(3, confidence=0.984, from svm:1, 1.9 ms)",
        ),
        (
            Answer(
                -1, 0.0, True, "deadline", missing=(VersionedModel("svm", 1),), latency_us=20_000
            ),
            "Answer(-1, confidence=0, default: deadline, missing svm:1, 20 ms)",
        ),
        (Answer("x" * 100), f"Answer('{'x' * 56}..., confidence=1, 0 ms)"),
    ],
)
def test_an_answer_shows_itself_in_one_line(answer: Answer, shown: str) -> None:
    assert repr(answer) == shown


SVM = VersionedModel("svm", 1)
PARTS = {
    "output": 3,
    "confidence": 0.5,
    "is_default": True,
    "reason": "why",
    "models": (SVM,),
    "missing": (VersionedModel("cnn", 2),),
    "latency_us": 17,
    "id": "node-ff",
    "agreement": 0.25,
    "decided_by": "majority",
    "set": (3, 4),
    "request_id": "mine",
    "qualifiers": {SVM: {"quality": 3}},
}


def parts_of(answer: Answer) -> dict[str, Any]:
    return {name: getattr(answer, name) for name in PARTS}


def test_an_answer_has_the_parts_that_it_is_made_of() -> None:
    assert parts_of(Answer(*PARTS.values())) == parts_of(Answer(**PARTS)) == PARTS
    assert parts_of(Answer(None)) == {
        "output": None,
        "confidence": 1.0,
        "is_default": False,
        "reason": "",
        "models": (),
        "missing": (),
        "latency_us": 0,
        "id": "",
        "agreement": 1.0,
        "decided_by": "all",
        "set": (),
        "request_id": "",
        "qualifiers": {},
    }
    assert Answer(1).qualifiers is not Answer(1).qualifiers
    with pytest.raises(TypeError):
        Answer()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="nonsense"):
        Answer(1, nonsense=2)  # type: ignore[call-arg]


def test_the_answer_of_a_query_equals_one_that_is_made_of_its_parts() -> None:
    combined = Combined(3, 0.5, (SVM,), 0.25, (3, 4))
    arrived = {SVM: Prediction(3, None, {"quality": 3}), VersionedModel("lda", 1): Prediction(4)}
    missing = [VersionedModel("cnn", 2)]
    arguments: tuple[Any, ...] = ("majority", "mine", arrived)
    answer = answer_of(3, combined, "why", missing, 17, "node", 255, *arguments)
    assert parts_of(answer) == PARTS
    assert answer.id is answer.id, "it is made once"
    plain = answer_of(3, combined, "", [], 0, "node", 2**64 - 1, "all", "", {})
    assert (plain.is_default, plain.missing, plain.qualifiers) == (False, (), {})
    assert plain.id == f"node-{2**64 - 1:x}"
    assert plain.qualifiers is plain.qualifiers


def test_an_answer_is_copied_replaced_pickled_and_matched() -> None:
    combined = Combined(3, 0.5, (SVM,), 0.25, (3, 4))
    arrived = {SVM: Prediction(3, None, {"quality": 3})}
    missing = [VersionedModel("cnn", 2)]
    arguments: tuple[Any, ...] = ("majority", "mine", arrived)
    lazy = answer_of(3, combined, "why", missing, 17, "node", 255, *arguments)
    for answer in (lazy, Answer(**PARTS)):
        for other in (copy.copy(answer), copy.deepcopy(answer), pickle.loads(pickle.dumps(answer))):
            assert type(other) is Answer
            assert parts_of(other) == PARTS
            assert other != answer, "by identity"
        assert len({answer, copy.copy(answer), answer}) == 2
        assert parts_of(dataclasses.replace(answer, output=4)) == {**PARTS, "output": 4}
        assert dataclasses.asdict(answer) == PARTS
        encoded = msgspec.to_builtins(Answer(1, models=(SVM,)))
        assert encoded["models"] == ({"name": "svm", "version": 1},)
        match answer:
            case Answer(output, 0.5, is_default=True):
                assert output == 3
            case _:
                pytest.fail("it does not match")
    assert Answer is clipper.Answer
    assert (Answer.__module__, Answer.__qualname__) == ("clipper.types", "Answer")


def test_a_cycle_through_an_answer_is_collected() -> None:
    class Output:
        answer: Answer

    output = Output()
    output.answer = Answer(output)
    gone = weakref.ref(output)
    del output
    gc.collect()
    assert gone() is None


def test_records_read_back_as_written() -> None:
    model = Model(
        "svm",
        2,
        InputType("f32", (28, 28)),
        batching=Batching("static", 8, pad=True),
        target="m:f",
        sha256="0",
    )
    app = Application(
        "digits", (VersionedModel("svm"), VersionedModel("svm", 2)), 7.5, [1, "a"], model.input
    )
    records: list[Any] = [model, app]
    for record in records:
        assert msgspec.json.decode(msgspec.json.encode(record), type=type(record)) == record
    assert model.id == VersionedModel("svm", 2)
    assert app.slo_us == 7500
    assert Application("a", slo_ms=0.0001).slo_us == 1, "never rounded down to no time at all"
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode(app), type=Model)
