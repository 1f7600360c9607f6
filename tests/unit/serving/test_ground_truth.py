"""Valid and invalid feedback: invalid feedback raises InvalidInput and nothing else."""

from typing import Any

import numpy as np
import pytest

from clipper.errors import InvalidInput
from clipper.serving.feedback.ground_truth import (
    LABEL_BYTES_MAX,
    fitted_column,
    fitted_label,
    label_column,
    plain_label,
    truth_of,
    user_of,
    weight_of,
)

HALF = "\ud800"
BAD_LABELS: list[Any] = [
    10**30,
    -(10**30),
    float("nan"),
    float("inf"),
    HALF,
    "x" + HALF,
    "x" * (LABEL_BYTES_MAX + 1),
    b"x" * (LABEL_BYTES_MAX + 1),
    np.zeros(LABEL_BYTES_MAX),
    [1, [2, 3]],
    [10**30],
    ["a", "b"],
    [HALF],
    {"a": 1},
    object(),
    1j,
    np.datetime64("2020"),
    np.array([1.0, np.nan]),
]


@pytest.mark.parametrize("label", BAD_LABELS, ids=lambda label: type(label).__name__)
def test_what_can_be_no_label_is_invalid_input(label: Any) -> None:
    with pytest.raises(InvalidInput):
        truth_of(label, None, None)
    with pytest.raises(InvalidInput):
        label_column([label])
    with pytest.raises(InvalidInput):
        label_column([1, label])


@pytest.mark.parametrize(
    "label", [0, -(2**63), 2**64 - 1, True, 1.5, "", "é", b"", "x" * LABEL_BYTES_MAX]
)
def test_a_label_stays_as_it_is(label: Any) -> None:
    assert type(plain_label(label)) is type(label)
    assert plain_label(label) == label
    assert list(label_column([label, label])) == [label, label]


@pytest.mark.parametrize(
    "score", [10**400, -1, 2.0, float("nan"), "1", True, 1j, np.complex128(1), [0.5], HALF]
)
def test_what_can_be_no_score_is_invalid_input(score: Any) -> None:
    with pytest.raises(InvalidInput):
        truth_of(None, None, score)


@pytest.mark.parametrize("weight", [0, -1.0, 10**400, float("nan"), "1", True, None, 1j])
def test_what_can_be_no_weight_is_invalid_input(weight: Any) -> None:
    with pytest.raises(InvalidInput):
        weight_of(weight)


@pytest.mark.parametrize(
    "user", [7, 7.0, b"ann", True, ["ann"], HALF, "ann" + HALF, "x" * 513, "é" * 513]
)
def test_what_can_be_no_user_is_invalid_input(user: Any) -> None:
    with pytest.raises(InvalidInput):
        user_of(user)


@pytest.mark.parametrize("user", [None, "", "ann", "é" * 512, "x" * 512])
def test_a_user_stays_as_it_is(user: Any) -> None:
    assert user_of(user) == user


@pytest.mark.parametrize(
    ("label", "outputs", "expected"),
    [
        (3.0, [3, 4], 3),
        (3, [3, 4], 3),
        (3, [2.5, 3.5], 3.0),
        (3, [2.5, 3], 3),
        ("3", [3, "4"], "3"),
        (b"3", [b"4"], b"3"),
        (True, [False], True),
        (3.5, [2.5], 3.5),
        (3.5, [], 3.5),
        (3.0, [3, "x"], 3),
        ("y", [3, "x"], "y"),
        (2**63, [1.0], 2.0**63),
        (True, [0], 1),
        (False, [0.5], 0.0),
        (np.True_, [3, "x"], 1),
        (1, [True], True),
        (0.0, [True, False], False),
    ],
)
def test_a_label_is_of_the_kind_of_the_outputs(
    label: Any, outputs: list[Any], expected: Any
) -> None:
    found = fitted_label(label, outputs)
    assert type(found) is type(expected)
    assert found == expected


@pytest.mark.parametrize(
    ("label", "outputs"),
    [
        (3.5, [3, 4]),
        (3.0, ["3"]),
        (3.5, [True]),
        (np.array([1.0]), [3]),
        (np.array([1.0]), ["a"]),
        (1e300, [b"x"]),
        ("cat", [3, 4]),
        ("cat", [0.5]),
        ("seven", [np.array([1.0])]),
        ("3", [b"3"]),
        (3, ["3"]),
        (3, [np.array([3])]),
        (2, [True]),
    ],
)
def test_what_can_be_no_label_is_refused(label: Any, outputs: list[Any]) -> None:
    with pytest.raises(InvalidInput, match="which it can never be"):
        fitted_label(label, outputs)


def test_columns_of_labels_are_of_the_kind_of_the_outputs() -> None:
    whole, numbers, text = np.array([1, 2, 3]), np.array([1.0, 2.0, 3.0]), ["a", "b", "c"]
    assert fitted_column(numbers, [whole, whole]).dtype == np.int64
    assert fitted_column(whole, [numbers]).dtype == np.float64
    assert fitted_column(whole, [whole]) is whole
    assert fitted_column(text, [text]) == text
    with pytest.raises(InvalidInput, match=r"label=2\.5"):
        fitted_column(np.array([1.0, 2.5, 3.0]), [whole])
    with pytest.raises(InvalidInput):
        fitted_column(numbers, [text])
    with pytest.raises(InvalidInput, match="label='a'"):
        fitted_column(text, [whole])
    truths = np.array([True, False, True])
    assert fitted_column(truths, [whole]).tolist() == [1, 0, 1]
    assert fitted_column(truths, [numbers]).dtype == np.float64
    assert fitted_column(np.array([1, 0, 1]), [truths]).tolist() == truths.tolist()
    with pytest.raises(InvalidInput, match="label=2"):
        fitted_column(whole, [truths])
