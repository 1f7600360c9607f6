"""Outputs of a model of every form: row i of the reply is the output for row i, or there is an
error."""

import collections

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clipper_container import Scored
from clipper_container.model import FunctionModel, as_model
from clipper_container.wire.frames import (
    DTYPE_OF,
    DType,
    Kind,
    encode_rows,
    open_rows,
    row_values,
    unpack_map,
)
from clipper_container.worker.evaluation import Evaluator, PredictionFailed, user_traceback
from clipper_container.worker.outputs import InvalidOutput, WrongCount, to_parts, to_rows


def back(rows):
    """Encode `rows`, decode them, and return them as a model would get them."""
    header, pieces = encode_rows(Kind.REPLY, rows)
    payload = np.frombuffer(b"".join(bytes(piece) for piece in pieces), np.uint8)
    assert header.payload_bytes == payload.size
    return row_values(open_rows(header, payload))


@pytest.mark.parametrize("kind", [*DTYPE_OF], ids=str)
@pytest.mark.parametrize("shape", [(4,), (4, 3), (4, 2, 3), (4, 1, 2, 1, 2)])
def test_arrays_keep_type_and_shape(kind, shape):
    array = (np.arange(np.prod(shape)).reshape(shape) % 2).astype(kind)
    for given_array in (
        array,
        np.asfortranarray(array),
        array.astype(kind.newbyteorder(">")),
        array[::-1][::-1],
    ):
        got = back(to_rows(given_array, 4, "m"))
        assert got.dtype == kind
        np.testing.assert_array_equal(got, array)


@pytest.mark.parametrize(
    ("returned", "dtype", "expected"),
    [
        ([1, 2], DType.I64, [1, 2]),
        ((1.5, 2), DType.F64, [1.5, 2.0]),
        ([True, False], DType.BOOL, [True, False]),
        ([np.float32(1), np.float32(2)], DType.F32, [1, 2]),
        ([2**63, 1], DType.U64, [2**63, 1]),
        ((x for x in (1, 2)), DType.I64, [1, 2]),
        (np.array([1, 2], object), DType.I64, [1, 2]),
        (["a", "ü"], DType.STR, ["a", "ü"]),
        (np.array(["a", "bc"]), DType.STR, ["a", "bc"]),
        (np.array(["a", None], object)[:1].repeat(2), DType.STR, ["a", "a"]),
        ([b"a", bytearray(b"bc")], DType.BYTES, [b"a", b"bc"]),
        (np.array([b"a", b"bc"]), DType.BYTES, [b"a", b"bc"]),
        ([[1, 2], [3, 4]], DType.I64, [[1, 2], [3, 4]]),
        ([[1.0, 2.0], [3.5]], DType.F64, [[1, 2], [3.5]]),
        ([1, 2.5], DType.F64, [1, 2.5]),
        ([[], [1]], DType.I64, [[], [1]]),
        ([np.ones(2, np.float32), np.ones(1, np.float32)], DType.F32, [[1, 1], [1]]),
        (np.empty((2, 0), np.float32), DType.F32, [[], []]),
        ([[], []], DType.F64, [[], []]),
    ],
)
def test_lists(returned, dtype, expected):
    rows = to_rows(returned, 2, "m")
    assert rows.dtype == dtype
    got = back(rows)
    assert [
        x if isinstance(x, str) else bytes(x) if dtype == DType.BYTES else x.tolist() for x in got
    ] == expected


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (7.0, "returned 1 value. predict() takes a list/array"),
        (np.float64(7), "returned 1 value"),
        (np.array(7), "returned 1 value"),
        ("ab", "returned 1 value"),
        (None, "returned None"),
        ([1], "got a batch of 2 and returned 1 value"),
        ([], "returned 0 values"),
        (np.ones((3, 2)), "returned 3 values"),
        ({"a": 1}, "returned a dict"),
        (object(), "returned a object"),
        (["a", 1], "outputs of several kinds"),
        ([1, "a"], "outputs of several kinds"),
        ([b"a", None], "returned for row 1 None"),
        ([None, None], "returned for row 0 None"),
        ([1, None], "returned for row 1 None"),
        ([2**64, 1], "do not fit in 64 bits"),
        (["a\ud800", "b"], "not valid Unicode"),
        (np.ma.masked_array([1, 2], [0, 1]), "a masked array that hides values"),
        ((np.ones(2), np.zeros(2)), "returned 2 arrays, such as labels and scores"),
        (([1, 2], [0.5, 0.5]), "returned 2 arrays"),
        ([np.ones(2, int), np.zeros(2)], "returned 2 arrays"),
        ([np.ones(2), np.zeros(2), np.ones(2)], "returned 3 arrays"),
        (np.ones(2, complex), "returned dtype complex128"),
        (np.array(["2020-01-01"] * 2, "M8[D]"), "returned dtype datetime64[D]"),
        (np.ones((2, 1, 1, 1, 1, 1)), "at most 4 dimensions"),
        (np.empty((2, 3, 0)), "without elements"),
        (np.array([["a"], ["b"]]), "returned strings of shape (2, 1)"),
        ([np.ones((2, 2)), np.ones(3)], "outputs of several kinds"),
        ([[[1], [2, 3]], [[1]]], "ragged nested list"),
        ([{"a": 1}, {}], "returned for row 0 a dict"),
        (Scored([1, 2], [0.5]), "confidence of shape (1,)"),
        (Scored([1, 2], "high"), "confidence that is not an array"),
        (Scored([1], [0.5]), "returned 1 value"),
    ],
)
def test_invalid_predictions_are_reported(returned, text):
    with pytest.raises(InvalidOutput) as caught:
        to_rows(returned, 2, "m")
    assert text in str(caught.value)
    assert "'m'" in str(caught.value)


