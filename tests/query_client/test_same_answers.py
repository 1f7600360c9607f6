"""The same behaviour in the server's process and over sockets: plain, in asyncio, and over TLS with
a key."""

from typing import Any

import numpy as np
import pytest

from clipper.errors import InvalidInput, UnknownApplication, UnknownPrediction
from tests.query_client.conftest import Door

ROW = [1.0, 2.0, 3.5]


# -- one query


@pytest.mark.parametrize(
    "row",
    [
        ROW,
        tuple(ROW),
        np.array(ROW),
        np.array(ROW, np.float32),
        np.array([1.0, 9.0, 2.0, 9.0, 3.5])[::2],
        [np.float64(1.0), 2, 3.5],
    ],
    ids=["list", "tuple", "f64", "f32", "strided", "mixed"],
)
def test_an_answer_has_all_of_its_members(door: Door, row: Any) -> None:
    answer = door.predict("total", row)
    assert answer.output == 6.5
    assert (answer.confidence, answer.agreement) == (1.0, 1.0)
    assert (answer.is_default, answer.reason, answer.missing) == (False, "", ())
    assert [str(model) for model in answer.models] == ["sum:1"]
    assert answer.id
    assert answer.latency_us >= 0
    assert (answer.decided_by, answer.set, answer.request_id) == ("all", (), "")


def test_two_answers_have_two_ids(door: Door) -> None:
    assert door.predict("total", ROW).id != door.predict("total", ROW).id


def test_settings_of_a_query(door: Door) -> None:
    answer = door.predict("total", ROW, user="ann", slo_ms=30_000, salt=7, id="mine-7")
    assert answer.output == 6.5
    if door.name == "in process":
        assert answer.request_id == "mine-7"
    answer = door.predict("learns", ROW, user="ann", context=[0.5, 1.0])
    assert answer.output == 6.5


def test_a_default_and_its_reason(door: Door) -> None:
    answer = door.predict("late", ROW)
    assert (answer.output, answer.is_default) == (-1.0, True)
    assert answer.reason
    assert [str(model) for model in answer.missing] == ["sleepy:1"]
    unsure = door.predict("unsure", ROW)
    assert (unsure.output, unsure.is_default, unsure.missing) == (-1.0, True, ())
    assert "0.25" in unsure.reason


def test_a_deadline_of_the_query(door: Door) -> None:
    assert door.predict("late", ROW, slo_ms=30_000).output == 6.5
    assert door.predict("total", [3.0, 1.0, 1.0], slo_ms=30_000).output == 5.0


@pytest.mark.parametrize(
    "row",
    [[1.0, 2.0], [[1.0, 2.0, 3.0]], "text", 3.0, None, {"x": 1}, ["a", "b", "c"], np.zeros((2, 3))],
    ids=repr,
)
def test_a_wrong_input_is_refused(door: Door, row: Any) -> None:
    with pytest.raises(InvalidInput):
        door.predict("total", row)


