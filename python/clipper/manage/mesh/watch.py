"""Changes of the mesh as server-sent events, one per change, without end.

The registry's changes come from a blocking iterator, so each watcher has a thread. Its writes
wait for room, so that an initial list of 20 000 models neither fills the memory nor loses the
client.
"""

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from clipper.component import Stop, Worker
from clipper.errors import ClipperError
from clipper.frontend.http.messages import HttpError, StreamedResponse, to_json
from clipper.frontend.http.server_sent_events import CONTENT_TYPE, HEADERS, HEARTBEAT, encode_event
from clipper.frontend.http.streamed_body import StreamedBody
from clipper.mesh.node.node import MeshNode
from clipper.mesh.reports import MeshEvent

WATCHERS_MAX: Final = 32
CHUNK_BYTES: Final = 64 << 10
STALLED_S: Final = (
    30.0  # a watcher that takes nothing for so long is cut off; it comes again and begins anew
)
HEARTBEAT_S: Final = 10.0
_CHECK_S: Final = 0.1
_log = logging.getLogger(__name__)


class Watchers:
    """Threads: any."""

    def __init__(self, mesh: MeshNode) -> None:
        self._mesh = mesh
        self._open: set[Watcher] = set()
        self._lock = threading.Lock()

    def response(self, prefix: str) -> StreamedResponse:
        """Return the response to a watcher. Raises HttpError when there are as many as there may
        be."""
        if len(self._open) >= WATCHERS_MAX:
            hint = "Let one watcher forward the changes to the others."
            raise HttpError(
                503, f"{WATCHERS_MAX} watch the mesh already.", hint, ((b"retry-after", b"5"),)
            )
        return StreamedResponse(
            lambda body: self._start(body, prefix), CONTENT_TYPE, HEADERS, endless=True
        )

    def _start(self, body: StreamedBody, prefix: str) -> None:
        watcher = Watcher(
            body, lambda stop: self._mesh.watch(prefix, stop=stop), self._open.discard
        )
        with self._lock:
            self._open.add(watcher)
        watcher.start()


class Watcher:
    """Watcher of one response. Threads: `start` and the body's callbacks run on the event loop, the
    rest on its own thread.
    """

    def __init__(
        self,
        body: StreamedBody,
        watch: Callable[[Callable[[], bool]], Iterator[MeshEvent]],
        leave: Callable[["Watcher"], None],
    ) -> None:
        self._body, self._watch, self._leave = body, watch, leave
        self._room = threading.Event()
        self._room.set()
        self._is_quiet = True
        self._worker = Worker("clipper-mesh-watch", self._run, once=True)

    def start(self) -> None:
        """Start the watcher's thread. Raises NotStarted; then the watcher has left."""
        self._body.listen(room=self._room.set, gone=self._room.set)
        try:
            self._worker.start()
        except BaseException:
            self._leave(self)
            raise
        asyncio.get_running_loop().call_later(HEARTBEAT_S, self._beat)

    def _beat(self) -> None:
        if self._is_over():
            return
        if self._is_quiet and self._room.is_set():
            self._write(HEARTBEAT)
        self._is_quiet = True
        asyncio.get_running_loop().call_later(HEARTBEAT_S, self._beat)

    def _is_over(self) -> bool:
        return self._body.gone or self._body.ended

    def _run(self, stop: Stop) -> None:
        held, is_synced = bytearray(), False
        try:
            for event in self._watch(self._is_over):
                held += encode_event(
                    to_json(event), name=event.kind.lower().encode(), id=event.revision
                )
                is_synced = is_synced or event.kind == "SYNC"
                if is_synced or len(held) >= CHUNK_BYTES:
                    self._send(bytes(held))
                    held.clear()
                if self._is_over():
                    break
        except ClipperError as error:
            _log.info("a watcher of the mesh was sent away: %s", error)
        except Exception:
            _log.exception("a watcher of the mesh was sent away")
        finally:
            self._body.post(self._body.end)
            self._leave(self)

    def _send(self, data: bytes) -> None:
        """Send data once there is room. A client that leaves no room for too long is
        disconnected."""
        give_up_s = time.monotonic() + STALLED_S
        while not self._room.wait(_CHECK_S):
            if self._is_over():
                return
            if time.monotonic() > give_up_s:
                self._body.post(self._body.drop)
                give_up_s = math.inf
        self._room.clear()
        self._body.post(self._write, data)

    def _write(self, data: bytes) -> None:
        self._is_quiet = False
        if self._body.write(data) or self._is_over():
            self._room.set()
