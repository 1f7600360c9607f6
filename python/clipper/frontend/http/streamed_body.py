"""The body of a response that is written bit by bit: what a handler that answered `Streamed` is
handed."""

import logging
from collections.abc import Callable
from typing import Any, Final, Protocol

from clipper.serving.query.future_watcher import Future, FutureWatcher

UNREAD_BYTES_MAX: Final = (
    4 << 20
)  # written and not taken by the client: who writes on without room loses the client
_log = logging.getLogger(__name__)


class BodyWriter(Protocol):
    """The connection below a body. write: -> how many bytes the client has not taken yet.  finish:
    after the last of them."""

    full: bool

    def write_body(self, data: bytes) -> int: ...
    def finish_body(self) -> None: ...
    def abort(self) -> None: ...


class StreamedBody:
    """Threads: the loop's; `post` is for any.

    `write` gives False when the client does not keep up: then write no more until `on_room` is
    called. `on_gone` is called once, when the client has hung up (or was cut off) before `end`:
    cancel what is still being done for it. chunked: how HTTP/1.1 tells where a body ends; HTTP/1.0
    closes.
    """

    __slots__ = ("_begun", "_chunked", "_outlet", "_watcher", "ended", "gone", "on_gone", "on_room")

    def __init__(self, outlet: BodyWriter, watcher: FutureWatcher, chunked: bool) -> None:
        self._outlet, self._watcher, self._chunked = outlet, watcher, chunked
        self._begun = False
        self.ended = self.gone = False
        self.on_room: Callable[[], None] | None = None
        self.on_gone: Callable[[], None] | None = None

    def begin(self, begin: "Callable[[StreamedBody], None]") -> None:
        """What it raises ends the connection: the head has left, and no other response can
        follow."""
        try:
            begin(self)
        except Exception as error:
            _log.exception("a streamed response failed", exc_info=error)
            self._outlet.abort()
        self._begun = True

    def write(self, data: bytes) -> bool:
        """Whether there is room for more. Nothing is written once the client is gone."""
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
        """That was all. Idempotent."""
        if self.gone or self.ended:
            return
        self.ended = True
        if self._chunked:
            self._outlet.write_body(b"0\r\n\r\n")
        if self._begun:
            self._outlet.finish_body()

    def drop(self) -> None:
        """Cut the client off."""
        if not self.gone and not self.ended:
            self._outlet.abort()

    def post(self, step: Callable[..., Any], *args: Any) -> None:
        """Have `step(*args)` called on the loop; from any thread. Nothing, once the loop is
        closed."""
        self._watcher.post(step, *args)

    def hear(self, future: Future, step: Callable[[Future], None]) -> bool:
        """Have `step(future)` called on the loop once it is done. False, and never called, when it
        is done already."""
        return self._watcher.on_done(future, step)

    # -- the connection's side

    def room(self) -> None:
        if self.on_room is not None and not self.ended:
            self.on_room()

    def lose(self) -> None:
        """The client is gone."""
        if self.gone or self.ended:
            return
        self.gone = True
        if self.on_gone is not None:
            self.on_gone()