@pytest.mark.parametrize(
    "setting",
    [
        {"slo_ms": 0},
        {"slo_ms": -1},
        {"slo_ms": "20"},
        {"slo_ms": float("inf")},
        {"slo_ms": 1e12},
        {"context": "abc"},
        {"context": [1.0] * 100},
        {"id": "a\nb"},
        {"id": "x" * 1000},
        {"id": 7},
        {"user": 7},
    ],
    ids=repr,
)
def test_a_wrong_setting_is_refused(door: Door, setting: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        door.predict("total", ROW, **setting)


def test_an_unknown_application(door: Door) -> None:
    for predict, rows in ((door.predict, ROW), (door.predict_many, [ROW])):
        with pytest.raises(
            UnknownApplication, match=r"no application 'totl' - did you mean 'total'"
        ):
            predict("totl", rows)
    with pytest.raises(UnknownApplication):
        door.feedback("totl", "1-1", label=1)
    with pytest.raises(UnknownApplication):  # a model is no application
        door.predict_many("sum", [ROW])


@pytest.mark.parametrize("value", ["Bern", "", "Zürich \N{SNOWMAN}", "a" * 5000])
def test_texts(door: Door, value: str) -> None:
    assert door.predict("texts", value).output == f"{value}!"


def test_lists_of_any_length(door: Door) -> None:
    for row in ([1.0], [1.0, 2.0, 3.0], np.arange(2000.0)):
        assert np.array_equal(door.predict("twice", row).output, 2 * np.asarray(row))


def test_missing_numbers(door: Door) -> None:
    nan = float("nan")
    for row in ([1.0, nan, nan], np.array([1.0, nan, nan], np.float32)):
        assert door.predict("holes", row).output == 2
        assert door.predict_many("holes", [row, row]).outputs.tolist() == [2, 2]


def test_named_tensors(door: Door) -> None:
    pair = {"x": [1.0, 2.0, 3.0], "factor": 2.0}
    output = door.predict("pair", pair).output
    assert np.array_equal(output["scaled"], [2.0, 4.0, 6.0])
    assert output["total"] == 12.0
    assert door.predict("pair-total", pair).output == 12.0
    only = door.predict("pair", pair, outputs=["total"]).output
    assert only == {"total": 12.0}
    assert door.predict("homes", {"age": 31, "city": "Bern"}).output == 35.0
    with pytest.raises(InvalidInput, match="'city'"):
        door.predict("homes", {"age": 31})


# -- arrays


@pytest.mark.parametrize("n", [1, 2, 32, 33, 500])
def test_arrays(door: Door, n: int) -> None:
    rows = np.random.default_rng(n).random((n, 3))
    answers = door.predict_many("total", rows)
    assert np.allclose(answers.outputs, rows.sum(axis=1))
    assert len(answers) == n
    assert np.array_equal(answers.confidence, np.ones(n))
    assert not answers.is_default.any()
    assert dict(answers.reasons) == {}
    assert [str(model) for model in answers.models] == ["sum:1"]
    assert sum(answers.missing.values()) == 0
    assert len(answers.latency_us) == n
    assert np.array_equal(door.predict_many("total", rows.tolist()).outputs, answers.outputs)


@pytest.mark.parametrize("n", [3, 40])
def test_arrays_of_defaults(door: Door, n: int) -> None:
    rows = np.random.default_rng(n).random((n, 3))
    late = door.predict_many("late", rows, slo_ms=50)
    assert np.array_equal(late.outputs, np.full(n, -1.0))
    assert late.is_default.all()
    assert sum(late.reasons.values()) == n
    assert {str(model): count for model, count in late.missing.items()} == {"sleepy:1": n}
    unsure = door.predict_many("unsure", rows)
    assert unsure.is_default.all()
    assert np.array_equal(unsure.outputs, np.full(n, -1.0))


@pytest.mark.parametrize("n", [3, 40])
def test_arrays_of_texts_and_of_rows(door: Door, n: int) -> None:
    texts = [f"{i}é" for i in range(n)]
    assert list(door.predict_many("texts", texts).outputs) == [f"{text}!" for text in texts]
    rows = np.arange(4 * n, dtype=np.float32).reshape(n, 4)
    found = door.predict_many("rows", rows).outputs
    assert np.array_equal(found, 2 * rows)
    assert found.dtype == np.float32


def test_arrays_of_lists_of_different_lengths(door: Door) -> None:
    rows = [[1.0], [1.0, 2.0], [4.0, 5.0, 6.0]]
    found = door.predict_many("twice", rows).outputs
    assert [list(row) for row in found] == [[2.0], [2.0, 4.0], [8.0, 10.0, 12.0]]


@pytest.mark.parametrize("n", [3, 40])
def test_arrays_of_named_tensors(door: Door, n: int) -> None:
    x, factor = np.random.default_rng(n).random((n, 3)), np.arange(float(n))
    columns = {"x": x, "factor": factor}
    objects = [{"x": row, "factor": one} for row, one in zip(x, factor, strict=True)]
    for inputs in (columns, objects):
        outputs = door.predict_many("pair", inputs).outputs
        assert np.allclose(outputs["scaled"], x * factor[:, None])
        assert np.allclose(outputs["total"], (x * factor[:, None]).sum(axis=1))
    assert np.allclose(
        door.predict_many("pair-total", columns).outputs, (x * factor[:, None]).sum(axis=1)
    )
    only = door.predict_many("pair", columns, outputs=["total"]).outputs
    assert [*only] == ["total"]


@pytest.mark.parametrize(
    "inputs",
    [np.zeros((3, 5)), [[1.0, 2.0]], [["a", "b", "c"]], np.zeros((2, 3), complex), "text"],
    ids=["5", "2", "texts", "complex", "text"],
)
def test_a_wrong_array_is_refused(door: Door, inputs: Any) -> None:
    with pytest.raises(InvalidInput):
        door.predict_many("total", inputs)


# -- feedback


@pytest.mark.parametrize("truth", [{"label": 6.5}, {"correct": True}, {"score": 0.5}], ids=repr)
def test_feedback_counts_once(door: Door, truth: dict[str, Any]) -> None:
    answer = door.predict("learns", ROW)
    assert door.feedback("learns", answer, **truth) is True
    assert door.feedback("learns", answer.id, **truth) is False


def test_feedback_by_the_input(door: Door) -> None:
    assert door.feedback("learns", input=ROW, user="bob", label=6.5, weight=2.0) is True


def test_feedback_about_nothing_known(door: Door) -> None:
    with pytest.raises(UnknownPrediction):
        door.feedback("learns", "0000-1", label=1.0)
    answer = door.predict("learns", ROW)
    for wrong in ({}, {"label": 1, "correct": True}, {"score": 2.0}, {"label": 1, "weight": -1.0}):
        with pytest.raises(InvalidInput):
            door.feedback("learns", answer, **wrong)
    with pytest.raises(InvalidInput):
        door.feedback("learns", label=1.0)
