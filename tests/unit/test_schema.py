"""Schemas: notation, checks that name the tensor, and records that are read back as written."""

import contextlib
import importlib
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from clipper.errors import InvalidInput
from clipper.schema import FREE, InvalidTensor, Schema, Tensors, TensorSpec
from clipper_container.records import FEW_ROWS
from clipper_container.schema import NUMPY_TYPES, TEXTS

TEXT = '{"ids": "i64[*]", "mask": "i64[*]"}'


# -- notation


def test_the_notation() -> None:
    schema = Schema.parse(TEXT + ' -> {"embedding": "float32[384]"}')
    assert str(schema) == TEXT + ' -> {"embedding": "f32[384]"}'
    assert schema == Schema.of(**schema.to_json())
    assert [spec.type for spec in schema.input_specs()] == ["i64[*]", "i64[*]"]
    assert schema.inputs.row_type == "bytes"
    assert schema.outputs.row_type == "u8[1536]"
    short = Schema.parse("f64[64] -> f64[10]")
    assert short.inputs is None
    assert short.input_specs()[0] == TensorSpec("input", "f64", (64,))
    assert Schema.parse("any").input_specs() == ()
    arrow = Schema.parse('{"a->b": "str"} -> i64')
    assert arrow.inputs.to_json() == {"a->b": "str"}
    assert arrow.output == "i64"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "bad schema"),
        ("f64 ->", "bad schema"),
        ("{", "bad schema"),
        ('{"a": "f64"} f32', "'->' is expected"),
        ("{}", "a dict of types by name"),
        ('{"": "f64"}', "needs a name"),
        ('{"a": "f64", "a": "f32"}', "named twice"),
        ('{"a": "f65"}', "tensor 'a': 'f65' is not a type"),
        ('{"a": "f64[0]"}', "tensor 'a': sizes"),
        ('{"a": "f64[-1]"}', "tensor 'a'"),
        ('{"a": 3}', "tensor 'a'"),
        ('{"a\\n": "f64"}', "bad tensor name"),
        ('{"a": "f64[2,2,2,2,2,2,2,2,2]"}', "tensor 'a' has 9 dimensions"),
        ('{"a": "f64[4294967295,4294967295]"}', "a row of"),
    ],
)
def test_a_bad_schema_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidTensor, match=message.replace("[", r"\[")):
        Schema.parse(text)


# -- values that do not fit

FIXED = Tensors.parse({"a": "f32[2]", "b": "i64", "c": "str"})


@pytest.mark.parametrize(
    ("values", "tensor", "message"),
    [
        ({"a": [1, 2], "b": 1}, "c", "tensor 'c' is missing"),
        ({"a": [1, 2], "b": 1, "c": "x", "d": 1}, "d", "unknown tensor 'd'"),
        ({"a": [1, 2], "b": 1.5, "c": "x"}, "b", "tensor 'b': expected i64, got f64"),
        ({"a": [1, 2, 3], "b": 1, "c": "x"}, "a", r"tensor 'a': expected f32\[2\], got shape"),
        ({"a": ["x", "y"], "b": 1, "c": "x"}, "a", "tensor 'a': expected"),
        ({"a": [1, [2]], "b": 1, "c": "x"}, "a", "tensor 'a': expected"),
        ({"a": [1, 2], "b": 1 << 70, "c": "x"}, "b", "tensor 'b': expected"),
        ({"a": [1, 2], "b": 1, "c": b"x"}, "c", "tensor 'c': expected str, got a bytes"),
        ({"a": [1, 2], "b": 1, "c": "\ud800"}, "c", "tensor 'c'"),
        ([1, 2], "a", "expected a dict of"),
    ],
)
def test_a_row_that_does_not_fit_names_the_tensor(values: Any, tensor: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        FIXED.pack(values)
    assert isinstance(caught.value, InvalidTensor)
    assert caught.value.tensor == tensor


def test_rows_of_different_numbers_are_refused() -> None:
    with pytest.raises(InvalidTensor, match="tensor 'b' has 3 rows, and 'a' has 2") as caught:
        FIXED.pack_many({"a": np.zeros((2, 2)), "b": [1, 2, 3], "c": ["x", "y"]})
    assert caught.value.tensor == "b"
    for bad in (3, np.zeros(()), "xy"):
        with pytest.raises(InvalidTensor, match="tensor 'b'"):
            FIXED.pack_many({"a": np.zeros((2, 2)), "b": bad, "c": ["x", "y"]})
    with pytest.raises(InvalidTensor, match="tensor 'score'"):
        Tensors.parse({"score": "f32"}).pack_many({"score": np.array(0.5, "f4")})


def test_names_of_some_outputs() -> None:
    assert FIXED.select(["c", "a"]) == ("a", "c")
    with pytest.raises(InvalidTensor, match="unknown tensor 'label'"):
        FIXED.select(["label"])


# -- records


@st.composite
def schemas(draw: st.DrawFn) -> Tensors:
    dtypes = st.sampled_from((*NUMPY_TYPES, *TEXTS))
    shapes = st.lists(st.sampled_from((FREE, 1, 2, 3)), max_size=3).map(tuple)
    count = draw(st.integers(1, 4))
    return Tensors.of(TensorSpec(f"t{i}", draw(dtypes), draw(shapes)) for i in range(count))


def rows_of(draw: st.DrawFn, spec: TensorSpec) -> Any:
    shape = tuple(draw(st.integers(0, 3)) if size == FREE else size for size in spec.shape)
    if not spec.is_text:
        return draw(hnp.arrays(spec.numpy, shape))
    array = np.empty(shape, object)
    kind = st.text(st.characters(codec="utf-8"), max_size=4)
    values: Any = kind if spec.dtype == "str" else st.binary(max_size=4)
    for at in np.ndindex(shape):
        array[at] = draw(values)
    return array


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensors, list[dict[str, Any]]]:
    tensors = draw(schemas())
    n = draw(st.sampled_from((1, 2, FEW_ROWS + 1, FEW_ROWS + 3)))
    return tensors, [{spec.name: rows_of(draw, spec) for spec in tensors.specs} for _ in range(n)]


