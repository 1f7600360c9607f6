"""Inputs and outputs of a server: every kind of row and output, confidence, and the cache
between."""

import numpy as np
import pytest

import clipper
from clipper.errors import InvalidInput, TooLarge
from clipper_container import Scored

ROW = np.arange(4.0)

# -- rows in


def test_strings(deploy):
    model = deploy(lambda xs: [x.upper() for x in xs], input="str", cache=False)
    texts = ["", "a", "grüße", "\0nul\0", "x" * 100_000, "日本", " "]
    assert model.predict_many(texts).result(60) == [text.upper() for text in texts]
    assert model.predict("grüße").result(60) == "GRÜSSE"
    with pytest.raises(InvalidInput, match="expected str, got bytes"):
        model.predict(b"bytes")


def test_bytes(deploy):
    model = deploy(lambda xs: [bytes(x)[::-1] for x in xs], input="bytes", cache=False)
    rows = [b"", b"\0\xff\0", bytes(range(256)), b"x" * 100_000]
    assert model.predict_many(rows).result(60) == [row[::-1] for row in rows]
    assert model.predict(bytearray(b"ab")).result(60) == b"ba"
    assert model.predict(memoryview(b"ab")).result(60) == b"ba"


def test_rows_that_differ_in_length(deploy):
    model = deploy(lambda xs: [float(x.sum()) for x in xs], input="f32[*]", cache=False)
    rows = [np.arange(n, dtype=np.float32) for n in (1, 5, 0, 1000)]
    assert model.predict_many(rows).result(60).tolist() == [float(row.sum()) for row in rows]


@pytest.mark.parametrize(
    "dtype", ["bool", "u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64", "f16", "f32", "f64"]
)
def test_every_element_type(deploy, dtype):
    numpy_type = (
        {"f": "float", "i": "int", "u": "uint"}.get(dtype[0], "") + dtype[1:]
        if dtype != "bool"
        else "bool"
    )
    model = deploy(
        lambda xs: [f"{x.dtype}{x.shape}{x.tolist()}" for x in xs],
        input=f"{dtype}[2,3]",
        cache=False,
    )
    row = np.array([[0, 1, 1], [1, 0, 1]], numpy_type)
    assert model.predict(row).result(60) == f"{numpy_type}(2, 3){row.tolist()}"


def test_scalars_and_lists(deploy):
    scalar = deploy(lambda xs: xs * 2, input="f64", cache=False)
    assert scalar.predict(1.5).result(60) == 3.0
    assert scalar.predict(np.float64(2)).result(60) == 4.0
    vector = deploy(lambda xs: xs.sum(axis=1), input="i32[3]", cache=False)
    assert vector.predict([1, 2, 3]).result(60) == 6
    assert vector.predict((1, 2, 3)).result(60) == 6


def test_arrays_that_are_not_contiguous_or_little_endian(deploy):
    model = deploy(lambda xs: xs.sum(axis=1), input="f64[4]", cache=False)
    assert model.predict(np.arange(8.0)[::2]).result(60) == 12.0
    assert model.predict(np.arange(4.0).astype(">f8")).result(60) == 6.0
    assert model.predict(np.arange(4, dtype=np.int32)).result(60) == 6.0
    fixed = np.arange(4.0)
    fixed.flags.writeable = False
    assert model.predict(fixed).result(60) == 6.0


def test_a_row_is_copied_at_once(deploy):
    model = deploy(lambda xs: xs.sum(axis=1), input="f64[4]", cache=False)
    row, futures = ROW.copy(), []
    for i in range(200):
        row[0] = i
        futures.append(model.predict(row))
    assert [future.result(60) for future in futures] == [6.0 + i for i in range(200)]


def test_the_type_of_the_first_row_when_none_was_given(deploy):
    model = deploy(lambda xs: xs.sum(axis=1))
    assert model.describe_input() == "any"
    assert model.predict(np.arange(3, dtype=np.float32)).result(60) == 3.0
    assert model.describe_input() == "f32[3]"
    with pytest.raises(InvalidInput, match=r"expected f32\[3\]"):
        model.predict(np.zeros(4, np.float32))


# -- outputs


def test_vectors_and_probabilities(deploy):
    model = deploy(
        lambda xs: np.stack([xs[:, 0], 1 - xs[:, 0]], axis=1), input="f64[1]", cache=False
    )
    out = model.predict([0.25]).result(60)
    assert out.tolist() == [0.25, 0.75]
    assert out.dtype == np.float64
    assert model.predict_many([[0.0], [1.0]]).result(60).tolist() == [[0, 1], [1, 0]]


def test_labels_and_ragged_outputs(deploy):
    labels = deploy(
        lambda xs: np.array(["cat", "dog"])[(xs[:, 0] > 0).astype(int)], input="f64[1]", cache=False
    )
    assert labels.predict([1.0]).result(60) == "dog"
    ragged = deploy(lambda xs: [np.arange(int(n)) for n in xs[:, 0]], input="f64[1]", cache=False)
    assert [out.tolist() for out in ragged.predict_many([[1.0], [3.0]]).result(60)] == [
        [0],
        [0, 1, 2],
    ]
    whole = deploy(lambda xs: xs[:, 0] > 0, input="f64[1]", cache=False)
    assert whole.predict([1.0]).result(60) is True


