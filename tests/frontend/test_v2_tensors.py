"""Named tensors in the Open Inference Protocol: JSON, binary data and protobuf give the same rows,
and errors have the same words."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clipper.errors import BadOutput, InvalidInput
from clipper.frontend.http.messages import to_json
from clipper.frontend.inference import codec
from clipper.frontend.inference.json_inputs import rows_in_columns, tensors_reader
from clipper.schema import FREE, Tensors, TensorSpec
from clipper.types import InputType

protobuf_codec = pytest.importorskip(
    "clipper.frontend.inference.protobuf_codec", reason="pip install 'clipper-serving[grpc]'"
)
from google.protobuf.json_format import ParseDict  # noqa: E402

from clipper.frontend.protocols import message  # noqa: E402

Named = dict[str, Any]
RESPONSE = message("inference.ModelInferResponse")
ENCODER = Tensors.parse({"ids": "i64[*]", "mask": "i64[*]"})
RECORD = Tensors.parse({"age": "f64", "city": "str"})


def as_json(columns: Named, tensors: Tensors) -> codec.InferRequest:
    """Return a request with its tensors in the JSON."""
    inputs = [
        {
            "name": name,
            "datatype": codec.datatype_of(tensors.by_name[name]),
            "shape": list(np.shape(column)),
            "data": [
                value.decode() if isinstance(value, bytes) else value
                for value in np.asarray(column).ravel().tolist()
            ],
        }
        for name, column in columns.items()
    ]
    return codec.decode(json.dumps({"inputs": inputs}).encode())


def binary_of(column: Any) -> bytes:
    column = np.asarray(column)
    return codec.to_binary(column.ravel().tolist() if column.dtype == object else column)


def as_binary(columns: Named, tensors: Tensors) -> codec.InferRequest:
    """Return a request with its tensors behind the JSON."""
    data = [binary_of(column) for column in columns.values()]
    inputs = [
        {
            "name": name,
            "datatype": codec.datatype_of(tensors.by_name[name]),
            "shape": list(np.shape(column)),
            "parameters": {"binary_data_size": len(part)},
        }
        for (name, column), part in zip(columns.items(), data, strict=True)
    ]
    head = json.dumps({"inputs": inputs}).encode()
    return codec.decode(head + b"".join(data), b"%d" % len(head))


def as_protobuf(columns: Named, tensors: Tensors, raw: bool = True) -> codec.InferRequest:
    """Return a request as gRPC carries it, raw or typed."""
    request = message("inference.ModelInferRequest")()
    for name, column in columns.items():
        datatype = codec.datatype_of(tensors.by_name[name])
        one = request.inputs.add(name=name, datatype=datatype, shape=np.shape(column))
        if raw:
            request.raw_input_contents.append(binary_of(column))
            continue
        values = np.asarray(column).ravel().tolist()
        field = getattr(one.contents, protobuf_codec.FIELDS[datatype])
        field.extend(v.encode() if isinstance(v, str) else v for v in values)
    return protobuf_codec.decode(protobuf_codec.read(request.SerializeToString()))


@st.composite
def requests(draw: Any) -> tuple[Tensors, Named, int]:
    """Draw a schema, and columns of 1 to 5 rows that fit it."""
    n = draw(st.integers(1, 5))
    specs, columns = [], {}
    names = draw(
        st.lists(st.text("abc _é", min_size=1, max_size=6), min_size=1, max_size=4, unique=True)
    )
    for name in names:
        dtype = draw(
            st.sampled_from(["bool", "u8", "i16", "i64", "u64", "f32", "f64", "str", "bytes"])
        )
        sizes = draw(st.lists(st.integers(1, 3), max_size=3))
        shape = tuple(FREE if draw(st.booleans()) else size for size in sizes)
        spec = TensorSpec(name, dtype, shape)
        if spec.is_text:
            column = np.empty((n, *sizes), object)
            flat = [draw(st.text("aé\0", max_size=3)) for _ in range(column.size)]
            column.ravel()[:] = flat if dtype == "str" else [text.encode() for text in flat]
        else:
            seed = draw(st.integers(0, 2**32))
            column = np.random.default_rng(seed).integers(0, 2, (n, *sizes)).astype(spec.numpy)
        specs.append(spec)
        columns[name] = column
    return Tensors.of(specs), columns, n


@given(requests())
def test_every_encoding_gives_the_same_rows(drawn: tuple[Tensors, Named, int]) -> None:
    tensors, columns, n = drawn
    encoders = [as_json, as_binary, as_protobuf, lambda c, t: as_protobuf(c, t, raw=False)]
    for encode in encoders:
        if encode is as_json and any(spec.dtype == "bytes" for spec in tensors.specs):
            continue  # bytes that are no text have no JSON
        rows, found = codec.columns_of(encode(columns, tensors), tensors)
        assert rows == n
        for name, column in columns.items():
            np.testing.assert_array_equal(np.asarray(found[name]), column)


@given(requests())
def test_responses_are_the_outputs(drawn: tuple[Tensors, Named, int]) -> None:
    _, outputs, n = drawn
    rows = [{name: column[i] for name, column in outputs.items()} for i in range(n)]
    for given_ in (outputs, rows):
        texts, size = codec.encode("m", "1", "", given_, True, {})
        body = b"".join(texts)
        at = size
        for one in json.loads(body[:size])["outputs"]:
            end = at + one["parameters"]["binary_data_size"]
            wanted = outputs[one["name"]]
            assert one["shape"] == list(wanted.shape)
            values = codec.from_binary("", one["datatype"], wanted.shape, memoryview(body[at:end]))
            if one["datatype"] == "BYTES":
                wanted = [v if isinstance(v, bytes) else v.encode() for v in wanted.ravel()]
            np.testing.assert_array_equal(values, wanted)
            at = end
        response = RESPONSE.FromString(protobuf_codec.encode("m", "1", "", given_, {}))
        assert [one.name for one in response.outputs] == [*outputs]
        assert body[size:] == b"".join(response.raw_output_contents)


@given(requests())
def test_rest_reads_the_same_rows(drawn: tuple[Tensors, Named, int]) -> None:
    tensors, columns, n = drawn
    rows = [{name: column[i] for name, column in columns.items()} for i in range(n)]
    read = tensors_reader(tensors)
    many = rows_in_columns(to_json(columns), "$.inputs", tensors)
    for row, other in zip(rows, many, strict=True):
        for found in (read(to_json(row), "$.input"), other):
            assert found.keys() == row.keys()
            for name, value in row.items():
                wanted = np.asarray(value, tensors.by_name[name].numpy)
                assert found[name].shape == wanted.shape
                assert found[name].tolist() == wanted.tolist()


WRONG_JSON: dict[str, tuple[str, str]] = {
    "text for a number": ('{"age": "31", "city": "Bern"}', "tensor 'age': expected f64, got a str"),
    "null": ('{"age": 31, "city": null}', "tensor 'city': expected str, got a null"),
    "a list for a scalar": ('{"age": [1], "city": "Bern"}', "tensor 'age': expected f64"),
    "a number for a text": ('{"age": 31, "city": 3}', "tensor 'city': expected str, got a int"),
    "missing": ('{"age": 31}', "tensor 'city' is missing"),
    "unknown": ('{"age": 31, "city": "a", "zip": 3}', "unknown tensor 'zip'"),
    "no object": ("[31, 1]", "Expected `object`, got `array` - at `$.input`"),
    "a half": ('{"age": 31, "city": ', "truncated"),
}


@pytest.mark.parametrize("name", WRONG_JSON)
def test_what_is_wrong_in_json_names_the_tensor(name: str) -> None:
    text, words = WRONG_JSON[name]
    with pytest.raises(InvalidInput) as raised:
        tensors_reader(RECORD)(text.encode(), "$.input")
    assert words in str(raised.value)


@pytest.mark.parametrize("data", ["[1, null, 2.5, 3]", "[[1, null], [2.5, 3]]"])
def test_a_null_is_nan_in_floats(data: str) -> None:
    def request_of(datatype: str) -> codec.InferRequest:
        tensor = f'{{"name": "x", "shape": [2, 2], "datatype": "{datatype}", "data": {data}}}'
        return codec.decode(f'{{"inputs": [{tensor}]}}'.encode())

    for datatype, type_ in (("FP16", "f16"), ("FP32", "f32"), ("FP64", "f64")):
        columns = codec.columns_of(request_of(datatype), Tensors.parse({"x": f"{type_}[2]"}))[1]
        np.testing.assert_array_equal(columns["x"], [[1, np.nan], [2.5, 3]])
        rows = codec.rows_of(request_of(datatype), InputType.parse(f"{type_}[2]"))
        np.testing.assert_array_equal(rows, [[1, np.nan], [2.5, 3]])
        with pytest.raises(InvalidInput, match=r"\$\.inputs\[0\]\.data"):
            codec.rows_of(request_of(datatype), InputType.parse("i64[2]"))
    for datatype in ("INT64", "UINT8", "BOOL", "BYTES"):
        with pytest.raises(InvalidInput, match=r"\$\.inputs\[0\]\.data"):
            request_of(datatype)


def test_whole_floats_are_integers_where_the_tensor_has_these() -> None:
    read = tensors_reader(Tensors.parse({"ids": "i64[*]", "n": "u8"}))
    found = read(b'{"ids": [1.0, 2], "n": 3.0}', "$.input")
    assert found["ids"].tolist() == [1, 2]
    assert found["ids"].dtype == np.int64
    with pytest.raises(InvalidInput, match="tensor 'n': expected u8"):
        read(b'{"ids": [], "n": 300}', "$.input")
    with pytest.raises(InvalidInput, match=r"tensor 'ids': expected i64\[\*\]"):
        read(b'{"ids": [1.5], "n": 3}', "$.input")


def test_some_outputs_only() -> None:
    outputs = {"a": np.ones((2, 3)), "b": ["x", "y"], "c": np.zeros(2)}
    wanted = [
        codec.RequestedOutput("b", {"binary_data": False}),
        codec.RequestedOutput("a", {"binary_data": True}),
    ]
    texts, size = codec.encode("m", "", "", outputs, False, {}, wanted)
    body = b"".join(texts)
    first, second = json.loads(body[:size])["outputs"]
    assert (first["name"], first["data"]) == ("b", ["x", "y"])
    assert (second["name"], second["parameters"]) == ("a", {"binary_data_size": 48})
    assert body[size:] == np.ones((2, 3)).tobytes()
    response = RESPONSE.FromString(protobuf_codec.encode("m", "", "", outputs, {}, wanted))
    assert [one.name for one in response.outputs] == ["b", "a"]
    with pytest.raises(InvalidInput, match="no output 'd': they are named 'a', 'b', 'c'"):
        codec.encode("m", "", "", outputs, False, {}, [codec.RequestedOutput("d")])


def test_one_row_may_omit_the_rows_and_a_scalar_may_have_a_dimension() -> None:
    one = {"ids": np.arange(4), "mask": np.ones(4, int)}
    n, columns = codec.columns_of(as_binary(one, ENCODER), ENCODER)
    assert (n, columns["ids"].shape) == (1, (1, 4))
    triton = {"age": np.array([[31.0], [40.0]]), "city": np.array([["Bern"], ["Ulm"]], object)}
    for encode in (as_json, as_binary, as_protobuf):
        n, columns = codec.columns_of(encode(triton, RECORD), RECORD)
        assert n == 2
        assert columns["age"].tolist() == [31, 40]
        assert [*columns["city"]] == ["Bern", "Ulm"]


WRONG: dict[str, tuple[Tensors, Named, str]] = {
    "missing": (ENCODER, {"ids": np.ones((1, 3), int)}, "tensor 'mask' is missing"),
    "of another number of rows": (
        ENCODER,
        {"ids": np.ones((2, 3), int), "mask": np.ones((1, 3), int)},
        "tensor 'mask' has 1 rows, and 'ids' has 2",
    ),
    "of another rank": (
        ENCODER,
        {"ids": np.ones((2, 3), int), "mask": np.ones((2, 3, 1), int)},
        "tensor 'mask': expected rows of i64[*], got shape [2, 3, 1]",
    ),
    "without rows": (
        ENCODER,
        {"ids": np.ones((0, 3), int), "mask": np.ones((0, 3), int)},
        "tensor 'ids' holds no rows",
    ),
}


@pytest.mark.parametrize("encode", [as_json, as_binary, as_protobuf])
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_names_the_tensor(name: str, encode: Any) -> None:
    tensors, columns, words = WRONG[name]
    with pytest.raises(InvalidInput) as raised:
        codec.columns_of(encode(columns, tensors), tensors)
    assert words in str(raised.value)


@pytest.mark.parametrize("encode", [as_json, as_binary, as_protobuf])
def test_another_type_or_name_is_refused(encode: Any) -> None:
    other = Tensors.parse({"ids": "f64[*]", "maks": "i64[*]"})
    columns = {"ids": np.ones((1, 3)), "maks": np.ones((1, 3), int)}
    with pytest.raises(InvalidInput, match="unknown tensor 'maks' - did you mean 'mask'"):
        codec.columns_of(encode(columns, other), ENCODER)
    other = Tensors.parse({"ids": "f64[*]", "mask": "i64[*]"})
    columns = {"ids": np.ones((1, 3)), "mask": np.ones((1, 3), int)}
    with pytest.raises(InvalidInput, match=r"tensor 'ids': expected i64\[\*\], got f64"):
        codec.columns_of(encode(columns, other), ENCODER)
    other = Tensors.parse({"age": "str", "city": "f64"})
    columns = {"age": np.array(["a"], object), "city": np.ones(1)}
    with pytest.raises(InvalidInput, match=r"tensor 'age': expected f64, got BYTES\[1\]"):
        codec.columns_of(encode(columns, other), RECORD)


def test_a_tensor_given_twice_is_refused() -> None:
    one = {"name": "ids", "datatype": "INT64", "shape": [1], "data": [1]}
    encoders = codec.decode(json.dumps({"inputs": [one, one]}).encode())
    with pytest.raises(InvalidInput, match="tensor 'ids' is given twice"):
        codec.columns_of(encoders, ENCODER)


def test_rows_of_different_outputs_are_no_tensors() -> None:
    with pytest.raises(BadOutput, match="different outputs"):
        codec.encode("m", "", "", [{"a": 1}, {"b": 1}], False, {})
    with pytest.raises(BadOutput, match="the outputs 'a' differ in shape"):
        codec.encode("m", "", "", [{"a": np.ones(1)}, {"a": np.ones(2)}], False, {})


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"inputs": [{}] * 65}, "up to 64 inputs: 65"),
        ({"outputs": [{}] * 65}, "up to 64 outputs: 65"),
        ({"parameters": {str(i): {} for i in range(1025)}}, "1025 parameters: up to 1024"),
    ],
)
def test_what_a_request_repeats_is_bounded(fields: Named, reason: str) -> None:
    """Millions of empty messages fit into one request, and each costs the loop microseconds."""
    made = ParseDict(fields, message("inference.ModelInferRequest")())
    with pytest.raises(InvalidInput, match=reason):
        protobuf_codec.decode(protobuf_codec.read(made.SerializeToString()))


def test_of_a_shape_no_more_is_read_than_is_possible() -> None:
    dims = iter(range(1, 1000))
    with pytest.raises(InvalidInput, match="cannot have the shape"):
        codec.checked_shape("x", "BOOL", dims, {})
    assert next(dims) == 10


# -- columns of the DataFrame that a model was fitted on


def of_columns(**columns: Any) -> codec.InferRequest:
    types = {np.dtype("f8"): "FP64", np.dtype("i8"): "INT64", np.dtype("f4"): "FP32"}
    inputs = [
        {
            "name": name,
            "datatype": types.get(np.asarray(column).dtype, "BYTES"),
            "shape": list(np.shape(column)),
            "data": np.asarray(column).ravel().tolist(),
        }
        for name, column in columns.items()
    ]
    return codec.decode(json.dumps({"inputs": inputs}).encode())


def test_columns_are_put_in_the_order_of_the_model() -> None:
    request = of_columns(b=[1, 2], a=[[0.5], [1.5]], c=np.array([3, 4], np.float32))
    rows = codec.rows_of_columns(request, ("a", "b", "c"))
    assert rows.tolist() == [[0.5, 1, 3], [1.5, 2, 4]]
    assert rows.dtype == np.float64


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({"a": [1, 2], "b": [1, 2, 3]}, r"different numbers of rows: 'a' has 2, 'b' has 3"),
        ({"a": [1, 2], "b": ["x", "y"]}, r"'b' is a column of numbers, \[n\]; got BYTES\[2\]"),
        ({"a": [[1, 2], [3, 4]], "b": [1, 2]}, r"'a' is a column of numbers, \[n\]; got INT64"),
    ],
)
def test_columns_that_make_no_rows(columns: Named, why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        codec.rows_of_columns(of_columns(**columns), ("a", "b"))
