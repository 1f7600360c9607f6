"""Calls of other models: what gets `Calls`, the frames of calls, answers, errors and limits."""

import functools

import msgpack
import numpy as np
import pytest

from clipper_container import (
    CallCycle,
    CalledAnswer,
    CallFailed,
    CallLimit,
    CallNotAllowed,
    Calls,
    Model,
)
from clipper_container.calls import give_calls
from clipper_container.current import evaluating
from clipper_container.model import FunctionModel, as_model
from clipper_container.wire.call_values import pack_call, unpack_call
from clipper_container.wire.frames import BadFrame, Header, Kind, decode_header
from clipper_container.wire.transport import Disconnected
from clipper_container.worker.async_model import CoroutineLoop, is_async
from clipper_container.worker.call_table import BatchCaller, CallTable


class Batch:
    """A batch that is being evaluated, which can call."""

    def __init__(self, caller):
        self.caller = caller

    def is_cancelled(self):
        return False


class Server:
    """Keeps what is sent, and answers calls when it is asked to."""

    def __init__(self, calls_max=4, post=None):
        self.sent = []
        self.table = CallTable(self.send, calls_max, 4096, False, post)
        self.lost = False

    def send(self, pieces):
        if self.lost:
            raise Disconnected("gone")
        data = b"".join(bytes(piece) for piece in pieces)
        header = decode_header(data)
        self.sent.append((header.kind, header.id, data[64:]))

    def answer(self, id, **fields):
        payload = pack_call(fields)
        header = Header(int(Kind.ANSWER), id=id, payload_bytes=len(payload))
        self.table.answer(header, np.frombuffer(payload, np.uint8))

    def batch(self, read, time_us=1_000_000):
        header = Header(int(Kind.PREDICT), rows=1, id=1, time_us=time_us)
        return Batch(BatchCaller(self.table, header, read))


def calling(x, calls: Calls):
    return x


async def awaiting(x, calls: "Calls"):
    return x


def other(x, calls: int = 3):
    return x


class WithAttribute(Model):
    calls: Calls

    def predict_batch(self, inputs):
        return inputs


def test_who_gets_calls():
    for function in (calling, awaiting):
        model, has = give_calls(as_model(function))
        assert has
        assert isinstance(model, FunctionModel)
        assert isinstance(model.inner, functools.partial)
        assert isinstance(model.inner.keywords["calls"], Calls)
    assert is_async(give_calls(as_model(awaiting))[0])
    model, has = give_calls(WithAttribute())
    assert has
    assert isinstance(model, WithAttribute)
    assert isinstance(model.calls, Calls)
    for without in (other, lambda xs: xs):
        assert not give_calls(as_model(without))[1]


def test_calls_are_made_while_a_batch_is_evaluated():
    with pytest.raises(RuntimeError, match="while a batch is evaluated"):
        Calls().model("m").predict(1.0)


def test_a_call_and_its_answer():
    server = Server()
    batch = server.batch(lambda: server.answer(1, outputs=np.arange(3.0)))
    with evaluating(batch):
        call = Calls().model("m", 2).predict(np.float32(0.5), slo_ms=20)
        assert not call.done()
        assert call.result().tolist() == [0.0, 1.0, 2.0]
    kind, id, payload = server.sent[0]
    assert (kind, id) == (Kind.CALL, 1)
    assert msgpack.unpackb(payload) == {
        "to": "model:m:2",
        "rows": 0.5,
        "many": False,
        "left_us": 20_000,
    }
    server.answer(1, outputs=None)  # a second answer is ignored
    assert call.result().tolist() == [0.0, 1.0, 2.0]


