"""HTTP/1.1 as a client speaks it with a server of Clipper, without sockets: heads of requests, and
responses from bytes as they come."""

from collections import deque
from typing import Final, NamedTuple

HEAD_BYTES_MAX: Final = 1 << 16
BODY_BYTES_MAX: Final = 1 << 32  # of a response; a larger one is refused before it is read
_LINE_BYTES_MAX: Final = 1 << 12  # of the head of a chunk
_NO_BODY: Final = frozenset((204, 304))


class NotHttp(Exception):
    """Bytes that are no response of HTTP/1.1; the message says why."""


class Response(NamedTuple):
    """A whole response. headers: by their names in lower case; the last of equal ones. closes: the
    server closes the connection after it."""

    status: int
    headers: dict[str, str]
    body: bytes
    closes: bool

    @property
    def retry_after_s(self) -> float | None:
        """Return the seconds of Retry-After; None if it has none."""
        text = self.headers.get("retry-after", "")
        return float(text) if text.isdecimal() and len(text) < 10 else None


class ResponseReader:
    """Reads the response to one request. Threads: one.

    streams: a body of server-sent events may be taken before it is whole. begun: whether a byte of
    it has come. An interim response (1xx) is dropped, and does not count as begun. has_events: it
    has such a body. is_whole: that body has come to its end.
    """

    __slots__ = (
        "_body",
        "_chunks",
        "_closes",
        "_head",
        "_headers",
        "_left",
        "_status",
        "_streams",
        "begun",
        "has_events",
        "is_whole",
    )

    def __init__(self, streams: bool = False) -> None:
        self._streams = streams
        self.begun = False
        self.has_events = False
        self.is_whole = False
        self._head = b""
        self._status = 0
        self._headers: dict[str, str] = {}
        self._closes = False
        self._body: list[bytes] = []
        self._left = 0  # bytes of the body; -1: until the connection ends
        self._chunks: ChunkReader | None = None

    def feed(self, data: bytes) -> Response | None:
        """Take bytes of the connection; return the response once it is whole, and one that has
        events, without its body, each time. Raises NotHttp."""
        self.begun = True
        if not self._status:
            data = self._take_head(data)
            if not self._status:
                return None
        if self._chunks is not None:
            is_whole = self._chunks.feed(data)
            if self.has_events:
                self.is_whole = is_whole
                return self._whole(b"")
            return self._whole(self._chunks.body()) if is_whole else None
        self._body.append(data)
        if self._left < 0:
            return None
        self._left -= len(data)
        if self._left > 0:
            return None
        if self._left < 0:
            raise NotHttp("more bytes than its Content-Length")
        return self._whole(b"".join(self._body) if len(self._body) > 1 else data)

    def take(self) -> bytes:
        """Return the bytes of a body of events that have come since the last call."""
        return b"" if self._chunks is None else self._chunks.take()

    def at_end(self) -> Response | None:
        """Return the response whose body the end of the connection ends; None if it is cut off."""
        if not self._status or self._left >= 0 or self._chunks is not None:
            return None
        return self._whole(b"".join(self._body))

    def _whole(self, body: bytes) -> Response:
        return Response(self._status, self._headers, body, self._closes)

    def _take_head(self, data: bytes) -> bytes:
        """Read the head, if all of it is there; return the bytes after it."""
        if self._head:
            data = self._head + data
        head, end, rest = data.partition(b"\r\n\r\n")
        if not end:
            if len(data) > HEAD_BYTES_MAX:
                raise NotHttp(f"a head of more than {HEAD_BYTES_MAX} bytes")
            self._head = data
            return b""
        self._head = b""
        first, *lines = head.decode("latin-1").split("\r\n")
        version, code = first[:9], first[9:12]
        if version not in ("HTTP/1.1 ", "HTTP/1.0 ") or not code.isdecimal():
            raise NotHttp(f"it begins with {first[:40]!r}")
        status = int(code)
        if 100 <= status < 200:
            self.begun = bool(rest)
            return self._take_head(rest) if rest else b""
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        self._begin(status, version, headers)
        return rest

    def _begin(self, status: int, version: str, headers: dict[str, str]) -> None:
        """Find out how the body ends."""
        self._status, self._headers = status, headers
        connection = headers.get("connection", "").lower()
        self._closes = "close" in connection or (version == "HTTP/1.0 ")
        length = headers.get("content-length")
        if status in _NO_BODY:
            self._left = 0
        elif "transfer-encoding" in headers:
            if headers["transfer-encoding"].lower() != "chunked":
                raise NotHttp(f"Transfer-Encoding {headers['transfer-encoding'][:40]!r}")
            self._chunks = ChunkReader()
            kind = headers.get("content-type", "").lower()
            self.has_events = self._streams and kind.startswith("text/event-stream")
        elif length is None:
            self._left, self._closes = -1, True
        else:
            if not length.isdecimal() or len(length) > 12 or int(length) > BODY_BYTES_MAX:
                raise NotHttp(f"Content-Length {length[:40]!r}")
            self._left = int(length)