def assert_same(found: Any, wanted: Any, spec: TensorSpec) -> None:
    found = np.asarray(found, spec.numpy) if spec.is_text else np.asarray(found)
    assert found.shape == wanted.shape
    assert found.dtype == spec.numpy
    assert (
        found.tolist() == wanted.tolist() if spec.is_text else found.tobytes() == wanted.tobytes()
    )


@settings(deadline=None, max_examples=60)
@given(batches())
def test_records_are_read_back(batch: tuple[Tensors, list[dict[str, Any]]]) -> None:
    tensors, rows = batch
    records = [tensors.pack(row) for row in rows]
    for record, row in zip(records, rows, strict=True):
        assert not tensors.is_fixed or record.size == tensors.row_bytes
        for name, value in tensors.unpack(record).items():
            assert_same(value, row[name], tensors.by_name[name])
    columns: dict[str, Any] = {
        spec.name: [row[spec.name] for row in rows]
        if spec.is_ragged
        else np.stack([row[spec.name] for row in rows])
        for spec in tensors.specs
    }
    many = tensors.pack_many(columns)
    assert [bytes(record) for record in many] == [bytes(record) for record in records]
    for name, column in tensors.unpack_many(many).items():
        assert len(column) == len(rows)
        for found, row in zip(column, rows, strict=True):
            assert_same(found, row[name], tensors.by_name[name])


VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "records.json").read_text())


def value_of(spec: TensorSpec, value: Any) -> Any:
    """Return a value of a vector, in which bytes are hexadecimal."""
    if spec.dtype != "bytes":
        return value
    return bytes.fromhex(value) if isinstance(value, str) else [value_of(spec, v) for v in value]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: str(vector["name"]))
def test_the_records_of_the_vectors(vector: dict[str, Any]) -> None:
    tensors = Tensors.parse(vector["schema"])
    records = [bytes.fromhex(record) for record in vector["records"]]
    if "why" in vector:
        for unpack in (tensors.unpack, partial(_unpack_among_others, tensors)):
            with pytest.raises(InvalidTensor):
                unpack(records[0])
        return
    assert tensors.row_type == vector["row"]
    for i, record in enumerate(records):
        row = {spec.name: value_of(spec, vector["values"][spec.name][i]) for spec in tensors.specs}
        assert bytes(tensors.pack(row)) == record
        for name, value in tensors.unpack(record).items():
            assert np.asarray(value).tolist() == row[name]


