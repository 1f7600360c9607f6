"""Async models: what is one, their batches and parts as tasks of the event loop, and CANCEL."""

import asyncio
import socket
import threading

import numpy as np
import pytest

from clipper_container import Model, is_cancelled
from clipper_container.current import BatchCancelled, evaluating
from clipper_container.loading.runtimes import _loaded
from clipper_container.model import as_model
from clipper_container.runtime import ArtifactError
from clipper_container.wire.frames import (
    HEADER_BYTES,
    BadFrame,
    Header,
    Kind,
    Rows,
    control_frame,
    decode_header,
    open_rows,
)
from clipper_container.wire.transport import Disconnected, FrameConnection, StopSwitch
from clipper_container.worker.async_answers import AsyncBatches, AsyncPartAnswers, ConnectionTasks
from clipper_container.worker.async_model import (
    AsyncEvaluator,
    AsyncModel,
    CoroutineLoop,
    async_model_of,
    is_async,
)
from clipper_container.worker.evaluation import Evaluator
from clipper_container.worker.inbox import FrameInbox, LookedAt
from clipper_container.worker.named_tensors import with_tensors
from clipper_container.worker.parts import PartsModel, whole_of
from clipper_container.worker.replies import BatchReplies

PATIENCE_S = 60.0


class Lines:
    """Keeps the frames that are sent, as (kind, id, what)."""

    def __init__(self):
        self._changed = threading.Condition()
        self.sent = []
        self.is_shut = False

    def send(self, pieces):
        data = b"".join(bytes(piece) for piece in pieces)
        header = decode_header(data)
        payload = np.frombuffer(data[HEADER_BYTES:], np.uint8)
        if header.rows:
            rows = open_rows(header, payload)
            found = rows.data.tobytes().decode() if rows.dtype == 13 else rows.data.tolist()
        else:
            found = payload.tobytes().decode()
        with self._changed:
            self.sent.append((Kind(header.kind).name, header.id, found))
            self._changed.notify_all()

    def shutdown(self):
        with self._changed:
            self.is_shut = True
            self._changed.notify_all()

    def wait(self, done):
        with self._changed:
            assert self._changed.wait_for(lambda: done(self), PATIENCE_S), self.sent


@pytest.fixture
def loop():
    made = CoroutineLoop()
    yield made
    made.close()


async def twice(x):
    await asyncio.sleep(0)
    return 2 * x


async def each(x):
    for letter in x:
        yield letter


class Called:
    """An object whose call is a coroutine function."""

    async def __call__(self, x):
        return x


class Batch(Model):
    """Negates a batch of numbers; a batch with 13 fails."""

    opened = False

    async def load(self):
        self.opened = True

    async def predict_batch(self, inputs):
        await asyncio.sleep(0)
        if 13 in inputs:
            raise ValueError("an unlucky number")
        return -np.asarray(inputs)


def test_what_is_async():
    assert is_async(as_model(twice))
    assert is_async(as_model(each))
    assert is_async(as_model(Called()))
    assert is_async(Batch())
    assert not is_async(as_model(lambda xs: xs))


def test_a_host_refuses_it():
    for thing in (twice, each, Called(), Batch()):
        with pytest.raises(ArtifactError, match="the model is async"):
            _loaded(thing)


def test_it_is_loaded_and_warmed_up_as_any_model(loop):
    batch = Batch()
    model = AsyncModel(batch, loop)
    model.load()
    assert batch.opened
    rows, _ = Evaluator(model, "m").run(np.arange(3.0), 3)
    assert rows[0].data.tolist() == [0.0, -1.0, -2.0]
    rows, _ = Evaluator(AsyncModel(as_model(each), loop), "m", row_by_row=True).run(["ab"], 1)
    assert rows[0].data.tobytes() == b"ab"


def served(loop, model, **options):
    lines = Lines()
    made = with_tensors(AsyncModel(as_model(model), loop), "any", "any", "m", False)
    evaluator = Evaluator(made, "m", **options)
    tasks = ConnectionTasks(lines, loop)
    return lines, AsyncBatches(AsyncEvaluator(evaluator), BatchReplies(evaluator), tasks), tasks


def numbers(id, *values):
    return Header(int(Kind.PREDICT), rows=len(values), id=id), Rows(
        12, len(values), np.array(values)
    )


