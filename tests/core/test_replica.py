"""Replies, and invalid replies: ids out of order, too many rows, other types, too large, too early,
too late."""

from typing import Any

import lz4.block
import numpy as np
import pytest

from clipper_core.engine.engine import Engine
from clipper_core.runtime.status import Status, error_for
from clipper_core.wire.codec import (
    Flag,
    Kind,
    decode_header,
    decode_v1,
    encode_frame,
    encode_rows,
    encode_v1,
    open_rows,
)

World = Any  # tests/core/conftest.py


def in_flight(
    world: World, model: Any, container: Any, values: list[float], slo_ms: float = 100
) -> list[Any]:
    futures = [model.predict(value, slo_ms) for value in values]
    world.step()
    container.read()
    return futures


def reply_of(container: Any, rows: Any, **fields: Any) -> bytes:
    return encode_rows(Kind.REPLY, rows, id=container.inbox[0][0], **fields)


@pytest.mark.parametrize("wrong", [[], [1.0], [1.0, 2.0, 3.0]])
def test_another_number_of_outputs(world: World, wrong: list[float]) -> None:
    """Too few or too many outputs are the model's error; a frame without any is invalid."""
    model = world.model(cached=False)
    container = world.container(model)
    futures = in_flight(world, model, container, [1.0, 2.0])
    if not wrong:
        assert not container.send(encode_frame(Kind.REPLY, dtype=12, id=container.inbox[0][0]))
        container.lose()
        return
    assert container.send(reply_of(container, np.array(wrong)))
    assert [future.status() for future in futures] == [Status.BAD_OUTPUT] * 2
    assert "number of outputs" in futures[0].detail()


WRONG = {
    "f32": np.zeros(1, "f4"),
    "shape": np.zeros((1, 2)),
    "str": ["text"],
    "variable": [np.zeros(2)],
}


@pytest.mark.parametrize("rows", WRONG.values(), ids=WRONG)
def test_other_than_declared(world: World, rows: Any) -> None:
    model = world.model(cached=False, output="f64", output_shape=())
    container = world.container(model)
    (future,) = in_flight(world, model, container, [1.0])
    assert container.send(reply_of(container, rows))
    assert future.status() == Status.BAD_OUTPUT


def test_an_output_too_large_ends_the_row_and_not_the_connection(new_world: Any) -> None:
    world = new_world(output_bytes_max=64)
    model = world.model(cached=False)
    container = world.container(model)
    (future,) = in_flight(world, model, container, [1.0])
    assert container.send(reply_of(container, np.zeros((1, 9))))
    assert future.status() == Status.TOO_LARGE
    assert "output_bytes_max" in future.detail()
    container.inbox.clear()
    (future,) = in_flight(world, model, container, [2.0])
    container.reply()
    assert future.result() == 2.0


def test_rows_that_failed_give_the_reason_and_the_others_are_right(world: World) -> None:
    model = world.model()
    container = world.container(model)
    futures = in_flight(world, model, container, [1.0, 2.0, 3.0])
    assert container.send(
        reply_of(
            container, np.array([10.0, 0.0, 30.0]), status=np.array([0, 1, 0], "u1"), text="wörse"
        )
    )
    assert futures[0].result() == 10.0
    assert futures[2].result() == 30.0
    assert futures[1].status() == Status.MODEL_ERROR
    assert futures[1].detail() == "wörse"
    assert model.cached(2.0) == (False, None), "a failure is not kept"


def test_a_failure_ends_the_batch(world: World) -> None:
    model = world.model()
    container = world.container(model)
    futures = in_flight(world, model, container, [1.0, 2.0])
    container.fail("ZeroDivisionError")
    assert [future.detail() for future in futures] == ["ZeroDivisionError"] * 2
    container.inbox.clear()
    (future,) = in_flight(world, model, container, [1.0])
    container.reply()
    assert future.result() == 1.0


def test_ids(world: World) -> None:
    """A reply with an old id is dropped. One with an id that was never given, or that is out of
    order, closes the connection, because the batches that it skips would hang."""
    model = world.model(cached=False)
    container = world.container(model, size_max=1)
    first, second = in_flight(world, model, container, [1.0, 2.0])
    batch_id = container.inbox[0][0]
    container.reply()
    assert container.send(encode_rows(Kind.REPLY, np.array([9.0]), id=batch_id))
    assert first.result() == 1.0
    assert not second.done()
    assert not container.send(encode_rows(Kind.REPLY, np.array([9.0]), id=batch_id + 2))
    container.lose()
    other = world.container(model, size_max=1)
    other.reply_all()
    assert second.result() == 2.0


def test_an_answer_out_of_turn_closes_and_both_rows_are_tried_again(world: World) -> None:
    model = world.model(cached=False)
    container = world.container(model, size_max=1)
    futures = in_flight(world, model, container, [1.0, 2.0])
    assert len(container.inbox) == 2
    assert not container.send(encode_rows(Kind.REPLY, np.array([2.0]), id=container.inbox[1][0]))
    container.lose()
    world.container(model).reply_all()
    assert [future.result() for future in futures] == [1.0, 2.0]


