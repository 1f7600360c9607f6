"""One call of gRPC on a stream of HTTP/2, and the server of all of them.

A `CallServer` calls methods (frontend/grpc/method.py). The method is found by the head of a call,
so that a call that may not be made is refused before its messages are read. A method of one request
runs when the request is complete; others read theirs as they come. Messages are taken apart by the
core (clipper_core.http.grpc_message), statuses and metadata are written here. Source: gRPC's
PROTOCOL-HTTP2, compression and statuscodes.
"""

import asyncio
import base64
import binascii
import contextlib
import functools
import logging
import zlib
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Generator, Iterable, Sequence
from concurrent.futures import Executor
from typing import Final, NamedTuple, Protocol
from urllib.parse import quote

from clipper.component import Tasks
from clipper.frontend.grpc.call_context import CallContext, CallDetails, Code
from clipper.frontend.grpc.method import CallMethod, CallMethods
from clipper.frontend.http.body_memory import BodyMemory
from clipper.frontend.http.http2 import CallReplies, Http2Connection
from clipper.frontend.http.messages import GZIP, decompressed
from clipper_core.http.grpc_message import GrpcReader
from clipper_core.http.http2_protocol import Http2Protocol
from clipper_core.http.http_server import HttpServer

_log = logging.getLogger(__name__)
READ_AHEAD: Final = 16  # messages of a call that are kept; more stay with the client
MESSAGE_BYTES: Final = 128  # that a message takes beside its own, so that empty ones count
_TIMEOUT_DIGITS: Final = 8
_UNITS_S: Final = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_CODINGS: Final = {b"gzip": GZIP, b"deflate": 15}
_ACCEPTED: Final = (b"grpc-accept-encoding", b"identity,deflate,gzip")
_PLAIN: Final = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")  # not percent-encoded
_OK: Final = ((b"grpc-status", b"0"),)
# fields of HTTP and of gRPC, which are not metadata
_NOT_METADATA: Final = frozenset(
    (
        b"accept-encoding",
        b"content-length",
        b"content-type",
        b"grpc-accept-encoding",
        b"grpc-encoding",
        b"grpc-timeout",
        b"host",
        b"te",
        b"transfer-encoding",
    )
)
Fields = Sequence[tuple[bytes, bytes]]


class CoreCalls(Protocol):
    """The calls that the core answers (fast_calls.py). Threads: the event loop's."""

    def take(self, connection: Http2Connection) -> bool:
        """Answer calls among the events that have come. Return whether there were any."""

    def lose(self, connection: Http2Connection) -> None:
        """Give up the calls of a connection that is gone."""

    def give(self, connection: Http2Connection) -> None:
        """Let the calls go with their connection."""

    def adopt(self, connection: Http2Connection) -> None:
        """Take the calls that have come with their connection."""

    def drop(self, protocol: Http2Protocol) -> None:
        """Cancel the calls of a connection that was lost before they were adopted."""

    def serve_in(self, core_server: HttpServer) -> CallReplies:
        """Let a server of the core answer calls on its own connections. Return what answers those
        that it gives to Python."""


class CallRefused(Exception):
    """A call ends by an error of gRPC itself. further: trailing fields."""

    def __init__(self, code: Code, text: str, further: Fields = ()) -> None:
        super().__init__(text)
        self.code = code
        self.text = text
        self.further = further


class CallHead(NamedTuple):
    """The head of a call. timeout_s: None for none. encoding: of its compressed messages."""

    details: CallDetails
    timeout_s: float | None
    encoding: bytes


@functools.lru_cache(256)
def head_of(text: bytes) -> CallHead:
    """Read the head of a call, which is one of HTTP/1.1. Raises CallRefused.

    Clients send the same head again and again, but for its timeout.
    """
    lines = text.split(b"\r\n")
    method = lines[0].split(b" ")[1].decode("ascii")
    found: list[tuple[str, str | bytes]] = []
    timeouts: list[bytes] = []
    encoding = b"identity"
    for line in lines[1:-2]:
        name, _, value = line.partition(b": ")
        if name == b"grpc-timeout":
            timeouts.append(value)
        elif name == b"grpc-encoding":
            encoding = value
        elif name not in _NOT_METADATA:
            found.append((name.decode("ascii"), _value_of(name, value)))
    if len(timeouts) > 1:
        why = f"the metadata grpc-timeout comes {len(timeouts)} times."
        raise CallRefused(Code.INVALID_ARGUMENT, why)
    timeout_s = _timeout_s(timeouts[0]) if timeouts else None
    return CallHead(CallDetails(method, tuple(found)), timeout_s, encoding)


