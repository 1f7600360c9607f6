"""Inputs as tensors and back: with numpy and without, the same bytes."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clipper_client import tensors
from clipper_client.errors import InvalidInput
from clipper_client.tensors import Ragged, many_rows, one_row, unpacked


@pytest.fixture
def without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch)


def hide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the package find no numpy."""
    monkeypatch.setattr("clipper_client.tensors.numpy_or_none", lambda: None)


numbers = st.one_of(
    st.lists(st.floats(width=64, allow_nan=False), min_size=1),
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1),
    st.lists(st.booleans(), min_size=1),
    st.lists(st.lists(st.integers(0, 9), min_size=2, max_size=2), min_size=1),
)


@given(numbers)
def test_lists_are_packed_as_numpy_packs_them(values: list[Any]) -> None:
    (by_numpy,) = many_rows(values)
    with pytest.MonkeyPatch.context() as patch:
        hide(patch)
        (by_library,) = many_rows(values)
        assert by_library[:3] == by_numpy[:3]
        assert bytes(by_library.data) == bytes(by_numpy.data)
        _, datatype, shape, data = by_library
        assert unpacked(datatype, shape, memoryview(bytes(data))) == values
    found = unpacked(datatype, shape, memoryview(bytes(data)))
    assert found.tolist() == values


@pytest.mark.parametrize("code", ["?", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8"])
@pytest.mark.parametrize("order", ["<", ">"])
def test_arrays_of_each_type_come_back(code: str, order: str) -> None:
    sent = np.arange(6).reshape(2, 3).astype(code).astype(np.dtype(code).newbyteorder(order))
    (tensor,) = many_rows(sent[:, ::-1])
    back = unpacked(tensor.datatype, tensor.shape, memoryview(bytes(tensor.data)))
    assert np.array_equal(back, sent[:, ::-1])
    assert back.dtype == np.dtype(code)


@pytest.mark.parametrize("code", ["f2", "f4", "f8"])
def test_floats_keep_nan_and_infinity(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = np.array([1.5, np.nan, np.inf], code)
    (tensor,) = many_rows(sent)
    data = memoryview(bytes(tensor.data))
    assert np.array_equal(unpacked(tensor.datatype, (3,), data), sent, equal_nan=True)
    hide(monkeypatch)
    first, second, third = unpacked(tensor.datatype, (3,), data)
    assert (first, math.isnan(second), third) == (1.5, True, math.inf)


@given(st.lists(st.text(), min_size=1))
def test_strings_come_back(texts: list[str]) -> None:
    (tensor,) = many_rows(texts)
    assert (tensor.datatype, tensor.shape) == ("BYTES", (len(texts),))
    assert unpacked("BYTES", tensor.shape, memoryview(tensor.data)) == texts


def test_one_row_has_a_first_dimension() -> None:
    assert one_row([1.0, 2.0])[0].shape == (1, 2)
    assert one_row(1.5)[0][:3] == ("input", "FP64", (1,))
    assert one_row("text")[0][:3] == ("input", "BYTES", (1,))
    named = one_row({"x": np.zeros(3), "city": "Bern"})
    assert [(one.name, one.datatype, one.shape) for one in named] == [
        ("x", "FP64", (1, 3)),
        ("city", "BYTES", (1,)),
    ]


class Frame(dict[str, Any]):
    """A table as polars has it."""

    def get_columns(self) -> list["Column"]:
        return [Column(name, values) for name, values in self.items()]


class Column:
    def __init__(self, name: str, values: Any) -> None:
        self.name, self._values = name, values

    def to_numpy(self) -> Any:
        return np.asarray(self._values)


def as_frame(columns: dict[str, Any]) -> Any:
    return type("Table", (), {"get_columns": Frame(columns).get_columns})()


def as_pandas(columns: dict[str, Any]) -> Any:
    pandas = pytest.importorskip("pandas", reason="pip install pandas")
    return pandas.DataFrame(columns, index=[5, 9])


def as_polars(columns: dict[str, Any]) -> Any:
    return pytest.importorskip("polars", reason="pip install polars").DataFrame(columns)


def as_arrow(columns: dict[str, Any]) -> Any:
    return pytest.importorskip("pyarrow", reason="pip install pyarrow").table(columns)


def as_objects(columns: dict[str, Any]) -> Any:
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


@pytest.mark.parametrize(
    "make", [dict, as_objects, as_frame, as_pandas, as_polars, as_arrow], ids=lambda f: f.__name__
)
def test_tables_are_columns(make: Any) -> None:
    found = many_rows(make({"age": [31.0, 4.5], "city": ["Bern", "Genève"]}))
    assert [(one.name, one.datatype, one.shape) for one in found] == [
        ("age", "FP64", (2,)),
        ("city", "BYTES", (2,)),
    ]
    assert unpacked("BYTES", (2,), memoryview(found[1].data)) == ["Bern", "Genève"]


@pytest.mark.parametrize(
    "values",
    [[[1, 2], [3]], [1, [2]], ["a", 1], [1, "a"], [{"a": 1}, {"b": 2}], [{"a": 1}, 3]],
)
def test_what_is_no_tensor_is_told(values: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Ragged):
        many_rows(values)
    hide(monkeypatch)
    with pytest.raises(Ragged):
        many_rows(values)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (3.5, "one value"),
        ("text", "one value"),
        (None, "one value"),
        (np.array(["2020-01-01"], "datetime64[D]"), "no model takes"),
        (np.zeros(2, complex), "no model takes"),
    ],
)
def test_what_can_be_no_input_is_refused(values: Any, why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        many_rows(values)


def test_without_numpy_what_is_no_list_is_refused(without_numpy: None) -> None:
    with pytest.raises(InvalidInput, match="numpy is not installed"):
        many_rows(memoryview)
    with pytest.raises(InvalidInput, match="64 bits"):
        many_rows([2**64])
    assert many_rows(range(3))[0].shape == (3,)


def test_missing_numbers_are_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    (tensor,) = many_rows([1.0, None])
    assert np.isnan(unpacked("FP64", (2,), memoryview(bytes(tensor.data)))[1])
    hide(monkeypatch)
    assert bytes(many_rows([1.0, None])[0].data) == bytes(tensor.data)


def test_an_output_of_json_is_an_array_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    assert np.array_equal(tensors.of_json([[1, 2], [3, 4]]), [[1, 2], [3, 4]])
    assert tensors.of_json([[1], [2, 3]]) == [[1], [2, 3]]
    assert tensors.of_json(["a"]) == ["a"]
    assert tensors.of_json(1.5) == 1.5
    assert isinstance(tensors.of_json({"x": [1.0]})["x"], np.ndarray)
    hide(monkeypatch)
    assert tensors.of_json([1.0]) == [1.0]