@pytest.mark.parametrize("protocol", [1, 2])
def test_an_answer_before_the_request_has_left(world: World, protocol: int) -> None:
    """The kernel may still be reading the rows: a container that guesses the id must not cause them
    to be freed."""
    model = world.model(cached=False)
    container = world.container(model, protocol=protocol)
    model.predict(1.0, 100)
    world.step()
    assert not container.send(
        np.zeros(1).tobytes() if protocol == 1 else encode_rows(Kind.REPLY, np.zeros(1), id=1)
    )


def test_a_late_answer_fills_the_cache_and_ends_waiting_rows(world: World) -> None:
    model = world.model()
    container = world.container(model)
    (early,) = in_flight(world, model, container, [5.0], slo_ms=10)
    world.step(9_000)
    joined = model.predict(5.0, 90)
    world.step(60_000)
    assert early.status() == Status.DEADLINE
    assert not joined.done(), "its container is overdue, and there is no other: it waits"
    world.step()
    container.reply()
    assert joined.result() == 5.0
    world.step()
    assert container.read() == [], "nothing is evaluated again"
    assert model.predict(5.0).result() == 5.0


def test_a_row_that_joins_an_overdue_one_is_sent_to_another_replica(world: World) -> None:
    model = world.model()
    hung = world.container(model)
    (early,) = in_flight(world, model, hung, [5.0], slo_ms=10)
    world.step(9_000)
    joined = model.predict(5.0, 90)
    world.step()
    other = world.container(model)
    world.step(60_000)
    other.reply_all()
    assert joined.result() == 5.0
    hung.reply()
    assert early.status() == Status.DEADLINE


def test_a_batch_that_cannot_leave_costs_the_connection(world: World) -> None:
    model = world.model(cached=False)
    container = world.container(model)
    future = model.predict(1.0, 10)
    world.step()
    world.step(60_000)
    assert future.status() == Status.DEADLINE
    assert world.engine.wants_close(container.conn)


def test_confidence_comes_with_the_output(world: World) -> None:
    model = world.model()
    container = world.container(model)
    futures = in_flight(world, model, container, [1.0, 2.0])
    assert container.send(reply_of(container, np.array([3.0, 4.0]), confidence=[0.25, 0.5]))
    assert [(future.result(), future.confidence()) for future in futures] == [
        (3.0, 0.25),
        (4.0, 0.5),
    ]


# -- strings on the wire

TEXTS = [f"the same words again and again, {i} times, and ümlauts" for i in range(100)]
NOISE = [
    "".join(map(chr, np.random.default_rng(i).integers(0x4E00, 0x9FFF, 40))) for i in range(100)
]
ROADS = [  # compression, remote, what a batch of many like strings becomes
    ("auto", False, "plain"),
    ("auto", True, "quick"),
    ("none", False, "plain"),
    ("none", True, "plain"),
    ("full", False, "thorough"),
    ("full", True, "thorough"),
]


def sent(new_world: Any, texts: list[str], compression: str, remote: bool, **attach: Any) -> bytes:
    """Return what a container is sent for these strings queried at once; all queries end."""
    world = new_world(compression=compression)
    model = world.model("str", cached=False)
    container = world.container(model, size_max=len(texts), remote=remote, **attach)
    futures = [model.predict(text, 10) for text in texts]
    world.step()
    frame: bytes = world.engine.outgoing(container.conn, world.now_us)
    world.pass_deadline(20_000)
    assert {future.status() for future in futures} == {Status.DEADLINE}
    return frame


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize(("compression", "remote", "how"), ROADS)
def test_strings_are_encoded_as_their_transport_requires(
    new_world: Any, compression: str, remote: bool, how: str, checked: bool
) -> None:
    frame = sent(new_world, TEXTS, compression, remote, checked=checked)
    header, payload = decode_header(frame), frame[64:]
    assert header is not None
    assert len(payload) == header.payload_bytes
    assert bool(header.flags & Flag.COMPRESSED) == (how != "plain")
    search = {
        "plain": {},
        "quick": {"compressed": True, "search": 8},
        "thorough": {"compressed": True, "search": 1},
    }[how]
    fields = {"id": header.id, "time_us": header.time_us, "checked": checked}
    assert frame == encode_rows(Kind.PREDICT, TEXTS, **fields, **search)
    assert open_rows(header, payload).data.tobytes() == "".join(TEXTS).encode()
    if how != "plain":
        size = int.from_bytes(payload[400:408], "little")
        text = lz4.block.decompress(
            payload[408 : 408 + size], uncompressed_size=len("".join(TEXTS).encode())
        )
        assert text.decode() == "".join(TEXTS)


@pytest.mark.parametrize(("compression", "remote", "how"), ROADS)
def test_strings_of_protocol_1(new_world: Any, compression: str, remote: bool, how: str) -> None:
    """Strings are always one LZ4 block: the format has no other form."""
    message = sent(new_world, TEXTS, compression, remote, protocol=1)
    assert message == encode_v1(7, TEXTS, {"plain": 0, "quick": 8, "thorough": 1}[how])
    assert decode_v1(message) == TEXTS
    text = lz4.block.decompress(message[9 + 400 :], uncompressed_size=len("".join(TEXTS).encode()))
    assert text.decode() == "".join(TEXTS)


