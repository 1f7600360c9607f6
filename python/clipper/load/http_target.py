"""Queries over HTTP: one query at a time per kept-alive connection, opened on demand. A query
without a free connection waits, which is counted.
"""

import asyncio
import secrets
import ssl
import time
import urllib.parse
from collections import deque
from collections.abc import Sequence

import msgspec

from clipper.component import Tasks
from clipper.errors import ClipperError, InvalidInput, NoServer
from clipper.host_port import join_host_port
from clipper.load.measurement import Measurement, QueryOutcome
from clipper_core.http.http_head import ChunkedBody, HttpSyntaxError, MessageHead, read_response

_FIRST = 16  # connections opened before the first query
AGAIN_S = 0.2  # before a lost connection is opened again
SALT_DIGITS = 16
WAITING_MAX = 100_000  # queries that wait for a connection; more fail at once


class _Answer(msgspec.Struct):
    default: bool = False
    missing: list[str] = []


_read = msgspec.json.Decoder(_Answer).decode
_read_problem = msgspec.json.Decoder(dict[str, object]).decode


def salt() -> int:
    """Return the first of a range of SALT_DIGITS-digit numbers that no earlier run has used."""
    return (
        int(10 ** (SALT_DIGITS - 1)) * (1 + secrets.randbelow(8)) + secrets.randbelow(10**6) * 10**8
    )


