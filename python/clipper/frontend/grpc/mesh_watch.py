"""The service `clipper.v1.Mesh`: changes of the mesh as a stream, like `GET /v1/mesh/watch`.

Changes come from a blocking iterator, so each call has a thread. The thread sends events in chunks
and waits while two chunks are unsent: the initial list of 20 000 models does not fill the memory
for a slow reader. A client that reads nothing is disconnected.
"""

import asyncio
import contextlib
import functools
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Final

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from clipper.component import Stop, Worker
from clipper.errors import ClipperError, Overloaded, ShuttingDown
from clipper.frontend.grpc.call_context import CallContext
from clipper.frontend.grpc.calls import GrpcCall, GrpcDispatcher, ending_of
from clipper.frontend.protocols import message
from clipper.mesh.node.node import MeshNode
from clipper.mesh.records import MeshModel
from clipper.mesh.reports import MeshEvent

SERVICE: Final = "clipper.v1.Mesh"
WATCHERS_MAX: Final = 32
PIECE_BYTES: Final = 64 << 10
PIECES_MAX: Final = 2
STALLED_S: Final = (
    30.0  # a client that reads nothing for so long is disconnected, and must start again
)
_CHECK_S: Final = 0.1
_log = logging.getLogger(__name__)
_EVENT, _REPLY = message("clipper.v1.MeshEvent"), message("clipper.v1.WatchReply")
_KINDS: Final = {
    value.name: value.number for value in _EVENT.DESCRIPTOR.enum_types_by_name["Kind"].values
}
_Watch = Callable[[Callable[[], bool]], Iterator[MeshEvent]]


class MeshWatchService:
    """The method of the service. Call `close` when no call is open any more.

    check: raises for a call that may not manage. Threads: the event loop's, and one for each call.
    """

    def __init__(
        self, calls: GrpcDispatcher, mesh: MeshNode, check: Callable[[GrpcCall], object]
    ) -> None:
        self._calls, self._mesh, self._check = calls, mesh, check
        self._open: set[MeshWatchCall] = set()
        self.handlers = calls.handlers(SERVICE, {"Watch": self.watch})

    async def watch(self, request: Message, call: GrpcCall) -> AsyncIterator[Message]:
        """Yield the changes of the mesh."""
        self._check(call)
        if len(self._open) >= WATCHERS_MAX:
            raise Overloaded(
                f"{WATCHERS_MAX} watch the mesh already.",
                retry_after_s=5,
                hint="Let one watcher forward the changes to the others.",
            )
        prefix, cut_off = (
            request.prefix,
            functools.partial(self._cut_off, call.context, asyncio.current_task()),
        )
        watcher = MeshWatchCall(
            lambda stop: self._mesh.watch(prefix, stop=stop), cut_off, self._open.discard
        )
        self._open.add(watcher)
        closing = asyncio.ensure_future(self._calls.closing.wait())
        closing.add_done_callback(watcher.leave)
        watcher.start()
        try:
            while (piece := await watcher.next()) is not None:
                yield piece
            raise ShuttingDown("the server is closing.")
        finally:
            watcher.leave()
            closing.cancel()

    def _cut_off(self, context: CallContext, task: "asyncio.Task[object] | None") -> None:
        """End a call that is blocked in a write: its task is cancelled, and the reason is sent when
        there is room."""
        error = Overloaded(
            f"nothing was read for {STALLED_S:g} s.", hint="Read as events come; call again."
        )
        context.abandon(*ending_of(error))
        if task is not None:
            task.cancel()

    def close(self) -> None:
        """Wait for the threads. No call is open."""
        for watcher in tuple(self._open):
            watcher.end()


class MeshWatchCall:
    """One call and its thread. Threads: `start`, `next` and `leave` from the event loop."""

    def __init__(
        self, watch: _Watch, cut_off: Callable[[], None], gone: Callable[["MeshWatchCall"], None]
    ) -> None:
        self._watch, self._cut_off, self._gone = watch, cut_off, gone
        self._pieces: asyncio.Queue[Message | ClipperError | None] = asyncio.Queue()
        self._room = threading.Semaphore(PIECES_MAX)
        self._left = False
        self._taken = False  # the reply taken last may still be unsent
        self._loop = asyncio.get_running_loop()
        self._worker = Worker("clipper-grpc-watch", self._run, once=True)

    def start(self) -> None:
        """Start the thread. Raises NotStarted; then the call has left."""
        try:
            self._worker.start()
        except BaseException:
            self._gone(self)
            raise

    def end(self) -> None:
        """Wait for the thread, which ends with its call."""
        self._worker.end()

    async def next(self) -> Message | None:
        """Return the next reply, or None at the end. The reply before has been sent. Raises
        ClipperError."""
        if self._taken:
            self._room.release()
        piece = await self._pieces.get()
        if isinstance(piece, ClipperError):
            raise piece
        self._taken = piece is not None
        return piece

    def leave(self, *_: object) -> None:
        """End the call."""
        if not self._left:
            self._left = True
            self._pieces.put_nowait(None)

    def _run(self, stop: Stop) -> None:
        end: ClipperError | None = None
        try:
            self._send_all()
        except ClipperError as error:
            end = error
        except Exception:
            _log.exception("a watcher of the mesh was sent away")
            end = ClipperError("an internal error; the server's log has it.")
        finally:
            self._post(self._pieces.put_nowait, end)
            self._gone(self)

    def _send_all(self) -> None:
        piece, size, is_synced = _REPLY(), 0, False
        for event in self._watch(lambda: self._left):
            one = event_message(event)
            piece.events.append(one)
            size += one.ByteSize()
            is_synced = is_synced or event.kind == "SYNC"
            if is_synced or size >= PIECE_BYTES:
                if not self._has_room():
                    return
                self._post(self._pieces.put_nowait, piece)
                piece, size = _REPLY(), 0

    def _has_room(self) -> bool:
        """Wait until a chunk may be sent. Returns False if the call has ended or was
        disconnected."""
        give_up_s = time.monotonic() + STALLED_S
        while not self._left:
            if self._room.acquire(timeout=_CHECK_S):
                return True
            if time.monotonic() > give_up_s:
                _log.info("a watcher of the mesh was cut off: it took nothing for %g s", STALLED_S)
                self._post(self._cut_off)
                return False
        return False

    def _post(self, act: Callable[..., object], *words: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(act, *words)


def event_message(event: MeshEvent) -> Message:
    """Return a clipper.v1.MeshEvent."""
    made = _EVENT(kind=_KINDS[event.kind], of=event.of, id=event.id, revision=event.revision)
    record = event.record
    if record is not None:
        into = getattr(made, event.of)
        into.SetInParent()
        _fill(into, record)
        if isinstance(record, MeshModel):
            _fill(into.policy, record.policy)
            for name, copy in record.copies.items():
                _fill(into.copies[name], copy)
            for name, failure in record.failures.items():
                _fill(into.failures[name], failure)
    return made


def _fill(into: Message, record: object) -> None:
    """Copy the fields of a record to the fields of a message with the same names, without nested
    messages."""
    for name in _plain(into.DESCRIPTOR):
        value = getattr(record, name)
        if isinstance(value, tuple):
            getattr(into, name).extend(value)
        else:
            setattr(into, name, value)


@functools.cache
def _plain(of: Descriptor) -> tuple[str, ...]:
    return tuple(field.name for field in of.fields if field.message_type is None)
