"""Declared reads of a model: their record, and the rows that an input reads."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from clipper.errors import InvalidInput
from clipper.serving.models.reads import IDS_MAX, check_reads, declaration_of, ids_of
from clipper.types import InputType, Model, Similar


def everything(x: Any) -> dict[str, Any]:
    return {"all": x}


def rows_read(reads: Any, x: Any) -> dict[str, list[int]] | None:
    found = ids_of(declaration_of("m", reads))(x)
    return None if found is None else {table: ids.tolist() for table, ids in found.items()}


@pytest.mark.parametrize(
    ("reads", "x", "ids"),
    [
        ({"u": 0, "i": [2, 1]}, np.array([5, 6, 7]), {"u": [5], "i": [7, 6]}),
        ({"u": (1,)}, np.array([[1.0, 2.0], [3.0, 4.0]]), {"u": [2]}),
        ({"u": 0}, np.array([2**63 + 1], np.uint64), {"u": [-(2**63) + 1]}),
        ({"u": 0}, np.array([-3], np.int8), {"u": [-3]}),
        ({"u": 0}, np.array([1.5]), None),
        ({"u": 0}, np.array([np.nan]), None),
        ({"u": 0}, np.array([np.inf]), None),
        ({"u": 3}, np.array([1, 2]), None),
        (everything, [1, 2], {"all": [1, 2]}),
        (everything, 7, {"all": [7]}),
        (everything, "seven", None),
        (everything, np.arange(IDS_MAX + 1), None),
        (lambda x: {"a": x["no such key"]}, "text", None),
        (lambda x: None, "text", None),
        (lambda x: {"w": [len(x)], "v": []}, "text", {"w": [4], "v": []}),
        ("tests.unit.serving.test_reads:everything", [3], {"all": [3]}),
        (partial(everything), [3], {"all": [3]}),
    ],
)
def test_rows_of_an_input(reads: Any, x: Any, ids: dict[str, list[int]] | None) -> None:
    assert rows_read(reads, x) == ids


def test_functions_without_a_name_are_distinguished() -> None:
    each: list[Callable[[Any], Any]] = [lambda x, n=n: {"t": [n]} for n in range(3)]
    declarations = [declaration_of("m", one) for one in each]
    assert [ids_of(one)(0)["t"].tolist() for one in declarations] == [[0], [1], [2]]  # type: ignore[index]


@pytest.mark.parametrize(
    "reads", [{}, {"t": []}, {"t": -1}, {"t": ["a"]}, "words", 7, [1], {"t": [0.5]}]
)
def test_what_is_no_reading_is_refused(reads: Any) -> None:
    with pytest.raises(InvalidInput, match="reads is"):
        declaration_of("m", reads)


@pytest.mark.parametrize("reads", ["no.such:f", "math:nothing", "math:pi", "math:<lambda>#17"])
def test_a_function_that_is_not_there_is_refused(reads: str) -> None:
    with pytest.raises(InvalidInput, match=r"cannot be imported|is not a function"):
        check_reads(Model("m", 1, InputType.parse("str"), reads=reads))


@pytest.mark.parametrize(
    ("input", "reads", "fits"),
    [
        ("i64[2]", {"t": (0, 1)}, True),
        ("i64[2]", {"t": (2,)}, False),
        ("i64[2,2]", {"t": (3,)}, True),
        ("i64", {"t": (0,)}, True),
        ("i64", {"t": (1,)}, False),
        ("any", {"t": (9,)}, True),
        ("i32[*]", {"t": (9,)}, True),
        ("str", {"t": (0,)}, False),
    ],
)
def test_columns_are_of_the_input(input: str, reads: Any, fits: bool) -> None:
    model = Model("m", 1, InputType.parse(input), reads=reads)
    if fits:
        check_reads(model)
    else:
        with pytest.raises(InvalidInput, match="reads column"):
            check_reads(model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tolerance": 0.1}, "does not declare what it reads"),
        ({"reads": {"t": (0,)}, "tolerance": -0.1}, "tolerance is"),
        ({"reads": {"t": (0,)}, "tolerance": float("nan")}, "tolerance is"),
        ({"reads": {"t": (0,)}, "similar": Similar(width=1.0)}, "only similar"),
    ],
)
def test_what_does_not_go_together_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        check_reads(Model("m", 1, InputType.parse("f32[2]"), **settings))


def test_a_model_of_named_tensors_reads_nothing_by_columns() -> None:
    model = Model("m", 1, InputType.parse({"x": "f64[3]"}), reads={"factors": (0,)})
    with pytest.raises(InvalidInput, match="takes named tensors"):
        check_reads(model)
