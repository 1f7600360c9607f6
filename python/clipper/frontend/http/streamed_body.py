"""The body of a streamed response: what a handler that returned StreamedResponse writes to."""

import logging
from collections.abc import Callable
from typing import Final, Protocol

from clipper.serving.query.future_watcher import Future, FutureWatcher

UNREAD_BYTES_MAX: Final = 4 << 20  # unsent bytes at which the client is disconnected
_log = logging.getLogger(__name__)


class BodyWriter(Protocol):
    """Interface of the connection below a body."""

    full: bool

    def write_body(self, data: bytes) -> int:
        """Send some bytes; return how many the client has not taken yet."""

    def request_turn(self) -> None:
        """Call the body's `take_turn` in a turn of the loop, if there is room."""

    def finish_body(self) -> None:
        """Go on with the next response, after the last byte of the body."""

    def abort(self) -> None:
        """Close the connection at once."""


class StreamedBody:
    """The body of one response, written in parts. Threads: the event loop's; `post` from any.

    What a handler has to know between its writes it is told by the functions that it gives to
    `listen`. `write` returns False when the client does not keep up: stop writing until there is
    room. chunked: HTTP/1.1 marks the end of the body by chunks; HTTP/1.0 closes the connection.
    """

    __slots__ = (
        "_chunked",
        "_on_gone",
        "_on_room",
        "_on_turn",
        "_outlet",
        "_started",
        "_watcher",
        "ended",
        "gone",
    )

    def __init__(self, outlet: BodyWriter, watcher: FutureWatcher, chunked: bool) -> None:
        self._outlet, self._watcher, self._chunked = outlet, watcher, chunked
        self._started = False
        self.ended = self.gone = False
        self.listen()

    def listen(
        self,
        *,
        room: Callable[[], None] | None = None,
        turn: Callable[[], None] | None = None,
        gone: Callable[[], None] | None = None,
    ) -> None:
        """Call these functions from now on, on the event loop, until the body ends.

        room: the client has taken what was written. turn: called once in a later turn of the loop
        after `request_turn`; connections that write much take turns. gone: called once if the
        client disconnects, or is cut off, before `end`: cancel the work in progress for it.
        """
        self._on_room = room
        self._on_turn = turn
        self._on_gone = gone

    def start(self, handler: "Callable[[StreamedBody], None]") -> None:
        """Call the handler's function."""
        self._call(handler, self)
        self._started = True

    def _call(self, step: Callable[..., None], *args: object) -> None:
        """Call a step. An error aborts the connection, since the headers are sent already."""
        try:
            step(*args)
        except Exception as error:
            _log.exception("a streamed response failed", exc_info=error)
            self._outlet.abort()

    def write(self, data: bytes) -> bool:
        """Send some bytes; return whether there is room for more. Does nothing once the client
        is gone."""
        if self.gone or self.ended:
            return False
        if data:
            unread = self._outlet.write_body(
                b"%x\r\n%s\r\n" % (len(data), data) if self._chunked else data
            )
            if unread > UNREAD_BYTES_MAX:
                self._outlet.abort()
                return False
        return not self._outlet.full

    def end(self) -> None:
        """Finish the body. Idempotent."""
        if self.gone or self.ended:
            return
        self.ended = True
        # the handler refers to this body
        self.listen()
        if self._chunked:
            self._outlet.write_body(b"0\r\n\r\n")
        if self._started:
            self._outlet.finish_body()

    def request_turn(self) -> None:
        """Have `turn` called in a later turn of the loop, unless the client has to read first: then
        `room` is called."""
        self._outlet.request_turn()

    def drop(self) -> None:
        """Disconnect the client."""
        if not self.gone and not self.ended:
            self._outlet.abort()

    def post(self, step: Callable[..., object], *args: object) -> None:
        """Call `step(*args)` on the event loop. Thread-safe; does nothing once the loop is
        closed."""
        self._watcher.post(step, *args)

    def on_done(self, future: Future, step: Callable[[Future], None]) -> bool:
        """Call `step(future)` on the loop when the future is done.

        Returns False, and never calls it, if the future is done already.
        """
        return self._watcher.on_done(future, step)

    # -- the connection's side

    def room(self) -> None:
        """Tell the handler that it may write again. Called by the connection."""
        if self._on_room is not None and not self.ended:
            self._on_room()

    def take_turn(self) -> None:
        """Let the handler write in its turn. Called by the connection."""
        if self._on_turn is not None and not self.ended:
            self._call(self._on_turn)

    def lose(self) -> None:
        """Tell the handler that the client has disconnected. Called by the connection."""
        if self.gone or self.ended:
            return
        self.gone = True
        on_gone = self._on_gone
        # the handler refers to this body
        self.listen()
        if on_gone is not None:
            on_gone()
