"""Models that learn: their frames, feedback that is sent after all batches, the accuracy that they
report, and sessions of rows."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipper_core.runtime.status import Status, error_for
from clipper_core.wire.codec import (
    HEADER_BYTES,
    Kind,
    accuracy_frame,
    decode_accuracy,
    decode_feedback,
    decode_header,
    encode_feedback,
    encode_rows,
    feedback_frame,
    open_rows,
)

World = Any  # tests/core/conftest.py
LATER_MAX = 64  # container_connection.pxd
FRAMES = json.loads((Path(__file__).parents[1] / "vectors" / "frames.json").read_text())


def golden(kind: str) -> list[Any]:
    return [
        pytest.param(vector, id=vector["name"])
        for vector in FRAMES
        if vector.get("meaning", {}).get("kind") == kind
    ]


def texts(rows: Any) -> list[Any]:
    """Return the rows as the vectors write them."""
    if rows.lengths is None:
        return rows.data.tolist()  # type: ignore[no-any-return]
    ends = np.cumsum(rows.lengths)
    return [
        rows.data[end - n : end].tobytes().decode()
        for end, n in zip(ends, rows.lengths, strict=True)
    ]


@pytest.mark.parametrize("vector", golden("FEEDBACK"))
def test_golden_feedback(vector: dict[str, Any]) -> None:
    frame, meaning = bytes.fromhex(vector["hex"]), vector["meaning"]
    inputs, labels = decode_feedback(frame[HEADER_BYTES:])
    assert texts(inputs) == meaning["inputs"]["values"]
    assert texts(labels) == meaning["labels"]["values"]
    assert inputs.sessions is not None
    assert inputs.sessions.tolist() == meaning["inputs"]["sessions"]
    x, y = (texts(rows) if rows.lengths is not None else rows.data for rows in (inputs, labels))
    payload = encode_feedback(x, y, inputs.sessions)
    assert feedback_frame(payload, checked="CHECKED" in meaning["flags"]) == frame
    for end in range(len(payload)):
        with pytest.raises(type(error_for(Status.BAD_FRAME, ""))):
            decode_feedback(payload[:end])


@pytest.mark.parametrize("vector", golden("ACCURACY"))
def test_golden_accuracy(vector: dict[str, Any]) -> None:
    frame, meaning = bytes.fromhex(vector["hex"]), vector["meaning"]
    values = meaning["learned"], meaning["failed"], meaning["accuracy"]
    assert decode_accuracy(frame[HEADER_BYTES:]) == values
    assert accuracy_frame(*values, checked="CHECKED" in meaning["flags"]) == frame


def test_feedback_of_unequal_lengths_is_refused() -> None:
    with pytest.raises(
        type(error_for(Status.BAD_INPUT, "")), match="2 inputs, 1 labels and 2 sessions"
    ):
        encode_feedback(np.zeros((2, 3)), np.zeros(1), [0, 0])


# -- through the engine


def one_feedback(number: int, rows: int = 1) -> bytes:
    return encode_feedback(
        np.full((rows, 1), float(number)), np.full(rows, number), [number] * rows
    )


class FeedbackReceiver:
    """A container that learns, and the frames that the engine sends to it."""

    def __init__(self, world: World, model: Any, **attach: Any) -> None:
        self.container = world.container(model, **attach)
        self.world, self.rest = world, b""

    def frames(self) -> list[tuple[int, bytes, Any]]:
        found = []
        self.rest += self.world.engine.outgoing(self.container.conn, self.world.now_us)
        while (header := decode_header(self.rest)) is not None:
            end = HEADER_BYTES + header.payload_bytes
            payload, self.rest = self.rest[HEADER_BYTES:end], self.rest[end:]
            found.append((header.kind, payload, header))
        return found

    def all_frames(self) -> list[tuple[int, bytes, Any]]:
        """Return all frames until the engine has no more to send."""
        found: list[tuple[int, bytes, Any]] = []
        while more := self.frames():
            found += more
        return found

    def figures(self) -> Any:
        return self.world.engine.replica(self.container.conn)


def test_feedback_stands_behind_every_batch_that_waits_to_leave(world: World) -> None:
    """While one frame of feedback is being sent, nine more wait; a batch that is cut then
    overtakes all nine."""
    model = world.model("f64", (1,), cached=False)
    receiver = FeedbackReceiver(world, model)
    for number in range(10):
        world.engine.send_feedback(receiver.container.conn, one_feedback(number), 1)
    world.step()
    future = model.predict([7.0])
    world.step()
    frames = receiver.all_frames()
    assert [kind for kind, *_ in frames] == [Kind.FEEDBACK, Kind.PREDICT, *[Kind.FEEDBACK] * 9]
    order = [
        decode_feedback(payload)[1].data[0] for kind, payload, _ in frames if kind == Kind.FEEDBACK
    ]
    assert order == list(range(10))
    assert (receiver.figures()["feedback_sent"], receiver.figures()["feedback_dropped"]) == (10, 0)
    assert receiver.container.send(encode_rows(Kind.REPLY, np.ones(1), id=1))
    assert future.result(0) == 1.0


@pytest.mark.parametrize("seed", range(6))
def test_whatever_leaves_when_feedback_keeps_its_order(world: World, seed: int) -> None:
    """Rows, feedback and bytes are sent in random order: only feedback that was counted as dropped
    is missing, and every batch is answered."""
    rng = random.Random(seed)
    model = world.model("f64", (1,), cached=False)
    receiver = FeedbackReceiver(world, model)
    feedback_count, order, futures = 0, [], []

    def read(frames: list[tuple[int, bytes, Any]]) -> None:
        for kind, payload, header in frames:
            if kind == Kind.PREDICT:
                assert receiver.container.send(
                    encode_rows(Kind.REPLY, np.ones(header.rows), id=header.id)
                )
            elif kind == Kind.FEEDBACK:
                order.append(decode_feedback(payload)[1].data[0])

    for _ in range(400):
        what = rng.random()
        if what < 0.6:
            world.engine.send_feedback(receiver.container.conn, one_feedback(feedback_count), 1)
            feedback_count += 1
        elif what < 0.7:
            futures.append(model.predict([1.0]))
        else:
            read(receiver.frames())
        world.step(1)
    while frames := receiver.frames():
        read(frames)
        world.step(1)
    assert order == sorted(order)
    assert (
        len(order)
        == receiver.figures()["feedback_sent"]
        == feedback_count - receiver.figures()["feedback_dropped"]
    )
    assert [future.result(0) for future in futures] == [1.0] * len(futures)


def test_feedback_is_bounded_and_what_is_dropped_is_counted(world: World) -> None:
    receiver = FeedbackReceiver(world, world.model("f64", (1,)))
    for number in range(LATER_MAX + 30):
        world.engine.send_feedback(receiver.container.conn, one_feedback(number, rows=3), 3)
    world.step()
    assert receiver.figures()["feedback_sent"] == 3 * (LATER_MAX + 1), "one was on its way at once"
    assert receiver.figures()["feedback_dropped"] == 3 * 29
    assert len(receiver.all_frames()) == LATER_MAX + 1


def test_feedback_for_a_disconnected_container_is_dropped(world: World) -> None:
    receiver = FeedbackReceiver(world, world.model("f64", (1,)))
    for number in range(5):
        world.engine.send_feedback(receiver.container.conn, one_feedback(number), 1)
    world.step()
    receiver.container.lose()
    world.engine.send_feedback(receiver.container.conn, one_feedback(9), 1)
    world.step()
    assert receiver.figures() is None


def test_a_container_reports_its_statistics(world: World) -> None:
    receiver = FeedbackReceiver(world, world.model())
    assert receiver.figures()["accuracy"] is None
    assert receiver.container.send(accuracy_frame(64, 3, 0.875))
    figures = receiver.figures()
    assert (figures["learned"], figures["failed"], figures["accuracy"]) == (64, 3, 0.875)
    for value in (0.0, 1.0):
        assert receiver.container.send(accuracy_frame(65, 3, value))
        assert receiver.figures()["accuracy"] == value
    assert receiver.container.send(accuracy_frame(66, 3))
    assert receiver.figures()["accuracy"] is None


@pytest.mark.parametrize("value", [-1e-9, 1.0000001, float("nan"), float("inf"), -float("inf")])
def test_an_accuracy_that_is_none_closes(world: World, value: float) -> None:
    receiver = FeedbackReceiver(world, world.model())
    assert not receiver.container.send(accuracy_frame(1, 0, value))


def test_an_unknown_peer_reports_no_accuracy_and_a_container_sends_no_feedback(
    world: World,
) -> None:
    conn = world.engine.open(world.now_us)
    assert not world.engine.receive(conn, accuracy_frame(1, 0, 0.5), world.now_us)
    assert not FeedbackReceiver(world, world.model()).container.send(
        feedback_frame(one_feedback(1))
    )


# -- sessions


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize(
    ("dtype", "shape"), [("f64", (3,)), ("u8", (5,)), ("str", ()), ("f32", (-1,))]
)
def test_sessions_travel_with_their_rows(
    world: World, dtype: str, shape: tuple[int, ...], checked: bool
) -> None:
    """One batch has rows of several sessions, each with its session; equal rows of two sessions are
    sent twice."""
    model = world.model(dtype, shape)
    receiver = FeedbackReceiver(world, model, sessions=True, checked=checked)
    row: Any = (
        "snow" if model.dtype is None else np.ones(4 if shape == (-1,) else shape, model.dtype)
    )
    salts = [7, 0, 2**64 - 1, 7]
    futures = [model.predict(row, salt=salt) for salt in salts]
    world.step()
    [(kind, payload, header)] = receiver.frames()
    rows = open_rows(header, payload)
    assert kind == Kind.PREDICT
    assert rows.sessions is not None
    assert rows.sessions.tolist() == [7, 0, 2**64 - 1], (
        "the second row of session 7 joined the first"
    )
    assert receiver.container.send(
        encode_rows(Kind.REPLY, np.array([70, 1, 2]), id=header.id, checked=checked)
    )
    world.step()
    assert [future.result(0) for future in futures] == [70, 1, 2, 70]
    assert model.predict(row, salt=7).result(0) == 70
    assert model.cached(row, salt=8) == (False, None)


def test_an_array_is_of_one_session(world: World) -> None:
    model = world.model("f64", (2,), cached=False)
    receiver = FeedbackReceiver(world, model, sessions=True, size_max=64)
    future = model.predict_many(np.arange(128.0).reshape(64, 2), salt=5)
    world.step()
    [(_, payload, header)] = receiver.frames()
    rows = open_rows(header, payload)
    assert rows.sessions is not None
    assert rows.sessions.tolist() == [5] * 64
    assert rows.data.tolist() == np.arange(128.0).reshape(64, 2).tolist()
    assert receiver.container.send(encode_rows(Kind.REPLY, rows.data[:, 0], id=header.id))
    world.step()
    assert future.result(0).tolist() == list(range(0, 128, 2))


def test_a_container_that_did_not_request_sessions_receives_none(world: World) -> None:
    model = world.model("f64", (2,))
    receiver = FeedbackReceiver(world, model)
    model.predict([1.0, 2.0], salt=9)
    world.step()
    [(_, payload, header)] = receiver.frames()
    assert open_rows(header, payload).sessions is None