def test_the_message_for_a_wrong_count():
    assert (
        str(WrongCount("svm", 8, "1 value"))
        == "model 'svm' got a batch of 8 and returned 1 value. predict() takes a list/array of"
        " inputs and returns one output per input. For a function of one input, deploy it with"
        " row_by_row=True."
    )


def test_things_that_know_how_to_become_an_array():
    class Series:
        def to_numpy(self):
            return np.array([1.0, 2.0])

    class Tensor:
        def detach(self):
            return self

        cpu = detach

        def numpy(self):
            return np.array([[1], [2]], np.int32)

    assert back(to_rows(Series(), 2, "m")).tolist() == [1.0, 2.0]
    assert back(to_rows(Tensor(), 2, "m")).tolist() == [[1], [2]]
    assert back(to_rows(collections.deque([1, 2]), 2, "m")).tolist() == [1, 2]


def test_bools_of_other_bytes_and_masked_floats_become_plain():
    odd = np.array([0, 2, 255], np.uint8).view(bool)
    assert back(to_rows(odd, 3, "m")).view(np.uint8).tolist() == [0, 1, 1]
    assert back(to_rows([odd, odd[:1]], 2, "m"))[0].view(np.uint8).tolist() == [0, 1, 1]
    masked = np.ma.masked_array([1.0, 2.0], [False, True])
    np.testing.assert_array_equal(back(to_rows(masked, 2, "m")), [1.0, np.nan])
    np.testing.assert_array_equal(back(to_rows([masked, masked], 2, "m"))[1], [1.0, np.nan])


def test_bfloat16_of_a_plain_function_becomes_f32():
    torch = pytest.importorskip("torch")
    rows = to_rows(torch.tensor([1.0, 2.5], dtype=torch.bfloat16), 2, "m")
    assert rows.dtype == DType.F32
    assert rows.data.tolist() == [1.0, 2.5]


OUTPUTS = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.sampled_from([np.float32(0.1), np.int8(-3), np.uint64(2**63), np.bool_(True)]),
    st.lists(st.integers(-5, 5), max_size=3),
    st.lists(st.floats(), max_size=3),
    st.sampled_from([np.ones((2, 2)), np.ones((1, 2), np.int32), np.zeros(2, np.float16)]),
)