@pytest.mark.parametrize("type_", ["f64", "f32[2]", "f32[2,2]", "u8[8]", "bool[3]", "i16"])
@pytest.mark.parametrize("n", [0, 1, 3])
def test_a_batch_of_one_fixed_tensor(type_: str, n: int) -> None:
    tensors = Tensors.parse({"x": type_})
    (spec,) = tensors.specs
    column = np.ones((n, *spec.shape), spec.numpy)
    records = tensors.pack_many({"x": column})
    assert records.shape == (n, tensors.row_bytes)
    for copy in (True, False):
        found = tensors.unpack_many(records, copy)["x"]
        assert_same(found, column, spec)


@pytest.mark.parametrize("type_", ["i8", "i16", "i32"])
def test_whole_numbers_of_an_array_that_the_type_cannot_hold_are_refused(type_: str) -> None:
    """Arrays of numpy are refused as lists are: numpy would keep their last bits only."""
    tensors = Tensors.parse({"x": type_})
    most = int(np.iinfo(tensors.specs[0].numpy).max)
    for n in (most, -most - 1):
        packed = tensors.pack({"x": np.array(n)})
        assert tensors.unpack(packed)["x"] == n
    beyond = rf"tensor .x.: .* beyond {-most - 1} to {most}"
    for n in (most + 1, -most - 2):
        for pack in (lambda n: tensors.pack({"x": n}), lambda n: tensors.pack_many({"x": n[None]})):
            with pytest.raises(InvalidTensor, match=beyond):
                pack(np.array(n))


def test_strings_keep_their_last_zeros() -> None:
    tensors = Tensors.parse({"a": "str", "b": "bytes[2]"})
    many = tensors.pack_many({"a": ["x\0"], "b": [[b"\0", b"y\0\0"]]})
    one = tensors.unpack(many[0])
    assert one["a"] == "x\0"
    assert np.asarray(one["b"]).tolist() == [b"\0", b"y\0\0"]


def test_columns_of_fixed_tensors_are_contiguous() -> None:
    tensors = Tensors.parse({"a": "f32[3]", "b": "u8[5]"})
    records = tensors.pack_many({"a": np.ones((4, 3), "f4"), "b": np.ones((4, 5), "u1")})
    columns = tensors.unpack_many(records)
    assert columns["a"].flags.c_contiguous
    assert columns["a"].shape == (4, 3)
    views = tensors.unpack_many(records, copy=False)
    assert all(np.shares_memory(view, records) for view in views.values())
    assert views["b"].tolist() == columns["b"].tolist()


@settings(deadline=None, max_examples=100)
@given(schemas(), st.data())
def test_damaged_records_are_refused_or_read(tensors: Tensors, data: st.DataObject) -> None:
    record = bytearray(tensors.pack({
        spec.name: data.draw(st.just(_zeros(spec))) for spec in tensors.specs
    }))  # fmt: skip
    for _ in range(data.draw(st.integers(0, 3))):
        if record:
            at = data.draw(st.integers(0, len(record) - 1))
            record[at] = data.draw(st.sampled_from((0, 1, 2, 8, 127, 255)))
    cut = bytes(record[: data.draw(st.integers(0, len(record)))])
    for raw in (bytes(record), cut, cut + b"\0"):
        alone = among = False
        with contextlib.suppress(InvalidTensor):
            tensors.unpack(raw)
            alone = True
        with contextlib.suppress(InvalidTensor):
            _unpack_among_others(tensors, raw)
            among = True
        assert alone == among


def _unpack_among_others(tensors: Tensors, record: bytes) -> None:
    """Open a batch of records, of which all but this one are right."""
    right = bytes(tensors.pack({spec.name: _zeros(spec) for spec in tensors.specs}))
    batch = [*[right] * FEW_ROWS, record]
    if tensors.is_fixed and len(record) == len(right):
        tensors.unpack_many(np.stack([np.frombuffer(each, np.uint8) for each in batch]))
    elif tensors.is_fixed:
        tensors.unpack(record)
    else:
        tensors.unpack_many(batch)


def _zeros(spec: TensorSpec) -> Any:
    array = np.zeros(tuple(2 if size == FREE else size for size in spec.shape), spec.numpy)
    if spec.is_text:
        array[...] = "ab" if spec.dtype == "str" else b"ab"
    return array


ROWS: list[dict[str, Any]] = [{"age": 31.0, "city": "Bern"}, {"city": "Ulm", "age": 4.5}]


