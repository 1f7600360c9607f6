"""The batches and the answers in parts of one connection that an async model works at: each is a
task of the event loop, and is sent when it is there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass, field

from clipper_container.current import evaluating
from clipper_container.errors import fails_call_only
from clipper_container.wire.frames import (
    BadFrame,
    Bytes,
    BytesLike,
    Header,
    Kind,
    Rows,
    check_payload,
    control_frame,
    encode_header,
    encode_rows,
)
from clipper_container.wire.transport import Disconnected, FrameConnection
from clipper_container.worker.async_model import AsyncEvaluator, AsyncModel, CoroutineLoop, Places
from clipper_container.worker.call_table import BatchCaller, CallTable
from clipper_container.worker.evaluation import PredictionFailed, user_traceback
from clipper_container.worker.outputs import InvalidOutput
from clipper_container.worker.parts import PartsModel, allowance_of
from clipper_container.worker.replies import BatchReplies

CLOSE_S = 10.0  # for tasks that were cancelled with their connection


class ConnectionTasks:
    """The tasks of one connection, by the ids of their frames. Threads: `begin`, `cancel`, `close`:
    the connection's."""

    def __init__(self, connection: FrameConnection, loop: CoroutineLoop) -> None:
        self._connection, self._loop = connection, loop
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self.under_way = Places()
        self.ended_by: BaseException | None = None

    def begin(self, id: int, run: Callable[[], Coroutine[object, object, list[BytesLike]]]) -> None:
        """Run a coroutine, and send the frames that it returns."""
        self.under_way.take()
        self._loop.call(self._start, id, run)

    def cancel(self, id: int) -> None:
        """Cancel a task, if it has not ended."""
        self._loop.call(self._cancel, id)

    def close(self) -> None:
        """Cancel all tasks: the connection is lost."""
        self._loop.call(self._cancel_all)
        self.under_way.wait(CLOSE_S)

    def send(self, frame: list[BytesLike]) -> None:
        """Send a frame of a task, unless the connection is lost."""
        with contextlib.suppress(Disconnected):
            self._connection.send(frame)

    def _start(
        self, id: int, run: Callable[[], Coroutine[object, object, list[BytesLike]]]
    ) -> None:
        self._tasks[id] = asyncio.get_running_loop().create_task(self._run(id, run))

    async def _run(
        self, id: int, run: Callable[[], Coroutine[object, object, list[BytesLike]]]
    ) -> None:
        try:
            self.send(await run())
        except BaseException as error:
            # a cancel comes here only before the task has begun
            if not isinstance(error, asyncio.CancelledError):
                self.ended_by = error
            # the server waits for an answer that cannot be given
            self._connection.shutdown()
        finally:
            self._tasks.pop(id, None)
            self.under_way.leave()

    def _cancel(self, id: int) -> None:
        task = self._tasks.get(id)
        if task is not None:  # its first step comes first: a task that never began answers nothing
            asyncio.get_running_loop().call_soon(task.cancel)

    def _cancel_all(self) -> None:
        for id in self._tasks:
            self._cancel(id)


class TaskBatch:
    """A batch of an async model, which is cancelled itself."""

    def __init__(self, caller: BatchCaller) -> None:
        self.caller = caller

    def is_cancelled(self) -> bool:
        """Return False: its task is cancelled instead."""
        return False


class AsyncBatches:
    """The batches of one connection, evaluated at the same time. Threads: one, the connection's."""

    def __init__(
        self,
        evaluator: AsyncEvaluator,
        replies: BatchReplies,
        tasks: ConnectionTasks,
        calls: CallTable | None = None,
    ) -> None:
        self._evaluator = evaluator
        self._replies = replies
        self._tasks = tasks
        self._calls = calls

    def begin(self, header: Header, rows: Rows) -> None:
        """Begin a batch. The rows are kept until it ends."""
        caller = None if self._calls is None else BatchCaller(self._calls, header, None)
        self._tasks.begin(header.id, lambda: self._called(header, rows, caller))

    async def _called(
        self, header: Header, rows: Rows, caller: BatchCaller | None
    ) -> list[BytesLike]:
        """Answer a batch whose model may call others."""
        if caller is None:
            return await self._reply(header, rows)
        try:
            with evaluating(TaskBatch(caller)):
                return await self._reply(header, rows)
        finally:
            caller.close()

    @property
    def under_way(self) -> int:
        """Return how many have not been answered."""
        return len(self._tasks.under_way)

    async def _reply(self, header: Header, rows: Rows) -> list[BytesLike]:
        """Return the frames that answer a batch."""
        try:
            outputs, time_us = await self._evaluator.run(rows)
            return self._replies.encode(header, outputs, time_us)
        except asyncio.CancelledError:
            return self._replies.cancelled(header.id)
        except UnicodeDecodeError as error:
            return self._replies.failure(header.id, f"a str row is not UTF-8: {error.reason}")
        except PredictionFailed as failure:
            return self._replies.failure(header.id, str(failure))