class HttpTarget:
    """Sends queries to one application's `http://HOST:PORT/api/NAME/predict`. fresh: add a unique
    salt to each query, so that no cache answers it. tls: for https.

    Threads: the event loop's.
    """

    def __init__(
        self,
        url: str,
        rows: Sequence[object],
        connections: int,
        headers: Sequence[tuple[str, str]] = (),
        fresh: bool = True,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        split = urllib.parse.urlsplit(url)
        try:
            port = split.port
        except ValueError:
            port = 0
        if split.scheme not in ("http", "https") or not split.hostname or port == 0:
            raise InvalidInput(f"{url!r} is not a server's URL.", hint="Write http://HOST:PORT.")
        self._host = split.hostname
        self._tls = tls or ssl.create_default_context() if split.scheme == "https" else None
        self._port = port or (443 if self._tls else 80)
        self.url = url
        more = "".join(f"{name}: {value}\r\n" for name, value in headers)
        head = (
            f"POST {split.path or '/'} HTTP/1.1\r\nHost: {split.netloc}\r\nContent-Type:"
            f" application/json\r\n{more}"
        )
        bodies = [
            msgspec.json.encode({"input": row})[:-1] + (b',"salt":' if fresh else b"}")
            for row in rows
        ]
        more_bytes = SALT_DIGITS + 1 if fresh else 0
        self._requests = [
            f"{head}Content-Length: {len(body) + more_bytes}\r\n\r\n".encode() + body
            for body in bodies
        ]
        self._salt = salt() if fresh else 0
        self._most = connections
        self._free: deque[_HttpConnection] = deque()
        self._waiting: deque[int] = deque()
        self._connections: set[_HttpConnection] = set()
        self._connecting = Tasks("the load")
        self._measured: Measurement
        self._zero_s = 0.0
        self._closed = False

    async def open(self) -> None:
        """Open connections and send one query to check that the server accepts them. Raises:
        NoServer, ClipperError.
        """
        try:
            await asyncio.gather(*(self._connect() for _ in range(min(self._most, _FIRST))))
        except OSError as error:
            hint = (
                "Start one with: clipper up --http HOST:PORT   Or name another: --to"
                " http://HOST:PORT"
            )
            raise NoServer(
                f"no server answers at {join_host_port(self._host, self._port)}:"
                f" {error.strerror or error}.",
                hint=hint,
            ) from None
        first = Measurement(1, 1, 1e9)
        self.count_in(first, time.perf_counter())
        self.send(first.sent(0, 0))
        for _ in range(1000):
            await asyncio.sleep(0.01)
            if first.outcomes[0] != QueryOutcome.UNANSWERED:
                break
        wrong = next((text for text in first.errors if text.startswith("4")), "")
        if first.outcomes[0] == QueryOutcome.UNANSWERED:
            wrong = "none was answered in 10 s"
        if wrong:
            raise ClipperError(
                f"{self.url} does not take the queries: {wrong}", hint="See --input."
            )

    def count_in(self, measured: Measurement, zero_s: float) -> None:
        """Record outcomes in `measured`, with times relative to zero_s."""
        self._measured, self._zero_s = measured, zero_s

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.create_connection(
            lambda: _HttpConnection(self), self._host, self._port, ssl=self._tls
        )

    def _request(self, number: int) -> bytes:
        request = self._requests[number % len(self._requests)]
        return request + b"%d}" % (self._salt + number) if self._salt else request

    def send(self, number: int) -> None:
        """Send query `number`, or queue it."""
        if self._free:
            self._free.popleft().send(number, self._request(number))
            return
        if not self._connections:
            self._finish(number, QueryOutcome.ERROR, "no connection")
            return
        if len(self._connections) + len(self._connecting) < self._most:
            self._connecting.spawn(self._connect_after(0.0))
        else:
            self._measured.waited += 1
        if len(self._waiting) >= WAITING_MAX:
            self._finish(
                number, QueryOutcome.ERROR, f"more than {WAITING_MAX} wait for a connection"
            )
        else:
            self._waiting.append(number)

    def connected(self, connection: "_HttpConnection") -> None:
        """Add a new connection."""
        self._connections.add(connection)
        self.released(connection)

    def released(self, connection: "_HttpConnection") -> None:
        """Use a free connection for a waiting query."""
        if self._waiting:
            number = self._waiting.popleft()
            connection.send(number, self._request(number))
        else:
            self._free.append(connection)

    def lost(self, connection: "_HttpConnection", number: int) -> None:
        """Remove a lost connection and open another. number: its query, or -1."""
        self._connections.discard(connection)
        if connection in self._free:
            self._free.remove(connection)
        if self._closed:  # queries in flight count as unanswered
            return
        if number >= 0:
            self._finish(number, QueryOutcome.ERROR, "the connection was lost")
        while not self._connections and self._waiting:
            self._finish(self._waiting.popleft(), QueryOutcome.ERROR, "no connection")
        self._connecting.spawn(self._connect_after(AGAIN_S))

    async def _connect_after(self, pause_s: float) -> None:
        while not self._closed:
            await asyncio.sleep(pause_s)
            try:
                await self._connect()
                return
            except OSError:
                pause_s = AGAIN_S

    def answered(self, number: int, status: int, body: bytes) -> None:
        """Record the response to a query."""
        if status == 200:
            try:
                reply = _read(body)
            except msgspec.MsgspecError:
                self._finish(number, QueryOutcome.ERROR, "200 without the members of an answer")
                return
            self._finish(
                number,
                (
                    QueryOutcome.DEFAULT
                    if reply.default
                    else QueryOutcome.MISSING
                    if reply.missing
                    else QueryOutcome.OK
                ),
            )
        elif status in (429, 503):
            self._finish(number, QueryOutcome.REFUSED, f"{status} {_problem(body)}")
        else:
            self._finish(number, QueryOutcome.ERROR, f"{status} {_problem(body)}")

    def _finish(self, number: int, outcome: QueryOutcome, error: str = "") -> None:
        self._measured.done(number, outcome, time.perf_counter() - self._zero_s, error)

    async def close(self) -> None:
        """Drop all connections."""
        self._closed = True
        await self._connecting.cancel()
        for connection in [*self._connections]:
            connection.transport.abort()
        await asyncio.sleep(0)


def _problem(body: bytes) -> str:
    try:
        problem = _read_problem(body)
        return str(problem.get("detail") or problem.get("error") or "")[:200]
    except msgspec.MsgspecError:
        return "(no reason given)"


class _HttpConnection(asyncio.Protocol):
    """One connection."""

    def __init__(self, target: HttpTarget) -> None:
        self._target = target
        self._number = -1
        self._received = self._body = b""
        self._head: MessageHead | None = None
        self._chunks = ChunkedBody()
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]  # TCP transports are of this type
        self._target.connected(self)

    def connection_lost(self, error: Exception | None) -> None:
        number, self._number = self._number, -1
        self._target.lost(self, number)

    def send(self, number: int, request: bytes) -> None:
        self._number = number
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        try:
            if self._has_all(data):
                self._finish()
        except HttpSyntaxError:
            self.transport.abort()

    def _has_all(self, data: bytes) -> bool:
        """Read bytes of a response; return whether it is complete."""
        if self._head is None:
            self._received += data
            self._head = read_response(self._received, (b"transfer-encoding",))
            if self._head is None:
                return False
            data = self._received[self._head.end :]
            self._chunks, self._received, self._body = ChunkedBody(), b"", b""
        if self._head.headers:
            self._body += self._chunks.feed(data, 0)[0]
            return self._chunks.done
        if self._head.length < 0:
            raise HttpSyntaxError("the response does not give the length of its body")
        self._body += data
        return len(self._body) >= self._head.length

    def _finish(self) -> None:
        head, self._head = self._head, None
        number, self._number = self._number, -1
        if number < 0 or head is None:
            return
        self._target.answered(number, head.status, self._body)
        if head.keep_alive and not self.transport.is_closing():
            self._target.released(self)
        else:
            self.transport.close()
