"""Feedback on its way to containers: what is kept, cut into frames, bounded and counted."""

import types

import numpy as np
import pytest

import clipper_container
from clipper.selection import Observation, Plan, Prediction, Truth
from clipper.serving.feedback.online_learning import FRAME_ROWS_MAX, OnlineLearning, session_of
from clipper.types import VersionedModel
from clipper_core.wire.codec import decode_feedback

A, B = VersionedModel("a", 1), VersionedModel("b", 1)


class Engine:
    """A fake engine that keeps the feedback it should send."""

    def __init__(self):
        self.sent = []

    def send_feedback(self, conn, payload, rows):
        inputs, labels = decode_feedback(payload)
        assert inputs.n == labels.n == rows
        self.sent.append((conn, inputs, labels))

    def labels(self):
        return [rows.data.tolist() for _, _, rows in self.sent]


def hello(id=A, corrects=True, sessions=False, tables=False):
    return types.SimpleNamespace(id=id, corrects=corrects, sessions=sessions, tables=tables)


def core(dtype="f8", shape=(2,)):
    return types.SimpleNamespace(dtype=dtype and np.dtype(dtype), shape=shape, tensors=None)


def seen(label=None, score=None, answer=3, models=(A,)):
    return Observation(
        Plan(models), {model: Prediction(3, None) for model in models}, Truth(label, score), answer
    )


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def online_learning(engine):
    made = OnlineLearning(rows_max=500, bytes_max=10_000, frame_bytes_max=1 << 20)
    made.open()
    made.came(engine, 1, hello())
    yield made
    made.close()


def test_replicas_that_learn_into_tables_receive_feedback_in_turn(engine, online_learning):
    for conn in (7, 8, 9):
        online_learning.came(engine, conn, hello(B, tables=True))
    for label in range(4):
        online_learning.send({B: core()}, [1.0, 2.0], 0, seen(label, models=(B,)))
        online_learning.flush()
    assert [conn for conn, _, _ in engine.sent] == [7, 8, 9, 7]
    assert [labels for [labels] in engine.labels()] == [0, 1, 2, 3]
    for conn in (7, 8):
        online_learning.went(engine, conn, B)
    online_learning.send({B: core()}, [1.0, 2.0], 0, seen(4, models=(B,)))
    online_learning.flush()
    assert engine.sent[-1][0] == 9


def test_a_server_without_models_that_learn_is_not_active(engine):
    online_learning = OnlineLearning()
    assert not online_learning.active
    online_learning.came(engine, 1, hello(corrects=False))
    assert not online_learning.active
    online_learning.came(engine, 2, hello())
    assert online_learning.active
    online_learning.went(engine, 2, A)
    assert not online_learning.active


def test_only_models_that_answered_and_learn_receive_feedback(online_learning, engine):
    online_learning.came(engine, 2, hello())
    online_learning.send({A: core(), B: core()}, np.ones(2), 0, seen(label=1, models=(A, B)))
    online_learning.send({B: core()}, np.ones(2), 0, seen(label=2, models=(B,)))
    online_learning.flush()
    assert [conn for conn, *_ in engine.sent] == [1, 2]
    assert engine.labels() == [[1], [1]]


@pytest.mark.parametrize(
    ("truth", "labels"),
    [({"label": 7}, [[7]]), ({"score": 1.0}, [[3]]), ({"score": 0.0}, []), ({"score": 0.5}, [])],
)
def test_feedback_determines_the_right_output(online_learning, engine, truth, labels):
    online_learning.send({A: core()}, np.ones(2), 0, seen(**truth))
    online_learning.flush()
    assert engine.labels() == labels


