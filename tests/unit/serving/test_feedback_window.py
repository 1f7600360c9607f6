"""The feedback window: valid feedback, the query that it belongs to, and its journal record."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipper.errors import InvalidInput, UnknownPrediction
from clipper.selection import Observation, Plan, Prediction, Truth, create_policy
from clipper.selection.learning.batch_learning import ObservationRows, column_of
from clipper.serving.feedback.ground_truth import label_column, truth_of, weight_of
from clipper.serving.feedback.journal_records import read, written, written_rows
from clipper.serving.feedback.states import Learner, States
from clipper.serving.feedback.window import FeedbackWindow, JoinedRows, seen_of
from clipper.store.journal import Journal
from clipper.store.memory import MemoryStore
from clipper.types import VersionedModel

A, B = VersionedModel("a", 1), VersionedModel("b", 2)


@pytest.fixture
def learner() -> Learner:
    return States(MemoryStore(), Journal(None), "n", 100, 1.0).learner(
        "app", "exp3", create_policy("exp3"), (A, B)
    )


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def fill(window: FeedbackWindow, learner: Learner, *numbers: int) -> None:
    for number in numbers:
        window.add(number, learner, "u", Plan((A,), (0.5,)), {A: Prediction(number)}, number)


def test_a_prediction_is_taken_once(learner: Learner) -> None:
    window = FeedbackWindow(10, 60, node="n")
    fill(window, learner, 1, 2)
    joined = window.take("n-1", "app")
    assert joined is not None
    assert seen_of(joined, Truth(7)).answer == 1
    assert window.take("n-1", "app") is None
    assert window.take("n-2", "app") is not None


def test_ids_of_this_server_end_in_numbers(learner: Learner) -> None:
    window = FeedbackWindow(20, 60, node="n-0")
    fill(window, learner, 1, 0x10, 2**64 - 1)
    ids = [id for id, _ in window.table.items()]
    assert ids == ["n-0-1", "n-0-10", "n-0-ffffffffffffffff"]
    unknown = ["n-0-01", "n-0-3", "n-0-g", "n-0", "", "0", "n-0-1 ", "n-1-1", "n-0-", "n-0-F"]
    for id in [*unknown, "n-0-é", "n-0-0", f"n-0-{2**64:x}", "\ud800"]:
        with pytest.raises(UnknownPrediction):
            window.take(id, "app")
    for id in reversed(ids):
        assert window.take(id, "app") is not None, id
        assert window.take(id, "app") is None, id
    window.add(1, learner, "u", Plan((A,), (0.5,)), {A: Prediction(2)}, "another")
    assert len(window) == len(ids), "it is known"
    assert window.take_many(["n-0-7", *ids], "app") == ([], [], [0])


def test_it_is_remembered_so_long_and_so_many(learner: Learner) -> None:
    clock = Clock()
    window = FeedbackWindow(3, 60, clock=clock, node="n")
    fill(window, learner, 1, 2, 3, 4)
    assert len(window) == 3
    with pytest.raises(
        UnknownPrediction, match=r"no prediction 'n-1' .* its last 3 answers, for 60 s"
    ):
        window.take("n-1", "app")
    clock.now = 61
    with pytest.raises(UnknownPrediction):
        window.take("n-4", "app")
    fill(window, learner, 5)
    assert len(window) == 1


def test_it_is_the_applications_own(learner: Learner) -> None:
    window = FeedbackWindow(3, 60, node="n")
    fill(window, learner, 1)
    with pytest.raises(UnknownPrediction, match="one of application 'app', not of 'other'"):
        window.take("n-1", "other")
    assert window.take("n-1", "app") is not None


def test_a_clock_that_jumps_loses_nothing_before_its_time(learner: Learner) -> None:
    clock = Clock()
    clock.now = 1000.0
    window = FeedbackWindow(10, 60, clock=clock, node="n")
    fill(window, learner, 1)
    clock.now = 10.0
    fill(window, learner, 2)
    assert window.take("n-1", "app") is not None
    clock.now = 69.0
    assert window.take("n-2", "app") is not None
    fill(window, learner, 3)
    clock.now = 1e9
    with pytest.raises(UnknownPrediction):
        window.take("n-3", "app")


def test_large_answers_are_bounded_by_their_bytes(learner: Learner) -> None:
    window = FeedbackWindow(1000, 60, bytes_max=100_000, node="n")
    for i in range(1, 51):
        window.add(i, learner, "", Plan((A,)), {A: Prediction(np.zeros(1000))}, "x")
    assert window.nbytes <= 100_000
    assert window.take("n-32", "app") is not None
    with pytest.raises(UnknownPrediction):
        window.take("n-1", "app")


def test_an_answer_that_was_given_without_python_is_found_by_its_id(learner: Learner) -> None:
    window = FeedbackWindow(16, 60, node="4bde13fa")
    owner = window.owner(learner, (A,))
    assert window.owner(learner, (A,)) is owner
    assert window.owner(learner, (B,)) is not owner
    window.table.add_output(0x2A, owner, 7)
    with pytest.raises(UnknownPrediction, match="one of application 'app'"):
        window.take("4bde13fa-2a", "other")
    joined = window.take("4bde13fa-2a", "app")
    assert joined is not None
    assert (joined.arrived[A].output, joined.answer, joined.plan.models) == (7, 7, (A,))
    assert window.take("4bde13fa-2a", "app") is None


class Ended:
    """A fake of the members of an array's future that a window reads."""

    def __init__(self, statuses: list[list[int]]) -> None:
        self._statuses = np.array(statuses, np.uint8)

    def statuses(self) -> np.ndarray:
        return self._statuses.reshape(-1)