@dataclass(slots=True)
class _OpenAnswer:
    """An answer that is being given in parts. allowed: how many further parts may be sent now;
    more: set when that changes."""

    allowed: int
    more: asyncio.Event = field(default_factory=asyncio.Event)


class AsyncPartAnswers:
    """The answers that a connection gives in parts, each by an async generator of its own. Threads:
    one, the connection's.

    ahead: parts that may be sent before the server allows more.
    """

    can_go_on = False  # they go on by themselves

    def __init__(
        self,
        source: AsyncModel,
        model: PartsModel,
        name: str,
        ahead: int,
        checked: bool,
        tasks: ConnectionTasks,
        loop: CoroutineLoop,
    ) -> None:
        self._source = source
        self._model = model
        self._name = name
        self._ahead = ahead
        self._checked = checked
        self._tasks = tasks
        self._loop = loop
        self._open: dict[int, _OpenAnswer] = {}

    def __len__(self) -> int:
        """Return the number of answers that have not ended."""
        return len(self._open)

    def __contains__(self, id: int) -> bool:
        """Return whether an answer has not ended."""
        return id in self._open

    def next_part(self) -> list[BytesLike]:
        """Return no frame: each answer sends its own."""
        return []

    def begin(self, header: Header, rows: Rows) -> list[BytesLike]:
        """Begin to answer a query."""
        if header.id in self._open:
            raise BadFrame(f"query {header.id} is being answered")
        answer = self._open[header.id] = _OpenAnswer(self._ahead)
        self._tasks.begin(header.id, lambda: self._give(header.id, answer, rows))
        return []

    def allow(self, header: Header, payload: Bytes) -> None:
        """Take in a PART of the server: so many further parts of an answer may be sent. Raises:
        BadFrame."""
        check_payload(header, payload)
        self._loop.call(self._allow, header.id, allowance_of(header, payload))

    def cancel(self, id: int) -> list[BytesLike]:
        """Cancel the task of an answer that nobody wants, which sends its end."""
        self._tasks.cancel(id)
        return []

    def close(self) -> None:
        """Do nothing: the tasks of the connection are cancelled with it."""

    def _allow(self, id: int, number: int) -> None:
        answer = self._open.get(id)
        if answer is not None:  # else it has ended meanwhile
            answer.allowed += number
            answer.more.set()

    async def _give(self, id: int, answer: _OpenAnswer, rows: Rows) -> list[BytesLike]:
        """Send the parts of an answer; return the frame of its end."""
        text = ""
        try:
            parts = self._source.stream(*self._model.given(rows))
            async with contextlib.aclosing(parts):
                await self._give_all(id, answer, parts)
        except asyncio.CancelledError:
            text = "cancelled"
        except InvalidOutput as error:
            text = str(error)
        except BaseException as error:
            if not fails_call_only(error):
                raise
            text = user_traceback(error)
        finally:
            self._open.pop(id, None)
        return list(control_frame(Kind.PART, text.encode("utf-8", "replace"), id, self._checked))

    async def _give_all(
        self, id: int, answer: _OpenAnswer, parts: AsyncGenerator[object, None]
    ) -> None:
        while True:
            while not answer.allowed:
                answer.more.clear()
                # the server allows more, or the task is cancelled with its connection
                await answer.more.wait()
            try:
                rows = self._model.rows_of(await anext(parts), self._name)
            except StopAsyncIteration:
                return
            answer.allowed -= 1
            header, pieces = encode_rows(Kind.PART, rows, id, 0, self._checked)
            self._tasks.send([encode_header(header), *pieces])