def test_frames_are_cut_by_rows_by_bytes_and_where_labels_change(online_learning, engine):
    for i in range(FRAME_ROWS_MAX + 6):
        online_learning.send({A: core()}, np.full(2, i), i, seen(label=i))
    for label in (0.5, "a", "b", np.array([1, 2]), np.array([3, 4]), np.array([5, 6, 7])):
        online_learning.send({A: core()}, np.zeros(2), 0, seen(label=label))
    online_learning.flush()
    assert [rows.n for _, _, rows in engine.sent] == [FRAME_ROWS_MAX, 7, 2, 2, 1]
    assert np.concatenate([inputs.sessions for _, inputs, _ in engine.sent[:2]]).tolist() == [
        *range(FRAME_ROWS_MAX + 6),
        0,
    ]
    engine.sent.clear()
    for _ in range(3):
        online_learning.send({A: core(shape=(50_000,))}, np.zeros(50_000), 0, seen(label=1))
    online_learning.flush()
    assert [rows.n for _, _, rows in engine.sent] == [1, 1, 1]


@pytest.mark.parametrize(
    ("kind", "inputs"),
    [
        ((None, ()), ["snow", "Grüße"]),
        ((None, ()), [b"\0", memoryview(b"ab")]),
        (("f4", (-1,)), [[1.0], np.ones(3)]),
    ],
)
def test_every_type_of_input(online_learning, engine, kind, inputs):
    for x in inputs:
        online_learning.send({A: core(*kind)}, x, 0, seen(label=1))
    online_learning.flush()
    [(_, rows, labels)] = engine.sent
    assert rows.lengths.size == labels.n == 2


def test_what_is_too_much_is_dropped_and_counted(online_learning, engine):
    for i in range(520):
        online_learning.send({A: core()}, np.zeros(2), 0, seen(label=i))
    assert online_learning.pending(A) == 20
    online_learning.flush()
    assert sum(rows.n for _, _, rows in engine.sent) == 500


def test_what_cannot_travel_is_dropped_and_counted_and_the_rest_goes_on(
    online_learning, engine, caplog
):
    online_learning.send({A: core()}, np.zeros(2), 0, seen(label=2**70))
    online_learning.send({A: core()}, np.zeros(2), 0, seen(label="fine"))
    online_learning.flush()
    assert online_learning.pending(A) == 1
    assert "cannot be sent to model a:1" in caplog.text
    assert len(engine.sent) == 1


def test_a_row_beyond_what_a_frame_may_hold_is_dropped_and_counted(online_learning, engine, caplog):
    online_learning.send({A: core(shape=(1 << 18,))}, np.zeros(1 << 18), 0, seen(label=1))
    online_learning.send({A: core(shape=(1 << 18,))}, np.zeros(1 << 10), 0, seen(label=2))
    online_learning.flush()
    assert (online_learning.pending(A), engine.labels()) == (1, [[2]])
    assert "a frame has at most 1048576" in caplog.text


def test_inputs_are_kept_up_to_a_bound_and_given_once(online_learning, engine):
    for i in range(100):
        online_learning.keep((A,), i, np.full(2, i), i)
    online_learning.keep((B,), 100, np.zeros(2), 0)
    for i in range(101):
        online_learning.send_for({A: core()}, f"node-{i:x}", seen(label=i))
        online_learning.send_for({A: core()}, f"node-{i:x}", seen(label=i))
    online_learning.flush()
    [(_, inputs, labels)] = engine.sent
    assert labels.data.tolist() == list(range(100 - labels.n, 100))
    assert 10_000 // 240 - 1 <= labels.n <= 10_000 // 200
    assert inputs.data[:, 0].tolist() == inputs.sessions.tolist() == labels.data.tolist()


def test_sessions_where_a_model_takes_them(online_learning, engine):
    assert online_learning.session((A,), "u1", 0) == 0
    online_learning.came(engine, 7, hello(B, corrects=False, sessions=True))
    assert online_learning.session((A,), "u1", 5) == 5
    assert (
        online_learning.session((A, B), "u1", 0)
        == session_of("u1")
        == clipper_container.session_of("u1")
        != 0
    )
    assert online_learning.session((A, B), "u1", 5) not in (5, session_of("u1"))
    assert online_learning.session((A, B), None, 5) == 5
    online_learning.went(engine, 7, B)
    assert online_learning.session((A, B), "u1", 0) == 0