def answers(parts):
    """Return what each row of the parts of a reply is read as."""
    return [row for part in parts for row in back(part)]


@given(st.lists(OUTPUTS, min_size=1, max_size=7))
def test_an_output_does_not_depend_on_the_others_of_its_batch(outputs):
    if len(outputs) > 1 and all(isinstance(each, np.ndarray) for each in outputs):
        return  # they could be columns
    together = answers(to_parts(outputs, len(outputs), "m"))
    alone = [answers(to_parts([each], 1, "m"))[0] for each in outputs]
    for one, other in zip(together, alone, strict=True):
        if isinstance(one, (str, memoryview)):
            assert one == other
        else:
            np.testing.assert_array_equal(one, other)
            assert (
                np.asarray(one).dtype.kind in "iu"
                or np.asarray(one).size == 0
                or (np.asarray(one).dtype == np.asarray(other).dtype)
            )


def test_whole_numbers_become_the_declared_type():
    evaluator = Evaluator(FunctionModel(lambda rows: [1, 0.5]), "m", output=np.dtype(np.float64))
    parts, _ = evaluator.run(np.ones(2), 2)
    assert {part.dtype for part in parts} == {DType.F64}
    assert answers(parts) == [1.0, 0.5]


@given(st.lists(st.lists(st.floats(width=32), max_size=4), min_size=1, max_size=8))
def test_ragged_rows_come_back_in_their_order(rows):
    got = back(to_rows([np.array(row, np.float32) for row in rows], len(rows), "m"))
    for mine, theirs in zip(rows, got, strict=True):
        np.testing.assert_array_equal(np.array(mine, np.float32), theirs)


KINDS = {
    "number": (lambda x: float(x), lambda x: x),
    "vector": (lambda x: [x, x], lambda x: x.tolist()),
    "ragged": (lambda x: np.arange(x + 1), lambda x: x.tolist()),
    "str": (lambda x: "ü" * x, lambda x: x),
    "bytes": (lambda x: bytes([x]) * x, bytes),
}
EMPTY = {"number": 0.0, "vector": [0, 0], "ragged": [], "str": "", "bytes": b""}


@given(
    st.lists(st.booleans(), min_size=2, max_size=9),
    st.booleans(),
    st.sampled_from([*KINDS]),
    st.booleans(),
)
def test_only_bad_rows_are_marked(bad, row_by_row, kind, scored):
    make, read = KINDS[kind]

    def one(x):
        if bad[x]:
            raise ValueError(f"row {x} is bad")
        return Scored(make(x), x / 8) if scored else make(x)

    def batch(xs):
        made = [one(int(x)) for x in xs]
        return Scored([m.outputs for m in made], [m.confidence for m in made]) if scored else made

    evaluator = Evaluator(
        FunctionModel(one if row_by_row else batch), "m", retry_singly=True, row_by_row=row_by_row
    )
    inputs, n = np.arange(len(bad)), len(bad)
    if all(bad):
        with pytest.raises(PredictionFailed, match="row 0 is bad"):
            evaluator.run(inputs, n)
        return
    (rows,), _ = evaluator.run(inputs, n)
    assert (rows.status is None and not any(bad)) or rows.status.tolist() == bad
    good = [x for x in range(n) if not bad[x]]
    got = [value.item() if kind == "number" else read(value) for value in back(rows)]
    # Ragged rows that happen to be of one length are sent as rows of one shape, and a failed one as
    # zeros.
    for x in range(n):
        if not bad[x]:
            expected = np.asarray(make(x)).tolist() if kind in ("vector", "ragged") else make(x)
            assert got[x] == expected
        elif kind != "ragged":
            assert got[x] == EMPTY[kind]
    assert all(f"row {x}: " in rows.text for x in range(n) if bad[x])
    if scored:
        assert rows.confidence[good].tolist() == [x / 8 for x in good]


