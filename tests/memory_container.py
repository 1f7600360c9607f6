"""A container that lives in the test's own process, and `wait_until`."""

import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import numpy as np

from clipper_container.wire import frames as wire
from clipper_container.wire.transport import connect
from clipper_container.worker.outputs import to_rows
from tests.threads import join

PATIENCE_S = 20.0
_HOLDS_WITHIN_S = 60.0
_BEAT_S = 0.02


def wait_until(
    condition: Callable[[], object], what: str = "", patience_s: float = _HOLDS_WITHIN_S
) -> Any:
    """Wait until `condition()` is true and return what it gave. AssertionError after `patience_s`:
    no test waits for ever."""
    give_up = time.monotonic() + patience_s
    while not (found := condition()):
        if time.monotonic() > give_up:
            raise AssertionError(f"not within {patience_s:g} s: {what or condition}")
        threading.Event().wait(0.002)
    return found


class MemoryContainer:
    """A container without a process: one connection that the test drives frame by frame, or lets
    run in a thread.

    Threads: one at a time. address, token: of the server. fields: of its HELLO, over the usual ones
    (docs/wire.md); None leaves one out.
    """

    def __init__(self, address: str, token: str, name: str, **fields: object) -> None:
        hello = {
            "name": name,
            "version": 1,
            "replica": 0,
            "input": "any",
            "output": "any",
            "batch_max": 0,
            "protocol": 2,
            "token": token,
            "pid": 0,
            "sdk": "memory",
            **fields,
        }
        self.hello = {key: value for key, value in hello.items() if value is not None}
        self.socket = connect(address, PATIENCE_S)
        self._thread: threading.Thread | None = None

    # -- frame by frame

    def send_hello(self) -> tuple[wire.Kind, str]:
        """Send HELLO; return WELCOME, or REFUSE and the server's reason."""
        self.send(*wire.control_frame(wire.Kind.HELLO, wire.pack_map(self.hello)))
        header, payload = self.read()
        kind = wire.Kind(header.kind)
        return kind, payload.decode() if kind is wire.Kind.REFUSE else ""

    def read(self) -> tuple[wire.Header, bytes]:
        """Return the next frame that is no heartbeat. Raises: ConnectionError if the server closed
        the connection."""
        while True:
            header, payload = self._frame()
            if header.kind != wire.Kind.HEARTBEAT:
                return header, payload

    def _frame(self) -> tuple[wire.Header, bytes]:
        header = wire.decode_header(self._exactly(wire.HEADER_BYTES))
        return header, self._exactly(header.payload_bytes)

    def read_batch(self) -> tuple[int, Any]:
        """Return the id of the next PREDICT, and its rows as a model would get them."""
        return self._batch(*self.read())

    def _batch(self, header: wire.Header, payload: bytes) -> tuple[int, Any]:
        if header.kind != wire.Kind.PREDICT:
            raise ConnectionError(f"{wire.Kind(header.kind).name} instead of PREDICT")
        return header.id, wire.row_values(
            wire.open_rows(header, np.frombuffer(payload, np.uint8).copy())
        )

    def reply(self, batch: int, outputs: Any) -> None:
        """Answer batch `batch` with one output a row, whatever number of them there is."""
        header, pieces = wire.encode_rows(
            wire.Kind.REPLY, to_rows(outputs, len(outputs), "memory"), batch
        )
        self.send(wire.encode_header(header), *pieces)

    def fail(self, batch: int, text: str) -> None:
        """Answer batch `batch` with a failure."""
        self.send(*wire.control_frame(wire.Kind.FAILURE, text.encode(), batch))

    def beat(self) -> None:
        self.send(*wire.control_frame(wire.Kind.HEARTBEAT))

    def send(self, *pieces: bytes | memoryview) -> None:
        self.socket.sendall(b"".join(pieces))

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = self.socket.recv(size - len(data))
            if not piece:
                raise ConnectionError("the server closed the connection")
            data += piece
        return bytes(data)

    # -- by itself

    def serve(self, predict: Callable[[Any], object]) -> Self:
        """Send HELLO, then answer every batch with `predict(rows)` in a thread of its own, until
        close()."""
        kind, why = self.send_hello()
        if kind is not wire.Kind.WELCOME:
            raise ConnectionError(why)
        self._thread = threading.Thread(
            target=self._run, args=(predict,), name="memory-container", daemon=True
        )
        self._thread.start()
        return self

    def _run(self, predict: Callable[[Any], object]) -> None:
        try:
            while True:
                if not self._handle():
                    self.beat()
                    continue
                header, payload = self._frame()
                if header.kind != wire.Kind.HEARTBEAT:
                    batch, rows = self._batch(header, payload)
                    self.reply(batch, predict(rows))
        except OSError:
            return

    def _handle(self) -> bool:
        """Return whether there is more to read, or the end; False when there is nothing in time for
        a beat."""
        self.socket.settimeout(_BEAT_S)
        try:
            self.socket.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return False
        self.socket.settimeout(PATIENCE_S)
        return True

    def close(self) -> None:
        """Drop the connection, as a crash would."""
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            self.socket.close()
        if self._thread is not None:
            join(self._thread)
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
