"""Models that are generators: the whole of their parts, and the frames of answers in parts."""

import numpy as np
import pytest

from clipper_container import Model, RowPart, Scored
from clipper_container.model import as_model
from clipper_container.wire.frames import BadFrame, Header, Kind, Rows, decode_header, open_rows
from clipper_container.worker.evaluation import Evaluator, PredictionFailed
from clipper_container.worker.outputs import InvalidOutput
from clipper_container.worker.parts import (
    PartAnswers,
    PartsModel,
    gives_parts,
    joined,
    whole_of,
    wholes_of,
)


def two(x):
    yield x
    yield x


class Batch(Model):
    """Gives two parts for each row, the last row first."""

    def predict_batch(self, inputs):
        for i in reversed(range(len(inputs))):
            yield RowPart(i, inputs[i])
        for i in range(len(inputs)):
            yield RowPart(i, inputs[i], 0.5)


class Called:
    """An object whose call is a generator."""

    def __call__(self, x):
        yield x


def test_what_is_a_generator():
    assert gives_parts(as_model(two))
    assert gives_parts(Batch())
    assert gives_parts(as_model(Called()))
    assert not gives_parts(as_model(lambda xs: xs))


@pytest.mark.parametrize(
    ("parts", "whole"),
    [
        (["a", "b"], "ab"),
        ([b"a", b"b"], b"ab"),
        ([1.0, 2.0], [1.0, 2.0]),
        ([np.zeros(2), np.ones(2)], [[0.0, 0.0], [1.0, 1.0]]),
        ([], []),
    ],
)
def test_the_whole_of_parts(parts, whole):
    np.testing.assert_equal(
        joined(parts, "any", "m") if isinstance(whole, str | bytes) else whole, whole
    )
    assert np.array_equal(joined(parts, "any", "m"), whole)


def test_an_answer_without_parts_is_empty():
    assert joined([], "str", "m") == ""
    assert joined([], "bytes", "m") == b""


@pytest.mark.parametrize("parts", [["a", 1.0], [np.zeros(1), np.zeros(2)]])
def test_parts_of_several_kinds_make_no_whole(parts):
    with pytest.raises(InvalidOutput, match="stream=True"):
        joined(parts, "any", "m")


def test_the_confidence_of_the_last_part_is_that_of_the_whole():
    whole = whole_of(iter([Scored("a", 0.1), Scored("b", 0.9)]), "str", "m")
    assert (whole.outputs, whole.confidence) == ("ab", 0.9)


def test_a_batch_generator_gives_each_row_its_parts():
    whole = wholes_of(Batch().predict_batch(["a", "b"]), 2, "str", "m")
    assert (whole.outputs, whole.confidence) == (["aa", "bb"], [0.5, 0.5])
    assert wholes_of(iter([1, 2]), 2, "any", "m") == [1, 2], "an output for each row"
    with pytest.raises(InvalidOutput, match="row 2"):
        wholes_of(iter([RowPart(2, "a")]), 2, "str", "m")
    with pytest.raises(InvalidOutput, match="int"):
        wholes_of(iter([RowPart(0, "a"), 1]), 2, "str", "m")


def test_a_batch_is_answered_with_wholes():
    rows, _ = Evaluator(as_model(two), "m", row_by_row=True).run(["a", "b"], 2)
    assert rows[0].data.tobytes() == b"aabb"
    rows, _ = Evaluator(Batch(), "m").run(["a", "b"], 2)
    assert rows[0].data.tobytes() == b"aabb"

    def fails(x):
        yield x
        raise ValueError("no")

    with pytest.raises(PredictionFailed, match="no"):
        Evaluator(as_model(fails), "m", row_by_row=True).run(["a"], 1)


def answers(model, ahead=2, row_by_row=True):
    return PartAnswers(PartsModel(as_model(model), row_by_row, None), "m", ahead, False, str)


def query(id, text="x"):
    raw = text.encode()
    rows = Rows(13, 1, np.frombuffer(raw, np.uint8).copy(), np.array([len(raw)], np.uint32))
    return Header(int(Kind.PREDICT), rows=1, id=id), rows


def read(frame):
    """Return (id, output) of a part, or (id, None, text) of an end."""
    data = b"".join(bytes(piece) for piece in frame)
    header = decode_header(data)
    payload = np.frombuffer(data[64:], np.uint8)
    if not header.rows:
        return header.id, None, payload.tobytes().decode()
    return header.id, open_rows(header, payload).data.tobytes().decode()


def test_answers_take_turns_and_wait_for_what_is_allowed():
    def three(x):
        for i in range(3):
            yield f"{x}{i}"

    given = answers(three)
    assert given.begin(*query(1, "a")) == []
    assert given.begin(*query(2, "b")) == []
    found = []
    while given.can_go_on:
        found.append(read(given.next_part()))
    assert found == [(1, "a0"), (2, "b0"), (1, "a1"), (2, "b1")]
    number = np.array([2], "<u8").view(np.uint8)
    given.allow(Header(int(Kind.PART), id=2, payload_bytes=8), number)
    assert [read(given.next_part()) for _ in range(2)] == [(2, "b2"), (2, None, "")]
    assert len(given) == 1
    given.allow(Header(int(Kind.PART), id=2, payload_bytes=8), number)  # it has ended meanwhile
    with pytest.raises(BadFrame):
        given.allow(Header(int(Kind.PART), id=1), number[:4])
    with pytest.raises(BadFrame):
        given.begin(*query(1))


def test_a_cancelled_generator_is_closed():
    closed = []

    def endless(x):
        try:
            while True:
                yield x
        finally:
            closed.append(x)

    given = answers(endless)
    for id in (1, 2, 3):
        given.begin(*query(id, str(id)))
    for _ in range(3):
        given.next_part()
    assert read(given.cancel(2)) == (2, None, "")
    assert (closed, given.cancel(2)) == (["2"], [])
    given.close()
    assert (len(given), sorted(closed)) == (0, ["1", "2", "3"])


def test_failures_end_an_answer_with_their_text():
    def fails(x):
        yield x
        raise ValueError("no")

    given = answers(fails)
    given.begin(*query(1))
    assert read(given.next_part()) == (1, "x")
    assert read(given.next_part()) == (1, None, "no")

    def wrong(x):
        yield {"a": 1}

    given = answers(wrong)
    given.begin(*query(1))
    end = read(given.next_part())
    assert end[:2] == (1, None)
    assert end[2]
    assert not given


def test_a_batch_model_answers_a_batch_of_one_row():
    given = answers(Batch(), 5, row_by_row=False)
    given.begin(*query(1))
    assert [read(given.next_part()) for _ in range(3)] == [(1, "x"), (1, "x"), (1, None, "")]
