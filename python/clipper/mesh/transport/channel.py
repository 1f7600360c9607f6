"""Messages between a node and its model hosts, and between nodes: a length, then a msgpack map.

The length is a little-endian u32. {"n": 7, "verb": "load", ...} is a request; {"n": 7, "ok": true,
...} or {"n": 7, "ok": false, "fault": ..., "why": ...} is its answer, in any order; {"event": ...}
needs no answer. The side that connects sends {"verb": "hello", "token": ..., ...} first. Threads:
all of a channel on one event loop.
"""

import asyncio
import contextlib
import hmac
import itertools
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, Self

import msgpack

from clipper.mesh.transport.network import SOCKETS, Network

FRAME_BYTES_MAX: Final = 1 << 20
HELLO_S: Final = 5.0
# the fault of a refusal that is no failure: the caller reads the record again
NOT_LOADED_HERE: Final = "elsewhere"
REQUESTS_MAX: Final = 65_536  # unanswered requests in one direction
MESSAGES_MAX: Final = 64  # of a connection that are handled in one turn of the loop
UNSENT_BYTES_MAX: Final = 64 << 20  # for the other side, which does not read
_LENGTH_BYTES: Final = 4
_log = logging.getLogger(__name__)

Message = dict[str, Any]
Serve = Callable[[str, Message], Awaitable[Message]]
OnEvent = Callable[[Message], None]


class RequestFailed(Exception):
    """The other side refuses a request or has failed.

    fault: `artifact`, `load` or `host`; `none` and NOT_LOADED_HERE: it was not tried.
    """

    def __init__(self, why: str, fault: str = "host") -> None:
        super().__init__(why)
        self.why, self.fault = why, fault


class ConnectionLost(RequestFailed):
    """The other side is gone or does not answer; the request may have been executed."""


async def _refuse(verb: str, _: Message) -> Message:
    raise RequestFailed(f"nothing here answers {verb!r}", "none")


def _ignore(_: Message) -> None:
    """Ignore an event."""