def test_confidence(deploy, app):
    model = deploy(
        lambda xs: Scored([int(x[0] * 10) for x in xs], xs[:, 0]), input="f64[1]", cache=False
    )
    future = model.predict([0.5])
    assert future.result(60) == 5
    assert future.confidence() == pytest.approx(0.5)
    handle = app(model, slo_ms=5000, default="unsure", confidence_min=0.6)
    sure, unsure = handle.predict([0.75]).result(), handle.predict([0.5]).result()
    assert (sure.output, sure.is_default, sure.confidence) == (7, False, pytest.approx(0.75))
    assert (unsure.output, unsure.is_default) == ("unsure", True)
    assert "confidence 0.50 is below" in unsure.reason


def test_output_i_belongs_to_input_i(deploy):
    model = deploy(lambda xs: xs[:, 0], input="f64[1]", cache=False)
    rows = np.random.default_rng(2).permutation(5000).astype(float)
    assert np.array_equal(model.predict_many(rows[:, None]).result(60), rows)


# -- the cache


def counting(path, seconds=0.0):
    """Evaluate rows, and write one byte to a file for each."""

    def predict(xs):
        import time

        with open(path, "ab", buffering=0) as file:
            file.write(b"." * len(xs))
        time.sleep(seconds)
        return xs.sum(axis=1)

    return predict


@pytest.fixture
def count(tmp_path):
    path = tmp_path / "evaluated"
    path.touch()
    count = path.stat
    return path, lambda: count().st_size


def test_a_hit_queries_no_model(deploy, count):
    path, evaluated = count
    model = deploy(counting(path), input="f64[4]")
    assert model.predict(ROW).result(60) == 6.0
    again = model.predict(ROW)
    assert again.done()
    assert again.result() == 6.0
    assert again.latency_us == 0
    assert evaluated() == 1


def test_identical_queries_in_the_air_cost_one_evaluation(deploy, count, server):
    path, evaluated = count
    model = deploy(counting(path, 0.1), input="f64[4]")
    futures = [model.predict(ROW) for _ in range(200)]
    assert {future.result(60) for future in futures} == {6.0}
    assert evaluated() == 1
    stats = server.stats()["models"][model.name]
    assert stats["joined"] + stats["hits"] == 199


def test_salt_separates(deploy, count):
    path, evaluated = count
    model = deploy(counting(path), input="f64[4]")
    for salt in (0, 1, 2, 1, 0):
        assert model.predict(ROW, salt=salt).result(60) == 6.0
    assert evaluated() == 3


def test_a_model_without_a_cache(deploy, count):
    path, evaluated = count
    model = deploy(counting(path), input="f64[4]", cache=False)
    for _ in range(5):
        model.predict(ROW).result(60)
    assert evaluated() == 5


def test_fetch_and_put(deploy, count, server):
    path, evaluated = count
    model = deploy(counting(path), input="f64[4]")
    server.cache.put(model.name, ROW, 99.0)
    assert server.cache.fetch(model.name, ROW).result(60) == 99.0
    assert evaluated() == 0
    assert server.cache.fetch(model.name, ROW + 1).result(60) == 10.0
    assert model.predict(ROW + 1).done()
    assert evaluated() == 1
    server.cache.put(model.name, ROW, np.arange(3), salt=5)
    assert server.cache.fetch(model.name, ROW, salt=5).result(60).tolist() == [0, 1, 2]
    assert server.cache.stats()["entries"] > 0


def test_a_new_version_does_not_see_the_old_ones_predictions(deploy, server):
    first = deploy(lambda xs: xs[:, 0] * 0 + 1, input="f64[1]", name="cached-versions")
    assert first.predict([5.0]).result(60) == 1
    second = deploy(lambda xs: xs[:, 0] * 0 + 2, input="f64[1]", name="cached-versions")
    assert second.predict([5.0]).result(60) == 2
    assert first.predict([5.0]).result(60) == 1


def test_a_late_prediction_still_fills_the_cache(deploy, count):
    path, evaluated = count
    model = deploy(counting(path, 0.15), input="f64[4]")
    with pytest.raises(TimeoutError):
        model.predict(ROW, slo_ms=30).result(60)
    assert model.predict(ROW, slo_ms=5000).result(60) == 6.0
    assert evaluated() == 1


def test_an_input_that_no_frame_can_hold(names):
    with clipper.start(heartbeat_ms=100, limits={"frame_bytes_max": 4096}) as server:
        model = server.deploy("small", lambda xs: [len(x) for x in xs], input="bytes")
        assert model.predict(b"x" * 1000).result(60) == 1000
        with pytest.raises(TooLarge):
            model.predict(b"x" * 10_000).result(60)
        assert model.predict(b"x" * 2000).result(60) == 2000


def test_near_inputs_share_a_prediction_when_configured_and_stats_have_the_error(deploy, server):
    model = deploy(
        lambda xs: xs[:, 0],
        input="f64[4]",
        similar=clipper.Similar(width=1.0, projections=8, check_share=1.0),
    )
    assert model.predict(ROW).result(60) == 0
    near = ROW + np.array([1e-9, 0, 0, 0])
    assert model.predict(near).result(60) == 0
    # answered after the check, which went before it
    assert model.predict(ROW + 500).result(60) == 500
    told = server.stats()["models"][model.name]["similar"]
    assert (told["hits"], told["checked"], told["disagreed"]) == (1, 1, 1)
    assert told["worst"] == pytest.approx(1e-9)