@given(st.integers(1, 20), st.integers(1, 8))
def test_padding_repeats_the_last_row_and_its_outputs_are_dropped(n, pad):
    seen = []

    def predict(inputs):
        seen.append(list(inputs))
        return [f"{x}" for x in inputs]

    (rows,), _ = Evaluator(FunctionModel(predict), "m", pad=pad).run(np.arange(n), n)
    assert back(rows) == [f"{x}" for x in range(n)]
    assert len(seen[0]) % pad == 0
    assert seen[0] == [min(i, n - 1) for i in range(len(seen[0]))]


def test_tracebacks_end_with_the_error_and_are_bounded():
    def predict(inputs):
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise ValueError("x" * 100_000 + "end") from error

    with pytest.raises(PredictionFailed) as caught:
        Evaluator(FunctionModel(predict), "m").run(np.ones(1), 1)
    text = str(caught.value)
    assert len(text.encode()) <= 16 << 10
    assert text.endswith("end")
    try:
        Evaluator(FunctionModel(lambda x: 1 / 0), "m")._whole(np.ones(1), 1)
    except ZeroDivisionError as error:
        text = user_traceback(error)
    assert "evaluate.py" not in text
    assert "test_outputs.py" in text


def with_note():
    error = ValueError("first")
    error.add_note("a note")
    return error


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("first\nsecond\nthird"), "ValueError: first"),
        (ValueError("\n  first\nsecond\n"), "ValueError: first"),
        (ValueError("first:\nsecond"), "ValueError: first: second"),
        (ValueError("x" * 5000 + "\nsecond"), f"ValueError: {'x' * 1988}"),
        (ExceptionGroup("first", [ValueError("inner")]), "ExceptionGroup: first (1 sub-exception)"),
        (SyntaxError("first", ("f.py", 1, 1, "a b\n")), "SyntaxError: first"),
        (with_note(), "ValueError: first"),
        (ValueError(""), "ValueError"),
        (KeyError("first"), "KeyError: 'first'"),
    ],
)
def test_the_last_line_of_a_traceback_is_the_first_of_the_message(error, line):
    def predict(inputs):
        raise error

    with pytest.raises(PredictionFailed) as caught:
        Evaluator(FunctionModel(predict), "m").run(np.ones(1), 1)
    lines = str(caught.value).split("\n")
    assert lines[-1] == line


def test_the_line_of_a_short_message_is_not_repeated():
    def predict(inputs):
        raise ValueError("first")

    with pytest.raises(PredictionFailed) as caught:
        Evaluator(FunctionModel(predict), "m").run(np.ones(1), 1)
    assert str(caught.value).split("\n").count("ValueError: first") == 1


def test_what_can_be_served():
    class Duck:
        batch_max = 3

        def predict_batch(self, inputs):
            return inputs

    class Estimator:
        n_features_in_ = 5

        def predict(self, inputs):
            return inputs[:, 0]

    assert as_model(Duck).batch_max == 3
    assert as_model(Duck()).predict_batch(4) == 4
    assert as_model(Estimator()).input == "f64[5]"
    assert as_model(len).predict_batch([1, 2]) == 2
    for thing in (object(), object, 5):
        with pytest.raises(TypeError):
            as_model(thing)


def test_estimators_send_labels_and_confidence():
    datasets = pytest.importorskip("sklearn.datasets")
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import LinearSVC
    from sklearn.tree import DecisionTreeClassifier

    x, y = datasets.load_iris(return_X_y=True)
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    for estimator, truth in (
        (DecisionTreeClassifier(), names),
        (make_pipeline(StandardScaler(), LogisticRegression()), y),
    ):
        estimator.fit(x, truth)
        model = as_model(estimator)
        assert model.input == "f64[4]"
        rows = to_rows(model.predict_batch(x), len(x), "m")
        np.testing.assert_array_equal(np.array(back(rows)), estimator.predict(x))
        np.testing.assert_allclose(
            rows.confidence, estimator.predict_proba(x).max(axis=1), rtol=1e-6
        )
        assert not isinstance(as_model(estimator, confidence=False).predict_batch(x), Scored)
    plain = as_model(LinearSVC(dual="auto").fit(x, y)).predict_batch(x)
    assert to_rows(plain, len(x), "m").dtype == DType.I64


