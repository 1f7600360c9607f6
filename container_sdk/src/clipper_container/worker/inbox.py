"""The frames that a connection receives, of which some are looked at while the model runs."""

from __future__ import annotations

from collections import deque

from clipper_container.wire.frames import (
    HEADER_BYTES,
    BadFrame,
    Bytes,
    Header,
    Kind,
    decode_header,
)
from clipper_container.wire.transport import Disconnected, FrameConnection
from clipper_container.worker.call_table import BatchCaller, CallTable

KEPT_MAX = 65_536  # frames that came while the model ran


class FrameInbox:
    """The frames of a connection, the oldest first. Threads: one, which also runs the model.

    While the model runs, `look` reads what has arrived, without waiting: CANCEL frames are noted,
    all others are kept for `next`. payload_bytes_max: of a frame.
    calls: those of the model, whose answers are taken in at once.
    """

    def __init__(
        self,
        connection: FrameConnection,
        payload_bytes_max: int,
        calls: CallTable | None = None,
    ) -> None:
        self._connection, self._payload_bytes_max = connection, payload_bytes_max
        self._calls = calls
        self._kept: deque[tuple[Header, Bytes]] = deque()
        self._lost: Disconnected | BadFrame | None = None

    def is_readable(self) -> bool:
        """Return True if a frame or a part of one waits, or a stop is requested."""
        return bool(self._kept) or self._lost is not None or self._connection.is_readable()

    def next(self, until_stop: bool = True) -> tuple[Header, Bytes]:
        """Wait for a frame; its payload is valid until the next one is read. Raises: Stopping, if
        `until_stop`, Disconnected, BadFrame."""
        if self._kept:
            return self._kept.popleft()
        if self._lost is not None:
            raise self._lost
        self._connection.next_message(until_stop=until_stop)
        return self._rest()

    def look(self) -> None:
        """Read the frames that have arrived. What is wrong with the connection is raised by
        `next`."""
        while self._lost is None and self._connection.has_bytes():
            self.wait()

    def wait(self) -> None:
        """Read one more frame, as `look` does, and wait for it. If the connection is lost, all
        calls end."""
        try:
            if self._lost is not None:
                raise self._lost
            self._connection.next_message(until_stop=False)
            header, payload = self._rest()
            if header.kind == Kind.ANSWER and self._calls is not None:
                self._calls.answer(header, payload)
                return
            if len(self._kept) == KEPT_MAX:
                raise BadFrame(f"more than {KEPT_MAX} frames during one batch")
            self._kept.append((header, payload.copy()))
        except (Disconnected, BadFrame) as error:
            self._lost = error
            if self._calls is not None:
                self._calls.close(str(error))

    def cancels(self, id: int) -> bool:
        """Return whether a CANCEL of this batch was read."""
        return any(header.kind == Kind.CANCEL and header.id == id for header, _ in self._kept)

    def _rest(self) -> tuple[Header, Bytes]:
        header = decode_header(self._connection.take(HEADER_BYTES), self._payload_bytes_max)
        return header, self._connection.take(header.payload_bytes)


class LookedAt:
    """A batch that is being evaluated by the thread that reads its connection. Threads: one."""

    def __init__(self, id: int, inbox: FrameInbox, caller: BatchCaller | None = None) -> None:
        self._id, self._inbox = id, inbox
        self.caller = caller

    def is_cancelled(self) -> bool:
        """Return whether the server has cancelled the batch."""
        self._inbox.look()
        return self._inbox.cancels(self._id)
