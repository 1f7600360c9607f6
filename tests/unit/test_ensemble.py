"""Votes and means, against arithmetic done the long way."""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clipper.selection import Combined, Ensemble, Prediction, Query
from clipper.types import VersionedModel

MODELS = [VersionedModel(f"m{i}", 1) for i in range(8)]
POLICY = Ensemble()


def combine(
    outputs: Sequence[object], missing: int = 0, confidences: Sequence[float | None] = ()
) -> Combined:
    given_confidences = [*confidences, *[None] * (len(outputs) - len(confidences))]
    predictions = map(Prediction, outputs, given_confidences)
    arrived = dict(zip(MODELS, predictions, strict=False))
    late = MODELS[len(outputs) : len(outputs) + missing]
    return POLICY.combine(POLICY.init(MODELS), arrived, late)


def test_an_ensemble_has_an_order_of_its_own() -> None:
    for candidates in itertools.permutations(MODELS[:4]):
        state = POLICY.init(candidates)
        assert (
            POLICY.select(state, Query("u"), candidates).models
            == POLICY.rank_models_desc(state, "u")
            == tuple(MODELS[:4])
        )
    assert POLICY.select((), Query(), []).models == ()
    twice = [VersionedModel("m", None), VersionedModel("m", 2), VersionedModel("m", 2)]
    assert POLICY.select((), Query(), twice).models == tuple(twice[:2])


labels = st.one_of(
    st.integers(0, 3), st.sampled_from(["a", "b", ""]), st.sampled_from([b"x", b""]), st.booleans()
)


@given(st.lists(labels, min_size=1, max_size=6), st.integers(0, 2))
def test_votes(outputs: list[object], missing: int) -> None:
    combined = combine(outputs, missing)
    counts = Counter((type(output), output) for output in outputs)
    count = len(outputs) + missing
    assert counts[type(combined.output), combined.output] == max(counts.values())
    assert combined.confidence == (max(counts.values()) / count if count > 1 else 1.0)
    assert combined.used == tuple(MODELS[: len(outputs)])


@given(st.permutations(range(5)), st.lists(st.sampled_from([1, 2, 3]), min_size=5, max_size=5))
def test_the_order_of_arrival_never_matters(order: list[int], outputs: list[int]) -> None:
    arrived = {MODELS[i]: Prediction(outputs[i]) for i in order}
    first = combine(outputs)
    again = POLICY.combine(POLICY.init(MODELS), arrived, ())
    assert (again.output, again.confidence, again.used) == (
        first.output,
        first.confidence,
        first.used,
    )


def test_ties_go_to_the_surer_then_to_the_first_model_never_to_a_class() -> None:
    assert combine([7, 3]).output == 7
    assert combine([3, 7]).output == 3
    assert combine([7, 3], confidences=[0.2, 0.9]).output == 3
    assert combine([7, 3], confidences=[0.2]).output == 3, "unknown counts as one half"
    assert combine([7, 3], confidences=[math.nan, 0.1]).output == 3
    assert combine([7, 3, 3], confidences=[1.0, 0.0, 0.0]).output == 3, "votes come first"


def test_true_is_not_one() -> None:
    combined = combine([1, True, True])
    assert combined.output is True
    assert combined.confidence == pytest.approx(2 / 3)


def test_a_missing_prediction_lowers_the_confidence_of_a_vote() -> None:
    assert [combine(["a"] * 3, missing=n).confidence for n in range(3)] == [1.0, 0.75, 0.6]


def test_a_single_model_has_its_own_confidence() -> None:
    assert combine([5], confidences=[0.3]).confidence == 0.3
    assert combine([5]).confidence == 1.0
    assert combine([0.5], confidences=[0.3]).confidence == 0.3
    assert combine([5], missing=1, confidences=[0.3]).confidence == 0.5


finite = st.floats(-1e300, 1e300, allow_nan=False).filter(lambda x: x == 0 or abs(x) > 1e-290)


@given(st.lists(finite, min_size=2, max_size=6), st.integers(0, 2))
def test_means(outputs: list[float], missing: int) -> None:
    combined = combine(outputs, missing)
    exact = [Fraction(x) for x in outputs]
    size = max(abs(x) for x in exact)
    assert isinstance(combined.output, float)
    assert abs(Fraction(combined.output) - statistics.mean(exact)) <= size * Fraction(1, 10**12)
    m = statistics.mean(abs(x) for x in exact)
    unit = [float(x / size) for x in exact] if size else [0.0] * len(exact)
    s, m1 = statistics.pstdev(unit), float(m / size) if size else 0.0
    share = len(outputs) / (len(outputs) + missing)
    assert combined.confidence == pytest.approx(share * (m1 / (m1 + s) if m1 else 1.0), rel=1e-6)
    assert 0.0 <= combined.confidence <= 1.0


def test_the_mean_does_not_change_when_a_model_is_missing_but_its_confidence_does() -> None:
    full, late = combine([2.0, 2.0]), combine([2.0, 2.0], missing=2)
    assert (full.output, full.confidence) == (2.0, 1.0)
    assert (late.output, late.confidence) == (2.0, 0.5)


@pytest.mark.parametrize("scale", [1e-300, 1e-3, 1.0, 1e300])
def test_the_unit_does_not_matter(scale: float) -> None:
    assert combine([1.0 * scale, 3.0 * scale]).confidence == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    "dtype", [np.float16, np.float32, np.float64, np.int32, np.uint8, np.bool_]
)
@pytest.mark.parametrize("shape", [(3,), (2, 3), (1,), ()])
def test_arrays_are_averaged_by_element(dtype: type, shape: tuple[int, ...]) -> None:
    a: np.ndarray[tuple[int, ...], np.dtype[Any]] = np.ones(shape, dtype)
    b = np.zeros_like(a)
    combined = combine([a, b, a, b])
    assert combined.output.shape == shape
    assert combined.output.dtype == (dtype if np.issubdtype(dtype, np.floating) else np.float64)
    assert np.all(combined.output == 0.5)
    assert combine([a, a]).confidence == 1.0
    assert combine([b, b]).confidence == 1.0, "agreement on zero is agreement"


@given(st.lists(st.floats(), min_size=1, max_size=6))
def test_what_is_not_finite_never_enters(outputs: list[float]) -> None:
    finite_ones = [x for x in outputs if math.isfinite(x)]
    combined = combine(outputs)
    assert math.isfinite(combined.confidence)
    assert combined.used == tuple(
        m for m, x in zip(MODELS, outputs, strict=False) if math.isfinite(x)
    )
    assert not finite_ones or math.isfinite(combined.output)
    vectors = combine([np.array([1.0, x]) for x in outputs])
    assert vectors.used == combined.used


def test_nothing_arrived() -> None:
    assert combine([], missing=3).used == ()


def test_models_that_disagree_on_the_kind_of_output_do_not_break_the_answer() -> None:
    assert combine(["cat", 1.0, 3.0]).output == 2.0
    assert combine(["cat", 1.0, 3.0]).used == tuple(MODELS[1:3])
    assert combine(["cat", 1.0]).output == "cat"
    assert combine([1, 2.0]).output == 1.5, "whole numbers beside floats are numbers"
    a, b = np.array([1.0, 2.0]), np.array([1.0, 2.0, 3.0])
    assert combine([b, a, a]).output.tolist() == [1.0, 2.0]
    assert combine([b, a, a]).confidence == pytest.approx(2 / 3)
    assert combine([np.array(["x"]), np.array(["x"])]).confidence == 1.0