def _value_of(name: bytes, value: bytes) -> str | bytes:
    """Return a value of metadata; one whose name ends in -bin is base64, with padding or without,
    and several of them are joined by commas."""
    if not name.endswith(b"-bin"):
        return value.decode("latin-1")
    try:
        parts = [part.strip().rstrip(b"=") for part in value.split(b",")]
        whole = [base64.b64decode(part + b"=" * (-len(part) % 4), validate=True) for part in parts]
    except binascii.Error:
        shown = name.decode("ascii")
        raise CallRefused(Code.INTERNAL, f"the metadata {shown} is not base64.") from None
    return b",".join(whole)


def _timeout_s(value: bytes) -> float:
    digits, unit = value[:-1], value[-1:].decode("latin-1")
    if not (digits.isdigit() and len(digits) <= _TIMEOUT_DIGITS and unit in _UNITS_S):
        shown = value[:20].decode("latin-1")
        raise CallRefused(Code.INTERNAL, f"grpc-timeout {shown!r} is no number with a unit.")
    return int(digits) * _UNITS_S[unit]


def trailers_of(code: Code, text: str, further: Fields = ()) -> Fields:
    """Return the fields that end a call."""
    number = b"%d" % code
    said = quote(text.strip(), safe=_PLAIN).encode("ascii")
    return ((b"grpc-status", number), (b"grpc-message", said), *further)


def fields_of(metadata: Iterable[tuple[str, str | bytes]]) -> Fields:
    """Return metadata as fields."""
    return [
        (
            name.encode("ascii"),
            base64.b64encode(value).rstrip(b"=")
            if isinstance(value, bytes)
            else value.encode("ascii", "replace"),
        )
        for name, value in metadata
    ]


class _Begun:
    """The rest of a coroutine that was begun outside of a task, to be awaited in one. waits_for:
    what its first step has yielded."""

    def __init__(self, work: Coroutine[object, object, None], waits_for: object) -> None:
        self._work, self._waits_for = work, waits_for

    def __await__(self) -> Generator[object, object, None]:
        """Yield what the coroutine waits for, and hand it what comes of that."""
        work, waits_for = self._work, self._waits_for
        while True:
            try:
                came = yield waits_for
            except BaseException as error:
                step = functools.partial(work.throw, error)
            else:
                step = functools.partial(work.send, came)
            try:
                waits_for = step()
            except StopIteration:
                return


async def _go_on(begun: _Begun) -> None:
    await begun


