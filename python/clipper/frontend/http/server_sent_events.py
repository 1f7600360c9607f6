"""Server-sent events: encoding, and the position from which a reader resumes.

A handler returns `StreamedResponse(begin)` and writes to the StreamedBody that `begin` is given.
Source: the HTML standard, section 9.2.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from clipper.frontend.http.messages import HttpRequest

CONTENT_TYPE: Final = b"text/event-stream; charset=utf-8"
# proxies must not buffer events
HEADERS: Final = (
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
)
HEARTBEAT: Final = b":\n\n"  # a comment: keeps the connection open through proxies
_ID_MAX = 20


def encode_event(data: bytes, *, name: bytes = b"", id: int = 0, retry_ms: int = 0) -> bytes:
    """Encode one event.

    data: UTF-8, one line or several. name: the event's type; `message` when empty. id: the value
    that the reader sends back as Last-Event-ID; 0 for none. retry_ms: how long the reader should
    wait before it reconnects; 0 for the reader's default.
    """
    lines = []
    if name:
        lines.append(b"event: " + _one_line(name))
    if id:
        lines.append(b"id: %d" % id)
    if retry_ms:
        lines.append(b"retry: %d" % retry_ms)
    lines += [
        b"data: " + line for line in data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    ]
    return b"\n".join(lines) + b"\n\n"


class Heartbeat:
    """Calls `beat` after each interval without a `note`. Threads: the event loop's."""

    def __init__(self, interval_s: float, beat: Callable[[], None]) -> None:
        self._interval_s = interval_s
        self._beat = beat
        self._is_quiet = False
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin an interval."""
        self._is_quiet = True
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._end)

    def note(self) -> None:
        """Note that something was written."""
        self._is_quiet = False

    def stop(self) -> None:
        """Call `beat` no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _end(self) -> None:
        if self._is_quiet:
            self._beat()
        self.start()


def _one_line(text: bytes) -> bytes:
    if b"\n" in text or b"\r" in text:
        raise ValueError("the name of an event is one line")
    return text


def last_event_id(request: HttpRequest) -> int:
    """Return the id of the last event that this reader has received.

    Returns 0 when the header is missing or is not a valid id.
    """
    given = request.headers.get(b"last-event-id", b"")
    return int(given) if given.isdigit() and len(given) <= _ID_MAX else 0
