"""A server's own readings, second by second, as a client reads them: server-sent events over one
connection."""

import contextlib
import http.client
import socket
from collections.abc import Iterator
from typing import Any

import msgspec

from clipper.errors import NoServer

SILENCE_S = 20.0  # the server has a reading in five seconds at the latest
LINE_BYTES_MAX = 16 << 20


class Stream:
    """Server-sent events of a server, to be iterated once: pairs of name and content.

    Raises NoServer when the server is gone. Threads: one; `hang_up`: any.
    """

    def __init__(
        self, url: str, line: http.client.HTTPConnection, response: http.client.HTTPResponse
    ) -> None:
        self._url, self._line, self._response = url, line, response
        self._socket = line.sock
        if self._socket is not None:
            self._socket.settimeout(SILENCE_S)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        name, data = "message", []
        while True:
            line = self._read()
            if line.startswith(b"event:"):
                name = line[6:].strip().decode()
            elif line.startswith(b"data:"):
                data.append(line[5:].strip())
            elif not line.strip():
                if data:
                    yield name, self._decoded(b"\n".join(data))
                name, data = "message", []

    def _read(self) -> bytes:
        try:
            line = self._response.readline(LINE_BYTES_MAX)
        except TimeoutError:
            raise NoServer(f"{self._url} has sent nothing for {SILENCE_S:g} s.") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise NoServer(f"{self._url} is gone: {error or type(error).__name__}.") from None
        if not line:
            raise NoServer(f"{self._url} ended the stream.")
        return line

    def _decoded(self, data: bytes) -> object:
        try:
            return msgspec.json.decode(data)
        except msgspec.DecodeError:
            raise NoServer(f"what {self._url} sends is not a stream of a Clipper server.") from None

    def hang_up(self) -> None:
        """End an iteration that waits."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self._response.close()
        self._line.close()
