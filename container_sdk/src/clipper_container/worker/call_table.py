"""The calls of one connection that a model has made, until they are answered."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

from clipper_container.calls import KINDS, CalledAnswer, CallFailed, CallLimit, PendingCall
from clipper_container.model import UserValue
from clipper_container.wire.call_values import pack_call, unpack_call
from clipper_container.wire.frames import (
    Bytes,
    BytesLike,
    Header,
    Kind,
    check_payload,
    control_frame,
)
from clipper_container.wire.transport import Disconnected


class CallTable:
    """The open calls of a connection, by their ids. Threads: any.

    calls_max: that may be open at a time. payload_bytes_max: of a frame. post: has the thread that
    waits for a call run a function; None: that thread reads the answers itself.
    """

    def __init__(
        self,
        send: Callable[[list[BytesLike]], None],
        calls_max: int,
        payload_bytes_max: int,
        checked: bool,
        post: Callable[..., None] | None = None,
    ) -> None:
        self._send = send
        self._calls_max = calls_max
        self._payload_bytes_max = payload_bytes_max
        self._checked = checked
        self._post = post
        self._guard = threading.Lock()
        self._ids = itertools.count(1)
        self._open: dict[int, PendingCall] = {}
        # of these, for which nobody waits
        self._forgotten: set[int] = set()

    def begin(self, fields: dict[str, object], call: PendingCall) -> int:
        """Send a call; return its id. Raises: CallFailed, TypeError."""
        payload = pack_call(fields)
        if len(payload) > self._payload_bytes_max:
            raise CallLimit(
                f"a call of {len(payload)} bytes; the limit is {self._payload_bytes_max}"
                " (limits.frame_bytes_max)",
                "call-limit",
            )
        with self._guard:
            if len(self._open) >= self._calls_max:
                raise CallLimit(
                    f"{self._calls_max} calls of this container are open (limits.calls_max)",
                    "call-limit",
                )
            id = next(self._ids)
            self._open[id] = call
        try:
            self._send(list(control_frame(Kind.CALL, payload, id, self._checked)))
        except Disconnected as error:
            self._end(id, CallFailed(f"the connection to the server is lost: {error}"))
        return id

    @property
    def is_crowded(self) -> bool:
        """Return whether no call may be made because of some for which nobody waits."""
        return len(self._open) >= self._calls_max and bool(self._forgotten)

    def answer(self, header: Header, payload: Bytes) -> None:
        """Take in an ANSWER. Raises: BadFrame."""
        check_payload(header, payload)
        self._end(header.id, _outcome(unpack_call(payload.tobytes())))

    def forget(self, id: int) -> None:
        """Tell the server that nobody waits for a call, if it is open."""
        with self._guard:
            is_open = id in self._open
            if is_open:
                self._forgotten.add(id)
        if is_open:
            self._send(list(control_frame(Kind.CANCEL, b"", id, self._checked)))

    def close(self, why: str) -> None:
        """End all calls that are open: the connection is lost."""
        for id in list(self._open):
            self._end(id, CallFailed(why))

    def _end(self, id: int, outcome: UserValue) -> None:
        with self._guard:
            call = self._open.pop(id, None)
            self._forgotten.discard(id)
        if call is None:
            return
        if self._post is None:
            call.end(outcome)
        else:
            self._post(call.end, outcome)


def _outcome(fields: dict[str, UserValue]) -> UserValue:
    """Return what an ANSWER says: outputs, or an error."""
    if "error" in fields:
        code = str(fields.get("code", "call-failed"))
        return KINDS.get(code, CallFailed)(str(fields["error"]), code)
    outputs = fields.get("outputs")
    if not fields.get("app"):
        return outputs
    if fields.get("many"):
        return [CalledAnswer(**each) for each in outputs or ()]
    return CalledAnswer(**(outputs or {}))


class BatchCaller:
    """Sends the calls that belong to one batch. Threads: that of the batch.

    until_s: its deadline by time.monotonic. read: waits for frames; None for a batch of an async
    model.
    """

    def __init__(self, table: CallTable, header: Header, read: Callable[[], None] | None) -> None:
        self._table = table
        self._read = read
        self._until_s = time.monotonic() + header.time_us / 1e6
        self._made: list[int] = []

    def call(
        self, target: str, rows: UserValue, many: bool, options: dict[str, object]
    ) -> PendingCall:
        """Send a call. Raises: CallFailed, TypeError."""
        left_us = max(1, round((self._until_s - time.monotonic()) * 1e6))
        if "slo_ms" in options:
            left_us = min(left_us, max(1, round(float(str(options.pop("slo_ms"))) * 1000)))
        while self._read is not None and self._table.is_crowded:
            # until the server has answered what earlier batches left
            self._read()
        call = PendingCall(self._read)
        fields = {"to": target, "rows": rows, "many": many, "left_us": left_us, **options}
        self._made.append(self._table.begin(fields, call))
        return call

    def close(self) -> None:
        """Tell the server that nobody waits for the calls of this batch that are open."""
        for id in self._made:
            self._table.forget(id)
