"""Serving loop of a container: connect, send HELLO, answer batches, reconnect when the server is
lost.

Over a unix socket each side notices at once when the other dies, because the kernel closes the
socket; such a connection is quiet (no heartbeats). Over TCP heartbeats are sparse. A model that
learns reports its accuracy with its heartbeats, and an alive file is touched with each; these keep
regular heartbeats.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from clipper_container.backoff import Backoff
from clipper_container.model import Model
from clipper_container.schema import TensorSpec, is_named
from clipper_container.wire.frames import (
    CONTROL_BYTES_MAX,
    HEADER_BYTES,
    PAYLOAD_BYTES_MAX,
    BadFrame,
    Bytes,
    BytesLike,
    Flag,
    Header,
    Kind,
    check_payload,
    control_frame,
    decode_header,
    open_rows,
    pack_map,
)
from clipper_container.wire.regions import CannotShare, Regions, can_share
from clipper_container.wire.transport import (
    Disconnected,
    FrameConnection,
    Heart,
    Stopping,
    StopSwitch,
    connect,
)
from clipper_container.wire.version1 import V1_HEAD_BYTES, v1_content_bytes, v1_open
from clipper_container.worker.async_answers import AsyncBatches, AsyncPartAnswers, ConnectionTasks
from clipper_container.worker.async_model import AsyncEvaluator, async_model_of
from clipper_container.worker.call_table import BatchCaller, CallTable
from clipper_container.worker.evaluation import Evaluator, PredictionFailed, user_traceback
from clipper_container.worker.feedback_queue import FeedbackQueue
from clipper_container.worker.handshake import (
    ATTEMPT_S,
    SILENCE_HEARTBEATS,
    ContainerOptions,
    Welcome,
    welcome_of,
)
from clipper_container.worker.inbox import FrameInbox, LookedAt
from clipper_container.worker.named_tensors import with_tensors
from clipper_container.worker.outputs import InvalidOutput, one_part
from clipper_container.worker.parts import PartAnswers, PartsModel, gives_parts
from clipper_container.worker.pipeline import is_pipelined, pipeline_of
from clipper_container.worker.replies import BatchReplies, FailureLog, evaluate
from clipper_container.worker.turns import Turns

ANNOUNCE_AGAIN_S = 30.0
FINISH_POLL_S = 0.02  # between two looks whether all has ended
_SHARED = int(Flag.SHARED)
_PARTS = int(Flag.PARTS)


def evaluator_of(model: Model, options: ContainerOptions) -> Evaluator:
    """Return the evaluator of a model with these options."""
    served = with_tensors(model, options.input, options.output, options.name, options.row_by_row)
    return Evaluator(
        served,
        options.name,
        options.retry_singly,
        options.row_by_row,
        options.pad,
        output=_numbers_of(options.output),
        declared=options.output,
    )


def _numbers_of(output: str) -> np.dtype | None:
    """Return the type of the numbers of a declared output; None for others and for `any`."""
    if output == "any" or is_named(output):
        return None
    spec = TensorSpec.parse("", output)
    return None if spec.is_text else spec.numpy


def serve(
    model: Model,
    address: str,
    options: ContainerOptions,
    stop: StopSwitch | None = None,
    alive: str = "",
    *,
    turn: Turns | None = None,
    is_wanted: Callable[[], bool] = lambda: True,
) -> None:
    """Answer batches until the server says GOODBYE or `stop` is requested. The model must be
    loaded.

    address: `unix:/path` or `tcp:host:port`. alive: file to touch with every heartbeat while
    connected. turn: held while the model runs, if several servers use it. is_wanted: whether to
    connect again after the connection was lost.

    Raises: ContainerRejected; ValueError for an invalid address.
    """
    stop = stop or StopSwitch()
    evaluator = evaluator_of(model, options)
    if turn is not None:
        evaluator.turn = turn
    backoff = Backoff()
    failures = FailureLog(f"model '{options.name}'", ANNOUNCE_AGAIN_S)
    signs = partial(_touch, alive)
    sharing = address.startswith("unix:") and can_share() and not is_pipelined(evaluator)
    sharing = sharing and not options.concurrency
    try:
        while True:
            try:
                _serve_once(
                    evaluator,
                    address,
                    options,
                    stop,
                    (backoff.reset, failures.reset, signs),
                    sharing,
                )
                return
            except CannotShare as error:
                sharing = False
                failures.report(f"{address}: {error}; continuing without shared memory")
            except (Disconnected, BadFrame, OSError) as error:
                if not is_wanted():
                    return
                failures.report(f"{address}: {error}; reconnecting")
                stop.wait(backoff.next_s())
    except Stopping:
        return


def _serve_once(
    evaluator: Evaluator,
    address: str,
    options: ContainerOptions,
    stop: StopSwitch,
    welcomed: Sequence[Callable[[], None]],
    sharing: bool = False,
) -> None:
    """Serve one connection until GOODBYE. Raises for any other end."""
    connection = FrameConnection(connect(address, ATTEMPT_S), stop, PAYLOAD_BYTES_MAX, ATTEMPT_S)
    try:
        if sharing:
            connection.take_descriptors()  # one may follow WELCOME immediately
        connection.send(control_frame(Kind.HELLO, pack_map(options.hello(address, sharing))))
        welcome = _read_welcome(connection)
        for reset in welcomed:
            reset()
        connection.buffer.size_max = HEADER_BYTES + welcome.payload_bytes_max
        if options.protocol == 1:
            connection.set_silence(float("inf"))  # version 1 has no heartbeats
            _Version1(connection, evaluator, welcome).run()
        connection.set_silence(
            float("inf") if welcome.quiet else SILENCE_HEARTBEATS * welcome.heartbeat_s
        )
        _Version2(connection, evaluator, welcome, sharing and welcome.shared).run(welcomed[-1])
    finally:
        connection.close()


def _touch(path: str) -> None:
    """Set the time of a file to now, and create it if necessary; without a path do nothing."""
    with contextlib.suppress(OSError), open(path, "ab"):
        os.utime(path)


def _read_welcome(connection: FrameConnection) -> Welcome:
    connection.next_message()
    header = decode_header(connection.take(HEADER_BYTES), CONTROL_BYTES_MAX)
    return welcome_of(header, connection.take(header.payload_bytes))


class _Version2:
    """Protocol version 2: frames with ids, heartbeats, failures as text."""

    def __init__(
        self,
        connection: FrameConnection,
        evaluator: Evaluator,
        welcome: Welcome,
        shared: bool = False,
    ) -> None:
        self._connection, self._evaluator, self._welcome = connection, evaluator, welcome
        self._regions = Regions(welcome.payload_bytes_max) if shared else None
        self._feedback = FeedbackQueue(
            evaluator.model, evaluator.name, welcome.payload_bytes_max, welcome.heartbeat_s
        )
        self._replies = BatchReplies(
            evaluator,
            welcome.payload_bytes_max,
            welcome.crc,
            welcome.qualifiers,
            welcome.partial,
        )
        self._pipeline = pipeline_of(evaluator, self._replies)
        model = async_model_of(evaluator.model)
        self._calls: CallTable | None = None
        if welcome.calls:
            self._calls = CallTable(
                connection.send,
                welcome.calls,
                welcome.payload_bytes_max,
                welcome.crc,
                None if model is None or not welcome.concurrency else model.loop.call,
            )
        self._inbox = FrameInbox(connection, welcome.payload_bytes_max, self._calls)
        self._tasks = None if model is None else ConnectionTasks(connection, model.loop)
        self._batches: AsyncBatches | None = None
        if self._tasks is not None and welcome.concurrency:
            self._batches = AsyncBatches(
                AsyncEvaluator(evaluator), self._replies, self._tasks, self._calls
            )
        self._answers = self._answers_of(evaluator, welcome)

    def run(self, signs: Callable[[], None]) -> None:
        """Answer until the server's GOODBYE. Raises: Stopping (after our GOODBYE), Disconnected,
        BadFrame.

        signs: called as often as a heartbeat is due.
        """
        connection = self._connection

        def changed_accuracy() -> list[BytesLike] | None:
            signs()
            return self._feedback.changed_accuracy() if self._welcome.accuracy else None

        heart = None
        if not self._welcome.quiet:
            heart = Heart(
                connection,
                self._welcome.heartbeat_s,
                lambda: connection.send(control_frame(Kind.HEARTBEAT)),
                changed_accuracy,
            )
        try:
            while self._handle_frame():
                pass
            self._finish()
        except Stopping:
            self._finish()
            raise
        except Disconnected:
            if self._tasks is not None and self._tasks.ended_by is not None:
                raise self._tasks.ended_by from None
            raise
        finally:
            if self._calls is not None:
                self._calls.close("the connection to the server has ended")
            if self._tasks is not None:
                self._tasks.close()
            if heart is not None:
                heart.stop()
            if self._answers is not None:
                self._answers.close()
            if self._regions is not None:
                self._regions.close()

    def _finish(self) -> None:
        """Answer the batches under way and say goodbye."""
        try:
            while self._pipeline:
                self._connection.send(self._pipeline.next_reply())
            self._finish_tasks()
            self._connection.send(control_frame(Kind.GOODBYE))
        except (BadFrame, Disconnected):
            return

    def _finish_tasks(self) -> None:
        """Answer the batches of an async model that are under way, and begin no others."""
        while self._batches is not None and self._batches.under_way:
            if self._connection.has_bytes(FINISH_POLL_S):
                header, payload = self._inbox.next(until_stop=False)
                if header.kind not in (Kind.PREDICT, Kind.GOODBYE):
                    self._handle(header, payload)

    def _handle_frame(self) -> bool:
        """Read one frame and answer it. Returns False after GOODBYE. Only the model's views of
        the buffer may outlive the call.
        """
        pipeline = self._pipeline
        while pipeline and (pipeline.is_full or not self._inbox.is_readable()):
            if pipeline.is_full or pipeline.is_done:
                self._connection.send(pipeline.next_reply())
        while self._feedback and not self._inbox.is_readable():
            with self._evaluator.turn or contextlib.nullcontext():
                self._feedback.run_one()
        if self._answers:
            self._give_parts(self._answers)
        return self._handle(*self._inbox.next())

    def _handle(self, header: Header, payload: Bytes) -> bool:
        """Handle a frame. Returns False after GOODBYE."""
        connection, limit = self._connection, self._welcome.payload_bytes_max
        if self._answers is not None and _is_about_parts(header, self._answers):
            self._handle_parts(self._answers, header, payload)
        elif header.kind == Kind.PREDICT and self._pipeline is not None:
            self._pipeline.add(header, open_rows(header, payload, limit))
        elif header.kind == Kind.PREDICT and self._batches is not None:
            self._batches.begin(header, open_rows(header, payload.copy(), limit))
        elif header.kind == Kind.PREDICT:
            connection.send(self._reply_to(header, payload))
        elif header.kind == Kind.CANCEL:
            if self._tasks is not None:  # else the batch has been answered
                self._tasks.cancel(header.id)
        elif header.kind == Kind.ANSWER and self._calls is not None:
            self._calls.answer(header, payload)
        elif header.kind == Kind.REGION and self._regions is not None:
            check_payload(header, payload)
            self._regions.add(payload, connection.descriptor())
        elif header.kind == Kind.FEEDBACK and self._evaluator.model.corrects:
            check_payload(header, payload)
            self._feedback.add(payload)
        elif header.kind == Kind.GOODBYE:
            return False
        elif header.kind != Kind.HEARTBEAT:
            raise BadFrame(f"unexpected {Kind(header.kind).name}")
        return True

    def _give_parts(self, answers: PartAnswers | AsyncPartAnswers) -> None:
        """Send parts until a frame arrives or none may be sent; at least one, so that batches that
        never end do not stop the answers."""
        while answers.can_go_on:
            with self._running():
                frame = answers.next_part()
            self._connection.send(frame)
            if self._inbox.is_readable():
                return

    def _running(self) -> contextlib.ExitStack:
        """Return what is entered while the model runs."""
        evaluator, held = self._evaluator, contextlib.ExitStack()
        held.enter_context(evaluator.turn or contextlib.nullcontext())
        if evaluator.work is not None:
            held.enter_context(evaluator.work.on(evaluator.name))
        return held

    def _handle_parts(
        self, answers: PartAnswers | AsyncPartAnswers, header: Header, payload: Bytes
    ) -> None:
        """Handle a frame about answers in parts."""
        if header.kind == Kind.PART:
            answers.allow(header, payload)
            return
        with self._running():
            if header.kind == Kind.CANCEL:
                frame = answers.cancel(header.id)
            else:
                rows = open_rows(header, payload.copy(), self._welcome.payload_bytes_max)
                frame = answers.begin(header, rows)
        if frame:
            self._connection.send(frame)

    def _answers_of(
        self, evaluator: Evaluator, welcome: Welcome
    ) -> PartAnswers | AsyncPartAnswers | None:
        """Return the answers in parts of a connection; None if the server or the model has none."""
        if not welcome.parts_ahead:
            return None
        source = async_model_of(evaluator.model)
        model = PartsModel(evaluator.model, evaluator.row_by_row, evaluator.output)
        name = evaluator.name
        ahead = welcome.parts_ahead
        checked = welcome.crc
        if source is not None and source.gives_parts and self._tasks is not None:
            return AsyncPartAnswers(source, model, name, ahead, checked, self._tasks, source.loop)
        if not gives_parts(evaluator.model):
            return None
        return PartAnswers(model, name, ahead, checked, user_traceback)

    def _reply_to(self, header: Header, payload: Bytes) -> list[BytesLike]:
        """Return the frame that answers a batch. After it is sent the server may overwrite the
        rows.
        """
        caller = None
        if self._calls is not None:
            caller = BatchCaller(self._calls, header, self._inbox.wait)
        try:
            return self._reply_with(header, payload, LookedAt(header.id, self._inbox, caller))
        finally:
            if caller is not None:
                caller.close()

    def _reply_with(self, header: Header, payload: Bytes, evaluation: LookedAt) -> list[BytesLike]:
        """Return the frame that answers a batch, of a model that can look at `evaluation`."""
        if self._inbox.cancels(header.id):
            return self._replies.cancelled(header.id)
        if self._regions is None or not header.flags & _SHARED:
            rows = open_rows(header, payload, self._welcome.payload_bytes_max)
            return self._replies.to(header, rows, evaluation)
        pieces = self._replies.to(header, self._regions.open(header, payload), evaluation)
        if self._regions.are_lent():
            pieces = [b"".join(pieces)]  # outputs can be views of the inputs
            if self._regions.are_lent():
                self._regions.leave(header, payload)
        return pieces


def _is_about_parts(header: Header, answers: PartAnswers | AsyncPartAnswers) -> bool:
    """Return whether a frame of the server is about an answer in parts."""
    if header.kind == Kind.CANCEL:
        return header.id in answers
    return header.kind == Kind.PART or bool(header.flags & _PARTS)


class _Version1:
    """Protocol version 1: bare batches without ids, n x f64 back. A model that fails closes the
    connection.
    """

    def __init__(self, connection: FrameConnection, evaluator: Evaluator, welcome: Welcome) -> None:
        self._connection, self._evaluator, self._welcome = connection, evaluator, welcome

    def run(self) -> None:
        """Answer batches; never returns. Raises: Stopping, Disconnected, BadFrame."""
        while True:
            self._handle_frame()

    def _handle_frame(self) -> None:
        connection, limit = self._connection, self._welcome.payload_bytes_max
        # the content behind the head is aligned
        connection.next_message(offset=-V1_HEAD_BYTES % HEADER_BYTES)
        head = connection.take(V1_HEAD_BYTES)
        rows = v1_open(head, connection.take(v1_content_bytes(head, limit)), limit)
        try:
            with self._evaluator.turn or contextlib.nullcontext():
                outputs = one_part(evaluate(self._evaluator, rows)[0], self._evaluator.name)
        except (PredictionFailed, InvalidOutput) as failure:
            print(failure, file=sys.stderr, flush=True)
            raise Disconnected(
                f"model '{self._evaluator.name}' failed; version 1 cannot report failures"
            ) from None
        if outputs.lengths is not None or outputs.data.size != rows.n or outputs.status is not None:
            raise Disconnected(
                f"model '{self._evaluator.name}': version 1 takes one number per row"
            )
        connection.send([outputs.data.reshape(-1).astype("<f8")])