def text(id, value="x"):
    raw = value.encode()
    rows = Rows(13, 1, np.frombuffer(raw, np.uint8).copy(), np.array([len(raw)], np.uint32))
    return Header(int(Kind.PREDICT), rows=1, id=id), rows


def test_batches_end_in_any_order(loop):
    gates = {}

    async def waits(x):
        gates[x] = asyncio.Event()
        await gates[x].wait()
        return x

    lines, batches, _ = served(loop, waits, row_by_row=True)
    for id in range(1, 6):
        batches.begin(*numbers(id, float(id)))
    loop.run(_until(lambda: len(gates) == 5))
    assert batches.under_way == 5
    for x in (3.0, 1.0, 5.0, 2.0, 4.0):
        loop.call(gates[x].set)
        lines.wait(lambda it, x=x: ("REPLY", int(x), [x]) in it.sent)
    assert [id for _, id, _ in lines.sent] == [3, 1, 5, 2, 4]
    assert batches.under_way == 0


async def _until(condition):
    while not condition():
        await asyncio.sleep(0.001)


def test_failures_are_those_of_their_batch(loop):
    lines, batches, _ = served(loop, Batch())
    batches.begin(*numbers(1, 13.0))
    batches.begin(*numbers(2, 1.0, 2.0))
    lines.wait(lambda it: len(it.sent) == 2)
    found = {id: (kind, what) for kind, id, what in lines.sent}
    assert found[2] == ("REPLY", [-1.0, -2.0])
    assert found[1][0] == "FAILURE"
    assert "an unlucky number" in found[1][1]


def test_rows_of_a_failed_batch_are_retried_singly(loop):
    evaluator = AsyncEvaluator(Evaluator(AsyncModel(Batch(), loop), "m", retry_singly=True))
    parts, _ = loop.run(evaluator.run(numbers(1, 1.0, 13.0, 2.0)[1]))
    assert parts[0].status.tolist() == [0, 1, 0]
    assert "an unlucky number" in parts[0].text


def test_named_tensors(loop):
    class Named(Model):
        input, output = {"a": "f64"}, {"b": "f64"}

        async def predict_batch(self, batch):
            return {"b": batch["a"] + 1}

    inner = AsyncModel(Named(), loop)
    model = with_tensors(inner, '{"a": "f64"}', '{"b": "f64"}', "m", False)
    assert async_model_of(model) is inner
    records = Rows(2, 2, np.array([1.0, 2.0]).view(np.uint8).reshape(2, 8))
    parts, _ = loop.run(AsyncEvaluator(Evaluator(model, "m")).run(records))
    assert parts[0].data.view(np.float64).reshape(-1).tolist() == [2.0, 3.0]


def test_a_cancelled_batch_is_answered_and_its_task_ends(loop):
    ended = []

    async def never(x):
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(x)

    lines, batches, tasks = served(loop, never, row_by_row=True)
    batches.begin(*numbers(1, 1.0))
    tasks.cancel(1)  # also before it has begun
    batches.begin(*numbers(2, 2.0))
    lines.wait(lambda it: it.sent)
    assert lines.sent[0][:2] == ("FAILURE", 1)
    tasks.cancel(7)  # it was answered meanwhile
    tasks.close()
    assert batches.under_way == 0
    assert ended in ([1.0, 2.0], [2.0, 1.0])


def test_what_ends_a_task_without_an_answer_ends_the_connection(loop):
    async def interrupted(x):
        raise BatchCancelled

    lines, batches, tasks = served(loop, interrupted, row_by_row=True)
    batches.begin(*numbers(1, 1.0))
    lines.wait(lambda it: it.is_shut)
    assert isinstance(tasks.ended_by, BatchCancelled)


def parts_of(loop, model, ahead=2):
    lines = Lines()
    source = AsyncModel(as_model(model), loop)
    tasks = ConnectionTasks(lines, loop)
    made = PartsModel(source, True, None)
    return lines, AsyncPartAnswers(source, made, "m", ahead, False, tasks, loop), tasks


