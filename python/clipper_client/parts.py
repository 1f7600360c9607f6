"""Answers in parts, as they come over a connection."""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol, Self

from clipper_client.address import Address
from clipper_client.answers import AnswerPart
from clipper_client.attempts import UNREADABLE, ConnectionEnded
from clipper_client.calls import PartsCall
from clipper_client.connections import BlockingConnection
from clipper_client.errors import ClipperError, DeadlineExceeded, not_clipper
from clipper_client.http_wire import EventReader, ResponseReader


class PartReader:
    """Reads the parts of one answer from a body of events. Threads: one at a time.

    is_over: the whole was read, or an error.
    """

    def __init__(self, call: PartsCall, address: Address, body: ResponseReader) -> None:
        self._call = call
        self._address = address
        self._events = EventReader()
        self.body = body
        self.is_over = False

    def next(self) -> AnswerPart | None:
        """Return the next part; None if it has not come. Raises the error that the server sent,
        NoServer for what no server of Clipper sends."""
        self._events.feed(self.body.take())
        event = self._events.next()
        if event is None:
            if self.body.is_whole:
                self.is_over = True
                raise not_clipper(self._address.url, "the events end without an answer")
            return None
        try:
            part = self._call.part(event, self._address.url)
        except ClipperError:
            self.is_over = True
            raise
        except UNREADABLE as error:
            self.is_over = True
            raise not_clipper(self._address.url, f"{type(error).__name__}: {error}") from None
        self.is_over = part.is_last
        return part

    def lost(self, why: str) -> ClipperError:
        """Return the error of a connection that has ended before the whole."""
        self.is_over = True
        return self._address.lost(why, may_be_done=False)

    def late(self, timeout_s: float) -> ClipperError:
        """Return the error of a server that has sent nothing for too long."""
        self.is_over = True
        return DeadlineExceeded(
            f"{self._address.url} has sent nothing for {timeout_s:g} s.",
            hint="Give more time: timeout_s=.",
        )


class AnswerParts:
    """The answer to one query in parts. Iterating gives each part as it comes and, as the last one,
    the whole. Threads: one at a time.

    It has a connection until the whole is read. Closing it before, leaving its `with` statement, or
    forgetting it, closes the connection, which stops the model.
    """

    def __init__(
        self,
        reader: PartReader,
        connection: BlockingConnection,
        give: Callable[[BlockingConnection, bool], None],
        timeout_s: float,
    ) -> None:
        """Read the parts of a response that has begun. give: gives the connection back. timeout_s:
        how long the server may send nothing."""
        self._reader = reader
        self._connection: BlockingConnection | None = connection
        self._give = give
        self._timeout_s = timeout_s

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> AnswerPart:
        if self._connection is None:
            raise StopIteration
        try:
            while (part := self._reader.next()) is None:
                self._receive(self._connection)
            while part.is_last and not self._reader.body.is_whole:
                self._receive(self._connection)
        except BaseException:
            self.close()
            raise
        if part.is_last:
            self._end(keep=True)
        return part

    def _receive(self, connection: BlockingConnection) -> None:
        try:
            connection.receive(self._reader.body, time.monotonic() + self._timeout_s)
        except ConnectionEnded as lost:
            raise self._reader.lost(str(lost)) from None
        except TimeoutError:
            raise self._reader.late(self._timeout_s) from None

    def result(self) -> AnswerPart:
        """Read all parts, and return the whole. Raises ClipperError if it was read or closed."""
        for part in self:
            if part.is_last:
                return part
        raise ClipperError("this answer was read or closed.", hint="Keep its last part.")

    def close(self) -> None:
        """Stop the model, if the whole was not read. Idempotent."""
        self._end(keep=False)

    def _end(self, keep: bool) -> None:
        if self._connection is not None:
            connection = self._connection
            self._connection = None
            self._give(connection, keep)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._end(keep=False)


class EventConnection(Protocol):
    """A connection of asyncio on which a body of events comes."""

    async def more(self) -> None:
        """Wait for more bytes of the body. Raises ConnectionEnded."""


class AsyncAnswerParts:
    """The same as AnswerParts, for `async for` and `async with`. Threads: that of the loop."""

    def __init__(
        self,
        reader: PartReader,
        connection: EventConnection,
        give: Callable[[bool], None],
        timeout_s: float,
    ) -> None:
        """Read the parts of a response that has begun. give: gives the connection back."""
        self._reader = reader
        self._connection = connection
        self._give: Callable[[bool], None] | None = give
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AnswerPart:
        if self._give is None:
            raise StopAsyncIteration
        try:
            while (part := self._reader.next()) is None:
                await self._more()
            while part.is_last and not self._reader.body.is_whole:
                await self._more()
        except BaseException:
            self._end(keep=False)
            raise
        if part.is_last:
            self._end(keep=True)
        return part

    async def _more(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._connection.more()
        except ConnectionEnded as lost:
            raise self._reader.lost(str(lost)) from None
        except TimeoutError:
            raise self._reader.late(self._timeout_s) from None

    async def result(self) -> AnswerPart:
        """Read all parts, and return the whole. Raises ClipperError if it was read or closed."""
        async for part in self:
            if part.is_last:
                return part
        raise ClipperError("this answer was read or closed.", hint="Keep its last part.")

    async def close(self) -> None:
        """Stop the model, if the whole was not read. Idempotent."""
        self._end(keep=False)

    def _end(self, keep: bool) -> None:
        if self._give is not None:
            give = self._give
            self._give = None
            give(keep)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def __del__(self) -> None:
        # It may be forgotten on any thread, by the collector.
        if self._give is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._give, False)