class PeerChannel:
    """A connection for requests in both directions.

    serve: answers the other side's requests, or raises RequestFailed. on_event: called with its
    events. hello: the first message of the side that has connected. closed: set at the end.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        serve: Serve = _refuse,
        on_event: OnEvent = _ignore,
        hello: Message | None = None,
    ) -> None:
        self._reader, self._writer, self._serve, self._on_event = reader, writer, serve, on_event
        self.hello = hello or {}
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[Message]] = {}
        self._serving: dict[asyncio.Task[None], None] = {}  # in the order of their starts
        self._runner: asyncio.Task[None] | None = None
        self.closed = asyncio.Event()

    async def request(self, verb: str, timeout_s: float, **fields: object) -> Message:
        """Send a request and return the answer. RequestFailed; ConnectionLost without an answer."""
        if self.closed.is_set():
            raise ConnectionLost("the connection is closed")
        if len(self._pending) >= REQUESTS_MAX:
            raise RequestFailed(f"{REQUESTS_MAX} requests wait for an answer already", "none")
        number = next(self._numbers)
        answer = self._pending[number] = asyncio.get_running_loop().create_future()
        # the caller may have been cancelled
        answer.add_done_callback(lambda one: one.cancelled() or one.exception())
        try:
            self.send({"n": number, "verb": verb, **fields})
            async with asyncio.timeout(timeout_s):
                await self._writer.drain()
                found = await answer
        except TimeoutError:
            raise ConnectionLost(f"no answer to {verb!r} within {timeout_s:g} s") from None
        except OSError as error:
            raise ConnectionLost(f"the connection broke: {error}") from None
        finally:
            self._pending.pop(number, None)
        if not found.get("ok", False):
            raise RequestFailed(
                str(found.get("why", "no reason given")), str(found.get("fault", "host"))
            )
        return dict(found)

    def notify(self, **message: object) -> None:
        """Send an event; ignored when the connection is closed."""
        if not self.closed.is_set():
            self.send(message)

    def send(self, message: Message) -> None:
        """Send a message."""
        data = msgpack.packb(message)
        if len(data) > FRAME_BYTES_MAX:
            raise RequestFailed(
                f"a message of {len(data)} bytes: at most {FRAME_BYTES_MAX}", "none"
            )
        if self._writer.transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
            self._writer.transport.abort()  # close() would wait until all is sent
            self.close()
            raise ConnectionLost(f"the other side does not read {UNSENT_BYTES_MAX} bytes")
        self._writer.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)

    def start(self) -> None:
        """Run the channel in a task of its own."""
        self._runner = asyncio.get_running_loop().create_task(self.run())

    async def run(self) -> None:
        """Read messages until the connection ends; pending requests then raise ConnectionLost."""
        try:
            while True:
                for _ in range(MESSAGES_MAX):
                    self._take(await read(self._reader))
                await asyncio.sleep(0)  # a read does not wait while messages are there
        except (EOFError, OSError, ValueError) as error:
            if not isinstance(error, EOFError):
                _log.info("a channel of the mesh ends: %s", error)
        except Exception:
            _log.exception("a channel of the mesh ends")
        finally:
            self.close()

    def close(self) -> None:
        """Close the connection."""
        self.closed.set()
        self._writer.close()
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(ConnectionLost("the other side is gone"))
        for task in tuple(self._serving):
            task.cancel()

    def _take(self, message: Message) -> None:
        if "event" in message:
            self._on_event(message)
        elif "verb" in message:
            if len(self._serving) >= REQUESTS_MAX:
                raise ValueError(f"more than {REQUESTS_MAX} requests at once")
            task = asyncio.get_running_loop().create_task(self._answer(message))
            self._serving[task] = None
            task.add_done_callback(lambda one: self._serving.pop(one, None))
        else:
            answer = self._pending.get(int(message.get("n", 0)))
            if answer is not None and not answer.done():
                answer.set_result(message)

    async def _answer(self, message: Message) -> None:
        number, verb = message.get("n"), str(message["verb"])
        try:
            found = {"n": number, "ok": True, **await self._serve(verb, message)}
        except RequestFailed as failure:
            found = {"n": number, "ok": False, "fault": failure.fault, "why": failure.why[:4096]}
        except Exception as error:
            _log.exception("the mesh could not answer %r", verb)
            found = {
                "n": number,
                "ok": False,
                "fault": "host",
                "why": f"{type(error).__name__}: {error}"[:4096],
            }
        with contextlib.suppress(OSError, RequestFailed):
            if not self.closed.is_set():
                self.send(found)


async def read(reader: asyncio.StreamReader) -> Message:
    """Read one message. EOFError at the end; ValueError for an invalid message."""
    length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "little")
    if not 0 < length <= FRAME_BYTES_MAX:
        raise ValueError(f"a message of {length} bytes: 1 to {FRAME_BYTES_MAX} are possible")
    try:
        message = msgpack.unpackb(await reader.readexactly(length))
    except asyncio.IncompleteReadError:
        raise
    except Exception as error:
        raise ValueError(f"the message is not msgpack: {error}") from None
    if not isinstance(message, dict):
        raise ValueError("the message is not a map")
    return message


async def dial(
    address: str, hello: Message, serve: Serve = _refuse, network: Network = SOCKETS
) -> PeerChannel:
    """Connect to an address and say hello; the channel then runs by itself. ConnectionLost."""
    try:
        async with asyncio.timeout(HELLO_S):
            reader, writer = await network.connect(address)
    except (OSError, TimeoutError, ValueError) as error:
        raise ConnectionLost(f"cannot reach {address}: {error or type(error).__name__}") from None
    channel = PeerChannel(reader, writer, serve)
    channel.send({"verb": "hello", **hello})
    channel.start()
    return channel


async def is_gone(address: str, network: Network = SOCKETS) -> bool:
    """Return whether the connection to an address is refused, so no process listens there."""
    try:
        async with asyncio.timeout(HELLO_S):
            _, writer = await network.connect(address)
    except (ConnectionRefusedError, FileNotFoundError):
        return True
    except (OSError, TimeoutError, ValueError):
        return False
    writer.close()
    return False


class ChannelServer:
    """A listening socket for channels; callers must present the token.

    address: `unix:/path`, `tcp:host:port`, or empty: a socket `name` in the directory. serve,
    on_event: see PeerChannel. on_accept: called with each accepted channel before it runs.
    network: on which it listens.
    """

    def __init__(
        self,
        address: str,
        token: str,
        directory: Path,
        name: str = "",
        *,
        serve: Serve = _refuse,
        on_event: OnEvent = _ignore,
        on_accept: Callable[[PeerChannel], None] = lambda _: None,
        network: Network = SOCKETS,
    ) -> None:
        self._listening = network.listen(address, directory, name)
        self._token, self._serve, self._on_event = token.encode(), serve, on_event
        self._on_accept = on_accept
        self._channels: dict[PeerChannel, None] = {}

    @property
    def address(self) -> str:
        """The address that callers connect to."""
        return self._listening.address

    async def open(self) -> Self:
        """Start to accept connections."""
        await self._listening.open(self._greet)
        return self

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(HELLO_S):
                hello = await read(reader)
            if hello.get("verb") != "hello" or not hmac.compare_digest(
                str(hello.get("token", "")).encode(), self._token
            ):
                raise ValueError("it gave no hello, or a wrong token")
        except (EOFError, OSError, TimeoutError, ValueError) as error:
            _log.warning("a connection to a channel of the mesh is rejected: %s", error)
            writer.close()
            return
        channel = PeerChannel(reader, writer, self._serve, self._on_event, hello)
        self._channels[channel] = None
        self._on_accept(channel)
        try:
            await channel.run()
        finally:
            self._channels.pop(channel, None)

    def close(self) -> None:
        """Close the socket and all channels."""
        self._listening.stop()
        for channel in tuple(self._channels):
            channel.close()
        self._listening.remove()