def array(learner: Learner, statuses: list[list[int]]) -> JoinedRows:
    return JoinedRows(learner, "u", Plan((A, B)[: len(statuses)]), Ended(statuses), [0] * 3)  # type: ignore[arg-type]


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 5), max_size=8), max_size=8))
def test_each_row_of_an_array_counts_once(lists: list[list[int]]) -> None:
    """Row 4 has no prediction. ObservationRows in any order, several times over."""
    learner = States(MemoryStore(), Journal(None), "n", 100, 1.0).learner(
        "app", "exp4", create_policy("exp4"), (A, B)
    )
    window, counted = FeedbackWindow(10, 60), set[int]()
    window.add_rows("x", array(learner, [[1, 1, 3, 1, 3, 1], [1, 3, 1, 1, 3, 1]]))
    joined = window.rows_of("x", "app")
    for rows in lists:
        fresh, unheard = window.take_rows(joined, np.array(rows, np.intp))
        assert [rows[i] for i in fresh] == list(
            dict.fromkeys(row for row in rows if row != 4 and row not in counted)
        )
        assert unheard == rows.count(4)
        counted |= {rows[i] for i in fresh}
    assert set(np.flatnonzero(joined.has_feedback)) == counted


def test_arrays_are_remembered_so_many_rows_and_so_long(learner: Learner) -> None:
    clock = Clock()
    window = FeedbackWindow(5, 60, clock=clock)
    for id in "abc":
        window.add_rows(id, array(learner, [[1, 1]]))
    with pytest.raises(UnknownPrediction, match="no prediction 'a'"):
        window.rows_of("a", "app")
    assert window.rows_of("b", "app").user == "u"
    with pytest.raises(UnknownPrediction, match="one of application 'app', not of 'other'"):
        window.rows_of("b", "other")
    window.add_rows("large", array(learner, [[1] * 100]))
    assert len(window.rows_of("large", "app")) == 100
    clock.now = 61
    with pytest.raises(UnknownPrediction):
        window.rows_of("large", "app")


@pytest.mark.parametrize(
    ("labels", "column"),
    [
        ([1, 2], np.array([1, 2])),
        (np.array([1, 2], np.uint8), np.array([1, 2])),
        (np.array([True]), np.array([True])),
        (np.array([1, 2], np.int16), np.array([1, 2])),
        (np.array([0.5], np.float32), np.array([0.5])),
        (["a", b"b"], ["a", b"b"]),
        (np.array(["a"]), ["a"]),
        ([1, True], [1, True]),
        ([2**64 - 1], [2**64 - 1]),
        ([], []),
        ([np.int64(3), 4], [3, 4]),
    ],
)
def test_labels_as_a_column(labels: object, column: Any) -> None:
    found = label_column(labels)  # type: ignore[arg-type]
    if isinstance(column, np.ndarray):
        assert isinstance(found, np.ndarray)
        assert (found.dtype, found.tolist()) == (column.dtype, column.tolist())
    else:
        assert [(type(value), value) for value in found] == [
            (type(value), value) for value in column
        ]


@pytest.mark.parametrize(
    "labels", [[math.nan], np.array([1.0, math.inf]), [None], [object()], np.array([1j])]
)
def test_labels_that_are_none(labels: object) -> None:
    with pytest.raises(InvalidInput, match="label"):
        label_column(labels)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "this has nothing"),
        ({"label": 1, "correct": True}, "this has label and correct"),
        ({"correct": True, "score": 0.5}, "this has correct and score"),
        ({"correct": 1}, "correct=1: it is True or False"),
        ({"score": 1.5}, "score=1.5: it must lie between 0 and 1"),
        ({"score": math.nan}, "score=nan"),
        ({"score": True}, "score=True"),
        ({"score": "1"}, "score='1'"),
        ({"label": math.inf}, "label=inf: it must be finite"),
        ({"label": object()}, "a label is a number, str, bytes or an array, not object"),
        ({"label": ["a"]}, "a label of dtype <U1"),
        ({"label": [math.nan]}, "an array label holds finite numbers"),
    ],
)
def test_feedback_that_is_rejected(given: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        truth_of(**{"label": None, "correct": None, "score": None, **given})  # type: ignore[arg-type]


def test_values_of_feedback() -> None:
    assert truth_of(np.int64(3), None, None).label == 3
    assert type(truth_of(np.int64(3), None, None).label) is int
    assert truth_of(None, False, None).score == 0.0
    assert truth_of(None, None, 0.25).score == 0.25


@pytest.mark.parametrize("weight", [0, -1, math.nan, math.inf, True, "1", 1001])
def test_a_weight_that_is_none(weight: object) -> None:
    with pytest.raises(InvalidInput, match="weight="):
        weight_of(weight)  # type: ignore[arg-type]


outputs = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.booleans(),
    st.text(max_size=8),
    st.binary(max_size=8),
    st.lists(st.floats(-1, 1), max_size=4).map(np.array),
    st.lists(st.integers(0, 9), min_size=1, max_size=4).map(
        lambda xs: np.array(xs, np.int32).reshape(1, -1)
    ),
)


