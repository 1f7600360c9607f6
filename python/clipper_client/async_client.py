"""A client for asyncio."""

import asyncio
import ssl
import time
from collections.abc import Sequence
from typing import Literal, Self, TypeVar, cast, overload

from clipper_client import calls
from clipper_client.address import Address
from clipper_client.answers import Answer, Answers, FeedbackCounts, UserValue
from clipper_client.attempts import Attempts, ConnectionEnded
from clipper_client.client import (
    CONNECTIONS_MAX,
    TIMEOUT_S,
    TRIES_MAX,
    check_limits,
    closed_error,
)
from clipper_client.errors import ClipperError
from clipper_client.http_wire import NotHttp, Response, ResponseReader
from clipper_client.parts import AsyncAnswerParts, PartReader

_T = TypeVar("_T")


class AsyncClient:
    """The same as Client, for one event loop: each method is a coroutine. Threads: that of the
    loop. A call that is cancelled closes its connection, which cancels its query.

    async with clipper.AsyncClient("http://127.0.0.1:8000") as client:
        answer = await client.predict("digits", [0.0, 1.0], slo_ms=20)
    """

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        ca: str | None = None,
        cert: tuple[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
        tries_max: int = TRIES_MAX,
        connections_max: int = CONNECTIONS_MAX,
    ) -> None:
        """Make a client, with the arguments of Client. Raises InvalidInput."""
        check_limits(timeout_s, tries_max, connections_max)
        self._address = Address(url, key, ca, cert)
        self.url = self._address.url
        self._timeout_s, self._tries_max = timeout_s, tries_max
        self._free = asyncio.Semaphore(connections_max)
        self._idle: list[_Connection] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    @overload
    async def predict(
        self,
        application: str,
        input: UserValue,
        *,
        user: str | None = None,
        slo_ms: float | None = None,
        salt: int = 0,
        priority: int | None = None,
        context: UserValue = None,
        id: str = "",
        outputs: Sequence[str] = (),
        stream: Literal[False] = False,
        part_slo_ms: float | None = None,
        slo_total_ms: float | None = None,
    ) -> Answer: ...

    @overload
    async def predict(
        self,
        application: str,
        input: UserValue,
        *,
        user: str | None = None,
        slo_ms: float | None = None,
        salt: int = 0,
        priority: int | None = None,
        context: UserValue = None,
        id: str = "",
        outputs: Sequence[str] = (),
        stream: Literal[True],
        part_slo_ms: float | None = None,
        slo_total_ms: float | None = None,
    ) -> AsyncAnswerParts: ...

    async def predict(
        self,
        application: str,
        input: UserValue,
        *,
        user: str | None = None,
        slo_ms: float | None = None,
        salt: int = 0,
        priority: int | None = None,
        context: UserValue = None,
        id: str = "",
        outputs: Sequence[str] = (),
        stream: bool = False,
        part_slo_ms: float | None = None,
        slo_total_ms: float | None = None,
    ) -> Answer | AsyncAnswerParts:
        """Make one query, as Client.predict. With stream=True, `await` it and iterate the result by
        `async for`."""
        settings = calls.Settings(user, slo_ms, salt, context, id, tuple(outputs), priority)
        limits = {"part_slo_ms": part_slo_ms, "slo_total_ms": slo_total_ms}
        if stream:
            return await self._stream(calls.PartsCall(application, input, settings, limits))
        calls.check_no_limits(limits)
        return await self._run(calls.predict(application, input, settings))

    async def predict_many(
        self,
        application: str,
        inputs: UserValue,
        *,
        user: str | None = None,
        slo_ms: float | None = None,
        salt: int = 0,
        priority: int | None = None,
        outputs: Sequence[str] = (),
    ) -> Answers:
        """Query an application for every row of an array, as Client.predict_many."""
        settings = calls.Settings(user, slo_ms, salt, None, "", tuple(outputs), priority)
        return await self._run(calls.predict_many(application, inputs, settings))

    async def feedback(
        self,
        application: str,
        prediction: str | Answer | None = None,
        *,
        label: UserValue = None,
        correct: bool | None = None,
        score: float | None = None,
        input: UserValue = None,
        user: str | None = None,
        weight: float = 1.0,
        context: UserValue = None,
    ) -> bool:
        """Tell what was right about a query, as Client.feedback."""
        truth = {
            "label": label,
            "correct": correct,
            "score": score,
            "input": input,
            "user": user,
            "context": context,
        }
        return await self._run(calls.feedback(application, prediction, truth, weight))

    async def feedback_many(
        self, application: str, predictions: Answers | Sequence[str | Answer], labels: UserValue
    ) -> FeedbackCounts:
        """Tell the right outputs of many predictions, as Client.feedback_many."""
        return await self._run(calls.feedback_many(application, predictions, labels))

    async def applications(self) -> list[dict[str, UserValue]]:
        """Return a description of each application, as Client.applications."""
        return await self._run(calls.ApplicationsCall())

    async def close(self) -> None:
        """Close the connections; calls that are under way end first."""
        self._closed = True
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
        for connection in idle:
            await connection.closed(self._timeout_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<asyncio clipper client of {self.url}>"

    async def _run(self, call: calls.Call[_T]) -> _T:
        attempts = Attempts(call, self._address, self._timeout_s, self._tries_max)
        connection = await self._tried(attempts, streams=False)
        return attempts.result(connection.response)

    async def _stream(self, call: calls.PartsCall) -> AsyncAnswerParts:
        """Return the parts of an answer, the first of which has come."""
        attempts = Attempts(call, self._address, self._timeout_s, self._tries_max)
        found = await self._tried(attempts, streams=True)
        if not found.reader.has_events:
            attempts.result(found.response)
            raise AssertionError("a response without events is an error")

        def give(keep: bool) -> None:
            self._give(found, keep)
            self._free.release()

        reader = PartReader(call, self._address, found.reader)
        return AsyncAnswerParts(reader, found, give, self._timeout_s)

    async def _tried(self, attempts: Attempts[_T], streams: bool) -> "_Connection":
        """Return the connection with the last response of a call. Raises NoServer,
        DeadlineExceeded."""
        self._check_loop()
        while True:
            try:
                async with asyncio.timeout(attempts.until_s - time.monotonic()):
                    found = await self._exchanged(attempts, ResponseReader(streams))
            except ConnectionEnded as lost:
                attempts.after_loss(lost)
                continue
            except TimeoutError:
                attempts.late()
            pause_s = attempts.pause_s(found.response)
            if pause_s is None:
                return found
            await asyncio.sleep(pause_s)

    def _check_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        if self._closed:
            raise closed_error(self.url)
        if self._loop is not loop:
            raise ClipperError(
                f"the client of {self.url} belongs to another event loop.",
                hint="Make one in each loop.",
            )

    async def _exchanged(self, attempts: Attempts[_T], reader: ResponseReader) -> "_Connection":
        """Return the connection with the response to the next request. It is in use while more
        events come. Raises ConnectionEnded, NoServer."""
        await self._free.acquire()
        connection: _Connection | None = None
        is_open = False
        is_whole = False
        try:
            request = attempts.request()
            connection = await self._connection()
            response = await connection.exchange(request, reader)
            is_open = reader.has_events
            is_whole = not response.closes
            return connection
        finally:
            if not is_open:
                if connection is not None:
                    self._give(connection, is_whole)
                self._free.release()

    def _give(self, connection: "_Connection", keep: bool) -> None:
        """Keep a connection, or close it."""
        if keep and not self._closed:
            self._idle.append(connection)
        else:
            connection.abort()

    async def _connection(self) -> "_Connection":
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        address = self._address
        loop = asyncio.get_running_loop()
        try:
            _, protocol = await loop.create_connection(
                _Connection, address.host, address.port, ssl=address.tls
            )
        except TimeoutError:
            raise
        except ssl.SSLError as error:
            raise address.untrusted(error) from None
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", "") or str(error)
            raise address.lost(why, may_be_done=False) from None
        return protocol


class _Connection(asyncio.Protocol):
    """A connection, which has one request at a time."""

    def __init__(self) -> None:
        self.is_open = False
        self.reader: ResponseReader
        self.response: Response
        self._is_reading = False
        self._is_paused = False
        self._why = ""  # it has ended during events
        self._came: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport
        self._end = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        if not self._is_reading:  # nobody asked for it
            self.abort()
            return
        try:
            response = self.reader.feed(data)
        except NotHttp as error:
            self._fail(str(error))
            return
        if response is None:
            return
        if self.reader.has_events and not self.reader.is_whole:
            self._transport.pause_reading()  # until these events are read
            self._is_paused = True
            self._wake(response)
        else:
            self._finish(response)

    def eof_received(self) -> None:
        self.is_open = False

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._end.set()
        if not self._is_reading:
            return
        response = self.reader.at_end() if error is None else None
        if response is not None:
            self._finish(response)
        else:
            self._fail(str(error) if error else "it closed the connection")

    async def exchange(
        self, parts: Sequence[bytes | memoryview], reader: ResponseReader
    ) -> Response:
        """Send a request and return the response. Raises ConnectionEnded."""
        self.reader = reader
        self._is_reading = True
        self._came = asyncio.get_running_loop().create_future()
        for part in parts:
            self._transport.write(part)
        await self._came
        return self.response

    async def more(self) -> None:
        """Wait for more events of the response. Raises ConnectionEnded."""
        if self._why:
            raise ConnectionEnded(self._why, begun=True)
        self._came = asyncio.get_running_loop().create_future()
        self._resume()
        await self._came

    def _resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()

    def _wake(self, response: Response) -> None:
        self.response = response
        if self._came is not None and not self._came.done():
            self._came.set_result(None)

    def _finish(self, response: Response) -> None:
        self._is_reading = False
        self._resume()
        self._wake(response)

    def _fail(self, why: str) -> None:
        self._is_reading = False
        if self._came is not None and not self._came.done():
            self._came.set_exception(ConnectionEnded(why, self.reader.begun))
        else:
            self._why = why

    def close(self) -> None:
        """Close the connection."""
        self.is_open = False
        self._transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        self.is_open = False
        self._is_reading = False
        self._transport.abort()

    async def closed(self, limit_s: float) -> None:
        """Wait until the connection has ended, or for `limit_s`; then abort it."""
        try:
            async with asyncio.timeout(limit_s):
                await self._end.wait()
        except TimeoutError:
            self.abort()
