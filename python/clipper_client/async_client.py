"""A client for asyncio."""

import asyncio
import ssl
import time
from collections.abc import Sequence
from typing import Self, TypeVar, cast

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

    async def predict(
        self,
        application: str,
        input: UserValue,
        *,
        user: str | None = None,
        slo_ms: float | None = None,
        salt: int = 0,
        context: UserValue = None,
        id: str = "",
        outputs: Sequence[str] = (),
    ) -> Answer:
        """Make one query, as Client.predict."""
        settings = calls.Settings(user, slo_ms, salt, context, id, tuple(outputs))
        return await self._run(calls.predict(application, input, settings))

    async def predict_many(
        self,
        application: str,
        inputs: UserValue,
        *,
        user: str | None = None,
        slo_ms: float | None = None,
        salt: int = 0,
        outputs: Sequence[str] = (),
    ) -> Answers:
        """Query an application for every row of an array, as Client.predict_many."""
        settings = calls.Settings(user, slo_ms, salt, None, "", tuple(outputs))
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
        self._check_loop()
        while True:
            try:
                async with asyncio.timeout(attempts.until_s - time.monotonic()), self._free:
                    response = await self._exchanged(attempts)
            except ConnectionEnded as lost:
                attempts.after_loss(lost)
                continue
            except TimeoutError:
                attempts.late()
            pause_s = attempts.pause_s(response)
            if pause_s is None:
                return attempts.result(response)
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

    async def _exchanged(self, attempts: Attempts[_T]) -> Response:
        """Return the response to the next request. Raises ConnectionEnded, NoServer."""
        request = attempts.request()
        connection = await self._connection()
        is_whole = False
        try:
            response = await connection.exchange(request)
            is_whole = not response.closes and not self._closed
        finally:
            if is_whole:
                self._idle.append(connection)
            else:
                connection.abort()
        return response

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
        self._reader: ResponseReader | None = None
        self._response: asyncio.Future[Response] | None = None
        self._transport: asyncio.Transport
        self._end = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        if self._reader is None:  # nobody asked for it
            self.abort()
            return
        try:
            response = self._reader.feed(data)
        except NotHttp as error:
            self._fail(str(error))
            return
        if response is not None:
            self._finish(response)

    def eof_received(self) -> None:
        self.is_open = False

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._end.set()
        if self._reader is None:
            return
        response = self._reader.at_end() if error is None else None
        if response is not None:
            self._finish(response)
        else:
            self._fail(str(error) if error else "it closed the connection")

    async def exchange(self, parts: Sequence[bytes | memoryview]) -> Response:
        """Send a request and return the response. Raises ConnectionEnded."""
        self._reader = ResponseReader()
        self._response = asyncio.get_running_loop().create_future()
        for part in parts:
            self._transport.write(part)
        return await self._response

    def _finish(self, response: Response) -> None:
        self._reader = None
        if self._response is not None and not self._response.done():
            self._response.set_result(response)

    def _fail(self, why: str) -> None:
        lost = ConnectionEnded(why, self._reader is not None and self._reader.begun)
        self._reader = None
        if self._response is not None and not self._response.done():
            self._response.set_exception(lost)

    def close(self) -> None:
        """Close the connection."""
        self.is_open = False
        self._transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        self.is_open = False
        self._reader = None
        self._transport.abort()

    async def closed(self, limit_s: float) -> None:
        """Wait until the connection has ended, or for `limit_s`; then abort it."""
        try:
            async with asyncio.timeout(limit_s):
                await self._end.wait()
        except TimeoutError:
            self.abort()