def test_parts_wait_for_what_is_allowed(loop):
    lines, answers, _ = parts_of(loop, each)
    assert answers.begin(*text(1, "abc")) == []
    answers.begin(*text(2, "x"))
    lines.wait(lambda it: len(it.sent) == 4)
    assert [line for line in lines.sent if line[1] == 1] == [("PART", 1, "a"), ("PART", 1, "b")]
    assert [line for line in lines.sent if line[1] == 2] == [("PART", 2, "x"), ("PART", 2, "")]
    with pytest.raises(BadFrame):
        answers.begin(*text(1))
    number = np.array([2], "<u8").view(np.uint8)
    with pytest.raises(BadFrame):
        answers.allow(Header(int(Kind.PART), id=1), number[:4])
    answers.allow(Header(int(Kind.PART), id=1, payload_bytes=8), number)
    lines.wait(lambda it: len(it.sent) == 6)
    assert lines.sent[4:] == [("PART", 1, "c"), ("PART", 1, "")]
    assert (len(answers), 1 in answers) == (0, False)


def test_an_async_generator_is_closed_and_fails_as_others(loop):
    closed = []

    async def endless(x):
        try:
            while True:
                await asyncio.sleep(0)
                if x == "fails":
                    raise ValueError("no")
                yield x
        finally:
            closed.append(x)

    lines, answers, tasks = parts_of(loop, endless)
    answers.begin(*text(1, "a"))
    answers.begin(*text(2, "fails"))
    lines.wait(lambda it: len(it.sent) == 3)
    assert any(id == 2 and "no" in what for _, id, what in lines.sent)
    answers.cancel(1)
    lines.wait(lambda it: len(it.sent) == 4)
    assert lines.sent[3] == ("PART", 1, "cancelled")
    answers.begin(*text(3, "b"))
    lines.wait(lambda it: len(it.sent) == 6)
    tasks.close()
    assert sorted(closed) == ["a", "b", "fails"]


# -- models that are not async


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    stop = StopSwitch()
    connection = FrameConnection(ours, stop, 1 << 20, PATIENCE_S)
    yield FrameInbox(connection, 1 << 20), theirs, stop
    connection.close()
    theirs.close()
    stop.close()


def cancel_of(id):
    return b"".join(map(bytes, control_frame(Kind.CANCEL, b"", id)))


def test_a_model_can_look_while_it_runs(pair):
    inbox, theirs, stop = pair
    first = LookedAt(1, inbox)
    assert not is_cancelled()
    with evaluating(first):
        assert not is_cancelled()
        theirs.sendall(cancel_of(2))
        theirs.sendall(b"".join(map(bytes, control_frame(Kind.HEARTBEAT))))
        assert not is_cancelled()
        stop.request()  # which is not lost
        theirs.sendall(cancel_of(1))
        assert is_cancelled()
        assert is_cancelled()
    # what came meanwhile follows in its order
    assert LookedAt(2, inbox).is_cancelled()
    kinds = [(Kind(header.kind).name, header.id) for header, _ in (inbox.next() for _ in range(3))]
    assert kinds == [("CANCEL", 2), ("HEARTBEAT", 0), ("CANCEL", 1)]
    assert inbox.is_readable()


def test_the_end_of_the_connection_is_seen_after_what_came_before(pair):
    inbox, theirs, _ = pair
    theirs.sendall(cancel_of(5) + b"x" * HEADER_BYTES)
    with evaluating(LookedAt(1, inbox)):
        assert not is_cancelled()
    assert inbox.next()[0].id == 5
    assert inbox.is_readable()
    with pytest.raises(BadFrame):
        inbox.next()


def test_a_lost_connection_is_no_error_of_the_model(pair):
    inbox, theirs, _ = pair
    theirs.close()
    with evaluating(LookedAt(1, inbox)):
        assert not is_cancelled()
    with pytest.raises(Disconnected):
        inbox.next()


def test_a_generator_of_a_batch_is_closed_when_nobody_waits(pair):
    inbox, theirs, _ = pair
    closed = []

    def endless(x):
        try:
            while True:
                theirs.sendall(cancel_of(9))
                yield x
        finally:
            closed.append(x)

    given = endless("a")
    with evaluating(LookedAt(9, inbox)), pytest.raises(BatchCancelled):
        whole_of(given, "str", "m")
    given.close()
    assert closed == ["a"]
    replies = BatchReplies(Evaluator(as_model(endless), "m", row_by_row=True))
    lines = Lines()
    header, rows = text(9, "b")
    lines.send(replies.to(header, rows, LookedAt(9, inbox)))
    assert lines.sent == [("FAILURE", 9, "the batch was cancelled: nobody waits for it")]
    assert closed == ["a", "b"]