def same(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray):
        return (
            isinstance(other, np.ndarray)
            and one.dtype == other.dtype
            and np.array_equal(one, other)
        )
    return type(one) is type(other) and (one == other or (one != one and other != other))


@given(outputs, outputs, st.floats(0, 1), st.text(max_size=5))
def test_an_observation_is_written_and_read(a: object, label: object, p: float, user: str) -> None:
    learner = States(MemoryStore(), Journal(None), "n", 100, 1.0).learner(
        "app", "exp3", create_policy("exp3"), (B, A)
    )
    seen = Observation(
        Plan((A,), (p,)), {A: Prediction(a, 0.5), B: Prediction(1)}, Truth(label), a, 2.0
    )
    application, text, models, whose, found = read(written(learner, user, seen))
    assert (application, text, models, whose) == ("app", "exp3", (A, B), user)
    assert (found.plan.models, found.plan.probabilities, found.weight) == ((A,), (p,), 2.0)
    assert same(found.predictions[A].output, a)
    assert same(found.truth.label, label)
    assert found.predictions[B] != seen.predictions[B] or found.predictions[B].output == 1


def test_the_features_of_a_query_are_written_and_old_records_have_none(learner: Learner) -> None:
    seen = Observation(Plan((A,), (), (), (1.0, -2.5)), {A: Prediction(1)}, Truth(1), 1)
    record = written(learner, "", seen)
    assert read(record)[4].plan.features == (1.0, -2.5)
    *old, _, _ = msgspec.msgpack.decode(record)
    assert read(msgspec.msgpack.encode(old))[4].plan.features == ()


@settings(deadline=None)
@given(
    st.lists(st.tuples(outputs, outputs, outputs), min_size=1, max_size=20),
    st.integers(0, 2**20),
    st.booleans(),
)
def test_columns_are_written_and_read(
    rows: list[tuple[object, object, object]], seed: int, alone: bool
) -> None:
    learner = States(MemoryStore(), Journal(None), "n", 100, 1.0).learner(
        "app", "exp3", create_policy("exp3"), (B, A)
    )
    rng, n = np.random.default_rng(seed), len(rows)
    columns = [column_of([row[i] for row in rows]) for i in range(3)]
    arrived = rng.random(n) < 0.5
    queried, p = (
        (np.array([0], np.int32), np.array([0.3]))
        if alone
        else (rng.integers(-1, 2, n, np.int32), rng.random(n))
    )
    seen = ObservationRows(
        (A, B),
        (columns[0], columns[1]),
        (None, arrived),
        (rng.random(n), None),
        columns[2],
        queried,
        p,
    )
    ((part, record),) = written_rows(learner, "u", seen)
    application, text, models, user, found = read(record)
    assert part is seen
    assert (application, text, models, user) == ("app", "exp3", (A, B), "u")
    assert isinstance(found, ObservationRows)
    for i in range(n):
        one, other = seen.observation(i), found.observation(i)
        assert (one.plan.models, one.plan.probabilities) == (
            other.plan.models,
            other.plan.probabilities,
        )
        assert same(one.truth.label, other.truth.label)
        assert one.predictions.keys() == other.predictions.keys()
        for model, prediction in one.predictions.items():
            assert same(prediction.output, other.predictions[model].output)
            assert prediction.confidence == other.predictions[model].confidence


@pytest.mark.parametrize(
    "data",
    [b"", b"\x00", b"\x91\x01", b"garbage", bytes(50), b"\xc1", b"\xc1\x91\x01", b"\xc1" * 9],
)
def test_bytes_of_something_else_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="no record of feedback"):
        read(data)


def test_an_output_that_no_model_gives_is_not_written(learner: Learner) -> None:
    seen = Observation(Plan((A,)), {A: Prediction(object())}, Truth(1))
    with pytest.raises(TypeError, match="no feedback record holds a object"):
        written(learner, "", seen)


@pytest.mark.parametrize("label", ["x" * (1 << 20), b"x" * (1 << 20), np.zeros(1 << 17)])
def test_a_label_that_is_too_large_for_its_record_is_refused(label: object) -> None:
    with pytest.raises(InvalidInput, match="at most 524288"):
        truth_of(label, None, None)