def as_pandas() -> Any:
    pandas = pytest.importorskip("pandas", reason="pip install pandas")
    return pandas.DataFrame(ROWS, index=[5, 9])


def as_arrow() -> Any:
    arrow = pytest.importorskip("pyarrow", reason="pip install pyarrow")
    return arrow.table({"age": [31, 4.5], "city": ["Bern", "Ulm"]})


def as_batch() -> Any:
    return as_arrow().to_batches()[0]


def as_polars() -> Any:
    return pytest.importorskip("polars", reason="pip install polars").DataFrame(ROWS)


@pytest.mark.parametrize("make", [as_pandas, as_arrow, as_batch, as_polars, lambda: ROWS])
def test_tables_are_packed_as_their_rows(make: Any) -> None:
    record = Tensors.parse({"age": "f64", "city": "str"})
    assert [*record.pack_many(make())] == [record.pack(row) for row in ROWS]


def test_a_wrong_column_of_a_table_is_named() -> None:
    table = as_pandas()
    with pytest.raises(InvalidTensor, match="unknown tensor 'cty' - did you mean 'city'"):
        Tensors.parse({"age": "f64", "city": "str"}).pack_many(
            table.rename(columns={"city": "cty"})
        )
    with pytest.raises(InvalidTensor, match="tensor 'city': expected str, got a float"):
        Tensors.parse({"age": "f64", "city": "str"}).pack_many(table.assign(city=1.5))


@pytest.mark.parametrize("n", [1, FEW_ROWS + 1])
def test_a_missing_number_is_nan_in_floats_and_refused_elsewhere(n: int) -> None:
    record = Tensors.parse({"age": "f32", "sizes": "f64[*]", "city": "str"})
    row = {"age": None, "sizes": [1, None], "city": "Bern"}
    for found in (record.unpack(record.pack(row)), record.unpack(record.pack_many([row] * n)[0])):
        assert np.isnan(found["age"])
        assert np.asarray(found["age"]).dtype == np.float32
        assert np.isnan(found["sizes"]).tolist() == [False, True]
    for type_ in ("i64", "bool", "str"):
        other = Tensors.parse({"age": type_})
        for pack, bad in ((other.pack, {"age": None}), (other.pack_many, {"age": [None] * n})):
            with pytest.raises(InvalidTensor, match=f"'age': expected {type_}, got a null"):
                pack(bad)
    with pytest.raises(InvalidTensor, match="finite=True"):
        replace(record, finite=True).pack_many([row] * n)


@pytest.mark.parametrize("library", ["pandas.DataFrame", "pyarrow.table", "polars.DataFrame"])
def test_columns_of_lists(library: str) -> None:
    module, make = library.split(".")
    make_table = getattr(pytest.importorskip(module, reason=f"pip install {module}"), make)
    for type_ in ("f64[2]", "f64[*]"):
        tensors = Tensors.parse({"x": type_})
        packed = tensors.pack_many(make_table({"x": [[1.0, 2.0], [3.0, 4.0]]}))
        found = tensors.unpack_many(packed)["x"]
        assert [row.tolist() for row in found] == [[1, 2], [3, 4]]


def test_missing_values_of_data_frames() -> None:
    pandas = pytest.importorskip("pandas", reason="pip install pandas")
    record = Tensors.parse({"age": "f64", "city": "str"})
    ages = [31, None, 4]
    tables: list[Any] = [
        pandas.DataFrame({"age": pandas.array(ages, dtype=type_), "city": ["a", "b", "c"]})
        for type_ in ("Int64", "Float64", "float64", "object")
    ]
    with contextlib.suppress(ImportError):
        arrow = importlib.import_module("pyarrow")
        tables.append(arrow.table({"age": ages, "city": ["a", "b", "c"]}))
    with contextlib.suppress(ImportError):
        polars = importlib.import_module("polars")
        tables.append(polars.DataFrame({"age": ages, "city": ["a", "b", "c"]}))
    for table in tables:
        found = record.unpack_many(record.pack_many(table))
        np.testing.assert_array_equal(found["age"], [31, np.nan, 4])
        with pytest.raises(InvalidTensor, match="tensor 'age': expected i64, got a null"):
            Tensors.parse({"age": "i64", "city": "str"}).pack_many(table)
