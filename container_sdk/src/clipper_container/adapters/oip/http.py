"""HTTP client of a model server, with kept-alive connections and a deadline per request."""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.parse
from collections.abc import Mapping
from typing import Any, NamedTuple

ANSWER_BYTES_MAX = 1 << 30
_PIECE = 1 << 20
_IDLE_MAX = 16
_SHOWN = 500


class Unreachable(ConnectionError):
    """The server does not answer, or not in time."""


class HttpReply(NamedTuple):
    """Status, headers and body of a response."""

    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes

    def json(self) -> Any:
        """Decode the body. Raises: Unreachable if it is not JSON, because then something else is
        listening.
        """
        try:
            return json.loads(self.body) if self.body else {}
        except ValueError:
            raise Unreachable(f"the server's answer is not JSON: {self.body[:80]!r}") from None

    @property
    def trouble(self) -> str:
        """Return the error message of the response, on one connection."""
        try:
            found = json.loads(self.body)
            text = (
                str(found.get("error") or found.get("detail") or found)
                if isinstance(found, dict)
                else str(found)
            )
        except ValueError:
            text = self.body.decode(errors="replace")
        return " ".join(text.split())[:_SHOWN] or f"status {self.status}"


class HttpServer:
    """Client of one server. Threads: any."""

    def __init__(self, url: str) -> None:
        """Set the address of the server. url: http://host:port, with an optional path prefix.
        Raises: ValueError."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not a server's URL, such as http://127.0.0.1:8080.")
        self.url, self.host, self.port = (
            url,
            parts.hostname,
            parts.port or {"http": 80, "https": 443}[parts.scheme],
        )
        self._before = parts.path.rstrip("/")
        self._make = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        self._mutex = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []

    def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        within_s: float = 10.0,
        headers: Mapping[str, str] | None = None,
    ) -> HttpReply:
        """Send a request and return the complete response. Raises: Unreachable if it does not
        arrive within within_s.

        A kept-alive connection that the server has closed is replaced.
        """
        until_s = time.monotonic() + within_s
        connection = self._take_idle()
        if connection is not None:
            try:
                return self._request(connection, method, path, body, until_s, headers or {})
            except (ConnectionError, http.client.BadStatusLine):
                pass  # the idle connection was closed before any byte of the answer
        connection = self._make(
            self.host, self.port, timeout=max(0.001, until_s - time.monotonic())
        )
        return self._request(connection, method, path, body, until_s, headers or {})

    def close(self) -> None:
        """Close the idle connections."""
        with self._mutex:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _take_idle(self) -> http.client.HTTPConnection | None:
        with self._mutex:
            return self._idle.pop() if self._idle else None

    def _request(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: bytes,
        until_s: float,
        headers: Mapping[str, str],
    ) -> HttpReply:
        is_new = connection.sock is None
        try:
            if not is_new:
                connection.sock.settimeout(max(0.001, until_s - time.monotonic()))
            connection.request(
                method,
                self._before + path,
                body or None,
                {"Content-Type": "application/json", **headers},
            )
            response = connection.getresponse()
            pieces = self._read(connection, response, until_s)
        except (ConnectionError, http.client.BadStatusLine) as error:
            connection.close()
            if not is_new:
                raise
            raise Unreachable(f"{self.url} does not answer: {error}") from None
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise Unreachable(
                f"{self.url} does not answer: {str(error) or type(error).__name__}"
            ) from None
        except BaseException:
            connection.close()
            raise
        self._keep(connection, response)
        return HttpReply(
            response.status, {name.lower(): value for name, value in response.getheaders()}, pieces
        )

    def _read(
        self,
        connection: http.client.HTTPConnection,
        response: http.client.HTTPResponse,
        until_s: float,
    ) -> bytes:
        pieces, size = [], 0
        while piece := response.read1(_PIECE):
            pieces.append(piece)
            size += len(piece)
            if size > ANSWER_BYTES_MAX:
                raise OSError(f"an answer of more than {ANSWER_BYTES_MAX} bytes")
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("timed out")
            if connection.sock is not None:
                connection.sock.settimeout(left_s)
        if response.length:
            raise OSError(f"the answer ends {response.length} bytes too early")
        response.close()  # a response without a body would keep the connection busy
        return b"".join(pieces)

    def _keep(
        self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse
    ) -> None:
        if not response.will_close:
            with self._mutex:
                if len(self._idle) < _IDLE_MAX:
                    self._idle.append(connection)
                    return
        connection.close()