# -- qualifiers


def qualifiers_of(rows):
    """Return the qualifiers of each row, sent over the wire and read again."""
    header, pieces = encode_rows(Kind.REPLY, rows)
    opened = open_rows(header, np.frombuffer(b"".join(bytes(piece) for piece in pieces), np.uint8))
    return (
        None
        if opened.qualifiers is None
        else [unpack_map(each) if each else {} for each in opened.qualifiers]
    )


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
plain = st.one_of(
    texts, st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False)
)
maps = st.dictionaries(texts, plain, max_size=4)


@given(st.lists(st.one_of(st.none(), maps), min_size=1, max_size=5), st.booleans())
def test_qualifiers_come_back(qualifiers, sure):
    confidence = [0.5] * len(qualifiers) if sure else None
    rows = to_rows(Scored(["x"] * len(qualifiers), confidence, qualifiers), len(qualifiers), "m")
    assert qualifiers_of(rows) == ([each or {} for each in qualifiers] if any(qualifiers) else None)
    assert (rows.confidence is not None) == sure
    assert back(rows) == ["x"] * len(qualifiers)


def test_numbers_of_numpy_are_numbers():
    rows = to_rows(
        Scored([1], qualifiers=[{"a": np.float32(0.5), "b": np.int64(3), "c": np.bool_(True)}]),
        1,
        "m",
    )
    assert qualifiers_of(rows) == [{"a": 0.5, "b": 3, "c": True}]


@pytest.mark.parametrize(
    ("qualifiers", "part"),
    [
        ([{}], "got a batch of 2 and returned as qualifiers 1 of them"),
        ({"a": 1}, "qualifiers a dict; return a list"),
        ([{}, 7], "qualifiers of row 1 a int; return a dict"),
        ([{}, {"a": None}], "row 1 the qualifier 'a' = None"),
        ([{"a": [1]}, {}], "row 0 the qualifier 'a' = \\[1\\]"),
        ([{1: "a"}, {}], "row 0 the qualifier 1 = 'a'"),
        ([{"a": 2**64}, {}], "row 0 cannot be sent"),
        ([{"a": "\ud800"}, {}], "row 0 cannot be sent"),
        ([{}, {"a": "x" * 1024}], "row 1 qualifiers of 1030 bytes; at most 1024"),
    ],
)
def test_qualifiers_that_are_none(qualifiers, part):
    with pytest.raises(InvalidOutput, match=part):
        to_rows(Scored([1, 2], qualifiers=qualifiers), 2, "m")


def test_qualifiers_stay_with_their_rows_whatever_way_a_batch_takes():
    def picky(inputs):
        if (inputs < 0).any():
            raise ValueError("negative")
        return Scored(inputs, qualifiers=[{"x": float(x)} if x else None for x in inputs])

    inputs = np.array([1.0, -1.0, 0.0, 2.0])
    (rows,), _ = Evaluator(FunctionModel(picky), "m", retry_singly=True).run(inputs, 4)
    assert rows.status.tolist() == [0, 1, 0, 0]
    assert qualifiers_of(rows) == [{"x": 1.0}, {}, {}, {"x": 2.0}]
    (rows,), _ = Evaluator(FunctionModel(picky), "m", pad=4).run(inputs[2:], 2)
    assert qualifiers_of(rows) == [{}, {"x": 2.0}]

    def single(row):
        return Scored(row, 0.5, {"x": float(row)}) if row else float(row)

    (rows,), _ = Evaluator(FunctionModel(single), "m", row_by_row=True).run(inputs[2:], 2)
    assert qualifiers_of(rows) == [{}, {"x": 2.0}]
    assert rows.confidence.tolist() == [0.0, 0.5]
