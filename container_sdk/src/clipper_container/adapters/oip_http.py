"""A model server over HTTP: connections that are kept, time that is bounded, and what it says as
values."""

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
_KEPT_MAX = 16
_SHOWN = 500


class Unreachable(Exception):
    """The server does not answer: it is down, or takes too long."""


class Reply(NamedTuple):
    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes

    def json(self) -> Any:
        """Unreachable for a body that is none: something else listens there."""
        try:
            return json.loads(self.body) if self.body else {}
        except ValueError:
            raise Unreachable(f"the server's answer is no JSON: {self.body[:80]!r}") from None

    @property
    def trouble(self) -> str:
        """What it says is wrong, on one line."""
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
    """Threads: any."""

    def __init__(self, url: str) -> None:
        """url: http://host:port, and a path before all others, if there is one. ValueError for what
        is none."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no address of a server: http://127.0.0.1:8080 is one.")
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

    def ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        within_s: float = 10.0,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """Unreachable when no whole answer comes within that time. A kept connection that the
        server has closed is replaced."""
        until_s = time.monotonic() + within_s
        line = self._kept()
        if line is not None:
            try:
                return self._ask(line, method, path, body, until_s, headers or {})
            except (ConnectionError, http.client.BadStatusLine):
                pass  # it was closed meanwhile, and nothing of an answer had come
        line = self._make(self.host, self.port, timeout=max(0.001, until_s - time.monotonic()))
        return self._ask(line, method, path, body, until_s, headers or {})

    def close(self) -> None:
        with self._mutex:
            idle, self._idle = self._idle, []
        for line in idle:
            line.close()

    def _kept(self) -> http.client.HTTPConnection | None:
        with self._mutex:
            return self._idle.pop() if self._idle else None

    def _ask(
        self,
        line: http.client.HTTPConnection,
        method: str,
        path: str,
        body: bytes,
        until_s: float,
        headers: Mapping[str, str],
    ) -> Reply:
        is_new = line.sock is None
        try:
            if not is_new:
                line.sock.settimeout(max(0.001, until_s - time.monotonic()))
            line.request(
                method,
                self._before + path,
                body or None,
                {"Content-Type": "application/json", **headers},
            )
            response = line.getresponse()
            pieces = self._read(line, response, until_s)
        except (ConnectionError, http.client.BadStatusLine) as error:
            line.close()
            if not is_new:
                raise
            raise Unreachable(f"{self.url} does not answer: {error}") from None
        except (OSError, http.client.HTTPException) as error:
            line.close()
            raise Unreachable(
                f"{self.url} does not answer: {str(error) or type(error).__name__}"
            ) from None
        except BaseException:
            line.close()
            raise
        self._keep(line, response)
        return Reply(
            response.status, {name.lower(): value for name, value in response.getheaders()}, pieces
        )

    def _read(
        self, line: http.client.HTTPConnection, response: http.client.HTTPResponse, until_s: float
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
            if line.sock is not None:
                line.sock.settimeout(left_s)
        if response.length:
            raise OSError(f"the answer ends {response.length} bytes too early")
        response.close()  # without it, one without a body would keep the connection
        return b"".join(pieces)

    def _keep(self, line: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
        if not response.will_close:
            with self._mutex:
                if len(self._idle) < _KEPT_MAX:
                    self._idle.append(line)
                    return
        line.close()