@pytest.mark.parametrize("texts", [NOISE, TEXTS[:20]], ids=["noise", "one segment"])
@pytest.mark.parametrize("compression", ["auto", "full"])
def test_what_gains_nothing_travels_as_it_is(
    new_world: Any, texts: list[str], compression: str
) -> None:
    frame = sent(new_world, texts, compression, True)
    header = decode_header(frame)
    assert header is not None
    assert frame == encode_rows(Kind.PREDICT, texts, id=header.id, time_us=header.time_us)


def test_only_strings_are_compressed(new_world: Any) -> None:
    world = new_world(compression="full")
    octets, numbers = world.model("bytes", cached=False), world.model("f64", (-1,), cached=False)
    for model, row in ((octets, bytes(5000)), (numbers, np.zeros(700))):
        container = world.container(model, remote=True)
        future = model.predict(row, 10)
        world.step()
        header = decode_header(world.engine.outgoing(container.conn, world.now_us))
        assert header is not None
        assert not header.flags & Flag.COMPRESSED
        world.pass_deadline(20_000)
        assert future.status() == Status.DEADLINE


def test_no_such_compression() -> None:
    with pytest.raises(type(error_for(Status.BAD_INPUT, "")), match="auto, none, full, not 'zip'"):
        Engine(compression="zip")


# -- qualifiers: opaque bytes beside outputs

QUALIFIERS = [b"\x81\xa1q\x03", b"", b"x" * 1024]
OUTPUTS = {
    "scalar": np.array([10.0, 20.0, 30.0]),
    "vector": np.arange(6, dtype="f4").reshape(3, 2),
    "str": ["a", "", "ccc"],
    "variable": [np.arange(2.0), np.zeros(0), np.ones(5)],
}


@pytest.mark.parametrize("confidence", [None, [0.5, 0.25, 1.0]], ids=["bare", "sure"])
@pytest.mark.parametrize("outputs", OUTPUTS.values(), ids=OUTPUTS)
def test_qualifiers_come_with_their_rows_and_from_the_cache(
    world: World, outputs: Any, confidence: Any
) -> None:
    model = world.model()
    container = world.container(model)
    futures = in_flight(world, model, container, [1.0, 2.0, 3.0])
    assert container.send(
        reply_of(container, outputs, qualifiers=QUALIFIERS, confidence=confidence)
    )
    again = [model.predict(value, 100) for value in (1.0, 2.0, 3.0)]
    for i, future in enumerate(futures):
        for each in (future, again[i]):
            prediction = each.prediction()
            np.testing.assert_array_equal(prediction[0], outputs[i])
            assert prediction[1] == (None if confidence is None else confidence[i])
            assert prediction[2:] == ((QUALIFIERS[i],) if QUALIFIERS[i] else ())
            assert prediction[1] == each.confidence()


def test_qualifiers_beside_rows_that_failed(world: World) -> None:
    model = world.model()
    container = world.container(model)
    futures = in_flight(world, model, container, [1.0, 2.0, 3.0])
    assert container.send(
        reply_of(
            container, np.zeros(3), qualifiers=[b"a", b"bb", b"ccc"], status=[0, 1, 0], text="no"
        )
    )
    assert [future.prediction() for future in futures] == [
        (0.0, None, b"a"),
        (None, None),
        (0.0, None, b"ccc"),
    ]


def test_qualifiers_beside_an_array_lose_nothing(world: World) -> None:
    model = world.model(cached=False)
    container = world.container(model)
    future = model.predict_many(np.arange(5.0))
    world.step()
    container.read()
    container.reply(qualifiers=[b"x"] * 5)
    assert future.result().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert future.prediction(3) == (3.0, None, b"x")


def test_qualifiers_too_large_end_the_rows_and_not_the_connection(world: World) -> None:
    model = world.model(cached=False)
    container = world.container(model)
    (future,) = in_flight(world, model, container, [1.0])
    assert container.send(reply_of(container, np.zeros(1), qualifiers=[b"x" * 1025]))
    assert future.status() == Status.TOO_LARGE
    assert "qualifiers" in future.detail()
    container.inbox.clear()
    (future,) = in_flight(world, model, container, [2.0])
    container.reply()
    assert future.result() == 2.0


def test_the_cache_pays_for_qualifiers(new_world: Any) -> None:
    """Outputs of 8 bytes that bring 1 KiB each: the cache of 64 KiB holds few of them, and stays
    within its bounds."""
    held = []
    for size in (0, 1024):
        world = new_world(cache_bytes_max=1 << 16)
        model = world.model()
        container = world.container(model)
        for first in range(0, 512, 64):
            futures = in_flight(world, model, container, [float(first + i) for i in range(64)])
            container.reply(qualifiers=[b"x" * size] * 64, confidence=[0.5] * 64)
            assert all(future.done() for future in futures)
        cache = world.engine.snapshot()["cache"]
        assert cache["bytes"] <= 1 << 16
        held.append(cache["entries"])
    assert held[1] < 64 < held[0]