class CallStream:
    """One call. Threads: the event loop's. head: as one of HTTP/1.1."""

    def __init__(self, server: "CallServer", owner: Http2Connection, id: int, head: bytes) -> None:
        self.is_full = False
        self._server = server
        self._owner = owner
        self._id = id
        self._reader = GrpcReader(server.message_bytes_max)
        self._messages: deque[tuple[bool, bytes]] = deque()  # (is it compressed, its bytes)
        self._encoding = b""
        self._held_bytes = 0  # of messages, taken from the memory for them
        self._kept_credit = 0  # of the window, given back when messages are read
        self._received = 0
        self._began_s = owner.service.now_s
        self._is_whole = False  # the client sends no more messages
        self._is_over = False  # nothing more is sent
        self._wakes: list[asyncio.Future[None]] = []
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._method: CallMethod | None = None
        self._context: CallContext
        try:
            self._open(head)
        except CallRefused as refusal:
            self._refuse(refusal)

    def _open(self, head: bytes) -> None:
        details, timeout_s, self._encoding = head_of(head)
        until_s = None
        if timeout_s is not None:
            loop = asyncio.get_running_loop()
            until_s = loop.time() + timeout_s
            self._timer = loop.call_at(until_s, self._expire)
        self._context = CallContext(details, self._owner, until_s)
        self._method = self._server.method_of(details)
        if self._method.reads_stream:
            self._begin(self._serve_stream(self._method, self._requests()))

    def _begin(self, work: Coroutine[object, object, None]) -> None:
        self._task = self._server.tasks.spawn(work)

    def _start(self) -> None:
        """Answer the one request: the first step is made at once, the rest by a task. So an answer
        that the cache has needs none."""
        if self._is_over or self._method is None:
            return
        work = self._serve(self._method)
        try:
            waits_for = work.send(None)
        except StopIteration:
            return
        self._begin(_go_on(_Begun(work, waits_for)))

    # -- the request

    def receive(self, text: bytes, credit: int) -> None:
        """Take bytes of messages. credit: the bytes of the window that they took."""
        self._received += len(text)
        if self._is_over:
            self._owner.protocol.consumed(self._id, credit)
            return
        self._kept_credit += credit
        try:
            self._take(text)
        except CallRefused as refusal:
            self._refuse(refusal)
        if len(self._messages) < READ_AHEAD:
            self._give_back()

    def _take(self, text: bytes) -> None:
        """Take the messages that the bytes complete. Raises CallRefused."""
        found = self._reader.feed(text)
        size = len(text) + MESSAGE_BYTES * len(found)
        if not self._server.memory.take(size):
            most = self._server.memory.bytes_max
            raise CallRefused(
                Code.RESOURCE_EXHAUSTED,
                f"the messages of all calls under way have {most} bytes already."
                " See http.bodies_bytes_max.",
            )
        self._held_bytes += size
        self._messages.extend(found)
        if len(self._messages) > 1 and not (self._method and self._method.reads_stream):
            raise self._not_one()
        if self._reader.is_too_large:
            raise self._too_large()
        if self._reader.is_wrong:
            raise CallRefused(Code.INTERNAL, "a message begins with neither 0 nor 1.")
        if found:
            self._wake()

    def _too_large(self) -> CallRefused:
        most = self._server.message_bytes_max
        return CallRefused(
            Code.RESOURCE_EXHAUSTED,
            f"a message has more than {most} bytes. See grpc.message_bytes_max.",
        )

    def _not_one(self) -> CallRefused:
        count = len(self._messages) or "no"
        why = f"{count} messages have come: this method takes one."
        return CallRefused(Code.UNIMPLEMENTED, why)

    def _inflated(self, data: bytes) -> bytes:
        """Return a message without its compression. Raises CallRefused."""
        bits = _CODINGS.get(self._encoding)
        if bits is None:
            shown = self._encoding[:40].decode("latin-1")
            if self._encoding == b"identity":
                raise CallRefused(
                    Code.INTERNAL, "a message is compressed, and grpc-encoding does not say how."
                )
            raise CallRefused(
                Code.UNIMPLEMENTED, f"grpc-encoding {shown!r} is not known here.", (_ACCEPTED,)
            )
        most = self._server.message_bytes_max
        try:
            plain, is_whole = decompressed(data, bits, most)
        except zlib.error:
            is_whole, plain = False, b""
        if len(plain) > most:
            raise self._too_large()
        if not is_whole:
            raise CallRefused(
                Code.INTERNAL, f"a message is not one of {self._encoding.decode('ascii')}."
            )
        return plain

    async def _next(self) -> bytes:
        """Return the next message without its compression, which a worker thread takes off. Raises
        CallRefused."""
        is_compressed, data = self._messages.popleft()
        if is_compressed:
            run = asyncio.get_running_loop().run_in_executor
            data = await run(self._server.workers, self._inflated, data)
            if not self._is_over:
                self._server.memory.grow(len(data))
                self._held_bytes += len(data)
        return data

    def receive_end(self) -> None:
        """Note that the client sends no more messages."""
        self._is_whole = True
        if self._is_over or self._method is None:
            return
        if self._reader.held:
            self._refuse(CallRefused(Code.INTERNAL, "the last message is cut off."))
        elif self._method.reads_stream:
            self._wake()
        elif len(self._messages) != 1:
            self._refuse(self._not_one())
        elif self._method.writes_stream:
            self._begin(self._serve_stream(self._method, None))
        else:
            self._owner.begin_call(self._start)

    async def _requests(self) -> AsyncIterator[bytes]:
        """Yield the messages of the client."""
        while True:
            while not self._messages:
                if self._is_whole:
                    return
                await self._woken()
            try:
                data = await self._next()
            except CallRefused as refusal:
                self._refuse(refusal)
                return
            if not self._messages:
                self._give_back()
                self._forget_bytes()
                self._owner.settle_soon()
            yield data

    def _give_back(self) -> None:
        if self._kept_credit:
            self._owner.protocol.consumed(self._id, self._kept_credit)
            self._kept_credit = 0

    def _forget_bytes(self) -> None:
        """Give back the memory of what was read."""
        self._server.memory.give_back(self._held_bytes - self._reader.held)
        self._held_bytes = self._reader.held

    async def _woken(self) -> None:
        wake = asyncio.get_running_loop().create_future()
        self._wakes.append(wake)
        await wake

    def _wake(self) -> None:
        wakes, self._wakes = self._wakes, []
        for wake in wakes:
            if not wake.done():
                wake.set_result(None)

    # -- the answer

    async def _serve(self, method: CallMethod) -> None:
        """Answer one request by one message."""
        write = method.write
        try:
            reply = await method.run(await self._next(), self._context)
            self._end(reply if write is None else write(reply), Code.OK, "")
        except (Exception, asyncio.CancelledError) as error:
            self._fail(error)

    async def _serve_stream(
        self, method: CallMethod, requests: AsyncIterator[bytes] | None
    ) -> None:
        """Answer a stream of requests by one message, or requests by a stream. requests: None for
        one, which is there."""
        write = method.write
        try:
            given = await self._next() if requests is None else requests
            if not method.writes_stream:
                reply = await method.run(given, self._context)
                self._end(reply if write is None else write(reply), Code.OK, "")
                return
            async with contextlib.aclosing(method.run(given, self._context)) as replies:
                async for reply in replies:
                    await self._send(reply if write is None else write(reply))
            self._end(None, Code.OK, "")
        except (Exception, asyncio.CancelledError) as error:
            self._fail(error)

    async def _send(self, message: bytes) -> None:
        """Send a message, once there is room for it."""
        while self.is_full and not self._is_over:
            await self._woken()
        self._owner.protocol.reply(self._id, message)
        self._owner.hold_back(self, self._id)
        self._owner.settle_soon()

    def _fail(self, error: BaseException) -> None:
        """End the call by what its method raised."""
        if isinstance(error, CallRefused):
            self._refuse(error)
        elif self._context.code is not Code.OK:
            self._end(None, self._context.code, self._context.text)
        elif isinstance(error, asyncio.CancelledError):
            self._end(None, Code.CANCELLED, "the call was cancelled.")
        else:
            _log.error("a call failed", exc_info=error)
            self._end(None, Code.INTERNAL, "an internal error; the server's log has it.")

    def _end(self, message: bytes | None, code: Code, text: str) -> None:
        if self._is_over:
            return
        self._finish()
        trailing = fields_of(self._context.trailing) if self._context.trailing else ()
        trailers = (*_OK, *trailing) if code is Code.OK else trailers_of(code, text, trailing)
        self._owner.protocol.reply(self._id, message, trailers)
        self._owner.settle_soon()

    def _refuse(self, refusal: CallRefused) -> None:
        """End the call by an error of gRPC itself."""
        if self._is_over:
            return
        self._finish()
        if self._task is not None:
            self._task.cancel()
        trailers = trailers_of(refusal.code, refusal.text, refusal.further)
        self._owner.protocol.reply(self._id, None, trailers)
        self._owner.settle_soon()

    def _finish(self) -> None:
        """Keep nothing more for the call."""
        self._is_over = True
        self._messages.clear()
        self._give_back()
        self._server.memory.give_back(self._held_bytes)
        self._held_bytes = 0
        if self._timer is not None:
            self._timer.cancel()
        self._wake()

    def _expire(self) -> None:
        self._refuse(CallRefused(Code.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    # -- the stream

    def lose(self) -> None:
        """Cancel the call, if it is not answered."""
        if not self._is_over:
            self._finish()
            if self._task is not None:
                self._task.cancel()
        self._server.open_calls -= 1

    def hold(self, is_full: bool) -> None:
        """Make no more of the answer, or go on."""
        self.is_full = is_full
        if not is_full:
            self._wake()

    def lose_client(self) -> None:
        """Do nothing: the call is answered. A client that is gone resets the connection."""

    def check(self, now_s: float) -> None:
        """Refuse a call whose only message comes too slowly."""
        settings = self._owner.service.settings
        is_read = self._method is not None and not self._method.reads_stream
        late_s = now_s - self._began_s - settings.header_s
        if not (is_read and not self._is_whole and late_s > 0):
            return
        if self._received < late_s * settings.body_bytes_s_min:
            least = settings.body_bytes_s_min
            self._refuse(
                CallRefused(
                    Code.CANCELLED,
                    f"the message came with less than {least} bytes a second."
                    " See http.body_bytes_s_min.",
                )
            )

    def drain(self) -> None:
        """Do nothing: streams end when their methods hear of it."""


class CallServer:
    """Serves calls by methods. Threads: the event loop's.

    sources: the first that knows a call answers it. open_calls: those that are not answered.
    memory: what the messages of all calls take. open_max: calls at once; more are refused.
    workers: threads that decode compressed messages. fast: answers calls in the core; None: none
    are.
    """

    def __init__(
        self,
        sources: Sequence[CallMethods],
        message_bytes_max: int,
        memory: BodyMemory,
        workers: Executor,
        open_max: int,
        ping_s_min: float,
        fast: CoreCalls | None = None,
    ) -> None:
        self.message_bytes_max = message_bytes_max
        self.memory = memory
        self.workers = workers
        self.ping_s_min = ping_s_min
        self.tasks = Tasks("gRPC")
        self.open_calls = 0
        self._sources, self._open_max = sources, open_max
        self._fast = fast

    def open(self, connection: Http2Connection, id: int, head: bytes) -> CallStream:
        """Return what answers a call."""
        self.open_calls += 1
        return CallStream(self, connection, id, head)

    def refuse_head(self, connection: Http2Connection, id: int) -> None:
        """Answer a call whose metadata is too large."""
        most = connection.service.settings.header_bytes_max
        text = f"the metadata has more than {most} bytes. See grpc.metadata_bytes_max."
        connection.protocol.reply(id, None, trailers_of(Code.RESOURCE_EXHAUSTED, text))

    def take(self, connection: Http2Connection) -> bool:
        """Answer calls in the core. Return whether there were any."""
        return self._fast is not None and self._fast.take(connection)

    def lose(self, connection: Http2Connection) -> None:
        """Give up such calls of a connection that is gone."""
        if self._fast is not None:
            self._fast.lose(connection)

    def give(self, connection: Http2Connection) -> None:
        """Let such calls go with their connection."""
        if self._fast is not None:
            self._fast.give(connection)

    def adopt(self, connection: Http2Connection) -> None:
        """Take such calls that have come with their connection."""
        if self._fast is not None:
            self._fast.adopt(connection)

    def drop(self, protocol: Http2Protocol) -> None:
        """Cancel such calls of a connection that was lost before they were adopted."""
        if self._fast is not None:
            self._fast.drop(protocol)

    def serve_in(self, core_server: HttpServer) -> CallReplies | None:
        """Let a server of the core answer calls on its own connections. Return what answers those
        that it gives to Python; None: it answers none."""
        return None if self._fast is None else self._fast.serve_in(core_server)

    def method_of(self, details: CallDetails) -> CallMethod:
        """Return the method of a call. Raises CallRefused."""
        if self.open_calls > self._open_max:
            raise CallRefused(Code.RESOURCE_EXHAUSTED, "too many calls are open.")
        for each in self._sources:
            if (found := each.method_of(details)) is not None:
                return found
        shown = details.method[:200]
        raise CallRefused(Code.UNIMPLEMENTED, f"there is no method {shown}.")