class ChunkReader:
    """Reads a body with Transfer-Encoding: chunked. Threads: one."""

    __slots__ = ("_after", "_buffer", "_data", "_left", "_size")

    def __init__(self) -> None:
        self._buffer = b""
        self._data: list[bytes] = []
        self._left = 0  # bytes of the chunk
        self._after = "size"  # the next line: a "size", the "end" of a chunk, or a "trailer"
        self._size = 0

    def feed(self, data: bytes) -> bool:
        """Take bytes; return whether the body is whole. Raises NotHttp."""
        data = self._buffer + data
        at = 0
        while True:
            if self._left:
                taken = data[at : at + self._left]
                self._data.append(taken)
                self._left -= len(taken)
                at += len(taken)
                if self._left:
                    break
            end = data.find(b"\r\n", at)
            if end < 0:
                if len(data) - at > _LINE_BYTES_MAX:
                    raise NotHttp("a chunk without a size")
                break
            line = data[at:end]
            at = end + 2
            if self._take_line(line):
                if at != len(data):
                    raise NotHttp("more bytes than its chunks")
                return True
        self._buffer = data[at:]
        return False

    def _take_line(self, line: bytes) -> bool:
        """Read a line between chunks; return whether it is the last one."""
        if self._after == "trailer":
            return not line
        if self._after == "end":
            if line:
                raise NotHttp("a chunk that is longer than its size")
            self._after = "size"
            return False
        digits = line.partition(b";")[0].strip()
        try:
            size = int(digits, 16) if digits.isalnum() else -1
        except ValueError:
            size = -1
        self._size += max(size, 0)
        if size < 0 or self._size > BODY_BYTES_MAX:
            raise NotHttp(f"a chunk of size {line[:40]!r}")
        self._left = size
        self._after = "end" if size else "trailer"
        return False

    def body(self) -> bytes:
        """Return the body so far."""
        return b"".join(self._data)

    def take(self) -> bytes:
        """Return the body since the last call, and keep it no more."""
        taken = self.body()
        self._data.clear()
        return taken


class ServerEvent(NamedTuple):
    """A server-sent event: its type, and its data."""

    name: str
    data: bytes


class EventReader:
    """Reads server-sent events as a server of Clipper writes them. Threads: one."""

    __slots__ = ("_events", "_rest")

    def __init__(self) -> None:
        self._events: deque[ServerEvent] = deque()
        self._rest = b""

    def feed(self, text: bytes) -> None:
        """Take bytes of the body."""
        *events, self._rest = (self._rest + text).split(b"\n\n")
        for event in events:
            name = "message"
            data: list[bytes] = []
            for line in event.split(b"\n"):
                field, _, value = line.partition(b": ")
                if field == b"event":
                    name = value.decode("latin-1")
                elif field == b"data":
                    data.append(value)
            if data:  # else it is a comment
                self._events.append(ServerEvent(name, b"\n".join(data)))

    def next(self) -> ServerEvent | None:
        """Return the next event; None if it has not come."""
        return self._events.popleft() if self._events else None
