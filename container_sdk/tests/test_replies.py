"""Replies to batches: in parts that fit into frames, and what a model's exceptions end."""

import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clipper_container.errors import Interruption, fails_call_only
from clipper_container.model import FunctionModel, Model, Scored
from clipper_container.wire.frames import (
    HEADER_BYTES,
    Flag,
    Kind,
    Rows,
    decode_header,
    encode_rows,
    open_rows,
    row_values,
)
from clipper_container.worker.evaluation import Evaluator
from clipper_container.worker.feedback_queue import FeedbackQueue
from clipper_container.worker.outputs import to_rows
from clipper_container.worker.replies import BatchReplies
from container_sdk.tests.fake_server import join

LIMIT = 400


def batch(rows):
    header, _ = encode_rows(Kind.PREDICT, to_rows(rows, len(rows), "m"), 7)
    return header, to_rows(rows, len(rows), "m")


def read(pieces):
    """Return the headers and the rows of the frames of a reply."""
    data = np.frombuffer(b"".join(bytes(piece) for piece in pieces), np.uint8).copy()
    frames, at = [], 0
    while at < data.size:
        header = decode_header(data[at : at + HEADER_BYTES])
        end = at + HEADER_BYTES + header.payload_bytes
        payload = np.zeros(header.payload_bytes, np.uint8)
        payload[:] = data[at + HEADER_BYTES : end]
        rows = open_rows(header, payload) if header.kind == Kind.REPLY else payload.tobytes()
        frames.append((header, rows))
        at = end
    return frames


def replies(function, limit=LIMIT, **options):
    evaluator = Evaluator(FunctionModel(function), "m", **options)
    return BatchReplies(evaluator, limit, True, True, partial=True)


@given(
    st.lists(st.integers(0, 120), min_size=1, max_size=30),
    st.sampled_from(["str", "fixed", "ragged", "mixed"]),
    st.booleans(),
)
def test_outputs_beyond_a_frame_are_sent_in_parts_within_it(sizes, kind, scored):
    def one(i):
        if kind == "str" or (kind == "mixed" and i % 3 == 0):
            return "x" * sizes[i]
        if kind == "fixed":
            return np.full(7, float(i))
        return np.full(sizes[i] // 8, float(i)) if kind == "ragged" else float(i)

    def predict(rows):
        made = [one(int(i)) for i in rows]
        n = len(made)
        return Scored(made, np.arange(n) / 64, [{"i": int(i)} for i in rows]) if scored else made

    header, rows = batch(np.arange(len(sizes)))
    frames = read(replies(predict).to(header, rows))
    assert all(each.payload_bytes <= LIMIT and each.id == 7 for each, _ in frames)
    partial = [bool(each.flags & Flag.PARTIAL) for each, _ in frames]
    assert partial == [True] * (len(frames) - 1) + [False]
    values = [value for _, part in frames for value in row_values(part)]
    for i, value in enumerate(values):
        np.testing.assert_array_equal(value, one(i))
    assert len(values) == len(sizes)
    if scored:
        confidence = [value for _, part in frames for value in part.confidence]
        assert confidence == [i / 64 for i in range(len(sizes))]
        assert all(len(part.qualifiers) == part.n for _, part in frames)


def test_one_text_beyond_a_frame_fails_alone():
    header, rows = batch(np.arange(3))
    frames = read(replies(lambda rows: ["a", "x" * 1000, "b"]).to(header, rows))
    status = [
        int(each)
        for _, part in frames
        for each in (np.zeros(part.n) if part.status is None else part.status)
    ]
    assert status == [0, 1, 0]
    assert any("limits.frame_bytes_max" in part.text for _, part in frames)


def test_rows_of_one_shape_that_fit_no_frame_fail_with_what_to_do():
    header, rows = batch(np.arange(3))
    ((failure, text),) = read(replies(lambda rows: np.ones((3, 100))).to(header, rows))
    assert failure.kind == Kind.FAILURE
    assert b"limits.frame_bytes_max" in text


def test_a_server_without_partial_replies_gets_a_failure_that_names_the_setting():
    evaluator = Evaluator(FunctionModel(lambda rows: np.ones((len(rows), 7))), "m")
    header, rows = batch(np.arange(30))
    ((failure, text),) = read(BatchReplies(evaluator, LIMIT).to(header, rows))
    assert failure.kind == Kind.FAILURE
    assert b"batching.size_max" in text


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, ValueError])
@pytest.mark.parametrize("options", [{}, {"retry_singly": True}, {"row_by_row": True}])
def test_what_a_model_raises_fails_its_batch_and_not_the_process(kind, options):
    def predict(rows):
        if np.any(rows == 2):
            raise kind("a bad row")
        return rows

    header, rows = batch(np.arange(4.0))
    answers = []

    def evaluate():
        answers.append(read(replies(predict, **options).to(header, rows)))

    # only the main thread may mean a Ctrl-C
    thread = threading.Thread(target=evaluate)
    thread.start()
    join(thread)
    (frames,) = answers
    if options.get("retry_singly"):
        assert [int(each) for _, part in frames for each in part.status] == [0, 0, 1, 0]
    else:
        assert frames[0][0].kind == Kind.FAILURE
        assert b"a bad row" in frames[0][1]


class Learner(Model):
    def predict_batch(self, inputs):
        return inputs

    def correct(self, inputs, labels, sessions):
        sys.exit("no licence")

    def accuracy(self):
        raise SystemExit(3)


def test_an_exit_of_correct_is_counted(capsys):
    queue = FeedbackQueue(Learner(), "m", 1 << 20, 0.0)
    inputs = Rows(12, 2, np.ones(2), sessions=np.zeros(2, "<u8"))
    queue._waiting.append((inputs, Rows(12, 2, np.ones(2)), 0))
    queue.run_one()
    assert (queue.learned, queue.failed) == (0, 2)
    assert "no licence" in capsys.readouterr().err


def test_a_ctrl_c_and_an_interruption_end_more_than_the_call():
    assert not fails_call_only(Interruption())
    assert not fails_call_only(KeyboardInterrupt())  # on the main thread, with Python's handler
    assert fails_call_only(SystemExit())