def test_answers_of_applications_and_users():
    server = Server()
    one = {"output": 1, "is_default": True, "reason": "late", "id": "7"}
    batch = server.batch(lambda: server.answer(1, outputs=[one], app=True, many=True))
    with evaluating(batch):
        found = Calls().app("a").predict_many(["x"], user="ann").result()
    assert found == [CalledAnswer(1, None, True, "late", "7")]
    assert msgpack.unpackb(server.sent[-1][2])["user"] == "ann"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("call-not-allowed", CallNotAllowed),
        ("call-cycle", CallCycle),
        ("call-limit", CallLimit),
        ("deadline-exceeded", CallFailed),
    ],
)
def test_errors_have_their_kind(code, kind):
    server = Server()
    with evaluating(server.batch(lambda: server.answer(1, error="no", code=code))):
        with pytest.raises(kind, match="no") as caught:
            Calls().model("m").predict(1).result()
        assert caught.value.code == code


def test_limits_are_kept_before_a_frame_is_sent():
    server = Server(calls_max=2)
    with evaluating(server.batch(lambda: None)):
        for _ in range(2):
            Calls().model("m").predict(1)
        with pytest.raises(CallLimit, match=r"limits\.calls_max"):
            Calls().model("m").predict(1)
        server.answer(1, outputs=1)
        Calls().model("m").predict(1)
        with pytest.raises(CallLimit, match=r"limits\.frame_bytes_max"):
            Calls().model("m").predict("x" * 5000)
        with pytest.raises(TypeError, match="object"):
            Calls().model("m").predict(object())
    assert len(server.sent) == 3


def test_calls_of_a_batch_that_has_ended_are_cancelled():
    server = Server()
    batch = server.batch(lambda: None)
    with evaluating(batch):
        Calls().model("m").predict(1)
        Calls().model("m").predict(2)
    server.answer(1, outputs=1)
    batch.caller.close()
    assert [(kind, id) for kind, id, _ in server.sent[2:]] == [(Kind.CANCEL, 2)]


def test_calls_that_a_batch_left_take_no_place():
    server = Server(calls_max=2)
    first = server.batch(lambda: None)
    with evaluating(first):
        for _ in range(2):
            Calls().model("m").predict(1)
    first.caller.close()
    ids = iter([1, 3])
    with evaluating(server.batch(lambda: server.answer(next(ids), outputs=5))):
        assert Calls().model("m").predict(1).result() == 5


def test_a_lost_connection_ends_calls():
    server = Server()
    with evaluating(server.batch(lambda: server.table.close("gone"))):
        with pytest.raises(CallFailed, match="gone"):
            Calls().model("m").predict(1).result()
        server.lost = True
        with pytest.raises(CallFailed, match="lost"):
            Calls().model("m").predict(1).result()


def test_calls_are_awaited_in_tasks():
    loop = CoroutineLoop()
    try:
        server = Server(post=loop.call)

        async def ask():
            with evaluating(server.batch(None)):
                call = Calls().model("m").predict(1.0)
                with pytest.raises(RuntimeError, match="awaited"):
                    call.result()
                server.answer(1, outputs=5.0)
                return await call, await call

        assert loop.run(ask()) == (5.0, 5.0)
    finally:
        loop.close()


@pytest.mark.parametrize(
    "value",
    [1, 2.5, True, None, "ä", b"\0", [1, "a"], {"a": [1]}, np.zeros((0, 2), "f4"), np.arange(4)],
)
def test_values_come_back(value):
    found = unpack_call(pack_call({"rows": value}))["rows"]
    if isinstance(value, np.ndarray):
        assert (found.dtype, found.tolist()) == (value.dtype, value.tolist())
    else:
        assert found == value


def test_other_values():
    found = unpack_call(pack_call({"a": np.float32(2), "b": (1, 2), "c": np.array(["x"])}))
    assert found == {"a": 2.0, "b": [1, 2], "c": ["x"]}
    big = np.arange(3, dtype=">f8")
    assert unpack_call(pack_call({"a": big}))["a"].tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(TypeError):
        pack_call({"a": np.array([1j])})
    with pytest.raises(BadFrame):
        unpack_call(b"\xc1")
